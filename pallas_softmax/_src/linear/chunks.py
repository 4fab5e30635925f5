"""The three operations of a projection and its softmax, built from the functions of an implementation on some rows.

    projection             the statistics of each row                                 1 matrix product
    projection_grad        the gradients of x, w and bias, from known statistics      3 products
    projection_with_grad   both at once, for losses with known weights                3 products, or 4

Rows are taken in chunks, so that the stored logits stay within a bound:

             D                    V                          the gradients of a chunk
         ┌───────┐       ┌─────────────────┐
   chunk │ x     │  @  D │ w               │ = z, here dz ──►  dx of the chunk = dz @ w.T
         ├───────┤       └─────────────────┘             ──►  dw, float32    += x.T @ dz
         │       │ ...                                   ──►  dbias, float32 += sum of dz over the rows
         └───────┘

In bfloat16 on a GPU, if the dz of all rows take no more memory than a float32 dw would, there is one chunk, and dw is
written once (`gradient_rows`). Otherwise all chunks have the same size. If they do not divide the rows, the last chunk
overlaps the one before it, and its repeated rows do not count again.

Rows that are left out do not take part in the products (`_on_kept_rows`):

    rows      a . c . . f . h     "." is left out
    gather    a c f h . . . .     kept rows first
    compute   a c f h .           the first rows only: the smallest of a few sizes that holds the kept rows
    scatter   A . C . . F . H     results in their places
"""

import dataclasses
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
from pallas_softmax._src.normalizers import Normalizer, log_of, widen

_ROWS = 128  # the rows of a chunk are a multiple of this, if so many fit: the rows of a kernel's tile
# Otherwise a multiple of this, even if 8 do not fit: the rows of an atom (`plan.ATOM_ROWS`).
_FEWEST_ROWS = 8

# A chunk that replaces a float32 dw has at most this many logits, so that int32 indices cannot overflow.
_MOST_LOGITS = 2**31 - 1

# With rows left out, this many sixteenths of the rows may be computed. A program contains the code for each size, and
# the GPU's host picks one while the program runs. Sizes are a little above the quarters: a random mask keeps a few rows
# more or less than half. For fewer rows, the sizes would save little time.
_SIXTEENTHS = (5, 9, 13)
_FEWEST_ROWS_TO_LEAVE_OUT = 1024

# The largest dz in float16 is about this, so that small probabilities do not underflow. It leaves a factor of 64.
_LARGEST = 2.0**10


class Pieces(NamedTuple):
    """The functions of an implementation on some rows: x (rows, D), `Tokens` of these rows, the whole w and bias.

    bias is (V,) or None. dz has the dtype of x and the shape (rows, V).

    Attributes:
      statistics: (x, w, bias, tokens, *, head) -> Statistics.
      dlogits: (x, w, bias, tokens, coefficients, *, head) -> dz, the gradient in the raw logits. Here and in
        `statistics_and_dlogits`, dz at several labels may be anything: it is replaced.
      statistics_and_dlogits: (x, w, bias, tokens, to_coefficients, largest, *, head) -> (Statistics, dz, of_rows).
        to_coefficients(Statistics) -> (Statistics, Coefficients) merges its argument over a mesh. largest(a) is the
        maximum over the mesh. The gradient is of_rows (rows,) times dz, or dz if of_rows is None.
      add_product: (total, x, dz, *, head) -> total + x.T @ dz, or its transpose for head.transpose_w; in the
        dtype of the arithmetic. A total of None is 0.
      product: (x, dz, *, head) -> the same without a total, in the dtype of x. It is summed in float32 without a
        float32 array. None if an implementation has no such function.
      bytes_per_logit: (itemsize of x, whether there are several labels) -> two numbers, the bytes that `statistics`
        stores for each logit, and the bytes that the other two store.
    """

    statistics: Callable[..., Statistics]
    dlogits: Callable[..., jax.Array]
    statistics_and_dlogits: Callable[..., tuple[Statistics, jax.Array, jax.Array | None]]
    add_product: Callable[..., jax.Array]
    product: Callable[..., jax.Array] | None
    bytes_per_logit: Callable[[int, bool], tuple[float, float]]


