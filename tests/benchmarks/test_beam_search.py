"""The beam search benchmark on the CPU: the searches agree, and its check can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import beam_search
from benchmarks.beam_search import Search
from benchmarks.support import language_model
from tests.support.covering import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = "--batch=3 --k=3 --vocab=90 --sequence=6 --tokens=64 --width=16 --training_steps=4".split()


def weights_of(vocab: int, width: int = 16) -> dict[str, jax.Array]:
    """Returns the weights of an untrained model."""
    normal = np.random.default_rng(0).standard_normal
    weights = {"embed": normal((vocab, width)), "bias": np.zeros(3 * width)}
    weights |= {name: normal((width, 3 * width)) for name in ("input", "hidden")}
    return {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}


def search_of(**changed) -> Search:
    usual = {"batch": 3, "beams": 3, "vocab": 90, "dtype": "float32", "sequence": 6}
    return Search(**(usual | changed))


def decoded(search: Search, contender: str, weights: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    starts = language_model.choose_prompts(search.vocab, search.batch)
    select = beam_search.selection(contender)
    found = jax.jit(lambda *args: beam_search.decode(select, search, *args))(weights, jnp.asarray(starts))
    return {name: np.asarray(value) for name, value in found.items()}


def test_near_ties_may_swap_but_no_others():
    search = search_of()
    weights = weights_of(90)
    found = decoded(search, "auto", weights)
    starts = jnp.asarray(language_model.choose_prompts(90, 3))
    scores, best = map(
        np.asarray, beam_search.replay(search, weights, starts, found["tokens"], found["parents"])
    )
    near, far = best.copy(), best.copy()
    near[4, 2, 1] += 1e-6
    far[4, 2, 1] += 1e-2
    error, gap, reason = beam_search.check(search, found, scores, near)
    assert error < 1e-5 and 0 < gap < 1e-5 and not reason
    assert "at step 4, prompt 2, beam 1" in beam_search.check(search, found, scores, far)[2]
    wrong = {"scores": found["scores"] * np.nan}
    assert "score off by nan" in beam_search.check(search, found | wrong, scores, best)[2]
    assert "score off by 0.001" in beam_search.check(search, found, scores + 1e-3, best)[2]
    wrong = {"tokens": found["tokens"] + 90}
    assert "a token is not from 0 to 89" in beam_search.check(search, found | wrong, scores, best)[2]


@pytest.mark.slow
@pytest.mark.parametrize("contender", [slow("jax"), "auto"])
def test_hypotheses_are_the_best_of_all(contender):
    # with as many beams as tokens, the first two steps lose nothing, and the search is exhaustive
    search = search_of(beams=7, vocab=7, sequence=2, batch=2)
    weights = weights_of(7)
    found = decoded(search, contender, weights)
    ids = language_model.choose_prompts(7, 2)
    after = [log_p(weights, jnp.c_[ids, np.full(2, i)]) for i in range(7)]
    every = (log_p(weights, ids)[:, :, None] + np.stack(after, 1)).reshape(2, 49)
    ranked = np.argsort(-every, -1)[:, :7]
    np.testing.assert_array_equal(found["hypotheses"], np.stack([ranked // 7, ranked % 7]))
    np.testing.assert_allclose(found["scores"][-1], np.take_along_axis(every, ranked, -1), rtol=1e-4)


def log_p(weights: dict[str, jax.Array], texts: jax.Array) -> np.ndarray:
    """Returns the log probabilities of the tokens after each text."""
    _, logits = language_model.model(weights, language_model.prefill(weights, texts), texts[:, -1])
    return np.asarray(jax.nn.log_softmax(logits))


@pytest.mark.slow
def test_training_learns_the_tokens_of_the_text(parse):
    vocab, words = 5000, language_model.text_tokens()[1]
    chosen = parse(beam_search, "--width=32", "--tokens=256", "--training_steps=60")
    weights, loss = language_model.trained(vocab, chosen)
    assert loss < 7 < np.log(vocab)
    hidden = jnp.zeros((3, 32))
    for token in language_model.choose_prompts(vocab, 3).T:
        hidden, logits = language_model.model(weights, hidden, jnp.asarray(token))
    padding = np.arange(vocab) >= len(words)
    assert np.mean(padding) > 0.3
    assert (np.sum(jax.nn.softmax(logits)[:, padding], axis=-1) < 0.1).all()


def test_the_whole_text_is_read():
    text, words = language_model.text_tokens()
    assert len(words) == len(set(words))
    ids = language_model.token_ids(len(words))
    assert language_model.UNKNOWN not in ids and [words[i] for i in ids] == text
    assert (language_model.token_ids(50) < 50).all()
    starts = language_model.choose_prompts(len(words), 5)
    assert starts.shape == (5, language_model.PROMPT)
    assert [words[i] for i in starts[0]] == ["GREGORY", ":", "\n", "No", ",", "for", "then", "we"]


def test_more_beams_than_tokens_are_refused(run_benchmark):
    with pytest.raises(SystemExit, match="--k=91 is more than the vocabulary V=90"):
        run_benchmark(beam_search, *SMALL, "--k=3,91")
