"""A histogram of the elements by distance, from a sample of them, in inline PTX.

It is an estimate: of every group of 16 elements of a thread two are counted, its largest as one, and another as 15,
for itself and the others. That other one is element number t % 16 of the group in thread t; if it is the largest
itself, its neighbour takes its place. With groups of 4 elements, of which the largest are marked:

    elements    | -1 [0] -3 -2 | [-1] -6 -2 -4 |       distances, of thread 1: it takes element 1 % 4
    sampled     |  the 0, so -1|      -6       |
    counts      0: 1    -1: 3 + 1    -6: 3

The buckets are of about equal relative width: 64 for each power of two of the distance, from 2^-9 to 2^7. A bucket's
number consists of the exponent and the upper 6 bits of the mantissa of the distance in float32:

    bits of a distance   s eeeeeeee mmmmmm mmmmmmmmmmmmmmmmm
                           |--------------|  less FIRST_BUCKET, and at least 0 and at most 1023

A thread's column is the 8 neighbouring buckets number 8 t to 8 t + 7. Their sums, of counts and of masses, are what the
CTAs of a cluster read from each other first.
"""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.plan import BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program

COLUMN = BUCKETS // WARPGROUP  # buckets of a thread
# Bits of a float32 below its bucket: 23 of a mantissa, less 6 for 64 buckets a power of two.
BUCKET_SHIFT = 17
_LEAST_EXPONENT = 127 - 9  # of a float32, biased: distances of less than 2^-9 are in bucket 0
FIRST_BUCKET = _LEAST_EXPONENT << (23 - BUCKET_SHIFT)  # the bits above BUCKET_SHIFT of a distance in bucket 0
_HALF_BUCKET = 1 << (BUCKET_SHIFT - 1)  # the bits of a distance in the middle of a bucket, below BUCKET_SHIFT
NEGATIVE = 1 << 31  # the sign of a float32


def count(code: Program) -> None:
    """Counts the sampled elements of the CTA by distance; the CTAs meet once the columns' sums are written."""
    _clear(code)
    best_at, sampled_at, group = code.new("b32", 3)
    vec, group_bytes = code.window.vec, code.group_blocks * code.block_bytes
    whole, rest = divmod(code.window.blocks, code.group_blocks)
    code += f"mov.b32 {group}, 0; mad.lo.u32 {best_at}, <thread>, 4, <scratch>;"
    if whole:
        again, more = code.label("histogram"), code.one("pred")
        _place_sampled(code, sampled_at, group, code.group_blocks * vec)
        code += f"{again}:"
        _count_group(code, best_at, sampled_at, code.group_blocks * vec)
        code += f"add.u32 {best_at}, {best_at}, {4 * WARPGROUP}; add.u32 {group}, {group}, 1;"
        code += f"add.u32 {sampled_at}, {sampled_at}, {group_bytes};"
        code += f"setp.lt.u32 {more}, {group}, {whole}; @{more} bra {again};"
    if rest:
        _place_sampled(code, sampled_at, group, rest * vec)
        _count_group(code, best_at, sampled_at, rest * vec)
    cluster_ptx.meet(code)
    _sum_columns(code)
    cluster_ptx.meet_cluster(code)


def _clear(code: Program) -> None:
    """Clears the thread's column."""
    column = code.one("b32")
    code += f"mad.lo.u32 {column}, <thread>, {4 * COLUMN}, <scratch>;"
    for byte in range(0, 4 * COLUMN, 16):
        code += f"st.shared.v4.b32 [{column}+{4 * code.scratch.histogram + byte}], {{0, 0, 0, 0}};"
    cluster_ptx.meet(code)


def _place_sampled(code: Program, sampled_at: str, group: str, elements: int) -> None:
    """Writes to `sampled_at` the address of element number t % elements of a group, for thread t."""
    element, block = code.new("b32", 2)
    vec = code.window.vec
    code += f"rem.u32 {element}, <thread>, {elements}; shr.u32 {block}, {element}, {vec.bit_length() - 1};"
    code += f"and.b32 {element}, {element}, {vec - 1};"
    code += f"mad.lo.u32 {sampled_at}, {group}, {code.group_blocks * code.block_bytes}, {code.first_vector};"
    code += f"mad.lo.u32 {sampled_at}, {block}, {code.block_bytes}, {sampled_at};"
    code += f"mad.lo.u32 {sampled_at}, {element}, {code.kind.itemsize}, {sampled_at};"


def _count_group(code: Program, best_at: str, sampled_at: str, elements: int) -> None:
    """Counts the largest element of a group, and one that stands for the others."""
    best = code.one("f32")
    code += f"ld.shared.f32 {best}, [{best_at}+{4 * code.scratch.best}];"
    other = _sampled(code, sampled_at, best)
    _count_element(code, best, 1)
    _count_element(code, other, elements - 1)


