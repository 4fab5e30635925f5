"""The kernels of `sample`, which read each row once from device memory.

Rows without filters have the one of `stream_kernel`. In the other one, a row lies in the shared memory of a cluster of
CTAs, one part in each CTA. The example has top_k = 4, and the temperature t = log2(e) = 1.44, which makes the masses
powers of two:

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

A CTA has several warpgroups. The first one starts the bulk copies of the part, one step for each warpgroup. Each
warpgroup waits for its own step and masks it. Then the CTA synchronizes, and one program of inline PTX does the rest:
`draw_ptx` lists its stages. `SamplePlan` draws the steps, the warps and the scratch words.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.folding import Mask, fold_mask
from pallas_softmax._src.gpu import checks, window_arrival
from pallas_softmax._src.gpu.interpreter import interpret, twin
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import aligned_view
from pallas_softmax._src.gpu.ptx.inline import insert_ptx
from pallas_softmax._src.gpu.window import Window
from pallas_softmax._src.sample import draw_ptx, stream_kernel
from pallas_softmax._src.sample.plan import SamplePlan, plan_sample
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import DRAWN, row_operands
from pallas_softmax._src.sample.rows import Cutoff
from pallas_softmax._src.sample.stream_plan import StreamPlan, plan_stream

# The results of a cutoff, by their names in the program.
_OF_CUTOFF = dict.fromkeys(("key", "index"), jnp.int32) | dict.fromkeys(
    ("top", "log_total", "log_mass"), jnp.float32
)


class Params(NamedTuple):
    """The parameters of a row, as float32; top_k as int32. A filter that is off has a value that filters nothing."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


class Plans(NamedTuple):
    """How the rows of a call lie over the GPU: with filters or a mask; and without, or None if `general` is faster."""

    general: SamplePlan
    unfiltered: StreamPlan | None


def plan(call: Call, capability: tuple[int, int]) -> Plans | Refusal:
    """Returns how the rows of a call lie over the GPU."""
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call)
    if reason is not None:
        return Refusal(reason)
    shape = call.rows, call.vocab, jnp.dtype(call.dtype), capability
    chosen = plan_sample(*shape)
    if chosen is None:
        return Refusal(f"V={call.vocab} {call.dtype} does not fit into the shared memory of a cluster")
    return Plans(chosen, plan_stream(*shape))


def sample(plans: Plans, logits, where, noise, temperature, top_k, top_p, min_p, *, stride):
    """Returns what `xla.sample` returns."""
    *batch, vocab = logits.shape
    words, filters = jnp.broadcast_to(noise, (*batch, 4)).reshape(-1, 4), (top_k, top_p, min_p)
    if plans.unfiltered is None or any(a is not None for a in (where, *filters)):
        return _run(plans.general, logits, where, temperature, *filters, words, stride)
    x = logits.reshape(-1, vocab)
    results = stream_kernel.draw_rows(x, _per_row(temperature, batch), words, plans.unfiltered, stride)
    return tuple(result.reshape(*batch, 1) for result in results)


def cutoff(plans: Plans, logits, where, temperature, top_k, top_p, min_p):
    """Returns what `xla.cutoff` returns."""
    return Cutoff(*_run(plans.general, logits, where, temperature, top_k, top_p, min_p))


def _run(plan: SamplePlan, logits, where, temperature, top_k, top_p, min_p, words=None, stride=1):
    """Folds the arrays to rows, and runs the kernel."""
    *batch, vocab = logits.shape
    filters = (
        (top_k, vocab, jnp.int32),
        (top_p, 1, jnp.float32),
        (min_p, 0, jnp.float32),
    )  # with what filters nothing
    numbers = [jnp.asarray(off if a is None else a, dtype) for a, off, dtype in filters]
    params = Params(*(_per_row(a, batch) for a in (temperature, *numbers)))
    mask = fold_mask(where, logits.shape, len(batch))
    results = sample_rows(logits.reshape(-1, vocab), mask, params, words, plan, stride)
    return tuple(result.reshape(*batch, 1) for result in results)


