"""The picture of a run: the bandwidth of every contender on every case, as a share of a plain copy's or read's."""

import logging
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, bandwidth_unit, number

# Our implementations have shades of one hue; peers have greys and browns, and the last one has a red.
OURS = ("#1f77b4", "#17becf", "#6baed6", "#08306b")
PEERS = ("#7f7f7f", "#c49c94", "#bcbd22", "#8c564b", "#d62728")

_INCHES_OF_BAR = 0.1
_INCHES_OF_GAP = 0.12  # between shapes


def pyplot() -> Any:
    """Returns matplotlib.pyplot, set to write files and to open no windows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # its news about fonts
    return plt


def draw(path: Path, rows: list[Row], bandwidths: dict[str, float], where: dict[str, str]) -> None:
    """Writes the PNG: a panel per function, direction and dtype, in which a group of bars is a shape and k."""
    plt = pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    names = list(dict.fromkeys(row.contender for row in rows))
    ours, peers = iter(OURS), iter(PEERS)
    is_ours = {row.contender: row.ours for row in rows}
    colors = {name: next(ours if is_ours[name] else peers) for name in names}
    panels: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        what = row.case.what.removeprefix(f"k={row.case.k} ")
        panel = panels.setdefault((what, row.case.short_dtype), {})
        panel.setdefault(_shape(row), []).append(row)

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    most = max(map(len, panels.values()))
    height = most * (len(names) * _INCHES_OF_BAR + _INCHES_OF_GAP)
    figure, axes = plt.subplots(
        lines,
        columns,
        squeeze=False,
        sharex=True,
        layout="constrained",
        figsize=(1.5 + 4 * columns, 1.4 + lines * (height + 0.4)),
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    gap = _INCHES_OF_GAP / _INCHES_OF_BAR
    beside: list[str] = []
    for i, (axis, ((what, dtype), shapes)) in enumerate(zip(axes.flat, panels.items())):
        ticks, position = [], 0.0
        for group in shapes.values():
            ticks.append(position + (len(group) - 1) / 2)
            for row in group:
                _bar(axis, row, position, colors[row.contender])
                position += 1
            position += gap
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.set_title(f"{what}, {dtype}", fontsize=9)
        same = i % columns and beside == list(shapes)
        beside = list(shapes)
        axis.set_yticks(ticks, [] if same else beside)
        axis.set_ylim(most * (len(names) + gap) - gap - 0.2, -0.8)
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axis.grid(axis="x", color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right"]].set_visible(False)
    *_, (floor, bytes_per_s) = bandwidths.items()
    scale, unit = bandwidth_unit(bytes_per_s)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    labels = [*names, f"{floor}, {number(bytes_per_s / scale)} {unit}"]
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1))
    if any(row.status == "differs" for row in rows):
        handles.append(Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black", linewidth=0.8))
        labels.append("hollow: the result differs")
    cached = {row.fits_cache for row in rows} - {""}
    if cached:
        handles.append(Line2D([], [], linestyle=""))
        labels.append(f"* fits {cached.pop()}")
    figure.suptitle(
        f"{rows[0].benchmark} on {where['device']}, jax {where['jax']}: share of a {floor}'s bandwidth",
        fontsize=10,
    )
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _shape(row: Row) -> str:
    """Returns the label of a group of bars, with a star if a cache holds the case."""
    k = "" if row.case.k is None else f", k={row.case.k}"
    return f"{row.case.batch} × {row.case.vocab}{k}{' *' if row.fits_cache else ''}"


def _bar(axis, row: Row, position: float, color: str) -> None:
    """Draws the bar of a row, hollow where the result differs, or writes why there is none."""
    if row.share is None:
        axis.text(0.01, position, row.status, va="center", fontsize=6, color=color)
        return
    fill = "white" if row.status == "differs" else color
    axis.barh(position, row.share, height=0.8, facecolor=fill, edgecolor=color, linewidth=0.8)
