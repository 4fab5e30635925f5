"""The right answers in NumPy float64: the only oracle of the tests and of the benchmarks.

This module imports neither jax nor the package. float64 inputs are computed in long double, so the oracle is always
more precise than the results that it judges. Gradients are written as formulas; test_oracle.py compares them with
finite differences. bounds.py has the error that rounding may cause.
"""

from typing import Any

import numpy as np

F64 = np.dtype(np.float64)

# The operations on rows. The functions below have the same names.
FORWARD = ("softmax", "log_softmax", "logsumexp")
BACKWARD = ("softmax_grad", "log_softmax_grad")
OPERATIONS = FORWARD + BACKWARD


def wide(x):
    """Returns x in a more precise dtype: float64, or long double if x is float64."""
    x = np.asarray(x)
    return x.astype(np.longdouble if x.dtype == F64 else np.float64)


def unmasked(x, where):
    """Returns the mask `where` in the shape of x; without a mask, True everywhere."""
    return np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)


def row_max(x, kept, axis):
    """Returns the maximum of the kept elements of each row, or -inf if there are none; reduced axes have size 1."""
    return np.max(x, axis=axis, where=kept, initial=-np.inf, keepdims=True)


def row_sum(x, kept, axis):
    """Returns the sum of the kept elements of each row; reduced axes have size 1."""
    return np.sum(x, axis=axis, where=kept, keepdims=True)


def softmax(x, axis=-1, where=None):
    """Returns softmax: NaN for a row that is all -inf or has +inf or NaN, and 0 for a fully masked row."""
    x = wide(x)
    kept = unmasked(x, where)
    with np.errstate(all="ignore"):
        e = np.exp(x - row_max(x, kept, axis))
        return np.where(kept, e / row_sum(e, kept, axis), 0)


def log_softmax(x, axis=-1, where=None):
    """Returns the logarithm of softmax; it is -inf where masked."""
    x = wide(x)
    kept = unmasked(x, where)
    with np.errstate(all="ignore"):
        shifted = x - row_max(x, kept, axis)
        total = row_sum(np.exp(shifted), kept, axis)
        return np.where(kept, shifted - np.log(total), -np.inf)


def logsumexp(x, axis=None, where=None, keepdims=False):
    """Returns logsumexp: -inf for a row that is empty, fully masked or all -inf, +inf with +inf, and NaN with NaN."""
    x = wide(x)
    kept = unmasked(x, where)
    with np.errstate(all="ignore"):
        m = row_max(x, kept, axis)
        m = np.where(np.isfinite(m), m, 0)
        total = np.log(row_sum(np.exp(x - m), kept, axis)) + m
    return total if keepdims else np.squeeze(total, tuple(range(x.ndim)) if axis is None else axis)


def softmax_vjp(x, g, axis=-1, where=None):
    return softmax_grad(softmax(x, axis, where), g, where, axis)


def log_softmax_vjp(x, g, axis=-1, where=None):
    return log_softmax_grad(log_softmax(x, axis, where), g, where, axis)


def logsumexp_vjp(x, g, axis=-1, where=None):
    """Returns the gradient: NaN at a +inf, and 0 at numbers in its row. The reduced axes of g have size 1."""
    x, kept = wide(x), unmasked(x, where)
    beside = np.where(kept & (x == np.inf), np.nan, 0)
    return wide(g) * np.where(row_max(x, kept, axis) == np.inf, beside, softmax(x, axis, where))


def normalizer(x, where=None):
    """Returns m and d of the rows along the last axis: -inf and 0 if a row is all -inf or fully masked."""
    x, kept = wide(x), unmasked(x, where)
    m = row_max(x, kept, -1)
    with np.errstate(all="ignore"):
        return m, row_sum(np.exp(x - np.where(m == -np.inf, 0, m)), kept, -1)


def softmax_grad(y, dy, where=None, axis=-1):
    """Returns the gradient from the result y, which may be stored and rounded; it is 0 where masked."""
    y, kept = wide(y), unmasked(y, where)
    with np.errstate(all="ignore"):
        return np.where(kept, y * (wide(dy) - row_sum(y * wide(dy), kept, axis)), 0)


