"""top_k: a drop-in for jax.lax.top_k, with masks and lengths, in plain JAX on the CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from pallas_softmax import TopK, fused_topk, top_k
from tests.kernels.test_random_rows import adversarial_logits, random_logits, random_shapes
from tests.support import cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import first, first_values, pairs
from tests.topk.test_api import ELEMENTS, FREE

pytestmark = pytest.mark.usefixtures("quick_compilation")

FLOATS = (F32, BF16, F16)
INTEGERS = [np.dtype(name) for name in ("int32", "uint32", "int16", "uint16", "int8", "uint8", "bool")]
LENGTHS = np.array([3, 0, -2, 20, 2**31 - 1, 7], np.int32)


def integers(dtype, v):
    return cases.integers(np.random.default_rng(0), v, np.dtype(dtype))


def same(got, want):
    """Asserts equal values and indices, of equal dtypes; a NaN may have another payload."""
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a, F64), np.asarray(b, F64))
        np.testing.assert_array_equal(np.signbit(np.asarray(a, F64)), np.signbit(np.asarray(b, F64)))


def rows_of(dtype, v):
    return cases.rows(ALL, v, dtype) if dtype in FLOATS else integers(dtype, v)


ORDINARY = [i for i, name in enumerate(ALL) if name in cases.FINITE and name != "denormals"]


@pytest.mark.parametrize(
    ("dtype", "v", "k"),
    first(3, pairs([F32, INTEGERS[0], *FLOATS[1:], *INTEGERS[1:]], [129, 9, 2, 1], ["v", 1, 2, 0])),
    ids=str,
)
def test_winners(dtype, v, k):
    """Every finite and special row, also sorted as a whole: values keep their bits, and so -0 and NaNs their signs.

    XLA's kernels may treat denormals as zeros, and some misplace -NaN.
    """
    k = v if k == "v" else min(k, v)
    x = rows_of(dtype, v)
    got = top_k(x, k)
    same(got, oracle.top_k(x, k))
    rows = ORDINARY if dtype in FLOATS else slice(None)
    same([a[rows] for a in map(np.asarray, got)], lax.top_k(x[rows], k))


@pytest.mark.parametrize("dtype", first_values(1, ["uint64", "int64", "float64"]))
def test_64_bits(dtype, x64):
    x = integers(dtype, 20) if "int" in dtype else cases.rows(ALL, 20).astype(F64)
    got = top_k(x, 5)
    same(got, oracle.top_k(x, 5) if dtype != "uint64" else lax.top_k(x, 5))
    assert got.indices.dtype == np.int32


@pytest.mark.parametrize("dtype", first_values(1, ["float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"]))
def test_the_nan_of_fnuz_dtypes_comes_last(dtype):
    """Its bits have the sign."""
    x = jnp.array([1, np.nan, 2, -1], dtype)
    for indices in (lax.top_k(x, 4)[1], top_k(x, 4).indices, fused_topk(x, 4).indices):
        np.testing.assert_array_equal(indices, [2, 0, 3, 1])


# the value of a masked winner
LOWEST = {"float8_e4m3fn": -448, "int4": -8, "float8_e5m2": -np.inf, "uint4": 0}
LOWEST |= {"float8_e4m3fnuz": -240, "float4_e2m1fn": -6}


@pytest.mark.parametrize("dtype", first_values(1, LOWEST))
def test_narrow_numbers(dtype):
    """A masked winner has the value -inf, or the least number of a dtype without it: so the values are in order."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 7, (4, 16)), dtype)  # float4_e2m1fn rounds 5 to 4
    got = top_k(x, 16, lengths=np.array([16, 5, 0, 9]))
    want, indices = oracle.top_k(np.asarray(x, F32), 16, oracle.within(x, [16, 5, 0, 9]))
    assert got.values.dtype == dtype
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_array_equal(np.asarray(got.values, F32), np.where(want == -np.inf, LOWEST[dtype], want))


