"""The correct result of a contender, by the project's float64 oracle, and the largest error that it may have."""

import dataclasses
import functools

import numpy as np

from tests.support import bounds, oracle


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one contender's result."""

    ok: bool
    rows: int  # how many rows were checked
    error_eps: float  # the largest relative error, in units of the dtype's eps
    error_share: float  # the largest error as a share of its bound
    detail: str = ""  # what is wrong


def all_of(checks: list[Check]) -> Check:
    return Check(
        ok=all(check.ok for check in checks),
        rows=checks[0].rows,
        error_eps=max(check.error_eps for check in checks),
        error_share=max(check.error_share for check in checks),
        detail=", ".join(check.detail for check in checks if check.detail),
    )


def _least(dtype: np.dtype) -> float:
    """Returns the smallest error that counts: a subnormal step for float16, float32's tiny for other dtypes.

    Hardware may flush float32 subnormals to zero. bfloat16 has the same exponent range as float32.
    """
    return 2.0**-24 if dtype == np.float16 else float(np.finfo(np.float32).tiny)


def ulp(size: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the spacing of the dtype's numbers at |size|, and at least the smallest error that counts."""
    least = _least(dtype)
    exponent = np.frexp(np.maximum(np.abs(size), least))[1] - 1
    return np.maximum(np.ldexp(bounds.eps(dtype), exponent), least)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The correct result, the largest error it may have, and the scale of relative errors."""

    want: np.ndarray
    bound: np.ndarray
    scale: np.ndarray
    dtype: np.dtype

    def _errors(self, got: np.ndarray, per: np.ndarray) -> np.ndarray:
        """Returns the errors as multiples of `per`. A misplaced NaN or inf is an infinite error."""
        got = got.astype(self.dtype)  # torch's 16-bit results arrive as float32
        return bounds.units(got, self.want, per / bounds.eps(self.dtype), slack_times=0)

    def ulps(self, got: np.ndarray) -> float:
        """Returns the largest error, in ulps of the dtype at `scale`."""
        scale = np.where(np.isfinite(self.want), self.scale, 0)
        return float(np.max(self._errors(got, ulp(scale, self.dtype))))

    def check(self, name: str, got: np.ndarray) -> Check:
        """Compares `got` with `want`. The verdict has the error in units of the dtype's eps at `scale`."""
        rows = len(self.want)
        if got.shape != self.want.shape:
            return Check(False, rows, np.inf, np.inf, f"{name} of shape {got.shape}, not {self.want.shape}")
        share = float(np.max(self._errors(got, self.bound)))
        eps = bounds.eps(self.dtype) * self.scale + _least(self.dtype)
        detail = ""
        if not share <= 1:
            far = f"{share:#.3g}x its bound" if np.isfinite(share) else "has a NaN or an inf out of place"
            detail = f"{name} {far}"
        return Check(share <= 1, rows, float(np.max(self._errors(got, eps))), share, detail)

    def at(self, indices: np.ndarray) -> "Expected":

        def taken(a: np.ndarray) -> np.ndarray:
            return np.take_along_axis(a, indices, axis=-1)

        return Expected(taken(self.want), taken(self.bound), taken(self.scale), self.dtype)


def _bound(
    want: np.ndarray, unit: np.ndarray, slack_times: np.ndarray | float, dtype: np.dtype
) -> np.ndarray:
    """Returns the largest error that the project allows: the tests' bounds, as absolute numbers.

    The bound allows for the rounding units of the float32 computation, for the rounding of a 16-bit result, and for
    flushed subnormals.
    """
    units = bounds.UNITS * unit
    if dtype.itemsize == 2:
        units = bounds.stored_unit(want, unit, dtype)
    return bounds.eps(dtype) * units + slack_times * bounds.slack(dtype)


class Answer:
    """The float64 answer for some rows of a case: y and dx of a function of cases.py.

    The gradients, with p = softmax(x):

    softmax      dx = p (dy - sum(p dy))
    log_softmax  dx = dy - p sum(dy)
    logsumexp    dx = p dy
    token_stats  dx = p (g_lse - g_lp - g_H (log p + H)), plus g_lp at the label
    top-k        the gradient of softmax, with dy = 0 except at the winners

    A masked x counts as -inf. There softmax is 0, log_softmax is -inf and dx is 0. If all of a row is masked,
    logsumexp is -inf.

    All contenders must meet the bounds of the tests, extended in two ways, because the benchmarks check many
    contenders and millions of elements. First, the denominator d may be off by the units of its terms. Second, a
    gradient starts from a stored y, which may be off by its bound. In 16-bit dtypes this is the larger part. The
    error of y enters p, and through p the product and the sum.

    Reported errors are relative:

    y of log_softmax  to max(|y|, 1): for d near 1, rounding d = 1 + ... loses digits of -log d
    any other y       to |y|
    dx                to the size of its terms, because they may cancel: p (|dy| + sum(p |dy|)) for softmax and
                      top-k, |dy| + p sum(|dy|) for log_softmax, p |dy| for logsumexp
    """

    def __init__(
        self,
        x: np.ndarray,
        cotangent: np.ndarray | None,
        function: str = "softmax",
        k: int | None = None,
        mask: np.ndarray | None = None,
    ):
        self.x, self.dy, self.function, self.mask = x, cotangent, function, mask
        self.indices = None if k is None else oracle.topk_indices(x, k)

    @functools.cached_property
    def output(self) -> Expected:
        """The expected y of whole rows."""
        if self.function == "token_stats":
            return self._statistics()
        want, unit, slack_times = bounds.expected(self.function, (self.x,), self.mask)
        if self.function != "logsumexp":  # its unit already includes the error of d
            with np.errstate(all="ignore"):
                of_d = bounds.normalizer_unit(self.x, self.mask) / oracle.normalizer(self.x, self.mask)[1]
            unit = unit + np.nan_to_num(of_d) * (want if self.function == "softmax" else 1)
        with np.errstate(invalid="ignore"):
            bound = _bound(want, unit, slack_times, self.x.dtype)
        scale = np.maximum(np.abs(want), 1 if self.function == "log_softmax" else 0)
        if self.function == "logsumexp":
            want, bound, scale = want[:, 0], bound[:, 0], scale[:, 0]
        return Expected(want, bound, scale, self.x.dtype)

    def _statistics(self) -> Expected:
        """Returns log p of label 0, the entropy, logsumexp and the argmax of each row, in float32."""
        x = oracle.wide(self.x) if self.mask is None else np.where(self.mask, oracle.wide(self.x), -np.inf)
        logsumexp = oracle.logsumexp(self.x, -1, self.mask)
        with np.errstate(all="ignore"):
            log_p = x - np.where(np.isfinite(logsumexp), logsumexp, np.nan)[:, None]
            entropy = -np.sum(np.where(log_p == -np.inf, 0, np.exp(log_p) * log_p), -1)
        want = np.stack([log_p[:, 0], entropy, logsumexp, np.argmax(x, -1)], -1)
        scale = np.maximum(np.abs(np.nan_to_num(want, posinf=0, neginf=0)), 1)
        scale[:, 1] = 1
        bound = bounds.eps(np.dtype("float32")) * 4 * (1 + np.log(x.shape[1])) * scale * [1, 1, 1, 0]
        return Expected(want, bound + _least(self.x.dtype), scale, np.dtype("float32"))

    @functools.cached_property
    def gradient(self) -> Expected:
        """The expected dx. For top-k the winners are the stable order's."""
        return self._gradient(self.indices)

    def _gradient(self, indices: np.ndarray | None) -> Expected:
        assert self.dy is not None, "a gradient needs a cotangent"
        x, mask, dtype = self.x, self.mask, self.x.dtype
        if self.function == "token_stats":
            return self._gradient_of_statistics()
        dy = self.dy.astype(dtype)
        p = oracle.softmax(x, -1, mask)
        if self.function == "logsumexp":
            dy = dy[:, None]
            want, unit = oracle.logsumexp_vjp(x, dy, -1, mask), bounds.logsumexp_vjp_unit(x, dy, -1, mask)
            size = np.abs(dy.astype(np.float64))
            return Expected(want, _bound(want, unit, 1 + size, dtype), p * size, dtype)
        if indices is not None:
            dy = np.zeros(x.shape, dtype)
            np.put_along_axis(dy, indices, self.dy.astype(dtype), axis=-1)
        y = self.output
        want, unit, slack_times = bounds.expected(f"{self.function}_grad", (y.want, dy), mask)
        y_error = np.where(np.isfinite(y.want), y.bound, 0)
        size = np.where(True if mask is None else mask, np.abs(dy.astype(np.float64)), 0)
        with np.errstate(invalid="ignore"):
            if self.function == "softmax":
                scale = p * (size + _sum(p * size))
                moved = y_error * (size + _sum(p * size)) + p * _sum(y_error * size)
            else:
                scale = size + p * _sum(size)
                moved = p * np.expm1(np.minimum(y_error, 99)) * _sum(size)  # y may be far off where p is 0
            bound = moved + _bound(want, unit, slack_times, dtype)
        return Expected(want.astype(np.float64), bound.astype(np.float64), scale, dtype)

    def _gradient_of_statistics(self) -> Expected:
        """Returns dx for cotangents of log p of label 0, the entropy and logsumexp (the argmax has none).

        The terms of a row may cancel. So the bound is relative to their sizes, and to 1 + |x|, because rounding x
        moves log p.
        """
        assert self.dy is not None
        labels = np.zeros(len(self.x), np.int32)
        g = tuple(self.dy.T[:3].astype(np.float64))
        want, _ = oracle.token_stats_vjp(self.x, labels, g, self.mask)
        of_label, of_entropy, of_logsumexp = np.abs(g)
        entropy = np.nan_to_num(self.output.want[:, 1])
        scale = (of_label + of_logsumexp + of_entropy * (1 + entropy))[:, None] + np.zeros_like(want)
        x = np.nan_to_num(oracle.wide(self.x), posinf=0, neginf=0)
        units = 4 * (1 + np.abs(x).max(-1, keepdims=True))
        bound = bounds.eps(np.dtype("float32")) * units * scale + bounds.eps(self.x.dtype) * np.abs(want)
        return Expected(want, bound + _least(self.x.dtype), scale, self.x.dtype)

    @functools.cached_property
    def winners(self) -> Expected:
        """The expected k values. They do not depend on the order of ties."""
        assert self.indices is not None
        return self.output.at(self.indices)

    def check_output(self, got: np.ndarray) -> Check:
        if self.indices is None:
            return self.output.check("y", got)
        return self.winners.check("values", got)

    def check_logits(self, got: np.ndarray) -> Check:
        """Checks the values of a top-k without softmax, which must be exactly the winners' logits."""
        assert self.indices is not None
        want = np.take_along_axis(self.x, self.indices, axis=-1).astype(np.float64)
        least = np.full(want.shape, bounds.slack(np.dtype(np.float32)))
        return Expected(want, least, np.abs(want), self.x.dtype).check("values", got)

    def check_indices(self, got: np.ndarray, stable: bool = True) -> Check:
        """Checks the indices of the winners.

        A stable contender must return exactly the winners in the total order. Any other contender may replace a
        winner by an element of nearly the same probability: the two may differ by twice the bound.
        """
        assert self.indices is not None
        if got.shape != self.indices.shape:
            detail = f"indices of shape {got.shape}, not {self.indices.shape}"
            return Check(False, len(self.indices), 0.0, 0.0, detail)
        differs = got != self.indices
        if not stable:
            chosen = np.take_along_axis(self.output.want, got, axis=-1)
            want, bound = self.winners.want, self.winners.bound
            tied = (np.abs(chosen - want) <= 2 * bound) | (np.isnan(chosen) & np.isnan(want))
            differs &= ~tied
            differs[:, 1:] |= np.diff(np.sort(got, axis=-1), axis=-1) == 0  # the same element chosen twice
        wrong = int(np.sum(np.any(differs, axis=-1)))
        detail = f"indices of {wrong} rows" if wrong else ""
        return Check(not wrong, len(got), 0.0, 0.0, detail)

    def check_gradient(self, got: np.ndarray, indices: np.ndarray | None = None) -> Check:
        """Checks dx. The winners are at `indices`, or in the stable order if that is None."""
        expected = self.gradient if indices is None else self._gradient(indices)
        return expected.check("dx", got)


def _sum(terms: np.ndarray) -> np.ndarray:
    return np.sum(terms, axis=-1, keepdims=True)
