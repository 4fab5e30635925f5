"""Token statistics of rows that are spread over a mesh: the devices exchange five numbers per row in one all-gather."""

import jax.numpy as jnp
from jax import lax

from pallas_softmax_base._src import normalizers
from pallas_softmax_base._src.dispatch.mesh_types import merge_over
from pallas_softmax_base._src.normalizers import Moments
from pallas_softmax_base._src.stats.xla import finished, is_column, logits_at, value_key


def token_stats_on_mesh(run_shard, logits, where, temperature, labels, *, scaled, mesh_axes):
    """Returns the `RowStats` of whole rows; the arguments are as for `xla.token_stats`."""
    vocab = logits.shape[-1]
    of_shard = run_shard(None, (logits, where, temperature, labels), {"scaled": scaled})
    label_logit = logits_at(labels, logits, where, mesh_axes)
    position = of_shard.argmax + lax.axis_index(mesh_axes) * vocab
    moments, label_logit, argmax = combine_shards(
        of_shard.moments, label_logit, position, mesh_axes, 1 / temperature if scaled else None
    )
    has_label = is_column(labels, vocab * lax.axis_size(mesh_axes))
    return finished(moments, temperature, label_logit, argmax, has_label)


def combine_shards(moments: Moments, label_logit, position, mesh_axes, scale=None):
    """Merges what the devices found in their shards of each row; arrays (..., 1).

    Args:
      moments: the moments of a shard.
      label_logit: the logit at the label; 0 if the label is in another shard.
      position: the position in the whole row of the first of the shard's largest logits.
      mesh_axes: the mesh axes that each row is spread over.
      scale: 1 / temperature, if the moments have one.

    Returns:
      The moments, the label's logit, and the position of the first of the largest logits, of whole rows.
    """

    def merge(gathered, scale):
        *parts, label_logits, positions = gathered
        parts = Moments(*parts)
        total = normalizers.combine_lanes(parts, -1, lambda per_row: per_row[..., None], scale)
        total = Moments(*(a[..., None] for a in total))
        keys = value_key(parts.m)
        is_largest = keys == jnp.max(keys, -1, keepdims=True)
        first = jnp.min(jnp.where(is_largest, positions, jnp.iinfo(jnp.int32).max), -1, keepdims=True)
        return total, jnp.sum(label_logits, -1, keepdims=True), first

    return merge_over(mesh_axes, merge, (*moments, label_logit, position), scale)
