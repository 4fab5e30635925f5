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

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.linear import losses as formulas
from pallas_softmax._src.linear import xla as xla_projection
from pallas_softmax._src.linear.chunks import changed_if
from pallas_softmax._src.linear.gradients import operations_of
from pallas_softmax._src.linear.logits_kernel import logit_gradients, row_draws, row_sums
from pallas_softmax._src.linear.losses import Columns, Head, Statistics, Tokens
from pallas_softmax._src.linear.merge_kernel import Winner, merge_tiles
from pallas_softmax._src.linear.plan import ATOM_COLUMNS, ATOM_ROWS, TILE_N, rounded_up
from pallas_softmax._src.linear.projection import ChunkFunctions, Projection
from pallas_softmax._src.linear.several_labels import in_given_order
from pallas_softmax._src.normalizers import Normalizer

_GUESS_COLUMNS = 128  # the largest logit of this many columns is the reference of a row
# The largest sum of exp(z - reference): float32 holds it, its inverse, and their products with x and w.
_LARGEST_SUM = 2.0**64


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
    sums, _ = row_sums(_whole_atoms(x), w, bias, tokens, head=head)
    return _merged_tiles(sums, tokens, len(x), head.vocab(w))[0]


def logits(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[jax.Array, Normalizer]:
    if x.dtype.itemsize != 2 or not x.size:  # for example, a teacher in float32
        return xla_projection.logits_and_normalizer(x, w, bias, tokens, head=head)
    sums, z = row_sums(_whole_atoms(x), w, bias, tokens, head=head, stored=jnp.float32)
    return z[: len(x)], _merged_tiles(sums, tokens, len(x), head.vocab(w))[0].normalizer


def _whole_atoms(x) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % ATOM_ROWS), (0, 0)))


def draw(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[jax.Array, jax.Array, Normalizer]:
    """Returns the column drawn from each row, its logit before the temperature divides it, and the normalizer."""
    tiles, winners = row_draws(_whole_atoms(x), w, bias, tokens, head=head)
    sums, winner = _merged_tiles(Statistics(tiles, None, None), tokens, len(x), head.vocab(w), winners=winners)
    assert winner is not None
    return *winner, sums.normalizer


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
        m, d = sums.normalizer
        normalizer = Normalizer(m, d * jnp.exp(reference - normalizers.shift(m)))
        found = sums._replace(normalizer=normalizer).merged(layer.mesh_axes, layer.vocab)
        coefficients = formulas.coefficients(found, weights, tokens, layer.whole_vocab)
        return found, coefficients, e, coefficients.exp_factor * jnp.exp(reference - coefficients.m)

    arrays, head = (x, layer.w, layer.columns.bias, tokens), layer.head
    found = statistics(*arrays, head=head).merged(layer.mesh_axes, layer.vocab) if known is None else known
    coefficients = formulas.coefficients(found, weights, tokens, layer.whole_vocab)
    return found, coefficients, logit_gradients(*arrays, coefficients, head=head), None


def _exponentials(layer: Projection, x, tokens: Tokens) -> Any:
    """Returns a reference for each row, statistics, and exp(z - reference) times the softcap's slope, for logits z.

    The d of the statistics is the sum of exp(z - reference). The reference is the same on all devices that the columns
    are spread over.
    """
    w, bias, head, largest = layer.w, layer.columns.bias, layer.head, layer.largest

    def exponentials(reference) -> Any:
        sums, e = row_sums(x, w, bias, tokens, reference, head=head)
        return reference, _merged_tiles(sums, tokens, len(x), layer.vocab, one_reference=True)[0], e

    def out_of_range(sums: Statistics):
        d = largest(sums.normalizer.d)
        return (d > _LARGEST_SUM) | (d < 1 / _LARGEST_SUM)

    def once_more(first):
        reference, sums, _ = first
        m = normalizers.shift(largest(sums.normalizer.m))
        return exponentials(jnp.where(out_of_range(sums), m, reference))

    first_w = w[:_GUESS_COLUMNS] if head.transpose_w else w[:, :_GUESS_COLUMNS]
    first_bias = None if bias is None else bias[:_GUESS_COLUMNS]
    guess = jnp.max(xla_projection.logits(x, first_w, first_bias, tokens, head=head), 1)
    first = exponentials(normalizers.shift(largest(guess)))
    return changed_if(jnp.any(out_of_range(first[1])), once_more, first)


def _merged_tiles(
    sums: Statistics, tokens: Tokens, rows: int, vocab: int, **options
) -> tuple[Statistics, Winner | None]:
    """Merges the tiles of each row, with the options of `merge_tiles`."""
    if tokens.labels is None or not tokens.several:
        return merge_tiles(sums, tokens.labels, rows=rows, vocab=vocab, **options)
    merged, winner = merge_tiles(sums._replace(label_logit=None), rows=rows, vocab=vocab, **options)
    return merged._replace(label_logit=in_given_order(sums.label_logit, tokens.labels, vocab)), winner


def bytes_per_logit(itemsize: int) -> tuple[float, float]:
    """Returns the bytes stored for each logit: by `statistics` six numbers per row of a tile, else the gradients."""
    return 24 / TILE_N, itemsize


FUNCTIONS = ChunkFunctions(statistics, dlogits, logits, bytes_per_logit, draw, are_plain=False)


# ---- Arrays of any size


def _on_whole_atoms(
    operation: Callable, name: str, x, w, columns: Columns, tokens: Tokens, *per_token, head: Head, **static
):
    """Runs an operation on arrays of whole swizzle atoms; other arrays are padded first.

    Padding copies w if D or V is not a multiple of 64. Few vocabularies need that; 50,257 is one. A gradient gets new
    rows, with x = 0 and weight 0, and the other numbers of the last row. Otherwise, the functions of a chunk pad x.
    """
    (n, depth), vocab = x.shape, head.vocab(w)
    rows = rounded_up(n, ATOM_ROWS) if name == "projection_grad" else n
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
    if name != "projection_grad":
        return results
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
