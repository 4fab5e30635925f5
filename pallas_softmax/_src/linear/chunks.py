"""The three operations of a projection and its softmax, from what an implementation does for some rows at a time.

    projection             the statistics of each row                                     1 matrix product
    projection_grad        the gradients of x, w and bias, the statistics being known     3 products
    projection_with_grad   both at once, for losses whose weights are known               3 products, or 4

Rows are taken in chunks, so that what is stored of their logits stays within a bound:

             D                    V                          the gradients of a chunk
         ┌───────┐       ┌─────────────────┐
   chunk │ x     │  @  D │ w               │ = z, here dz ──►  dx of the chunk = dz @ w.T
         ├───────┤       └─────────────────┘             ──►  dw, float32    += x.T @ dz
         │       │ ...                                   ──►  dbias, float32 += sum of dz over the rows
         └───────┘

Where the dz of all rows take no more memory than a float32 dw would, they are one chunk, and dw is written once
(`gradient_rows`). Of several chunks, the last one starts where it ends with the array, and of its rows those that were
seen before do not count again.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim

from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.losses import Coefficients, Head, Statistics, Tokens
from pallas_softmax.online import Normalizer, log_of, widen

_ROWS = 128  # what the number of rows of a chunk is a multiple of, where so many fit: a kernel's tile
_FEWEST_ROWS = 8  # and where they do not, also if not even these fit: a block of a kernel's copies


class Pieces(NamedTuple):
    """What an implementation does for some rows at a time: x (rows, D), `Tokens` of these rows, the whole w and bias.

    bias is (V,) or None. dz has the dtype of x and the shape (rows, V).

    Attributes:
      statistics: (x, w, bias, tokens, *, head) -> Statistics.
      dlogits: (x, w, bias, tokens, coefficients, *, head) -> dz, the gradient in the raw logits.
      statistics_and_dlogits: (x, w, bias, tokens, to_coefficients, *, head) -> (Statistics, dz).
        to_coefficients(Statistics) -> (Statistics, Coefficients) merges its argument over a mesh.
      add_product: (total, x, dz, *, head) -> total + x.T @ dz, or its transpose for head.transpose_w; in float32.
        A total of None is 0.
      product: (x, dz, *, head) -> the same without a total, in the dtype of x, summed in float32 without a float32
        array; None if an implementation has no such.
      bytes_per_logit: (itemsize of x) -> the bytes that `statistics` and the other two store for each logit.
    """

    statistics: Callable[..., Statistics]
    dlogits: Callable[..., jax.Array]
    statistics_and_dlogits: Callable[..., tuple[Statistics, jax.Array]]
    add_product: Callable[..., jax.Array]
    product: Callable[..., jax.Array] | None
    bytes_per_logit: Callable[[int], tuple[float, float]]


def chunk_rows(rows: int, vocab: int, bytes_per_logit: float, workspace_bytes: float) -> int:
    """Returns the number of rows of a chunk: of chunks that fit, the fewest, as even as multiples of `_ROWS` are."""
    fit = max(_FEWEST_ROWS, math.floor(workspace_bytes / (max(1, vocab) * max(bytes_per_logit, 1e-9))))
    if not isinstance(rows, int):  # symbolic: of jax.export
        return min_dim(rows, fit)
    if rows <= fit:
        return rows
    unit = _ROWS if fit >= _ROWS else _FEWEST_ROWS
    chunks = -(-rows // (fit // unit * unit))
    even = -(-rows // chunks)
    return min(rows, -(-even // unit) * unit)


def gradient_rows(
    rows: int, vocab: int, bytes_per_logit: float, workspace_bytes: int, dw_bytes: float
) -> int:
    """Returns the number of rows of a chunk of a gradient, by what memory there is at that time anyway.

    Chunks are added to a float32 dw, of `dw_bytes`, each by a pass that reads and writes it. If all rows fit into that
    much, they are one chunk, whose dw is rounded as it is written: there is no float32 one then. Else a chunk may be as
    large as the 16-bit dw that is written in the end, when the chunks are gone. Of bfloat16 that is all rows for
    n <= 2 D, and else chunks of D rows, or of the workspace where that is more.
    """
    if isinstance(rows, int) and rows * vocab * bytes_per_logit <= dw_bytes:
        return rows
    return chunk_rows(rows, vocab, bytes_per_logit, max(workspace_bytes, dw_bytes // 2))


def dot(a: jax.Array, b: jax.Array, along: tuple[int, int], head: Head) -> jax.Array:
    """Returns the matrix product of a and b, summed along one dimension of each, in the dtype of the arithmetic."""
    to = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return lax.dot_general(
        a, b, ((along[:1], along[1:]), ((), ())), precision=head.precision, preferred_element_type=to
    )


def operations_of(pieces: Pieces) -> dict[str, Callable]:
    """Returns the operations of `operations.TABLE` that are made of the pieces of an implementation."""
    return {
        "projection": functools.partial(_projection, pieces),
        "projection_grad": functools.partial(_projection_grad, pieces),
        "projection_with_grad": functools.partial(_projection_with_grad, pieces),
    }


def _projection(
    pieces: Pieces, x, w, bias, tokens: Tokens, *, head: Head, workspace_bytes: int, mesh_axes=()
):
    """Returns the statistics of whole rows.

    Args:
      pieces: those of the implementation.
      x: (n, D), of a floating dtype of 16 bits or more.
      w: (D, V), or (V, D) for head.transpose_w; of the same dtype. Inside `mesh_axes`, a device's columns.
      bias: (V,) or None.
      tokens: the numbers of each token, (n,); labels are columns of whole rows, or None.
      head: what is static of the projection and its loss.
      workspace_bytes: the bound of what is stored of the logits at a time; see `chunk_rows`.
      mesh_axes: the mesh axes that the columns are spread over, in the order of `lax.axis_index`.
    """
    tokens = _on_shard(tokens, x, head.vocab(w), mesh_axes)
    rows = chunk_rows(x.shape[0], head.vocab(w), pieces.bytes_per_logit(x.dtype.itemsize)[0], workspace_bytes)

    def step(chunk: _Chunk, statistics):
        of_chunk = pieces.statistics(chunk.of(x), w, bias, chunk.of(tokens), head=head)
        return chunk.put(statistics, vary_together(of_chunk, x, w)[0])

    empty = vary_together(_no_statistics(x, tokens), x, w, tokens)[0]
    return _over_chunks(x.shape[0], rows, step, empty).merged(mesh_axes)


def _projection_grad(pieces: Pieces, x, w, bias, tokens: Tokens, weights, statistics, **static):
    """Returns the gradients (dx, dw, dbias) of sum(weights * losses), in the dtypes of x, w and bias.

    dx is that of whole rows, dw and dbias are those of this device's columns.

    Args:
      pieces, x, w, bias, tokens: as for `projection`.
      weights: (n,), one per row, in the dtype of the arithmetic; rows of weight 0 are left out, whatever is in them.
      statistics: what `projection` returned.
      **static: as for `projection`; and `with_dw`, whether dw is wanted. If it is not, it is computed all the same, but
        XLA may see that nothing uses it. So its memory may not be there, and chunks are not made as large as it.
    """
    return _gradients(pieces, x, w, bias, tokens, weights, statistics, **static)[1:]


def _projection_with_grad(pieces: Pieces, x, w, bias, tokens: Tokens, weights, **static):
    """Returns the statistics of whole rows (of those whose weight is not 0), and the gradients."""
    return _gradients(pieces, x, w, bias, tokens, weights, None, **static)


def _gradients(
    pieces: Pieces,
    x,
    w,
    bias,
    tokens: Tokens,
    weights,
    known: Statistics | None,
    *,
    head: Head,
    workspace_bytes: int,
    with_dw: bool = True,
    mesh_axes=(),
):
    """Returns the statistics of whole rows, `known` or found, and the gradients (dx, dw, dbias)."""
    whole_vocab = head.vocab(w) * (lax.axis_size(mesh_axes) if mesh_axes else 1)
    tokens = _on_shard(tokens, x, head.vocab(w), mesh_axes)
    rows, product = _way_to_dw(pieces, x, w, head, workspace_bytes, with_dw)
    sizes = weights if tokens.temperature is None else weights / tokens.temperature
    if tokens.z_loss is not None and known is not None:
        sizes = sizes * (1 + 2 * tokens.z_loss * jnp.abs(log_of(known.normalizer)))
    scale = _scale(sizes, x.dtype, exact=product is not None)
    scale_of_x, scale_of_dw = (scale, 1) if product else (1, scale)
    weights = weights / scale

    def to_coefficients(found: Statistics, own_tokens, own_weights) -> tuple[Statistics, Coefficients]:
        found = vary_together(found, x, w)[0].merged(mesh_axes)
        return found, formulas.coefficients(found, own_weights, own_tokens, whole_vocab)

    def gradient(chunk: _Chunk, own_x, own_weights):
        """Returns the statistics of the chunk's rows if they are new, and their dz."""
        own_tokens = chunk.of(tokens)
        arrays = (own_x, w, bias, own_tokens)
        if known is None:
            to = functools.partial(to_coefficients, own_tokens=own_tokens, own_weights=own_weights)
            found, dz = pieces.statistics_and_dlogits(*arrays, to, head=head)
        else:
            coefficients = formulas.coefficients(chunk.of(known), own_weights, own_tokens, whole_vocab)
            found, dz = None, pieces.dlogits(*arrays, coefficients, head=head)
        return found, vary_together(dz, x, w)[0]

    def step(chunk: _Chunk, carry):
        statistics, dx, dw, dbias = carry
        own_weights = chunk.new(chunk.of(weights))
        own_x = jnp.where(own_weights[:, None] == 0, 0, chunk.of(x))  # a NaN there must not reach dw
        found, dz = gradient(chunk, own_x, own_weights)
        own_dx = dot(dz, w, (1, 0 if head.transpose_w else 1), head) * scale
        own_dx = lax.psum(own_dx, mesh_axes) if mesh_axes else own_dx
        own_x = (own_x * scale_of_x).astype(x.dtype)
        dw = product(own_x, dz, head=head) if product else pieces.add_product(dw, own_x, dz, head=head)
        dw = vary_together(dw, x, w, tokens, weights)[0]
        if bias is not None:
            dbias = dbias + jnp.sum(dz, 0, dtype=dbias.dtype)
        statistics = statistics if found is None else chunk.put(statistics, found)
        return statistics, chunk.put(dx, own_dx.astype(x.dtype)), dw, dbias

    per_row = known if known is not None else _no_statistics(x, tokens)
    per_row, dx = vary_together((per_row, jnp.zeros_like(x)), x, w, tokens, weights, but=mesh_axes)[0]
    dbias = None if bias is None else jnp.zeros(bias.shape, widen(x).dtype)
    dbias = vary_together(dbias, x, w, tokens, weights)[0]
    carry = per_row, dx, None, dbias
    statistics, dx, dw, dbias = _over_chunks(x.shape[0], rows, step, carry, first_apart=True)
    dbias = None if bias is None else (dbias * scale).astype(bias.dtype)
    return statistics, dx, (dw * scale_of_dw).astype(w.dtype), dbias


