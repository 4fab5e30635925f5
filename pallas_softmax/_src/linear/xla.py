"""Implementation `xla` of a projection and its softmax: `ChunkFunctions` in plain JAX, for every floating dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.gradients import operations_of
from pallas_softmax._src.linear.losses import Head, Statistics, Tokens, at_columns, times_softcap_slope
from pallas_softmax._src.linear.projection import ChunkFunctions, Projection, dot
from pallas_softmax._src.masks import stored
from pallas_softmax._src.normalizers import Moments, Normalizer
from pallas_softmax._src.stats.xla import first_of_largest


def logits(x, w, bias, tokens: Tokens, *, head: Head):
    """Returns the logits z of some rows, in the dtype of the arithmetic; all readers see the same roundings."""
    z = dot(x, w, (1, 1 if head.transpose_w else 0), head)
    z = z if bias is None else z + bias.astype(z.dtype)[None]
    z = z if head.softcap is None else head.softcap * jnp.tanh(z / head.softcap)
    return stored(tokens.divided(z))


def logits_and_normalizer(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[jax.Array, Normalizer]:
    z = logits(x, w, bias, Tokens(None) if head.undivided else tokens, head=head)
    if head.columns is not None:
        z = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) < head.columns, z, -jnp.inf)
    divided = stored(tokens.divided(z)) if head.undivided else z
    return z, jax.tree.map(lambda a: a[:, 0], normalizers.reduce(divided, (1,), chunk=z.shape[1]))


def statistics(x, w, bias, tokens: Tokens, *, head: Head) -> Statistics:
    return _reduced(logits(x, w, bias, tokens, head=head), tokens, head)


def dlogits(layer: Projection, x, tokens: Tokens, weights, known):
    z = logits(x, layer.w, layer.columns.bias, tokens, head=layer.head)
    found = _reduced(z, tokens, layer.head).merged(layer.mesh_axes, layer.vocab) if known is None else known
    coefficients = formulas.coefficients(found, weights, tokens, layer.whole_vocab)
    of_row = jax.tree.map(lambda number: number[:, None], coefficients._replace(label_term=None))
    z = jnp.where(of_row.m == jnp.inf, 0, z)  # the logits of a row that is left out may be NaN
    dz = of_row.of_exponential(z)
    dz = dz if of_row.constant is None else dz - of_row.constant
    return found, coefficients, times_softcap_slope(dz, z, tokens, layer.head).astype(x.dtype), None


def _reduced(z, tokens: Tokens, head: Head) -> Statistics:
    form: Any = Moments if head.entropy else Normalizer
    sums = normalizers.reduce(z, (1,), chunk=z.shape[1], of=form)
    return Statistics(
        jax.tree.map(lambda a: a[:, 0], sums),
        at_columns(z, tokens.labels, z.shape[1]),
        None if tokens.label_smoothing is None else jnp.sum(z, 1),
        first_of_largest(z)[:, 0] if head.entropy else None,
    )


def bytes_per_logit(itemsize: int) -> tuple[float, float]:
    """Returns the bytes of one z, in float32 or wider, and the bytes of one z and one dz, in the dtype of x."""
    wide = max(4, itemsize)
    return wide, wide + itemsize


FUNCTIONS = ChunkFunctions(statistics, dlogits, logits_and_normalizer, bytes_per_logit, None, are_plain=True)
OPERATIONS = operations_of(FUNCTIONS)
