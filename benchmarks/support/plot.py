"""The pictures of results: heat maps over shapes, lines over sizes, and bars. Every title states the finding.

Colour-blind readers can tell the colours apart: they are by Okabe and Ito. A peer has a dashed line. A bar has its name
next to it, so its colour only tells this package, plain JAX and other libraries apart.
"""

import logging
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.cases import LOGITS
from benchmarks.support.result import Frame, case_columns, number

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000 #E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()
)
# contender: its name in words, colour, line. No two contenders of one picture have both colour and line alike.
STYLES = {
    "auto": ("pallas_softmax", BLUE, "-"),
    "ours": ("pallas_softmax", BLUE, "-"),
    "mosaic_gpu": ("Mosaic GPU kernels of pallas_softmax", SKY, "-"),
    "triton": ("Triton kernels of pallas_softmax", GREEN, "-."),
    "xla": ("pallas_softmax as plain JAX", SKY, ":"),
    "jax": ("plain JAX", BLACK, "--"),
    "jax.nn.softmax": ("jax.nn.softmax alone", GREEN, "--"),
    "jax_stable": ("jax.nn.softmax + lax.top_k", BLACK, "--"),
    "jax_unstable": ("jax.nn.softmax + lax.top_k, not stable", BLACK, ":"),
    "jax_raft": ("jax.nn.softmax + lax.top_k by RAFT", PINK, "--"),
    "jax_rows": ("plain JAX, row by row", PINK, "--"),
    "lax_stable": ("lax.top_k", BLACK, "--"),
    "lax_unstable": ("lax.top_k, not stable", BLACK, ":"),
    "torch_topk": ("topk of torch", RED, "--"),
    "torch": ("torch", RED, "--"),
    "quack": ("QuACK", ORANGE, "--"),
    "flashinfer": ("FlashInfer", ORANGE, ":"),
    "naive": ("naive softmax (2 reads, 1 write)", GREEN, "-"),
    "safe": ("safe softmax (3 reads, 1 write)", RED, "-"),
    "online": ("online softmax (2 reads, 1 write)", ORANGE, "-"),
    "topk": ("top-k alone", GREEN, "-"),
    "fused_topk": ("fused_topk", GREEN, "-"),
    "jax_dense": ("plain JAX, dense weights", ORANGE, "--"),
    "safe_unfused": ("safe softmax and a separate top-k", RED, "-"),
    "safe_fused": ("safe softmax fused with top-k", PINK, "-"),
    "online_fused": ("online softmax fused with top-k", ORANGE, "-"),
    "matmul": ("the projection alone", SKY, ":"),
    "logsumexp": ("linear_logsumexp", GREEN, ":"),
    "log_probs": ("linear_log_probs", PINK, ":"),
    "jax_scan": ("plain JAX, scan, float32 logits", BLACK, "-"),
    "jax_float32": ("plain JAX, float32 logits", SKY, "-"),
    "jax_inexact": ("plain JAX, 16-bit logits", ORANGE, "-"),
    "torch_compile": ("torch.compile, 16-bit logits", PINK, "-"),
    "liger": ("Liger", GREEN, "-"),
    "cce": ("cut-cross-entropy", YELLOW, "-"),
    "quack_exp": ("QuACK, scaled exponentials", ORANGE, ":"),
}


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # silences its messages about fonts
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def words(contender: str) -> str:
    return STYLES[contender][0] if contender in STYLES else contender


def finish(figure: Any, file: Path, document: dict[str, Any], title: str, letters: int = 90) -> None:
    """Writes a picture with its title, and where and when its numbers were measured."""
    runs = document["runs"]
    commits = ", ".join(dict.fromkeys(run["commit"][:7] for run in runs))
    dates = ", ".join(sorted({run["date"][:10] for run in runs}))
    place = f"{runs[0]['device']}, jax {runs[0]['jax']}, commit {commits}, {dates}"
    figure.suptitle("\n".join(textwrap.wrap(title, letters)), fontsize=12, fontweight="bold")
    figure.supxlabel("\n".join(textwrap.wrap(place, letters + 20)), fontsize=8, color="#555555")
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def span(values: Frame, digits: int = 1) -> str:
    """Returns the smallest and the largest value in words: "1.0 to 2.6 times"."""
    low, high = (f"{v:.0f}" if v >= 9.95 else f"{v:.{digits}f}" for v in (values.min(), values.max()))
    return f"{low} times" if low == high else f"{low} to {high} times"


def ours_of(rows: Frame) -> Frame:
    """Returns the rows of the implementation that users get, or else of the first of ours."""
    names = list(dict.fromkeys(rows.contender[rows.ours.astype(bool)]))
    return rows[rows.contender == ("auto" if "auto" in names else names[0])] if names else rows[:0]


