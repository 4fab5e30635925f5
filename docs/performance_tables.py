"""Writes the tables of docs/performance from the recorded results: python docs/performance_tables.py.

A comment above each table says what it shows:

    <!-- table RESULT: what its rows are, if QUERY
    title of a column | column of the CSV | QUERY
    -->

A QUERY is one of `pandas.DataFrame.query`. Where none names a contender, the table shows "auto". The line below a table
comes from the JSON of the result. A comment `<!-- calls` has a line for each call of a table that compares it with
JAX: the call, its shape, its dtype, RESULT, JAX's contender, QUERY.
"""

import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.result import number  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = {path.stem: path for path in (ROOT / "docs" / "performance.md", *ROOT.glob("docs/performance/*.md"))}

_HEADS = {"shape": "rows × V", "columns": "V × columns", "vocab": "V", "size": "sequence, or V"}
_HEADS |= {"contender": "", "sharding": "sharded along", "teacher_width": "D'"}
_FIELDS = {"shape": ["batch", "vocab"], "columns": ["batch", "vocab"], "statistics": ["contender"]}
_STATISTICS = {"auto": "`linear_token_stats`", "logsumexp": "`linear_logsumexp`", "log_probs": "`linear_log_probs`"}
_WORDS = {
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


# --- The results --------------------------------------------------------------------------------------


@functools.cache
def rows_of(name: str) -> Any:
    """Returns the rows of a result, such as targets/softmax."""
    rows = pd.read_csv(RESULTS / f"{name}.csv")
    for column in set(rows) & {"p50_us", "device_us", "device_us_per_step", "wall_p50_us"}:
        rows[column.replace("_us", "_ms")] = rows[column] / 1000
    if "memory_mib" in rows:
        rows["memory_gib"] = rows.memory_mib / 1024
    if name == "moe_router/topk":
        rows["experts"] = rows.vocab
    return rows


def chosen(name: str, query: str = "", **where: Any) -> Any:
    """Returns the rows of a result that agree with the query and have these values."""
    conditions = [query] * bool(query) + [f"{column} == {value!r}" for column, value in where.items()]
    return rows_of(name).query(" and ".join(conditions)) if conditions else rows_of(name)


def value(name: str, column: str = "p50_us", query: str = "", **where: Any) -> float:
    """Returns one number of a result."""
    (found,) = chosen(name, query, **where)[column]
    return float(found)


def times(ratio: float) -> str:
    """Returns a speed-up as text."""
    return f"{ratio:.2f}" if round(ratio, 2) < 10 else number(ratio)


def span(values: Iterable[float], form: Callable[[float], str] = times) -> str:
    """Returns the smallest and the largest value: "0.99 to 2.56"."""
    values = list(values)
    return f"{form(min(values))} to {form(max(values))}"


# --- The tables ---------------------------------------------------------------------------------------


def _markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def _cell(name: str, row: Any) -> str:
    """Returns what a row of a table says of its case."""
    match name:
        case "shape":
            return f"{row.batch:,} × {row.vocab:,}"
        case "columns":
            return f"{row.vocab:,} × {row.batch:,}"
        case "statistics":
            return _STATISTICS.get(row.contender) or _WORDS[row.contender]
        case "contender" | "program" | "function" | "sharding":
            return _WORDS.get(row[name], row[name])
    return f"{row[name]:,}" if pd.api.types.is_number(row[name]) else row[name].replace("_", " ")


def _number(column: str, value: float) -> str:
    """Returns a number of a column as text: a speed-up, a share in percent, or a number with three digits."""
    if value != value:
        return ""
    if column.startswith(("speedup", "slowdown", "products", "of_topk")):
        return times(value)
    if column.startswith(("share", "of_linear")):
        return f"{100 * value:.0f}%"
    return number(value, 4 if column in ("first_loss", "last_loss") else 3)


def table(head: str, columns: list[list[str]]) -> str:
    """Returns a table and its provenance, as its comment asks."""
    result, down, where = re.fullmatch(r"(\S+): (.*?)(?:, if (.*))?", head).groups()
    down = down.split(", ")
    fields = [field for name in down for field in _FIELDS.get(name, [name])]
    found = chosen(result, where or "")
    group = found.groupby(fields, sort=False, dropna=False).ngroup()
    firsts = found[~group.duplicated()]
    rows = [[_cell(name, row) for name in down] for _, row in firsts.iterrows()]
    for _, column, *query in columns:
        if "contender" not in " ".join([*fields, where or "", *query]):
            query.append('contender == "auto"')
        values = found.query(" and ".join(query))[column] if query else found[column]
        values = values.groupby(group).nth(0)  # a query per column: one for each cell would take seconds
        by_group = dict(zip(group[values.index], values))
        for i, cells in enumerate(rows):
            cells.append(_number(column, by_group[i]) if i in by_group else "")
    heads = [_HEADS.get(name, name) for name in down] + [title for title, *_ in columns]
    return f"{_markdown(heads, rows)}\n\n{provenance(result)}"


def calls(lines: list[list[str]]) -> str:
    """Returns the table of some calls. The speed-up comes early, so that a phone shows it."""
    rows = []
    for call, shape, dtype, result, jax, query in lines:
        theirs, ours = (value(result, query=query, contender=contender) for contender in (jax, "auto"))
        rows.append([call, times(theirs / ours), number(theirs), number(ours), shape, dtype])
    return _markdown(["call", "speed-up", "plain JAX, µs", "ours, µs", "shape", "dtype"], rows)


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


# A comment, and below it the table, and the line below a table with a head.
_TABLE = re.compile(r"(<!-- (table|calls) ?(.*)\n((?:.*\n)*?)-->\n\n)((?:\|.*\n)*(?:\n`python .*\n)?)")


@functools.cache
def tables(page: str) -> list[str]:
    """Returns the tables of the text of a page, as the results have them."""
    found = []
    for _, kind, head, body, _ in _TABLE.findall(page):
        lines = [line.split(" | ") for line in body.splitlines()]
        found.append(table(head, lines) if kind == "table" else calls(lines))
    return found


def written(page: str) -> str:
    """Returns the text of a page with its tables written anew."""
    new = iter(tables(page))
    return _TABLE.sub(lambda match: f"{match[1]}{next(new)}\n", page)


if __name__ == "__main__":
    for path in PAGES.values():
        path.write_text(written(path.read_text()))
