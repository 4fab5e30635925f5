"""Calls that test the choice and the launch plans of mosaic_gpu and of triton."""

import jax
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_softmax as ps
from pallas_softmax._src.dispatch.operation import Refusal
from pallas_softmax._src.sample.operation import CUTOFF, SAMPLE
from pallas_softmax._src.softmax.operation import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_GRAD,
    LOGSUMEXP,
    SOFTMAX,
    SOFTMAX_GRAD,
)
from pallas_softmax._src.topk.operation import MERGE, TOPK, TOPK_GRAD

DTYPES = ("float32", "bfloat16", "float16")
FREE = settings(max_examples=200, deadline=None, derandomize=True)
lengths = st.one_of(st.integers(1, 20_000), st.integers(1, 3_000_000))


def named(f, name):
    """Returns f with its implementation named."""
    return lambda *args, **kwargs: f(*args, implementation=name, **kwargs)


def topk(x, **kwargs):
    """Returns the top 5 of each row of x."""
    return ps.fused_topk(x, 5, **kwargs)


def device(kind):
    """Returns a context that makes JAX lower for this kind of GPU, without the GPU."""
    gpu = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


OPERATIONS = {
    operation.name: operation
    for operation in (
        SOFTMAX,
        SOFTMAX_GRAD,
        LOG_SOFTMAX,
        LOG_SOFTMAX_GRAD,
        LOGSUMEXP,
        TOPK,
        TOPK_GRAD,
        MERGE,
        CUTOFF,
        SAMPLE,
    )
}


def refusal(implementation, call, capability):
    """Returns why the implementation refuses the call; None if it has a plan."""
    plan = call.operation.kernels[implementation]().plan(call, capability)
    return plan.reason if isinstance(plan, Refusal) else None


def slower(implementation, call):
    """Returns why XLA is faster than the implementation; None if it is not."""
    return call.operation.kernels[implementation]().slower(call)
