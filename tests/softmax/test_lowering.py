"""The Mosaic GPU kernels of softmax, log_softmax and logsumexp lowered for CUDA, without a GPU.

These tests do not see registers, shared memory, alignment and deadlocks; test_gpu.py does.
"""

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.softmax.plan import Parts
from tests.softmax import kernels
from tests.support import oracle
from tests.support.calls import DTYPES
from tests.support.covering import first, pairs
from tests.support.lowering import CALLS, MASKS, array, kernel_names, kernel_results, lowered, square_sum

# --- Every kernel -------------------------------------------------------------------------------------


def kernels_of(op, rows, v, dtype, plan=None, mask=None):
    """Returns the names of the lowered kernels of an operation, and the names that it should have."""
    arrays = [array(rows, v, dtype=dtype)] * (2 if op in oracle.BACKWARD else 1)
    where = None
    if mask is not None:
        where = array(*(n if n == 1 else m for n, m in zip(MASKS[mask](v), (rows, v))), dtype="bool")

    def f(arrays, where):
        return kernels.softmax_results(op, arrays, where, (1,), plan, interpret=None)

    names = kernel_names(lowered(f, arrays, where))
    kernel = op if op in oracle.BACKWARD else f"{op}_forward"
    if not isinstance(plan, Parts) or plan.cluster:
        return names, [kernel]
    return names, [f"{kernel}_reduce"] if op == "logsumexp" else [f"{kernel}_reduce", kernel]


# vectors of one element, and of eight; rows over a whole CTA
SHORT = (15, 512, 1003, 1, 3, 7, 8, 31, 127, 5000)
# name: (V, CTAs of a row, whether they are a cluster)
LONG = {
    "cluster, unaligned": (50257, 8, True),
    "one CTA": (8192, 1, True),
    "one CTA, unaligned": (10003, 1, True),
    "cluster": (65536, 4, True),
    "cluster of unequal parts": (20008, 2, True),
    "largest cluster": (151935, 16, True),
    "two launches": (1048576, 256, False),
    "two launches, unaligned": (1000003, 256, False),
}


def test_short_rows_cover_every_number_of_lanes():
    lanes = {kernels.plan_softmax("softmax", 5, v, "float32").lanes for v in SHORT}
    assert lanes == {2, 4, 8, 16, 32, 128}


@pytest.mark.parametrize(
    ("op", "kind", "dtype", "mask"),
    first(2, pairs(oracle.OPERATIONS[::-1], [15, *LONG, *SHORT[1:]], DTYPES, [*MASKS, None])),
)
def test_kernels(op, kind, dtype, mask):
    rows, plan = 8 if dtype == "bfloat16" else 5, None
    if kind in LONG:
        v, count, cluster = LONG[kind]
        plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster)
    names, want = kernels_of(op, rows, plan.vocab if plan else kind, dtype, plan, mask)
    assert names == want


TURNS = [("softmax", 9, None), ("log_softmax_grad", 9, None), ("softmax", 9, "full"), ("softmax", 5, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "slots", "mask"), [*TURNS, ("softmax_grad", 5, None)])
def test_rows_in_turns(op, slots, mask):
    """Slots for more than one row, and for less than one."""
    plan = Parts(50257, 4, 4, 4, True, teams=3, slots=slots)
    names, want = kernels_of(op, 5, 50257, "float32", plan, mask)
    assert names == want


# --- Public functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "call", "v"), first(1, pairs(oracle.FORWARD, {"grad": 0} | CALLS, [100, 20011]))
)
def test_public_functions(op, call, v):
    """Each function runs its kernel, and its gradient runs a kernel; logsumexp's gradient is plain JAX."""

    def f(x, axis=-1, where=None):
        return getattr(ps, op)(x, axis, where=where, implementation="mosaic_gpu")

    forward, backward = [f"{op}_forward"], [f"{op}_grad"]
    want = forward + backward if "grad" in call and op != "logsumexp" else forward
    text = lowered(CALLS[call](f), array(5, 3, v))
    assert [name for name in kernel_names(text) if not name.endswith("_reduce")] == want


@pytest.mark.slow
def test_integers_and_leading_axes_are_folded():
    def f(x, y, integers):
        return ps.softmax(x), ps.softmax(y, (1, 2)), ps.softmax(integers)

    text = lowered(f, array(16, 8, 16384), array(128, 2, 8192), array(64, 16384, dtype="int32"))
    assert kernel_results(text) == [["128x16384xf32"], ["128x16384xf32"], ["64x16384xf32"]]


# --- Transformations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "implementation"), first(1, pairs([(1, 1000), (4, 1, 1000)], ["mosaic_gpu", None]))
)
def test_rows_of_one_element(implementation, shape):
    """Along an axis that is not the last one, XLA runs them by default, and a named kernel lowers."""
    f = jax.grad(square_sum(lambda x: ps.softmax(x, -2, implementation=implementation)))
    assert len(kernel_names(lowered(f, array(*shape)))) == (2 if implementation else 0)


@pytest.mark.slow
def test_grad_of_grad_of_softmax():
    """The second derivative is plain JAX, but the function and its gradient still run as kernels."""
    second = jax.grad(square_sum(jax.grad(square_sum(ps.softmax))))
    assert len(kernel_results(lowered(second, array(128, 16384)))) >= 2
