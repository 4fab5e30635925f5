"""How far from the oracle's answers rounding may lead: the one set of bounds.

An error is counted in *units*. One unit is the effect of one relative rounding (the dtype's eps) in the argument
of the exponential and in the result, element by element:

* exp(x - m) with a relative error eps in (x - m) is off by eps * |x - m| of itself, hence the factor
  (1 + |x - m|) below;
* the sum is rescaled at every step of a row that ascends, and if it ascends evenly, always by the same factor, so that
  its roundings add up: hence the V / 2^21 below, of which UNITS are an eps for every eighth step of 2^16 elements;
* a logarithm of a sum has an absolute error of eps times what was added up to make it;
* a gradient g * p - p * sum(g * p) cancels, so its unit is taken from the sum of absolute values.

What lies below the smallest normal number may be flushed to zero, hence `slack`.
"""

from typing import Any

import numpy as np

from tests.support import oracle
from tests.support.oracle import BACKWARD, F64

F32 = np.dtype(np.float32)


def _distance(x, axis, where):
    """Returns 1 + |x - m| + V / 2^21, without |x - m| where that is not finite (the element is 0, or the row NaN)."""
    x = oracle.wide(x)
    with np.errstate(all="ignore"):
        m = oracle.row_max(x, oracle.unmasked(x, where), axis)
        d = np.abs(x - m)
    return 1 + np.where(np.isfinite(d), d, 0) + x.size / max(1, m.size) / 2**21


def softmax_unit(x, axis=-1, where=None):
    return oracle.softmax(x, axis, where) * _distance(x, axis, where)


def log_softmax_unit(x, axis=-1, where=None):
    """The unit has no |m| in it: log_softmax must not cancel when the whole row is shifted far from 0."""
    x, kept = oracle.wide(x), oracle.unmasked(x, where)
    with np.errstate(all="ignore"):
        d = np.abs(np.log(oracle.row_sum(np.exp(x - oracle.row_max(x, kept, axis)), kept, axis)))
    return _distance(x, axis, where) + np.where(np.isfinite(d), d, 0)


def logsumexp_unit(x, axis=None, where=None):
    return 1 + np.abs(oracle.logsumexp(x, axis, where))


def normalizer_unit(x, where=None):
    """The unit of d, each term of which has its own; m is exact."""
    x = oracle.wide(x)
    with np.errstate(all="ignore"):
        terms = np.exp(x - oracle.normalizer(x, where)[0]) * _distance(x, -1, where)
    return oracle.row_sum(terms, oracle.unmasked(x, where), -1)


def softmax_grad_unit(y, dy, where=None):
    """The unit is y times both sides of the subtraction, in absolute values."""
    y, dy, kept = np.abs(oracle.wide(y)), np.abs(oracle.wide(dy)), oracle.unmasked(y, where)
    with np.errstate(all="ignore"):
        return y * (dy + oracle.row_sum(y * dy, kept, -1))


def log_softmax_grad_unit(y, dy, where=None):
    """exp(y) is off by eps |y| of itself, and its product with the sum is subtracted from dy."""
    y, dy, kept = oracle.wide(y), np.abs(oracle.wide(dy)), oracle.unmasked(y, where)
    with np.errstate(all="ignore"):
        p = np.where(y == -np.inf, 0, np.exp(y) * (1 + np.abs(y)))
        return dy + p * oracle.row_sum(dy, kept, -1)


def softmax_vjp_unit(x, g, axis=-1, where=None):
    unit, kept, g = softmax_unit(x, axis, where), oracle.unmasked(x, where), np.abs(oracle.wide(g))
    return unit * (g + oracle.row_sum(g * unit, kept, axis))


def log_softmax_vjp_unit(x, g, axis=-1, where=None):
    """p comes from log p, so that its relative error is eps * |log p|."""
    p, kept, g = oracle.softmax(x, axis, where), oracle.unmasked(x, where), np.abs(oracle.wide(g))
    return g + p * log_softmax_unit(x, axis, where) * oracle.row_sum(g, kept, axis)


def logsumexp_vjp_unit(x, g, axis=-1, where=None):
    """The gradient is g * exp(x - m) / d, where each term of d has its own unit."""
    unit, kept = softmax_unit(x, axis, where), oracle.unmasked(x, where)
    return np.abs(oracle.wide(g)) * (unit + oracle.softmax(x, axis, where) * oracle.row_sum(unit, kept, axis))


def fused_topk_unit(x, k, where=None, temperature=1.0, log=False):
    unit = (log_softmax_unit if log else softmax_unit)(oracle.tempered(x, temperature), -1, where)
    return np.take_along_axis(unit, oracle.topk_indices(x, k, where), -1)


