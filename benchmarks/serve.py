"""How fast does a server decode with sample? python -m benchmarks.serve --flagfile=configs/serve.flags

The language model of support.language_model continues --batch requests together, by --sequence tokens each. A
request has its own temperature, top_k, top_p, min_p and seed, which are all traced. One jitted program computes the
texts from the prompts. The contenders draw a token in different ways:

sort   plain JAX: sort every row, sum cumulatively, and draw from the rest with jax.random.categorical. The sort is
       necessary because top_k and top_p differ between rows.
ours   sample

Every step of a few requests is replayed. The replay compares the tokens drawn by `sample` with the float64 oracle,
given the same u. Tokens per second are --batch times --sequence, over the wall time of a call.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax
from benchmarks.support import driver, flags, language_model
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.result import Benchmark, Record
from tests.support import bounds

_CHECKED = 8  # requests, replayed from first to last step
# The requests cycle through these parameters. The first one is greedy.
_NAMES = ("temperature", "top_k", "top_p", "min_p")
_KINDS = [
    (0.0, 1, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 2**31 - 1, 0.95, 0.0),
    (1.0, 40, 1.0, 0.05),
    (1.3, 2**31 - 1, 1.0, 0.1),
    (0.8, 20, 0.8, 0.02),
    (1.0, 2**31 - 1, 1.0, 0.0),
]


@dataclasses.dataclass(frozen=True)
class Service:
    batch: int  # requests that are decoded together
    vocab: int
    dtype: str  # of the output layer and the logits
    sequence: int


def requests(batch: int) -> dict[str, jax.Array]:
    columns = zip(*(_KINDS[i % len(_KINDS)] for i in range(batch)))
    return {name: jnp.array(column) for name, column in zip(_NAMES, columns)}


def keys_of(seeds: jax.Array, step: Any) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(seeds, step)


def by_sort(keys: jax.Array, logits: jax.Array, asked: dict[str, jax.Array]) -> tuple[jax.Array]:
    temperature, top_k, top_p, min_p = (asked[name][:, None] for name in _NAMES)
    x = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)
    tokens = jnp.argsort(x, -1, descending=True)
    x = jnp.take_along_axis(x, tokens, -1)
    p = jax.nn.softmax(jnp.where(jnp.arange(x.shape[-1]) < top_k, x, -jnp.inf))
    kept = (jnp.cumsum(p, -1) - p < top_p) & (p >= min_p * p[:, :1]) & (p > 0)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, x, -jnp.inf))
    drawn = jnp.where(temperature[:, 0] > 0, drawn, 0)
    return (jnp.take_along_axis(tokens, drawn[:, None], -1)[:, 0],)


def ours(name: str, keys: jax.Array, logits: jax.Array, asked: Any) -> Any:
    return tuple(pallas_softmax.sample(keys, logits, **asked, implementation=named(name)))


def decode(draw: Any, length: int, weights: Any, prompts: jax.Array, seeds: jax.Array, asked: Any) -> Any:
    """Continues the prompts by `length` tokens. Returns everything that `draw` returned, stacked over the steps.

    `draw` maps keys, logits and parameters to a tuple of arrays with one entry per row. The first holds the tokens.
    """

    def choose(logits: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
        drawn = draw(keys_of(seeds, i), logits, asked)
        return drawn[0], drawn

    return {"drawn": language_model.generate(choose, weights, prompts, jnp.arange(length))}


@jax.jit
def replay(weights: Any, prompts: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the logits behind the tokens of the checked requests, (length, checked, V).

    The model runs on all requests, because a product with fewer rows may run another kernel and round differently.
    """
    choose = lambda logits, token: (token, logits[:_CHECKED])  # noqa: E731
    return language_model.generate(choose, weights, prompts, tokens)


def check(drawn: Any, weights: Any, prompts: jax.Array, seeds: jax.Array, asked: Any) -> int:
    """Raises if the oracle refutes a draw of the first requests. Returns how many draws were checked."""
    logits = np.asarray(replay(weights, prompts, drawn[0]))
    drawn = [of[:, :_CHECKED] for of in drawn]
    asked = {name: np.asarray(of[:_CHECKED]) for name, of in asked.items()}
    for i, x in enumerate(logits):
        keys = keys_of(seeds[:_CHECKED], i)
        noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, x.shape[-1:], jnp.float32))(keys))  # noqa: B023
        names = [f"step {i}, request {j}" for j in range(len(x))]
        bounds.assert_sample([of[i] for of in drawn], x, noise, names, **asked)
    return logits.shape[0] * logits.shape[1]


def run_service(service: Service, chosen: Any) -> list[Record]:
    weights, prompts, _ = language_model.trained(service, chosen)
    seeds = jax.random.split(jax.random.key(chosen.seed), service.batch)
    asked = requests(service.batch)

    def prepare(record: Record) -> Call:
        own = functools.partial(ours, record.contender)
        program = functools.partial(decode, own if record.ours else by_sort, service.sequence)
        call = jax_call(program, weights, prompts, seeds, asked, ran="" if record.ours else "jax")
        logits = jax.ShapeDtypeStruct((service.batch, service.vocab), service.dtype)
        driver.describe(record, call, own, seeds, logits, asked)
        if record.ours:
            with driver.wrong_if_refuted():
                record.add(draws_checked=check(call.result()["drawn"], weights, prompts, seeds, asked))
        return call

    names = ["sort", *chosen.implementations]
    return driver.measure(service, names, prepare, chosen, required=["sort"], steps=service.sequence)


def make_services(chosen: Any) -> list[Service]:
    lists = chosen.batch, chosen.vocab, chosen.dtype, chosen.sequence
    return list(itertools.starmap(Service, itertools.product(*lists)))


COLUMNS = "ran", "status", "draws_checked", "tokens_per_s", "speedup", "device_us_per_step", "first_result_s"
BENCHMARK = Benchmark("serve", make_services, run_service, COLUMNS, ("sort",))


def define_flags() -> None:
    flags.define_decoding(batch="How many requests are decoded together.")


main = driver.program(__name__, define_flags, BENCHMARK)
