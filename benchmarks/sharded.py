"""How do softmax and top-k scale over devices? python -m benchmarks.sharded --flagfile=configs/sharded.flags

A shape BATCHxV means softmax, and BATCHxVxK means softmax with top-k. --sharding=batch distributes the rows over
the first devices, --sharding=vocab distributes each row. Both are compared with a run on one device.
jax.nn.softmax is the peer of softmax, and a yardstick for top-k. The times are:

wall     the wall time of one call until its result is ready, including JAX's dispatch to the devices
device   on GPUs, the time from one call to the next in a program of 32 calls, from a trace of all devices

The other benchmarks sum the kernel times that CUPTI reports. That is wrong here: NCCL's kernels spin while they
wait for other devices, so a sum would count the waiting, once per device. Instead, each call of the program waits
for the whole result of the previous one (`compile_repeated`), and a trace tells when each kernel started
(`timing.call_seconds`). If the profiler sees no kernels, the less precise host's clock takes its place.

The traffic on the links comes from the compiled program of one call (support/links.py).
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax
from benchmarks.support import answers, cases, driver, flags, links, plot, timing
from benchmarks.support.cases import Case
from benchmarks.support.contenders import Call, fetch
from benchmarks.support.result import Benchmark, Record

SHARDINGS = {"batch": P("d", None), "vocab": P(None, "d")}
ALONE = "none"  # the name of the sharding on one device
OURS, JAX, SOFTMAX = "ours", "jax", "jax.nn.softmax"
CALLS = 32  # calls in the traced program, which gives the device time
PICTURED = (1024, 262144, 64)  # batch, V and k of the case in the picture


@dataclasses.dataclass(frozen=True)
class Layout:
    case: Case
    sharding: str
    devices: int


def make_layouts(chosen: Any) -> list[Layout]:
    """Returns every case in every layout that the present devices allow."""
    present = [n for n in chosen.devices if n <= jax.device_count()]
    if skipped := [str(n) for n in chosen.devices if n not in present]:
        print(f"--devices={','.join(skipped)}: passed over, there are {jax.device_count()}")
    shapes = chosen.shapes or itertools.product(chosen.batch, chosen.vocab, chosen.k)
    layouts = [
        Layout(case, sharding, devices)
        for shape in shapes
        for case in cases.make_cases(chosen, chosen.k if len(shape) == 3 else (None,), shapes=[shape])
        for devices in present
        for sharding in (chosen.sharding if devices > 1 else (ALONE,))
    ]
    for layout in layouts:
        size = {"batch": layout.case.batch, "vocab": layout.case.vocab, ALONE: 1}[layout.sharding]
        if size % layout.devices:
            raise ValueError(f"--sharding={layout.sharding}: {layout.devices} devices cannot share {size}")
    if not layouts:
        raise ValueError(f"nothing to measure on {jax.device_count()} devices")
    return layouts


def functions(case: Case) -> dict[str, Callable[[jax.Array], Any]]:
    k, softmax = case.k, {SOFTMAX: lambda x: jax.nn.softmax(x)}
    if k is None:
        return {OURS: lambda x: pallas_softmax.softmax(x)} | softmax
    of_topk = {OURS: lambda x: pallas_softmax.fused_topk(x, k), JAX: lambda x: lax.top_k(jax.nn.softmax(x), k)}
    return of_topk | softmax


def draw(layout: Layout) -> jax.Array:
    """Draws the case's logits on the devices that hold them. Every layout gets the same numbers."""
    devices = jax.devices()[: layout.devices]
    mesh = jax.make_mesh((layout.devices,), ("d",), axis_types=(AxisType.Auto,), devices=devices)
    sharding = NamedSharding(mesh, SHARDINGS.get(layout.sharding, P()))
    return jax.jit(lambda: cases.logits(layout.case), out_shardings=sharding)()


