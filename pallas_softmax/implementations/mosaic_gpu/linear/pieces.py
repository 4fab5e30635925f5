"""The pieces of a projection (`implementations.projection.Pieces`) by the kernels of this folder, for 16-bit floats.

    statistics               one product; its epilogue reduces
    dlogits                  one product; its epilogue writes the gradients
    statistics_and_dlogits   of bfloat16, one product, whose epilogue does both: see there

The products with the gradients of the logits, which are stored by then, are XLA's: cuBLAS reaches what the kernels do.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax import online
from pallas_softmax.implementations import xla_projection
from pallas_softmax.implementations.mosaic_gpu.linear import logits_kernel
from pallas_softmax.implementations.mosaic_gpu.linear.logits_kernel import RowSums
from pallas_softmax.implementations.mosaic_gpu.linear.plan import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    TILE_N,
    plan_projection,
)
from pallas_softmax.implementations.projection import Pieces, operations_of
from pallas_softmax.online import Normalizer
from pallas_softmax.projection import Coefficients, Head, Statistics

_GUESS_COLUMNS = 128  # columns whose largest logit is the reference of a row
_LARGEST_SUM = 2.0**100  # of exp(z - reference): bfloat16 holds it, its inverse, and what they multiply


def statistics(x, w, bias, labels, *, head: Head, interpret: Any = None) -> Statistics:
    """What `Pieces.statistics` says."""
    sums, _ = logits_kernel.row_sums(
        x, w, bias, labels, head=head, tiling=plan_projection(len(x)), interpret=interpret
    )
    return _of_rows(sums, None, len(x))


def dlogits(x, w, bias, labels, coefficients, *, head: Head, interpret: Any = None) -> jax.Array:
    """What `Pieces.dlogits` says."""
    return logits_kernel.logit_gradients(
        x, w, bias, labels, coefficients, head=head, tiling=plan_projection(len(x)), interpret=interpret
    )


def statistics_and_dlogits(x, w, bias, labels, to_coefficients, *, head: Head, interpret: Any = None):
    """What `Pieces.statistics_and_dlogits` says.

    The gradient of the logits is of_exp * exp(z - m), but for the label, and the m and the of_exp of a row are known
    when the whole row is. So the product stores e = exp(z - r), with a guess r of m, the largest of some logits, and
    the rest is a factor of the row, by which not e but the smaller x and dx are multiplied:

        dz = factor * e,   factor = of_exp * exp(r - m)          dx = factor * (e @ w.T),   dw = (factor * x).T @ e

    A bad guess does no harm as long as e and its sum are within the range of bfloat16, which is that of float32. Where
    they are not, in any row, e is made once more, with r = m there.

    float16 has not that range, and label smoothing makes dz no multiple of e: they take two products.
    """
    if x.dtype != jnp.bfloat16 or head.label_smoothing:
        merged, coefficients = to_coefficients(statistics(x, w, bias, labels, head=head, interpret=interpret))
        return merged, dlogits(x, w, bias, labels, coefficients, head=head, interpret=interpret), None

    reference, sums, e = _exponentials(x, w, bias, labels, head, interpret)
    found = _of_rows(sums, reference, len(x))
    merged, coefficients = to_coefficients(found)
    at_label, factor = _at_label(found, reference, _sum_of_exponentials(sums, len(x)), coefficients, head)
    # It is the largest gradient of the row, as large as all others together. What rounding it changes is put right by
    # the factor: so the others are off, by as much of themselves, and the whole by less. A cast to bfloat16 and back is
    # one that XLA may leave out.
    rounded = lax.reduce_precision(at_label, exponent_bits=8, mantissa_bits=7)
    is_column = (labels >= 0) & (labels < head.vocab(w))
    factor = jnp.where(is_column & (rounded != 0), factor * (at_label / rounded), factor)
    column = jnp.where(is_column, labels, e.shape[1])
    e = e.at[jnp.arange(len(x)), column].set(rounded.astype(e.dtype), mode="drop", unique_indices=True)
    return merged, e, factor


def _exponentials(x, w, bias, labels, head: Head, interpret) -> Any:
    """A reference of each row, what is found of its logits z, and exp(z - reference), times the softcap's slope."""
    tiling = plan_projection(len(x))

    def exponentials(reference) -> Any:
        args = (x, w, bias, labels, reference)
        return reference, *logits_kernel.row_sums(*args, head=head, tiling=tiling, interpret=interpret)

    def out_of_range(sums: RowSums):
        d = _sum_of_exponentials(sums, len(x))
        return (d > _LARGEST_SUM) | (d < 1 / _LARGEST_SUM)

    def once_more(state):
        (reference, sums, _), _ = state
        m = online.shift(jnp.max(sums.normalizer.m, 0)[: len(x)])
        return exponentials(jnp.where(out_of_range(sums), m, reference)), False

    guess = jnp.max(xla_projection.logits(x, *_first_columns(w, bias, head), head=head), 1)
    first = exponentials(online.shift(guess))
    state = first, jnp.any(out_of_range(first[1]))
    return lax.while_loop(lambda state: state[1], once_more, state)[0]


