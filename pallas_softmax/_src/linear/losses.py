"""The losses of a projection followed by a softmax, and their gradients, as formulas on a few numbers per row.

The logits of a token (a row of x) are, element by element,

    raw = x @ w + bias,     z = softcap * tanh(raw / softcap) / temperature

in float32 (float64 for float64 inputs). They are stored in bounded chunks. Only the `Statistics` of each row are kept.
The losses, and the coefficients of their gradients in the raw logits, are formulas on the statistics.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.masks import at, is_column
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.softmax.mesh import combine_shards
from pallas_softmax._src.temperatures import is_zero, times_power


@dataclasses.dataclass(frozen=True)
class Head:
    """The static arguments of a projection; hashable."""

    transpose_w: bool = False  # whether w is (V, D) instead of (D, V)
    softcap: float | None = None
    precision: Any = None  # of the matrix products, as `lax.dot_general` takes it
    columns: int | None = None  # only this many columns of w count, the first ones; None for all
    entropy: bool = False  # whether the statistics include `Moments` and the argmax
    # Whether `ChunkFunctions.logits` returns the logits before the temperature divides them. The normalizer that it
    # returns is always of the quotients.
    undivided: bool = False
    beta: float = 0.0  # of the divergence from a teacher (`divergence.py`)
    teacher: "Head | None" = None  # the teacher's projection

    def width(self, w: jax.Array) -> int:
        """Returns the number of columns of w, with those that do not count."""
        return w.shape[0 if self.transpose_w else 1]

    def vocab(self, w: jax.Array) -> int:
        """Returns V, the number of columns of w; if a mesh divides them, the columns of one device."""
        return self.width(w) if self.columns is None else self.columns


class Columns(NamedTuple):
    """The arrays of columns, except w. None leaves an array out."""

    bias: Any = None  # (V,)
    teacher_w: Any = None  # (D', V), or (V, D') for head.transpose_w
    teacher_bias: Any = None  # (V,)


_LEAST = float(np.float32(1e-37))  # a little less, so that it is accepted in float32 and in float64


def is_positive(a: Any) -> Any:
    """Returns which numbers are in the range of softcaps and positive temperatures."""
    return (a >= _LEAST) & (a <= 1e37)


def is_temperature(t: Any) -> Any:
    zero = is_zero(t) if isinstance(t, jax.Array) else t == 0  # a CPU would take subnormal numbers for 0
    return zero | is_positive(t)


# Divides the logits where the temperature is 0. A power of two keeps ties. Other logits are then so far below the
# largest one that their exponentials are 0, if the largest one is from 1e-15 to 1e14.
_COLD = 2.0**-80


class Tokens(NamedTuple):
    """The arguments of a loss that have one number per token, each of shape (rows,). None leaves a number out.

    `draw` has the noise, top_k, top_p and min_p of a draw, as `sample/xla.py` takes them: (rows, 1). The noise is
    (rows, 4), words that it is computed from (`sample/noise.py`); or (rows, V of all devices).
    """

    # int32 columns of the whole w; a number outside [0, V) is no column. (rows, K) for several labels
    labels: Any
    temperature: Any = None  # the divisor of the logits, applied after the softcap. 0 stands for the limit
    label_smoothing: Any = None  # the part of the target that is spread evenly over all columns
    z_loss: Any = None  # the weight of the squared logsumexp in the loss
    label_probs: Any = None  # (rows, K): a loss is the sum of the products with the losses of K labels
    kept: Any = None  # boolean, False for a token that is left out
    teacher_x: Any = None  # (rows, D')
    draw: tuple | None = None

    @property
    def several(self) -> bool:
        """Whether rows have several labels each. Batch dimensions must have become rows."""
        return self.labels.ndim == 2

    @property
    def divisor(self) -> Any:
        """The number that divides the logits of each row, above 0; None for 1."""
        return None if self.temperature is None else jnp.where(self.temperature == 0, _COLD, self.temperature)

    def divided(self, z: jax.Array) -> jax.Array:
        """Returns z times the rounded 1 / temperature, as kernels compute it; z is (rows,), or (rows, n)."""
        return z if self.temperature is None else z * like_labels((1 / self.divisor).astype(z.dtype), z)

    def at_0(self, limit: ArrayLike, value: jax.Array) -> jax.Array:
        """Returns `limit` where the temperature is 0, and `value` elsewhere."""
        if self.temperature is None:
            return value
        return jnp.where(like_labels(self.temperature == 0, value), limit, value)

    def zero_if_left_out(self, results: jax.Array) -> jax.Array:
        return results if self.kept is None else jnp.where(like_labels(self.kept, results), results, 0)


class Divergence(NamedTuple):
    """The numbers of a whole row in addition to its student's normalizer."""

    teacher: Normalizer  # of the teacher's logits
    value: jax.Array
    student: jax.Array  # the sum that the gradient needs: KL(q || m) for 0 < beta < 1, else the value


