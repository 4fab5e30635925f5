"""Makes the CSV, the table and the picture of results again: python -m benchmarks.support.redraw FOLDER

It takes folders, measures nothing, and needs pandas. A folder is for example benchmarks/results/targets.
"""

import importlib
from pathlib import Path

from absl import app

from benchmarks.support import driver
from benchmarks.support.result import Benchmark


def benchmark_of(name: str) -> Benchmark:
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK


def main(argv: list[str]) -> None:
    for folder in argv[1:]:
        for file in sorted(Path(folder).glob("*.json")):
            driver.show(benchmark_of(file.stem), Path(folder))


if __name__ == "__main__":
    app.run(main)
