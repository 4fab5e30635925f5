"""softmax, log_softmax, logsumexp against their peers: python -m benchmarks.softmax [--flagfile=...]."""

import functools
from typing import Any

import jax
from absl import app, flags

import pallas_softmax
from benchmarks import settings
from benchmarks.cases import Case, make_cases
from benchmarks.contenders import Contender, ours, prepare_jax, prepare_quack, prepare_torch
from benchmarks.run import Benchmark, run


def _ours(
    x: jax.Array, where: jax.Array | None = None, *, function: str, axis: int, implementation: str | None
) -> tuple[jax.Array, None]:
    return getattr(pallas_softmax, function)(x, axis=axis, where=where, implementation=implementation), None


def _jax(x: jax.Array, where: jax.Array | None = None, *, function: str, axis: int) -> tuple[jax.Array, None]:
    return getattr(jax.nn, function)(x, axis=axis, where=where), None


def _torch(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    return getattr(x, function)(dim=axis), None


def _quack(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    if function != "softmax" or axis != -1:
        raise NotImplementedError("QuACK has softmax alone, along the last axis")
    from quack import softmax  # pyright: ignore[reportMissingImports]

    return softmax(x), None


def contenders(chosen: settings.Settings, case: Case) -> list[Contender]:
    """Our implementations, then the peers, as the flags name them."""
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


def main(argv: list[str]) -> int:
    return run(BENCHMARK, settings.from_flags(argv))


if __name__ == "__main__":
    settings.define()
    flags.adopt_module_key_flags(settings)  # so that --help lists them
    app.run(main)
