"""Every function lowers for CUDA under jax_enable_x64, to the kernels that it has without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.calls import WITHOUT_GRADIENT, float_sum
from tests.support.covering import first, pairs
from tests.support.lowering import array, kernel_names, lowered


def per_row(x, value):
    """Returns a number for each row, of 64 bits under x64."""
    return jnp.asarray(np.full(x.shape[:-1], value))


KEY = jax.random.key(0)
ROWS = {
    "softmax": lambda x, **where: ps.softmax(x, **where),
    "columns": lambda x, **where: ps.softmax(x, 0, **where),
    "log_softmax": lambda x, **where: ps.log_softmax(x, **where),
    "logsumexp": lambda x, **where: ps.logsumexp(x, -1, **where),
    "fused_topk": lambda x, **where: ps.fused_topk(x, 5, temperature=per_row(x, 2.0), **where),
    "long lists": lambda x, **where: ps.fused_topk(x, 200, log=True, **where),
    "top_k": lambda x, **where: ps.top_k(x, 5, lengths=per_row(x, 60), **where),
    "token_stats": lambda x, **where: ps.token_stats(x, per_row(x, 1), **where),
    "hot stats": lambda x, **where: ps.token_stats(x, temperature=per_row(x, 2.0), **where),
    "draw": lambda x, **where: ps.sample(KEY, x, **where),
    "filters": lambda x, **where: ps.sample(
        KEY, x, top_k=50, top_p=per_row(x, 0.9), min_p=0.1, temperature=per_row(x, 2.0), **where
    ),
    "kept logits": lambda x, **where: jnp.maximum(ps.filter_logits(x, top_p=per_row(x, 0.9), **where), -99),
}
ROUTERS = {
    "route": lambda x: ps.route(x, 4),
    "groups": lambda x: ps.route(
        x, 4, score="sigmoid", bias=jnp.zeros(x.shape[-1]), groups=4, top_groups=2, renormalize=True
    ),
}
N, D, V = 2048, 512, 32000
PROJECTIONS = {
    "linear_logsumexp": lambda x, w, labels: ps.linear_logsumexp(x, w, softcap=30),
    "linear_cross_entropy": lambda x, w, labels: ps.linear_cross_entropy(
        x, w, labels, where=labels > 0, label_smoothing=0.1, z_loss=1e-4, token_weights=jnp.ones(N)
    ),
    "linear_log_probs": lambda x, w, labels: ps.linear_log_probs(x, w, labels, temperature=jnp.full(N, 2.0)),
    "several labels": lambda x, w, labels: ps.linear_log_probs(x, w, jnp.stack([labels] * 3, -1)),
    "soft labels": lambda x, w, labels: ps.linear_cross_entropy(
        x, w, jnp.stack([labels] * 2, -1), label_probs=jnp.ones((N, 2))
    ),
    "linear_token_stats": lambda x, w, labels: ps.linear_token_stats(x, w, labels),
    "linear_sample": lambda x, w, labels: ps.linear_sample(jax.random.key(0), x, w, temperature=0.7, top_p=0.9),
    "linear_topk": lambda x, w, labels: ps.linear_topk(x, w, 7),
}
FAST = ("softmax", "fused_topk")
CASES = [(name, "float32", (128, 16384), "call") for name in (*FAST, *(name for name in ROWS if name not in FAST))]
CASES += [("token_stats", "float32", (8, 16384), "call"), ("columns", "float32", (4096, 256), "gradient")]
DTYPES = ("float32", "bfloat16", "float16", "int32")
SHAPES = [(5, 64), (4096, 256), (8, 131072), (1, 2**20), (8, 50257)]
COMBINATIONS = pairs(ROWS, DTYPES, SHAPES, ("call", "where", "gradient"))
COMBINATIONS += pairs(ROUTERS, DTYPES, [(4096, 128), (5, 64), (16384, 256)], ("call", "gradient"))
CASES += [
    (name, dtype, shape, way)
    for name, dtype, shape, way in COMBINATIONS
    if not (name == "long lists" and shape[1] < 200) and not (way == "gradient" and dtype == "int32")
    if not (name == "columns" and shape[0] == 1)
]


def assert_the_same_kernels(f, *arrays):
    expected = kernel_names(lowered(f, *arrays))
    with jax.enable_x64(True):
        assert kernel_names(lowered(f, *arrays)) == expected


@pytest.mark.parametrize(("name", "dtype", "shape", "way"), first(len(FAST), CASES))
def test_rows(name, dtype, shape, way):
    call = (ROWS | ROUTERS)[name]
    f = {"call": call, "where": lambda x: call(x, where=x > 0), "gradient": jax.grad(lambda x: float_sum(call(x)))}[way]
    assert_the_same_kernels(f, array(*shape, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), first(0, [(name, d) for d in ("bfloat16", "float32", "float16") for name in PROJECTIONS])
)
def test_projections(name, dtype):
    f = PROJECTIONS[name]
    arrays = array(N, D, dtype=dtype), array(D, V, dtype=dtype), array(N, dtype="int32")
    assert_the_same_kernels(f, *arrays)
    if name not in WITHOUT_GRADIENT:
        assert_the_same_kernels(jax.grad(lambda *arrays: float_sum(f(*arrays)), (0, 1)), *arrays)
