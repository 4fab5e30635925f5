"""Beam search and serving on the CPU: the check of a search can fail, and peers draw what they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import beam_search, serve
from benchmarks.beam_search import Search
from benchmarks.support import language_model
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_near_ties_may_swap_but_no_others():
    search, shape = Search(3, 3, 90, "float32", 6), (6, 3, 3)
    best = -np.cumsum(np.full(shape, 4.0, np.float32), 0)
    found = {"tokens": np.zeros(shape, int), "parents": np.zeros(shape, int), "scores": best}

    def check(replayed=best, best=best, **changed):
        return beam_search.check(search, found | changed, replayed, best)

    near, far = best.copy(), best.copy()
    near[4, 2, 1] += 1e-5
    far[4, 2, 1] += 1e-2
    error, gap, reason = check(best=near)
    assert error == 0 and 0 < gap < 2e-5 and not reason
    assert "at step 4, prompt 2, beam 1" in check(best=far)[2]
    assert "score off by nan" in check(scores=best * np.nan)[2]
    assert "score off by 0.001" in check(best + 1e-3)[2]
    assert "a token is not from 0 to 89" in check(tokens=found["tokens"] + 90)[2]


@pytest.mark.slow
def test_hypotheses_are_the_best_of_all():
    # with as many beams as tokens, the first two steps lose nothing, and the search is exhaustive
    search, ids = Search(2, 7, 7, "float32", 2), language_model.choose_prompts(7, 2)
    shapes = {"embed": (7, 16), "bias": 48, "input": (16, 48), "hidden": (16, 48)}
    normal = np.random.default_rng(0).standard_normal
    weights = {name: jnp.asarray(normal(shape), jnp.float32) for name, shape in shapes.items()}
    decode = functools.partial(beam_search.decode, "auto", search)
    found = jax.jit(decode)(weights, jnp.asarray(ids))

    @jax.jit
    def log_p(texts):
        """Returns the log probabilities of the tokens after each text."""
        _, logits = language_model.model(weights, language_model.prefill(weights, texts), texts[:, -1])
        return jax.nn.log_softmax(logits)

    after = [log_p(np.c_[ids, np.full(2, i)]) for i in range(7)]
    every = np.asarray(log_p(ids)[:, :, None] + np.stack(after, 1)).reshape(2, 49)
    ranked = np.argsort(-every, -1)[:, :7]
    np.testing.assert_array_equal(found["hypotheses"], np.stack([ranked // 7, ranked % 7]))
    np.testing.assert_allclose(found["scores"][-1], np.take_along_axis(every, ranked, -1), rtol=1e-4)


@pytest.mark.slow
def test_sorted_draws_are_in_the_kept_set():
    x = np.random.default_rng(0).standard_normal((70, 200)).astype("float32") * 2
    asked = serve.requests(70)
    temperature, *filters = map(np.asarray, asked.values())
    (tokens,) = jax.jit(serve.by_sort)(serve.keys_of(jax.random.split(jax.random.key(0), 70), 3), x, asked)
    filters = dict(zip(("top_k", "top_p", "min_p"), filters))
    kept = oracle.sample_kept(x, None, temperature, **filters, lean=1e-4, min_p_lean=-1e-4)
    assert kept[np.arange(70), tokens].all()
    np.testing.assert_array_equal(tokens[::7], x[::7].argmax(-1))  # greedy
    assert len(np.unique(tokens[6::7])) > 5  # no filter
