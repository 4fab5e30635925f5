"""How do softmax and top-k scale over devices? python -m benchmarks.sharded --flagfile=configs/sharded.flags

A shape BATCHxV means softmax, and BATCHxVxK means softmax with top-k. --sharding=batch distributes the rows over
the first devices, --sharding=vocab distributes each row. Both are compared with a run on one device.

ours             softmax(x) or fused_topk(x, k) of pallas_softmax
jax              jax.nn.softmax(x), then lax.top_k
jax.nn.softmax   the peer of softmax, and a yardstick for top-k

wall     the wall time of one call until its result is ready, including JAX's dispatch to the devices
device   on GPUs, the time from one call to the next in a program of 32 calls, from a trace of all devices

The other benchmarks sum the kernel times that CUPTI reports. That is wrong here: NCCL's kernels spin while they
wait for other devices, so a sum would count the waiting, once per device. Comparing the wall times of longer and
shorter programs is not precise enough: each device has a host thread, and these vary more than the devices.
Instead, each call of the program waits for the whole result of the previous one (`repeated`), and a trace tells
when each kernel started (support/traces.py).

The traffic on the links comes from the compiled program of one call (support/links.py).
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax
from benchmarks.support import answers, cases, flags, links, plot, report, timing, traces
from benchmarks.support.cases import Case
from benchmarks.support.contenders import Call, fetch_jax
from benchmarks.support.driver import note, progress, require_extra
from benchmarks.support.flags import Settings

SHARDINGS = {"batch": P("d", None), "vocab": P(None, "d")}
ALONE = "none"  # the name of the sharding on one device
OURS, JAX, SOFTMAX = "ours", "jax", "jax.nn.softmax"
SAME_AS = {OURS: "auto", JAX: "jax_stable", SOFTMAX: "jax"}  # their names in the other benchmarks
NAMES = {OURS: "pallas_softmax", JAX: "jax.nn.softmax + lax.top_k"}  # their names in pictures
CALLS = 32  # calls in the traced program, which gives the device time
PICTURED = (1024, 262144, 64)  # batch, V and k of the case in the picture


@dataclasses.dataclass(frozen=True)
class Layout:
    """A case, and how its logits are sharded."""

    case: Case
    sharding: str
    devices: int

    @property
    def label(self) -> str:
        """A short name of the layout."""
        return f"{self.case.label} {self.sharding} {self.devices}"


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender on one layout. Empty columns were not measured."""

    layout: Layout
    contender: str
    ours: bool
    ran: str = ""  # the implementations found in the compiled program
    status: str = "ok"  # ok, FAILED (ours), differs (a peer), not run, error
    reason: str = ""  # why the status is not ok, or why there is no device time
    rows_checked: int = 0
    error_eps: float | None = None  # largest relative error, in eps of the dtype
    collectives: str = ""  # the number of collectives of each kind in a call
    link_bytes: float | None = None  # the most that any device receives in a call
    samples: int = 0
    wall_p20_us: float | None = None
    wall_p50_us: float | None = None
    wall_p80_us: float | None = None
    device_us: float | None = None
    speedup_wall: float | None = None  # over plain JAX on the same layout
    speedup_device: float | None = None
    of_softmax: float | None = None  # wall time relative to jax.nn.softmax's on the same layout
    of_linear: float | None = None  # device time on one device / (n * device time on n devices)

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail, because ours is wrong or raised."""
        return self.ours and self.status in ("FAILED", "error")


def make_layouts(chosen: Settings) -> list[Layout]:
    """Returns every case in every layout that the present devices allow."""
    found = []
    for shape in chosen.shapes or [(b, v, k) for b in chosen.batch for v in chosen.vocab for k in chosen.k]:
        ks = chosen.k if len(shape) == 3 else (None,)
        found += cases.make_cases(dataclasses.replace(chosen, shapes=(shape,)), ks)
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
    """Returns the contenders by name: ours, for top-k its peer, and jax.nn.softmax."""
    k = case.k
    if k is None:
        return {OURS: lambda x: pallas_softmax.softmax(x), SOFTMAX: lambda x: jax.nn.softmax(x)}
    return {
        OURS: lambda x: pallas_softmax.fused_topk(x, k),
        JAX: lambda x: lax.top_k(jax.nn.softmax(x), k),
        SOFTMAX: lambda x: jax.nn.softmax(x),
    }


def draw(layout: Layout, axis_type: AxisType) -> jax.Array:
    """Draws the case's logits on the devices that hold them. Every layout gets the same numbers."""

    def lying(axis_type: AxisType) -> NamedSharding:
        devices = jax.devices()[: layout.devices]
        mesh = jax.make_mesh((layout.devices,), ("d",), axis_types=(axis_type,), devices=devices)
        return NamedSharding(mesh, SHARDINGS.get(layout.sharding, P()))

    x = jax.jit(lambda: cases.logits(layout.case), out_shardings=lying(AxisType.Auto))()
    return jax.device_put(x, lying(axis_type))  # this moves nothing


