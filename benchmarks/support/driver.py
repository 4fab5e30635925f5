"""The driver of softmax, topk and paper: checks all contenders of a case, times them together, and reports."""

import dataclasses
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_softmax
from benchmarks.support import answers, cases, plot, report, timing
from benchmarks.support.cases import Case
from benchmarks.support.contenders import Call, Contender, fetch_jax
from benchmarks.support.flags import Settings
from benchmarks.support.report import Row


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark: its cases, its contenders, and how to show the results."""

    name: str
    cases: Callable[[Settings], list[Case]]
    contenders: Callable[[Settings, Case], list[Contender]]
    baseline: str  # the contender with speed-up 1
    table: Callable[[list[Row], dict[str, float]], str] = report.table
    draw: Callable[[Path, list[Row], dict[str, float], dict[str, str]], None] = plot.draw


# --- The check ------------------------------------------------------------------------------------------


def rows_of(fetch: Callable[..., np.ndarray], array: Any, case: Case, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an input or a result of the case. With axis 0, these are columns of the array."""
    if case.axis == 0:
        return fetch(array, rows, array.ndim - 1).T
    return fetch(array, rows, 0)


def question(case: Case, rows: np.ndarray) -> tuple[tuple[jax.Array, ...], jax.Array | None, answers.Answer]:
    """Returns the case's arrays (x and any mask), its cotangent, and the answer for the rows.

    A forward call has the cotangent None.
    """
    x, mask = cases.logits(case), cases.mask(case)
    g = None if case.direction == "forward" else cases.cotangent(case)
    arrays = (x,) if mask is None else (x, mask)
    kept = None if mask is None else rows_of(fetch_jax, jnp.broadcast_to(mask, x.shape), case, rows)
    x_rows = rows_of(fetch_jax, x, case, rows)
    g_rows = None if g is None else rows_of(fetch_jax, g, case, rows)
    return arrays, g, answers.Answer(x_rows, g_rows, case.function, case.k, kept)


def _check(
    call: Call, contender: Contender, case: Case, answer: answers.Answer, rows: np.ndarray
) -> answers.Check:
    """Runs the call once and compares the result with the answer."""
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
        if not contender.ours and case.k is not None:  # a peer may order ties freely
            chosen = call.fetch(result.get("indices", call.indices), rows, 0)
        checks.append(answer.check_gradient(rows_of(call.fetch, result["dx"], case, rows), chosen))
    return answers.all_of(checks)


def _require_name(contender: Contender, case: Case, choices: list[Any], ran: str) -> None:
    """Raises if the program runs another implementation than the one asked for and explained."""
    said = set()
    for choice in choices:  # a gradient without kernels is plain JAX, and has no choice
        is_gradient = choice.call.op.endswith("_grad")
        if case.direction in ("both", "backward" if is_gradient else "forward"):
            said.add(choice.cuda if timing.on_gpu() else choice.elsewhere)
    asked = {contender.asked} if contender.asked else said
    if choices and not said and asked - {"xla"}:
        function = case.function if case.k is None else "fused_topk"
        raise NotImplementedError(f"the gradient of {function} is plain JAX: it has no kernel here")
    said = said or asked  # explain says nothing about the paper's algorithms
    if not said <= asked or said - {"xla"} != set(ran.split("+")) - {"xla"}:
        raise AssertionError(f"asked for {contender.name}, explained as {said}, lowered to {ran}")


def require_ran(row: Any) -> None:
    """Raises unless a row of ours, for a whole program, ran the implementation in its name (maybe among others)."""
    if row.ours and row.contender not in ("auto", "xla") and row.contender not in row.ran.split("+"):
        raise AssertionError(f"asked for {row.contender}, lowered to {row.ran}")


# --- What cannot run ------------------------------------------------------------------------------------


def _cannot_run(error: Exception) -> bool:
    """Tells whether the error means that this contender cannot run here, as opposed to a fault."""
    if isinstance(error, NotImplementedError | ImportError | MemoryError):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "No such compile option"))
    return type(error).__name__ == "OutOfMemoryError"  # torch's


def note(row: Any, error: Exception) -> None:
    """Records an error in the row's status and reason."""
    row.status = "not run" if _cannot_run(error) else "error"
    row.reason = " ".join(str(error).split())[:400] or type(error).__name__
    if row.status == "error":
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        row.reason = f"{type(error).__name__}: {row.reason} ({where})"


def _memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _require_memory(case: Case) -> None:
    """Raises if a case does not fit a CPU's memory. Running it would kill the process, not only the call."""
    if timing.on_gpu() or not hasattr(os, "sysconf"):
        return
    # Eight float32 arrays hold x, its gradient, outputs, values that peers keep, and float32 copies of 16-bit rows.
    needed = 8 * case.batch * case.vocab * 4
    if needed > _memory():
        raise MemoryError(f"needs about {needed / 1e9:.3g} GB of memory, there are {_memory() / 1e9:.3g}")


# --- One case -------------------------------------------------------------------------------------------


