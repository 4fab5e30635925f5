"""linear_topk: the top-k of a projection, chunk by chunk."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_softmax_base._src import arguments
from pallas_softmax_base._src.arguments import AxisName
from pallas_softmax_base._src.dispatch import mesh
from pallas_softmax_base._src.dispatch.choose import ImplementationName, choose, choose_plain
from pallas_softmax_base._src.dispatch.eager import at_once
from pallas_softmax_base._src.dispatch.mesh_types import vary_together
from pallas_softmax_base._src.dispatch.operation import Choice, Operation
from pallas_softmax_base._src.dispatch.operation import describe as describe_rows
from pallas_softmax_base._src.linear.checks import (
    WORKSPACE_BYTES,
    Options,
    check_replicated,
    checked_projection,
    known_options,
    lay_out,
)
from pallas_softmax_base._src.linear.chunks import Chunk, chunk_rows, over_chunks
from pallas_softmax_base._src.linear.losses import Head, Tokens
from pallas_softmax_base._src.linear.mesh import describe
from pallas_softmax_base._src.linear.vmap import as_tokens
from pallas_softmax_base._src.linear.xla import logits
from pallas_softmax_base._src.normalizers import widen
from pallas_softmax_base._src.topk.operation import TOPK
from pallas_softmax_base._src.topk.xla import TopK


def linear_topk(
    x: ArrayLike,
    w: ArrayLike,
    k: int | np.integer,
    *,
    temperature: ArrayLike = 1.0,
    log: bool = False,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TopK:
    """Returns `fused_topk` of the logits z = x @ w + bias of each token, without storing all logits at once.

    `x`, `w`, `bias`, `softcap` and `transpose_w` are as for `linear_logsumexp`; `k` and `log` are as for `fused_topk`.

    Args:
      temperature: as for `fused_topk`: a positive scalar, or one per token. It divides the logits after the softcap.
      workspace_bytes: the bound, in bytes, on the float32 logits that are stored at a time: a chunk of at least 8 rows.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the columns are spread over, as for
        `linear_logsumexp`. `k` and the indices count columns of the whole w.
      implementation: names the implementation of top-k, as for `fused_topk`. XLA computes the matrix product.

    Returns:
      TopK(values, indices), each of the shape of `x` with k instead of D. `values` are float32 (float64 for float64).
      The order is that of the float32 logits. There is no gradient: pass the indices to `linear_log_probs` as labels.

    Raises:
      TypeError, ValueError: as `linear_logsumexp` for the projection, and as `fused_topk` for k, log and temperature.
      NotImplementedError: the named implementation cannot run this call (the message says why), or the call is
        differentiated.
    """
    name = "linear_topk"
    temperature = arguments.known_temperature(name, temperature, x)
    options = known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _topk_of(x, w, bias, temperature, k, log, options)


@at_once("k", "log", "options")
def _topk_of(x, w, bias, temperature, k, log, options: Options) -> TopK:
    name = options.function
    x, w, bias, head, workspace_bytes, mesh_axes, vocab = checked_projection(x, w, bias, options)
    k = arguments.count_in_row(name, "k", k, vocab)
    log = arguments.static_bool(name, "log", log)
    dtype, batch = widen(x).dtype, x.shape[:-1]
    temperature = arguments.row_temperature(name, temperature, x.shape, x.ndim - 1, dtype)
    tokens = Tokens(None, jnp.broadcast_to(temperature[..., 0], batch))
    check_replicated(options, mesh_axes, x=x, temperature=tokens.temperature)
    rows: Any = jax.ShapeDtypeStruct((*batch, head.vocab(w)), dtype)
    call = describe_rows(TOPK, rows, (len(batch),), None, k, mesh_axes, function=name)
    topk = choose(call, options.implementation)
    topk.required_cuda()
    x, w, bias, tokens = lay_out(_without_gradient((x, w, bias, tokens)), head, mesh_axes)
    choice = choose_plain(describe(PROJECTION_TOPK, x, w, head, mesh_axes, function=name))
    static = {"head": head, "workspace_bytes": workspace_bytes, "topk": topk, "k": k, "log": log}
    return as_tokens(choice, x, w, bias, tokens, **static)


@jax.custom_jvp
def _without_gradient(arrays):
    """Returns the arrays. To differentiate them raises."""
    return arrays


@_without_gradient.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "linear_topk: there is no gradient; wrap the arguments in jax.lax.stop_gradient, and pass the indices as labels"
        " to pallas_softmax_base.linear_log_probs, which has one"
    )


def _projection_topk(
    x, w, bias, tokens: Tokens, *, head: Head, workspace_bytes: int, topk: Choice, k, log: bool, mesh_axes=()
) -> TopK:
    """Returns the winners of whole rows, (n, k).

    Args:
      x: (n, D).
      w, bias, head, workspace_bytes, mesh_axes: as for `gradients._Projection`.
      tokens: the temperature of each token, (n,).
      topk: the choice of top-k for the user's call.
      k, log: as for `linear_topk`.
    """
    n, vocab, dtype = x.shape[0], head.vocab(w), widen(x).dtype
    rows = chunk_rows(n, vocab, dtype.itemsize, workspace_bytes)

    def step(chunk: Chunk, found: TopK) -> TopK:
        z = logits(chunk.slice(x), w, bias, Tokens(None), head=head)
        arrays = z, None, chunk.slice(tokens.temperature)[:, None]
        winners, _ = mesh.on_shard(topk, arrays, {"k": k, "log": log, "dtype": dtype}, mesh_axes)
        return chunk.put(found, vary(TopK(*winners), x, w, tokens)[0])

    vary = functools.partial(vary_together, but=mesh_axes)
    none = TopK(jnp.zeros((n, k), dtype), jnp.zeros((n, k), jnp.int32))
    return over_chunks(n, rows, step, vary(none, x, w, tokens)[0])


PROJECTION_TOPK = Operation(name="projection_topk", plain=_projection_topk)
