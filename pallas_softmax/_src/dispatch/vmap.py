"""Handles `jax.vmap`, the first of four steps from a chosen call to its kernel: a batch becomes more rows.

    vmap.as_rows             a batch becomes more rows
      mesh.over_mesh           each device takes its shard of sharded arrays
        mesh.on_shard            what devices exchange if a row is spread over them
          platform.by_platform     a kernel or plain JAX, decided when the computation is lowered

The operations on a projection x @ w go the same way through `linear/vmap.py` and `linear/mesh.py`.

All steps take a `Choice`, which is the call and its implementations; the positional arguments of the operation
(`arrays`); and its static arguments (`keywords`). The first array has the full shape.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_softmax._src.dispatch.choose import choose_unlisted
from pallas_softmax._src.dispatch.mesh import over_mesh
from pallas_softmax._src.dispatch.mesh_types import explicit_mesh
from pallas_softmax._src.dispatch.operation import Choice, symbolic
from pallas_softmax._src.dispatch.platform import by_platform
from pallas_softmax._src.jax_internals import stage_constants


def as_rows(choice: Choice, *arrays: Any, **static: Any) -> Any:
    """Runs a call. Under a vmap the choice is made anew for all rows, and on a mesh for each device's shard."""
    choice.required_cuda()
    with stage_constants():
        if is_visible(choice, arrays):
            return by_platform(choice, arrays, static)
        call = custom_vmap(functools.partial(over_mesh, choice, static))

        @call.def_vmap
        def _(axis_size, in_batched, *arrays):
            leaves, tree = jax.tree.flatten(arrays)
            batched = jax.tree.leaves(in_batched)
            full = leaves[0].shape[batched[0] :]
            leaves = [a if b else a[None] for a, b in zip(leaves, batched)]
            leaves = [jnp.broadcast_to(a, (axis_size, *full)) if a.shape[1:] == full else a for a in leaves]
            objection = choice.call.objection or symbolic((axis_size,))
            batch = dataclasses.replace(choice.call, rows=choice.call.rows * axis_size, objection=objection)
            shifted = {"axes": tuple(a + 1 for a in static["axes"])} if "axes" in static else {}
            batch_choice = choose_unlisted(batch, choice.requested)
            out = as_rows(batch_choice, *jax.tree.unflatten(tree, leaves), **static | shifted)
            return out, jax.tree.map(lambda _: True, out)

        return call(*arrays)


def is_visible(choice: Choice, arrays: Any) -> bool:
    """Returns whether the call needs no wrapper, so that JAX and its tools see plain operations.

    Plain JAX needs a wrapper only if arrays may be sharded and XLA would divide it less well.
    """
    call, op = choice.call, choice.call.row_operation
    if choice.requested is None:
        stays_plain = call.objection is not None or call.dtype not in op.kernel_dtypes
    else:
        stays_plain = choice.requested == "xla"
    if not stays_plain or call.mesh_axes or op.vmap_adds_rows:
        return False
    if explicit_mesh(jax.tree.leaves(arrays)) is not None:
        return op.divided_by_xla and choice.requested == "xla"
    return op.divided_by_xla or jax.device_count() == 1
