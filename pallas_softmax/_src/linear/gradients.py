"""The operations of a projection and its softmax, built from the functions of an implementation on some rows.

    projection          the statistics of each row                                      1 matrix product
    projection_grad     the gradients of x, w and bias, and the statistics if unknown   3 products, or 4
    projection_sample   a draw from each row (`draws.py`)                               1 product

Rows are taken in chunks (`chunks.py`):

             D                    V                          the gradients of a chunk
         ┌───────┐       ┌─────────────────┐
   chunk │ x     │  @  D │ w               │ = z, here dz ──►  dx of the chunk = dz @ w.T
         ├───────┤       └─────────────────┘             ──►  dw, float32    += x.T @ dz
         │       │ ...                                   ──►  dbias, float32 += sum of dz over the rows
         └───────┘

With a teacher, the first two take 2 and 4 products: the teacher's logits are another product (`divergence.py`).

In bfloat16 on a GPU, one chunk may hold all rows, so that dw is written once: see `gradient_rows`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.linear import chunks, divergence
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear.chunks import Chunk
from pallas_softmax._src.linear.draws import projection_sample
from pallas_softmax._src.linear.losses import Columns, Statistics, Tokens
from pallas_softmax._src.linear.projection import ChunkFunctions, Projection
from pallas_softmax._src.masks import is_column
from pallas_softmax._src.normalizers import log_of

# A chunk that replaces a float32 dw has at most this many logits, so that int32 indices cannot overflow.
_MOST_LOGITS = 2**31 - 1

# The largest quotient of a label's gradient and its row's factor. bfloat16 holds it; e beyond it counts as 0.
_LARGEST_RATIO = 2.0**100

# The largest dz in float16 is about this, so that small probabilities do not underflow. It leaves a factor of 64.
_LARGEST = 2.0**10


def operations_of(functions: ChunkFunctions) -> dict[str, Callable]:
    operations = projection, projection_grad, projection_sample
    return {operation.__name__: functools.partial(operation, functions) for operation in operations}


def projection(functions: ChunkFunctions, x, w, columns: Columns, tokens: Tokens, **static) -> Statistics:
    """Returns the statistics of whole rows.

    Args:
      functions, w, columns, static: as for `Projection`.
      x: (n, D), in a floating dtype of at least 16 bits.
      tokens: the numbers of each token, (n,); labels are columns of whole rows, (n,) or (n, K), or None.
    """
    layer = Projection(functions, w, columns, **static)
    tokens, head = layer.with_own_labels(tokens, x), layer.head

    def statistics(x, tokens: Tokens) -> Statistics:
        if head.teacher:
            return divergence.logits_and_statistics(layer, x, tokens, None)[1]
        return functions.statistics(x, w, columns.bias, tokens, head=head)

    if head.teacher:  # `logits_and_statistics` merges over the mesh
        return layer.on_kept_rows(statistics, x, tokens, divergence.bytes_per_logit(layer, x))
    stored, _ = functions.bytes_per_logit(x.dtype.itemsize)
    return layer.on_kept_rows(statistics, x, tokens, stored).merged(layer.mesh_axes, layer.vocab)


def projection_grad(
    functions: ChunkFunctions, x, w, columns: Columns, tokens: Tokens, weights, statistics=None, **static
):
    """Returns the statistics of whole rows (except rows of weight 0), and the gradients dx, dw and dbias.

    They are the gradients of sum(weights * losses), in the dtypes of x, w and bias. dx is the gradient of whole rows.
    dw and dbias are the gradients of this device's columns.

    Args:
      functions, x, w, columns, tokens, static: as for `projection`.
      weights: (n,), one per row, in the dtype of the arithmetic; rows of weight 0 are left out, whatever they hold.
        (n, K) for several labels: the gradients of the sum over all losses of a row. (n, 3) with `head.entropy`: see
        `losses.coefficients`.
      statistics: the result of `projection`, or None. Only gradients of 16-bit x use it.
    """
    # XLA may compute float32 logits by other matrix product algorithms here than in the forward pass, and round them
    # differently. In a row with p = 1 at the label, the gradient would be this difference of two large logits instead
    # of 0. So the gradient computes statistics of its own logits. Compared with float32 products, this costs little.
    known = statistics if x.dtype.itemsize == 2 else None
    layer = Projection(functions, w, columns, **static)
    rows = _Rows(x, layer.with_own_labels(tokens, x), weights, known)
    gradients = functools.partial(_gradients_of_rows, layer)
    per_row, sums = chunks.on_kept_rows(gradients, tokens.kept, rows, left_out=(1, 0))
    return *per_row, *sums


class _Rows(NamedTuple):
    """The arrays of a gradient that have a row, or a number, for each token."""

    x: jax.Array
    tokens: Tokens  # with labels as columns of this device
    weights: jax.Array  # (n,), (n, K) or (n, 3), see `projection_grad`; divided by the scale once it is known
    known: Statistics | None  # of whole rows; None if the gradient computes them


def _gradients_of_rows(layer: Projection, rows: _Rows):
    """Returns two tuples, (statistics, dx) and (dw, dbias)."""
    x, tokens, weights, known = rows
    w, bias = layer.w, layer.columns.bias
    size_of_chunk, written = _way_to_dw(layer, x)
    scale = _scale(_dz_sizes(tokens, weights, known), x.dtype, exact=written is not None)
    rows = rows._replace(weights=weights / scale)
    step = functools.partial(_add_chunk, layer, rows, written, scale)

    per_row, (dw, dbias) = chunks.over_chunks(x.shape[0], size_of_chunk, step, with_sums=True)
    dw = dw if written is not None else dw * scale
    dbias = None if bias is None else dbias * scale
    if not layer.partial_dw:
        dw, dbias = jax.tree.map(lambda a, of: a.astype(of.dtype), (dw, dbias), (w, bias))
    return per_row, (dw, dbias)


def _way_to_dw(layer: Projection, x) -> tuple[Any, Any]:
    """Returns the rows of a chunk of a gradient, and the dtype that one product of all rows writes dw in.

    The dtype is None if chunks are added to a float32 dw.
    """
    n = x.shape[0]
    # On a GPU, cuBLAS sums in float32 and rounds as it writes. On a CPU, XLA would copy the operands to float32. For
    # this product, x is multiplied by the scale, which could overflow in float16.
    at_once = x.dtype == jnp.bfloat16 and not layer.functions.are_plain
    _, stored = layer.functions.bytes_per_logit(x.dtype.itemsize)
    dw_bytes = min(4 * layer.w.size, stored * _MOST_LOGITS) if at_once and layer.with_dw else 0
    if layer.head.teacher and not dw_bytes:  # the workspace holds z, u and dz
        stored = x.dtype.itemsize + divergence.bytes_per_logit(layer, x)
    rows = gradient_rows(n, layer.vocab, stored, layer.workspace_bytes, dw_bytes)
    if not at_once or not chunks.is_one_chunk(n, rows):
        return rows, None
    return rows, jnp.dtype(jnp.float32) if layer.partial_dw else x.dtype


def gradient_rows(rows: int, vocab: int, bytes_per_logit: float, workspace_bytes: int, dw_bytes: float) -> int:
    """Returns the number of rows of a chunk of a gradient, given the memory that the gradient takes anyway.

    Each of several chunks is added to a float32 dw of `dw_bytes`, by a pass that reads and writes it. If all rows fit
    into `dw_bytes`, they are one chunk. Its dw is rounded as it is written, so there is no float32 dw. Otherwise a
    chunk may be as large as the 16-bit dw, which is written when the chunks are gone. In bfloat16 this makes one chunk
    of up to 2 D rows. For more rows, chunks have D rows, or as many as the workspace holds if that is more.
    """
    if isinstance(rows, int) and rows * vocab * bytes_per_logit <= dw_bytes:
        return rows
    return chunks.chunk_rows(rows, vocab, bytes_per_logit, max(workspace_bytes, dw_bytes // 2))


def _add_chunk(layer: Projection, rows: _Rows, written: Any, scale, chunk: Chunk, sums):
    """Returns the statistics and dx of a chunk, and `sums`: the (dw, dbias) of this chunk and the chunks before.

    The gradient of the logits is dz * factor * scale, with one factor for each row. So

        dx    = dz @ w.T * factor * scale
        dw    = (x * factor).T @ dz * scale
        dbias = sum(dz * factor) * scale

    The sums over chunks, dw and dbias, are multiplied by the scale after the last chunk. If one product writes dw in
    the dtype `written`, x is multiplied by the scale instead.
    """
    rows = chunk.slice(rows)
    weightless = formulas.is_weightless(rows.weights)
    x = jnp.where(weightless[:, None], 0, rows.x)  # a NaN there must not reach dw
    found, dz, factor = _dz_of_chunk(layer, rows._replace(x=x))
    factor = jnp.ones_like(rows.weights, shape=weightless.shape) if factor is None else factor

    dx = jnp.where(weightless[:, None], 0, layer.dx(dz, factor * scale))
    if layer.mesh_axes and not layer.partial_dx:
        # XLA would run the sum of dx during the product for dw. Both then wait for each other's multiprocessors. The
        # barrier has no dz: with jax 0.10 its results vary over the mesh axes of all its operands.
        dx, x = lax.optimization_barrier((dx, x))
    factor = chunk.zero_if_seen(factor)
    x_factor = factor if written is None else factor * scale
    x = (x.astype(x_factor.dtype) * x_factor[:, None]).astype(x.dtype)
    dbias = None if layer.columns.bias is None else jnp.sum(factor[:, None] * dz.astype(factor.dtype), 0)
    of_chunk = layer.dw(x, dz, written), dbias
    return (found, dx), of_chunk if sums is None else jax.tree.map(jnp.add, sums, of_chunk)


def _dz_of_chunk(layer: Projection, rows: _Rows):
    """Returns the statistics of whole rows, dz and its factor (rows,) of a chunk. The factor is None for 1."""
    x, tokens, weights, known = rows
    if tokens.temperature is not None:  # out of range, it is NaN
        temperature = jnp.where(formulas.is_weightless(weights), 1, tokens.temperature)
        tokens = tokens._replace(temperature=temperature)
    if layer.head.teacher:
        return *divergence.gradient(layer, x, tokens, weights, known), None

    found, coefficients, dz, factor = layer.functions.dlogits(layer, x, tokens, weights, known)
    at_labels = formulas.gradient_at_label(found.label_logit, coefficients, tokens, layer.head)
    return found, *_put_at_labels(dz, factor, at_labels, tokens, layer.vocab)


def _put_at_labels(dz, factor, at_labels: jax.Array, tokens: Tokens, vocab: int) -> tuple[Any, Any]:
    """Returns dz, (rows, columns of w), with `at_labels` as the gradients at the labels, and the factors.

    So the labels' terms are subtracted in float32 and rounded once. Equal labels of a row have the same element.
    """
    columns = jnp.where(is_column(tokens.labels, vocab), tokens.labels, dz.shape[1])
    if factor is None:
        rows = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
        return dz.at[rows, columns].set(at_labels.astype(dz.dtype), mode="drop"), None
    if tokens.several:
        # If the label_probs of a row sum to about 0, its gradient is not a factor times its exponentials.
        apart = jnp.any(jnp.abs(at_labels) > _LARGEST_RATIO * jnp.abs(factor)[:, None], 1)
        dz = chunks.changed_if(jnp.any(apart), lambda dz: jnp.where(apart[:, None], 0, dz), dz)
        factor = jnp.where(apart, 1, factor)
    at_labels = at_labels / formulas.like_labels(jnp.where(factor == 0, 1, factor), at_labels)
    return chunks.set_in_place(dz, columns, at_labels), factor


def _dz_sizes(tokens: Tokens, weights, known: Statistics | None) -> jax.Array:
    """Returns about how large the elements of each row's dz may be."""
    weights = jnp.sum(jnp.abs(weights), 1) if weights.ndim == 2 else weights
    logsumexp_weight = 1 if tokens.label_probs is None else jnp.sum(jnp.abs(tokens.label_probs), 1)
    if tokens.z_loss is not None and known is not None:
        logsumexp_weight = logsumexp_weight + 2 * tokens.z_loss * jnp.abs(log_of(known.normalizer))
    if known is not None and known.divergence is not None:  # at beta = 1, |dz| is at most 1 + 2 KL
        logsumexp_weight = 1 + 2 * jnp.abs(known.divergence.student)
    sizes = weights * logsumexp_weight
    return sizes if tokens.temperature is None else tokens.at_0(0, sizes / tokens.divisor)


def _scale(sizes, dtype, *, exact: bool):
    """Returns the number that the weights are divided by. dz is proportional to the weights, and rounded to x's dtype.

    The gradients are multiplied by the scale in float32. For dw, x may be multiplied instead, before the product.

    The largest size becomes 1 (1024 in float16), so that the gradient at an improbable label is not rounded. With
    `exact`, the scale is rounded to a power of two, so that x times the scale is not rounded. The largest size then
    becomes a number from 0.75 to 1.5.
    """
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), jnp.abs(sizes), 0), initial=0)
    scale = jnp.where(largest > 0, largest / (_LARGEST if dtype == jnp.float16 else 1.0), 1)
    scale = jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)  # a smaller one would become 0
    return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=0) if exact else scale
