"""The tables and measured numbers of the performance pages agree with the recorded results.

`tables_of` makes the tables of a page from the CSVs, with the line below each one from the JSON.
"""

import dataclasses
import functools
import json
import re
import shlex
from typing import Any

import pytest

from benchmarks.support.result import number
from tests.docs.test_docs import ROOT

pd = pytest.importorskip("pandas")
RESULTS = ROOT / "benchmarks" / "results"
UNITS = r"(?:µs|us|ms|GiB|GB|MiB|MB|%|times|tokens/s)"


@functools.cache
def rows_of(name: str):
    """Returns the rows of a result, such as targets/softmax."""
    rows = pd.read_csv(RESULTS / f"{name}.csv")
    for column in set(rows) & {"p50_us", "device_us", "device_us_per_step", "wall_p50_us"}:
        rows[column.replace("_us", "_ms")] = rows[column] / 1000
    if "memory_mib" in rows:
        rows["memory_gib"] = rows.memory_mib / 1024
    if name == "moe_router/topk":
        rows["experts"] = rows.vocab
    return rows


def chosen(name: str, **where: Any):
    """Returns the rows of a result with these values."""
    rows = rows_of(name)
    for column, value in where.items():
        if value is None:
            rows = rows[rows[column].isna()]
        else:
            rows = rows[rows[column].isin(value if isinstance(value, tuple) else (value,))]
    return rows


def value(name: str, column: str = "p50_us", **where: Any) -> float:
    """Returns one number of a result."""
    (found,) = chosen(name, **where)[column]
    return float(found)


def times(ratio: float) -> str:
    """Returns a speed-up as text."""
    return f"{ratio:.2f}" if ratio < 10 else number(ratio)


def span(values: Any, form: Any = times) -> str:
    """Returns the smallest and the largest value: "0.99 to 2.56"."""
    return f"{form(min(values))} to {form(max(values))}"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page: what its rows are (columns of the CSV), and one column after the other.

    A column is (title, column of the CSV, values that choose its rows). Other rows of the CSV are left out by `where`.
    """

    name: str
    down: tuple[str, ...]
    columns: tuple[tuple[str, str, dict[str, Any]], ...]
    where: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns the lines of the table in Markdown."""
        heads = [_HEADS.get(name, name) for name in self.down] + [title for title, *_ in self.columns]
        lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        rows = chosen(self.name, **self.where)
        for _, row in rows[_fields(self.down)].drop_duplicates().iterrows():
            same = {field: None if row[field] != row[field] else row[field] for field in row.index}
            cells = [_cell(name, row) for name in self.down]
            for _, column, where in self.columns:
                found = chosen(self.name, **{"contender": "auto"} | self.where | same | where)
                cells.append(_number(column, found[column].iloc[0]) if len(found) else "")
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def text(self) -> str:
        """Returns the table with its provenance."""
        return "\n".join([*self.lines(), "", provenance(self.name)])


_HEADS = {"shape": "rows × V", "columns": "V × columns", "vocab": "V", "size": "sequence, or V"}
_HEADS |= {"contender": "", "sharding": "sharded along"}


def _fields(down: tuple[str, ...]) -> list[str]:
    fields = {"shape": ["batch", "vocab"], "columns": ["batch", "vocab"], "statistics": ["contender"]}
    return [field for name in down for field in fields.get(name, [name])]


def _cell(name: str, row: Any) -> str:
    match name:
        case "shape":
            return f"{row.batch:,} × {row.vocab:,}"
        case "columns":
            return f"{row.vocab:,} × {row.batch:,}"
        case "contender":
            return _CONTENDERS[row.contender]
        case "statistics":
            return _STATISTICS.get(row.contender) or _CONTENDERS[row.contender]
        case "program" | "function" | "sharding":
            return _CONTENDERS.get(row[name], row[name])
    return f"{row[name]:,}" if isinstance(row[name], int | float) else str(row[name]).replace("_", " ")


