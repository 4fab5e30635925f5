"""What is measured: the cases, their logits, and the fewest bytes that a call must move."""

import dataclasses
import itertools
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.settings import LOGITS, Settings


@dataclasses.dataclass(frozen=True)
class Case:
    """One input and one thing to compute from it; k is None for softmax itself."""

    batch: int
    vocab: int
    dtype: str
    k: int | None
    direction: str
    logits: str
    seed: int

    @property
    def label(self) -> str:
        """The case in few words, the shape first."""
        dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[self.dtype]
        k = "" if self.k is None else f" k={self.k}"
        logits = os.path.basename(self.logits)
        return f"{self.batch}x{self.vocab} {dtype}{k} {self.direction} {logits}"

    @property
    def least_bytes(self) -> int:
        """Each input read once, each output written once; both is forward plus backward.

        softmax: read x, write y; read y and dy, write dx. top-k: read the logits, write k values
        and k int32 indices; read the logits, write dx.
        """
        itemsize = jnp.dtype(self.dtype).itemsize
        row = self.vocab * itemsize
        if self.k is None:
            forward, backward = 2 * row, 3 * row
        else:
            forward, backward = row + self.k * (itemsize + 4), 2 * row
        per_row = {"forward": forward, "backward": backward, "both": forward + backward}
        return self.batch * per_row[self.direction]


def _open(path: str) -> np.ndarray:
    """The user's logits as (rows, V), still on the disk."""
    array = np.load(path, mmap_mode="r")
    if array.ndim == 0 or array.dtype.kind != "f":
        raise ValueError(
            f"--logits={path} holds {array.dtype} of shape {array.shape}; it must hold float16,"
            " float32 or float64 with at least one axis"
        )
    if array.size == 0:
        raise ValueError(f"--logits={path} is empty: its shape is {array.shape}")
    return array.reshape(-1, array.shape[-1])


def make_cases(settings: Settings, ks: tuple[int | None, ...]) -> list[Case]:
    """The product of the lists; a file has its own V, and no more rows than it holds."""
    cases = []
    for logits in settings.logits:
        if logits in LOGITS:
            shapes = list(itertools.product(settings.batch, settings.vocab))
        else:
            rows, vocab = _open(logits).shape
            shapes = list(dict.fromkeys((min(batch, rows), vocab) for batch in settings.batch))
        for (_, vocab), k in itertools.product(shapes, ks):
            if k is not None and k > vocab:
                raise ValueError(f"--k={k} is more than the row length V={vocab} ({logits} logits)")
        products = itertools.product(shapes, settings.dtype, ks, settings.direction)
        for (batch, vocab), dtype, k, direction in products:
            cases.append(Case(batch, vocab, dtype, k, direction, logits, settings.seed))
    return cases


def _key(case: Case, purpose: str) -> jax.Array:
    # The same shape gives the same numbers in every dtype, k and direction.
    text = f"{purpose} {case.batch} {case.vocab} {case.logits}"
    return jax.random.fold_in(jax.random.key(case.seed), zlib.crc32(text.encode()))


def logits(case: Case) -> jax.Array:
    """The case's input, on the default device.

    Random logits are drawn in float32 and then cast: drawn in 16 bits they would have only a few
    hundred distinct values in the tail, and tie as no model's logits do.
    """
    shape = (case.batch, case.vocab)
    if case.logits not in LOGITS:
        rows = np.asarray(_open(case.logits)[: case.batch], np.float32)
        return jnp.asarray(rows).astype(case.dtype)

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        normal_key, outlier_key = jax.random.split(key)
        x = jax.random.normal(normal_key, shape, jnp.float32)
        if case.logits == "peaked":
            x = jnp.where(jax.random.bernoulli(outlier_key, 1e-3, shape), 20 * x, x)
        elif case.logits == "ties":
            x = jnp.round(x)
            x = jnp.where(x == 0, 0.0, x)  # no -0.0: it ranks below 0.0, but softmax makes them equal
        return x.astype(case.dtype)

    return draw(_key(case, "logits"))


def cotangent(case: Case) -> jax.Array:
    """A random gradient for the case's differentiable output: y, or the k values."""
    shape = (case.batch, case.vocab if case.k is None else case.k)
    return jax.random.normal(_key(case, "cotangent"), shape, jnp.float32).astype(case.dtype)
