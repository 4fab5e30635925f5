"""sample and filter_logits: the kept set, the tokens of `jax.random.categorical`, the distribution, and bad input."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax import filter_logits, sample
from pallas_softmax._src.sample import noise, xla
from tests.support import bounds, cases
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import first, pairs, parameter_id, slow
from tests.support.draws import (
    NO_TOP_K,
    all_combinations,
    assert_cutoffs,
    assert_draws,
    assert_failed_and_empty,
    assert_share,
    bits_at,
    masked_rows,
    rows_without_a_draw,
)
from tests.support.trees import assert_equal, assert_near

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(7)


@jax.jit
def operation(x, where, words, *parameters):
    results = xla.sample(x, where, words, *(None if a is None else a[..., None] for a in parameters), stride=1)
    return [a[..., 0] for a in results]


@jax.jit
def cutoffs(x, where, *parameters):
    results = xla.cutoff(x, where, *(None if a is None else a[..., None] for a in parameters))
    return [a[..., 0] for a in results]


def by_categorical(key, x, mode=None, **options):
    filtered = filter_logits(x, **options) if options or x.dtype != F32 else x
    draw = functools.partial(jax.random.categorical, mode=mode)
    return jax.jit(functools.reduce(lambda each, _: jax.vmap(each), key.shape, draw))(key, filtered)


def assert_categorical(key, x, mode=None, **options):
    """Asserts that the tokens equal `jax.random.categorical`, without a kernel. Returns the draw."""
    got = sample(key, x, mode=mode, **options)
    np.testing.assert_array_equal(got.indices, by_categorical(key, x, mode=mode, **options))
    return got


# Rows are long enough for a small top_k to use candidates on a CPU; the other rows of a batch are searched.
LONG = 2**14 + 7


OF_LONG_ROWS = [
    (["integers", "denormals", "signed_zeros", "neg_inf_last"], LONG),
    (["normal", "ascending", "one_winner", "all_but_one_neg_inf"], cases.GPT2),
    (["peaked", "constant"], cases.LARGE[0]),
]


@pytest.mark.parametrize(
    ("names", "v", "dtype", "masked"),
    first(
        1,
        [
            *((ALL, v, dtype, False) for v, dtype in [(129, F32), (LONG, F32), (2, BF16), (1000, F16)]),
            *((ALL, v, dtype, False) for v, dtype in pairs(cases.SMALL, [F32, BF16, F16])[:5]),
            *((ALL, v, F32, True) for v in (127, 300)),  # 300 is more than a block, and not a multiple of one
            *((*case, F32, False) for case in OF_LONG_ROWS),
        ],
    ),
    ids=parameter_id,
)
def test_every_row_with_every_filter(names, v, dtype, masked):
    """In long rows, top_p near 1 keeps most, and a small one keeps one entry. Boundaries are among many ties."""
    rows, where = masked_rows(names, v, dtype, masked)
    if where is not None:  # nothing is kept, or one entry
        where[0] = False
        where[1] &= np.cumsum(where[1]) == 1
    x, where, words, parameters, labels = all_combinations(rows, where)
    labels = [(names[i], *rest) for i, *rest in labels]
    got = operation(x, where, words, *parameters)
    assert_draws(got, x, words, labels, parameters, where)
    assert_cutoffs(cutoffs(x, where, *parameters), x, labels, parameters, where)
    indices, log_probs, log_mass = map(np.asarray, got)
    assert (log_probs <= log_mass)[indices >= 0].all()  # the probability of a draw is at most 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "v"),
    [
        *(((1, 1, 1), v) for v in (300, LONG)),
        *(((1, 0, 0), v) for v in (129, LONG)),
        *((given, 129) for given in [(0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (0, 0, 0)]),
    ],
    ids=str,
)
def test_omitted_filters(given, v):
    """An omitted filter keeps everything. Without any filter, log_mass is exactly 0. A row alone has the same draw."""
    names = ["normal", "integers", "peaked", "zero"]
    x, _, words, (t, *filters), labels = all_combinations(cases.rows(names, v))
    where = np.random.default_rng(0).random(x.shape) < 0.8
    filters = [a if wanted else None for a, wanted in zip(filters, given)]
    got = operation(x, where, words, t, *filters)
    assert_draws(got, x, words, labels, [t, *filters], where)
    assert_cutoffs(cutoffs(x, where, t, *filters), x, labels, [t, *filters], where)
    if not any(given):
        np.testing.assert_array_equal(got[2][t != 0], 0)
    for i in range(0, len(x), 17):
        alone = (None if a is None else a[i : i + 1] for a in (x, where, words, t, *filters))
        assert_near(operation(*alone), [a[i : i + 1] for a in got], atol=1e-6)  # sums may round differently


@pytest.mark.slow
def test_filters_keep_ties_with_the_lowest_indices():
    """A filter keeps the first entries of a constant row, exactly, because sums of ones are exact."""
    top_k, top_p = np.array([300, NO_TOP_K, 300, NO_TOP_K], np.int32), np.array([1, 0.25, 0.5, 1], F32)
    x, filters = np.zeros((4, 1000), F32), {"top_k": top_k, "top_p": top_p}
    got = filter_logits(x, min_p=0.0, **filters)
    np.testing.assert_array_equal(np.sum(got == 0, -1), [300, 250, 150, 1000])
    np.testing.assert_array_equal(np.argmin(got[:3], -1), [300, 250, 150])
    log_mass = sample(KEY, x, **filters).log_mass
    np.testing.assert_allclose(log_mass, np.log([0.3, 0.25, 0.15, 1]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("x", [np.uint8([255, 0]), np.int32([0, -(2**31)]), np.float32([255, 0])], ids=str)
def test_top_p_of_1_keeps_entries_without_mass(x):
    got = ps.filter_logits(np.stack([x, x]), top_p=np.float32([1, 0.99]))
    np.testing.assert_array_equal(got, [x, [x[0], -np.inf]])


@pytest.mark.parametrize("dtype", [slow("int8"), slow("uint32")])
def test_integers(dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.max - 9, info.max, (4, 40), dtype, endpoint=True)
    x[0], x[1, :-1] = info.min, info.min
    if info.bits == 32:  # float32 would round larger ones
        x = (x // 2**10).astype(dtype)
    x, _, words, parameters, names = all_combinations(x)
    assert_draws(operation(x, None, words, *parameters), x, words, names, parameters)
    assert_categorical(KEY, x, top_k=9, temperature=3.0)


@pytest.mark.slow
def test_float64(x64):
    names = list(cases.FINITE)
    x = cases.rows(names, 129, F64)
    options = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    got = assert_categorical(KEY, x, **options)
    assert got.log_probs.dtype == got.log_mass.dtype == filter_logits(x).dtype == F64
    bounds.assert_sample(got, x, np.asarray(jax.random.gumbel(KEY, x.shape)), names, **options)
    assert sample(KEY, x.astype(F32)).log_probs.dtype == F32


# --- Noise --------------------------------------------------------------------------------------------


GENERATORS = ["threefry2x32", "rbg", "unsafe_rbg", "philox2x32"]
MANY = {"temperature": np.linspace(0, 2, 6, dtype=F32), "top_k": np.array([0, 1, 5, 50, 100, 300])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 300), -1), ((300,), 0), ((4, 30, 7), 1), ((30, 4, 7), 0), ((3, 5, 1), 1)]
)
def test_noise_of_words(shape, axis):
    """The noise equals jax.random.gumbel, and its words equal jax.random.bits, bit for bit."""
    axis %= len(shape)
    words = jnp.concatenate(noise.words(KEY, shape, axis), -1)
    index = jnp.broadcast_to(jnp.arange(shape[axis], dtype=jnp.int32), (*words.shape[:-1], shape[axis]))
    both = jax.jit(lambda *at: (noise.gumbel_at(*at), noise.bits_at(*at)), static_argnums=2)
    got, bits = both(words, index, noise.stride(KEY, shape, axis))
    np.testing.assert_array_equal(got, jnp.moveaxis(jax.random.gumbel(KEY, shape, F32, "low"), axis, -1))
    np.testing.assert_array_equal(bits, jnp.moveaxis(jax.random.bits(KEY, shape), axis, -1))


@pytest.mark.parametrize("stride", [1, 3, 2**16 + 1, 2**31, 2**40 + 12345])
def test_counters_have_64_bits(stride):
    start, index = [0, 2**32 - 3, 2**63 + 5], np.array([0, 1, 7, 2**16, 2**31 - 1], np.uint32)
    words = np.array([(1, 2, a >> 32, a % 2**32) for a in start], np.uint32)
    got = noise.bits_at(jnp.asarray(words), jnp.broadcast_to(index, (3, 5)), stride)
    np.testing.assert_array_equal(got, bits_at(words, index, stride))
    advanced = jnp.stack([noise.advance(jnp.asarray(words), i, stride) for i in index], 1)
    for i, a in enumerate(start):
        counters = [divmod((a + int(v) * stride) % 2**64, 2**32) for v in index]
        np.testing.assert_array_equal(advanced[i, :, 2:], counters)


@pytest.mark.parametrize(
    ("impl", "mode", "dtype", "filtered", "batch"),
    first(1, pairs(GENERATORS, [None, "low", "high", "highest"], [F32, BF16], [False, True], [(3, 2), ()])),
    ids=str,
)
def test_tokens_of_categorical(impl, mode, dtype, filtered, batch):
    """A key for each row, and one key, of every generator, in every mode, with and without filters."""
    try:
        keys = jax.random.split(jax.random.key(3, impl=impl), batch)
    except ValueError:
        pytest.skip(f"this JAX has no {impl}")
    x = cases.rows(["normal", "peaked", "integers", "zero", "constant", "normal"], 300).astype(dtype)
    options = MANY | {"top_p": 0.95, "min_p": 0.01} if filtered else {}
    options = {of: np.reshape(a, (3, 2)[: 2 * np.ndim(a)]) for of, a in options.items()}
    assert_categorical(keys, x.reshape(3, 2, 300), mode, **options)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["jax_threefry_partitionable", "jax_high_dynamic_range_gumbel"])
def test_settings_of_noise(setting):
    """A program that was compiled before a setting changed is not used after."""
    x = cases.rows(["normal", "peaked"], 301)
    drafts = jax.random.split(KEY, 100), np.zeros((100, 1), int), np.broadcast_to(x[0, :5], (100, 2, 5))
    before, drawn, verified = getattr(jax.config, setting), assert_categorical(KEY, x, top_k=200), ps.verify(*drafts)
    try:
        jax.config.update(setting, not before)
        assert np.any(assert_categorical(KEY, x, top_k=200).indices != drawn.indices)
        assert_categorical(jax.random.split(KEY, 2), x)
        tokens, again = (f(*drafts).tokens for f in (ps.verify, jax.jit(ps.verify.__wrapped__)))
        assert np.any(tokens != verified.tokens)
        np.testing.assert_array_equal(tokens, again)
    finally:
        jax.config.update(setting, before)
    assert_equal(assert_categorical(KEY, x, top_k=200), drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("v", "dtype"), [(LONG, F32), (cases.LARGE[0], BF16)])
def test_tokens_of_long_rows(v, dtype):
    x = cases.rows(["normal", "peaked", "constant"], v, dtype)
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 1000, "min_p": 0.01}):
        assert_categorical(KEY, x, temperature=0.8, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "n", "batch", "filters"),
    [
        ("normal", 200_000, 20_000, {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01}),
        ("peaked", 320, 64, {"temperature": 4, "top_p": 0.99}),  # test_gpu.py makes a million draws
    ],
)
def test_the_distribution(row, n, batch, filters):
    x = cases.rows([row], cases.GPT2 if row == "peaked" else 32)
    draw = jax.jit(lambda key: sample(key, jnp.broadcast_to(x, (batch, x.size)), **filters).indices)
    counts = sum(np.bincount(draw(key), minlength=x.size) for key in jax.random.split(KEY, n // batch))
    assert_share(counts, x, **filters)


X = cases.rows(["normal", "peaked", "integers"] * 2, 300).reshape(2, 3, 300)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, -3])
def test_one_key_along_an_axis(axis):
    x, options = cases.rows(list(cases.FINITE)[:6], 20).reshape(6, 4, 5), {"axis": axis, "top_p": 0.8}
    want = jax.random.categorical(KEY, filter_logits(x, **options), axis)
    np.testing.assert_array_equal(sample(KEY, x, **options).indices, want)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_vmap_of_rbg(axes):
    """The tokens equal a vmapped categorical. Where the key is shared, all slices have the same noise."""
    keys = jax.random.split(jax.random.key(2, impl="rbg"), 2)
    args = [a if i == 0 else a[0] for a, i in zip((keys, X), axes)]

    def reference(key, x):
        return jax.random.categorical(key, filter_logits(x, top_k=50, top_p=0.9))

    got = jax.vmap(lambda key, x: sample(key, x, top_k=50, top_p=0.9), axes)(*args)
    np.testing.assert_array_equal(got.indices, jax.vmap(reference, axes)(*args))


def test_filtered_logits():
    """Kept entries are logits / temperature, exactly; the rest is -inf. Rows without a distribution say so."""
    x = np.array(X[0, :1].repeat(7, 0))
    where = np.ones(x.shape, bool)
    x[2, 3], x[3, 3], where[4], x[5] = np.nan, np.inf, False, -np.inf
    t = np.array([0.7, 0, 1, 1, 1, 1, -1], F32)
    got = np.asarray(jax.jit(lambda x, t: filter_logits(x, temperature=t, top_k=5, where=where))(x, t))
    best = np.sort(np.argsort(-x[0], kind="stable")[:5])
    np.testing.assert_array_equal(np.flatnonzero(got[0] > -np.inf), best)
    np.testing.assert_array_equal(got[0, best], x[0, best] / t[0])
    want = np.where(np.arange(300) == np.argmax(x[1]), 0, -np.inf)
    np.testing.assert_array_equal(got[1], want)
    assert np.isnan(got[[2, 3, 6]]).all() and (got[4:6] == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("v", "dtype", "options", "optimized"),
    pairs(
        [300, LONG],
        [F32, BF16, F64, jnp.float8_e5m2],
        [{"top_p": np.float32(0.9), "min_p": 0.01}, {}, {"top_k": 5}],
        [False, True],
    ),
    ids=str,
)
def test_filtered_rows_without_a_draw(v, dtype, options, optimized):
    """A failed row is NaN at every temperature, with every filter, even where XLA's maximum loses a NaN."""
    jax.config.update("jax_disable_most_optimizations", not optimized)
    x, t = rows_without_a_draw(v, dtype), np.array([0, 1e-3, 1], F32)[:, None]
    with jax.enable_x64(dtype == F64):
        for filtered in filter_logits(np.broadcast_to(x, (3, *x.shape)), temperature=t, **options):
            assert_failed_and_empty(filtered)


