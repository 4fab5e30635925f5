"""The correct result of a contender, by the tests' float64 oracle, and the largest error that it may have.

All contenders must meet the bounds of the tests, extended in two ways, because the benchmarks check many contenders and
millions of elements. First, the denominator d may be off by the units of its terms. Second, a gradient starts from a
stored y, which may be off by its bound. In 16-bit dtypes this is the larger part.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from tests.support import bounds, oracle

F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one contender's result."""

    ok: bool
    error_eps: float = 0.0  # the largest relative error, in units of the dtype's eps
    error_share: float = 0.0  # the largest error as a share of its bound
    detail: str = ""  # what is wrong


def all_of(checks: list[Check]) -> Check:
    return Check(
        ok=all(check.ok for check in checks),
        error_eps=max(check.error_eps for check in checks),
        error_share=max(check.error_share for check in checks),
        detail=", ".join(check.detail for check in checks if check.detail),
    )


def _least(dtype: np.dtype) -> float:
    """Returns the smallest error that counts, since hardware may flush subnormals."""
    return 2 * bounds.slack(dtype) if dtype == np.float16 else bounds.slack(F32)


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

    def _error(self, got: np.ndarray, per: np.ndarray) -> float:
        """Returns the largest error as a multiple of `per`; inf for a misplaced NaN or inf."""
        got = got.astype(self.dtype)  # torch's 16-bit results arrive as float32
        return float(np.max(bounds.units(got, self.want, per / bounds.eps(self.dtype), slack_times=0)))

    def ulps(self, got: np.ndarray) -> float:
        return self._error(got, ulp(np.where(np.isfinite(self.want), self.scale, 0), self.dtype))

    def check(self, name: str, got: np.ndarray) -> Check:
        if got.shape != self.want.shape:
            return Check(False, np.inf, np.inf, f"{name} of shape {got.shape}, not {self.want.shape}")
        share = self._error(got, self.bound)
        error_eps = self._error(got, bounds.eps(self.dtype) * self.scale + _least(self.dtype))
        if share <= 1:
            return Check(True, error_eps, share)
        far = f"{share:#.3g}x its bound" if np.isfinite(share) else "has a NaN or an inf out of place"
        return Check(False, error_eps, share, f"{name} {far}")

    def at(self, indices: np.ndarray) -> "Expected":
        want, bound, scale = (np.take_along_axis(a, indices, -1) for a in (self.want, self.bound, self.scale))
        return Expected(want, bound, scale, self.dtype)


def _bound(want, unit, slack_times, dtype: np.dtype) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        units = bounds.stored_unit(want, unit, dtype) if dtype.itemsize == 2 else bounds.UNITS * unit
        return bounds.eps(dtype) * units + slack_times * bounds.slack(dtype)


