"""Finds the winner of a row with filters: the kept entry with the largest sum of x / temperature and noise.

`race_ptx` adds the noise and compares. Here each warp lists the elements that take part:

    threshold   at first a guess, 2 below logsumexp of the kept entries. The winner exceeds the guess with probability
                1 - exp(-e^2), in 99.94% of all rows
    sweep       each warp lists its elements from `Race.low` up, and enters 64 listed ones at a time; where most
                elements can win, it lists all of them, which is faster
    again       if the winner is below the guess, its sum becomes the threshold of another sweep; if no sum was found,
                that sweep takes all elements

If the filters have listed all that they keep, these lists replace the warps' own lists. The winner depends neither on
the guess nor on the order of the sums.
"""

import contextlib

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample.filter_ptx import Kept
from pallas_softmax._src.sample.plan import NOISE_AT_ONCE, RECORD_WORDS, SCRATCH, WARP_LOAD_BYTES
from pallas_softmax._src.sample.race_ptx import Noise, Race
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, LN2, PartProgram

_GUESS_BELOW = 2.0  # how far the first threshold is below logsumexp
# If a larger share of elements can win, all are listed. Other shares were not timed.
_DENSE = 3 / 4
_BATCH = NOISE_AT_ONCE * LANES  # positions that a warp enters at once


# --- Ties: the entries with the last kept key


def find_last_tie(p: PartProgram, kept: Kept) -> tuple[Value, Value, Value]:
    """Returns the CTA of the last kept tie, its position in this CTA, and whether any tie is left out.

    The kept ties are the first ones of the row: all of them in lower CTAs, none in higher ones. The filters know how
    many ties each CTA has and keeps.
    """
    is_cut = p.any(kept.equal_kept < kept.equal)
    last = p.last_that(kept.equal_kept > 0)
    position = p.var(p.select(is_cut & (p.cta > last), -1, HIGHEST, "s32"))
    with p.when(is_cut & p.cta.equals(last)):
        p.set(position, _position_of_tie(p, kept.key, p.shuffle(kept.equal_kept, "idx", last)))
    return last, position, is_cut


def _position_of_tie(p: PartProgram, key: Value, number: Value) -> Value:
    """Returns the position of element `number`, from 1, of the CTA's elements with this key.

    Each warp counts its elements with the key. Then the warp that has the element looks for it, load by load.
    """
    equal = p.var(0, "u32")
    p.sweep_elements(lambda x: p.increase(equal, 1, when=p.key(x).equals(key)))
    own = p.over_lanes("add", equal)
    p.store(p.word(SCRATCH.warps, p.warp, RECORD_WORDS), own, when=p.first_lane)
    p.barrier()
    (each,) = p.from_warps(["u32"], [0])
    before, _ = p.before(each)
    rest = p.var(number - p.shuffle(before, "idx", p.warp))  # the number among the elements of this warp
    with p.when((rest.bits("s32") > 0) & (rest <= own)):
        at = p.var(p.first_vector)
        with p.repeat() as again:
            elements = p.floats(p.vector(at))
            equal = p.var(0, "u32")
            for x in elements:
                p.increase(equal, 1, when=p.key(x).equals(key))
            before, in_load = p.before(equal)
            missing = in_load < rest
            p.increase(at, WARP_LOAD_BYTES, when=missing)
            p.update(rest, "sub", in_load, when=missing)
            again(missing)
        position, seen = p.position_of(at), p.var(before)
        for i, x in enumerate(elements):
            is_equal = p.key(x).equals(key)
            p.increase(seen, 1, when=is_equal)
            p.store(p.word(SCRATCH.picked), position + i, when=is_equal & seen.equals(rest))
    p.barrier()
    return p.load(p.word(SCRATCH.picked), "s32")


# --- The draw