_STATISTICS = {
    "auto": "`linear_token_stats`",
    "logsumexp": "`linear_logsumexp`",
    "log_probs": "`linear_log_probs`",
}
_CONTENDERS = {
    "auto": "`linear_cross_entropy`",
    "jax_inexact": "plain JAX, bfloat16 logits",
    "jax_float32": "plain JAX, float32 logits",
    "jax_scan": "plain JAX, checkpointed scan, float32 logits",
    "torch_compile": "torch.compile, bfloat16 logits",
    "quack": "QuACK 0.6.5, chunks of 4,096 tokens",
    "quack_exp": "the same with scaled exponentials",
    "liger": "Liger 0.8.5",
    "cce": "cut-cross-entropy 25.1.1",
    "matmul": "the projection alone (a third of the products)",
    "block": "transformer block, mask of -inf in the scores",
    "block_where": "transformer block, mask as `where=`",
    "loss_take": "cross entropy by `log_softmax`",
    "loss_lse": "cross entropy by `logsumexp`",
    "jax": "plain JAX",
    "ours": "`linear_cross_entropy`",
    "attention": "no mask",
    "attention_causal": "causal mask",
    "batch": "the batch",
    "vocab": "V",
    "top_k_top_p": "top_k and top_p",
    "all": "all three",
    "none": "no filter",
}


def _number(column: str, value: Any) -> str:
    """Returns a number of a column as text: a speed-up, a share in percent, or a number with three digits."""
    if value != value:
        return ""
    if column.startswith(("speedup", "slowdown", "products", "of_topk")):
        return times(value)
    if column.startswith(("share", "of_linear")):
        return f"{100 * value:.0f}%"
    if column in ("first_loss", "last_loss"):
        return number(value, 4)
    return number(value)


def provenance(name: str) -> str:
    """Returns the line below a table, from the JSON: device, versions, date, commit, command and folder."""
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    commands = [
        [word for word in shlex.split(part)[1:] if not re.match(r"--(output_dir|commit)", word)]
        for run in runs
        for part in run["command"].split(";")
    ]
    command = " ".join(word for word in commands[0] if all(word in other for other in commands))
    device = runs[0]["device"].replace("NVIDIA ", "")
    dates = ", ".join(sorted({run["date"][:10] for run in runs}))
    commits = ", ".join(sorted({run["commit"][:7] for run in runs}))
    folder = name.split("/")[0]
    return (
        f"`python {command}`: {device}, jax {runs[0]['jax']}, {dates}, commit {commits}"
        f" ([{folder}](../../benchmarks/results/{folder}))"
    )


def time_and_speedup(**by: dict[str, Any]) -> tuple[tuple[str, str, dict[str, Any]], ...]:
    """Returns two columns, time and speed-up, for each title."""
    return tuple(
        column
        for title, where in by.items()
        for column in ((f"{title.replace('_', ' ')}, µs", "p50_us", where), ("speed-up", "speedup", where))
    )


