"""Applies the filters one after another: top_k, then top_p to what top_k keeps, then min_p."""

import dataclasses

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import distances_ptx, lists_ptx, values_ptx, zone_ptx
from pallas_softmax._src.sample.arrival_ptx import bound_of_best
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch, Kept

_LEAST_GOAL = 1e-37  # so that even a top_p of 0 keeps one entry


@dataclasses.dataclass(frozen=True)
class Filters:
    """The filters of a row.

    Attributes:
      top_k, top_p, min_p: their parameters.
      by_number, by_mass, by_weight: conditions: whether top_k, top_p and min_p filter anything.
    """

    top_k: Value
    by_number: Value
    top_p: Value
    by_mass: Value
    min_p: Value
    by_weight: Value


def apply_filters(
    p: RowProgram, kept: Kept, total: Value, filters: Filters, small_top_k: Value, bound: Value
) -> None:
    """Applies top_k, then top_p. Applies min_p after them if the lists hold everything that is kept.

    The text has one search, in a loop that runs once for each filter. The goals of its turns are:

        top_k                    a number of entries
        top_p   `is_mass`        a share of the kept mass
        min_p   `is_weight`      how many keys in the lists min_p keeps; only if the lists hold everything that is kept

    If top_k is small, everything that it keeps reaches `bound`. So a zone from `bound` up (`from_bound`) holds
    everything that any filter keeps, and its lists are made once. If these lists overflow (in a sorted row, the weakest
    CTA sets the bound), the turn of top_k runs again (`retry`) with the bound of the best CTA. If they still overflow,
    it runs again without a bound.

    Args:
      kept: what is kept, everything at first; this changes it.
      total: the mass of the row.
      filters: the filters.
      small_top_k: whether top_k is small, at most `arrival_ptx.largest_small_top_k`.
      bound: if so, an element that at least top_k elements reach.
    """
    counted, is_weight, is_best = (p.var(False, "pred") for _ in range(3))
    is_mass, from_bound = p.var(~filters.by_number), p.var(small_top_k)
    pending = p.var(filters.by_number | filters.by_mass)
    low, high = p.var(p.max(bound, LEAST_FINITE)), p.var(p.top)
    zone = lists_ptx.zone_of(p)
    with p.loop() as leave:
        leave(~pending)
        _, all_kept = p.before(kept.mass)
        of_mass = p.max(filters.top_p * all_kept, _LEAST_GOAL)
        goal = p.var(p.select(is_mass, of_mass, p.convert(filters.top_k, "f32")))
        retry, to_weight = (p.var(False, "pred") for _ in range(2))
        f = FilterSearch(p, kept, goal, is_mass)
        if p.plan.by_value:
            values_ptx.search_values(f, counted)
        else:
            with p.when(is_weight):
                p.set(goal, lists_ptx.number_from(p, zone, filters.min_p))
            with p.when(~from_bound):
                for edge, found in zip((low, high), distances_ptx.zone(f, total)):
                    p.set(edge, found)
            p.set(retry, zone_ptx.search_zone(f, zone, low, high, from_bound))
            p.set(from_bound, from_bound & ~(retry & is_best))
            with p.when(retry & from_bound):
                p.set(low, p.max(low, bound_of_best(p, filters.top_k)))
                p.set(is_best, True)
            p.set(zone.known, zone.known & from_bound)
            is_first = filters.by_weight & zone.known & lists_ptx.have_room(p, zone) & ~is_weight
            p.set(to_weight, is_first & (p.weight(p.of_key(kept.key)) < filters.min_p))
        to_mass = p.var(filters.by_mass & ~is_mass & ~is_weight & ~retry)
        p.set(is_weight, to_weight & ~to_mass)
        p.set(is_mass, to_mass)
        p.set(pending, retry | is_mass | is_weight)
        with p.when(from_bound & pending & ~zone.known & ~retry):
            p.sync_cluster()  # other CTAs may still read the sums of this CTA over the zone


def least_weight(p: RowProgram, kept: Kept, min_p: Value, by_weight: Value) -> tuple[Value, Value]:
    """Returns the least mass that min_p keeps, and whether min_p is stricter than the other filters.

    If min_p is stricter, `kept` becomes what it keeps, and the last sum over the CTA is the kept mass. Otherwise the
    least mass is 0.
    """
    least = p.var(0, "f32")
    is_kept = p.weight(p.of_key(kept.key)) >= min_p
    enough = is_kept & kept.key.differs(KEEP_ALL)
    is_stricter = p.var(by_weight & ~enough)
    with p.when(is_stricter):
        p.set(least, min_p)
        sums = [p.var(0, "f32") for _ in range(4)]

        def add(words, _):
            for i, x in enumerate(p.floats(words)):
                weight = p.weight(x)
                p.increase(sums[i % 4], weight, weight >= least)

        p.sweep(add)
        p.over_cta(["add"], [p.reduce("add", sums)], [0.0], p.plan.least)
        p.sync_cluster()
        kept.down_to_the_last(p.of_ctas(p.plan.least, 1)[0].bits("f32"))
    return least, is_stricter
