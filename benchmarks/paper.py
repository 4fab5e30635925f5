"""Do the paper's figures hold? python -m benchmarks.paper --flagfile=configs/figure1.flags

This draws figures 1 to 4 and the sweep over K of "Online normalizer calculation for softmax" (arXiv
1805.02867). The lines show the elements per second of the algorithms in --algorithms, of our softmax or
fused_topk, and of their peers. The bars show the paper's speed-up: online over safe softmax, or online fused over
safe unfused top-k. Everything is float32 and forward. On a CPU the algorithms are plain jax.numpy, and the figures
say so.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app
from absl.flags import register_validator

from benchmarks import softmax, topk
from benchmarks.support import flags, plot, report, timing
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.contenders import Contender, prepare_jax
from benchmarks.support.driver import Benchmark, run
from benchmarks.support.report import Row
from pallas_softmax import paper

_ALGORITHMS = paper.SOFTMAX | paper.TOPK
_CPU = "CPU figures, wall time: the algorithms in plain jax.numpy, not the kernels"
_PEERS = {
    "jax": "jax.nn.softmax",
    "jax_stable": "jax.nn.softmax + lax.top_k",
    "jax_unstable": "jax.nn.softmax + lax.top_k(is_stable=False)",
    "jax_raft": "jax.nn.softmax + lax.top_k by RAFT",
    "quack": "QuACK",
}


def _algorithm(name: str, case: Case) -> Contender:
    """Returns one of the paper's algorithms: on a GPU its kernel, on a CPU its twin in plain jax.numpy."""
    algorithm = _ALGORITHMS[name]
    function: Callable[..., Any] = algorithm.kernel if timing.on_gpu() else algorithm.plain
    return Contender(
        name,
        ours=True,
        function=(lambda x: (function(x), None)) if case.k is None else functools.partial(function, k=case.k),
        prepare=prepare_jax,
        stable=name != "safe_unfused",  # different logits tie if their probabilities round to one number
        of_logits=name == "topk",
        asked="mosaic_gpu" if timing.on_gpu() else "xla",
    )


def contenders(chosen: flags.Settings, case: Case) -> list[Contender]:
    """Returns the paper's algorithms, then our implementations and peers for the same case."""
    others = softmax if case.k is None else topk
    return [_algorithm(name, case) for name in chosen.algorithms] + others.contenders(chosen, case)


def _ks(chosen: flags.Settings) -> tuple[int | None, ...]:
    """Returns every k if the algorithms compute top-k, or else (None,)."""
    return chosen.k if set(chosen.algorithms) <= set(paper.TOPK) else (None,)


def _pair(k: int | None) -> tuple[str, str]:
    """Returns the pair that the bars compare: the faster algorithm, then its baseline."""
    return ("online", "safe") if k is None else ("online_fused", "safe_unfused")


