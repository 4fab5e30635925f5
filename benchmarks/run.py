"""The driver of the benchmarks: check every contender of a case, time them together, report."""

import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax
from benchmarks import cases, oracle, plot, report, settings, timing
from benchmarks.cases import Case
from benchmarks.contenders import Call, Contender, fetch_jax
from benchmarks.report import Row


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One of the programs: what it measures, of whom, over which of them the speed-ups are, how it is shown."""

    name: str
    cases: Callable[[settings.Settings], list[Case]]
    contenders: Callable[[settings.Settings, Case], list[Contender]]
    baseline: str
    table: Callable[[list[Row], dict[str, float]], str] = report.table
    draw: Callable[[Path, list[Row], dict[str, float], dict[str, str]], None] = plot.draw


def rows_of(fetch: Callable[..., np.ndarray], array: Any, case: Case, rows: np.ndarray) -> np.ndarray:
    """Chosen rows of an input or a result of the case; for axis 0 they are its columns."""
    if case.axis == 0:
        return fetch(array, rows, array.ndim - 1).T
    return fetch(array, rows, 0)


def question(case: Case, rows: np.ndarray) -> tuple[tuple[jax.Array, ...], jax.Array | None, oracle.Answer]:
    """The case's arrays, x and its mask if there is one; its cotangent, but for a forward; the rows' answer."""
    x, mask = cases.logits(case), cases.mask(case)
    g = None if case.direction == "forward" else cases.cotangent(case)
    arrays = (x,) if mask is None else (x, mask)
    kept = None if mask is None else rows_of(fetch_jax, jnp.broadcast_to(mask, x.shape), case, rows)
    x_rows = rows_of(fetch_jax, x, case, rows).astype(np.float32)
    g_rows = None if g is None else rows_of(fetch_jax, g, case, rows).astype(np.float32)
    return arrays, g, oracle.Answer(x_rows, g_rows, case.dtype, case.function, case.k, kept)


def _check(
    call: Call, contender: Contender, case: Case, answer: oracle.Answer, rows: np.ndarray
) -> oracle.Check:
    """Runs the call once and holds what it returns against the answer."""
    result = call.run()
    call.wait(result)
    checks = []
    if "y" in result:
        check = answer.check_logits if contender.of_logits else answer.check_output
        checks.append(check(rows_of(call.fetch, result["y"], case, rows)))
    if "indices" in result:
        checks.append(answer.check_indices(call.fetch(result["indices"], rows, 0), contender.stable))
    if "dx" in result:
        chosen = None
        if not contender.ours and case.k is not None:  # a peer may order ties as it likes
            chosen = call.fetch(result.get("indices", call.indices), rows, 0)
        checks.append(answer.check_gradient(rows_of(call.fetch, result["dx"], case, rows), chosen))
    return oracle.all_of(checks)


def _require_name(contender: Contender, case: Case, choices: list[Any], ran: str) -> None:
    """Nothing is timed under another name: the program runs what was asked for and explained."""
    said = set()
    for choice in choices:  # an operation without a gradient of its own has a plain one
        is_gradient = choice.call.op.endswith("_grad")
        if case.direction in ("both", "backward" if is_gradient else "forward"):
            said.add(choice.cuda if timing.on_gpu() else choice.elsewhere)
    asked = {contender.asked} if contender.asked else said
    said = said or asked  # the paper's algorithms leave nothing to explain
    if not said <= asked or said - {"xla"} != set(ran.split("+")) - {"xla"}:
        raise AssertionError(f"asked for {contender.name}, explained as {said}, lowered to {ran}")


def _cannot_run(error: Exception) -> bool:
    """Whether the error means that this contender has no answer here, rather than a wrong one."""
    if isinstance(error, NotImplementedError | ImportError | MemoryError):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "No such compile option"))
    return type(error).__name__ == "OutOfMemoryError"  # torch's


def note(row: Any, error: Exception) -> None:
    """Writes into the row, into its status and reason, why it has no result."""
    row.status = "not run" if _cannot_run(error) else "error"
    row.reason = " ".join(str(error).split())[:400] or type(error).__name__
    if row.status == "error":
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        row.reason = f"{type(error).__name__}: {row.reason} ({where})"


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _require_memory(case: Case) -> None:
    """A CPU's memory runs out by a kill of the process, not by an exception: ask first."""
    if timing.on_gpu() or not hasattr(os, "sysconf"):
        return
    # x, its gradient, outputs and what peers keep, with float32 copies of 16-bit rows.
    needed = 8 * case.batch * case.vocab * 4
    if needed > _memory():
        raise MemoryError(f"needs about {needed / 1e9:.3g} GB of memory, there are {_memory() / 1e9:.3g}")


