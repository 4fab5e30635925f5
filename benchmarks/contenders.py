"""What is compared: each contender as a call that can be checked, then timed.

A function under test maps x to (y, None), or to (values, indices). From it, the three directions:
forward is the function; backward is its gradient from what the forward call kept, which was
computed before; both is one call that returns the outputs and the gradient.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Implementations that are seen in a lowered program, by the name of a custom call.
_KERNELS = ("mosaic_gpu", "triton")


@dataclasses.dataclass(frozen=True)
class Call:
    """A contender on one input: run() starts it, wait(result) returns when it has finished."""

    run: Callable[[], dict[str, Any]]  # some of y, indices, dx
    wait: Callable[[Any], Any]
    fetch: Callable[[Any, np.ndarray], np.ndarray]  # chosen rows of one result, as numpy
    ran: str  # the implementation found in the lowered program; of a peer its library
    indices: Any = None  # the winners that a backward call starts from


@dataclasses.dataclass(frozen=True)
class Contender:
    """A named function, and how to make calls of it."""

    name: str
    ours: bool
    function: Callable[[Any], tuple[Any, Any]]
    prepare: Callable[["Contender", str, jax.Array, jax.Array], Call]
    stable: bool = True  # whether it promises the lowest index first among ties


def ours(function: Callable[..., tuple[Any, Any]], names: tuple[str, ...]) -> list[Contender]:
    """A function of ours under each of its implementations; auto leaves the choice to it."""
    return [
        Contender(
            name,
            ours=True,
            function=functools.partial(function, implementation=None if name == "auto" else name),
            prepare=prepare_jax,
        )
        for name in names
    ]


def _fetch_jax(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    return np.asarray(array[rows])


def _lowered_to(text: str) -> str:
    found = [name for name in _KERNELS if re.search(rf'custom_call @"?[\w$.]*{name}', text)]
    return "+".join(found) or "xla"


def prepare_jax(contender: Contender, direction: str, x: jax.Array, g: jax.Array) -> Call:
    """The call of a JAX function, jitted, with everything it needs on the device."""
    function = contender.function
    indices = None

    def forward(x: jax.Array) -> dict[str, Any]:
        y, indices = function(x)
        return {"y": y} if indices is None else {"y": y, "indices": indices}

    def both(x: jax.Array, g: jax.Array) -> dict[str, Any]:
        y, pull, indices = jax.vjp(function, x, has_aux=True)
        result = {"y": y, "dx": pull(g)[0]}
        return result if indices is None else result | {"indices": indices}

    def backward(pull: Any, g: jax.Array) -> dict[str, Any]:
        return {"dx": pull(g)[0]}

    if direction == "forward":
        timed, args = forward, (x,)
    elif direction == "both":
        timed, args = both, (x, g)
    else:
        keep = jax.jit(lambda x: jax.vjp(function, x, has_aux=True)[1:])
        pull, indices = keep(x)
        timed, args = backward, (pull, g)
    jitted = jax.jit(timed)
    ran = _lowered_to(jitted.lower(*args).as_text()) if contender.ours else "jax"
    return Call(
        run=lambda: jitted(*args),
        wait=jax.block_until_ready,
        fetch=_fetch_jax,
        ran=ran,
        indices=indices,
    )


def prepare_torch(contender: Contender, direction: str, x: jax.Array, g: jax.Array) -> Call:
    """The call of a torch function on the same memory, through DLPack."""
    import torch  # pyright: ignore[reportMissingImports]

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    leaf = torch.from_dlpack(x).requires_grad_(direction != "forward")
    gradient = torch.from_dlpack(g)

    def forward() -> dict[str, Any]:
        y, indices = contender.function(leaf)
        return {"y": y} if indices is None else {"y": y, "indices": indices}

    def both() -> dict[str, Any]:
        result = forward()
        return result | {"dx": torch.autograd.grad(result["y"], leaf, gradient)[0]}

    def backward() -> dict[str, Any]:
        return {"dx": torch.autograd.grad(kept["y"], leaf, gradient, retain_graph=True)[0]}

    kept = forward() if direction == "backward" else {}

    def wait(result: Any) -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def fetch(tensor: Any, rows: np.ndarray) -> np.ndarray:
        part = tensor.detach()[torch.from_numpy(rows).to(tensor.device)].cpu()
        return (part.float() if part.is_floating_point() else part).numpy()

    run = {"forward": forward, "backward": backward, "both": both}[direction]
    return Call(run=run, wait=wait, fetch=fetch, ran="torch", indices=kept.get("indices"))
