"""token_stats: what it promises, and how its gradient is wired."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import ArrayLike

from pallas_softmax_base._src import arguments
from pallas_softmax_base._src.arguments import AxisName
from pallas_softmax_base._src.dispatch.choose import ImplementationName
from pallas_softmax_base._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax_base._src.dispatch.eager import at_once
from pallas_softmax_base._src.masks import differentiable_if_finite
from pallas_softmax_base._src.stats.operation import TOKEN_STATS


class TokenStats(NamedTuple):
    """Statistics of p = softmax(logits / temperature), one number per row each.

    Attributes:
      log_probs: log p of the label; None without labels.
      entropy: -sum(p log p), in nats.
      logsumexp: logsumexp(logits / temperature).
      argmax: int32, the first position of the largest logit; of the first NaN, if there is one.
    """

    log_probs: jax.Array | None
    entropy: jax.Array
    logsumexp: jax.Array
    argmax: jax.Array


export.register_namedtuple_serialization(TokenStats, serialized_name="pallas_softmax_base.TokenStats")


def _known_numbers(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the temperature, None if it is 1, and the labels."""
    name, labels = "token_stats", given["labels"]
    t = arguments.known_temperature(name, given["temperature"], given["logits"])
    if arguments.is_known(t) and np.ndim(t) == 0 and np.asarray(t) == 1:
        t = None
    return {"temperature": t, "labels": None if labels is None else arguments.known_labels(name, labels)}


@at_once("axis", "axis_name", "implementation", known=_known_numbers)
def token_stats(
    logits: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    axis_name: AxisName = None,
    implementation: ImplementationName | None = None,
) -> TokenStats:
    """Returns the label's log-probability, the entropy, logsumexp and argmax of each row, from one read of the logits.

    The entropy takes one more sum than the normalizer of Milakov and Gimelshein (arXiv 1805.02867): `online.Moments`.

    Args:
      logits: real array of any shape with at least one dimension.
      labels: integers of the shape of `logits` without `axis`, 0 <= label < V: columns of the whole row; or None.
      axis: the axis of a row.
      where: boolean, broadcastable to `logits`. Masked positions are left out of the row.
      temperature: as for `fused_topk`: a positive scalar, or one per row.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that the row is spread over. Each device passes its equal
        shard of `logits` and `where`, in the order of `lax.axis_index`, and the same labels. The result is the same on
        all devices, and `argmax` counts columns of the whole row.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      TokenStats(log_probs, entropy, logsumexp, argmax), each of the shape of `logits` without `axis`. The first three
      are float32, or float64 for float64 logits, and differentiable in `logits` and `temperature`, in both modes and to
      any order. A logit of -inf adds 0 to the entropy. A row with NaN or +inf, or with nothing but -inf and masked
      positions, has NaN `entropy` and `log_probs`; its `logsumexp` is as in `logsumexp`. A label at a masked position
      has the log-probability -inf, and a label out of range has NaN. A result that is not finite has the derivative 0.

    Raises:
      TypeError: `logits` or `temperature` is not a real array, `labels` are not integers, `where` is not an array,
        `axis` is not an int, or `axis_name` is not a name.
      ValueError: `axis` is out of range; `labels`, `where` or `temperature` does not fit; `temperature` is not
        positive; `labels` or `temperature` differs along `axis_name`, or it is not bound; or `implementation` is
        unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    name = "token_stats"
    x, axis = arguments.real_rows(name, "logits", logits, axis)
    x = x.astype(jax.eval_shape(jnp.exp, x).dtype)
    scaled = temperature is not None
    t = arguments.row_temperature(name, temperature if scaled else 1.0, x.shape, axis, x.dtype)
    column = _labels(name, labels, x.shape, axis)
    per_row = [("temperature", t), ("labels", column)]
    call, arrays = arguments.last_axis(TOKEN_STATS, name, x, axis, where, axis_name, per_row)
    stats = evaluate(choose_all(call, implementation, scaled=scaled), *arrays)
    log_probs = stats.at_label - jnp.log(stats.moments.d)
    log_probs, entropy, logsumexp = (
        differentiable_if_finite(a)[..., 0] for a in (log_probs, stats.entropy, stats.logsumexp)
    )
    return TokenStats(None if labels is None else log_probs, entropy, logsumexp, stats.argmax[..., 0])


def _labels(name: str, labels, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the labels as int32, of shape batch + (1,); -1 without labels, and for labels that int32 cannot hold."""
    batch = shape[:axis] + shape[axis + 1 :]
    if labels is None:
        return jnp.full((*batch, 1), -1, jnp.int32)
    labels = arguments.array(name, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype.name}")
    if labels.shape != batch:
        raise ValueError(
            f"{name}: labels must have the shape of logits without axis {axis}, {batch}, got {labels.shape}"
        )
    if labels.dtype.itemsize >= 4:
        labels = jnp.where((labels >= 0) & (labels <= jnp.iinfo(jnp.int32).max), labels, -1)
    return labels.astype(jnp.int32)[..., None]
