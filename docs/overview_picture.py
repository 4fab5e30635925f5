"""Draws docs/overview.svg and docs/overview_narrow.svg from the recorded results: python docs/overview_picture.py.

The README's table and the tests read the same `COMPARISONS`, so the picture, the table and the CSVs agree.
"""

import csv
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "overview.svg"
NARROW = ROOT / "docs" / "overview_narrow.svg"  # for phones

JAX, OURS, TEXT = "#D55E00", "#0072B2", "#333333"  # vermilion and blue of Okabe and Ito


class Comparison(NamedTuple):
    """A call in plain JAX and in this package, as one benchmark recorded the two.

    Attributes:
      name: the call, as the README writes it.
      shape: rows x V, or tokens x D x V.
      dtype: of the logits, or of x and w.
      file: the CSV, below benchmarks/results.
      case: the columns and values that select the case.
      jax: the contender that is plain JAX.
      drawn: whether the picture shows the case.
    """

    name: str
    shape: str
    dtype: str
    file: str
    case: dict[str, str]
    jax: str = "jax"
    drawn: bool = False


def _rows(
    name: str, file: str, batch: int, vocab: int, dtype: str, jax: str = "jax", drawn: bool = False, **case: str
) -> Comparison:
    """Returns the comparison of a call on rows of logits."""
    case = {"batch": str(batch), "vocab": str(vocab), "dtype": dtype, "direction": "forward", **case}
    return Comparison(name, f"{batch} x {vocab:,}", dtype, f"{file}.csv", case, jax, drawn)


_LOSS = {"tokens": "8192", "reduction": "mean", "direction": "both"}
_LOSSES = "8192 x 4096 x 128,256", "bfloat16", "linear/linear.csv", _LOSS

COMPARISONS = (
    _rows("`softmax`", "targets/softmax", 4096, 128256, "bfloat16", drawn=True),
    _rows("`softmax`, backward", "targets/softmax", 4096, 128256, "bfloat16", direction="backward"),
    _rows("`fused_topk`, k = 5", "topk_targets/topk", 4000, 25000, "float32", "jax_stable", True, k="5"),
    _rows("`fused_topk`, k = 64", "topk_targets/topk", 4096, 128256, "float32", "jax_stable", k="64"),
    Comparison("`linear_cross_entropy`, forward and backward", *_LOSSES, "jax_float32", drawn=True),
    Comparison("the same, against bfloat16 logits in JAX", *_LOSSES, "jax_inexact"),
)


