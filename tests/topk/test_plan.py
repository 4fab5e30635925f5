"""The launch plans of top-k: pure functions of V, k, dtype and the GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_softmax._src.gpu import hardware, layout
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.topk import plan as topk_plan
from tests.support.calls import DTYPES, FREE, lengths
from tests.support.plans import CAPABILITIES, HOPPER, check_tile

# The plans of (V, k): the number of parts of a row, "compact" for one part, or "tile" for rows in registers.
PLANS = [
    ("float32", {(1, 1): "tile", (100, 5): "tile", (512, 1): "tile", (128, 128): "tile", (512, 512): "tile"}),
    ("float32", {(516, 256): "tile", (1024, 1024): "tile"}),
    ("bfloat16", {(1024, 8): "tile", (1024, 1024): "tile", (2048, 2048): "tile"}),
    # too many elements for the lanes of a warp
    ("float32", {(1028, 1): 1, (2052, 1): 1, (8000, 1): 1, (20000, 5): 1, (25000, 5): 1}),
    ("bfloat16", {(2056, 1): 1, (25000, 128): 1}),
    ("bfloat16", {(1025, 1): 1}),  # its lanes load one element at a time
    # two rows do not fit into a multiprocessor
    ("float32", {(262144, 5): 16, (50257, 64): 3, (128256, 64): 8}),
    ("bfloat16", {(50257, 5): 4, (50257, 64): 2}),
    # many winners need longer parts, because each part is searched, or the whole row if it fills a multiprocessor
    ("float32", {(33333, 128): 2, (39999, 128): 2, (40000, 128): 1, (50257, 65): 1, (50257, 256): 1}),
    ("float32", {(60000, 128): 3}),  # a row that one CTA cannot hold
    ("bfloat16", {(49152, 128): 1, (100003, 128): 2}),
    # candidates listed by position let two CTAs share a multiprocessor
    ("float32", {(24576, 1024): "compact", (25000, 512): "compact", (25000, 1024): "compact"}),
    ("float32", {(18000, 2048): "compact", (25000, 2048): 1}),  # there is room, or none
    ("float32", {(12289, 512): 1, (25000, 256): 1, (50257, 512): 1}),
    ("bfloat16", {(50000, 512): 1}),
]


@pytest.mark.parametrize(("dtype", "plans"), PLANS, ids=str)
def test_plan(dtype, plans):
    for shape, says in plans.items():
        plan = topk_plan.plan_topk(*shape, dtype, HOPPER)
        got = "tile" if isinstance(plan, Tile) else "compact" if plan.compact else plan.count
        assert (shape, got) == (shape, says)


@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [
        (2_048, 512, "float32"),  # as many groups as winners
        (25_000, 1024, "float32"),  # a compact window
        (4_096, 1000, "float32"),
        (2_049, 300, "bfloat16"),
        (4_800, 2048, "bfloat16"),
        (16_000, 2048, "bfloat16"),
    ],
)
def test_bound_of_rows_in_any_order(vocab, k, dtype):
    """In random rows, at least k elements reach the bound, and the list has room for all that do."""
    plan = topk_plan.plan_topk(vocab, k, dtype, HOPPER)
    items, _ = topk_plan.listed_items(plan, k)
    room = items if plan.compact else items // 2
    rank = topk_plan.bound_rank(plan, k, room)
    size = plan.groups * plan.group_size
    for seed in range(10):
        window = np.full(size, -np.inf)
        window[:vocab] = np.random.default_rng(seed).random(vocab)
        largest = window.reshape(-1, plan.group_blocks, 128, plan.vec).max((1, 3))
        assert k <= np.sum(window >= np.sort(largest, None)[-rank]) <= room


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 127, 128, 512, 1000, 1024])
def test_plans_of_the_gradient(vocab, dtype):
    """A row is held by lanes of one warp; longer rows have no plan."""
    plan = topk_plan.plan_topk_grad(vocab, dtype)
    assert plan is not None and plan.lanes <= 32 and plan.shape[1] >= vocab
    check_tile(plan, vocab)
    assert topk_plan.plan_topk_grad(1028, dtype) is None


# The lanes of a row, elements per lane, and length of a lane's list for (V, k)
LANES = [
    ("float32", {(64, 6): (4, 16, 7), (384, 8): (16, 24, 5), (512, 64): (16, 32, 14), (1024, 64): (32, 32, 10)}),
    ("float32", {(256, 100): (8, 32, 28)}),
    ("float32", {(64, 2): (4, 16, 3)}),  # one more than the winners
    ("float32", {(128, 64): (8, 16, 16)}),  # all elements, because a lane often has more than 15 winners
    ("float32", {(512, 200): (32, 16, 16)}),  # a lane would hold half as many winners as elements
    ("float32", {(128, 128): (16, 8, 8)}),  # most are winners
    ("bfloat16", {(384, 8): (8, 48, 6), (1000, 256): (16, 64, 32), (1000, 257): (32, 32, 20), (2048, 5): (32, 64, 4)}),
    ("bfloat16", {(500, 8): (16, 32, 5)}),  # its lanes load 8 bytes at once
]


@pytest.mark.parametrize(("dtype", "shapes"), LANES, ids=str)
def test_lanes_and_lists(dtype, shapes):
    for (vocab, k), says in shapes.items():
        tile = topk_plan.plan_topk(vocab, k, dtype, HOPPER)
        assert isinstance(tile, Tile)
        length = layout.list_length(tile, k, jnp.dtype(dtype).itemsize)
        assert (tile.lanes, tile.steps * tile.vec, length) == says


def test_lanes_hold_few_elements_if_most_are_winners():
    """Half of a row is not most of it. 513 elements are too many for each lane."""
    few = {(31, 31): False, (32, 32): True, (512, 256): False, (512, 257): True, (513, 513): False}
    assert {case: topk_plan.mostly_winners(*case) for case in few} == few


@settings(FREE, max_examples=30)
@given(
    st.one_of(st.integers(1, 200), st.integers(1, 5000)),
    lengths,
    st.one_of(st.integers(1, 128), st.integers(1, topk_plan.MAX_K)),
    st.sampled_from(DTYPES),
    st.sampled_from(CAPABILITIES),
)
@example(1, 24001, 2048, "float32", (12, 0))
@example(4000, 25000, 512, "float32", HOPPER)  # a compact one
@example(4000, 50257, 65, "float32", HOPPER)  # a whole row
@example(1, 2048, 2048, "bfloat16", HOPPER)
@example(5000, 65, 65, "float32", HOPPER)  # the shortest windows
@example(129, 3_000_000, 2048, "float32", (12, 0))
def test_plans_cover_every_row_once(rows, vocab, k, dtype, capability):
    k = min(k, vocab)
    plan = topk_plan.plan_topk(vocab, k, dtype, capability)
    if isinstance(plan, Tile):
        assert plan.shape[1] >= vocab and plan.lanes <= 32  # one warp holds a row
        check_tile(plan, vocab)
        itemsize = jnp.dtype(dtype).itemsize
        winners = layout.merged_tile(plan, k)
        assert (winners.rows, winners.lanes) == (plan.rows, plan.lanes) and winners.shape[1] >= k
        length = layout.list_length(plan, k, itemsize)
        assert length * plan.lanes >= k
    else:
        check_window(plan, rows, k, jnp.dtype(dtype).itemsize)
        smem = {9: 227, 10: 227, 12: 99}[capability[0]] * 1024
        used = plan.size * jnp.dtype(dtype).itemsize + sum(topk_plan.selection_bytes(plan, k))
        assert used + 2048 <= smem  # barriers, and scratch of the reductions
        assert topk_plan.candidate_capacity(k) >= 2 * k


def check_window(plan, rows, k, itemsize):
    """Asserts that parts cover the row with at least k elements each, and that bulk copies are aligned and inside."""
    starts = np.asarray(plan.cut.start(np.arange(plan.count + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == plan.vocab
    assert owned.min() >= k and owned.max() == plan.cut.longest
    together = layout.aligned_view(rows, plan.vocab, plan.vec)[-1] // plan.vocab
    firsts = np.add.outer(np.arange(min(together, plan.vec)) * plan.vocab, starts[:-1])
    shifts = firsts % plan.vec  # elements before a part in its first 16 bytes
    assert plan.shifted or not shifts.any()
    assert (plan.body - shifts <= owned).all()  # what is copied in bulk ends in the part
    assert (owned - plan.body <= 2 * plan.vec + plan.cut.unit).all() and (owned <= plan.size).all()
    copies = plan.copies()
    assert plan.vec * itemsize == 16 and 1 <= len(copies) <= 32  # unrolled
    assert all(at % plan.vec == size % plan.vec == 0 < size for at, size in copies)
    ends = [at + size for at, size in copies]
    assert [0, *ends] == [*(at for at, _ in copies), plan.body]
    # all steps before the last fill their copies; a step has whole groups
    assert plan.full in (len(copies), len(copies) - 1)
    assert all(end == (i + 1) * plan.step_blocks * plan.block_size for i, end in enumerate(ends[: plan.full]))
    assert 0 <= plan.rest <= plan.step_blocks
    assert plan.step_blocks % plan.group_blocks == 0
    if plan.compact:
        assert itemsize == 4 and plan.count == 1
        # including the 1 KiB that CUDA keeps per CTA
        assert 2 * (topk_plan.cta_bytes(plan, k, 4) + 1024) <= 228 * 1024
        assert sum(topk_plan.ordering_words(k)) <= plan.size <= 2**16
        positions, groups = topk_plan.listed_items(plan, k)
        assert k + max(2, k // 16) <= groups  # the number that may reach the bound
        # each thread clears 16 bytes, and the bound's search has 128 counters
        assert 2 * positions >= 16 * 128
    assert plan.blocks == plan.full * plan.step_blocks + plan.rest
    assert plan.groups_per_thread * plan.group_blocks >= plan.blocks


@FREE
@given(st.integers(1, topk_plan.MAX_K), st.integers(1, 1000))
def test_merges_end(k, count):
    """Merges end after a few launches, and each launch has room for its lists."""
    group, launches = topk_plan.lists_per_merge(k), 0
    assert 2 <= group <= hardware.WARPGROUP
    slots = layout.power_of_two(group * k, hardware.WARPGROUP)
    assert 8 * slots + 8 * topk_plan.padded_winners(k) <= 95 * 1024
    while count > 1:
        count, launches = -(-count // group), launches + 1
    assert launches <= 10