BY_DTYPE = time_and_speedup(float32={"dtype": "float32"}, bfloat16={"dtype": "bfloat16"})
PASSES = time_and_speedup(forward={"direction": "forward"}, backward={"direction": "backward"})
FILTERS = ("none", "min_p", "top_k", "top_p", "top_k_top_p", "all")
TABLES = {
    "softmax": (
        Table("targets/softmax", ("shape", "dtype"), PASSES),
        Table("logsumexp/softmax", ("shape",), BY_DTYPE),
        Table(
            "token_stats/softmax",
            ("shape", "dtype"),
            (
                ("forward, µs", "p50_us", {"direction": "forward"}),
                ("speed-up", "speedup", {"direction": "forward"}),
                ("`logsumexp`, µs", "p50_us", {"direction": "forward", "function": "logsumexp"}),
                ("with gradients, µs", "p50_us", {"direction": "both"}),
                ("speed-up", "speedup", {"direction": "both"}),
            ),
            {"function": "token_stats"},
        ),
        Table("few_rows/softmax", ("shape",), BY_DTYPE),
        Table("long_rows/softmax", ("shape", "dtype"), PASSES),
        Table("columns/softmax", ("columns", "dtype"), PASSES),
    ),
    "topk": (
        Table(
            "topk_targets/topk",
            ("shape", "k", "dtype"),
            (
                ("ours, µs", "p50_us", {}),
                ("JAX, µs", "p50_us", {"contender": "jax_stable"}),
                ("not stable, µs", "p50_us", {"contender": "jax_unstable"}),
                ("torch, µs", "p50_us", {"contender": "torch"}),
                ("speed-up", "speedup", {}),
            ),
        ),
        Table("topk_sweep/topk", ("k",), (*time_and_speedup(time={}), ("of a read", "share_of_read", {}))),
        Table("topk_shapes/topk", ("shape", "k"), BY_DTYPE),
        Table(
            "moe_router/topk",
            ("experts", "k", "dtype"),
            time_and_speedup(forward={"direction": "forward"}, forward_and_backward={"direction": "both"}),
            {"batch": 131072},
        ),
        Table(
            "route/route",
            ("gate", "experts", "k", "dtype"),
            (
                ("forward, µs", "p50_us", {"direction": "forward"}),
                ("speed-up", "speedup", {"direction": "forward"}),
                ("relative to `fused_topk`", "of_topk", {"direction": "forward"}),
                ("forward and backward, µs", "p50_us", {"direction": "both"}),
                ("speed-up", "speedup", {"direction": "both"}),
                ("relative to `fused_topk`", "of_topk", {"direction": "both"}),
            ),
        ),
        Table("topk_many/topk", ("shape", "k"), BY_DTYPE),
        Table("topk_short/topk", ("shape", "k"), BY_DTYPE, {"logits": "normal"}),
        Table("topk_backward/topk", ("shape", "k"), BY_DTYPE),
    ),
    "sampling": (
        Table(
            "sample/sample",
            ("shape", "dtype"),
            tuple((_CONTENDERS.get(name, name), "p50_us", {"function": name}) for name in FILTERS),
        ),
        Table(
            "sample/sample",
            ("shape", "dtype"),
            tuple((_CONTENDERS.get(name, name), "speedup", {"function": name}) for name in FILTERS),
        ),
        Table(
            "serve/serve",
            ("vocab", "dtype"),
            (
                ("sort, tokens/s", "tokens_per_s", {"contender": "sort"}),
                ("`sample`, tokens/s", "tokens_per_s", {}),
                ("speed-up", "speedup", {}),
                ("a step by sort, µs", "device_us_per_step", {"contender": "sort"}),
                ("by `sample`, µs", "device_us_per_step", {}),
            ),
        ),
    ),
    "loss": (
        Table(
            "linear/linear",
            ("contender",),
            (
                ("mean, ms", "p50_ms", {"reduction": "mean"}),
                ("speed-up", "speedup", {"reduction": "mean"}),
                ("a loss per token, ms", "p50_ms", {"reduction": "none"}),
                ("speed-up", "speedup", {"reduction": "none"}),
                ("memory, GiB", "memory_gib", {"reduction": "mean"}),
            ),
        ),
        Table(
            "linear_peers/linear",
            ("contender",),
            (
                ("w as (V, D), ms", "p50_ms", {"w_shape": "VxD"}),
                ("w as (D, V), ms", "p50_ms", {"w_shape": "DxV"}),
                ("memory, GiB", "memory_gib", {"w_shape": "VxD"}),
            ),
        ),
        Table(
            "linear_quack/linear",
            ("contender",),
            tuple(
                (f"{title}, {unit}", column, {"head": head, "workspace_mib": workspace})
                for title, head, workspace in (
                    ("Llama 3", "llama3", 512),
                    ("BitNet", "bitnet", 512),
                    ("BitNet with 2 GiB", "bitnet", 2048),
                )
                for unit, column in (("ms", "p50_ms"), ("GiB", "memory_gib"))
            ),
        ),
        Table(
            "linear_shapes/linear",
            ("contender",),
            tuple(
                (f"{name}, ms", "p50_ms", {"head": head})
                for head, name in (("llama3", "Llama 3"), ("gpt2", "GPT-2"), ("llama2_70b", "Llama 2 70B"))
            ),
        ),
        Table(
            "linear_workspace/linear",
            ("workspace_mib",),
            (
                ("time, ms", "p50_ms", {}),
                ("memory, GiB", "memory_gib", {}),
                ("the projection alone, ms", "p50_ms", {"contender": "matmul"}),
            ),
        ),
        Table(
            "linear_long/linear",
            ("contender",),
            (("time, ms", "p50_ms", {}), ("memory, GiB", "memory_gib", {})),
        ),
        Table(
            "linear_gpt2/linear",
            ("contender",),
            (
                ("forward, ms", "p50_ms", {"direction": "forward"}),
                ("with gradients, mean, ms", "p50_ms", {"direction": "both", "reduction": "mean"}),
                (
                    "with gradients, a loss per token, ms",
                    "p50_ms",
                    {"direction": "both", "reduction": "none"},
                ),
            ),
        ),
        Table(
            "linear_token_stats/linear",
            ("statistics",),
            (
                ("Llama 3, forward, ms", "p50_ms", {"head": "llama3", "direction": "forward"}),
                ("with gradients, ms", "p50_ms", {"head": "llama3", "direction": "both"}),
                ("memory, GiB", "memory_gib", {"head": "llama3", "direction": "both"}),
                ("GPT-2, forward, ms", "p50_ms", {"head": "gpt2", "direction": "forward"}),
                ("with gradients, ms", "p50_ms", {"head": "gpt2", "direction": "both"}),
            ),
            {"contender": ("matmul", "jax_scan", "logsumexp", "log_probs", "auto")},
        ),
        Table(
            "linear_training/linear_training",
            ("contender",),
            (
                ("a step, µs", "step_us", {}),
                ("memory, GiB", "memory_gib", {}),
                ("first loss", "first_loss", {}),
                ("last loss", "last_loss", {}),
            ),
        ),
    ),
    "programs": (
        Table(
            "programs/programs",
            ("program", "size"),
            (
                ("plain JAX, µs", "p50_us", {"contender": "jax", "remat": False}),
                ("ours, µs", "p50_us", {"remat": False}),
                ("speed-up", "speedup", {"remat": False}),
                ("with `jax.checkpoint`", "speedup", {"remat": True}),
            ),
            {"program": ("block", "block_where", "loss_take", "loss_lse")},
        ),
        Table(
            "attention/programs",
            ("program", "size"),
            (
                ("plain JAX, µs", "p50_us", {"contender": "jax"}),
                ("our softmax, µs", "p50_us", {}),
                ('`"xla"`, µs', "p50_us", {"contender": "dot_product_attention"}),
                ('`"cudnn"`, µs', "p50_us", {"contender": "cudnn"}),
            ),
            {"remat": False},
        ),
        Table(
            "beam_search/beam_search",
            ("vocab", "dtype"),
            (
                ("plain JAX, tokens/s", "tokens_per_s", {"contender": "jax"}),
                ("by rows, tokens/s", "tokens_per_s", {"contender": "jax_rows"}),
                ("ours, tokens/s", "tokens_per_s", {}),
                ("speed-up", "speedup", {}),
            ),
        ),
    ),
    "several_gpus": (
        Table(
            "sharded/sharded",
            ("shape", "sharding"),
            (
                ("ours, µs", "wall_p50_us", {"contender": "ours"}),
                ("plain JAX, µs", "wall_p50_us", {"contender": "jax"}),
                ("speed-up", "speedup_wall", {"contender": "ours"}),
                ("`jax.nn.softmax` alone, µs", "wall_p50_us", {"contender": "jax.nn.softmax"}),
            ),
            {"devices": 4, "k": 64},
        ),
    ),
    "cpu": (
        Table(
            "cpu/softmax",
            ("shape",),
            (("`softmax`, ms", "p50_ms", {}), ("plain JAX, ms", "p50_ms", {"contender": "jax"}))
            + (("speed-up", "speedup", {}),),
        ),
        Table(
            "cpu/topk",
            ("shape", "k"),
            (("`fused_topk`, ms", "p50_ms", {}), ("plain JAX, ms", "p50_ms", {"contender": "jax_stable"}))
            + (("speed-up", "speedup", {}),),
        ),
        Table(
            "cpu/sample",
            ("function",),
            (("`sample`, ms", "p50_ms", {}), ("plain JAX, ms", "p50_ms", {"contender": "jax"}))
            + (("speed-up", "speedup", {}),),
        ),
    ),
    "triton": (
        Table("triton/softmax", ("shape", "dtype"), PASSES, {"contender": "triton"}),
        Table(
            "triton_topk/topk",
            ("shape", "k", "dtype"),
            (
                ("time, µs", "p50_us", {"contender": "triton"}),
                ("speed-up over JAX", "speedup", {"contender": "triton"}),
                ("JAX, not stable, µs", "p50_us", {"contender": "jax_unstable"}),
                ("torch, µs", "p50_us", {"contender": "torch"}),
            ),
        ),
    ),
}


