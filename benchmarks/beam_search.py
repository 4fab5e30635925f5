"""How fast is beam search with fused_topk? python -m benchmarks.beam_search --flagfile=configs/beam_search.flags

A small language model (a GRU) trains for --training_steps on the text in data/, then decodes --batch prompts.
A prompt has --k beams, and a hypothesis has --sequence tokens, which no token ends. A search, from the prompts to the
traced hypotheses, is one jitted program. The contenders differ in the selection:

jax        log_softmax, then lax.top_k over the beams * V scores of a prompt
jax_rows   log_softmax, lax.top_k of every row, then the best of the remaining beams * beams
ours       fused_topk of every row replaces log_softmax and lax.top_k of jax_rows

Rounding may reverse a near tie, and everything that follows it. Every search is therefore replayed: the model takes
the same steps, and jax.nn scores all candidates. The claimed scores must be right and no candidate may beat the chosen
ones, within a worst case of rounding. `same` counts the hypotheses that equal jax's, and `gap` is the largest near tie.

Tokens per second are --batch times --sequence, over the wall time of a call. The text is the first 100 kB of
Romeo and Juliet, in the public domain, from data/tinyshakespeare of github.com/karpathy/char-rnn.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_softmax
from benchmarks.support import driver, flags, language_model
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.language_model import Weights
from benchmarks.support.result import Benchmark, Record

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Search:
    batch: int  # prompts
    beams: int  # of a prompt
    vocab: int
    dtype: str  # of the output layer and the logits
    sequence: int


def log_probs(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def all_scores(scores: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the scores of all beams * V candidates of each prompt."""
    return (scores[..., None] + log_probs(logits)).reshape(len(scores), -1)


def _ours(name: str, logits: jax.Array, k: int) -> Any:
    return pallas_softmax.fused_topk(logits, k, log=True, dtype=jnp.float32, implementation=named(name))


def select(contender: str, scores: jax.Array, logits: jax.Array) -> Arrays:
    """Selects the best candidates of each prompt: at once, or from the best tokens of each beam.

    Returns the scores, parents and tokens, (batch, beams).
    """
    batch, beams, vocab = logits.shape
    if contender == "jax":
        scores, best = lax.top_k(all_scores(scores, logits), beams)
        return scores, best // vocab, best % vocab
    by_jax = contender == "jax_rows"
    log_p, tokens = lax.top_k(log_probs(logits), beams) if by_jax else _ours(contender, logits, beams)
    scores, best = lax.top_k((scores[..., None] + log_p).reshape(batch, -1), beams)
    return scores, best // beams, jnp.take_along_axis(tokens.reshape(batch, -1), best, -1)


def _start(weights: Weights, prompts: jax.Array, beams: int) -> Arrays:
    """Returns hidden state, last token and score of every beam. Only the first beam of a prompt scores above -inf."""
    hidden = language_model.prefill(weights, prompts)
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    arrays = hidden[:, None], prompts[:, -1:], scores[None]
    return tuple(jnp.broadcast_to(a, (len(prompts), beams, *a.shape[2:])) for a in arrays)


def decode(contender: str, search: Search, weights: Weights, prompts: jax.Array) -> Weights:
    """Searches. Returns the hypotheses, best first, and each step's choices. All are (sequence, batch, beams)."""

    def step(carry: Any, _: None) -> tuple[Any, Arrays]:
        hidden, token, scores = carry
        hidden, logits = language_model.model(weights, hidden, token)
        scores, parents, token = select(contender, scores, logits)
        return (_of(hidden, parents), token, scores), (token, parents, scores)

    start = _start(weights, prompts, search.beams)
    _, (tokens, parents, scores) = lax.scan(step, start, length=search.sequence)

    def trace(beam: jax.Array, chosen: Any) -> tuple[jax.Array, jax.Array]:
        token, parent = chosen
        return _of(parent, beam), _of(token, beam)

    last = jnp.broadcast_to(jnp.arange(search.beams), (search.batch, search.beams))
    _, hypotheses = lax.scan(trace, last, (tokens, parents), reverse=True)
    return {"hypotheses": hypotheses, "tokens": tokens, "parents": parents, "scores": scores}


def _of(state: jax.Array, beams: jax.Array) -> jax.Array:
    """Returns the states of these beams. `state` is (batch, beams, ...)."""
    return jax.vmap(lambda state, beams: state[beams])(state, beams)


