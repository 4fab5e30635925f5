"""The Mosaic GPU kernels of routers: in Pallas's interpreter, lowered for CUDA, and on a GPU.

The interpreter replaces inline PTX by a twin in plain JAX, which test_ptx.py runs. Lowering does not see registers,
shared memory, alignment and deadlocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.route import kernels
from tests.support import cases, routing
from tests.support.calls import DTYPES
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, pairs
from tests.support.gpu import on_a_gpu
from tests.support.lowering import array, kernel_names, kernel_results, lowered
from tests.support.routing import GATES

SHAPES = [
    ("sigmoid, bias, groups", 64, 6, F32),
    ("softmax", 64, 6, BF16),
    ("sigmoid, renormalized", 100, 3, F32),
    ("softmax, bias", 384, 8, F32),
    ("softmax, groups", 8, 2, F16),
    ("sigmoid", 33, 33, F16),
    ("softmax, renormalized", 8, 1, F32),
    ("sigmoid, bias", 1000, 6, BF16),
    ("sigmoid, bias, groups", 256, 8, BF16),
    ("softmax, bias", 1, 1, F32),
    ("sqrtsoftplus, bias, groups", 64, 6, F32),
    ("sqrtsoftplus", 33, 5, BF16),
    ("sqrtsoftplus, renormalized", 100, 3, F32),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("name", "experts", "k", "dtype"), first(1, SHAPES), ids=str)
def test_interpreted(name, experts, k, dtype):
    rows = ["normal", "peaked", "integers", "constant", "neg_inf_last"]
    x, bias = cases.rows(rows, experts, dtype), 0.1 * np.random.default_rng(experts).standard_normal(experts)
    routing.check(kernels.results_and_gradient(k, GATES[name]), x, k, GATES[name], bias.astype(F32))


# --- Lowered for CUDA -------------------------------------------------------------------------------------

BEST = "sigmoid, bias, groups"  # the gate with all options
ROWS = 999  # the last tile is not full


def weights(k, gate):
    """Returns the function (logits, bias) -> weights, by the kernel."""
    return lambda x, b: ps.route(x, k, implementation="mosaic_gpu", **gate.keywords(b)).weights


def gradient(k, gate):
    return jax.grad(lambda x, b: jnp.sum(weights(k, gate)(x, b) ** 2))


def operands(experts, dtype="float32"):
    return array(ROWS, experts, dtype=dtype), array(experts)


SIZES = [(64, 6), (8, 1), (160, 6), (384, 8), (1024, 2)]
ODD = [(1, 1), (7, 7), (100, 17)]  # not powers of 2


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    first(
        1,
        [
            *pairs([BEST, *list(GATES)[:-1]], SIZES, DTYPES),
            *pairs(["softmax", "sigmoid", "sigmoid, bias"], ODD, DTYPES[:1]),
        ],
    ),
    ids=str,
)
def test_lowered(name, size, dtype):
    """One kernel each."""
    experts, k = size
    k = min(k, experts // GATES[name].groups)
    text = lowered(gradient(k, GATES[name]), *operands(experts, dtype))
    assert kernel_names(text) == ["route", "route_grad"]
    forward, backward = kernel_results(text)
    assert forward == [f"{ROWS}x{k}xf32", f"{ROWS}x{k}xi32", f"{ROWS}x1xf32"]
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    assert backward == [f"{ROWS}x{experts}x{short}"]


@pytest.mark.slow
def test_lowered_groups_without_a_kernel():
    """The forward is plain JAX. The gradient does not depend on groups, and has a kernel."""
    f = jax.grad(lambda x: jnp.sum(ps.route(x, 2, groups=3, top_groups=2).weights ** 2))
    assert kernel_names(lowered(f, array(ROWS, 60))) == ["route_grad"]
    assert kernel_names(lowered(f, array(ROWS, 1026))) == []


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)], ids=str)
def test_lowered_under_vmap(axes):
    """The slices are more rows of one kernel, with one bias or one for each slice."""
    shapes = [(4, *a.shape) if axis == 0 else a.shape for a, axis in zip(operands(64), axes)]
    arrays = [array(*shape) for shape in shapes]
    text = lowered(jax.vmap(gradient(6, GATES[BEST]), axes), *arrays)
    assert kernel_names(text) == ["route", "route_grad"]
    assert f"{4 * ROWS}x6xi32" in kernel_results(text)[0]


@pytest.mark.slow
def test_the_lowered_jvp_has_the_forward_kernel():
    x, bias = operands(64)
    f = lambda x, b, dx: jax.jvp(lambda x: weights(6, GATES[BEST])(x, b), (x,), (dx,))  # noqa: E731
    assert kernel_names(lowered(f, x, bias, x)) == ["route"]


# --- On a GPU, with the numbers of experts of models and the longest rows ---------------------------------

EXPERTS = [(8, 2), (64, 6), (256, 8), (384, 8), (1000, 6), (1024, 8)]  # (E, k)
CASES = [
    (name, experts, min(k, experts // gate.groups * (gate.top_groups or 1)), [F32, BF16, F16][(i + at) % 3])
    for at, (name, gate) in enumerate(GATES.items())
    for i, (experts, k) in enumerate(EXPERTS)
]
CASES += [
    ("softmax", 64, 64, BF16),
    ("sigmoid, bias, groups", 256, 64, F32),
    ("sigmoid, bias", 1024, 64, F16),
]


def logits_and_bias(experts, dtype):
    """Returns mild, tied and peaked rows, rows of large and of small scores, and rows with infinities and NaN."""
    rng = np.random.default_rng(experts)
    rows = [
        2 * rng.standard_normal((300, experts)),
        rng.integers(-2, 3, (40, experts)),
        np.zeros((3, experts)),
    ]
    rows += [shift + rng.standard_normal((9, experts)) for shift in (60, -60, 300, -300)]
    rows += [30 * rng.standard_normal((9, experts))]
    special = rng.standard_normal((12, experts))
    special[:8][rng.random((8, experts)) < 0.2] = -np.inf
    special[8, 3], special[9, 5], special[10, 1:4], special[11] = np.inf, np.nan, -np.nan, -np.inf
    bias = 0.2 * rng.standard_normal(experts)
    return np.concatenate([*rows, special]).astype(dtype), bias.astype(F32)


def implementation_of(gate, experts):
    """Returns the implementation to name: the kernel, if it has a tile for these groups."""
    return None if gate.groups > 1 and experts == 1000 else "mosaic_gpu"


@on_a_gpu
@pytest.mark.parametrize(("name", "experts", "k", "dtype"), CASES, ids=str)
def test_route_on_a_gpu(name, experts, k, dtype):
    """Experts, weights, logsumexp and the cotangents of the logits. Groups of 125 experts have no kernel."""
    gate = GATES[name]
    x, bias = logits_and_bias(experts, dtype)
    results = routing.results_and_gradient(k, gate, implementation_of(gate, experts))
    routing.check(jax.jit(results), x, k, gate, bias)


@on_a_gpu
@pytest.mark.parametrize(("name", "experts", "k", "dtype"), CASES, ids=str)
def test_many_tokens_on_a_gpu(name, experts, k, dtype):
    """Rows lie over fewer lanes than few rows do."""
    gate = GATES[name]
    x, bias = logits_and_bias(experts, dtype)
    x, named = np.tile(x, (6, 1)), implementation_of(gate, experts)
    route = jax.jit(lambda x, bias: ps.route(x, k, implementation=named, **gate.keywords(bias)))
    routing.judge(route(x, bias), x, k, gate, bias)
