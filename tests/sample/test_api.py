"""sample: the kept set, the drawn index, the distribution, keys, and bad input."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import pallas_softmax as ps
from pallas_softmax import Sample, sample
from pallas_softmax._src.sample import gradient, xla
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, F64
from tests.support.covering import first, first_values, pairs, slow
from tests.support.draws import LARGEST, NONE, PARAMETERS, all_combinations, assert_draws, chi_square

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(7)


def assert_equal(got, want):
    """Asserts that two draws have the same bits."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@jax.jit
def operation(x, where, *parameters):
    """Runs the operation with a given u; the public function draws u."""
    results = xla.sample(x, where, *(None if a is None else a[..., None] for a in parameters))
    return [a[..., 0] for a in results]


# Rows are long enough for a small top_k to use candidates on a CPU; the other rows of a batch are searched.
LONG = 2**14 + 7
SMALL = pairs(cases.SMALL, [F32, BF16, F16])


# --- Exactness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("v", "dtype"),
    first(1, [(129, F32), (LONG, F32), (LONG, BF16), (2, BF16), (1000, F16), *SMALL]),
    ids=str,
)
def test_every_row_with_every_filter(v, dtype):
    x, _, u, parameters, names = all_combinations(cases.rows(ALL, v, dtype))
    assert_draws(
        operation(x, None, u, *parameters), x, u, [(ALL[i], *rest) for i, *rest in names], parameters
    )


@pytest.mark.parametrize("given", [(1, 1, 1), slow((1, 0, 0)), slow((0, 1, 0)), slow((0, 0, 1))], ids=str)
@pytest.mark.parametrize("v", [40, slow(300), slow(LONG)])
def test_a_row_alone_agrees_with_a_batch(v, given):
    """A row has the same draw in a batch as alone."""
    x, _, u, (t, *filters), names = all_combinations(cases.rows(["normal", "integers", "peaked", "zero"], v))
    where = np.random.default_rng(0).random(x.shape) < 0.8
    filters = [a if wanted else None for a, wanted in zip(filters, given)]
    got = operation(x, where, u, t, *filters)
    assert_draws(got, x, u, names, [t, *filters], where)
    for i in range(0, len(x), 17):
        alone = (None if a is None else a[i : i + 1] for a in (x, where, u, t, *filters))
        same(operation(*alone), [a[i : i + 1] for a in got])


