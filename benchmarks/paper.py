"""Do the paper's figures hold? python -m benchmarks.paper --flagfile=configs/figure1.flags

This draws figures 1 to 4 and the sweep over K of "Online normalizer calculation for softmax" (arXiv
1805.02867). The lines show the algorithms in --algorithms, our softmax or fused_topk, and their peers. The speed-up
is the paper's: over safe softmax, or over safe softmax followed by top-k. Everything is float32 and forward. On a
CPU the algorithms are plain jax.numpy, and the figures say so.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import softmax, topk
from benchmarks.support import driver, flags, plot, timing
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import run_case
from benchmarks.support.contenders import Contender
from benchmarks.support.result import Benchmark, Frame
from pallas_softmax import paper

_ALGORITHMS = paper.SOFTMAX | paper.TOPK
_CPU = "CPU figures, wall time: the algorithms in plain jax.numpy, not the kernels"


def _algorithm(name: str, case: Case) -> Contender:
    algorithm = _ALGORITHMS[name]
    function: Callable[..., Any] = algorithm.kernel if timing.on_gpu() else algorithm.plain
    return Contender(
        name,
        (lambda x: (function(x), None)) if case.k is None else functools.partial(function, k=case.k),
        ours=True,
        stable=name != "safe_unfused",  # different logits tie if their probabilities round to one number
        of_logits=name == "topk",
        asked="mosaic_gpu" if timing.on_gpu() else "xla",
    )


def make_paper_cases(chosen: Any) -> list[Case]:
    asked = set(chosen.algorithms)
    if asked <= {*paper.TOPK}:
        return make_cases(chosen, chosen.k)
    if asked <= {*paper.SOFTMAX}:
        return make_cases(chosen)
    either = " or ".join(", ".join(kind) for kind in (paper.SOFTMAX, paper.TOPK))
    raise ValueError(f"--algorithms={','.join(chosen.algorithms)}: it takes some of either {either}")


def contenders(case: Case, chosen: Any) -> list[Contender]:
    others = (softmax if case.k is None else topk).contenders(case, chosen)
    return [_algorithm(name, case) for name in chosen.algorithms] + others


def _draw(rows: Frame, document: dict[str, Any], file: Path) -> None:
    """The title gives the paper's speed-up at the end of the axis."""
    over = "k" if rows.vocab.nunique() == 1 < rows.k.nunique() else "vocab"
    fast, slow = ("online", "safe") if rows.k.iloc[0] is None else ("online_fused", "safe_unfused")
    own = rows[rows.batch == rows.batch.iloc[0]]
    if over == "vocab":
        own = own[own.k.map(str) == str(own.k.iloc[0])]
    whole = own.pivot(index=over, columns="contender", values="elements_per_s").astype(float)
    plain = rows.contender.isin(list(_ALGORITHMS)) & (rows.ran == "xla")
    title = _CPU if plain.any() else ""
    if {fast, slow} <= set(whole):
        ratio = (whole[fast] / whole[slow]).dropna()
        name = {"vocab": "V", "k": "k"}[over]
        title += f" {plot.words(fast).split(' (')[0].capitalize()} is {ratio.iloc[-1]:.1f} times as fast as"
        title += f" {plot.words(slow).split(' (')[0]} at {name} = {ratio.index[-1]:,}"
        if over == "k":
            title += f", {ratio.iloc[0]:.1f} times at k = {ratio.index[0]}"
    title += f" (batch {own.batch.iloc[0]:,})"
    baseline = next((name for name in ("jax", "jax_stable") if name in whole), slow)
    plot.over_sizes(own, document, file, over, baseline, title.strip())


BENCHMARK = Benchmark(
    "paper",
    make_paper_cases,
    functools.partial(run_case, contenders),
    ("ran", "status", "error_eps", "p50_us", "elements_per_s", "share_of_copy", "speedup"),
    baselines=("safe", "safe_unfused"),
    draw=_draw,
    bandwidths=("copy", "read"),
)


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "implementations", "logits", "seed", "repeats")
    text = "Which of the paper's algorithms to time: softmax algorithms only, or top-k algorithms only."
    flags.define_words("algorithms", _ALGORITHMS, text, ",".join(paper.SOFTMAX))
    flags.define_peers(softmax.PEERS, topk.PEERS)


main = driver.program(__name__, define_flags, BENCHMARK)
