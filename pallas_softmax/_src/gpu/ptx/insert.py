"""Inserts inline PTX with named operands and results into a kernel."""

from typing import Any

from pallas_softmax._src.gpu.ptx.inline import (
    PER_THREAD,
    REF,
    SCALAR,
    as_block,
    emit_ptx,
    inline,
    own_element,
    per_thread_type,
    scalar,
    thread,
)
from pallas_softmax._src.gpu.ptx.values import Program

_DTYPES = {"i32": "int32", "f32": "float32"}


def insert_ptx(
    code: Program,
    refs: dict[str, Any],
    scalars: dict[str, Any] | None = None,
    blocks: dict[str, Any] | None = None,
    results: dict[str, str] | None = None,
) -> tuple:
    """Inserts PTX into the kernel; <name> stands for an operand or a result, <thread> for the number 0 to 127.

    Args:
      code: the program.
      refs: references to memory; the text gets their addresses.
      scalars: numbers that are the same for all threads.
      blocks: arrays (128,) with one number for each thread; the text gets the thread's number.
      results: "i32" or "f32" by name; each thread writes one number to each result.

    Returns:
      The results, each as an array (128,).
    """
    scalars, blocks, results = scalars or {}, blocks or {}, results or {}
    arg_types = (REF,) * len(refs) + (PER_THREAD,) * len(blocks) + (SCALAR,) * len(scalars)
    return_type = tuple(per_thread_type(_DTYPES[t]) for t in results.values()) if results else None

    @inline(arg_types=arg_types, return_type=return_type)
    def emit(_, *arguments):
        values = iter(arguments)
        operands = {name: next(values) for name in refs} | {"thread": thread()}
        operands |= {name: own_element(next(values)) for name in blocks}
        operands |= {name: scalar(next(values)) for name in scalars}
        written = emit_ptx(code, operands, results)
        signed = {"i32": True, "f32": None}
        out = tuple(as_block(x, signed[t]) for x, t in zip(written, results.values()))
        return out or None

    return emit(*refs.values(), *blocks.values(), *scalars.values()) or ()
