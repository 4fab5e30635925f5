"""The launch plans of softmax, log_softmax and logsumexp: pure functions of the call and the GPU."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.softmax import plan as softmax_plan
from tests.support import oracle
from tests.support.calls import DTYPES, FREE, lengths
from tests.support.plans import CAPABILITIES, HOPPER, check_tile

# The plans of shapes (rows, V) on Hopper: "tile" for rows in registers, or (CTAs of a row, launches)
PLANS = [
    ("softmax", "float32", {(1, 1): "tile", (4000, 1000): "tile", (16, 10240): "tile", (16, 12288): "tile"}),
    ("softmax", "bfloat16", {(4096, 10000): "tile"}),
    ("softmax_grad", "bfloat16", {(4000, 5000): "tile"}),
    # On both sides of each threshold for rows in registers
    ("softmax", "float32", {(4000, 12288): "tile", (4000, 12292): (1, 1)}),
    ("softmax", "bfloat16", {(4000, 5119): "tile", (4000, 5121): (1, 1)}),
    ("softmax_grad", "float32", {(4000, 6144): "tile", (4000, 6148): (1, 1)}),
    ("softmax", "float32", {(4000, 25000): (2, 1), (10, 16128): (8, 1), (1, 50257): (8, 1), (10, 49600): (8, 1)}),
    ("softmax", "float32", {(1, 90000): (16, 1), (1, 100004): (16, 1), (10, 100000): (16, 1), (16, 200000): (16, 1)}),
    ("softmax", "float32", {(16, 400000): (16, 1), (1, 1000003): (256, 2)}),
    ("softmax", "bfloat16", {(4096, 50257): (4, 1), (512, 128256): (8, 1)}),
    ("log_softmax", "bfloat16", {(512, 151936): (8, 1)}),
    ("softmax_grad", "float32", {(16, 200000): (16, 1), (1024, 262144): (16, 1)}),
    ("softmax_grad", "bfloat16", {(1, 128256): (16, 1), (1, 200000): (16, 1)}),
    ("logsumexp", "float32", {(4000, 25000): (2, 1), (1024, 128256): (8, 1), (1, 200000): (16, 1)}),
    ("logsumexp", "float32", {(1, 1000000): (256, 2)}),
    ("logsumexp", "bfloat16", {(1024, 17000): (1, 1), (4000, 25000): (2, 1), (4000, 50257): (2, 1)}),
    ("logsumexp", "bfloat16", {(64, 128256): (4, 1), (4096, 262144): (16, 1)}),
    ("token_stats", "float32", {(1024, 262144): (16, 1)}),
    ("token_stats", "bfloat16", {(4000, 25000): (1, 1), (500, 25000): (2, 1), (4000, 50257): (2, 1)}),
    ("token_stats", "bfloat16", {(4096, 128256): (4, 1), (1024, 262144): (8, 1)}),
]
# The (teams, slots) of rows in turns; None without turns. Rows take turns if one part fills a multiprocessor.
TURNS = [
    ("softmax", "float32", {(512, 500009): (70, 13), (15, 500009): (7, 13), (256, 1_000_000): (35, 13)}),
    ("softmax", "float32", {(28, 1_000_000): (7, 13), (256, 2_000_000): (35, 13)}),
    ("softmax", "float32", {(30, 1_400_000): None, (256, 5_000_000): None, (1024, 262144): None}),
    ("log_softmax", "bfloat16", {(40, 1000000): (7, 13)}),
    ("softmax_grad", "float32", {(512, 500009): (70, 13), (256, 1_000_000): (35, 13)}),
    ("softmax_grad", "float32", {(28, 1_000_000): None, (1024, 200_000): None, (1024, 262144): (133, 13)}),
    ("softmax_grad", "bfloat16", {(7, 516096): None, (512, 500009): (70, 6), (2000, 516096): (252, 6)}),
    ("log_softmax_grad", "float32", {(28, 500009): (7, 13)}),
    ("logsumexp", "float32", {(512, 500009): None}),
]


@pytest.mark.parametrize(("op", "dtype", "plans"), PLANS, ids=str)
def test_plan(op, dtype, plans):
    for shape, says in plans.items():
        plan = softmax_plan.plan_softmax(op, *shape, dtype, HOPPER)
        got = "tile" if isinstance(plan, Tile) else (plan.count, 1 if plan.cluster else 2)
        assert (shape, got) == (shape, says)


@pytest.mark.parametrize(("op", "dtype", "plans"), TURNS, ids=str)
def test_turns(op, dtype, plans):
    for shape, says in plans.items():
        plan = softmax_plan.plan_softmax(op, *shape, dtype, HOPPER)
        assert (shape, plan.teams, plan.slots) == (shape, *(says or (None, None)))


def test_steps_are_longer_for_reductions_and_the_longest_segments():
    shapes = [("logsumexp", 4000, 32000), ("softmax", 512, 500009), ("softmax", 4000, 32000)]
    assert [softmax_plan.plan_softmax(*s, "float32", HOPPER).step_blocks for s in shapes] == [8, 8, 4]


# The fields of a plan that the order of a row's sums depends on. Turns change only when a row is loaded.
def order_of(plan):
    return plan if isinstance(plan, Tile) else (plan.cut, plan.step_blocks, plan.cluster)


VOCABS = (2, 127, 1000, 8192, 12288, 12292, 32000, 50257, 50304, 100_000, 100_352, 128256, 151936, 262144, 445_001)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [*oracle.OPERATIONS, "token_stats"])
def test_rows_have_one_order_in_any_batch(op, dtype):
    for masked, vocab in itertools.product((False, True), VOCABS):
        orders = {
            order_of(softmax_plan.plan_softmax(op, rows, vocab, dtype, HOPPER, masked=masked))
            for rows in (1, 2, 3, 8, 13, 16, 17, 64, 100, 512, 1024, 2000, 4096)
        }
        assert len(orders) == 1


@pytest.mark.parametrize("op", ["softmax", "softmax_grad", "token_stats"])
def test_segments_of_16_bit_rows_leave_few_blocks_idle(op):
    """A sixteenth of 50,304 elements has 3.07 blocks, which take four. A sixteenth of 65,536 has four."""
    for vocab, dtype, segments in (50304, "bfloat16", 8), (65536, "bfloat16", 16), (50304, "float32", 16):
        plans = [softmax_plan.plan_softmax(op, rows, vocab, dtype, HOPPER) for rows in (1, 64, 1024)]
        assert [plan.count * plan.per_cta for plan in plans] == [segments] * 3


def test_few_rows_have_a_cta_for_each_segment():
    plans = [softmax_plan.plan_softmax("softmax", rows, 32000, "float32", HOPPER) for rows in (1, 200, 4000)]
    assert [(plan.count, plan.per_cta) for plan in plans] == [(8, 1), (4, 2), (2, 4)]


def test_the_mask_of_a_part_is_loaded_ahead_into_few_registers():
    for vocab in (50304, 128256):
        for dtype in ("float32", "bfloat16"):
            plan = softmax_plan.plan_softmax("softmax", 1024, vocab, dtype, HOPPER, masked=True)
            assert plan.mask_steps_ahead >= plan.walk.steps
            assert plan.mask_steps_ahead * plan.step_blocks * plan.vec <= 4 * softmax_plan.MASK_REGISTERS


@settings(FREE, max_examples=60)
@given(
    st.sampled_from(oracle.OPERATIONS),
    st.integers(1, 5000),
    lengths,
    st.sampled_from(DTYPES),
    st.sampled_from(CAPABILITIES),
    st.booleans(),
)
@example("softmax", 16, 5121, "bfloat16", HOPPER, False)  # the shortest parts
@example("log_softmax_grad", 1, 2561, "float32", HOPPER, False)
@example("softmax_grad", 3, 262143, "float32", (12, 0), False)
@example("softmax", 33, 500009, "float32", HOPPER, False)  # in turns
@example("softmax_grad", 64, 450_001, "float32", HOPPER, False)  # read again
@example("softmax", 1, 20_000_000, "bfloat16", HOPPER, True)  # short steps of long parts
def test_plans_cover_every_row_once(op, rows, vocab, dtype, capability, masked):
    plan = softmax_plan.plan_softmax(op, rows, vocab, dtype, capability, masked=masked)
    if isinstance(plan, Tile):
        check_tile(plan, vocab)
    else:
        check_parts(plan, rows, vocab, jnp.dtype(dtype).itemsize)
        arrays = 2 if op in oracle.BACKWARD else 1
        smem = {9: 227, 10: 227, 12: 99}[capability[0]] * 1024
        # 2048 bytes for barriers and messages between CTAs
        assert arrays * plan.smem_elements * jnp.dtype(dtype).itemsize + 2048 <= smem


def check_parts(plan, rows, vocab, itemsize):
    """Asserts that segments own each element once, hold elements of the row only, and copy aligned to 16 bytes."""
    segments = plan.count * plan.per_cta
    starts = np.asarray(plan.cut.start(np.arange(segments + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == vocab
    assert (0 < owned).all() and (owned <= plan.length).all() and (plan.length - owned <= plan.cut.unit).all()
    assert (starts[:-1] + plan.length <= vocab).all()
    assert segments <= 16 or not plan.cluster
    assert plan.vec * itemsize == 16 and plan.body > 0 and plan.body % plan.vec == 0
    assert plan.per_cta * plan.walk.steps - plan.again <= plan.barriers <= 32
    assert plan.again < 0.85 * plan.walk.steps
    assert plan.again or plan.smem_elements >= (plan.per_cta - 1) * plan.length + plan.walk.padded_length
    assert (plan.teams is None) == (plan.slots is None) and plan.slots != 1
    assert 1 <= (plan.teams or rows) <= rows
    line = softmax_plan.LINE_BYTES // itemsize
    numbers = np.arange(min(rows, line))[:, None]
    firsts = numbers * vocab + starts[:-1]
    if not plan.has_edges:
        assert plan.body == plan.length and plan.overlaps == (owned < plan.length).any()
        assert plan.cut.unit <= plan.walk.block_size  # the elements of the next segment are in the last block
        assert (firsts % plan.vec == 0).all()
        return
    assert plan.per_cta == 1
    # the start of the bulk copy, near the first elements of the segment
    body_start = softmax_plan.EDGE - plan.before_middle(numbers, starts[:-1])
    assert ((firsts + body_start) % line == 0).all()
    assert (0 < body_start).all() and (body_start + plan.body <= owned).all()
    # It holds the middle, and a step holds what is reduced of it.
    assert (body_start <= softmax_plan.EDGE).all() and plan.middle > 0
    assert (body_start + plan.body >= plan.length - softmax_plan.EDGE).all()
    assert (softmax_plan.EDGE - body_start < plan.margin).all()
    # Also what a step copies of the next one is in the segment.
    assert (body_start + (plan.walk.steps - 1) * plan.walk.step_size + plan.margin <= owned).all()
