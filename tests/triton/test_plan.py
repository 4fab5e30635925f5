"""The launch plans of the Triton kernels, which need no Triton."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_softmax._src.gpu import layout
from pallas_softmax._src.triton import plan as triton_plan
from pallas_softmax._src.triton.plan import Block, Slabs
from tests.support import oracle
from tests.support.calls import DTYPES, FREE, lengths

# The plans of (rows, V): rows per program, or (parts, launches)
PLANS = [
    ("softmax", "float32", {(4000, 1): 1024, (4000, 500): 2, (4000, 1000): 1, (1, 32768): 1, (4000, 32769): (1, 1)}),
    ("softmax", "bfloat16", {(64, 128256): (4, 2), (65, 128256): (1, 1)}),
    ("log_softmax", "float32", {(4000, 28673): (1, 1)}),
    ("logsumexp", "float32", {(1, 50257): (13, 2)}),
    ("softmax_grad", "float32", {(1, 1000003): (245, 2), (10, 1000000): (21, 2)}),
    ("softmax_grad", "bfloat16", {(4000, 1000): 1, (4000, 25000): (1, 1)}),
]
# The launches that merge the parts of a row for (rows, V, k); 0 if a row is one part
TOPK_PLANS = [
    ("float32", {(4000, 1, 1): 0, (4000, 25000, 5): 0, (4000, 25000, 256): 0, (4000, 50257, 64): 0}),
    ("float32", {(4000, 128256, 64): 0, (4000, 128256, 256): 1, (1, 128256, 5): 1, (1, 3_000_000, 256): 2}),
    ("bfloat16", {(1, 128256, 64): 1}),
]


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


@pytest.mark.parametrize(("op", "dtype", "plans"), PLANS, ids=str)
def test_plan(op, dtype, plans):
    for shape, says in plans.items():
        plan = triton_plan.plan_softmax(op, *shape, dtype)
        got = plan.rows if isinstance(plan, Block) else (plan.parts, 1 + (plan.parts > 1))
        assert (shape, got) == (shape, says)


@pytest.mark.parametrize(("dtype", "plans"), TOPK_PLANS, ids=str)
def test_topk_plan(dtype, plans):
    for shape, launches in plans.items():
        assert (shape, len(merges(triton_plan.plan_topk(*shape, dtype)))) == (shape, launches)


def assert_parts(plan, vocab, step):
    """Asserts that parts have whole steps, that the last part is not empty, and that every element is in a part."""
    assert plan.length % step == 0
    assert (plan.parts - 1) * plan.length < vocab <= plan.parts * plan.length
    assert plan.parts < 65536  # the grid's second dimension


@settings(FREE, max_examples=120)
@given(st.sampled_from(oracle.OPERATIONS), st.integers(1, 5000), lengths, st.sampled_from(DTYPES), st.booleans())
@example("softmax_grad", 64, 32769, "float32", False)
@example("softmax", 128, 32769, "float32", True)
@example("softmax", 1, triton_plan.MAX_INDEX, "bfloat16", False)
def test_plans_cover_every_row_once(op, rows, vocab, dtype, masked):
    plan = triton_plan.plan_softmax(op, rows, vocab, dtype, masked)
    arrays = 2 if op in oracle.BACKWARD else 1
    threads = 32 * plan.warps
    assert power_of_two(plan.warps) and threads <= 1024
    if isinstance(plan, Block):
        assert plan.width // 2 < vocab <= plan.width
        assert power_of_two(plan.width) and power_of_two(plan.rows)
        assert plan.rows * plan.width * arrays <= 64 * threads
    else:
        assert_parts(plan, vocab, plan.depth * plan.width)
        assert power_of_two(plan.depth) and power_of_two(plan.width)
        assert plan.depth * plan.width * arrays <= 64 * threads
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
