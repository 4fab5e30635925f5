"""Draws the pictures of results again, from their JSON: python -m benchmarks.support.redraw benchmarks/results/targets

It measures nothing. A folder without the JSON of a benchmark that draws pictures stays as it is.
"""

import sys
from pathlib import Path

from benchmarks import paper, sharded
from benchmarks.support import plot, report


def redraw(directory: Path) -> None:
    """Draws the pictures of the results in a folder."""
    for name, draw in {"softmax": plot.draw, "topk": plot.draw, "paper": paper.draw}.items():
        if (file := directory / f"{name}.json").is_file():
            draw(directory / f"{name}.png", *report.read(file, report.Row))
    if (file := directory / "sharded.json").is_file():
        rows, _, where = report.read(file, sharded.Row)
        sharded.picture(directory / "sharded.png", rows, where)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        redraw(Path(folder))