class WinnerSearch:
    """The search for the winner: it lists elements for the race, or takes the lists of the filters."""

    def __init__(self, p: PartProgram, noise: Noise, kept: Kept, last_tie: Value):
        """`last_tie` is the position of the last kept tie: ties have the key `kept.key`."""
        self.p, self.kept, self.last_tie = p, kept, last_tie
        least = p.select(kept.key.equals(KEEP_ALL), LEAST_FINITE, p.from_key(kept.key))
        self.race = Race(p, noise.from_origin(p.origin), least, self._is_kept, p.origin)

    def run(self) -> tuple[Value, Value]:
        """Returns the index of the winner, and the element there."""
        p, race = self.p, self.race
        index, x = p.fresh("s32"), p.fresh("f32")
        guess = p.var(p.tempered_top + p.log2(self.kept.mass) * LN2 - _GUESS_BELOW)
        slot = p.var(p.word(SCRATCH.best))  # one of two
        race.start(guess)
        with p.loop() as leave:
            self._sweep()
            values, neutral = [race.best, race.index, race.x], [-INF, HIGHEST, -INF]
            each = p.over_each_cta(lambda values: race.first_best(p, *values), values, neutral, slot)
            best, winner, element = race.first_best(p, *each)
            p.set(index, winner)
            p.set(x, element)
            leave(best >= guess)
            p.set(guess, best)
            race.set_threshold(best)
            p.set(slot, slot ^ 16)  # other CTAs may still read the last results
        return index, x

    def _is_kept(self, x: Value, position: Value) -> Value:
        """Returns whether the filters keep the element at a position."""
        key = self.p.key(x)
        return (key > self.kept.key) | (key.equals(self.kept.key) & (position <= self.last_tie))

    def _sweep(self) -> None:
        """Finds the best sum of the warp's elements, unless it is below the threshold."""
        p, kept = self.p, self.kept
        at, remaining = p.var(p.first_vector), p.var(p.select(kept.listed, 0, p.loads))
        share = p.plan.list_size // p.warps  # the filters' list is cut into a share for each warp
        from_share_on = p.load(p.word(SCRATCH.listed), "s32") - p.warp.bits("s32") * share
        listed = p.select(kept.listed, p.min(p.max(from_share_on, 0), share), 0)
        filters_list = p.word(p.plan.key_positions, p.warp, share // 2)
        own_list = p.word(p.plan.positions, p.warp, p.plan.noise_words)
        list_ = p.select(kept.listed, filters_list, own_list)
        end = p.var(list_ + listed.bits("u32") * 2)  # the address after the last listed position
        more, until = p.var(remaining > 0), p.var(list_)
        with p.loop() as leave:
            p.sync_warp()
            with p.loop() as enough:
                enough(end <= until)
                self._perturb(list_, end, more)
            p.sync_warp()
            leave(remaining <= 0)
            self.race.catch_up()
            self._list(end, at, remaining)
            p.set(more, remaining > 0)
            # A partial batch waits for more positions, until there are none.
            p.set(until, p.select(more, list_ + 2 * (_BATCH - 1), list_))

    def _list(self, end: Value, at: Value, remaining: Value) -> None:
        """Lists the warp's next elements from `low` up; after the last kept tie, those above the ties."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        loads = count // vec
        vectors = [[p.fresh("s32") for _ in range(4)] for _ in range(loads)]
        for i, words in enumerate(vectors):
            p.load_into(words, at, offset=WARP_LOAD_BYTES * i, when=remaining > i)
        # If a filter keeps few elements, most of these have none of them. A maximum of packed elements shows it soon.
        may_list = p.any(~(p.greatest(sum(vectors, [])) < self.race.low)) if p.elements.halves else None
        with contextlib.nullcontext() if may_list is None else p.when(may_list):
            self._list_words(end, p.position_of(at), vectors, remaining)
        p.increase(at, WARP_LOAD_BYTES * loads)
        p.increase(remaining, -loads)

    def _list_words(self, end: Value, position: Value, vectors: list[list[Value]], remaining: Value) -> None:
        """Lists elements of these vectors; the first one has the position. `remaining` of the vectors exist."""
        p, vec, count = self.p, self.p.plan.window.vec, self.p.plan.listed_at_once
        above_ties = p.from_key(self.kept.key + 1)
        least = p.select(position > self.last_tie, p.max(self.race.low, above_ties), self.race.low)
        inside = p.var(0, "u32")
        for i, words in enumerate(vectors):  # the last element has the lowest bit
            outside = p.var(0, "u32")
            for x in p.floats(words):
                outside = p.append_sign(outside, (x - least).bits("u32"))
            inside = inside << vec | p.select(remaining > i, ~outside & 2**vec - 1, 0)
        positions = [position.bits("u32") + (i // vec * LANES * vec + i % vec) for i in range(count)]
        number = p.over_lanes("add", p.count_ones(inside))
        lists_all = (number > int(_DENSE * LANES * count)) & (remaining >= len(vectors))
        with p.when(lists_all):
            for i, here in enumerate(positions):
                p.store(end + p.lane * 2, p.convert(here, "u16"), offset=2 * LANES * i)
            p.increase(end, 2 * LANES * count)
        with p.when(~lists_all & (number > 0)):
            before, _ = p.scan(p.count_ones(inside))
            to = p.var(end + before * 2)
            for i, here in enumerate(positions):
                is_inside = (inside & 1 << count - 1 - i).differs(0)
                p.store(to, p.convert(here, "u16"), when=is_inside)
                p.increase(to, 2, when=is_inside)
            p.increase(end, number * 2)

    def _perturb(self, list_: Value, end: Value, more: Value) -> None:
        """Takes the last positions of the list, and enters the elements there in the race.

        `more` is a condition: whether further positions will be listed.
        """
        p = self.p
        p.increase(end, -2 * _BATCH)
        first = end + p.lane * 2
        # Entries before the first one are the first one again.
        entries = [p.max(first + 2 * LANES * i, list_) for i in range(NOISE_AT_ONCE)]
        positions = [p.convert(p.load(entry, "u16"), "u32").bits("s32") for entry in entries]
        p.set(end, p.max(end, list_))
        self.race.enter([p.element_at(position) for position in positions], positions, more)
