"""The output of a run: rows, the table, CSV and JSON, and the environment of the measurement."""

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np

from benchmarks.support import flags
from benchmarks.support.cases import Case
from benchmarks.support.flags import Settings

WIDTH = 120  # of every printed table

# Explanations of columns that several tables share.
RAN = "the implementation found in the lowered program, or the peer's library"
CHECK = (
    "ok, or what is wrong. eps: the largest relative error, against float64, in units of the dtype's eps (the step"
    " of its numbers at 1). rows: how many were checked"
)
DIFFERS = (
    "the peer rounds otherwise (to 16 bits between its steps) or orders otherwise; this does not fail the run"
)
SPEEDUP = "how many times as fast as the contender with 1.00x"
FITS = "the cache holds everything that a call moves, so that repeated calls may not read the memory"
FIRST = "seconds to trace, lower, compile and run a JAX function the first time"

_LONGEST_CHECK = 31  # characters


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender on one case. Empty columns were not measured."""

    benchmark: str
    case: Case
    contender: str
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"  # ok, FAILED (ours), differs (a peer), not run, error
    reason: str = ""  # why the status is not ok
    rows_checked: int = 0
    error_eps: float | None = None  # largest relative error, in eps of the dtype
    error_share_of_bound: float | None = None
    samples: int = 0
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    elements_per_s: float | None = None  # batch * V / p50
    bytes: int = 0  # the fewest that a call must move
    tb_per_s: float | None = None  # bytes / p50
    share_of_copy: float | None = None
    share_of_read: float | None = None  # for top-k and sample, which write almost nothing
    slowdown: float | None = None  # p50 over the same contender's p50 with normal logits
    speedup: float | None = None  # p50 of the benchmark's baseline over this p50
    first_result_s: float | None = None  # to trace, lower, compile and run a JAX function once
    extra_mb: float | None = None  # device memory that a JAX function needs beyond its arguments
    fits_cache: str = ""  # the cache that holds everything, so that repeated calls may never read the memory
    explain: str = ""  # what pallas_softmax.explain says about ours

    @property
    def share(self) -> float | None:
        """The share of a read's bandwidth if that was measured, otherwise of a copy's."""
        return self.share_of_copy if self.share_of_read is None else self.share_of_read

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail, because ours is wrong or raised."""
        return self.ours and self.status in ("FAILED", "error")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a dictionary with the items of inner dictionaries moved to the top level."""
    columns: dict[str, Any] = {}
    for name, value in values.items():
        columns |= _flat(value) if isinstance(value, dict) else {name: value}
    return columns


def record(row: Any) -> dict[str, Any]:
    """Returns a row (a dataclass) as flat columns. The columns of its case replace the case."""
    return _flat(dataclasses.asdict(row))


def _restored(kind: Any, columns: dict[str, Any]) -> Any:
    """Rebuilds a dataclass from its flat columns. Missing columns keep their defaults."""
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _restored(hints[field.name], columns)
        elif field.name in columns:
            values[field.name] = columns[field.name]
    return kind(**values)


def read(path: Path, kind: type[Any]) -> tuple[list[Any], dict[str, float], dict[str, str]]:
    """Reads a run's JSON. Returns its rows (of the dataclass `kind`), its bandwidths and its environment."""
    document = json.loads(path.read_text())
    bandwidths = {
        name: 1e12 * document[f"{name}_tb_per_s"]
        for name in ("copy", "read")
        if f"{name}_tb_per_s" in document
    }
    return [_restored(kind, each) for each in document["rows"]], bandwidths, document["environment"]


def _output_of(*command: str) -> str:
    """Returns the output of a command, or "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _device_name() -> str:
    """Returns the name of the first device. A CPU's name is its model and the number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine() or 'CPU'} ({os.cpu_count()} cores)"


def environment(commit: str = "") -> dict[str, str]:
    """Returns device, driver, versions, commit (by default the git checkout's), date and command."""
    driver = ""
    if jax.default_backend() == "gpu":
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        driver = _output_of("nvidia-smi", *query).split("\n")[0]
    if not commit:
        commit = _output_of("git", "rev-parse", "HEAD")
        if commit and _output_of("git", "status", "--porcelain"):
            commit += "+dirty"
    return {
        "device": _device_name(),
        "driver": driver,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
    }


def write(
    name: str,
    rows: Sequence[Any],
    chosen: Settings,
    where: dict[str, str],
    **also: float,
) -> None:
    """Writes name.csv, with a line per row that ends with the environment, and name.json."""
    directory = Path(chosen.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    records = [record(row) for row in rows]
    with open(directory / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*records[0], *also, *where])
        writer.writeheader()
        writer.writerows(each | also | where for each in records)
    document = {
        "benchmark": name,
        "environment": where,
        "flags": {flag: getattr(chosen, flag) for flag in flags.defined()},
        **also,
        "rows": records,
    }
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def exit_code(name: str, failed: int, rows: Sequence[Any]) -> int:
    """Returns the exit code: 0, or 1 after a message on stderr if rows failed."""
    if failed:
        print(f"{name}: {failed} of {len(rows)} rows failed", file=sys.stderr)
    return 1 if failed else 0


def bandwidth_unit(bytes_per_s: float) -> tuple[float, str]:
    """Returns a suitable unit of bandwidth: its bytes per second, and its name."""
    return (1e12, "TB/s") if bytes_per_s > 1e12 else (1e9, "GB/s")


