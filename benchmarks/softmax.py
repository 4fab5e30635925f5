"""How fast are softmax, log_softmax and logsumexp? python -m benchmarks.softmax --flagfile=configs/targets.flags.

--function=token_stats times token_stats. Its yardstick is --function=logsumexp.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import pallas_softmax
from benchmarks.support import driver, flags, plot
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import run_case
from benchmarks.support.contenders import Contender, need_gpu, ours
from benchmarks.support.result import Benchmark


def _ours(x: jax.Array, where: Any = None, *, function: str, **options: Any) -> tuple[jax.Array, None]:
    if function == "token_stats":
        labels = jnp.zeros(x.shape[1 + options["axis"]], jnp.int32)
        statistics = pallas_softmax.token_stats(x, labels, where=where, **options)
        return _stacked(statistics, options["axis"]), None
    return getattr(pallas_softmax, function)(x, where=where, **options), None


def _stacked(statistics: Any, axis: int) -> jax.Array:
    """Returns log p of label 0, the entropy, logsumexp and the argmax of each row, as float32 along `axis`."""
    return jnp.stack([a.astype(jnp.float32) for a in statistics if a is not None], axis)


def _jax(x: jax.Array, where: Any = None, *, function: str, axis: int) -> tuple[jax.Array, None]:
    if function == "token_stats":
        x = x.astype(jnp.float32) if where is None else jnp.where(where, x.astype(jnp.float32), -jnp.inf)
        log_p = jax.nn.log_softmax(x, axis)
        finite = jnp.where(log_p == -jnp.inf, 0, log_p)
        entropy = -jnp.sum(jnp.exp(log_p) * finite, axis)
        at_label, logsumexp = jnp.take(log_p, 0, axis), jax.nn.logsumexp(x, axis)
        # a masked label has no gradient, as in token_stats
        at_label = jnp.where(jnp.isfinite(at_label), at_label, jax.lax.stop_gradient(at_label))
        return _stacked((at_label, entropy, logsumexp, jnp.argmax(x, axis)), axis), None
    return getattr(jax.nn, function)(x, axis=axis, where=where), None


def _torch(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    if function == "token_stats":
        raise NotImplementedError("torch has no function for the statistics of a row")
    return getattr(x, function)(dim=axis), None


def _quack(x: Any, *, function: str, axis: int) -> tuple[Any, None]:
    if function != "softmax" or axis != -1:
        raise NotImplementedError("QuACK has only softmax, and only along the last axis")
    need_gpu("QuACK")
    from quack import softmax  # pyright: ignore[reportMissingImports]

    return softmax(x), None


PEERS = {"jax": "jax.nn's function", "torch": "the function of torch", "quack": "QuACK's softmax"}
_FUNCTIONS: dict[str, Any] = {"jax": _jax, "torch": _torch, "quack": _quack}


def contenders(case: Case, chosen: Any) -> list[Contender]:
    what = {"function": case.function, "axis": case.axis}
    return ours(functools.partial(_ours, **what), chosen.implementations) + [
        Contender(name, functools.partial(_FUNCTIONS[name], **what), torch=name != "jax")
        for name in chosen.peers
        if name in PEERS
    ]


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    functions = "/".join(dict.fromkeys(rows.function))
    axis = " along axis 0" * (set(rows.axis) == {0})
    baseline = "plain JAX" if "token_stats" in functions else f"jax.nn.{functions}"
    plot.heat(rows, document, file, baseline, functions + axis)


run = functools.partial(run_case, contenders)
COLUMNS = "ran", "status", "error_eps", "p50_us", "share_of_copy", "speedup", "slowdown", "first_result_s"
BENCHMARK = Benchmark("softmax", make_cases, run, COLUMNS, baselines=("jax",), draw=_draw, bandwidths=("copy",))


def define_flags() -> None:
    flags.define("batch", "vocab", "shapes", "dtype", "where", "axis", "direction")
    flags.define_words("function", (*flags.FUNCTIONS, "token_stats"), "The function to compute.", "softmax")
    flags.define("implementations", "logits", "seed", "repeats")
    flags.define_peers(PEERS)


main = driver.program(__name__, define_flags, BENCHMARK)
