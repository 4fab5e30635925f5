"""Fixtures for tests of the benchmarks: command lines, small settings, and quick runs in this process."""

import csv
import dataclasses

import pytest
from absl.flags import FLAGS

from benchmarks import softmax, topk
from benchmarks.support import flags, timing
from benchmarks.support.flags import Settings


@pytest.fixture
def parse():
    """Parses the command line of a benchmark, given as its module, and removes its flags again."""

    def settings(benchmark, *args):
        others = set(FLAGS)
        benchmark.define_flags()
        own = set(FLAGS) - others
        try:
            return flags.read(FLAGS([benchmark.__name__, *args]))
        finally:
            for name in own:
                delattr(FLAGS, name)

    return settings


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Makes settings of a quick run in this process: without peers, pictures and bandwidth measurements."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e10)
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 8e9)
    for module in (softmax, topk):
        blind = dataclasses.replace(module.BENCHMARK, draw=lambda *args: None)
        monkeypatch.setattr(module, "BENCHMARK", blind)

    def make(**changed):
        quick = {"batch": (6,), "vocab": (40,), "repeats": 3, "seconds": 0.0, "peers": ()}
        quick["output_dir"] = str(tmp_path)
        return Settings(**(quick | changed))

    return make


@pytest.fixture
def run_benchmark(parse, monkeypatch, tmp_path):
    """Runs a benchmark, given as its module, with flags; returns the exit code and the lines of the CSV."""

    def run(benchmark, *args):
        chosen = parse(benchmark, f"--output_dir={tmp_path}", *args)
        monkeypatch.setattr(flags, "read", lambda argv: chosen)
        monkeypatch.setattr(flags, "defined", lambda: {})
        code = benchmark.main([])
        with open(tmp_path / f"{benchmark.__name__.split('.')[-1]}.csv", newline="") as file:
            return code, list(csv.DictReader(file))

    return run
