"""The kernels of `sample`, which read each row once from device memory.

`stream_kernel` has the one for rows without filters and mask. In the other one, a row lies in the shared memory of a
cluster of CTAs, one part in each CTA. The example has top_k = 4, and the temperature t = log2(e) = 1.44, which makes
the masses powers of two:

    index                 0     1     2     3  |  4     5     6     7       two CTAs, with four elements each
    x                     3     5     0     4  |  5     1     4     4
                                                                            arrival     the maximum of the row is 5
    mass, 2^(x - 5)      .25    1   .03    .5  |  1   .06    .5    .5                   the total mass is 3.84
                                                                            filters     the 4th largest is a 4:
    kept                  -     1     -    .5  |  1     -    .5     -                   two of the 4s are kept
    kept mass                1.5               |        1.5                             the kept mass is 3
    x / t                 -   3.5     -   2.8  | 3.5    -   2.8     -
    noise                 -   -.1     -   1.2  |  .3    -    .1     -       draw        the largest sum is 4.0,
    sum                       3.4         4.0  | 3.8        2.9                         so index 3 is drawn
                                          ^
    results               log_prob = log(.5 / 3.84), log_mass = log(3 / 3.84)

The first warpgroup of a CTA starts the bulk copies of the part, one step for each warpgroup. Each warpgroup waits for
its own step and masks it. `SamplePlan` shows the steps and the warps. Then one program of inline PTX does the rest:

    part of the program                   function                  exchanges over the cluster
    the row's maximum and its mass        row_ptx.arrive            1
    the filters top_k and top_p           _apply_filters
      the last entry that a filter keeps
        bfloat16                            filter_ptx.search_values  1; 0 in TOP_P_REUSE
        float32, float16                    zone_ptx.expected_zone    0
          the keys in this zone               zone_ptx.sweep_*        1; 2 more for a bound of the best CTA
          the last entry among them           zone_ptx.search_zone    0; 1 if the lists overflow with two keys
        where that is not enough            filter_ptx.search_digits  1 for every 7 bits of the keys' range, then 1
                                                                      more (bfloat16: 3 more)
    the filter min_p                      _apply_min_p              1, if it is stricter than the others
    the index of the last kept entry      filter_ptx.find_last_tie  0
    the draw                              race_ptx.WinnerSearch     1 (bfloat16: 2); 1 more in 1 of 1,600 rows

The mass of an element x is exp((x - top) / temperature), where top is the largest element of the row. The program takes
it as a power of 2. Decisions rest on integers, or on sums in a fixed order. So a draw has the same bits each time.

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

Stages of absent filters are skipped. bfloat16 never starts at a bound; after TOP_K it takes TOP_P_REUSE, if the
histogram told the last entry, and TOP_P otherwise. `row_ptx.arrive` finds the bounds. After the loop, `_apply_min_p`
applies min_p where it is stricter than the other filters.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import fold_mask, fold_numbers, fold_topk, one_per_row
from pallas_softmax._src.gpu import checks, window_arrival
from pallas_softmax._src.gpu.interpreter import interpret, twin
from pallas_softmax._src.gpu.kernel import gpu_kernel, number_of_row
from pallas_softmax._src.gpu.layout import Window, aligned_view
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import row_ptx, stream_kernel, zone_ptx
from pallas_softmax._src.sample.filter_ptx import FilterSearch, Kept, find_last_tie, search_values
from pallas_softmax._src.sample.plan import SCRATCH, SamplePlan, StreamPlan, plan_sample, plan_stream
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS, WinnerSearch, log, log_prob_of
from pallas_softmax._src.sample.row_ptx import DRAWN, HIGHEST, INF, KEEP_ALL, PartProgram
from pallas_softmax._src.sample.rows import Cutoff

# The results of a cutoff, by their names in the program.
_OF_CUTOFF = dict.fromkeys(Cutoff._fields, jnp.float32) | dict.fromkeys(("key", "index"), jnp.int32)

# The stages. Their order counts: those up to TOP_K_BEST start from a bound, the next one follows after an overflow, and
# those after TOP_P use what the last turn made.
TOP_K_BOUND, TOP_K_BEST, TOP_K, TOP_P, TOP_P_REUSE, DONE = range(6)

_NAN = float("nan")
_LEAST_GOAL = 1e-37  # so that even a top_p of 0 keeps one entry
_PARAMETERS = "temperature", "top_k", "top_p", "min_p"


def sample_rows(
    plan: SamplePlan, logits, where, temperature, top_k, top_p, min_p, words=None, stride: int | None = None
) -> list:
    """Returns the results of `xla.sample`, or without words and stride the fields of `xla.cutoff`.

    `words` (rows, 4) are the random key and the first counter of each row (`noise.py`). Parameters are (..., 1), one
    element, or None.
    """
    *batch, vocab = logits.shape
    # with the number of each filter that filters nothing
    filters = (top_k, vocab, jnp.int32), (top_p, 1, jnp.float32), (min_p, 0, jnp.float32)
    numbers = [jnp.asarray(off if a is None else a, dtype) for a, off, dtype in filters]
    parameters = [one_per_row(a, (*batch,)) for a in (temperature, *numbers)]
    x, mask = logits.reshape(-1, vocab), fold_mask(where, logits.shape, len(batch))
    rows, window = len(x), plan.window
    names = _OF_CUTOFF if words is None else DRAWN

    def sample(x_gmem, parameters_gmem, words_gmem, mask_gmem, *out, arrived, scratch, x_smem, barrier: Any = None):
        part = window_arrival.part_of(window, x_gmem, mask, mask_gmem)
        row = part.place.row
        # These loads are in flight while the part arrives, so that no thread waits for them afterwards.
        parameters = {name: number_of_row(ref, row) for name, ref in zip(_PARAMETERS, parameters_gmem)}
        words = [] if words_gmem is None else [words_gmem[row, i] for i in range(4)]
        _copy_and_mask(window, part, x_smem, arrived, barrier)
        refs = {"x": x_smem, "scratch": scratch, **dict(zip(names, out))}
        _run_program(plan, stride, part, refs, parameters, dict(zip(NOISE_OPERANDS, words)), barrier)

    results = gpu_kernel(
        sample,
        name="filter_cutoff" if words is None else "sample",
        grid={"row": rows, "part": window.count},
        cluster=window.count,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in names.values()],
        scratch_types={
            "arrived": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "scratch": plgpu.SMEM((plan.words,), jnp.int32),
            "x_smem": plgpu.SMEM((window.smem_size,), x.dtype),
            **({"barrier": plgpu.Barrier(num_arrivals=plan.warpgroups)} if interpret() else {}),
        },
    )(x.reshape(aligned_view(rows, vocab, window.vec)), parameters, words, None if mask is None else mask.array)
    return [result.reshape(*batch, 1) for result in results]


@twin
def _run_program(plan: SamplePlan, stride, part: window_arrival.WindowPart, refs, parameters, words, barrier):
    del barrier  # the interpreter synchronizes the warpgroups by it
    numbers = row_ptx.row_operands(part.place.row, part.place.index, parameters["temperature"])
    numbers = parameters | numbers | words | {"start": jnp.int32(part.place.start), "shift": part.shift}
    insert_ptx(row_program(plan, refs["x"].dtype, stride), refs, numbers)


def _copy_and_mask(window: Window, part: window_arrival.WindowPart, x_smem, arrived, barrier) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def start():
        window_arrival.start_copies(window, part, x_smem, arrived)
        window_arrival.fill_tail(window, part, x_smem, infinite=True)

    def wait_for(step):
        pl.when(step < len(window.copies()))(lambda: plgpu.barrier_wait(arrived.at[step]))

    def mask(blocks):
        keep = window_arrival.mask_of_step(window, part, warpgroup)[:blocks]
        window_arrival.mask_step(window, part, x_smem, warpgroup, [*keep], infinite=True)

    wait_for(warpgroup)
    if part.mask is not None:
        if window.shifted:  # the step ends in the next copy
            wait_for(warpgroup + 1)
        if interpret():  # `mask_step` rewrites whole steps there, including what `fill_tail` wrote
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        if window.full:
            pl.when(warpgroup < window.full)(functools.partial(mask, window.step_blocks))
        if window.rest:
            pl.when(warpgroup == window.full)(functools.partial(mask, window.rest))


# --- The program of inline PTX


@functools.lru_cache(maxsize=16)  # writing the program takes half a second
def row_program(plan: SamplePlan, dtype, stride: int | None) -> PartProgram:
    """Returns the program that draws from a row; if the stride of the noise is None, it finds the cutoff.

    A part is at <x>, where missing and masked elements are -inf. <row> is the number of the row. `PartProgram` has
    further operands, and a draw has `NOISE_OPERANDS`. The results, `DRAWN` or `_OF_CUTOFF`, are addresses in
    device memory.
    """
    p = PartProgram(plan, dtype)
    total, small_top_k, bound = row_ptx.arrive(p)
    drawable = (p.absolute(p.top) < INF) & (p.temperature >= 0.0)
    with p.when(~drawable):
        nan = p.var(_NAN, "f32")
        with p.writes(0) as write:
            if stride is None:
                key, index = p.var(HIGHEST, "s32"), p.var(-1, "s32")
                write(key=key, index=index, top=p.top, log_total=nan, log_mass=nan)
            else:
                write(index=p.var(-1, "s32"), log_prob=nan, log_mass=nan)
    with p.when(drawable):
        kept = Kept(p, total)
        _apply_filters(p, kept, small_top_k, bound)
        _apply_min_p(p, kept)
        if stride is None:
            _write_cutoff(p, kept)
        else:
            _draw(p, kept, stride)
    return p


def _write_cutoff(p: PartProgram, kept: Kept) -> None:
    cta, last_tie, is_cut = find_last_tie(p, kept)
    with p.writes(cta) as write:
        index, key = p.select(is_cut, last_tie + p.start, HIGHEST), kept.last_key
        if p.elements.name == "f16":  # its `p.key` is not its sort key
            bits = p.convert(p.convert(p.from_key(key), "f16").bits("s16"), "s32")
            key = p.select(kept.keeps_all(), KEEP_ALL, p.elements.key(bits))
        log_mass = _log_mass(p, kept)
        write(key=key, index=index, top=p.top, log_total=log(p, kept.total), log_mass=log_mass)


def _draw(p: PartProgram, kept: Kept, stride: int) -> None:
    if p.plan.value_buckets:
        p.sync_cluster()  # other CTAs may still read the histogram, and lists of positions overwrite it
    _, last_tie, _ = find_last_tie(p, kept)
    index, x = WinnerSearch(p, stride, kept, last_tie).run()
    with p.writes(0) as write:
        log_prob = log_prob_of(p, x, p.top, kept.total)
        write(index=index, log_prob=log_prob, log_mass=p.max(_log_mass(p, kept), log_prob))


def _apply_filters(p: PartProgram, kept: Kept, small_top_k: Value, bound: Value) -> None:
    stage = p.select(p.top_p < 1.0, TOP_P, DONE, "u32")
    stage = p.select(p.top_k < p.plan.window.vocab, TOP_K, stage)
    stage = p.var(p.select(small_top_k, TOP_K_BOUND, stage))
    bound, zone = p.var(p.max(bound, row_ptx.LEAST_FINITE)), zone_ptx.Zone(p)
    with p.loop() as leave:
        leave(stage.equals(DONE))
        is_mass = stage.equals(TOP_P) | stage.equals(TOP_P_REUSE)
        mass_goal = p.max(p.top_p * kept.mass, _LEAST_GOAL)
        goal = p.var(p.select(is_mass, mass_goal, p.convert(p.top_k, "f32")))
        f = FilterSearch(p, kept, goal, is_mass)
        if p.plan.value_buckets:
            can_reuse = search_values(f, stage.equals(TOP_P_REUSE))
            top_p = p.select(can_reuse, TOP_P_REUSE, TOP_P, "u32")
            p.set(stage, p.select(stage.equals(TOP_K) & (p.top_p < 1.0), top_p, DONE))
        else:
            _search_zones(f, stage, bound, zone)


def _search_zones(f: FilterSearch, stage: Value, bound: Value, zone: zone_ptx.Zone) -> None:
    """Runs one turn for float32 or float16. Sets the stage of the next turn, and for TOP_K_BEST a better bound."""
    p = f.p
    overflow = p.var(False, "pred")
    with p.when(stage <= TOP_K_BEST):
        p.set(overflow, zone_ptx.sweep_from_bound(p, zone, bound))
    with p.when(overflow & stage.equals(TOP_K_BOUND)):
        p.set(bound, p.max(bound, row_ptx.bound_of_best(p)))
    with p.when(stage.equals(TOP_K) | stage.equals(TOP_P)):
        zone_ptx.sweep_between(f, zone, *zone_ptx.expected_zone(f))
    with p.when(~overflow):
        zone_ptx.search_zone(f, zone, searched=stage > TOP_P)
        p.set(f.kept.listed, zone.has_room, when=stage <= TOP_K_BEST)

    from_bound, by_mass = stage <= TOP_K_BEST, p.top_p < 1.0
    following = p.select(by_mass & from_bound, TOP_P_REUSE, DONE, "u32")
    following = p.select(by_mass & stage.equals(TOP_K), TOP_P, following)
    p.set(stage, p.select(overflow, stage + 1, following))


def _apply_min_p(p: PartProgram, kept: Kept) -> None:
    """Applies min_p to `kept`, if it is stricter than the other filters."""
    has_min_p = p.mass(p.from_key(kept.last_key)) >= p.min_p
    all_have_min_p = has_min_p & kept.last_key.differs(KEEP_ALL)
    with p.when((p.min_p > 0.0) & ~all_have_min_p):
        mass, least = p.var(0, "f32"), p.var(HIGHEST, "s32")

        def add(x):
            mass_of_one = p.mass(x)
            p.increase(mass, mass_of_one, when=mass_of_one >= p.min_p)
            p.update(least, "min", p.key(x), when=mass_of_one >= p.min_p)

        p.sweep_elements(add)
        at = p.word(SCRATCH.counted + 2)  # another CTA may still read the first two words, of the last filter
        of_ctas = p.over_each_cta(["add", "min"], [mass, least], [0.0, HIGHEST], at)
        mass, least = p.over_warp(["add", "min"], of_ctas)
        kept.all_down_to(least, mass)


def _log_mass(p: PartProgram, kept: Kept) -> Value:
    return p.select(kept.keeps_all(), 0.0, log(p, p.min(p.divide(kept.mass, kept.total), 1.0)))


# --- Calls of any rank

# How the rows of a call lie over the GPU with filters or a mask; and without.
Plans = tuple[SamplePlan, StreamPlan]


def plan(call: Call, capability: tuple[int, int]) -> Plans | Refusal:
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call)
    if reason is not None:
        return Refusal(reason)
    row = call.vocab, jnp.dtype(call.dtype), capability
    chosen = plan_sample(*row)
    if chosen is None:
        return Refusal(f"V={call.vocab} {call.dtype} does not fit into the shared memory of a cluster")
    return chosen, plan_stream(call.rows, *row)


def sample(plans: Plans, logits, where, noise, temperature, top_k, top_p, min_p, *, stride):
    words = fold_numbers(noise, logits.shape[:-1])
    if any(a is not None for a in (where, top_k, top_p, min_p)):
        return tuple(sample_rows(plans[0], logits, where, temperature, top_k, top_p, min_p, words, stride))
    x, _, t, unfold = fold_topk(logits, None, temperature)
    return tuple(map(unfold, stream_kernel.draw_rows(x, t, words, plans[1], stride)))


def cutoff(plans: Plans, *arrays):
    return Cutoff(*sample_rows(plans[0], *arrays))


KERNELS = {"sample": Kernel(plan, sample), "filter_cutoff": Kernel(plan, cutoff)}
