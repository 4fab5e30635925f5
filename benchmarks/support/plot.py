"""The picture of a run: the bandwidth of all contenders on all cases, relative to a plain copy or read."""

import colorsys
import logging
import textwrap
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.support.flags import logits_text
from benchmarks.support.report import Row, bandwidth_unit, number

# Each contender has one colour in all pictures. Our implementations are blue. An algorithm of the paper has the same
# colour with and without top-k.
COLORS = {
    "auto": "#1f77b4",
    "mosaic_gpu": "#17becf",
    "triton": "#08306b",
    "xla": "#6baed6",
    "jax": "#7f7f7f",
    "jax_stable": "#4d4d4d",
    "jax_unstable": "#c49c94",
    "jax_raft": "#bcbd22",
    "torch": "#d62728",
    "quack": "#8c564b",
    "flashinfer": "#98df8a",
    "naive": "#2ca02c",
    "safe": "#ff7f0e",
    "online": "#e377c2",
    "topk": "#2ca02c",
    "safe_unfused": "#ff7f0e",
    "safe_fused": "#9467bd",
    "online_fused": "#e377c2",
}

_INCHES_OF_BAR = 0.1
_INCHES_OF_LABEL = 0.14  # a group of bars is at least as high as its label
_INCHES_OF_GAP = 0.12  # between groups
_POINTS_OF_LETTER = 4.5  # in the names of groups and bars
_LETTERS_OF_GROUP = 26  # per line of a group's name
_TOO_SMALL = 1 / 40  # a bar below this fraction of the axis gets its number as text


# The rows of a panel, by group name and bar label.
_Groups = dict[str, dict[str, list[Row]]]


def pyplot() -> Any:
    """Returns matplotlib.pyplot, set up to write files and open no windows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # silences its messages about fonts
    return plt


def color(contender: str) -> str:
    """Returns the colour of a contender, the same in all pictures. An unlisted name gets a colour from its hash."""
    if contender in COLORS:
        return COLORS[contender]
    hue = zlib.crc32(contender.encode()) / 2**32
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.45, 0.6))


def label(contender: str, ours: bool, function: str = "") -> str:
    """Returns the name of a contender in a legend. Our implementations mention pallas_softmax."""
    return f"pallas_softmax{function and '.'}{function} ({contender})" if ours else contender


def logits_line(kinds: Iterable[str]) -> str:
    """Returns a picture's line of text about its logits."""
    return f"logits: {'; '.join(dict.fromkeys(map(logits_text, kinds)))}"


def hollow_text(dtypes: Iterable[str]) -> str:
    """Returns the legend text for peers with different results, in these dtypes."""
    if set(dtypes) <= {"bfloat16", "float16"}:
        return "hollow: the peer's result differs,\nfor it rounds to 16 bits between its steps"
    return "hollow: the peer's result differs\nby more than rounding may, or in its order"