class Statistics(NamedTuple):
    """The numbers that are kept of each row's logits z: arrays (rows,), in the dtype of the arithmetic."""

    normalizer: Any  # `Normalizer`; `Moments` for `Head.entropy`
    label_logit: Any  # z at the label; 0 for a label outside [0, V). (rows, K) for several labels; None without labels
    total: jax.Array | None  # the sum of z over the row; None without label smoothing
    argmax: jax.Array | None = None  # int32, the first column of the largest z; None without `Head.entropy`
    divergence: Divergence | None = None  # None without `Head.teacher`

    def merged(self, mesh_axes: tuple[str, ...], vocab: int) -> "Statistics":
        """Returns the statistics of whole rows, merged from the `vocab` columns of each device of `mesh_axes`."""
        if not mesh_axes:
            return self
        several = self.label_logit.ndim > self.normalizer.m.ndim
        sums = [a for a in (None if several else self.label_logit, self.total) if a is not None]
        position = None if self.argmax is None else self.argmax + lax.axis_index(mesh_axes) * vocab
        # the others are in the order of `sums`, and then the position
        normalizer, *others = combine_shards(self.normalizer, mesh_axes, *sums, position=position)
        label_logit = lax.psum(self.label_logit, mesh_axes) if several else others.pop(0)
        total, argmax = (None if a is None else others.pop(0) for a in (self.total, self.argmax))
        return Statistics(normalizer, label_logit, total, argmax)


class Coefficients(NamedTuple):
    """Numbers of each row, (rows,) each, that give the gradient of sum(weights * losses) in the raw logits:

        ((exp_factor + entropy_factor * (z - m)) * exp(z - m) - label_term * [column == label] - constant)
            * (1 - tanh) * (1 + tanh)

    tanh = z * temperature / softcap; without a softcap, it is 0. At the label of a peaked row the first two
    terms cancel. So they must be subtracted in float32, and only the difference may be rounded to 16 bits. A row that
    is left out has m = inf, and 0 for the other numbers: its gradient is 0. `constant` is None without label smoothing,
    `entropy_factor` without an entropy. With several labels, `label_term` is (rows, K), and each term is subtracted.
    """

    m: jax.Array
    exp_factor: jax.Array
    label_term: jax.Array
    constant: jax.Array | None
    entropy_factor: jax.Array | None = None

    def of_exponential(self, z):
        """Returns the first term, for numbers that broadcast to the logits z."""
        if self.entropy_factor is None:
            return self.exp_factor * jnp.exp(z - self.m)
        below = normalizers.distance(z, self.m)
        return (self.exp_factor + self.entropy_factor * below) * jnp.exp(below)


def at_columns(z: jax.Array, columns: jax.Array, vocab: int) -> jax.Array:
    """Returns z (rows, V or more) at columns (rows,) or (rows, K), and 0 for a column outside [0, vocab)."""
    own = is_column(columns, vocab)
    index = jnp.where(own, columns, 0).reshape(z.shape[0], math.prod(columns.shape[1:]))
    found = at(z, index).reshape(columns.shape)
    return jnp.where(own, found, 0)


def logsumexp(statistics: Statistics, tokens: Tokens) -> jax.Array:
    m, d, *_ = statistics.normalizer
    limit = jnp.where(m > 0, jnp.inf, jnp.where(m < 0, -jnp.inf, jnp.log(d)))
    return tokens.at_0(limit, normalizers.log_of(statistics.normalizer))


