"""How fast are softmax, log_softmax and logsumexp? python -m benchmarks.softmax --flagfile=configs/targets.flags."""

import functools
from typing import Any

import jax
from absl import app

import pallas_softmax
from benchmarks.support import flags
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.contenders import Contender, ours, prepare_jax, prepare_quack, prepare_torch
from benchmarks.support.driver import Benchmark, run


def _ours(
    x: jax.Array,
    where: jax.Array | None = None,
    *,
    function: str,
    axis: int,
    implementation: pallas_softmax.ImplementationName | None,
) -> tuple[jax.Array, None]:
    return getattr(pallas_softmax, function)(x, axis=axis, where=where, implementation=implementation), None


def _jax(x: jax.Array, where: jax.Array | None = None, *, function: str, axis: int) -> tuple[jax.Array, None]:
    return getattr(jax.nn, function)(x, axis=axis, where=where), None


def _torch(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    return getattr(x, function)(dim=axis), None


def _quack(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    if function != "softmax" or axis != -1:
        raise NotImplementedError("QuACK has only softmax, and only along the last axis")
    from quack import softmax  # pyright: ignore[reportMissingImports]

    return softmax(x), None


def contenders(chosen: flags.Settings, case: Case) -> list[Contender]:
    """Returns the implementations and the peers of softmax that the flags name, ours first."""
    what = {"function": case.function, "axis": case.axis}
    peers = {
        "jax": Contender("jax", False, functools.partial(_jax, **what), prepare_jax),
        "torch": Contender("torch", False, functools.partial(_torch, **what), prepare_torch),
        "quack": Contender("quack", False, functools.partial(_quack, **what), prepare_quack),
    }
    return ours(functools.partial(_ours, **what), chosen.implementations) + [
        peers[name] for name in chosen.peers if name in peers
    ]


BENCHMARK = Benchmark("softmax", make_cases, contenders, baseline="jax")


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes()
    flags.define_dtype()
    flags.define_function()
    flags.define_direction()
    flags.define_implementations()
    flags.define_peers(flags.SOFTMAX_PEERS)
    flags.define_logits()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    return run(BENCHMARK, flags.read(argv))


if __name__ == "__main__":
    define_flags()
    app.run(main)