def log_softmax_grad(y, dy, where=None, axis=-1):
    """Returns the gradient from the result y, as `softmax_grad`; y is -inf where masked."""
    y, kept = wide(y), unmasked(y, where)
    with np.errstate(all="ignore"):
        return np.where(kept, wide(dy) - np.exp(y) * row_sum(wide(dy), kept, axis), 0)


def order_key(x):
    """Returns int64 keys in the total order +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN."""
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        return x.astype(np.int64)
    # One NaN per sign: payloads do not count.
    x = np.where(np.isnan(x), np.copysign(np.full_like(x, np.nan), x), x)
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1), bits)


def topk_indices(x, k, where=None):
    """Returns the int32 indices of the k best along the last axis, in descending total order.

    Equal values come in the order of their indices. Masked elements come last.
    """
    x = np.asarray(x)
    masked = ~unmasked(x, where)
    descending = ~order_key(x)  # ~ reverses without overflow
    if x.dtype.itemsize > 4 or x.shape[-1] > 2**30 or not 0 < k < x.shape[-1]:
        return np.lexsort((np.where(masked, 0, descending), masked), axis=-1)[..., :k].astype(np.int32)
    # The position makes all keys different, so the k best can be selected before they are sorted.
    keys = np.where(masked, 2**32, descending) * 2**30 + np.arange(x.shape[-1])
    best = np.sort(np.partition(keys, k - 1, axis=-1)[..., :k], axis=-1)
    return (best & (2**30 - 1)).astype(np.int32)


def top_k(x, k, where=None):
    """Returns the k best of each row, and their indices. Masked ones are -inf, the least integer, or False."""
    x, indices = np.asarray(x), topk_indices(x, k, where)
    lowest = False if x.dtype == bool else np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    kept = np.take_along_axis(unmasked(x, where), indices, -1)
    return np.where(kept, np.take_along_axis(x, indices, -1), np.array(lowest, x.dtype)), indices


def within(x, lengths, where=None):
    """Returns the mask without the elements of each row from its length on."""
    return unmasked(x, where) & (np.arange(x.shape[-1]) < np.asarray(lengths)[..., None])


def tempered(x, temperature):
    """Returns x / temperature in the dtype of `wide`. The temperature is a scalar, or one number per row."""
    x = np.asarray(x)
    t = np.asarray(temperature, np.longdouble if x.dtype == F64 else np.float64)
    return wide(x) / (t[..., None] if t.ndim else t)


def at_limit(x, where, temperature):
    """Returns x in the dtype of `wide`, and the temperatures; where one is 0, it is 1, and x below the largest is -inf.

    Their softmax is the limit of softmax(x / temperature).
    """
    x, kept = wide(x), unmasked(x, where)
    t = np.broadcast_to(np.asarray(temperature, x.dtype), x.shape[:-1])
    with np.errstate(invalid="ignore"):
        below = x < row_max(x, kept, -1)
    return np.where((t == 0)[..., None] & kept & below, -np.inf, x), np.where(t == 0, 1, t)


def fused_topk(x, k, where=None, temperature=1.0, log=False, functions=(softmax, log_softmax)):
    """Returns softmax(x / temperature) along the last axis at topk_indices(x), and these indices.

    `functions` are without and with a logarithm; bounds.py has others.
    """
    indices = topk_indices(x, k, where)
    row = functions[log](tempered(*at_limit(x, where, temperature)), -1, where)
    return np.take_along_axis(row, indices, -1), indices


def fused_topk_vjp(x, g, k, where=None, temperature=1.0, log=False):
    """Returns the gradients with respect to x and each row's temperature, for the cotangent g of the values."""
    g = np.where(np.broadcast_to(np.asarray(temperature) == 0, x.shape[:-1])[..., None], 0, g)
    z, t, dz = topk_pullback(x, g, k, where, temperature, log_softmax_vjp if log else softmax_vjp)
    with np.errstate(invalid="ignore"):
        dt = np.sum(np.where(dz == 0, 0, -dz * z / t), -1)
    return dz / t, dt


