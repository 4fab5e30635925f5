"""Functions lowered for a platform, which need not be there, and the Mosaic GPU kernels that are in the text."""

import re

import jax


def array(*shape, dtype="float32", **kwargs):
    """Returns the shape and dtype of an array that does not exist."""
    return jax.ShapeDtypeStruct(shape, dtype, **kwargs)


def lowered(f, *args, platform="cuda"):
    """Returns the text that f is lowered to."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def kernel_results(text):
    """Returns the shapes and dtypes of the results of each kernel call of a lowered computation: "128x4096xf32"."""
    signatures = re.findall(r"custom_call @mosaic_gpu\w*\(.* -> (.*)$", text, re.MULTILINE)
    return [re.findall(r"tensor<([^>]*)>", signature) for signature in signatures]


def kernel_names(text):
    """Returns the names under which the kernels of a lowered computation show in a profile."""
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    return [re.findall(r"\\00([a-z]\w*)_mosaic_gpu\\00", call)[-1] for call in calls]