def draw(path: Path, rows: list[Row], bandwidths: dict[str, float], where: dict[str, str]) -> None:
    """Writes the PNG: a panel per function, direction and dtype, with a group of bars per shape and k.

    With several kinds of logits the picture compares them: each kind is a group, with all its shapes, ks and dtypes.
    """
    plt = pyplot()
    *_, (floor, bytes_per_s) = bandwidths.items()
    scale, unit = bandwidth_unit(bytes_per_s)
    kinds = {row.case.logits for row in rows}
    several = len(kinds) > 1
    panels = _panels_by_logits(rows) if several else _panels_by_dtype(rows)
    bar = max(_INCHES_OF_BAR, _INCHES_OF_LABEL / len({row.contender for row in rows}))
    gap = _INCHES_OF_GAP / bar
    most = max(
        sum(gap + sum(map(len, bars.values())) for bars in groups.values()) for groups in panels.values()
    )
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        squeeze=False,
        sharex=True,
        layout="constrained",
        figsize=(1.5 + 4 * columns + 2.5 * several, 1.6 + lines * (bar * most + 0.6)),
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    right = 1.05 * max([1.0, *(row.share for row in rows if row.share is not None)])
    left_groups: list[str] = []
    for i, (axis, (title, groups)) in enumerate(zip(axes.flat, panels.items())):
        same = bool(i % columns) and left_groups == list(groups)
        _draw_panel(axis, groups, gap, right, headed=several and not same)
        if same:
            axis.tick_params(axis="y", labelleft=False)
        elif several:
            pad = 30 + _POINTS_OF_LETTER * _LETTERS_OF_GROUP
            axis.set_ylabel("kind of logits (what they are), and the call", fontsize=8, labelpad=pad)
        else:
            k = "" if rows[0].case.k is None else ", k"
            axis.set_ylabel(f"rows × elements of a row{k}", fontsize=8)
        left_groups = list(groups)
        axis.set_ylim(most - gap - 0.2, -0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(f"bandwidth, % of {number(bytes_per_s / scale)} {unit} (a {floor}'s)", fontsize=8)
    about = "" if several else f"\n{logits_line(kinds)}"
    figure.suptitle(f"{rows[0].benchmark} on {where['device']}, jax {where['jax']}{about}", fontsize=10)
    handles = _legend(rows, floor)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=1 + columns, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panels_by_dtype(rows: list[Row]) -> dict[str, _Groups]:
    """Returns the panels by title, with a group per shape and k."""
    panels: dict[str, _Groups] = {}
    for row in rows:
        shape = ", ".join([_shape(row), *_k(row)]) + _star(row)
        groups = panels.setdefault(f"{_call(row)}, {row.case.dtype}", {})
        groups.setdefault(shape, {}).setdefault(shape, []).append(row)
    return panels


def _panels_by_logits(rows: list[Row]) -> dict[str, _Groups]:
    """Returns the panels by title, with a group per kind of logits."""
    shapes = {_shape(row) for row in rows}
    panels: dict[str, _Groups] = {}
    for row in rows:
        shape, title, words = _shape(row), _call(row), ", ".join([*_k(row), row.case.dtype]) + _star(row)
        if len(shapes) == 1:
            title = f"{title}, {shape}"
        else:
            words = f"{shape}, {words}"
        groups = panels.setdefault(title, {})
        bars = groups.setdefault(logits_text(row.case.logits), {})
        bars.setdefault(words, []).append(row)
    return panels


def _call(row: Row) -> str:
    """Returns a short description of a call."""
    case = row.case
    return " ".join([case.function if case.k is None else "top-k", case.direction, *case.arguments])


def _shape(row: Row) -> str:
    return f"{row.case.batch} × {row.case.vocab}"


def _k(row: Row) -> list[str]:
    return [] if row.case.k is None else [f"k={row.case.k}"]


def _star(row: Row) -> str:
    """Returns a star if the case fits a cache."""
    return " *" if row.fits_cache else ""


def _draw_panel(axis: Any, groups: _Groups, gap: float, right: float, headed: bool) -> None:
    """Draws groups of bars from top to bottom. The axis ends at `right`. `headed` adds the groups' names."""
    ticks: dict[float, str] = {}
    position = 0.0
    for group, bars in groups.items():
        first = position
        for name, rows in bars.items():
            ticks[position + (len(rows) - 1) / 2] = name
            for row in rows:
                _draw_bar(axis, row, position, right)
                position += 1
        if headed:
            axis.annotate(
                textwrap.fill(group, _LETTERS_OF_GROUP),
                (0, (first + position - 1) / 2),
                xycoords=("axes fraction", "data"),
                xytext=(-12 - _POINTS_OF_LETTER * max(map(len, bars)), 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
            )
        position += gap
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    axis.set_xlim(0, right)
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(axis="x", color="#dddddd", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, labelbottom=True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_bar(axis: Any, row: Row, position: float, right: float) -> None:
    """Draws the bar of a row, hollow if the result differs. Without a time, writes the status instead.

    A bar that is too small to see gets its number as text.
    """
    own = color(row.contender)
    text = {"va": "center", "fontsize": 6, "color": "#333333"}
    if row.share is None:
        axis.text(0.01 * right, position, row.status, **text)
        return
    fill = "white" if row.status == "differs" else own
    axis.barh(position, row.share, height=0.8, facecolor=fill, edgecolor=own, linewidth=0.8)
    if row.share < _TOO_SMALL * right:
        axis.text(row.share + 0.01 * right, position, f"{number(100 * row.share, 2)}%", **text)


def _legend(rows: list[Row], floor: str) -> dict[str, Any]:
    """Returns the legend's handles by text."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    handles: dict[str, Any] = {
        label(row.contender, row.ours): Rectangle((0, 0), 1, 1, color=color(row.contender)) for row in rows
    }
    what = {"copy": "copy, read plus written", "read": "read, in a sum"}[floor]
    handles[f"100%: a plain {what}"] = Line2D([], [], color="black", linestyle="--", linewidth=1)
    differing = [row for row in rows if row.status == "differs"]
    if differing:
        hollow = Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black", linewidth=0.8)
        handles[hollow_text(row.case.dtype for row in differing)] = hollow
    for cache in sorted({row.fits_cache for row in rows} - {""}):
        handles[f"* fits {cache}, so may never read the memory"] = Line2D([], [], linestyle="")
    return handles
