"""The right answers, in NumPy float64, and how far from them rounding may lead.

Imports neither jax nor the package. float64 inputs are computed in long double, so that the oracle is
always more precise than what it judges. Gradients are written as formulas; test_oracle.py holds them
against finite differences.

An error is counted in *units*. One unit is the effect of one relative rounding (the dtype's eps) in the
argument of the exponential and in the result, element by element:

* exp(x - m) with a relative error eps in (x - m) is off by eps * |x - m| of itself, hence the factor
  (1 + |x - m|) below;
* a logarithm of a sum has an absolute error of eps times what was added up to make it;
* a gradient g * p - p * sum(g * p) cancels, so its unit is taken from the sum of absolute values.

What lies below the smallest normal number may be flushed to zero, hence `slack`.
"""

import numpy as np

F64 = np.dtype(np.float64)


def _wide(x):
    x = np.asarray(x)
    return x.astype(np.longdouble if x.dtype == F64 else np.float64)


def _kept(x, where):
    return np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)


def _max(x, kept, axis):
    return np.max(x, axis=axis, where=kept, initial=-np.inf, keepdims=True)


def _sum(x, kept, axis):
    return np.sum(x, axis=axis, where=kept, keepdims=True)


def softmax(x, axis=-1, where=None):
    """A row that is all -inf is NaN, one with +inf or NaN is NaN, one fully masked is 0."""
    x = _wide(x)
    kept = _kept(x, where)
    with np.errstate(all="ignore"):
        e = np.exp(x - _max(x, kept, axis))
        return np.where(kept, e / _sum(e, kept, axis), 0)


def log_softmax(x, axis=-1, where=None):
    """As softmax; what is masked is -inf."""
    x = _wide(x)
    kept = _kept(x, where)
    with np.errstate(all="ignore"):
        shifted = x - _max(x, kept, axis)
        total = _sum(np.exp(shifted), kept, axis)
        return np.where(kept, shifted - np.log(total), -np.inf)


def logsumexp(x, axis=None, where=None, keepdims=False):
    """An empty, fully masked or all -inf row is -inf; +inf is +inf; NaN is NaN."""
    x = _wide(x)
    kept = _kept(x, where)
    with np.errstate(all="ignore"):
        m = _max(x, kept, axis)
        m = np.where(np.isfinite(m), m, 0)
        total = np.log(_sum(np.exp(x - m), kept, axis)) + m
    return total if keepdims else np.squeeze(total, _squeezed(x, axis))


def _squeezed(x, axis):
    return tuple(range(x.ndim)) if axis is None else axis


def softmax_vjp(x, g, axis=-1, where=None):
    p, kept, g = softmax(x, axis, where), _kept(x, where), _wide(g)
    return np.where(kept, p * (g - _sum(g * p, kept, axis)), 0)


def log_softmax_vjp(x, g, axis=-1, where=None):
    p, kept, g = softmax(x, axis, where), _kept(x, where), _wide(g)
    return np.where(kept, g - p * _sum(g, kept, axis), 0)


def logsumexp_vjp(x, g, axis=-1, where=None):
    """g has the kept dimensions, so that it broadcasts against x. A +inf is NaN, the numbers beside it 0."""
    x, kept = _wide(x), _kept(x, where)
    beside = np.where(kept & (x == np.inf), np.nan, 0)
    return _wide(g) * np.where(_max(x, kept, axis) == np.inf, beside, softmax(x, axis, where))


def normalizer(x, where=None):
    """m and d of the rows, along the last axis: of -inf, or of nothing, they are -inf and 0."""
    x, kept = _wide(x), _kept(x, where)
    m = _max(x, kept, -1)
    with np.errstate(all="ignore"):
        return m, _sum(np.exp(x - np.where(m == -np.inf, 0, m)), kept, -1)


def softmax_grad(y, dy, where=None):
    """The backward along the last axis by y as it was stored, rounded: 0 where masked."""
    y, kept = _wide(y), _kept(y, where)
    with np.errstate(all="ignore"):
        return np.where(kept, y * (_wide(dy) - _sum(y * _wide(dy), kept, -1)), 0)


def log_softmax_grad(y, dy, where=None):
    """As softmax_grad; y is -inf where masked."""
    y, kept = _wide(y), _kept(y, where)
    with np.errstate(all="ignore"):
        return np.where(kept, _wide(dy) - np.exp(y) * _sum(_wide(dy), kept, -1), 0)


def order_key(x):
    """int64 that sort as the total order +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN."""
    x = np.asarray(x)
    if x.dtype.kind in "biu":
        return x.astype(np.int64)
    # One NaN per sign: payloads do not order.
    x = np.where(np.isnan(x), np.copysign(np.full_like(x, np.nan), x), x)
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    return np.where(bits < 0, bits ^ np.int64(2 ** (8 * x.dtype.itemsize - 1) - 1), bits)


