"""The steps of `selection` while a row arrives, in inline PTX: thread t takes vector t of every block."""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_softmax.implementations.mosaic_gpu.device.element_ptx import Elements
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    BARRIER,
    NEG_INF,
    REF,
    SCALAR,
    Code,
    elements,
    emit_ptx,
    i32,
    inline,
    scalar,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.predicated_ptx import load_mask, load_vector
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window
from pallas_softmax.online import Normalizer

_SLT, _SGE = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge


def clear(slots, counts) -> None:
    """Every thread writes 16 bytes at a time, until all slots are 0; thread 0 sets both counts to 0."""
    (words,) = slots.shape
    code = Code()
    address, turn = code.new("b32", 2)
    (p,) = code.new("pred")
    code += f"{BARRIER} mad.lo.u32 {address}, <thread>, 16, <slots>; mov.b32 {turn}, <thread>;"
    code += f"again: st.shared.v4.b32 [{address}], {{0, 0, 0, 0}}; add.u32 {address}, {address}, {16 * WARPGROUP};"
    code += f"add.u32 {turn}, {turn}, {WARPGROUP}; setp.lt.u32 {p}, {turn}, {words // 4}; @{p} bra again;"
    code += f"setp.eq.u32 {p}, <thread>, 0; @{p} st.shared.v2.b32 [<counts>], {{0, 0}}; {BARRIER}"
    insert(code, {"slots": slots, "counts": counts})


# ---- head and tail


def fill_edges(window: Window, x_gmem, first, x_smem, extent, mask, infinite: bool) -> None:
    """Each thread takes a position of the head, and every 128th of the tail:

    if low <= position < high:  x = the element, or the float of the lowest key where the mask has 0; -inf if `infinite`
    else:                       x = -inf
    x_smem[position] = x
    """
    kind = Elements(x_smem.dtype)
    tail, last = window.head + window.body, window.head + window.cut.longest

    @inline(arg_types=(REF, REF) + (SCALAR,) * 4 + (() if mask is None else (REF, SCALAR)))
    def emit(_, x_gmem, x_smem, first, low, high, origin, *mask):
        first, low, high, origin = map(scalar, (first, low, high, origin))
        bits = ir.IntegerType.get_signless(8 * kind.itemsize)

        def place(position, end, in_row):
            """Fills a position, if it is below `end`; `in_row` says whether a row may have an element there."""
            within = arith.cmpi(_SLT, position, i32(end))
            inside = arith.andi(arith.cmpi(_SGE, position, low), arith.cmpi(_SLT, position, high))
            x = utils.c(kind.neg_inf, bits)
            if in_row:
                inside = arith.andi(inside, within)
                x = _element(x_gmem, arith.addi(first, arith.subi(position, low)), inside, bits)
            if in_row and mask:
                mask_gmem, row = mask
                of_masked = kind.neg_inf if infinite else -1
                x = _masked(x, mask_gmem, row, arith.addi(position, origin), inside, of_masked)
            _store_if(within, x_smem, position, x, kind.itemsize)

        if window.head:
            place(thread(), window.head, True)
        for position in range(tail, window.size, WARPGROUP):
            place(arith.addi(thread(), i32(position)), window.size, position < last)

    emit(x_gmem, x_smem, first, *extent, *(mask or ()))


def _element(x_gmem, at, inside, bits) -> ir.Value:
    """Returns the bits of element number `at` (i32) of x_gmem, or of -inf unless `inside`."""
    offset = arith.extui(ir.IntegerType.get_signless(64), at)
    dtype = ir.MemRefType(x_gmem.type).element_type
    x = load_vector(utils.memref_ptr(x_gmem), dtype, 1, offset, inside, -float("inf"))
    (x,) = elements(vector.bitcast(ir.VectorType.get((1,), bits), x))
    return x