# What takes the place of dw has no more logits than int32 counts, lest a compiler or library count in it.
_MOST_LOGITS = 2**31 - 1


def _way_to_dw(
    pieces: Pieces, x, w, head: Head, workspace_bytes: int, with_dw: bool
) -> tuple[Any, Callable | None]:
    """Returns the rows of a chunk, and what makes dw of all rows at once: None if chunks are added to a float32 dw."""
    n = x.shape[0]
    product = pieces.product if x.dtype == jnp.bfloat16 else None  # float16 has no room for x times a weight
    stored = pieces.bytes_per_logit(x.dtype.itemsize)[1]
    dw_bytes = min(4 * w.size, stored * _MOST_LOGITS) if product and with_dw else 0
    rows = gradient_rows(n, head.vocab(w), stored, workspace_bytes, dw_bytes)
    return rows, product if _is_one_chunk(n, rows) else None


# What the largest dz in float16 may be, about, so that small probabilities do not underflow: 64 times more is left.
_LARGEST = 2.0**10


def _scale(sizes, dtype, *, exact: bool):
    """Returns what the weights are divided by before dz, of which they are factors, is rounded to the dtype of x.

    The gradients are multiplied by it in float32; or x is, before the product for dw.

    The largest size becomes 1 (in float16 1024), of which the gradient at an improbable label is not rounded. With
    `exact` the scale is a power of two, so that x times it is not rounded, and the largest size is from 1 to 2.

    Args:
      sizes: how large the elements of each row's dz may be, about.
      dtype: that of x.
      exact: whether x is multiplied by the scale.
    """
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), jnp.abs(sizes), 0), initial=0)
    scale = jnp.where(largest > 0, largest / (_LARGEST if dtype == jnp.float16 else 1.0), 1)
    scale = jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)  # a smaller one would become 0
    return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=0) if exact else scale


