"""Calls that a type checker must accept or refuse; tests/package/test_typing.py runs pyright on this file.

Each `pyright: ignore` marks a call that pyright must refuse: pyright reports an unnecessary comment as an error.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=error

import jax
import numpy as np

import pallas_softmax as ps
from pallas_softmax import Axis, AxisName, Choice, ImplementationName, Reduction


def accepted(key: jax.Array, x: jax.Array, w: jax.Array, labels: jax.Array, name: ImplementationName) -> None:
    """Has calls that a type checker accepts."""
    axis: Axis = (0, 1)
    axis_name: AxisName = "v"
    reduction: Reduction = None
    ps.softmax(x, axis, axis_name=axis_name, implementation=name)
    for each in ps.IMPLEMENTATIONS:
        ps.log_softmax(x, implementation=each)
    total: jax.Array = ps.logsumexp(x, implementation="xla")
    size, sign = ps.logsumexp(total, return_sign=True)
    values, indices = ps.fused_topk(size, np.int64(3), implementation=None)
    ps.top_k(values, 2, lengths=indices, sorted=False)
    ps.sample(key, values, temperature=sign)
    ps.sample(np.array([0, 1], np.uint32), values, top_k=indices)
    ps.linear_cross_entropy(x, w, labels, reduction=reduction, implementation="mosaic_gpu")
    choices: list[Choice] = ps.explain(ps.softmax, x)
    cuda: str | None = choices[0].cuda
    ps.online.combine(ps.online.identity(), ps.online.scan(x))
    print(cuda)


def refused(key: jax.Array, x: jax.Array, w: jax.Array, labels: jax.Array) -> None:
    """Has calls that a type checker refuses."""
    ps.softmax(x, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.log_softmax(x, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.logsumexp(x, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.fused_topk(x, 1, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.fused_topk(x, 1.0)  # pyright: ignore[reportArgumentType]
    ps.top_k(x, 1, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.sample(key, x, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.sample(0, x)  # pyright: ignore[reportArgumentType]
    ps.linear_logsumexp(x, w, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.linear_log_probs(x, w, labels, implementation="cuda")  # pyright: ignore[reportArgumentType]
    ps.linear_cross_entropy(x, w, labels, reduction="max")  # pyright: ignore[reportArgumentType]
    ps.online.combine(ps.online.identity(), None)  # pyright: ignore[reportArgumentType]
    ps.explain(ps.softmax(x))  # pyright: ignore[reportArgumentType]
