"""Plain JAX of `sample`: a draw from each row, restricted by top-k, top-p and min-p, without a sort of the row.

The filters keep the first entries of a row in the order of `lax.top_k` (by value, equal ones by the lowest index), up
to where a weight reaches a target: the count of entries for top_k, their mass for top_p. `first_entries` finds that
place by bisection on the bits of the entries' keys, unsigned integers in their order. The draw is the inverse of the
cumulative sum of what is kept, in the order of the row.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax import online

# Number of elements of a block, over which the cumulative sum is taken before and after the blocks.
_BLOCK = 256


def sample(logits, where, u, temperature, top_k, top_p, min_p, *, mesh_axes=()):
    """One draw from each row of softmax(logits / temperature), restricted by the filters.

    Args:
      logits: (..., vocab), floats or integers.
      where: None, or a boolean of the rank of the logits that broadcasts to them.
      u: float32 in [0, 1); the draw is the first kept entry, in the order of the row, whose cumulative kept mass
        exceeds u times the kept mass. This and what follows are of the rank of the logits, each dimension 1 or theirs,
        the last one 1.
      temperature: 0, which takes the first entry in the order of lax.top_k, whatever the filters and u; or a positive
        normal number whose reciprocal is one; or NaN, for a row that is to give -1 and NaN.
      top_k: int32, at least 1; or None. At the vocabulary's size or more it filters nothing.
      top_p: in [0, 1], or None. 0 keeps the first entry, 1 all that top_k keeps.
      min_p: in [0, 1], or None.
      mesh_axes: the mesh axes that each row is spread over, if any.

    Returns:
      Each of shape (..., 1): the index in the whole row (int32), log softmax(logits / temperature) there, and the log
      of the share of the mass that the filters keep; -1, NaN and NaN for a row with an unmasked NaN or +inf, with
      nothing but -inf, or of temperature NaN.
    """
    x = online.to_float(logits, (-1,), where, mesh_axes)
    x = online.widen(x)
    x = x if where is None else jnp.where(where, x, -jnp.inf)
    over = _Over(mesh_axes)
    key = _key(logits)
    index = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) + over.offset(x.shape[-1])
    nowhere = jnp.iinfo(jnp.int32).max

    tiny = jnp.finfo(x.dtype).tiny
    scaled = (x - over.max(x)) / jnp.maximum(temperature, tiny)
    mass = jnp.exp(scaled)
    total = over.sum(mass)

    kept = mass
    if top_k is not None:
        ones = jnp.ones((), jnp.int32) if where is None else where.astype(jnp.int32)
        wanted = jnp.where(top_k < over.size(x.shape[-1]), top_k, nowhere)
        kept = jnp.where(_first_entries(key, jnp.broadcast_to(ones, x.shape), wanted, over), kept, 0)
    if top_p is not None:
        wanted = jnp.where(top_p < 1, jnp.maximum(top_p * over.sum(kept), 1), jnp.inf)  # the first entry's mass is 1
        kept = jnp.where(_first_entries(key, kept, wanted, over), kept, 0)
    if min_p is not None:
        kept = jnp.where(mass >= min_p, kept, 0)

    drawn, kept_total = _draw(kept, u, over)
    of_masked = key if where is None else jnp.where(where, key, 0)
    best = jnp.where((of_masked == over.max(of_masked)) & (mass == 1), index, nowhere)
    greedy = temperature == 0
    drawn = jnp.where(greedy, over.min(best), drawn)
    log_probs = over.sum(jnp.where(index == drawn, scaled, 0)) - jnp.log(total)
    log_mass = jnp.where(greedy, log_probs, jnp.minimum(jnp.log(kept_total / total), 0))
    drawable = total >= 1
    return (
        jnp.where(drawable, drawn, -1),
        jnp.where(drawable, log_probs, jnp.nan),
        jnp.where(drawable, log_mass, jnp.nan),
    )


class _Over:
    """Reductions of rows, over the last axis and the mesh axes that a row is spread over; the axis stays, of size 1."""

    def __init__(self, mesh_axes):
        self.mesh_axes = tuple(mesh_axes)

    def sum(self, x):
        part = jnp.sum(x, -1, keepdims=True)
        return lax.psum(part, self.mesh_axes) if self.mesh_axes else part

    def max(self, x):
        part = jnp.max(x, -1, keepdims=True)
        return lax.pmax(part, self.mesh_axes) if self.mesh_axes else part

    def min(self, x):
        part = jnp.min(x, -1, keepdims=True)
        return lax.pmin(part, self.mesh_axes) if self.mesh_axes else part

    def size(self, vocab):
        return vocab * (lax.axis_size(self.mesh_axes) if self.mesh_axes else 1)

    def offset(self, vocab):
        return lax.axis_index(self.mesh_axes) * vocab if self.mesh_axes else 0


def _key(x):
    """Unsigned integers in the order of `lax.top_k`."""
    bits = online.sort_key(x)
    if jnp.issubdtype(bits.dtype, jnp.unsignedinteger):
        return bits
    unsigned = jnp.dtype(f"uint{8 * bits.dtype.itemsize}")
    return lax.bitcast_convert_type(bits ^ jnp.iinfo(bits.dtype).min, unsigned)


def _first_entries(key, weight, target, over):
    """Which entries come first, by the highest key and then the lowest index, until their weights reach the target."""

    def reach(key, weight, target):
        """The highest bound for which the weights of key >= bound reach the target; 0 if none does."""
        bits = 8 * key.dtype.itemsize

        def step(i, bound):
            higher = bound | lax.shift_left(jnp.ones((), key.dtype), (bits - 1 - i).astype(key.dtype))
            reached = over.sum(jnp.where(key >= higher, weight, 0)) >= target
            return jnp.where(reached, higher, bound)

        return lax.fori_loop(0, bits, step, jnp.zeros((*key.shape[:-1], 1), key.dtype))

    bound = reach(key, weight, target)
    above = over.sum(jnp.where(key > bound, weight, 0))
    backwards = ~lax.broadcasted_iota(jnp.uint32, key.shape, key.ndim - 1)
    last = reach(backwards, jnp.where(key == bound, weight, 0), target - above)
    return (key > bound) | (key == bound) & (backwards >= last)


def _draw(kept, u, over):
    ends = jnp.cumsum(kept, -1)
    target = u * ends[..., -1:]
    reached = (ends > target) & (kept > 0)
    drawn = jnp.argmax(reached, -1, keepdims=True).astype(jnp.int32)
    return drawn, ends[..., -1:]