def benchmark(chosen: flags.Settings) -> Benchmark:
    """Returns the benchmark that suits the algorithms: softmax, or softmax and top-k."""
    _, baseline = _pair(_ks(chosen)[0])
    return Benchmark(
        "paper", lambda chosen: make_cases(chosen, _ks(chosen)), contenders, baseline, table, draw
    )


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One plot of the figure, and one part of the table: rows over V, or over K if only K differs."""

    title: str
    over: str  # V or K
    points: dict[int, dict[str, Row]]  # the rows by V or K, then by contender

    @property
    def pair(self) -> tuple[str, str]:
        """The pair that the bars compare: the faster algorithm, then its baseline."""
        rows = next(iter(self.points.values()))
        return _pair(next(iter(rows.values())).case.k)

    @property
    def ratios(self) -> dict[int, float]:
        """The heights of the bars, by V or K, wherever both algorithms ran."""
        fast, _ = self.pair
        speedups = {x: rows[fast].speedup for x, rows in self.points.items() if fast in rows}
        return {x: speedup for x, speedup in speedups.items() if speedup is not None}


def _panels(rows: list[Row]) -> list[_Panel]:
    """Returns the panels: one per batch and K, over V, or one per batch and V, over K."""
    over_k = len({row.case.vocab for row in rows}) == 1 < len({row.case.k for row in rows})
    panels: dict[str, _Panel] = {}
    for row in rows:
        case = row.case
        words = [f"batch {case.batch}"]
        if over_k:
            words.append(f"V = {case.vocab}")
        elif case.k is not None:
            words.append(f"K = {case.k}")
        title = ", ".join([*words, f"float32, {os.path.basename(case.logits)} logits"])
        panel = panels.setdefault(title, _Panel(title, "K" if over_k else "V", {}))
        x = case.k if over_k and case.k is not None else case.vocab
        panel.points.setdefault(x, {})[row.contender] = row
    return list(panels.values())


def _plain(rows: list[Row]) -> bool:
    """Tells whether the algorithms ran as plain jax.numpy, without a kernel."""
    return any(row.contender in _ALGORITHMS and row.ran == "xla" for row in rows)


def table(rows: list[Row], bandwidths: dict[str, float]) -> str:
    """Returns the rows in the format of the paper's own program: a line per V (or K), a column per contender.

    If one table would be too wide, a second one shows ours and the peers.
    """
    text = f"{_CPU}\n" if _plain(rows) else ""
    names = list(dict.fromkeys(row.contender for row in rows))
    algorithms = [name for name in names if name in _ALGORITHMS]
    notes = report.Notes()
    for panel in _panels(rows):
        bars = f", speed-up of {' over '.join(panel.pair)}" if panel.ratios else ""
        parts = [_columns(panel, names, notes)]
        if max(map(len, parts[0].split("\n"))) > report.WIDTH:
            parts = [_columns(panel, some, notes) for some in (algorithms, names[len(algorithms) :])]
        text += "\n".join([report.wrapped(f"{panel.title}; 10^9 elements/s{bars}"), *parts, ""])
    caches = {f"* fits {row.fits_cache}": report.FITS for row in rows if row.fits_cache}
    return text.rstrip() + str(notes) + report.legend(caches)


def _columns(panel: _Panel, names: list[str], notes: report.Notes) -> str:
    """Returns the rates of these contenders, and the speed-ups if the pair's baseline is one of them."""
    _, slow = panel.pair
    ratios = panel.ratios if slow in names else {}

    def cell(row: Row) -> str:
        rate = "" if row.elements_per_s is None else report.number(row.elements_per_s / 1e9)
        return rate if row.status == "ok" else f"{rate} {notes.mark(f'{row.status}: {row.reason}')}".strip()

    lines = [[panel.over, *names, *(["speed-up"] if ratios else [])]]
    for x, found in panel.points.items():
        star = "* " if next(iter(found.values())).fits_cache else ""
        line = [f"{star}{x}", *(cell(found[name]) for name in names)]
        if ratios:
            line.append(f"{ratios[x]:.2f}x" if x in ratios else "")
        lines.append(line)
    return report.columns(lines, left=0)


