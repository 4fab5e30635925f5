"""Runs a benchmark: measures its cases, writes one record per contender and case, and shows the result.

`main` is the program of every benchmark, and `measure` is its loop over the contenders of one case. Only `show` needs
pandas and matplotlib, so that a GPU machine can measure without them.
"""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app

import pallas_softmax
from benchmarks.support import result, timing
from benchmarks.support.contenders import Call
from benchmarks.support.flags import FLAGS, IMPLEMENTATIONS
from benchmarks.support.result import Benchmark, Record


class Wrong(Exception):
    """A result is wrong. The contender is not timed."""


@contextlib.contextmanager
def wrong_if_refuted() -> Iterator[None]:
    """Raises Wrong in place of an oracle's failed assertion."""
    try:
        yield
    except AssertionError as error:
        raise Wrong(str(error)) from None


def measure(
    case: Any,
    names: Iterable[str],
    prepare: Callable[[Record], Call | None],
    chosen: Any,
    *,
    ours: Container[str] = IMPLEMENTATIONS,
    required: Container[str] = (),
    prefix: str = "",
    steps: int = 0,
    **found: Any,
) -> list[Record]:
    """Checks every contender of a case, then times them together. Returns a record per contender.

    Args:
      case: a frozen dataclass.
      names: the contenders. A repeated name counts once.
      prepare: compiles and checks the contender of a record, and returns the call to time. It returns None if the
        call must not be timed, and raises if the contender cannot run.
      chosen: the parsed flags, which say how long to time.
      ours, required: the contenders that are ours, and the peers that may not fail either.
      prefix: of the names of the percentiles, if these are of wall times. Otherwise a GPU's times are device times.
      steps: the steps of a call that decodes. It is timed by wall time, and on a GPU by the device time of a step too.
      found: what all records share.
    """
    records = {
        name: Record(case, name, name in ours, found={**found}, required=name in required)
        for name in dict.fromkeys(names)
    }
    calls = {}
    for name, record in records.items():
        try:
            if (call := prepare(record)) is not None:
                calls[name] = call
        except Exception as error:
            note(record, error)
    if not calls:
        return list(records.values())
    failed = lambda name, error: note(records[name], error)  # noqa: E731
    sample = timing.wall_times if steps or prefix else None
    for name, seconds in timing.interleave(calls, chosen.repeats, chosen.seconds, failed, sample).items():
        times = {f"{prefix}p{n}_us": 1e6 * float(np.percentile(seconds, n)) for n in (20, 50, 80)}
        records[name].add(samples=len(seconds), **times)
    if steps and timing.on_gpu():

        def without(name: str, error: Exception) -> None:
            records[name].reason = f"no device time: {error}"

        for name, seconds in timing.interleave(calls, chosen.repeats, chosen.seconds, without).items():
            records[name].add(device_us_per_step=1e6 * float(np.median(seconds)) / steps)
    return list(records.values())


def describe(
    record: Record, call: Call, *explained: Any, direction: str = "forward", asked: str = "", **found: Any
) -> None:
    """Writes into a record what its call ran, and how long that took the first time.

    Raises if ours ran another implementation than the one asked for (by `asked` or the contender's name), or than
    `explain` says. `explained` has a function of ours and its arguments, unless the call is a whole program.
    """
    record.ran = call.ran
    record.add(first_result_s=call.first_result_s, **found)
    if not record.ours:
        return
    ran = {*call.ran.split("+")}
    wanted = {asked or record.contender} - {"auto"}
    said, is_right = {call.ran}, wanted <= {"xla", *ran}
    if explained:
        choices = explain(record, *explained)
        said = {
            choice.cuda if timing.on_gpu() else choice.elsewhere
            for choice in choices
            if direction in ("both", "backward" if choice.call.op.endswith("_grad") else "forward")
        }
        if choices and not said and wanted - {"xla"}:  # a gradient without kernels has no choice
            of = choices[0].call.op
            raise NotImplementedError(f"the gradient of {of} is plain JAX: it has no kernel here")
        said = said or wanted  # explain says nothing about the paper's algorithms
        is_right = said <= (wanted or said) and said - {"xla"} == ran - {"xla"}
    if not is_right:
        raise AssertionError(f"asked for {record.contender}, explained as {said}, lowered to {call.ran}")


def explain(record: Record, function: Callable, *arrays: Any) -> list[Any]:
    """Writes into a record what `explain` says of a call of ours, and returns it."""
    choices = pallas_softmax.explain(function, *arrays)
    record.add(explain="; ".join(map(str, choices)))
    return choices