def read(file: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV below benchmarks/results. Nothing else here knows how the files are written."""
    with open(ROOT / "benchmarks" / "results" / file, newline="") as text:
        return list(csv.DictReader(text))


def recorded(file: str, **case: str) -> dict[str, str]:
    """Returns the one row of a CSV with these values."""
    [row] = [row for row in read(file) if all(row[name] == value for name, value in case.items())]
    return row


def microseconds(comparison: Comparison) -> tuple[float, float]:
    """Returns the median times of plain JAX and of this package."""
    jax, ours = (
        float(recorded(comparison.file, contender=contender, **comparison.case)["p50_us"])
        for contender in (comparison.jax, "auto")
    )
    return jax, ours


def gibibytes(contender: str) -> float:
    """Returns the temporary memory of a contender for the loss."""
    return float(recorded("linear/linear.csv", contender=contender, **_LOSS)["memory_mib"]) / 1024


def times(ratio: float) -> str:
    """Returns a speed-up as text, with two or three digits."""
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.1f}"


def message() -> str:
    """Returns the title of the picture."""
    ratios = [jax / ours for jax, ours in map(microseconds, (c for c in COMPARISONS if c.drawn))]
    return (
        f"On one H100: {min(ratios):.0f} to {max(ratios):.0f} times as fast as plain JAX, "
        f"and the loss needs {gibibytes('auto'):.1f} GiB instead of {gibibytes('jax_float32'):.1f}"
    )


def description() -> str:
    """Returns the numbers of the picture as text. The file holds it, which shows that the picture is current."""
    lines = [message()]
    for c in COMPARISONS:
        if c.drawn:
            jax, ours = microseconds(c)
            lines.append(f"{c.name}, {c.shape}, {c.dtype}: JAX {jax:,.0f} µs, pallas_softmax {ours:,.0f} µs")
    return "; ".join(lines).replace("`", "")


def duration(us: float) -> str:
    """Returns a time with its unit and three digits."""
    return f"{us / 1000:#.3g} ms" if us >= 1000 else f"{us:.0f} µs"


def draw(narrow: bool = False) -> None:
    """Writes the picture, or its form for a phone. Its white ground keeps it readable on a dark page."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "overview", "font.size": 9 if narrow else 10, "text.color": TEXT})
    figure, time, memory = _axes(plt, narrow)
    title = "\n".join(textwrap.wrap(message(), 42)) if narrow else message()
    figure.suptitle(title, fontsize=10 if narrow else 11, fontweight="bold", x=0.02, y=0.98, ha="left")
    drawn = [c for c in COMPARISONS if c.drawn]
    _draw_times(time, drawn, size=11 if narrow else 12)
    labels = [f"{c.name.partition(', forward')[0]}\n{c.shape}, {c.dtype}".replace("`", "") for c in drawn]
    if narrow:  # the name of a call is above its line
        time.set_yticks([])
        time.set_ylim(len(drawn) - 0.5, -0.75)
        for y, label in enumerate(labels):
            name = label.replace("\n", ": ")
            time.annotate(name, (0, y - 0.42), xycoords=("axes fraction", "data"), va="center", size=8)
        time.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.98), ncols=2, frameon=False, borderpad=0)
        _draw_memory(memory.barh, memory)
        memory.set_yticks([0, 1], ["plain JAX", "ours"])
        memory.set_ylim(1.6, -0.6)
        memory.set_xlim(0, 10)
        memory.set_xticks([])
    else:
        time.set_yticks(range(len(drawn)), labels)
        time.set_ylim(len(drawn) - 0.4, -0.6)
        time.legend(loc="lower right", bbox_to_anchor=(1.2, 1), ncols=2, frameon=False, borderpad=0)
        _draw_memory(memory.bar, memory)
        memory.set_xticks([0, 1], ["plain\nJAX", "pallas_\nsoftmax"], size=9)
        memory.set_yticks([])
        memory.set_xlim(-0.6, 1.6)
        memory.set_ylim(0, 9)
    memory.spines["bottom" if narrow else "left"].set_visible(False)
    time.spines["left"].set_visible(not narrow)  # it would cross the names
    for axes in (time, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    facts = {"Title": message(), "Description": description(), "Date": None, "Creator": None}
    figure.savefig(NARROW if narrow else PICTURE, metadata=facts)


def _axes(plt: Any, narrow: bool) -> tuple[Any, Any, Any]:
    """Returns the figure, the axes of the times and the axes of the memory: side by side, or one below the other."""
    if narrow:
        figure, (time, memory) = plt.subplots(2, 1, figsize=(3.75, 4.6), height_ratios=(4, 1), facecolor="white")
        figure.subplots_adjust(left=0.17, right=0.84, top=0.8, bottom=0.03, hspace=0.5)
        time.set_position([0.05, 0.32, 0.77, 0.48])
    else:
        figure, (time, memory) = plt.subplots(1, 2, figsize=(8.33, 3.5), width_ratios=(3, 1), facecolor="white")
        figure.subplots_adjust(left=0.3, right=0.97, top=0.8, bottom=0.2, wspace=0.45)
    return figure, time, memory


def _draw_times(time: Any, drawn: list[Comparison], size: int) -> None:
    """Draws two points and the speed-up of each call."""
    for y, c in enumerate(drawn):
        jax, ours = microseconds(c)
        time.plot([ours, jax], [y, y], color="#BBBBBB", linewidth=3, zorder=1)
        points = (("plain JAX", jax, JAX, "s", 8, "left"), ("pallas_softmax", ours, OURS, "o", -8, "right"))
        for label, us, color, marker, shift, side in points:
            time.scatter(us, y, s=70, color=color, marker=marker, label=label if y == 0 else None)
            time.annotate(duration(us), (us, y), (shift, 0), textcoords="offset points", ha=side, va="center")
        speedup = f"{times(jax / ours)}×"
        at_the_right = ("axes fraction", "data")
        time.annotate(speedup, (1.03, y), xycoords=at_the_right, va="center", color=OURS, size=size, fontweight="bold")
    time.set_xscale("log")
    time.set_xlim(5, 1e6)
    time.set_xticks([1e1, 1e2, 1e3, 1e4, 1e5], ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"])
    time.minorticks_off()
    time.grid(axis="x", color="#E5E5E5")
    time.set_axisbelow(True)
    time.set_xlabel("time of a call")


def _draw_memory(draw_bars: Callable[..., Any], memory: Any) -> None:
    """Draws a bar of plain JAX and one of this package, with their numbers."""
    bars = draw_bars([0, 1], [gibibytes("jax_float32"), gibibytes("auto")], 0.6, color=[JAX, OURS])
    memory.bar_label(bars, fmt="%.1f GiB", padding=3)
    memory.set_title("temporaries of the loss", fontsize=10)


if __name__ == "__main__":
    draw()
    draw(narrow=True)
