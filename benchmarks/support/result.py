"""A benchmark and its result: records, provenance, JSON, and what pandas makes of them (more columns, CSV and table).

The JSON holds what cannot be computed again: {"benchmark", "runs": [provenance], "rows": [record]}. A row of a result
that was put together from several runs has the index of its run.
"""

import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl.flags import FLAGS

Frame = Any  # a pandas.DataFrame or Series, which type checkers know too little about

WIDTH = 120  # of every printed table

# The meaning of each column. A table is followed by the lines of its columns.
COLUMNS = {
    "ran": "the implementation of pallas_softmax that the lowered program has; xla is plain JAX",
    "status": "ok; FAILED (a wrong result, which fails the run); differs (a peer rounds or orders otherwise, which"
    " does not); WORSE (less accurate than XLA); not run; error",
    "error_eps": "the largest relative error against float64, in units of the dtype's eps",
    "error": "the largest error of a loss or a gradient against plain JAX, or of log-probabilities against"
    " linear_log_probs: the norm of the difference, over the norm",
    "rows_checked": "how many rows were compared with the float64 oracle, or with the same rows in another batch",
    "rows_that_differ": "how many of these rows have a result that differs in any bit",
    "best_us": "the least p50_us over all orders in which the kernel can add up a row",
    "cost": "p50_us over best_us: the price of an order that does not depend on the number of rows",
    "p50_us": "the median time of a call: device time on a GPU, otherwise wall time",
    "spread": "how much the times of calls differ: the range of the middle 60% of them, over the median",
    "elements_per_s": "the elements of all rows, divided by that time",
    "share_of_copy": "the fewest bytes that a call must move, over its time, over the rate of a plain copy of 1 GB",
    "share_of_read": "the fewest bytes that a call must move, over its time, over the rate of a plain sum of 1 GB",
    "speedup": "how many times as fast as the baseline",
    "slowdown": "the time relative to the same call with normal logits",
    "value": "the mean loss",
    "loss": "the loss",
    "first_loss": "the loss of the first step",
    "last_loss": "the mean loss of the last steps",
    "largest_gap": "the largest difference from plain JAX's loss, over all steps",
    "step_us": "the wall time of a step",
    "other_tokens": "how many tokens are not those of sample on stored logits: near ties",
    "of_log_probs": "the time relative to linear_log_probs",
    "of_topk": "the time relative to fused_topk",
    "products": "the time relative to the projection alone",
    "memory_mib": "temporaries, including any float32 dw: XLA's plan, or torch's peak",
    "first_result_s": "seconds to trace, lower, compile and run a JAX function the first time",
    "ulps": "the largest error against float64, in units of the last place of the true value (dx: of its terms)",
    "xla_ulps": "the largest error of jax.nn's function, in the same units",
    "same": "how many hypotheses equal jax's, token for token",
    "score_error": "the largest error of a score, found by a replay of the search",
    "gap": "the largest shortfall of a choice from the best, found by a replay: a near tie",
    "accepted": "how many drafts of a sequence were accepted, the mean",
    "draws_checked": "how many draws were checked against the float64 oracle",
    "tokens_per_s": "tokens of all requests, over the wall time of a whole decoding",
    "device_us_per_step": "the device time of the kernels in one step, including the model",
    "wall_p50_us": "the median time of one call until its result is ready",
    "device_us": "on GPUs, the time from one call to the next in a program of many calls",
    "timed_by": "how device_us was found: by the trace; or, if it has no kernels, by the host's clock: what a further"
    " call adds to the wall time of a program of calls",
    "speedup_wall": "by wall time, how many times as fast as plain JAX on the same layout",
    "speedup_device": "the same by device time",
    "of_softmax": "the wall time, relative to jax.nn.softmax on the same layout",
    "of_linear": "device time on one device / (n * device time on n devices)",
    "link_bytes": "the most that any device receives in a call",
}


