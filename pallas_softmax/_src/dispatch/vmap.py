"""A call on its way to its kernel: first vmap, here; then the mesh, the platform, and the implementation.

execution.run            vmap: a batch becomes more rows
  sharding.partition.run   mesh: each device takes its shard of sharded arrays
    sharding.exchange.run    what devices send where a row is spread over them
      platforms.run            platform, and so implementation: decided when the computation is lowered
        implementations/...      a kernel, or plain JAX

`linear_cross_entropy` and its kin, whose arrays are not logits, take the same way by `execution.run_projection` and
`sharding.projection.run`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_softmax._src.dispatch import mesh as partition
from pallas_softmax._src.dispatch import platform as platforms
from pallas_softmax._src.dispatch import table as operations
from pallas_softmax._src.dispatch.choose import choose_again, stays_plain
from pallas_softmax._src.dispatch.operation import Choice, symbolic
from pallas_softmax._src.dispatch.specs import explicit_mesh
from pallas_softmax._src.linear import mesh as projection


def run(choice: Choice, *arrays: Any, axes: tuple[int, ...] | None = None, **static: Any) -> Any:
    """Runs a call; its choice is made anew for all rows of a vmap, and for each device's shard of sharded arrays.

    Args:
      choice: what to call.
      *arrays: the positional arguments of the operation, of equal rank, the first of the full shape.
      axes: the reduced axes, for an operation that has them as an argument.
      **static: its other arguments.

    Raises:
      NotImplementedError: a named implementation does not support the call.
    """
    choice.required_cuda()
    keywords = static if axes is None else {"axes": axes, **static}
    if is_visible(choice, arrays):
        return platforms.run(choice, arrays, keywords)

    @custom_vmap
    def call(*arrays):
        return partition.run(choice, arrays, keywords)

    @call.def_vmap
    def _(axis_size, in_batched, *arrays):
        leaves, tree = jax.tree.flatten(arrays)
        batched = jax.tree.leaves(in_batched)
        full = leaves[0].shape[batched[0] :]
        leaves = [a if b else a[None] for a, b in zip(leaves, batched)]
        leaves = [jnp.broadcast_to(a, (axis_size, *full)) if a.shape[1:] == full else a for a in leaves]
        objection = choice.call.objection or symbolic((axis_size,))
        batch = dataclasses.replace(choice.call, rows=choice.call.rows * axis_size, objection=objection)
        shifted = None if axes is None else tuple(a + 1 for a in axes)
        batch_choice = choose_again(batch, choice.requested)
        out = run(batch_choice, *jax.tree.unflatten(tree, leaves), axes=shifted, **static)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arrays)


def is_visible(choice: Choice, arrays: Any) -> bool:
    """Returns whether the call needs no wrapper, so that JAX and its tools see plain operations.

    Plain JAX needs one only if arrays may be sharded and XLA would not divide it as well. `sample` keeps its wrapper:
    under a plain vmap, its `lax.cond` over all rows would run both branches.

    Args:
      choice: what to call.
      arrays: its arguments.
    """
    if not stays_plain(choice) or choice.call.mesh_axes or choice.call.op == "sample":
        return False
    divided_by_xla = operations.TABLE[choice.call.op].divided_by_xla
    if explicit_mesh(jax.tree.leaves(arrays)) is not None:
        return divided_by_xla and choice.requested == "xla"
    return divided_by_xla or jax.device_count() == 1


def run_projection(choice: Choice, *arrays: Any, **static: Any) -> Any:
    """Runs an operation of a projection, x @ w.

    Under a vmap whose slices share w and bias, the statistics of all slices are those of one call with more tokens. All
    else is computed slice by slice, since each slice has a dw of its own.

    Args:
      choice: what to call.
      *arrays: x, w, bias, and what has one number for each token.
      **static: the other arguments.

    Raises:
      NotImplementedError: a named implementation does not support the call.
    """
    choice.required_cuda()

    @custom_vmap
    def call(*arrays):
        return projection.run(choice, arrays, static)

    @call.def_vmap
    def _(axis_size, in_batched, *arrays):
        x, w, bias, *per_token = arrays
        x_batched, w_batched, bias_batched, *per_token_batched = in_batched
        if choice.call.op == "projection" and not any(jax.tree.leaves((w_batched, bias_batched))):
            x, *per_token = jax.tree.map(
                lambda a, b: a if b else jnp.broadcast_to(a, (axis_size, *a.shape)),
                [x, *per_token],
                [x_batched, *per_token_batched],
            )
            out = call(x, w, bias, *per_token)
        else:
            leaves, tree = jax.tree.flatten(arrays)
            batched = jax.tree.leaves(in_batched)

            def one(moving):
                slices = iter(moving)
                return call(*tree.unflatten([next(slices) if b else a for a, b in zip(leaves, batched)]))

            out = lax.map(one, [a for a, b in zip(leaves, batched) if b])
        return out, jax.tree.map(lambda _: True, out)

    once = jax.custom_jvp(call)

    @once.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            "linear_cross_entropy, linear_log_probs and linear_logsumexp have first derivatives only; for second ones"
            " write the logits out, with pallas_softmax.logsumexp"
        )

    return once(*arrays)
