"""Implementation `mosaic_gpu` of a projection and its softmax: `ChunkFunctions` by kernels, for 16-bit floats.

    statistics   one product; its epilogue reduces
    dlogits      one product; its epilogue writes the gradients. If the statistics are not known, `statistics` comes
                 first; in bfloat16 without label smoothing, the epilogue reduces too, so that one product is enough
    logits       one product; its epilogue reduces, and writes the logits in float32
    draw         one product; its epilogue reduces, and draws

The products with the stored gradients of the logits are left to XLA: there, cuBLAS is as fast as these kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear import xla as xla_projection
from pallas_softmax._src.linear.chunks import changed_if
from pallas_softmax._src.linear.gradients import operations_of
from pallas_softmax._src.linear.logits_kernel import logit_gradients, row_draws, row_sums
from pallas_softmax._src.linear.losses import Columns, Head, Statistics, Tokens
from pallas_softmax._src.linear.plan import ATOM_COLUMNS, ATOM_ROWS, TILE_N, rounded_up
from pallas_softmax._src.linear.projection import ChunkFunctions, Projection
from pallas_softmax._src.linear.several_labels import in_given_order
from pallas_softmax._src.masks import at
from pallas_softmax._src.normalizers import Normalizer

_GUESS_COLUMNS = 128  # the largest logit of this many columns is the reference of a row
# The largest sum of exp(z - reference): float32 holds it, its inverse, and their products with x and w.
_LARGEST_SUM = 2.0**64
_ADDED = 25  # sums of tiles that are added up at once; two kernels of XLA add up 625 tiles, 160,000 columns


def plan(call: Call, capability: tuple[int, int]) -> None | Refusal:
    """Returns why the kernels cannot run the call, or None: each chunk of rows gets a plan of its own."""
    if (reason := checks.unsupported(call, capability)) is not None:
        return Refusal(reason)
    if capability[0] != 9:  # only Hopper has wgmma
        major, minor = capability
        return Refusal(f"the matrix product needs compute capability 9.0, not {major}.{minor}")
    if jnp.dtype(call.dtype).itemsize != 2:
        return Refusal(f"no matrix product for {call.dtype}, only bfloat16 and float16")
    if 0 in (call.rows, call.vocab, call.depth):
        return Refusal("an array is empty")
    if call.vocab < TILE_N:  # most of a tile would be idle; see also `product.store`
        return Refusal(f"V={call.vocab} is less than the {TILE_N} columns of a tile")
    return None


# ---- The functions of a chunk


def statistics(x, w, bias, tokens: Tokens, *, head: Head) -> Statistics:
    return _merged_tiles(row_sums(x, w, bias, tokens, head=head)[0], None, tokens, len(x), head.vocab(w))


def logits(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[jax.Array, Normalizer]:
    if x.dtype.itemsize != 2 or not x.size:  # for example, a teacher in float32
        return xla_projection.logits_and_normalizer(x, w, bias, tokens, head=head)
    sums, z = row_sums(_whole_atoms(x), w, bias, tokens, head=head, stored=jnp.float32)
    return z[: len(x)], _merged_tiles(sums, None, tokens, len(x), head.vocab(w)).normalizer


def _whole_atoms(x) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % ATOM_ROWS), (0, 0)))


def draw(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[jax.Array, jax.Array, Normalizer]:
    """Returns the column drawn from each row, its logit before the temperature divides it, and the normalizer."""
    vocab = head.vocab(w)
    tiles, winners = row_draws(_whole_atoms(x), w, bias, tokens, head=head)
    winners = jax.tree.map(lambda a: a[:, : len(x)], winners)
    columns = jnp.where(winners.key == jnp.max(winners.key, 0), winners.column, vocab - 1)
    column = jnp.min(jnp.minimum(columns, vocab - 1), 0)  # any column in a row without a winner
    logit = at(winners.logit.T, column[:, None] // TILE_N)[:, 0]
    return column, logit, _merged_tiles(Statistics(tiles, None, None), None, tokens, len(x), vocab).normalizer


def dlogits(layer: Projection, x, tokens: Tokens, weights, known):
    """Returns dz by the kernel of gradients, or if nothing is known yet, e and its factors as dz.

    Except at labels, the gradient of the logits is exp_factor * exp(z - m). m and exp_factor are known only after the
    whole row. So the product stores e = exp(z - r). r is a guess of m, the largest of some logits. The gradient is e
    times a number for each row:

        dz = factor * e,   factor = exp_factor * exp(r - m)

    A bad guess is harmless if e and its sums are within the range of bfloat16, which is the range of float32. If any
    row leaves the range, the whole e is computed once more, with r = m in the rows that left it.

    float16 has a smaller range, and with label smoothing dz is not proportional to e. These take two products.
    """
    if known is None and x.dtype == jnp.bfloat16 and tokens.label_smoothing is None:
        assert not layer.head.entropy  # a gradient with an entropy knows its statistics
        reference, sums, e = _exponentials(layer, x, tokens)
        found = _merged_tiles(sums, reference, tokens, len(x), layer.vocab).merged(layer.mesh_axes, layer.vocab)
        coefficients = formulas.coefficients(found, weights, tokens, layer.whole_vocab)
        return found, coefficients, e, coefficients.exp_factor * jnp.exp(reference - coefficients.m)

    arrays, head = (x, layer.w, layer.columns.bias, tokens), layer.head
    found = statistics(*arrays, head=head).merged(layer.mesh_axes, layer.vocab) if known is None else known
    coefficients = formulas.coefficients(found, weights, tokens, layer.whole_vocab)
    return found, coefficients, logit_gradients(*arrays, coefficients, head=head), None


def _exponentials(layer: Projection, x, tokens: Tokens) -> Any:
    """Returns a reference for each row, the sums of its logits z, and exp(z - reference) times the softcap's slope.

    The reference is the same on all devices that the columns are spread over.
    """
    w, bias, head, largest = layer.w, layer.columns.bias, layer.head, layer.largest

    def exponentials(reference) -> Any:
        return reference, *row_sums(x, w, bias, tokens, reference, head=head)

    def out_of_range(sums: Statistics):
        d = largest(jnp.sum(sums.normalizer.d, 0)[: len(x)])
        return (d > _LARGEST_SUM) | (d < 1 / _LARGEST_SUM)

    def once_more(first):
        reference, sums, _ = first
        m = normalizers.shift(largest(jnp.max(sums.normalizer.m, 0)[: len(x)]))
        return exponentials(jnp.where(out_of_range(sums), m, reference))

    first_w = w[:_GUESS_COLUMNS] if head.transpose_w else w[:, :_GUESS_COLUMNS]
    first_bias = None if bias is None else bias[:_GUESS_COLUMNS]
    guess = jnp.max(xla_projection.logits(x, first_w, first_bias, tokens, head=head), 1)
    first = exponentials(normalizers.shift(largest(guess)))
    return changed_if(jnp.any(out_of_range(first[1])), once_more, first)


def _merged_tiles(sums: Statistics, reference, tokens: Tokens, rows: int, vocab: int) -> Statistics:
    """Merges the tiles of each row by ⊕. Their d is relative to m, or to the reference if there is one."""
    sums = jax.tree.map(lambda a: a[:, :rows] if a.ndim == 2 else a, sums)
    tiles = sums.normalizer
    m = jnp.max(tiles.m, 0)
    if reference is None:
        normalizer = normalizers.combine_lanes(tiles, 0, lambda a: a[None], m=m, total=lambda a, _: _total(a))
    else:
        normalizer = Normalizer(m, _total(tiles.d) * jnp.exp(reference - normalizers.shift(m)))
    if tokens.labels is None:
        label_logit = None
    elif tokens.several:
        label_logit = in_given_order(sums.label_logit, tokens.labels, vocab)
    else:
        is_column = formulas.is_column(tokens.labels, vocab)
        tile = jnp.where(is_column, tokens.labels, 0) // TILE_N
        label_logit = jnp.where(is_column, at(sums.label_logit.T, tile[:, None])[:, 0], 0)
    total, argmax = None if sums.total is None else _total(sums.total), None
    if sums.argmax is not None:
        columns = lax.broadcasted_iota(jnp.int32, sums.argmax.shape, 0) * TILE_N + sums.argmax
        argmax = jnp.min(normalizers.if_largest(columns, tiles.m, m), 0)
    return Statistics(normalizer, label_logit, total, argmax)


def _total(a) -> jax.Array:
    """Returns the sum over the tiles in a fixed order. The order of XLA's own sum depends on the number of rows."""
    while len(a) > 1:
        groups = -(-len(a) // _ADDED)
        a = jnp.pad(a, ((0, groups * _ADDED - len(a)), (0, 0))).reshape(_ADDED, groups, -1)
        a = lax.optimization_barrier(normalizers.tree_sum(list(a)))  # XLA might compute it again for each use
    return a[0]


def bytes_per_logit(itemsize: int) -> tuple[float, float]:
    """Returns the bytes stored for each logit: by `statistics` six numbers per row of a tile, else the gradients."""
    return 24 / TILE_N, itemsize


FUNCTIONS = ChunkFunctions(statistics, dlogits, logits, bytes_per_logit, draw, are_plain=False)


# ---- Arrays of any size


def _on_whole_atoms(
    operation: Callable, name: str, x, w, columns: Columns, tokens: Tokens, *per_token, head: Head, **static
):
    """Runs an operation on arrays of whole swizzle atoms; other arrays are padded first.

    Padding copies w if D or V is not a multiple of 64. Few vocabularies need that; 50,257 is one. The new rows have
    x = 0 and weight 0, and the other numbers of the last row. A draw gets no new rows, because they would be drawn too:
    `logits` and `draw` pad only x.
    """
    (n, depth), vocab = x.shape, head.vocab(w)
    rows = n if name == "projection_sample" else rounded_up(n, ATOM_ROWS)
    deep, wide = rounded_up(depth, ATOM_COLUMNS), rounded_up(vocab, ATOM_COLUMNS)
    teacher_depth = 0 if head.teacher is None else tokens.teacher_x.shape[1]
    teacher_deep = rounded_up(teacher_depth, ATOM_COLUMNS)
    if (rows, deep, wide, teacher_deep) == (n, depth, vocab, teacher_depth):
        return operation(x, w, columns, tokens, *per_token, head=head, **static)

    def extended(a, *shape: int, mode: str = "constant"):
        shape += a.shape[len(shape) :]
        return jnp.pad(a, [(0, to - size) for to, size in zip(shape, a.shape)], mode)

    def whole_w(w, deep: int):
        return extended(w, *((wide, deep) if head.transpose_w else (deep, wide)))

    w = whole_w(w, deep)
    tokens = jax.tree.map(lambda a: extended(a, rows, mode="edge"), tokens)
    per_token = jax.tree.map(lambda a: extended(a, rows), per_token)
    columns = jax.tree.map(lambda a: whole_w(a, teacher_deep) if a.ndim == 2 else extended(a, wide), columns)
    if head.teacher is not None:
        tokens = tokens._replace(teacher_x=extended(tokens.teacher_x, rows, teacher_deep))
        head = dataclasses.replace(head, teacher=dataclasses.replace(head.teacher, columns=vocab))
    head = dataclasses.replace(head, columns=vocab)
    results = operation(extended(x, rows, deep), w, columns, tokens, *per_token, head=head, **static)
    if name in ("projection", "projection_sample"):
        return jax.tree.map(lambda a: a[:n], results)
    statistics, dx, dw, dbias = results
    dw = dw[:vocab, :depth] if head.transpose_w else dw[:depth, :vocab]
    dbias = None if dbias is None else dbias[:vocab]
    return jax.tree.map(lambda a: a[:n], statistics), dx[:n, :depth], dw, dbias


def _kernel(function: Callable) -> Kernel:
    return Kernel(plan, lambda plan, *arrays, **static: function(*arrays, **static))


OPERATIONS: dict[str, Callable] = {
    name: functools.partial(_on_whole_atoms, operation, name) for name, operation in operations_of(FUNCTIONS).items()
}
KERNELS = {name: _kernel(function) for name, function in OPERATIONS.items()}