def chunk_rows(rows: int, vocab: int, bytes_per_logit: float, workspace_bytes: float) -> int:
    """Returns the number of rows of a chunk: as few chunks as fit, and as even as multiples of `_ROWS` allow."""
    fit = max(_FEWEST_ROWS, math.floor(workspace_bytes / (max(1, vocab) * max(bytes_per_logit, 1e-9))))
    if not isinstance(rows, int):  # a symbolic dimension of jax.export
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
    """Returns the number of rows of a chunk of a gradient, given the memory that the gradient takes anyway.

    Each of several chunks is added to a float32 dw of `dw_bytes`, by a pass that reads and writes it. If all rows fit
    into `dw_bytes`, they are one chunk. Its dw is rounded as it is written, so there is no float32 dw. Otherwise a
    chunk may be as large as the 16-bit dw, which is written when the chunks are gone. In bfloat16 this makes one chunk
    of up to 2 D rows. For more rows, chunks have D rows, or as many as the workspace holds if that is more.
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
    """Returns the operations of a projection, by name, made of the pieces of an implementation."""
    return {
        "projection": functools.partial(_projection, pieces),
        "projection_grad": functools.partial(_projection_grad, pieces),
        "projection_with_grad": functools.partial(_projection_with_grad, pieces),
    }


def _projection(pieces: Pieces, x, w, bias, tokens: Tokens, **static):
    """Returns the statistics of whole rows.

    Args:
      pieces, w, bias: as for `_Projection`.
      x: (n, D), in a floating dtype of at least 16 bits.
      tokens: the numbers of each token, (n,); labels are columns of whole rows, (n,) or (n, K), or None.
      **static: `head`, `workspace_bytes` and `mesh_axes`, as for `_Projection`.
    """
    projection = _Projection(pieces, w, bias, **static)
    tokens = projection.with_own_labels(tokens, x)
    empty = vary_together(_no_statistics(x, tokens, projection.head), x, w, tokens)[0]

    def of_rows(rows) -> tuple[Statistics, None]:
        return _statistics(projection, *rows), None

    return _on_kept_rows(of_rows, tokens.kept, (x, tokens), empty)[0].merged(
        projection.mesh_axes, projection.vocab
    )


def _statistics(projection: "_Projection", x, tokens: Tokens) -> Statistics:
    """Returns the statistics of this device's columns."""
    stored, _ = projection.pieces.bytes_per_logit(x.dtype.itemsize, tokens.several)
    rows = chunk_rows(x.shape[0], projection.vocab, stored, projection.workspace_bytes)
    w, bias, head = projection.w, projection.bias, projection.head

    def step(chunk: Chunk, found: Statistics) -> Statistics:
        of_chunk = projection.pieces.statistics(chunk.of(x), w, bias, chunk.of(tokens), head=head)
        return chunk.put(found, vary_together(of_chunk, x, w)[0])

    empty = vary_together(_no_statistics(x, tokens, head), x, w, tokens)[0]
    return over_chunks(x.shape[0], rows, step, empty)


def _projection_grad(pieces: Pieces, x, w, bias, tokens: Tokens, weights, statistics, **static):
    """Returns the gradients (dx, dw, dbias) of sum(weights * losses), in the dtypes of x, w and bias.

    dx is the gradient of whole rows. dw and dbias are the gradients of this device's columns.

    Args:
      pieces, x, w, bias, tokens: as for `_projection`.
      weights: (n,), one per row, in the dtype of the arithmetic; rows of weight 0 are left out, whatever they hold.
        (n, K) for several labels: the gradients of the sum over all losses of a row. (n, 3) with `head.entropy`: see
        `losses.coefficients`.
      statistics: the result of `_projection`. Only gradients of 16-bit x use it.
      **static: as for `_projection`; and `with_dw`.
    """
    # XLA may compute float32 logits by other matrix product algorithms here than in the forward pass, and round them
    # differently. In a row with p = 1 at the label, the gradient would be this difference of two large logits instead
    # of 0. So the gradient computes statistics of its own logits. Compared with float32 products, this costs little.
    known = statistics if x.dtype.itemsize == 2 else None
    return _gradients(_Projection(pieces, w, bias, **static), _GradientRows(x, tokens, weights, known))[1:]


