"""linear_topk and linear_sample: indices chosen by the logits of a projection, chunk by chunk."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_softmax._src import arguments
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch import mesh
from pallas_softmax._src.dispatch.choose import ImplementationName, choose
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.operation import Choice, Operation
from pallas_softmax._src.dispatch.operation import describe as describe_rows
from pallas_softmax._src.dispatch.refusal import constant
from pallas_softmax._src.linear import checks, xla
from pallas_softmax._src.linear.checks import WORKSPACE_BYTES, Checked, Options
from pallas_softmax._src.linear.losses import Columns, Tokens
from pallas_softmax._src.linear.mesh import as_tokens, lay_out
from pallas_softmax._src.linear.operation import PROJECTION_SAMPLE
from pallas_softmax._src.linear.projection import Projection
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.api import Sample, checked_mode, parameters, typed_keys
from pallas_softmax._src.sample.operation import CUTOFF, SAMPLE
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
    tokens = checks.known_tokens(name, None, temperature=temperature)
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _topk_of(x, w, bias, where, tokens, k, log, options)


@at_once("k", "log", "options")
def _topk_of(x, w, bias, where, tokens: Tokens, k, log, options: Options) -> TopK:
    name = options.function
    given = checks.checked_projection(x, w, Columns(bias), options)
    k = arguments.winners(name, k, given.vocab)
    log = arguments.static_bool(name, "log", log)
    where = checks.kept_tokens(name, where, given)
    if tokens.temperature is None:
        tokens = tokens._replace(temperature=jnp.ones(given.batch, given.dtype))
    tokens = checks.checked_tokens(name, tokens, where, given)
    replicated = ("x", given.x), ("where", where), ("temperature", tokens.temperature)
    arguments.check_replicated(name, options.axis_name, replicated)
    topk = _choice_for_logits(TOPK, given, options, k)
    return TopK(*_run_on_constants(PROJECTION_TOPK, given, tokens, options, topk=topk, k=k, log=log))


def _projection_topk(x, w, columns: Columns, tokens: Tokens, *, topk: Choice, k, log: bool, **static) -> tuple:
    """Returns the values and indices of the winners of whole rows, (n, k), by the choice of top-k for the user's call.

    The tokens have a temperature, and no labels. The other arguments are as for `gradients.projection`.
    """
    layer, dtype = Projection(xla.FUNCTIONS, w, columns, **static), widen(x).dtype

    def winners(x, tokens: Tokens) -> tuple:
        z = xla.logits(x, w, columns.bias, Tokens(None), head=layer.head)
        arrays = z, None, tokens.temperature[:, None]
        return tuple(mesh.on_shard(topk, arrays, {"k": k, "log": log, "dtype": dtype}, layer.mesh_axes)[0])

    return layer.on_kept_rows(winners, x, tokens, dtype.itemsize)


PROJECTION_TOPK = Operation(name="projection_topk", plain=_projection_topk)


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
    (float64 for float64). They are not all stored at once. Without filters, a kernel may store none. With kernels,
    `log_probs` have the bits of `linear_log_probs(x, w, indices)` with the same temperature, bias and softcap, in any
    batch. So a sampler and its trainer agree. `linear_log_probs` takes temperatures from 1e-37 to 1e37, and 0.

    `where`, `bias`, `softcap`, `transpose_w`, `workspace_bytes` and `axis_name` are as for `linear_cross_entropy`. A
    token that is left out has index 0, and log_probs and log_mass of 0. Without a softcap, a bias of -inf masks a
    column.

    Args:
      key: one key, or an array of typed keys, one per token; as for `sample` of logits (..., V).
      x: (..., D), of float16, bfloat16, float32 or float64.
      w: (D, V), of the dtype of `x`.
      temperature: 0 or positive, a scalar or one per token. It divides the logits, after the softcap. 0 takes the
        largest logit.
      top_k: as for `sample`, a scalar or one per token; so are `top_p` and `min_p`.
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
    given = {"key": key, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= arguments.known_numbers(name, given | {"logits": x})
    options = checks.known_options(name, softcap, transpose_w, workspace_bytes, axis_name, implementation)
    return _sample_of(x=x, w=w, bias=bias, where=where, mode=mode, options=options, **given)


@at_once("mode", "options")
def _sample_of(key, x, w, bias, where, temperature, top_k, top_p, min_p, mode, options: Options) -> Sample:
    name = options.function
    given = checks.checked_projection(x, w, Columns(bias), options)
    shape, axis = (*given.batch, given.vocab), len(given.batch)
    where = checks.kept_tokens(name, where, given)
    numbers: dict = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    is_default = all(a is None for a in numbers.values())
    per_row = parameters(name, jax.ShapeDtypeStruct(shape, given.dtype), axis, **numbers)
    per_row = jax.tree.map(lambda a: jnp.broadcast_to(a, (*given.batch, 1)), per_row)
    t, *filters = per_row
    key = typed_keys(name, key, given.batch)
    mode = checked_mode(name, mode)
    has_words = noise.has_words(key, shape, given.dtype, mode)
    if has_words:
        of_key = jnp.concatenate(noise.words(key, shape, axis), -1)
    else:
        of_key = noise.gumbel_array(key, shape, axis, given.dtype, mode)
    # The temperature also says which tokens have a filter out of range: it is NaN there.
    tokens = Tokens(None, None if is_default else t[..., 0], kept=where, draw=(of_key, *filters))
    replicated = ("x", given.x), ("where", where), ("key", of_key), *zip(numbers, per_row)
    arguments.check_replicated(name, options.axis_name, replicated)
    sampler = _choice_for_logits(SAMPLE if has_words else CUTOFF, given, options)
    given = given._replace(head=dataclasses.replace(given.head, undivided=True))
    return Sample(*_run_on_constants(PROJECTION_SAMPLE, given, tokens, options, sampler=sampler))


def _choice_for_logits(operation: Operation, given: Checked, options: Options, k=None) -> Choice:
    """Returns the choice of an operation on this device's logits."""
    logits: Any = jax.ShapeDtypeStruct((*given.batch, given.head.vocab(given.w)), given.dtype)
    call = describe_rows(operation, logits, (len(given.batch),), None, given.mesh_axes, k, function=options.function)
    choice = choose(call, options.implementation)
    choice.required_cuda()
    return choice


def _run_on_constants(operation: Operation, given: Checked, tokens: Tokens, options: Options, **static):
    """Runs an operation of a projection on constants: to differentiate in them raises an error.

    Tokens that are left out have results of 0.
    """
    x, w, columns, head, workspace_bytes, mesh_axes, _ = given
    reason = (
        f"{options.function}: there is no gradient; wrap the arguments in jax.lax.stop_gradient, and pass the indices"
        " as labels to pallas_softmax.linear_log_probs, which has one"
    )
    *arrays, tokens = lay_out(constant((x, w, columns, tokens), reason), head, mesh_axes)
    choice = checks.chosen(operation, given, options)
    results = as_tokens(choice, *arrays, tokens, head=head, workspace_bytes=workspace_bytes, **static)
    return map(tokens.zero_if_left_out, results)