def _empty_rows(benchmark: Benchmark, case: Case, contenders: list[Contender]) -> dict[str, Row]:
    """Returns a row for each contender, by name. It holds only the bytes that the case moves so far."""
    cache, cache_bytes = timing.cache()
    return {
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


def _prepare(
    row: Row,
    contender: Contender,
    arrays: tuple[jax.Array, ...],
    g: jax.Array | None,
    answer: answers.Answer,
) -> Call | None:
    """Makes the contender's call, checks it and describes it in its row. Returns the call if it should be timed.

    A wrong result of ours is not timed. A peer that differs is timed, and the table shows the difference.
    """
    case = row.case
    # explain comes later: it would do part of the tracing, which first_result_s should include.
    call = contender.prepare(contender, case.direction, arrays, g)
    row.ran, row.first_result_s, row.extra_mb = call.ran, call.first_result_s, call.extra_mb
    if contender.ours:
        choices = pallas_softmax.explain(contender.function, *arrays)
        row.explain = "; ".join(map(str, choices))
        _require_name(contender, case, choices, call.ran)
    check = _check(call, contender, case, answer, case.checked_rows)
    row.rows_checked = check.rows
    if np.isfinite(check.error_share):
        row.error_eps, row.error_share_of_bound = check.error_eps, check.error_share
    if check.ok:
        return call
    row.status = "FAILED" if contender.ours else "differs"
    row.reason = check.detail
    return None if contender.ours else call


def write_times(
    rows: dict[str, Row], times: dict[str, list[float]], baseline: str, bandwidths: dict[str, float]
) -> None:
    """Fills in the rows' columns of times, rates and speed-ups from the seconds of the calls."""
    medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
    for name, seconds in times.items():
        row = rows[name]
        timing.write_samples(row, seconds)
        row.elements_per_s = row.case.batch * row.case.vocab / medians[name]
        rate = row.bytes / medians[name]
        row.tb_per_s, row.share_of_copy = rate / 1e12, rate / bandwidths["copy"]
        if "read" in bandwidths:
            row.share_of_read = rate / bandwidths["read"]
        if baseline in medians:
            row.speedup = medians[baseline] / medians[name]


def _run_case(benchmark: Benchmark, case: Case, chosen: Settings, bandwidths: dict[str, float]) -> list[Row]:
    """Checks every contender of a case, then times them together."""
    contenders = benchmark.contenders(chosen, case)
    rows = _empty_rows(benchmark, case, contenders)
    try:
        _require_memory(case)
        arrays, g, answer = question(case, case.checked_rows)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())
    calls: dict[str, Call] = {}
    for contender in contenders:
        try:
            call = _prepare(rows[contender.name], contender, arrays, g, answer)
        except Exception as error:
            note(rows[contender.name], error)
            continue
        if call is not None:
            calls[contender.name] = call
    times = timing.interleave(
        calls, chosen.repeats, chosen.seconds, lambda name, error: note(rows[name], error)
    )
    write_times(rows, times, benchmark.baseline, bandwidths)
    return list(rows.values())


# --- The run --------------------------------------------------------------------------------------------


def _compare_logits(rows: list[Row]) -> None:
    """Writes into the rows with other kinds of logits how much longer they took than normal logits."""
    normal = {(row.case, row.contender): row.p50_us for row in rows if row.case.logits == "normal"}
    for row in rows:
        base = normal.get((dataclasses.replace(row.case, logits="normal"), row.contender))
        if row.case.logits != "normal" and row.p50_us and base:
            row.slowdown = row.p50_us / base


def progress(todo: list[Any], name: str) -> Iterator[Any]:
    """Yields the items of `todo`, and on a terminal shows a progress bar with their labels."""
    from tqdm import tqdm

    with tqdm(todo, desc=name, unit="case", disable=None) as bar:
        for case in bar:
            bar.set_postfix_str(case.label)
            yield case


def require_extra() -> None:
    """Ends the program if packages of the extra `bench` are missing."""
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"the benchmarks need {' and '.join(missing)}; install the extra bench: pip install '.[bench]'"
        )


def _bandwidths(todo: list[Case]) -> dict[str, float]:
    """Returns the bytes per second of a copy, and of a read if a case is top-k, which writes almost nothing."""
    try:
        found = {"copy": timing.copy_bandwidth()}
        if any(case.k is not None for case in todo):
            found["read"] = timing.read_bandwidth()
    except RuntimeError as error:
        raise SystemExit(f"{error}: {error.__cause__}") from error
    return found


def run(benchmark: Benchmark, chosen: Settings) -> int:
    """Runs one benchmark, prints its table and writes its files. Returns the exit code."""
    require_extra()
    try:
        todo = benchmark.cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    where = report.environment(chosen.commit)
    bandwidths = _bandwidths(todo)
    rows: list[Row] = []
    for case in progress(todo, benchmark.name):
        rows += _run_case(benchmark, case, chosen, bandwidths)
    _compare_logits(rows)

    also = {f"{name}_tb_per_s": bandwidth / 1e12 for name, bandwidth in bandwidths.items()}
    report.write(benchmark.name, rows, chosen, where, **also)
    directory = Path(chosen.output_dir)
    benchmark.draw(directory / f"{benchmark.name}.png", rows, bandwidths, where)
    kind = "device time" if timing.on_gpu() else "wall time"
    print(f"\n{benchmark.name} on {where['device']}, jax {where['jax']}; {kind}")
    print(benchmark.table(rows, bandwidths))
    print(f"files: {directory}/{benchmark.name}.*")
    return report.exit_code(benchmark.name, sum(row.fails for row in rows), rows)