def _projection_with_grad(pieces: Pieces, x, w, bias, tokens: Tokens, weights, **static):
    """Returns the statistics of whole rows (except rows of weight 0), and the gradients."""
    return _gradients(_Projection(pieces, w, bias, **static), _GradientRows(x, tokens, weights, None))


@dataclasses.dataclass(frozen=True, eq=False)
class _Projection:
    """All that is the same for every row of a projection on one device.

    Attributes:
      pieces: the functions of the implementation.
      w: (D, V), or (V, D) for head.transpose_w; in the dtype of x. Inside `mesh_axes`, a device's columns.
      bias: (V,) or None.
      head: the static part of the projection and its loss.
      workspace_bytes: the bound on the logits that are stored at a time; see `chunk_rows`.
      with_dw: whether dw is wanted. If not, it is computed all the same, but XLA may remove it as unused. Its memory
        may then not exist, so chunks do not count on it.
      mesh_axes: the mesh axes that the columns are spread over, in the order of `lax.axis_index`.
    """

    pieces: Pieces
    w: jax.Array
    bias: jax.Array | None
    head: Head
    workspace_bytes: int
    with_dw: bool = True
    mesh_axes: tuple[str, ...] = ()

    @property
    def vocab(self) -> int:
        """The number of columns on this device."""
        return self.head.vocab(self.w)

    @property
    def whole_vocab(self) -> int:
        """The number of columns of a whole row."""
        return self.vocab * (lax.axis_size(self.mesh_axes) if self.mesh_axes else 1)

    def with_own_labels(self, tokens: Tokens, x) -> Tokens:
        """Returns the tokens with labels as columns of this device; without labels, with -1, which is no column."""
        labels = tokens.labels
        if labels is None:
            labels = vary_together(jnp.full(x.shape[:1], -1, jnp.int32), x)[0]
        elif self.mesh_axes:
            labels = labels - lax.axis_index(self.mesh_axes) * self.vocab
        return tokens._replace(labels=labels)

    def way_to_dw(self, x, tokens: Tokens) -> tuple[Any, Callable | None]:
        """Returns the rows of a chunk of a gradient, and the function that computes dw of all rows at once.

        The function is None if chunks are added to a float32 dw.
        """
        n = x.shape[0]
        # For this product, x is multiplied by the scale, which could overflow in float16.
        product = self.pieces.product if x.dtype == jnp.bfloat16 else None
        _, stored = self.pieces.bytes_per_logit(x.dtype.itemsize, tokens.several)
        dw_bytes = min(4 * self.w.size, stored * _MOST_LOGITS) if product and self.with_dw else 0
        rows = gradient_rows(n, self.vocab, stored, self.workspace_bytes, dw_bytes)
        return rows, product if _is_one_chunk(n, rows) else None

    def dx(self, dz, of_rows) -> jax.Array:
        """Returns dz @ w.T times a number for each row, summed over the mesh axes."""
        dx = dot(dz, self.w, (1, 0 if self.head.transpose_w else 1), self.head) * of_rows[:, None]
        return lax.psum(dx, self.mesh_axes) if self.mesh_axes else dx

    def largest(self, a) -> jax.Array:
        """Returns the maximum over the mesh axes."""
        return lax.pmax(a, self.mesh_axes) if self.mesh_axes else a


class _GradientRows(NamedTuple):
    """The arrays of a gradient that have a row, or a number, for each token.

    Attributes:
      x: (n, D).
      tokens: the numbers of each token, with labels as columns of this device.
      weights: (n,) or (n, K), divided by the scale; see `_scale`.
      known: the statistics of whole rows; None if the gradient computes them.
    """

    x: jax.Array
    tokens: Tokens
    weights: jax.Array
    known: Statistics | None