@pytest.mark.slow
def test_filtered_at_a_known_temperature_of_0():
    """A failed row is NaN, and so is every row with a filter out of range."""
    x = rows_without_a_draw(300, F32)
    f = jax.jit(lambda p: filter_logits(x, temperature=0.0, top_p=p))
    assert_failed_and_empty(f(1.0))
    assert np.isnan(f(2.0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_min_p_keeps_numbers_that_a_cpu_takes_for_0(dtype):
    """min_p keeps 0, -0 and subnormal numbers. One row is greedy."""
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    rows = [[0.0, -0.0, tiny, -tiny, -5], [-tiny, 0.0, -0.0, 0.5, -5], [1, 2, 0.5, -tiny, 2]]
    x = np.array(rows, F32).astype(dtype)
    got = np.asarray(ps.filter_logits(x, min_p=0.5, temperature=np.array([1, 1, 0], F32)))
    kept = [[True] * 4 + [False], [True] * 4 + [False], [False, True, False, False, False]]
    np.testing.assert_array_equal(np.isfinite(got), kept)


@pytest.mark.slow
def test_temperatures_whose_quotients_overflow():
    """Logits beyond the range of floats after the division are as at temperature 0."""
    x = np.array([[1, 3, 2, 3], [-3, -1, -2, -1], [0, -1, -1, 0]], F32) * 1e5
    got = assert_categorical(KEY, x, temperature=1e-36)
    np.testing.assert_array_equal(got.indices[:2], [1, 1])
    np.testing.assert_allclose(got.log_probs, -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(got.log_mass[:2], -np.log(2), rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.jit, slow(lambda f: f), slow(lambda f: jax.vmap(f))])
def test_log_mass_has_no_gradient(transform):
    gradient = jax.grad(lambda x: jnp.sum(sample(KEY, x).log_mass))
    with pytest.raises(NotImplementedError, match="sample: log_mass has no gradient; .*stop_gradient"):
        transform(gradient)(jnp.asarray(X[0]))


@pytest.mark.slow
def test_the_tangent_of_log_mass_is_nan():
    _, tangents = jax.jvp(lambda x: sample(KEY, x, top_k=3), (X[0],), (X[0],))
    assert jnp.isnan(tangents.log_mass).all() and jnp.isfinite(tangents.log_probs).all()


@pytest.mark.slow
def test_the_log_mass_with_a_derivative_that_the_documents_give():
    limits = (Path(ps.__file__).parents[1] / "docs/limits.md").read_text()
    (formula,) = re.findall(r"log-mass with a derivative is\s+`(.*)`", limits)
    names = {"x": X[0], "t": 0.7, "w": X[0] < 1}
    got = eval(formula.replace("...", "top_k=9"), vars(ps) | names)
    want = sample(KEY, names["x"], temperature=names["t"], where=names["w"], top_k=9).log_mass
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gradient_of_an_improbable_draw():
    """Its gradient must not overflow."""
    x, t = jnp.array([[0.0, 85.0, 85.0]]), jnp.ones((1, 1))
    index, log_probs = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), -85 - np.log(2), F32)
    dx, dt = jax.jit(xla.sample_grad)((x, t, index, log_probs), None, jnp.ones((1, 1)))
    np.testing.assert_allclose(dx, [[1, -0.5, -0.5]], rtol=1e-5)
    np.testing.assert_allclose(dt, [[85]], rtol=1e-5)