@functools.partial(jax.jit, static_argnums=0)
def replay(search: Search, weights: Weights, prompts: jax.Array, tokens: Any, parents: Any) -> Arrays:
    """Returns jax.nn's scores of each step's choices and of its best candidates, each (sequence, batch, beams)."""

    def step(carry: Any, chosen: Arrays) -> tuple[Any, Arrays]:
        hidden, token, scores = carry
        hidden, logits = language_model.model(weights, hidden, token)
        scores = all_scores(scores, logits)
        token, parents = chosen
        best, _ = lax.top_k(scores, search.beams)
        scores = jnp.take_along_axis(scores, parents * search.vocab + token, -1)
        return (_of(hidden, parents), token, scores), (scores, best)

    return lax.scan(step, _start(weights, prompts, search.beams), (tokens, parents))[1]


def check(search: Search, found: Mapping[str, Any], scores: Any, best: Any) -> tuple[float, float, str]:
    """Returns the largest error of a score, the largest near tie, and the first fault that the replay shows (or "").

    Each step may add to a score's error: the rounding of the score itself, and 32 eps for log p. The 32 eps cover
    the rounding of the largest logits, of the sum of their exponentials, and of its logarithm.
    """
    tokens, parents, claimed = (np.asarray(found[name]) for name in ("tokens", "parents", "scores"))
    for name, ids, end in (("token", tokens, search.vocab), ("parent", parents, search.beams)):
        if not (0 <= ids.min() and ids.max() < end):
            return np.nan, np.nan, f"a {name} is not from 0 to {end - 1}"
    scores, best = np.asarray(scores), np.asarray(best)
    steps = np.arange(1, search.sequence + 1)[:, None, None]
    bound = steps * np.finfo(np.float32).eps * (32 + np.abs(best))
    with np.errstate(invalid="ignore"):
        errors, gaps = np.abs(claimed - scores), np.abs(best - scores)
    largest = float(errors.max()), float(gaps.max())
    for what, off in (("score off by", errors), ("choice short of the best by", gaps)):
        wrong = np.argwhere(~(off <= bound))  # a NaN is wrong as well
        if len(wrong):
            step, prompt, beam = wrong[0]
            return *largest, (
                f"{what} {off[step, prompt, beam]:.3g}, more than {bound[step, prompt, beam]:.3g}, at step"
                f" {step}, prompt {prompt}, beam {beam}; so are {len(wrong)} of {off.size}"
            )
    return *largest, ""


def make_searches(chosen: Any) -> list[Search]:
    if max(chosen.k) > min(chosen.vocab):
        raise ValueError(f"--k={max(chosen.k)} is more than the vocabulary V={min(chosen.vocab)}")
    lists = chosen.batch, chosen.k, chosen.vocab, chosen.dtype, chosen.sequence
    return list(itertools.starmap(Search, itertools.product(*lists)))


def run_search(search: Search, chosen: Any) -> list[Record]:
    weights, prompts, training_loss = language_model.trained(search, chosen)
    peers = ["jax", "jax_rows"]
    jaxs: list[np.ndarray] = []  # the hypotheses of jax, which the others are compared with

    def prepare(record: Record) -> Call:
        name = record.contender
        program = functools.partial(decode, name, search)
        call = jax_call(program, weights, prompts, ran="" if record.ours else "jax")
        logits = jax.ShapeDtypeStruct((search.batch, search.beams, search.vocab), search.dtype)
        driver.describe(record, call, functools.partial(_ours, name), logits, search.beams)
        found = call.result()
        hypotheses = np.asarray(found["hypotheses"])
        jaxs.extend([hypotheses] * (name == "jax"))
        record.add(hypotheses=search.batch * search.beams)
        if jaxs:
            record.add(same=int(np.sum(np.all(hypotheses == jaxs[0], axis=0))))
        replayed = replay(search, weights, prompts, found["tokens"], found["parents"])
        error, gap, reason = check(search, found, *replayed)
        if np.isfinite(error) and np.isfinite(gap):
            record.add(score_error=error, gap=gap)
        if reason:
            raise driver.Wrong(reason)  # timing a wrong search would be pointless
        return call

    names = [*peers, *chosen.implementations]
    found = {"steps": search.sequence, "training_loss": training_loss}
    return driver.measure(search, names, prepare, chosen, required=peers, **found)


COLUMNS = "ran", "status", "same", "score_error", "gap", "tokens_per_s", "speedup", "device_us_per_step"
BENCHMARK = Benchmark("beam_search", make_searches, run_search, COLUMNS, ("jax",))


def define_flags() -> None:
    flags.define_decoding(batch="How many prompts a search has.", k="How many beams a prompt has.")


main = driver.program(__name__, define_flags, BENCHMARK)
