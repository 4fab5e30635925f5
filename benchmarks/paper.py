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

from absl.flags import ValidationError, register_validator

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
    """Returns one of the paper's algorithms: on a GPU its kernel, on a CPU its twin in plain jax.numpy."""
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
    """Returns the cases: with every k if the algorithms compute top-k."""
    return make_cases(chosen, chosen.k if set(chosen.algorithms) <= set(paper.TOPK) else (None,))


def contenders(case: Case, chosen: Any) -> list[Contender]:
    """Returns the paper's algorithms, then our implementations and peers for the same case."""
    others = (softmax if case.k is None else topk).contenders(case, chosen)
    return [_algorithm(name, case) for name in chosen.algorithms] + others


def _draw(rows: Frame, document: dict[str, Any], file: Path) -> None:
    """Draws the figure. Its title gives the paper's speed-up, and ours, at the end of the axis."""
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
    bandwidths=lambda cases: ("copy",) if cases[0].k is None else ("copy", "read"),
)


def _not_mixed(algorithms: tuple[str, ...]) -> bool:
    """Refuses a mix of softmax and top-k algorithms, because each figure of the paper shows one kind."""
    if not any(set(algorithms) <= set(kind) for kind in (paper.SOFTMAX, paper.TOPK)):
        either = " or ".join(", ".join(kind) for kind in (paper.SOFTMAX, paper.TOPK))
        raise ValidationError(f"--algorithms={','.join(algorithms)}: it takes some of either {either}")
    return True


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "implementations", "logits", "seed", "repeats")
    text = "Which of the paper's algorithms to time: softmax algorithms only, or top-k algorithms only."
    flags.define_words("algorithms", _ALGORITHMS, text, ",".join(paper.SOFTMAX))
    register_validator("algorithms", _not_mixed)
    flags.define_peers(softmax.PEERS, topk.PEERS)


main = driver.program(__name__, define_flags, BENCHMARK)