@pytest.mark.slow
def test_logits_of_a_float_without_a_sign():
    x = jnp.asarray([[0.25, 4, 1, 0.5, 2, 1]], "float8_e8m0fnu")
    for f in (functools.partial(sample, KEY, top_k=2), functools.partial(ps.filter_logits, top_p=0.5)):
        assert_equal(f(x), f(x.astype(F32)))
    rank = functools.partial(ps.token_stats, labels=jnp.array([5]), rank=True)
    assert_equal(rank(x), rank(x.astype(F32)))


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_values_that_disable_filters(traced):
    """top_k = 0 and -1 disable top_k. A top_p may exceed 1 by rounding."""
    f = functools.partial(sample, KEY, X[0], temperature=np.array([0.5, 1, 1.5], F32))
    want = f()
    for top_k, top_p in ((0, None), (-1, 1.0), (np.array([0, -1, 300]), 1 + 1e-6)):
        got = jax.jit(f)(top_k=top_k, top_p=top_p) if traced else f(top_k=top_k, top_p=top_p)
        assert_equal(got, want)


good = {"temperature": np.ones(3, F32), "top_k": np.full(3, 9, np.int32)}
good |= {"top_p": np.full(3, 0.8, F32), "min_p": np.full(3, 0.1, F32)}
traced = jax.jit(lambda parameters: sample(jax.random.key_data(KEY), X[0], **parameters))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": np.nan},
        *({"top_k": bad} for bad in (-2, -3)),
        *({"top_p": bad} for bad in (-0.1, 1.01, 1.00001, np.nan)),
        *({"min_p": bad} for bad in (-0.1, 2.0)),
    ],
    ids=str,
)
def test_parameters_out_of_range(bad):
    """A traced number gives -1 and NaN in its row, and other rows do not change."""
    mixed = {of: np.where(np.arange(3) == 1, bad.get(of, a), a).astype(a.dtype) for of, a in good.items()}
    got, want = traced(mixed), traced(good)
    assert got.indices[1] == -1 and np.isnan([got.log_probs[1], got.log_mass[1]]).all()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), got, want)


@pytest.mark.slow
def test_a_traced_top_k_of_64_bits_never_wraps(x64):
    assert traced({"top_k": jnp.array([-(2**32) + 5, 2**32 + 1, 1])}).indices.tolist()[0] == -1
    got, want = (traced({"top_k": jnp.array([1, k, 1])}) for k in (2**32 + 1, 0))
    assert_equal(got, want)


@pytest.mark.slow
def test_parameters_beyond_every_dtype_of_jax():
    """Such filters keep everything, and such a temperature makes all entries equal."""
    x = jnp.tile(jnp.arange(3.0), (3000, 1))
    drawn = sample(KEY, x, top_k=2**64, temperature=2**64).indices
    assert (jnp.abs(jnp.bincount(drawn, length=3) - 1000) < 150).all()
