"""Runs a benchmark: measures its cases, writes one record per contender and case, and shows the result.

`main` is the program of every benchmark, and `measure` is its loop over the contenders of one case. Nothing here needs
pandas, so that a GPU machine can measure without it: see `benchmarks.support.result`.
"""

import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallas_softmax
from benchmarks.support import result, timing
from benchmarks.support.contenders import Call
from benchmarks.support.flags import FLAGS
from benchmarks.support.result import Record


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark: its cases, how to measure one, and how to show the result."""

    name: str
    cases: Callable[[Any], list[Any]]  # flags -> cases, which are frozen dataclasses
    run: Callable[[Any, Any], list[Record]]  # (case, flags) -> records
    view: result.View
    bandwidths: Callable[[list[Any]], tuple[str, ...]] = lambda cases: ()  # which to measure: copy, read
    several: bool = False  # whether it uses all devices. Such a long run is written after every case


class Wrong(Exception):
    """A result is wrong. The contender is not timed."""


def measure(
    records: Iterable[Record],
    prepare: Callable[[Record], Call | None],
    chosen: Any,
    sample: Callable[[Call], list[float]] | None = None,
    prefix: str = "",
) -> dict[str, Call]:
    """Prepares every contender of a case, then times them together.

    Args:
      records: one per contender. They receive what is found.
      prepare: compiles and checks the contender of a record, and returns the call to time. It returns None if the
        call must not be timed, and raises if the contender cannot run.
      chosen: the parsed flags, which say how long to time.
      sample: how to time a call; the default is device times on a GPU, wall times on a CPU.
      prefix: of the names of the percentiles.

    Returns:
      The timed calls, by contender.
    """
    found = {record.contender: record for record in records}
    calls = {}
    for name, record in found.items():
        try:
            if (call := prepare(record)) is not None:
                calls[name] = call
        except Exception as error:
            note(record, error)
    failed = lambda name, error: note(found[name], error)  # noqa: E731
    for name, seconds in timing.interleave(calls, chosen.repeats, chosen.seconds, failed, sample).items():
        percentiles = zip(("p20_us", "p50_us", "p80_us"), timing.percentiles_us(seconds))
        found[name].add(samples=len(seconds), **{prefix + column: us for column, us in percentiles})
    return calls


def described(record: Record, call: Call) -> Call:
    """Writes into a record what its call ran, and how long that took the first time. Returns the call."""
    record.ran = call.ran
    record.add(first_result_s=call.first_result_s)
    return call


def note(record: Record, error: Exception) -> None:
    """Records an error in the status and the reason."""
    record.reason = " ".join(str(error).split())[:400] or type(error).__name__
    if isinstance(error, Wrong):
        record.status = "FAILED" if record.required else "differs"
    elif _cannot_run(error):
        record.status = "not run"
    else:
        record.status = "error"
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        record.reason = f"{type(error).__name__}: {record.reason} ({where})"


def _cannot_run(error: Exception) -> bool:
    """Tells whether the error means that this contender cannot run here, as opposed to a fault."""
    if isinstance(error, NotImplementedError | ImportError | MemoryError):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "No such compile option"))
    return type(error).__name__ == "OutOfMemoryError"  # torch's


def explained(record: Record, function: Callable[..., Any], *args: Any) -> set[str | None]:
    """Writes into a record what explain says about a call of ours. Returns the implementations that it names."""
    choices = pallas_softmax.explain(function, *args)
    record.add(explain="; ".join(map(str, choices)))
    return {choice.cuda if timing.on_gpu() else choice.elsewhere for choice in choices}


def require_ran(record: Record, said: set[str | None]) -> None:
    """Raises unless the lowered program runs what its name asks for, and what `explained` returned."""
    if said != {record.ran} or record.contender not in ("auto", record.ran):
        raise AssertionError(f"asked for {record.contender}, explained as {said}, lowered to {record.ran}")


def require_among(record: Record) -> None:
    """Raises unless a whole program of ours ran the implementation in its name, maybe among others."""
    if record.ours and record.contender not in ("auto", "xla", *record.ran.split("+")):
        raise AssertionError(f"asked for {record.contender}, lowered to {record.ran}")


@jax.jit
def relative_errors(got: Any, want: Any) -> Any:
    """Returns the relative error of each array: the norm of the difference over the norm of `want`."""

    def error(got: jax.Array, want: jax.Array) -> jax.Array:
        got, want = (jax.numpy.ravel(a).astype(jax.numpy.float32) for a in (got, want))
        return jax.numpy.linalg.norm(got - want) / jax.numpy.linalg.norm(want)

    return jax.tree.map(error, got, want)


def largest_error(got: Any, want: Any) -> float:
    """Returns the largest relative error over the arrays of two trees. A NaN is the largest."""
    return float(np.max([np.asarray(error) for error in jax.tree.leaves(relative_errors(got, want))]))


def progress(todo: list[Any], name: str) -> Iterator[Any]:
    """Yields the items of `todo`, and on a terminal shows a progress bar with their fields."""
    from tqdm import tqdm

    with tqdm(todo, desc=name, unit="case", disable=None) as bar:
        for case in bar:
            bar.set_postfix_str(" ".join(map(str, result.flat(case).values())))
            yield case


def main(benchmark: Benchmark, argv: list[str]) -> int:
    """Runs one benchmark as its flags say, writes its files and prints its table. Returns the exit code."""
    chosen = FLAGS
    if argv[1:]:
        raise SystemExit(f"not a flag: {' '.join(argv[1:])}; lists have commas and no spaces")
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"the benchmarks need {' and '.join(missing)}; install the extra bench: pip install '.[bench]'"
        )
    try:
        todo = benchmark.cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    run = result.provenance(chosen.commit, jax.device_count() if benchmark.several else 1)
    try:
        measured = {"copy": timing.copy_bandwidth, "read": timing.read_bandwidth}
        limits = {f"{name}_tb_per_s": measured[name]() / 1e12 for name in benchmark.bandwidths(todo)}
    except RuntimeError as error:
        raise SystemExit(f"{error}: {error.__cause__}") from error
    records: list[Record] = []
    for case in progress(todo, benchmark.name):
        records += benchmark.run(case, chosen)
        if benchmark.several:
            result.write(chosen.output_dir, benchmark.name, records, run | limits)
    result.write(chosen.output_dir, benchmark.name, records, run | limits)
    show(benchmark, Path(chosen.output_dir))
    failed = sum(record.fails for record in records)
    if failed:
        print(f"{benchmark.name}: {failed} of {len(records)} records failed", file=sys.stderr)
    return 1 if failed else 0


def show(benchmark: Benchmark, directory: Path) -> None:
    """Prints the table of a result that was written, and writes its CSV and its picture."""
    file = directory / f"{benchmark.name}.json"
    if importlib.util.find_spec("pandas") is None:
        print(
            f"without pandas there is only {file}; elsewhere: python -m benchmarks.support.redraw {directory}"
        )
        return
    document = result.read(file)
    run = document["runs"][0]
    print(f"\n{benchmark.name} on {run['device']}, jax {run['jax']}")
    print(result.show(document, benchmark.view, directory))
    print(f"files: {directory}/{benchmark.name}.*")
