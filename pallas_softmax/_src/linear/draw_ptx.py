"""The draw of `linear_sample` without filters: the best sums of logit and noise, in the kernel of the product.

Noise takes 78 instructions, 68 of them threefry, and few sums can win. All of them need a bound, so a thread computes
the random words of its elements while the tensor cores multiply. It has no registers to keep them, so it keeps a byte
of each in shared memory:

    while a tile is multiplied   a bound of the noise of each element, in 8 bits                   `keep_bounds`
    when its logits are there    logit / temperature + the bound of the noise bounds the sum       `best_sums`
                                   while some bound reaches the best sum that any tile of the row has found: each thread
                                   takes its element with the largest bound out, and computes its sum exactly
    after the kernel             the best of all tiles; ties go to the lowest index

A thread has elements of two rows, as wgmma lays them out. Of every 8 columns, it has two:

    thread 4 i + j of a warp     rows i and i + 8 of 16; columns 2 j and 2 j + 1, 2 j + 8 and 2 j + 9, ..

Noise is -log(-log(u)), which is at most -log(1 - u). The bound is this, in octaves (powers of two), as a float from 32
to 128 that falls by `_STEPS` for each octave. All of these floats have the same upper byte, and the lower two are cut
off, which raises the bound. So the byte between them is kept:

    1 - u                2^-23    2^-22    ..   1/4       1/2       1
    _TOP - the bound     33       37.1     ..   119.6     123.8     127.9
    as a float           0x4204   0x4214   ..   0x42EF    0x42F7    0x42FF

At a temperature of 0 the sum is the logit, and so is the bound. +0 is above -0, as in `lax.top_k`.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.inline import REF, SCALAR, array, elements, emit_ptx, inline, pack, scalar, thread
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.linear.plan import TILE_N
from pallas_softmax._src.linear.several_labels import ROW_LAYOUT
from pallas_softmax._src.normalizers import LOG2_E
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS, Noise, from_order, gumbel, order
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, TINY

_ROWS, _COLUMNS = 2, TILE_N // 4  # of a thread
_COLUMNS_OF_LOAD = 8  # a load of 16 bytes has the bounds of these columns, a byte for each of the two rows
# Words of the bounds of a tile, in shared memory: (loads, threads, words of a load).
BOUNDS = _COLUMNS // _COLUMNS_OF_LOAD, WARPGROUP, 4
_GROUP = 16  # elements of a row whose largest bound a thread keeps

_TOP, _STEPS = 127.875, 4.125
_ROUNDING = 1 / 4096  # octaves: more than the errors of log2 and of two multiply-adds
_UPPER_BYTE = 0x42000000
_SLOT_BITS = 6  # a thread has 64 elements of a row. The lower bits of a bound say which of them it is
_MARGIN = 2.0**-16  # twice the relative error of a bound without these bits
_RANGE = 64.0  # octaves: more than |noise|
_UNIT = 4.0  # octaves in the unit of bounds, so that no bound overflows if the quotient does not
_KEY_OF_NOTHING = -0x7F800001  # the sort key of -inf

_NAMES = *NOISE_OPERANDS, "temperature"
OPERANDS = len(_NAMES)  # numbers of a row


@twin
def keep_bounds(bounds_smem, words, first_column, step, *, steps: int) -> None:
    """Keeps the bounds of the noise of some columns: all columns of the tile are done after `steps` steps.

    `words` describe the noise of the 64 rows, as `noise.words` does; each is (64,).
    """
    columns = -(-_COLUMNS // steps)

    @inline(arg_types=(REF, [ROW_LAYOUT] * len(NOISE_OPERANDS), SCALAR, SCALAR))
    def keep(_, bounds, words, first_column, number):
        operands = {"bounds": bounds, "thread": thread(), "column": scalar(first_column), "number": scalar(number)}
        emit_ptx(_bounds_program(columns), operands | _of_rows(NOISE_OPERANDS, words))

    @pl.when(step * columns < _COLUMNS)
    def _():
        keep(bounds_smem, words, first_column, step * columns)


@twin
def best_sums(z, bounds_smem, numbers, first_row, first_column, *, rows: int) -> tuple:
    """Returns the best sum of each row of z (64, TILE_N) as a sort key, with its column and its logit; each is (64,).

    `numbers` are the words of the noise, and the bits of the temperature, a NaN in a row without a draw; each is (64,).
    z is not yet divided by the temperature. Logits that are not finite cannot win. If no element reaches the best sum
    that another tile has found, the column is `HIGHEST`. `first_row` is the number of the first row, of so many `rows`.
    """
    dtypes = {"key": jnp.int32, "index": jnp.int32, "x": jnp.float32}
    shape = (len(z),)
    # Zeroed at the start of the kernel. The best sum of each row, by `order`: the same array for all CTAs.
    best_of_rows = pl.get_global(plgpu.SemaphoreType.REGULAR((rows,)))

    @inline(
        arg_types=(plgpu.Layout.WGMMA, REF, REF, [ROW_LAYOUT] * OPERANDS, SCALAR, SCALAR),
        return_type=tuple(plgpu.ShapeDtypeStruct(shape, jnp.dtype(d), layout=ROW_LAYOUT) for d in dtypes.values()),
    )
    def best(_, z, bounds, best_of_rows, numbers, row, column):
        operands = {"bounds": bounds, "best_of_rows": best_of_rows, "thread": thread()}
        operands |= {"row": scalar(row), "column": scalar(column)} | _of_rows(_NAMES, numbers)
        each = [element for register in z.registers.flat for element in elements(register)]
        operands |= {f"z{i}": element for i, element in enumerate(each)}
        kinds = {f"{name}{row}": "f32" if name == "x" else "i32" for name in dtypes for row in range(_ROWS)}
        found = emit_ptx(_best_program(), operands, kinds)
        layout = ROW_LAYOUT.to_mgpu()
        return tuple(
            array(layout, shape, [pack([number]) for number in found[_ROWS * i : _ROWS * (i + 1)]])
            for i in range(len(dtypes))
        )

    return best(z, bounds_smem, best_of_rows, numbers, first_row, first_column)


def _of_rows(names, numbers) -> dict[str, Any]:
    """Returns the operands of a thread's rows, from arrays with a number for each row."""
    return {
        f"{name}_{row}": elements(register)[0]
        for name, a in zip(names, numbers)
        for row, register in enumerate(a.registers.flat)
    }


