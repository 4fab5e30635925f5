"""The kernels of a projection: their plan, what is lowered, and their numbers in Pallas's interpreter."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from pallas_softmax._src.linear import mosaic_gpu, pieces, plan, product
from pallas_softmax._src.linear.losses import Head, Tokens, coefficients
from tests.support import linear
from tests.support.covering import first
from tests.support.kernels import INTERPRET
from tests.support.lowering import array, kernel_names, lowered

SMEM = 227 * 1024


@pytest.mark.parametrize("rows", [1, 128, 129, 2048, 131072])
def test_tiling(rows):
    tiling = plan.plan_projection(rows)
    stage = (plan.TILE_M + plan.TILE_N) * plan.TILE_K * 2
    staging = plan.MULTIPLIERS * 2 * plan.WARPGROUP_ROWS * plan.SWIZZLE_BYTES
    assert tiling.stages * stage + staging + 2048 <= SMEM
    assert plan.CTAS % tiling.cluster == 0
    assert tiling.cluster == 1 or rows > plan.TILE_M  # no CTA of a cluster without rows


# --- Lowered ------------------------------------------------------------------------------------------

SIZES = [  # n, D, V, transpose_w, dtype, keywords of the loss
    (127, 100, 257, False, "float16", {"label_smoothing": 0.1}),
    (129, 768, 50257, True, "bfloat16", {"softcap": 30.0}),
    (8192, 4096, 128256, False, "bfloat16", {}),
    (8193, 4096, 128256, False, "bfloat16", {}),
    (1, 64, 32000, True, "float16", {"z_loss": 1e-3}),
]


@pytest.mark.parametrize(("n", "depth", "vocab", "transpose_w", "dtype", "keywords"), first(1, SIZES))
def test_lowered(n, depth, vocab, transpose_w, dtype, keywords):
    """A loss is one kernel; its gradient stores exponentials, and makes them again if need be; or is two products."""
    w = array(*((vocab, depth) if transpose_w else (depth, vocab)), dtype=dtype)
    args = array(n, depth, dtype=dtype), w, array(n, dtype="int32")

    def loss(x, w, labels, reduction: Any = "mean"):
        return jnp.sum(
            ps.linear_cross_entropy(
                x,
                w,
                labels,
                transpose_w=transpose_w,
                reduction=reduction,
                implementation="mosaic_gpu",
                **keywords,
            )
        )

    assert kernel_names(lowered(loss, *args)) == ["linear_statistics"]
    of_chunk = ["linear_exponentials"] * 2
    if dtype == "float16" or "label_smoothing" in keywords:
        of_chunk = ["linear_statistics", "linear_logit_gradients"]
    chunks = 2 if n > 2 * depth else 1  # in the text: the first one, and those of the loop
    text = lowered(jax.grad(loss, (0, 1)), *args)
    assert kernel_names(text) == of_chunk * chunks
    of_w = "x".join(str(-(-size // 64) * 64) for size in w.shape)
    directly = dtype == "bfloat16" and chunks == 1  # dw is written by its product, and nothing is added to it
    assert bool(re.search(rf"dot_general.*-> tensor<{of_w}xf32>", text)) != directly
    per_token = functools.partial(loss, reduction=None)
    want = ["linear_statistics"] + ["linear_logit_gradients"] * chunks
    assert kernel_names(lowered(jax.grad(per_token, (0, 1)), *args)) == want


@pytest.mark.parametrize("axis_name", ["v", pytest.param(None, marks=pytest.mark.slow)])
def test_lowered_in_shard_map(axis_name):
    """The types of the numbers of rows vary over the mesh, that of the exponentials, by a kernel, does not."""
    x, w, labels = (
        array(256, 64, dtype="bfloat16"),
        array(64, 512, dtype="bfloat16"),
        array(256, dtype="int32"),
    )
    mean = functools.partial(ps.linear_cross_entropy, axis_name=axis_name, implementation="mosaic_gpu")
    specs = (P(), P(None, "v"), P()) if axis_name else (P("b"), P(), P("b"))
    gradients = jax.shard_map(
        lambda *args: jax.tree.map(lambda a: a[None, None], jax.grad(mean, (0, 1))(*args)),
        mesh=jax.make_mesh((1, 1), ("b", "v"), axis_types=(AxisType.Auto,) * 2),
        in_specs=specs,
        out_specs=P("b", "v"),
    )
    assert kernel_names(lowered(gradients, x, w, labels)) == ["linear_exponentials"] * 2


@pytest.mark.slow
def test_lowered_without_dw():
    """Where no gradient of w is asked for, logits do not take the memory of a float32 dw: there are chunks."""
    x, w, labels = (
        array(8192, 4096, dtype="bfloat16"),
        array(4096, 128256, dtype="bfloat16"),
        array(8192, dtype="int32"),
    )
    mean: Any = functools.partial(ps.linear_cross_entropy, implementation="mosaic_gpu")
    assert kernel_names(lowered(jax.grad(mean), x, w, labels)) == ["linear_exponentials"] * 4
    per_token = jax.grad(lambda *args: jnp.sum(mean(*args, reduction=None)))
    assert (
        kernel_names(lowered(per_token, x, w, labels))
        == ["linear_statistics"] + ["linear_logit_gradients"] * 2
    )


@pytest.mark.parametrize(
    ("dtype", "n", "vocab", "kind", "match"),
    [
        ("float32", 8, 512, "NVIDIA H100 80GB HBM3", "only bfloat16 and float16"),
        ("bfloat16", 0, 512, "NVIDIA H100 80GB HBM3", "empty"),
        ("bfloat16", 8, 255, "NVIDIA H100 80GB HBM3", "V=255 is less than the 256 columns"),
        ("bfloat16", 8, 512, "NVIDIA B200", "compute capability 9.0, not 10.0"),
    ],
)
def test_unsupported(dtype, n, vocab, kind, match, monkeypatch):
    capability = (10, 0) if "B200" in kind else (9, 0)
    monkeypatch.setattr("pallas_softmax._src.target.capability", lambda: capability)
    f = functools.partial(ps.linear_logsumexp, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(f, array(n, 64, dtype=dtype), array(64, vocab, dtype=dtype))


# --- In the interpreter -------------------------------------------------------------------------------

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the interpreter of jax 0.10 does not come to the end of these kernels",
)
NUMBERS = [  # n, D, V, transpose_w, dtype, bias, peak, workspace in bytes, keywords of the loss
    (5, 72, 257, True, "bfloat16", True, 1, 2**29, {}),
    (130, 64, 320, False, "bfloat16", False, 300, 2**29, {}),  # far beyond the reference: e is made again
    (
        9,
        64,
        128,
        True,
        "float16",
        True,
        4,
        2**29,
        {"softcap": 5.0, "label_smoothing": 0.1, "temperature": 0.7},
    ),
    (9, 64, 264, True, "bfloat16", True, 4, 2**29, {"softcap": 5.0, "z_loss": 1e-3, "temperature": 0.7}),
    (136, 64, 256, False, "bfloat16", False, 1, 48 * 512, {"z_loss": 0.5}),  # three chunks: n > 2 D
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "depth", "vocab", "transpose_w", "dtype", "bias", "peak", "workspace", "options"), NUMBERS
)
def test_interpreted(n, depth, vocab, transpose_w, dtype, bias, peak, workspace, options, monkeypatch):
    monkeypatch.setattr(product, "CTAS", 2)
    operations = mosaic_gpu.operations(INTERPRET)
    linear.assert_operations(
        operations,
        *(n, depth, vocab, dtype),
        options={"transpose_w": transpose_w, **options},
        bias=bias,
        peak=peak,
        workspace_bytes=workspace,
    )


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ("head", "numbers"), [(Head(), {}), (Head(softcap=3.0, transpose_w=True), {"z_loss": 0.1})]
)
def test_interpreted_gradient_at_the_label(head, numbers, monkeypatch):
    """It is subtracted in float32 and rounded once, though the kernel did not know the normalizer."""
    monkeypatch.setattr(product, "CTAS", 2)
    x, w, labels, _ = linear.arrays(8, 64, 320, "bfloat16", transpose_w=head.transpose_w)
    labels = labels.at[3].set(-1)  # no column: nothing is changed there
    weights = jnp.arange(1, 9) / 8.0
    tokens = linear.tokens_of(labels, **numbers)

    def to_coefficients(found):
        return found, coefficients(found, weights, tokens, 320)

    run = jax.jit(
        functools.partial(pieces.statistics_and_dlogits, head=head, interpret=INTERPRET), static_argnums=4
    )
    found, dz = run(x, w, None, tokens, to_coefficients)
    m, of_exp, of_label, _ = to_coefficients(found)[1]
    slope = 1 - (found.label_logit / head.softcap) ** 2 if head.softcap else 1
    want = (of_exp * jnp.exp(found.label_logit - m) - of_label) * slope
    rows = np.flatnonzero(labels >= 0)
    np.testing.assert_allclose(dz[jnp.arange(8), labels].astype(jnp.float32)[rows], want[rows], rtol=2**-8)
    if head.softcap is None:
        np.testing.assert_allclose(jnp.max(dz[3]).astype(jnp.float32), of_exp[3], rtol=2**-7)


@pytest.mark.slow
@interpreted
def test_interpreted_labels_of_other_shards(monkeypatch):
    """A label from V on is no column, also where a tile or a padded w has one there."""
    monkeypatch.setattr(product, "CTAS", 2)
    x, w, _, _ = linear.arrays(8, 64, 260, "bfloat16")
    labels = jnp.array([-3, 259, 260, 262, 319, 320, 511, 600], jnp.int32)
    projection = mosaic_gpu.operations(INTERPRET)["projection"]
    found = projection(x, w, None, Tokens(labels), head=Head(), workspace_bytes=2**29).label_logit
    z, _ = linear.logits(x, w)
    np.testing.assert_allclose(found, np.where(np.arange(8) == 1, z[:, 259], 0), atol=1e-5)
