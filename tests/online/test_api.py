"""online: the pair (m, d), the operator's laws, prefixes, totals, and the merge of candidates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_softmax import online
from pallas_softmax.online import Candidates, Moments, Normalizer
from tests.support import calls, cases, oracle
from tests.support.cases import ALL, F32
from tests.support.covering import first, first_values, pairs, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

FREE = settings(calls.FREE, max_examples=25)
combine = jax.jit(online.combine)
reduce = jax.jit(online.reduce, static_argnames=("axis", "of", "chunk"))


def logsumexp(pair):
    """Returns m + log(d): -inf for the empty set, and +inf for a +inf maximum with any d."""
    with np.errstate(divide="ignore", invalid="ignore"):
        m, d = (np.asarray(part, np.float64) for part in pair)
        return np.where(m == np.inf, np.inf, m + np.log(d))


def assert_same_maximum(got, want):
    """Asserts that maxima are equal, except for denormals that are flushed to zero."""
    flushed = np.where(np.abs(want) < np.finfo(F32).tiny, 0, want)
    np.testing.assert_array_equal(np.where(got == want, want, np.asarray(got)), np.where(got == want, want, flushed))


def assert_pairs_close(a, b, ulps=8):
    assert_same_maximum(a.m, np.asarray(b.m))
    np.testing.assert_allclose(a.d, b.d, rtol=ulps * 2.0**-23)


# Pairs of rows: d is at least 1 if m is finite, and at least 0 if m is -inf.
NORMAL = st.floats(-100, 100, width=32, allow_subnormal=False)  # a CPU makes subnormal numbers 0
PAIRS = (
    hnp.arrays(F32, (4,), elements=NORMAL)
    .map(lambda m: Normalizer(np.where(np.abs(m) > 90, F32.type(-np.inf), m), 1 + np.abs(m) / 4))
    .map(lambda p: Normalizer(p.m, np.where(np.isinf(p.m), 0, p.d).astype(F32)))
)


# the moments of four pairs of logits each; -inf stands for the empty set
MOMENTS = hnp.arrays(
    F32, (4, 2), elements=st.one_of(st.floats(-90, 90, width=32, allow_subnormal=False), st.just(-np.inf))
).map(lambda x: jax.tree.map(lambda a: np.asarray(a)[:, 0], reduce(x, -1, of=Moments)))


@pytest.mark.parametrize(("of", "sums"), [(Normalizer, PAIRS), slow(Moments, MOMENTS)], ids=["pairs", "moments"])
@FREE
@given(data=st.data())
def test_laws(of, sums, data):
    """combine is associative and commutative. The identity changes nothing on either side, not even the empty set."""
    a, b, c = (data.draw(sums) for _ in range(3))
    left, right = combine(a, combine(b, c)), combine(combine(a, b), c)
    assert isinstance(left, of)
    assert_pairs_close(left, right)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), left[2:], right[2:])
    jax.tree.map(np.testing.assert_array_equal, combine(a, b), combine(b, a))
    empty = online.identity((4,), F32, of=of)
    for total in (combine(a, empty), combine(empty, a)):
        jax.tree.map(np.testing.assert_array_equal, total, a)


def test_identity():
    """It is also the total of nothing."""
    empty, nothing = (online.identity((2, 3), jnp.bfloat16), [online.reduce(jnp.zeros(n)) for n in ((0,), (3, 0))])
    for pair, shape in [(empty, (2, 3)), (combine(empty, empty), (2, 3)), *zip(nothing, ((1,), (3, 1)))]:
        assert pair.m.shape == pair.d.shape == shape
        assert pair.m.dtype == pair.d.dtype == (jnp.bfloat16 if shape == (2, 3) else F32)
        assert (pair.m == -jnp.inf).all() and (pair.d == 0).all()


@pytest.mark.parametrize("of", [Normalizer, slow(Moments)])
def test_combine_is_the_normalizer_of_the_union(of):
    """An infinite maximum is kept, and the softmax of its row is NaN. A NaN survives every combination."""
    x = cases.rows(ALL, 129)

    @jax.jit
    def whole_and_halves(x):
        halves = [(online.reduce(x[:, :cut], of=of), online.reduce(x[:, cut:], of=of)) for cut in (1, 64, 128)]
        return online.reduce(x, of=of), [online.combine(*pair) for pair in halves]

    whole, unions = whole_and_halves(x)
    finite = [i for i, name in enumerate(ALL) if name in cases.FINITE]
    has_nan = np.isnan(x).any(-1)
    infinite = ~has_nan & (x == np.inf).any(-1)
    for got in (whole, *unions):
        m, d = (np.asarray(a)[:, 0] for a in got[:2])
        assert_pairs_close(*(Normalizer(*(np.asarray(a)[finite] for a in pair[:2])) for pair in (got, whole)), ulps=64)
        assert np.isnan(m + d)[has_nan].all()
        assert (m[infinite] == np.inf).all()
        with np.errstate(invalid="ignore", over="ignore"):
            assert np.isnan(np.exp(x - m[:, None]) / d[:, None])[infinite].all()
        if of is Moments:
            assert np.isnan(online.entropy(got))[has_nan | infinite].all()


def test_normalizer_is_a_pytree():
    pair = Normalizer(jnp.zeros(3), jnp.ones(3))
    doubled = jax.tree.map(lambda x: 2 * x, pair)
    assert isinstance(doubled, Normalizer)
    np.testing.assert_array_equal(doubled.d, 2 * np.ones(3))
    carried, _ = jax.lax.scan(lambda c, p: (combine(c, p), None), online.identity(), pair)
    np.testing.assert_array_equal(carried, [0, 3])


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_scan_gives_the_normalizer_of_every_prefix(axis):
    x = cases.rows(list(cases.FINITE), 18)
    prefixes = jax.jit(online.scan, static_argnums=1)(x, axis)
    assert prefixes.m.shape == prefixes.d.shape == x.shape
    assert_same_maximum(prefixes.m, np.maximum.accumulate(x, axis))
    total = reduce(x, axis)
    last = Normalizer(*(np.take(np.asarray(part), [-1], axis) for part in prefixes))
    assert_pairs_close(last, total, ulps=64)
    first = np.take(np.asarray(prefixes.d), 0, axis)
    np.testing.assert_array_equal(first, np.ones_like(first))


def test_scan_of_a_prefix_of_neg_inf():
    """The maximum is -inf up to the third element. d must not become NaN there."""
    x = np.array([-np.inf, -np.inf, 1.0, -np.inf, 2.0], F32)
    prefixes = jax.jit(online.scan)(x)
    np.testing.assert_array_equal(prefixes.m, [-np.inf, -np.inf, 1, 1, 2])
    np.testing.assert_allclose(prefixes.d[2:], [1, 1, 1 + np.exp(-1)], rtol=1e-6)
    np.testing.assert_array_equal(logsumexp(prefixes)[:2], [-np.inf, -np.inf])


@pytest.mark.parametrize("v", first_values(1, [4097, 129, 1, 2, 9, 127, 128, 1000, 4095, 4096, 5000, cases.GPT2]))
def test_reduce_is_logsumexp(v):
    """reduce agrees with logsumexp, also for lengths that need several chunks."""
    x = cases.rows(ALL, v)
    total = reduce(x, -1)
    assert total.m.shape == total.d.shape == (len(x), 1)
    want = oracle.logsumexp(x, -1, keepdims=True)
    np.testing.assert_allclose(logsumexp(total), want, rtol=1e-5, atol=1e-5)
    finite = [i for i, name in enumerate(ALL) if name in cases.FINITE]
    m = x[finite].max(-1, keepdims=True)
    assert_same_maximum(total.m[np.array(finite)], m)
    d = np.exp(x[finite] - m.astype(np.float64)).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(total.d)[finite], d, rtol=2e-6)


def test_reduce_axes():
    x = cases.rows(list(cases.FINITE)[:6], 20).reshape(6, 4, 5)
    axes = [1, (2, 0), (), 0, -2, (0, 2), (2, 1), (0, 1, 2)]
    long = cases.rows(["normal", "peaked"], 9000)
    calls = [(x, axis) for axis in axes] + [(long.T, 0), (long[:, :, None], 1), (long, (0, 1))]
    calls += [(long.reshape(2, 3, 3000), (1, 2))]
    totals = jax.jit(lambda xs: [online.reduce(x, axis) for x, (_, axis) in zip(xs, calls)])([x for x, _ in calls])
    for (x, axis), total in zip(calls, totals, strict=True):
        assert total.m.shape == total.d.shape == np.max(x, axis=axis, keepdims=True).shape
        want = oracle.logsumexp(x, axis, keepdims=True)
        np.testing.assert_allclose(logsumexp(total), want, rtol=1e-5, atol=1e-5, err_msg=str(axis))


@pytest.mark.parametrize(("v", "mask"), first(1, pairs([20, 5000], cases.masks((7, 20)))))
def test_reduce_where(mask, v):
    """Masked NaN and inf do not matter, and a fully masked row gives the identity."""
    x = cases.rows(list(cases.FINITE)[:7], v)
    where = cases.masks(x.shape)[mask]
    for poison in (0.0, np.nan, np.inf):
        total = reduce(np.where(where, x, F32.type(poison)), -1, where)
        want = oracle.logsumexp(x, -1, where, keepdims=True)
        np.testing.assert_allclose(logsumexp(total), want, rtol=1e-5, atol=1e-5)
    empty = ~np.broadcast_to(where, x.shape).any(-1)
    assert (np.asarray(total.m)[empty] == -np.inf).all()
    assert (np.asarray(total.d)[empty] == 0).all()


def test_reduce_does_not_build_the_prefix():
    """Only elementwise operations have the length of the row; associative_scan runs over the chunks."""
    v = 2**18
    jaxpr = jax.make_jaxpr(online.reduce)(jax.ShapeDtypeStruct((1, v), F32))
    scanned = [
        var.aval.size
        for eqn in jaxpr.eqns
        if eqn.primitive.name in ("concatenate", "pad", "cumlogsumexp", "cummax", "while", "scan")
        for var in eqn.outvars
    ]
    assert all(size <= v // 16 for size in scanned), scanned


def candidates(x, k, where):
    """Returns the k best of the positions in `where`, with their indices in the whole row."""
    local = np.flatnonzero(where)
    indices = oracle.topk_indices(x[..., local], min(k, len(local)))
    return Candidates(np.take_along_axis(x[..., local], indices, -1), local[indices].astype(np.int32))


@pytest.mark.parametrize(
    ("part", "dtype"), first(1, pairs(["first_half", "even", "one"], [F32, cases.BF16, cases.F16])), ids=str
)
def test_merge_of_two_parts_is_the_top_k_of_the_whole(part, dtype):
    """The order is the total order, then the lowest index, from either list."""
    x, k = cases.rows(ALL, 40, dtype), 6
    index = np.arange(40)
    inside = {"first_half": index < 20, "even": index % 2 == 0, "one": index == 30}[part]
    want = oracle.topk_indices(x, k)
    a, b = candidates(x, k, inside), candidates(x, k, ~inside)
    for pair in [(a, b), (b, a)]:
        got = online.merge(*pair, k)
        assert got.indices.dtype == np.int32
        np.testing.assert_array_equal(got.indices, want)
        np.testing.assert_array_equal(np.asarray(got.values).astype(F32), np.take_along_axis(x, want, -1).astype(F32))
        np.testing.assert_array_equal(np.signbit(got.values), np.signbit(np.take_along_axis(x, want, -1)))


def test_merge_is_a_reduction():
    """A merge of eight parts gives the same as a tree and one after the other."""
    x, k = cases.rows(ALL, 40), 6
    parts = [candidates(x, k, np.arange(40) // 5 == i) for i in range(8)]
    merge = jax.jit(online.merge, static_argnums=2)
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = merge(one_by_one, part, k)
    while len(parts) > 1:
        parts = [merge(a, b, k) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    np.testing.assert_array_equal(parts[0].indices, one_by_one.indices)
    np.testing.assert_array_equal(parts[0].indices, oracle.topk_indices(x, k))


def test_merge_of_integers():
    a = Candidates(np.array([5, 3], np.int32), np.array([4, 1], np.int32))
    b = Candidates(np.array([5, -7], np.int32), np.array([2, 0], np.int32))
    got = online.merge(a, b, 4)
    np.testing.assert_array_equal(got.values, [5, 5, 3, -7])
    np.testing.assert_array_equal(got.indices, [2, 4, 1, 0])


def assert_moments(got, x):
    """Asserts that moments are right for rows without NaN and +inf; errors of t are relative to d (1 + log d)."""
    x = np.asarray(x, np.float64)
    m = x.max(-1, keepdims=True)
    below = np.maximum(x - np.where(np.isneginf(m), 0, m), -1e4)
    e = np.exp(below)
    d, t = e.sum(-1, keepdims=True), (below * e).sum(-1, keepdims=True)
    eps = 64 * 2.0**-23
    assert_same_maximum(got.m, m.astype(F32))
    np.testing.assert_allclose(got.d, d, rtol=eps)
    assert (np.abs(got.t - t) <= eps * d * (1 + np.log(np.maximum(d, 1)))).all()


@pytest.mark.slow
def test_reduce_and_scan_of_moments():
    """In chunks, by prefixes and at once, the moments of all rows are right, and the entropy does not cancel."""
    x = np.concatenate([cases.rows(list(cases.FINITE), 129), np.full((1, 129), -np.inf, F32)])
    x[1, ::2] = -np.inf
    for chunk in (7, 129):
        assert_moments(reduce(x, -1, chunk=chunk, of=Moments), x)
    prefixes = jax.jit(functools.partial(online.scan, of=Moments))(x)
    assert prefixes.t.shape == x.shape
    for n in (1, 64, 129):
        assert_moments(jax.tree.map(lambda a, n=n: a[:, n - 1 : n], prefixes), x[:, :n])
    halves = combine(*(reduce(part, -1, of=Moments) for part in (x[:, :64], x[:, 64:])))
    assert_moments(halves, x)
    _, entropy, *_ = oracle.token_stats(x, np.zeros(len(x), int))
    got = np.asarray(online.entropy(halves))[:, 0]
    np.testing.assert_allclose(got, entropy, rtol=0, atol=64 * 2.0**-23 * (1 + np.log(129)))


def refused(match, function, *arguments, error=TypeError, **options):
    with pytest.raises(error, match=match):
        function(*arguments, **options)


def test_what_does_not_fit_is_refused():
    """Numbers must be floats, and arrays must be arrays; dispatch/test_errors.py has axes and shapes."""
    pair, triple, numbers = online.identity((3,)), online.identity(of=Moments), jnp.ones(3)
    for f in (online.scan, online.reduce):
        for x in ([1.0, 2.0], "a", None, np.array(["a"])):
            refused(f"online.{f.__name__}: x must be .*, got", f, x)
        refused(f"online.{f.__name__}: of must be Normalizer or Moments, got", f, numbers, of=tuple)
    for where in ("a", [True, False, True]):
        refused("online.reduce: where must be an array or a scalar, got", online.reduce, numbers, where=where)
    refused("b must be Moments, got Normalizer", online.combine, triple, pair)
    refused("b must be a Normalizer, got Moments", online.combine, pair, triple)
    refused("a must be a Normalizer or Moments", online.combine, tuple(pair), pair)
    for field in "md":
        for bad in ([1.0], "a", None, jnp.ones(3, int)):
            wrong = pair._replace(**{field: bad})
            refused(f"online.combine: a.{field} must be .*, got", online.combine, wrong, pair)
            refused(f"online.combine: b.{field} must be .*, got", online.combine, pair, wrong)
    refused("scale must be a real number .*, got bool", online.combine, pair, pair, scale=True)
    refused("a.m must be from", online.combine, Normalizer(2**40, 1.0), pair, error=ValueError)
    other = online.identity((2,))
    refused("must broadcast, got the shapes", online.combine, pair, other, error=ValueError)
    for dtype in (None, "foo", np.longdouble, int):
        refused("dtype must be a floating or complex one", online.identity, (), dtype)
    for shape in ("a", (-1,)):
        refused("shape must be integers", online.identity, shape)
    values, indices = jnp.array([3.0, 1.0]), jnp.arange(2)
    good = Candidates(values, indices)
    for bad in (None, (values, indices, indices)):
        refused("a must be Candidates, got", online.merge, bad, good, 2)
    refused("a.values must be .* real numbers or bools, got complex64", online.merge, (values + 1j, indices), good, 2)
    for wrong in (values, indices.astype(jnp.uint32)):  # uint32 might wrap
        refused("b.indices must be integers, .*, got (float32|uint32)", online.merge, good, (values, wrong), 2)
    refused("and scale, must broadcast", online.combine, pair, pair, scale=jnp.ones(2), error=ValueError)


def test_combine_under_strict_promotion():
    """Fields of other ranks, and a narrower scale, give what they give when JAX promotes them."""
    a, b = online.reduce(jnp.arange(6.0).reshape(2, 3), 0), online.reduce(jnp.arange(3.0))
    scale = jnp.float16(0.5)
    want = online.combine(a, jax.tree.map(lambda x: x[None], b), scale=jnp.full((1, 3), 0.5))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = online.combine(a, b, scale=scale), online.combine(a, b, scale=jnp.full(3, 0.5))
    for each in got:
        jax.tree.map(np.testing.assert_array_equal, each, want)
        assert each.d.dtype == jnp.float32


def test_moments_of_a_float_that_ends_below_10000():
    x = jnp.array([1, 2, 3], "float8_e4m3fn")
    found, wide = (online.scan(a, of=Moments) for a in (x, x.astype(jnp.float32)))
    for got, want in zip(found, wide):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0.1)


def test_programs_that_return_candidates_can_be_stored():
    def best(x):
        candidates = Candidates(*jax.lax.top_k(x, 2))
        return online.merge(candidates, candidates, 3)

    x = jnp.arange(4.0)
    stored = jax.export.export(jax.jit(best))(x).serialize()
    found, want = jax.export.deserialize(stored).call(x), best(x)
    assert isinstance(found, Candidates)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16"])
def test_merged_indices_are_int32(dtype):
    a, b = (Candidates(jnp.array(v), jnp.array(i, t)) for v, i, t in (([2.0], [3], dtype), ([1.0], [100], "int8")))
    indices = online.merge(a, b, 2).indices
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, [3, 100])


@pytest.mark.parametrize("dtype", ["int2", "uint4", "bool"])
def test_merge_of_narrow_numbers(dtype):
    a, b = ([1, 0], [4, 1]), ([1, 1], [2, 0])
    got = online.merge(*(Candidates(jnp.array(v, dtype), jnp.array(i)) for v, i in (a, b)), 3)
    assert got.values.dtype == dtype
    np.testing.assert_array_equal(got.indices, [0, 2, 4])
