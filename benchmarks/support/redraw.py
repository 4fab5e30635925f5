"""Redraws the pictures of results from their JSON: python -m benchmarks.support.redraw benchmarks/results/targets

It takes folders, and measures nothing. It skips results of benchmarks that draw no pictures.
"""

from pathlib import Path

from absl import app

from benchmarks import linear, paper, sharded
from benchmarks.support import plot, report


def redraw(directory: Path) -> None:
    """Redraws the pictures of the results in a folder."""
    for name, draw in {
        "softmax": plot.draw,
        "topk": plot.draw,
        "paper": paper.draw,
        "sample": plot.draw,
    }.items():
        if (file := directory / f"{name}.json").is_file():
            draw(directory / f"{name}.png", *report.read(file, report.Row))
    if (file := directory / "linear.json").is_file():
        rows, _, where = report.read(file, linear.Row)
        linear.draw(directory / "linear.png", rows, where)
    if (file := directory / "sharded.json").is_file():
        rows, _, where = report.read(file, sharded.Row)
        sharded.picture(directory / "sharded.png", rows, where)


def main(argv: list[str]) -> None:
    """Redraws the pictures in the folders named on the command line."""
    for folder in argv[1:]:
        redraw(Path(folder))


if __name__ == "__main__":
    app.run(main)
