"""The rows that tests run on, with a reason for each.

One array holds many rows, so that a test compiles once per (V, dtype).
"""

import ml_dtypes
import numpy as np

from tests.support import oracle

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)

# 1, 2: the degenerate rows. 127, 128, 129: around a tile. 1000: not a multiple of 16 elements.
SMALL = (1, 2, 127, 128, 129, 1000)
# The vocabularies of GPT-2; of Llama 3, Qwen 2.5 and Gemma, for one cheap row each.
GPT2 = 50257
LARGE = (128256, 151936, 262144)


def largest(dtype):
    return float(ml_dtypes.finfo(dtype).max)


def _peaked(rng, v, dtype):
    x = rng.standard_normal(v)
    x[rng.integers(0, v, max(1, v // 50))] *= 20
    return x


def _rare(rng, v, dtype):
    x = rng.standard_normal(v) - 30
    x[v // 3] = 10
    return x


# All rows are finite; SPECIAL has the other ones.
FINITE = {
    # mild: every term counts, so the order of summation shows
    "normal": lambda rng, v, dtype: rng.standard_normal(v),
    # outliers x20, as language models have; most terms vanish
    "peaked": _peaked,
    # p is 1 to rounding, log p is near 0
    "one_winner": _rare,
    # ties everywhere: top-k must take the lowest index
    "integers": lambda rng, v, dtype: rng.integers(-3, 4, v),
    # all tied: p = 1/V, indices 0 to k-1
    "constant": lambda rng, v, dtype: np.full(v, 2.5),
    # m = 0, where a wrong initial maximum of 0 would not show elsewhere
    "zero": lambda rng, v, dtype: np.zeros(v),
    # below 0: padding with 0 or a maximum that starts at 0 would win
    "negative": lambda rng, v, dtype: -50 - rng.random(v),
    # the maximum changes at every step: the rescaling works hardest
    "ascending": lambda rng, v, dtype: np.linspace(-20, 20, v),
    # the maximum never changes after the first element
    "descending": lambda rng, v, dtype: np.linspace(20, -20, v),
    # signs alternate: x - m spans 160
    "alternating": lambda rng, v, dtype: np.where(np.arange(v) % 2, 1.0, -1.0) * rng.random(v) * 80,
    # +0 sorts above -0 although they compare equal
    "signed_zeros": lambda rng, v, dtype: np.where(np.arange(v) % 3, -0.0, 0.0),
    # ordered by top-k although the arithmetic may flush them
    "denormals": lambda rng, v, dtype: rng.standard_normal(v) * float(ml_dtypes.finfo(dtype).tiny) / 4,
    # x - m overflows to -inf, which must give p = 0 and not NaN
    "huge": lambda rng, v, dtype: rng.standard_normal(v).clip(-1, 1) * 0.88 * largest(dtype),
    # far from 0: x - logsumexp(x) would cancel, x - m does not
    "shifted": lambda rng, v, dtype: largest(dtype) ** 0.5 + rng.standard_normal(v),
}

NEG_NAN = np.copysign(np.nan, -1.0)
# Positions and new elements of a normal row, in this order.
SPECIAL = {
    "neg_inf_first": [(0, -np.inf)],  # an -inf logit is p = 0; at the front it is the first maximum seen
    "neg_inf_last": [(-1, -np.inf)],
    "all_but_one_neg_inf": [(slice(None), -np.inf), (-1, 1.0)],  # p = 1 after a run of -inf
    "all_neg_inf": [(slice(None), -np.inf)],  # NaN
    "inf_first": [(0, np.inf)],  # the whole row is NaN
    "inf_last": [(-1, np.inf)],
    "two_infs": [(0, np.inf), (-1, np.inf)],  # tied +inf: lowest index first
    "inf_and_neg_inf": [(0, -np.inf), (-1, np.inf)],  # inf - inf on both sides
    "nan_first": [(0, np.nan)],  # the whole row is NaN, and +NaN is the largest of all
    "nan_last": [(-1, np.nan)],
    "neg_nan_first": [(0, NEG_NAN)],  # -NaN is the smallest of all, below -inf
    "neg_nan_last": [(-1, NEG_NAN)],
    "nan_and_inf": [(0, np.inf), (-1, np.nan)],  # NaN before +inf
    "all_nan": [(slice(None), np.nan)],  # all tied
    "all_neg_nan": [(slice(None), NEG_NAN)],  # all tied, at the bottom
    # -NaN must not be chosen before -inf
    "every_third_neg_nan": [(slice(None, None, 3), NEG_NAN), (slice(1, None, 3), -np.inf)],
    # every class at once, with ties of each
    "everything": [*enumerate([NEG_NAN, -0.0, 0.0, -np.inf, np.inf, np.nan, -0.0, 0.0, np.nan])],
}
# Rows of five with a softmax at temperature 0 that is not obvious
TINY = 2.0**-130
AT_0 = {
    "ties": [1, 3, 3, 2, -1],
    "zeros": [0, -0.0, -1, 0, -2],
    "negative": [-1, -2, -1, -3, -1],
    "subnormal": [TINY, 2 * TINY, 2 * TINY, 0, -TINY],
    "next to a subnormal": [0, -TINY, -0.0, -1, -1],
    "huge": [3e38, -3e38, 3e38, 0, 1],
    "one": [0, 1, 2, 4, 3],
}
ALL = [*FINITE, *SPECIAL]  # 31 rows; 31 is prime
FEW = ["normal", "peaked", "integers", "ascending", "everything", "neg_inf_last", "nan_last"]


def _row(rng, name, v, dtype):
    if name in FINITE:
        return FINITE[name](rng, v, dtype)
    x = rng.standard_normal(v)
    for at, value in SPECIAL[name]:
        if isinstance(at, slice) or -v <= at < v:
            x[at] = value
    return x


def rows(names, v, dtype=F32, seed=0):
    """Returns one row per name, as an array (len(names), v)."""
    rng = np.random.default_rng([seed, v])
    with np.errstate(all="ignore"):
        return np.stack([np.asarray(_row(rng, n, v, dtype), np.float64) for n in names]).astype(dtype)


def integers(rng, v, dtype):
    """Returns ten rows of integers or booleans. As floats, some are NaNs, infinities and subnormal numbers."""
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    held, at = np.dtype("uint8") if dtype.kind == "b" else dtype, np.arange(v)
    few = np.array([low, high, low + 1], held)
    anywhere = rng.integers(low, high, v, held, endpoint=True)
    small = rng.integers(max(low, -3), min(high, 3), v, held, endpoint=True)
    rows = [
        np.full(v, few[0]),
        anywhere,
        small,
        np.where(at % 3, anywhere, small),
        anywhere // 64,
        few[at % 2],
        np.sort(anywhere),
        np.sort(anywhere)[::-1],
        np.full(v, few[1]),
        few[np.where(at == v // 2, 2, 0)],
    ]
    return np.stack(rows).astype(dtype)


def cotangent(shape, dtype=F32):
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def operands(name, x, where=None):
    """Returns the operands of the kernel of this name for the logits x: x itself, or the stored y and dy."""
    if name in oracle.FORWARD:
        return (x,)
    y = getattr(oracle, name.removesuffix("_grad"))(x, -1, where)
    dy = rows(["peaked", "normal", "integers"], x.shape[-1], x.dtype)
    with np.errstate(all="ignore"):
        return y.astype(x.dtype), np.resize(dy, x.shape)


def spoil_masked(x, where):
    """Returns x with NaN, infinities and huge numbers at masked positions, which must not matter."""
    hidden = np.resize([np.nan, np.inf, -np.inf, largest(x.dtype), NEG_NAN], x.shape).astype(x.dtype)
    return np.where(where, x, hidden)


def along_last(a, axes):
    """Returns rows along these axes as rows along the last axis."""
    moved = np.moveaxis(a, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: -len(axes)], -1)


# Ways to broadcast a mask to (2, 3, 2, V): no broadcast, along the row, and along every kind of batch dimension.
BATCH = (2, 3, 2)
BROADCASTS = ("bhqv", "111v", "bhq1", "b11v", "1h11", "b1q1", "1hqv", "1111")


def broadcast_mask(pattern, shape, seed=3):
    """Returns a mask that broadcasts to the shape, of size 1 where the pattern has a 1. Its first row keeps nothing."""
    size = [1 if letter == "1" else n for letter, n in zip(pattern, shape)]
    mask = np.random.default_rng(seed).random(size) < 0.6
    mask.reshape(-1, size[-1])[0] = False
    return mask


def broadcast_rows(pattern, v, dtype=F32):
    """Returns rows (*BATCH, v) with NaN and infinities where they are masked, their mask, and their names."""
    shape = (*BATCH, v)
    where = broadcast_mask(pattern, shape)
    x = np.resize(rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v, dtype), shape)
    return spoil_masked(x, where), where, [f"row {at}" for at in np.ndindex(BATCH)]


def few_unmasked(v, dtype=F32):
    """Returns four rows with NaNs of both signs, a mask that keeps few entries of them, and their names."""
    names, where = ["normal", "everything", "every_third_neg_nan", "all_neg_nan"], np.zeros((4, v), bool)
    where[:, 2:40:3] = where[:, -1] = True
    return rows(names, v, dtype), where, names


def masks(shape):
    """Returns masks that broadcast to the two-dimensional shape, by name."""
    rng = np.random.default_rng(2)
    n, v = shape
    full = rng.random(shape) < 0.6
    full[0] = False
    return {
        "x_shaped": full,  # any position; row 0 is fully masked
        "per_row": rng.random((n, 1)) < 0.5,  # broadcast along V: a row is kept or dropped
        "per_column": rng.random(v) < 0.7,  # broadcast along the rows
        "all": np.ones((1, 1), bool),  # nothing is masked
        "none": np.zeros((1, 1), bool),  # everything is masked
    }