def _gradients(projection: _Projection, rows: _GradientRows):
    """Returns the statistics of whole rows, known or computed, and the gradients (dx, dw, dbias)."""
    rows = rows._replace(tokens=projection.with_own_labels(rows.tokens, rows.x))
    of_no_row = _no_statistics(rows.x, rows.tokens, projection.head), jnp.zeros_like(rows.x)
    of_no_row = vary_together(of_no_row, rows, projection.w, but=projection.mesh_axes)[0]
    of_rows = functools.partial(_gradients_of_rows, projection)
    per_row, of_w = _on_kept_rows(of_rows, rows.tokens.kept, rows, of_no_row)
    return *per_row, *of_w


def _gradients_of_rows(projection: _Projection, rows: _GradientRows):
    """Returns two tuples, (statistics, dx) and (dw, dbias)."""
    x, tokens, weights, known = rows
    w, bias = projection.w, projection.bias
    size_of_chunk, product = projection.way_to_dw(x, tokens)
    scale = _scale(_dz_sizes(tokens, weights, known), x.dtype, exact=product is not None)
    rows = rows._replace(weights=weights / scale)
    step = functools.partial(_add_chunk, projection, rows, product, scale)

    statistics = known if known is not None else _no_statistics(x, tokens, projection.head)
    per_row = vary_together((statistics, jnp.zeros_like(x)), rows, w, but=projection.mesh_axes)[0]
    dbias = None if bias is None else jnp.zeros(bias.shape, widen(x).dtype)
    carry = *per_row, None, vary_together(dbias, rows, w)[0]
    *per_row, dw, dbias = over_chunks(x.shape[0], size_of_chunk, step, carry, first_apart=True)

    dbias = None if bias is None else (dbias * scale).astype(bias.dtype)
    return tuple(per_row), ((dw * (1 if product else scale)).astype(w.dtype), dbias)


