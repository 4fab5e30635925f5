"""Which implementation runs a call, and why."""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax

from pallas_softmax._src import target
from pallas_softmax._src.dispatch import table as operations
from pallas_softmax._src.dispatch.load import load
from pallas_softmax._src.dispatch.operation import KERNEL_DTYPES, Call, Choice

ImplementationName = Literal["mosaic_gpu", "triton", "xla"]

IMPLEMENTATIONS: tuple[ImplementationName, ...] = ("mosaic_gpu", "triton", "xla")
"""The names that `implementation=` takes, in order of preference on CUDA devices; elsewhere it is always xla."""

_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


def choose(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for a call of the user's, which `explain` lists.

    It is the named implementation or, if None, the first one that takes the call.

    Raises:
      ValueError: the name is unknown.
    """
    check_name(call.function, implementation)
    choice = choose_again(call, implementation)
    record(choice)
    return choice


def check_name(function: str, implementation: str | None) -> None:
    """Raises ValueError if the name that a user passed to this function is unknown."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{function}: implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
        )


def record(choice: Choice) -> None:
    """Adds the choice to what `explain` lists."""
    if (choices := _recorder.get()) is not None:
        choices.append(choice)


def choose_again(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for other shapes of a call that was chosen before, as `choose`; `explain` does not list it."""
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
    """Returns the choice of `xla`, for an operation that no other implementation has."""
    return Choice(call, "xla", "xla", requested="xla")


def choose_if_able(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for a step that no user named: as `choose_again`, but `xla` if the implementation lacks it."""
    choice = choose_again(call, implementation)
    return choose_plain(call) if choice.cuda is None else choice


def _objection(name: str, call: Call, automatic: bool) -> str | None:
    """Returns why the implementation does not take the call, or is not the choice for it; None if it is."""
    if name == "xla":
        return None
    if call.objection is not None:
        return call.objection
    if folds_constants():
        return "JAX cannot trace a kernel inside jax.ensure_compile_time_eval"
    candidate = load(name)
    if call.op not in candidate.functions:
        return f"no kernel for {call.op}"
    reason = candidate.unsupported(call, target.capability())
    if reason is None and automatic:
        reason = _better_by_xla(call) or candidate.slower(call)
    return reason


_FUSED_ROW = 8_192  # elements of a row at most that XLA keeps on chip (benchmarks/results/launch)


def _better_by_xla(call: Call) -> str | None:
    """Returns why XLA is better at a call than any kernel, however fast; None if it is not.

    It is for a float32 softmax of short, aligned rows. The kernels of `mosaic_gpu` take from 24% less time for it than
    XLA (few rows) to 11% more (in the L2 cache), and those of `triton` as long as XLA. But in a program XLA fuses the
    softmax with what makes its logits, which a kernel cannot.
    """
    plain_softmax = call.op == "softmax" and call.dtype == "float32" and not call.masked and call.inner == 1
    if plain_softmax and call.vocab % 4 == 0 and call.vocab <= _FUSED_ROW:
        return f"no faster than xla for aligned float32 rows of up to {_FUSED_ROW} without where"
    return None


def folds_constants() -> bool:
    """Returns whether the call is inside `jax.ensure_compile_time_eval`: JAX then evaluates constants while tracing."""
    return getattr(jax.config, "eager_constant_folding", False)


def stays_plain(choice: Choice) -> bool:
    """Returns whether the call is plain JAX on every platform, and remains so with any number of rows."""
    if choice.requested is not None:
        return choice.requested == "xla"
    call = choice.call
    return call.objection is not None or call.dtype not in KERNEL_DTYPES or _better_by_xla(call) is not None


def recording() -> bool:
    """Returns whether `explain` is listing the calls."""
    return _recorder.get() is not None


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Returns which implementations `function(*args, **kwargs)` would run, in the order of its calls of this package.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. Inside `jax.vmap` the choice shown is that for one
    slice, and for sharded arrays that for the whole arrays. When the function runs, the choice is made again for the
    batch, and on each device for its shard.

      >>> print(*explain(softmax, jax.ShapeDtypeStruct((4, 50257), "float32")), sep="\\n")
      softmax float32[4, 50257]: mosaic_gpu on cuda, xla elsewhere
      softmax_grad float32[4, 50257]: mosaic_gpu on cuda, xla elsewhere

    Args:
      function: a function of this package, or one of yours that calls such functions. A part of it that `jax.jit` has
        traced before with the same arguments is not traced again, so its calls are not listed.
      *args: the positional arguments of the function.
      **kwargs: its keyword arguments.

    Returns:
      One `Choice` for each call, which prints as one line: the implementation on CUDA devices, that on other ones, and
      why others were passed over. One for its gradient follows where that has kernels, whether or not it is wanted. If
      the last call names an implementation that cannot run it, its `cuda` is None.

    Raises:
      TypeError: `function` is not callable.
    """
    if not callable(function):
        raise TypeError(
            "explain: function must be callable, and its arguments follow it, as in explain(softmax, x); "
            f"got {function!r} ({type(function).__name__})"
        )
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
