"""The base of all operations of a projection: the functions of an implementation, and the numbers all rows share."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch.mesh_types import rounded_sum
from pallas_softmax._src.linear import chunks
from pallas_softmax._src.linear.losses import Coefficients, Columns, Head, Statistics, Tokens
from pallas_softmax._src.normalizers import Normalizer


class ChunkFunctions(NamedTuple):
    """The functions of an implementation on some rows: x (rows, D), `Tokens` of these rows, the whole w and bias.

    bias is (V,) or None. Labels are columns of this device (`with_own_labels`). dz, the gradient in the raw logits, has
    the dtype of x and the shape (rows, columns of w); it is 0 from column V on. Its elements at the labels may be
    anything: `gradients._put_at_labels` replaces them.

    Attributes:
      statistics: (x, w, bias, tokens, *, head) -> Statistics of this device's columns.
      dlogits: (`Projection`, x, tokens, weights, known) -> (Statistics, Coefficients, dz, factor). The Statistics are
        of whole rows: `known`, or computed if that is None. The gradient is factor (rows,) times dz, or dz if factor is
        None.
      logits: (x, w, bias, tokens, *, head) -> (z, Normalizer), in the dtype of the arithmetic. z has the columns of w,
        and -inf from column V on. With `head.undivided`, z is before the temperature divides it.
      bytes_per_logit: (itemsize of x) -> the bytes that `statistics` and `dlogits` store for each logit.
      draw: (x, w, bias, tokens, *, head) -> (column, logit, Normalizer), a draw from whole rows without filters, by
        words of noise; None if there is no such function. The logit is before the temperature divides it. A row without
        a finite maximum may get any column.
      are_plain: whether the functions are plain JAX, for any platform. Others are for a GPU.
    """

    statistics: Callable[..., Statistics]
    dlogits: Callable[..., tuple[Statistics, Coefficients, jax.Array, jax.Array | None]]
    logits: Callable[..., tuple[jax.Array, Normalizer]]
    bytes_per_logit: Callable[[int], tuple[float, float]]
    draw: Callable[..., tuple[jax.Array, jax.Array, Normalizer]] | None
    are_plain: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """All that is the same for every row of a projection on one device.

    If dw is not wanted (`with_dw`), it is computed all the same, but XLA may remove it as unused. Its memory may then
    not exist, so chunks do not count on it.
    """

    functions: ChunkFunctions
    w: jax.Array  # (D, V), or (V, D) for head.transpose_w; inside `mesh_axes`, a device's columns
    columns: Columns  # the same columns as w
    head: Head
    workspace_bytes: int  # the most bytes of logits that are stored at a time; see `chunk_rows`
    with_dw: bool = True
    mesh_axes: tuple[str, ...] = ()  # the columns are spread over them, in the order of `lax.axis_index`
    partial_dw: bool = False  # whether dw and dbias are parts of sums over devices: they stay in float32
    partial_dx: bool = False  # the same for dx, which is then not summed over `mesh_axes`

    @property
    def vocab(self) -> int:  # on this device
        return self.head.vocab(self.w)

    @property
    def whole_vocab(self) -> int:  # on all devices
        return self.vocab * lax.axis_size(self.mesh_axes)

    def on_kept_rows(self, step: Callable, x, tokens: Tokens, bytes_per_logit: float) -> Any:
        """Returns step(x, tokens), computed from the kept rows, chunk by chunk; 1 for other rows.

        It is 1 because statistics of 1 are harmless: no number that follows from them is NaN. See also `in_chunks`.
        """

        def computed(rows):
            return self.in_chunks(step, rows, bytes_per_logit), None

        return chunks.on_kept_rows(computed, tokens.kept, (x, tokens), left_out=1)[0]

    def in_chunks(self, step: Callable, rows: tuple, bytes_per_logit: float) -> Any:
        """Returns step(*rows), computed chunk by chunk.

        Args:
          step: maps some rows of the arrays to a tree of arrays (rows, ...). It stores `bytes_per_logit`.
          rows: trees of arrays (n, ...); the first one is an array.
        """
        n = rows[0].shape[0]
        size = chunks.chunk_rows(n, self.vocab, bytes_per_logit, self.workspace_bytes)
        return chunks.over_chunks(n, size, lambda chunk, _: (step(*chunk.slice(rows)), None), with_sums=False)[0]

    def with_own_labels(self, tokens: Tokens, x) -> Tokens:
        """Returns the tokens with labels as columns of this device; without labels, with -1, which is no column."""
        labels = tokens.labels
        if labels is None:
            labels = jnp.full_like(x, -1, jnp.int32, shape=x.shape[:1])
        elif self.mesh_axes:
            labels = labels - lax.axis_index(self.mesh_axes) * self.vocab
        return tokens._replace(labels=labels)

    def dx(self, dz, factor) -> jax.Array:
        """Returns dz @ w.T times a number for each row, in the dtype of dz, summed over the mesh axes.

        With `partial_dx` it is not summed, and has the dtype of the arithmetic.
        """
        dx = dot(dz, self.w, (1, 0 if self.head.transpose_w else 1), self.head) * factor[:, None]
        if self.partial_dx:
            return dx
        return rounded_sum(dx, dz.dtype, self.mesh_axes) if self.mesh_axes else dx.astype(dz.dtype)

    def dw(self, x, dz, dtype=None) -> jax.Array:
        """Returns x.T @ dz, or its transpose for head.transpose_w, in a dtype; None for the one of the arithmetic."""
        a, b = (dz, x) if self.head.transpose_w else (x, dz)
        return dot(a, b, (0, 0), self.head, dtype)

    def largest(self, a) -> jax.Array:
        return lax.pmax(a, self.mesh_axes) if self.mesh_axes else a


def dot(a: jax.Array, b: jax.Array, along: tuple[int, int], head: Head, dtype=None) -> jax.Array:
    """Returns the matrix product of a and b, summed along one dimension of each.

    It is in the dtype of the arithmetic, or in another one, rounded as it is written.
    """
    to = dtype or (jnp.float64 if a.dtype == jnp.float64 else jnp.float32)
    return lax.dot_general(
        a, b, ((along[:1], along[1:]), ((), ())), precision=head.precision, preferred_element_type=to
    )