def _run_case(
    benchmark: Benchmark, case: Case, chosen: settings.Settings, bandwidths: dict[str, float]
) -> list[Row]:
    contenders = benchmark.contenders(chosen, case)
    cache, cache_bytes = timing.cache()
    rows = {
        contender.name: Row(
            benchmark=benchmark.name,
            case=case,
            contender=contender.name,
            ours=contender.ours,
            bytes=case.least_bytes,
            fits_cache=cache if case.least_bytes <= cache_bytes else "",
        )
        for contender in contenders
    }
    try:
        _require_memory(case)
        arrays, g, answer = question(case, case.checked_rows)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())

    calls: dict[str, Call] = {}
    for contender in contenders:
        row = rows[contender.name]
        try:
            # before explain, which would do a part of the tracing that first_result_s is to include
            call = contender.prepare(contender, case.direction, arrays, g)
            row.ran, row.first_result_s, row.extra_mb = call.ran, call.first_result_s, call.extra_mb
            if contender.ours:
                choices = pallas_softmax.explain(contender.function, *arrays)
                row.explain = "; ".join(map(str, choices))
                _require_name(contender, case, choices, call.ran)
            check = _check(call, contender, case, answer, case.checked_rows)
        except Exception as error:
            note(row, error)
            continue
        row.rows_checked = check.rows
        if np.isfinite(check.error_share):
            row.error_eps, row.error_share_of_bound = check.error_eps, check.error_share
        if not check.ok:
            row.status = "FAILED" if contender.ours else "differs"
            row.reason = check.detail
        if row.status != "FAILED":  # the time of a wrong result of ours is worth nothing
            calls[contender.name] = call

    times = timing.interleave(
        calls, chosen.repeats, chosen.seconds, lambda name, error: note(rows[name], error)
    )
    medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
    for name, seconds in times.items():
        row = rows[name]
        row.samples = len(seconds)
        row.p20_us, row.p50_us, row.p80_us = (1e6 * np.percentile(seconds, [20, 50, 80])).tolist()
        row.elements_per_s = case.batch * case.vocab / medians[name]
        rate = row.bytes / medians[name]
        row.tb_per_s, row.share_of_copy = rate / 1e12, rate / bandwidths["copy"]
        if "read" in bandwidths:
            row.share_of_read = rate / bandwidths["read"]
        if benchmark.baseline in medians:
            row.speedup = medians[benchmark.baseline] / medians[name]
    return list(rows.values())


def _compare_logits(rows: list[Row]) -> None:
    """Writes into the rows of other logits how much longer they took than normal ones."""
    normal = {(row.case, row.contender): row.p50_us for row in rows if row.case.logits == "normal"}
    for row in rows:
        base = normal.get((dataclasses.replace(row.case, logits="normal"), row.contender))
        if row.case.logits != "normal" and row.p50_us and base:
            row.slowdown = row.p50_us / base


def progress(todo: list[Any], name: str) -> Iterator[Any]:
    """What there is to do (each with a label), with a bar on a terminal."""
    from tqdm import tqdm

    with tqdm(todo, desc=name, unit="case", disable=None) as bar:
        for case in bar:
            bar.set_postfix_str(case.label)
            yield case


def require_extra() -> None:
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"the benchmarks need {' and '.join(missing)}, the extra bench: pip install '.[bench]'"
        )


def run(benchmark: Benchmark, chosen: settings.Settings) -> int:
    """Runs one benchmark, prints its table and writes its files; returns the exit code."""
    require_extra()
    try:
        todo = benchmark.cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    where = report.environment(chosen.commit)
    try:
        bandwidths = {"copy": timing.copy_bandwidth()}
        if any(case.k is not None for case in todo):  # it writes next to nothing
            bandwidths["read"] = timing.read_bandwidth()
    except RuntimeError as error:
        raise SystemExit(f"{error}: {error.__cause__}") from error
    rows: list[Row] = []
    for case in progress(todo, benchmark.name):
        rows += _run_case(benchmark, case, chosen, bandwidths)
    _compare_logits(rows)

    directory = Path(chosen.output_dir)
    records = [row.record() for row in rows]
    also = {f"{name}_tb_per_s": bandwidth / 1e12 for name, bandwidth in bandwidths.items()}
    report.write(directory, benchmark.name, records, chosen, where, **also)
    benchmark.draw(directory / f"{benchmark.name}.png", rows, bandwidths, where)
    kind = "device time" if timing.on_gpu() else "wall time"
    print(f"\n{benchmark.name} on {where['device']}, jax {where['jax']}; {kind}")
    print(benchmark.table(rows, bandwidths))
    print(f"files: {directory}/{benchmark.name}.*")
    failed = sum(row.fails for row in rows)
    if failed:
        print(f"{benchmark.name}: {failed} of {len(rows)} rows failed", file=sys.stderr)
    return 1 if failed else 0
