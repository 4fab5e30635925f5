"""The kernel for the backward of a router, in registers: it reads logits once, and writes cotangents once.

It takes the steps of `topk.tile_grad_kernel`. The normalizer is computed again from the row, which is in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route.formulas import Gate
from pallas_softmax._src.route.kernel import normalizer, of_row
from pallas_softmax._src.softmax.plan import approximate


def route_grad(plan: Tile, gate: Gate, x_gmem, indices_gmem, g_gmem, g_logsumexp_gmem, dx_gmem) -> None:
    """The kernel: writes the cotangents of one tile of rows. The arguments are as for `route_grad_rows`."""
    k = indices_gmem.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))  # in the registers of the same lanes
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA

    x = tiles.load(x_gmem, plan, row, -jnp.inf)
    index = tiles.load(indices_gmem, winners, row, 0)
    g = tiles.load(g_gmem, winners, row, 0)
    g_logsumexp = tiles.load(g_logsumexp_gmem, winners, row)
    won = tiles.load(x_gmem, winners, row, -jnp.inf, column=index, held=k).astype(jnp.float32)

    # the winners
    m, d, e = normalizer(x, plan)
    m_won, d_won = tiles.spread(m, plan, winners), tiles.spread(d, plan, winners)
    direct, rest = gate.cotangents(won, (m_won, d_won), g, g_logsumexp, of_row(winners))
    p_won = jnp.exp(won - m_won) / d_won

    # the row
    weight = tiles.spread(rest / d_won, winners, plan)
    tiles.store(dx_gmem, plan, row, e * weight)

    dx_won = p_won * rest + direct
    tiles.store(dx_gmem, winners, row, dx_won, column=index, held=k)  # over what the row wrote there


def route_grad_rows(x, indices, g, g_logsumexp, plan: Tile, *, gate: Gate):
    """Returns the cotangents of the logits (rows, experts).

    Args:
      x: (rows, experts), the logits.
      indices: (rows, k) int32, the winners.
      g: (rows, k), the cotangents of the weights.
      g_logsumexp: (rows,), the cotangents of the logsumexp.
      plan: how a row lies over the lanes.
      gate: how logits become weights.
    """
    (dx,) = gpu_kernel(
        functools.partial(route_grad, plan, gate),
        grid={"row": -(-x.shape[0] // plan.rows)},
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="route_grad",
        approximate=approximate(x.dtype),
    )(x, indices, g, g_logsumexp)
    return dx