def _per_row(numbers, batch):
    """Returns an array with one number for each row of the batch, or one for all."""
    numbers = jnp.asarray(numbers)
    numbers = numbers if jnp.issubdtype(numbers.dtype, jnp.integer) else numbers.astype(jnp.float32)
    return jnp.broadcast_to(numbers, (*batch, 1)).reshape(-1) if numbers.size > 1 else numbers.reshape(1)


def sample_rows(x, mask: Mask | None, params: Params, words, plan: SamplePlan, stride: int = 1) -> list:
    """Draws once from each row of x, (rows, vocab), or finds where the filters cut it.

    Each parameter is an array (rows,), or (1,) if all rows have the same value. The words of the noise are (rows, 4),
    with their stride, and the results of `xla.sample` are returned, (rows,). If the words are None, the fields of a
    `Cutoff` are returned.
    """
    rows, vocab = x.shape
    window = plan.window
    view = aligned_view(rows, vocab, window.vec)
    names = _OF_CUTOFF if words is None else DRAWN

    def sample(
        x_gmem, params_gmem, words_gmem, mask_gmem, *out, arrived, scratch, x_smem, barrier: Any = None
    ):
        part = window_arrival.part_of(window, view, rows, x_gmem, mask, mask_gmem)
        row = part.place.row
        # These loads are in flight while the part arrives, so that no thread waits for them afterwards.
        row_params = Params(*(ref[row if ref.shape[0] > 1 else 0] for ref in params_gmem))
        words = [] if words_gmem is None else [words_gmem[row, i] for i in range(4)]
        _copy_and_mask(window, part, x_smem, arrived, barrier)
        refs = {"x": x_smem, "scratch": scratch, **dict(zip(names, out))}
        _run_program(plan, stride, part, refs, row_params, dict(zip(NOISE_OPERANDS, words)), barrier)

    return gpu_kernel(
        sample,
        name="filter_cutoff" if words is None else "sample",
        grid={"row": rows, "part": window.count} if window.count > 1 else {"row": rows},
        cluster=window.count,
        warpgroups=plan.warpgroups,
        out_type=[jax.ShapeDtypeStruct((rows,), dtype) for dtype in names.values()],
        scratch_types={
            "arrived": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "scratch": plgpu.SMEM((plan.words,), jnp.int32),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
            **({"barrier": plgpu.Barrier(num_arrivals=plan.warpgroups)} if interpret() else {}),
        },
        approximate=True,
    )(x.reshape(view), params, words, None if mask is None else mask.array)


@twin
def _run_program(
    plan: SamplePlan, stride, part: window_arrival.WindowPart, refs, params: Params, words, barrier
) -> None:
    """Runs the program of `draw_ptx` in this CTA. The interpreter synchronizes the warpgroups by the barrier."""
    numbers = params._asdict() | row_operands(part.place.row, part.place.index, params.temperature) | words
    arguments = plan, refs["x"].dtype
    program = draw_ptx.draw_program(*arguments, stride) if words else draw_ptx.cutoff_program(*arguments)
    insert_ptx(program, refs, numbers | {"origin": jnp.int32(part.origin)})


def _copy_and_mask(window: Window, part: window_arrival.WindowPart, x_smem, arrived, barrier) -> None:
    """Starts the copies of the part to shared memory. Then each warpgroup waits for its step, and masks it."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def start():
        window_arrival.start_copies(window, part, x_smem, arrived)
        window_arrival.fill_head_and_tail(window, part, x_smem, infinite=True)

    @pl.when(warpgroup < len(window.copies()))
    def wait():
        plgpu.barrier_wait(arrived.at[warpgroup])

    def mask(blocks):
        keep = window_arrival.mask_of_step(window, part, warpgroup)[:blocks]
        window_arrival.mask_step(window, x_smem, warpgroup, [*keep], infinite=True)

    if part.mask is not None:
        if interpret():  # `mask_step` rewrites whole steps there, including what `fill_head_and_tail` wrote
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        if window.full:
            pl.when(warpgroup < window.full)(functools.partial(mask, window.step_blocks))
        if window.rest:
            pl.when(warpgroup == window.full)(functools.partial(mask, window.rest))


KERNELS = {"sample": Kernel(plan, sample), "filter_cutoff": Kernel(plan, cutoff)}
