"""Kernels that compute logits tile by tile in registers, and store per-row sums, exponentials or gradients.

`row_sums` reduces the rows of each tile. If each row has a reference (a guess of its maximum), it also writes
exponentials. For a divergence, and for draws with filters, it also writes the logits z. `row_draws` reduces and draws.
`logit_gradients` writes gradients. The kernel is `product.multiply_tiles`; here are its three epilogues. A warpgroup
calls the epilogue for each of its parts:

    acc, 64 rows of a tile of x @ w, float32, in the registers of a warpgroup
      │  + bias, softcap, temperature; -inf from column V on
      ▼
      z ──► per row: its `Statistics`                                       (tiles, rows), see `merge_kernel.py`
      ├───► the winner of a draw (`draw_ptx.py`), before the temperature      (tiles, rows)
      ├───► z at several labels (`several_labels.py`)                       (rows * K,)
      ├───► exp(z - reference) * slope of the softcap, or the gradient        (rows, V), 16-bit
      └───► z                                                                 (rows, V), float32
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.gpu.blocks import load_as
from pallas_softmax._src.gpu.interpreter import interpret, laid_out, twin
from pallas_softmax._src.gpu.ptx.inline import array, elements, i32, inline, instruction, pack, thread
from pallas_softmax._src.linear.draw_ptx import BOUNDS, OPERANDS, WORDS, best_sums, keep_bounds
from pallas_softmax._src.linear.losses import Coefficients, Head, Statistics, Tokens
from pallas_softmax._src.linear.merge_kernel import Winners
from pallas_softmax._src.linear.plan import TILE_N, WARPGROUP_ROWS, Tiling, plan_projection, rounded_up
from pallas_softmax._src.linear.product import Overlapped, Place, product, store
from pallas_softmax._src.linear.several_labels import ROW_LAYOUT, SeveralLabels, pick_logits, sorted_labels
from pallas_softmax._src.normalizers import Moments, Normalizer


def reduce_logits(
    head: Head, vocab: int, acc, place: Place, inputs: "Inputs", reference_gmem, sums_gmem, stored_gmem
) -> None:
    """The epilogue of `row_sums`: reduces the rows of a part of the product, and may store one array of it.

    The array is z; z before the temperature divides it (`head.undivided`); or, with a reference, the exponentials.
    """
    own = place.tile, pl.ds(place.row, WARPGROUP_ROWS)
    z, column = _undivided_logits(acc, place, inputs, head, vocab)
    if stored_gmem is not None and head.undivided:
        store(place, z, stored_gmem)
    z = _divided(z, place, inputs)
    if isinstance(inputs.labels, SeveralLabels):
        pick_logits(z, inputs.labels, place, column, sums_gmem.label_logit)
    elif inputs.labels is not None:
        sums_gmem.label_logit[own] = _logit_at_label(z, inputs.labels, place, column)
    if sums_gmem.total is not None:
        sums_gmem.total[own] = jnp.sum(jnp.where(column < vocab - place.column, z, 0.0), axis=1)

    m = jnp.max(z, axis=1)
    sums_gmem.normalizer.m[own] = m
    r = normalizers.shift(m) if reference_gmem is None else _load_per_row(reference_gmem, place)
    if head.entropy:
        sums_gmem.argmax[own] = _first_of_largest(z, m, column)
        below = normalizers.distance(z, _broadcast_rows(r, z))
        e = jnp.exp(below)
        sums_gmem.normalizer.t[own] = jnp.sum(below * e, axis=1)
    else:
        e = jnp.exp(z - _broadcast_rows(r, z))
    sums_gmem.normalizer.d[own] = jnp.sum(e, axis=1)

    if reference_gmem is not None:
        store(place, e * _softcap_slope(z, place, inputs, head), stored_gmem)
    elif stored_gmem is not None and not head.undivided:
        store(place, z, stored_gmem)


def draw_logits(
    head: Head, vocab: int, acc, place: Place, inputs: "Inputs", numbers_gmem, normalizer_gmem, winners_gmem
) -> None:
    """The epilogue of `row_draws`: finds the winner of each row of a part of the product, and its normalizer."""
    own = place.tile, pl.ds(place.row, WARPGROUP_ROWS)
    z, _ = _undivided_logits(acc, place, inputs, head, vocab)
    numbers = [_load_per_row(numbers_gmem.at[i], place) for i in range(OPERANDS)]
    found = best_sums(z, place.scratch, numbers, place.row, place.column, rows=numbers_gmem.shape[1])
    for gmem, number in zip(winners_gmem, found):
        gmem[own] = number
    z = _divided(z, place, inputs)
    m = jnp.max(z, axis=1)
    normalizer_gmem.m[own] = m
    normalizer_gmem.d[own] = jnp.sum(jnp.exp(z - _broadcast_rows(normalizers.shift(m), z)), axis=1)


def _bounds_of_noise(place: Place, _: "Inputs", numbers_gmem) -> Callable[[Any, int], None]:
    words = [_load_per_row(numbers_gmem.at[i], place) for i in range(WORDS)]
    return lambda k, steps: keep_bounds(place.scratch, words, place.column, k, steps=steps)


def write_gradients(
    head: Head, vocab: int, acc, place: Place, inputs: "Inputs", coefficients_gmem: Coefficients, dz_gmem
) -> None:
    """The epilogue of `logit_gradients`: writes the gradients of the logits in a part of the product."""
    z, column = _logits(acc, place, inputs, head, vocab)
    coefficients = jax.tree.map(lambda gmem: _broadcast_rows(_load_per_row(gmem, place), z), coefficients_gmem)
    dz = coefficients.of_exponential(z)
    if coefficients.constant is not None:
        dz = dz - jnp.where(column < vocab - place.column, coefficients.constant, 0.0)
    store(place, dz * _softcap_slope(z, place, inputs, head), dz_gmem)


# ---- Launches


class Labels(NamedTuple):
    """The labels, and which parts of the product contain any."""

    column: Any  # int32 (rows,). A label outside of [0, V) matches no column
    in_tile: Any  # int32 (groups of 64 rows, tiles): 0 if no row of the group has its label in the tile


class Inputs(NamedTuple):
    """Arrays that the epilogues read: the bias (V,), the labels, and 1 / temperature (rows,). Each may be None."""

    bias: Any
    labels: Labels | SeveralLabels | None
    inverse_temperature: Any


def row_sums(x, w, bias, tokens: Tokens, reference=None, *, head: Head, stored: Any = None) -> tuple[Statistics, Any]:
    """Reduces each row's part of each tile of the logits z. With a reference, also writes exp(z - reference).

    The reference is float32 (rows,), or None. Without one, `stored` may be the dtype to write z in, and
    `head.undivided` says which z. The other arguments are as in `ChunkFunctions`.

    Returns:
      The statistics of the parts, (tiles, rows rounded up to a multiple of `Tiling.cluster_rows`), and the
      exponentials, z or None. With a reference, d is the sum of exp(z - reference). Several labels are as `pick_logits`
      writes them. The exponentials (rows, columns of w) have the dtype of x, are 0 from column V on, and are multiplied
      by the slope of a softcap.
    """
    rows, columns, labels = len(x), head.width(w), tokens.labels
    number = _number_per_tile(x, w, head)
    shaped: Any = jax.ShapeDtypeStruct
    of_labels = number
    if labels is None or tokens.several:
        of_labels = None if labels is None else shaped((number.shape[1] * labels.shape[1],), jnp.float32)
    sums = Statistics(
        Moments(number, number, number) if head.entropy else Normalizer(number, number),
        of_labels,
        None if tokens.label_smoothing is None else number,
        shaped(number.shape, jnp.int32) if head.entropy else None,
    )
    name = "linear_statistics" if stored is None else "linear_logits"
    if reference is not None:
        name, stored = "linear_exponentials", x.dtype
        reference = _padded(reference, plan_projection(rows).cluster_rows)
    stored = None if stored is None else shaped((rows, columns), stored)
    results = sums, stored
    static = {"epilogue": reduce_logits, "name": name, "results": results, "stored": stored, "head": head}
    return _launch(x, w, bias, tokens, reference, interpreted=interpret(), **static)


def row_draws(x, w, bias, tokens: Tokens, *, head: Head) -> tuple[Normalizer, Winners]:
    """Draws from each row's part of each tile. The tokens have no labels, and a draw by words, without filters.

    Returns the normalizers and the winners, with the shape of the statistics of `row_sums`.
    """
    assert tokens.draw is not None
    words, *_ = tokens.draw
    t = jnp.ones_like(words[:, 0], jnp.float32) if tokens.temperature is None else tokens.temperature
    numbers = jnp.concatenate([words, lax.bitcast_convert_type(t, jnp.uint32)[:, None]], 1)
    # Rows without a draw have a NaN as temperature.
    numbers = _padded(numbers, plan_projection(len(x)).cluster_rows, 0x7FFFFFFF)
    numbers = lax.bitcast_convert_type(numbers.T, jnp.int32)
    number = _number_per_tile(x, w, head)
    integer: Any = jax.ShapeDtypeStruct(number.shape, jnp.int32)
    results = Normalizer(number, number), Winners(integer, integer, number)
    static = {"epilogue": draw_logits, "name": "linear_draw", "results": results, "stored": None, "head": head}
    overlapped = Overlapped(_bounds_of_noise, BOUNDS)
    return _launch(x, w, bias, tokens, numbers, interpreted=interpret(), overlapped=overlapped, **static)


def _number_per_tile(x, w, head: Head) -> Any:
    """Returns the shape of a number for each row of each tile: (tiles, rows of all clusters), float32."""
    rows = rounded_up(len(x), plan_projection(len(x)).cluster_rows)
    return jax.ShapeDtypeStruct((-(-head.width(w) // TILE_N), rows), jnp.float32)


def logit_gradients(x, w, bias, tokens: Tokens, coefficients: Coefficients, *, head: Head) -> jax.Array:
    """Returns the gradients that `Coefficients` describes, without the labels' terms, as `ChunkFunctions.dlogits`."""
    tokens, coefficients = tokens._replace(labels=None), coefficients._replace(label_term=None)
    coefficients = jax.tree.map(lambda a: _padded(a, plan_projection(len(x)).cluster_rows), coefficients)
    dz = jax.ShapeDtypeStruct((len(x), head.width(w)), x.dtype)
    static = {"epilogue": write_gradients, "name": "linear_logit_gradients", "results": (dz,), "stored": dz}
    return _launch(x, w, bias, tokens, coefficients, head=head, interpreted=interpret(), **static)[0]