def topk_indices(x, k, where=None):
    """Along the last axis, descending; equal values by the lowest index; masked ones come last."""
    x = np.asarray(x)
    masked = ~_kept(x, where)
    descending = np.where(masked, 0, ~order_key(x))  # ~ reverses without overflow
    return np.lexsort((descending, masked), axis=-1)[..., :k].astype(np.int32)


def _tempered(x, temperature):
    x = np.asarray(x)
    t = np.asarray(temperature, np.longdouble if x.dtype == F64 else np.float64)
    return _wide(x) / (t[..., None] if t.ndim else t)


def fused_topk(x, k, where=None, temperature=1.0, log=False):
    """Along the last axis: the values of softmax(x / temperature) at topk_indices(x)."""
    indices = topk_indices(x, k, where)
    row = (log_softmax if log else softmax)(_tempered(x, temperature), -1, where)
    return np.take_along_axis(row, indices, -1), indices


def fused_topk_vjp(x, g, k, where=None, temperature=1.0, log=False):
    """The gradients by x and by the temperature (one per row) for the cotangent g of the values."""
    z = _tempered(x, temperature)
    t = np.broadcast_to(np.asarray(temperature, z.dtype), z.shape[:-1])[..., None]
    spread = np.zeros(z.shape, z.dtype)
    np.put_along_axis(spread, topk_indices(x, k, where), _wide(g), -1)
    dz = (log_softmax_vjp if log else softmax_vjp)(z, spread, -1, where)
    with np.errstate(invalid="ignore"):
        dt = np.sum(np.where(dz == 0, 0, -dz * z / t), -1)
    return dz / t, dt


# --- How large one unit of error is -------------------------------------------------------------------


def _distance(x, axis, where):
    """1 + |x - m|, 1 where that is not finite (the element is then 0, or the whole row NaN)."""
    x = _wide(x)
    with np.errstate(all="ignore"):
        d = 1 + np.abs(x - _max(x, _kept(x, where), axis))
    return np.where(np.isfinite(d), d, 1)


def softmax_unit(x, axis=-1, where=None):
    return softmax(x, axis, where) * _distance(x, axis, where)


def log_softmax_unit(x, axis=-1, where=None):
    """No |m| in it: log_softmax must not cancel when the whole row is shifted far from 0."""
    x, kept = _wide(x), _kept(x, where)
    with np.errstate(all="ignore"):
        d = np.abs(np.log(_sum(np.exp(x - _max(x, kept, axis)), kept, axis)))
    return _distance(x, axis, where) + np.where(np.isfinite(d), d, 0)


def logsumexp_unit(x, axis=None, where=None):
    return 1 + np.abs(logsumexp(x, axis, where))


def normalizer_unit(x, where=None):
    """Of d; m is exact. Each term of d has its own."""
    x = _wide(x)
    with np.errstate(all="ignore"):
        terms = np.exp(x - normalizer(x, where)[0]) * _distance(x, -1, where)
    return _sum(terms, _kept(x, where), -1)


def softmax_grad_unit(y, dy, where=None):
    """y times what is subtracted from what, in absolute values."""
    y, dy, kept = np.abs(_wide(y)), np.abs(_wide(dy)), _kept(y, where)
    with np.errstate(all="ignore"):
        return y * (dy + _sum(y * dy, kept, -1))


def log_softmax_grad_unit(y, dy, where=None):
    """exp(y) is off by eps |y| of itself, its product with the sum is subtracted from dy."""
    y, dy, kept = _wide(y), np.abs(_wide(dy)), _kept(y, where)
    with np.errstate(all="ignore"):
        p = np.where(y == -np.inf, 0, np.exp(y) * (1 + np.abs(y)))
        return dy + p * _sum(dy, kept, -1)


def softmax_vjp_unit(x, g, axis=-1, where=None):
    unit, kept, g = softmax_unit(x, axis, where), _kept(x, where), np.abs(_wide(g))
    return unit * (g + _sum(g * unit, kept, axis))


def log_softmax_vjp_unit(x, g, axis=-1, where=None):
    """p comes from log p, so that its relative error is eps * |log p|."""
    p, kept, g = softmax(x, axis, where), _kept(x, where), np.abs(_wide(g))
    return g + p * log_softmax_unit(x, axis, where) * _sum(g, kept, axis)


def logsumexp_vjp_unit(x, g, axis=-1, where=None):
    """By exp(x - m) / d; each term of d has its own unit."""
    unit, kept = softmax_unit(x, axis, where), _kept(x, where)
    return np.abs(_wide(g)) * (unit + softmax(x, axis, where) * _sum(unit, kept, axis))


def fused_topk_unit(x, k, where=None, temperature=1.0, log=False):
    unit = (log_softmax_unit if log else softmax_unit)(_tempered(x, temperature), -1, where)
    return np.take_along_axis(unit, topk_indices(x, k, where), -1)