def repeated(function: Callable[[jax.Array], Any], calls: int) -> Callable[[jax.Array], Any]:
    """Returns a program of `calls` calls in sequence. Each starts when the previous one has its whole result.

    A barrier makes the input of a call depend on all earlier results. A result of x's shape becomes the next
    input. Without a use, XLA would remove it from the barrier, and its call from the program. Other results are
    small, and the program returns them all.
    """
    call = jax.jit(function)  # traced and lowered only once

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
    """Returns the compiled program of `calls` calls."""
    # On a GPU, XLA drops the barriers after scheduling. On a CPU it would drop them before it merges equal calls.
    options = {} if timing.on_gpu() else {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return jax.jit(repeated(function, calls)).lower(x).compile(compiler_options=options)


def parts(hlo_text: str) -> collections.Counter[str]:
    """Counts the collectives of each kind and the kernels of each implementation in a compiled program."""
    kernels = re.findall(r'custom_call_target="[^"]*?(mosaic_gpu|triton)', hlo_text)
    return collections.Counter([*kernels, *(each.kind for each in links.collectives(hlo_text))])


def _not_repeated(single: Any, program: Any, calls: int, x: jax.Array) -> str:
    """Returns "" if the program contains the single call `calls` times, or else what differs."""
    (sharding, *others) = jax.tree.leaves(single.output_shardings)
    if not others and not sharding.is_equivalent_to(x.sharding, x.ndim):
        return "no device time: the result does not lie as the logits do, and cannot be the next call's"
    one, found = parts(single.as_text()), parts(program.as_text())
    if found != collections.Counter({part: calls * count for part, count in one.items()}):
        return f"no device time: a call has {dict(one)}, a program of {calls} {dict(found)}"
    return ""


@functools.lru_cache(1)  # shared by all layouts of a case
def _answer(case: Case, devices: int) -> tuple[np.ndarray, answers.Answer]:
    """Returns rows to check and their answer. With up to `devices` devices, each of these holds some of the rows."""
    rows = np.union1d(case.checked_rows, np.arange(devices) * case.batch // devices)
    return rows, answers.Answer(fetch_jax(cases.logits(case), rows, 0), None, case.function, case.k)


def _fetch(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Copies some rows from the devices that hold them. Nothing moves between devices."""
    found = np.empty((len(rows), array.shape[1]), array.dtype)
    for shard in array.addressable_shards:
        held, columns = shard.index
        first, last, _ = held.indices(len(array))
        for i in np.flatnonzero((first <= rows) & (rows < last)):
            found[i, columns] = shard.data[int(rows[i]) - first]
    return found


def _check(result: Any, answer: answers.Answer, rows: np.ndarray) -> answers.Check:
    """Checks y, or values and indices. The result of jax.nn.softmax is y even in a case of top-k."""
    if isinstance(result, jax.Array):
        return answer.output.check("y", _fetch(result, rows))
    values, indices = (_fetch(each, rows) for each in result)
    return answers.all_of([answer.check_output(values), answer.check_indices(indices)])


def _prepare(row: Row, function: Callable[[jax.Array], Any], x: jax.Array, devices: int) -> Any:
    """Checks a contender and describes it in its row. Returns the call to time, or None if ours is wrong."""
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
            return None
    if timing.on_gpu():
        program = compile_repeated(function, CALLS, x)
        if why := _not_repeated(single, program, CALLS, x):
            row.reason = row.reason or why
        else:
            row.device_us = 1e6 * traces.call_seconds(lambda: program(x), CALLS)
    return single


def run_layout(layout: Layout, chosen: Settings) -> list[Row]:
    """Checks and traces all contenders on one layout, then times them together."""
    rows = {name: Row(layout, name, ours=name == OURS) for name in functions(layout.case)}
    present = max(n for n in chosen.devices if n <= jax.device_count())
    calls: dict[str, Call] = {}
    try:
        x = draw(layout, AxisType[chosen.axis_type])
        for name, function in functions(layout.case).items():
            try:
                single = _prepare(rows[name], function, x, present)
                if single is not None:
                    calls[name] = _call(single, x)
            except Exception as error:
                note(rows[name], error)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())
    times = timing.interleave(
        calls,
        chosen.repeats,
        chosen.seconds,
        lambda name, error: note(rows[name], error),
        timing.wall_times,
    )
    for name, seconds in times.items():
        rows[name].samples = len(seconds)
        rows[name].wall_p20_us, rows[name].wall_p50_us, rows[name].wall_p80_us = timing.percentiles_us(
            seconds
        )
    return list(rows.values())


def _call(program: Any, x: jax.Array) -> Call:
    """Returns the call of a compiled program on x."""
    return Call(lambda: program(x), jax.block_until_ready, fetch_jax, ran="jax")


def _ratio(over: float | None, under: float | None) -> float | None:
    """Returns over / under, or None if either is missing or 0."""
    return over / under if over and under else None


def compare(rows: list[Row]) -> None:
    """Fills in the rows' columns that compare their times with other rows."""
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
    """Returns the rows as aligned text, with a heading per layout and the columns explained at the end."""
    head = ["  contender", "ran", "check", "wall us", "faster", "of softmax", "device us", "faster"]
    head += ["of linear", "link MB", ""]
    cell = report.cell

    def heading(row: Row) -> str:
        layout = row.layout
        over = f"{layout.sharding} over {layout.devices}"
        return f"{layout.case.label}, {'one device' if layout.sharding == ALONE else over}"

    def cells(row: Row, notes: report.Notes) -> list[str]:
        check = f"ok: {report.number(row.error_eps or 0, 2)} eps" if row.status == "ok" else row.status
        line = [f"  {row.contender}", row.ran, check]
        line += [cell(row.wall_p50_us), cell(row.speedup_wall, "{:.2f}x"), cell(row.of_softmax, "{:.2f}")]
        line += [cell(row.device_us), cell(row.speedup_device, "{:.2f}x"), cell(row.of_linear, "{:.0%}")]
        line += [cell(row.link_bytes / 1e6) if row.link_bytes else ""]
        return [*line, "".join(notes.mark(text) for text in (row.collectives, row.reason) if text)]

    texts = {
        "ran": report.RAN,
        "check": "ok, or what is wrong. eps: the largest relative error, against float64, in units of the dtype's eps",
        "wall us": "the median time of one call until its result is ready",
        "device us": "on GPUs, the time from one call to the next in a program of many calls",
        "faster": f"first by wall time, then by device time: {report.SPEEDUP}",
        "of softmax": "the wall time, relative to jax.nn.softmax on the same layout",
        "of linear": "device time on one device / (n * device time on n devices)",
        "link MB": "the most that any device receives in a call. A footnote lists the collectives",
    }
    if any(row.status == "differs" for row in rows):
        texts["differs"] = report.DIFFERS
    return report.grouped(head, rows, heading, cells, texts)


def picture(path: Path, rows: list[Row], where: dict[str, str]) -> None:
    """Writes the PNG: the device time of one case over the number of GPUs."""
    plt = plot.pyplot()
    every = list(dict.fromkeys(row.layout.case for row in rows))
    case = next((case for case in every if (case.batch, case.vocab, case.k) == PICTURED), every[0])
    rows = [row for row in rows if row.layout.case == case and row.device_us]
    figure, axis = plt.subplots(layout="constrained", figsize=(7, 6))
    for name in functions(case):
        color = plot.color(SAME_AS[name])
        for sharding, style in zip(SHARDINGS, ("-", "--")):
            points = _points(rows, name, sharding)
            axis.plot(
                *_coordinates(points),
                style,
                color=color,
                marker="o",
                label=f"{NAMES.get(name, name)}, {sharding}",
            )
            wrong = {n: row for n, row in points.items() if row.status == "differs"}
            axis.plot(*_coordinates(wrong), "o", color=color, markerfacecolor="white")
    if any(row.status == "differs" for row in rows):
        axis.plot((), (), "o", color="black", markerfacecolor="white", label=plot.hollow_text([case.dtype]))
    ours = _points(rows, OURS, "vocab")
    if 1 in ours:
        n = np.array(sorted({row.layout.devices for row in rows}))
        axis.plot(n, ours[1].device_us / n, ":", color="black", label="linear scaling of pallas_softmax")
    if case.k and "H200" in where["device"]:
        _draw_model(axis, case, {n: row.device_us for n, row in ours.items() if row.device_us})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [tick for tick in axis.get_xticks() if 1 <= tick <= 4096]
    axis.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axis.set_xlabel("number of devices")
    axis.set_ylabel("device time of a call, us")
    axis.grid(color="#dddddd", linewidth=0.5)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    title = f"{case.label} on {where['device']}, jax {where['jax']}"
    axis.set_title(f"{title}\n{plot.logits_line([case.logits])}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _points(rows: list[Row], contender: str, sharding: str) -> dict[int, Row]:
    """Returns a contender's rows in one sharding, and on one device, by the number of devices."""
    found = {
        row.layout.devices: row
        for row in rows
        if row.contender == contender and row.layout.sharding in (ALONE, sharding)
    }
    return dict(sorted(found.items()))


def _coordinates(points: dict[int, Row]) -> tuple[list[int], list[float | None]]:
    """Returns the numbers of devices and the device times."""
    return list(points), [row.device_us for row in points.values()]


def _draw_model(axis: Any, case: Case, measured: dict[int, float]) -> None:
    """Draws the model of ours for up to 4096 devices, its error, and a grey area where nothing was measured."""
    shape = case.batch, case.vocab, case.k or 0, jax.numpy.dtype(case.dtype).itemsize

    def model_us(*mesh: int) -> float:
        return 1e6 * links.predicted(*shape, mesh, links.H200).seconds

    meshes = {"one mesh axis": lambda i: (2**i,), "two": lambda i: (2 ** ((i + 1) // 2), 2 ** (i // 2))}
    for (axes, mesh), style in zip(meshes.items(), (":", "-.")):
        times = [model_us(*mesh(i)) for i in range(13)]
        text = f"model of links.py: pallas_softmax, vocab over {axes}"
        axis.plot(2 ** np.arange(13), times, style, color=plot.color(SAME_AS[OURS]), label=text)
    if measured:
        axis.axvspan(max(measured), 4096, color="#f0f0f0", zorder=0)
        place = {"transform": axis.get_xaxis_transform(), "va": "top"}
        axis.text(1.2 * max(measured), 0.97, misses(measured, model_us), fontsize=8, **place)


def misses(measured: dict[int, float], model_us: Callable[[int], float]) -> str:
    """Returns a text: the model's error for each number of devices, and where the measurements end."""
    off = (f"{model_us(n) / us - 1:+.0%} on {n}" for n, us in measured.items())
    return (
        f"grey: nothing was measured beyond {max(measured)} devices;\n"
        f"the model is off the measured times (vocab)\nby {', '.join(off)}"
    )


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes(with_k=True)
    flags.define_dtype()
    flags.define_words(
        "sharding",
        tuple(SHARDINGS),
        "How the logits are sharded over the devices: by rows (batch), or along each row (vocab).",
    )
    flags.define_integers(
        "devices", "How many devices to use; numbers above the available count are skipped."
    )
    flags.define_word("axis_type", ("Auto", "Explicit"), "Type of the mesh axis, a jax.sharding.AxisType.")
    flags.define_seed()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
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
        report.write("sharded", rows, chosen, where)  # an interrupted run keeps its results
    if any(row.device_us for row in rows):
        picture(directory / "sharded.png", rows, where)
    print(f"\nsharded on {where['device']}, jax {where['jax']}")
    print(table(rows))
    print(f"files: {directory}/sharded.*")
    return report.exit_code("sharded", sum(row.fails for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
