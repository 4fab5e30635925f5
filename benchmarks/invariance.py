"""How many rows have other bits in another batch? python -m benchmarks.invariance --flagfile=configs/invariance.flags

A call has --whole rows. Then --batch of them run alone, from the start of the whole batch and from its end. The table
counts the rows that get other bits. docs/invariance.md promises that a kernel has none.

A kernel reduces a row in the same order in any batch. --orders shows what this costs. It times the rows that run alone
in this order, and in every other order that the kernel has (`support/orders.py`).
"""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import DEFINE_boolean, DEFINE_integer

import pallas_softmax as ps
from benchmarks.support import driver, flags, timing
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.orders import orders
from benchmarks.support.result import Benchmark, Frame, Record, case_columns

EXPERTS = 256  # of a router, at most: its V
UNFILTERED = "sample", "sample_temperature"  # draws without filters and mask have a kernel of their own
ALLOWED = 0.1  # error of a result in another order; a draw may differ in a near tie
Rows = collections.namedtuple("Rows", "x keys labels keep t")  # keep is the mask, t the temperatures


def _gradient(of: Any, x: Any, **options: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.sin(of(x, **options).astype(jnp.float32))))(x)


# (rows, **implementation) -> results, each with a row for each row of the logits
FUNCTIONS = {
    "softmax": lambda r, **options: ps.softmax(r.x, **options),
    "softmax_where": lambda r, **options: ps.softmax(r.x, where=r.keep, **options),
    "softmax_gradient": lambda r, **options: _gradient(ps.softmax, r.x, **options),
    "softmax_where_gradient": lambda r, **options: _gradient(ps.softmax, r.x, where=r.keep, **options),
    "log_softmax": lambda r, **options: ps.log_softmax(r.x, **options),
    "log_softmax_gradient": lambda r, **options: _gradient(ps.log_softmax, r.x, **options),
    "logsumexp": lambda r, **options: ps.logsumexp(r.x, -1, **options),
    "token_stats": lambda r, **options: ps.token_stats(r.x, r.labels, temperature=0.7, **options),
    "token_stats_where": lambda r, **options: ps.token_stats(r.x, r.labels, where=r.keep, temperature=r.t, **options),
    "fused_topk": lambda r, **options: ps.fused_topk(r.x, _k(r, 64), **options),
    "fused_topk_where": lambda r, **options: ps.fused_topk(r.x, _k(r, 64), where=r.keep, temperature=r.t, **options),
    "sample": lambda r, **options: ps.sample(r.keys, r.x, **options),
    "sample_temperature": lambda r, **options: ps.sample(r.keys, r.x, temperature=r.t, **options),
    "sample_where": lambda r, **options: ps.sample(r.keys, r.x, where=r.keep, **options),
    "sample_top_p": lambda r, **options: ps.sample(r.keys, r.x, top_p=0.9, **options),
    "filter_logits": lambda r, **options: ps.filter_logits(r.x, top_k=50, top_p=0.9, **options),
    "verify": lambda r, **options: ps.verify(r.keys, r.labels[:, None], jnp.stack([r.x, r.x], 1), **options),
    "route": lambda r, **options: ps.route(r.x, _k(r, 8), **options),
}
PEERS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "logsumexp": jax.nn.logsumexp}


def _k(rows: Rows, most: int) -> int:
    return min(most, rows.x.shape[-1])


@dataclasses.dataclass(frozen=True)
class Part:
    function: str
    vocab: int
    dtype: str
    batch: int
    whole: int
    seed: int


def _rows(part: Part) -> Rows:
    """Returns the whole batch."""
    keys, shape = jax.random.split(jax.random.key(part.seed), part.whole), (part.whole, part.vocab)
    x = (3 * jax.random.normal(keys[0], shape)).astype(part.dtype)
    labels = jnp.arange(part.whole, dtype=jnp.int32) % part.vocab
    return Rows(x, keys, labels, jax.random.bernoulli(keys[-1], 0.7, shape), jnp.linspace(0.5, 2, part.whole)[:, None])


def _call(part: Part, contender: str, rows: Rows) -> Call:
    if contender == "jax":
        return jax_call(lambda rows: PEERS[part.function](rows.x, axis=-1), rows, ran="jax")
    return jax_call(functools.partial(FUNCTIONS[part.function], implementation=named(contender)), rows)


def _bits(result: Any) -> list[np.ndarray]:
    found = [np.asarray(a) for a in jax.tree.leaves(result)]
    return [np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in found]


