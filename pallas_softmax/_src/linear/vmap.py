"""How `jax.vmap` runs an operation of a projection: a batch becomes more tokens, or a loop."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.dispatch.refusal import constant
from pallas_softmax._src.jax_internals import stage_constants
from pallas_softmax._src.linear.mesh import over_mesh
from pallas_softmax._src.linear.operation import GRADIENTS

_ONE_DERIVATIVE = (
    "linear_cross_entropy, linear_kl_divergence, linear_log_probs, linear_logsumexp and linear_token_stats have first"
    " derivatives only; for second ones compute the logits and call pallas_softmax.logsumexp or token_stats"
)


def as_tokens(choice: Choice, *arrays: Any, **static: Any) -> Any:
    """Runs an operation of a projection x @ w.

    If the slices of a vmap share w and bias, one call with more tokens computes the statistics or winners of all
    slices. Gradients run slice by slice, because each slice has its own dw. If w or bias differ between slices, the
    statistics or winners run slice by slice as well. A mesh divides slices as it divides tokens.

    `arrays` are x, w, bias, and arrays with one number per token.

    Raises:
      NotImplementedError: a named implementation does not support the call.
    """
    choice.required_cuda()
    with stage_constants():
        once: Any = constant(arrays, _ONE_DERIVATIVE)
        return _under_vmap(choice, static, once)


def _under_vmap(choice: Choice, static: dict[str, Any], arrays: tuple) -> Any:
    @custom_vmap
    def call(*arrays):
        return over_mesh(choice, arrays, static)

    @call.def_vmap
    def _(axis_size, in_batched, *arrays):
        x, w, bias, *per_token = arrays
        x_batched, w_batched, bias_batched, *per_token_batched = in_batched
        slices = static.get("slices", ())
        if slices or choice.call.operation in GRADIENTS or any(jax.tree.leaves((w_batched, bias_batched))):
            slices = tuple(jax.tree.leaves(in_batched)), *slices
            out = _under_vmap(choice, static | {"slices": slices}, arrays)
        else:
            x, *per_token = jax.tree.map(
                lambda a, b: a if b else jnp.broadcast_to(a, (axis_size, *a.shape)),
                [x, *per_token],
                [x_batched, *per_token_batched],
            )
            out = call(x, w, bias, *per_token)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arrays)
