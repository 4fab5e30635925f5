"""The threshold of a count (top_k) or of a mass (top_p): the last entry that is kept, in PTX.

    histogram    two of every 16 elements, counted by distance from the maximum: an estimate of what lies above what
    zone         the distances between which the threshold lies, with a margin for the error of the estimate
    collect      one sweep: the exact mass and number above the zone, and a list of the elements in it
    rounds       the exact threshold: counts and masses by key, of 256 ranges of keys, then of the 256 ranges of the one
                 in which the threshold lies, and so on until that is a single key
    cut          elements of that key count up to an index; those after it become -inf

The zone need not hold the threshold, and the list need not have room for it: then the rounds go over all elements.
So the estimate changes the time, and not the result.

Masses are integers in the rounds, of two words, so that sums do not depend on the order.
"""

import dataclasses

import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.sample.plan import BUCKETS, KEY_BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import INF, NEG_INF, Program

_LEAST_EXPONENT = 127 - 9  # of a distance in float32; smaller ones are in bucket 0
_BUCKET_SHIFT = 18  # bits of a distance below its bucket
_FIRST_BUCKET = _LEAST_EXPONENT << (23 - _BUCKET_SHIFT)
_HALF_BUCKET = 1 << (_BUCKET_SHIFT - 1)
_HIGHEST_KEY, _LOWEST_KEY = "0x7fffffff", "0x80000000"


@dataclasses.dataclass(frozen=True)
class Kept:
    """Registers with what the thresholds have left.

    Attributes:
      least: the least element that is kept, in float32.
      mass: the mass that is kept.
      total: that of the whole row.
      known: predicate: whether `total` and `mass` are known.
    """

    least: str
    mass: str
    total: str
    known: str


