"""The unfiltered draw of `linear_sample`, in the kernel of the product: the best sum of logit and noise of each tile.

Noise takes 78 instructions, 68 of them threefry. Few elements can win, but each needs a bound of its noise. So a thread
computes the random words of its elements while the tensor cores multiply, and keeps a bound of 8 bits for each. Only
candidates compute their noise again, exactly:

    while a tile is multiplied   a bound of the noise of each element, in shared memory            `keep_bounds`
    when its logits are there    logit / temperature + the bound of the noise bounds the sum       `best_sums`
                                   while some bound in the warp reaches the best sum that is known of its row: each lane
                                   removes its largest bound, and computes that sum exactly
    after the kernel             the best of all tiles; ties go to the lowest column

The tiles of a row tell each other their best sums by an array in device memory. A thread reads only bounds that it
wrote, so no barrier is needed. It has elements of two rows, as wgmma lays them out, and two of every 8 columns:

    thread 4 i + j of a warp     rows i and i + 8 of 16; columns 2 j and 2 j + 1, 2 j + 8 and 2 j + 9, ..

Noise is -log(-log(u)), which is at most -log(1 - u). This bound in octaves (powers of two) is kept as the code _TOP -
_STEPS * octaves, a float from 32 to 128. Its upper byte is always the same. Its lower two bytes are cut off, which
raises the bound. The byte between them is kept:

    1 - u          2^-23    2^-22    ..   1/4       1/2       1
    the code       33       37.1     ..   119.6     123.8     127.9
    as a float     0x4204   0x4214   ..   0x42EF    0x42F7    0x42FF

At a temperature of 0, each lane takes its first largest logit as its sum. +0 is above -0, as in `lax.top_k`.
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
# Shape of the bounds of a part, words in shared memory: (loads, threads, words of a load).
BOUNDS = _COLUMNS // _COLUMNS_OF_LOAD, WARPGROUP, 4
_GROUP = 16  # a thread knows the largest bound of every 16 elements of a row

_TOP, _STEPS = 127.875, 4.125  # so that the codes of 0 and 23 octaves have the same upper byte
_UPPER_BYTE = 0x42000000
_ROUNDING = 1 / 4096  # octaves: more than the errors of log2 and of two multiply-adds
# The bound of a sum is x * _PER_NAT / temperature + code * _PER_STEP + _OFFSET. Its unit is 4 octaves, so that no bound
# overflows if x / temperature does not.
_PER_NAT, _PER_STEP, _OFFSET = LOG2_E / 4, -1 / _STEPS / 4, (_TOP / _STEPS + _ROUNDING) / 4
_SLOT_BITS = 6  # a thread has 64 elements of a row. The lower bits of a bound say which of them it is
_MARGIN = 2.0**-16  # more than the relative error of a bound without these bits, 2^-17, and of its arithmetic
_RANGE = 16.0  # more than |noise|, in the unit of bounds
_KEY_OF_NOTHING = -0x7F800001  # the sort key of -inf

WINNER = {"key": "s32", "index": "s32", "x": "f32"}  # the results of a row, by their names in the program
_NAMES = *NOISE_OPERANDS, "temperature"
WORDS, OPERANDS = len(NOISE_OPERANDS), len(_NAMES)  # numbers of each row: of its noise, and of its draw


@twin
def keep_bounds(bounds_smem, words, first_column, step, *, steps: int) -> None:
    """Keeps the bounds of the noise of some columns. `steps` calls do all columns of the tile.

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

    `numbers` are the words of the noise, and the bits of the temperature (a NaN: no draw); each is (64,). z is not yet
    divided by the temperature, and starts at row `first_row` of `rows`. If no element reaches the best sum of another
    tile, the column is `HIGHEST`. -inf and NaN cannot win. A row with +inf may get anything.
    """
    dtypes = [jnp.float32 if kind == "f32" else jnp.int32 for kind in WINNER.values()]
    shape = (len(z),)
    # The best sum that is known of each row, by `order`, for all CTAs. Mosaic GPU zeroes semaphores before the kernel.
    best_of_rows = pl.get_global(plgpu.SemaphoreType.REGULAR((rows,)))

    @inline(
        arg_types=(plgpu.Layout.WGMMA, REF, REF, [ROW_LAYOUT] * OPERANDS, SCALAR, SCALAR),
        return_type=tuple(plgpu.ShapeDtypeStruct(shape, jnp.dtype(d), layout=ROW_LAYOUT) for d in dtypes),
    )
    def best(_, z, bounds, best_of_rows, numbers, row, column):
        operands = {"bounds": bounds, "best_of_rows": best_of_rows, "thread": thread()}
        operands |= {"row": scalar(row), "column": scalar(column)} | _of_rows(_NAMES, numbers)
        each = [element for register in z.registers.flat for element in elements(register)]
        operands |= {f"z{i}": element for i, element in enumerate(each)}
        kinds = {f"{name}{i}": kind.replace("s", "i") for name, kind in WINNER.items() for i in range(_ROWS)}
        found = emit_ptx(_best_program(), operands, kinds)
        layout = ROW_LAYOUT.to_mgpu()
        return tuple(
            array(layout, shape, [pack([number]) for number in found[_ROWS * i : _ROWS * (i + 1)]])
            for i in range(len(WINNER))
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
            codes = [p.multiply_add(p.log2(2.0 - one), _STEPS, _TOP) for one in ones_plus_u]
            load, at = here >> log2(_COLUMNS_OF_LOAD), here & _COLUMNS_OF_LOAD - 1
            to = bounds + load * (WARPGROUP * 16) + thread * 16 + at * _ROWS
            p.store(to, p.convert(_bytes(p, codes[0], codes[1], 0x62), "u16"))
    return p


def _bytes(p: Program, a: Value, b: Value, which: int) -> Value:
    """Returns four bytes of a (numbers 0 to 3) and b (4 to 7); hexadecimal digit i of `which` names byte i."""
    return p.write("prmt.b32", "u32", a.bits("u32"), b.bits("u32"), which, of=("b32", "b32", "i32"))


class _Row:
    """The draw from one of a thread's rows: its logits, their largest bounds, and the best sum."""

    def __init__(self, p: Program, number: int, row: Value, bounds: Value):
        self.p, self.number, self.bounds = p, number, bounds  # the address of the thread's bounds
        self.words = p.operands("u32", *(f"{name}_{number}" for name in NOISE_OPERANDS))
        t = p.operand(f"temperature_{number}", "f32")
        self.greedy, self.races, self.temperature = p.var(t.equals(0.0)), p.var(t > 0.0), p.max(t, TINY)
        self.per_logit = p.divide(p.var(_PER_NAT, "f32"), self.temperature)
        # the winner of this lane: the key of its sum, its column, its logit
        self.winner = [p.operand(f"{name}{number}", kind) for name, kind in WINNER.items()]
        for register, start in zip(self.winner, (_KEY_OF_NOTHING, HIGHEST, -INF)):
            p.set(register, start)
        self.best_of_row = p.multiply_add_wide(row, 4, p.operand("best_of_rows", "u64"))
        self.best, self.threshold = p.var(-INF, "f32"), p.fresh("f32")  # of the row, as far as this lane knows
        self.largest = [p.var(-INF, "f32") for _ in range(_COLUMNS // _GROUP)]
        found = p.var(0, "u32")
        p += f"@{self.races} ld.relaxed.gpu.global.b32 {found}, [{self.best_of_row}+0];"
        p.update(self.best, "max", from_order(found))  # a NaN if nothing was found
        self._set_threshold()
        # The registers of wgmma: two logits of the first row, two of the second one, and so on. A slot is a column.
        at = [2 * _ROWS * (slot // 2) + 2 * number + slot % 2 for slot in range(_COLUMNS)]
        self.logits = [p.operand(f"z{i}", "f32") for i in at]

    def _set_threshold(self) -> None:
        best = self.best * _PER_NAT
        self.p.set(self.threshold, self.p.multiply_add(self.p.absolute(best) + _RANGE, -_MARGIN, best))

    def keep_first_largest(self, column: Value) -> None:
        """Keeps the first of the largest logits of this lane, at a temperature of 0; slot 0 is in column `column`."""
        p, x = self.p, self.p.reduce("max", self.logits)
        first = p.var(0, "u32")
        for slot in reversed(range(_COLUMNS)):
            p.set(first, slot, when=self.logits[slot].bits("s32").equals(x.bits("s32")))
        index = column + (first >> 1) * 8 + (first & 1)
        self.keep([flip_negative(x.bits("s32")), index.bits("s32"), x], self.greedy & (x > -INF))

    def bounds_of(self, group: int, mask: Value, upper: Value) -> list[Value]:
        """Returns the bounds of the sums of a group. The lower bits of a bound say which slot it is of.

        An infinite bound, except of slot 0, becomes a NaN.
        """
        p, first, bounds = self.p, group * _GROUP, []
        for load in range(first // _COLUMNS_OF_LOAD, (first + _GROUP) // _COLUMNS_OF_LOAD):
            words = p.load_vector(self.bounds, "u32", 4, offset=load * WARPGROUP * 16)
            for i in range(_COLUMNS_OF_LOAD):
                slot, byte = load * _COLUMNS_OF_LOAD + i, i % 2 * _ROWS + self.number
                code = _bytes(p, words[i // 2], upper, 0x7044 | byte << 8).bits("f32")
                bound = p.multiply_add(self.logits[slot], self.per_logit, _OFFSET)
                bound = p.multiply_add(code, _PER_STEP, bound).bits("u32")
                bounds.append(p.bitwise3(lambda a, mask, slot: a & mask | slot, bound, mask, slot).bits("f32"))
        return bounds

    def reaching(self) -> tuple[Value, Value]:
        """Returns the largest bound, and whether it reaches the threshold."""
        largest = self.p.reduce("max", self.largest)
        return largest, (largest > self.threshold) & self.races

    def keep(self, other: list[Value], when: Value) -> None:
        """Keeps another winner, if it is better."""
        p, (key, column, _) = self.p, other
        best, of_best, _ = self.winner
        better = (key > best) | (key.equals(best) & (column < of_best))
        better = better & when
        for register, value in zip(self.winner, other):
            p.set(register, value, when=better)

    def raise_threshold(self) -> None:
        """Raises the threshold to the best sum of the lanes that have elements of this row."""
        p, key = self.p, self.winner[0]
        for distance in 1, 2:
            key = p.max(key, p.shuffle(key, "bfly", distance))
        p.update(self.best, "max", flip_negative(key).bits("f32"))
        self._set_threshold()

    def publish(self, is_first: Value) -> None:
        """Merges the winners of the lanes that have elements of this row. The first of them tells the other CTAs."""
        p, key = self.p, self.winner[0]
        for distance in 1, 2:
            self.keep([p.shuffle(number, "bfly", distance) for number in self.winner], self.greedy | self.races)
        number = order(flip_negative(key).bits("f32"))
        publishes = (key > _KEY_OF_NOTHING) & is_first
        p += f"@{publishes} red.relaxed.gpu.global.max.u32 [{self.best_of_row}+0], {number};"


@functools.cache
def _best_program() -> Program:
    """The program of `best_sums`."""
    p = Program()
    bounds, thread, row, column = p.operands("u32", "bounds", "thread", "row", "column")
    row, column, lane_of_row = row + (thread >> 5) * 16 + (thread >> 2 & 7), column + (thread & 3) * 2, thread & 3
    own = p.var(bounds + thread * 16)
    first, second = pair = [_Row(p, i, row + 8 * i, own) for i in range(_ROWS)]
    mask, upper = p.var(2**32 - 2**_SLOT_BITS, "u32"), p.var(_UPPER_BYTE, "u32")
    groups = range(_COLUMNS // _GROUP)
    for group in groups:
        for one in pair:
            for bound in one.bounds_of(group, mask, upper):
                p.update(one.largest[group], "max", bound)
    with p.loop() as leave:
        (largest, reaches), (largest_of_second, second_reaches) = (one.reaching() for one in pair)
        leave(~p.any(reaches | second_reaches))
        # These shuffles change nothing, but ptxas cannot know. Otherwise it would keep all bounds in registers.
        for register in own, first.per_logit, second.per_logit:
            p.set(register, p.shuffle(register, "bfly", 0))
        # Each lane takes out one element, of the first row if it can.
        taken = p.select(reaches, largest, largest_of_second)
        slot, is_second = taken.bits("u32") & (1 << _SLOT_BITS) - 1, second_reaches & ~reaches
        x, is_of = p.fresh("f32"), [reaches, is_second]
        for group in groups:
            for one, is_of_row in zip(pair, is_of):
                is_here = is_of_row & (slot >> log2(_GROUP)).equals(group)
                with p.when(p.any(is_here)):
                    p.set(x, _chosen(p, one.logits[group * _GROUP :][:_GROUP], slot), when=is_here)
                    next_largest = p.var(-INF, "f32")
                    for bound in one.bounds_of(group, mask, upper):
                        p.update(next_largest, "max", bound, when=bound < taken)
                    p.set(one.largest[group], next_largest, when=is_here)

        def of_row(of_first: Value, of_second: Value) -> Value:
            return p.select(is_second, of_second, of_first)

        index = column + (slot >> 1) * 8 + (slot & 1)
        noise = Noise(p, [of_row(*words) for words in zip(first.words, second.words)], 1)
        quotient = p.divide_exactly(x, of_row(first.temperature, second.temperature))
        z = quotient + gumbel(p, *noise.ones_plus_uniform([index])) + 0.0  # +0 in place of -0
        key = flip_negative(z.bits("s32"))
        for one, is_of_row in zip(pair, is_of):
            one.keep([key, index.bits("s32"), x], is_of_row)
            one.raise_threshold()
    with p.when(p.any(first.greedy | second.greedy)):
        for one in pair:
            one.keep_first_largest(column)
    for one in pair:
        one.publish(lane_of_row.equals(0))
    return p


def _chosen(p: Program, values: list[Value], number: Value) -> Value:
    """Returns one of 2^n values, by the lowest n bits of a number."""
    for bit in range(log2(len(values))):
        is_odd = (number & 1 << bit).differs(0)
        values = [p.select(is_odd, b, a) for a, b in zip(values[::2], values[1::2])]
    return values[0]
