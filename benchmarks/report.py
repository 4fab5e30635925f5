"""What a run leaves behind: rows, the table, CSV and JSON, and where it all was measured."""

import csv
import dataclasses
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cases import Case
from benchmarks.settings import Settings


@dataclasses.dataclass
class Row:
    """One contender on one case: the columns of the CSV. Empty means: not measured."""

    benchmark: str
    case: Case
    contender: str
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"  # ok, FAILED (ours), differs (a peer), not run, error
    reason: str = ""  # of any status but ok
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
    share_of_read: float | None = None  # of top-k, which writes next to nothing
    slowdown: float | None = None  # by p50, over normal logits with the same contender
    speedup: float | None = None  # over the baseline of the benchmark, by p50
    first_result_s: float | None = None  # of a JAX function: to trace, lower, compile and run it once
    extra_mb: float | None = None  # of a JAX function: device memory beyond its arguments
    fits_cache: str = ""  # the cache that holds it all: repeated calls may never read the memory
    explain: str = ""  # of ours: what pallas_softmax.explain says

    @property
    def share(self) -> float | None:
        """Of the floor that fits the benchmark: of one read where that was measured, else of a copy."""
        return self.share_of_copy if self.share_of_read is None else self.share_of_read

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail: ours is wrong, or broke."""
        return self.ours and self.status in ("FAILED", "error")

    def record(self) -> dict[str, Any]:
        """The row as flat columns, those of its case among them."""
        columns: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            columns |= dataclasses.asdict(value) if isinstance(value, Case) else {field.name: value}
        return columns


def _output_of(*command: str) -> str:
    """What a command prints, or nothing where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _device_name() -> str:
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
    """Device, driver, versions, commit (of the git checkout, unless given) and date."""
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
    directory: Path,
    name: str,
    records: list[dict[str, Any]],
    settings: Settings,
    where: dict[str, str],
    **also: float,
) -> None:
    """Writes name.csv, a line a record with the environment beside it, and name.json."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*records[0], *also, *where])
        writer.writeheader()
        writer.writerows(record | also | where for record in records)
    document = {
        "benchmark": name,
        "environment": where,
        "flags": dataclasses.asdict(settings),
        **also,
        "rows": records,
    }
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def bandwidth_unit(bytes_per_s: float) -> tuple[float, str]:
    """The unit that suits the device: (bytes per second, its name)."""
    return (1e12, "TB/s") if bytes_per_s > 1e12 else (1e9, "GB/s")


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent: 0.0123, 1.50, 2,079."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def columns(lines: list[list[str]], left: int) -> str:
    """The lines as aligned text: a head with a rule below, then the rest; so many columns start left."""
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
    """Footnotes: why something did not run, each reason once."""

    def mark(self, reason: str) -> str:
        """The mark of a reason's footnote."""
        if reason not in self:
            self.append(reason)
        return f"[{self.index(reason) + 1}]"

    def __str__(self) -> str:
        return "".join(f"\n[{i}] {note}" for i, note in enumerate(self, 1))


def _check_cell(row: Row) -> str:
    if row.status in ("not run", "error"):
        return row.status
    if row.status == "ok":
        return f"ok: {number(row.error_eps or 0, 2)} eps, {row.rows_checked} rows"
    return f"{row.status}: {row.reason}"


def table(rows: list[Row], bandwidths: dict[str, float]) -> str:
    """The rows as aligned text; why something did not run stands below, once each.

    The last bandwidth is the one that the rows are held against.
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
