"""The kernels of routers with the plans that the package chooses."""

import jax.numpy as jnp
import numpy as np

import pallas_softmax as ps
from pallas_softmax._src.dispatch.operation import Call
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.route import kernel
from pallas_softmax._src.route.formulas import Gate, Groups
from pallas_softmax._src.route.operation import ROUTE
from pallas_softmax._src.route.plan import plan
from pallas_softmax._src.topk import plan as topk_plan
from tests.support.cases import F32
from tests.support.plans import HOPPER
from tests.support.twins import INTERPRET, fewer_rows, interpreted


def plan_route(experts, k, dtype, *, biased, groups=1):
    dtype = np.dtype(dtype).name
    call = Call(ROUTE, dtype, 1, experts, masked=biased, k=k, groups=groups, function="route")
    tile = plan(call, HOPPER)
    assert isinstance(tile, Tile)
    return tile


def results_and_gradient(k, gate, interpret=INTERPRET):
    """Returns what `routing.results_and_gradient` returns, by the kernels, for a gate of tests/support/routing.py."""
    of_kernel = Gate(gate.score, gate.renormalize, gate.scale)

    def tile(whole):
        return whole if interpret is None else fewer_rows(whole)

    def run(x, bias, g, g_logsumexp):
        x, no_bias = jnp.asarray(x), np.zeros(x.shape[-1], F32) if gate.steered else None
        steer = bias if gate.biased else no_bias
        chosen = plan_route(x.shape[-1], k, x.dtype, biased=gate.steered, groups=gate.groups)
        steer = None if steer is None else jnp.asarray(steer)[None]
        groups = Groups(gate.groups, gate.top_groups or 1, gate.group_best or 2)
        plan_of_gradient = topk_plan.plan_topk_grad(x.shape[-1], x.dtype)
        assert plan_of_gradient is not None
        with interpreted(interpret):
            weights, indices, logsumexp = kernel.route_rows(tile(chosen), x, steer, k=k, gate=of_kernel, groups=groups)
            cotangents = jnp.asarray(g), jnp.asarray(g_logsumexp).reshape(-1, 1)
            (dx,) = kernel.route_grad_rows(tile(plan_of_gradient), (x, indices), *cotangents, gate=of_kernel)
        return ps.Routing(weights, indices, logsumexp[:, 0]), dx

    return run
