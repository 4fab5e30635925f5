"""token_stats: what it promises, and how its gradient is wired."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_softmax._src import arguments, sort_keys
from pallas_softmax._src.arguments import AxisName
from pallas_softmax._src.dispatch.choose import ImplementationName
from pallas_softmax._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.masks import differentiable_if_finite
from pallas_softmax._src.normalizers import float_dtype, to_float
from pallas_softmax._src.stats.operation import RANKED_STATS, TOKEN_STATS
from pallas_softmax._src.stats.xla import RowStats
from pallas_softmax._src.temperatures import Temperature


class TokenStats(NamedTuple):
    """Statistics of p = softmax(logits / temperature), one number per row each.

    Attributes:
      log_probs: log p of the label; None without labels.
      entropy: -sum(p log p), in nats.
      logsumexp: logsumexp(logits / temperature).
      argmax: int32, the first position of the largest logit; of the first NaN, if there is one; 0 if all are -inf.
      rank: int32, 1 + the number of logits before the label's in the order of `lax.top_k`; None unless asked for.
    """

    log_probs: jax.Array | Any  # not `| None`: a caller who passes labels need not test for None
    entropy: jax.Array
    logsumexp: jax.Array
    argmax: jax.Array
    rank: jax.Array | Any = None


@at_once("axis", "rank", "axis_name", "implementation", known=arguments.known_numbers)
def token_stats(
    logits: "ArrayLike",
    labels: "ArrayLike | None" = None,
    *,
    axis: int = -1,
    where: "ArrayLike | None" = None,
    temperature: "ArrayLike" = 1.0,
    rank: bool = False,
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
      temperature: as for `fused_topk`: a scalar of at least 0, or one per row.
      rank: whether to return the rank of the label, which must be given.
      axis_name: as for `fused_topk`. All devices pass the same labels, and `argmax` counts columns of the whole row.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      TokenStats(log_probs, entropy, logsumexp, argmax, rank), each of the shape of `logits` without `axis`. The first
      three are float32, or float64 for float64 logits, and differentiable in `logits` and `temperature`, in both modes
      and to any order. A logit of -inf adds 0 to the entropy. A row with NaN or +inf, or with nothing but -inf and
      masked positions, has NaN `entropy` and `log_probs`; its `logsumexp` is as in `logsumexp`. A label at a masked
      position has the log-probability -inf, and a label out of range has NaN. A result that is not finite has the
      derivative 0.
      `rank` counts unmasked logits. Among equal ones, the lowest index comes first, and +0 is above -0. A label out of
      range, or at a masked position, has the rank 0. At temperature 0, `entropy` is the log of the number of tied
      largest logits, and `logsumexp` is +inf, -inf or this log, by the sign of the largest logit.

    Raises:
      TypeError, NotImplementedError: as `fused_topk`. TypeError also if `labels` are not integers, or `rank` is not a
        bool.
      ValueError: as `fused_topk`, or `labels` do not fit or differ along `axis_name`, or `rank` is asked for without
        `labels`.

    Examples:
      >>> stats = ps.token_stats(jnp.array([0.0, 1.0, 2.0]), labels=2)
      >>> stats.log_probs, stats.entropy, stats.argmax
      (Array(-0.408, dtype=float32), Array(0.832, dtype=float32), Array(2, dtype=int32))
    """
    name = "token_stats"
    x, axis = arguments.real_rows(name, "logits", logits, axis)
    floating = float_dtype(x.dtype)
    if not (is_wide := jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4):
        x = x.astype(floating)
    if (ranked := arguments.static_bool(name, "rank", rank)) and labels is None:
        raise ValueError(f"{name}: rank=True needs labels, got labels=None")
    t = arguments.row_temperature(name, temperature, x.shape, axis, floating)
    column = _labels(name, labels, x.shape, axis)
    per_row = [("temperature", t), ("labels", column)]
    operation = RANKED_STATS if ranked else TOKEN_STATS
    call, (x, *arrays) = arguments.last_axis(operation, name, x, axis, where, axis_name, per_row)
    call = dataclasses.replace(call, dtype=floating.name)
    run = functools.partial(evaluate, choose_all(call, implementation, scaled=temperature is not None))
    stats = _of_integers(run, x, *arrays, mesh_axes=call.mesh_axes) if is_wide else run(x, *arrays)
    log_probs = None if labels is None else stats.at_label - jnp.log(stats.moments.d)
    floats = log_probs, stats.entropy, stats.logsumexp
    log_probs, entropy, logsumexp = jax.tree.map(differentiable_if_finite, floats)
    return jax.tree.map(lambda a: a[..., 0], TokenStats(log_probs, entropy, logsumexp, stats.argmax, stats.rank))


def _of_integers(run: Callable[..., RowStats], x, where, temperature, labels, *, mesh_axes) -> RowStats:
    """Returns the `RowStats` of integers that floats may be unable to hold.

    Their distances from the largest have the same softmax, and floats in the same order have the same ranks.
    """
    distances = to_float(x, (-1,), where, mesh_axes)
    stats = run(distances, where, temperature, labels)
    top = jnp.max(x, -1, keepdims=True, where=where, initial=jnp.iinfo(x.dtype).min)
    top = lax.pmax(top, mesh_axes) if mesh_axes else top
    largest = Temperature.of(temperature).divide(top.astype(distances.dtype))
    stats = stats._replace(logsumexp=largest + stats.logsumexp)
    if stats.rank is None:
        return stats
    in_order = sort_keys.from_key(sort_keys.key(x), f"float{8 * x.dtype.itemsize}")
    return stats._replace(rank=run(in_order, where, temperature, labels).rank)


def _labels(name: str, labels, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the labels in int32, batch + (1,), and -1 without labels. No column is the int32 maximum."""
    batch = shape[:axis] + shape[axis + 1 :]
    if labels is None:
        return jnp.full((*batch, 1), -1, jnp.int32)
    of_shape = f"the shape of logits without axis {axis},"
    return arguments.integers(name, "labels", labels, batch, of_shape)[..., None]
