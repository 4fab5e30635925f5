"""Finds the last key that a filter keeps, digit by digit of the key, from the elements of a row.

A digit is the number of a bucket in a round of `gpu.ptx.narrow`, over the elements of all CTAs.

Masses are added as integers: atomic additions come in any order, and integer sums always have the same bits. The unit
is so small that the largest mass is 2^31. A sum has two words: one adds up the lower 16 bits of the masses, and the
other adds up the upper 16 bits.
"""

from pallas_softmax_base._src.gpu.hardware import LANES
from pallas_softmax_base._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.sample.plan import DIGIT
from pallas_softmax_base._src.sample.row_ptx import RowProgram
from pallas_softmax_base._src.sample.search_ptx import FilterSearch

_LARGEST = 2.0**31  # the largest mass as an integer
_EACH = DIGIT // LANES  # buckets of a lane


def search_digits(f: FilterSearch, high: Value, low: Value, above: Value) -> None:
    """Keeps what the filter keeps. The last kept key is from `high` down to `low`; `above` is the measure above."""
    p, plan = f.p, f.p.plan
    keys, greatest = KeyRange(p, high, low), p.of_key(high)
    sums = p.var(p.word(plan.histogram))
    other_sums = p.var(sums + 4 * 2 * DIGIT)
    rest = f.goal - above  # what the range must reach
    in_units = p.divide(rest, p.weight(greatest) * (1 / _LARGEST))
    rest = p.var(p.max(f.measure(in_units, rest), 1.0))

    def mass_of(key):
        return p.convert(p.exp2((p.of_key(key) - greatest) * p.scale) * _LARGEST, "u32", "rni")

    def one_round(bucket_of):
        zero = p.var(0, "u32")
        for first in range(0, 2 * DIGIT, plan.threads):
            p.store(sums + p.thread * 4, zero, offset=4 * first, when=p.thread < 2 * DIGIT - first)
        p.barrier()

        for words, _ in p.sweep():
            for x in p.floats(words):
                key = p.key(x)
                bucket, inside = bucket_of(key)
                with p.when(inside):
                    at, amount = sums + bucket * 4, f.measure(mass_of(key), 1)
                    p.add_to(at, amount & 0xFFFF)
                    p.add_to(at, amount >> 16, offset=4 * DIGIT)
        p.sync_cluster()
        with p.when(p.warp.equals(0)):
            bucket, new_rest = bucket_that_reaches(p, _sums_of_ctas(p, sums, rest), rest)
            p.store(p.word(plan.picked), bucket, new_rest.bits("u32"), when=p.first_lane)
        p.barrier()
        bucket, new_rest = p.load_vector(p.word(plan.picked), "u32", 2)
        p.set(rest, new_rest.bits("f32"))
        # Other CTAs may still read these sums. The cluster synchronizes before they are written again.
        last_sums = p.var(sums)
        p.set(sums, other_sums)
        p.set(other_sums, last_sums)
        return bucket

    narrow(p, keys, DIGIT, one_round)
    number = f.number_that_reaches(rest, p.convert(p.max(mass_of(keys.high), 1), "f32"))
    f.kept.down_to(keys.high, number, *_of_row(p, keys.high))


def _sums_of_ctas(p: RowProgram, sums: Value, rest: Value) -> list[Value]:
    """Returns the sums over this lane's buckets, in all CTAs; `rest` is above 0."""
    amounts = [p.var(0, "f32") for _ in range(_EACH)]
    # This hides the number of turns from ptxas. Unrolled, the loop would take more registers than all other code.
    with p.each(0, p.select(rest > 0.0, p.ctas, 0, "u32")) as cta:
        at = sums + p.lane * (4 * _EACH)
        low, high = (p.of_cta(at + 4 * first, cta, "u32", _EACH) for first in (0, DIGIT))
        for amount, *words in zip(amounts, low, high):
            lower_bits, others = (p.convert(word, "f32") for word in words)
            p.increase(amount, p.multiply_add(others, 2.0**16, lower_bits))
    return amounts


def _of_row(p: RowProgram, key: Value) -> list[Value]:
    """Sweeps the row; returns the mass above a key and the number of elements with that key, for each CTA."""
    above, number = p.var(0, "f32"), p.var(0, "u32")
    for words, _ in p.sweep():
        for x in p.floats(words):
            own = p.key(x)
            p.increase(above, p.weight(x), own > key)
            p.increase(number, 1, own.equals(key))
    return p.each_cta(["add", "add"], [above, number], [0.0, 0], p.plan.kept)
