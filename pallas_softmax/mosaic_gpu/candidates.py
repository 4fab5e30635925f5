"""The candidates of a row in shared memory: threshold, append, rank. Inline PTX, and a plain twin of each.

Pallas has no scatter, sort or warp operations on the GPU, and its interpreter runs no inline code; so each
operation exists twice, and the function without an underscore takes one or the other. A slot is 8 bytes:
the complemented position below, the key as an unsigned number above. As a 64-bit number, larger is better,
and of equal keys the lower position is larger. An empty slot is 0.
"""

import contextlib
import functools

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_softmax.mosaic_gpu.direct import REF, SCALAR, i32, inline, scalar, thread
from pallas_softmax.mosaic_gpu.launch import WARPGROUP

CAPACITY = 512  # slots; more survivors than this take the exact path
_LANES = 256  # maxima among which the threshold is found: 8 a thread, every warp for itself
_SIGN = np.int32(-(2**31))

# slots, their count, lanes
SCRATCH = tuple(plgpu.SMEM((n,), jnp.int32) for n in (2 * CAPACITY, 32, _LANES))


def selected(key, position, bound, end):
    """What is appended: keys above `bound`, and those equal to it at positions before `end`."""
    return (key > bound) | ((key == bound) & (position < end))


def clear(slots, count, *, interpret):
    """Empties the list."""
    if interpret:
        slots[...] = jnp.zeros_like(slots[...])
        count[...] = jnp.zeros_like(count[...])
    else:
        _clear(slots, count)


def threshold(lanes, keys, k, layout):
    """A key that at least k of the lanes' best keys reach, and not many more.

    Args:
      lanes: scratch.
      keys: a block of each lane's best key.
      layout: of the block; None in the interpreter.
    """
    if layout is not None:
        return _threshold(lanes, keys, k, layout)
    return lax.sort(jnp.max(keys.reshape(_LANES, -1), axis=1))[_LANES - k]


def append(slots, count, blocks, start, bound, end, layout):
    """Appends the `selected` keys of `blocks`, the first of which starts at position `start`. No barrier.

    `count` counts all of them, also those that found no free slot.
    """
    if layout is not None:
        return _append(slots, count, blocks, start, bound, end, layout)
    keys = jnp.concatenate(blocks)
    position = start + jnp.arange(keys.size, dtype=jnp.int32)
    chosen = selected(keys, position, bound, end)
    slot = jnp.where(chosen, count[0] + jnp.cumsum(chosen) - 1, CAPACITY)
    pairs = jnp.stack([~position, keys ^ _SIGN], axis=1)
    slots[...] = slots[...].reshape(CAPACITY, 2).at[slot].set(pairs, mode="drop").reshape(-1)
    count[...] = count[...] + jnp.sum(chosen, dtype=jnp.int32)


def rank(slots, n, row, values, indices, r, k, *, interpret):
    """Writes the k best of the first n slots, best first, to row r of `values` and `indices`.

    Args:
      row: the row in shared memory, from which the values are taken.
    """
    if not interpret:
        return _rank(slots, n, row, values, indices, r, k)
    position, key = slots[...].reshape(CAPACITY, 2).T
    empty = jnp.arange(CAPACITY) >= n
    *_, best = lax.sort((empty, ~(key ^ _SIGN), ~position), num_keys=3)
    values[r] = row[...][best[:k]]
    indices[r] = best[:k]


# ---- on the GPU


def _elements(block: mgpu.FragmentedArray) -> list[ir.Value]:
    """This thread's elements of a block, in the order of their positions."""
    (register,) = block.registers.flat
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def _ptx(code: str, constraints: str, *operands: ir.Value, result: ir.Type | None = None):
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, list(operands), "{" + code + " }", constraints, has_side_effects=True)


