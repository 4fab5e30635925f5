"""Writes the program of inline PTX for a row of logits, once the row has arrived in a cluster of CTAs.

It finds what the filters keep of the row, and then draws, or writes where they cut the row.

    part of the program                   function                  exchanges over the cluster
    the row's maximum and its mass        arrival_ptx.arrive        1
    the filters: top_k, top_p, min_p      _apply_filters            1 for min_p, if it is stricter than the others
      the last entry that a filter keeps
        bfloat16                            histogram_ptx             1
        float32, float16                    histogram_ptx             1
          in the zone where it is expected    zone_ptx                1; after an overflow 1 more to count the greater
                                                                      of two keys, or 2 for a better bound
        where that is not enough            filter_ptx                1 for every 7 bits of the keys' range, then 1
                                                                      more (bfloat16: 3 more)
    the index of the last kept entry      winner_ptx.find_last_tie  0
    the draw                              winner_ptx.WinnerSearch   1; 1 more in 1 of 1,600 rows

All of them use `row_ptx` (elements, sums over warps, CTAs and clusters) and the words of `plan.SCRATCH`. The mass of
an element x is exp((x - top) / temperature), where top is the largest element of the row; the program takes it as a
power of 2. Every decision rests on integers, or on sums in a fixed order. So a draw has the same bits each time.

The filters have one search, in a loop. Each turn looks for the last entry that one filter keeps. The stage says which
filter, and where the entry is looked for:

    small top_k ──► TOP_K_BOUND ────┬──► TOP_P_REUSE ─────────┐
                      │ overflow    │                         │
                      ▼             │                         │
                    TOP_K_BEST ─────┘                         ├──► draw
                      │ overflow                              │
                      ▼                                       │
    otherwise ────► TOP_K ─────────────► TOP_P ───────────────┘

    stage          goal                              where
    TOP_K_BOUND    top_k entries                     among the elements that reach a bound of all CTAs
    TOP_K_BEST     top_k entries                     among the elements that reach the bound of the best CTA
    TOP_K          top_k entries                     in the row, by a histogram
    TOP_P          the share top_p of the kept mass  in the row, by a histogram
    TOP_P_REUSE    the share top_p of the kept mass  in what the last turn made: lists, or the histogram of bfloat16

After the loop, `_apply_min_p` applies min_p where it is stricter than the other filters.
"""

import functools
from collections.abc import Callable

from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import arrival_ptx, histogram_ptx, zone_ptx
from pallas_softmax._src.sample.filter_ptx import FilterSearch, Kept
from pallas_softmax._src.sample.noise_ptx import log
from pallas_softmax._src.sample.plan import SCRATCH, SamplePlan
from pallas_softmax._src.sample.race_ptx import Noise
from pallas_softmax._src.sample.row_ptx import HIGHEST, INF, KEEP_ALL, LEAST_FINITE, LN2, TINY, PartProgram
from pallas_softmax._src.sample.winner_ptx import WinnerSearch, find_last_tie

# The stages, in this order: after an overflow the next one follows, and those after TOP_P use the lists again.
TOP_K_BOUND, TOP_K_BEST, TOP_K, TOP_P, TOP_P_REUSE, DONE = range(6)

_NAN = float("nan")
_LEAST_GOAL = 1e-37  # so that even a top_p of 0 keeps one entry


@functools.lru_cache(maxsize=16)  # writing the program takes half a second
def draw_program(plan: SamplePlan, dtype, stride: int) -> PartProgram:
    """Returns the program that draws from a row; a part is at <x>, where missing and masked elements are -inf.

    It has the operands of `PartProgram`, the number of the row, <row>, `NOISE_OPERANDS`, and addresses in device
    memory of the results <index>, <log_prob> and <log_mass>. `stride` belongs to the noise.
    """
    return _program(
        plan, dtype, lambda p, kept, total: _draw(p, kept, total, Noise.of_row(p, stride)), _draw_nothing
    )


@functools.lru_cache(maxsize=16)
def cutoff_program(plan: SamplePlan, dtype) -> PartProgram:
    """Returns the program that finds the cutoff of a row, with results <key>, <index>, <top>, <log_total>, <log_mass>.

    Otherwise it is like `draw_program`, without noise.
    """
    return _program(plan, dtype, _write_cutoff, _write_no_cutoff)


def _program(
    plan: SamplePlan, dtype, finish: Callable[..., None], write_nothing: Callable[..., None]
) -> PartProgram:
    """Returns the program that applies the filters, and ends with finish(p, kept, total).

    In a row without a draw, write_nothing(p) takes the place of the filters and of the end.
    """
    p = PartProgram(plan, dtype)
    p.barrier()
    total, small_top_k, bound = arrival_ptx.arrive(p)
    p.tempered_top = p.divide_exactly(p.top, p.max(p.temperature, TINY))
    p.update(p.greedy, "or", p.absolute(p.tempered_top).equals(INF))
    p.keep_first(p.greedy)
    drawable = (p.absolute(p.top) < INF) & (p.temperature >= 0.0)
    with p.when(~drawable):
        write_nothing(p)
    with p.when(drawable):
        kept = Kept(p, total)
        _apply_filters(p, kept, total, small_top_k, bound)
        _apply_min_p(p, kept)
        finish(p, kept, total)
    return p


