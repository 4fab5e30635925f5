"""The Mosaic GPU kernels of routers lowered for CUDA, without a GPU.

These tests do not see registers, shared memory, alignment and deadlocks; test_gpu.py does.
"""

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from tests.support.calls import DTYPES
from tests.support.covering import first, pairs
from tests.support.lowering import array, kernel_names, kernel_results, lowered
from tests.support.routing import GATES

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
def test_forward_and_gradient(name, size, dtype):
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
def test_groups_without_a_kernel():
    """The forward is plain JAX. The gradient does not depend on groups, and has a kernel."""
    f = jax.grad(lambda x: jnp.sum(ps.route(x, 2, groups=3, top_groups=2).weights ** 2))
    assert kernel_names(lowered(f, array(ROWS, 60))) == ["route_grad"]
    assert kernel_names(lowered(f, array(ROWS, 1026))) == []


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None), (0, 0), (None, 0)], ids=str)
def test_vmap(axes):
    """The slices are more rows of one kernel, with one bias or one for each slice."""
    shapes = [(4, *a.shape) if axis == 0 else a.shape for a, axis in zip(operands(64), axes)]
    arrays = [array(*shape) for shape in shapes]
    text = lowered(jax.vmap(gradient(6, GATES[BEST]), axes), *arrays)
    assert kernel_names(text) == ["route", "route_grad"]
    assert f"{4 * ROWS}x6xi32" in kernel_results(text)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", BEST])
def test_under_x64(name, x64):
    """No number becomes a 64-bit number."""
    text = lowered(gradient(6, GATES[name]), *operands(64))
    assert kernel_names(text) == ["route", "route_grad"]


@pytest.mark.slow
def test_the_jvp_has_the_forward_kernel():
    x, bias = operands(64)
    f = lambda x, b, dx: jax.jvp(lambda x: weights(6, GATES[BEST])(x, b), (x,), (dx,))  # noqa: E731
    assert kernel_names(lowered(f, x, bias, x)) == ["route"]
