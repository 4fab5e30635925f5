"""verify: the distribution of its tokens, rounding, greedy rows, drafts that are no tokens, masks, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pallas_softmax as ps
from pallas_softmax import verify
from pallas_softmax._src.sample import xla
from tests.support.covering import first_values, slow
from tests.support.draws import chi_square

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
S, V = 3, 5
RNG = np.random.default_rng(0)
TARGET = (1.5 * RNG.standard_normal((S + 1, V))).astype(np.float32)
LOG_Q = np.asarray(jax.nn.log_softmax(RNG.standard_normal((S, V)).astype(np.float32)))


def drafts_of(rows, log_q):
    """Returns drafts (rows, S), drawn from the distributions of the draft model, or its best tokens."""
    if log_q is None:
        return np.tile(TARGET[:-1].argmax(-1).astype(np.int32), (rows, 1))
    return jax.random.categorical(jax.random.key(7), jnp.asarray(log_q), shape=(rows, S))


@pytest.mark.slow
@pytest.mark.parametrize("given", [slow({}), slow({"top_k": 3}), {"top_p": 0.7, "temperature": 0.8}], ids=str)
@pytest.mark.parametrize("log_q", [LOG_Q, slow(None)], ids=["drawn", "chosen"])
@pytest.mark.parametrize("each_row", [slow(False), True], ids=["one key", "keys per row"])
def test_tokens_have_the_distribution_of_the_target(given, log_q, each_row):
    """Each token that is there, whatever comes before it, is a draw from the filtered target at its position."""
    rows = 20_000
    key = jax.random.split(KEY, rows) if each_row else KEY
    x = np.broadcast_to(TARGET, (rows, S + 1, V))
    q = None if log_q is None else np.broadcast_to(log_q, (rows, S, V))
    tokens, accepted = (np.asarray(a) for a in verify(key, drafts_of(rows, log_q), x, q, **given))
    p = np.asarray(jax.nn.softmax(ps.filter_logits(TARGET, **given)), np.float64)
    for position in range(S + 1):
        there = tokens[:, position][tokens[:, position] >= 0]
        np.testing.assert_array_equal(tokens[:, position] >= 0, position <= accepted)
        if len(there) > 500:
            assert chi_square(np.bincount(there, minlength=V), p[position] / p[position].sum()) < 5
    assert (accepted > 0).mean() > 0.1


@pytest.mark.slow
def test_all_drafts_of_the_target_itself_are_accepted():
    rows, log_p = 1000, np.asarray(jax.nn.log_softmax(TARGET))
    drafts = jax.random.categorical(jax.random.key(5), log_p[:-1], shape=(rows, S))
    q = np.broadcast_to(log_p[:-1], (rows, S, V))
    tokens, accepted = verify(KEY, drafts, np.broadcast_to(TARGET, (rows, S + 1, V)), q)
    assert (accepted == S).mean() > 0.999  # the rest: probabilities that are rounded in two ways
    assert (np.asarray(tokens) >= 0).all(-1)[np.asarray(accepted) == S].all()


@pytest.mark.parametrize("draft", [0, slow(1), slow(2)])
def test_chosen_drafts_are_accepted_with_their_probability(draft):
    """In the place of a rejected draft is never the draft, but a draw from the others."""
    rows, p = 4000, np.asarray(jax.nn.softmax(TARGET[0]), np.float64)
    x, drafts = np.broadcast_to(TARGET[:2], (rows, 2, V)), np.full((rows, 1), draft)
    tokens, accepted = (np.asarray(a) for a in verify(KEY, drafts, x))
    assert chi_square(np.bincount(accepted, minlength=2), np.array([1 - p[draft], p[draft]])) < 5
    new = np.bincount(tokens[accepted == 0, 0], minlength=V)
    assert new[draft] == 0
    others = np.arange(V) != draft
    assert chi_square(new[others], p[others] / (1 - p[draft])) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"top_k": 1}, {"where": np.arange(V) == 2}, {"min_p": 1.0, "temperature": 3}], ids=str
)
def test_chosen_drafts_of_probability_1_and_0(given):
    """The only token that is kept is always accepted; a draft that is not kept never is."""
    target, rows = np.where(np.arange(V) == 2, TARGET.max() + 1, TARGET[:2]), 2000
    x = np.broadcast_to(target, (rows, 2, V))
    for draft in range(V):
        tokens, accepted = verify(KEY, np.full((rows, 1), draft), x, **given)
        assert (accepted == (draft == 2)).all()
        assert (tokens == np.array([2, 2 if draft == 2 else -1])).all()


@pytest.mark.parametrize("v", [V, slow(600)])
def test_the_new_token_is_of_the_target_if_nothing_is_left(v):
    """Here q is greater than p everywhere, as it may be by rounding."""
    rows = 4000
    target = np.where(np.arange(v) % (v // V) == 0, np.resize(TARGET[0], v), -np.inf).astype(np.float32)
    p = np.asarray(jax.nn.softmax(target), np.float64)
    x, q = (
        np.broadcast_to(target, (rows, 2, v)),
        np.broadcast_to(jax.nn.log_softmax(target) + 1, (rows, 1, v)),
    )
    tokens, accepted = (np.asarray(a) for a in verify(KEY, np.full((rows, 1), p.argmax()), x, q))
    assert chi_square(np.bincount(tokens[accepted == 0, 0], minlength=v), p / p.sum()) < 5


# Greater than p, by rounding, except where p is 0.
Q_OF_A_PEAK = np.log(np.array([1e-12, 1, 1e-10, 1e-12], np.float32))


@pytest.mark.parametrize("other", [-np.inf, slow(-1000), -80, slow(-87.3), slow(-87.4)])
@pytest.mark.parametrize(
    "q", [Q_OF_A_PEAK, slow(np.array([-np.inf, 0, -20, -np.inf], np.float32))], ids=["", "zeros"]
)
def test_the_new_token_has_mass(q, other):
    """If rounding leaves little or nothing of p - q, the new token is still one of positive p, and not the draft."""
    x = np.broadcast_to(np.array([other, 0, other, other], np.float32), (50, 2, 4))
    tokens, accepted = verify(KEY, np.full((50, 1), 2), x, np.broadcast_to(q, (50, 1, 4)))
    assert (accepted == 0).all()
    possible = [1] if np.isfinite(q).all() or other < -100 else [0, 1, 3]
    assert np.isin(tokens[:, 0], possible).all()


def test_masses_may_round_in_two_ways():
    """The draw takes a chunk by one computation of the masses, and the token by another one."""
    mass = np.zeros((200, 600), np.float32)
    mass[:, 300], mass[:, [310, 320]] = 2.0**-30, -0.5
    mass[:, 7] = -1  # in a chunk that is not drawn
    again = np.where(mass > 0, -(2.0**-30), mass)
    noise = jax.random.gumbel(KEY, (200, xla.noise_of_mass(600)))
    drawn = np.asarray(xla.draw_by_mass(mass, again, noise))
    assert {310, 320} <= set(drawn[:, 0]) <= {300, 310, 320}
    assert (xla.draw_by_mass(mass * 0, again, noise) == -1).all()
    assert (xla.draw_by_mass(np.where(mass == -1, np.nan, mass), again, noise) == -1).all()


@pytest.mark.slow
def test_no_rounding_of_large_logits():
    """p depends on the differences of logits only, however large logits / temperature are."""
    rows, x = 500, np.array([0, 1, 2, 0], np.float32)
    q = np.broadcast_to(np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32)), (rows, 1, 4))
    drafts = np.arange(rows)[:, None] % 4

    def run(x, q, temperature):
        return verify(KEY, drafts, np.broadcast_to(x, (rows, 2, 4)), q, temperature=temperature)

    want = [run(x, given, 1.0) for given in (None, q)]
    for shift, t in (
        (50, 2.0**-16),
        (-50, 2.0**-16),
        (1e4, 2.0**-10),
        (2.0**25, 4),
        (-(2.0**25), 4),
        (2.0**100, 2.0**80),
    ):
        got = [run(x * np.float32(t) + np.float32(shift), given, t) for given in (None, q)]
        jax.tree.map(np.testing.assert_array_equal, got, want)
    got = [run(np.array([0, 1, 2, 0]) + 2**30, given, 1.0) for given in (None, q)]  # integers
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("v", [1003, 256, 257, 512])
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_rows_of_several_chunks(v, drawn):
    """A token is drawn as a chunk and a place in it. Masses vary between chunks and within them."""
    rows, rng = 3000, np.random.default_rng(1)
    chunks = np.repeat(rng.standard_normal(-(-v // 16)), 16)[:v]
    target = (2 * chunks + 2 * rng.standard_normal(v)).astype(np.float32)
    p = np.asarray(jax.nn.softmax(target), np.float64)
    p /= p.sum()
    q = 0.5 * p + 0.5 / v
    x = np.broadcast_to(target, (rows, 2, v))
    if drawn:
        drafts = rng.choice(v, (rows, 1), p=q)
        tokens, _ = verify(KEY, drafts, x, np.broadcast_to(np.log(q), (rows, 1, v)))
    else:
        tokens, _ = verify(KEY, np.full((rows, 1), p.argmax()), x)
    # the tokens of small p in groups, by chunks of 256 and by their places in them
    small = p < 5 / rows
    group = np.where(small, v + np.arange(v) // 256 * 8 + np.arange(v) % 256 // 32, np.arange(v))
    expected = np.bincount(group, p)
    counts = np.bincount(group[np.asarray(tokens)[:, 0]], minlength=len(expected))
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 5


@pytest.mark.parametrize("q", [slow(None), LOG_Q], ids=["chosen", "drawn"])
def test_temperature_0_takes_the_greedy_tokens(q):
    best = TARGET.argmax(-1)
    for wrong in range(S + 1):
        drafts = np.where(np.arange(S) < wrong, best[:-1], (best[:-1] + 1) % V)
        tokens, accepted = verify(KEY, drafts, TARGET, q, temperature=0.0)
        assert accepted == wrong
        np.testing.assert_array_equal(tokens, np.where(np.arange(S + 1) <= wrong, best, -1))


@pytest.mark.parametrize(
    ("q", "bad"),
    [
        (LOG_Q, -1),
        slow(None, -1),
        slow(None, V),
        slow(LOG_Q, -7),
        slow(LOG_Q, V),
        slow(LOG_Q, 2**40),
        slow(LOG_Q, "impossible"),
    ],
    ids=["drawn--1", "chosen--1", "chosen-V", "drawn--7", "drawn-V", "drawn-wide", "drawn-impossible"],
)
def test_drafts_that_are_no_tokens_end_the_row(q, bad):
    """The token in the place of such a draft is a draw from the target itself."""
    drafts = TARGET.argmax(-1)[:-1].astype(np.int64)
    drafts[1] = 2 if bad == "impossible" else bad
    if bad == "impossible":
        q = LOG_Q.copy()
        q[1, 2] = -np.inf
    keys, x = jax.random.split(KEY, 3000), np.broadcast_to(TARGET, (3000, S + 1, V))
    q = None if q is None else np.broadcast_to(q, (3000, S, V))
    tokens, accepted = (np.asarray(a) for a in verify(keys, np.broadcast_to(drafts, (3000, S)), x, q))
    assert {1} <= set(accepted) <= {0, 1}
    second = tokens[accepted == 1, 1]
    p = np.asarray(jax.nn.softmax(TARGET[1]), np.float64)
    assert chi_square(np.bincount(second, minlength=V), p / p.sum()) < 5


@pytest.mark.parametrize("q", [None, slow(np.zeros((S, V), np.float32) - np.log(V))], ids=["chosen", "drawn"])
@pytest.mark.parametrize(
    ("logit", "given"),
    [(np.nan, {}), slow(np.inf, {}), slow(None, {"top_p": np.array([1, 7.0, 1, 1])})],
    ids=str,
)
def test_a_position_without_a_distribution_gives_minus_1(q, logit, given):
    x = TARGET.copy()
    x[:, 0] = 30  # so that all good drafts are accepted
    if logit is not None:
        x[1, 3] = logit
    q = None if q is None else np.where(np.arange(V) == 0, np.log(0.5), q - 1).astype(np.float32)
    tokens, accepted = jax.jit(verify)(KEY, np.zeros(S, int), x, q, **given)  # traced
    assert accepted == 1
    np.testing.assert_array_equal(tokens, [0, -1, -1, -1])


@pytest.mark.parametrize("q", [None, slow(LOG_Q)], ids=["chosen", "drawn"])
@pytest.mark.parametrize("shape", first_values(1, [(1,), (2, S + 1, 1), (1, 1, V)]), ids=str)
def test_a_mask_broadcasts(shape, q):
    """A mask with a last dimension of 1 masks whole positions."""
    x, drafts = np.stack([TARGET, TARGET - 1]), np.tile(TARGET.argmax(-1)[:-1], (2, 1))
    q = None if q is None else np.stack([q, q])
    masks = np.stack(
        [np.ones(shape, bool), np.zeros(shape, bool), np.random.default_rng(0).random(shape) < 0.7]
    )
    run = lambda where: verify(KEY, drafts, x, q, where=where, temperature=0.1)  # noqa: E731
    want = jax.tree.map(
        lambda *rows: np.stack(rows), *(run(np.broadcast_to(mask, x.shape)) for mask in masks)
    )
    for i, mask in enumerate(masks):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i]), run(mask), want)
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(run)(masks), want)


def test_a_row_with_nothing_kept_gives_minus_1():
    tokens, accepted = verify(KEY, np.zeros(S, int), TARGET, LOG_Q, where=np.zeros(V, bool))
    assert accepted == 0
    np.testing.assert_array_equal(tokens, -1)


@pytest.mark.slow
@pytest.mark.parametrize("q", [None, LOG_Q], ids=["chosen", "drawn"])
def test_parameters_are_per_row_or_per_position(q):
    rows = 4
    x, drafts = np.broadcast_to(TARGET, (rows, S + 1, V)), drafts_of(rows, None)
    q = None if q is None else np.broadcast_to(q, (rows, S, V))
    keys = jax.random.split(KEY, rows)
    per_row = {"temperature": np.array([0, 0.5, 1, 2]), "top_k": np.array([1, 2, 3, -1])}
    per_position = {name: np.broadcast_to(a[:, None], (rows, S + 1)) for name, a in per_row.items()}
    got, same = verify(keys, drafts, x, q, **per_row), verify(keys, drafts, x, q, **per_position)
    jax.tree.map(np.testing.assert_array_equal, got, same)
    for i in range(rows):  # a row does not depend on the others
        alone = verify(
            keys[i : i + 1], drafts[i : i + 1], x[i : i + 1], None if q is None else q[i : i + 1],
            **{name: a[i] for name, a in per_row.items()},
        )  # fmt: skip
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b[0]), got, alone)


@pytest.mark.slow
@pytest.mark.parametrize("q", [None, LOG_Q], ids=["chosen", "drawn"])
def test_vmap_and_jit(q):
    rows = 3
    keys = jax.random.split(KEY, rows)
    x, drafts = TARGET + np.arange(rows, dtype=np.float32)[:, None, None] / 8, drafts_of(rows, None)
    mapped = jax.jit(jax.vmap(functools.partial(verify, draft_log_probs=q)))(keys, drafts, x)
    for i in range(rows):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_array_equal(a[i], b),
            mapped,
            verify(keys[i], drafts[i], x[i], q),
        )


@pytest.mark.slow
def test_a_setting_of_the_noise_makes_another_program():
    """A program that was compiled before jax_high_dynamic_range_gumbel changed is not used after."""
    keys, x = jax.random.split(KEY, 100), np.broadcast_to(TARGET, (100, S + 1, V))
    drafts = np.zeros((100, S), int)
    before = verify(keys, drafts, x).tokens
    changed = jax.config.jax_high_dynamic_range_gumbel
    try:
        jax.config.update("jax_high_dynamic_range_gumbel", not changed)
        after, again = (f(keys, drafts, x).tokens for f in (verify, jax.jit(verify.__wrapped__)))
    finally:
        jax.config.update("jax_high_dynamic_range_gumbel", changed)
    assert (after != before).any()
    np.testing.assert_array_equal(after, again)


@pytest.mark.slow
@pytest.mark.parametrize(("q", "symbolic"), [(None, True), (LOG_Q, False)], ids=["chosen", "drawn"])
def test_export_round_trip(q, symbolic):
    """One module for the CPU and CUDA; with a symbolic batch it holds no kernel."""
    rows, v = 4, 512
    x = np.tile(TARGET, (rows, 1, v // V + 1))[..., :v]
    arrays = [jax.random.key_data(KEY), np.zeros((rows, S), np.int32), x]
    arrays += [] if q is None else [np.asarray(jax.nn.log_softmax(x[:, :-1]))]
    (n,) = export.symbolic_shape("n") if symbolic else (rows,)
    shapes = [jax.ShapeDtypeStruct((n, *a.shape[1:]) if a.ndim > 1 else a.shape, a.dtype) for a in arrays]
    f = jax.jit(functools.partial(verify, top_p=0.9))
    stored = export.export(f, platforms=("cpu", "cuda"))(*shapes)
    loaded = export.deserialize(bytearray(stored.serialize()))
    got = loaded.call(*arrays)
    assert isinstance(got, ps.Verified)
    jax.tree.map(np.testing.assert_array_equal, got, f(*arrays))
    assert ("mosaic_gpu" in loaded.mlir_module()) != symbolic


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "uint32"])
def test_drafts_of_every_integer_dtype(dtype):
    target, drafts = TARGET[:2], np.array([TARGET[0].argmax()])
    tokens, accepted = verify(KEY, drafts.astype(jnp.dtype(dtype)), target, temperature=0.0)
    np.testing.assert_array_equal(tokens, target.argmax(-1))
    assert accepted == 1
    if jnp.iinfo(dtype).min:
        assert verify(KEY, (drafts * 0 - 1).astype(jnp.dtype(dtype)), target, temperature=0.0).accepted == 0


@pytest.mark.slow
@pytest.mark.parametrize(("q", "dtype"), [(None, "int4"), (LOG_Q, "int32")], ids=["chosen", "drawn"])
def test_logits_of_integers(q, dtype):
    target, drafts = np.round(TARGET + 3).clip(0, 7), np.array([1, V, 2])
    got, want = (verify(KEY, drafts, target.astype(jnp.dtype(of)), q, top_k=4) for of in (dtype, "float32"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_no_drafts():
    x = np.broadcast_to(TARGET[:1], (3000, 1, V))
    tokens, accepted = verify(KEY, np.zeros((3000, 0), int), x, np.zeros((3000, 0, V)))
    np.testing.assert_array_equal(accepted, 0)
    p = np.asarray(jax.nn.softmax(TARGET[0]), np.float64)
    assert chi_square(np.bincount(tokens[:, 0], minlength=V), p / p.sum()) < 5


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"draft_tokens": np.zeros(S)}, TypeError, "draft_tokens must be integers, got float"),
        ({"draft_tokens": np.zeros(S + 1, int)}, ValueError, r"draft_tokens must have the shape \(3,\), got \(4,\)"),
        ({"draft_log_probs": LOG_Q[:-1]}, ValueError, r"draft_log_probs must have the shape \(3, 5\), got \(2, 5\)"),
        ({"draft_log_probs": LOG_Q > 0}, TypeError, "draft_log_probs must be floating, got bool"),
        ({"logits": TARGET[0]}, ValueError, r"logits must have a shape \(..., S \+ 1, V\), got \(5,\)"),
        ({"temperature": np.ones((1, 1, 1))}, ValueError, "temperature must be a scalar, one per row"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_p": 2.0}, ValueError, "top_p"),
        ({"key": jax.random.split(KEY, 2)}, ValueError, "key must be one key or have the batch shape"),
    ],
)  # fmt: skip
def test_bad_input(change, error, match):
    given = {"key": KEY, "draft_tokens": np.zeros(S, int), "logits": TARGET, "draft_log_probs": LOG_Q}
    with pytest.raises(error, match=f"^verify: .*{match}"):
        verify(**{**given, **change})