@pytest.mark.slow
@pytest.mark.parametrize("v", [127, 300])
def test_masked_entries_do_not_matter(v):
    """V = 300 is more than a block, and not a multiple of one."""
    x = cases.rows(ALL, v)
    where = np.random.default_rng(0).random(x.shape) < 0.5
    where[0], where[1], where[1, v // 2] = False, False, True
    x, where, u, parameters, names = all_combinations(cases.spoil_masked(x, where), where)
    assert_draws(operation(x, where, u, *parameters), x, u, names, parameters, where)


@pytest.mark.parametrize(
    ("names", "v"),
    [
        slow(["integers", "denormals", "signed_zeros", "neg_inf_last"], LONG),
        slow(["peaked", "constant"], cases.GPT2),
        slow(["normal", "integers", "ascending", "one_winner", "all_but_one_neg_inf"], cases.GPT2),
        slow(["peaked", "constant", "normal", "descending"], cases.LARGE[0]),
    ],
    ids=str,
)
def test_long_rows(names, v):
    """top_p near 1 keeps most of a row, a small top_p keeps one entry, and boundaries are among thousands of ties."""
    x, _, u, parameters, labels = all_combinations(cases.rows(names, v))
    assert_draws(
        operation(x, None, u, *parameters), x, u, [(names[i], *rest) for i, *rest in labels], parameters
    )


@pytest.mark.parametrize(
    "given", first_values(0, [(0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)]), ids=str
)
def test_omitted_filters(given):
    """An omitted filter keeps everything. Without any filter, log_mass is exactly 0."""
    x = cases.rows(list(cases.FINITE), 129)
    u = np.linspace(0, LARGEST, len(x), dtype=F32)
    t, *filters = (np.full(len(x), a, d) for a, d in zip(PARAMETERS["all"], (F32, np.int32, F32, F32)))
    filters = [f if wanted else None for f, wanted in zip(filters, given)]
    got = operation(x, None, u, t, *filters)
    assert_draws(got, x, u, list(cases.FINITE), [t, *filters])
    if not any(given):
        np.testing.assert_array_equal(got[2], 0)


@pytest.mark.slow
def test_filters_keep_ties_with_the_lowest_indices():
    """A filter keeps the first entries of a constant row, exactly, because sums of ones are exact."""
    x, u = np.zeros((4, 1000), F32), np.full(4, LARGEST, F32)
    filters = np.array([300, NONE, 300, NONE], np.int32), np.array([1, 0.25, 0.5, 1], F32), np.zeros(4, F32)
    indices, _, log_mass = operation(x, None, u, np.ones(4, F32), *filters)
    np.testing.assert_array_equal(indices, [299, 249, 149, 999])
    np.testing.assert_allclose(log_mass, np.log([0.3, 0.25, 0.15, 1]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [slow("uint8"), slow("int8"), slow("int32"), slow("uint32")])
def test_integers(dtype):
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.max - 9, info.max, (4, 40), dtype, endpoint=True)
    x[0], x[1, :-1] = info.min, info.min
    x, _, u, parameters, names = all_combinations(x)
    assert_draws(operation(x, None, u, *parameters), x, u, names, parameters)


@pytest.mark.slow
def test_float64(x64):
    names = list(cases.FINITE)
    x = cases.rows(names, 129, F64)
    got = sample(KEY, x, top_k=40, top_p=0.9, min_p=0.01)
    assert got.log_probs.dtype == got.log_mass.dtype == F64
    u = jax.random.uniform(KEY, (len(x),), jnp.float32)
    bounds.assert_sample(got, x, u, names, top_k=40, top_p=0.9, min_p=0.01)
    assert sample(KEY, x.astype(F32)).log_probs.dtype == F32


@pytest.mark.slow
def test_8_bit_floats():
    x = jnp.asarray(cases.rows(["normal", "integers"], 40), jnp.float8_e4m3fn)
    got, u = sample(KEY, x, top_k=9, top_p=0.7), jax.random.uniform(KEY, (2,))
    bounds.assert_sample(got, np.asarray(x, F32), u, range(2), top_k=9, top_p=np.float32(0.7))


def test_the_result_is_a_named_tuple_of_the_batch_shape():
    got = jax.eval_shape(lambda x: sample(KEY, x, axis=1), jnp.zeros((2, 3, 5)))
    assert isinstance(got, Sample)
    assert got.indices.shape == got.log_probs.shape == got.log_mass.shape == (2, 5)
    assert (got.indices.dtype, got.log_probs.dtype, got.log_mass.dtype) == (np.int32, F32, F32)
    for shape in [(3,), (0, 3)]:
        assert jax.eval_shape(lambda x: sample(KEY, x), jnp.zeros(shape)).indices.shape == shape[:-1]


@pytest.mark.slow
def test_axis_and_shapes_of_parameters():
    """A parameter is a scalar, or broadcasts to the batch, or has size 1 along the row."""
    x = cases.rows(list(cases.FINITE)[:6], 20).reshape(6, 4, 5)
    t, p = np.linspace(0.5, 2, 24, dtype=F32).reshape(6, 4), np.linspace(0.2, 0.9, 4, dtype=F32)
    want = sample(KEY, x, temperature=t, top_p=np.broadcast_to(p, (6, 4)), top_k=3)
    for got in (
        sample(KEY, np.moveaxis(x, 2, 1), axis=1, temperature=t[:, None], top_p=p, top_k=np.uint8(3)),
        sample(KEY, np.moveaxis(x, 2, 0), axis=-3, temperature=t, top_p=p[None], top_k=np.full((6, 1), 3)),
    ):
        assert_equal(got, want)
    u = jax.random.uniform(KEY, (6, 4))
    assert_draws(
        [a.reshape(24) for a in want],
        x.reshape(24, 5),
        np.ravel(u),
        range(24),
        [t.ravel(), 3, np.tile(p, 6), None],
    )


# --- Keys ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_key_typed_or_raw():
    x = cases.rows(["normal"] * 4, 50)
    want = sample(KEY, x)
    assert_equal(sample(jax.random.key_data(KEY), x), want)
    u = jax.random.uniform(KEY, (4,))
    bounds.assert_sample(want, x, u, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_for_each_row(impl):
    """A row has the same draw alone, in another batch and at another place, with any generator."""
    x = cases.rows(["normal", "peaked", "integers", "zero"] * 2, 300).reshape(4, 2, 300)
    keys = jax.random.split(jax.random.key(3, impl=impl), (4, 2))
    got = sample(keys, x, temperature=1.5, top_p=0.9)
    assert_equal(sample(keys, x, temperature=1.5, top_p=0.9), got)
    for i, j in [(0, 0), (1, 1), (3, 0)]:
        alone = sample(keys[i, j], x[i, j], temperature=1.5, top_p=0.9)
        assert_equal(alone, [a[i, j] for a in got])
    assert_equal([a[::-1] for a in sample(keys[::-1], x[::-1], temperature=1.5, top_p=0.9)], got)
    u = [jax.random.uniform(key) for key in keys.reshape(-1)]
    bounds.assert_sample(
        [a.reshape(-1) for a in got],
        x.reshape(8, 300),
        np.array(u),
        range(8),
        temperature=1.5,
        top_p=np.float32(0.9),
    )


# --- Distribution -------------------------------------------------------------------------------------


FILTERS = {
    "none": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}


def drawn(x, n, batch, filters):
    """Returns how often n draws pick each entry of a row."""
    draw = jax.jit(lambda key: sample(key, jnp.broadcast_to(x, (batch, x.size)), **filters).indices)
    counts = np.zeros(x.size)
    for key in jax.random.split(KEY, n // batch):
        counts += np.bincount(draw(key), minlength=x.size)
    return counts


@pytest.mark.parametrize(("name", "n"), [slow("all", 10_000), *(slow(name, 1_000_000) for name in FILTERS)])
def test_the_distribution(name, n):
    x, filters = np.random.default_rng(1).standard_normal(32).astype(F32) * 2, FILTERS[name]
    temperature = filters.get("temperature", 1.0)
    _, mass = oracle.sample_terms(x[None], None, temperature)
    mass = np.where(oracle.sample_kept(x[None], **filters), mass, 0)[0]
    assert abs(chi_square(drawn(x, n, min(n // 4, 20_000), filters), mass / mass.sum())) < 5


@pytest.mark.slow
def test_the_distribution_of_a_peaked_vocabulary():
    """A CPU is slow, so it makes few draws; test_gpu.py makes a million."""
    x = cases.rows(["peaked"], cases.LARGE[0])[0] / 4
    _, mass = oracle.sample_terms(x[None], None, 1.0)
    mass = np.where(oracle.sample_kept(x[None], top_p=0.99), mass, 0)[0]
    assert abs(chi_square(drawn(x, 1_280, 64, {"top_p": 0.99}), mass / mass.sum())) < 5


# --- Transformations ----------------------------------------------------------------------------------

X = cases.rows(["normal", "peaked", "integers"] * 2, 300).reshape(2, 3, 300)
KEYS = jax.random.split(KEY, (2, 3))
T = np.linspace(0.5, 1.5, 6, dtype=F32).reshape(2, 3)


def draw(key, x, t):
    return sample(key, x, temperature=t, top_k=50, top_p=0.9)


def same(got, want):
    """Asserts that the draws are the same. Another program may round the sums differently."""
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(np.stack(got[1:]), np.stack(want[1:]), rtol=1e-5, atol=1e-6)


@functools.cache
def expected():
    return jax.tree.map(np.asarray, draw(KEYS, X, T))


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "vmap_of_vmap": lambda f: jax.vmap(jax.vmap(f)),
    "vmap_of_last": lambda f: jax.vmap(f, in_axes=(1, 1, 1), out_axes=1),
    "scan": lambda f: lambda *args: lax.scan(lambda c, a: (c, f(*a)), 0, args)[1],
    "checkpoint": jax.checkpoint,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformed(name):
    same(TRANSFORMS[name](draw)(KEYS, X, T), expected())


@pytest.mark.slow
def test_vmap_of_a_shared_argument():
    """vmap over keys with shared logits, and over temperatures with a shared row."""
    got = jax.vmap(draw, (0, None, None))(KEYS, X[0], T[0])
    same(got, draw(KEYS, np.stack([X[0], X[0]]), np.stack([T[0], T[0]])))
    got = jax.vmap(draw, (None, None, 0))(KEYS[0, 0], X[0, 0], T[0])
    same(got, [np.stack(a) for a in zip(*(draw(KEYS[0, 0], X[0, 0], t) for t in T[0]))])


def log_probs_at(indices, x, t):
    """Returns the expected `log_probs` in plain JAX."""
    scaled = jnp.asarray(x, F32) / jnp.expand_dims(t, -1)
    return jnp.take_along_axis(jax.nn.log_softmax(scaled), indices[..., None], -1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradient_of_log_probs(masked, shared):
    """Derivatives of log_probs, which REINFORCE needs: for logits and temperature, in both modes, to second order."""
    x, t = jnp.asarray(X[0]), jnp.float32(0.7) if shared else T[0]
    where = np.arange(300) % 5 != 0 if masked else None
    options = {"top_p": 0.9, "where": where}
    x = x if where is None else jnp.where(where, x, jnp.nan)
    indices = sample(KEY, x, temperature=t, **options).indices

    def ours(x, t):
        return sample(KEY, x, temperature=t, **options).log_probs

    def reference(x, t):
        return log_probs_at(indices, x if where is None else jnp.where(where, x, -1e9), t)

    g = jnp.arange(1.0, 4.0)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6)
    (dx, dt), (want_dx, want_dt) = (jax.vjp(f, x, t)[1](g) for f in (ours, reference))
    close(dt, want_dt)
    close(dx, want_dx if where is None else jnp.where(where, want_dx, 0))
    tangents = jnp.where(jnp.isnan(x), 0, x), jnp.ones_like(t)
    got, want = (jax.jvp(f, (x, t), tangents)[1] for f in (ours, reference))
    close(got, want)
    second = [
        jax.grad(lambda t, f=f: jax.grad(lambda t: f(x, t).sum())(t).sum())(t) for f in (ours, reference)
    ]
    close(*second, rtol=1e-3)


def test_reinforce_learns():
    """The mean reward rises. The gradient was once zero, and the policy stayed uniform."""
    reward = jnp.arange(8.0) == 5

    @jax.jit
    def step(logits, key):
        def surrogate(logits):
            drawn = sample(jax.random.split(key, 64), jnp.broadcast_to(logits, (64, 8)))
            return jnp.mean((reward[drawn.indices] - 0.125) * drawn.log_probs)

        return logits + 4 * jax.grad(surrogate)(logits)

    logits = jnp.zeros(8)
    for key in jax.random.split(KEY, 40):
        logits = step(logits, key)
    assert jax.nn.softmax(logits)[5] > 0.9


@pytest.mark.parametrize("transform", [slow(lambda f: f), jax.jit, slow(lambda f: jax.vmap(f))])
def test_log_mass_has_no_gradient(transform):
    def loss(x):
        got = sample(KEY, x, top_k=3)
        return jnp.sum(got.log_probs - got.log_mass)

    f = transform(jax.grad(loss))
    with pytest.raises(NotImplementedError, match="sample: log_mass has no gradient; .*stop_gradient"):
        f(jnp.asarray(X[0]))
    _, tangents = jax.jvp(lambda x: sample(KEY, x, top_k=3), (X[0],), (X[0],))
    assert jnp.isnan(tangents.log_mass).all() and jnp.isfinite(tangents.log_probs).all()


def test_gradient_at_temperature_0_and_of_rows_without_a_draw():
    x = jnp.stack([X[0, 0], jnp.full(300, jnp.nan), jnp.full(300, -jnp.inf)])
    dx = jax.grad(lambda x: sample(KEY, x, temperature=jnp.array([0.0, 1.0, 1.0])).log_probs.sum())(x)
    np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("mode", [slow("grad"), "jvp of grad", slow("grad of jvp")])
def test_a_row_without_a_draw_has_derivatives_of_0(mode):
    """Its NaN passes through exp before it is dropped."""
    x = np.array(X[0, :1].repeat(6, 0))
    x[1, 3], x[2, 3] = np.nan, np.inf
    where = np.ones(x.shape, bool)
    where[3] = False
    t = np.array([1, 1, 1, 1, -1, np.nan], F32)

    def f(x, t):
        got = sample(KEY, x, temperature=t, where=where).log_probs
        return jnp.sum(jnp.where(jnp.isfinite(got), jnp.exp(got), 0))

    def moved(x, t):
        return jax.jvp(f, (x, t), (jnp.ones_like(x).at[:, 0].set(0), jnp.ones_like(t)))[1]

    def of_gradient(x, t):
        return jax.jvp(jax.grad(f, (0, 1)), (x, t), (jnp.ones_like(x).at[:, 0].set(0), jnp.ones_like(t)))[1]

    function = {
        "grad": jax.grad(f, (0, 1)),
        "jvp of grad": of_gradient,
        "grad of jvp": jax.grad(moved, (0, 1)),
    }
    for d in jax.jit(function[mode])(x, t):
        assert np.isfinite(d).all() and not d[1:].any() and d[0].any()


@pytest.mark.parametrize("v", [300, slow(LONG)])
def test_the_probability_of_a_draw_is_at_most_1(v):
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((500, v)), F32)
    for filters in (
        {"top_k": 1},
        {"top_k": 3, "top_p": 0.5},
        {"top_p": 0.01},
        {"min_p": 0.9},
        {"temperature": 0},
    ):
        _, log_probs, log_mass = sample(KEY, x, **filters)
        assert (log_probs <= log_mass).all(), filters


def test_gradient_of_an_improbable_draw():
    """u = 0 draws the first entry with mass, however improbable. Its gradient must not overflow."""
    x, t = jnp.array([[0.0, 85.0, 85.0]]), jnp.ones((1, 1))
    u = jnp.zeros((1, 1))
    index, log_probs, _ = xla.sample(x, None, u, t, None, None, None)
    assert index[0, 0] == 0 and log_probs[0, 0] < -85
    dx, dt = gradient.sample_grad((x, t, index, log_probs), None, jnp.ones((1, 1)))
    np.testing.assert_allclose(dx, [[1, -0.5, -0.5]], rtol=1e-5)
    np.testing.assert_allclose(dt, [[85]], rtol=1e-5)


def test_4_bit_logits():
    x = jnp.asarray(X[0], "float4_e2m1fn")
    assert_equal(sample(KEY, x, top_p=0.9), sample(KEY, x.astype(F32), top_p=0.9))


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_values_that_disable_filters(traced):
    """top_k = 0 and -1 disable top_k. A top_p may exceed 1 by rounding."""
    f = functools.partial(sample, KEY, X[0], temperature=T[0])
    want = f()
    for top_k, top_p in ((0, None), (-1, 1.0), (np.array([0, -1, 300]), 1 + 1e-6)):
        got = jax.jit(f)(top_k=top_k, top_p=top_p) if traced else f(top_k=top_k, top_p=top_p)
        assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["b, 300", "2, 3, v"])
def test_export(shape):
    """Exports with a symbolic batch or vocabulary."""
    x = X.reshape(6, 300) if shape[0] == "b" else X
    t, key = T[0, 0], jax.random.key_data(KEY)
    like = jax.ShapeDtypeStruct(export.symbolic_shape(shape), F32)
    stored = export.export(jax.jit(lambda x: draw(key, x, t)))(like)
    got = export.deserialize(stored.serialize()).call(x)
    assert isinstance(got, Sample)
    same(got, draw(key, x, t))


@pytest.mark.slow
def test_donated_buffers():
    x = jnp.array(X)
    got = jax.jit(lambda x: (draw(KEYS, x, T), x + 1), donate_argnums=0)(x)[0]
    same(got, expected())


# --- Implementations ----------------------------------------------------------------------------------


def test_choice():
    """On the CPU, or if named, plain JAX runs without a sort of rows. Triton has no kernel, and says so."""
    x = jax.ShapeDtypeStruct((64, 50257), F32)
    (choice,) = ps.explain(lambda x: draw(KEY, x, 1.0), x)
    assert (choice.call.op, choice.elsewhere) == ("sample", "xla")
    with pytest.raises(NotImplementedError, match="'triton' cannot run sample.*no kernel for sample"):
        jax.eval_shape(lambda x: sample(KEY, x, implementation="triton"), x)
    text = jax.jit(lambda x: sample(KEY, x, top_k=50, top_p=0.9, implementation="xla")).lower(x).as_text()
    sorted_types = re.findall(r'"stablehlo\.sort".*?\}\) : \(([^)]*)\)', text, re.DOTALL)
    assert sorted_types and not any("50257" in types for types in sorted_types)


# --- Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"top_k": -2},
        {"top_k": -3},
        {"top_p": -0.1},
        {"top_p": 1.01},
        {"top_p": 1.00001},
        {"top_p": np.nan},
        {"min_p": -0.1},
        {"min_p": 2.0},
    ],
    ids=str,
)
def test_parameters_out_of_range(bad):
    """A concrete number raises. A traced number gives -1 and NaN in its row, and other rows do not change."""
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"sample: {name} must be .*, got {value}"):
        sample(KEY, X[0], **bad)
    good = {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
    good = {of: np.full(3, a) for of, a in good.items()}
    mixed = {of: np.where(np.arange(3) == 1, bad.get(of, a), a) for of, a in good.items()}
    got, want = traced(mixed), traced(good)
    assert got.indices[1] == -1 and np.isnan([got.log_probs[1], got.log_mass[1]]).all()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::2], b[::2]), got, want)


