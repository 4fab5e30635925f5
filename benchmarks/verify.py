"""How fast is verify? python -m benchmarks.verify --flagfile=configs/verify.flags

A step of speculative decoding: --batch sequences with --drafts drafts each, which a draft model drew. The draft model's
logits are the target's, with normal noise of standard deviation 0.5.

The draft is accepted with probability min(1, p / q). So the drafts give the expected number of accepted ones, and its
standard deviation. The check of every contender compares the number with these, to 5 standard deviations, and each
token with the drafts, the filters and the residual max(p - q, 0).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax
from benchmarks.sample import within_top_p
from benchmarks.support import driver, flags
from benchmarks.support.contenders import Call, Contender, jax_call, named, need_gpu, torch_and_wait
from benchmarks.support.result import Benchmark, Record

TEMPERATURE, TOP_P = 0.8, 0.9
FILTERS = {"none": {}, "top_p": {"top_p": TOP_P}}
PEERS = {
    "sample": "our sample of the same rows: one token at every position",
    "jax": "the formula in plain JAX, with a sort for top_p",
    "flashinfer": "FlashInfer's softmax, top_p_renorm_probs and chain_speculative_sampling",
}


@dataclasses.dataclass(frozen=True)
class Step:
    batch: int
    drafts: int
    vocab: int
    dtype: str
    function: str  # the filters
    seed: int


@functools.partial(jax.jit, static_argnums=0)
def inputs(step: Step) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(step.seed), 3)
    x = jax.random.normal(keys[0], (step.batch, step.drafts + 1, step.vocab), step.dtype)
    noise = 0.5 * jax.random.normal(keys[1], (step.batch, step.drafts, step.vocab))
    log_q = jax.nn.log_softmax(x[:, :-1].astype(jnp.float32) / TEMPERATURE + noise)
    drafts = jax.random.categorical(keys[2], log_q).astype(jnp.int32)
    return {"draft_tokens": drafts, "logits": x, "draft_log_probs": log_q}


def plain_log_p(x: jax.Array, top_p: float = 1.0) -> jax.Array:
    x = x.astype(jnp.float32) / TEMPERATURE
    x = within_top_p(x, jnp.sort(x, -1, descending=True), top_p) if top_p < 1 else x
    return jax.nn.log_softmax(x)


def at_tokens(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_p, tokens[..., None], -1)[..., 0]


def by_jax(key: jax.Array, draft_tokens, logits, draft_log_probs, top_p: float = 1.0) -> jax.Array:
    """Returns the tokens, padded with -1."""
    keys, drafts = jax.random.split(key), draft_tokens
    log_p = plain_log_p(logits, top_p)
    u = jax.random.uniform(keys[0], drafts.shape)
    is_accepted = jnp.log(u) < at_tokens(log_p[:, :-1], drafts) - at_tokens(draft_log_probs, drafts)
    accepted = jnp.sum(jnp.cumprod(is_accepted, -1), -1, dtype=jnp.int32)
    q = jnp.pad(jnp.exp(draft_log_probs), [(0, 0), (0, 1), (0, 0)])  # 0 after the last draft
    here = accepted[:, None, None]
    p, q = (jnp.take_along_axis(a, here, 1)[:, 0] for a in (jnp.exp(log_p), q))
    new = jax.random.categorical(keys[1], jnp.log(jnp.maximum(p - q, 0)))
    place = jnp.arange(drafts.shape[-1] + 1)
    padded = jnp.pad(drafts, [(0, 0), (0, 1)])
    after = jnp.where(place == accepted[:, None], new[:, None], -1)
    return jnp.where(place < accepted[:, None], padded, after)


def by_flashinfer(x: Any, drafts: Any, q: Any, filters: dict[str, float]) -> tuple[Any, None]:
    from flashinfer import sampling  # pyright: ignore[reportMissingImports]

    rows = x.reshape(-1, x.shape[-1]).float()
    p = sampling.softmax(rows, TEMPERATURE)
    if filters:
        p = sampling.top_p_renorm_probs(p, filters["top_p"])
    tokens = sampling.chain_speculative_sampling(q, drafts, p.reshape(x.shape))[0]
    return tokens, None


def ours(name: str, key: jax.Array, given: dict[str, jax.Array], filters: dict[str, float]) -> jax.Array:
    options = {"temperature": TEMPERATURE, "implementation": named(name)}
    return pallas_softmax.verify(key, **given, **filters, **options).tokens


@functools.partial(jax.jit, static_argnames="top_p")
def facts(tokens: jax.Array, draft_tokens, logits, draft_log_probs, top_p: float = 1.0) -> dict[str, Any]:
    """Returns what `check` compares."""
    log_p = plain_log_p(logits, top_p)
    ratio = at_tokens(log_p[:, :-1], draft_tokens) - at_tokens(draft_log_probs, draft_tokens)
    accepted = jnp.sum(tokens >= 0, -1) - 1
    here = jnp.maximum(accepted, 0)[:, None]
    new = jnp.take_along_axis(tokens, here, 1)

    def of_new(a: jax.Array) -> jax.Array:
        row = jnp.take_along_axis(a, jnp.minimum(here, a.shape[1] - 1)[..., None], 1)[:, 0]
        return jnp.take_along_axis(row, jnp.maximum(new, 0), -1)[:, 0]

    lenient = plain_log_p(logits, min(1.0, top_p + 1e-3))  # rounding may move the cutoff of a contender
    return {
        "accept": jnp.exp(jnp.minimum(ratio, 0)),  # the probability of acceptance of each draft
        "accepted": accepted,  # the number of accepted drafts of each row
        "log_p": of_new(lenient),
        "log_q": of_new(draft_log_probs),
    }


def check(tokens: Any, given: dict[str, jax.Array], filters: dict[str, float]) -> None:
    """Raises AssertionError if no step could give these tokens."""
    found = {name: np.asarray(a, float) for name, a in facts(jnp.asarray(tokens), **given, **filters).items()}
    tokens, drafts, accepted = np.asarray(tokens), np.asarray(given["draft_tokens"]), found["accepted"]
    place = np.arange(tokens.shape[1])
    padded = (tokens >= 0) == (place <= accepted[:, None])
    assert (accepted >= 0).all() and padded.all(), "-1 before the end"
    assert (tokens < given["logits"].shape[-1]).all(), "a token of V or more"
    same = (tokens[:, :-1] == drafts) | (place[:-1] >= accepted[:, None])
    assert same.all(), "an accepted draft changed"
    assert np.isfinite(found["log_p"]).all(), "a token that the filters leave out"
    rejected = accepted < drafts.shape[1]
    # A token of the residual has p > q; 1e-2 is for rounding.
    assert (found["log_p"] > found["log_q"] - 1e-2)[rejected].all(), "a token outside of the residual"
    reached = np.cumprod(found["accept"], -1)  # the probabilities that at least 1, 2, .. drafts are accepted
    counts = np.arange(1, drafts.shape[1] + 1)
    # The mean of N is the sum of P(N >= n); the mean of N^2 is the sum of (2 n - 1) P(N >= n).
    mean, square = reached.sum(-1), (reached * (2 * counts - 1)).sum(-1)
    bound = 5 * np.sqrt(np.sum(square - mean**2)) + 1
    assert abs(accepted.sum() - mean.sum()) <= bound, f"{accepted.sum()} accepted, expected {mean.sum():.1f}"


def _run(step: Step, chosen: Any) -> list[Record]:
    key, given, filters = jax.random.key(step.seed + 1), inputs(step), FILTERS[step.function]

    def prepare(record: Record) -> Call:
        name = record.contender
        if name == "flashinfer":
            need_gpu("FlashInfer")
            torch, _ = torch_and_wait()
            q = torch.from_dlpack(jnp.exp(given["draft_log_probs"]))
            drafts = torch.from_dlpack(given["draft_tokens"])
            draw = functools.partial(by_flashinfer, drafts=drafts, q=q, filters=filters)
            call = Contender(name, draw, torch=True).call("forward", (given["logits"],), None)
        elif name == "sample":
            sample = functools.partial(pallas_softmax.sample, temperature=TEMPERATURE, **filters)
            call = jax_call(lambda key, given: sample(key, given["logits"]), key, given)
        elif name == "jax":
            call = jax_call(lambda key, given: by_jax(key, **given, **filters), key, given, ran="jax")
        else:
            call = jax_call(functools.partial(ours, name, filters=filters), key, given)
        driver.describe(record, call, extra_mb=call.extra_mb)
        result = call.result()
        if name != "sample":
            tokens = np.asarray(result["y"].cpu() if name == "flashinfer" else result)
            with driver.wrong_if_refuted():
                check(tokens, given, filters)
            record.add(accepted=float((tokens >= 0).sum(-1).mean() - 1))
        return call

    names = [*chosen.implementations, *chosen.peers]
    return driver.measure(step, names, prepare, chosen, bytes=given["logits"].nbytes)


def make_steps(chosen: Any) -> list[Step]:
    lists = chosen.batch, chosen.drafts, chosen.vocab, chosen.dtype, chosen.filters, [chosen.seed]
    return list(itertools.starmap(Step, itertools.product(*lists)))


COLUMNS = "ran", "status", "accepted", "p50_us", "share_of_read", "speedup", "first_result_s"
BENCHMARK = Benchmark("verify", make_steps, _run, COLUMNS, ("jax",), bandwidths=("read",))


def define_flags() -> None:
    flags.define("vocab", "dtype", "implementations", "seed", "repeats", batch="How many sequences.")
    flags.define_list("drafts", flags.INTEGERS, "5", "How many drafts each sequence has.")
    flags.define_words("filters", FILTERS, "Which filters restrict the target.")
    flags.define_peers(PEERS, default=("sample", "jax"))


main = driver.program(__name__, define_flags, BENCHMARK)