@FREE
@given(
    x=hnp.arrays(F32, (4, 8), elements=ELEMENTS),
    where=hnp.arrays(bool, (4, 8)) | st.just(np.ones((4, 8), bool)),
    lengths=st.just(np.full(4, 8, np.int32)) | hnp.arrays(np.int32, 4, elements=st.integers(-1, 9)),
)
def test_any_row_mask_and_lengths(x, where, lengths):
    got = top_k(x, 8, where=where, lengths=lengths)
    same(got, oracle.top_k(x, 8, oracle.within(x, lengths, where)))


X = cases.rows(list(cases.FINITE)[:6], 20)
MASKS = cases.masks(X.shape)


@pytest.mark.parametrize(("mask", "dtype"), first(1, pairs(MASKS, [*FLOATS, *INTEGERS])), ids=str)
def test_where(mask, dtype):
    """Masked positions win if fewer than k are unmasked, by the lowest index, with the lowest value."""
    x = X.astype(dtype) if dtype in FLOATS else integers(dtype, 20)[:6]
    where = MASKS[mask]
    want = oracle.top_k(x, 15, np.broadcast_to(where, x.shape))
    same(top_k(x, 15, where=where), want)
    unsorted = top_k(x, 15, where=where, sorted=False)
    np.testing.assert_array_equal(np.sort(unsorted.indices), np.sort(want[1]))