def compile_repeated(function: Callable[[jax.Array], Any], calls: int, x: jax.Array) -> Any:
    """Compiles a program of `calls` calls in sequence. Each starts when the previous one has its whole result.

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

    # On a GPU, XLA drops the barriers after scheduling. On a CPU it would drop them before it merges equal calls.
    options = {} if timing.on_gpu() else {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return jax.jit(program).lower(x).compile(compiler_options=options)


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
    return rows, answers.Answer(fetch(cases.logits(case), rows, 0), None, case.function, case.k)


def _check(result: Any, answer: answers.Answer, rows: np.ndarray) -> answers.Check:
    """Checks y, or values and indices. The result of jax.nn.softmax is y even in a case of top-k."""
    if isinstance(result, jax.Array):
        return answer.output.check("y", np.asarray(result)[rows])
    values, indices = (np.asarray(each)[rows] for each in result)
    return answers.all_of([answer.check_output(values), answer.check_indices(indices)])


def run_layout(layout: Layout, chosen: Any) -> list[Record]:
    contenders = functions(layout.case)
    present = max(n for n in chosen.devices if n <= jax.device_count())
    drawn = functools.cache(lambda: draw(layout))

    def prepare(record: Record) -> Call | None:
        function, x = contenders[record.contender], drawn()
        single: Any = jax.jit(function).lower(x).compile()
        found = links.collectives(single.as_text())
        counts = collections.Counter(each.kind for each in found)
        record.ran = ("+".join(parts(single.as_text()) - counts) or "xla") if record.ours else "jax"
        rows, answer = _answer(layout.case, present)
        check = _check(single(x), answer, rows)
        record.add(
            collectives=", ".join(f"{count} {kind}" for kind, count in counts.items()),
            link_bytes=sum(each.received for each in found),
            rows_checked=len(rows),
            error_eps=check.error_eps if np.isfinite(check.error_eps) else None,
        )
        if not check.ok:
            driver.note(record, driver.Wrong(check.detail))
            if record.ours:
                return None
        call = Call(lambda: single(x), record.ran)
        if timing.on_gpu():
            program = compile_repeated(function, CALLS, x)
            if why := _not_repeated(single, program, CALLS, x):
                record.reason = record.reason or why
            else:
                seconds, timed_by = timing.call_seconds(call, Call(lambda: program(x), record.ran), CALLS)
                record.add(device_us=1e6 * seconds, timed_by=timed_by)
        return call

    return driver.measure(layout, contenders, prepare, chosen, ours={OURS}, prefix="wall_")


def compare(rows: Any, of: Callable) -> None:
    for name in {"wall_p50_us", "device_us"} - set(rows):
        rows[name] = np.nan
    for name, column in (("speedup_wall", "wall_p50_us"), ("speedup_device", "device_us")):
        plain = of(column, JAX).where(rows.k.map(lambda k: k is not None), of(column, SOFTMAX))
        rows[name] = plain / rows[column]
    rows["of_softmax"] = rows.wall_p50_us / of("wall_p50_us", SOFTMAX)
    rows["of_linear"] = of("device_us", sharding=ALONE, devices=1) / (rows.devices * rows.device_us)
    rows["of_linear"] = rows.of_linear.astype(float)


def picture(rows: Any, document: dict[str, Any], file: Path) -> None:
    if rows.device_us.isna().all():  # only GPUs have device times
        return
    every = rows[["batch", "vocab", "k"]].apply(tuple, axis=1)
    rows = rows[every == (PICTURED if PICTURED in set(every) else every.iloc[0])]
    rows = rows[rows.device_us.notna()]
    case = rows.iloc[0]
    figure, axes = plot.pyplot().subplots(1, 2, layout="constrained", figsize=(12, 5), sharey=True)
    titles = {"batch": "rows over devices (batch)", "vocab": "each row over devices (vocab)"}
    for axis, (sharding, title) in zip(axes, titles.items()):
        own = rows[rows.sharding.isin((ALONE, sharding))]
        plot.lines(axis, own.replace({"contender": {JAX: "jax_stable"}}), "devices", "device_us")
        ours = own[own.contender == OURS].set_index("devices").device_us
        n = np.array(sorted(own.devices.unique()))
        if 1 in ours.index:
            axis.plot(n, ours[1] / n, ":", color="#777777", label="linear scaling of pallas_softmax")
        axis.set_xticks(n, [f"{each:,}" for each in n])
        axis.set(title=title, xlabel="number of devices")
    axes[0].set_ylabel("device time of a call, µs")
    plot.legend(figure, axes[1], rows)
    spread = rows[(rows.contender == OURS) & (rows.sharding != ALONE)].speedup_device.dropna()
    what, over = ("fused_topk", f", k = {case.k}") if case.k else ("softmax", "")
    found = f"{plot.span(spread)} less device time than plain JAX" if len(spread) else "device time"
    title = f"{what}: {found} on several GPUs ({case.batch:,} × {case.vocab:,} {case['dtype']}{over})"
    plot.finish(figure, file, document, title)


COLUMNS = (
    *("status", "wall_p50_us", "speedup_wall", "device_us", "timed_by", "speedup_device"),
    *("of_linear", "of_softmax", "link_bytes", "error_eps", "ran"),
)
BENCHMARK = Benchmark("sharded", make_layouts, run_layout, COLUMNS, derive=compare, draw=picture, several=True)


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "dtype", "seed", "repeats")
    text = "How the logits are sharded over the devices: by rows (batch), or along each row (vocab)."
    flags.define_words("sharding", SHARDINGS, text)
    text = "How many devices to use; numbers above the available count are skipped."
    flags.define_list("devices", flags.INTEGERS, "1,2,4,8", text)


main = driver.program(__name__, define_flags, BENCHMARK)
