"""Error bounds: how far rounding may move a result from the oracle's answer.

Errors are counted in *units*. One unit is the effect of one relative rounding (the dtype's eps) in the argument
of the exponential and in the result, element by element:

* A relative error eps in (x - m) changes exp(x - m) by the relative error eps * |x - m|. This gives the factor
  (1 + |x - m|) below.
* The sum is rescaled at every step of an ascending row. If the row ascends evenly, every step rescales by the same
  factor, so the roundings add up. This gives the term V / 2^21 below: times UNITS, it allows one eps for every eighth
  step of 2^16 elements.
* The logarithm of a sum has an absolute error of eps times the terms that were added up.
* A gradient g * p - p * sum(g * p) cancels, so its unit is taken from the sum of absolute values.

Numbers below the smallest normal number may be flushed to zero, which `slack` allows for.
"""

from typing import Any

import numpy as np

from tests.support import oracle
from tests.support.oracle import BACKWARD, F64

F32 = np.dtype(np.float32)


def _distance(x, axis, where):
    """Returns 1 + |x - m| + V / 2^21. A |x - m| that is not finite counts as 0: the result is 0, or the row is NaN."""
    x = oracle.wide(x)
    with np.errstate(all="ignore"):
        m = oracle.row_max(x, oracle.unmasked(x, where), axis)
        d = np.abs(x - m)
    return 1 + np.where(np.isfinite(d), d, 0) + x.size / max(1, m.size) / 2**21


def softmax_unit(x, axis=-1, where=None):
    return oracle.softmax(x, axis, where) * _distance(x, axis, where)


def log_softmax_unit(x, axis=-1, where=None):
    """Returns a unit without |m|: log_softmax must not cancel if the whole row is far from 0."""
    x, kept = oracle.wide(x), oracle.unmasked(x, where)
    with np.errstate(all="ignore"):
        d = np.abs(np.log(oracle.row_sum(np.exp(x - oracle.row_max(x, kept, axis)), kept, axis)))
    return _distance(x, axis, where) + np.where(np.isfinite(d), d, 0)


def logsumexp_unit(x, axis=None, where=None):
    return 1 + np.abs(oracle.logsumexp(x, axis, where))


def normalizer_unit(x, where=None):
    """Returns the unit of d, the sum of the units of its terms; m is exact."""
    x = oracle.wide(x)
    with np.errstate(all="ignore"):
        terms = np.exp(x - oracle.normalizer(x, where)[0]) * _distance(x, -1, where)
    return oracle.row_sum(terms, oracle.unmasked(x, where), -1)


def softmax_grad_unit(y, dy, where=None, axis=-1):
    """Returns y times the absolute values of both sides of the subtraction."""
    y, dy, kept = np.abs(oracle.wide(y)), np.abs(oracle.wide(dy)), oracle.unmasked(y, where)
    with np.errstate(all="ignore"):
        return y * (dy + oracle.row_sum(y * dy, kept, axis))


def log_softmax_grad_unit(y, dy, where=None):
    """Returns the unit: exp(y) has the relative error eps |y|, and its product with the sum is subtracted from dy."""
    y, dy, kept = oracle.wide(y), np.abs(oracle.wide(dy)), oracle.unmasked(y, where)
    with np.errstate(all="ignore"):
        p = np.where(y == -np.inf, 0, np.exp(y) * (1 + np.abs(y)))
        return dy + p * oracle.row_sum(dy, kept, -1)


def softmax_vjp_unit(x, g, axis=-1, where=None):
    return softmax_grad_unit(softmax_unit(x, axis, where), g, where, axis)


def log_softmax_vjp_unit(x, g, axis=-1, where=None):
    """Returns the unit: p is the exponential of log p, so its relative error is eps * |log p|."""
    p, kept, g = oracle.softmax(x, axis, where), oracle.unmasked(x, where), np.abs(oracle.wide(g))
    return g + p * log_softmax_unit(x, axis, where) * oracle.row_sum(g, kept, axis)


def logsumexp_vjp_unit(x, g, axis=-1, where=None):
    """Returns the unit of g * exp(x - m) / d; each term of d has its own unit."""
    unit, kept = softmax_unit(x, axis, where), oracle.unmasked(x, where)
    return np.abs(oracle.wide(g)) * (unit + oracle.softmax(x, axis, where) * oracle.row_sum(unit, kept, axis))


def fused_topk_unit(x, k, where=None, temperature=1.0, log=False):
    return oracle.fused_topk(x, k, where, temperature, log, (softmax_unit, log_softmax_unit))[0]


def fused_topk_vjp_unit(x, g, k, where=None, temperature=1.0, log=False):
    of_row = log_softmax_vjp_unit if log else softmax_vjp_unit
    z, t, dz = oracle.topk_pullback(x, np.abs(g), k, where, temperature, of_row)
    # x_j enters the temperature's gradient relative to the row's mean, not to 0.
    return dz / t, np.sum(dz * _distance(z, -1, where), -1) / t[..., 0]