def topk_pullback(x, g, k, where, temperature, vjp):
    """Returns z = x / temperature, each row's temperature, with 1 for 0, and vjp(z, g at the k best of each row)."""
    temperature = np.where(np.asarray(temperature) == 0, 1, temperature)
    z = tempered(x, temperature)
    cotangents = np.zeros(z.shape, z.dtype)
    np.put_along_axis(cotangents, topk_indices(x, k, where), wide(g), -1)
    t = np.broadcast_to(np.asarray(temperature, z.dtype), z.shape[:-1])[..., None]
    return z, t, vjp(z, cotangents, -1, where)


def token_stats(x, labels, where=None, temperature: Any = 1.0):
    """Returns the log-probability of the label, the entropy, logsumexp and argmax of rows along the last axis.

    A label out of range has NaN.
    """
    x, is_limit = np.asarray(x), np.asarray(temperature) == 0
    x, temperature = at_limit(x, where, temperature)
    z = np.where(unmasked(x, where), tempered(x, temperature), -np.inf)
    labels, (log_p, p) = np.asarray(labels), _log_softmax_of_finite(z)
    inside = (labels >= 0) & (labels < x.shape[-1])
    at_label = np.take_along_axis(log_p, np.where(inside, labels, 0)[..., None], -1)[..., 0]
    entropy, lse, largest = -np.sum(_p_log_p(log_p, p), -1), logsumexp(z, -1), z.max(-1)
    with np.errstate(invalid="ignore"):
        lse = np.where(is_limit & (largest != 0), largest * np.inf, lse)
    return np.where(inside, at_label, np.nan), entropy, lse, z.argmax(-1)


def rank(x, labels, where=None):
    """Returns the places of the labels in topk_indices(x), from 1 on; 0 for a label out of range or masked."""
    x, labels = np.asarray(x), np.asarray(labels)
    inside = (labels >= 0) & (labels < x.shape[-1])
    label = np.where(inside, labels, 0)[..., None]
    place = np.argmax(topk_indices(x, x.shape[-1], where) == label, -1) + 1
    return np.where(inside & np.take_along_axis(unmasked(x, where), label, -1)[..., 0], place, 0)


def token_stats_vjp(x, labels, g, where=None, temperature: Any = 1.0):
    """Returns the gradients of x and each row's temperature. A result that is not finite has the cotangent 0."""
    is_limit = np.broadcast_to(np.asarray(temperature) == 0, x.shape[:-1])
    g, temperature = [np.where(is_limit, 0, a) for a in g], np.where(is_limit, 1, temperature)
    kept = unmasked(x, where)
    z = np.where(kept, tempered(x, temperature), -np.inf)
    t = np.broadcast_to(np.asarray(temperature, z.dtype), z.shape[:-1])[..., None]
    log_p, p = _log_softmax_of_finite(z)
    results = token_stats(x, labels, where, temperature)[:3]
    p, log_p = (np.where(np.isfinite(results[1])[..., None], a, 0) for a in (p, log_p))
    of_label, of_entropy, of_logsumexp = (
        np.where(np.isfinite(result), wide(a), 0)[..., None] for result, a in zip(results, g)
    )
    p_log_p = _p_log_p(log_p, p)
    dz = p * (of_logsumexp - of_label) - of_entropy * (p_log_p - p * np.sum(p_log_p, -1, keepdims=True))
    column = np.arange(z.shape[-1])
    dz = np.where(kept, dz + np.where(column == np.asarray(labels)[..., None], of_label, 0), 0)
    with np.errstate(invalid="ignore"):
        return dz / t, -np.sum(np.where(dz == 0, 0, dz * z / t), -1)


def divergence(z, u, beta):
    """Returns the divergence of a student from a teacher, with logits z and u, and its gradient in z, row by row.

    A term with a probability of 0 in front is 0. The gradient is of no use where the divergence is not finite.
    """
    with np.errstate(all="ignore"):
        log_q, log_p = log_softmax(z), log_softmax(u)
        log_m = np.logaddexp(np.log(wide(beta)) + log_p, np.log1p(-wide(beta)) + log_q)
        p, q = np.exp(log_p), np.exp(log_q)

        def kl(log_a, log_b):
            terms = np.where(log_b == -np.inf, np.inf, np.exp(log_a) * (log_a - log_b))
            return np.sum(np.where(log_a == -np.inf, 0, terms), -1)

        if beta == 0:
            return kl(log_p, log_q), q - p
        value = kl(log_q, log_p) if beta == 1 else beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
        # the derivative in q, up to a constant; the softmax projects it
        of_q = log_q - log_p if beta == 1 else (1 - beta) * (log_q - log_m)
        weighted = np.where(log_q == -np.inf, 0, q * of_q)
        return value, weighted - q * np.sum(weighted, -1, keepdims=True)


