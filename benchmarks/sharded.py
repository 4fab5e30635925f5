"""Softmax and top-k of logits that lie over several devices: python -m benchmarks.sharded --flagfile=...

A shape BATCHxV is a softmax, BATCHxVxK a softmax with top-k. --sharding=batch spreads the rows over the first
devices, vocab each row; on one device there is nothing to spread, and both are measured against that.

ours             softmax(x) or fused_topk(x, k) of pallas_softmax
jax              jax.nn.softmax(x), then lax.top_k
jax.nn.softmax   the peer of softmax, the yardstick of top-k

wall     of one call until its result is there, JAX's dispatch to the devices included
device   what one more call adds to a program of several: those of 8 calls less those of 2, a sixth of it

The device time is not the sum of the kernels' times that CUPTI reports, as in the other benchmarks: NCCL's
kernels spin while they wait for other devices, so that a sum counts the waiting, and counts it again on each
device, whose kernels overlap besides. In the programs a call waits for the whole result of the one before
(`repeated`), and the dispatch, that of the first call and of the program, is the same in both.

What goes over the links is read from the compiled program of one call (links.py).
"""

import collections
import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax
from benchmarks import cases, links, oracle, plot, report, settings, timing
from benchmarks.cases import Case
from benchmarks.contenders import fetch_jax
from benchmarks.run import note, progress, require_extra
from benchmarks.settings import Settings

SHARDINGS = {"batch": P("d", None), "vocab": P(None, "d")}
ALONE = "none"  # the sharding on one device
OURS, JAX, SOFTMAX = "ours", "jax", "jax.nn.softmax"
FEW, MANY = 2, 8  # calls of the programs that the device time is from
PICTURED = (1024, 262144, 64)

_LEAST_SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """A case, and how its logits lie."""

    case: Case
    sharding: str
    devices: int

    @property
    def label(self) -> str:
        """The layout in few words."""
        return f"{self.case.label} {self.sharding} {self.devices}"


@dataclasses.dataclass
class Row:
    """One contender on one layout: the columns of the CSV. Empty means: not measured."""

    layout: Layout
    contender: str
    ours: bool
    ran: str = ""  # the implementations found in the compiled program
    status: str = "ok"  # ok, FAILED (ours), differs (a peer), not run, error
    reason: str = ""  # of any status but ok, or why there is no device time
    rows_checked: int = 0
    error_eps: float | None = None  # largest relative error, in eps of the dtype
    collectives: str = ""  # their kinds and number in a call
    link_bytes: float | None = None  # that each device receives in a call, at most
    samples: int = 0
    wall_p20_us: float | None = None
    wall_p50_us: float | None = None
    wall_p80_us: float | None = None
    device_us: float | None = None
    speedup_wall: float | None = None  # over plain jax on the same layout
    speedup_device: float | None = None
    of_softmax: float | None = None  # wall time relative to jax.nn.softmax's on the same layout
    of_linear: float | None = None  # device time on one device over that on all of n devices

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail: ours is wrong, or broke."""
        return self.ours and self.status in ("FAILED", "error")

    def record(self) -> dict[str, Any]:
        """The row as flat columns, those of its case among them."""
        columns = dataclasses.asdict(self)
        layout = columns.pop("layout")
        return layout.pop("case") | layout | columns


def make_layouts(chosen: Settings) -> list[Layout]:
    """Every case, forward and of normal logits, in every layout that there are devices for."""
    forward = dataclasses.replace(cases.only_softmax(chosen), direction=("forward",), logits=("normal",))
    found = []
    for shape in chosen.shapes or [(b, v, k) for b in chosen.batch for v in chosen.vocab for k in chosen.k]:
        ks = chosen.k if len(shape) == 3 else (None,)
        found += cases.make_cases(dataclasses.replace(forward, shapes=(shape,)), ks)
    layouts = [
        Layout(case, sharding, devices)
        for case in found
        for devices in chosen.devices
        if devices <= jax.device_count()
        for sharding in (chosen.sharding if devices > 1 else (ALONE,))
    ]
    for layout in layouts:
        size = {"batch": layout.case.batch, "vocab": layout.case.vocab, ALONE: 1}[layout.sharding]
        if size % layout.devices:
            raise ValueError(f"--sharding={layout.sharding}: {layout.devices} devices cannot share {size}")
    return layouts


def functions(case: Case) -> dict[str, Callable[[jax.Array], Any]]:
    """Ours, the peer that it is compared with, and at last jax.nn.softmax, which of softmax is the peer."""
    k = case.k
    if k is None:
        return {OURS: lambda x: pallas_softmax.softmax(x), SOFTMAX: lambda x: jax.nn.softmax(x)}
    return {
        OURS: lambda x: pallas_softmax.fused_topk(x, k),
        JAX: lambda x: lax.top_k(jax.nn.softmax(x), k),
        SOFTMAX: lambda x: jax.nn.softmax(x),
    }


def draw(layout: Layout, axis_type: AxisType) -> jax.Array:
    """The case's logits, drawn where they lie: the same numbers in every layout."""

    def lying(axis_type: AxisType) -> NamedSharding:
        devices = jax.devices()[: layout.devices]
        mesh = jax.make_mesh((layout.devices,), ("d",), axis_types=(axis_type,), devices=devices)
        return NamedSharding(mesh, SHARDINGS.get(layout.sharding, P()))

    x = jax.jit(lambda: cases.logits(layout.case), out_shardings=lying(AxisType.Auto))()
    return jax.device_put(x, lying(axis_type))  # moves nothing


