"""How fast is fused_topk? python -m benchmarks.topk --flagfile=configs/topk_targets.flags."""

import functools
import inspect
from typing import Any

import jax
from absl import app
from jax import lax

import pallas_softmax
from benchmarks.support import flags, timing
from benchmarks.support.cases import Case, make_cases, only_softmax
from benchmarks.support.contenders import Contender, ours, prepare_jax, prepare_quack, prepare_torch
from benchmarks.support.driver import Benchmark, run


def _ours(
    x: jax.Array, k: int, implementation: pallas_softmax.ImplementationName | None
) -> tuple[jax.Array, jax.Array]:
    values, indices = pallas_softmax.fused_topk(x, k, implementation=implementation)
    return values, indices


def _jax_stable(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(jax.nn.softmax(x), k)
    return values, indices


def _jax_unstable(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    if "is_stable" not in inspect.signature(lax.top_k).parameters:
        raise NotImplementedError(f"lax.top_k of jax {jax.__version__} has no is_stable")
    values, indices = lax.top_k(jax.nn.softmax(x), k, is_stable=False)
    return values, indices


def _jax_raft(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    if not timing.on_gpu():  # elsewhere XLA accepts the option and ignores it
        raise NotImplementedError("XLA has RAFT's kernels on GPUs only")
    return _jax_stable(x, k)


def _torch(x: Any, k: int) -> tuple[Any, Any]:
    values, indices = x.softmax(dim=-1).topk(k, dim=-1)
    return values, indices


def _quack(x: Any, k: int) -> tuple[Any, Any]:
    v = x.shape[-1]
    if v > 4096 or k > 128 or v & (v - 1) or k & (k - 1):
        raise NotImplementedError("QuACK's top-k takes V up to 4096 and k up to 128, both powers of 2")
    from quack import softmax  # pyright: ignore[reportMissingImports]
    from quack.topk import topk  # pyright: ignore[reportMissingImports]

    return topk(softmax(x), k)  # QuACK's topk has a softmax too, but over the winners only


def contenders(chosen: flags.Settings, case: Case) -> list[Contender]:
    """Returns the implementations and the peers of top-k that the flags name, ours first."""
    assert case.k is not None
    k = case.k
    raft = {"xla_gpu_experimental_enable_raft_for_stable_topk": True}
    peers = {
        "jax_stable": Contender("jax_stable", False, functools.partial(_jax_stable, k=k), prepare_jax),
        "jax_unstable": Contender(
            "jax_unstable", False, functools.partial(_jax_unstable, k=k), prepare_jax, stable=False
        ),
        "jax_raft": Contender(
            "jax_raft",
            False,
            functools.partial(_jax_raft, k=k),
            functools.partial(prepare_jax, options=raft),
        ),
        "torch": Contender("torch", False, functools.partial(_torch, k=k), prepare_torch, stable=False),
        "quack": Contender("quack", False, functools.partial(_quack, k=k), prepare_quack, stable=False),
    }
    return ours(functools.partial(_ours, k=k), chosen.implementations) + [
        peers[name] for name in chosen.peers if name in peers
    ]


def _cases(chosen: flags.Settings) -> list[Case]:
    return make_cases(only_softmax(chosen), chosen.k)


BENCHMARK = Benchmark("topk", _cases, contenders, baseline="jax_stable")


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes(with_k=True)
    flags.define_dtype()
    flags.define_direction()
    flags.define_implementations()
    flags.define_peers(flags.TOPK_PEERS)
    flags.define_logits()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    return run(BENCHMARK, flags.read(argv))


if __name__ == "__main__":
    define_flags()
    app.run(main)
