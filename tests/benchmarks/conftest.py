"""Fixtures for tests of the benchmarks: command lines, and quick runs in this process."""

import contextlib
import csv
import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
from absl.flags import FLAGS

from benchmarks.support import driver, plot, timing
from benchmarks.support.cases import Case
from tests.support import children


def output_of(*command, **environment):
    """Runs a module in a process of its own, on the CPU. Returns what it prints."""
    of_cpu = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return children.output_of("-m", *command, env=os.environ | of_cpu | environment)


def case_of(**changed) -> Case:
    """Returns a forward case of 6 x 40 float32."""
    return dataclasses.replace(Case(6, 40, "float32", "softmax", "none", -1, None, "forward", "normal", 0), **changed)


@contextlib.contextmanager
def flags_of(benchmark, *args):
    """Parses the command line of a benchmark, given as its module. Removes its flags at the end."""
    others = set(FLAGS)
    benchmark.define_flags()
    own = set(FLAGS) - others
    try:
        FLAGS([benchmark.__name__, *args])
        yield SimpleNamespace(**{name: getattr(FLAGS, name) for name in own})
    finally:
        for name in own:
            delattr(FLAGS, name)


def parse(benchmark, *args):
    """Returns the flags of a command line of a benchmark, given as its module."""
    with flags_of(benchmark, *args) as found:
        return found


@pytest.fixture
def titles(monkeypatch):
    """Returns the titles of the pictures, which are drawn but not saved."""
    found = []

    def finish(figure, file, document, title, *args):
        found.append(title)
        plot.pyplot().close(figure)

    monkeypatch.setattr(plot, "finish", finish)
    return found


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path, titles):
    """Runs a benchmark, given as its module, on a small input; returns the exit code and the rows of its JSON.

    No bandwidth is measured, and no picture is saved. `choose` takes the cases of the flags, and returns those to run.
    """
    monkeypatch.setattr(timing, "bandwidth", {"copy": 1e10, "read": 8e9}.get)

    def run(benchmark, *args, choose=None):
        name = benchmark.__name__.split(".")[-1]
        quick = [f"--output_dir={tmp_path}", *(["--repeats=3", "--seconds=0"] if name != "accuracy" else [])]
        if name in ("softmax", "topk", "paper"):
            quick += ["--batch=6", "--vocab=40", "--peers="]
        with flags_of(benchmark, *quick, *args):
            if choose is None:
                code = benchmark.main([name])
            else:
                of = benchmark.BENCHMARK
                few = dataclasses.replace(of, cases=lambda chosen: choose(of.cases(chosen)))
                code = driver.main(few, [name])
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        with open(tmp_path / f"{name}.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) == len(rows)
        return code, rows

    return run
