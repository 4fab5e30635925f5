"""The contenders: each one becomes a call that can be checked and then timed.

A function under test maps x (and other inputs, such as a mask) to (y, indices), or to (y, None). A call has one of
three directions:

forward   calls the function
backward  computes the gradient, from values that an earlier forward call kept
both      returns outputs and gradient from one call
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Implementations that appear in a lowered program as custom calls of these names.
_KERNELS = ("mosaic_gpu", "triton")

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A contender on one input: run() starts a call, wait(result) returns when it has finished."""

    # -> some of y, indices, dx, in a dictionary. It takes other arguments for a JAX function, if any.
    run: Callable[..., Any]
    ran: str  # the implementation found in the lowered program, or a peer's library
    wait: Callable[[Any], Any] = jax.block_until_ready
    first_result_s: float | None = None  # seconds to trace, lower, compile and run it once
    extra_mb: float | None = None  # device memory that the program needs beyond its arguments
    indices: Any = None  # the winners, if a backward call starts from them
    text: str = ""  # the lowered program of a JAX function

    def result(self) -> Any:
        """Runs the call once, and returns its result when it has finished."""
        result = self.run()
        self.wait(result)
        return result


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    function: Callable[..., tuple[Any, Any]]
    help: str = ""  # of a peer, for the flag
    ours: bool = False
    torch: bool = False  # whether it takes arrays of torch
    stable: bool = True  # whether ties are guaranteed to be in order of their indices
    of_logits: bool = False  # whether it is a top-k without softmax, so that its values are logits
    ordered: bool = True  # whether its winners are in order
    asked: str = ""  # the implementation that ours must run, if its name does not say it
    options: dict[str, bool] | None = None  # XLA's

    def call(self, direction: str, arrays: Arrays, g: jax.Array | None) -> Call:
        """Returns its call on x and any further inputs. The cotangent g is y by default."""
        return (_torch_call if self.torch else _jax_call)(self, direction, arrays, g)


def named(name: str) -> Any:
    """Returns the argument `implementation` for a name in --implementations."""
    return None if name == "auto" else name


def ours(function: Callable[..., tuple[Any, Any]], names: tuple[str, ...]) -> list[Contender]:
    return [Contender(name, functools.partial(function, implementation=named(name)), ours=True) for name in names]


def fetch(array: Any, indices: np.ndarray, axis: int) -> np.ndarray:
    """Returns some elements of a JAX or torch array. torch's 16-bit results are widened."""
    if isinstance(array, jax.Array):
        return np.asarray(array.take(indices, axis))
    import torch  # pyright: ignore[reportMissingImports]

    part = array.detach().index_select(axis, torch.from_numpy(indices).to(array.device)).cpu()
    return (part.float() if part.is_floating_point() else part).numpy()


def jax_call(function: Callable[..., Any], *args: Any, ran: str = "", options: dict[str, bool] | None = None) -> Call:
    """Returns the call of a JAX function, compiled with XLA's `options`.

    The time to the first result includes the setup of Python and JAX, if this is the first call of the process. It
    reads no cache on disk. The memory is XLA's plan, which misses what a library such as RAFT allocates.
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
    text = lowered.as_text()
    kernels = [name for name in _KERNELS if re.search(rf'custom_call @"?[\w$.]*{name}', text)]
    ran = ran or "+".join(kernels) or "xla"
    run = lambda *others: compiled(*(others or args))  # noqa: E731
    return Call(run, ran, first_result_s=first_result_s, extra_mb=extra_mb, text=text)


def _jax_call(contender: Contender, direction: str, arrays: Arrays, g: jax.Array | None) -> Call:
    function = contender.function

    def forward(x: jax.Array, *mask: jax.Array) -> dict[str, Any]:
        return _present(*function(x, *mask))

    def pullback(x: jax.Array, *mask: jax.Array) -> tuple[Any, Any, Any]:
        return jax.vjp(lambda x: function(x, *mask), x, has_aux=True)

    def both(g: jax.Array | None, *arrays: jax.Array) -> dict[str, Any]:
        y, pull, indices = pullback(*arrays)
        return _present(y, indices, pull(y if g is None else g)[0])

    def backward(pull: Any, g: jax.Array) -> dict[str, Any]:
        return {"dx": pull(g)[0]}

    call = functools.partial(jax_call, ran="" if contender.ours else "jax", options=contender.options)
    if direction == "forward":
        return call(forward, *arrays)
    if direction == "both":
        return call(both, g, *arrays)
    pull, indices = jax.jit(lambda *arrays: pullback(*arrays)[1:])(*arrays)
    return dataclasses.replace(call(backward, pull, g), indices=indices)


def _present(y: Any, indices: Any, dx: Any = None) -> dict[str, Any]:
    return {name: a for name, a in {"y": y, "indices": indices, "dx": dx}.items() if a is not None}


def need_gpu(library: str) -> None:
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"{library} has kernels for NVIDIA GPUs only")


def torch_and_wait() -> tuple[Any, Callable[[Any], None]]:
    """Returns the module torch, and a function that waits for a result of torch on JAX's device."""
    import torch  # pyright: ignore[reportMissingImports]

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    return torch, lambda result: torch.cuda.synchronize() if on_gpu else None


def from_torch(result: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.from_dlpack(a.detach().contiguous()) for name, a in result.items()}


def _torch_call(contender: Contender, direction: str, arrays: Arrays, g: jax.Array | None) -> Call:
    """DLPack shares the JAX arrays' memory with torch."""
    torch, wait = torch_and_wait()
    x, *rest = map(torch.from_dlpack, arrays)
    leaf = x.requires_grad_(direction != "forward")
    gradient = None if g is None else torch.from_dlpack(g)

    def forward() -> dict[str, Any]:
        return _present(*contender.function(leaf, *rest))

    def both() -> dict[str, Any]:
        result = forward()
        of_y = result["y"].detach() if gradient is None else gradient
        return result | {"dx": torch.autograd.grad(result["y"], leaf, of_y)[0]}

    def backward() -> dict[str, Any]:
        return {"dx": torch.autograd.grad(kept["y"], leaf, gradient, retain_graph=True)[0]}

    kept = forward() if direction == "backward" else {}
    run = {"forward": forward, "backward": backward, "both": both}[direction]
    return Call(run, contender.name, wait, indices=kept.get("indices"))
