"""The picture of a run: bandwidth of every contender on every case, against a plain copy."""

import itertools
import logging
import math
from pathlib import Path
from typing import Any

from benchmarks.report import Row, bandwidth_unit, number

_COLUMN_OF_BARS = 48  # more are hard to read under each other; then a second column begins


def draw(path: Path, rows: list[Row], copy_bytes_per_s: float, where: dict[str, str]) -> None:
    """Writes the PNG: one horizontal bar a row, grouped by case, and the copy as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its news about fonts
    scale, unit = bandwidth_unit(copy_bytes_per_s)
    copy = copy_bytes_per_s / scale
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.case)]
    columns = min(3, math.ceil(len(rows) / _COLUMN_OF_BARS))
    per_column = math.ceil(len(groups) / columns)
    names = list(dict.fromkeys(row.contender for row in rows))
    # Ours in shades of one hue and first; peers in greys and browns.
    ours = iter(["#1f77b4", "#17becf", "#6baed6", "#08306b"])
    peers = iter(["#7f7f7f", "#bcbd22", "#c49c94", "#d62728"])
    is_ours = {row.contender: row.ours for row in rows}
    colors = {name: next(ours if is_ours[name] else peers) for name in names}

    height = max(len(group) + 1.2 for group in groups) * per_column * 0.2
    figure, axes = plt.subplots(
        1,
        columns,
        squeeze=False,
        layout="constrained",
        figsize=(2.5 + 6 * columns, max(3.0, height + 1.6)),
    )
    longest = max([copy] + [(row.tb_per_s or 0) * 1e12 / scale for row in rows])
    for column, axis in enumerate(axes[0]):
        part = groups[column * per_column : (column + 1) * per_column]
        position, ticks = 0.0, []
        for group in part:
            ticks.append((position + (len(group) - 1) / 2, group[0].case.label))
            for row in group:
                _bar(axis, row, position, scale, colors[row.contender], longest)
                position += 1
            position += 1.2
        axis.axvline(copy, color="black", linestyle="--", linewidth=1, zorder=1.5)
        axis.set_yticks([tick for tick, _ in ticks], [_two_lines(text) for _, text in ticks])
        axis.tick_params(axis="both", labelsize=8)
        axis.set_ylim(position - 0.8, -1.0)
        axis.set_xlim(0, longest * 1.3)
        axis.set_xlabel(f"{unit}: fewest bytes of the call / median time")
        axis.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1))
    figure.suptitle(f"{rows[0].benchmark} on {where['device']}, jax {where['jax']}", fontsize=10)
    figure.legend(
        handles,
        [*names, f"copy, {number(copy)} {unit}"],
        loc="outside lower center",
        ncols=min(5, len(handles)),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _two_lines(label: str) -> str:
    shape, rest = label.split(" ", 1)
    return f"{shape.replace('x', ' × ')}\n{rest}"


def _bar(axis, row: Row, position: float, scale: float, color: str, longest: float) -> None:
    """One row: its bar and median time, or why there is none."""
    length = 0.0
    text = row.status
    if row.tb_per_s is not None and row.p50_us is not None:
        length = row.tb_per_s * 1e12 / scale
        time = row.p50_us
        text = f"{number(time / 1e3)} ms" if time >= 1e3 else f"{number(time)} us"
        if row.status != "ok":
            text += f" ({row.status})"
    axis.barh(position, length, height=0.85, color=color)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axis.text(length + 0.01 * longest, position, text, va="center", fontsize=7, bbox=box)
