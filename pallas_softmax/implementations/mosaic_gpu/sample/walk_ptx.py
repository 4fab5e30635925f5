"""Walks of a thread over its elements in shared memory, in inline PTX.

Each is a generator, which writes the text of a loop around what its caller writes:

    for group in walk_ptx.groups(code, above):     writes the head of the loop, and then
        code += ...                                the caller its body, which stands in the text once,
                                                   and at last the generator the end of the loop

A caller takes all that a generator yields. Where the last group or block is a short one, the body stands in the text
a second time, for that.
"""

import dataclasses
from collections.abc import Iterator

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import WHOLE_WARP, ZERO
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of a thread.

    Attributes:
      number: register with the group's number in the thread (b32).
      floats: registers with its elements (f32).
      mass: register for what the walk stores as the group's mass (f32).
    """

    number: str
    floats: list[str]
    mass: str


@dataclasses.dataclass(frozen=True)
class Vector:
    """What a thread has of a block, as registers.

    Attributes:
      block: the block's number (b32).
      address: the vector's address in shared memory (b32).
      floats: its elements (f32).
      bits: their bits, as `ElementText.bits` has them (b32).
    """

    block: str
    address: str
    floats: list[str]
    bits: list[str]


def groups(code: Program, above: str) -> Iterator[Group]:
    """Walks over the groups of a thread, and stores for each the mass that the caller writes to `mass`.

    The caller's text is left out, and the mass is 0, where no element of a group of a warp's threads has a larger
    distance than `above`, a register.
    """
    whole, rest = divmod(code.window.blocks, code.group_blocks)
    address, of_thread, number = code.new("b32", 3)
    mass = code.one("f32")
    code += f"mov.b32 {address}, {code.first_vector}; mov.b32 {number}, 0;"
    code += f"mad.lo.u32 {of_thread}, <thread>, 4, <scratch>;"
    if whole:
        again, more = code.label("group"), code.one("pred")
        code += f"{again}:"
        yield from _group(code, code.group_blocks, address, of_thread, number, mass, above)
        code += f"add.u32 {address}, {address}, {code.group_blocks * code.block_bytes};"
        code += f"add.u32 {number}, {number}, 1; add.u32 {of_thread}, {of_thread}, {4 * WARPGROUP};"
        code += f"setp.lt.u32 {more}, {number}, {whole}; @{more} bra {again};"
    if rest:
        yield from _group(code, rest, address, of_thread, number, mass, above)


def _group(
    code: Program, blocks: int, address: str, of_thread: str, number: str, mass: str, above: str
) -> Iterator[Group]:
    """Writes the text for one group of so many blocks, of which the first has the thread's vector at `address`."""
    best = code.one("f32")
    none, skip = code.one("pred"), code.label("group_done")
    code += f"ld.shared.f32 {best}, [{of_thread}+{4 * code.scratch.best}]; mov.f32 {mass}, {ZERO};"
    distance = code.distance(best)
    code += f"setp.gt.f32 {none}, {distance}, {above}; not.pred {none}, {none};"
    code += f"vote.sync.all.pred {none}, {none}, {WHOLE_WARP}; @{none} bra {skip};"
    vectors = code.kind.vectors(code, address, [i * code.block_bytes for i in range(blocks)])
    yield Group(number, [x for words in vectors for x in code.kind.floats(code, words, False)], mass)
    code += f"{skip}: st.shared.f32 [{of_thread}+{4 * code.scratch.masses}], {mass};"


def blocks(code: Program, first: str, least: str | None = None) -> Iterator[Vector]:
    """Walks over the vectors of a thread in the blocks from number `first`, a register, on.

    If `least` is given, a register with a float, the blocks of a group are left out where no element of that group of
    a warp's threads reaches it.
    """
    address, block = code.new("b32", 2)
    again, after, done = code.label("block"), code.label("next_block"), code.label("blocks_done")
    skip = code.one("pred")
    code += f"mov.b32 {block}, {first};"
    code += f"mad.lo.u32 {address}, {block}, {code.block_bytes}, {code.first_vector};"
    code += f"{again}: setp.ge.u32 {skip}, {block}, {code.window.blocks}; @{skip} bra {done};"
    if least is not None:
        best_at, best = code.one("b32"), code.one("f32")
        code += f"shr.u32 {best_at}, {block}, {code.group_blocks.bit_length() - 1};"
        code += f"mad.lo.u32 {best_at}, {best_at}, {WARPGROUP}, <thread>;"
        code += f"mad.lo.u32 {best_at}, {best_at}, 4, <scratch>;"
        code += f"ld.shared.f32 {best}, [{best_at}+{4 * code.scratch.best}];"
        code += f"setp.lt.f32 {skip}, {best}, {least};"
        code += f"vote.sync.all.pred {skip}, {skip}, {WHOLE_WARP}; @{skip} bra {after};"
    (words,) = code.kind.vectors(code, address, [0])
    yield Vector(block, address, code.kind.floats(code, words, False), code.kind.bits(code, words))
    code += f"{after}: add.u32 {address}, {address}, {code.block_bytes}; add.u32 {block}, {block}, 1;"
    code += f"bra {again}; {done}:"
