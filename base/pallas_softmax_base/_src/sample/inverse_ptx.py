"""Finds the drawn entry: the first one, in the order of the row, at which the kept mass exceeds u times the total.

The search has four steps: among the CTAs, the warps of one CTA, the loads of one warp, and the lanes of one load:

    kept mass       0.5 | 1.5 | 0 | 1        u = 0.6: the target is 1.8
    before it       0   | 0.5 | 2 | 2        the second one has the target, 1.3 into its mass

Each step takes the last part that has kept mass, with at most the target before it.
"""

from collections.abc import Callable

from pallas_softmax_base._src.gpu.hardware import LANES
from pallas_softmax_base._src.gpu.ptx.values import Value
from pallas_softmax_base._src.sample.plan import WARP_LOAD_BYTES
from pallas_softmax_base._src.sample.row_ptx import INF, KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax_base._src.sample.search_ptx import Kept

_EVERYWHERE = 0x7FFFFFFF  # a position after all others

# Called as weight(element, position). Returns the mass of an element, and whether it counts.
Weight = Callable[[Value, Value], tuple[Value, Value]]


def choose(p: RowProgram, mass: Value, before: Value, target: Value) -> tuple[Value, Value]:
    """Returns the lane where a target lies, and the target minus the mass before that lane.

    Each lane passes its mass, and the mass of all lower lanes together. The target is not negative.
    """
    lane = p.last_that((mass > 0.0) & (before <= target))
    return lane, target - p.shuffle(before, "idx", lane)


def draw_from_part(
    p: RowProgram, kept: Kept, cta: Value, target: Value, least: Value, all_drawn: Value, by_least: Value
) -> tuple[Value, Value]:
    """Returns the position of the drawn entry, and the entry as a float; called in CTA `cta`, where the target lies.

    `target` is the kept mass of the CTA up to the entry, and `least` is the least mass that min_p keeps. The words of
    the warps hold their kept mass if the filters leave nothing out (`all_drawn`) or min_p was applied last
    (`by_least`). Otherwise the CTA adds it up.
    """
    equal, equal_kept = p.shuffle(kept.equal, "idx", cta), p.shuffle(kept.equal_kept, "idx", cta)
    none_kept, all_kept = equal_kept.equals(0), equal_kept.equals(equal)
    least_key = p.select(all_kept, kept.key, kept.key + 1)
    position, element = p.fresh("s32"), p.fresh("f32")

    def find(weight, masses):
        for register, value in zip((position, element), _find(p, weight, masses, target)):
            p.set(register, value)

    # Comparing floats suffices unless only some ties are kept, or +0 is kept and -0 is not.
    is_simple = p.var((all_kept | none_kept) & least_key.differs(0))
    with p.when(is_simple):
        bound = p.select(kept.key.equals(KEEP_ALL), -INF, p.of_key(least_key))

        def weight_from_bound(x, _):
            weight = p.weight(x)
            return weight, (x >= bound) & (weight >= least)

        masses = p.var(0, "f32")
        with p.when(all_drawn):
            m, d = p.words_of_warp(["f32", "f32"], [-INF, 0])  # of `arrival_ptx`
            p.set(masses, d * p.exp2((p.max(m, LEAST_FINITE) - p.top) * p.scale))
        with p.when(by_least):
            p.set(masses, p.words_of_warp(["f32"], [0])[0])
        with p.when(~(all_drawn | by_least)):
            p.set(masses, _masses_of_warps(p, weight_from_bound))
        find(weight_from_bound, masses)
    with p.when(~is_simple):
        # From position `cut` on, entries with the last key are left out.
        cut = p.var(_EVERYWHERE, "s32")
        with p.when(~all_kept):
            p.set(cut, 0)
        with p.when(~all_kept & ~none_kept):

            def one_if_equal(x, _):
                return p.var(1.0, "f32"), p.key(x).equals(kept.key)

            equals = _masses_of_warps(p, one_if_equal)
            last, _ = _find(p, one_if_equal, equals, p.convert(equal_kept, "f32"))
            p.set(cut, last)
            p.barrier()

        def kept_weight(x, position):
            weight, key = p.weight(x), p.key(x)
            equal = key.equals(kept.key) & (position < cut)
            return weight, ((key > kept.key) | equal) & (weight >= least)

        find(kept_weight, _masses_of_warps(p, kept_weight))
    return position, element


def _find(p: RowProgram, weight: Weight, of_warps: Value, target: Value) -> tuple[Value, Value]:
    """Returns the last element that has mass and no more than `target` before it: its position, and the element.

    `of_warps` has the mass of each warp, in the lane with its number.
    """

    def go_on(mass):
        return choose(p, mass, p.scan(mass)[0], target)

    warp, target = go_on(of_warps)

    # The warps of the CTA share the loads of that warp, one load each at a time.
    span, loads = p.span_of(warp)
    masses = p.plan.drawn + LANES
    with p.each(p.warp, loads.bits("u32"), p.warps) as load:
        at = span + load * WARP_LOAD_BYTES
        of_lane = p.reduce("add", _masses(p, weight, p.vector(at), at))
        p.store(p.word(masses, load), *p.over_warp(["add"], [of_lane]), when=p.first_lane)
    p.barrier()
    inside = p.lane < loads.bits("u32")
    load, target = go_on(p.load(p.word(masses, p.lane), "f32", when=inside, default=0))

    at = span + load * WARP_LOAD_BYTES
    words = p.vector(at)
    of_elements = _masses(p, weight, words, at)
    lane, target = go_on(p.reduce("add", of_elements))
    elements = p.floats(words)
    before, number, element = p.var(0, "f32"), p.var(0, "s32"), p.var(elements[0])
    for i, (x, mass) in enumerate(zip(elements, of_elements)):
        reached = (mass > 0.0) & (before <= target)
        p.set(number, i, reached)
        p.set(element, x, reached)
        p.increase(before, mass)
    position = _position_of(p, at) + number
    return p.shuffle(position, "idx", lane), p.shuffle(element, "idx", lane)


def _masses_of_warps(p: RowProgram, weight: Weight) -> Value:
    """Returns the mass of each warp of the CTA, in the lane with its number."""
    drawn, of_thread = p.plan.drawn, p.add_up(lambda words, address: _weights(p, weight, words, address))
    p.store(p.word(drawn, p.warp), *p.over_warp(["add"], [of_thread]), when=p.first_lane)
    p.barrier()
    return p.load(p.word(drawn, p.lane), "f32", when=p.lane < p.warps, default=0)


def _weights(p: RowProgram, weight: Weight, words: list[Value], address: Value) -> list[tuple[Value, Value]]:
    """Returns weight(element, position) for each element of words that were loaded at once from an address."""
    first, vec = _position_of(p, address), p.plan.window.vec
    return [weight(x, first + (i // vec * LANES * vec + i % vec)) for i, x in enumerate(p.floats(words))]


def _masses(p: RowProgram, weight: Weight, words: list[Value], address: Value) -> list[Value]:
    """Returns the mass of each element of the words; 0 for elements that do not count."""
    return [p.select(counts, one, 0.0) for one, counts in _weights(p, weight, words, address)]


def _position_of(p: RowProgram, address: Value) -> Value:
    """Returns the position of the element at an address; positions count in the part."""
    return ((address - p.x) >> (p.elements.itemsize.bit_length() - 1)).bits("s32")
