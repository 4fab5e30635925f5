"""Which implementation runs a call, and why."""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_softmax import operations, target
from pallas_softmax.call import Call, Choice
from pallas_softmax.implementations.load import load

# In order of preference on a CUDA device; on other platforms it is always xla.
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")

_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


def choose(call: Call, implementation: str | None) -> Choice:
    """The choice for a call of the user's: the named implementation or, if None, the first that supports the call.

    `explain` lists it.

    Raises:
      ValueError: the name is unknown.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    choice = choose_again(call, implementation)
    if (record := _recorder.get()) is not None:
        record.append(choice)
    return choice


def choose_again(call: Call, implementation: str | None) -> Choice:
    """As `choose`, for other shapes of a call that is chosen already: `explain` does not list it."""
    on_shard = call
    if call.mesh_axes:
        operation = operations.TABLE[call.op]
        if operation.on_shard is None:  # the plain JAX form, with sums over the mesh
            return Choice(call, "xla", "xla", requested=implementation)
        on_shard = dataclasses.replace(call, op=operation.on_shard)
    reasons = []
    cuda = None
    for name in IMPLEMENTATIONS if implementation is None else (implementation,):
        reason = _objection(name, on_shard, automatic=implementation is None)
        if reason is None:
            cuda = name
            break
        reasons.append((name, reason))
    elsewhere = "xla" if implementation in (None, "xla") else None
    return Choice(call, cuda, elsewhere, tuple(reasons), requested=implementation)


def choose_plain(call: Call) -> Choice:
    """The choice of `xla` for an operation that no other implementation has."""
    return Choice(call, "xla", "xla", requested="xla")


def choose_if_able(call: Call, implementation: str | None) -> Choice:
    """As `choose_again`, but `xla` where the named implementation has no kernel: for a step that no user named."""
    choice = choose_again(call, implementation)
    return choose_plain(call) if choice.cuda is None else choice


def _objection(name: str, call: Call, automatic: bool) -> str | None:
    """Why the implementation does not take the call, or is not the choice for it; None if it is."""
    if name == "xla":
        return None
    if call.objection is not None:
        return call.objection
    candidate = load(name)
    if call.op not in candidate.functions:
        return f"no kernel for {call.op}"
    reason = candidate.unsupported(call, target.capability())
    if reason is None and automatic:
        reason = _better_by_xla(call) or candidate.slower(call)
    return reason


_FUSED_ROW = 8_192  # elements of a row that XLA keeps on chip (benchmarks/results/launch)


def _better_by_xla(call: Call) -> str | None:
    """Why XLA is better at a call than any kernel, however fast; None if it is not.

    A float32 softmax of short, aligned rows takes those of `mosaic_gpu` from 17% less time than XLA (few rows) to
    11% more (in the L2 cache), and those of `triton` as long; in a program, XLA fuses it with what makes its
    logits, which a kernel cannot.
    """
    if not call.trailing:
        return "slower than xla where the row is not the last axes: it is transposed, twice"
    if call.op == "softmax" and call.dtype == "float32" and not call.masked and call.vocab % 4 == 0:
        if call.vocab <= _FUSED_ROW:
            return f"no faster than xla for aligned float32 rows of up to {_FUSED_ROW} without where"
    return None


def recording() -> bool:
    """Whether `explain` is listing the calls."""
    return _recorder.get() is not None


def explain(function: Callable, *args: Any, **kwargs: Any) -> list[Choice]:
    """The implementations that `function(*args, **kwargs)` would run, in the order of the calls.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. Each choice prints as one line. Inside `jax.vmap` it
    is the choice for one slice, and of sharded arrays that for the whole; the batch, and each device for its shard,
    chooses again.

      >>> explain(softmax, jax.ShapeDtypeStruct((4, 50257), "float32"))  # doctest: +SKIP

    Args:
      function: a function of this package, or one of yours that calls them. A part of it that jax.jit has traced
        before with the same arguments is not traced again, so its calls are not listed.
      *args: the positional arguments of the function.
      **kwargs: its keyword arguments.

    Returns:
      One `Choice` for each call: the implementation on CUDA devices, that on other ones, and why others were passed
      over.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def call(arrays):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    choices: list[Choice] = []
    token = _recorder.set(choices)
    try:
        jax.eval_shape(call, arrays)
    except NotImplementedError:
        if not choices or choices[-1].cuda is not None:
            raise
    finally:
        _recorder.reset(token)
    return choices
