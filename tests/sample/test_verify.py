"""verify: the distribution of its tokens, rounding, greedy rows, drafts that are no tokens, masks, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax import verify
from pallas_softmax._src.sample import xla
from tests.support.covering import pairs, slow
from tests.support.draws import chi_square
from tests.support.trees import assert_equal

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
S, V = 3, 5
RNG = np.random.default_rng(0)
TARGET = (1.5 * RNG.standard_normal((S + 1, V))).astype(np.float32)
LOG_Q = np.asarray(jax.nn.log_softmax(RNG.standard_normal((S, V)).astype(np.float32)))
BEST = TARGET.argmax(-1)


# Drafts that are chosen, and drafts that are drawn from LOG_Q
of_drafts = pytest.mark.parametrize("q", [None, slow(LOG_Q)], ids=["chosen", "drawn"])


def softmax(logits):
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    return p / p.sum(-1, keepdims=True)


def assert_distribution(tokens, p):
    assert chi_square(np.bincount(tokens, minlength=len(p)), p) < 5


def drafts_of(rows, q):
    """Returns drafts (rows, S), drawn from the distributions of the draft model, or the best tokens of the target."""
    if q is None:
        return np.tile(BEST[:-1], (rows, 1))
    return jax.random.categorical(jax.random.key(7), jnp.asarray(q), shape=(rows, S))


def repeated(drafts, target, q=None, key=KEY, rows=4000, **given):
    """Verifies many rows of the same logits. The drafts are (rows, S), or the same in each row."""
    drafts, target, q = (
        None if a is None else np.broadcast_to(a, (rows, *np.shape(a)[-n:]))
        for a, n in ((drafts, 1), (target, 2), (q, 2))
    )
    return jax.tree.map(np.asarray, verify(key, drafts, target, q, **given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "drawn", "each_row"),
    pairs([{"top_p": 0.7, "temperature": 0.8}, {"top_k": 3}, {}], [True, False], [True, False]),
    ids=str,
)
def test_tokens_have_the_distribution_of_the_target(given, drawn, each_row):
    """Each token that is there, whatever comes before it, is a draw from the filtered target at its position."""
    rows, q = 20_000, LOG_Q if drawn else None
    key = jax.random.split(KEY, rows) if each_row else KEY
    tokens, accepted = repeated(drafts_of(rows, q), TARGET, q, key, rows, **given)
    p = softmax(ps.filter_logits(TARGET, **given))
    for position in range(S + 1):
        there = tokens[:, position][tokens[:, position] >= 0]
        np.testing.assert_array_equal(tokens[:, position] >= 0, position <= accepted)
        if len(there) > 500:
            assert_distribution(there, p[position])
    assert (accepted > 0).mean() > 0.1


@pytest.mark.slow
def test_all_drafts_of_the_target_itself_are_accepted():
    log_p = np.asarray(jax.nn.log_softmax(TARGET))[:-1]
    tokens, accepted = repeated(drafts_of(4000, log_p), TARGET, log_p)
    assert (accepted == S).mean() > 0.999  # the rest: probabilities that are rounded in two ways
    assert (tokens >= 0).all(-1)[accepted == S].all()


def test_chosen_drafts_are_accepted_with_their_probability():
    """In the place of a rejected draft is never the draft, but a draw from the others."""
    p = softmax(TARGET[0])
    for draft in range(3):
        tokens, accepted = repeated([draft], TARGET[:2])
        assert_distribution(accepted, np.array([1 - p[draft], p[draft]]))
        others = np.where(np.arange(V) == draft, 0, p / (1 - p[draft]))
        assert_distribution(tokens[accepted == 0, 0], others)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"top_k": 1}, {"where": np.arange(V) == 2}, {"min_p": 1.0, "temperature": 3}], ids=str
)
def test_chosen_drafts_of_probability_1_and_0(given):
    """The only token that is kept is always accepted; a draft that is not kept never is."""
    target = np.where(np.arange(V) == 2, TARGET.max() + 1, TARGET[:2])
    for draft in range(V):
        tokens, accepted = repeated([draft], target, **given)
        assert (accepted == (draft == 2)).all()
        assert (tokens == np.array([2, 2 if draft == 2 else -1])).all()


@pytest.mark.slow
@pytest.mark.parametrize("v", [1003, 256, 257, 512])
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_rows_of_several_chunks(v, drawn):
    """A token is drawn as a chunk and a place in it. Masses vary between chunks and within them."""
    rows, rng = 3000, np.random.default_rng(1)
    chunks = np.repeat(rng.standard_normal(-(-v // 16)), 16)[:v]
    target = (2 * chunks + 2 * rng.standard_normal(v)).astype(np.float32)
    p = softmax(target)
    q = 0.5 * p + 0.5 / v
    drafts, log_q = (rng.choice(v, (rows, 1), p=q), np.log(q)[None]) if drawn else ([p.argmax()], None)
    tokens, _ = repeated(drafts, [target] * 2, log_q, rows=rows)
    # the tokens of small p in groups, by chunks of 256 and by their places in them
    small = p < 5 / rows
    group = np.where(small, v + np.arange(v) // 256 * 8 + np.arange(v) % 256 // 32, np.arange(v))
    expected = np.bincount(group, p)
    counts = np.bincount(group[tokens[:, 0]], minlength=len(expected))
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 5


@pytest.mark.slow
def test_no_drafts():
    tokens, accepted = repeated(np.zeros(0, int), TARGET[:1], np.zeros((0, V)))
    np.testing.assert_array_equal(accepted, 0)
    assert_distribution(tokens[:, 0], softmax(TARGET[0]))


@pytest.mark.parametrize("v", [V, slow(600)])
def test_the_new_token_is_of_the_target_if_nothing_is_left(v):
    """Here q is greater than p everywhere, as it may be by rounding."""
    target = np.where(np.arange(v) % (v // V) == 0, np.resize(TARGET[0], v), -np.inf).astype(np.float32)
    p = softmax(target)
    tokens, accepted = repeated([p.argmax()], [target] * 2, [jax.nn.log_softmax(target) + 1])
    assert_distribution(tokens[accepted == 0, 0], p)


def test_the_new_token_has_mass():
    """If rounding leaves little or nothing of p - q, the new token is still one of positive p, and not the draft."""
    # the first q is greater than p, by rounding, except where p is 0
    for q in np.log(np.array([1e-12, 1, 1e-10, 1e-12, 1e-12], np.float32)), [-np.inf, 0, -20] + [-np.inf] * 2:
        for other in -np.inf, -1000, -80, -87.3, -87.4:
            target = np.full(V, other, np.float32)
            target[1] = 0
            tokens, accepted = repeated([2], [target] * 2, np.array([q], np.float32))
            assert (accepted == 0).all()
            possible = [1] if np.isfinite(q).all() or other < -100 else [0, 1, 3, 4]
            assert np.isin(tokens[:, 0], possible).all()


def test_masses_may_round_in_two_ways():
    """The draw takes a chunk by one computation of the masses, and the token by another one."""
    mass = np.zeros((200, 600), np.float32)
    mass[:, 300], mass[:, [310, 320]] = 2.0**-30, -0.5
    mass[:, 7] = -1  # in a chunk that is not drawn
    again = np.where(mass > 0, -(2.0**-30), mass)
    noise = jax.random.gumbel(KEY, (200, xla.noise_of_mass(600)))
    draw = jax.jit(xla.draw_by_mass)
    drawn = np.asarray(draw(mass, again, noise))
    assert {310, 320} <= set(drawn[:, 0]) <= {300, 310, 320}
    assert (draw(mass * 0, again, noise) == -1).all()
    assert (draw(np.where(mass == -1, np.nan, mass), again, noise) == -1).all()


@pytest.mark.slow
def test_no_rounding_of_large_logits():
    """p depends on the differences of logits only, however large logits / temperature are."""
    rows, x = 500, np.array([0, 1, 2, 0], np.float32)
    drafts, q = np.arange(rows)[:, None] % 4, np.log(np.array([[0.5, 0.2, 0.2, 0.1]], np.float32))

    def run(x, temperature):
        return [repeated(drafts, [x] * 2, given, rows=rows, temperature=temperature) for given in (None, q)]

    want = run(x, 1.0)
    far = (50, 2.0**-16), (-50, 2.0**-16), (1e4, 2.0**-10), (2.0**25, 4), (-(2.0**25), 4), (2.0**100, 2.0**80)
    for shift, t in far:
        assert_equal(run(x * np.float32(t) + np.float32(shift), t), want)
    assert_equal(run(x.astype(int) + 2**30, 1.0), want)  # integers


@jax.jit
def verify_5_rows(drafts, x, q, where, top_p, temperature):
    """Runs `verify` with all that the next two tests need, so that these share a program."""
    return verify(KEY, drafts, x, q, where=where, top_p=top_p, temperature=temperature)


@of_drafts
def test_temperature_0_takes_the_greedy_tokens(q):
    wrong = np.array([0, 1, 2, S, S])  # the place of the first draft that is not the best token
    drafts = np.where(np.arange(S) < wrong[:, None], BEST[:-1], (BEST[:-1] + 1) % V)
    ones = np.ones((5, S + 1))
    q, where = None if q is None else np.tile(q, (5, 1, 1)), np.ones((5, S + 1, V), bool)
    tokens, accepted = verify_5_rows(drafts, np.tile(TARGET, (5, 1, 1)), q, where, ones, 0 * ones)
    np.testing.assert_array_equal(accepted, wrong)
    np.testing.assert_array_equal(tokens, np.where(np.arange(S + 1) <= wrong[:, None], BEST, -1))


@of_drafts
def test_a_position_without_a_distribution_gives_minus_1(q):
    """Logits of NaN and +inf, a filter out of range, and a mask that keeps nothing; the last row draws all tokens."""
    x, where = np.tile(TARGET, (5, 1, 1)), np.ones((5, S + 1, V), bool)
    x[..., 0] = 30  # so that all good drafts are accepted
    x[0, 1, 3], x[1, 1, 3], where[3] = np.nan, np.inf, False
    top_p = np.ones((5, S + 1))
    top_p[2, 1] = 7
    q = None if q is None else np.tile(np.log([0.5] + [0.5 / (V - 1)] * (V - 1)), (5, S, 1))
    tokens, accepted = verify_5_rows(np.zeros((5, S), int), x, q, where, top_p, np.ones((5, S + 1)))
    np.testing.assert_array_equal(accepted, [1, 1, 1, 0, S])
    np.testing.assert_array_equal(tokens, [[0, -1, -1, -1]] * 3 + [[-1] * 4, [0] * 4])


@of_drafts
def test_drafts_that_are_no_tokens_end_the_row(q):
    """The token in the place of such a draft is a draw from the target itself."""
    bad, impossible = [-1, V, -7, 2**40], 2  # a draft with q = 0 is impossible
    bad = bad if q is None else [*bad, impossible]
    rows = 3000 * len(bad)
    drafts = np.tile(BEST[:-1].astype(np.int64), (len(bad), 3000, 1))
    drafts[..., 1] = np.array(bad)[:, None]
    if q is not None:
        q = np.tile(q, (len(bad), 3000, 1, 1))
        q[-1, :, 1, impossible] = -np.inf
        q = q.reshape(rows, S, V)
    x = np.broadcast_to(TARGET, (rows, S + 1, V))
    got = verify(jax.random.split(KEY, rows), drafts.reshape(rows, S), x, q)
    tokens, accepted = (np.asarray(a).reshape(len(bad), 3000, -1) for a in got)
    for i in range(len(bad)):
        assert {1} <= set(accepted[i].ravel()) <= {0, 1}
        assert_distribution(tokens[i, accepted[i, :, 0] == 1, 1], softmax(TARGET[1]))


@pytest.mark.slow
@of_drafts
@pytest.mark.parametrize("shape", [(1,), (2, S + 1, 1), (1, 1, V)], ids=str)
def test_a_mask_broadcasts(shape, q):
    """A mask with a last dimension of 1 masks whole positions."""
    x, drafts = np.stack([TARGET, TARGET - 1]), drafts_of(2, None)
    q = None if q is None else np.stack([q, q])
    masks = np.stack([np.ones(shape), np.zeros(shape), np.random.default_rng(0).random(shape) < 0.7]) > 0
    run = lambda where: verify(KEY, drafts, x, q, where=where, temperature=0.1)  # noqa: E731
    full = [run(np.broadcast_to(mask, x.shape)) for mask in masks]
    assert_equal([run(mask) for mask in masks], full)
    assert_equal(jax.vmap(run)(masks), jax.tree.map(lambda *rows: np.stack(rows), *full))


@pytest.mark.slow
@of_drafts
def test_parameters_are_per_row_or_per_position(q):
    """A row does not depend on the others."""
    rows = 4
    x, drafts = TARGET + np.arange(rows, dtype=np.float32)[:, None, None] / 8, drafts_of(rows, None)
    given = {"key": jax.random.split(KEY, rows), "draft_tokens": drafts, "logits": x}
    given |= {} if q is None else {"draft_log_probs": np.broadcast_to(q, (rows, S, V))}
    per_row = {"temperature": np.array([0, 0.5, 1, 2]), "top_k": np.array([1, 2, 3, -1])}
    per_position = {name: np.broadcast_to(a[:, None], (rows, S + 1)) for name, a in per_row.items()}
    got = verify(**given, **per_row)
    assert_equal(verify(**given, **per_position), got)
    alone = [verify(**{name: a[i] for name, a in (given | per_row).items()}) for i in range(rows)]
    assert_equal(jax.tree.map(lambda *rows: np.stack(rows), *alone), got)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16", "uint16", "uint32"])
def test_drafts_of_every_integer_dtype(dtype):
    """The temperature is known to be 0. Unsigned drafts are drawn, the others are chosen."""
    q = LOG_Q[:1] if dtype[0] == "u" else None
    run = functools.partial(verify, KEY, logits=TARGET[:2], draft_log_probs=q, temperature=0.0)
    tokens, accepted = run(BEST[:1].astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(tokens, BEST[:2])
    assert accepted == 1
    if jnp.iinfo(dtype).min:
        assert run(np.array([-1]).astype(jnp.dtype(dtype))).accepted == 0
