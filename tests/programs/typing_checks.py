"""Calls that a type checker must accept or refuse; tests/package/test_typing.py runs pyright and mypy on this file.

Each `type: ignore` marks a call that both must refuse: they report an unnecessary comment as an error.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=error

import jax
import numpy as np

import pallas_softmax as ps
from pallas_softmax import Axis, AxisName, Choice, ImplementationName, Reduction


def accepted(key: jax.Array, x: jax.Array, w: jax.Array, labels: jax.Array, name: ImplementationName) -> None:
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
    plus: jax.Array = ps.token_stats(x, labels, rank=True).log_probs + 1
    mean: jax.Array = ps.linear_token_stats(x, w, labels).log_probs.mean()
    ps.online.combine(ps.online.identity(), ps.online.scan(x))
    print(cuda, plus, mean)


def results_of_flags(x: jax.Array, w: jax.Array, labels: jax.Array, flag: bool) -> None:
    loss: jax.Array = ps.linear_cross_entropy(x, w, labels)
    number = float(ps.linear_cross_entropy(x, w, labels, return_logsumexp=False))
    pair: tuple[jax.Array, jax.Array] = ps.linear_cross_entropy(x, w, labels, return_logsumexp=True)
    either: jax.Array | tuple[jax.Array, jax.Array] = ps.linear_cross_entropy(x, w, labels, return_logsumexp=flag)
    total: jax.Array = ps.logsumexp(x, None, None, False, False)
    pair = ps.logsumexp(x, None, None, return_sign=True)
    either = ps.logsumexp(x, None, None, False, flag)
    print(loss, number, pair, either, total)


def refused(key: jax.Array, x: jax.Array, w: jax.Array, labels: jax.Array) -> None:
    ps.softmax(x, implementation="cuda")  # type: ignore
    ps.log_softmax(x, implementation="cuda")  # type: ignore
    ps.logsumexp(x, implementation="cuda")  # type: ignore
    ps.fused_topk(x, 1, implementation="cuda")  # type: ignore
    ps.fused_topk(x, 1.0)  # type: ignore
    ps.top_k(x, 1, implementation="cuda")  # type: ignore
    ps.sample(key, x, implementation="cuda")  # type: ignore
    ps.sample(0, x)  # type: ignore
    ps.linear_logsumexp(x, w, implementation="cuda")  # type: ignore
    ps.linear_log_probs(x, w, labels, implementation="cuda")  # type: ignore
    ps.linear_cross_entropy(x, w, labels, reduction="max")  # type: ignore
    float(ps.linear_cross_entropy(x, w, labels, return_logsumexp=True))  # type: ignore
    print(ps.token_stats(x, labels).log_probs.nothing)  # type: ignore
    ps.online.combine(ps.online.identity(), None)  # type: ignore
    ps.explain(ps.softmax(x))  # type: ignore
