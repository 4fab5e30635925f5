"""softmax, log_softmax and logsumexp of rows that are spread over a mesh: the devices exchange two numbers per row.

Each function returns what its plain function returns for whole rows, or this device's shard of it. It runs where the
mesh axes are bound. `run_shard(None, arrays, static)` runs the best kernel of `logsumexp`, their shard step.
"""

import jax
import jax.numpy as jnp

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import merge_over
from pallas_softmax._src.masks import logits_of, masked
from pallas_softmax._src.normalizers import Normalizer, Sums
from pallas_softmax._src.sort_keys import value_key
from pallas_softmax._src.temperatures import Temperature


def softmax_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    m, d = _normalizer(run_shard, x, where, axes, mesh_axes)
    return masked(jnp.exp(logits_of(x, where) - normalizers.shift(m)) / d, where, 0).astype(x.dtype)


def log_softmax_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    m, d = _normalizer(run_shard, x, where, axes, mesh_axes)
    return masked(logits_of(x, where) - m - jnp.log(d), where, -jnp.inf).astype(x.dtype)


def logsumexp_on_mesh(run_shard, x, where, *, axes, mesh_axes):
    normalizer = _normalizer(run_shard, x, where, axes, mesh_axes)
    return normalizers.log_of(normalizer).astype(x.dtype), normalizer


def _normalizer(run_shard, x, where, axes, mesh_axes) -> Normalizer:
    _, (m, d) = run_shard(None, (x, where), {"axes": axes})
    return combine_shards(Normalizer(m, d), mesh_axes)[0]


def combine_shards(local: Sums, mesh_axes, *others, position=None, temperature=None) -> tuple:
    """Merges what the devices found in their shards of each row: arrays of one shape, which are sent together.

    It returns the merged `local`; the sums of `others` over the devices; and, with a `position`, the first position of
    the row's largest logit. `position` is the shard's own, counted in the whole row. The sums in `local` have this
    `temperature`, at least 0; None is 1.
    """
    numbers, own = jax.tree.map(lambda a: a[..., None], ((local, others, position), temperature))
    numbers, structure = jax.tree.flatten(numbers)

    def merge(gathered, temperature):
        parts, others, position = structure.unflatten(gathered)
        scale = None if temperature is None else Temperature.of(temperature)
        sums = [jnp.sum(a, -1, keepdims=True) for a in others]
        if position is not None:
            keys = value_key(parts.m)
            first = normalizers.if_largest(position, keys, jnp.max(keys, -1, keepdims=True))
            sums.append(jnp.min(first, -1, keepdims=True))
        return *normalizers.combine_parts(parts, scale), *sums

    merged = [a[..., 0] for a in merge_over(mesh_axes, merge, tuple(numbers), own)]
    return type(local)(*merged[: len(local)]), *merged[len(local) :]