def fused_topk_vjp_unit(x, g, k, where=None, temperature=1.0, log=False):
    z = _tempered(x, temperature)
    t = np.broadcast_to(np.asarray(temperature, z.dtype), z.shape[:-1])[..., None]
    spread = np.zeros(z.shape, z.dtype)
    np.put_along_axis(spread, topk_indices(x, k, where), np.abs(_wide(g)), -1)
    dz = (log_softmax_vjp_unit if log else softmax_vjp_unit)(z, spread, -1, where)
    # x_j enters the temperature's gradient relative to the row's mean, not to 0.
    return dz / t, np.sum(dz * _distance(z, -1, where), -1) / t[..., 0]


def stored_unit(want, unit, dtype):
    """For what is computed in float32 and then stored in 16 bits: half a step of the stored dtype and
    four units of the float32 computation."""
    ratio = float(np.finfo(np.float32).eps) / eps(dtype)
    with np.errstate(invalid="ignore"):
        return np.abs(want) / 2 + 4 * ratio * unit


def eps(dtype):
    try:
        return float(np.finfo(dtype).eps)
    except ValueError:  # bfloat16, which NumPy does not know
        return 2.0**-7


def slack(dtype):
    """What may be lost by flushing: the smallest normal of the dtype it is computed in, or half the
    smallest step of a 16-bit result."""
    if np.dtype(dtype) == np.float16:
        return 2.0**-25
    return float(np.finfo(F64 if np.dtype(dtype) == F64 else np.float32).tiny)


def error_units(got, want, unit, *, slack_times=1.0):
    """The largest error of `got` in units of eps * unit; infinite where NaN or inf do not agree."""
    return float(units(got, want, unit, slack_times=slack_times).max(initial=0))


def units(got, want, unit, *, slack_times=1.0):
    """The error of each element of `got`, as for `error_units`.

    `want` is rounded to the dtype of `got` before it is asked whether it is infinite.
    """
    got = np.asarray(got)
    with np.errstate(all="ignore"):
        rounded = np.asarray(want).astype(got.dtype)
        wide, want = _wide(got), np.broadcast_to(want, got.shape)
        special = ~np.isfinite(_wide(rounded))
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

FORWARD = ("softmax", "log_softmax", "logsumexp")
BACKWARD = ("softmax_grad", "log_softmax_grad")
OPERATIONS = FORWARD + BACKWARD


def expected(name, arrays, where=None):
    """The result of a kernel on rows, along the last axis; its unit; and how many slacks flushing may cost."""
    x = arrays[-1]
    if name == "logsumexp":  # the relative error of d is an absolute one of its logarithm
        with np.errstate(all="ignore"):
            of_d = np.nan_to_num(normalizer_unit(x, where) / normalizer(x, where)[1])
        return logsumexp(x, -1, where, True), 1 + np.abs(logsumexp(x, -1, where, True)) + of_d, 1.0
    value, unit = {
        "softmax": (softmax, softmax_unit),
        "log_softmax": (log_softmax, log_softmax_unit),
        "softmax_grad": (softmax_grad, softmax_grad_unit),
        "log_softmax_grad": (log_softmax_grad, log_softmax_grad_unit),
    }[name]
    slack_times = 1.0
    if name in BACKWARD:
        y, x = arrays = arrays[0], np.where(_kept(x, where), x, np.zeros_like(x))
        if x.dtype != np.float16:  # whose denormals are none in float32
            # a denormal y, or exp(y), may be flushed before it is scaled
            with np.errstate(invalid="ignore"):
                terms = np.abs(_wide(x) if name == "log_softmax_grad" else _wide(y) * _wide(x))
            slack_times = np.nan_to_num(1 + np.abs(_wide(x)) + np.sum(terms, -1, keepdims=True), nan=1)
    return value(*arrays, where=where), unit(*arrays, where=where), slack_times


def assert_close(got, want, unit, names, slack=1.0):
    """Within UNITS in float32; a 16-bit result is that, rounded once. `slack` scales what flushing may cost."""
    got = np.asarray(got)
    limit = UNITS
    if got.dtype.itemsize == 2:
        unit, limit = stored_unit(want, unit, got.dtype), 1.0
    worst = units(got, want, unit, slack_times=slack).max(-1, initial=0).ravel()
    assert len(worst) == len(names)
    wrong = [f"{name}: {error} units" for name, error in zip(names, worst) if not error <= limit]
    assert not wrong, "; ".join(wrong)


def assert_operation(name, got, arrays, names, where=None):
    """The kernel's result is that of the oracle on the same rows; `names` are the rows'."""
    got = np.asarray(got)
    assert got.dtype == arrays[-1].dtype
    want, unit, slack_times = expected(name, arrays, where)
    assert_close(got, want, unit, names, slack_times)
