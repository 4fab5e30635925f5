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
    repeated = np.where(x <= 0, given.repetition[:, None], 1 / given.repetition[:, None])
    x *= np.where((prompt > 0) | (output > 0), repeated, 1)
    x -= np.where(output > 0, given.presence[:, None] + given.frequency[:, None] * output, 0)
    for row, tokens, biases in zip(x, given.bias_tokens, given.bias):
        np.add.at(row, tokens[tokens < V], biases[tokens < V])
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
    filtered = jax.nn.log_softmax(kept)[rows, token]
    np.testing.assert_allclose(report["filtered_log_prob"], filtered, rtol=1e-5, atol=1e-6)
    values, tokens = jax.lax.top_k(log_p, 5)
    np.testing.assert_array_equal(report["top_tokens"], tokens)
    np.testing.assert_allclose(report["top_log_probs"], values, rtol=1e-5)
    np.testing.assert_array_equal(output - OUTPUT, np.eye(V, dtype=int)[token])


@pytest.mark.slow
def test_a_failed_row_leaves_its_counts_and_its_neighbours():
    """The rows 1 to 3 have a NaN, no allowed token, and a top_p above 1."""
    logits, rows = LOGITS.copy(), np.arange(ROWS)
    logits[1, 3] = np.nan
    allowed, top_p = np.ones((ROWS, V), bool), requests().top_p + (rows == 3).astype(np.float32)

    def step(logits, **changes):
        return page()["sampler_step"](logits, PROMPT, OUTPUT, POSITION, requests(**changes))

    good, *_ = step(LOGITS, allowed=allowed)
    token, failed, _, output = step(logits, allowed=allowed & (rows != 2)[:, None], top_p=top_p)
    np.testing.assert_array_equal(failed, [False, True, True, True, False, False])
    assert ((token >= 0) & (token < V)).all()
    np.testing.assert_array_equal((output - OUTPUT).sum(-1), ~failed)
    np.testing.assert_array_equal(token[~failed], good[~failed])


class Table:
    """A language model and the rules of a search. The next token depends on the last token only."""

    def __init__(self, v, length, ends, alpha, seed):
        logits = 1.5 * jax.random.normal(jax.random.key(seed), (v, v))
        self.log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
        self.length, self.ends, self.alpha = length, ends, alpha

    def score(self, prompt, text):
        return sum(self.log_p[pair] for pair in itertools.pairwise((prompt, *text))) / len(text) ** self.alpha

    def is_over(self, text):
        """Returns whether a text ends where it should: at its only end token, or at the length."""
        return not {*text[:-1]} & {*self.ends} and (text[-1] in self.ends or len(text) == self.length)

    def search(self, prompt, beams):
        """Returns the scores of the hypotheses of a prompt, best first, by a search in plain Python."""
        live, finished = [()], []
        for _ in range(self.length):
            pairs = itertools.product(live, range(len(self.log_p)))
            found = sorted(((*text, token) for text, token in pairs), key=lambda text: -self.score(prompt, text))
            found = found[: (1 + len(self.ends)) * beams]
            finished += [self.score(prompt, text) for text in found if self.is_over(text)]
            live = [text for text in found if text[-1] not in self.ends][:beams]
        return sorted(finished, reverse=True)[:beams]


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize(("v", "beams", "ends"), [(12, 3, (0,)), (12, 4, (0, 7)), (4, 16, (1, 2))])
def test_beam_search(v, beams, ends, alpha):
    """A search in plain Python finds the same hypotheses. With many beams, the best one is the best of all texts."""
    table, prompts = Table(v, 4, ends, alpha, seed=beams), np.arange(3)
    search = jax.jit(page()["beam_search"], static_argnums=(2, 3, 4))
    got, scores = search(jnp.asarray(table.log_p, jnp.float32), prompts, beams, table.length, ends, alpha)
    for prompt in prompts:
        np.testing.assert_allclose(scores[prompt], table.search(prompt, beams), rtol=1e-5)
        texts = {tuple(int(t) for t in text if t >= 0): s for text, s in zip(got[prompt], scores[prompt])}
        assert len(texts) == beams and all(map(table.is_over, texts))
        for text, score in texts.items():  # equal scores may be in either order
            np.testing.assert_allclose(score, table.score(prompt, text), rtol=1e-5)
        if v == 4:
            every = (text for n in range(table.length) for text in itertools.product(range(v), repeat=n + 1))
            best = max(table.score(prompt, text) for text in every if table.is_over(text))
            np.testing.assert_allclose(scores[prompt, 0], best, rtol=1e-5)


@pytest.mark.slow
def test_a_failed_row_of_speculative_decoding_stops():
    """A NaN in the target's logits stops the rows that reach it. The others go on. The page tests what is drawn."""
    target = jnp.eye(V).at[5].set(jnp.nan) * 50
    target = jnp.roll(target, 1, -1)  # each token is followed by the next one
    run = jax.jit(page()["speculate"], static_argnums=(4, 5))
    texts, _, failed = run(target, target, np.arange(2), np.array([3, 10]), 3, 2, {"temperature": 1.0})
    np.testing.assert_array_equal(failed, [True, False])
    np.testing.assert_array_equal(texts[0], [4, 5, *[-1] * 7])
    np.testing.assert_array_equal(texts[1], np.arange(11, 20))