@pytest.mark.parametrize(
    ("dtype", "masked"), first(1, pairs([F32, BF16, np.dtype("int8"), np.dtype("bool")], [True, False])), ids=str
)
def test_lengths(dtype, masked):
    """A negative length is 0, and one above V is V. Lengths broadcast to the batch."""
    x = X.astype(dtype) if dtype in FLOATS else integers(dtype, 20)[:6]
    where = MASKS["x_shaped"] if masked else None
    every = [LENGTHS, np.int32(7), LENGTHS[:1], LENGTHS[:, None]]
    known = [top_k(x, 10, where=where, lengths=n) for n in every[:2]]
    traced = jax.jit(lambda x, every: [top_k(x, 10, where=where, lengths=n) for n in every])(x, every)
    for n, got in zip([*every[:2], *every], known + traced, strict=True):
        same(got, oracle.top_k(x, 10, oracle.within(x, np.broadcast_to(n.reshape(-1), 6), where)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint64", "int8", "uint8", "int64", "uint32"])
def test_lengths_never_wrap(dtype):
    info = np.iinfo(dtype)
    lengths = np.array([info.min, info.max, 0, 7, 3, 5], dtype)
    want = oracle.top_k(X, 10, oracle.within(X, [max(0, info.min), min(info.max, 20), 0, 7, 3, 5]))
    same(top_k(X, 10, lengths=lengths), want)
    same(top_k(X, 10, lengths=-(2**70)), oracle.top_k(X, 10, np.zeros(X.shape, bool)))
    with jax.enable_x64(True):
        same(jax.jit(lambda n: top_k(X, 10, lengths=n))(lengths), want)


@pytest.mark.parametrize(
    "k", first_values(3, [2.0, False, np.array(2), True, np.True_, np.float32(2), np.int8(2), jnp.int32(2)])
)
def test_every_k_of_lax_top_k(k):
    """Both take these, whatever their types are."""
    same(top_k(X, k), lax.top_k(X, int(k)))
    same(top_k(X, k), lax.top_k(X, int(k)))  # by the program of the first call


@pytest.mark.parametrize(
    ("operand", "k"),
    [*((X, k) for k in (-1, 21, 2.5, "2", None)), (jnp.float32(1), 1), (X.astype("complex64"), 1), ([1.0, 2.0], 1)],
)
def test_errors_have_the_types_of_lax_top_k(operand, k):
    """dispatch/test_errors.py has the messages."""
    with pytest.raises((TypeError, ValueError)) as error:
        lax.top_k(operand, k)
    for f in (top_k, lambda *arguments: jax.eval_shape(lambda: top_k(*arguments))):
        with pytest.raises(error.type):
            f(operand, k)


def test_empty_arrays():
    for shape in ((3, 0), (0, 5)):
        same(top_k(jnp.zeros(shape), 0), lax.top_k(jnp.zeros(shape), 0))


@pytest.mark.parametrize("x", [jnp.full((4,), 2.0), jnp.full((4,), 2), jnp.ones(4, F32), jnp.ones(4, bool)], ids=str)
def test_weak_types_agree_with_lax_top_k(x):
    def types(f):
        return [(a.dtype, a.weak_type) for a in jax.tree.leaves(jax.eval_shape(f, x))]

    assert types(lambda x: top_k(x, 2)) == types(lambda x: lax.top_k(x, 2))
    assert types(jax.jit(lambda x: top_k(x, 2))) == types(lambda x: lax.top_k(x, 2))
    if x.dtype == F32:
        gradients = [jax.grad(lambda x, f=f: f(x, 2)[0].sum()) for f in (top_k, lax.top_k)]
        assert types(gradients[0]) == types(gradients[1])


@pytest.mark.parametrize(("dtype", "axis"), first(1, pairs([F32, BF16, F16], [-1, 0])), ids=str)
def test_derivatives_agree_with_lax_top_k(dtype, axis):
    x, dx = X.astype(dtype), cases.cotangent(X.shape, dtype)
    g = cases.cotangent(np.shape(lax.top_k(x, 4, axis=axis)[0]), dtype)

    def derivatives(top_k):
        f = lambda x: top_k(x, 4, axis=axis)[0]  # noqa: E731
        return jax.jvp(f, (x,), (dx,)), jax.vjp(f, x)[1](g)

    ours, theirs = (jax.jit(functools.partial(derivatives, f))() for f in (top_k, lax.top_k))
    same(ours[0], theirs[0])
    jax.tree.map(np.testing.assert_array_equal, ours[1:], theirs[1:])


def test_masked_winners_have_no_gradient():
    """The cotangent goes to the unmasked winners. A tangent of a masked element, even a NaN, goes nowhere."""
    lengths, where = np.array([3, 0, 20, 5, 1, 9]), MASKS["x_shaped"]
    kept = oracle.within(X, lengths, where)
    f = lambda x: top_k(x, 12, where=where, lengths=lengths).values  # noqa: E731
    g, tangent = cases.cotangent((6, 12)), np.where(kept, 1, np.nan).astype(F32)
    (dx,), (_, dy) = jax.jit(lambda x: (jax.vjp(f, x)[1](g), jax.jvp(f, (x,), (tangent,))))(X)
    want = np.zeros_like(X)
    np.put_along_axis(want, oracle.topk_indices(X, 12, kept), g, -1)
    np.testing.assert_array_equal(dx, np.where(kept, want, 0))
    np.testing.assert_array_equal(dy, np.take_along_axis(kept, oracle.topk_indices(X, 12, kept), -1))


@pytest.mark.slow
def test_integers_have_no_gradient():
    x, float0 = jnp.arange(6).reshape(2, 3), jax.dtypes.float0
    zeros: Any = np.zeros((2, 2), float0)
    (dx,) = jax.vjp(lambda x: top_k(x, 2), x)[1](TopK(zeros, zeros))
    assert dx.dtype == float0 and dx.shape == x.shape
    _, tangents = jax.jvp(lambda x: top_k(x, 2), (x,), (np.zeros((2, 3), float0),))
    assert {t.dtype for t in tangents} == {np.dtype(float0)}
    # an integer that depends on a differentiated number
    assert jax.grad(lambda x: x * top_k((4 * jnp.ones(3) * x).astype(int), 1).values[0])(2.0) == 8


@pytest.mark.slow
def test_random_rows():
    """20,000 random and adversarial rows of 100 shapes, in plain JAX; a third has lengths, and a half a mask."""
    for shape, (rng, v, k, dtype, pattern, _, rows, _) in enumerate(random_shapes(100, 2048, longest=3000)):
        for call in range(-(-200 // rows)):
            x = (adversarial_logits if call % 2 else random_logits)(rng, rows, v, dtype)
            where = None if pattern is None else cases.broadcast_mask(pattern, x.shape, seed=call)
            lengths = rng.integers(-9, v + 9, rows).astype(np.int32) if shape % 3 == 0 else None
            kept = None if where is None else np.broadcast_to(where, x.shape)
            kept = kept if lengths is None else oracle.within(x, lengths, kept)
            same(top_k(x, k, where=where, lengths=lengths), oracle.top_k(x, k, kept))
