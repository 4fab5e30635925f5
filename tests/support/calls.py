"""The calls whose choice and whose launch plans are tested, for mosaic_gpu and for triton."""

import jax
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_softmax as ps

DTYPES = ("float32", "bfloat16", "float16")
FREE = settings(max_examples=200, deadline=None, derandomize=True)
lengths = st.one_of(st.integers(1, 20_000), st.integers(1, 3_000_000))


def named(f, name):
    """Returns f with its implementation named."""
    return lambda *args, **kwargs: f(*args, implementation=name, **kwargs)


def topk(x, **kwargs):
    """Returns the five best of the rows of x."""
    return ps.fused_topk(x, 5, **kwargs)


def device(kind):
    """Returns a context in which JAX lowers for this kind of GPU, which need not exist."""
    gpu = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))
