"""The kernel for the backward of top-k of short rows, in registers: it reads logits once, and writes cotangents once.

Let p = softmax(x / T). The winners' values have the cotangents g, and d has the cotangent g_d. Let r be g_d d minus the
sum over the winners of g p, and m the maximum of the row. The cotangents are:

    a logit that did not win    p r / T
    a winner                    p r / T + g p / T
    T                           - sum over all logits of cotangent * (x - m) / T

With log, g p becomes g in all of these. In the sum for T, `slope` has the share of p r / T, and `slope_won` has the
share of g p / T. A row lies in the registers of some lanes of a warp, as a `Tile`. Its winners lie over the same lanes
as another tile, k / lanes in each lane, so that `tiles.spread` can copy a number per row from tile to tile. The steps:

    winners   load g and the indices; read the logits of the winners, from the cache; compute r of the row
    row       write p r / T of all elements
    winners   overwrite the cotangents of the winners; `tiles.store` first waits until the warp has written the row
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src.gpu import tiles
from pallas_softmax_base._src.gpu.kernel import gpu_kernel
from pallas_softmax_base._src.gpu.layout import Tile
from pallas_softmax_base._src.softmax.plan import approximate


def topk_grad(
    plan: Tile,
    log: bool,
    x_gmem,
    scale_gmem,
    m_gmem,
    d_gmem,
    g_d_gmem,
    indices_gmem,
    g_gmem,
    dx_gmem,
    dt_gmem,
) -> None:
    """The kernel: a CTA holds one tile of rows in registers, and writes their cotangents."""
    k = indices_gmem.shape[1]
    winners = Tile(plan.rows, plan.lanes, 1, -(-k // plan.lanes))  # in the registers of the same lanes
    row = lax.axis_index("row") * plan.rows  # the first row of this CTA

    def load_per_row(gmem):
        if gmem.shape[0] == 1 < x_gmem.shape[0]:
            return tiles.broadcast(jnp.full((plan.rows,), gmem[0]), winners)
        return tiles.load(gmem, winners, row)

    def spread(per_winner):
        return tiles.spread(per_winner, winners, plan)

    x = tiles.load(x_gmem, plan, row, -jnp.inf).astype(jnp.float32)
    index = tiles.load(indices_gmem, winners, row, 0)
    g = tiles.load(g_gmem, winners, row, 0).astype(jnp.float32)
    m, d, scale = load_per_row(m_gmem), load_per_row(d_gmem), load_per_row(scale_gmem)
    x_won = tiles.load(x_gmem, winners, row, column=index).astype(jnp.float32)

    # the winners
    scaled_won = (x_won - m) * scale
    p_won = jnp.exp(scaled_won) / d
    direct = g if log else g * p_won  # the winners' own term, g p
    rest = load_per_row(g_d_gmem) * d - tiles.broadcast(jnp.sum(direct, 1), winners)  # r
    dx_won = (direct + p_won * rest) * scale
    # If a factor is 0, (x - m) / T may be -inf, and their product NaN.
    slope_won = tiles.broadcast(jnp.sum(jnp.where(direct == 0, 0.0, direct * scaled_won), 1), winners)

    # the row
    weight, scale = spread(rest / d), spread(scale)
    scaled = (x - spread(m)) * scale
    e = jnp.exp(scaled)
    tiles.store(dx_gmem, plan, row, e * (weight * scale))
    slope = tiles.broadcast(jnp.sum(jnp.where(e == 0, 0.0, e * scaled), 1), plan)
    tiles.store(dt_gmem, plan, row, -(weight * slope + spread(slope_won)) * scale)

    tiles.store(dx_gmem, winners, row, dx_won, column=index, held=k)  # over what the row wrote there


def topk_grad_rows(x, temperature, m, d, indices, g, g_d, plan: Tile, *, log: bool):
    """Returns the cotangents of the logits (rows, vocab), and of the temperature of each row (rows, 1).

    x has the logits, (rows, vocab). The temperature is (1,) or (rows,), and (m, d) are the normalizers (rows,). The
    winners are `indices` (rows, k) int32. g (rows, k) and g_d (rows,) are the cotangents of the winners' values and of
    d. With `log`, the values are logs of probabilities.
    """
    rows, vocab = x.shape
    return gpu_kernel(
        functools.partial(topk_grad, plan, log),
        grid={"row": -(-rows // plan.rows)},
        out_type=[
            jax.ShapeDtypeStruct((rows, vocab), x.dtype),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
        ],
        name="topk_grad",
        approximate=approximate(x.dtype),
    )(x, 1 / temperature, m, d, g_d, indices, g)
