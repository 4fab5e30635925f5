"""linear_sample: a draw from the softmax of a projection."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName, choose
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.operation import describe as describe_rows
from pallas_softmax._src.linear.checks import (
    WORKSPACE_BYTES,
    Options,
    check_replicated,
    checked_projection,
    constants,
    kept_tokens,
    known_options,
    lay_out,
)
from pallas_softmax._src.linear.losses import Draw, Tokens
from pallas_softmax._src.linear.mesh import describe
from pallas_softmax._src.linear.operation import PROJECTION_SAMPLE
from pallas_softmax._src.linear.vmap import as_tokens
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.api import Sample, checked_mode, known_numbers, parameters, typed_keys
from pallas_softmax._src.sample.operation import CUTOFF, SAMPLE


class _Parameters(NamedTuple):
    """The temperature and the filters, as `known_numbers` returns them. None has no effect."""

    temperature: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None


def linear_sample(
    key: "ArrayLike",
    x: "ArrayLike",
    w: "ArrayLike",
    *,
    temperature: "ArrayLike" = 1.0,
    top_k: "ArrayLike | None" = None,
    top_p: "ArrayLike | None" = None,
    min_p: "ArrayLike | None" = None,
    where: "ArrayLike | None" = None,
    bias: "ArrayLike | None" = None,
    softcap: float | None = None,
    mode: str | None = None,
    transpose_w: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> Sample:
    """Draws once for each token from the softmax of its logits: the LM head and the draw of a decoder in one call.

    It returns `sample(key, z, ...)` of the logits z = softcap * tanh((x @ w + bias) / softcap), which are float32
    (float64 for float64). They are not all stored at once. With kernels, `log_probs` have the bits of
    `linear_log_probs(x, w, indices)` with the same temperature, bias and softcap, in any batch. So a sampler and its
    trainer agree. `linear_log_probs` takes temperatures from 1e-37 to 1e37, and 0.

    `where`, `bias`, `softcap`, `transpose_w`, `workspace_bytes` and `axis_name` are as for `linear_cross_entropy`. A
    token where `where` is False has index 0, and log_probs and log_mass of 0. Without a softcap, a bias of -inf masks a
    column.

    Args:
      key: one key, or an array of typed keys, one per token; as for `sample` of logits (..., V).
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      temperature: 0 or positive, a scalar or one per token. It divides the logits, after the softcap. 0 takes the
        largest logit.
      top_k: as for `sample`, a scalar or one per token; so are `top_p` and `min_p`.
      top_p: as for `sample`.
      min_p: as for `sample`.
      mode: as for `sample`. With a threefry key, the mode "low" and float32 logits, noise is computed where it is
        needed. Otherwise the noise of all logits is stored; `workspace_bytes` does not limit it.
      implementation: None chooses the best implementations (see `explain`); "mosaic_gpu" or "xla" names one, for both
        the logits and the draw.

    Returns:
      Sample(indices, log_probs, log_mass), each of shape (...), as for `sample`. There is no gradient: pass the indices
      to `linear_log_probs` as labels.

    Raises:
      TypeError, ValueError: as `linear_logsumexp`, and as `sample` for the key, the temperature, the filters and mode.
      NotImplementedError: the named implementation cannot run this call (the message says why), or the call is
        differentiated.

    Examples:
      >>> x, w = jnp.eye(2), jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # x @ w is w
      >>> ps.linear_sample(jax.random.key(0), x, w, top_p=0.5).indices  # keeps one entry of each row
      Array([2, 0], dtype=int32)
    """
    name = "linear_sample"
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    known = _Parameters(**known_numbers(numbers | {"key": key, "logits": x}, name))
    options = known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _sample_of(key, x, w, bias, where, known, mode, options)


@at_once("mode", "options")
def _sample_of(key, x, w, bias, where, given: _Parameters, mode, options: Options) -> Sample:
    name = options.function
    x, w, bias, head, workspace_bytes, mesh_axes, vocab = checked_projection(x, w, bias, options)
    batch, dtype = x.shape[:-1], widen(x).dtype
    shape, axis = (*batch, vocab), len(batch)
    where = kept_tokens(name, where, batch)
    per_row = parameters(name, jax.ShapeDtypeStruct(shape, dtype), axis, **given._asdict())
    t, *filters = (None if a is None else jnp.broadcast_to(a, (*batch, 1))[..., 0] for a in per_row)
    key = typed_keys(name, key, batch)
    mode = checked_mode(name, mode)
    has_words = noise.has_words(key, shape, dtype, mode)
    if has_words:
        of_key = jnp.concatenate(noise.words(key, shape, axis), -1)
    else:
        of_key = noise.gumbel_array(key, shape, axis, dtype, mode)
    tokens = Tokens(None, kept=where, draw=Draw(of_key, *filters))
    if any(
        a is not None for a in given
    ):  # t also says which tokens have a filter out of range: it is NaN there
        tokens = tokens._replace(temperature=t)
    numbers = {"temperature": t} | dict(zip(("top_k", "top_p", "min_p"), filters))
    check_replicated(options, mesh_axes, x=x, where=where, key=of_key, **numbers)

    rows: Any = jax.ShapeDtypeStruct((*batch, head.vocab(w)), dtype)
    call = describe_rows(SAMPLE if has_words else CUTOFF, rows, (axis,), None, None, mesh_axes, function=name)
    sampler = choose(call, options.implementation)
    sampler.required_cuda()
    x, w, bias, tokens = lay_out(constants(name, (x, w, bias, tokens)), head, mesh_axes)
    head = dataclasses.replace(head, undivided=True)
    call = describe(PROJECTION_SAMPLE, x, w, head, mesh_axes, function=name)
    static = {"head": head, "workspace_bytes": workspace_bytes, "sampler": sampler}
    return Sample(*as_tokens(choose(call, options.implementation), x, w, bias, tokens, **static))