def repeated(function: Callable[[jax.Array], Any], calls: int) -> Callable[[jax.Array], Any]:
    """A program of so many calls in a row, each of which starts when the one before has its whole result.

    A barrier ties the input of a call to the results before it. An array of x's shape is itself the next
    input: if nothing used it, XLA would take it out of the barrier, and the call with it. Other results are
    small, and all are returned.
    """
    call = jax.jit(function)  # traced and lowered once

    def program(x: jax.Array) -> Any:
        kept = []
        for _ in range(calls):
            result = call(x)
            if isinstance(result, jax.Array):
                x = lax.optimization_barrier(result)
            else:
                kept.append(result)
                x, kept = lax.optimization_barrier((x, kept))
        return kept or x

    return program


def compile_repeated(function: Callable[[jax.Array], Any], calls: int, x: jax.Array) -> Any:
    """The compiled program of so many calls."""
    # XLA drops the barriers after scheduling on a GPU, but on a CPU before it merges what is equal.
    options = {} if timing.on_gpu() else {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return jax.jit(repeated(function, calls)).lower(x).compile(compiler_options=options)


def parts(hlo_text: str) -> collections.Counter[str]:
    """How many collectives of each kind, and kernels of each implementation, a compiled program holds."""
    kernels = re.findall(r'custom_call_target="[^"]*?(mosaic_gpu|triton)', hlo_text)
    return collections.Counter([*kernels, *(each.kind for each in links.collectives(hlo_text))])


def _not_repeated(single: Any, programs: dict[int, Any], x: jax.Array) -> str:
    """Why the programs do not hold so many calls like the single one; empty if they do."""
    (sharding, *others) = jax.tree.leaves(single.output_shardings)
    if not others and not sharding.is_equivalent_to(x.sharding, x.ndim):
        return "no device time: the result does not lie as the logits do, and cannot be the next call's"
    one = parts(single.as_text())
    for calls, program in programs.items():
        found = parts(program.as_text())
        if found != collections.Counter({part: calls * count for part, count in one.items()}):
            return f"no device time: a call has {dict(one)}, a program of {calls} {dict(found)}"
    return ""


@functools.lru_cache(1)  # the same for all layouts of a case
def _answer(case: Case, devices: int) -> tuple[np.ndarray, oracle.Answer]:
    """Rows to check, some of every one of up to so many devices, and the answer for them."""
    rows = np.union1d(case.checked_rows, np.arange(devices) * case.batch // devices)
    x = fetch_jax(cases.logits(case), rows, 0).astype(np.float32)
    return rows, oracle.Answer(x, None, case.dtype, case.function, case.k)


def _fetch(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Some rows, from the devices that hold them: nothing is moved between devices."""
    found = np.empty((len(rows), array.shape[1]), array.dtype)
    for shard in array.addressable_shards:
        held, columns = shard.index
        first, last, _ = held.indices(len(array))
        for i in np.flatnonzero((first <= rows) & (rows < last)):
            found[i, columns] = shard.data[int(rows[i]) - first]
    return found


def _check(result: Any, answer: oracle.Answer, rows: np.ndarray) -> oracle.Check:
    if isinstance(result, jax.Array):
        return answer.output.check("y", _fetch(result, rows), answer.dtype)
    values, indices = (_fetch(each, rows) for each in result)
    return oracle.all_of([answer.check_output(values), answer.check_indices(indices)])


def _prepare(row: Row, function: Callable[[jax.Array], Any], x: jax.Array, devices: int) -> dict[int, Any]:
    """Checks a contender and writes into its row what it is; the warm programs to time, by number of calls."""
    single: Any = jax.jit(function).lower(x).compile()
    found = links.collectives(single.as_text())
    counts = collections.Counter(each.kind for each in found)
    row.collectives = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    row.link_bytes = sum(each.received for each in found)
    row.ran = ("+".join(parts(single.as_text()) - counts) or "xla") if row.ours else "jax"
    rows, answer = _answer(row.layout.case, devices)
    check = _check(single(x), answer, rows)
    row.rows_checked = check.rows
    row.error_eps = check.error_eps if np.isfinite(check.error_eps) else None
    if not check.ok:
        row.status, row.reason = "FAILED" if row.ours else "differs", check.detail
        if row.ours:
            return {}
    programs = {calls: compile_repeated(function, calls, x) for calls in (FEW, MANY)}
    if why := _not_repeated(single, programs, x):
        row.reason = row.reason or why
        return {1: single}
    for program in programs.values():
        jax.block_until_ready(program(x))
    return {1: single} | programs


def _sample(
    programs: dict[tuple[str, int], Any], x: jax.Array, repeats: int, seconds: float
) -> dict[tuple[str, int], list[float]]:
    """Wall times of every program in turn, as timing.interleave takes them."""
    times: dict[tuple[str, int], list[float]] = {name: [] for name in programs}
    deadline = time.monotonic() + seconds
    for taken in range(repeats):
        if taken >= _LEAST_SAMPLES and time.monotonic() > deadline:
            break
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(x))
            times[name].append(time.perf_counter() - start)
    return times


def run_layout(layout: Layout, chosen: Settings) -> list[Row]:
    """Every contender on one layout: held against the oracle, then timed together."""
    rows = {name: Row(layout, name, ours=name == OURS) for name in functions(layout.case)}
    present = max(n for n in chosen.devices if n <= jax.device_count())
    programs: dict[tuple[str, int], Any] = {}
    try:
        x = draw(layout, AxisType[chosen.axis_type])
        for name, function in functions(layout.case).items():
            try:
                found = _prepare(rows[name], function, x, present)
                programs |= {(name, calls): program for calls, program in found.items()}
            except Exception as error:
                note(rows[name], error)
        times = _sample(programs, x, chosen.repeats, chosen.seconds)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())
    for (name, calls), seconds in times.items():
        row = rows[name]
        if calls == 1:
            row.samples = len(seconds)
            walls = (1e6 * np.percentile(seconds, [20, 50, 80])).tolist()
            row.wall_p20_us, row.wall_p50_us, row.wall_p80_us = walls
        elif calls == MANY:
            added = np.median(seconds) - np.median(times[name, FEW])
            if added > 0:  # or else the noise is more than the calls
                row.device_us = 1e6 * float(added) / (MANY - FEW)
    return list(rows.values())


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def compare(rows: list[Row]) -> None:
    """Writes into the rows how they compare with others."""
    by = {(row.layout, row.contender): row for row in rows}
    for row in rows:
        case = row.layout.case
        softmax = by[row.layout, SOFTMAX]
        plain = by.get((row.layout, JAX), softmax)
        row.speedup_wall = _ratio(plain.wall_p50_us, row.wall_p50_us)
        row.speedup_device = _ratio(plain.device_us, row.device_us)
        row.of_softmax = _ratio(row.wall_p50_us, softmax.wall_p50_us)
        alone = by.get((Layout(case, ALONE, 1), row.contender))
        if alone and row.device_us:
            row.of_linear = _ratio(alone.device_us, row.layout.devices * row.device_us)


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    head = ["case", "sharding", "devices", "contender", "ran", "check", "wall us", "speed-up", "of softmax"]
    lines = [[*head, "device us", "speed-up", "of linear", "link MB", "collectives", ""]]
    notes = report.Notes()

    def cell(value: float | None, form: str = "") -> str:
        return "" if value is None else form.format(value) if form else report.number(value)

    last = None
    for row in rows:
        layout = row.layout
        line = [layout.case.label, layout.sharding, str(layout.devices)] if layout != last else [""] * 3
        last = layout
        check = f"ok: {report.number(row.error_eps or 0, 2)} eps" if row.status == "ok" else row.status
        line += [row.contender, row.ran, check]
        line += [cell(row.wall_p50_us), cell(row.speedup_wall, "{:.2f}x"), cell(row.of_softmax, "{:.2f}")]
        line += [cell(row.device_us), cell(row.speedup_device, "{:.2f}x"), cell(row.of_linear, "{:.0%}")]
        line += [cell(row.link_bytes / 1e6) if row.link_bytes else "", row.collectives]
        lines.append([*line, notes.mark(row.reason) if row.reason else ""])
    return report.columns(lines, left=6) + str(notes)


def picture(path: Path, rows: list[Row], where: dict[str, str]) -> None:
    """Writes the PNG: device time over the number of devices, for one case."""
    plt = plot.pyplot()
    every = list(dict.fromkeys(row.layout.case for row in rows))
    case = next((case for case in every if (case.batch, case.vocab, case.k) == PICTURED), every[0])
    rows = [row for row in rows if row.layout.case == case and row.device_us]
    figure, axis = plt.subplots(layout="constrained", figsize=(7, 5))
    peers = iter(plot.PEERS)
    for name in functions(case):
        color = plot.OURS[0] if name == OURS else next(peers)
        mine = [row for row in rows if row.contender == name]
        alone = {row.layout.devices: row.device_us for row in mine if row.layout.sharding == ALONE}
        for sharding, style in zip(SHARDINGS, ("-", "--")):
            spread = {row.layout.devices: row.device_us for row in mine if row.layout.sharding == sharding}
            points = sorted((alone | spread).items())
            label = f"{name}, {sharding}"
            axis.plot(*zip(*points) if points else ((), ()), style, marker="o", color=color, label=label)
        if name == OURS and alone:
            n = np.array(sorted({row.layout.devices for row in rows}))
            axis.plot(n, alone[1] / n, ":", color="black", label="linear scaling of ours")
    if case.k and "H200" in where["device"]:
        shape = case.batch, case.vocab, case.k, jax.numpy.dtype(case.dtype).itemsize
        meshes = {"one mesh axis": lambda i: (2**i,), "two": lambda i: (2 ** ((i + 1) // 2), 2 ** (i // 2))}
        for (axes, mesh), style in zip(meshes.items(), (":", "-.")):
            model = [1e6 * links.predicted(*shape, mesh(i), links.H200).seconds for i in range(13)]
            label = f"ours, vocab over {axes}: the model of links.py"
            axis.plot(2 ** np.arange(13), model, style, color=plot.OURS[0], label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [tick for tick in axis.get_xticks() if 1 <= tick <= 4096]
    axis.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axis.set_xlabel("devices")
    axis.set_ylabel("device time, us")
    axis.grid(color="#dddddd", linewidth=0.5)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title(f"{case.label} on {where['device']}, jax {where['jax']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str]) -> int:
    chosen = settings.from_flags(argv)
    require_extra()
    skipped = [str(n) for n in chosen.devices if n > jax.device_count()]
    if skipped:
        print(f"--devices={','.join(skipped)}: passed over, there are {jax.device_count()}")
    try:
        layouts = make_layouts(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not layouts:
        raise SystemExit(f"nothing to measure on {jax.device_count()} devices")
    where = report.environment(chosen.commit)
    where["device"] = f"{jax.device_count()} x {where['device']}"
    directory = Path(chosen.output_dir)
    rows: list[Row] = []
    for layout in progress(layouts, "sharded"):
        rows += run_layout(layout, chosen)
        compare(rows)
        report.write(directory, "sharded", [row.record() for row in rows], chosen, where)  # if it is cut off
    picture(directory / "sharded.png", rows, where)
    print(f"\nsharded on {where['device']}, jax {where['jax']}")
    print(table(rows))
    print(f"files: {directory}/sharded.*")
    failed = sum(row.fails for row in rows)
    if failed:
        print(f"sharded: {failed} of {len(rows)} rows failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    settings.define()
    flags.adopt_module_key_flags(settings)  # so that --help lists them
    app.run(main)
