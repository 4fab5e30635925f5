"""How fast is fused_topk? python -m benchmarks.topk --flagfile=configs/topk_targets.flags."""

import functools
import inspect
from pathlib import Path
from typing import Any

import jax
from absl import app
from jax import lax

import pallas_softmax
from benchmarks.support import driver, flags, plot, timing
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import run_case
from benchmarks.support.contenders import Contender, ours, prepare_jax, prepare_torch
from benchmarks.support.driver import Benchmark
from benchmarks.support.result import Record, View


def _ours(x: jax.Array, k: int, **options: Any) -> Any:
    return pallas_softmax.fused_topk(x, k, **options)


def _jax_stable(x: jax.Array, k: int) -> Any:
    return lax.top_k(jax.nn.softmax(x), k)


def _jax_unstable(x: jax.Array, k: int) -> Any:
    if "is_stable" not in inspect.signature(lax.top_k).parameters:
        raise NotImplementedError(f"lax.top_k of jax {jax.__version__} has no is_stable")
    return lax.top_k(jax.nn.softmax(x), k, is_stable=False)


def _jax_raft(x: jax.Array, k: int) -> Any:
    if not timing.on_gpu():  # elsewhere XLA accepts the option and ignores it
        raise NotImplementedError("XLA has RAFT's kernels on GPUs only")
    return _jax_stable(x, k)


def _torch(x: Any, k: int) -> Any:
    return x.softmax(dim=-1).topk(k, dim=-1)


def _quack(x: Any, k: int) -> Any:
    v = x.shape[-1]
    if v > 4096 or k > 128 or v & (v - 1) or k & (k - 1):
        raise NotImplementedError("QuACK's top-k takes V up to 4096 and k up to 128, both powers of 2")
    if not x.is_cuda:
        raise NotImplementedError("QuACK has kernels for NVIDIA GPUs only")
    from quack import softmax  # pyright: ignore[reportMissingImports]
    from quack.topk import topk  # pyright: ignore[reportMissingImports]

    return topk(softmax(x), k)  # QuACK's topk has a softmax too, but over the winners only


PEERS = {
    "jax_stable": "jax.nn.softmax, then lax.top_k",
    "jax_unstable": "the same with is_stable=False",
    "jax_raft": "jax_stable, for which XLA may take the kernels of RAFT",
    "torch": "softmax, then topk of torch",
    "quack": "softmax, then topk of QuACK",
}
_RAFT = {"xla_gpu_experimental_enable_raft_for_stable_topk": True}


def contenders(case: Case, implementations: tuple[str, ...], peers: tuple[str, ...]) -> list[Contender]:
    """Returns implementations and peers of top-k, ours first."""
    assert case.k is not None
    functions = {
        "jax_stable": (_jax_stable, prepare_jax),
        "jax_unstable": (_jax_unstable, prepare_jax),
        "jax_raft": (_jax_raft, functools.partial(prepare_jax, options=_RAFT)),
        "torch": (_torch, prepare_torch),
        "quack": (_quack, prepare_torch),
    }
    found = ours(functools.partial(_ours, k=case.k), implementations)
    for name in peers:
        if name in functions:
            function, prepare = functions[name]
            stable = name in ("jax_stable", "jax_raft")
            found.append(
                Contender(name, False, functools.partial(function, k=case.k), prepare, stable=stable)
            )
    return found


def _run(case: Case, chosen: Any) -> list[Record]:
    return run_case(case, contenders(case, chosen.implementations, chosen.peers), chosen)


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    baseline = "jax.nn.softmax + lax.top_k"
    if "jax_stable" not in set(rows.contender):
        baseline += "(is_stable=False)"
    ours = plot.ours_of(rows).speedup
    over_k = len(rows[["batch", "vocab", "dtype"]].drop_duplicates()) == 1 < rows.k.nunique()
    if over_k and ours.notna().any():
        title = f"fused_topk is {plot.span(ours)} as fast as {baseline}"
        plot.over_sizes(rows, document, file, "k", "jax_stable", title)
    else:
        plot.heat(rows, document, file, baseline, "fused_topk")


VIEW = View(
    ("ran", "status", "error_eps", "p50_us", "share_of_read", "speedup", "slowdown", "first_result_s"),
    baselines=("jax_stable", "jax_unstable"),
    draw=_draw,
)
BENCHMARK = Benchmark(
    "topk", lambda chosen: make_cases(chosen, chosen.k), _run, VIEW, lambda cases: ("copy", "read")
)


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "dtype", "direction")
    flags.define("implementations", "logits", "seed", "repeats")
    flags.define_peers(PEERS)


main = functools.partial(driver.main, BENCHMARK)

if __name__ == "__main__":
    define_flags()
    app.run(main)
