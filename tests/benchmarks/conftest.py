"""Fixtures for tests of the benchmarks: command lines, and quick runs in this process."""

import contextlib
import csv
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl.flags import FLAGS

import benchmarks
from benchmarks.support import plot, timing

NAMES = [file.stem for file in sorted(Path(benchmarks.__path__[0]).glob("*.py"))]
MODULES = [importlib.import_module(f"benchmarks.{name}") for name in NAMES if not name.startswith("__")]


@contextlib.contextmanager
def flags_of(benchmark, *args):
    """Parses the command line of a benchmark, given as its module. Removes its flags at the end."""
    others = set(FLAGS)
    benchmark.define_flags()
    own = set(FLAGS) - others
    try:
        FLAGS([benchmark.__name__, *args])
        yield {name: getattr(FLAGS, name) for name in own}
    finally:
        for name in own:
            delattr(FLAGS, name)


@pytest.fixture
def parse():
    """Returns the flags of a command line of a benchmark, given as its module."""

    def parsed(benchmark, *args):
        with flags_of(benchmark, *args) as found:
            return SimpleNamespace(**found)

    return parsed


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path):
    """Runs a benchmark, given as its module, on a small input; returns the exit code and the rows of its JSON.

    No bandwidth is measured, and no picture is saved.
    """
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e10)
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 8e9)
    monkeypatch.setattr(plot, "finish", lambda figure, *args: plot.pyplot().close(figure))

    def run(benchmark, *args, name=None):
        quick = [f"--output_dir={tmp_path}", "--repeats=3", "--seconds=0"]
        module = benchmark.__name__.split(".")[-1]
        name = name or module
        if module in ("softmax", "topk", "paper"):
            quick += ["--batch=6", "--vocab=40", "--peers="]
        with flags_of(benchmark, *(quick if name != "accuracy" else quick[:1]), *args):
            code = benchmark.main([benchmark.__name__])
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        with open(tmp_path / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == len(rows)
        return code, rows

    return run


@pytest.fixture
def one(run_benchmark):
    """Runs a benchmark on one case; returns the exit code and the rows by contender."""

    def run(*args):
        code, rows = run_benchmark(*args)
        return code, {row["contender"]: row for row in rows}

    return run
