"""The launch plans of a projection: tiles and clusters, and which calls have no kernel."""

import jax
import pytest

import pallas_softmax as ps
from pallas_softmax._src.linear import plan
from tests.support.calls import device, named
from tests.support.lowering import array

SMEM = 227 * 1024


@pytest.mark.parametrize("rows", [1, 128, 129, 2048, 131072])
def test_tiling(rows):
    tiling = plan.plan_projection(rows)
    stage = (plan.TILE_M + plan.TILE_N) * plan.TILE_K * 2
    staging = plan.MULTIPLIERS * 2 * plan.WARPGROUP_ROWS * plan.SWIZZLE_BYTES
    assert tiling.stages * stage + staging + 2048 <= SMEM
    assert plan.CTAS % tiling.cluster == 0
    assert tiling.cluster == 1 or rows > plan.TILE_M  # no CTA of a cluster without rows


@pytest.mark.parametrize(
    ("dtype", "n", "vocab", "kind", "match"),
    [
        ("float32", 8, 512, "NVIDIA H100 80GB HBM3", "only bfloat16 and float16"),
        ("bfloat16", 0, 512, "NVIDIA H100 80GB HBM3", "empty"),
        ("bfloat16", 8, 255, "NVIDIA H100 80GB HBM3", "V=255 is less than the 256 columns"),
        ("bfloat16", 8, 512, "NVIDIA B200", "compute capability 9.0, not 10.0"),
    ],
)
def test_unsupported(dtype, n, vocab, kind, match):
    f = named(ps.linear_logsumexp, "mosaic_gpu")
    with device(kind), pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(f, array(n, 64, dtype=dtype), array(64, vocab, dtype=dtype))