def token_losses(function: str, statistics: Statistics, tokens: Tokens, vocab: int) -> jax.Array:
    """Returns the loss of each token, NaN for a label out of range; its logsumexp without labels or a teacher.

    With a logit of +inf, logsumexp and cross entropy are +inf. The loss of another public function is then NaN, so
    that its log-prob is NaN, as in `log_softmax`. The other arguments are as for `losses`.
    """
    if statistics.divergence is not None:
        return statistics.divergence.value
    if tokens.labels is None:
        return logsumexp(statistics, tokens)
    each = losses(statistics, tokens, vocab)
    valid = is_column(tokens.labels, vocab)
    if tokens.label_probs is not None:
        valid = jnp.all(valid | (tokens.label_probs == 0), -1)
    d = statistics.normalizer.d
    if function != "linear_cross_entropy":  # d is NaN with a logit of +inf
        valid = valid & like_labels(d == d, each)
    return jnp.where(valid, each, jnp.nan)


def weighted_sum(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(product(jnp.where(weights == 0, 0, losses), weights))


def losses(statistics: Statistics, tokens: Tokens, vocab: int) -> jax.Array:
    """Returns logsumexp(z) - z[label] of each row, with label smoothing, label_probs and z_loss.

    The statistics are of whole rows, and `vocab` is the number of columns of a whole row.
    """
    (m, d, *_), label_logit, total, *_ = statistics
    several = label_logit.ndim > m.ndim
    if several:
        m, d = m[..., None], d[..., None]
    finite = jnp.abs(m) < jnp.inf
    # log d is added last: in a peaked row, m - z[label] is exact and log d is small
    loss = jnp.where(finite, m - label_logit, normalizers.log_of(Normalizer(m, d)) - label_logit)
    loss = loss + jnp.where(finite, jnp.log(d), 0)
    loss = tokens.at_0(jnp.where(label_logit < m, jnp.inf, loss), loss)
    if total is not None:
        smooth = tokens.label_smoothing != 0
        limit = jnp.where(smooth & (d < vocab), jnp.inf, loss)
        loss = tokens.at_0(limit, loss + tokens.label_smoothing * (label_logit - total / vocab))
    if tokens.label_probs is not None:
        is_empty = jnp.all(tokens.label_probs == 0, -1)  # 0 times a logsumexp that is not finite is NaN
        loss = jnp.sum(tokens.label_probs * jnp.where(tokens.label_probs == 0, 0, loss), -1)
        loss = jnp.where(is_empty & ~(finite & (d < jnp.inf))[..., 0], jnp.nan, loss)
    if tokens.z_loss is not None:
        loss = loss + tokens.z_loss * jnp.where(tokens.z_loss == 0, 0, logsumexp(statistics, tokens)) ** 2
    return loss


def like_labels(per_token: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns an array with one element per token, with one more dimension if the labels have one."""
    return per_token if per_token.ndim == labels.ndim else per_token[..., None]


def product(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns values * weights. The derivatives of a product that is not finite are 0."""
    result = values * weights
    finite = jnp.isfinite(result)
    values, weights = (jnp.where(finite, a, 0) for a in (values, weights))
    return jnp.where(finite, values * weights, lax.stop_gradient(result))


def shares(weights: jax.Array) -> jax.Array:
    """Returns the weights divided by their sum; 0 if the sum is 0, NaN if it is not finite.

    A sum that overflows is computed from smaller weights, and a small sum from larger weights. One reduction computes
    all sums, so that devices exchange them at once.
    """
    large = 2.0 ** (jnp.finfo(weights.dtype).maxexp // 2)
    each = (weights / large, weights, jnp.where(jnp.abs(weights) < 1, times_power(weights, large**1.5), jnp.inf))
    counts = ~is_zero(weights)
    small_sum, given_sum, large_sum = jnp.sum(jnp.stack(each), range(1, weights.ndim + 1))
    is_small = (jnp.abs(given_sum) < 1 / large) & jnp.isfinite(large_sum)
    chosen = jnp.where(jnp.isfinite(given_sum), 1 + is_small.astype(jnp.int32), 0)
    total = lax.select_n(chosen, small_sum, given_sum, large_sum)
    usable = jnp.isfinite(total) & (total != 0)
    share = product(lax.select_n(chosen, *each), 1 / jnp.where(usable, total, 1))
    tiny = lax.stop_gradient(jnp.finfo(share.dtype).tiny - share)  # a share of 0 would leave the token out
    return jnp.where(usable, share + jnp.where(counts & (share == 0), tiny, 0), total - total)


def coefficients(statistics: Statistics, weights: jax.Array, tokens: Tokens, vocab: int) -> Coefficients:
    """Returns the coefficients of the gradient of sum(weights * losses), or of sum(weights * logsumexp) without labels.

    There is one weight per row, or (rows, K) for several labels without label_probs. With an entropy, (rows, 3): the
    weights of the losses, the entropies, and logsumexp. The gradient is 0 in a row with no other weight than 0, and at
    temperature 0.
    """
    m, d, *t = statistics.normalizer  # t only for `Head.entropy`
    weightless = tokens.at_0(True, is_weightless(weights))
    if tokens.temperature is not None:
        weights = weights / like_labels(tokens.divisor, weights)
    label_term, logsumexp_weight, constant, entropy_factor = weights, 1, None, None
    weight = weights if weights.ndim == 1 else jnp.sum(weights, 1)
    if t:
        # the gradient of an entropy is p * (t / d - (z - m))
        label_term, of_entropy, of_logsumexp = (weights[:, i] for i in range(3))
        weight, entropy_factor = label_term + of_logsumexp + of_entropy * (t[0] / d), -of_entropy / d
    if tokens.label_probs is not None:
        label_term, logsumexp_weight = weight[:, None] * tokens.label_probs, jnp.sum(tokens.label_probs, 1)
    if tokens.z_loss is not None:
        logsumexp_weight = logsumexp_weight + 2 * tokens.z_loss * normalizers.log_of(statistics.normalizer)
    exp_factor = weight * logsumexp_weight / d
    if tokens.label_smoothing is not None:
        label_term = weight * (1 - tokens.label_smoothing)
        constant = weight * tokens.label_smoothing / vocab
    numbers = exp_factor, label_term, constant, entropy_factor
    kept = jax.tree.map(lambda a: jnp.where(like_labels(weightless, a), 0, a), numbers)
    m = jnp.where(weightless, jnp.inf, normalizers.shift(m))  # with m = inf, exp(z - m) is 0
    return Coefficients(m, *kept)


def is_weightless(weights: jax.Array) -> jax.Array:
    return weights == 0 if weights.ndim == 1 else jnp.all(weights == 0, 1)


def times_softcap_slope(dz, z, tokens: Tokens, head: Head):
    """Returns dz times the derivative of the softcap at the logits z; 0 where z is -inf."""
    if head.softcap is None:
        return dz
    capped = z if tokens.temperature is None else z * like_labels(tokens.divisor, z)
    tanh = jnp.maximum(capped / head.softcap, -1)
    return dz * (1 - tanh) * (1 + tanh)


def gradient_at_label(label_logit, coefficients: Coefficients, tokens: Tokens, head: Head) -> jax.Array:
    """Returns the gradient in the raw logit at each label. Equal labels share it."""
    if tokens.several:
        terms = _sums_of_equal(tokens.labels, coefficients.label_term)
        coefficients = coefficients._replace(label_term=terms)
    of_row = jax.tree.map(lambda a: like_labels(a, label_logit), coefficients)
    # The logit is 0 for a label that is no column, and exp(0 - m) may be infinite.
    z = jnp.minimum(label_logit, of_row.m)
    gradient = of_row.of_exponential(z) - of_row.label_term
    gradient = gradient if of_row.constant is None else gradient - of_row.constant
    gradient = times_softcap_slope(gradient, z, tokens, head)
    return jnp.where(of_row.m == jnp.inf, 0, gradient)  # the logits of a row that is left out may be NaN


def _sums_of_equal(labels: jax.Array, terms: jax.Array) -> jax.Array:
    """Returns, for each label (rows, K), the sum of the terms of all equal labels of the row.

    A loop: XLA's GPU compiler did not end with sums over arrays of three large dimensions that are broadcast.
    """
    start = vary_together(jnp.zeros_like(terms), labels, terms)[0]

    def add(k, sums):
        label, term = (lax.dynamic_slice_in_dim(a, k, 1, 1) for a in (labels, terms))
        return sums + jnp.where(labels == label, term, 0)

    return lax.fori_loop(0, labels.shape[1], add, start)
