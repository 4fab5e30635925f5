"""The kernels of routers with the plans that the package chooses."""

import jax.numpy as jnp
import numpy as np

from pallas_softmax._src import folding
from pallas_softmax._src.route import kernel
from pallas_softmax._src.route import plan as route_plan
from pallas_softmax._src.route.formulas import Gate
from pallas_softmax._src.topk import plan as topk_plan
from tests.support.cases import F32
from tests.support.kernels import INTERPRET, fewer_rows
from tests.support.twins import interpreted


def plan_route(rows, experts, k, dtype, *, biased, groups=1):
    """Returns the tile that the package chooses."""
    tile = route_plan.plan_route(rows, experts, k, np.dtype(dtype).itemsize, biased=biased, groups=groups)
    assert tile is not None
    return tile


def route_rows(x, k, gate, bias, interpret=INTERPRET):
    """Returns the kernel's weights, indices and logsumexp for a gate of tests/support/routing.py."""
    steer = bias if gate.biased else np.zeros(x.shape[-1], F32) if gate.steered else None
    plan = plan_route(*x.shape, k, x.dtype, biased=gate.steered, groups=gate.groups)
    mask = None if steer is None else folding.fold_mask(jnp.asarray(steer)[None], x.shape, 1)
    with interpreted(interpret):
        weights, indices, logsumexp = kernel.route_rows(
            jnp.asarray(x),
            mask,
            k,
            plan if interpret is None else fewer_rows(plan),
            gate=Gate(gate.score, gate.renormalize, gate.scale),
            groups=gate.groups,
            top_groups=gate.top_groups or 1,
            group_best=gate.group_best or 2,
        )
    return weights, indices, logsumexp[:, 0]


def route_grad_rows(x, indices, gate, g, g_logsumexp, interpret=INTERPRET):
    """Returns the kernel's cotangents of the logits."""
    plan = topk_plan.plan_topk_grad(x.shape[-1], x.dtype)
    assert plan is not None
    plan = plan if interpret is None else fewer_rows(plan)
    gate = Gate(gate.score, gate.renormalize, gate.scale)
    arrays = (jnp.asarray(a) for a in (x, indices, g, g_logsumexp))
    with interpreted(interpret):
        return kernel.route_grad_rows(*arrays, plan, gate=gate)
