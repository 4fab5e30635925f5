"""The functions of docs/serving.md: penalties, the sampler step, beam search, speculative decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.docs.test_docs import ROOT, blocks

V, ROWS = 40, 6
RNG = np.random.default_rng(0)


@functools.cache
def page():
    """Returns the functions that the page defines, from the blocks that print nothing."""
    names = {}
    for block in blocks((ROOT / "docs" / "serving.md").read_text(), "python"):
        if "print(" not in block:
            exec(block, names)
    return names


def requests(**changes):
    """Returns requests with different settings: greedy, no filter, all filters, penalties, a mask, a bias."""
    allowed = np.ones((ROWS, V), bool)
    allowed[4, V // 2 :] = False
    given = {
        "seed": np.arange(ROWS),
        "temperature": np.array([0, 1, 0.7, 1.3, 1, 1], np.float32),
        "top_k": np.array([-1, 0, 10, -1, 5, -1]),
        "top_p": np.array([1, 1, 0.8, 1, 0.9, 0.95], np.float32),
        "min_p": np.array([0, 0, 0.05, 0.02, 0, 0], np.float32),
        "repetition": np.array([1.3, 1, 1, 1.1, 1, 1], np.float32),
        "presence": np.array([0, 0, 0.3, -0.2, 0, 0], np.float32),
        "frequency": np.array([0.5, 0, 0, 0.1, 0, 0], np.float32),
        "bias_tokens": np.array([[1, 2], [V, V], [3, V], [V, V], [V, V], [7, 7]]),
        "bias": np.array([[2, -3], [9, 9], [-100, 9], [9, 9], [9, 9], [1, 2]], np.float32),
        "allowed": allowed,
    }
    return page()["Requests"](**(given | changes))


LOGITS = (2 * RNG.standard_normal((ROWS, V))).astype(np.float32)
PROMPT, OUTPUT = RNG.integers(0, 2, (ROWS, V)), RNG.integers(0, 4, (ROWS, V))
POSITION = np.arange(ROWS) + 5


def penalized_numpy(logits, prompt, output, given):
    x = logits.astype(np.float64)
    for row, token in itertools.product(*map(range, x.shape)):
        if prompt[row, token] or output[row, token]:
            x[row, token] *= given.repetition[row] if x[row, token] <= 0 else 1 / given.repetition[row]
        if output[row, token]:
            x[row, token] -= given.presence[row] + given.frequency[row] * output[row, token]
    for row, (tokens, biases) in enumerate(zip(given.bias_tokens, given.bias)):
        for token, bias in zip(tokens, biases):
            if token < V:
                x[row, token] += bias
    return x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_penalties_are_those_of_the_servers(dtype):
    logits = jnp.asarray(LOGITS, dtype)
    got = page()["penalized"](logits, PROMPT, OUTPUT, requests())
    want = penalized_numpy(np.asarray(logits, np.float32), PROMPT, OUTPUT, requests())
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_the_sampler_step_reports_what_it_drew():
    given = requests()
    token, failed, report, output = page()["sampler_step"](LOGITS, PROMPT, OUTPUT, POSITION, given)
    x = page()["penalized"](LOGITS, PROMPT, OUTPUT, given)
    filters = {name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    kept = ps.filter_logits(x, where=given.allowed, **filters)
    keys = [jax.random.fold_in(jax.random.key(int(s)), int(i)) for s, i in zip(given.seed, POSITION)]
    np.testing.assert_array_equal(token, [jax.random.categorical(k, z) for k, z in zip(keys, kept)])
    assert not failed.any()
    rows, log_p = np.arange(ROWS), jax.nn.log_softmax(LOGITS)
    np.testing.assert_allclose(report["log_prob"], log_p[rows, token], rtol=1e-5)
    np.testing.assert_array_equal(report["rank"], (LOGITS > LOGITS[rows, token][:, None]).sum(-1) + 1)
    np.testing.assert_allclose(
        report["filtered_log_prob"], jax.nn.log_softmax(kept)[rows, token], rtol=1e-5, atol=1e-6
    )
    values, tokens = jax.lax.top_k(log_p, 5)
    np.testing.assert_array_equal(report["top_tokens"], tokens)
    np.testing.assert_allclose(report["top_log_probs"], values, rtol=1e-5)
    np.testing.assert_array_equal(output - OUTPUT, np.eye(V, dtype=int)[token])


@pytest.mark.slow
def test_a_failed_row_leaves_its_counts_and_its_neighbours():
    logits = LOGITS.copy()
    logits[1, 3] = np.nan
    given = requests(
        allowed=np.arange(ROWS)[:, None] * np.ones(V) != 2,
        top_p=requests().top_p + np.eye(ROWS, dtype="f4")[3],
    )
    good = page()["sampler_step"](
        LOGITS, PROMPT, OUTPUT, POSITION, requests(allowed=np.ones((ROWS, V), bool))
    )
    token, failed, _, output = page()["sampler_step"](logits, PROMPT, OUTPUT, POSITION, given)
    np.testing.assert_array_equal(failed, [False, True, True, True, False, False])
    assert ((token >= 0) & (token < V)).all()
    np.testing.assert_array_equal((output - OUTPUT).sum(-1), ~failed)
    np.testing.assert_array_equal(token[np.array([0, 4, 5])], good[0][np.array([0, 4, 5])])


# --- Beam search --------------------------------------------------------------------------------------


def log_table(v, seed):
    return np.asarray(jax.nn.log_softmax(1.5 * jax.random.normal(jax.random.key(seed), (v, v))), np.float64)


def search_by_hand(log_p, prompt, beams, length, ends, alpha):
    """Returns the hypotheses of one prompt, with their scores, best first: a list of Python tuples."""
    live, finished = [(0.0, ())], []
    for i in range(length):
        pairs = itertools.product(live, range(len(log_p)))
        found = [(s + log_p[(text or (prompt,))[-1], t], (*text, t)) for (s, text), t in pairs]
        found = sorted(found, reverse=True)[: (1 + len(ends)) * beams]
        over = [f for f in found if f[1][-1] in ends or i == length - 1]
        finished = sorted(finished + [(s / (i + 1) ** alpha, t) for s, t in over], reverse=True)[:beams]
        live = [f for f in found if f[1][-1] not in ends][:beams]
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize(("v", "beams", "ends"), [(12, 3, (0,)), (12, 4, (0, 7)), (4, 16, (1, 2))])
def test_beam_search(v, beams, ends, alpha):
    """A search in plain Python finds the same hypotheses. With many beams, the best one is the best of all texts."""
    length, log_p, prompts = 4, log_table(v, beams), np.arange(3)
    search = jax.jit(page()["beam_search"], static_argnums=(2, 3, 4))
    got, scores = search(jnp.asarray(log_p, jnp.float32), prompts, beams, length, ends, alpha)
    for prompt in prompts:
        want = search_by_hand(log_p, prompt, beams, length, ends, alpha)
        np.testing.assert_allclose(scores[prompt], [score for score, _ in want], rtol=1e-5)
        texts = [tuple(int(t) for t in text if t >= 0) for text in got[prompt]]
        assert len({*texts}) == beams
        for text, score in zip(texts, scores[prompt]):  # equal scores may be in either order
            np.testing.assert_allclose(score, score_of(log_p, prompt, text) / len(text) ** alpha, rtol=1e-5)
            assert is_over(text, length, ends)
        if v == 4:
            best = max(
                score_of(log_p, prompt, text) / len(text) ** alpha
                for n in range(length)
                for text in itertools.product(range(v), repeat=n + 1)
                if is_over(text, length, ends)
            )
            np.testing.assert_allclose(scores[prompt, 0], best, rtol=1e-5)


def score_of(log_p, prompt, text):
    return sum(log_p[a, b] for a, b in zip((prompt, *text), text))


def is_over(text, length, ends):
    """Returns whether a text ends where it should: at its only end token, or at the length."""
    return not {*text[:-1]} & {*ends} and (text[-1] in ends or len(text) == length)


# --- Speculative decoding -----------------------------------------------------------------------------


@pytest.mark.slow
def test_speculative_texts_at_temperature_0_are_greedy():
    target, small = jax.random.normal(jax.random.key(2), (2, V, V))
    small = target + 0.2 * small
    run = jax.jit(page()["speculate"], static_argnums=(4, 5))
    texts, accepted, failed = run(target, small, np.arange(8), np.arange(8), 6, 3, {"temperature": 0.0})
    assert 0 < np.asarray(accepted).sum() and not failed.any()
    for row, text in enumerate(np.asarray(texts)):
        length, last = int(accepted[row].sum()) + 6, row
        np.testing.assert_array_equal(text[length:], -1)
        for token in text[:length]:
            assert token == target[last].argmax()
            last = token


@pytest.mark.slow
def test_a_failed_row_of_speculative_decoding_stops():
    """A NaN in the target's logits stops the rows that reach it. The others go on."""
    target = jnp.eye(V).at[5].set(jnp.nan) * 50
    target = jnp.roll(target, 1, -1)  # each token is followed by the next one
    run = jax.jit(page()["speculate"], static_argnums=(4, 5))
    texts, _, failed = run(target, target, np.arange(2), np.array([3, 10]), 3, 2, {"temperature": 1.0})
    np.testing.assert_array_equal(failed, [True, False])
    np.testing.assert_array_equal(texts[0], [4, 5, *[-1] * 7])
    np.testing.assert_array_equal(texts[1], np.arange(11, 20))