def fused_topk_vjp_unit(x, g, k, where=None, temperature=1.0, log=False):
    z = oracle.tempered(x, temperature)
    t = np.broadcast_to(np.asarray(temperature, z.dtype), z.shape[:-1])[..., None]
    of_row = np.zeros(z.shape, z.dtype)
    np.put_along_axis(of_row, oracle.topk_indices(x, k, where), np.abs(oracle.wide(g)), -1)
    dz = (log_softmax_vjp_unit if log else softmax_vjp_unit)(z, of_row, -1, where)
    # x_j enters the temperature's gradient relative to the row's mean, not to 0.
    return dz / t, np.sum(dz * _distance(z, -1, where), -1) / t[..., 0]


def stored_unit(want, unit, dtype):
    """The unit of what is computed in float32 and then stored in 16 bits.

    It is half a step of the stored dtype and four units of the float32 computation.
    """
    ratio = float(np.finfo(np.float32).eps) / eps(dtype)
    with np.errstate(invalid="ignore"):
        return np.abs(want) / 2 + 4 * ratio * unit


def eps(dtype):
    try:
        return float(np.finfo(dtype).eps)
    except ValueError:  # bfloat16, which NumPy does not know
        return 2.0**-7


def slack(dtype):
    """The absolute error that flushing to zero may cause.

    It is the smallest normal number of the dtype that is computed in, or half the smallest step of a float16 result.
    """
    if np.dtype(dtype) == np.float16:
        return 2.0**-25
    return float(np.finfo(F64 if np.dtype(dtype) == F64 else np.float32).tiny)


def error_units(got, want, unit, *, slack_times=1.0):
    """Returns the largest error of `got` in units of eps * unit; it is infinite where NaN or inf do not agree."""
    return float(units(got, want, unit, slack_times=slack_times).max(initial=0))


def units(got, want, unit, *, slack_times=1.0):
    """Returns the error of each element of `got`, as for `error_units`.

    `want` is rounded to the dtype of `got` before it is asked whether it is infinite.
    """
    got = np.asarray(got)
    with np.errstate(all="ignore"):
        rounded = np.asarray(want).astype(got.dtype)
        wide, want = oracle.wide(got), np.broadcast_to(want, got.shape)
        special = ~np.isfinite(oracle.wide(rounded))
        if got.shape != rounded.shape:
            raise AssertionError(f"shape {got.shape}, expected {rounded.shape}")
        agree = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        off = np.maximum(np.abs(wide - want) - slack_times * slack(got.dtype), 0)
        units = np.where(off == 0, 0, off / (eps(got.dtype) * unit))
    return np.where(special, np.where(agree, 0, np.inf), np.where(np.isfinite(wide), units, np.inf))


# --- What the kernels are held to ---------------------------------------------------------------------

# In float32, in units of eps. Half a unit each for x - m, its product with log2(e), the sum's reciprocal and
# the product with it, one or two for exp; the sum's chains are short (a lane adds V / 512) and its terms
# positive, so a relative error there stays of the order of a unit.
UNITS = 4.0


# One unit of each operation along the last axis, but for logsumexp.
UNIT = {
    "softmax": softmax_unit,
    "log_softmax": log_softmax_unit,
    "softmax_grad": softmax_grad_unit,
    "log_softmax_grad": log_softmax_grad_unit,
}


def expected(name, arrays, where=None):
    """Returns the result of a kernel on rows along the last axis, its unit, and how many slacks flushing may cost."""
    x = arrays[-1]
    if name == "logsumexp":  # the relative error of d is an absolute one of its logarithm
        with np.errstate(all="ignore"):
            of_d = np.nan_to_num(normalizer_unit(x, where) / oracle.normalizer(x, where)[1])
        return (
            oracle.logsumexp(x, -1, where, True),
            1 + np.abs(oracle.logsumexp(x, -1, where, True)) + of_d,
            1.0,
        )
    value, unit = getattr(oracle, name), UNIT[name]
    slack_times = 1.0
    if name in BACKWARD:
        y, x = arrays = arrays[0], np.where(oracle.unmasked(x, where), x, np.zeros_like(x))
        if x.dtype != np.float16:  # whose denormals are none in float32
            # a denormal y, or exp(y), may be flushed before it is scaled
            with np.errstate(invalid="ignore"):
                terms = np.abs(
                    oracle.wide(x) if name == "log_softmax_grad" else oracle.wide(y) * oracle.wide(x)
                )
            slack_times = np.nan_to_num(1 + np.abs(oracle.wide(x)) + np.sum(terms, -1, keepdims=True), nan=1)
    return value(*arrays, where=where), unit(*arrays, where=where), slack_times