def histogram(p: Program) -> None:
    """Counts two elements of each group of each thread by distance: its largest, and one that stands for the others."""
    address = p.one("b32")
    p += f"mad.lo.u32 {address}, <thread>, {4 * BUCKETS // WARPGROUP}, <scratch>;"
    p += f"st.shared.v4.b32 [{address}+{4 * p.scratch.histogram}], {{0, 0, 0, 0}};"
    p.barrier()
    odd, upper = p.new("pred", 2)
    t = p.one("b32")
    p += f"and.b32 {t}, <thread>, 1; setp.ne.u32 {odd}, {t}, 0; and.b32 {t}, <thread>, 2; setp.ne.u32 {upper}, {t}, 0;"

    def count(x, number, counted=""):
        bucket = p.one("b32")
        p.emit(f"mov.b32 {bucket}, {p.distance(x)}; and.b32 {bucket}, {bucket}, 0x7fffffff;")
        p.emit(f"shr.u32 {bucket}, {bucket}, {_BUCKET_SHIFT}; sub.s32 {bucket}, {bucket}, {_FIRST_BUCKET};")
        p.emit(f"max.s32 {bucket}, {bucket}, 0; min.s32 {bucket}, {bucket}, {BUCKETS - 1};")
        p.emit(f"mad.lo.u32 {bucket}, {bucket}, 4, <scratch>;")
        p.emit(
            f"{counted} red.relaxed.cta.shared::cta.add.u32 [{bucket}+{4 * p.scratch.histogram}], {number};"
        )

    def group(floats, position, step):
        n = len(floats)
        some = p.new("f32", 3)
        a, b, c, d = (floats[i * n // 4 + i % (n // 4)] for i in range(4))
        other = p.one("pred")
        p.emit(f"selp.f32 {some[0]}, {a}, {b}, {odd}; selp.f32 {some[1]}, {c}, {d}, {odd};")
        p.emit(f"selp.f32 {some[2]}, {some[0]}, {some[1]}, {upper};")
        largest = p.tree("max.f32", "f32", floats)
        count(largest, 1)
        p.emit(f"setp.neu.f32 {other}, {some[2]}, {largest};")
        count(some[2], n - 1, f"@{other}")

    p.sweep(group)
    p.cluster_barrier()


def find(p: Program, by_mass: bool, target: str, kept: Kept) -> None:
    """Finds the threshold for a target; `kept` gets what it leaves, as long as the row has as much as the target.

    Args:
      by_mass: whether the target is a share of the kept mass, or a number of entries.
      target: that number (b32); by_mass, the share (f32).
    """
    search = _Search(p, by_mass, target, kept)
    search.zone()
    search.collect()
    search.extremes_and_rounds()


class _Search:
    """The registers of one search.

    Attributes:
      upper, lower: distances: those above `upper` are above the zone, those above `lower` and not above `upper` in it.
      above_mass, above_count: of what is above the zone.
      listed: number of the thread's positions in the list.
      whole: predicate: whether the thread takes all its positions, since its list has no room for those in the zone.
      everything: predicate: whether the zone is the whole row.
    """

    def __init__(self, p: Program, by_mass: bool, target: str, kept: Kept):
        self.p, self.by_mass, self.target, self.kept = p, by_mass, target, kept
        self.upper, self.lower, self.above_mass = p.new("f32", 3)
        self.above_count, self.listed = p.new("b32", 2)
        self.whole, self.everything = p.new("pred", 2)

    def zone(self) -> None:
        """The distances between which the threshold is expected. Bucket 0 has the largest elements."""
        p, histogram = self.p, self.p.scratch.histogram
        each = BUCKETS // WARPGROUP
        address, p0 = p.one("b32"), p.one("pred")
        p += f"mad.lo.u32 {address}, <thread>, {4 * each}, <scratch>; add.u32 {address}, {address}, {4 * histogram};"
        counts = p.load_peer(0, address, each)
        for cta in range(1, p.ctas):
            for total, more in zip(counts, p.load_peer(cta, address, each)):
                p += f"add.u32 {total}, {total}, {more};"
        amounts, first = p.new("f32", each), p.one("b32")
        p += f"mul.lo.u32 {first}, <thread>, {each};"
        for i, (amount, count) in enumerate(zip(amounts, counts)):
            p += f"cvt.rn.f32.u32 {amount}, {count};"
            if self.by_mass:
                middle, bits = p.one("f32"), p.one("b32")
                p += f"add.u32 {bits}, {first}, {_FIRST_BUCKET + i}; shl.b32 {bits}, {bits}, {_BUCKET_SHIFT};"
                p += f"add.u32 {bits}, {bits}, {_HALF_BUCKET}; or.b32 {bits}, {bits}, 0x80000000;"
                p += f"mov.b32 {middle}, {bits};"
                p += f"mul.f32 {amount}, {amount}, {p.weight(middle)};"
        own = p.one("f32")
        p += f"mov.f32 {own}, 0f00000000;"
        for amount in amounts:
            p += f"add.f32 {own}, {own}, {amount};"
        ends, total = p.scan_cta(own, "f32", p.scratch.scans)
        wanted, margin, start, end = p.new("f32", 4)
        if self.by_mass:
            # The error of the estimate is less towards the end, where what remains is small.
            p += f"@{self.kept.known} mov.f32 {total}, {self.kept.mass};"
            p += f"mul.f32 {wanted}, {total}, {self.target};"
            p += f"sub.f32 {margin}, 0f3F800000, {self.target}; sqrt.approx.f32 {margin}, {margin};"
            p += f"mul.f32 {margin}, {margin}, 0f3D23D70A; mul.f32 {margin}, {margin}, {total};"  # 0.04
        else:
            p += f"cvt.rn.f32.u32 {wanted}, {self.target}; sqrt.approx.f32 {margin}, {wanted};"
            p += f"fma.rn.f32 {margin}, {margin}, 0f41000000, 0f41A00000;"  # 20 + 8 sqrt(k)
        p += f"sub.f32 {start}, {wanted}, {margin}; add.f32 {end}, {wanted}, {margin};"
        before_start, before_end = p.const("b32", 0), p.const("b32", 0)
        for amount in amounts:
            p += f"add.f32 {ends}, {ends}, {amount};"
            p += f"setp.lt.f32 {p0}, {ends}, {start}; @{p0} add.u32 {before_start}, {before_start}, 1;"
            p += f"setp.lt.f32 {p0}, {ends}, {end}; @{p0} add.u32 {before_end}, {before_end}, 1;"
        p.over_warp("add.s32", "b32", before_start)
        p.over_warp("add.s32", "b32", before_end)
        at = p.scratch.scans + 8
        p.send(at, [before_start, before_end])
        p.barrier()
        for register, number in ((before_start, at), (before_end, at + 4)):
            words = p.new("b32", 4)
            p += f"ld.shared.v4.b32 {{{', '.join(words)}}}, [<scratch>+{4 * number}];"
            p += f"mov.b32 {register}, {p.tree('add.u32', 'b32', words)};"
        p += f"add.u32 {before_end}, {before_end}, 1;"
        for register, distance, edge, beyond in (
            (before_start, self.upper, f"setp.eq.u32 {p0}, {before_start}, 0;", INF),
            (before_end, self.lower, f"setp.ge.u32 {p0}, {before_end}, {BUCKETS};", NEG_INF),
        ):
            bits = p.one("b32")
            p += f"add.u32 {bits}, {register}, {_FIRST_BUCKET}; shl.b32 {bits}, {bits}, {_BUCKET_SHIFT};"
            p += f"or.b32 {bits}, {bits}, 0x80000000; mov.b32 {distance}, {bits};"
            p += f"{edge} @{p0} mov.f32 {distance}, {beyond};"

    def collect(self) -> None:
        """Sums what is above the zone, and lists the positions in it; of the whole row the total mass."""
        p = self.p
        row_bytes = 2 * WARPGROUP
        end, start, limit = p.new("b32", 3)
        total, lower = p.new("f32", 2)
        above, inside, room = p.new("pred", 3)
        p += f"mad.lo.u32 {start}, <thread>, 2, <scratch>; add.u32 {start}, {start}, {4 * p.scratch.listed};"
        p += f"add.u32 {limit}, {start}, {(p.scratch.list_rows - 16) * row_bytes}; mov.b32 {end}, {start};"
        p += f"mov.f32 {total}, 0f00000000; mov.f32 {self.above_mass}, 0f00000000; mov.b32 {self.above_count}, 0;"
        p += f"setp.ne.u32 {self.whole}, {start}, {start}; setp.ne.u32 {self.everything}, {start}, {start};"

        def group(floats, position, step):
            p.emit(f"setp.le.u32 {room}, {end}, {limit}; selp.f32 {lower}, {self.lower}, {INF}, {room};")
            p.emit(f"not.pred {above}, {room}; or.pred {self.whole}, {self.whole}, {above};")
            weights = []
            for j, x in enumerate(floats):
                distance = p.distance(x)
                weight = p.weight(distance)
                weights.append(weight)
                p.emit(f"setp.gt.f32 {above}, {distance}, {self.upper};")
                p.emit(f"@{above} add.f32 {self.above_mass}, {self.above_mass}, {weight};")
                if not self.by_mass:
                    p.emit(f"@{above} add.u32 {self.above_count}, {self.above_count}, 1;")
                p.emit(f"setp.gt.and.f32 {inside}, {distance}, {lower}, !{above};")
                at, half = p.one("b32"), p.one("b16")
                p.emit(f"add.u32 {at}, {position}, {p.offset(j)}; cvt.u16.u32 {half}, {at};")
                p.emit(
                    f"@{inside} st.shared.b16 [{end}], {half}; @{inside} add.u32 {end}, {end}, {row_bytes};"
                )
            p.emit(f"add.f32 {total}, {total}, {p.tree('add.f32', 'f32', weights)};")

        p.sweep(group)
        p += f"sub.u32 {self.listed}, {end}, {start}; shr.u32 {self.listed}, {self.listed}, 8;"
        self.total = total
        p.over_warp("add.f32", "f32", total)
        p.over_warp("add.f32", "f32", self.above_mass)
        p.over_warp("add.s32", "b32", self.above_count)

    def positions(self, body) -> None:
        """Calls body(bits, key, distance) for the elements of the zone that the thread has, and for some others."""
        p = self.p
        turn, number, position, at = p.new("b32", 4)
        more = p.one("pred")
        again, done = p.label("position"), p.label("positions_done")
        p += f"mov.b32 {turn}, 0; selp.b32 {number}, {p.window.size // WARPGROUP}, {self.listed}, {self.whole};"
        p += f"{again}: setp.lt.u32 {more}, {turn}, {number}; @!{more} bra {done};"
        half = p.one("b16")
        vec = p.window.vec
        p += f"mad.lo.u32 {at}, {turn}, {WARPGROUP}, <thread>; mad.lo.u32 {at}, {at}, 2, <scratch>;"
        p += f"@!{self.whole} ld.shared.b16 {half}, [{at}+{4 * p.scratch.listed}];"
        p += f"shr.u32 {position}, {turn}, {vec.bit_length() - 1}; mad.lo.u32 {position}, {position}, {WARPGROUP}, <thread>;"
        p += f"and.b32 {at}, {turn}, {vec - 1}; mad.lo.u32 {position}, {position}, {vec}, {at};"
        p += f"@!{self.whole} cvt.u32.u16 {position}, {half};"
        bits = p.load_bits(position)
        body(bits, p.key(bits), p.distance(p.float_of_bits(bits)))
        p += f"add.u32 {turn}, {turn}, 1; bra {again}; {done}:"

    def extremes_and_rounds(self) -> None:
        """The exact threshold, within the zone, or if that fails within all elements."""
        p, kept = self.p, self.kept
        retry, fail, end = p.label("retry"), p.label("fail"), p.label("end")
        p += f"{retry}:"
        high, low = p.const("b32", _LOWEST_KEY), p.const("b32", _HIGHEST_KEY)
        inside = p.one("pred")

        def extreme(bits, key, distance):
            p.emit(f"setp.gt.f32 {inside}, {distance}, {self.lower};")
            p.emit(f"setp.le.and.f32 {inside}, {distance}, {self.upper}, {inside};")
            p.emit(f"@{inside} max.s32 {high}, {high}, {key}; @{inside} min.s32 {low}, {low}, {key};")

        self.positions(extreme)
        p.over_warp("max.s32", "b32", high)
        p.over_warp("min.s32", "b32", low)
        p.send(p.scratch.zone_mail, [self.total, self.above_mass, self.above_count, high, low])
        p.cluster_barrier()
        total, above_mass, above_count, high, low = p.receive(
            p.scratch.zone_mail,
            [
                ("add.f32", "f32"),
                ("add.f32", "f32"),
                ("add.s32", "b32"),
                ("max.s32", "b32"),
                ("min.s32", "b32"),
            ],
        )
        # The whole row's total is that of the first search; the second one has -inf in place of some elements.
        wrong = p.one("pred")
        p += f"@{kept.known} mov.f32 {total}, {kept.total}; mov.f32 {kept.total}, {total};"
        p += f"@!{kept.known} mov.f32 {kept.mass}, {total};"
        p += f"setp.eq.f32 {kept.known}, {total}, {total};"
        p += f"setp.gt.s32 {wrong}, {low}, {high}; @{wrong} bra {fail};"
        factor = self._mass_factor()
        remaining = self._remaining(above_mass, above_count, factor, fail)
        counted, above = self._rounds(high, low, remaining, factor, fail)
        self._cut(high, counted, remaining, above, above_mass, factor)
        p += f"bra {end}; {fail}: @{self.everything} bra {end};"
        # The second try: all elements are in the zone. No CTA sends again before all have received.
        p.cluster_barrier()
        p += f"mov.f32 {self.upper}, {INF}; mov.f32 {self.lower}, {NEG_INF}; mov.f32 {self.above_mass}, 0f00000000;"
        p += f"mov.b32 {self.above_count}, 0; setp.eq.f32 {self.everything}, {self.upper}, {self.upper};"
        p += f"setp.eq.f32 {self.whole}, {self.upper}, {self.upper}; bra {retry}; {end}:"

    # --- Masses as integers

    @property
    def _half(self) -> int:
        """Bits of each of the two words of a mass: as many as leave room for the sum over a part."""
        return 32 - self.p.window.size.bit_length()

    def _mass_factor(self) -> str:
        """A power of two by which the largest mass that the zone may have is 2^(2 half), or less."""
        p = self.p
        least, factor = p.new("f32", 2)
        exponent = p.one("b32")
        p += f"neg.f32 {least}, {self.upper}; max.f32 {least}, {least}, 0f00000000;"
        p += f"min.f32 {least}, {least}, 0f42B40000;"  # 90
        p += f"cvt.rzi.s32.f32 {exponent}, {least}; add.u32 {exponent}, {exponent}, {127 + 2 * self._half};"
        p += f"shl.b32 {exponent}, {exponent}, 23; mov.b32 {factor}, {exponent};"
        return factor

    def _mass(self, distance: str, factor: str) -> tuple[str, str]:
        """The upper and the lower word of the mass of an element."""
        p = self.p
        high, low = p.new("b32", 2)
        mass, upper = p.new("f32", 2)
        p += f"mul.f32 {mass}, {p.weight(distance)}, {factor}; mul.f32 {upper}, {mass}, {_float(2.0**-self._half)};"
        p += f"cvt.rzi.u32.f32 {high}, {upper}; cvt.rn.f32.u32 {upper}, {high};"
        p += f"fma.rn.f32 {mass}, {upper}, {_float(-(2.0**self._half))}, {mass}; cvt.rni.u32.f32 {low}, {mass};"
        return high, low

    def _whole_mass(self, high: str, low: str) -> str:
        """Both words of a mass, or of a sum of masses, as one (b64)."""
        p = self.p
        mass, wide = p.new("b64", 2)
        p += f"mul.wide.u32 {mass}, {high}, {1 << self._half}; cvt.u64.u32 {wide}, {low};"
        p += f"add.u64 {mass}, {mass}, {wide};"
        return mass

    # --- Rounds

    def _remaining(self, above_mass: str, above_count: str, factor: str, fail: str) -> str:
        """How much of the target the zone must reach (b64): a number of entries, or a mass."""
        p = self.p
        remaining, wrong = p.one("b64"), p.one("pred")
        if not self.by_mass:
            left = p.one("b32")
            p += f"setp.le.u32 {wrong}, {self.target}, {above_count}; @{wrong} bra {fail};"
            p += f"sub.u32 {left}, {self.target}, {above_count}; cvt.u64.u32 {remaining}, {left};"
            return remaining
        wanted = p.one("f32")
        p += f"mul.f32 {wanted}, {self.kept.mass}, {self.target};"
        p += f"setp.ge.f32 {wrong}, {above_mass}, {wanted}; setp.gt.and.f32 {wrong}, {above_mass}, 0f00000000, {wrong};"
        p += f"@{wrong} bra {fail}; sub.f32 {wanted}, {wanted}, {above_mass}; mul.f32 {wanted}, {wanted}, {factor};"
        p += f"min.f32 {wanted}, {wanted}, 0f5E800000; max.f32 {wanted}, {wanted}, 0f3F800000;"  # 2^62, 1
        p += f"cvt.rni.u64.f32 {remaining}, {wanted};"
        return remaining

    def _rounds(self, high: str, low: str, remaining: str, factor: str, fail: str) -> tuple[str, str]:
        """Narrows the keys from low to high to the one where `remaining` is reached, which `high` becomes.

        Returns:
          A register with the address of the number of elements of that key, and one (b64) with the mass of the
          elements that come before it in the zone. `remaining` becomes what that key has to give.
        """
        p = self.p
        again, done = p.label("round"), p.label("rounds_done")
        counts, extent, shift, bucket = p.new("b32", 4)
        above, wide = p.new("b64", 2)
        inside = p.one("pred")
        p += f"mov.b64 {above}, 0; {again}:"
        p += f"mov.b32 {counts}, {p.counts}; sub.u32 {p.counts}, {p.both_counts}, {counts};"
        p += f"sub.u32 {extent}, {high}, {low}; clz.b32 {shift}, {extent}; sub.s32 {shift}, 24, {shift};"
        p += f"max.s32 {shift}, {shift}, 0;"
        self._clear(counts)

        def count(bits, key, distance):
            at = p.one("b32")
            p.emit(f"setp.ge.s32 {inside}, {key}, {low}; setp.le.and.s32 {inside}, {key}, {high}, {inside};")
            p.emit(
                f"sub.u32 {at}, {high}, {key}; shr.u32 {at}, {at}, {shift}; mad.lo.u32 {at}, {at}, 4, {counts};"
            )
            mass = self._mass(distance, factor)
            for i, amount in enumerate(("1", *mass)):
                add = f"red.relaxed.cta.shared::cta.add.u32 [{at}+{4 * KEY_BUCKETS * i}], {amount};"
                p.emit(f"@{inside} {add}")

        self.positions(count)
        p.cluster_barrier()
        self._choose(counts, remaining, bucket, above)
        p += f"setp.eq.s32 {inside}, {bucket}, -1; @{inside} bra {fail};"
        p += f"mad.lo.u32 {counts}, {bucket}, 4, {counts}; shl.b32 {bucket}, {bucket}, {shift};"
        p += f"sub.u32 {high}, {high}, {bucket}; setp.eq.u32 {inside}, {shift}, 0; @{inside} bra {done};"
        p += f"sub.u32 {extent}, {extent}, {bucket}; shl.b32 {bucket}, 1, {shift}; sub.u32 {bucket}, {bucket}, 1;"
        p += f"min.u32 {extent}, {extent}, {bucket}; sub.u32 {low}, {high}, {extent}; bra {again}; {done}:"
        return counts, above

    def _clear(self, counts: str) -> None:
        p = self.p
        address = p.one("b32")
        each = 4 * p.scratch.round_words // WARPGROUP
        p += f"mad.lo.u32 {address}, <thread>, {each}, {counts};"
        for i in range(0, each, 8):
            p += f"st.shared.v2.b32 [{address}+{i}], {{0, 0}};"
        p.barrier()

    def _choose(self, counts: str, remaining: str, bucket: str, above: str) -> None:
        """Finds the bucket where `remaining` is reached, -1 if none; takes what comes before it from `remaining`."""
        p, chosen = self.p, self.p.scratch.chosen
        address = p.one("b32")
        p += f"mad.lo.u32 {address}, <thread>, 8, {counts};"
        numbers = p.load_peer(0, address, 2)
        masses = [[], []]
        for cta in range(p.ctas):
            if cta:
                for total, more in zip(numbers, p.load_peer(cta, address, 2)):
                    p += f"add.u32 {total}, {total}, {more};"
            highs = p.load_peer(cta, address, 2, 4 * KEY_BUCKETS)
            lows = p.load_peer(cta, address, 2, 8 * KEY_BUCKETS)
            for of_bucket, high, low in zip(masses, highs, lows):
                of_bucket.append(self._whole_mass(high, low))
        masses = [p.tree("add.u64", "b64", of_bucket) for of_bucket in masses]
        amounts = masses
        if not self.by_mass:
            amounts = p.new("b64", 2)
            for amount, number in zip(amounts, numbers):
                p += f"cvt.u64.u32 {amount}, {number};"
        first = p.first_thread()
        p += f"@{first} st.shared.b32 [<scratch>+{4 * chosen}], -1;"
        both = p.one("b64")
        p += f"add.u64 {both}, {amounts[0]}, {amounts[1]};"
        before, _ = p.scan_cta(both, "b64", p.scratch.scans)
        mass_before = before
        if not self.by_mass:
            p += f"add.u64 {both}, {masses[0]}, {masses[1]};"
            mass_before, _ = p.scan_cta(both, "b64", p.scratch.scans + 12)
        number, end, hit, p0 = *p.new("b32"), *p.new("b64"), *p.new("pred", 2)
        for i in range(2):
            p += f"add.u64 {end}, {before}, {amounts[i]}; mad.lo.u32 {number}, <thread>, 2, {i};"
            p += (
                f"setp.lt.u64 {hit}, {before}, {remaining}; setp.le.and.u64 {hit}, {remaining}, {end}, {hit};"
            )
            p += f"@{hit} st.shared.b32 [<scratch>+{4 * chosen}], {number};"
            p += f"@{hit} st.shared.b64 [<scratch>+{4 * chosen + 8}], {before};"
            p += f"@{hit} st.shared.b64 [<scratch>+{4 * chosen + 16}], {mass_before};"
            p += f"mov.b64 {before}, {end};"
            if not self.by_mass and not i:
                p += f"add.u64 {mass_before}, {mass_before}, {masses[0]};"
        p.barrier()
        p += f"ld.shared.b32 {bucket}, [<scratch>+{4 * chosen}];"
        p += f"ld.shared.b64 {end}, [<scratch>+{4 * chosen + 8}];"
        p += f"setp.ne.s32 {p0}, {bucket}, -1; @{p0} sub.u64 {remaining}, {remaining}, {end};"
        p += f"ld.shared.b64 {end}, [<scratch>+{4 * chosen + 16}]; @{p0} add.u64 {above}, {above}, {end};"

    # --- Equal entries at the threshold

    def _cut(self, key: str, counted: str, remaining: str, above: str, above_mass: str, factor: str) -> None:
        """Makes -inf of the entries of the last key that are too many, those of the highest indices."""
        p, kept = self.p, self.kept
        everywhere, before, own, keep = p.const("b32", 0), p.const("b32", 0), p.one("b32"), p.one("b32")
        p0, p1 = p.new("pred", 2)
        for cta in range(p.ctas):
            (number,) = p.load_peer(cta, counted, 1)
            p += f"add.u32 {everywhere}, {everywhere}, {number}; setp.gt.u32 {p0}, <part>, {cta};"
            p += f"@{p0} add.u32 {before}, {before}, {number};"
        p += f"ld.shared.b32 {own}, [{counted}];"
        p += f"mov.f32 {kept.least}, {p.float_of_bits(p.key(key))};"
        mass = self._whole_mass(*self._mass(p.distance(kept.least), factor))
        if self.by_mass:
            rounded = p.one("b64")
            p += f"max.u64 {mass}, {mass}, 1; add.u64 {rounded}, {remaining}, {mass}; sub.u64 {rounded}, {rounded}, 1;"
            p += f"div.u64 {rounded}, {rounded}, {mass}; cvt.u32.u64 {keep}, {rounded};"
            p += f"min.u32 {keep}, {keep}, {everywhere};"
        else:
            left, bits = p.one("f32"), p.one("b32")
            p += f"cvt.u32.u64 {keep}, {remaining}; mad.lo.u64 {mass}, {mass}, {remaining}, {above};"
            p += f"mov.b32 {bits}, {factor}; sub.u32 {bits}, {254 << 23}, {bits}; mov.b32 {left}, {bits};"
            total = p.one("f32")
            p += f"cvt.rn.f32.u64 {total}, {mass}; fma.rn.f32 {kept.mass}, {total}, {left}, {above_mass};"
        end = p.label("cut_done")
        p += f"sub.s32 {keep}, {keep}, {before}; max.s32 {keep}, {keep}, 0;"
        p += f"setp.lt.s32 {p0}, {keep}, {own}; setp.eq.or.f32 {p0}, {kept.least}, 0f00000000, {p0};"
        p.skip_unless(p0, end)
        equal = p.const("b32", 0)

        def count(bits, of_bits, address):
            p.emit(f"setp.eq.s32 {p0}, {of_bits}, {key}; @{p0} add.u32 {equal}, {equal}, 1;")

        def cut(bits, of_bits, address):
            x = p.float_of_bits(bits)
            p.emit(f"setp.eq.f32 {p1}, {x}, {kept.least}; setp.lt.and.s32 {p1}, {of_bits}, {key}, {p1};")
            p.emit(f"setp.eq.s32 {p0}, {of_bits}, {key}; setp.ge.and.s32 {p0}, {equal}, {keep}, {p0};")
            p.emit(
                f"or.pred {p1}, {p1}, {p0}; @{p1} st.shared.b{8 * p.kind.itemsize} [{address}], {neg_inf};"
            )
            p.emit(f"setp.eq.s32 {p0}, {of_bits}, {key}; @{p0} add.u32 {equal}, {equal}, 1;")

        p.in_order(count)
        lower, _ = p.scan_cta(equal, "b32", p.scratch.scans)
        neg_inf = p.const(f"b{8 * p.kind.itemsize}", p.kind.neg_inf)
        p += f"mov.b32 {equal}, {lower};"
        p.in_order(cut)
        p.barrier()
        p += f"{end}:"


def _float(value: float) -> str:
    """A float32 in PTX."""
    return f"0f{np.float32(value).view(np.uint32):08X}"
