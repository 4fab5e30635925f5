"""The cases to measure: their shapes, their inputs, and the fewest bytes that a call must move."""

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

# name: its explanation, and the logits, from normal numbers x, the indices i in a row, and the key of other numbers
LOGITS: dict[str, tuple[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]]] = {
    "normal": ("standard normal numbers", lambda x, i, key: x),
    "uniform": ("0 to 1, as the paper's benchmark draws them", lambda x, i, key: random.uniform(key, x.shape)),
    "peaked": ("normal, one in 1000 times 20", lambda x, i, key: _some(x, key, 1e-3, 20 * x)),
    # -0.0 is replaced: it ranks below 0.0, but both have the same softmax
    "ties": ("normal, rounded to integers", lambda x, i, key: jnp.where(abs(x) <= 0.5, 0.0, jnp.round(x))),
    "quantized": ("normal, drawn in bfloat16", lambda x, i, key: x),
    "constant": ("all 1", lambda x, i, key: jnp.ones(x.shape)),
    "two_values": ("0 or 1", lambda x, i, key: random.bernoulli(key, 0.5, x.shape)),
    "ascending": ("from -4 to 4", lambda x, i, key: 8 * i / x.shape[-1] - 4),
    "descending": ("from 4 to -4", lambda x, i, key: 4 - 8 * i / x.shape[-1]),
    "shifted": ("normal, plus 1000", lambda x, i, key: x + 1000),
    "scaled": ("normal, times 0.001", lambda x, i, key: x * 1e-3),
    "close": (
        "1 and less than 2^-11 more: alike in their upper bits",
        lambda x, i, key: 1 + random.randint(key, x.shape, 0, 2**12) * jnp.finfo(jnp.float32).eps,
    ),
    "blocked": (
        "normal, 256 in the middle 10 higher",
        lambda x, i, key: jnp.where(jnp.abs(i + 0.5 - x.shape[-1] // 2) < 128, x + 10, x),
    ),
    "one_lane": (  # of one thread, if up to 256 threads take turns with vectors of four or more
        "normal, four in 1024 10 higher: one thread's",
        lambda x, i, key: jnp.where(i % 1024 < 4, x + 10, x),
    ),
    "neg_inf": ("all -inf", lambda x, i, key: jnp.full(x.shape, -jnp.inf)),
    "one_finite": (
        "all -inf but one",
        lambda x, i, key: jnp.where(i == random.randint(key, (len(x), 1), 0, x.shape[-1]), 1.0, -jnp.inf),
    ),
    "nan": ("normal, a third of it NaN", lambda x, i, key: _some(x, key, 1 / 3, jnp.nan)),
}


def _some(x: jax.Array, key: jax.Array, share: float, other: Any) -> jax.Array:
    return jnp.where(random.bernoulli(key, share, x.shape), other, x)


# How many elements of a case are checked. numpy takes about half a second for them.
_CHECKED_ELEMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Case:
    """One input and one function to compute from it. k is the number of winners for top-k, otherwise None."""

    batch: int
    vocab: int
    dtype: str
    function: str
    where: str
    axis: int
    k: int | None
    direction: str
    logits: str
    seed: int

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The shape of the mask, rows first, or of the lengths; () without either."""
        batch, vocab = self.batch, self.vocab
        shapes = {"full": (batch, vocab), "vocab": (vocab,), "rows": (batch, 1), "lengths": (batch,)}
        return shapes.get(self.where, ())

    @property
    def output_shape(self) -> tuple[int, ...]:
        of_row = {"token_stats": (4,), "logsumexp": ()}.get(self.function, (self.k or self.vocab,))
        return (self.batch, *of_row)

    @property
    def least_bytes(self) -> int:
        """The bytes that a call moves if it reads each input once and writes each output once.

        A mask is read once, at a byte per element. With lengths, half of the elements are read.
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        row = self.vocab * itemsize // (2 if self.where == "lengths" else 1)
        if self.k is not None:  # x to k values and int32 indices; x to dx
            forward, backward = row + self.k * (itemsize + 4), 2 * row
        elif numbers := {"logsumexp": itemsize, "token_stats": 16}.get(self.function):
            forward, backward = row + numbers, 2 * (row + numbers)  # with the numbers and their cotangents
        else:  # x to y; y and dy to dx
            forward, backward = 2 * row, 3 * row
        per_row = {"forward": forward, "backward": backward, "both": forward + backward}
        mask = math.prod(self.mask_shape) if self.mask_shape else 0
        return self.batch * per_row[self.direction] + mask

    @property
    def checked_rows(self) -> np.ndarray:
        """The rows to check: all rows of a small case, or else the first, the last and a random sample."""
        count = max(2, _CHECKED_ELEMENTS // self.vocab)
        if count >= self.batch:
            return np.arange(self.batch)
        inner = np.random.default_rng(self.seed).choice(self.batch - 2, count - 2, replace=False) + 1
        return np.sort(np.concatenate([[0, self.batch - 1], inner]))


def make_cases(chosen: Any, ks: tuple[int | None, ...] = (None,), shapes: Any = None) -> list[Case]:
    """Returns the cases that the flags ask for: every combination of the items of their lists.

    `ks` are for shapes that name no k; (None,) means that the function is not top-k. `shapes` replaces --shapes. Top-k
    ignores function, mask and axis.
    """
    is_topk = ks != (None,)
    kinds = {"function": "softmax", "where": "none", "axis": -1}
    defaults = {"dtype": "float32", **kinds, "direction": "forward", "logits": "normal"}
    lists: dict[str, Any] = {
        name: (value,) if is_topk and name in kinds else getattr(chosen, name, (value,))
        for name, value in defaults.items()
    }
    cases = [
        Case(batch, vocab, dtype, function, where, axis, k, direction, logits, chosen.seed)
        for logits in lists["logits"]
        for batch, vocab, *own in shapes or chosen.shapes or itertools.product(chosen.batch, chosen.vocab)
        for dtype, function, where, axis in itertools.product(*(lists[name] for name in ("dtype", *kinds)))
        for k, direction in itertools.product((own or ks) if is_topk else ks, lists["direction"])
    ]
    for case in cases:
        if case.k is not None and case.k > case.vocab:
            raise ValueError(f"k={case.k}, from --k or --shapes, is more than the row length V={case.vocab}")
    return list(dict.fromkeys(cases))


def _key(case: Case, purpose: str) -> jax.Array:
    """Returns the same key for every dtype, function, k and direction of a shape."""
    text = f"{purpose} {case.batch} {case.vocab} {case.logits}"
    return random.fold_in(random.key(case.seed), zlib.crc32(text.encode()))


def logits(case: Case) -> jax.Array:
    """Returns the case's input on the default device: (batch, V), or (V, batch) for axis 0."""
    return _draw(_key(case, "logits"), (case.batch, case.vocab), case.logits, case.dtype, case.axis)


def cotangent(case: Case) -> jax.Array:
    dtype = "float32" if case.function == "token_stats" else case.dtype
    return _draw(_key(case, "cotangent"), case.output_shape, "normal", dtype, case.axis)


def mask(case: Case) -> jax.Array | None:
    """Returns the case's `where` in the layout of the logits, or its lengths, or None if it has neither."""
    if not case.mask_shape:
        return None
    if case.where == "lengths":
        return random.randint(_key(case, "lengths"), case.mask_shape, 0, case.vocab + 1)
    kept = random.bernoulli(_key(case, "mask"), 0.7, case.mask_shape)
    return jnp.atleast_2d(kept).T if case.axis == 0 else kept


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))  # compiled once per shape, kind, dtype and axis
def _draw(key: jax.Array, shape: tuple[int, ...], kind: str, dtype: str, axis: int) -> jax.Array:
    """Draws in float32. Drawn in a 16-bit dtype, the tail would have far more ties than a model's logits."""
    normal_key, other_key = random.split(key)
    x = random.normal(normal_key, shape, jnp.bfloat16 if kind == "quantized" else jnp.float32)
    i = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    x = LOGITS[kind][1](x.astype(jnp.float32), i, other_key)
    return (x.T if axis == 0 else x).astype(dtype)