def draw(path: Path, rows: list[Row], bandwidths: dict[str, float], where: dict[str, str]) -> None:
    """Writes the figure as PNG and SVG: lines over a logarithmic axis, with bars behind them."""
    plt = plot.pyplot()
    panels = _panels(rows)
    styles = _styles(rows)
    figure, axes = plt.subplots(
        len(panels), squeeze=False, layout="constrained", figsize=(9, 1.2 + 4.3 * len(panels))
    )
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels):
        handles |= _lines(axis, panel, styles) | _bars(axis, panel)
        axis.set_title(panel.title, fontsize=9)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("$10^9$ elements per second", fontsize=8)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y / 1e9:g}")
        of_row = {"V": "elements of a row", "K": "winners of a row"}[panel.over]
        axis.set_xlabel(f"{panel.over}, {of_row}", fontsize=8)
        axis.set_xscale("log")
        if panel.over == "K":
            axis.set_xticks(list(panel.points), list(map(str, panel.points)))
            axis.minorticks_off()
        axis.tick_params(which="both", labelsize=8)
    kind = f"\n{_CPU}" if _plain(rows) else ", device time"
    about = plot.logits_line(row.case.logits for row in rows)
    figure.suptitle(f"{where['device']}, jax {where['jax']}{kind}\n{about}", fontsize=10)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    # The SVG keeps text as text, and its ids do not change from run to run.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paper"}):
        figure.savefig(path, dpi=130)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Returns the style of each line: the paper's algorithms are solid, ours are solid and thick, peers are dashed."""
    function = "softmax" if rows[0].case.k is None else "fused_topk"
    styles = {}
    for name, is_ours in {row.contender: row.ours for row in rows}.items():
        styles[name] = {"color": plot.color(name)}
        if name in _ALGORITHMS:
            styles[name] |= {"label": _ALGORITHMS[name].title}
        elif is_ours:
            styles[name] |= {"label": plot.label(name, True, function), "linewidth": 3, "zorder": 1.9}
        else:
            styles[name] |= {"label": _PEERS.get(name, name), "linestyle": "--"}
    return styles


def _lines(axis: Any, panel: _Panel, styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draws a line for each contender that ran. Returns the legend's handles by label."""
    handles = {}
    for name, style in styles.items():
        rates = [rows[name].elements_per_s or np.nan for rows in panel.points.values()]
        if not np.all(np.isnan(rates)):
            (line,) = axis.plot(list(panel.points), rates, marker="o", markersize=3.5, **style)
            handles[style["label"]] = line
    return handles


def _bars(axis: Any, panel: _Panel) -> dict[str, Any]:
    """Draws the speed-ups as labelled bars, on a second axis behind the lines. Returns the legend's handle by label."""
    ratios = panel.ratios
    if not ratios:
        return {}
    fast, slow = (_ALGORITHMS[name].title for name in panel.pair)
    behind = axis.twinx()
    axis.set_zorder(behind.get_zorder() + 1)
    axis.patch.set_visible(False)
    x, height = np.array(list(ratios)), np.array(list(ratios.values()))
    bars = behind.bar(x / 1.15, height, x * 1.15 - x / 1.15, align="edge", color="#e4e4e4")
    text = {"ha": "center", "va": "bottom", "fontsize": 7, "zorder": 3}
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.5}
    for at, ratio in ratios.items():
        axis.text(at, ratio, f"{ratio:.1f}x", transform=behind.transData, bbox=box, **text)
    behind.set_ylim(0, 1.15 * height.max())
    behind.set_ylabel(f"speed-up of {fast}\nover {slow}, times", fontsize=8)
    behind.tick_params(labelsize=8)
    return {"speed-up (axis at the right)": bars}


def _not_mixed(algorithms: list[str]) -> bool:
    """Refuses a mix of softmax and top-k algorithms, because each figure of the paper shows one kind."""
    kinds = (flags.SOFTMAX_ALGORITHMS, flags.TOPK_ALGORITHMS)
    if not any(set(algorithms) <= set(kind) for kind in kinds):
        either = " or ".join(", ".join(kind) for kind in kinds)
        flags.refuse("algorithms", ",".join(algorithms), f"it takes some of either {either}")
    return True


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes(with_k=True)
    flags.define_words(
        "algorithms",
        flags.SOFTMAX_ALGORITHMS + flags.TOPK_ALGORITHMS,
        "Which of the paper's algorithms to time: softmax algorithms only, or top-k algorithms only.",
    )
    register_validator("algorithms", _not_mixed)
    flags.define_implementations()
    flags.define_peers(flags.SOFTMAX_PEERS, flags.TOPK_PEERS)
    flags.define_logits()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    return run(benchmark(chosen), chosen)


if __name__ == "__main__":
    define_flags()
    app.run(main)