def stored_unit(want, unit, dtype):
    """Returns the unit of a stored 16-bit result: half a step, and four units of the float32 computation."""
    ratio = float(np.finfo(np.float32).eps) / eps(dtype)
    with np.errstate(invalid="ignore"):
        return np.abs(want) / 2 + 4 * ratio * unit


def eps(dtype):
    try:
        return float(np.finfo(dtype).eps)
    except ValueError:  # NumPy has no bfloat16
        return 2.0**-7


def slack(dtype):
    """Returns the absolute error that flushing to zero may cause.

    This is the smallest normal number of the dtype that computes, or half the smallest step of a float16 result.
    """
    if np.dtype(dtype) == np.float16:
        return 2.0**-25
    return float(np.finfo(F64 if np.dtype(dtype) == F64 else np.float32).tiny)


def error_units(got, want, unit, *, slack_times=1.0):
    """Returns the largest error of `got` in units of eps * unit; it is infinite if NaN or inf differ."""
    return float(units(got, want, unit, slack_times=slack_times).max(initial=0))


def units(got, want, unit, *, slack_times=1.0):
    """Returns the error of each element, as `error_units`; infinities are compared in the dtype of `got`."""
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


# --- Bounds of the kernels --------------------------------------------------------------------------

# The float32 bound in units of eps. x - m, its product with log2(e), the sum's reciprocal and the product with the
# reciprocal take half a unit each, and exp takes one or two. A lane adds only V / 512 terms of the sum, all positive,
# so the relative error of the sum stays near one unit.
UNITS = 4.0


# The unit of each operation along the last axis, except logsumexp.
UNIT = {
    "softmax": softmax_unit,
    "log_softmax": log_softmax_unit,
    "softmax_grad": softmax_grad_unit,
    "log_softmax_grad": log_softmax_grad_unit,
}


def expected(name, arrays, where=None):
    """Returns the expected result for rows along the last axis, its unit, and the number of slacks for flushing."""
    x = arrays[-1]
    if name == "logsumexp":  # a relative error of d is an absolute error of log d
        with np.errstate(all="ignore"):
            of_d = np.nan_to_num(normalizer_unit(x, where) / oracle.normalizer(x, where)[1])
        return (oracle.logsumexp(x, -1, where, True), 1 + np.abs(oracle.logsumexp(x, -1, where, True)) + of_d, 1.0)
    value, unit = getattr(oracle, name), UNIT[name]
    slack_times = 1.0
    if name in BACKWARD:
        y, x = arrays = arrays[0], np.where(oracle.unmasked(x, where), x, np.zeros_like(x))
        if x.dtype != np.float16:  # denormals of float16 are normal in float32
            # a denormal y or exp(y) may be flushed before it is scaled
            with np.errstate(invalid="ignore"):
                terms = np.abs(oracle.wide(x) if name == "log_softmax_grad" else oracle.wide(y) * oracle.wide(x))
            slack_times = np.nan_to_num(1 + np.abs(oracle.wide(x)) + np.sum(terms, -1, keepdims=True), nan=1)
    return value(*arrays, where=where), unit(*arrays, where=where), slack_times


def assert_close(got, want, unit, names=None, slack=1.0):
    """Asserts that each row is within UNITS in float32. A 16-bit result may be rounded once more."""
    got = np.asarray(got)
    limit = UNITS
    if got.dtype.itemsize == 2:
        unit, limit = stored_unit(want, unit, got.dtype), 1.0
    worst = units(got, want, unit, slack_times=slack).max(-1, initial=0).ravel()
    names = [f"row {i}" for i in range(len(worst))] if names is None else names
    wrong = [f"{name}: {error} units" for name, error in zip(names, worst, strict=True) if not error <= limit]
    assert not wrong, "; ".join(wrong)


def assert_operation(name, got, arrays, names=None, where=None):
    """Asserts that a kernel's result agrees with the oracle on the same rows, which are called `names`."""
    got = np.asarray(got)
    assert got.dtype == arrays[-1].dtype
    want, unit, slack_times = expected(name, arrays, where)
    assert_close(got, want, unit, names, slack_times)


# --- Draws --------------------------------------------------------------------------------------------

# Let s = (x - m) / T. A sum of masses exp(s), such as the normalizer, has an error of at most
# off = UNITS eps sum(exp(s) (1 + |s|)). A boundary of top_p may therefore move by `off`, and any kept set with such a
# boundary is right. It contains the smallest of these sets, and is contained in the largest one.


