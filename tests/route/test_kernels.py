"""The Mosaic GPU kernels of routers: in Pallas's interpreter, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.route import kernels
from tests.support import cases, routing
from tests.support.calls import DTYPES
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, pairs, values
from tests.support.gpu import on_a_gpu
from tests.support.lowering import array, kernel_names, kernel_results, lowered
from tests.support.routing import GATES

BEST = "sigmoid, bias, groups"  # the gate with all options
SHAPES = [(BEST, 64, 6, F32), ("softmax, groups", 8, 2, F16), (BEST, 256, 8, BF16)]
SHAPES += [("sqrtsoftplus, bias, groups", 64, 6, F32)]
UNGROUPED = [name for name in GATES if GATES[name].groups == 1]
ROWS_OF_ANY = [(100, 3), (384, 8), (33, 33), (8, 1), (1000, 6), (1, 1), (33, 5), (64, 6)]
SHAPES += [(name, *size, dtype) for name, size, dtype in values(UNGROUPED, ROWS_OF_ANY, [F32, BF16, F16])]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("name", "experts", "k", "dtype"), first(1, SHAPES), ids=str)
def test_interpreted(name, experts, k, dtype):
    rows = ["normal", "peaked", "integers", "constant", "neg_inf_last"]
    x, bias = cases.rows(rows, experts, dtype), 0.1 * np.random.default_rng(experts).standard_normal(experts)
    routing.check(kernels.results_and_gradient(k, GATES[name]), x, k, GATES[name], bias.astype(F32))


ROWS = 999  # the last tile is not full


def weights(k, gate):
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


# (E, k) of models and of the longest rows
EXPERTS = [(8, 2), (64, 6), (256, 8), (384, 8), (1000, 6), (1024, 8)]
CASES = [
    (name, experts, min(k, experts // gate.groups * (gate.top_groups or 1)), [F32, BF16, F16][(i + at) % 3])
    for at, (name, gate) in enumerate(GATES.items())
    for i, (experts, k) in enumerate(EXPERTS)
]
CASES += [("softmax", 64, 64, BF16), (BEST, 256, 64, F32), ("sigmoid, bias", 1024, 64, F16)]


@on_a_gpu
@pytest.mark.parametrize(("name", "experts", "k", "dtype"), CASES, ids=str)
def test_route_on_a_gpu(name, experts, k, dtype):
    """Experts, weights, logsumexp and the cotangents of the logits. Groups of 125 experts have no kernel."""
    gate = GATES[name]
    x, bias = routing.rows(experts, dtype, 300)
    named = None if gate.groups > 1 and experts == 1000 else "mosaic_gpu"
    routing.check(jax.jit(routing.results_and_gradient(k, gate, named)), x, k, gate, bias)
    many = np.tile(x, (6, 1))  # they lie over fewer lanes than few rows do
    route = jax.jit(lambda x, bias: ps.route(x, k, implementation=named, **gate.keywords(bias)))
    routing.judge(route(many, bias), many, k, gate, bias)
