"""The beam search benchmark on the CPU: the searches agree, and its check can fail."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax
from benchmarks import beam_search
from benchmarks.beam_search import Search
from benchmarks.support import language_model

FUSED_TOPK = pallas_softmax.fused_topk
slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("quick_compilation")


SMALL = [
    "--batch=3",
    "--k=3",
    "--vocab=90",
    "--sequence=6",
    "--tokens=64",
    "--width=16",
    "--training_steps=4",
]


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
    starts = language_model.choose_prompts(language_model.token_ids(search.vocab), search.batch)
    select = beam_search.selection(contender)
    found = jax.jit(lambda *args: beam_search.decode(select, search, *args))(weights, jnp.asarray(starts))
    return {name: np.asarray(value) for name, value in found.items()}


def held_against_replay(search: Search, contender: str, weights: dict[str, jax.Array]):
    found = decoded(search, contender, weights)
    starts = jnp.asarray(language_model.choose_prompts(language_model.token_ids(search.vocab), search.batch))
    replayed = beam_search.replay(search, weights, starts, found["tokens"], found["parents"])
    return beam_search.check(search, found, *replayed)


@slow
def test_end_to_end(run_benchmark, capsys):
    args = ["--dtype=bfloat16", "--implementations=auto,mosaic_gpu", "--vocab=4000"]
    code, rows = run_benchmark(beam_search, *SMALL, *args)
    assert code == 0 and [row["contender"] for row in rows] == ["jax", "jax_rows", "auto", "mosaic_gpu"]
    for row in rows:
        if row["contender"] == "mosaic_gpu":
            assert row["status"] == "not run" and "mosaic_gpu" in row["reason"]
            continue
        assert row["status"] == "ok" and row["same"] == row["hypotheses"] == 9
        assert row["score_error"] < 1e-4 and row["gap"] < 1e-4 and row["p50_us"] > 0
        assert ("explain" in row) == (row["contender"] == "auto")
    assert "topk bfloat16[9, 4000], k=3" in rows[2]["explain"]
    printed = capsys.readouterr().out
    assert "GREGORY: / No, for then we ..." in printed and "tokens_per_s" in printed


def worse_scores(logits, k, **kwargs):
    found = FUSED_TOPK(logits, k, **kwargs)
    return found._replace(values=found.values - 1e-3)  # like a sum that misses the end of the row


def other_tokens(logits, k, **kwargs):
    found = FUSED_TOPK(logits, k, **kwargs)
    return found._replace(indices=(found.indices + 1) % logits.shape[-1])


def beyond_the_row(logits, k, **kwargs):
    found = FUSED_TOPK(logits, k, **kwargs)
    return found._replace(indices=found.indices + logits.shape[-1])


def second_passed_over(logits, k, **kwargs):
    found = FUSED_TOPK(logits, k + 1, **kwargs)
    return jax.tree.map(lambda a: jnp.delete(a, 1, axis=-1, assume_unique_indices=True), found)


def nan_scores(logits, k, **kwargs):
    found = FUSED_TOPK(logits, k, **kwargs)
    return found._replace(values=found.values * jnp.nan)


@slow  # test_near_ties_may_swap_but_no_others has the check alone
@pytest.mark.parametrize(
    "planted, reason",
    [
        (worse_scores, "score off by 0.001"),
        (other_tokens, "score off by"),
        (beyond_the_row, "a token is not from 0 to 89"),
        (second_passed_over, "choice short of the best by"),
        (nan_scores, "score off by nan"),
    ],
)
def test_a_wrong_selection_is_found(monkeypatch, planted, reason):
    monkeypatch.setattr(pallas_softmax, "fused_topk", planted)
    search, weights = search_of(), weights_of(90)
    assert reason in held_against_replay(search, "auto", weights)[2]


@pytest.mark.slow
def test_a_right_selection_is_not_refused():
    assert not held_against_replay(search_of(), "jax_rows", weights_of(90))[2]


@pytest.mark.slow
def test_a_wrong_selection_fails_the_run(run_benchmark, monkeypatch, capsys):
    monkeypatch.setattr(pallas_softmax, "fused_topk", second_passed_over)
    monkeypatch.setattr(beam_search, "trained", lambda vocab, chosen: (weights_of(vocab), 1.0))
    code, (reference, by_rows, ours) = run_benchmark(beam_search, *SMALL)
    assert code == 1 and reference["status"] == by_rows["status"] == "ok"
    assert ours["status"] == "FAILED" and "short of the best" in ours["reason"]
    assert ours["same"] < 9 and "p50_us" not in ours
    assert "1 of 3 records failed" in capsys.readouterr().err


def test_near_ties_may_swap_but_no_others():
    search = search_of()
    weights = weights_of(90)
    found = decoded(search, "auto", weights)
    starts = jnp.asarray(language_model.choose_prompts(language_model.token_ids(90), 3))
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


@pytest.mark.parametrize("contender", ["jax", "auto"])
def test_hypotheses_are_the_best_of_all(contender):
    # with as many beams as tokens, the first two steps lose nothing, and the search is exhaustive
    search = search_of(beams=7, vocab=7, sequence=2, batch=2)
    weights = weights_of(7)
    found = decoded(search, contender, weights)
    ids = language_model.choose_prompts(language_model.token_ids(7), 2)
    for b in range(2):
        every = {
            (i, j): log_p(weights, [*ids[b]], i) + log_p(weights, [*ids[b], i], j)
            for i in range(7)
            for j in range(7)
        }
        ranked = sorted(every, key=lambda pair: -every[pair])[:7]
        assert [tuple(pair) for pair in found["hypotheses"][:, b].T] == ranked
        np.testing.assert_allclose(found["scores"][-1, b], [every[pair] for pair in ranked], rtol=1e-4)


def log_p(weights: dict[str, jax.Array], text: list[int], token: int) -> float:
    """Returns the log probability of a token after a text, in numpy."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    h = np.zeros(16)
    for each in text:
        x, g = w["embed"][each] @ w["input"] + w["bias"], h @ w["hidden"]
        update, reset = (1 / (1 + np.exp(-x[s] - g[s])) for s in (slice(16), slice(16, 32)))
        h = update * h + (1 - update) * np.tanh(x[32:] + reset * g[32:])
    logits = w["embed"] @ h
    return logits[token] - np.log(np.sum(np.exp(logits)))


