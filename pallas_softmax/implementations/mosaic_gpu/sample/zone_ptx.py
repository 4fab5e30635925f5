"""The zone: the distances between which a threshold is expected, read from the histogram, in inline PTX.

What is wanted is a number of entries, or a mass; the histogram, an estimate, says at which distance the elements from
the largest on reach it. The zone is as wide as the estimate may be wrong: from where wanted - margin is reached to
where wanted + margin is. With columns of two buckets, wanted = 9 and margin = 4:

    bucket       0   1 | 2   3 | 4   5 | 6   7 |      the largest elements are in bucket 0
    count        1   1 | 2   3 | 2   4 | 3   9 |
    reached      1   2 | 4   7 | 9  13 | 16 25 |      5 is reached in bucket 3, and 13 in bucket 5
    zone                     '----------'
                  upper, the edge before bucket 3      lower, the edge after bucket 5

Elements with a larger distance than `upper` are above the zone; those of it have a larger distance than `lower`, and at
most `upper`. If wanted - margin is not positive, nothing is above the zone; if wanted + margin is reached nowhere, it
has all the others.
"""

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import INF, NEG_INF, ONE, ZERO, float_literal
from pallas_softmax.implementations.mosaic_gpu.sample import cluster_ptx, histogram_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.histogram_ptx import COLUMN
from pallas_softmax.implementations.mosaic_gpu.sample.plan import BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word
from pallas_softmax.implementations.mosaic_gpu.sample.search import Search, Target, Zone

# A sample of n entries has about sqrt(n) more or fewer than are expected. These are several times that, so that a
# threshold outside of the zone, which costs a second search, is rare.
_COUNT_MARGIN, _COUNT_MARGIN_OF_ROOT = 20.0, 8.0  # entries; and entries by the root of those wanted
# Of a mass, by the root of (1 - share) / vocab: the error is less towards the end, where what remains is small.
_MASS_MARGIN_OF_ROOT = 16.0  # total masses


def expect(code: Program, search: Search, target: Target) -> None:
    """Writes the distances between which the target is expected to be reached."""
    own = _amount_of_column(code, target.by_mass)
    first_thread = cluster_ptx.is_first_thread(code)
    # Where nothing is reached: nothing above the zone, and nothing below it.
    code += f"@{first_thread} st.shared.v2.b32 [{word(code.scratch.zone_ends)}], {{0, {BUCKETS}}};"
    before, total = cluster_ptx.sum_of_lower_threads(code, own, "f32", code.scratch.scans)
    for i, wanted in enumerate(_wanted(code, search, target, total)):
        _write_bucket(code, target.by_mass, wanted, before, own, code.scratch.zone_ends + i)
    cluster_ptx.meet(code)
    _read_ends(code, search.zone)


def _amount_of_column(code: Program, by_mass: bool) -> str:
    """Returns what the thread's column holds in all CTAs, a number of elements or a mass (f32)."""
    own = code.constant("f32", ZERO)
    sums = cluster_ptx.address_of_word(code, code.scratch.columns[by_mass])
    address = code.one("b32")
    code += f"mad.lo.u32 {address}, <thread>, 4, {sums};"
    for cta in range(code.ctas):
        (bits,) = cluster_ptx.load_from(code, cta, address, 1)
        amount = code.one("f32")
        code += f"mov.b32 {amount}, {bits}; add.f32 {own}, {own}, {amount};"
    return own


def _wanted(code: Program, search: Search, target: Target, total: str) -> tuple[str, str]:
    """Returns the amounts that are reached where the zone starts and where it ends (f32).

    `total` is the mass of the histogram; where the kept mass is known, it becomes that.
    """
    wanted, margin, start, end = code.new("f32", 4)
    if target.by_mass:
        of_root = float_literal(_MASS_MARGIN_OF_ROOT / code.window.vocab**0.5)
        code += f"@{search.kept.known} mov.f32 {total}, {search.kept.mass};"
        code += f"mul.f32 {wanted}, {total}, {target.amount};"
        code += f"sub.f32 {margin}, {ONE}, {target.amount}; sqrt.approx.f32 {margin}, {margin};"
        code += f"mul.f32 {margin}, {margin}, {of_root}; mul.f32 {margin}, {margin}, {total};"
    else:
        of_root, least = float_literal(_COUNT_MARGIN_OF_ROOT), float_literal(_COUNT_MARGIN)
        code += f"cvt.rn.f32.u32 {wanted}, {target.amount}; sqrt.approx.f32 {margin}, {wanted};"
        code += f"fma.rn.f32 {margin}, {margin}, {of_root}, {least};"
    code += f"sub.f32 {start}, {wanted}, {margin}; add.f32 {end}, {wanted}, {margin};"
    return start, end


def _write_bucket(code: Program, by_mass: bool, wanted: str, before: str, own: str, at: int) -> None:
    """Writes to word `at` the number of the bucket in which an amount is reached, in the thread whose column has it.

    Args:
      by_mass: whether amounts are masses.
      wanted: the amount.
      before: what the columns of lower threads hold.
      own: what the thread's column holds.
      at: number of the word.
    """
    here, not_yet = code.new("pred", 2)
    end = code.label("bucket_written")
    reached, bucket = code.one("f32"), code.one("b32")
    code += f"add.f32 {reached}, {before}, {own}; setp.lt.f32 {here}, {before}, {wanted};"
    code += f"setp.ge.and.f32 {here}, {reached}, {wanted}, {here};"
    code.skip_unless(here, end)
    counts = histogram_ptx.load_column(code)
    code += f"mov.f32 {reached}, {before}; mul.lo.u32 {bucket}, <thread>, {COLUMN};"
    for i, amount in enumerate(histogram_ptx.amounts(code, counts, by_mass)[:-1]):
        code += f"add.f32 {reached}, {reached}, {amount}; setp.lt.f32 {not_yet}, {reached}, {wanted};"
        code += f"@{not_yet} mad.lo.u32 {bucket}, <thread>, {COLUMN}, {i + 1};"
    code += f"st.shared.b32 [{word(at)}], {bucket}; {end}:"


def _read_ends(code: Program, zone: Zone) -> None:
    """Writes the zone's distances: the edges before the first of its buckets, and after the last one."""
    first, end = code.new("b32", 2)
    beyond = code.one("pred")
    code += f"ld.shared.b32 {first}, [{word(code.scratch.zone_ends)}];"
    code += f"ld.shared.b32 {end}, [{word(code.scratch.zone_ends + 1)}];"
    code += f"add.u32 {end}, {end}, 1;"
    _write_edge(code, first, zone.upper)
    code += f"setp.eq.u32 {beyond}, {first}, 0; @{beyond} mov.f32 {zone.upper}, {INF};"
    _write_edge(code, end, zone.lower)
    code += f"setp.ge.u32 {beyond}, {end}, {BUCKETS}; @{beyond} mov.f32 {zone.lower}, {NEG_INF};"


def _write_edge(code: Program, bucket: str, distance: str) -> None:
    """Writes the largest distance of a bucket, which is where it starts."""
    bits = code.one("b32")
    code += f"add.u32 {bits}, {bucket}, {histogram_ptx.FIRST_BUCKET};"
    code += f"shl.b32 {bits}, {bits}, {histogram_ptx.BUCKET_SHIFT};"
    code += f"or.b32 {bits}, {bits}, {histogram_ptx.NEGATIVE}; mov.b32 {distance}, {bits};"
