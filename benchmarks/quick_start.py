"""Are five calls right, and how fast are they here? python -m benchmarks.quick_start

The calls are a softmax, a top-k, a draw, a gate, and a loss with its gradients. On a GPU they have the sizes of the
table in README.md, elsewhere small ones. The other benchmarks check and time them, and this one shows one table.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax

import pallas_softmax as ps
from benchmarks import linear, route, sample, softmax, topk
from benchmarks.support import driver, flags, timing
from benchmarks.support.cases import Case
from benchmarks.support.driver import Benchmark
from benchmarks.support.result import Record, View

_KEPT = ("samples", "p20_us", "p50_us", "p80_us", "first_result_s", "rows_checked", "error")


@dataclasses.dataclass(frozen=True)
class Line:
    """The columns of the table that describe a call."""

    call: str
    shape: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Quick:
    """A call: its line of the table, how another benchmark measures it, and what `explain` traces."""

    line: Line
    run: Callable[[Any, Any], list[Record]]
    case: Any
    peer: str  # the contender of that benchmark that is plain JAX
    function: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]


def make_calls(chosen: Any) -> list[Quick]:
    """Returns the five calls."""
    if timing.on_gpu():
        rows = [(4096, 128256, "bfloat16"), (4000, 25000, "float32"), (64, 128256, "float32")]
        return [*_calls_on_rows(rows, chosen.seed), _gate(131072), _loss(8192, "llama3")]
    rows = [(64, 50257, "float32"), (64, 50257, "float32"), (16, 50257, "float32")]
    return [*_calls_on_rows(rows, chosen.seed), _gate(4096), _loss(128, "gpt2")]


def _calls_on_rows(rows: list[tuple[int, int, str]], seed: int) -> list[Quick]:
    """Returns the softmax, the top-k and the draw, each of logits (batch, V) of a dtype."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    calls = (
        ("softmax", softmax.BENCHMARK.run, "softmax", None, "jax", ps.softmax, ()),
        ("fused_topk, k = 5", topk.BENCHMARK.run, "softmax", 5, "jax_stable", _best, ()),
        ("sample, top_p = 0.9", sample.BENCHMARK.run, "top_p", None, "jax", _nucleus, (key,)),
    )
    found = []
    for (name, run, function, k, peer, explained, first), (batch, vocab, dtype) in zip(calls, rows):
        case = Case(batch, vocab, dtype, function, "none", -1, k, "forward", "normal", seed)
        logits = jax.ShapeDtypeStruct((batch, vocab), dtype)
        line = Line(name, f"{batch:,} x {vocab:,}", dtype)
        found.append(Quick(line, run, case, peer, explained, (*first, logits)))
    return found


def _best(logits: jax.Array) -> Any:
    return ps.fused_topk(logits, 5)


def _nucleus(key: jax.Array, logits: jax.Array) -> Any:
    return ps.sample(key, logits, top_p=0.9)


def _gate(tokens: int) -> Quick:
    """Returns DeepSeek-V3's gate."""
    case = route.Router(tokens, 256, 8, "float32", "groups", "forward")
    logits, bias = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((tokens, 256), (256,)))
    gate = lambda x, bias: ps.route(x, 8, **route.GATES["groups"].keywords(bias))  # noqa: E731
    return Quick(
        Line("route, 8 of 256 experts", f"{tokens:,} x 256", "float32"),
        route.run_router,
        case,
        "jax",
        gate,
        (logits, bias),
    )


def _loss(tokens: int, head: str) -> Quick:
    """Returns the mean loss of a language model's head, with its gradients."""
    width, vocab = linear.HEADS[head]
    case = linear.Loss(tokens, head, "bfloat16", "mean", "both")
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((tokens, width), (width, vocab)))
    labels = jax.ShapeDtypeStruct((tokens,), "int32")
    line = Line("linear_cross_entropy, gradients", f"{tokens:,} x {width:,} x {vocab:,}", "bfloat16")
    return Quick(line, linear.run_loss, case, "jax_float32", ps.linear_cross_entropy, (x, w, labels))


def run_call(quick: Quick, chosen: Any) -> list[Record]:
    """Measures one call. Returns a record of plain JAX and one of this package."""
    options = SimpleNamespace(
        implementations=("auto",),
        peers=(quick.peer,),
        seed=chosen.seed,
        repeats=chosen.repeats,
        seconds=chosen.seconds,
    )
    measured = {record.contender: record for record in quick.run(quick.case, options)}
    records = []
    for name, contender in (("plain JAX", quick.peer), ("pallas_softmax", "auto")):
        of = measured[contender]
        record = Record(quick.line, name, of.ours, of.ran, of.status, of.reason, required=of.required)
        record.add(**{key: value for key, value in of.found.items() if key in _KEPT})
        records.append(record)
    choices = ps.explain(quick.function, *quick.arrays)
    records[-1].add(explain="; ".join(map(str, choices)))
    return records


def _add_spread(rows: Any, of: Callable) -> None:
    rows["spread"] = (rows.p80_us - rows.p20_us) / rows.p50_us


_COLUMNS = "ran", "status", "p50_us", "spread", "speedup", "first_result_s"
VIEW = View(_COLUMNS, baselines=("plain JAX",), derive=_add_spread)
BENCHMARK = Benchmark("quick_start", make_calls, run_call, VIEW)


def define_flags() -> None:
    flags.define("seed", "repeats")


main = driver.program(__name__, BENCHMARK, define_flags)