# --- The overview ---------------------------------------------------------------------------------------

FIRST = {"dtype": "bfloat16", "batch": 4096, "vocab": 128256}
OVERVIEW = (  # call, shape, dtype, result, the rows of the call, JAX's name
    ("`softmax`", "4,096 × 128,256", "bfloat16", "targets/softmax", FIRST | {"direction": "forward"}, "jax"),
    (
        "its gradient",
        "4,096 × 128,256",
        "bfloat16",
        "targets/softmax",
        FIRST | {"direction": "backward"},
        "jax",
    ),
    ("`logsumexp`", "4,096 × 128,256", "bfloat16", "logsumexp/softmax", FIRST, "jax"),
    (
        "`softmax`, `axis=0`",
        "1,000 × 100,000",
        "bfloat16",
        "columns/softmax",
        {"dtype": "bfloat16", "vocab": 1000, "direction": "forward"},
        "jax",
    ),
    (
        "`fused_topk`, k = 5",
        "4,000 × 25,000",
        "float32",
        "topk_targets/topk",
        {"dtype": "float32", "batch": 4000, "vocab": 25000, "k": 5},
        "jax_stable",
    ),
    (
        "`fused_topk`, k = 64",
        "4,096 × 128,256",
        "float32",
        "topk_targets/topk",
        {"dtype": "float32", "vocab": 128256, "batch": 4096, "k": 64},
        "jax_stable",
    ),
    (
        "`fused_topk` as a router, k = 8",
        "131,072 × 256",
        "bfloat16",
        "moe_router/topk",
        {"dtype": "bfloat16", "batch": 131072, "vocab": 256, "direction": "forward"},
        "jax_stable",
    ),
    (
        "`sample`, top_p = 0.9",
        "64 × 128,256",
        "float32",
        "sample/sample",
        {"dtype": "float32", "batch": 64, "function": "top_p"},
        "jax",
    ),
    (
        "`linear_cross_entropy`, with gradients",
        "8,192 × 4,096 × 128,256",
        "bfloat16",
        "linear/linear",
        {"reduction": "mean"},
        "jax_float32",
    ),
    (
        "transformer block, mask as `where=`",
        "4 sequences of 1,024",
        "bfloat16",
        "programs/programs",
        {"program": "block_where", "size": 1024, "remat": False},
        "jax",
    ),
)