def assert_close(got, want, unit, names, slack=1.0):
    """Asserts that each row is within UNITS in float32; a 16-bit result is that, rounded once.

    `slack` scales what flushing may cost; `names` are those of the rows.
    """
    got = np.asarray(got)
    limit = UNITS
    if got.dtype.itemsize == 2:
        unit, limit = stored_unit(want, unit, got.dtype), 1.0
    worst = units(got, want, unit, slack_times=slack).max(-1, initial=0).ravel()
    assert len(worst) == len(names)
    wrong = [f"{name}: {error} units" for name, error in zip(names, worst) if not error <= limit]
    assert not wrong, "; ".join(wrong)


def assert_operation(name, got, arrays, names, where=None):
    """Asserts that a kernel's result is that of the oracle on the same rows, which are called `names`."""
    got = np.asarray(got)
    assert got.dtype == arrays[-1].dtype
    want, unit, slack_times = expected(name, arrays, where)
    assert_close(got, want, unit, names, slack_times)


# --- Draws --------------------------------------------------------------------------------------------

# A sum of masses exp(s), s = (x - m) / T, is off by at most UNITS eps sum(exp(s) (1 + |s|)), as is the normalizer: so
# far a boundary of top_p or of the draw may lie from where it is. An answer may be that of any filter whose boundary
# is this far off; of such kept sets the smallest and the largest differ, but for their last entry, by twice as much, so
# that the draw from any of them is that of one of these two with a boundary three times as far off.


def assert_sample(got, x, u, names, where=None, temperature: Any = 1.0, **filters):
    """Asserts that each row's draw is that of the oracle, or one that rounding may lead to.

    Args:
      got: indices, log_probs and log_mass.
      x: (rows, V).
      u: the number in [0, 1) of each row.
      names: those of the rows.
      where, temperature, **filters: as for `oracle.sample`; top_p and min_p as they are in float32.
    """
    indices, log_probs, log_mass = map(np.asarray, got)
    assert indices.dtype == np.int32
    x, rows = np.asarray(x), np.arange(len(x))
    unit = eps(F64) if x.dtype == F64 else eps(np.float32)
    scaled, mass = oracle.sample_terms(x, where, temperature)
    total = np.sum(mass, -1)
    drawable = total >= 1
    with np.errstate(all="ignore"):
        distance = np.where(mass > 0, 1 + np.abs(scaled), 0)
        off = np.where(drawable, UNITS * unit * np.sum(mass * distance, -1), 0)
        kept = [
            oracle.sample_kept(
                x, where, temperature, **filters, lean=sign * off, min_p_lean=-sign * UNITS * unit * distance
            )
            for sign in (-1, 1)
        ]
        # differences below the smallest normal number may count as 0, which shows where the temperature is as small
        t = np.maximum(np.broadcast_to(np.asarray(temperature), total.shape), slack(F32))[..., None]
        flushed = np.log(np.sum(np.where(-scaled * t < 2 * slack(F32), 1, mass), -1) / total)
        right, close = np.zeros(len(x), bool), np.zeros(len(x), bool)
        for each in kept:
            of_set = np.where(each, mass, 0)
            ends, share = np.cumsum(of_set, -1), np.sum(of_set, -1)
            own = np.where(kept[1][rows, indices], mass[rows, indices], 0)
            start = ends[rows, indices] - of_set[rows, indices]
            at = np.asarray(u, mass.dtype) * share
            right |= (own > 0) & (start - 3 * off <= at) & (at < start + own + 3 * off)
            wanted = np.log(share / total)
            close |= (
                np.abs(log_mass - wanted) <= 4 * off / share + UNITS * unit * (1 + np.abs(wanted)) + flushed
            )
        greedy = np.broadcast_to(np.asarray(temperature) == 0, right.shape)
        right = np.where(greedy, indices == oracle.sample_drawn(mass, kept[1], u), right)
        probability = scaled[rows, indices] - np.log(total)
        error = UNITS * unit * (distance[rows, indices] + np.log(total)) + off / total + flushed
        close &= np.abs(log_probs - probability) <= error
    nothing = (indices == -1) & np.isnan(log_probs) & np.isnan(log_mass)
    good = np.where(drawable, (indices >= 0) & right & close, nothing)
    wrong = [
        f"{name}: {i}, {p}, {m}"
        for name, i, p, m, g in zip(names, indices, log_probs, log_mass, good)
        if not g
    ]
    assert not wrong, "; ".join(wrong)