def _on_kept_rows(function: Callable[[Any], tuple[Any, Any]], kept, rows, of_no_row) -> tuple[Any, Any]:
    """Returns function(rows), computed from the kept rows.

    Args:
      function: (rows) -> (a result for each row, results of all rows together). Other rows than the kept ones do not
        change the results of all rows together.
      kept: boolean (n,), or None for all rows.
      rows: a tree of arrays (n, ...).
      of_no_row: the first results, for rows that are left out. They may have other results.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    if kept is None or not isinstance(n, int) or n < _FEWEST_ROWS_TO_LEAVE_OUT:
        return function(rows)

    def of_first(size: int) -> Callable:
        def branch(rows):
            first = jnp.argsort(~kept, stable=True)[:size]  # kept rows first
            unique = {"mode": "promise_in_bounds", "unique_indices": True}
            per_row, of_all = function(jax.tree.map(lambda a: a.at[first].get(**unique), rows))
            return jax.tree.map(lambda a, part: a.at[first].set(part, **unique), of_no_row, per_row), of_all

        return branch

    sizes = [-(-n * part // 16 // _ROWS) * _ROWS for part in _SIXTEENTHS]
    too_small = sum((jnp.sum(kept) > size).astype(jnp.int32) for size in sizes)
    return lax.switch(too_small, [*map(of_first, sizes), function], rows)


def _add_chunk(projection: _Projection, rows: _GradientRows, product: Callable | None, scale, chunk, carry):
    """Returns `carry` with the statistics and gradients of a chunk.

    `dz` here is the gradient of the logits divided by the scale, and by a number of each row, `of_rows`:

        dx = (dz @ w.T) * of_rows * scale
        dw = (x * of_rows).T @ dz * scale       by `product`, x is multiplied by the scale; otherwise, the last dw is

    Args:
      projection: what all rows share.
      rows: the arrays of all rows.
      product: computes dw if the chunk is all rows; None adds the chunk to dw.
      scale: the number that the weights were divided by.
      chunk: the `Chunk`.
      carry: (statistics, dx, dw, dbias). dw and dbias are not multiplied by the scale yet, except a dw by `product`.
    """
    head, bias = projection.head, projection.bias
    statistics, dx, dw, dbias = carry
    weights = chunk.new(chunk.of(rows.weights))
    out = formulas.left_out(weights)
    x = jnp.where(out[:, None], 0, chunk.of(rows.x))  # a NaN there must not reach dw
    found, dz, of_rows = _dz_of_chunk(projection, rows, chunk, x, weights)
    of_rows = jnp.ones_like(weights, shape=out.shape) if of_rows is None else of_rows
    dx_of_chunk = jnp.where(out[:, None], 0, projection.dx(dz, of_rows * scale))
    of_x = of_rows * scale if product else of_rows
    x = (x.astype(of_x.dtype) * of_x[:, None]).astype(x.dtype)
    dw = product(x, dz, head=head) if product else projection.pieces.add_product(dw, x, dz, head=head)
    dw = vary_together(dw, rows.x, projection.w, rows.tokens, rows.weights)[0]
    if bias is not None:
        dbias = dbias + jnp.sum(of_rows[:, None] * dz.astype(dbias.dtype), 0)
    statistics = statistics if found is None else chunk.put(statistics, found)
    return statistics, chunk.put(dx, dx_of_chunk.astype(x.dtype)), dw, dbias


def _dz_of_chunk(projection: _Projection, rows: _GradientRows, chunk: "Chunk", x, weights):
    """Returns (statistics, dz, of_rows) of a chunk, as `Pieces.statistics_and_dlogits` does.

    The statistics are None if they were known before. Otherwise they are the statistics of whole rows.

    Args:
      projection: what all rows share.
      rows: the arrays of all rows.
      chunk: which rows.
      x, weights: these rows of the arrays; rows that do not count are 0.
    """
    pieces, head, w = projection.pieces, projection.head, projection.w
    tokens = chunk.of(rows.tokens)
    if tokens.temperature is not None:  # out of range, it is NaN
        tokens = tokens._replace(temperature=jnp.where(formulas.left_out(weights), 1, tokens.temperature))
    arrays = (x, w, projection.bias, tokens)

    def to_coefficients(found: Statistics) -> tuple[Statistics, Coefficients]:
        found = vary_together(found, rows.x, w)[0].merged(projection.mesh_axes, projection.vocab)
        return found, formulas.coefficients(found, weights, tokens, projection.whole_vocab)

    if rows.known is None:
        found, dz, of_rows = pieces.statistics_and_dlogits(
            *arrays, to_coefficients, projection.largest, head=head
        )
    else:
        known = chunk.of(rows.known)
        coefficients = formulas.coefficients(known, weights, tokens, projection.whole_vocab)
        found, dz, of_rows = None, pieces.dlogits(*arrays, coefficients, head=head), None
    if tokens.several:  # no implementation of several labels has a factor of each row
        of_whole_rows = known if found is None else found
        coefficients = formulas.coefficients(of_whole_rows, weights, tokens, projection.whole_vocab)
        at_labels = formulas.gradient_at_label(of_whole_rows.label_logit, coefficients, tokens, head)
        dz = _put_at_labels(dz, at_labels, tokens.labels, projection.vocab)
    return found, *vary_together(dz, of_rows, rows.x, w)[:2]


def _put_at_labels(dz: jax.Array, at_labels: jax.Array, labels: jax.Array, vocab: int) -> jax.Array:
    """Returns dz (rows, V) with the elements at several labels replaced by `at_labels`, (rows, K).

    The label's terms are subtracted in float32 and rounded once, like a single label's. Equal labels of a row have the
    same element. Labels that are not a column of this device change nothing.
    """
    columns = jnp.where((labels >= 0) & (labels < vocab), labels, dz.shape[1])
    dz, at_labels, columns = vary_together(dz, at_labels.astype(dz.dtype), columns)
    rows = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    return dz.at[rows, columns].set(at_labels, mode="drop")


def _dz_sizes(tokens: Tokens, weights, known: Statistics | None) -> jax.Array:
    """Returns about how large the elements of each row's dz may be."""
    weights = jnp.sum(jnp.abs(weights), 1) if weights.ndim == 2 else weights
    sizes = weights if tokens.temperature is None else weights / tokens.temperature
    if tokens.z_loss is not None and known is not None:
        sizes = sizes * (1 + 2 * tokens.z_loss * jnp.abs(log_of(known.normalizer)))
    return sizes