def number(value: float, digits: int = 3) -> str:
    """Returns a number with this many significant digits and without an exponent: 0.0123, 1.50, 2,079."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def wrapped(text: str) -> str:
    """Wraps a line of text to the width of a table. The second line and later ones are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def columns(lines: list[list[str]], left: int) -> str:
    """Returns the lines as aligned text, with a rule below the first line.

    A line with a single cell is a heading, and does not affect the alignment.

    Args:
      lines: the cells of each line.
      left: the number of columns to align on the left. An unnamed last column is also aligned on the left.
    """
    widths = [max(map(len, cells)) for cells in zip(*(line for line in lines if len(line) > 1), strict=True)]
    lefts = {*range(left), *([] if lines[0][-1] else [len(widths) - 1])}

    def aligned(line: list[str]) -> str:
        if len(line) == 1:
            return wrapped(line[0])
        cells = zip(line, widths, strict=True)
        return "  ".join(
            cell.ljust(width) if i in lefts else cell.rjust(width) for i, (cell, width) in enumerate(cells)
        ).rstrip()

    text = "\n".join(map(aligned, lines)).split("\n")
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(text)


class Notes(list[str]):
    """The footnotes of a table. Each reason appears once."""

    def mark(self, reason: str) -> str:
        """Returns the mark of the footnote with this reason, which is added if new."""
        if reason not in self:
            self.append(reason)
        return f"[{self.index(reason) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n{wrapped(f'[{i}] {note}')}" for i, note in enumerate(self, 1))


def legend(texts: dict[str, str]) -> str:
    """Returns the lines below a table that explain its columns or its words."""
    return "".join(f"\n{wrapped(f'{name}: {text}')}" for name, text in texts.items())


def cell(value: float | None, form: str = "") -> str:
    """Returns a number as text, in the format `form` or else with three digits. None becomes ""."""
    if value is None:
        return ""
    return form.format(value) if form else number(value) if value else "0"


def status_cell(row: Any, notes: Notes) -> str:
    """Returns a row's status, with the mark of a footnote if there is a reason."""
    return f"{row.status} {notes.mark(row.reason)}" if row.reason else row.status


def grouped(
    head: list[str],
    rows: Sequence[Any],
    heading: Callable[[Any], str],
    cells: Callable[[Any, Notes], list[str]],
    texts: dict[str, str],
) -> str:
    """Returns rows as aligned text, with a heading wherever it changes, and with explanations at the end.

    Args:
      head: the names of the columns. The first three columns are aligned on the left.
      rows: the rows of the table.
      heading: row -> its heading.
      cells: (row, notes) -> its cells. It may add footnotes.
      texts: explanations of columns, or of words in them, by name.
    """
    lines, notes, last = [head], Notes(), None
    for row in rows:
        if heading(row) != last:
            last = heading(row)
            lines.append([last])
        lines.append(cells(row, notes))
    return columns(lines, left=3) + str(notes) + legend(texts)


def _check_cell(row: Row, notes: Notes) -> str:
    """Returns the cell of the column `check`. A long reason becomes a footnote."""
    if row.status == "ok":
        return f"ok: {number(row.error_eps or 0, 2)} eps, {row.rows_checked} rows"
    text = f"{row.status}: {row.reason}"
    return text if len(text) <= _LONGEST_CHECK else f"{row.status} {notes.mark(row.reason)}"


def table(rows: list[Row], bandwidths: dict[str, float]) -> str:
    """Returns the rows as aligned text, with a heading per case and the columns explained at the end.

    The rows' bandwidths are shown relative to the last one of `bandwidths`.
    """
    *_, floor = bandwidths
    scale, unit = bandwidth_unit(bandwidths[floor])
    slowdown = any(row.slowdown for row in rows)
    head = ["  contender", "ran", "check", "p50 us", unit, f"of {floor}", "speed-up"]
    head = head + ["slowdown"] * slowdown + ["first s"]

    def heading(row: Row) -> str:
        return row.case.label + (f", fits {row.fits_cache}" if row.fits_cache else "")

    def cells(row: Row, notes: Notes) -> list[str]:
        line = [f"  {row.contender}", row.ran, _check_cell(row, notes)]
        if row.p50_us is None or row.tb_per_s is None or row.share is None:
            line += [""] * 4
        else:
            line += [number(row.p50_us), number(row.tb_per_s * 1e12 / scale), f"{row.share:.0%}"]
            line += [cell(row.speedup, "{:.2f}x")]
        line += [cell(row.slowdown, "{:.2f}x")] * slowdown
        return [*line, cell(row.first_result_s, "{:.2f}")]

    texts = {"ran": RAN, "check": CHECK}
    if any(row.status == "differs" for row in rows):
        texts["differs"] = DIFFERS
    texts["p50 us"] = "the median time of a call"
    texts[unit] = "the fewest bytes that a call must move, divided by that time"
    plain = {"copy": "copy, read plus written", "read": "sum, which reads and writes nothing"}
    speed = f"{number(bandwidths[floor] / scale)} {unit}"
    texts[f"of {floor}"] = f"that as a share of the {speed} of a plain {plain[floor]}"
    texts["speed-up"] = SPEEDUP
    if slowdown:
        texts["slowdown"] = "the time relative to the same call with normal logits"
    texts["first s"] = FIRST
    for cache in sorted({row.fits_cache for row in rows} - {""}):
        texts[f"fits {cache}"] = FITS
    return grouped(head, rows, heading, cells, texts)