def _draw(p: PartProgram, kept: Kept, total: Value, noise: Noise) -> None:
    """Draws, and writes the results of the draw."""
    if p.plan.by_value:
        p.sync_cluster()  # other CTAs may still read the histogram, and lists of positions overwrite it
    _, last_tie, _ = find_last_tie(p, kept)
    index, x = WinnerSearch(p, noise, kept, last_tie).run()
    with p.writes(0) as write:
        log_prob = (x - p.top) * p.octaves_per_unit * LN2 - log(p, total)
        write(index=index, log_prob=log_prob, log_mass=p.max(_log_mass(p, kept, total), log_prob))


def _write_cutoff(p: PartProgram, kept: Kept, total: Value) -> None:
    """Writes the cutoff of the row."""
    cta, last_tie, is_cut = find_last_tie(p, kept)
    with p.writes(cta) as write:
        index = p.select(is_cut, last_tie + p.origin, HIGHEST)
        key, log_mass = p.key_of_dtype(kept.key), _log_mass(p, kept, total)
        write(key=key, index=index, top=p.top, log_total=log(p, total), log_mass=log_mass)


def _apply_filters(p: PartProgram, kept: Kept, total: Value, small_top_k: Value, bound: Value) -> None:
    """Applies top_k and top_p in turn to `kept`."""
    stage = p.select(p.top_p < 1.0, TOP_P, DONE, "u32")
    stage = p.select(p.top_k < p.plan.window.vocab, TOP_K, stage)
    stage = p.var(p.select(small_top_k, TOP_K_BOUND, stage))
    bound, zone = p.var(p.max(bound, LEAST_FINITE)), zone_ptx.Zone(p)
    with p.loop() as leave:
        leave(stage.equals(DONE))
        is_mass = stage.equals(TOP_P) | stage.equals(TOP_P_REUSE)
        mass_goal = p.max(p.top_p * kept.mass, _LEAST_GOAL)
        goal = p.var(p.select(is_mass, mass_goal, p.convert(p.top_k, "f32")))
        f = FilterSearch(p, kept, goal, is_mass)
        if p.plan.by_value:
            can_reuse = histogram_ptx.search_values(f, stage.equals(TOP_P_REUSE))
            top_p = p.select(can_reuse, TOP_P_REUSE, TOP_P, "u32")
            p.set(stage, p.select(stage.equals(TOP_K) & (p.top_p < 1.0), top_p, DONE))
        else:
            _search_zones(f, stage, total, bound, zone)


def _search_zones(f: FilterSearch, stage: Value, total: Value, bound: Value, zone: zone_ptx.Zone) -> None:
    """Runs one turn for float32 or float16, and sets the stage of the next turn; for TOP_K_BEST also a better bound."""
    p = f.p
    overflow = p.var(False, "pred")
    with p.when(stage <= TOP_K_BEST):
        p.set(overflow, zone_ptx.sweep_from_bound(p, zone, bound))
    with p.when(overflow & stage.equals(TOP_K_BOUND)):
        p.set(bound, p.max(bound, arrival_ptx.bound_of_best(p)))
    with p.when(stage.equals(TOP_K) | stage.equals(TOP_P)):
        zone_ptx.sweep_between(f, zone, *histogram_ptx.expected_zone(f, total))
    with p.when(~overflow):
        zone_ptx.search_zone(f, zone, searched=stage > TOP_P)
        p.set(f.kept.listed, zone.has_room, when=stage <= TOP_K_BEST)

    from_bound, by_mass = stage <= TOP_K_BEST, p.top_p < 1.0
    following = p.select(by_mass & from_bound, TOP_P_REUSE, DONE, "u32")
    following = p.select(by_mass & stage.equals(TOP_K), TOP_P, following)
    p.set(stage, p.select(overflow, stage + 1, following))


def _apply_min_p(p: PartProgram, kept: Kept) -> None:
    """Applies min_p to `kept`, if it is stricter than the other filters."""
    has_min_p = p.mass(p.from_key(kept.key)) >= p.min_p
    all_have_min_p = has_min_p & kept.key.differs(KEEP_ALL)
    with p.when((p.min_p > 0.0) & ~all_have_min_p):
        mass, least = p.var(0, "f32"), p.var(HIGHEST, "s32")

        def add(x):
            mass_of_one = p.mass(x)
            p.increase(mass, mass_of_one, when=mass_of_one >= p.min_p)
            p.update(least, "min", p.key(x), when=mass_of_one >= p.min_p)

        p.sweep_elements(add)
        of_ctas = p.over_each_cta(["add", "min"], [mass, least], [0.0, HIGHEST], p.word(SCRATCH.counted))
        mass, least = p.over_warp(["add", "min"], of_ctas)
        kept.all_down_to(least, mass)


def _log_mass(p: PartProgram, kept: Kept, total: Value) -> Value:
    """Returns the log of the kept share of the mass."""
    return p.select(kept.key.equals(KEEP_ALL), 0.0, log(p, p.min(p.divide(kept.mass, total), 1.0)))


def _draw_nothing(p: PartProgram) -> None:
    """Writes the results of a row without a draw."""
    nan = p.var(_NAN, "f32")
    with p.writes(0) as write:
        write(index=p.var(-1, "s32"), log_prob=nan, log_mass=nan)


def _write_no_cutoff(p: PartProgram) -> None:
    """Writes the cutoff of a row without a draw."""
    nan = p.var(_NAN, "f32")
    with p.writes(0) as write:
        write(key=p.var(HIGHEST, "s32"), index=p.var(-1, "s32"), top=p.top, log_total=nan, log_mass=nan)