def heat(rows: Frame, document: dict[str, Any], file: Path, baseline: str, what: str) -> None:
    """Draws the speed-up of ours, or else its slowdown, and its share of the memory's bandwidth, over all cases.

    A row is a shape, or a kind of logits if there is one shape.
    """
    ours = ours_of(rows)
    present = [name for name in ("speedup", "slowdown") if name in ours and ours[name].notna().any()]
    if not present:
        return
    measure = present[0]
    ours = (ours[ours.slowdown.notna()] if measure == "slowdown" else ours).copy()
    many = len(ours[["batch", "vocab"]].drop_duplicates()) > 1 or ours.logits.nunique() == 1
    kind = lambda row: f"{row.logits} ({LOGITS[row.logits][0]})"  # noqa: E731
    ours["down"] = ours.apply(_shape if many else kind, axis=1)
    named_by_row = ("batch", "vocab", "k") if many else ("logits",)
    across = [name for name in case_columns(rows) if ours[name].map(str).nunique() > 1 and name not in named_by_row]
    ours["across"] = ours.apply(lambda row: "\n".join(_value(name, row[name]) for name in across), axis=1)
    caches = ours.fits_cache.fillna("") if "fits_cache" in ours else ours.dtype.map(lambda _: "")
    ours["cached"] = caches.ne("")
    order = {"index": ours.down.unique(), "columns": ours.across.unique()}

    def over_cases(name: str) -> Frame:
        table = ours.pivot_table(index="down", columns="across", values=name, aggfunc="last")
        return table.reindex(**order).astype(float)

    share = "share_of_read" if "share_of_read" in ours else "share_of_copy"
    cached = over_cases("cached").to_numpy() == 1
    of_cache = f" (*: fits the {caches.max()} cache)" * bool(cached.any())
    titles = {
        "speedup": textwrap.fill(f"speed-up over {baseline}, times", 50),
        "slowdown": "time relative to normal logits, times",
        share: f"share of a plain {share.removeprefix('share_of_')}'s bandwidth, %{of_cache}",
    }
    tables = {name: over_cases(name) for name in (measure, share)}
    figure, width = heat_maps(tables, titles, "rows × elements of a row" if many else "logits", cached)
    if ours.contender.iloc[0] != "auto":
        what = f"{words(ours.contender.iloc[0])}: {what}"
    if measure == "speedup":
        claim = f"{what}: {span(ours.speedup)} as fast as {baseline}, median {ours.speedup.median():.1f}"
    else:
        claim = f"{what}: other logits take {span(ours.slowdown)} as long as normal ones"
    if set(ours.ran) == {"xla"}:
        claim += "; no kernel ran: ours is plain JAX on this device"
    finish(figure, file, document, claim, int(9.5 * width))


def heat_maps(
    tables: dict[str, Frame], titles: dict[str, str], down: str, marked: np.ndarray | None = None
) -> tuple[Any, float]:
    """Draws tables of the same cases as heat maps side by side, or stacked if they are wide.

    `tables` and `titles` are by measure: speedup, a share, slowdown or of_topk. `down` says what the rows are. The
    `marked` cells get a star in tables of shares. Returns the figure, and its width in inches.
    """
    order = next(iter(tables.values()))
    stacked = len(order.columns) > 5
    grid = (2, 1) if stacked else (1, 2)
    width = max(4.2, 0.68 * len(order.columns)) * grid[1] + 1.8
    height = (0.7 + 0.36 * len(order)) * grid[0] + 1.3
    figure, axes = pyplot().subplots(*grid, layout="constrained", figsize=(width, height), sharey=True)
    marked = np.zeros(order.shape, bool) if marked is None else marked
    for axis, (name, table) in zip(axes, tables.items()):
        _heat(axis, table, name, marked)
        axis.set_title(titles[name], fontsize=10)
        axis.set_yticks(range(len(order)), order.index)
    for axis in () if len(order) == 1 else axes if stacked else axes[:1]:
        axis.set_ylabel(down)
    return figure, width