@dataclasses.dataclass
class Record:
    """The result of one contender on one case. `found` holds what the benchmark measured."""

    case: Any  # a frozen dataclass. Its fields are columns
    contender: str
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"
    reason: str = ""  # why the status is not ok
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    required: bool = False  # whether a failure of a peer fails the run as well

    def add(self, **found: Any) -> None:
        self.found |= found

    @property
    def fails(self) -> bool:
        return (self.ours or self.required) and self.status in ("FAILED", "WORSE", "error")


def flat(case: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, and of the dataclasses in it, as one dictionary."""
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        columns |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return columns


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _device_name() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    file = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", file.read_text() if file.exists() else "")
    return f"{model[1] if model else platform.machine() or 'CPU'} ({os.cpu_count()} cores)"


def provenance(commit: str = "", devices: int = 1) -> dict[str, Any]:
    """Returns device, driver, versions, commit (by default the git checkout's), date, command and flags."""
    driver = ""
    if jax.default_backend() == "gpu":
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        driver = _output_of("nvidia-smi", *query).split("\n")[0]
    if not commit:
        commit = _output_of("git", "rev-parse", "HEAD")
        if commit and _output_of("git", "status", "--porcelain"):
            commit += "+dirty"
    program = FLAGS.get_key_flags_for_module(sys.modules["__main__"])
    return {
        "device": f"{devices} x " * (devices > 1) + _device_name(),
        "driver": driver,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "flags": {flag.name: flag.value for flag in program},
    }


def write(directory: Path, name: str, records: list[Record], run: dict[str, Any]) -> None:
    described = ("contender", "ours", "ran", "status", "reason")
    rows = [flat(record.case) | {of: getattr(record, of) for of in described} | record.found for record in records]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_text(as_text({"benchmark": name, "runs": [run], "rows": rows}))


def as_text(document: dict[str, Any]) -> str:
    """Returns JSON with one run or row on a line."""
    runs, rows = (",\n  ".join(map(json.dumps, document[part])) for part in ("runs", "rows"))
    name = json.dumps(document["benchmark"])
    return f'{{\n "benchmark": {name},\n "runs": [\n  {runs}\n ],\n "rows": [\n  {rows}\n ]\n}}\n'


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@dataclasses.dataclass(frozen=True)
class Benchmark:
    name: str  # of its module and its files
    cases: Callable[[Any], list[Any]]  # flags -> cases, which are frozen dataclasses
    run: Callable[[Any, Any], list[Record]]  # (case, flags) -> records
    columns: tuple[str, ...]  # what the table shows of each contender
    baselines: tuple[str, ...] = ()  # contenders with speed-up 1: the first of them that the result has
    # (rows, of) -> None: adds columns; see `frame` for `of`
    derive: Callable[[Frame, Callable], None] | None = None
    # (rows, document, file) -> None: the picture
    draw: Callable[[Frame, dict[str, Any], Path], None] | None = None
    bandwidths: tuple[str, ...] = ()  # which to measure: copy, read
    several: bool = False  # whether it uses all devices


def case_columns(rows: Frame) -> list[str]:
    return list(rows.columns[: list(rows.columns).index("contender")])


def frame(document: dict[str, Any], benchmark: Benchmark) -> Frame:
    """Returns the rows of a result with everything that follows from them: rates, shares and speed-ups."""
    import pandas as pd

    rows: Frame = pd.DataFrame(document["rows"])
    cases = case_columns(rows)
    for name in cases:  # integers stay integers in columns with None
        rows[name] = pd.Series([row[name] for row in document["rows"]], dtype=object)

    def of(column: str, contender: str = "", **changed: Any) -> Frame:
        """Returns for each row the value of another row: a contender's in its case, or its own in a changed case."""
        on = cases + ["contender"] * (not contender)
        own = rows[rows.contender == contender] if contender else rows
        values = own.drop_duplicates(on, keep="last")[on + [column]]
        return rows[on].assign(**changed).merge(values, "left", on)[column].astype(float)

    baseline = next((name for name in benchmark.baselines if name in set(rows.contender)), "")
    if benchmark.baselines:
        rows["p50_us"] = rows.p50_us.astype(float) if "p50_us" in rows else np.nan
        rows["speedup"] = of("p50_us", baseline) / rows.p50_us if baseline else np.nan
    if "sequence" in rows:
        rows["tokens_per_s"] = (rows.batch * rows.sequence / rows.p50_us * 1e6).astype(float)
    if "bytes" in rows:
        rows["elements_per_s"] = (rows.batch * rows.vocab / rows.p50_us * 1e6).astype(float)
        rows["tb_per_s"] = rows.bytes / rows.p50_us / 1e6
        runs = pd.DataFrame(document["runs"]).iloc[rows["run"] if "run" in rows else [0] * len(rows)]
        for name in ("copy", "read"):
            if f"{name}_tb_per_s" in runs:
                rows[f"share_of_{name}"] = rows.tb_per_s / runs[f"{name}_tb_per_s"].to_numpy()
        if "logits" in rows and rows.logits.nunique() > 1 and "normal" in rows.logits.values:
            slowdown = rows.p50_us / of("p50_us", logits="normal")
            rows["slowdown"] = slowdown.where(rows.logits != "normal")
    if benchmark.derive:
        benchmark.derive(rows, of)
    return rows


def number(value: Any, digits: int = 3) -> str:
    """Returns a number without an exponent, such as 0.0123, 1.50 or 2,079."""
    if value is None or value != value:
        return ""
    if not isinstance(value, int | float):
        return str(value)
    if value and abs(value) < 1e-4:
        return f"{value:.1e}"
    if isinstance(value, int) or abs(float(f"{value:.{digits}g}")) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def table(rows: Frame, columns: Iterable[str]) -> str:
    """Returns the rows as aligned text: the fields of the case that vary, the contender, and `columns`.

    The fields that do not vary are above it. Notes below it give the reasons behind a status, and the columns' meaning.
    """
    cases = case_columns(rows)
    varying = [name for name in cases if rows[name].map(str).nunique() > 1]
    shown = [name for name in columns if name in rows and rows[name].notna().any()]
    reasons = list(dict.fromkeys(rows.reason[rows.reason != ""]))
    text = rows[varying + ["contender"] + shown].copy()
    for name in shown:
        text[name] = rows[name].map(number)
    marks = rows.reason.map(lambda reason: f" [{reasons.index(reason) + 1}]" if reason else "")
    written = {"ran": rows.ran.where(rows.ours, ""), "status": rows.status + marks}
    text = text.assign(**{name: written[name] for name in written if name in shown})
    text = text.astype(str).set_index([*varying, "contender"])
    while max(map(len, (lines := [text.to_string()])[0].split("\n"))) > WIDTH:  # the CSV has every column
        text = text[(shown := shown[:-1])]
    if fixed := [f"{name} {rows[name].iloc[0]}" for name in cases if name not in varying]:
        lines.insert(0, wrapped(", ".join(fixed)))
    if note := without_kernels(rows):
        lines.insert(0, wrapped(note))
    lines += [wrapped(f"[{i}] {reason}") for i, reason in enumerate(reasons, 1)]
    lines += [wrapped(f"{name}: {COLUMNS[name]}") for name in shown]
    return "\n".join(lines)


def without_kernels(rows: Frame) -> str:
    """Returns a line that says what an H100 would run, if this device has no kernels. Otherwise returns ""."""
    ours = rows[rows.ours.astype(bool)]
    if "explain" not in ours or set(ours.ran) != {"xla"}:
        return ""
    explained = ours.explain.fillna("")
    of_kernels = explained[explained.str.contains(" on cuda, xla elsewhere")]
    if of_kernels.empty:
        return ""
    return (
        "No kernels on this device: pallas_softmax is plain JAX here. On an H100, kernels run "
        f"{len(of_kernels)} of these {len(ours)} calls; docs/performance.md has the times."
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
