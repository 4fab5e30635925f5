"""How fast are a language model's head and its draw? python -m benchmarks.head --flagfile=configs/head.flags

A step of a decoder draws one token from each of --batch rows of logits x @ w. PEERS lists the other contenders.

Before anything is timed, the tokens are compared with product_sample's. 1% of them may differ, or one, because of near
ties. The log-probabilities of `linear_sample` must equal `linear_log_probs` of its tokens, bit for bit with kernels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_softmax as ps
from benchmarks.linear import HEADS
from benchmarks.sample import FILTERS
from benchmarks.support import driver, flags
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.result import Benchmark, Record

PEERS = {
    "product": "x @ w in float32, by XLA: what every contender that stores logits has to compute",
    "product_sample": "that product, then our sample",
    "product_categorical": "that product, then our filter_logits if there are filters, then jax.random.categorical",
    "log_probs": "linear_log_probs of random labels: no draw",
}


@dataclasses.dataclass(frozen=True)
class Step:
    tokens: int
    head: str
    dtype: str
    function: str  # the filters
    deviation: float  # of the logits
    seed: int


def compute(name: str, filters: dict[str, Any], key: jax.Array, x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
    if name == "log_probs":
        return ps.linear_log_probs(x, w, labels)
    if name not in PEERS:
        return ps.linear_sample(key, x, w, **filters, implementation=named(name))
    z = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    if name == "product_sample":
        return ps.sample(key, z, **filters)
    if name == "product_categorical":
        return jax.random.categorical(key, ps.filter_logits(z, **filters) if filters else z)
    return z


def inputs(step: Step) -> tuple[jax.Array, ...]:
    keys, (width, vocab) = jax.random.split(jax.random.key(step.seed), 4), HEADS[step.head]
    x = jax.random.normal(keys[1], (step.tokens, width), step.dtype)
    w = step.deviation * width**-0.5 * jax.random.normal(keys[2], (width, vocab), step.dtype)
    return keys[0], x, w, jax.random.randint(keys[3], (step.tokens,), 0, vocab)


def _run(step: Step, chosen: Any) -> list[Record]:
    _, x, w, _ = arrays = inputs(step)
    wanted: dict[str, jax.Array] = {}

    def prepare(record: Record) -> Call:
        own = functools.partial(compute, record.contender, FILTERS[step.function])
        call = jax_call(own, *arrays)
        driver.describe(record, call, own, *arrays, extra_mb=call.extra_mb)
        if record.contender in ("product", "log_probs"):
            return call
        drawn = call.result()
        tokens = getattr(drawn, "indices", drawn)
        differ = int(jnp.sum(tokens != wanted.setdefault("tokens", tokens)))
        record.add(other_tokens=differ)
        if differ > max(1, step.tokens / 100):
            raise driver.Wrong(f"{differ} of {step.tokens} tokens are not product_sample's")
        if record.ours:
            log_probs = functools.partial(ps.linear_log_probs, implementation=named(record.contender))
            again, got = jax_call(log_probs, x, w, tokens), {"y": drawn.log_probs}
            driver.compare(record, got, {"y": again.result()}, 1e-5 * (again.ran == "xla"), "linear_log_probs")
        return call

    names = ["product_sample", *chosen.peers, *chosen.implementations]
    return driver.measure(step, names, prepare, chosen, required=PEERS)


def make_steps(chosen: Any) -> list[Step]:
    lists = chosen.batch, chosen.head, chosen.dtype, chosen.filters, chosen.deviation, [chosen.seed]
    return list(itertools.starmap(Step, itertools.product(*lists)))


def _derive(rows: Any, of: Callable) -> None:
    rows["of_log_probs"] = rows.p50_us / of("p50_us", "log_probs")


COLUMNS = "ran", "status", "other_tokens", "error", "p50_us", "speedup", "of_log_probs"
BENCHMARK = Benchmark("head", make_steps, _run, COLUMNS, ("product_sample",), _derive)


def define_flags() -> None:
    flags.define("dtype", "implementations", "seed", "repeats", batch="How many tokens are projected.")
    flags.define_words("head", HEADS, "The models to take the head's width and columns from.", "small")
    flags.define_words("filters", FILTERS, "Which filters restrict the draw.")
    flags.define_list("deviation", flags.Items(r"\d+(\.\d+)?", "numbers", float), "2", "Standard deviation of logits.")
    flags.define_peers(PEERS, default=tuple(PEERS))


main = driver.program(__name__, define_flags, BENCHMARK)
