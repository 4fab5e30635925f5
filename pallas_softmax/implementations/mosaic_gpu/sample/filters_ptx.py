"""The filters, one after another: top_k, then top_p of what that keeps, then min_p."""

from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Value
from pallas_softmax.implementations.mosaic_gpu.sample import distances_ptx, values_ptx, zone_ptx
from pallas_softmax.implementations.mosaic_gpu.sample.row_ptx import KEEP_ALL, LOWEST, Row
from pallas_softmax.implementations.mosaic_gpu.sample.search_ptx import Kept, Search

_LEAST_GOAL = 1e-37  # so that one entry is kept, even of a top_p of 0


def search(
    p: Row,
    kept: Kept,
    total: Value,
    top_k: Value,
    by_number: Value,
    top_p: Value,
    by_mass: Value,
    few: Value,
    bound: Value,
) -> None:
    """Keeps what top_k keeps, where `by_number` holds, and of that what top_p keeps, where `by_mass` does.

    The text of a search is there once, in a loop that runs for each of both. If top_k is small, `few`, all of what it
    keeps is not below `bound`, and so a zone from there to the largest has what both search. If that is too much, as of
    a sorted row, whose bound is of its least CTA, the loop runs once more, and then without the bound.
    """
    counted, again, few = p.var(p.lane < 0), p.var(p.lane < 0), p.var(few)
    is_mass, left = p.var(~by_number), p.var(by_number | by_mass)
    low, high = p.var(p.max(bound, LOWEST)), p.var(p.top)
    with p.loop() as leave:
        leave(~left)
        _, all_kept = p.before(kept.mass)
        goal = p.select(is_mass, p.max(top_p * all_kept, _LEAST_GOAL), p.convert(top_k, "f32"))
        f = Search(p, kept, goal, is_mass)
        if p.layout.by_value:
            values_ptx.search(f, counted)
        else:
            with p.when(~few):
                for edge, found in zip((low, high), distances_ptx.zone(f, total)):
                    p.set(edge, found)
            p.set(again, zone_ptx.search(f, low, high, few))
            p.set(few, few & ~again)
        p.set(left, again | (by_mass & ~is_mass))
        p.set(is_mass, left & ~again)  # if it runs again
        with p.when(few & left):
            p.set(low, p.max(p.of_key(kept.key), LOWEST))
            p.meet()  # others may still read the lists


def least_weight(p: Row, kept: Kept, min_p: Value, by_weight: Value) -> tuple[Value, Value]:
    """Returns the least mass that min_p keeps; where it is stricter than the others, `kept` becomes what it keeps.

    The second result is whether it is: then the last sum over the CTA was of what is kept.
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
        p.over_cta(["add"], [p.reduce("add", sums)], [0.0], p.layout.least)
        p.meet()
        kept.down_to_the_last(p.of_ctas(p.layout.least, 1)[0].bits("f32"))
    return least, is_stricter