def overview() -> list[str]:
    """Returns the lines of the table of ten calls. The speed-up comes early, so that a phone shows it."""
    lines = ["| call | speed-up | plain JAX, µs | ours, µs | shape | dtype |", "|" + "---|" * 6]
    for call, shape, dtype, name, where, jax in OVERVIEW:
        theirs, ours = (value(name, **where, contender=contender) for contender in (jax, "auto"))
        cells = [call, times(theirs / ours), number(theirs), number(ours), shape, dtype]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- The sentences --------------------------------------------------------------------------------------


def speedups(name: str, **where: Any) -> str:
    """Returns the range of our speed-ups in a result."""
    return span(chosen(name, **{"contender": "auto"} | where).speedup.dropna())


def ratios(name: str, peer: str, by: tuple[str, ...], **where: Any) -> str:
    """Returns the range of a peer's time over ours, by case."""
    mine, theirs = (
        chosen(name, contender=contender, **where).set_index(list(by)).p50_us for contender in ("auto", peer)
    )
    return span((theirs / mine).dropna())


def percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}%"


def ours(name: str, column: str = "p50_us", digits: int = 3, **where: Any) -> str:
    """Returns one number of a result, by default of the implementation that users get."""
    return number(value(name, column, **{"contender": "auto"} | where), digits)


