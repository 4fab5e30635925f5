"""How many rows have other bits in another batch? python -m benchmarks.invariance --flagfile=configs/invariance.flags

A call has --whole rows. Then --batch of them run alone, from the start of the whole batch and from its end. The table
counts the rows that get other bits. docs/invariance.md promises that a kernel has none.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import DEFINE_integer

import pallas_softmax as ps
from benchmarks.support import driver, flags
from benchmarks.support.contenders import jax_call, named
from benchmarks.support.result import Benchmark, Record

EXPERTS = 256  # of a router, in place of V


def _gradient(of: Any, x: Any, **options: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.sin(of(x, **options).astype(jnp.float32))))(x)


# (logits, keys, labels, **implementation) -> results, each with a row for each row of the logits
FUNCTIONS = {
    "softmax": lambda x, keys, labels, **options: ps.softmax(x, **options),
    "softmax_gradient": lambda x, keys, labels, **options: _gradient(ps.softmax, x, **options),
    "log_softmax": lambda x, keys, labels, **options: ps.log_softmax(x, **options),
    "log_softmax_gradient": lambda x, keys, labels, **options: _gradient(ps.log_softmax, x, **options),
    "logsumexp": lambda x, keys, labels, **options: ps.logsumexp(x, -1, **options),
    "token_stats": lambda x, keys, labels, **options: ps.token_stats(x, labels, temperature=0.7, **options),
    "fused_topk": lambda x, keys, labels, **options: ps.fused_topk(x, 64, **options),
    "sample": lambda x, keys, labels, **options: ps.sample(keys, x, **options),
    "sample_top_p": lambda x, keys, labels, **options: ps.sample(keys, x, top_p=0.9, **options),
    "filter_logits": lambda x, keys, labels, **options: ps.filter_logits(x, top_k=50, top_p=0.9, **options),
    "verify": lambda x, keys, labels, **options: ps.verify(keys, labels[:, None], jnp.stack([x, x], 1), **options),
    "route": lambda x, keys, labels, **options: ps.route(x[:, :EXPERTS], 8, **options),
}
PEERS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "logsumexp": jax.nn.logsumexp}


@dataclasses.dataclass(frozen=True)
class Part:
    function: str
    vocab: int
    dtype: str
    batch: int
    whole: int
    seed: int


@functools.cache
def _run(part: Part, contender: str, first: int) -> tuple[str, list[np.ndarray]]:
    """Returns what ran, and the bits of each row's results, for `part.batch` rows from `first` on."""
    keys = jax.random.split(jax.random.key(part.seed), part.whole)
    x = (3 * jax.random.normal(keys[0], (part.whole, part.vocab))).astype(part.dtype)
    labels = jnp.arange(part.whole, dtype=jnp.int32) % part.vocab
    rows = slice(first, first + part.batch)
    if contender == "jax":
        call = jax_call(functools.partial(PEERS[part.function], axis=-1), x[rows], ran="jax")
    else:
        function = functools.partial(FUNCTIONS[part.function], implementation=named(contender))
        call = jax_call(function, x[rows], keys[rows], labels[rows])
    found = [np.asarray(a) for a in jax.tree.leaves(call.result())]
    return call.ran, [np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in found]


def _compare(part: Part, chosen: Any) -> list[Record]:
    def prepare(record: Record) -> None:
        record.ran, whole = _run(dataclasses.replace(part, batch=part.whole), record.contender, 0)
        differ = 0
        for first in (0, part.whole - part.batch):
            _, alone = _run(part, record.contender, first)
            rows = slice(first, first + part.batch)
            differ += int(np.any([(a[rows] != b).any(1) for a, b in zip(whole, alone)], 0).sum())
        record.add(rows_checked=2 * part.batch, rows_that_differ=differ)
        if differ and record.ours and record.ran != "xla":  # XLA makes no promise
            record.status = "FAILED"

    return driver.measure(part, [*chosen.implementations, *["jax"] * (part.function in PEERS)], prepare, chosen)


def make_parts(chosen: Any) -> list[Part]:
    lists = chosen.functions, chosen.vocab, chosen.dtype, chosen.batch, [chosen.whole], [chosen.seed]
    return [Part(*values) for values in itertools.product(*lists) if chosen.whole >= values[3]]


COLUMNS = "ran", "status", "rows_checked", "rows_that_differ"
BENCHMARK = Benchmark("invariance", make_parts, _compare, COLUMNS)


def define_flags() -> None:
    flags.define("vocab", "dtype", "implementations", "seed", batch="How many rows run alone.")
    flags.define_words("functions", FUNCTIONS, "Which functions to run.")
    DEFINE_integer("whole", 1024, "Rows of the whole batch.", 1)


main = driver.program(__name__, define_flags, BENCHMARK)
