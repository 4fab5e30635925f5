"""What the result of a contender should be, by the project's float64 oracle, and how far off it may be."""

import dataclasses
import functools

import numpy as np

from tests.support import bounds, oracle


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one contender's result."""

    ok: bool
    rows: int  # how many rows were looked at
    error_eps: float  # the largest relative error, in units of the dtype's eps
    error_share: float  # the largest error as a share of its bound
    detail: str = ""  # what is wrong


def all_of(checks: list[Check]) -> Check:
    """Returns one verdict from several on the same rows."""
    return Check(
        ok=all(check.ok for check in checks),
        rows=checks[0].rows,
        error_eps=max(check.error_eps for check in checks),
        error_share=max(check.error_share for check in checks),
        detail=", ".join(check.detail for check in checks if check.detail),
    )


def _least(dtype: np.dtype) -> float:
    """Returns the smallest error that counts: a step of float16's subnormals, elsewhere float32's tiny.

    Hardware may flush float32 subnormals to zero, and bfloat16 has float32's exponents.
    """
    return 2.0**-24 if dtype == np.float16 else float(np.finfo(np.float32).tiny)


def ulp(size: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the spacing of the dtype's numbers at |size|, and no less than the smallest error that counts."""
    least = _least(dtype)
    exponent = np.frexp(np.maximum(np.abs(size), least))[1] - 1
    return np.maximum(np.ldexp(bounds.eps(dtype), exponent), least)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result should be, the largest error that is sound, and the size that errors are relative to."""

    want: np.ndarray
    bound: np.ndarray
    scale: np.ndarray
    dtype: np.dtype

    def _errors(self, got: np.ndarray, per: np.ndarray) -> np.ndarray:
        """Returns the errors as multiples of `per`; they are infinite where a NaN or an inf is out of place."""
        got = got.astype(self.dtype)  # torch's 16 bits come as float32
        return bounds.units(got, self.want, per / bounds.eps(self.dtype), slack_times=0)

    def ulps(self, got: np.ndarray) -> float:
        """Returns the largest error, in ulps of the dtype at the scale."""
        scale = np.where(np.isfinite(self.want), self.scale, 0)
        return float(np.max(self._errors(got, ulp(scale, self.dtype))))

    def check(self, name: str, got: np.ndarray) -> Check:
        """Holds got against want; the error is reported in units of the dtype's eps at the scale."""
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
        """Returns what is expected of the elements at these indices of each row."""

        def taken(a: np.ndarray) -> np.ndarray:
            return np.take_along_axis(a, indices, axis=-1)

        return Expected(taken(self.want), taken(self.bound), taken(self.scale), self.dtype)


def _bound(
    want: np.ndarray, unit: np.ndarray, slack_times: np.ndarray | float, dtype: np.dtype
) -> np.ndarray:
    """Returns the largest error that the project allows: the tests' bounds, as absolute numbers.

    It is so many units of the float32 computation, a 16-bit result's own rounding, and what flushing of
    subnormals may cost.
    """
    units = bounds.UNITS * unit
    if dtype.itemsize == 2:
        units = bounds.stored_unit(want, unit, dtype)
    return bounds.eps(dtype) * units + slack_times * bounds.slack(dtype)


class Answer:
    """The float64 answer for some rows of a case: y and dx of softmax, log_softmax, logsumexp or top-k.

    With p = softmax(x): softmax has dx = p (dy - sum(p dy)), log_softmax dx = dy - p sum(dy), logsumexp
    dx = p dy, and top-k that of softmax where dy is 0 but at the winners. A masked x counts as -inf; there
    softmax is 0, log_softmax -inf and dx 0; the logsumexp of nothing is -inf.

    All contenders are held to the bounds of the tests. Two things are added, because here every kind of
    contender and millions of elements are checked. The denominator d may be off by the units of its terms.
    And a gradient starts from a y that is itself off by up to its bound, for it is kept in its own dtype (in
    16 bits this is the larger part): that error enters p, and with it the product and the sum.

    Errors are reported relative to |y|; of log_softmax relative to 1 if that is more, for -log d with d near
    1 has lost what d = 1 + ... has rounded. Those of a gradient are relative to the size of its terms, which
    may cancel: p (|dy| + sum(p |dy|)), |dy| + p sum(|dy|), or p |dy|.
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
        """y of the whole rows."""
        want, unit, slack_times = bounds.expected(self.function, (self.x,), self.mask)
        if self.function != "logsumexp":  # whose unit has it already
            with np.errstate(all="ignore"):
                of_d = bounds.normalizer_unit(self.x, self.mask) / oracle.normalizer(self.x, self.mask)[1]
            unit = unit + np.nan_to_num(of_d) * (want if self.function == "softmax" else 1)
        with np.errstate(invalid="ignore"):
            bound = _bound(want, unit, slack_times, self.x.dtype)
        scale = np.maximum(np.abs(want), 1 if self.function == "log_softmax" else 0)
        if self.function == "logsumexp":
            want, bound, scale = want[:, 0], bound[:, 0], scale[:, 0]
        return Expected(want, bound, scale, self.x.dtype)

    @functools.cached_property
    def gradient(self) -> Expected:
        """dx; that of top-k where the winners are those of the stable order."""
        return self._gradient(self.indices)

    def _gradient(self, indices: np.ndarray | None) -> Expected:
        assert self.dy is not None, "a gradient needs a cotangent"
        x, mask, dtype = self.x, self.mask, self.x.dtype
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
                moved = p * np.expm1(np.minimum(y_error, 99)) * _sum(size)  # it is far off where p is 0
            bound = moved + _bound(want, unit, slack_times, dtype)
        return Expected(want.astype(np.float64), bound.astype(np.float64), scale, dtype)

    @functools.cached_property
    def winners(self) -> Expected:
        """The k values; those are the same for any order of ties."""
        assert self.indices is not None
        return self.output.at(self.indices)

    def check_output(self, got: np.ndarray) -> Check:
        """Checks y itself, or the k values."""
        if self.indices is None:
            return self.output.check("y", got)
        return self.winners.check("values", got)

    def check_logits(self, got: np.ndarray) -> Check:
        """Checks the values of a top-k without softmax: the winners' logits, exactly."""
        assert self.indices is not None
        want = np.take_along_axis(self.x, self.indices, axis=-1).astype(np.float64)
        least = np.full(want.shape, bounds.slack(np.dtype(np.float32)))
        return Expected(want, least, np.abs(want), self.x.dtype).check("values", got)

    def check_indices(self, got: np.ndarray, stable: bool = True) -> Check:
        """Checks the winners.

        Those of a stable contender are exactly those of the total order. Others may choose in its place any
        element whose probability, each off by its bound, may have been equal.
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
            differs[:, 1:] |= np.diff(np.sort(got, axis=-1), axis=-1) == 0  # one is chosen twice
        wrong = int(np.sum(np.any(differs, axis=-1)))
        detail = f"indices of {wrong} rows" if wrong else ""
        return Check(not wrong, len(got), 0.0, 0.0, detail)

    def check_gradient(self, got: np.ndarray, indices: np.ndarray | None = None) -> Check:
        """Checks dx, where the winners are `indices` (None: those of the stable order)."""
        expected = self.gradient if indices is None else self._gradient(indices)
        return expected.check("dx", got)


def _sum(terms: np.ndarray) -> np.ndarray:
    return np.sum(terms, axis=-1, keepdims=True)
