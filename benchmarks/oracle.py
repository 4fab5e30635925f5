"""The float64 answer in plain numpy, which shares nothing with the code under test, and its bounds."""

import dataclasses
import functools

import numpy as np

EPS32 = float(np.finfo(np.float32).eps)
TINY32 = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one contender's result."""

    ok: bool
    rows: int  # how many rows were looked at
    error_eps: float  # the largest relative error, in units of the dtype's eps
    error_share: float  # the largest error as a share of its bound
    detail: str = ""  # what is wrong


def top_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of each row: descending, equal values by the lowest index.

    The order is the total order of lax.top_k (+NaN > +inf > ... > +0 > -0 > ... > -NaN), which is
    the order of the float32 bits read as sign and magnitude.
    """
    bits = np.asarray(x, np.float32).view(np.int32)
    descending = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    order = descending << 32 | np.arange(x.shape[-1])  # no two are equal, so that a partition keeps the order
    return np.sort(np.partition(order, k - 1, axis=-1)[:, :k], axis=-1) & 0xFFFFFFFF


def scatter(g: np.ndarray, indices: np.ndarray, vocab: int) -> np.ndarray:
    """The gradient of the whole row whose gradient at the winners is g."""
    dy = np.zeros((len(g), vocab))
    np.put_along_axis(dy, indices, g.astype(np.float64), axis=-1)
    return dy


def _resolution(dtype: str) -> tuple[float, float]:
    """(eps, the smallest absolute error that counts) of a dtype.

    Hardware may flush float32 subnormals to zero, and bfloat16 has float32's exponents; float16's
    subnormals are kept, one step of them is the least that can be asked.
    """
    return {
        "float32": (EPS32, TINY32),
        "bfloat16": (2.0**-7, TINY32),
        "float16": (2.0**-10, 2.0**-24),
    }[dtype]


def ulp(size: np.ndarray, dtype: str) -> np.ndarray:
    """The spacing of the dtype's numbers at |size|, and no less than the smallest error that counts."""
    eps, tiny = _resolution(dtype)
    return np.maximum(np.ldexp(eps, np.frexp(np.maximum(np.abs(size), tiny))[1] - 1), tiny)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result should be, the largest error that is sound, and the size that errors are relative to."""

    want: np.ndarray
    bound: np.ndarray
    scale: np.ndarray

    def error(self, got: np.ndarray) -> np.ndarray:
        """The absolute errors: inf for a NaN out of place, 0 where both are NaN or the same infinity."""
        same = (got == self.want) | (np.isnan(got) & np.isnan(self.want))
        with np.errstate(invalid="ignore"):
            error = np.abs(got - self.want)
        return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))

    def ulps(self, got: np.ndarray, dtype: str) -> float:
        """The largest error, in ulps of the dtype at the scale."""
        scale = np.where(np.isfinite(self.want), self.scale, 0)
        return float(np.max(self.error(got.astype(np.float64)) / ulp(scale, dtype)))

    def check(self, name: str, got: np.ndarray, dtype: str) -> Check:
        """Holds got against want; the error is reported in units of the dtype's eps at the scale."""
        rows = len(self.want)
        if got.shape != self.want.shape:
            return Check(False, rows, np.inf, np.inf, f"{name} of shape {got.shape}, not {self.want.shape}")
        got = got.astype(np.float64)
        misplaced = int(np.sum(np.isnan(got) != np.isnan(self.want)))
        if misplaced:
            return Check(False, rows, np.inf, np.inf, f"{name}: {misplaced} wrong NaN")
        eps, tiny = _resolution(dtype)
        error = self.error(got)
        finite = np.isfinite(self.want)  # elsewhere the error is 0 or inf
        share = np.max(error / np.where(finite, self.bound, 1.0))
        in_eps = np.max(error / np.where(finite, eps * self.scale + tiny, 1.0))
        detail = "" if share <= 1 else f"{name} {share:#.3g}x its bound"
        return Check(bool(share <= 1), rows, float(in_eps), float(share), detail)