def _heat(axis: Any, table: Frame, measure: str, cached: np.ndarray) -> None:
    """Draws one heat map with its numbers. Slower cells than the baseline are orange, others blue."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", [ORANGE, "#ffffff", BLUE])
    values, is_share = table.to_numpy(), measure.startswith("share")
    shade = values if is_share else np.log2(values) * (1 if measure == "speedup" else -1)
    most = np.nanmax(np.abs(shade))
    most = most if is_share else max(most, 0.3)  # a difference of less than a fifth is pale
    axis.imshow(shade, cmap=colors, vmin=-most, vmax=most, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text, color, size = "peer did not run", "#555555", 8
        if not np.isnan(value):
            text = f"{100 * value:.0f}" + " *" * bool(cached[i, j])
            text = text if is_share else number(value, 3 if measure == "of_topk" else 2)
            color, size = "white" if shade[i, j] > 0.65 * most else "black", 9
        axis.text(j, i, text, ha="center", va="center", fontsize=size, color=color)
    axis.set_xticks(range(len(table.columns)), table.columns, fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _shape(row: Any) -> str:
    k = "" if row.k is None else f", k = {row.k:,.0f}"
    return f"{row.batch:,} × {row.vocab:,}{k}"


def _value(name: str, value: Any) -> str:
    return {"k": f"k = {value}", "axis": f"axis {value}"}.get(name, str(value).replace("_", " "))


def lines(axis: Any, rows: Frame, x: str, y: str) -> None:
    """Draws a line for each contender over logarithmic axes. A hollow point's result differs from the oracle's."""
    from matplotlib.ticker import LogLocator, NullLocator

    for name, own in rows[rows[y].notna()].groupby("contender", sort=False):
        text, color, style = STYLES.get(str(name), (str(name), PINK, "-"))
        own = own.sort_values(x)
        wide = 3 if name in ("auto", "ours") else 1.5
        axis.plot(own[x], own[y], style, color=color, label=text, linewidth=wide, marker="o", markersize=4)
        wrong = own[own.status == "differs"]
        axis.plot(wrong[x], wrong[y], "o", color=color, markerfacecolor="white", markersize=4)
    axis.set(xscale="log", yscale="log")
    for of, ticks in ((axis.xaxis, (1,)), (axis.yaxis, (1, 2, 5))):
        of.set_major_locator(LogLocator(subs=ticks))
        of.set_minor_locator(NullLocator())
        of.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.grid(color="#dddddd", linewidth=0.5)


def legend(figure: Any, axis: Any, rows: Frame) -> None:
    """Draws the legend of lines next to the figure, with the reason for hollow points."""
    handles, labels = axis.get_legend_handles_labels()
    dtypes = set(rows["dtype"][rows.status == "differs"])
    if dtypes:
        handles += axis.plot([], [], "o", color="black", markerfacecolor="white")
        rounded = "it was rounded to 16 bits between steps"
        is_rounded = dtypes <= {"bfloat16", "float16"}
        why = f", {rounded}" if is_rounded else " by more than rounding may, or in its order"
        labels.append(f"hollow: the result differs{why}")
    labels = [textwrap.fill(label, 30) for label in labels]
    figure.legend(handles, labels, loc="outside right center", fontsize=9, frameon=False)


def over_sizes(rows: Frame, document: dict[str, Any], file: Path, x: str, baseline: str, title: str) -> None:
    """Draws the speed-up over a baseline and, below it, the elements per second, over V or over k."""
    base = rows[rows.contender == baseline].set_index(x).p50_us
    base = base[~base.index.duplicated()]
    rows = rows.assign(of_baseline=rows[x].map(base) / rows.p50_us, rate=rows.elements_per_s / 1e9)
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, layout="constrained", figsize=(10.5, 7.5), sharex=True)
    lines(top, rows, x, "of_baseline")
    lines(bottom, rows, x, "rate")
    top.set_ylabel(f"speed-up over {words(baseline)},\ntimes")
    bottom.set_ylabel("$10^9$ elements per second")
    bottom.set_xlabel({"vocab": "V, elements of a row", "k": "k, winners of a row"}[x])
    if x == "k":
        bottom.set_xticks(sorted(rows.k.unique()), [f"{k:.0f}" for k in sorted(rows.k.unique())])
    legend(figure, bottom, rows)
    finish(figure, file, document, title)


def _bar_color(contender: str) -> str:
    if contender in ("auto", "ours", "mosaic_gpu", "triton", "xla"):
        return BLUE
    if contender in ("logsumexp", "log_probs"):  # ours, but they compute less
        return SKY
    return "#777777" if contender.startswith("jax") else "#C4C4C4"


def bars(axis: Any, rows: Frame, values: Frame, unit: str) -> None:
    """Draws a horizontal bar with its number for each row, from top to bottom. Our bars are hatched."""
    names = [words(name) for name in rows.contender]
    drawn = axis.barh(names, values, color=list(map(_bar_color, rows.contender)), edgecolor="white")
    for bar, own in zip(drawn, rows.ours):
        bar.set_hatch("//" if own else "")
    axis.bar_label(drawn, [number(value) for value in values], fontsize=9, padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel(unit)
