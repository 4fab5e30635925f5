"""The contenders: each one becomes a call that can be checked and then timed.

A function under test maps x (and a mask) to (y, None), or x to (values, indices). A call has one of three directions:

forward   calls the function
backward  computes the gradient, from values that an earlier forward call kept
both      returns outputs and gradient from one call
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from pallas_softmax import ImplementationName

# Implementations that appear in a lowered program as custom calls of these names.
_KERNELS = ("mosaic_gpu", "triton")


@dataclasses.dataclass(frozen=True)
class Call:
    """A contender on one input: run() starts a call, wait(result) returns when it has finished."""

    run: Callable[[], Any]  # -> some of y, indices, dx, in a dictionary
    ran: str  # the implementation found in the lowered program, or a peer's library
    wait: Callable[[Any], Any] = jax.block_until_ready
    first_result_s: float | None = None  # seconds to trace, lower, compile and run it once
    extra_mb: float | None = None  # device memory that the program needs beyond its arguments
    indices: Any = None  # the winners, if a backward call starts from them


@dataclasses.dataclass(frozen=True)
class Contender:
    """A named function, and how to turn it into calls."""

    name: str
    ours: bool
    function: Callable[..., tuple[Any, Any]]
    prepare: Callable[["Contender", str, tuple[jax.Array, ...], jax.Array | None], Call]
    stable: bool = True  # whether ties are guaranteed to be in order of their indices
    of_logits: bool = False  # whether it is a top-k without softmax, so that its values are logits
    ordered: bool = True  # whether its winners are in order
    asked: str = ""  # the implementation that ours must run; empty if ours may choose


def named(name: str) -> ImplementationName | None:
    """Returns the argument `implementation` for a name in --implementations: None for auto."""
    return None if name == "auto" else cast(ImplementationName, name)


def ours(function: Callable[..., tuple[Any, Any]], names: tuple[str, ...]) -> list[Contender]:
    """Returns a contender per implementation of a function of ours. With auto, the function chooses."""
    return [
        Contender(
            name,
            ours=True,
            function=functools.partial(function, implementation=named(name)),
            prepare=prepare_jax,
            asked="" if name == "auto" else name,
        )
        for name in names
    ]


def fetch(array: Any, indices: np.ndarray, axis: int) -> np.ndarray:
    """Returns the elements at `indices` along an axis of a JAX or torch array. torch's 16-bit results are widened."""
    if isinstance(array, jax.Array):
        return np.asarray(array.take(indices, axis))
    import torch  # pyright: ignore[reportMissingImports]

    part = array.detach().index_select(axis, torch.from_numpy(indices).to(array.device)).cpu()
    return (part.float() if part.is_floating_point() else part).numpy()


def jax_call(
    function: Callable[..., Any], *args: Any, ran: str = "", options: dict[str, bool] | None = None
) -> Call:
    """Returns the call of a JAX function, compiled with XLA's `options`.

    The time to the first result includes the one-time setup of Python and JAX, if this is the first call of the
    process. Earlier traces by JAX stay cached, but nothing is read from a cache on disk. The memory is XLA's plan,
    which does not know of allocations inside a library such as RAFT.
    """
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    compiled = lowered.compile(compiler_options=options)
    jax.block_until_ready(compiled(*args))
    first_result_s = time.perf_counter() - start
    extra_mb = None
    if memory := compiled.memory_analysis():
        extra = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        extra_mb = extra / 1e6
    return Call(
        run=lambda: compiled(*args),
        ran=ran or _lowered_to(lowered.as_text()),
        first_result_s=first_result_s,
        extra_mb=extra_mb,
    )


def _lowered_to(text: str) -> str:
    """Returns the implementations with kernels in a lowered program, joined by "+", or "xla"."""
    found = [name for name in _KERNELS if re.search(rf'custom_call @"?[\w$.]*{name}', text)]
    return "+".join(found) or "xla"


def prepare_jax(
    contender: Contender,
    direction: str,
    arrays: tuple[jax.Array, ...],
    g: jax.Array | None,
    options: dict[str, bool] | None = None,
) -> Call:
    """Returns the call of a JAX contender for one direction, with all its inputs on the device."""
    function = contender.function

    def forward(x: jax.Array, *mask: jax.Array) -> dict[str, Any]:
        y, indices = function(x, *mask)
        return {name: a for name, a in (("y", y), ("indices", indices)) if a is not None}

    def pullback(x: jax.Array, *mask: jax.Array) -> tuple[Any, Any, Any]:
        return jax.vjp(lambda x: function(x, *mask), x, has_aux=True)

    def both(g: jax.Array, *arrays: jax.Array) -> dict[str, Any]:
        y, pull, indices = pullback(*arrays)
        result = {"y": y, "dx": pull(g)[0]}
        return result if indices is None else result | {"indices": indices}

    def backward(pull: Any, g: jax.Array) -> dict[str, Any]:
        return {"dx": pull(g)[0]}

    call = functools.partial(jax_call, ran="" if contender.ours else "jax", options=options)
    if direction == "forward":
        return call(forward, *arrays)
    if direction == "both":
        return call(both, g, *arrays)
    pull, indices = jax.jit(lambda *arrays: pullback(*arrays)[1:])(*arrays)
    return dataclasses.replace(call(backward, pull, g), indices=indices)


def torch_and_wait() -> tuple[Any, Callable[[Any], None]]:
    """Returns the module torch, and a function that waits for a result of torch on JAX's device."""
    import torch  # pyright: ignore[reportMissingImports]

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    return torch, lambda result: torch.cuda.synchronize() if on_gpu else None


def prepare_torch(
    contender: Contender, direction: str, arrays: tuple[jax.Array, ...], g: jax.Array | None
) -> Call:
    """Returns the call of a torch function. DLPack shares the JAX arrays' memory with torch."""
    x, *mask = arrays
    if mask:
        raise NotImplementedError(f"{contender.name}'s softmax takes no mask")
    torch, wait = torch_and_wait()
    leaf = torch.from_dlpack(x).requires_grad_(direction != "forward")
    gradient = None if g is None else torch.from_dlpack(g)

    def forward() -> dict[str, Any]:
        y, indices = contender.function(leaf)
        return {"y": y} if indices is None else {"y": y, "indices": indices}

    def both() -> dict[str, Any]:
        result = forward()
        return result | {"dx": torch.autograd.grad(result["y"], leaf, gradient)[0]}

    def backward() -> dict[str, Any]:
        return {"dx": torch.autograd.grad(kept["y"], leaf, gradient, retain_graph=True)[0]}

    kept = forward() if direction == "backward" else {}

    run = {"forward": forward, "backward": backward, "both": both}[direction]
    return Call(run, contender.name, wait, indices=kept.get("indices"))
