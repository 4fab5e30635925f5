"""How fast are softmax, log_softmax and logsumexp? python -m benchmarks.softmax --flagfile=configs/targets.flags."""

import functools
from pathlib import Path
from typing import Any

import jax
from absl import app

import pallas_softmax
from benchmarks.support import driver, flags, plot
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import run_case
from benchmarks.support.contenders import Contender, ours, prepare_jax, prepare_torch
from benchmarks.support.driver import Benchmark
from benchmarks.support.result import Record, View


def _ours(x: jax.Array, where: Any = None, *, function: str, **options: Any) -> tuple[jax.Array, None]:
    return getattr(pallas_softmax, function)(x, where=where, **options), None


def _jax(x: jax.Array, where: Any = None, *, function: str, axis: int) -> tuple[jax.Array, None]:
    return getattr(jax.nn, function)(x, axis=axis, where=where), None


def _torch(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    return getattr(x, function)(dim=axis), None


def _quack(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    if function != "softmax" or axis != -1:
        raise NotImplementedError("QuACK has only softmax, and only along the last axis")
    if not x.is_cuda:
        raise NotImplementedError("QuACK has kernels for NVIDIA GPUs only")
    from quack import softmax  # pyright: ignore[reportMissingImports]

    return softmax(x), None


PEERS = {"jax": "jax.nn's function", "torch": "the function of torch", "quack": "QuACK's softmax"}


def contenders(case: Case, implementations: tuple[str, ...], peers: tuple[str, ...]) -> list[Contender]:
    """Returns implementations and peers of softmax, ours first."""
    what = {"function": case.function, "axis": case.axis}
    every = {
        "jax": Contender("jax", False, functools.partial(_jax, **what), prepare_jax),
        "torch": Contender("torch", False, functools.partial(_torch, **what), prepare_torch),
        "quack": Contender("quack", False, functools.partial(_quack, **what), prepare_torch),
    }
    return ours(functools.partial(_ours, **what), implementations) + [every[p] for p in peers if p in every]


def _run(case: Case, chosen: Any) -> list[Record]:
    return run_case(case, contenders(case, chosen.implementations, chosen.peers), chosen)


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    functions = "/".join(dict.fromkeys(rows.function))
    axis = " along axis 0" * (set(rows.axis) == {0})
    plot.heat(rows, document, file, f"jax.nn.{functions}", functions + axis)


VIEW = View(
    ("ran", "status", "error_eps", "p50_us", "share_of_copy", "speedup", "slowdown", "first_result_s"),
    baselines=("jax",),
    draw=_draw,
)
BENCHMARK = Benchmark("softmax", make_cases, _run, VIEW, lambda cases: ("copy",))


def define_flags() -> None:
    flags.define("batch", "vocab", "shapes", "dtype", "function", "where", "axis", "direction")
    flags.define("implementations", "logits", "seed", "repeats")
    flags.define_peers(PEERS)


main = functools.partial(driver.main, BENCHMARK)

if __name__ == "__main__":
    define_flags()
    app.run(main)
