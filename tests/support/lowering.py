"""Functions lowered for a platform that the machine need not have, and the Mosaic GPU kernels in the lowered text."""

import re

import jax
import jax.numpy as jnp


def array(*shape, dtype="float32", **kwargs):
    return jax.ShapeDtypeStruct(shape, dtype, **kwargs)


def lowered(f, *args, platform="cuda"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def kernel_results(text):
    """Returns the shapes and dtypes of the results of each kernel call of a lowered computation: "128x4096xf32"."""
    signatures = re.findall(r"custom_call @mosaic_gpu\w*\(.* -> (.*)$", text, re.MULTILINE)
    return [re.findall(r"tensor<([^>]*)>", signature) for signature in signatures]


def kernel_names(text):
    """Returns the names of the kernels of a lowered computation, as a profile shows them."""
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    return [re.findall(r"\\00([a-z]\w*)_mosaic_gpu\\00", call)[-1] for call in calls]


def divided_calls(text):
    """Returns the calls that the package divides over a mesh, as XLA passes them: [(shapes of arguments, text)]."""
    calls = re.findall(r"custom_call @pallas_softmax_divided\(.*?backend_config = \"(.*?)\", .* : \((.*?)\) -> ", text)
    return [([*map(_shape, _TENSOR.findall(types))], call.replace("\\22", '"')) for call, types in calls]


_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>")
_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "ui": "uint"}


def _shape(tensor):
    dims, kind, bits = tensor
    return tuple(map(int, dims.split("x")[:-1])), jnp.dtype(_KINDS[kind] + bits if bits != "1" else "bool")


def square_sum(f):
    return lambda x: jnp.sum(f(x).astype("float32") ** 2)


MASKS = ("full", "along rows", "per row")


def mask_of(kind, rows, v):
    """Returns a mask of one of MASKS, or None."""
    shapes = {"full": (rows, v), "along rows": (1, v), "per row": (rows, 1)}
    return None if kind is None else array(*shapes[kind], dtype="bool")


# Ways to call or transform a function of an array (5, 3, V).
CALLS = {
    "call": lambda f: f,
    "where": lambda f: lambda x: f(x, where=x[:1] > 0),
    "axis": lambda f: lambda x: f(x, axis=0),
    "axes": lambda f: lambda x: f(x, axis=(0, 2)),
    "vmap": jax.vmap,
    "vmap with one mask": lambda f: lambda x: jax.vmap(lambda x, w: f(x, where=w), (0, None))(x, x[0] > 0),
    "grad": lambda f: jax.grad(square_sum(f)),
    "grad with where": lambda f: jax.grad(square_sum(lambda x: f(x, where=x > 0))),
    "vmap of grad": lambda f: jax.vmap(jax.grad(square_sum(f))),
}