def _sampled(code: Program, sampled_at: str, best: str) -> str:
    """Returns the element at `sampled_at`; its neighbour, if it is the only one of its vector that equals `best`."""
    kind, neighbour_at, vector_at = code.kind, code.one("b32"), code.one("b32")
    equals_best = code.one("pred")
    x = kind.float_of_bits(code, kind.load_bits(code, sampled_at))
    code += f"xor.b32 {neighbour_at}, {sampled_at}, {kind.itemsize};"
    neighbour = kind.float_of_bits(code, kind.load_bits(code, neighbour_at))
    equals = code.constant("b32", 0)
    code += f"and.b32 {vector_at}, {sampled_at}, -16;"
    (words,) = kind.vectors(code, vector_at, [0])
    for each in kind.floats(code, words, False):
        code += f"setp.eq.f32 {equals_best}, {each}, {best}; @{equals_best} add.u32 {equals}, {equals}, 1;"
    code += f"setp.eq.f32 {equals_best}, {x}, {best};"
    code += f"setp.eq.and.u32 {equals_best}, {equals}, 1, {equals_best};"
    code += f"selp.f32 {x}, {neighbour}, {x}, {equals_best};"
    return x


def _count_element(code: Program, x: str, number: int) -> None:
    """Adds a number to the counter of an element's bucket."""
    bucket = code.one("b32")
    distance = code.distance(x)
    code += f"mov.b32 {bucket}, {distance}; and.b32 {bucket}, {bucket}, {NEGATIVE - 1};"
    code += f"shr.u32 {bucket}, {bucket}, {BUCKET_SHIFT}; sub.s32 {bucket}, {bucket}, {FIRST_BUCKET};"
    code += f"max.s32 {bucket}, {bucket}, 0; min.s32 {bucket}, {bucket}, {BUCKETS - 1};"
    code += f"mad.lo.u32 {bucket}, {bucket}, 4, <scratch>;"
    code += f"red.relaxed.cta.shared::cta.add.u32 [{bucket}+{4 * code.scratch.histogram}], {number};"


def _sum_columns(code: Program) -> None:
    """Writes the sums of the counts, and of the masses, of the thread's column."""
    column, sum_at = code.new("b32", 2)
    code += f"mad.lo.u32 {column}, <thread>, {4 * COLUMN}, <scratch>;"
    code += f"mad.lo.u32 {sum_at}, <thread>, 4, <scratch>;"
    counts = code.new("b32", COLUMN)
    for i, number in enumerate(counts):
        code += f"ld.shared.b32 {number}, [{column}+{4 * (code.scratch.histogram + i)}];"
    for by_mass, sums in enumerate(code.scratch.columns):
        total = code.tree("add.f32", "f32", amounts(code, counts, bool(by_mass)))
        code += f"st.shared.f32 [{sum_at}+{4 * sums}], {total};"


def load_column(code: Program) -> list[str]:
    """Returns the counts of the thread's column, summed over the CTAs of the cluster."""
    column = code.one("b32")
    code += f"mad.lo.u32 {column}, <thread>, {4 * COLUMN}, <scratch>;"
    code += f"add.u32 {column}, {column}, {4 * code.scratch.histogram};"
    counts = _load_column_from(code, 0, column)
    for cta in range(1, code.ctas):
        for total, more in zip(counts, _load_column_from(code, cta, column)):
            code += f"add.u32 {total}, {total}, {more};"
    return counts


def _load_column_from(code: Program, cta: int, column: str) -> list[str]:
    """Returns the counts of the thread's column in one CTA, four at a time."""
    return [
        count
        for byte in range(0, 4 * COLUMN, 16)
        for count in cluster_ptx.load_from(code, cta, column, 4, byte)
    ]


def amounts(code: Program, counts: list[str], by_mass: bool) -> list[str]:
    """Returns what the buckets of the thread's column hold (f32).

    Args:
      counts: the counts of the buckets (b32).
      by_mass: whether to return masses, as if all elements of a bucket lay at its middle, in place of the counts.
    """
    out, first = code.new("f32", len(counts)), code.one("b32")
    code += f"mad.lo.u32 {first}, <thread>, {len(counts)}, {FIRST_BUCKET};"
    for i, (amount, number) in enumerate(zip(out, counts)):
        code += f"cvt.rn.f32.u32 {amount}, {number};"
        if by_mass:
            middle, bits = code.one("f32"), code.one("b32")
            code += f"add.u32 {bits}, {first}, {i}; shl.b32 {bits}, {bits}, {BUCKET_SHIFT};"
            code += f"add.u32 {bits}, {bits}, {_HALF_BUCKET}; or.b32 {bits}, {bits}, {NEGATIVE};"
            code += f"mov.b32 {middle}, {bits};"
            weight = code.weight(middle)
            code += f"mul.f32 {amount}, {amount}, {weight};"
    return out
