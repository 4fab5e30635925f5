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

ROWS, V = 128, 16384  # enough for the automatic choice of a kernel, in every dtype
X = array(ROWS, V)


# --- Every kernel -------------------------------------------------------------------------------------


def lowered_rows(op, rows, v, dtype, plan=None, mask=None):
    """Returns the lowered kernel of an operation on `rows` rows, with a mask of this shape."""
    arrays = [array(rows, v, dtype=dtype)] * (2 if op in oracle.BACKWARD else 1)
    where = None if mask is None else array(*mask, dtype="bool")

    def f(arrays, where):
        return kernels.softmax_results(op, arrays, where, (1,), plan, interpret=None)

    return lowered(f, arrays, where)


def names_of(op, plan=None):
    """Returns the names of the kernels that an operation runs as."""
    kernel = op if op in oracle.BACKWARD else f"{op}_forward"
    if not isinstance(plan, Parts) or plan.cluster:
        return [kernel]
    return [f"{kernel}_reduce"] if op == "logsumexp" else [f"{kernel}_reduce", kernel]


SHORT = (1, 2, 3, 7, 8, 15, 31, 127, 512, 1000, 1003, 5000)


def test_short_rows_cover_every_number_of_lanes():
    lanes = {kernels.plan_softmax("softmax", 5, v, "float32").lanes for v in SHORT}
    assert lanes == {2, 4, 8, 16, 32, 128}


@pytest.mark.parametrize(("op", "v", "dtype"), first(3, pairs(oracle.OPERATIONS, SHORT, DTYPES)))
def test_short_rows(op, v, dtype):
    assert kernel_names(lowered_rows(op, 5, v, dtype)) == names_of(op)


# (V, dtype). Vectors of one element, of eight, and of one in rows over a whole CTA.
MASKED = [(15, "float16"), (512, "bfloat16"), (1003, "float32")]


@pytest.mark.parametrize(("op", "shape", "mask"), first(3, pairs(oracle.OPERATIONS, MASKED, MASKS)), ids=str)
def test_short_rows_with_masks(op, shape, mask):
    v, dtype = shape
    assert kernel_names(lowered_rows(op, 5, v, dtype, mask=MASKS[mask](v))) == names_of(op)


# name: (V, CTAs of a row, whether they are a cluster)
LONG = {
    "one CTA": (8192, 1, True),
    "one CTA, unaligned": (10003, 1, True),
    "cluster": (65536, 4, True),
    "cluster of unequal parts": (20008, 2, True),
    "cluster, unaligned": (50257, 8, True),
    "largest cluster": (151935, 16, True),
    "two launches": (1048576, 256, False),
    "two launches, unaligned": (1000003, 256, False),
}


@pytest.mark.parametrize(
    ("op", "kind", "shape"),
    first(2, pairs(oracle.OPERATIONS, LONG, [(5, "float32"), (8, "bfloat16")])),
    ids=str,
)
def test_long_rows(op, kind, shape):
    (v, count, cluster), (rows, dtype) = LONG[kind], shape
    plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster)
    assert kernel_names(lowered_rows(op, rows, v, dtype, plan)) == names_of(op, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "slots", "mask"),
    [
        ("softmax", 9, None),
        ("log_softmax_grad", 9, None),
        ("softmax", 9, "full"),
        ("softmax", 5, None),
        ("softmax_grad", 5, None),
    ],
)
def test_rows_in_turns(op, slots, mask):
    """Slots for more than one row, and for less than one."""
    plan = Parts(50257, 4, 4, 4, True, teams=3, slots=slots)
    text = lowered_rows(op, 5, 50257, "float32", plan, mask and MASKS[mask](50257))
    assert kernel_names(text) == names_of(op, plan)


@pytest.mark.parametrize(
    ("op", "kind", "mask"),
    first(
        1,
        pairs(
            ["softmax", "logsumexp", "log_softmax_grad"],
            ["cluster, unaligned", "one CTA", "two launches, unaligned"],
            MASKS,
        ),
    ),
)
def test_long_rows_with_masks(op, kind, mask):
    v, count, cluster = LONG[kind]
    plan = Parts(v, 8, 4, count, cluster)
    text = lowered_rows(op, 5, v, "float16", plan, MASKS[mask](v))
    assert kernel_names(text) == names_of(op, plan)


# --- Public functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "call", "v"), first(2, pairs(oracle.FORWARD, CALLS, [100, 20011])))
def test_public_functions(op, call, v):
    """Each function runs its kernel, and its gradient runs a kernel; logsumexp's gradient is plain JAX."""

    def f(x, axis=-1, where=None):
        return getattr(ps, op)(x, axis, where=where, implementation="mosaic_gpu")

    forward, backward = [f"{op}_forward"], [f"{op}_grad"]
    want = forward + backward if "grad" in call and op != "logsumexp" else forward
    text = lowered(CALLS[call](f), array(5, 3, v))
    assert [name for name in kernel_names(text) if not name.endswith("_reduce")] == want


def test_integers_and_leading_axes_are_folded():
    assert kernel_results(lowered(ps.softmax, array(16, 8, V))) == [[f"128x{V}xf32"]]
    assert kernel_results(lowered(lambda x: ps.softmax(x, (1, 2)), array(ROWS, 2, V // 2))) == [
        [f"128x{V}xf32"]
    ]
    assert kernel_results(lowered(ps.softmax, array(ROWS, V, dtype="int32"))) == [[f"128x{V}xf32"]]


# --- Transformations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), [((1, 1000), 0), ((4, 1, 1000), 1)])
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_rows_of_one_element(implementation, shape, axis):
    """Along an axis that is not the last one, XLA runs them by default, and a named kernel lowers."""
    f = jax.grad(square_sum(lambda x: ps.softmax(x, axis, implementation=implementation)))
    assert len(kernel_names(lowered(f, array(*shape)))) == (2 if implementation else 0)


def test_grad_of_softmax():
    """One kernel for the forward and one for the gradient."""
    assert kernel_results(lowered(jax.grad(square_sum(ps.softmax)), X)) == [[f"{ROWS}x{V}xf32"]] * 2


@pytest.mark.slow
def test_grad_of_grad_of_softmax():
    """The second derivative is plain JAX, but the function and its gradient still run as kernels."""
    second = jax.grad(square_sum(jax.grad(square_sum(ps.softmax))))
    assert len(kernel_results(lowered(second, X))) >= 2


def test_vmap_over_single_rows_is_one_call_over_all_of_them():
    assert kernel_results(lowered(jax.vmap(ps.softmax), X)) == kernel_results(lowered(ps.softmax, X))


@pytest.mark.slow
def test_vmap_of_grad_is_two_calls_over_all_rows():
    f = jax.vmap(jax.grad(square_sum(ps.softmax)))
    assert kernel_results(lowered(f, array(3, ROWS, V))) == [[f"{3 * ROWS}x{V}xf32"]] * 2