def _masked(x, mask_gmem, row, column, inside, of_masked: int) -> ir.Value:
    """Returns the bits x, or `of_masked` if the position is `inside` and the mask has 0."""
    columns = ir.MemRefType(mask_gmem.type).shape[1]
    keep = load_mask(utils.memref_ptr(mask_gmem), 1, scalar(row), column, columns, inside)
    (keep,) = elements(keep)
    masked = arith.cmpi(arith.CmpIPredicate.eq, keep, utils.c(0, keep.type))
    return arith.select(arith.andi(inside, masked), utils.c(of_masked, x.type), x)


def _store_if(condition, x_smem, position, x, itemsize: int) -> None:
    """Writes the bits x to a position of shared memory, if the condition holds."""
    code = Code()
    (address,) = code.new("b32")
    (p,) = code.new("pred")
    code += f"setp.ne.b32 {p}, <condition>, 0; mad.lo.u32 {address}, <position>, {itemsize}, <smem>;"
    code += f"@{p} st.shared.b{8 * itemsize} [{address}], <x>;"
    condition = arith.extui(ir.IntegerType.get_signless(32), condition)
    emit_ptx(code, {"smem": x_smem, "position": position, "x": x, "condition": condition})


# ---- a step


def mask_step(window: Window, x_smem, step, keep, infinite: bool) -> None:
    """For each block of the step, a thread loads its vector, and the bytes of the mask, which are 0 or 1:

    x[j] |= all ones, where keep[j] == 0      (all ones are the float of the lowest key; -inf if `infinite`)
    store x, if the vector is in the body     (`fill_edges` has masked what is beside it)
    """
    layout = plgpu.Layout.WG_STRIDED((window.block,), vec_size=window.vec)
    code = _mask_vectors(window, Elements(x_smem.dtype), len(keep), infinite)

    @inline(arg_types=(REF, SCALAR, [layout] * len(keep)))
    def emit(_, x_smem, step, keep):
        operands = {"x": x_smem, "step": scalar(step), "thread": thread()}
        for b, of_block in enumerate(keep):
            operands |= {f"keep{b}_{i}": word for i, word in enumerate(_words(of_block, window.vec // 4))}
        emit_ptx(code, operands)

    emit(x_smem, step, keep)


def _words(of_block, count: int) -> list[ir.Value]:
    """Returns the bytes of this thread in a block of int8, as `count` numbers of 32 bits."""
    (register,) = of_block.registers.flat
    return elements(vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)), register))