def all_of(checks: list[Check]) -> Check:
    """One verdict from several on the same rows."""
    return Check(
        ok=all(check.ok for check in checks),
        rows=checks[0].rows,
        error_eps=max(check.error_eps for check in checks),
        error_share=max(check.error_share for check in checks),
        detail=", ".join(check.detail for check in checks if check.detail),
    )


class Answer:
    """The float64 answer for some rows of a case: y and dx of softmax, log_softmax, logsumexp or top-k.

    With p = softmax(x): softmax has dx = p (dy - sum(p dy)), log_softmax dx = dy - p sum(dy), logsumexp
    dx = p dy, and top-k that of softmax where dy is 0 but at the winners. A masked x counts as -inf; there
    softmax is 0, log_softmax -inf and dx 0; the logsumexp of nothing is -inf.

    The bounds are those of a sound float32 computation, in units of float32's eps:
    8           exp, log, the division and the multiplications;
    2 |x - m|   x - m (and its product with log2 e) is rounded before exp makes a factor of the error;
    sqrt(V)/2   V rounded additions into one growing sum, taken as a random walk. Sums in blocks stay
                far below; a lost block of the row does not;
    2 log V     for y that is a logarithm: the errors of log d's terms, and log d itself;
    |y|         for logsumexp: its last addition.
    For softmax they are relative, for a logarithm absolute. Then half an eps of a 16-bit output's own
    rounding, and the flushed or subnormal remainder. The errors of y are relative to |y|; of log_softmax to
    1 if that is more, for -log d with d near 1 has lost what d = 1 + ... has rounded.

    A gradient starts from a y that is itself off by up to its bound, for it is kept in its own dtype (in 16
    bits this is the larger part). That error enters p and with it the product and the sum; the sum and the
    products are rounded in float32; then dx is. Its errors are relative to the size of its terms, which
    may cancel: p (|dy| + sum(p |dy|)), |dy| + p sum(|dy|), or p |dy|.
    """

    def __init__(
        self,
        x: np.ndarray,
        cotangent: np.ndarray | None,
        dtype: str,
        function: str = "softmax",
        k: int | None = None,
        mask: np.ndarray | None = None,
    ):
        self.dtype, self.function, self.k = dtype, function, k
        self.indices = None if k is None else top_indices(x, k)
        self.logits = None if self.indices is None else np.take_along_axis(x, self.indices, axis=-1)
        self.mask = np.broadcast_to(True if mask is None else mask, x.shape)
        x = np.where(self.mask, x.astype(np.float64), -np.inf)
        self.dy = None if cotangent is None else cotangent.astype(np.float64)
        eps, tiny = _resolution(dtype)
        half_eps = 0.5 * eps * (eps > EPS32)
        self.addition = EPS32 * np.sqrt(x.shape[-1]) / 2
        with np.errstate(invalid="ignore", under="ignore", divide="ignore"):  # NaN and inf in a user's file
            m = x.max(axis=-1, keepdims=True)
            shifted = x - m
            e = np.exp(shifted)
            d = e.sum(axis=-1, keepdims=True)
            self.p = np.where(self.mask, e / d, 0)
            distance = np.where(np.isfinite(shifted), -shifted, 0)
            logarithm = EPS32 * (8 + 2 * np.log(x.shape[-1])) + self.addition
            if function == "softmax":
                y = self.p
                bound = y * (EPS32 * (8 + 2 * distance) + self.addition)
            elif function == "log_softmax":
                y = np.where(self.mask, shifted - np.log(d), -np.inf)
                bound = 2 * EPS32 * distance + logarithm
            else:
                y = np.where(np.isfinite(m), m + np.log(d), m)[:, 0]
                bound = EPS32 * np.abs(y) + logarithm
            bound = bound + half_eps * np.abs(y) + tiny
            self.p_error = bound
            if function != "softmax":  # p is exp of what is off by y's error, and of |log p|
                off = np.minimum(np.where(np.isfinite(bound), bound, 0), 99).reshape(len(x), -1)
                error = self.p * (np.expm1(off) + EPS32 * (8 + 2 * (distance + np.log(d))))
                self.p_error = np.where(self.mask, error, 0) + TINY32
        self.output = Expected(y, bound, np.maximum(np.abs(y), 1 if function == "log_softmax" else 0))

    @functools.cached_property
    def gradient(self) -> Expected:
        """dx; that of top-k where the winners are those of the stable order."""
        return self._gradient(self.indices)

    def _gradient(self, indices: np.ndarray | None) -> Expected:
        assert self.dy is not None, "a gradient needs a cotangent"
        p, p_error = self.p, self.p_error
        dy = self.dy if indices is None else scatter(self.dy, indices, p.shape[-1])
        dy = np.where(self.mask, dy.reshape(len(p), -1), 0)
        eps, tiny = _resolution(self.dtype)

        def total(terms: np.ndarray) -> np.ndarray:
            return np.sum(terms, axis=-1, keepdims=True)

        size = np.abs(dy)
        if self.function == "softmax":
            want = p * (dy - total(p * dy))
            weighed = total(p * size)
            spread = size + weighed
            sum_error = total(p_error * size) + (4 * EPS32 + self.addition) * weighed
            error, scale = p_error * spread + p * sum_error, p * spread
        elif self.function == "log_softmax":
            want = dy - p * total(dy)
            error = p_error * np.abs(total(dy)) + p * (4 * EPS32 + self.addition) * total(size)
            scale = size + p * total(size)
        else:
            want, error, scale = p * dy, p_error * size, p * size
        want, error = np.where(self.mask, want, 0), error + 4 * EPS32 * scale
        return Expected(want, error + eps * np.abs(want) + tiny, scale)

    @functools.cached_property
    def winners(self) -> Expected:
        """The k values; those are the same for any order of ties."""
        assert self.indices is not None
        fields = (self.output.want, self.output.bound, self.output.scale)
        return Expected(*(np.take_along_axis(a, self.indices, axis=-1) for a in fields))

    def check_output(self, got: np.ndarray) -> Check:
        """y itself, or the k values."""
        if self.indices is None:
            return self.output.check("y", got, self.dtype)
        return self.winners.check("values", got, self.dtype)

    def check_logits(self, got: np.ndarray) -> Check:
        """The winners' logits as they are, for a top-k without softmax."""
        assert self.logits is not None
        want = self.logits.astype(np.float64)
        exact = Expected(want, np.full(want.shape, TINY32), np.abs(want))
        return exact.check("values", got, self.dtype)

    def check_indices(self, got: np.ndarray, stable: bool = True) -> Check:
        """The winners: exactly those of the stable total order; or others, if their probabilities, each off by
        its bound, may have been equal."""
        assert self.indices is not None
        if got.shape != self.indices.shape:
            detail = f"indices of shape {got.shape}, not {self.indices.shape}"
            return Check(False, len(self.indices), 0.0, 0.0, detail)
        if stable:
            differs = got != self.indices
        else:
            chosen = np.take_along_axis(self.output.want, got, axis=-1)
            differs = self.winners.error(chosen) > 2 * self.winners.bound
            differs[:, 1:] |= np.diff(np.sort(got, axis=-1), axis=-1) == 0  # one twice
        wrong = int(np.sum(np.any(differs, axis=-1)))
        detail = f"indices of {wrong} rows" if wrong else ""
        return Check(not wrong, len(got), 0.0, 0.0, detail)

    def check_gradient(self, got: np.ndarray, indices: np.ndarray | None = None) -> Check:
        """dx, where the winners are `indices` (None: those of the stable order)."""
        expected = self.gradient if indices is None else self._gradient(indices)
        return expected.check("dx", got, self.dtype)
