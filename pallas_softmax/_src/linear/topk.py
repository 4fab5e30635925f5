"""linear_topk: the top-k of a projection, chunk by chunk."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_softmax._src import arguments
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch import mesh
from pallas_softmax._src.dispatch.choose import ImplementationName, choose, choose_plain
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.operation import Choice, Operation
from pallas_softmax._src.dispatch.operation import describe as describe_rows
from pallas_softmax._src.linear.checks import (
    WORKSPACE_BYTES,
    Options,
    check_replicated,
    checked_projection,
    checked_tokens,
    constants,
    kept_tokens,
    known_options,
    known_tokens,
    lay_out,
)
from pallas_softmax._src.linear.chunks import results_of_rows
from pallas_softmax._src.linear.losses import Head, Tokens
from pallas_softmax._src.linear.mesh import describe
from pallas_softmax._src.linear.vmap import as_tokens
from pallas_softmax._src.linear.xla import logits
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.topk.operation import TOPK
from pallas_softmax._src.topk.xla import TopK


def linear_topk(
    x: "ArrayLike",
    w: "ArrayLike",
    k: int | np.integer,
    *,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    log: bool = False,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TopK:
    """Returns `fused_topk` of the logits z = x @ w + bias of each token, without storing all logits at once.

    `where`, `temperature`, `bias`, `softcap`, `transpose_w`, `workspace_bytes` and `axis_name` are as for
    `linear_cross_entropy`. A token that is left out has values and indices of 0.

    Args:
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      k: static int from 0 to V, the number of winners of each token.
      log: whether the values are log-probabilities.
      implementation: names the implementation of top-k, as for `fused_topk`. XLA computes the matrix product.

    Returns:
      TopK(values, indices), each of shape (..., k). `values` are float32 (float64 for float64). The float32 logits
      determine the order. There is no gradient: pass the indices to `linear_log_probs` as labels.

    Raises:
      TypeError, ValueError: as `linear_logsumexp`, and as `fused_topk` for k and log.
      NotImplementedError: the named implementation cannot run this call (the message says why), or the call is
        differentiated.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_topk(x, w, 1).indices
      Array([[2],
             [0]], dtype=int32)
    """
    name = "linear_topk"
    tokens = known_tokens(name, None, temperature=temperature)
    options = known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _topk_of(x, w, bias, where, tokens, k, log, options)


@at_once("k", "log", "options")
def _topk_of(x, w, bias, where, tokens: Tokens, k, log, options: Options) -> TopK:
    name = options.function
    x, w, bias, head, workspace_bytes, mesh_axes, vocab = checked_projection(x, w, bias, options)
    k = arguments.winners(name, k, vocab)
    log = arguments.static_bool(name, "log", log)
    dtype, batch = widen(x).dtype, x.shape[:-1]
    where = kept_tokens(name, where, batch)
    if tokens.temperature is None:
        tokens = tokens._replace(temperature=jnp.ones(batch, dtype))
    tokens = checked_tokens(name, tokens, where, batch, dtype, vocab)
    check_replicated(options, mesh_axes, x=x, where=where, temperature=tokens.temperature)
    rows: Any = jax.ShapeDtypeStruct((*batch, head.vocab(w)), dtype)
    call = describe_rows(TOPK, rows, (len(batch),), None, k, mesh_axes, function=name)
    topk = choose(call, options.implementation)
    topk.required_cuda()
    x, w, bias, tokens = lay_out(constants(name, (x, w, bias, tokens)), head, mesh_axes)
    choice = choose_plain(describe(PROJECTION_TOPK, x, w, head, mesh_axes, function=name))
    static = {"head": head, "workspace_bytes": workspace_bytes, "topk": topk, "k": k, "log": log}
    return as_tokens(choice, x, w, bias, tokens, **static)


def _projection_topk(
    x, w, bias, tokens: Tokens, *, head: Head, workspace_bytes: int, topk: Choice, k, log: bool, mesh_axes=()
) -> TopK:
    """Returns the winners of whole rows, (n, k).

    Args:
      x: (n, D).
      w, bias, head, workspace_bytes, mesh_axes: as for `gradients._Projection`.
      tokens: the temperature of each token, and which tokens are kept, (n,).
      topk: the choice of top-k for the user's call.
      k, log: as for `linear_topk`.
    """
    dtype = widen(x).dtype

    def winners(x, tokens: Tokens) -> tuple:
        arrays = logits(x, w, bias, Tokens(None), head=head), None, tokens.temperature[:, None]
        return tuple(mesh.on_shard(topk, arrays, {"k": k, "log": log, "dtype": dtype}, mesh_axes)[0])

    of_row = tuple(jax.ShapeDtypeStruct((k,), of) for of in (dtype, jnp.int32))
    static = {"head": head, "workspace_bytes": workspace_bytes, "mesh_axes": mesh_axes}
    return TopK(*results_of_rows(winners, x, w, tokens, of_row, dtype.itemsize, **static))


PROJECTION_TOPK = Operation(name="projection_topk", plain=_projection_topk)
