"""How fast is route? python -m benchmarks.route --flagfile=configs/route.flags

A router chooses k of E experts for each token. GATES has the kinds of routers. Our results are compared with the
float64 definition in some rows. Weights and gradients of all contenders, as dense arrays, are compared with jax's. Near
ties may be decided otherwise.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_softmax
from benchmarks.support import driver, flags, plot
from benchmarks.support.contenders import Call, Contender, fetch, from_torch, named, torch_and_wait
from benchmarks.support.result import Benchmark, Record
from tests.support import oracle, routing
from tests.support.routing import Gate

PEERS = {
    "fused_topk": "the yardstick: the k largest probabilities, whatever the gate is",
    "jax": "the usual JAX code, as in MaxText: lax.top_k of the steered scores, with a mask of groups",
    "jax_dense": "the same, with the weights as a dense array (tokens, E), as Transformer Engine returns them",
    "torch": "the usual torch code",
    "torch_compile": "the same under torch.compile",
}
GROUPS, TOP_GROUPS, SCALE = 8, 4, 2.5
GATES = {
    "softmax": Gate(),  # the k largest probabilities over all experts
    # a bias steers the choice; weights are divided by their sum
    "sigmoid": Gate("sigmoid", biased=True, renormalize=True, scale=SCALE),
    # the same, with 4 of 8 groups of experts (DeepSeek-V3)
    "groups": Gate("sigmoid", True, GROUPS, TOP_GROUPS, renormalize=True, scale=SCALE),
}
CHECKED_ROWS = 4096
TOLERANCE = 2e-2  # a few tokens with near ties, or 16-bit logits


@dataclasses.dataclass(frozen=True)
class Router:
    tokens: int
    experts: int
    k: int
    dtype: str
    gate: str
    direction: str  # forward or both


def _ours(x: jax.Array, bias: jax.Array, case: Router, name: str) -> tuple[jax.Array, jax.Array]:
    gate: Any = GATES[case.gate].keywords(bias)
    found = pallas_softmax.route(x, case.k, **gate, implementation=named(name))
    return found.weights, found.indices


def _topk(x: jax.Array, bias: jax.Array, case: Router) -> tuple[jax.Array, jax.Array]:
    return pallas_softmax.fused_topk(x, case.k, dtype=jnp.float32)[:2]


def _jax(x: jax.Array, bias: jax.Array, case: Router) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    if case.gate == "softmax":
        return lax.top_k(jax.nn.softmax(x), case.k)
    score = jax.nn.sigmoid(x)
    steered = lax.stop_gradient(score + bias)
    if case.gate == "groups":
        of_groups = steered.reshape(len(x), GROUPS, -1)
        _, best = lax.top_k(lax.top_k(of_groups, 2)[0].sum(-1), TOP_GROUPS)
        takes_part = jax.nn.one_hot(best, GROUPS, dtype=bool).any(1)
        steered = jnp.where(takes_part[:, :, None], of_groups, -jnp.inf).reshape(x.shape)
    _, indices = lax.top_k(steered, case.k)
    weights = jnp.take_along_axis(score, indices, -1)
    return weights / weights.sum(-1, keepdims=True) * SCALE, indices


def _jax_dense(x: jax.Array, bias: jax.Array, case: Router) -> tuple[jax.Array, None]:
    return _dense(*_jax(x, bias, case), case.experts), None


def _dense(weights: jax.Array, indices: jax.Array, experts: int) -> jax.Array:
    rows = jnp.arange(len(indices))[:, None]
    return jnp.zeros((len(indices), experts), weights.dtype).at[rows, indices].set(weights)


def _torch(torch: Any, x: Any, bias: Any, case: Router) -> tuple[Any, Any]:
    x = x.float()
    if case.gate == "softmax":
        return x.softmax(-1).topk(case.k, -1)
    score = x.sigmoid()
    steered = score.detach() + bias
    if case.gate == "groups":
        of_groups = steered.view(len(x), GROUPS, -1)
        best = of_groups.topk(2, -1)[0].sum(-1).topk(TOP_GROUPS, -1)[1]
        out = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        steered = of_groups.masked_fill(out[..., None], float("-inf")).flatten(1)
    indices = steered.topk(case.k, -1)[1]
    weights = score.gather(1, indices)
    return weights / weights.sum(-1, keepdim=True) * SCALE, indices


_JAX: dict[str, Any] = {"fused_topk": _topk, "jax": _jax, "jax_dense": _jax_dense}


def contender(record: Record) -> Contender:
    name, case = record.contender, record.case
    if record.ours:
        return Contender(name, functools.partial(_ours, case=case, name=name), ours=True)
    if name in _JAX:
        return Contender(name, functools.partial(_JAX[name], case=case))
    torch, _ = torch_and_wait()
    function = functools.partial(_torch, torch, case=case)
    return Contender("torch", torch.compile(function) if name == "torch_compile" else function, torch=True)


def check(case: Router, result: dict[str, Any], x: jax.Array, bias: jax.Array) -> int:
    """Compares a result of ours with the float64 definition in some rows. Returns how many rows."""
    rows = np.linspace(0, case.tokens - 1, min(case.tokens, CHECKED_ROWS)).astype(int)
    logits, steer, gate = fetch(x, rows, 0), np.asarray(bias), GATES[case.gate]
    weights, indices = (fetch(result[name], rows, 0) for name in ("y", "indices"))
    routing.judge((weights, indices, oracle.logsumexp(logits, -1)), logits, case.k, gate, steer)
    if "dx" in result:  # for cotangents that equal the weights
        routing.judge_vjp(fetch(result["dx"], rows, 0), logits, indices, gate, weights, np.zeros(len(rows)))
    return len(rows)


def make_routers(chosen: Any) -> list[Router]:
    return [
        Router(tokens, experts, k, dtype, gate, direction)
        for tokens, experts, k in chosen.shapes
        for gate in chosen.gates
        if gate != "groups" or (experts % GROUPS == 0 and k <= experts // GROUPS * TOP_GROUPS)
        for dtype in chosen.dtype
        for direction in chosen.direction
    ]


def run_router(case: Router, chosen: Any) -> list[Record]:
    keys = jax.random.split(jax.random.key(chosen.seed))
    x = jax.random.normal(keys[0], (case.tokens, case.experts), case.dtype)
    bias = 0.1 * jax.random.normal(keys[1], (case.experts,))
    wanted: dict[str, jax.Array] = {}

    def prepare(record: Record) -> Call:
        each = contender(record)
        call = each.call(case.direction, (x, bias), None)  # the cotangent is the weights
        driver.describe(record, call, each.function, x, bias, direction=case.direction)
        got = call.result()
        if record.contender == "fused_topk":
            return call
        if record.ours:
            with driver.wrong_if_refuted():
                record.add(rows_checked=check(case, got, x, bias))
        got = from_torch(got) if each.torch else got
        if (indices := got.pop("indices", None)) is not None:
            got["y"] = _dense(got["y"], indices, case.experts)
        driver.compare(record, got, wanted, TOLERANCE, "jax")
        return call

    names = ["jax", *chosen.peers, *chosen.implementations]
    return driver.measure(case, names, prepare, chosen, required=_JAX)


def _derive(rows: Any, of: Callable) -> None:
    rows["of_topk"] = rows.p50_us / of("p50_us", "fused_topk")


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    ours = plot.ours_of(rows)
    ours = ours[ours.of_topk.notna() & ours.speedup.notna()].copy()
    if ours.empty:
        return
    ours["down"] = [f"{a.gate}: {a.k} of {a.experts}" for a in ours.itertuples()]
    ours["across"] = ours["dtype"] + "\n" + ours.direction
    titles = {"speedup": "speed-up over plain JAX, times", "of_topk": "time relative to fused_topk, times"}
    tables = {name: ours.pivot_table(index="down", columns="across", values=name, sort=False) for name in titles}
    figure, width = plot.heat_maps(tables, titles, "gate: k of E experts")
    claim = f"route is {plot.span(ours.speedup)} as fast as plain JAX"
    claim += f", and takes {plot.span(ours.of_topk)} the time of fused_topk"
    plot.finish(figure, file, document, claim, int(9.5 * width))


COLUMNS = "ran", "status", "rows_checked", "error", "p50_us", "speedup", "of_topk"
BENCHMARK = Benchmark("route", make_routers, run_router, COLUMNS, ("jax",), _derive, _draw)


def define_flags() -> None:
    flags.define("k", "shapes", "dtype", "direction", "implementations", "seed", "repeats")
    flags.define_words("gates", GATES, "How the experts are chosen.")
    flags.define_peers(PEERS, default=("fused_topk", "jax", "jax_dense"))


main = driver.program(__name__, define_flags, BENCHMARK)