def cudnn() -> str:
    """Returns the range of our time divided by the time of cuDNN's fused attention."""
    mine, theirs = (
        chosen("attention/programs", contender=contender, remat=False).p50_us.to_numpy()
        for contender in ("auto", "cudnn")
    )
    return span(mine / theirs)


def of_devices(sharding: str) -> str:
    """Returns the range of our speed-ups in device time on several GPUs."""
    rows = chosen("sharded/sharded", contender="ours", sharding=sharding, k=64)
    return span(rows.speedup_device.dropna())


TARGETS, TOPK, SAMPLE, LINEAR = "targets/softmax", "topk_targets/topk", "sample/sample", "linear/linear"
CASE = ("batch", "vocab", "dtype", "direction")
DRAW = ("batch", "dtype", "function")
LONG = span(
    [row.share_of_copy for row in chosen(TARGETS, contender="auto").itertuples() if row.vocab >= 25000],
    percent,
)
KERNEL = {"contender": "mosaic_gpu", "dtype": "float32", "direction": "forward"}
FULL_READ = value(TOPK, "share_of_read", contender="auto", batch=4096, vocab=128256, k=5, dtype="float32")
ONE_ROW = {"dtype": "float32", "batch": 1, "function": "none"}
MANY = chosen(SAMPLE, contender="auto", batch=(64, 256, 1024)).speedup
TIES = chosen("topk_short/topk", contender="auto", logits="ties").slowdown
WORST = span(rows_of("topk_worst/topk").slowdown.dropna())
PEERS = "linear_peers/linear"
GAP = value("linear_training/linear_training", "largest_gap", contender="ours")
ERROR = value(LINEAR, "error", contender="auto", reduction="mean")
SENTENCES = {
    "performance": (
        f"`softmax` reaches {LONG} of the speed of a plain copy",
        f"a read of the logits at {percent(FULL_READ)} of the speed of a plain sum",
        f"{ours(LINEAR, 'memory_gib', 2, reduction='mean')} GiB of temporaries instead of"
        f" {ours(LINEAR, 'memory_gib', 2, reduction='mean', contender='jax_float32')} GiB",
        f"is {speedups('programs/programs', program='block')} times as fast as with `jax.nn`",
        f"given as `where=` it is {speedups('programs/programs', program='block_where')} times as fast",
        f"cuDNN's kernel is {cudnn()} times as fast as ours",
        f"takes {ours(LINEAR, 'p50_ms', reduction='none')} ms where plain JAX with bfloat16 logits takes"
        f" {ours(LINEAR, 'p50_ms', reduction='none', contender='jax_inexact')} ms",
        f"without a filter takes {ours(SAMPLE, digits=2, **ONE_ROW)} µs where `jax.random.categorical` takes"
        f" {ours(SAMPLE, digits=2, **ONE_ROW, contender='jax')} µs",
    ),
    "softmax": (
        f"Forward, `softmax` is {speedups(TARGETS, direction='forward')} times as fast as `jax.nn.softmax`",
        f"Backward, it is {speedups(TARGETS, direction='backward')} times as fast",
        f"From 25,000 elements on it reaches {LONG} of the bandwidth of a plain copy",
        f"QuACK 0.6.5 takes {ratios(TARGETS, 'quack', CASE)} times as long as `softmax`",
        f"torch takes {ratios(TARGETS, 'torch', CASE)} times as long",
        f"torch takes {ratios('few_rows/softmax', 'torch', CASE)} times as long as `softmax` on few rows",
        f"`logsumexp` is {speedups('logsumexp/softmax')} times as fast as `jax.nn.logsumexp`",
        f"takes {ours(TARGETS, digits=2, vocab=1000, **KERNEL)} µs at 4,000 × 1,000 and"
        f" {ours(TARGETS, vocab=4096, **KERNEL)} µs at 4,000 × 4,096",
    ),
    "topk": (
        f"`fused_topk` is {speedups(TOPK)} times as fast as `jax.nn.softmax` and `lax.top_k`",
        f"torch takes {ratios(TOPK, 'torch', (*CASE, 'k'))} times as long as `fused_topk`",
        f"RAFT takes {ours('topk_sweep/topk', contender='jax_raft', k=64)} µs at k = 64",
        f"other logits take {WORST} times as long as normal ones",
        f"the largest slowdown is {times(TIES.max())} times",
    ),
    "sampling": (
        f"from {times(MANY.min())} to {times(MANY.max())} times as fast",
        f"torch takes {ratios(SAMPLE, 'torch', DRAW)} times as long as `sample`, and FlashInfer 0.7.2 takes"
        f" {ratios(SAMPLE, 'flashinfer', DRAW)} times as long",
        f"`sample` makes the server {speedups('serve/serve')} times as fast",
    ),
    "loss": (
        f"{ours(LINEAR, 'products', reduction='mean')} times the projection alone",
        f"{ours(LINEAR, 'products', reduction='none')} times the projection alone",
        f"{100 * ERROR:.2f}% off the gradients of the scan",
        f"logits are {100 * value(LINEAR, 'error', contender='jax_inexact', reduction='mean'):.2f}% off",
        f"differ by at most {GAP:.4f}",
        f"{ours('linear_long/linear', 'products')} times the projection alone at 65,536 tokens",
        f"QuACK's gradients are {100 * value(PEERS, 'error', contender='quack', w_shape='VxD'):.2f}% off, ours"
        f" {100 * value(PEERS, 'error', contender='auto', w_shape='VxD'):.2f}%",
    ),
    "programs": (
        f"ours is {speedups('attention/programs', remat=False)} times as fast as plain JAX",
        f"all {value('beam_search/beam_search', 'same', contender='auto', vocab=32000, dtype='float32'):.0f}"
        " hypotheses",
        f"cuDNN's kernel is {cudnn()} times as fast as ours",
    ),
    "several_gpus": (
        f"{of_devices('batch')} times as fast as plain JAX with a sharded batch, and"
        f" {of_devices('vocab')} times as fast with a sharded V",
    ),
    "triton": (),
    "cpu": (),
}
PAGES = {
    name: ROOT / "docs" / (f"{name}.md" if name == "performance" else f"performance/{name}.md")
    for name in SENTENCES
}


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def tables_of(page: str) -> list[str]:
    """Returns the tables of a page, each with its provenance."""
    if page == "performance":
        return ["\n".join(overview())]
    return [table.text() for table in TABLES[page]]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_those_of_the_results(page):
    text = PAGES[page].read_text()
    tables = tables_of(page)
    assert [table for table in tables if table not in text] == []
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    measured = [table for table in found if re.search(r"\| [\d.,%]+ \|", table)]
    assert [table for table in measured if table.strip() not in "\n".join(tables)] == []


@pytest.mark.parametrize(
    ("page", "sentence"), [(page, each) for page in SENTENCES for each in SENTENCES[page]]
)
def test_a_sentence_is_true(page, sentence):
    assert sentence in one_line(PAGES[page].read_text())


@pytest.mark.parametrize("page", PAGES)
def test_no_other_number_is_measured(page):
    text = PAGES[page].read_text()
    for table in tables_of(page):
        text = text.replace(table, "")
    text = one_line(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)).replace("80GB", "")
    for sentence in SENTENCES[page]:
        text = text.replace(sentence, "")
    assert not re.findall(rf"\d[\d.,]* ?{UNITS}(?!\w)", text)


def test_the_overview_is_short():
    assert PAGES["performance"].read_text().count("\n") <= 150
