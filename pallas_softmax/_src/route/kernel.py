"""The kernel of a router, for short rows in registers: finds the k best experts of each token, and their weights.

A row is a token's logits of all experts. It lies over some lanes of a warp, as in `topk.tile_kernel`, and the search is
the same. Without a bias the sort keys order the logits. With a bias they order score + bias, in float32. The logits of
the winners are read again, from the cache, and give the weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch.operation import Kernel
from pallas_softmax._src.folding import Mask, fold_mask, fold_numbers
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile, merged_tile
from pallas_softmax._src.gpu.ptx.merging import search_input, search_rows
from pallas_softmax._src.route import scores_ptx
from pallas_softmax._src.route.formulas import Gate, Groups, RowReductions, Score, score_alone
from pallas_softmax._src.route.plan import plan, plan_grad
from pallas_softmax._src.softmax.plan import approximate


def route(
    plan: Tile, bias: Mask | None, gate: Gate, groups: Groups, x_gmem, bias_gmem, weights_gmem, indices_gmem, lse_gmem
) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and writes their experts, weights and logsumexp.

    Stages: load, normalizer, sort keys, choose groups of experts (if there are groups), find the k best, read the
    winners' logits again, compute their weights, write.
    """
    (rows, experts), k = x_gmem.shape, weights_gmem.shape[1]
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA
    winners = merged_tile(plan, k)  # how the winners lie over the same lanes
    tiles.prefetch(x_gmem, plan, row)  # a later CTA's tile
    x = tiles.load(x_gmem, plan, row, -jnp.inf, last_row=rows - 1)  # rows past the last one repeat it

    # `elements` are what the search takes, see `search_input`.
    lanes = None  # how many lanes may have winners: all
    if bias is None:  # experts are chosen by their logits
        m, d, _ = normalizer(x, plan)
        elements, _ = search_input(x)
    else:  # experts are chosen by score + bias, in groups that take part
        e, m, d, factor = _scores(plan, gate.score, x.astype(jnp.float32))
        bias_of_expert = tiles.load(bias_gmem, plan, row, 0, ref_row=bias.row)
        elements = sort_keys.key32(e * factor + bias_of_expert)  # e * factor is the score
        if groups.count > 1:  # experts of the other groups get the lowest key
            lanes = max(1, plan.lanes * groups.top / groups.count)
            elements = scores_ptx.keep_groups(plan, groups, elements)
    tiles.store(lse_gmem, plan, row, jnp.where(m == jnp.inf, m, m + normalizers.log_of_sum(d)))

    index, _ = search_rows(plan, experts, k, elements, lanes)
    per_row = [tiles.spread(a, plan, winners) for a in ((m, d) if gate.needs_normalizer else ())]
    won = tiles.load(x_gmem, winners, row, -jnp.inf, column=index, held=k)  # again, from the cache
    weight = gate.weights(won.astype(jnp.float32), per_row, over_row(winners))
    tiles.store(weights_gmem, winners, row, weight)
    tiles.store(indices_gmem, winners, row, index)


def route_rows(plan: Tile, logits, bias, *, k, gate: Gate, groups: Groups):
    """Returns what `xla.route` returns, of logits (..., experts).

    `bias` is float32 or None; folded, it is a `Mask` with an array of biases. Groups need a bias.
    """
    *batch, experts = logits.shape
    bias, x = fold_mask(bias, logits.shape, len(batch)), logits.reshape(-1, experts)
    rows = x.shape[0]
    results = gpu_kernel(
        functools.partial(route, plan, bias, gate, groups),
        grid={"row": -(-rows // plan.rows)},
        out_type=[
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
        ],
        name="route",
    )(x, None if bias is None else bias.array)
    return tuple(a.reshape(*batch, a.shape[-1]) for a in results)


def normalizer(x, tile: Tile):
    """Returns m, d and exp(x - m), as tiles."""
    broadcast = functools.partial(tiles.broadcast, tile=tile)
    # The maximum comes before the cast: one instruction compares two 16-bit elements.
    m = broadcast(jnp.max(x, 1).astype(jnp.float32))
    e = jnp.exp2((x.astype(jnp.float32) - normalizers.shift(m)) * normalizers.LOG2_E)
    return m, broadcast(jnp.sum(e, 1)), e


def over_row(tile: Tile) -> RowReductions:
    broadcast = functools.partial(tiles.broadcast, tile=tile)
    return RowReductions(lambda a: broadcast(jnp.max(a, 1)), lambda a: broadcast(jnp.sum(a, 1)))


def _scores(tile: Tile, score: Score, x):
    """Returns tiles (e, m, d, factor): e * factor is the score, and (m, d) the normalizer of the row."""
    if score == "sqrtsoftplus":
        _, m, d, _ = _exponentials(tile, "sigmoid", x)
        return score_alone(score, x), m, d, 1.0
    return _exponentials(tile, score, x)


@twin
def _exponentials(tile: Tile, score: Score, x):
    """Returns e, m, d of `scores_ptx.exponentials_program`, and the factor of e in the score, as tiles."""
    program = scores_ptx.exponentials_program(tile, score)
    e, m, d = tiles.insert_in_tile(program, x, "f32", {"e": tile, "m": None, "d": None})
    return e, m, d, scores_ptx.reciprocals(tile, d if score == "softmax" else 1 + e)


# --- The backward


def route_grad(plan: Tile, gate: Gate, x_gmem, indices_gmem, g_gmem, g_logsumexp_gmem, dx_gmem) -> None:
    """The kernel of the backward: a CTA holds one tile of rows in registers, and writes their cotangents.

    The forward saves no normalizer: it is computed again from the row, which is in registers. `Gate.cotangents` has the
    formulas. As in `topk.tile_kernel.topk_grad`, the cotangents of all elements are written first, as if none had won.
    Then the winners overwrite theirs.
    """
    k = indices_gmem.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA

    x = tiles.load(x_gmem, plan, row, -jnp.inf)
    index = tiles.load(indices_gmem, winners, row, 0)
    g = tiles.load(g_gmem, winners, row, 0)
    g_logsumexp = tiles.load(g_logsumexp_gmem, winners, row)
    won = tiles.load(x_gmem, winners, row, -jnp.inf, column=index, held=k).astype(jnp.float32)  # from the cache
    m, d, e = normalizer(x, plan)

    # the winners
    m_won, d_won = tiles.spread(m, plan, winners), tiles.spread(d, plan, winners)
    direct, rest = gate.cotangents(won, (m_won, d_won), g, g_logsumexp, over_row(winners))
    p_won = jnp.exp(won - m_won) / d_won

    # the row
    weight = tiles.spread(rest / d_won, winners, plan)
    tiles.store(dx_gmem, plan, row, e * weight)

    # the winners again, once the warp has written the row
    tiles.store(dx_gmem, winners, row, p_won * rest + direct, column=index, held=k)


def route_grad_rows(plan: Tile, residuals, g, g_logsumexp, *, gate: Gate):
    """Returns what `xla.route_grad` returns."""
    logits, indices = residuals
    x = logits.reshape(-1, logits.shape[-1])
    indices, g, g_logsumexp = (fold_numbers(a, logits.shape[:-1]) for a in (indices, g, g_logsumexp))
    (dx,) = gpu_kernel(
        functools.partial(route_grad, plan, gate),
        grid={"row": -(-x.shape[0] // plan.rows)},
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="route_grad",
        approximate=approximate(x.dtype),
    )(x, indices, g, g_logsumexp[:, 0])
    return (dx.reshape(logits.shape),)


KERNELS = {"route": Kernel(plan, route_rows), "route_grad": Kernel(plan_grad, route_grad_rows)}
