"""The kernel for the backward of a router, in registers: it reads the logits, and writes their cotangents.

The forward saves no normalizer: it is computed again from the row, which is in registers. With p the softmax of the
row, the cotangents are:

    a logit that did not win    p rest
    a winner                    p rest + direct

`Gate.cotangents` computes `direct`, a number per winner, and `rest`, a number per row. The steps, as in
`topk.tile_kernel.topk_grad`:

    load      the row; the winners' indices, cotangents and (from the cache) logits
    row       reduce to the normalizer
    winners   compute direct and rest
    row       write p rest of all elements
    winners   overwrite their cotangents; `tiles.store` first waits until the warp has written the row
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route.formulas import Gate
from pallas_softmax._src.route.kernel import normalizer, over_row
from pallas_softmax._src.softmax.plan import approximate


def route_grad(plan: Tile, gate: Gate, x_gmem, indices_gmem, g_gmem, g_logsumexp_gmem, dx_gmem) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and writes their cotangents.

    `route_grad_rows` documents the arguments.
    """
    k = indices_gmem.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))  # in the registers of the same lanes
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA

    x = tiles.load(x_gmem, plan, row, -jnp.inf)
    index = tiles.load(indices_gmem, winners, row, 0)
    g = tiles.load(g_gmem, winners, row, 0)
    g_logsumexp = tiles.load(g_logsumexp_gmem, winners, row)
    won = tiles.load(x_gmem, winners, row, -jnp.inf, column=index, held=k).astype(jnp.float32)

    m, d, e = normalizer(x, plan)

    # the winners
    m_won, d_won = tiles.spread(m, plan, winners), tiles.spread(d, plan, winners)
    direct, rest = gate.cotangents(won, (m_won, d_won), g, g_logsumexp, over_row(winners))
    p_won = jnp.exp(won - m_won) / d_won

    # the row
    weight = tiles.spread(rest / d_won, winners, plan)
    tiles.store(dx_gmem, plan, row, e * weight)

    # the winners again
    dx_won = p_won * rest + direct
    tiles.store(dx_gmem, winners, row, dx_won, column=index, held=k)  # over what the row wrote there


def route_grad_rows(x, indices, g, g_logsumexp, plan: Tile, *, gate: Gate):
    """Returns the cotangents of the logits x (rows, experts).

    The winners are `indices` (rows, k) int32. g (rows, k) and g_logsumexp (rows,) are the cotangents of the weights and
    of the logsumexp.
    """
    (dx,) = gpu_kernel(
        functools.partial(route_grad, plan, gate),
        grid={"row": -(-x.shape[0] // plan.rows)},
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        name="route_grad",
        approximate=approximate(x.dtype),
    )(x, indices, g, g_logsumexp)
    return dx
