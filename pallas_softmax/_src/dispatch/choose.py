"""The choice of an implementation for a call, with the reasons."""

import contextvars
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import target
from pallas_softmax._src.dispatch.operation import Call, Choice, Refusal, RowOperation
from pallas_softmax._src.misfits import check_static, is_known

ImplementationName = Literal["mosaic_gpu", "triton", "xla"]

IMPLEMENTATIONS: tuple[ImplementationName, ...] = ("mosaic_gpu", "triton", "xla")
"""The names that `implementation=` takes, in order of preference on CUDA devices; elsewhere it is always xla."""

_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


def choose(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for a user's call, which `explain` lists. Raises if the name is unknown, not if it refuses."""
    check_name(call.function, implementation)
    choice = choose_unlisted(call, implementation)
    record(choice)
    return choice


def check_name(function: str, implementation: str | None) -> None:
    accepted = f"None or one of {IMPLEMENTATIONS}"
    check_static(function, "implementation", accepted, implementation)
    is_name = isinstance(implementation, str) and implementation in IMPLEMENTATIONS
    if implementation is not None and not is_name:
        raise ValueError(f"{function}: implementation must be {accepted}, got {implementation!r}")


def record(choice: Choice) -> None:
    """Adds the choice to what `explain` lists, if it is running."""
    if (choices := _recorder.get()) is not None:
        choices.append(choice)


def choose_unlisted(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for a step of a call, or for other shapes of a call that was chosen before.

    It is the named implementation (`cuda` is None if it refuses) or, if None, the first that takes the call.
    """
    shard_call, operation = call, call.operation
    if call.mesh_axes and isinstance(operation, RowOperation):  # other kernels take mesh_axes= themselves
        if operation.on_mesh is None:  # plain JAX, with sums over the mesh
            return Choice(call, "xla", "xla", requested=implementation)
        shard_call = call.of(operation.shard_step or operation)
    elsewhere = "xla" if implementation in (None, "xla") else None
    reasons = []
    for name in IMPLEMENTATIONS if implementation is None else (implementation,):
        plan = _plan(name, shard_call, automatic=implementation is None)
        if not isinstance(plan, Refusal):
            return Choice(call, name, elsewhere, tuple(reasons), implementation, plan)
        reasons.append((name, plan.reason))
    return Choice(call, None, elsewhere, tuple(reasons), implementation)


def choose_plain(call: Call) -> Choice:
    return choose_unlisted(call, "xla")


def choose_if_able(call: Call, implementation: str | None) -> Choice:
    """Returns the choice for a step that no user named: `xla` if the named implementation lacks it."""
    choice = choose_unlisted(call, implementation)
    return choose_plain(call) if choice.cuda is None else choice


def _plan(name: str, call: Call, automatic: bool) -> Any:
    """Returns a plan, None for `xla`, or a `Refusal`: also of a slower kernel, if the choice is automatic."""
    if name == "xla":
        return None
    if call.objection is not None:
        return Refusal(call.objection)
    kernel = call.operation.kernels.get(name)
    if kernel is None:
        return Refusal(f"no kernel for {call.op}")
    plan = kernel.plan(call, target.capability())
    is_candidate = automatic and not isinstance(plan, Refusal)
    reason = kernel.slower(call) if is_candidate else None
    return plan if reason is None else Refusal(reason)


def is_recording() -> bool:
    return _recorder.get() is not None


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Returns which implementations `function(*args, **kwargs)` would run, in the order of its calls of this package.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. The choice shown is for one slice of a `jax.vmap`, and
    for the whole of a sharded array. When the function runs, the choice is made again for the batch and for each
    device's shard. If a mesh divides the experts, `route` gathers the logits; the choice does not show this.

    Args:
      function: a function of this package, or one of yours that calls such functions. A part of it that `jax.jit` has
        traced before with the same arguments is not traced again, so its calls are not listed.
      *args: the positional arguments of the function.
      **kwargs: its keyword arguments.

    Returns:
      One `Choice` per call. It prints as one line: the implementation on CUDA devices and elsewhere, and why others
      were passed over. A `Choice` for the gradient follows if the gradient has kernels. If the last call
      names an implementation that cannot run it, its `cuda` is None.

    Raises:
      TypeError: `function` is not callable.

    Examples:
      >>> x = jax.ShapeDtypeStruct((4, 32000), "float32")
      >>> print(*ps.explain(ps.fused_topk, x, 5))
      fused_topk float32[4, 32000], k=5: mosaic_gpu on cuda, xla elsewhere
    """
    if not callable(function):
        raise TypeError(
            "explain: function must be callable, and its arguments follow it, as in explain(softmax, x); "
            f"got {function!r} ({type(function).__name__})"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}

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


def _is_array(x: Any) -> bool:
    """Returns whether x is an array, or describes one. Scalars of NumPy, dtypes and known integers stay known."""
    is_integer = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.integer)
    is_number = (isinstance(x, np.ndarray) or is_integer) and not x.ndim and is_known(x)
    return not isinstance(x, type | np.generic) and not is_number and hasattr(x, "shape") and hasattr(x, "dtype")
