"""Softmax against its peers: python -m benchmarks.softmax [--flagfile=configs/h100.flags]."""

from typing import Any

import jax
from absl import app, flags

import pallas_softmax
from benchmarks import settings
from benchmarks.contenders import Contender, ours, prepare_jax, prepare_torch
from benchmarks.run import Benchmark, run


def _ours(x: jax.Array, implementation: str | None) -> tuple[jax.Array, None]:
    return pallas_softmax.softmax(x, implementation=implementation), None


def _jax(x: jax.Array) -> tuple[jax.Array, None]:
    return jax.nn.softmax(x), None


def _torch(x: Any) -> tuple[Any, None]:
    return x.softmax(dim=-1), None


def contenders(chosen: settings.Settings, k: None = None) -> list[Contender]:
    """Our implementations, then the peers, as the flags name them."""
    peers = {
        "jax": Contender("jax", False, _jax, prepare_jax),
        "torch": Contender("torch", False, _torch, prepare_torch),
    }
    return ours(_ours, chosen.implementations) + [peers[name] for name in chosen.peers if name in peers]


BENCHMARK = Benchmark("softmax", contenders, baseline="jax")


def main(argv: list[str]) -> int:
    return run(BENCHMARK, settings.from_flags(argv))


if __name__ == "__main__":
    settings.define()
    flags.adopt_module_key_flags(settings)  # so that --help lists them
    app.run(main)