# ---- The programs


@functools.cache
def _bounds_program(columns: int) -> Program:
    """The program of `keep_bounds`, for `columns` of a thread's columns from <number> on."""
    p = Program()
    bounds, thread, column, number = p.operands("u32", "bounds", "thread", "column", "number")
    rows = [Noise(p, p.operands("u32", *(f"{name}_{row}" for name in NOISE_OPERANDS)), 1) for row in range(_ROWS)]
    for i in range(columns):
        here = number + i
        with p.when(here < _COLUMNS):
            own = column + (here >> 1) * 8 + (thread & 3) * 2 + (here & 1)
            ones_plus_u = [one for row in rows for one in row.ones_plus_uniform([own])]
            falling = [p.multiply_add(p.log2(2.0 - one), _STEPS, _TOP) for one in ones_plus_u]
            load, at = here >> log2(_COLUMNS_OF_LOAD), here & _COLUMNS_OF_LOAD - 1
            to = bounds + load * (WARPGROUP * 16) + thread * 16 + at * _ROWS
            p.store(to, p.convert(_bytes(p, falling[0], falling[1], 0x62), "u16"))
    return p


def _bytes(p: Program, a: Value, b: Value, which: int) -> Value:
    """Returns four bytes of a (0 to 3) and b (4 to 7); hexadecimal digit i of `which` selects byte i of the result."""
    return p.write("prmt.b32", "u32", a.bits("u32"), b.bits("u32"), which, of=("b32", "b32", "i32"))