@functools.lru_cache(maxsize=4)  # of several contenders; cases that differ only in their batch follow each other
def _whole(part: Part, contender: str) -> list[np.ndarray]:
    return _bits(_call(part, contender, _rows(part)).result())


def _orders(part: Part, rows: Rows) -> dict[str, Any]:
    """Returns the orders of the function's kernel, as `support.orders` does; none on a CPU, or without a kernel."""
    choices = ps.explain(functools.partial(FUNCTIONS[part.function], implementation=None), rows)
    choices = [c for c in choices if c.call.operation.is_gradient == part.function.endswith("_gradient")]
    has_kernel = timing.on_gpu() and choices and choices[-1].cuda == "mosaic_gpu"
    return orders(choices[-1], filtered=part.function not in UNFILTERED) if has_kernel else {}


def _compare(part: Part, chosen: Any) -> list[Record]:
    starts, rows = (0, part.whole - part.batch), _rows(part)
    alone = {at: jax.tree.map(lambda a, at=at: a[at : at + part.batch], rows) for at in starts}
    planned = _orders(part, alone[0]) if chosen.orders and "auto" in chosen.implementations else {}
    own, *others = planned or [None]
    calls: dict[str, Call] = {}

    def count(record: Record) -> Call | None:
        call = calls[record.contender] = _call(part, record.contender, alone[0])
        record.ran, whole = call.ran, _whole(dataclasses.replace(part, batch=part.whole), record.contender)
        differ = 0
        for at in starts:
            pairs = zip(whole, _bits(call.run(alone[at])))
            differ += int(np.any([(a[at : at + part.batch] != b).any(1) for a, b in pairs], 0).sum())
        record.add(rows_checked=2 * part.batch, rows_that_differ=differ)
        if own and record.contender in ("auto", "mosaic_gpu"):
            record.add(order=own)
        if differ and record.ours and record.ran != "xla":  # XLA makes no promise
            record.status = "FAILED"
        return call if record.ours and chosen.orders else None

    def reorder(record: Record) -> Call:
        with planned[record.contender]():
            call = _call(part, "auto", alone[0])
        if call.text == calls["auto"].text:
            raise AssertionError("the program is that of the planner's order")
        driver.compare(record, _finite(call), _finite(calls["auto"]), ALLOWED, "auto")
        record.add(order=record.contender)
        return call

    names = [*chosen.implementations, *["jax"] * (part.function in PEERS), *others]
    prepare = lambda record: (reorder if record.contender in others else count)(record)  # noqa: E731
    return driver.measure(part, names, prepare, chosen)


def _finite(call: Call) -> dict[str, Any]:
    return {"result": jax.tree.map(functools.partial(jnp.nan_to_num, neginf=0), call.result())}


def make_parts(chosen: Any) -> list[Part]:
    lists = chosen.functions, chosen.vocab, chosen.dtype, chosen.batch, [chosen.whole], [chosen.seed]
    parts = [Part(*values) for values in itertools.product(*lists) if chosen.whole >= values[3]]
    of_router = lambda part: dataclasses.replace(part, vocab=min(part.vocab, EXPERTS))  # noqa: E731
    return [*dict.fromkeys(of_router(part) if part.function == "route" else part for part in parts)]


def _add_cost(rows: Frame, of: Any) -> None:
    """Adds the least time over the orders of a call, and the cost of the planner's order, if there are others."""
    if {"order", "p50_us"} <= {*rows}:
        times = rows[rows.order.notna()].groupby(case_columns(rows)).p50_us
        rows["best_us"] = times.transform("min")
        rows["cost"] = (rows.p50_us / rows.best_us).where(rows.ours & (times.transform("count") > 1))


COLUMNS = "ran", "status", "rows_that_differ", "cost", "p50_us", "best_us", "rows_checked"
BENCHMARK = Benchmark("invariance", make_parts, _compare, COLUMNS, derive=_add_cost)


def define_flags() -> None:
    flags.define("vocab", "dtype", "implementations", "seed", "repeats", batch="How many rows run alone.")
    flags.define_words("functions", FUNCTIONS, "Which functions to run.")
    DEFINE_integer("whole", 1024, "Rows of the whole batch.", 1)
    DEFINE_boolean("orders", False, "Time each call; on GPUs, also time auto in other orders of its sums.")


main = driver.program(__name__, define_flags, BENCHMARK)