def _scale(sizes, dtype, *, exact: bool):
    """Returns the number that the weights are divided by. dz is proportional to the weights, and rounded to x's dtype.

    The gradients are multiplied by the scale in float32. For dw, x may be multiplied instead, before the product.

    The largest size becomes 1 (1024 in float16), so that the gradient at an improbable label is not rounded. With
    `exact`, the scale is rounded to a power of two, so that x times the scale is not rounded. The largest size then
    becomes a number from 0.75 to 1.5.

    Args:
      sizes: about how large the elements of each row's dz may be.
      dtype: the dtype of x.
      exact: whether x is multiplied by the scale.
    """
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), jnp.abs(sizes), 0), initial=0)
    scale = jnp.where(largest > 0, largest / (_LARGEST if dtype == jnp.float16 else 1.0), 1)
    scale = jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)  # a smaller one would become 0
    return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=0) if exact else scale


def _no_statistics(x, tokens: Tokens, head: Head) -> Statistics:
    """Returns harmless statistics, for rows that are left out."""
    zeros = jnp.zeros(x.shape[:1], widen(x).dtype)
    at_label = jnp.zeros(tokens.labels.shape, zeros.dtype)
    total = None if tokens.label_smoothing is None else zeros
    of_entropy = (zeros, zeros.astype(jnp.int32)) if head.entropy else ()
    return Statistics(Normalizer(zeros, jnp.ones_like(zeros)), at_label, total, *of_entropy)


class Chunk(NamedTuple):
    """Some consecutive rows.

    Attributes:
      start: the first row; None if the chunk is all rows.
      rows: the number of rows.
      seen: how many rows, at the start of this chunk, belong to the chunk before it.
    """

    start: Any
    rows: int
    seen: Any

    def of(self, arrays):
        """Returns these rows of each array in a tree; None stays."""
        if self.start is None:
            return arrays
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.start, self.rows), arrays)

    def new(self, part, old=0):
        """Returns `part`, an array of these rows, with `old` in the rows that were seen before."""
        if self.start is None:
            return part
        index = lax.broadcasted_iota(jnp.int32, part.shape, 0)
        return jnp.where(index < self.seen, old, part)

    def put(self, arrays, parts):
        """Returns the arrays with `parts` in these rows, except in rows that were seen before."""
        if self.start is None:
            return parts

        def put(a, part):
            return lax.dynamic_update_slice_in_dim(a, self.new(part, self.of(a)), self.start, 0)

        return jax.tree.map(put, arrays, parts)


def _is_one_chunk(n: int, rows: int) -> bool:
    """Returns whether one chunk of `rows` rows holds all n. (In `jax.export` both may be symbolic.)"""
    return rows is n or rows == n


def over_chunks(n: int, rows: int, step: Callable[[Chunk, Any], Any], carry, *, first_apart: bool = False):
    """Returns the last carry of carry = step(chunk, carry), called for each chunk of n rows; it changes in place.

    With `first_apart`, step takes the first chunk before the loop, and may replace a None in `carry` by an array.
    """
    if _is_one_chunk(n, rows):
        return step(Chunk(None, rows, 0), carry)
    first = jnp.int32(0)
    if first_apart:
        carry = step(Chunk(first, rows, 0), carry)
        # XLA must not know the length of the loop. A loop of one step would become no loop, and XLA would store the
        # logits of two chunks at a time.
        first = lax.optimization_barrier(first + 1)

    def body(i, carry):
        start = jnp.minimum(i * rows, n - rows)
        return step(Chunk(start, rows, i * rows - start), carry)

    return lax.fori_loop(first, -(-n // rows), body, carry)