def _mask_vectors(window: Window, kind: Elements, blocks: int, infinite: bool) -> Code:
    """Returns the text of `mask_step`; <keep{b}_{i}> has the mask of elements 4 i to 4 i + 3 of block b."""
    code = Code()
    block_bytes = window.block * kind.itemsize
    address, first, at, keep = code.new("b32", 4)
    masked, in_body = code.new("pred", 2)
    code += f"mad.lo.u32 {address}, <step>, {window.step_blocks * block_bytes}, <x>;"
    code += f"mad.lo.u32 {address}, <thread>, 16, {address}; mul.lo.u32 {first}, <thread>, {window.vec};"
    code += f"mad.lo.u32 {first}, <step>, {window.step_blocks * window.block}, {first};"
    for b in range(blocks):
        code += f"add.u32 {at}, {first}, {b * window.block}; setp.ge.u32 {in_body}, {at}, {window.head};"
        code += f"setp.lt.and.u32 {in_body}, {at}, {window.head + window.body}, {in_body};"
        (words,) = kind.vectors(code, address, [b * block_bytes])
        for j in range(window.vec):
            word, ones = (words[j // 2], ("0xffff", "0xffff0000")[j % 2]) if kind.halves else (words[j], "-1")
            code += f"and.b32 {keep}, <keep{b}_{j // 4}>, {255 << 8 * (j % 4)};"
            code += f"setp.eq.u32 {masked}, {keep}, 0; @{masked} or.b32 {word}, {word}, {ones};"
            if infinite:  # from all ones
                shift = 16 if kind.halves and j % 2 else 0
                flipped = (kind.neg_inf ^ (0xFFFF if kind.halves else 0xFFFFFFFF)) << shift
                code += f"@{masked} xor.b32 {word}, {word}, {flipped};"
        code += f"@{in_body} st.shared.v4.b32 [{address}+{b * block_bytes}], {{{', '.join(words)}}};"
    return code


def absorb_step(
    window: Window, x_smem, group_keys, step, blocks: int, lane: Normalizer, scale, masked: bool
) -> Normalizer:
    """A thread adds its elements of a step to its normalizer, with one rescaling of d for all:

    new_m = max(m, x...)                                a NaN is left out here, for it makes d NaN
    s     = new_m, but 0 if that is -inf                so that -inf - s is -inf, and not NaN
    new_d = d * 2^((m - s) scale) + sum of 2^((x - s) scale)

    It writes the largest key of each of its groups in the step.
    """
    kind, code = Elements(x_smem.dtype), Code()
    x_at, keys_at = _step_addresses(code, window, kind)
    vectors = kind.vectors(code, x_at, [b * window.block * kind.itemsize for b in range(blocks)])
    floats = [kind.floats(code, words, True) for words in vectors] if masked else None
    largest = _largest_of_groups(code, window, kind, vectors, floats, keys_at)
    code += f"max.f32 <new_m>, <m>, {code.tree('max.f32', 'f32', largest)};"
    s, rescale = code.new("f32", 2)
    (empty,) = code.new("pred")
    code += f"setp.eq.f32 {empty}, <new_m>, {NEG_INF}; selp.f32 {s}, 0f00000000, <new_m>, {empty};"
    terms = []
    for b, words in enumerate(vectors):
        for x in floats[b] if floats else kind.floats(code, words, False):
            code += f"sub.f32 {x}, {x}, {s}; mul.f32 {x}, {x}, <scale>; ex2.approx.ftz.f32 {x}, {x};"
            terms.append(x)
    code += f"sub.f32 {rescale}, <m>, {s}; mul.f32 {rescale}, {rescale}, <scale>;"
    code += f"ex2.approx.ftz.f32 {rescale}, {rescale};"
    code += f"fma.rn.f32 <new_d>, <d>, {rescale}, {code.tree('add.f32', 'f32', terms)};"
    new = insert(
        code,
        {"x": x_smem, "group_keys": group_keys},
        {"step": step, "scale": scale},
        {"m": lane.m, "d": lane.d},
        {"new_m": "f32", "new_d": "f32"},
    )
    return Normalizer(*new)


def _step_addresses(code: Code, window: Window, kind: Elements) -> tuple[str, str]:
    """Returns registers with the addresses of the thread's first vector and first group key of step <step>."""
    x_at, keys_at = code.new("b32", 2)
    step_bytes = window.step_blocks * window.block * kind.itemsize
    groups_per_step = window.step_blocks // window.group_blocks
    code += f"mad.lo.u32 {x_at}, <step>, {step_bytes}, <x>; mad.lo.u32 {x_at}, <thread>, 16, {x_at};"
    code += f"mad.lo.u32 {keys_at}, <step>, {groups_per_step * 4 * WARPGROUP}, <group_keys>;"
    code += f"mad.lo.u32 {keys_at}, <thread>, 4, {keys_at};"
    return x_at, keys_at


def _largest_of_groups(
    code: Code,
    window: Window,
    kind: Elements,
    vectors: list[list[str]],
    floats: list[list[str]] | None,
    keys_at: str,
) -> list[str]:
    """Writes the largest key of each of the thread's groups in a step; returns registers with the largest floats.

    Args:
      vectors: the words of each block.
      floats: its elements as floats, where they may differ from the words since some are masked; or None.
      keys_at: register with the address of the thread's first key.
    """
    largest = []
    for i, start in enumerate(range(0, len(vectors), window.group_blocks)):
        group = slice(start, start + window.group_blocks)
        words, values = sum(vectors[group], []), sum(floats[group], []) if floats else None
        value, key = kind.best(code, words, values)
        code += f"st.shared.b32 [{keys_at}+{i * 4 * WARPGROUP}], {key};"
        largest.append(value)
    return largest
