"""softmax, log_softmax and logsumexp of rows that are spread over a mesh: the devices exchange two numbers per row.

Each function runs on one device's shard, where the mesh axes are bound. `run_shard(None, arrays, static)` runs the best
kernel of `logsumexp`, their shard step, on the shard.
"""

import jax.numpy as jnp

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import merge_over
from pallas_softmax._src.masks import logits_of, masked
from pallas_softmax._src.normalizers import Normalizer


def softmax_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    """Returns this device's shard of the softmax of whole rows."""
    m, d = _normalizer(run_shard, x, where, axes, mesh_axes)
    return masked(jnp.exp(logits_of(x, where) - normalizers.shift(m)) / d, where, 0).astype(x.dtype)


def log_softmax_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    """Returns this device's shard of the log_softmax of whole rows."""
    m, d = _normalizer(run_shard, x, where, axes, mesh_axes)
    return masked(logits_of(x, where) - m - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def logsumexp_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    """Returns logsumexp of whole rows, and their normalizers."""
    normalizer = _normalizer(run_shard, x, where, axes, mesh_axes)
    return normalizers.log_of(normalizer).astype(x.dtype), normalizer


def _normalizer(run_shard, x, where, axes, mesh_axes) -> Normalizer:
    """Returns the normalizer of each whole row: the shards' normalizers, by the best kernel, merged by ⊕."""
    _, (m, d) = run_shard(None, (x, where), {"axes": axes})
    return combine_shards(Normalizer(m, d), mesh_axes)[0]


def combine_shards(local: Normalizer, mesh_axes, *others):
    """Returns the normalizer of each row, from the shards' normalizers, and the sums of `others` over the devices.

    The numbers m and d of a shard and the `others` are arrays of one shape. They are sent together.
    """

    def merge(gathered, _):
        m, d, *others = gathered
        sums = [jnp.sum(a, -1, keepdims=True) for a in others]
        return *normalizers.combine_parts(Normalizer(m, d)), *sums

    parts = tuple(a[..., None] for a in (*local, *others))
    m, d, *sums = (a[..., 0] for a in merge_over(mesh_axes, merge, parts, None))
    return Normalizer(m, d), *sums
