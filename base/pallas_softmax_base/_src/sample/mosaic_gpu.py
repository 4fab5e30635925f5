"""The kernel of `sample`: draws from each row of logits, and reads each row once from device memory.

A row lies in the shared memory of a cluster of CTAs, one part in each CTA. The example has u = 0.7, top_k = 4 and a
temperature that makes the weights powers of two:

    index                 0     1     2     3  |  4     5     6     7       two CTAs, with four elements each
    x                     3     5     0     4  |  5     1     4     4
                                                                            arrival     the maximum of the row is 5
    weight, 2^(x - 5)    .25    1   .03    .5  |  1   .06    .5    .5                   the total mass is 3.84
                                                                            filters     the 4th largest is a 4:
    kept                  -     1     -    .5  |  1     -    .5     -                   two of the 4s are kept
    kept mass                1.5               |        1.5                 draw        u * 3 = 2.1: the second CTA
    up to here                  1         1.5  |  2.5                                   exceeds 2.1 first,
    drawn                                         ^                                     at index 4

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
import numpy as np

from pallas_softmax_base._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax_base._src.folding import Mask, fold_mask
from pallas_softmax_base._src.gpu import checks, window_arrival
from pallas_softmax_base._src.gpu.interpreter import interpret
from pallas_softmax_base._src.gpu.kernel import gpu_kernel
from pallas_softmax_base._src.gpu.layout import aligned_view
from pallas_softmax_base._src.gpu.ptx.inline import insert_ptx
from pallas_softmax_base._src.gpu.window import Window
from pallas_softmax_base._src.normalizers import LOG2_E
from pallas_softmax_base._src.sample import draw_ptx, xla
from pallas_softmax_base._src.sample.plan import SamplePlan, plan_sample

_TINY = float(np.finfo(np.float32).tiny)  # replaces a temperature of 0; also the smallest scale


class Params(NamedTuple):
    """The parameters of a row, as float32; top_k as int32. A filter that is off has a value that filters nothing."""

    u: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


def plan(call: Call, capability: tuple[int, int]) -> SamplePlan | Refusal:
    """Returns how the rows of a call lie over the GPU."""
    reason = checks.unsupported(call, capability) or checks.not_contiguous(call) or checks.too_large(call)
    if reason is not None:
        return Refusal(reason)
    chosen = plan_sample(call.rows, call.vocab, jnp.dtype(call.dtype), capability)
    return chosen or Refusal(f"V={call.vocab} {call.dtype} does not fit into the shared memory of a cluster")


def sample(plan: SamplePlan, logits, where, u, temperature, top_k, top_p, min_p):
    """Returns what `xla.sample` returns."""
    *batch, vocab = logits.shape

    def per_row(numbers, off=0, dtype=jnp.float32):  # `off` filters nothing
        numbers = jnp.asarray(off if numbers is None else numbers, dtype)
        return jnp.broadcast_to(numbers, (*batch, 1)).reshape(-1) if numbers.size > 1 else numbers.reshape(1)

    filters = per_row(top_k, vocab, jnp.int32), per_row(top_p, 1), per_row(min_p, 0)
    params = Params(per_row(u), per_row(temperature), *filters)
    mask = fold_mask(where, logits.shape, len(batch))
    results = sample_rows(logits.reshape(-1, vocab), mask, params, plan)
    return tuple(result.reshape(*batch, 1) for result in results)


def sample_rows(x, mask: Mask | None, params: Params, plan: SamplePlan) -> list[jax.Array]:
    """Draws once from each row of x, (rows, vocab).

    Each parameter is an array (rows,), or (1,) if all rows have the same value. The results are arrays (rows,): the
    drawn index (int32), its log probability, and the log of the kept share of the mass (float32). They are -1, NaN and
    NaN if the largest logit is not finite, or the temperature is negative or NaN. The interpreter runs a plain-JAX twin
    of the program, in one CTA.
    """
    rows, vocab = x.shape
    window = plan.window
    view = aligned_view(rows, vocab, window.vec)

    def sample(x_gmem, params_gmem, mask_gmem, *out, arrived, scratch, x_smem, barrier: Any = None):
        part = window_arrival.part_of(window, view, rows, x_gmem, mask, mask_gmem)
        # These loads are in flight while the part arrives, so that no thread waits for them afterwards.
        of_row = Params(*(ref[part.place.row if ref.shape[0] > 1 else 0] for ref in params_gmem))
        _copy_and_mask(window, part, x_smem, arrived, barrier)
        if interpret():
            _draw_by_twin(part, x_smem, of_row, out, barrier)
            return
        results = dict(zip(("index", "log_prob", "log_mass"), out))
        place = {"row": part.place.row, "part": part.place.index, "origin": part.origin}
        numbers = {"scale": scale_of(of_row.temperature), **of_row._asdict()}
        numbers |= {name: jnp.int32(number) for name, number in place.items()}
        program = draw_ptx.draw_program(plan, x.dtype)
        insert_ptx(program, {"x": x_smem, "scratch": scratch, **results}, numbers)

    types = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    return gpu_kernel(
        sample,
        grid={"row": rows, "part": window.count} if window.count > 1 else {"row": rows},
        cluster=window.count,
        warpgroups=plan.warpgroups,
        out_type=types,
        scratch_types={
            "arrived": plgpu.Barrier(num_barriers=max(1, len(window.copies()))),
            "scratch": plgpu.SMEM((plan.words,), jnp.int32),
            "x_smem": plgpu.SMEM((window.size,), x.dtype),
            **({"barrier": plgpu.Barrier(num_arrivals=plan.warpgroups)} if interpret() else {}),
        },
        approximate=True,
    )(x.reshape(view), params, None if mask is None else mask.array)


def scale_of(temperature):
    """Returns log2(e) / temperature; temperature and result are at least the smallest normal float32."""
    return jnp.maximum(LOG2_E / jnp.maximum(temperature, _TINY), _TINY)


def _draw_by_twin(part: window_arrival.Part, x_smem, params: Params, out, barrier) -> None:
    """Synchronizes all warpgroups; then one of them draws in plain JAX and writes the results."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def write():
        one_row = (jnp.reshape(number, (1, 1)) for number in params)
        position, *logs = (result[0, 0] for result in xla.sample(x_smem[...][None], None, *one_row))
        index = jnp.where(position < 0, position, position + part.origin)
        for gmem, result in zip(out, (index, *logs), strict=True):
            gmem[part.place.row] = result


def _copy_and_mask(window: Window, part: window_arrival.Part, x_smem, arrived, barrier) -> None:
    """Copies the part to shared memory, where each warpgroup waits for its step, and masks it."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def start():
        window_arrival.start_copies(window, part, x_smem, arrived)
        window_arrival.fill_edges(window, part, x_smem, infinite=True)

    @pl.when(warpgroup < len(window.copies()))
    def wait():
        plgpu.barrier_wait(arrived.at[warpgroup])

    def mask(blocks):
        keep = window_arrival.mask_of_step(window, part, warpgroup)[:blocks]
        window_arrival.mask_step(window, x_smem, warpgroup, [*keep], infinite=True)

    if part.mask is not None:
        if interpret():  # `mask_step` rewrites whole steps there, including what `fill_edges` wrote
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)
        if window.full:
            pl.when(warpgroup < window.full)(functools.partial(mask, window.step_blocks))
        if window.rest:
            pl.when(warpgroup == window.full)(functools.partial(mask, window.rest))


KERNEL = Kernel(plan, sample)