traced = jax.jit(lambda parameters: sample(KEY, X[0], **parameters))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"temperature": None}, TypeError, "temperature must be an array or a scalar, got None"),
        ({"temperature": [1.0]}, TypeError, "temperature must be an array or a scalar"),
        (
            {"temperature": 1j},
            TypeError,
            "temperature must be a real number, or one per row, got complex128",
        ),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, or one per row, got float64"),
        ({"top_k": True}, TypeError, "top_k must be an integer, or one per row, got bool"),
        ({"top_p": "0.9"}, TypeError, "top_p must be an array or a scalar"),
        (
            {"top_p": np.ones(2)},
            ValueError,
            r"top_p must be .* the batch shape \(3,\), got \(2,\)",
        ),
        ({"min_p": np.ones((3, 300))}, ValueError, "min_p must be a scalar or broadcast to the batch"),
        ({"where": np.ones(300)}, ValueError, "where must be None or boolean"),
        ({"axis": 2}, ValueError, "axis 2 is out of bounds"),
        ({"axis": (0, 1)}, TypeError, "axis must be an integer"),
        ({"axis_name": "v"}, ValueError, "axis_name must name mesh axes"),
        ({"implementation": "cuda"}, ValueError, "implementation must be None"),
        ({"key": 0}, TypeError, "key must be a key of jax.random"),
        ({"key": KEYS}, ValueError, r"key must be one key or have the batch shape \(3,\), got \(2, 3\)"),
        ({"key": np.zeros((3, 2), np.uint32)}, TypeError, "an array of keys must be typed"),
        ({"key": np.zeros(2, F32)}, TypeError, "key must be a key of jax.random"),
        ({"logits": np.ones((3, 4), bool)}, TypeError, "logits must be a float or integer array, got bool"),
        ({"logits": np.ones((3, 4), np.complex64)}, TypeError, "logits must be a float or integer array"),
        ({"logits": np.ones((3, 0), F32)}, ValueError, r"logits of shape \(3, 0\) have nothing to draw"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input(arguments, error, message):
    arguments = {"key": KEY, "logits": X[0]} | arguments
    with pytest.raises(error, match=message):
        sample(arguments.pop("key"), arguments.pop("logits"), **arguments)


@pytest.mark.slow
def test_a_large_top_k_and_scalars_of_all_types():
    """A top_k beyond int32 keeps everything."""
    want = sample(KEY, X[0])
    for top_k in (2**40, np.int64(2**40), 300):
        jax.tree.map(np.testing.assert_array_equal, sample(KEY, X[0], top_k=top_k).indices, want.indices)
    sample(KEY, X[0], temperature=np.float16(1), top_p=1, min_p=jnp.float32(0), top_k=jnp.uint8(3))


@pytest.mark.parametrize("filters", [slow({"top_k": 9}), slow({"top_p": 0.9}), {"min_p": 0.5}], ids=str)
def test_without_jit(filters):
    x = jnp.sin(jnp.arange(100.0)).reshape(2, 50)
    want = sample(KEY, x, **filters)
    with jax.disable_jit():
        same(sample(KEY, x, **filters), want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strict_promotion_in_64_bits(dtype, x64):
    x, filters = (
        jnp.sin(jnp.arange(2100.0)).reshape(3, 700).astype(dtype),
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    )
    want = sample(KEY, x, **filters)
    with jax.numpy_dtype_promotion("strict"):
        same(sample(KEY, x, **filters), want)


@pytest.mark.parametrize(("vocab", "top_k", "mass"), [(4, 4, 4), (1000, 1000, 1000), (1000, 64, 64)])
def test_a_draw_on_a_boundary_takes_the_next_entry(vocab, top_k, mass):
    """Cumulative masses of equal entries are exact. If u times the total equals a mass, the next entry is drawn."""
    first = np.arange(0, mass, max(1, mass // 8))
    u = (first / mass).astype(F32)
    exact = u * np.float32(mass) == first
    parameters = [np.ones(len(u), F32), np.full(len(u), top_k, np.int32), None, None]
    indices = operation(np.zeros((len(u), vocab), F32), None, u, *parameters)[0]
    np.testing.assert_array_equal(np.ravel(indices)[exact], first[exact])
    assert exact.sum() > 2


def test_no_rows_with_parameters_per_row():
    out = sample(KEY, jnp.zeros((0, 5)), temperature=jnp.ones(0), top_k=jnp.ones(0, int))
    assert out.indices.shape == (0,)


def test_the_smallest_temperatures_draw():
    """Temperature 0 takes the first of equal entries. XLA for CPUs treats numbers below 1.2e-38 as 0."""
    for temperature in (1e-38, np.float64(1e-300)):
        drawn = sample(KEY, jnp.zeros((1000, 2)), temperature=temperature).indices
        assert 400 < int(drawn.sum()) < 600


def test_parameters_beyond_every_dtype_of_jax():
    """Such filters keep everything, and such a temperature makes all entries equal."""
    x = jnp.tile(jnp.arange(3.0), (3000, 1))
    drawn = sample(KEY, x, top_k=2**64, temperature=2**64).indices
    assert (jnp.abs(jnp.bincount(drawn, length=3) - 1000) < 150).all()