def _sum_of_exponentials(sums: RowSums, rows: int) -> jax.Array:
    """The sum of exp(z - reference) of each row."""
    return jnp.sum(sums.normalizer.d, 0)[:rows]


def _at_label(found: Statistics, reference, d, coefficients: Coefficients, head: Head):
    """What stands in place of exp(z - reference) at the label, and the factor of the row; `d` is the sum of these."""
    m, of_exp, of_label, _ = coefficients
    factor = of_exp * jnp.exp(reference - m)
    if head.z_loss:  # of_exp may be next to nothing beside of_label, by which it is divided
        least = jnp.abs(of_label) * 2.0**-20 / d
        factor = jnp.where(jnp.abs(factor) < least, least, factor)
    at_label = jnp.exp(found.label_logit - reference) - jnp.where(factor == 0, 0, of_label / factor)
    if head.softcap is not None:
        tanh = found.label_logit * (head.temperature / head.softcap)
        at_label = at_label * (1 - tanh) * (1 + tanh)
    return at_label, factor


def _first_columns(w, bias, head: Head):
    columns = min(_GUESS_COLUMNS, head.vocab(w))
    w = w[:columns] if head.transpose_w else w[:, :columns]
    return w, None if bias is None else bias[:columns]


def _of_rows(sums: RowSums, reference, rows: int) -> Statistics:
    """Merges the tiles of each row by ⊕; d is of exp(z - m) or, with a reference, of exp(z - reference)."""
    m, d = sums.normalizer
    if reference is None:
        total = online.across(Normalizer(m, d), 0, lambda of_row: of_row[None])
        normalizer = Normalizer(total.m[:rows], total.d[:rows])
    else:
        m = jnp.max(m, 0)[:rows]
        d = _sum_of_exponentials(sums, rows)
        normalizer = Normalizer(m, d * jnp.exp(reference - online.shift(m)))
    label_logit = jnp.sum(sums.label_logit, 0)[:rows]
    return Statistics(normalizer, label_logit, None if sums.total is None else jnp.sum(sums.total, 0)[:rows])


def bytes_per_logit(itemsize: int) -> tuple[float, float]:
    """Four float32 for each row of a tile; and the gradients, beside which these do not count."""
    return 16 / TILE_N, itemsize


def pieces(interpret: Any = None) -> Pieces:
    """The pieces; `interpret` as for `pallas_call`."""

    def of(function):
        return functools.partial(function, interpret=interpret)

    return Pieces(
        of(statistics),
        of(dlogits),
        of(statistics_and_dlogits),
        xla_projection.add_product,
        xla_projection.product,
        bytes_per_logit,
    )


# ---- The operations, of arrays of any size


def operations(interpret: Any = None) -> dict[str, Callable]:
    """The operations of a projection; `interpret` as for `pallas_call`."""
    return {
        name: functools.partial(_on_whole_blocks, operation, name)
        for name, operation in operations_of(pieces(interpret)).items()
    }


def _on_whole_blocks(operation: Callable, name: str, x, w, bias, labels, *of_rows, head: Head, **static):
    """Runs an operation on arrays of whole blocks of smem; x, and rarely w, is copied to be one, if need be.

    w is copied where D or V is no multiple of 64: of V, that is 50,257, and few others that are in use.
    """
    (n, depth), vocab = x.shape, head.vocab(w)
    rows, deep, wide = (
        _rounded_up(n, BLOCK_ROWS),
        _rounded_up(depth, BLOCK_COLUMNS),
        _rounded_up(vocab, BLOCK_COLUMNS),
    )
    if (rows, deep, wide) == (n, depth, vocab):
        return operation(x, w, bias, labels, *of_rows, head=head, **static)

    def extended(a, *shape: int):
        return jnp.pad(a, [(0, to - size) for to, size in zip(shape, a.shape, strict=True)])

    w = extended(w, *((wide, deep) if head.transpose_w else (deep, wide)))
    labels, of_rows = jax.tree.map(lambda a: extended(a, rows), (labels, of_rows))  # new rows have weight 0
    bias = None if bias is None else extended(bias, wide)
    head = dataclasses.replace(head, columns=vocab)
    results = operation(extended(x, rows, deep), w, bias, labels, *of_rows, head=head, **static)
    if name == "projection":
        return jax.tree.map(lambda a: a[:n], results)
    *statistics, dx, dw, dbias = results
    dw = dw[:vocab, :depth] if head.transpose_w else dw[:depth, :vocab]
    dbias = None if dbias is None else dbias[:vocab]
    return *jax.tree.map(lambda a: a[:n], statistics), dx[:n, :depth], dw, dbias


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
