"""Every program that the plans of `triton` can choose, compiled and run on a GPU."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.triton import plan as triton_plan
from tests.support import bounds, cases, oracle
from tests.support import triton_kernels as triton
from tests.support.cases import BF16, F32
from tests.support.gpu import THREADS, one_process, only_triton

# A test compiles in many threads. Groups also begin first, and these tests are long.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu"), one_process("every plan of triton")]


def assert_all(check, plans):
    def run(plan):
        try:
            check(*plan)
        except Exception as e:
            return f"{plan}: {type(e).__name__}: {' '.join(str(e).split())[:300]}"

    with ThreadPoolExecutor(THREADS) as pool:
        failed = [failure for failure in pool.map(run, plans) if failure]
    assert not failed, f"{len(failed)} of {len(plans)} plans\n" + "\n".join(failed)


def triton_topk_plans():
    """Returns (V, dtype, k, plan): few cases with every program, level, sort and merge that `plan_topk` can choose.

    Each sort has its own layout, and Triton may miscompile some layouts: 3.6 does so with 2048 groups of one.
    """
    lengths = (1, 2, 17, 127, 400, 1000, 1500, 3000, 5000, 10000, 20000, 40000, 70000, 128256, 300000)
    lengths += (1003, 3001, 10002, 20011, 50257, 100002, 151935, 300001)  # not aligned to 16 bytes
    ks, every = (1, 2, 5, 9, 16, 17, 33, 64, 65, 128, 256), {}
    for k, v, rows, dtype in itertools.product(ks, lengths, (2, 64, 500), (F32, BF16)):
        if k <= v:
            plan = triton_plan.plan_topk(rows, v, k, dtype)
            fan = triton_plan.merge_fan_in(plan.parts, plan.slots)
            every.setdefault((plan, dtype), (v, dtype, k, plan, fan))

    def has(plan, fan):
        """Returns the programs, sorts and merges that a plan compiles."""
        found = {(plan.slots, plan.groups, plan.vec, plan.warps), plan.levels}
        found |= {("sort", plan.slots, plan.warps, slabs * plan.vec, size) for slabs, size in plan.levels}
        return found | ({("merge", plan.slots, fan)} if fan > 1 else set())

    chosen, missing = [], set().union(*(has(*case[3:]) for case in every.values()))
    while missing:
        best = max(every.values(), key=lambda case: len(has(*case[3:]) & missing))
        missing -= has(*best[3:])
        chosen.append(best[:4])
    return chosen


@only_triton
def test_every_triton_plan_of_topk(implementation):
    def check(v, dtype, k, plan):
        x = cases.rows(["normal", "integers"] * 4, v, dtype)  # different rows
        run = functools.partial(triton.topk, k=k, log=False, dtype=jnp.dtype(F32), plan=plan)
        winners, _ = jax.jit(run)(x, None, np.ones((1, 1), F32))
        np.testing.assert_array_equal(winners[1], oracle.topk_indices(x, k))

    assert_all(check, triton_topk_plans())


def triton_softmax_plans():
    """Returns (operation, V, dtype, plan): one case for each program that `plan_softmax` can choose."""
    lengths = (1, 2, 3, 5, 9, 17, 33, 65, 129, 400, 1000, 1500, 3000, 5000, 10000, 20000, 40000, 50257, 128256)
    every = {}
    for op, v, rows, dtype in itertools.product(oracle.OPERATIONS, lengths, (2, 64, 500), (F32, BF16)):
        plan = triton_plan.plan_softmax(op, rows, v, dtype)
        if isinstance(plan, triton_plan.Block):
            program = plan.rows, plan.width, plan.warps
        else:
            program = plan.depth, plan.width, plan.warps, plan.parts > 1, v % 8 == 0
        every.setdefault((program, op in oracle.BACKWARD), []).append((op, v, dtype, plan))
    return [options[i % len(options)] for i, options in enumerate(every.values())]


@only_triton
def test_every_triton_plan_of_softmax(implementation):
    names = ["normal", "peaked", "integers"]

    def check(op, v, dtype, plan):
        arrays = cases.operands(op, cases.rows(names, v, dtype))
        out = jax.jit(lambda arrays: triton.softmax_rows(op, arrays, None, (1,), plan))(arrays)
        got = np.asarray(out[0] if op == "logsumexp" else out).astype(dtype)
        bounds.assert_operation(op, got, arrays, names)

    assert_all(check, triton_softmax_plans())
