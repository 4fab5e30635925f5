"""The float64 answer in plain numpy, which shares nothing with the code under test, and its bounds."""

import dataclasses

import numpy as np

EPS32 = float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict on one contender's result."""

    ok: bool
    rows: int  # how many rows were looked at
    error_eps: float  # the largest relative error, in units of the dtype's eps
    error_share: float  # the largest error as a share of its bound
    detail: str = ""  # what is wrong


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax of the rows, in float64."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore", under="ignore"):  # NaN and inf in a user's file
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def top_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of each row: descending, equal values by the lowest index.

    The order is the total order of lax.top_k (+NaN > +inf > ... > +0 > -0 > ... > -NaN), which is
    the order of the float32 bits read as sign and magnitude.
    """
    bits = np.asarray(x, np.float32).view(np.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    return np.argsort(-key, axis=-1, kind="stable")[:, :k]


def scatter(g: np.ndarray, indices: np.ndarray, vocab: int) -> np.ndarray:
    """The gradient of the whole row whose gradient at the winners is g."""
    dy = np.zeros((len(g), vocab))
    np.put_along_axis(dy, indices, g.astype(np.float64), axis=-1)
    return dy


def gradient(y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx of softmax, in float64."""
    return y * (dy - np.sum(y * dy, axis=-1, keepdims=True))


def _resolution(dtype: str) -> tuple[float, float]:
    """(eps, the smallest absolute error that counts) of a dtype.

    Hardware may flush float32 subnormals to zero, and bfloat16 has float32's exponents; float16's
    subnormals are kept, one step of them is the least that can be asked.
    """
    tiny = float(np.finfo(np.float32).tiny)
    return {
        "float32": (EPS32, tiny),
        "bfloat16": (2.0**-7, tiny),
        "float16": (2.0**-10, 2.0**-24),
    }[dtype]


def softmax_bound(x: np.ndarray, y: np.ndarray, dtype: str) -> np.ndarray:
    """The largest absolute error that a sound float32 computation of y = softmax(x) may have.

    Relative to y, in units of float32's eps:
    8          exp, the division and the multiplications;
    2 |x - m|  x - m (and its product with log2 e) is rounded before exp makes a factor of the error;
    sqrt(V)/2  V rounded additions into one growing sum, taken as a random walk. Sums in blocks stay
               far below; a lost block of the row does not.
    Then half an eps of a 16-bit output's own rounding, and the flushed or subnormal remainder.
    """
    eps, tiny = _resolution(dtype)
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - x.max(axis=-1, keepdims=True))
        relative = EPS32 * (8 + 2 * distance + np.sqrt(x.shape[-1]) / 2)
        return np.where(y == 0, 0, relative * y) + (eps > EPS32) * 0.5 * eps * y + tiny


def gradient_bound(
    y: np.ndarray, y_error: np.ndarray, dy: np.ndarray, dx: np.ndarray, dtype: str
) -> np.ndarray:
    """The same for dx = y (dy - sum(y dy)), from a y that is itself off by up to y_error.

    The error of y enters the factor and the sum (a softmax keeps y in its own dtype, so in 16
    bits this is the larger part); the sum and the products are rounded in float32; then dx is.
    """
    eps, tiny = _resolution(dtype)
    size = np.sum(y * np.abs(dy), axis=-1, keepdims=True)
    sum_error = np.sum(y_error * np.abs(dy), axis=-1, keepdims=True)
    sum_error += EPS32 * (4 + np.sqrt(y.shape[-1]) / 2) * size
    spread = np.abs(dy) + size
    return y_error * spread + y * (sum_error + 4 * EPS32 * spread) + eps * np.abs(dx) + tiny


def compare(
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    bound: np.ndarray,
    scale: np.ndarray,
    dtype: str,
) -> Check:
    """Holds got against want; NaN must stand where it is wanted and nowhere else.

    The reported error is relative to `scale`, in units of the dtype's eps.
    """
    eps, tiny = _resolution(dtype)
    if got.shape != want.shape:
        return Check(False, len(want), np.inf, np.inf, f"{name} of shape {got.shape}, not {want.shape}")
    nan = np.isnan(want)
    misplaced = np.isnan(got) != nan
    if misplaced.any():
        return Check(False, len(want), np.inf, np.inf, f"{name}: {misplaced.sum()} wrong NaN")
    error = np.where(nan, 0.0, np.abs(got - want))
    share = np.max(np.where(nan, 0.0, error / np.where(nan, 1.0, bound)))
    in_eps = np.max(error / (eps * np.where(nan, 1.0, scale) + tiny))
    detail = "" if share <= 1 else f"{name} {share:#.3g}x its bound"
    return Check(bool(share <= 1), len(want), float(in_eps), float(share), detail)


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
    """The float64 answer to one case, on the checked rows."""

    def __init__(self, x: np.ndarray, cotangent: np.ndarray, dtype: str, k: int | None):
        self.dtype, self.k, self.cotangent = dtype, k, cotangent.astype(np.float64)
        self.y = softmax(x)
        self.y_bound = softmax_bound(x, self.y, dtype)
        self.indices = None if k is None else top_indices(x, k)

    def check_output(self, got: np.ndarray) -> Check:
        """The softmax itself, or the k values; those are the same for any order of ties."""
        name, want, bound = "y", self.y, self.y_bound
        if self.indices is not None:
            name = "values"
            want, bound = (np.take_along_axis(a, self.indices, axis=-1) for a in (want, bound))
        return compare(name, got.astype(np.float64), want, bound, np.abs(want), self.dtype)

    def check_indices(self, got: np.ndarray) -> Check:
        """The winners: exactly those of the stable total order."""
        assert self.indices is not None
        if got.shape != self.indices.shape:
            detail = f"indices of shape {got.shape}, not {self.indices.shape}"
            return Check(False, len(self.indices), 0.0, 0.0, detail)
        wrong = int(np.sum(np.any(got != self.indices, axis=-1)))
        detail = f"indices of {wrong} rows" if wrong else ""
        return Check(not wrong, len(got), 0.0, 0.0, detail)

    def check_gradient(self, got: np.ndarray, indices: np.ndarray | None) -> Check:
        """dx, where the winners are `indices` (None: those of the stable order)."""
        dy = self.cotangent
        if self.indices is not None:
            dy = scatter(dy, self.indices if indices is None else indices, self.y.shape[-1])
        want = gradient(self.y, dy)
        scale = self.y * (np.abs(dy) + np.sum(self.y * np.abs(dy), axis=-1, keepdims=True))
        bound = gradient_bound(self.y, self.y_bound, dy, want, self.dtype)
        return compare("dx", got.astype(np.float64), want, bound, scale, self.dtype)
