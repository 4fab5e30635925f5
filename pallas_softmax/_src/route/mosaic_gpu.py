"""The router and its gradient as Mosaic GPU kernels, on arrays of any rank."""

import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_mask, fold_numbers
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route import kernel
from pallas_softmax._src.route.plan import MAX_EXPERTS, MOST_GROUP_BEST, plan_route
from pallas_softmax._src.topk.plan import plan_topk_grad


def _unsupported(call: Call, capability: tuple[int, int]) -> str | None:
    """Returns why no kernel can run a call."""
    if (reason := checks.unsupported(call, capability)) is not None:
        return reason
    if not call.k:
        return "k is 0"
    return None if call.vocab <= MAX_EXPERTS else f"{call.vocab} experts are more than {MAX_EXPERTS}"


def plan(call: Call, capability: tuple[int, int]) -> Tile | Refusal:
    """Returns how the rows lie over the GPU."""
    if (reason := _unsupported(call, capability)) is not None:
        return Refusal(reason)
    assert call.k is not None
    itemsize = jnp.dtype(call.dtype).itemsize
    if call.groups > 1 and call.group_best > MOST_GROUP_BEST:
        return Refusal(f"group_best={call.group_best} is more than {MOST_GROUP_BEST}")
    tile = plan_route(call.vocab, call.k, itemsize, biased=call.masked, groups=call.groups)
    return tile or Refusal(f"no kernel for {call.vocab} experts in {call.groups} groups")


def plan_grad(call: Call, capability: tuple[int, int]) -> Tile | Refusal:
    """Returns how the rows of the gradient lie over the GPU."""
    if (reason := _unsupported(call, capability)) is not None:
        return Refusal(reason)
    tile = plan_topk_grad(call.vocab, jnp.dtype(call.dtype))
    assert tile is not None  # for so few experts
    return tile


def route(plan: Tile, logits, bias, *, k, gate, groups, top_groups, group_best):
    """Returns what `xla.route` returns."""
    *batch, experts = logits.shape
    folded = fold_mask(bias, logits.shape, len(batch))
    static = {"gate": gate, "groups": groups, "top_groups": top_groups, "group_best": group_best}
    results = kernel.route_rows(logits.reshape(-1, experts), folded, k, plan, **static)
    return tuple(a.reshape(*batch, a.shape[-1]) for a in results)


def route_grad(plan: Tile, residuals, g, g_logsumexp, *, gate):
    """Returns what `xla.route_grad` returns."""
    logits, indices = residuals
    x = logits.reshape(-1, logits.shape[-1])
    indices, g, g_logsumexp = (fold_numbers(a, logits.shape[:-1]) for a in (indices, g, g_logsumexp))
    dx = kernel.route_grad_rows(x, indices, g, g_logsumexp[:, 0], plan, gate=gate)
    return (dx.reshape(logits.shape),)


KERNELS = {"route": Kernel(plan, route), "route_grad": Kernel(plan_grad, route_grad)}
