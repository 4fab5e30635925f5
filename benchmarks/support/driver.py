"""Runs a benchmark: measures its cases, writes one record per contender and case, and shows the result.

`main` is the program of every benchmark, and `measure` is its loop over the contenders of one case. Nothing here needs
pandas, so that a GPU machine can measure without it: see `benchmarks.support.result`.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app

import pallas_softmax
from benchmarks.support import result, timing
from benchmarks.support.contenders import Call
from benchmarks.support.flags import FLAGS, IMPLEMENTATIONS
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


@contextlib.contextmanager
def wrong_if_refuted() -> Iterator[None]:
    """Raises Wrong in place of a failed assertion: an oracle has refuted a result."""
    try:
        yield
    except AssertionError as error:
        raise Wrong(str(error)) from None


def records_of(case: Any, names: Iterable[str], required: Iterable[str] = (), **found: Any) -> list[Record]:
    """Returns a record per contender of a case. Contenders with the name of an implementation are ours.

    A repeated name counts once. `required` has the peers that may not fail either, `found` what all records share.
    """
    required = {*IMPLEMENTATIONS, *required}
    return [
        Record(case, name, name in IMPLEMENTATIONS, found={**found}, required=name in required)
        for name in dict.fromkeys(names)
    ]


def measure(
    records: Iterable[Record],
    prepare: Callable[[Record], Call | None],
    chosen: Any,
    sample: Callable[[Call], list[float]] | None = None,
    prefix: str = "",
) -> dict[str, Call]:
    """Prepares every contender of a case, then times them together. Returns the timed calls, by contender.

    Args:
      records: one per contender. They receive what is found.
      prepare: compiles and checks the contender of a record, and returns the call to time. It returns None if the
        call must not be timed, and raises if the contender cannot run.
      chosen: the parsed flags, which say how long to time.
      sample: how to time a call; the default is device times on a GPU, wall times on a CPU.
      prefix: of the names of the percentiles.
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
        times = {f"{prefix}p{n}_us": 1e6 * float(np.percentile(seconds, n)) for n in (20, 50, 80)}
        found[name].add(samples=len(seconds), **times)
    return calls


def describe(record: Record, call: Call, *explained: Any) -> None:
    """Writes into a record what its call ran, and how long that took the first time.

    `explained` is a function of ours and its arguments, if the call is one call of ours. Without it, the call is a
    whole program. Raises if ours ran another implementation than its name asks for, or than `explain` says.
    """
    record.ran = call.ran
    record.add(first_result_s=call.first_result_s)
    if not record.ours:
        return
    said, accepted = {call.ran}, {"auto", "xla", *call.ran.split("+")}
    if explained:
        choices = pallas_softmax.explain(*explained)
        record.add(explain="; ".join(map(str, choices)))
        said = {choice.cuda if timing.on_gpu() else choice.elsewhere for choice in choices}
        accepted = {"auto", call.ran}
    if said != {call.ran} or record.contender not in accepted:
        raise AssertionError(f"asked for {record.contender}, explained as {said}, lowered to {call.ran}")


def compare(record: Record, got: dict[str, Any], wanted: dict[str, Any], allowed: float, whose: str) -> None:
    """Compares a result with the first contender's, which `wanted` keeps, and records the largest relative error.

    The error of an array is the norm of the difference over the norm. Raises Wrong if it is not at most `allowed`.
    """
    wanted.update(wanted or got)
    errors = jax.tree.map(_relative_error, got, {name: wanted[name] for name in got})
    error = float(np.max(jax.tree.leaves(errors)))  # a NaN is the largest
    record.add(error=error)
    if not error <= allowed:
        raise Wrong(f"{error:.3g} off {whose}'s, more than {allowed:.3g}")


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = (jax.numpy.ravel(a).astype(jax.numpy.float32) for a in (got, want))
    return jax.numpy.linalg.norm(got - want) / jax.numpy.linalg.norm(want)


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
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "No such compile option"))
    is_torchs = type(error).__name__ == "OutOfMemoryError"
    return is_torchs or isinstance(error, NotImplementedError | ImportError | MemoryError)


def program(
    module: str, benchmark: Benchmark, define_flags: Callable[[], None]
) -> Callable[[list[str]], int]:
    """Returns the `main` of a benchmark. Runs it if its module is the program: `module` is the module's __name__."""
    run = functools.partial(main, benchmark)
    if module == "__main__":
        define_flags()
        app.run(run)
    return run


def main(benchmark: Benchmark, argv: list[str]) -> int:
    """Runs one benchmark as its flags say, writes its files and prints its table. Returns the exit code."""
    chosen, directory = FLAGS, Path(FLAGS.output_dir)
    if argv[1:]:
        raise SystemExit(f"not a flag: {' '.join(argv[1:])}; lists have commas and no spaces")
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise SystemExit(f"the benchmarks need {needed}; install the extra bench: pip install '.[bench]'")
    try:
        todo = benchmark.cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    run = result.provenance(chosen.commit, jax.device_count() if benchmark.several else 1)
    measured = {"copy": timing.copy_bandwidth, "read": timing.read_bandwidth}
    try:
        run |= {f"{name}_tb_per_s": measured[name]() / 1e12 for name in benchmark.bandwidths(todo)}
    except RuntimeError as error:
        raise SystemExit(f"{error}: {error.__cause__}") from error
    records: list[Record] = []
    for case in progress(todo, benchmark.name):
        records += benchmark.run(case, chosen)
        if benchmark.several:
            result.write(directory, benchmark.name, records, run)
    result.write(directory, benchmark.name, records, run)
    show(benchmark, directory)
    failed = sum(record.fails for record in records)
    if failed:
        print(f"{benchmark.name}: {failed} of {len(records)} records failed", file=sys.stderr)
    return 1 if failed else 0


def progress(cases: list[Any], name: str) -> Iterator[Any]:
    """Yields the cases, and shows which one runs: as a bar on a terminal, and as a line for each in a file."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(cases, desc=name, unit="case")
        return
    for i, case in enumerate(cases, 1):
        fields = result.flat(getattr(case, "line", case))  # what the table says of it, if that is shorter
        what = " ".join(str(value) for value in fields.values() if value not in (None, "none"))
        print(f"{name}: case {i} of {len(cases)}: {what}", file=sys.stderr, flush=True)
        yield case


def show(benchmark: Benchmark, directory: Path) -> None:
    """Prints the table of a result that was written, and writes its CSV and its picture."""
    file = directory / f"{benchmark.name}.json"
    if importlib.util.find_spec("pandas") is None:
        again = f"python -m benchmarks.support.redraw {directory}"
        print(f"without pandas there is only {file}; elsewhere: {again}")
        return
    document = result.read(file)
    run = document["runs"][0]
    print(f"\n{benchmark.name} on {run['device']}, jax {run['jax']}")
    print(result.show(document, benchmark.view, directory))
    print(f"files: {directory}/{benchmark.name}.*")