_STATIC = "epilogue", "name", "results", "stored", "head", "interpreted", "overlapped"


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)  # JAX traces equal calls only once
def _launch(
    x, w, bias, tokens: Tokens, per_row, *, epilogue, name, results, stored, head: Head, interpreted, overlapped=None
):
    """Runs the product x @ w. `stored` is the one of the results that has an element for each logit, or None.

    The arrays `per_row` have the rows of whole clusters.
    """
    del interpreted  # only tells calls apart
    vocab, tiling = head.vocab(w), plan_projection(len(x))
    inputs = Inputs(
        None if bias is None else _padded(bias.astype(jnp.float32), TILE_N),
        _labels(tokens, head.width(w), vocab, tiling),
        None if tokens.temperature is None else _padded(1 / tokens.divisor, tiling.cluster_rows, 1),
    )
    epilogue = functools.partial(epilogue, head, vocab)
    staged = stored and stored.dtype
    options = {"b_transposed": head.transpose_w, "staged": staged, "tiling": tiling, "name": name}
    results = product(epilogue, x, w, (inputs, per_row), results, overlapped=overlapped, **options)
    return vary_together(results, x, w, inputs, per_row)[0]  # their types would vary over no mesh axis


# ---- Logits in registers


def _logits(acc, place: Place, inputs: Inputs, head: Head, vocab: int):
    """Returns the logits of a part of the product, and their column numbers within the part."""
    z, column = _undivided_logits(acc, place, inputs, head, vocab)
    return _divided(z, place, inputs), column