def _log_softmax_of_finite(z):
    """Returns log p and p, both NaN in rows with NaN or +inf, or with nothing but -inf."""
    with np.errstate(all="ignore"):
        log_p = z - z.max(-1, keepdims=True)
        log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
        return log_p, np.exp(log_p)


def _p_log_p(log_p, p):
    with np.errstate(invalid="ignore"):
        return np.where(p == 0, 0, p * log_p)


def sample_terms(x, where=None, temperature: Any = 1.0):
    """Returns (x - m) / temperature of rows along the last axis, and its exponential, the mass.

    Masked elements count as -inf. At temperature 0, others than the largest do so too.
    """
    kept = unmasked(x, where)
    x = np.where(kept, wide(x), -np.inf)
    t = np.broadcast_to(np.asarray(temperature, x.dtype), x.shape[:-1])[..., None]
    with np.errstate(all="ignore"):
        below = x - row_max(x, kept, -1)
        scaled = np.where((t == 0) & (below == 0), 0, below / t)
        return scaled, np.exp(scaled)


def sample_greedy(x, where=None, temperature: Any = 1.0):
    """Returns which rows keep the first best entry only: at temperature 0, or if x / temperature overflows."""
    with np.errstate(all="ignore"):
        top = row_max(np.where(unmasked(x, where), wide(x), -np.inf), unmasked(x, where), -1)[..., 0]
        largest = np.finfo(F64 if np.asarray(x).dtype == F64 else np.float32).max
        t = np.maximum(np.broadcast_to(np.asarray(temperature), top.shape), np.finfo(np.float32).tiny)
        return (np.asarray(temperature) == 0) | (np.isfinite(top) & (np.abs(top / t) > largest))


def sample_kept(
    x, where=None, temperature: Any = 1.0, top_k=None, top_p=None, min_p=None, lean: Any = 0.0, min_p_lean: Any = 0.0
):
    """Returns which entries of rows along the last axis the filters keep; at temperature 0 the first best one.

    `lean` is added to top_p's share of each row's mass. `min_p_lean`, in the shape of x, is a relative amount to add to
    min_p's threshold.
    """
    x = np.asarray(x)
    scaled, mass = sample_terms(x, where, temperature)
    allowed = np.sum(unmasked(x, where), -1)
    order = topk_indices(x, x.shape[-1], where)
    in_order = np.take_along_axis(mass, order, -1)
    before = np.cumsum(in_order, -1) - in_order
    place = np.arange(x.shape[-1])
    shape = x.shape[:-1]

    count = allowed if top_k is None else np.minimum(allowed, np.broadcast_to(top_k, shape))
    kept = place < count[..., None]
    if top_p is not None:
        share = np.broadcast_to(np.asarray(top_p, mass.dtype), shape)
        reached = share * np.sum(in_order, -1, where=kept) + lean
        kept &= (before < reached[..., None]) | (place == 0) | (share == 1)[..., None]
    if min_p is not None:
        least = np.broadcast_to(np.asarray(min_p, mass.dtype), shape)[..., None]
        kept &= in_order >= least * (1 + np.take_along_axis(np.broadcast_to(min_p_lean, x.shape), order, -1))
    kept &= ~sample_greedy(x, where, temperature)[..., None] | (place == 0)
    out = np.zeros(x.shape, bool)
    np.put_along_axis(out, order, kept, -1)
    return out


def sample_perturbed(x, noise, where=None, temperature: Any = 1.0):
    """Returns x / temperature + noise; the noise alone in greedy rows, which keep one entry."""
    greedy = sample_greedy(x, where, temperature)[..., None]
    with np.errstate(all="ignore"):
        return np.where(greedy, 0, np.asarray(tempered(x, temperature))) + noise