@dataclasses.dataclass
class Answer:
    """The float64 answer for some rows of a case: y and dx of a function of cases.py.

    The gradient of top-k is the gradient of softmax for a dy that is 0 except at the winners.
    Reported errors are relative: y to |y|, or to 1 where taking a logarithm may cancel; dx to the size of its terms.
    """

    x: np.ndarray
    dy: np.ndarray | None
    function: str = "softmax"
    k: int | None = None
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.labels = np.zeros(len(self.x), np.int32)  # of token_stats
        self.indices: Any = None if self.k is None else oracle.topk_indices(self.x, self.k, self.mask)

    @functools.cached_property
    def output(self) -> Expected:
        """y of whole rows. For token_stats: log p, the entropy, logsumexp and the argmax."""
        if self.function == "token_stats":
            want = np.stack(oracle.token_stats(self.x, self.labels, self.mask), -1)
            scale = np.maximum(np.abs(np.nan_to_num(want, posinf=0, neginf=0)), [1, 0, 1, 1])
            scale[:, 1] = 1
            bound = bounds.eps(F32) * 4 * (1 + np.log(self.x.shape[1])) * scale * [1, 1, 1, 0]
            return Expected(want, bound + _least(self.x.dtype), scale, F32)
        want, unit, slack_times = bounds.expected(self.function, (self.x,), self.mask)
        if self.function != "logsumexp":  # its unit already includes the error of d
            with np.errstate(all="ignore"):
                of_d = bounds.normalizer_unit(self.x, self.mask) / oracle.normalizer(self.x, self.mask)[1]
            unit = unit + np.nan_to_num(of_d) * (want if self.function == "softmax" else 1)
        bound = _bound(want, unit, slack_times, self.x.dtype)
        scale = np.maximum(np.abs(want), 1 if self.function == "log_softmax" else 0)
        if self.function == "logsumexp":
            want, bound, scale = want[:, 0], bound[:, 0], scale[:, 0]
        return Expected(want, bound, scale, self.x.dtype)

    def gradient(self, indices: np.ndarray | None = None) -> Expected:
        """Returns the expected dx. The winners of top-k are at `indices`, or in the stable order if that is None."""
        assert self.dy is not None, "a gradient needs a cotangent"
        x, mask, dtype = self.x, self.mask, self.x.dtype
        indices = self.indices if indices is None else indices
        if self.function == "token_stats":
            return self._gradient_of_statistics(self.dy.T[:3].astype(np.float64))
        dy = self.dy.astype(dtype)
        p = oracle.softmax(x, -1, mask)
        if self.function == "logsumexp":
            dy = dy[:, None]
            want, unit = oracle.logsumexp_vjp(x, dy, -1, mask), bounds.logsumexp_vjp_unit(x, dy, -1, mask)
            size = np.abs(oracle.wide(dy))
            return Expected(want, _bound(want, unit, 1 + size, dtype), p * size, dtype)
        if indices is not None:
            dy = np.zeros(x.shape, dtype)
            np.put_along_axis(dy, indices, self.dy.astype(dtype), axis=-1)
        y = self.output
        want, unit, slack_times = bounds.expected(f"{self.function}_grad", (y.want, dy), mask)
        y_error = np.where(np.isfinite(y.want), y.bound, 0)
        size = np.where(oracle.unmasked(x, mask), np.abs(oracle.wide(dy)), 0)
        if self.function == "softmax":
            scale = p * (size + _sum(p * size))
            moved = y_error * (size + _sum(p * size)) + p * _sum(y_error * size)
        else:
            scale = size + p * _sum(size)
            moved = p * np.expm1(np.minimum(y_error, 99)) * _sum(size)  # y may be far off where p is 0
        return Expected(want, moved + _bound(want, unit, slack_times, dtype), scale, dtype)

    def _gradient_of_statistics(self, g: np.ndarray) -> Expected:
        """Returns dx for cotangents of log p, the entropy and logsumexp. The argmax has none.

        The bound is relative to the terms of a row, which may cancel, and to 1 + |x|: rounding x moves log p.
        """
        want, _ = oracle.token_stats_vjp(self.x, self.labels, tuple(g), self.mask)
        of_label, of_entropy, of_logsumexp = np.abs(g)
        entropy = np.nan_to_num(self.output.want[:, 1])
        scale = (of_label + of_logsumexp + of_entropy * (1 + entropy))[:, None] + np.zeros_like(want)
        x = np.nan_to_num(oracle.wide(self.x), posinf=0, neginf=0)
        bound = bounds.eps(F32) * 4 * (1 + np.abs(x).max(-1, keepdims=True)) * scale
        bound += bounds.eps(self.x.dtype) * np.abs(want) + _least(self.x.dtype)
        return Expected(want, bound, scale, self.x.dtype)

    @functools.cached_property
    def winners(self) -> Expected:
        """The expected k values. They do not depend on the order of ties."""
        return self.output.at(self.indices)

    def check_output(self, got: np.ndarray) -> Check:
        return self.output.check("y", got) if self.indices is None else self.winners.check("values", got)

    def check_logits(self, got: np.ndarray) -> Check:
        """Checks the values of a top-k without softmax, which must be exactly the winners' logits."""
        want = oracle.top_k(self.x, self.indices.shape[-1], self.mask)[0].astype(np.float64)
        least = np.full(want.shape, bounds.slack(F32))
        return Expected(want, least, np.abs(want), self.x.dtype).check("values", got)

    def in_order(self, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Sorts the values and the indices of a top-k in any order."""
        indices = found["indices"]
        keys = np.take_along_axis(oracle.order_key(self.x), indices, axis=-1)
        masked = ~np.take_along_axis(oracle.unmasked(self.x, self.mask), indices, axis=-1)
        order = np.lexsort((indices, np.where(masked, 0, -keys), masked))
        return {name: np.take_along_axis(a, order, axis=-1) for name, a in found.items()}

    def check_indices(self, got: np.ndarray, stable: bool = True) -> Check:
        """Checks the indices of the winners.

        A stable contender must return exactly the winners in the total order. Any other contender may replace a
        winner by an element of nearly the same probability: the two may differ by twice the bound.
        """
        if got.shape != self.indices.shape:
            return Check(False, detail=f"indices of shape {got.shape}, not {self.indices.shape}")
        differs = got != self.indices
        if not stable:
            chosen = np.take_along_axis(self.output.want, got, axis=-1)
            want, bound = self.winners.want, self.winners.bound
            differs &= ~((np.abs(chosen - want) <= 2 * bound) | (np.isnan(chosen) & np.isnan(want)))
            differs[:, 1:] |= np.diff(np.sort(got, axis=-1), axis=-1) == 0  # the same element chosen twice
        wrong = int(np.sum(np.any(differs, axis=-1)))
        return Check(not wrong, detail=f"indices of {wrong} rows" if wrong else "")


@np.errstate(invalid="ignore")
def _sum(terms: np.ndarray) -> np.ndarray:
    return np.sum(terms, axis=-1, keepdims=True)