@slow
def test_training_learns_the_tokens_of_the_text(parse):
    vocab, words = 5000, language_model.text_tokens()[1]
    chosen = parse(beam_search, "--width=32", "--tokens=256", "--training_steps=60")
    weights, loss = language_model.train(vocab, chosen)
    assert loss < 7 < np.log(vocab)
    hidden = jnp.zeros((3, 32))
    for token in language_model.choose_prompts(language_model.token_ids(vocab), 3).T:
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
    starts = language_model.choose_prompts(ids, 5)
    assert starts.shape == (5, language_model.PROMPT)
    assert language_model.as_text(starts[0]) == "GREGORY: / No, for then we"
    ids = np.array([len(words), words.index("\n\n"), words.index("the"), words.index(".")])
    assert language_model.as_text(ids) == f"<{len(words)}> // the."


def test_more_beams_than_tokens_are_refused(run_benchmark):
    with pytest.raises(SystemExit, match="--k=91 is more than the vocabulary V=90"):
        run_benchmark(beam_search, *SMALL, "--k=3,91")


def test_flags_become_searches(parse):
    file = Path(__file__).parents[2] / "configs" / "beam_search.flags"
    searches = beam_search.make_searches(parse(beam_search, f"--flagfile={file}"))
    assert {search.vocab for search in searches} == {32000, 128256}
    assert {search.dtype for search in searches} == {"float32", "bfloat16"}