class _Row:
    """The draw from one of a thread's rows: the largest bound of each group of elements, and the best sum."""

    def __init__(self, p: Program, number: int, row: Value):
        self.p = p
        self.words = p.operands("u32", *(f"{name}_{number}" for name in NOISE_OPERANDS))
        t = p.operand(f"temperature_{number}", "f32")
        self.exists, self.greedy, self.temperature = p.var(t.equals(t)), p.var(t.equals(0.0)), p.max(t, TINY)
        # The bound of a sum is x * per_logit + falling * per_step + offset, and its unit is 1 / per_sum.
        self.per_sum = self._unless_greedy(LOG2_E / _UNIT, 1.0)
        self.per_logit = self._unless_greedy(p.divide(self.per_sum, self.temperature), 1.0)
        self.per_step = self._unless_greedy(-1 / _STEPS / _UNIT, 0.0)
        self.offset = self._unless_greedy((_TOP / _STEPS + _ROUNDING) / _UNIT, 0.0)
        self.range = self._unless_greedy(_RANGE / _UNIT, 4 * TINY)
        self.key, self.index, self.x = (
            p.operand(f"{name}{number}", kind) for name, kind in (("key", "s32"), ("index", "s32"), ("x", "f32"))
        )
        for register, start in (self.key, _KEY_OF_NOTHING), (self.index, HIGHEST), (self.x, -INF):
            p.set(register, start)
        self.best_of_row = p.multiply_add_wide(row, 4, p.operand("best_of_rows", "u64"))
        self.best, self.threshold = p.var(-INF, "f32"), p.fresh("f32")
        self.largest = [p.var(-INF, "f32") for _ in range(_COLUMNS // _GROUP)]
        found = p.var(0, "u32")
        p += f"@{self.exists} ld.relaxed.gpu.global.b32 {found}, [{self.best_of_row}+0];"
        p.update(self.best, "max", from_order(found))  # which is NaN, if nothing was found
        self._set_threshold()

    def _unless_greedy(self, number: Value | float, otherwise: float) -> Value:
        return self.p.select(self.greedy, otherwise, number, "f32")

    def _set_threshold(self) -> None:
        best = self.best * self.per_sum
        self.p.set(self.threshold, self.p.multiply_add(self.p.absolute(best) + self.range, -_MARGIN, best))

    def bound(self, x: Value, falling: Value, mask: Value, slot: int) -> Value:
        """Returns the bound of the sum of logit and noise, given the bound of the noise. `slot` is in its lower bits.

        An infinite bound, except of slot 0, becomes a NaN.
        """
        p = self.p
        bound = p.multiply_add(falling, self.per_step, p.multiply_add(x, self.per_logit, self.offset))
        return p.bitwise3(lambda a, mask, slot: a & mask | slot, bound.bits("u32"), mask, slot).bits("f32")

    def reaching(self) -> tuple[Value, Value]:
        """Returns the largest bound, and whether it reaches the threshold."""
        largest = self.p.reduce("max", self.largest)
        return largest, (largest > self.threshold) & self.exists

    def keep(self, other: list[Value], when: Value | None = None) -> None:
        """Keeps another sum with its column and its logit, if it is better."""
        p, (key, index, _) = self.p, other
        better = (key > self.key) | (key.equals(self.key) & (index < self.index))
        better = better if when is None else better & when
        for register, value in zip((self.key, self.index, self.x), other):
            p.set(register, value, when=better)

    def raise_threshold(self) -> None:
        """Raises the threshold to the best sum of the lanes that have elements of this row."""
        p, key = self.p, self.key
        for distance in 1, 2:
            key = p.max(key, p.shuffle(key, "bfly", distance))
        p.update(self.best, "max", flip_negative(key).bits("f32"))
        self._set_threshold()

    def merge_lanes(self, is_first: Value) -> None:
        """Merges the sums of the lanes that have elements of this row. The first of them tells the other CTAs."""
        p = self.p
        for distance in 1, 2:
            self.keep([p.shuffle(number, "bfly", distance) for number in (self.key, self.index, self.x)])
        number = order(flip_negative(self.key).bits("f32"))
        tells = (self.key > _KEY_OF_NOTHING) & is_first
        p += f"@{tells} red.relaxed.gpu.global.max.u32 [{self.best_of_row}+0], {number};"


class _Tile:
    """The elements of a thread: <z0>, <z1>, .. are logits, as registers of wgmma."""

    def __init__(self, p: Program, own: Value):
        # two elements of the first row, two of the second one, and so on
        each = [p.operand(f"z{i}", "f32") for i in range(_ROWS * _COLUMNS)]
        self.of_rows = [[each[2 * _ROWS * (i // 2) + 2 * row + i % 2] for i in range(_COLUMNS)] for row in range(_ROWS)]
        self.p, self.own = p, own  # the address of the thread's bounds
        self.mask, self.upper = p.var(2**32 - 2**_SLOT_BITS, "u32"), p.var(_UPPER_BYTE, "u32")

    def bounds(self, pair: list[_Row], number: int, first: int) -> list[Value]:
        """Returns the bounds of sums of a group of elements of one of the rows, from slot `first` on."""
        p, bounds = self.p, []
        for load in range(first // _COLUMNS_OF_LOAD, (first + _GROUP) // _COLUMNS_OF_LOAD):
            words = p.load_vector(self.own, "u32", 4, offset=load * WARPGROUP * 16)
            for at in range(_COLUMNS_OF_LOAD):
                slot = load * _COLUMNS_OF_LOAD + at
                falling = _bytes(p, words[at // 2], self.upper, 0x7044 | at % 2 * 2 + number << 8).bits("f32")
                bounds.append(pair[number].bound(self.of_rows[number][slot], falling, self.mask, slot))
        return bounds


@functools.cache
def _best_program() -> Program:
    """The program of `best_sums`."""
    p = Program()
    bounds, thread, row, column = p.operands("u32", "bounds", "thread", "row", "column")
    first_row = row + (thread >> 5) * 16 + (thread >> 2 & 7)
    first_column, lane_of_row = column + (thread & 3) * 2, thread & 3
    pair = [_Row(p, i, first_row + 8 * i) for i in range(_ROWS)]
    tile = _Tile(p, bounds + thread * 16)
    groups = [(number, first) for first in range(0, _COLUMNS, _GROUP) for number in range(_ROWS)]
    for number, first in groups:
        for bound in tile.bounds(pair, number, first):
            p.update(pair[number].largest[first // _GROUP], "max", bound)
    with p.loop() as leave:
        (largest, reaches), (largest_of_second, second_reaches) = (row.reaching() for row in pair)
        leave(~p.any(reaches | second_reaches))
        # ptxas does not know that these changes are none. Otherwise it would keep bounds in registers, and spill.
        for register in tile.own, *(row.per_logit for row in pair):
            p.set(register, p.shuffle(register, "bfly", 0))
        # a lane enters one element, of the first row if it can
        entered = p.select(reaches, largest, largest_of_second)
        slot, is_second = entered.bits("u32") & (1 << _SLOT_BITS) - 1, second_reaches & ~reaches
        x, enters = p.fresh("f32"), [reaches, is_second]
        for number, first in groups:
            is_here = enters[number] & (slot >> log2(_GROUP)).equals(first // _GROUP)
            with p.when(p.any(is_here)):
                p.set(x, _chosen(p, tile.of_rows[number][first : first + _GROUP], slot), when=is_here)
                left = p.var(-INF, "f32")
                for bound in tile.bounds(pair, number, first):
                    p.update(left, "max", bound, when=bound < entered)
                p.set(pair[number].largest[first // _GROUP], left, when=is_here)

        def of_row(first, second):
            return p.select(is_second, second, first)

        index = first_column + (slot >> 1) * 8 + (slot & 1)
        noise = Noise(p, [of_row(*words) for words in zip(*(row.words for row in pair))], 1)
        quotient = p.divide_exactly(x, of_row(*(row.temperature for row in pair)))
        z = quotient + gumbel(p, *noise.ones_plus_uniform([index])) + 0.0  # +0 in place of -0
        greedy = (pair[0].greedy & ~is_second) | (pair[1].greedy & is_second)
        key = flip_negative(p.select(greedy, x, z).bits("s32"))
        for row, is_of_row in zip(pair, enters):
            row.keep([key, index.bits("s32"), x], is_of_row)
            row.raise_threshold()
    for row in pair:
        row.merge_lanes(lane_of_row.equals(0))
    return p


def _chosen(p: Program, values: list[Value], number: Value) -> Value:
    """Returns one of 2^n values, by the lowest n bits of a number."""
    for bit in range(log2(len(values))):
        is_odd = (number & 1 << bit).differs(0)
        values = [p.select(is_odd, b, a) for a, b in zip(values[::2], values[1::2])]
    return values[0]
