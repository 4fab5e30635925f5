"""The threshold of a count (top_k) or of a mass (top_p): the last entry that is kept, in PTX.

    histogram    two of every 16 elements, counted by distance from the maximum: an estimate of what lies above what
    zone         the distances between which the threshold lies, with a margin for the error of the estimate
    collect      one sweep: the exact mass and number above the zone, and a list of the elements in it
    rounds       the exact threshold: counts and masses by key, of 256 ranges of keys, then of the 256 ranges of the one
                 in which the threshold lies, and so on until that has a single key, or a single element
    cut          elements of that key count up to an index; those after it become -inf

The zone need not hold the threshold, and the list need not have room for it: then the rounds go over all elements.
So the estimate changes the time, and not the result.

Masses are integers in the rounds, of two words, so that sums do not depend on the order.
"""

import dataclasses

import numpy as np

from pallas_softmax.implementations.mosaic_gpu.device import sort_keys
from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.sample.plan import BUCKETS, KEY_BUCKETS
from pallas_softmax.implementations.mosaic_gpu.sample.program import INF, NEG_INF, WHOLE_WARP, Program

_LEAST_EXPONENT = 127 - 9  # of a distance in float32; smaller ones are in bucket 0
_BUCKET_SHIFT = 17  # bits of a distance below its bucket
_FIRST_BUCKET = _LEAST_EXPONENT << (23 - _BUCKET_SHIFT)
_HALF_BUCKET = 1 << (_BUCKET_SHIFT - 1)
_LOWEST_KEY = "0x80000000"
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


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
    for i in (0, 16):
        p += f"st.shared.v4.b32 [{address}+{4 * p.scratch.histogram + i}], {{0, 0, 0, 0}};"
    p.barrier()
    at, other_at, group = p.new("b32", 3)
    other, more = p.new("pred", 2)

    def count(x, number):
        bucket = p.one("b32")
        p.emit(f"mov.b32 {bucket}, {p.distance(x)}; and.b32 {bucket}, {bucket}, 0x7fffffff;")
        p.emit(f"shr.u32 {bucket}, {bucket}, {_BUCKET_SHIFT}; sub.s32 {bucket}, {bucket}, {_FIRST_BUCKET};")
        p.emit(f"max.s32 {bucket}, {bucket}, 0; min.s32 {bucket}, {bucket}, {BUCKETS - 1};")
        p.emit(f"mad.lo.u32 {bucket}, {bucket}, 4, <scratch>;")
        p.emit(f"red.relaxed.cta.shared::cta.add.u32 [{bucket}+{4 * p.scratch.histogram}], {number};")

    def place_of_other(elements):
        """The other one is element number t % elements of the group, for thread t."""
        j, block = p.new("b32", 2)
        block_bytes = p.window.block * p.kind.itemsize
        p.emit(f"rem.u32 {j}, <thread>, {elements}; shr.u32 {block}, {j}, {vec.bit_length() - 1};")
        p.emit(f"and.b32 {j}, {j}, {vec - 1};")
        p.emit(f"mad.lo.u32 {other_at}, {group}, {p.group_blocks * block_bytes}, {p.base};")
        p.emit(f"mad.lo.u32 {other_at}, {block}, {block_bytes}, {other_at};")
        p.emit(f"mad.lo.u32 {other_at}, {j}, {p.kind.itemsize}, {other_at};")

    def both(elements):
        best = p.one("f32")
        p.emit(f"ld.shared.f32 {best}, [{at}+{4 * p.scratch.best}];")
        x = p.float_of_bits(p.load_bits(other_at))
        neighbour = p.one("b32")
        p.emit(f"xor.b32 {neighbour}, {other_at}, {p.kind.itemsize};")
        y = p.float_of_bits(p.load_bits(neighbour))
        # If it is the largest, its neighbour takes its place, unless there is another one like it in the vector.
        vector, equals = *p.new("b32"), p.const("b32", 0)
        p.emit(f"and.b32 {vector}, {other_at}, -16;")
        (words,) = p.kind.vectors(p, vector, [0])
        for each in p.kind.floats(p, words, False):
            p.emit(f"setp.eq.f32 {other}, {each}, {best}; @{other} add.u32 {equals}, {equals}, 1;")
        p.emit(f"setp.eq.f32 {other}, {x}, {best}; setp.eq.and.u32 {other}, {equals}, 1, {other};")
        p.emit(f"selp.f32 {x}, {y}, {x}, {other};")
        count(best, 1)
        count(x, elements - 1)

    vec = p.window.vec
    full, rest = divmod(p.window.blocks, p.group_blocks)
    p += f"mov.b32 {group}, 0; mad.lo.u32 {at}, <thread>, 4, <scratch>;"
    if full:
        again = p.label("histogram")
        place_of_other(p.group_blocks * vec)
        p += f"{again}:"
        both(p.group_blocks * vec)
        p += f"add.u32 {at}, {at}, {4 * WARPGROUP}; add.u32 {group}, {group}, 1;"
        p += f"add.u32 {other_at}, {other_at}, {p.group_blocks * p.window.block * p.kind.itemsize};"
        p += f"setp.lt.u32 {more}, {group}, {full}; @{more} bra {again};"
    if rest:
        place_of_other(rest * vec)
        both(rest * vec)
    p.barrier()
    # What other CTAs read first: the sums of the columns, of the buckets of a thread.
    own, address = p.new("b32", 2)
    p += f"mad.lo.u32 {own}, <thread>, {4 * BUCKETS // WARPGROUP}, <scratch>;"
    p += f"mad.lo.u32 {address}, <thread>, 4, <scratch>;"
    counts = p.new("b32", BUCKETS // WARPGROUP)
    for i, number in enumerate(counts):
        p += f"ld.shared.b32 {number}, [{own}+{4 * (p.scratch.histogram + i)}];"
    for by_mass, column in enumerate(p.scratch.columns):
        sum_of_column = p.tree("add.f32", "f32", _amounts(p, counts, bool(by_mass)))
        p += f"st.shared.f32 [{address}+{4 * column}], {sum_of_column};"
    p.cluster_barrier()


def _amounts(p: Program, counts: list[str], by_mass: bool) -> list[str]:
    """The numbers of elements in the thread's buckets, or their masses, about: each at its bucket's middle (f32)."""
    amounts, first = p.new("f32", len(counts)), p.one("b32")
    p += f"mad.lo.u32 {first}, <thread>, {len(counts)}, {_FIRST_BUCKET};"
    for i, (amount, count) in enumerate(zip(amounts, counts)):
        p += f"cvt.rn.f32.u32 {amount}, {count};"
        if by_mass:
            middle, bits = p.one("f32"), p.one("b32")
            p += f"add.u32 {bits}, {first}, {i}; shl.b32 {bits}, {bits}, {_BUCKET_SHIFT};"
            p += f"add.u32 {bits}, {bits}, {_HALF_BUCKET}; or.b32 {bits}, {bits}, 0x80000000;"
            p += f"mov.b32 {middle}, {bits};"
            p += f"mul.f32 {amount}, {amount}, {p.weight(middle)};"
    return amounts


class Search:
    """The search for the threshold of a count, and after it for that of a mass.

    Attributes:
      kept: what the thresholds have left.
      upper, lower: distances: those above `upper` are above the zone, those above `lower` and not above `upper` in it.
      total, above_mass, above_count: of the warp, of all elements and of those above the zone.
      listed: number of the thread's elements in the list.
      whole: predicate: whether the thread takes all its elements, since its list has no room for those in the zone.
      everything: predicate: whether the zone is the whole row.
      alike: predicate: whether the thread takes all its elements, and those in the zone are all the same, not 0.
      alike_x, alike_count: then that, and how many they are.
      low: a key below which no element is.
    """

    def __init__(self, p: Program, total: str, kept: Kept):
        self.p, self.total, self.kept = p, total, kept
        self.upper, self.lower, self.above_mass = p.new("f32", 3)
        self.above_count, self.listed, self.all_above = p.new("b32", 3)
        self.whole, self.everything, self.alike, self._infinite = p.new("pred", 4)
        self.alike_x, self.alike_count = p.one("f32"), p.one("b32")
        self.low = p.const("b32", _LOWEST_KEY)
        self.by_mass, self.target = False, ""
        p += f"mov.b32 {self.all_above}, 1; setp.ne.u32 {self.everything}, {p.lane}, {p.lane};"
        p += f"setp.ne.u32 {self.whole}, {p.lane}, {p.lane};"

    def find(self, target: str, *, by_mass: bool) -> None:
        """Finds the threshold for a target; `kept` gets what it leaves, if the row has as much as the target.

        Args:
          target: a number of entries (b32), or a share of the kept mass (f32).
          by_mass: which of them.
        """
        p = self.p
        self.by_mass, self.target = by_mass, target
        listed, again = p.label("listed"), p.one("pred")
        if by_mass:  # if nothing was above the zone of the count, what that has kept is in the list
            p += f"setp.eq.u32 {again}, {self.all_above}, 0; @{self.everything} bra {listed}; @{again} bra {listed};"
        self.zone()
        self.collect()
        p += f"{listed}:"
        self.rounds_of_zone()

    def zone(self) -> None:
        """The distances between which the threshold is expected. Bucket 0 has the largest elements."""
        p = self.p
        own = p.const("f32", "0f00000000")
        columns = p.address(p.scratch.columns[self.by_mass])
        address = p.one("b32")
        p += f"mad.lo.u32 {address}, <thread>, 4, {columns};"
        for cta in range(p.ctas):
            (word,) = p.load_peer(cta, address, 1)
            amount = p.one("f32")
            p += f"mov.b32 {amount}, {word}; add.f32 {own}, {own}, {amount};"
        first = p.first_thread()
        p += f"@{first} st.shared.v2.b32 [<scratch>+{4 * (p.scratch.scans + 8)}], {{0, {BUCKETS}}};"  # if none is found
        before, total = p.scan_cta(own, "f32", p.scratch.scans)
        wanted, margin, start, end = p.new("f32", 4)
        if self.by_mass:
            # The error of the estimate is less towards the end, where what remains is small.
            p += f"@{self.kept.known} mov.f32 {total}, {self.kept.mass};"
            p += f"mul.f32 {wanted}, {total}, {self.target};"
            p += f"sub.f32 {margin}, 0f3F800000, {self.target}; sqrt.approx.f32 {margin}, {margin};"
            p += f"mul.f32 {margin}, {margin}, {_float(16 / p.window.vocab**0.5)}; mul.f32 {margin}, {margin}, {total};"
        else:
            p += f"cvt.rn.f32.u32 {wanted}, {self.target}; sqrt.approx.f32 {margin}, {wanted};"
            p += f"fma.rn.f32 {margin}, {margin}, 0f41000000, 0f41A00000;"  # 20 + 8 sqrt(k)
        p += f"sub.f32 {start}, {wanted}, {margin}; add.f32 {end}, {wanted}, {margin};"
        self._bucket_of(start, before, own, 0)
        self._bucket_of(end, before, own, 1)
        p.barrier()
        before_start, before_end, p0 = *p.new("b32", 2), p.one("pred")
        p += f"ld.shared.b32 {before_start}, [<scratch>+{4 * (p.scratch.scans + 8)}];"
        p += f"ld.shared.b32 {before_end}, [<scratch>+{4 * (p.scratch.scans + 9)}];"
        p += f"add.u32 {before_end}, {before_end}, 1;"
        for register, distance, edge, beyond in (
            (before_start, self.upper, f"setp.eq.u32 {p0}, {before_start}, 0;", INF),
            (before_end, self.lower, f"setp.ge.u32 {p0}, {before_end}, {BUCKETS};", NEG_INF),
        ):
            bits = p.one("b32")
            p += f"add.u32 {bits}, {register}, {_FIRST_BUCKET}; shl.b32 {bits}, {bits}, {_BUCKET_SHIFT};"
            p += f"or.b32 {bits}, {bits}, 0x80000000; mov.b32 {distance}, {bits};"
            p += f"{edge} @{p0} mov.f32 {distance}, {beyond};"

    def _bucket_of(self, wanted: str, before: str, own: str, number: int) -> None:
        """Writes, in the thread in whose column the amount `wanted` is reached, how many buckets end before that."""
        p, each = self.p, BUCKETS // WARPGROUP
        mine, p0, end = *p.new("pred", 2), p.label("bucket")
        reached = p.one("f32")
        p += f"add.f32 {reached}, {before}, {own}; setp.lt.f32 {mine}, {before}, {wanted};"
        p += f"setp.ge.and.f32 {mine}, {reached}, {wanted}, {mine};"
        bucket = p.one("b32")
        p += f"@!{mine} bra {end};"
        address = p.one("b32")
        p += f"mad.lo.u32 {address}, <thread>, {4 * each}, <scratch>;"
        p += (
            f"add.u32 {address}, {address}, {4 * p.scratch.histogram}; mul.lo.u32 {bucket}, <thread>, {each};"
        )
        counts = p.load_peer(0, address, 4) + p.load_peer(0, address, 4, 16)
        for cta in range(1, p.ctas):
            for total, more in zip(counts, p.load_peer(cta, address, 4) + p.load_peer(cta, address, 4, 16)):
                p += f"add.u32 {total}, {total}, {more};"
        ends = p.one("f32")
        p += f"mov.f32 {ends}, {before}; mul.lo.u32 {bucket}, <thread>, {each};"
        for i, amount in enumerate(_amounts(p, counts, self.by_mass)[:-1]):
            p += f"add.f32 {ends}, {ends}, {amount}; setp.lt.f32 {p0}, {ends}, {wanted};"
            p += f"@{p0} mad.lo.u32 {bucket}, <thread>, {each}, {i + 1};"
        p += f"st.shared.b32 [<scratch>+{4 * (p.scratch.scans + 8 + number)}], {bucket}; {end}:"

    def collect(self) -> None:
        """Sums what is above the zone, by groups, and lists the elements in it."""
        p = self.p
        end, start, limit, number = p.new("b32", 4)
        lower, of_group = p.new("f32", 2)
        above, inside, room = p.new("pred", 3)
        p += f"add.u32 {start}, <scratch>, <thread>; add.u32 {start}, {start}, {4 * p.scratch.listed};"
        p += f"add.u32 {limit}, {start}, {(p.scratch.list_rows - 16) * WARPGROUP}; mov.b32 {end}, {start};"
        p += f"mov.f32 {self.above_mass}, 0f00000000; mov.b32 {self.above_count}, 0;"
        p += f"setp.ne.u32 {self.whole}, {start}, {start};"

        def group(floats, step):
            p.emit(f"setp.le.u32 {room}, {end}, {limit}; selp.f32 {lower}, {self.lower}, {INF}, {room};")
            p.emit(f"not.pred {above}, {room}; or.pred {self.whole}, {self.whole}, {above};")
            p.emit(f"mov.f32 {of_group}, 0f00000000; mul.lo.u32 {number}, {step}, 16;")
            for j, x in enumerate(floats):
                distance = p.distance(x)
                p.emit(f"setp.gt.f32 {above}, {distance}, {self.upper};")
                p.emit(f"@{above} add.f32 {of_group}, {of_group}, {p.weight(distance)};")
                if not self.by_mass:
                    p.emit(f"@{above} add.u32 {self.above_count}, {self.above_count}, 1;")
                p.emit(f"setp.gt.and.f32 {inside}, {distance}, {lower}, !{above};")
                at = p.one("b32")
                p.emit(f"add.u32 {at}, {number}, {j};")
                p.emit(f"@{inside} st.shared.b8 [{end}], {at}; @{inside} add.u32 {end}, {end}, {WARPGROUP};")
            p.emit(f"add.f32 {self.above_mass}, {self.above_mass}, {of_group};")
            return of_group

        p.sweep(group, self.lower)
        p += f"sub.u32 {self.listed}, {end}, {start}; shr.u32 {self.listed}, {self.listed}, 7;"
        p.over_warp("add.f32", "f32", self.above_mass)
        p.over_warp("add.s32", "b32", self.above_count)

    def elements(self, body, but: str = "") -> None:
        """Calls body(x, bits, distance, inside, number, next) for the elements of the zone that the thread has.

        `inside` is a predicate, since there may be others among them; `number` the element's number in the thread;
        `next` a label to go on from. A thread for which the predicate `but` holds has none.
        """
        p = self.p
        turn, count, number, at = p.new("b32", 4)
        more, inside = p.new("pred", 2)
        again, done, after = p.label("element"), p.label("elements_done"), p.label("next_element")
        each = p.window.size // WARPGROUP
        p += f"mov.b32 {turn}, 0; selp.b32 {count}, {each}, {self.listed}, {self.whole};"
        p += f"@{but} mov.b32 {count}, 0;" if but else ""
        p += f"add.u32 {at}, <scratch>, <thread>; add.u32 {at}, {at}, {4 * p.scratch.listed};"
        p += f"{again}: setp.lt.u32 {more}, {turn}, {count}; @!{more} bra {done}; mov.b32 {number}, {turn};"
        p += f"@!{self.whole} ld.shared.b8 {number}, [{at}];"
        bits = p.load_bits(self._address(number))
        x = p.float_of_bits(bits)
        distance = p.distance(x)
        p += f"setp.gt.f32 {inside}, {distance}, {self.lower};"
        p += f"setp.le.and.f32 {inside}, {distance}, {self.upper}, {inside};"
        body(x, bits, distance, inside, number, after)
        p += f"{after}: add.u32 {turn}, {turn}, 1; add.u32 {at}, {at}, {WARPGROUP}; bra {again}; {done}:"

    def find_alike(self) -> None:
        """Finds the threads that need not go over their elements one by one, for those in the zone are all the same."""
        p = self.p
        least, most = p.new("f32", 2)
        inside, some = p.new("pred", 2)
        end = p.label("alike_known")
        p += f"mov.f32 {least}, {INF}; mov.f32 {most}, {NEG_INF}; mov.b32 {self.alike_count}, 0;"
        p += f"mov.f32 {self.alike_x}, 0f00000000;"
        p += f"setp.ne.u32 {self.alike}, {p.lane}, {p.lane}; not.pred {some}, {self.whole};"
        p += f"vote.sync.all.pred {some}, {some}, {WHOLE_WARP}; @{some} bra {end};"

        def vector(floats, bits, address, block):
            for x in floats:
                distance = p.distance(x)
                p.emit(f"setp.gt.f32 {inside}, {distance}, {self.lower};")
                p.emit(f"setp.le.and.f32 {inside}, {distance}, {self.upper}, {inside};")
                p.emit(f"@{inside} min.f32 {least}, {least}, {x}; @{inside} max.f32 {most}, {most}, {x};")
                p.emit(f"@{inside} add.u32 {self.alike_count}, {self.alike_count}, 1;")

        p.each_block(p.const("b32", 0), vector)
        p += f"setp.ge.and.f32 {self.alike}, {least}, {most}, {self.whole}; mov.f32 {self.alike_x}, {most};"
        p += f"setp.ne.and.f32 {self.alike}, {most}, 0f00000000, {self.alike}; {end}:"

    def add_kept(self) -> None:
        """Adds the kept elements of the zone to the masses of their groups."""
        p, least = self.p, self.kept.least
        same_group, at = p.const("b32", 0), p.one("b32")
        sum_of_group, mass = p.const("f32", "0f00000000"), p.one("f32")
        same = p.one("pred")

        def put():
            p.emit(
                f"mad.lo.u32 {at}, {same_group}, {WARPGROUP}, <thread>; mad.lo.u32 {at}, {at}, 4, <scratch>;"
            )
            p.emit(
                f"ld.shared.f32 {mass}, [{at}+{4 * p.scratch.masses}]; add.f32 {mass}, {mass}, {sum_of_group};"
            )
            p.emit(f"st.shared.f32 [{at}+{4 * p.scratch.masses}], {mass};")

        def add(x, bits, distance, inside, number, after):
            group, other = p.one("b32"), p.label("same_group")
            p.emit(f"setp.ge.and.f32 {inside}, {x}, {least}, {inside}; @!{inside} bra {after};")
            p.emit(
                f"shr.u32 {group}, {number}, 4; setp.eq.u32 {same}, {group}, {same_group}; @{same} bra {other};"
            )
            put()
            p.emit(f"mov.b32 {same_group}, {group}; mov.f32 {sum_of_group}, 0f00000000;")
            p.emit(f"{other}:")
            p.emit(f"add.f32 {sum_of_group}, {sum_of_group}, {p.weight(distance)};")

        self.elements(add)
        put()

    def rounds_of_zone(self) -> None:
        """The exact threshold, within the zone, or if that fails within all elements."""
        p, mail = self.p, self.p.scratch.zone_mail[self.by_mass]
        retry, fail, end = p.label("retry"), p.label("fail"), p.label("end")
        p += f"{retry}:"
        factor = self._mass_factor()
        high, low = self._key_near(self.upper, "add"), self._key_near(self.lower, "sub")
        p += f"max.s32 {low}, {low}, {self.low};"
        self.find_alike()
        p.send(mail, [self.total, self.above_mass, self.above_count])
        counted, remaining, above, mass, above_mass = self._rounds(high, low, factor, mail, fail)
        self._cut(high, counted, remaining, above, mass, above_mass, factor)
        p += f"mov.b32 {self.low}, {high}; bra {end}; {fail}: @{self.everything} bra {end};"
        # The second try: all elements are in the zone. No CTA sends again before all have received.
        p.cluster_barrier()
        p += f"mov.f32 {self.upper}, {INF}; mov.f32 {self.lower}, {NEG_INF}; mov.f32 {self.above_mass}, 0f00000000;"
        p += f"mov.b32 {self.above_count}, 0; setp.eq.f32 {self.everything}, {self.upper}, {self.upper};"
        p += f"setp.eq.f32 {self.whole}, {self.upper}, {self.upper};"
        self._clear_masses()
        p += f"bra {retry}; {end}:"

    def _clear_masses(self) -> None:
        """Nothing is above the zone any more."""
        p = self.p
        at = p.one("b32")
        p += f"mad.lo.u32 {at}, <thread>, 4, <scratch>;"
        for i in range(p.scratch.groups):
            p += f"st.shared.b32 [{at}+{4 * (p.scratch.masses + i * WARPGROUP)}], 0;"

    def _key_near(self, distance: str, direction: str) -> str:
        """A key that no element beyond a distance reaches, in the direction "add" or "sub"."""
        p = self.p
        x, error, size, key = *p.new("f32", 3), p.one("b32")
        p += f"div.rn.f32 {x}, {distance}, {p.scale}; abs.f32 {error}, {x}; abs.f32 {size}, {p.m};"
        p += f"add.f32 {error}, {error}, {size}; mul.f32 {error}, {error}, {_float(2.0**-20)}; add.f32 {x}, {x}, {p.m};"
        p += f"{direction}.f32 {x}, {x}, {error}; min.f32 {x}, {x}, {p.m};"
        if direction == "add":  # the distance may be +inf
            p += f"setp.eq.f32 {self._infinite}, {distance}, {INF}; @{self._infinite} mov.f32 {x}, {p.m};"
        else:
            p += f"setp.eq.f32 {self._infinite}, {distance}, {NEG_INF}; @{self._infinite} mov.f32 {x}, {NEG_INF};"
        bits = p.bits_of_float(x)
        p += f"{direction}.s32 {key}, {p.key(bits)}, 1;"
        return key

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

    def _rounds(
        self, high: str, low: str, factor: str, mail: int, fail: str
    ) -> tuple[str, str, str, str, str]:
        """Narrows the keys from low to high to the one where the target is reached, which `high` becomes.

        Returns:
          Registers with the address of the number of elements of that key; what that key has to give; the masses of the
          elements that come before it in the zone, and of its own (b64); and the mass above the zone.
        """
        p = self.p
        above_mass, remaining = p.one("f32"), p.one("b64")
        first = p.one("pred")
        p += f"setp.eq.f32 {first}, {factor}, {factor};"
        again, done = p.label("round"), p.label("rounds_done")
        counts, extent, shift, bucket = p.new("b32", 4)
        above, mass, inside, number = *p.new("b64", 2), p.one("pred"), p.one("b32")
        p += f"mov.b64 {above}, 0; {again}:"
        p += f"mov.b32 {counts}, {p.counts}; sub.u32 {p.counts}, {p.both_counts}, {counts};"
        p += f"sub.u32 {extent}, {high}, {low}; clz.b32 {shift}, {extent};"
        p += f"sub.s32 {shift}, {33 - KEY_BUCKETS.bit_length()}, {shift}; max.s32 {shift}, {shift}, 0;"
        self._clear(counts)

        # Equal elements, one after the other, are added together: of a constant row all that a thread has.
        same_key, times = p.new("b32", 2)
        of_same = p.one("f32")
        same = p.one("pred")
        p += f"mov.b32 {times}, 0; add.s32 {same_key}, {high}, 1; mov.f32 {of_same}, 0f00000000;"

        def add():
            at, done = p.one("b32"), p.label("added")
            p.emit(f"setp.eq.u32 {same}, {times}, 0; @{same} bra {done};")
            p.emit(f"sub.u32 {at}, {high}, {same_key}; shr.u32 {at}, {at}, {shift};")
            p.emit(f"mad.lo.u32 {at}, {at}, 4, {counts};")
            for i, amount in enumerate((None, *self._mass(of_same, factor))):
                number = times
                if amount is not None:
                    number = p.one("b32")
                    p.emit(f"mul.lo.u32 {number}, {amount}, {times};")
                p.emit(f"red.relaxed.cta.shared::cta.add.u32 [{at}+{4 * KEY_BUCKETS * i}], {number};")
            p.emit(f"{done}:")

        def count(x, bits, distance, within, number, after):
            key = p.key(bits)
            p.emit(f"setp.ge.and.s32 {within}, {key}, {low}, {within};")
            p.emit(f"setp.le.and.s32 {within}, {key}, {high}, {within}; @!{within} bra {after};")
            p.emit(
                f"setp.eq.s32 {same}, {key}, {same_key}; @{same} add.u32 {times}, {times}, 1; @{same} bra {after};"
            )
            add()
            p.emit(f"mov.b32 {same_key}, {key}; mov.f32 {of_same}, {distance}; mov.b32 {times}, 1;")

        key = p.key(p.bits_of_float(self.alike_x))
        p += f"setp.ge.and.s32 {same}, {key}, {low}, {self.alike}; setp.le.and.s32 {same}, {key}, {high}, {same};"
        p += f"@{same} mov.b32 {times}, {self.alike_count}; @{same} mov.b32 {same_key}, {key};"
        p += f"@{same} mov.f32 {of_same}, {p.distance(self.alike_x)};"
        self.elements(count, but=self.alike)
        add()
        p.cluster_barrier()
        later = p.label("later_round")
        p += f"@!{first} bra {later}; setp.ne.f32 {first}, {factor}, {factor};"
        self._receive(mail, above_mass, remaining, factor, fail)
        p += f"{later}:"
        self._choose(counts, remaining, bucket, above, number, mass)
        p += f"setp.eq.s32 {inside}, {bucket}, -1; @{inside} bra {fail};"
        p += f"mad.lo.u32 {counts}, {bucket}, 4, {counts}; shl.b32 {bucket}, {bucket}, {shift};"
        p += f"sub.u32 {high}, {high}, {bucket}; setp.eq.u32 {inside}, {shift}, 0; @{inside} bra {done};"
        p += f"sub.u32 {extent}, {extent}, {bucket}; shl.b32 {bucket}, 1, {shift}; sub.u32 {bucket}, {bucket}, 1;"
        p += f"min.u32 {extent}, {extent}, {bucket}; sub.u32 {low}, {high}, {extent};"
        p += f"setp.ne.u32 {inside}, {number}, 1; @{inside} bra {again};"
        # The range has one element, and so its lowest key will do for a threshold, if it is a number's.
        p += f"max.s32 {high}, {low}, {sort_keys.key_of(-np.inf, _DTYPES[p.kind.name])}; {done}:"
        return counts, remaining, above, mass, above_mass

    def _receive(self, mail: int, above_mass: str, remaining: str, factor: str, fail: str) -> None:
        """What is above the zone in the whole row, and how much of the target is left for the zone."""
        p, kept = self.p, self.kept
        total, mass, all_count = p.receive(mail, [("add.f32", "f32"), ("add.f32", "f32"), ("add.s32", "b32")])
        p += f"mov.f32 {above_mass}, {mass};"
        if not self.by_mass:
            p += f"mov.b32 {self.all_above}, {all_count};"
        # The whole row's total is that of the first search; a second one has -inf in place of some elements.
        p += f"@{kept.known} mov.f32 {total}, {kept.total}; mov.f32 {kept.total}, {total};"
        p += f"@!{kept.known} mov.f32 {kept.mass}, {total}; setp.eq.f32 {kept.known}, {total}, {total};"
        p += f"mov.b64 {remaining}, {self._remaining(above_mass, all_count, factor, fail)};"

    def _clear(self, counts: str) -> None:
        p = self.p
        address = p.one("b32")
        each = 4 * p.scratch.round_words // WARPGROUP
        p += f"mad.lo.u32 {address}, <thread>, {each}, {counts};"
        for i in range(0, each, 4):
            p += f"st.shared.b32 [{address}+{i}], 0;"
        p.barrier()

    def _choose(self, counts: str, remaining: str, bucket: str, above: str, number: str, mass: str) -> None:
        """Finds the bucket where `remaining` is reached, -1 if none; takes what comes before it from `remaining`.

        `number` and `mass` become those of the bucket.
        """
        p, chosen = self.p, self.p.scratch.chosen
        address = p.one("b32")
        p += f"mad.lo.u32 {address}, <thread>, 8, {counts};"
        numbers = p.load_peer(0, address, 2)
        masses = [[], []]
        for cta in range(p.ctas):
            if cta:
                for total, more in zip(numbers, p.load_peer(cta, address, 2)):
                    p += f"add.u32 {total}, {total}, {more};"
            words = (p.load_peer(cta, address, 2, 4 * KEY_BUCKETS * i) for i in (1, 2))
            for of_bucket, high, low in zip(masses, *words):
                of_bucket.append(self._whole_mass(high, low))
        masses = [p.tree("add.u64", "b64", of_bucket) for of_bucket in masses]
        amounts = masses
        if not self.by_mass:
            amounts = p.new("b64", 2)
            for amount, each in zip(amounts, numbers):
                p += f"cvt.u64.u32 {amount}, {each};"
        first = p.first_thread()
        p += f"@{first} st.shared.b32 [<scratch>+{4 * chosen}], -1;"
        both = p.one("b64")
        p += f"add.u64 {both}, {amounts[0]}, {amounts[1]};"
        before, _ = p.scan_cta(both, "b64", p.scratch.scans)
        mass_before = before
        if not self.by_mass:
            p += f"add.u64 {both}, {masses[0]}, {masses[1]};"
            mass_before, _ = p.scan_cta(both, "b64", p.scratch.scans + 12)
        place, end, hit, p0 = *p.new("b32"), *p.new("b64"), *p.new("pred", 2)
        for i in range(2):
            p += f"add.u64 {end}, {before}, {amounts[i]}; mad.lo.u32 {place}, <thread>, 2, {i};"
            p += (
                f"setp.lt.u64 {hit}, {before}, {remaining}; setp.le.and.u64 {hit}, {remaining}, {end}, {hit};"
            )
            p += f"@{hit} st.shared.v2.b32 [<scratch>+{4 * chosen}], {{{place}, {numbers[i]}}};"
            for word, amount in ((2, before), (4, mass_before), (6, masses[i])):
                p += f"@{hit} st.shared.b64 [<scratch>+{4 * (chosen + word)}], {amount};"
            p += f"mov.b64 {before}, {end};"
            if not self.by_mass and not i:
                p += f"add.u64 {mass_before}, {mass_before}, {masses[0]};"
        p.barrier()
        p += f"ld.shared.v2.b32 {{{bucket}, {number}}}, [<scratch>+{4 * chosen}];"
        p += f"setp.ne.s32 {p0}, {bucket}, -1;"
        p += f"ld.shared.b64 {end}, [<scratch>+{4 * (chosen + 2)}]; @{p0} sub.u64 {remaining}, {remaining}, {end};"
        p += f"ld.shared.b64 {end}, [<scratch>+{4 * (chosen + 4)}]; @{p0} add.u64 {above}, {above}, {end};"
        p += f"ld.shared.b64 {mass}, [<scratch>+{4 * (chosen + 6)}];"

    # --- Equal entries at the threshold

    def _cut(
        self, key: str, counted: str, remaining: str, above: str, mass: str, above_mass: str, factor: str
    ) -> None:
        """Makes -inf of the entries of the last key that are too many, those of the highest indices."""
        p, kept = self.p, self.kept
        everywhere, before, own, keep = p.const("b32", 0), p.const("b32", 0), p.one("b32"), p.one("b32")
        p0 = p.one("pred")
        for cta in range(p.ctas):
            (number,) = p.load_peer(cta, counted, 1)
            p += f"add.u32 {everywhere}, {everywhere}, {number}; setp.gt.u32 {p0}, <part>, {cta};"
            p += f"@{p0} add.u32 {before}, {before}, {number};"
        p += f"ld.shared.b32 {own}, [{counted}];"
        p += f"mov.f32 {kept.least}, {p.float_of_bits(p.key(key))};"
        divisor = p.one("b64")
        p += f"cvt.u64.u32 {divisor}, {everywhere}; div.u64 {mass}, {mass}, {divisor};"  # of one entry
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
        end, none = p.label("cut_done"), p.label("cut_none")
        p += f"sub.s32 {keep}, {keep}, {before}; max.s32 {keep}, {keep}, 0;"
        p += f"setp.eq.f32 {p0}, {kept.least}, 0f00000000; @{p0} bra {none};"  # of 0 and -0 one may be left
        p += f"setp.ge.s32 {p0}, {keep}, {own}; @{p0} bra {end}; setp.gt.s32 {p0}, {keep}, 0; @{p0} bra {none};"
        next_key = p.one("b32")
        p += f"add.s32 {next_key}, {key}, 1;"
        p += f"mov.f32 {kept.least}, {p.float_of_bits(p.key(next_key))}; bra {end}; {none}:"
        self._cut_equal(key, keep)
        p += f"{end}:"

    def _cut_equal(self, key: str, keep: str) -> None:
        """Keeps so many entries of a key in this CTA, by the number of them in each block, and then in one block."""
        p, vec = self.p, self.p.window.vec
        p0, p1 = p.new("pred", 2)
        per_block, block, before, held = p.new("b32", 4)
        p += f"mad.lo.u32 {per_block}, <thread>, 4, {p.counts}; st.shared.b32 [{per_block}], 0;"
        p.barrier()
        size, first_lane = 8 * p.kind.itemsize, p.one("pred")
        p += f"setp.eq.u32 {first_lane}, {p.lane}, 0;"
        of_key = p.key(key)  # the bits

        def count(floats, bits, address, of_block):
            number, at = p.const("b32", 0), p.one("b32")
            for each in bits:
                p.emit(f"setp.eq.s32 {p0}, {each}, {of_key}; @{p0} add.u32 {number}, {number}, 1;")
            p.over_warp("add.s32", "b32", number)
            p.emit(f"mad.lo.u32 {at}, {of_block}, 4, {p.counts};")
            p.emit(f"@{first_lane} red.relaxed.cta.shared::cta.add.u32 [{at}], {number};")

        p.each_block(p.const("b32", 0), count, self.kept.least)
        p.barrier()
        # Every warp finds the block of the first entry that is too many: a lane has two blocks.
        two = p.new("b32", 2)
        p += f"mad.lo.u32 {per_block}, {p.lane}, 8, {p.counts}; ld.shared.v2.b32 {{{two[0]}, {two[1]}}}, [{per_block}];"
        p += f"add.u32 {held}, {two[0]}, {two[1]};"
        ends = p.scan(held, "b32")
        p += f"sub.u32 {ends}, {ends}, {held}; mov.b32 {block}, -1; mov.b32 {before}, -1;"
        for i, number in enumerate(two):
            p += f"add.u32 {held}, {ends}, {number};"
            p += f"setp.le.u32 {p0}, {ends}, {keep}; setp.lt.and.u32 {p0}, {keep}, {held}, {p0};"
            p += f"@{p0} mad.lo.u32 {block}, {p.lane}, 2, {i}; @{p0} mov.b32 {before}, {ends}; mov.b32 {ends}, {held};"
        p.over_warp("max.s32", "b32", block)
        p.over_warp("max.s32", "b32", before)
        neg_inf, after = p.const(f"b{size}", p.kind.neg_inf), p.const("b32", 0)
        # Of +0 as the key all -0 go, which are no entries of the key but equal floats.
        positive_zero, also = p.one("pred"), p.one("b32")
        p += f"setp.eq.s32 {positive_zero}, {key}, 0; mov.b32 {also}, {of_key};"
        p += f"@{positive_zero} mov.b32 {also}, {-(1 << (size - 1))}; @!{positive_zero} add.u32 {after}, {block}, 1;"

        def cut(floats, bits, address, of_block):
            late, late_or_zero = p.new("pred", 2)
            p.emit(f"setp.ne.s32 {late}, {block}, -1; setp.gt.and.s32 {late}, {of_block}, {block}, {late};")
            p.emit(f"or.pred {late_or_zero}, {late}, {positive_zero};")
            for j, each in enumerate(bits):
                p.emit(f"setp.eq.and.s32 {p0}, {each}, {of_key}, {late};")
                p.emit(f"setp.eq.and.s32 {p1}, {each}, {also}, {late_or_zero}; or.pred {p0}, {p0}, {p1};")
                p.emit(f"@{p0} st.shared.b{size} [{address}+{j * p.kind.itemsize}], {neg_inf};")

        p.each_block(after, cut, self.kept.least)
        done = p.label("block_cut")
        p += f"setp.eq.s32 {p0}, {block}, -1; @{p0} bra {done};"
        address, in_thread = p.one("b32"), p.const("b32", 0)
        p += (
            f"mad.lo.u32 {address}, {block}, {WARPGROUP}, <thread>; mad.lo.u32 {address}, {address}, 16, <x>;"
        )
        (words,) = p.kind.vectors(p, address, [0])
        equals = p.new("pred", vec)
        for bits, is_equal in zip(p.kind.bits(p, words), equals):
            p += f"setp.eq.s32 {is_equal}, {bits}, {of_key}; @{is_equal} add.u32 {in_thread}, {in_thread}, 1;"
        lower, _ = p.scan_cta(in_thread, "b32", p.scratch.scans)
        p += f"add.u32 {lower}, {lower}, {before};"
        for j, is_equal in enumerate(equals):
            p += (
                f"setp.ge.and.s32 {p1}, {lower}, {keep}, {is_equal}; @{is_equal} add.u32 {lower}, {lower}, 1;"
            )
            p += f"@{p1} st.shared.b{size} [{address}+{j * p.kind.itemsize}], {neg_inf};"
        p += f"{done}:"
        p.barrier()

    def _block(self, number: str) -> str:
        """The block of a thread's element."""
        block = self.p.one("b32")
        self.p.emit(f"shr.u32 {block}, {number}, {self.p.window.vec.bit_length() - 1};")
        return block

    def _address(self, number: str) -> str:
        """The address of a thread's element."""
        p, vec = self.p, self.p.window.vec
        address, of_vector = p.new("b32", 2)
        p.emit(f"mad.lo.u32 {address}, {self._block(number)}, {WARPGROUP}, <thread>;")
        p.emit(
            f"and.b32 {of_vector}, {number}, {vec - 1}; mad.lo.u32 {address}, {address}, {vec}, {of_vector};"
        )
        p.emit(f"mad.lo.u32 {address}, {address}, {p.kind.itemsize}, <x>;")
        return address


def _float(value: float) -> str:
    """A float32 in PTX."""
    return f"0f{np.float32(value).view(np.uint32):08X}"
