"""Token statistics of rows that are spread over a mesh: the devices exchange five numbers per row."""

from jax import lax

from pallas_softmax._src.softmax.mesh import combine_shards
from pallas_softmax._src.stats.xla import RowStats, finished, label_keys, logits_at, with_rank


def token_stats_on_mesh(run_shard, logits, where, temperature, labels, *, scaled, mesh_axes):
    """Returns the `RowStats` of whole rows; the arguments are as for `xla.token_stats`."""
    local = run_shard(None, (logits, where, temperature, labels), {"scaled": scaled})
    return _merged(local, logits, where, temperature, labels, scaled, mesh_axes)


def _merged(local: RowStats, logits, where, temperature, labels, scaled: bool, mesh_axes) -> RowStats:
    vocab = logits.shape[-1]
    moments, label_logit, argmax = combine_shards(
        local.moments,
        mesh_axes,
        logits_at(labels, logits, where, mesh_axes),
        position=local.argmax + lax.axis_index(mesh_axes) * vocab,
        temperature=temperature if scaled else None,
    )
    return finished(moments, temperature, labels, label_logit, argmax, vocab * lax.axis_size(mesh_axes))


def ranked_stats_on_mesh(run_shard, logits, where, temperature, labels, *, scaled, mesh_axes):
    """Returns the `RowStats` of whole rows, with the rank. Its shard step is `counted_stats`."""
    keys, is_ranked = label_keys(labels, logits, where, mesh_axes)
    columns = labels - lax.axis_index(mesh_axes) * logits.shape[-1]
    local = run_shard(None, (logits, where, temperature, columns, keys), {"scaled": scaled})
    merged = _merged(local, logits, where, temperature, labels, scaled, mesh_axes)
    return with_rank(merged._replace(rank=lax.psum(local.rank, mesh_axes)), is_ranked)