def compare(record: Record, got: dict[str, Any], wanted: dict[str, Any], allowed: float, whose: str) -> None:
    """Compares a result with the first contender's, which `wanted` keeps, and records the largest relative error.

    Raises Wrong if the error is not at most `allowed`.
    """
    wanted.update(wanted or got)
    errors = jax.tree.map(_relative_error, got, {name: wanted[name] for name in got})
    error = float(np.max(jax.tree.leaves(errors)))  # a NaN is the largest
    record.add(error=error)
    if not error <= allowed:
        raise Wrong(f"{error:.3g} off {whose}'s, more than {allowed:.3g}")


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the norm of the difference over the norm; 0 if both are 0."""
    got, want = (jax.numpy.ravel(a).astype(jax.numpy.float32) for a in (got, want))
    return jax.numpy.linalg.norm(got - want) / jax.numpy.maximum(jax.numpy.linalg.norm(want), 1e-30)


def note(record: Record, error: Exception) -> None:
    """Records an error in the status and the reason."""
    record.reason = " ".join(str(error).split())[:400] or type(error).__name__
    if isinstance(error, Wrong):
        record.status = "FAILED" if record.ours or record.required else "differs"
    elif _cannot_run(error):
        record.status = "not run"
    else:
        record.status = "error"
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        record.reason = f"{type(error).__name__}: {record.reason} ({where})"


def _cannot_run(error: Exception) -> bool:
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "No such compile option"))
    is_torchs = type(error).__name__ == "OutOfMemoryError"
    return is_torchs or isinstance(error, NotImplementedError | ImportError | MemoryError)


def program(module: str, define_flags: Callable[[], None], *benchmarks: Benchmark) -> Callable[[list[str]], int]:
    """Returns the `main` of one benchmark or of several, which returns the largest exit code.

    Runs it if its module is the program: `module` is the module's __name__.
    """
    run = lambda argv: max(main(benchmark, argv) for benchmark in benchmarks)  # noqa: E731
    if module == "__main__":
        define_flags()
        app.run(run)
    return run


def main(benchmark: Benchmark, argv: list[str]) -> int:
    chosen, directory = FLAGS, Path(FLAGS.output_dir)
    if argv[1:]:
        raise SystemExit(f"not a flag: {' '.join(argv[1:])}; lists have commas and no spaces")
    try:
        todo = benchmark.cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not todo:
        print(f"{benchmark.name}: nothing to measure", file=sys.stderr)
        return 0
    run = result.provenance(chosen.commit, jax.device_count() if benchmark.several else 1)
    try:
        run |= {f"{name}_tb_per_s": timing.bandwidth(name) / 1e12 for name in benchmark.bandwidths}
    except RuntimeError as error:
        raise SystemExit(f"{error}: {error.__cause__}") from error
    records: list[Record] = []
    for i, case in enumerate(todo, 1):
        fields = result.flat(getattr(case, "line", case))  # what the table says of it, if that is shorter
        what = " ".join(str(value) for value in fields.values() if value not in (None, "none"))
        print(f"{benchmark.name}: case {i} of {len(todo)}: {what}", file=sys.stderr, flush=True)
        records += benchmark.run(case, chosen)
        result.write(directory, benchmark.name, records, run)
    show(benchmark, directory)
    failed = sum(record.fails for record in records)
    if failed:
        print(f"{benchmark.name}: {failed} of {len(records)} records failed", file=sys.stderr)
    return 1 if failed else 0


def show(benchmark: Benchmark, directory: Path) -> None:
    """Prints the table of a result that was written, and writes its CSV and its picture."""
    file = directory / f"{benchmark.name}.json"
    if missing := [name for name in ("pandas", "matplotlib") if importlib.util.find_spec(name) is None]:
        again = f"python -m benchmarks.support.redraw {directory}"
        print(f"without {' and '.join(missing)} there is only {file}; elsewhere: {again}")
        return
    document = result.read(file)
    run = document["runs"][0]
    print(f"\n{benchmark.name} on {run['device']}, jax {run['jax']}")
    rows = result.frame(document, benchmark)
    rows.to_csv(file.with_suffix(".csv"), index=False, lineterminator="\n")
    if benchmark.draw:
        benchmark.draw(rows, document, file.with_suffix(".png"))
    print(result.table(rows, benchmark.columns))
    print(f"files: {directory}/{benchmark.name}.*")
