"""Token statistics of rows that are spread over a mesh: the devices exchange five numbers per row."""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import merge_over
from pallas_softmax._src.normalizers import Moments
from pallas_softmax._src.sort_keys import value_key
from pallas_softmax._src.stats.xla import RowStats, finished, is_column, label_keys, logits_at, with_rank
from pallas_softmax._src.temperatures import Temperature


def token_stats_on_mesh(run_shard, logits, where, temperature, labels, *, scaled, mesh_axes):
    """Returns the `RowStats` of whole rows; the arguments are as for `xla.token_stats`."""
    local = run_shard(None, (logits, where, temperature, labels), {"scaled": scaled})
    return _merged(local, logits, where, temperature, labels, scaled, mesh_axes)


def _merged(local: RowStats, logits, where, temperature, labels, scaled: bool, mesh_axes) -> RowStats:
    """Returns the `RowStats` of whole rows, given the `RowStats` of this device's shard."""
    vocab = logits.shape[-1]
    label_logit = logits_at(labels, logits, where, mesh_axes)
    position = local.argmax + lax.axis_index(mesh_axes) * vocab
    moments, label_logit, argmax = combine_shards(
        local.moments, label_logit, position, mesh_axes, temperature if scaled else None
    )
    has_label = is_column(labels, vocab * lax.axis_size(mesh_axes))
    return finished(moments, temperature, label_logit, argmax, has_label)


def ranked_stats_on_mesh(run_shard, logits, where, temperature, labels, *, scaled, mesh_axes):
    """Returns the `RowStats` of whole rows, with the rank. Its shard step is `counted_stats`."""
    keys, is_ranked = label_keys(labels, logits, where, mesh_axes)
    columns = labels - lax.axis_index(mesh_axes) * logits.shape[-1]
    local = run_shard(None, (logits, where, temperature, columns, keys), {"scaled": scaled})
    merged = _merged(local, logits, where, temperature, labels, scaled, mesh_axes)
    return with_rank(merged._replace(rank=lax.psum(local.rank, mesh_axes)), is_ranked)


def combine_shards(moments: Moments, label_logit, position, mesh_axes, temperature=None):
    """Merges what the devices found in their shards of each row; arrays (..., 1).

    Args:
      moments: the moments of a shard.
      label_logit: the logit at the label; 0 if the label is in another shard.
      position: the position in the whole row of the first of the shard's largest logits.
      mesh_axes: the mesh axes that each row is spread over.
      temperature: the temperature of the moments, at least 0; None if it is 1.

    Returns:
      The moments, the label's logit, and the position of the first of the largest logits, of whole rows.
    """

    def merge(gathered, temperature):
        *parts, label_logits, positions = gathered
        parts = Moments(*parts)
        keys = value_key(parts.m)
        is_largest = keys == jnp.max(keys, -1, keepdims=True)
        scale = None if temperature is None else Temperature.of(temperature)
        total = normalizers.combine_lanes(
            parts, -1, lambda per_row: per_row[..., None], scale, normalizers.largest(parts.m)[..., 0]
        )
        first = jnp.min(jnp.where(is_largest, positions, jnp.iinfo(jnp.int32).max), -1, keepdims=True)
        return *(a[..., None] for a in total), jnp.sum(label_logits, -1, keepdims=True), first

    *total, label_logit, first = merge_over(mesh_axes, merge, (*moments, label_logit, position), temperature)
    return Moments(*total), label_logit, first
