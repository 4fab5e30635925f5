"""Counters in device memory, by which the CTAs of a launch take turns, and tell each other what they have written.

They start at 0 in each launch. Each function is called by all threads of a CTA. In the interpreter there are no
counters: it runs one CTA after the other, in order, so what a counter would hold is known.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    REF,
    SCALAR,
    emit_ptx,
    inline,
    scalar,
    thread,
)
from pallas_softmax.implementations.mosaic_gpu.device.ptx_values import Program, Value

_ITEMSIZE = 4
_PAUSE_NS = 40  # between two looks at a counter


def counters(count: int, *, interpret):
    """Returns a reference to `count` counters; None in the interpreter."""
    return None if interpret else pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def take(ref, number, mail_smem, *, in_order, interpret):
    """Adds 1 to a counter, and returns what it was.

    Args:
      ref: the counters.
      number: which of them.
      mail_smem: shared memory for an int32, through which all threads get the result.
      in_order: the result if CTAs run one after the other.
      interpret: as for `pallas_call`.
    """
    return _add(ref, number, mail_smem, "relaxed", in_order, interpret)


def tell(ref, number, mail_smem, *, in_order, interpret):
    """Does as `take`, once what the CTA wrote to device memory can be read by those who see the counter.

    So can, afterwards, by this CTA, what those wrote that added to it before.
    """
    return _add(ref, number, mail_smem, "acq_rel", in_order, interpret)


def _add(ref, number, mail_smem, order: str, in_order, interpret):
    if interpret:
        return in_order

    @inline(arg_types=(REF, SCALAR, REF))
    def add(_, ref, number, mail):
        p = Program()
        at = _address(p)
        p.barrier()  # all have written, and read the mail before this one
        with p.when(p.operand("thread", "u32").equals(0)):
            before = p.fresh("u32")
            p += f"atom.{order}.gpu.global.add.u32 {before}, [{at}], 1;"
            p.store(p.operand("mail", "u32"), before)
        p.barrier()
        emit_ptx(p, {"counters": ref, "number": scalar(number), "thread": thread(), "mail": mail})

    add(ref, number, mail_smem)
    return mail_smem[0]


def wait(ref, number, value: int, *, interpret) -> None:
    """Waits until a counter has reached a value; what was written before that can be read then."""
    if interpret:
        return

    @inline(arg_types=(REF, SCALAR))
    def wait(_, ref, number):
        p = Program()
        at = _address(p)
        with p.when(p.operand("thread", "u32").equals(0)), p.loop() as leave:
            seen = p.fresh("u32")
            p += f"ld.acquire.gpu.global.u32 {seen}, [{at}];"
            leave(seen >= value)
            p += f"nanosleep.u32 {_PAUSE_NS};"
        p.barrier()
        emit_ptx(p, {"counters": ref, "number": scalar(number), "thread": thread()})

    wait(ref, number)


def _address(p: Program) -> Value:
    """Returns the address of the counter <number> of <counters>."""
    return p.operand("counters", "u64") + p.multiply_wide(p.operand("number", "u32"), _ITEMSIZE)