def assert_sample(got, x, noise, names, where=None, temperature: Any = 1.0, top_k=None, top_p=None, min_p=None):
    """Asserts that each row's draw has the largest sum of a kept entry and its noise, except for rounding.

    The logits and the noise are (rows, V). top_p and min_p are rounded to float32.
    """
    indices, log_probs, log_mass = map(np.asarray, got)
    assert indices.dtype == np.int32
    x, rows = np.asarray(x), np.arange(len(x))
    terms = _DrawTerms(x, where, temperature, top_k, top_p, min_p)
    with np.errstate(all="ignore"):
        perturbed = oracle.sample_perturbed(x, noise, where, temperature)
        best = np.max(np.where(terms.kept[0], perturbed, -np.inf), -1)
        rounding = UNITS * terms.unit * (1 + np.abs(perturbed[rows, indices]) + np.abs(noise[rows, indices]))
        right = terms.kept[1][rows, indices] & (perturbed[rows, indices] >= best - rounding)
        probability = terms.scaled[rows, indices] - np.log(terms.total)
        distance = terms.distance[rows, indices]
        right &= np.abs(log_probs - probability) <= terms.error_of_log(distance)
    nothing = (indices == -1) & np.isnan(log_probs) & np.isnan(log_mass)
    good = np.where(terms.drawable, (indices >= 0) & right & terms.is_share(log_mass), nothing)
    wrong = [f"{n}: {i}, {p}, {m}" for n, i, p, m, g in zip(names, indices, log_probs, log_mass, good) if not g]
    assert not wrong, "; ".join(wrong)


def assert_cutoff(got, x, names, where=None, temperature: Any = 1.0, top_k=None, top_p=None, min_p=None):
    """Asserts that each row's cutoff keeps what the oracle keeps, except for rounding."""
    key, index, top, log_total, log_mass = map(np.asarray, got)
    assert key.dtype == index.dtype == np.int32
    x = np.asarray(x)
    terms = _DrawTerms(x, where, temperature, top_k, top_p, min_p)
    order, allowed = oracle.order_key(x), oracle.unmasked(x, where) & (x > -np.inf)
    kept = (order > key[:, None]) | (order == key[:, None]) & (np.arange(x.shape[-1]) <= index[:, None])
    right = np.all((terms.kept[0] & allowed <= kept) & (kept & allowed <= terms.kept[1]), -1)
    with np.errstate(all="ignore"):
        right &= np.abs(log_total - np.log(terms.total)) <= terms.error_of_log(1)
        largest = np.max(np.where(oracle.unmasked(x, where), oracle.wide(x), -np.inf), -1)
        right &= np.abs(top - largest) <= slack(F32)  # a subnormal number may count as 0
    nothing = ~kept.any(-1) & np.isnan(log_total) & np.isnan(log_mass)
    nothing &= np.isnan(temperature) | np.where(largest == -np.inf, top == -np.inf, ~(top < np.inf))
    good = np.where(terms.drawable, right & terms.is_share(log_mass), nothing)
    wrong = [f"{n}: {r}" for n, r, g in zip(names, zip(key, index, top, log_total, log_mass), good) if not g]
    assert not wrong, "; ".join(wrong)


class _DrawTerms:
    """The limits of rounding in draws from rows: the smallest and the largest kept set, and errors of logarithms."""

    def __init__(self, x, where, temperature, *filters):
        self.unit = unit = eps(F64) if x.dtype == F64 else eps(np.float32)
        self.scaled, self.mass = oracle.sample_terms(x, where, temperature)
        self.total = np.sum(self.mass, -1)
        self.drawable = self.total >= 1
        with np.errstate(all="ignore"):
            self.distance = np.where(self.mass > 0, 1 + np.abs(self.scaled), 0)
            self.off = np.where(self.drawable, UNITS * unit * np.sum(self.mass * self.distance, -1), 0)
            lean = UNITS * unit * self.distance
            self.kept = [
                oracle.sample_kept(x, where, temperature, *filters, sign * self.off, -sign * lean) for sign in (-1, 1)
            ]
            # a difference below the smallest normal number may count as 0, which matters at temperatures as small
            t = np.maximum(np.broadcast_to(np.asarray(temperature), self.total.shape), slack(F32))[..., None]
            flushed = np.where(-self.scaled * t < 2 * slack(F32), 1, self.mass)
            self.flushed = np.log(np.sum(flushed, -1) / self.total)

    def error_of_log(self, distance):
        """Returns the error of a logit, which has this distance from 0, minus the logarithm of the total."""
        log_total = np.log(self.total)
        return UNITS * self.unit * (distance + log_total) + self.off / self.total + self.flushed

    def is_share(self, log_mass):
        """Returns whether these are the logarithms of the share of what is kept, in some kept set."""
        close = np.zeros(len(self.total), bool)
        with np.errstate(all="ignore"):
            for kept in self.kept:
                share = np.sum(np.where(kept, self.mass, 0), -1)
                wanted = np.log(share / self.total)
                error = 4 * self.off / share + UNITS * self.unit * (1 + np.abs(wanted)) + self.flushed
                close |= np.abs(log_mass - wanted) <= error
        return close