def _undivided_logits(acc, place: Place, inputs: Inputs, head: Head, vocab: int):
    """Returns the same before the temperature divides the logits."""
    column = _columns(acc.shape)
    z = acc
    if inputs.bias is not None:
        bias = load_as(inputs.bias.at[pl.ds(place.column, acc.shape[1])], plgpu.Layout.WGMMA.reduce(0))
        z = z + lax.broadcast_in_dim(bias, z.shape, (1,))
    if head.softcap is not None:
        z = _times(_tanh(z * (1 / head.softcap)), laid_out(jnp.full(acc.shape[:1], head.softcap), ROW_LAYOUT))
    if vocab % acc.shape[1]:
        z = jnp.where(column < vocab - place.column, z, -jnp.inf)
    return z, column


def _divided(z, place: Place, inputs: Inputs):
    return z if inputs.inverse_temperature is None else _times(z, _load_per_row(inputs.inverse_temperature, place))


@twin
def _times(z, factors):
    """Returns z (64, columns) times a factor for each row, rounded before any later sum.

    LLVM may fuse a plain product with a sum, so that both are rounded once. It decides by the code around them. A row
    would have other bits in another kernel.
    """

    @inline(
        arg_types=(plgpu.Layout.WGMMA, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(z.shape, z.dtype, layout=plgpu.Layout.WGMMA),
    )
    def times(_, z, factors):
        factor_of_row = [elements(register)[0] for register in factors.registers.flat]
        registers = []
        for i, register in enumerate(z.registers.flat):  # the rows of a thread take turns
            a = factor_of_row[i % len(factor_of_row)]
            registers.append(pack([instruction("mul.rn.f32", x, a) for x in elements(register)]))
        return array(plgpu.Layout.WGMMA.to_mgpu(), z.shape, registers)

    return times(z, factors)


def _logit_at_label(z, labels_gmem: Any, place: Place, column):
    zeros = laid_out(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), ROW_LAYOUT)

    def at_label():
        own = _broadcast_rows(_load_per_row(labels_gmem.column, place) - place.column, z)
        return jnp.sum(jnp.where(column == own, z, 0.0), axis=1)

    has_labels = labels_gmem.in_tile[place.row // WARPGROUP_ROWS, place.tile] != 0
    return lax.cond(has_labels, at_label, lambda: zeros)


@twin
def _columns(shape: tuple[int, ...]):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


@twin
def _first_of_largest(z, m, column):
    """Returns the first column where z (64, columns) is m, its maximum along the rows; if m is NaN, where z is NaN.

    A thread has two neighbouring columns of every eight, of two rows. It takes two instructions for each element: it
    compares and selects from the last column to the first. 0 and -0 tie. See `_below` for the comparison.
    """
    result = plgpu.ShapeDtypeStruct(m.shape, jnp.dtype("int32"), layout=ROW_LAYOUT)

    @inline(arg_types=(plgpu.Layout.WGMMA, ROW_LAYOUT), return_type=result)
    def first_of_largest(_, z, m):
        in_quad = arith.muli(arith.remui(thread(), i32(4)), i32(2))
        columns, registers = z.registers.reshape(-1, 2), []
        for row, largest in enumerate(m.registers.flat):
            below = _below(*elements(largest))
            firsts = []
            for start in range(0, len(columns), _COLUMNS_IN_CHAIN):
                first = i32(_NO_COLUMN)
                for i in reversed(range(start, start + _COLUMNS_IN_CHAIN)):
                    for j, value in reversed([*enumerate(elements(columns[i, row]))]):
                        is_m = arith.cmpf(arith.CmpFPredicate.UGT, value, below)
                        first = arith.select(is_m, i32(8 * i + j), first)
                firsts.append(first)
            first = arith.addi(normalizers.tree(arith.minsi, firsts), in_quad)
            for distance in 1, 2:
                first = arith.minsi(first, utils.shfl_bfly(first, distance))
            registers.append(pack([first]))
        return array(ROW_LAYOUT.to_mgpu(), m.shape, registers)

    return first_of_largest(z, m)


def _below(m: ir.Value) -> ir.Value:
    """Returns the number that only the largest logits z of a row exceed, given their maximum m.

    "Exceed" means z > below, or that z or below is NaN:

        m             below
        finite, inf   the next smaller number; for 0 and -0, the largest negative number
        -inf          NaN, because every z is m
        NaN           inf, because only NaNs count as m
    """
    compare, f32 = arith.CmpFPredicate, ir.F32Type.get()
    bits, zero = arith.bitcast(ir.IntegerType.get_signless(32), m), arith.constant(f32, 0.0)
    below_zero = arith.bitcast(f32, i32(-(2**31) + 1))  # the largest negative number
    is_positive = arith.cmpf(compare.OGT, m, zero)
    step = arith.select(is_positive, i32(-1), i32(1))
    below = arith.bitcast(f32, arith.addi(bits, step))
    below = arith.select(arith.cmpf(compare.OEQ, m, zero), below_zero, below)
    return arith.select(arith.cmpf(compare.UNO, m, m), arith.constant(f32, float("inf")), below)


# Pairs of columns that a thread compares one after another. Several such chains run at the same time.
_COLUMNS_IN_CHAIN = 8
_NO_COLUMN = 2**30


def _tanh(y):
    """Returns tanh(y) within a few float32 ulp. The GPU's own instruction is accurate only to 11 bits."""
    far = 1 - 2 / (1 + jnp.exp(2 * y))
    square = y * y
    # Taylor series, relative error 1e-9
    near = y - y * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
    return jnp.where(square < 0.01, near, far)


def _softcap_slope(z, place: Place, inputs: Inputs, head: Head):
    """Returns the derivative of the softcap; 1 without a softcap. From column V on, where z is -inf, it is 0."""
    if head.softcap is None:
        return 1.0
    capped = z
    if inputs.inverse_temperature is not None:
        capped = z * _broadcast_rows(1 / _load_per_row(inputs.inverse_temperature, place), z)
    tanh = jnp.maximum(capped * (1 / head.softcap), -1)
    return (1 - tanh) * (1 + tanh)


# ---- Per-row and per-column numbers


def _labels(tokens: Tokens, columns: int, vocab: int, tiling: Tiling) -> Labels | SeveralLabels | None:
    labels = tokens.labels
    if labels is None:
        return None
    if tokens.several:
        return sorted_labels(labels, columns, vocab, rounded_up(len(labels), tiling.cluster_rows))
    labels = _padded(jnp.where(labels < vocab, labels, -1), tiling.cluster_rows, -1)
    tile = labels.reshape(-1, WARPGROUP_ROWS, 1) // TILE_N
    tiles = jnp.arange(-(-columns // TILE_N), dtype=jnp.int32)[None, None]
    return Labels(labels, jnp.any(tile == tiles, axis=1).astype(jnp.int32))


def _padded(a, multiple: int, value=0):
    return jnp.pad(a, [(0, -len(a) % multiple)] + [(0, 0)] * (a.ndim - 1), constant_values=value)


def _load_per_row(gmem, place: Place):
    return load_as(gmem.at[pl.ds(place.row, WARPGROUP_ROWS)], ROW_LAYOUT)


def _broadcast_rows(per_row, like):
    return lax.broadcast_in_dim(per_row, like.shape, (0,))