@contextlib.contextmanager
def _when(condition: ir.Value):
    op = scf.IfOp(condition)
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def _clear(slots, count):
    @inline(arg_types=(REF, REF))
    def clear(_, slots, count):
        utils.warpgroup_barrier()  # the last readers are done
        _ptx(
            f"""
            .reg .pred p; .reg .b32 a;
            mad.lo.u32 a, $1, {8 * CAPACITY // WARPGROUP}, $0;"""
            + "".join(f"st.shared.v4.b32 [a+{16 * i}], {{0, 0, 0, 0}};\n" for i in range(CAPACITY // 256))
            + """
            setp.eq.u32 p, $1, 0;
            @p st.shared.b32 [$2], 0;""",
            "r,r,r",
            utils.memref_ptr(slots),
            thread(),
            utils.memref_ptr(count),
        )
        utils.warpgroup_barrier()

    clear(slots, count)


def _threshold(lanes, keys, k, layout):
    """Bisection, by every warp for itself: no barrier in the loop."""

    @inline(arg_types=(REF, layout), return_type=plgpu.ShapeDtypeStruct((), np.dtype("int32"), layout=SCALAR))
    def threshold(_, lanes, keys):
        mine = _elements(keys)
        for i in range(_LANES // WARPGROUP):
            best = functools.reduce(arith.maxsi, mine[i :: _LANES // WARPGROUP])
            _ptx(
                f"""
                .reg .b32 a;
                mad.lo.u32 a, $1, 4, $0;
                st.shared.b32 [a+{4 * WARPGROUP * i}], $2;""",
                "r,r,r",
                utils.memref_ptr(lanes),
                thread(),
                best,
            )
        utils.warpgroup_barrier()
        i32 = ir.IntegerType.get_signless(32)
        per_thread = _LANES // 32
        # lo is reached by n >= k lanes, hi + 1 by fewer than k
        bound = _ptx(
            f"""
            .reg .pred p, q;
            .reg .b32 a, v, n, lo, hi, mid, gap, x<{per_thread}>;
            and.b32 a, $2, 31;
            mad.lo.u32 a, a, {4 * per_thread}, $1;
            """
            + "".join(
                f"ld.shared.v4.b32 {{x{j}, x{j + 1}, x{j + 2}, x{j + 3}}}, [a+{4 * j}];\n"
                for j in range(0, per_thread, 4)
            )
            + "mov.b32 lo, x0; mov.b32 hi, x0;\n"
            + "".join(f"min.s32 lo, lo, x{j}; max.s32 hi, hi, x{j};\n" for j in range(1, per_thread))
            + f"""
            redux.sync.min.s32 lo, lo, 0xffffffff;
            redux.sync.max.s32 hi, hi, 0xffffffff;
            mov.b32 n, {_LANES};
            again:
            setp.lt.s32 p, lo, hi;
            setp.gt.and.s32 p, n, {k + max(4, k // 8)}, p;
            @!p bra done;
            sub.u32 gap, hi, lo;
            and.b32 mid, gap, 1;
            shr.u32 gap, gap, 1;
            add.u32 mid, mid, gap;
            add.u32 mid, mid, lo;
            mov.b32 v, 0;
            """
            + "".join(f"setp.ge.s32 q, x{j}, mid; @q add.u32 v, v, 1;\n" for j in range(per_thread))
            + f"""
            redux.sync.add.u32 v, v, 0xffffffff;
            setp.ge.s32 q, v, {k};
            @q mov.b32 lo, mid;
            @q mov.b32 n, v;
            @!q sub.u32 hi, mid, 1;
            bra again;
            done:
            mov.b32 $0, lo;""",
            "=r,r,r",
            utils.memref_ptr(lanes),
            thread(),
            result=i32,
        )
        return mgpu.FragmentedArray.splat(bound, (), is_signed=True)

    return threshold(lanes, keys)


def _append(slots, count, blocks, start, bound, end, layout):
    @inline(arg_types=(REF, REF, [layout] * len(blocks), SCALAR, SCALAR, SCALAR))
    def append(_, slots, count, blocks, start, bound, end):
        start, bound, end = scalar(start), scalar(bound), scalar(end)
        slots, count = utils.memref_ptr(slots), utils.memref_ptr(count)
        blocks = [_elements(block) for block in blocks]
        vec = len(blocks[0])
        first = arith.addi(start, arith.muli(thread(), i32(vec)))
        best = [functools.reduce(arith.maxsi, keys) for keys in blocks]

        def reaches(key):
            return arith.cmpi(arith.CmpIPredicate.sge, key, bound)

        def push(key, position):
            _ptx(
                f"""
                .reg .pred p, q; .reg .b32 n, a, u; .reg .b64 w;
                setp.gt.s32 p, $0, $2;
                setp.eq.s32 q, $0, $2;
                setp.lt.and.s32 q, $1, $3, q;
                or.pred p, p, q;
                @!p bra out;
                atom.relaxed.cta.shared::cta.add.u32 n, [$5], 1;
                setp.lt.u32 p, n, {CAPACITY};
                mad.lo.u32 a, n, 8, $4;
                xor.b32 u, $0, 0x80000000;
                not.b32 n, $1;
                mov.b64 w, {{n, u}};
                @p st.shared.b64 [a], w;
                out:""",
                "r,r,r,r,r,r",
                *(key, position, bound, end, slots, count),
            )

        # few threads have anything to append: one branch a step, then one a block, then one an element
        with _when(reaches(functools.reduce(arith.maxsi, best))):
            for b, keys in enumerate(blocks):
                with _when(reaches(best[b])):
                    for i, key in enumerate(keys):
                        push(key, arith.addi(first, i32(b * WARPGROUP * vec + i)))

    append(slots, count, blocks, start, bound, end)


def _rank(slots, n, row, values, indices, r, k):
    """A slot's rank is the number of better ones."""

    @inline(arg_types=(REF, SCALAR, REF, REF, REF, SCALAR))
    def rank(_, slots, n, row, values, indices, r):
        bits = 8 * utils.bytewidth(ir.MemRefType(row.type).element_type)
        value = {32: "b32", 16: "b16"}[bits]
        _ptx(
            f"""
            .reg .pred p; .reg .b32 own, at, to, rank, a, i; .reg .b64 w, x<4>, g; .reg .{value} v;
            mov.b32 own, $1;
            next:
            setp.ge.u32 p, own, $2;
            @p bra end;
            mad.lo.u32 a, own, 8, $0;
            ld.shared.b64 w, [a];
            mov.b32 rank, 0;
            mov.b32 at, $0;
            mad.lo.u32 to, $2, 8, $0;
            count:
            ld.shared.v2.b64 {{x0, x1}}, [at];
            ld.shared.v2.b64 {{x2, x3}}, [at+16];
            """
            + "".join(f"setp.gt.u64 p, x{j}, w; @p add.u32 rank, rank, 1;\n" for j in range(4))
            + f"""
            add.u32 at, at, 32;
            setp.lt.u32 p, at, to;
            @p bra count;
            setp.ge.u32 p, rank, {k};
            @p bra skip;
            cvt.u32.u64 i, w;
            not.b32 i, i;
            mad.lo.u32 a, i, {bits // 8}, $3;
            ld.shared.{value} v, [a];
            cvt.u64.u32 g, $6;
            mul.lo.u64 g, g, {k};
            cvt.u64.u32 w, rank;
            add.u64 g, g, w;
            mad.lo.u64 w, g, {bits // 8}, $4;
            st.global.{value} [w], v;
            mad.lo.u64 w, g, 4, $5;
            st.global.b32 [w], i;
            skip:
            add.u32 own, own, {WARPGROUP};
            bra next;
            end:""",
            "r,r,r,r,l,l,r",
            utils.memref_ptr(slots),
            thread(),
            scalar(n),
            utils.memref_ptr(row),
            utils.memref_ptr(values),
            utils.memref_ptr(indices),
            scalar(r),
        )

    rank(slots, n, row, values, indices, r)