def _no_statistics(x, tokens: Tokens) -> Statistics:
    zeros = jnp.zeros(x.shape[:1], widen(x).dtype)
    return Statistics(Normalizer(zeros, zeros), zeros, None if tokens.label_smoothing is None else zeros)


def _on_shard(tokens: Tokens, x, vocab: int, mesh_axes) -> Tokens:
    """Returns the tokens with labels as columns of this device; without labels, with labels that are no column."""
    labels = tokens.labels
    if labels is None:
        labels = vary_together(jnp.full(x.shape[:1], -1, jnp.int32), x)[0]
    elif mesh_axes:
        labels = labels - lax.axis_index(mesh_axes) * vocab
    return tokens._replace(labels=labels)


class _Chunk(NamedTuple):
    """Some consecutive rows.

    Attributes:
      start: the first one; None if the chunk is all rows.
      rows: their number.
      seen: how many of them, the first ones, belong to the chunk before.
    """

    start: Any
    rows: int
    seen: Any

    def of(self, arrays):
        """These rows of the arrays, of which None stays."""
        if self.start is None:
            return arrays
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.start, self.rows), arrays)

    def new(self, part, old=0):
        """Returns `part`, of these rows, with `old` in those that were seen before."""
        if self.start is None:
            return part
        index = lax.broadcasted_iota(jnp.int32, part.shape, 0)
        return jnp.where(index < self.seen, old, part)

    def put(self, arrays, parts):
        """Returns the arrays with these rows of them replaced, but for those that were seen before."""
        if self.start is None:
            return parts

        def put(a, part):
            return lax.dynamic_update_slice_in_dim(a, self.new(part, self.of(a)), self.start, 0)

        return jax.tree.map(put, arrays, parts)


def _is_one_chunk(n: int, rows: int) -> bool:
    """Returns whether chunks of so many rows are one chunk of n rows. (In `jax.export` both may be symbolic.)"""
    return rows is n or rows == n


def _over_chunks(n: int, rows: int, step: Callable[[_Chunk, Any], Any], carry, *, first_apart: bool = False):
    """Returns what carry = step(chunk, carry) gives in the end, called for each chunk of n rows; it changes in place.

    With `first_apart`, step takes the first chunk before the loop, and may make arrays of what is None in `carry`.
    """
    if _is_one_chunk(n, rows):
        return step(_Chunk(None, rows, 0), carry)
    if first_apart:
        carry = step(_Chunk(jnp.int32(0), rows, 0), carry)

    def body(i, carry):
        start = jnp.minimum(i * rows, n - rows)
        return step(_Chunk(start, rows, i * rows - start), carry)

    return lax.fori_loop(1 if first_apart else 0, -(-n // rows), body, carry)
