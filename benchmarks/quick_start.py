"""Are five calls right, and how fast are they here? python -m benchmarks.quick_start

The calls are a softmax, a top-k, a draw, a gate, and a loss with its gradients. On a GPU they have the sizes of the
table in README.md, elsewhere small ones. The other benchmarks check and time them, and this one shows one table.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks import linear, route, sample, softmax, topk
from benchmarks.support import driver, flags, timing
from benchmarks.support.cases import Case
from benchmarks.support.result import Benchmark, Record

_KEPT = ("samples", "p20_us", "p50_us", "p80_us", "first_result_s", "rows_checked", "error", "explain")


@dataclasses.dataclass(frozen=True)
class Line:
    """The columns of the table that describe a call."""

    call: str
    shape: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Quick:
    """A call: its line of the table, and the benchmark and the case that measure it."""

    line: Line
    benchmark: Benchmark  # its first baseline is plain JAX
    case: Any


def make_calls(chosen: Any) -> list[Quick]:
    if timing.on_gpu():
        rows = (4096, 128256, "bfloat16"), (4000, 25000, "float32"), (64, 128256, "float32")
        tokens, (loss_tokens, head) = 131072, (8192, "llama3")
    else:
        rows = (64, 50257, "float32"), (64, 50257, "float32"), (16, 50257, "float32")
        tokens, (loss_tokens, head) = 4096, (128, "gpt2")

    def on_rows(size: tuple, name: str, of: Any, what: str, k: int | None = None) -> Quick:
        batch, vocab, dtype = size
        case = Case(batch, vocab, dtype, what, "none", -1, k, "forward", "normal", chosen.seed)
        return Quick(Line(name, f"{batch:,} x {vocab:,}", dtype), of.BENCHMARK, case)

    width, vocab = linear.HEADS[head]
    return [
        on_rows(rows[0], "softmax", softmax, "softmax"),
        on_rows(rows[1], "fused_topk, k = 5", topk, "softmax", 5),
        on_rows(rows[2], "sample, top_p = 0.9", sample, "top_p"),
        Quick(  # DeepSeek-V3's gate
            Line("route, 8 of 256 experts", f"{tokens:,} x 256", "float32"),
            route.BENCHMARK,
            route.Router(tokens, 256, 8, "float32", "groups", "forward"),
        ),
        Quick(  # the mean loss of a language model's head
            Line("linear_cross_entropy, gradients", f"{loss_tokens:,} x {width:,} x {vocab:,}", "bfloat16"),
            linear.BENCHMARK,
            linear.Loss(loss_tokens, head, "bfloat16", "mean", "both"),
        ),
    ]


def run_call(quick: Quick, chosen: Any) -> list[Record]:
    """Measures one call. Returns a record of plain JAX and one of this package."""
    sampling = {name: getattr(chosen, name) for name in ("seed", "repeats", "seconds")}
    peer = quick.benchmark.baselines[0]
    options = SimpleNamespace(implementations=("auto",), peers=(peer,), **sampling)
    measured = {record.contender: record for record in quick.benchmark.run(quick.case, options)}
    records = []
    for name, contender in (("plain JAX", peer), ("pallas_softmax", "auto")):
        of = measured[contender]
        found = {key: value for key, value in of.found.items() if key in _KEPT}
        records.append(dataclasses.replace(of, case=quick.line, contender=name, found=found))
    return records


def _add_spread(rows: Any, of: Callable) -> None:
    rows["spread"] = (rows.p80_us - rows.p20_us) / rows.p50_us


COLUMNS = "ran", "status", "p50_us", "spread", "speedup", "first_result_s"
BENCHMARK = Benchmark("quick_start", make_calls, run_call, COLUMNS, ("plain JAX",), derive=_add_spread)


def define_flags() -> None:
    flags.define("seed", "repeats")


main = driver.program(__name__, define_flags, BENCHMARK)
