"""The launch plans of the Triton kernels, which need no Triton."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_softmax._src.gpu import layout
from pallas_softmax._src.triton import plan as triton_plan
from pallas_softmax._src.triton.plan import Slabs
from tests.support.calls import DTYPES, FREE, lengths

# (rows, V): (rows per program, parts, steps of a part)
PLANS = {
    (4000, 1): (256, 1, 1),
    (4000, 100): (2, 1, 1),
    (4000, 1000): (1, 1, 1),
    (1, 8192): (1, 1, 1),
    (65, 8193): (1, 1, 2),
    (65, 128256): (1, 1, 16),
    (64, 128256): (1, 4, 4),
    (1, 50257): (1, 13, 1),
    (1, 1000003): (1, 245, 1),
    (10, 1000000): (1, 25, 5),
}
# (rows, V, k, dtype): launches that merge the parts of a row; 0 if a row is one part
TOPK_PLANS = {
    (4000, 1, 1, "float32"): 0,
    (4000, 25000, 5, "float32"): 0,
    (4000, 25000, 256, "float32"): 0,
    (4000, 50257, 64, "float32"): 0,
    (4000, 128256, 64, "float32"): 0,
    (4000, 128256, 256, "float32"): 1,
    (1, 128256, 5, "float32"): 1,
    (1, 128256, 64, "bfloat16"): 1,
    (1, 3_000_000, 256, "float32"): 2,
}


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def merges(plan):
    """Returns the number of lists before each merge; asserts that programs merge two or more lists of few elements."""
    parts, counts = plan.parts, []
    while parts > 1:
        counts.append(parts)
        fan_in = triton_plan.merge_fan_in(parts, plan.slots)
        assert fan_in >= 2 and power_of_two(fan_in) and fan_in * plan.slots <= 4096
        assert power_of_two(triton_plan.merge_warps(fan_in, plan.slots))
        parts = -(-parts // fan_in)
    return counts


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_plan(shape):
    plan = triton_plan.plan_softmax(*shape)
    assert (plan.rows, plan.parts, plan.length // plan.width) == PLANS[shape]


@pytest.mark.parametrize("shape", TOPK_PLANS, ids=str)
def test_topk_plan(shape):
    assert len(merges(triton_plan.plan_topk(*shape))) == TOPK_PLANS[shape]


def assert_parts(plan, vocab, step):
    """Asserts that parts have whole steps, that the last part is not empty, and that every element is in a part."""
    assert plan.length % step == 0
    assert (plan.parts - 1) * plan.length < vocab <= plan.parts * plan.length
    assert plan.parts < 65536  # the grid's second dimension


@settings(FREE, max_examples=120)
@given(st.integers(1, 5000), lengths)
@example(64, 8193)
@example(128, 32769)
@example(1, triton_plan.MAX_INDEX)
def test_plans_cover_every_row_once(rows, vocab):
    plan = triton_plan.plan_softmax(rows, vocab)
    assert all(map(power_of_two, (plan.rows, plan.width, plan.warps))) and plan.warps <= 32
    assert plan.rows * plan.width <= 8 * 32 * plan.warps
    assert_parts(plan, vocab, plan.width)
    assert plan.rows == 1 or plan.length == plan.width
    assert plan.parts == 1 or rows * plan.parts <= 256


@settings(FREE, max_examples=120)
@given(
    st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    lengths,
    st.one_of(st.integers(1, 16), st.integers(1, triton_plan.MAX_K)),
    st.sampled_from(DTYPES),
)
@example(1, 3_000_000, 256, "float32")
@example(5000, 1, 1, "bfloat16")
def test_topk_plans_cover_every_row_once(rows, vocab, k, dtype):
    k = min(k, vocab)
    plan = triton_plan.plan_topk(rows, vocab, k, dtype)
    assert_parts(plan, vocab, plan.groups * plan.vec)
    assert plan.slots // 2 < max(k, 2) <= plan.slots
    assert all(map(power_of_two, (plan.slots, plan.groups, plan.vec, plan.warps)))
    assert plan.slots <= plan.groups and plan.warps <= 32
    assert plan.groups * plan.vec <= 64 * 32 * plan.warps
    assert_levels(plan)
    merges(plan)


def assert_levels(plan):
    """Asserts that levels lead from whole groups to single elements; each level reads the previous level's winners."""
    slabs_of_part = plan.length // (plan.groups * plan.vec)
    elements = plan.vec * layout.power_of_two(slabs_of_part, 1)
    for slabs, chosen in plan.levels:
        assert slabs * plan.vec == elements  # all elements of a winning group
        assert plan.slots * elements <= 8192
        assert chosen < elements and elements % chosen == 0
        assert chosen == 1 or chosen % plan.vec == 0  # whole slabs, which _members requires
        assert plan.slots <= plan.slots * elements // chosen
        elements = chosen
    assert elements == 1


@FREE
@given(st.integers(1, 32), st.integers(0, 8), st.integers(0, 11), st.integers(0, 3))
def test_levels_of_any_plan(slabs, slots, groups, vec):
    plan = Slabs(1, slabs << groups << vec, 2 << min(slots, groups), 1 << groups, 1 << vec, 1)
    elements = layout.power_of_two(slabs, 1) << vec
    for _, chosen in plan.levels:
        assert chosen < elements and elements % chosen == 0 and (chosen == 1 or chosen % plan.vec == 0)
        elements = chosen
    assert elements == 1 and len(plan.levels) <= 4
