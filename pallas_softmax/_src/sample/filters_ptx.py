"""Applies the filters one after another: top_k, then top_p to what top_k keeps, then min_p.

The program has one search, in a loop. Each turn looks for the last entry that one filter keeps. The stage says which
filter, and where the entry is looked for:

    stage          goal                              where
    TOP_K_BOUND    top_k entries                     among the elements that reach a bound of all CTAs
    TOP_K_BEST     top_k entries                     among the elements that reach the bound of the best CTA
    TOP_K          top_k entries                     in the row, by a histogram
    TOP_P          the share top_p of the kept mass  in the row, by a histogram
    TOP_P_REUSE    the share top_p of the kept mass  in what the last turn made: lists, or the histogram of bfloat16
    MIN_P          as many entries as min_p keeps    in the lists

A turn follows if its filter is on. With lists, MIN_P follows only if min_p is stricter than the other filters:

    small top_k ──► TOP_K_BOUND ──────┬──► TOP_P_REUSE ──► MIN_P ──► DONE       the lists hold everything that is kept
                      │ lists overflow│
                      ▼               │
                    TOP_K_BEST ───────┘
                      │ lists overflow
                      ▼
    otherwise ────► TOP_K ───────────────► TOP_P ──► DONE                       TOP_P_REUSE, if the histogram is there

After the loop, `least_weight` applies min_p where it is still stricter than the other filters.
"""

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import distances_ptx, lists_ptx, values_ptx, zone_ptx
from pallas_softmax._src.sample.arrival_ptx import bound_of_best
from pallas_softmax._src.sample.row_ptx import KEEP_ALL, LEAST_FINITE, RowProgram
from pallas_softmax._src.sample.search_ptx import FilterSearch, Kept

TOP_K_BOUND, TOP_K_BEST, TOP_K, TOP_P, TOP_P_REUSE, MIN_P, DONE = range(7)

_LEAST_GOAL = 1e-37  # so that even a top_p of 0 keeps one entry


def apply_filters(p: RowProgram, kept: Kept, total: Value, small_top_k: Value, bound: Value) -> None:
    """Applies top_k, then top_p. Applies min_p after them if the lists hold everything that is kept.

    Args:
      kept: what is kept, everything at first; this changes it.
      total: the mass of the row.
      small_top_k: whether top_k is small, at most `arrival_ptx.largest_small_top_k`.
      bound: if so, an element that at least top_k elements reach.
    """
    stage = p.select(p.top_p < 1.0, TOP_P, DONE, "u32")
    stage = p.select(p.top_k < p.plan.window.vocab, TOP_K, stage)
    stage = p.var(p.select(small_top_k, TOP_K_BOUND, stage))
    bound, zone = p.var(p.max(bound, LEAST_FINITE)), lists_ptx.Zone(p)
    with p.loop() as leave:
        leave(stage.equals(DONE))
        is_mass = stage.equals(TOP_P) | stage.equals(TOP_P_REUSE)
        _, all_kept = p.before(kept.mass)
        of_mass = p.max(p.top_p * all_kept, _LEAST_GOAL)
        goal = p.var(p.select(is_mass, of_mass, p.convert(p.top_k, "f32")))
        f = FilterSearch(p, kept, goal, is_mass)
        if p.plan.by_value:
            stays = values_ptx.search_values(f, stage.equals(TOP_P_REUSE))
            top_p = p.select(stays, TOP_P_REUSE, TOP_P, "u32")
            p.set(stage, p.select(stage.equals(TOP_K) & (p.top_p < 1.0), top_p, DONE))
        else:
            _search_lists(f, stage, total, bound, zone)


def _search_lists(f: FilterSearch, stage: Value, total: Value, bound: Value, zone: lists_ptx.Zone) -> None:
    """Runs a turn for float32 and float16, and sets the stage to the next one. TOP_K_BEST gets a better `bound`."""
    p = f.p
    overflow = p.var(False, "pred")
    with p.when(stage <= TOP_K_BEST):
        p.set(overflow, zone_ptx.sweep_from_bound(p, zone, bound))
    with p.when(overflow & stage.equals(TOP_K_BOUND)):
        p.set(bound, p.max(bound, bound_of_best(p)))
    with p.when(stage.equals(TOP_K) | stage.equals(TOP_P)):
        zone_ptx.sweep_between(f, zone, *distances_ptx.edges(f, total))
    with p.when(stage.equals(MIN_P)):
        p.set(f.goal, lists_ptx.number_from_min_p(p, zone))
    with p.when(~overflow):
        zone_ptx.search_zone(f, zone, searched=stage > TOP_P)

    of_bound, by_mass = stage <= TOP_K_BEST, p.top_p < 1.0
    is_stricter = zone.has_room & (p.weight(p.of_key(f.kept.key)) < p.min_p)
    following = p.select(is_stricter & (of_bound | stage.equals(TOP_P_REUSE)), MIN_P, DONE, "u32")
    following = p.select(by_mass & of_bound, TOP_P_REUSE, following)
    following = p.select(by_mass & stage.equals(TOP_K), TOP_P, following)
    p.set(stage, p.select(overflow, stage + 1, following))


def least_weight(p: RowProgram, kept: Kept) -> tuple[Value, Value]:
    """Returns the least mass that min_p keeps, and whether min_p is stricter than the other filters.

    If min_p is stricter, `kept` becomes what it keeps, and the words of the warps hold their kept mass. Otherwise the
    least mass is 0.
    """
    least = p.var(0, "f32")
    is_kept = p.weight(p.of_key(kept.key)) >= p.min_p
    enough = is_kept & kept.key.differs(KEEP_ALL)
    is_stricter = p.var((p.min_p > 0.0) & ~enough)
    with p.when(is_stricter):
        p.set(least, p.min_p)
        sums = [p.var(0, "f32") for _ in range(4)]

        def add(words, _):
            for i, x in enumerate(p.floats(words)):
                weight = p.weight(x)
                p.increase(sums[i % 4], weight, weight >= least)

        p.sweep(add)
        kept.down_to_the_last(*p.each_cta(["add"], [p.reduce("add", sums)], [0.0], p.plan.least))
    return least, is_stricter
