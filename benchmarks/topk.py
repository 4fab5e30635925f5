"""How fast are fused_topk and top_k? python -m benchmarks.topk --flagfile=configs/topk_targets.flags.

With --top_k, as in configs/select.flags, it is top_k: the winners as they are, without a softmax.
"""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl.flags import DEFINE_boolean
from jax import lax

import pallas_softmax
from benchmarks.support import driver, flags, plot
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import run_case
from benchmarks.support.contenders import Contender, need_gpu, ours
from benchmarks.support.result import Benchmark


def _jax_stable(x: jax.Array, k: int) -> Any:
    return lax.top_k(jax.nn.softmax(x), k)


def _jax_raft(x: jax.Array, k: int) -> Any:
    need_gpu("RAFT")  # elsewhere XLA accepts the option and ignores it
    return _jax_stable(x, k)


def _jax_unstable(x: jax.Array, k: int) -> Any:
    return _lax_unstable(jax.nn.softmax(x), k=k)


def _torch(x: Any, k: int) -> Any:
    return x.softmax(-1).topk(k, -1)


def _quack(x: Any, k: int) -> Any:
    v = x.shape[-1]
    if v > 4096 or k > 128 or v & (v - 1) or k & (k - 1):
        raise NotImplementedError("QuACK's top-k takes V up to 4096 and k up to 128, both powers of 2")
    need_gpu("QuACK")
    from quack import softmax  # pyright: ignore[reportMissingImports]
    from quack.topk import topk  # pyright: ignore[reportMissingImports]

    return topk(softmax(x), k)  # QuACK's topk has a softmax too, but over the winners only


# --- top_k, without a softmax


def _top_k(x: jax.Array, lengths: jax.Array | None = None, **options: Any) -> Any:
    return pallas_softmax.top_k(x, lengths=lengths, **options)


def _fused(x: jax.Array, lengths: jax.Array | None = None, *, k: int) -> Any:
    if lengths is not None:
        raise NotImplementedError("fused_topk takes no lengths")
    # probabilities are no answer here: the table shows the time
    return None, pallas_softmax.fused_topk(x, k).indices


def _within(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    return x if lengths is None else jnp.where(jnp.arange(x.shape[-1]) < lengths[:, None], x, -jnp.inf)


def _lax_stable(x: jax.Array, lengths: jax.Array | None = None, *, k: int) -> Any:
    return lax.top_k(_within(x, lengths), k)


def _lax_unstable(x: jax.Array, lengths: jax.Array | None = None, *, k: int) -> Any:
    if "is_stable" not in inspect.signature(lax.top_k).parameters:
        raise NotImplementedError(f"lax.top_k of jax {jax.__version__} has no is_stable")
    return lax.top_k(_within(x, lengths), k, is_stable=False)


def _torch_topk(x: Any, k: int, *, sorted: bool) -> Any:
    return x.topk(k, -1, sorted=sorted)


def _flashinfer(x: Any, k: int, *, sorted: bool) -> Any:
    need_gpu("FlashInfer")
    from flashinfer import top_k  # pyright: ignore[reportMissingImports]

    return top_k(x, k, sorted=sorted)


_RAFT = {"xla_gpu_experimental_enable_raft_for_stable_topk": True}
_OF_FUSED_TOPK = [
    Contender("jax_stable", _jax_stable, "jax.nn.softmax, then lax.top_k"),
    Contender("jax_unstable", _jax_unstable, "the same with is_stable=False", stable=False),
    Contender("jax_raft", _jax_raft, "jax_stable, for which XLA may take the kernels of RAFT", options=_RAFT),
    Contender("torch", _torch, "softmax, then topk of torch", torch=True, stable=False),
    Contender("quack", _quack, "softmax, then topk of QuACK", torch=True, stable=False),
]
_OF_TOP_K = [
    Contender("lax_stable", _lax_stable, "with --top_k: lax.top_k"),
    Contender("lax_unstable", _lax_unstable, "with --top_k: the same with is_stable=False", stable=False),
    Contender("fused_topk", _fused, "with --top_k: fused_topk of the same logits"),
    Contender("torch_topk", _torch_topk, "with --top_k: topk of torch", torch=True, stable=False),
    Contender("flashinfer", _flashinfer, "with --top_k: top_k of FlashInfer", torch=True, stable=False),
]
PEERS = {peer.name: peer.help for peer in _OF_FUSED_TOPK + _OF_TOP_K}


def contenders(case: Case, chosen: Any) -> list[Contender]:
    assert case.k is not None
    of_logits = case.function == "top_k"
    ordered = chosen.sorted if of_logits else True
    own: Any = functools.partial(_top_k, sorted=ordered) if of_logits else pallas_softmax.fused_topk
    found = ours(functools.partial(own, k=case.k), chosen.implementations)
    for peer in _OF_TOP_K if of_logits else _OF_FUSED_TOPK:
        if peer.name in chosen.peers:
            options = {"sorted": ordered} if peer.name in ("torch_topk", "flashinfer") else {}
            function = functools.partial(peer.function, k=case.k, **options)
            found.append(dataclasses.replace(peer, function=function))
    return [dataclasses.replace(each, of_logits=of_logits, ordered=ordered) for each in found]


def _cases(chosen: Any) -> list[Case]:
    found = make_cases(chosen, chosen.k)
    if not getattr(chosen, "top_k", False):  # benchmarks.__main__ has no such flag
        return found
    where = {"none": "none", "even": "lengths"}
    return [
        dataclasses.replace(case, function="top_k", where=where[lengths])
        for case in found
        for lengths in chosen.lengths
    ]


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    what, of = ("top_k", "lax") if "top_k" in set(rows.function) else ("fused_topk", "jax")
    baseline = "lax.top_k" if what == "top_k" else "jax.nn.softmax + lax.top_k"
    if f"{of}_stable" not in set(rows.contender):
        baseline += "(is_stable=False)"
    ours = plot.ours_of(rows).speedup
    over_k = len(rows[["batch", "vocab", "dtype"]].drop_duplicates()) == 1 < rows.k.nunique()
    if over_k and ours.notna().any():
        title = f"{what} is {plot.span(ours)} as fast as {baseline}"
        plot.over_sizes(rows, document, file, "k", f"{of}_stable", title)
    else:
        plot.heat(rows, document, file, baseline, what)


BENCHMARK = Benchmark(
    "topk",
    _cases,
    functools.partial(run_case, contenders),
    ("ran", "status", "error_eps", "p50_us", "share_of_read", "speedup", "slowdown", "first_result_s"),
    baselines=("jax_stable", "jax_unstable", "lax_stable", "lax_unstable"),
    draw=_draw,
    bandwidths=("copy", "read"),
)


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "dtype", "direction")
    flags.define("implementations", "logits", "seed", "repeats")
    flags.define_peers(PEERS)
    DEFINE_boolean("top_k", False, "Time top_k and its peers, without a softmax, instead of fused_topk.")
    DEFINE_boolean("sorted", True, "With --top_k: whether the winners must be in order.")
    text = "With --top_k: none, or a length for each row, drawn evenly from 0 to V."
    flags.define_words("lengths", ("none", "even"), text, "none")


main = driver.program(__name__, define_flags, BENCHMARK)
