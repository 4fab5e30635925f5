"""The kernel for the backward of a router, in registers: it reads logits once, and writes cotangents once.

It takes the steps of `topk.tile_grad_kernel`. The normalizer is computed again from the row, which is in registers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route.formulas import Gate
from pallas_softmax._src.route.kernel import normalizer, of_row
from pallas_softmax._src.softmax.plan import approximate


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
    rows, experts = x.shape
    k = indices.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))  # in the registers of the same lanes

    def over_winners(of_row):
        return tiles.spread(of_row, plan, winners)

    def route_grad(x_gmem, indices_gmem, g_gmem, g_logsumexp_gmem, dx_gmem):
        row = lax.axis_index("row") * plan.rows
        x = tiles.load(x_gmem, plan, row, -jnp.inf)
        index = tiles.load(indices_gmem, winners, row, 0)
        g = tiles.load(g_gmem, winners, row, 0)
        g_logsumexp = tiles.load(g_logsumexp_gmem, winners, row)
        won = tiles.load(x_gmem, winners, row, -jnp.inf, column=index, held=k)
        won = won.astype(jnp.float32)
        m, d, e = normalizer(x, plan)
        m_won, d_won = over_winners(m), over_winners(d)
        direct, rest = gate.cotangents(won, (m_won, d_won), g, g_logsumexp, of_row(winners))
        p_won = jnp.exp(won - m_won) / d_won
        weight = tiles.spread(rest / d_won, winners, plan)
        tiles.store(dx_gmem, plan, row, e * weight)
        tiles.store(dx_gmem, winners, row, p_won * rest + direct, column=index, held=k)

    (dx,) = gpu_kernel(
        route_grad,
        grid={"row": -(-rows // plan.rows)},
        out_type=[jax.ShapeDtypeStruct((rows, experts), x.dtype)],
        approximate=approximate(x.dtype),
    )(x, indices, g, g_logsumexp)
    return dx
