"""The kernel of `sample` without filters: one pass over each row, straight from device memory.

The steps of a row belong to shares in turn, and the CTAs of a cluster take the shares in turn. A step has 16 elements
for each lane. With four shares, and two warps in a CTA:

    step                        0   1   2   3   4   5   6   7   8   9  ..
    share                       0   0   1   1   2   2   3   3   0   0  ..
    warp of the CTA             0   1   0   1   0   1   0   1   0   1  ..
    CTA, if there is one        0   0   0   0   0   0   0   0   0   0  ..
    CTA, if there are two       0   0   1   1   0   0   1   1   0   0  ..

A warp takes all of its steps in one share, then in the next. A lane has a normalizer in each share. They form two
chains: the even shares, combined in order, and the odd ones. Then both chains are combined. So the order of a row's
sums does not depend on the number of CTAs.

A warp does this with each step:

    load         in vectors of up to 16 bytes; elements after the row are -inf
    normalizer   the pair (m, d) of each lane takes its elements in
    list         each lane lists its elements that can still win, see `race_ptx`
    race         rounds: each lane enters two entries, while some lane has more than `KEPT`; after the last step, until
                 the lists are empty

Lanes list different numbers of elements. They keep some for the next step, so that few lanes are idle in a round.
Each warp visits its first step twice. The first time, each lane lists only its largest element, and (m, d) stays. So
the warp soon has a good threshold.

At a temperature of 0 there is no noise: each lane keeps its first element in the order of sort keys. A temperature may
be so small that x / temperature is infinite at the largest element. Then a second pass takes the row as at a
temperature of 0.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.gpu.hardware import LANES
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.kernel import cta_number, gpu_kernel, number_of_row
from pallas_softmax._src.gpu.layout import log2
from pallas_softmax._src.gpu.ptx.elements import flip_negative
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.ptx.values import Value
from pallas_softmax._src.sample import row_ptx
from pallas_softmax._src.sample.plan import CHAINS, KEPT, LIST_SIZE, NOISE_AT_ONCE, SCRATCH, STEP_ELEMENTS, StreamPlan
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS, Race, log, log_prob_of
from pallas_softmax._src.sample.row_ptx import DRAWN, HIGHEST, INF, LEAST_FINITE, ClusterProgram, row_operands

_NAN = float("nan")
_LINE = 4 * LANES  # bytes from one entry of a list to the next: the lists of a warp alternate word by word
_PADDING = NOISE_AT_ONCE  # entries of -inf at the start of each list: what a lane enters that has no others
_INDICES = _LINE * LIST_SIZE  # from an element to its index


def draw_rows(x, temperature, words, plan: StreamPlan, stride: int) -> list:
    """Draws once from each row of x, (rows, vocab), without filters.

    The temperature is (rows,), or (1,) for all rows; the words are (rows, 4). Returns what `xla.sample` does, (rows,).
    """
    rows, _ = x.shape

    def draw(x_gmem, temperature_gmem, words_gmem, *out, scratch):
        row, part = lax.axis_index("row"), cta_number("part", plan.ctas)
        temperature = number_of_row(temperature_gmem, row)
        words = dict(zip(NOISE_OPERANDS, [words_gmem[row, i] for i in range(4)]))
        refs = {"x": x_gmem, "scratch": scratch, **dict(zip(DRAWN, out))}
        _draw(plan, stride, refs, row_operands(row, part, temperature), words)

    return gpu_kernel(
        draw,
        name="sample",
        grid={"row": rows, "part": plan.ctas},
        cluster=plan.ctas,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in DRAWN.values()],
        scratch_types={"scratch": plgpu.SMEM((plan.words,), jnp.int32)},
    )(x, temperature, words)


@twin
def _draw(plan: StreamPlan, stride: int, refs, numbers, words) -> None:
    insert_ptx(row_program(plan, refs["x"].dtype, stride), refs, numbers | words)


# --- The program of inline PTX


@functools.lru_cache(maxsize=16)
def row_program(plan: StreamPlan, dtype, stride: int) -> "StreamProgram":
    """Returns the program for a row of the logits at <x>, an address in device memory.

    <row> is the number of the row, and `NOISE_OPERANDS` describe its noise. The results `DRAWN` are addresses.
    """
    p = StreamProgram(plan, dtype)
    p.update(p.greedy, "or", ~p.temperature.equals(p.temperature))  # a row without a draw needs no noise
    p.store(p.word(SCRATCH.threshold), 0, when=p.thread.equals(0))
    p.sync_cluster()
    race = Race(p, stride)
    index, log_prob, log_mass = p.fresh("s32"), p.fresh("f32"), p.fresh("f32")
    with p.loop() as leave:
        _take_steps(p, race)
        values = [*_normalizer_of_row(p), race.best, race.index, race.x]
        neutral = [-INF, 0, -INF, HIGHEST, -INF]
        lanes = p.over_each_cta(functools.partial(_combine, p), values, neutral, p.word(SCRATCH.normalizer))
        if plan.ctas > 1:  # the warps' normalizers are combined at once, as in one CTA
            p.barrier()  # other warps may still load `lanes` from the words that this writes
            of_warp = p.record_of_warp(p.lane)
            lanes[:2] = p.fetched(of_warp, p.lane & plan.ctas - 1, p.warps, ["f32", "f32"], [-INF, 0])
        top, total, _, winner, x = _combine(p, lanes)
        p.set(index, winner)
        p.set(log_prob, log_prob_of(p, x, top, total))
        mass_of_first = p.min(p.divide(p.var(1.0, "f32"), total), 1.0)  # all that a temperature of 0 keeps
        p.set(log_mass, p.max(p.select(p.greedy, log(p, mass_of_first), 0.0), log_prob))
        drawable = (p.absolute(top) < INF) & (p.temperature >= 0.0)
        for result, nothing in ((index, -1), (log_prob, _NAN), (log_mass, _NAN)):
            p.set(result, nothing, when=~drawable)
        tempered_top = p.divide_exactly(top, race.temperature)
        leave(~(drawable & p.absolute(tempered_top).equals(INF)) | p.greedy)
        p.set(p.greedy, True)
        p.sync_cluster()  # other CTAs may still read the numbers of this pass
    with p.writes(0) as write:
        write(index=index, log_prob=log_prob, log_mass=log_mass)
    return p


class StreamProgram(ClusterProgram):
    """A program for a row in device memory; the warps of a cluster share the row."""

    def __init__(self, plan: StreamPlan, dtype):
        super().__init__(plan.threads // LANES, plan.ctas, dtype)
        self.plan = plan
        start = self.multiply_wide(self.operand("row", "u32"), plan.vocab)
        self.x = self.operand("x", "u64") + (start << log2(plan.itemsize))  # address of the row

    def load_step(self, index: Value) -> list[Value]:
        """Returns the lane's elements of a step as floats, given the index of the first one; -inf after the row."""
        p, plan = self, self.plan
        out = [p.fresh("f32") for _ in range(STEP_ELEMENTS)]
        at = p.multiply_add_wide(index, plan.itemsize, p.x)
        whole = index - p.lane * plan.vec + LANES * STEP_ELEMENTS <= plan.vocab
        kind = "s16" if p.elements.halves and plan.vec == 1 else "s32"
        with p.when(whole):
            words = [[p.fresh(kind) for _ in range(-(-plan.vec * plan.itemsize // 4))] for _ in range(plan.vectors)]
            for i, vector in enumerate(words):
                p.load_into(vector, at, offset=LANES * plan.vec * plan.itemsize * i)
            if kind == "s16":
                found = [p.elements.float_of_bits(p, p.convert(bits, "s32")) for (bits,) in words]
            else:
                found = p.elements.floats(p, sum(words, []), marked=False)
            for register, x in zip(out, found):
                p.set(register, x)
        with p.when(~whole):
            kind = "s16" if p.elements.halves else "s32"
            for i, register in enumerate(out):
                exists = index + p.offset(i) < plan.vocab
                # Without the default, ptxas takes 19 registers more.
                bits = p.load(at, kind, offset=p.offset(i) * plan.itemsize, when=exists, default=0)
                bits = p.convert(bits, "s32") if p.elements.halves else bits
                p.set(register, p.select(exists, p.elements.float_of_bits(p, bits), -INF))
        return out

    def normalizer_at(self, slot: Value | int) -> Value:
        return self.word(self.plan.normalizers, self.thread + slot * self.plan.threads, 2)

    def offset(self, i: int) -> int:
        """Returns how far the lane's element number i of a step is after its first one."""
        vec = self.plan.vec
        return i // vec * LANES * vec + i % vec


class LaneList:
    """The list of each lane, in shared memory: elements and their indices. No other lane reads it."""

    def __init__(self, p: StreamProgram):
        self._p = p
        start = p.word(SCRATCH.histogram, p.warp, 2 * LANES * LIST_SIZE) + p.lane * 4
        for i in range(_PADDING):
            p.store(start, p.var(-INF, "f32"), offset=_LINE * i)
            p.store(start, 0, offset=_LINE * i + _INDICES)
        self._first = start + _LINE * _PADDING  # the address of the first entry after the padding
        self._end = p.var(self._first)  # the address after the last entry

    def append(self, x: Value, index: Value, when: Value) -> None:
        p = self._p
        p.store(self._end, x, when=when)
        p.store(self._end, index, offset=_INDICES, when=when)
        p.increase(self._end, _LINE, when=when)

    def enter(self, race: Race, keeps_some: Value, more: Value) -> None:
        """Enters the last entries in the race, until no lane has more than `KEPT`; with `keeps_some` false, any.

        `more` says whether further elements follow.
        """
        p = self._p
        until = p.select(keeps_some, self._first + _LINE * KEPT, self._first)
        with p.loop() as enough:
            enough(~p.any(self._end > until))
            entries = [self._end - _LINE * (i + 1) for i in range(NOISE_AT_ONCE)]
            elements = [p.load(entry, "f32") for entry in entries]
            indices = [p.load(entry, "s32", offset=_INDICES) for entry in entries]
            p.set(self._end, p.max(self._end - _LINE * NOISE_AT_ONCE, self._first))
            race.enter(elements, indices, more)


def _combine(p: StreamProgram, values: list[Value]) -> list[Value]:
    m, d, *best = values
    return [*row_ptx.combine(p, m, d), *Race.first_best(p, *best)]


def _take_steps(p: StreamProgram, race: Race) -> None:
    """Takes the steps of the warp. Leaves (m, d) of each lane in shared memory, and its best sum in `race`.

    The loop has a turn for each step, and one more without a step, which enters what the lists still hold.
    """
    plan, size = p.plan, LANES * STEP_ELEMENTS  # of a step
    turn = size * p.warps * plan.shares  # from a step of the warp to the next one in the share
    normalizer = row_ptx.LaneNormalizer(p)
    list_ = LaneList(p)
    for slot in range(plan.slots):
        p.store(p.normalizer_at(slot), p.var(-INF, "f32"), p.var(0, "f32"))
    at = p.fresh("u32")  # the index of the first element of the warp's next step
    first_visit, more = p.var(~p.greedy), p.fresh("pred")

    def start_share(share: Value) -> None:
        p.set(at, p.select(share < plan.shares, (share * p.warps + p.warp) * size, plan.vocab))

    race.start(-INF)
    for register in (race.threshold, race.low):  # no finite entry takes part
        p.set(register, INF, when=p.greedy)
    start_share(p.cta)
    with p.loop() as leave:
        p.set(more, at < plan.vocab)
        with p.when(more):
            index = at + p.lane * plan.vec
            elements = p.load_step(index)
            top = p.reduce("max.NaN", elements)
            with p.when(~first_visit):
                with p.when(p.greedy):
                    _keep_first(p, race, elements, index)
                normalizer.raise_to(top)
                normalizer.add(elements)
                race.catch_up()
                p.increase(at, turn)
                with p.when(at >= plan.vocab):
                    share = at >> log2(size * p.warps) & plan.shares - 1
                    slot = p.normalizer_at(share >> log2(plan.ctas) & plan.slots - 1)
                    before = p.load_vector(slot, "f32", 2)
                    p.store(slot, *row_ptx.join(p, before, [normalizer.m, normalizer.d]))
                    normalizer.clear()
                    start_share(share + plan.ctas)
            low = p.select(first_visit, p.max(top, LEAST_FINITE), race.low)
            for i, x in enumerate(elements):
                list_.append(x, index + p.offset(i), x >= low)
        list_.enter(race, keeps_some=more & ~first_visit, more=more)
        p.set(first_visit, False)
        leave(~more)


def _normalizer_of_row(p: StreamProgram) -> list[Value]:
    """Returns (m, d) of each lane in all shares, for the warps of the row that this CTA combines; else (-inf, 0).

    CTA i % ctas combines the normalizers of warp i of every CTA.
    """
    plan, join = p.plan, functools.partial(row_ptx.join, p)
    normalizer = [p.var(-INF, "f32"), p.var(0, "f32")]
    p.sync_cluster()
    with p.when((p.warp & plan.ctas - 1).equals(p.cta)):
        found = [
            p.of_cta(p.normalizer_at(slot), p.var(cta, "u32"), "f32", 2)
            for slot in range(plan.slots)
            for cta in range(plan.ctas)
        ]
        chains = [functools.reduce(join, found[i::CHAINS]) for i in range(CHAINS) if found[i:]]
        for register, number in zip(normalizer, functools.reduce(join, chains)):
            p.set(register, number)
    return normalizer


def _keep_first(p: StreamProgram, race: Race, elements: list[Value], index: Value) -> None:
    """Makes the first of the elements, in the order of sort keys, the best of the lane, if it comes before that."""
    best = p.var(flip_negative(race.best.bits("s32")))
    for i, x in enumerate(elements):
        key = flip_negative(x.bits("s32"))
        comes_before = key > best
        p.set(best, key, when=comes_before)
        p.set(race.index, index.bits("s32") + p.offset(i), when=comes_before)
    p.set(race.best, flip_negative(best).bits("f32"))
    p.set(race.x, race.best)
