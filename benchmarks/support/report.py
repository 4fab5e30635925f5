"""What a run leaves behind: rows, the table, CSV and JSON, and where all of it was measured."""

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np

from benchmarks.support import flags
from benchmarks.support.cases import Case
from benchmarks.support.flags import Settings


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender on one case; what is empty was not measured."""

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
    bytes: int = 0  # the fewest a call must move
    tb_per_s: float | None = None  # bytes / p50
    share_of_copy: float | None = None
    share_of_read: float | None = None  # of top-k alone, which writes next to nothing
    slowdown: float | None = None  # p50 over that of normal logits with the same contender
    speedup: float | None = None  # p50 of the benchmark's baseline over this p50
    first_result_s: float | None = None  # to trace, lower, compile and run a JAX function once
    extra_mb: float | None = None  # device memory that a JAX function needs beyond its arguments
    fits_cache: str = ""  # the cache that holds it all, so that repeated calls may never read the memory
    explain: str = ""  # what pallas_softmax.explain says of ours

    @property
    def share(self) -> float | None:
        """The share of a read's bandwidth where that was measured, else of a copy's."""
        return self.share_of_copy if self.share_of_read is None else self.share_of_read

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail: ours is wrong, or broke."""
        return self.ours and self.status in ("FAILED", "error")


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with those of inner dictionaries in place of these."""
    columns: dict[str, Any] = {}
    for name, value in values.items():
        columns |= _flat(value) if isinstance(value, dict) else {name: value}
    return columns


def record(row: Any) -> dict[str, Any]:
    """Returns a row, which is a dataclass, as flat columns: those of its case stand in the place of the case."""
    return _flat(dataclasses.asdict(row))


def _restored(kind: Any, columns: dict[str, Any]) -> Any:
    """Returns the dataclass whose flat columns these are; it keeps its defaults for those that are missing."""
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _restored(hints[field.name], columns)
        elif field.name in columns:
            values[field.name] = columns[field.name]
    return kind(**values)


def read(path: Path, kind: type[Any]) -> tuple[list[Any], dict[str, float], dict[str, str]]:
    """Returns what a run's JSON holds: its rows, which are of this dataclass, the bandwidths, and the environment."""
    document = json.loads(path.read_text())
    bandwidths = {
        name: 1e12 * document[f"{name}_tb_per_s"]
        for name in ("copy", "read")
        if f"{name}_tb_per_s" in document
    }
    return [_restored(kind, each) for each in document["rows"]], bandwidths, document["environment"]


def _output_of(*command: str) -> str:
    """Returns what a command prints, or nothing where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _device_name() -> str:
    """Returns the name of the first device; of a CPU its model and the number of cores."""
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
    """Returns device, driver, versions, commit (that of the git checkout unless given), date and command."""
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
    """Writes name.csv, which has a line per row with the environment beside it, and name.json."""
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
    """Returns what the program ends with: 1 if rows have failed, which it says on stderr, else 0."""
    if failed:
        print(f"{name}: {failed} of {len(rows)} rows failed", file=sys.stderr)
    return 1 if failed else 0


def bandwidth_unit(bytes_per_s: float) -> tuple[float, str]:
    """Returns the unit that suits the device: bytes per second, and its name."""
    return (1e12, "TB/s") if bytes_per_s > 1e12 else (1e9, "GB/s")


def number(value: float, digits: int = 3) -> str:
    """Returns a number with so many significant digits and without an exponent: 0.0123, 1.50, 2,079."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def columns(lines: list[list[str]], left: int) -> str:
    """Returns the lines as aligned text, a rule below the first; so many columns are aligned on the left."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if i < left or i == len(widths) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return "\n".join(text)


class Notes(list[str]):
    """The footnotes of a table: why something did not run, each reason once."""

    def mark(self, reason: str) -> str:
        """Returns the mark of a reason's footnote."""
        if reason not in self:
            self.append(reason)
        return f"[{self.index(reason) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n[{i}] {note}" for i, note in enumerate(self, 1))


def _check_cell(row: Row) -> str:
    """Returns the text of the column `check`."""
    if row.status in ("not run", "error"):
        return row.status
    if row.status == "ok":
        return f"ok: {number(row.error_eps or 0, 2)} eps, {row.rows_checked} rows"
    return f"{row.status}: {row.reason}"


def table(rows: list[Row], bandwidths: dict[str, float]) -> str:
    """Returns the rows as aligned text; why something did not run stands below, each reason once.

    The last of the bandwidths is the one that the rows are held against.
    """
    *_, floor = bandwidths
    scale, unit = bandwidth_unit(bandwidths[floor])
    slowdown = any(row.slowdown for row in rows)
    head = ["case", "contender", "ran", "check", "p50 us", unit, f"of {floor}", "speed-up"]
    lines = [head + ["slowdown"] * slowdown + ["first s", ""]]
    notes = Notes()
    last = None
    for row in rows:
        line = [row.case.label if row.case != last else "", row.contender, row.ran, _check_cell(row)]
        last = row.case
        if row.p50_us is None or row.tb_per_s is None or row.share is None:
            line += [""] * 4
        else:
            line += [number(row.p50_us), number(row.tb_per_s * 1e12 / scale), f"{row.share:.0%}"]
            line += ["" if row.speedup is None else f"{row.speedup:.2f}x"]
        if slowdown:
            line.append("" if row.slowdown is None else f"{row.slowdown:.2f}x")
        line.append("" if row.first_result_s is None else f"{row.first_result_s:.2f}")
        if row.status in ("not run", "error"):
            line.append(notes.mark(row.reason))
        else:
            line.append(f"fits {row.fits_cache}" if row.fits_cache else "")
        lines.append(line)
    text = columns(lines, left=4) + str(notes)
    if any(row.status == "differs" for row in rows):
        text += "\ndiffers: a peer's rounding (in 16 bits between its steps) or order; it fails nothing"
    for name, bandwidth in bandwidths.items():
        what = {"copy": ", read plus written", "read": " in a sum, without writing"}[name]
        text += f"\n{name}: {number(bandwidth / scale)} {unit}{what}"
    return text
