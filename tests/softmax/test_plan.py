"""The launch plans of mosaic_gpu: pure functions of the operation, rows, V, dtype, k and the GPU."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_softmax._src import folding
from pallas_softmax._src.gpu import hardware, layout
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.gpu.staged_row import StagedRow
from pallas_softmax._src.softmax import plan as softmax_plan
from pallas_softmax._src.topk import plan as topk_plan
from pallas_softmax._src.topk import tile_plan
from tests.support import oracle
from tests.support.calls import DTYPES, FREE, lengths

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (10, 0), (10, 3), (12, 0))

# --- softmax -----------------------------------------------------------------------------------

# The documented shapes on Hopper: CTAs of a row ("tile": its rows in registers), one launch or two.
PLANS = {
    ("softmax", 1, 1, "float32"): "tile",
    ("softmax", 4000, 1000, "float32"): "tile",
    ("softmax_grad", 4000, 5000, "bfloat16"): "tile",
    ("softmax", 4096, 10000, "bfloat16"): "tile",
    # On both sides of each threshold up to which rows are held in registers
    ("softmax", 4000, 12288, "float32"): "tile",
    ("softmax", 4000, 12292, "float32"): (1, 1),
    ("softmax_grad", 4000, 6144, "float32"): "tile",
    ("softmax_grad", 4000, 6148, "float32"): (1, 1),
    ("softmax", 16, 10240, "float32"): "tile",
    ("softmax", 16, 10244, "float32"): (4, 1),
    ("softmax", 4000, 5119, "bfloat16"): "tile",
    ("softmax", 4000, 5121, "bfloat16"): (1, 1),
    ("softmax", 4000, 25000, "float32"): (1, 1),
    ("softmax", 4096, 50257, "bfloat16"): (4, 1),
    ("softmax", 10, 16128, "float32"): (8, 1),
    ("softmax", 1, 50257, "float32"): (16, 1),
    ("softmax", 10, 100000, "float32"): (16, 1),
    ("softmax", 16, 200000, "float32"): (16, 1),
    ("softmax", 16, 400000, "float32"): (256, 2),
    ("softmax_grad", 16, 200000, "float32"): (256, 2),
    ("softmax", 10, 49600, "float32"): (8, 1),
    ("softmax", 1, 90000, "float32"): (16, 1),
    ("softmax", 1, 100004, "float32"): (256, 2),
    ("softmax_grad", 1, 128256, "bfloat16"): (16, 1),
    ("softmax_grad", 1, 200000, "bfloat16"): (256, 2),
    ("logsumexp", 1, 200000, "float32"): (16, 1),
    ("logsumexp", 1, 1000000, "float32"): (256, 2),
    ("softmax", 512, 128256, "bfloat16"): (8, 1),
    ("log_softmax", 512, 151936, "bfloat16"): (8, 1),
    ("logsumexp", 4000, 25000, "float32"): (1, 1),
    ("logsumexp", 1024, 128256, "float32"): (8, 1),
    ("logsumexp", 1024, 17000, "bfloat16"): (1, 1),
    ("logsumexp", 4000, 25000, "bfloat16"): (2, 1),
    ("logsumexp", 4000, 50257, "bfloat16"): (2, 1),
    ("logsumexp", 64, 128256, "bfloat16"): (4, 1),
    ("logsumexp", 4096, 262144, "bfloat16"): (16, 1),
    ("softmax_grad", 1024, 262144, "float32"): (16, 1),
    ("softmax", 1, 1000003, "float32"): (256, 2),
}


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_plan(shape):
    plan = softmax_plan.plan_softmax(*shape, HOPPER)
    got = "tile" if isinstance(plan, Tile) else (plan.count, 1 if plan.cluster else 2)
    assert got == PLANS[shape]


def test_steps_are_longer_where_rows_are_only_read_and_where_parts_are_longest():
    shapes = (
        ("logsumexp", 4000, 25000),
        ("softmax", 512, 500009),
        ("softmax", 4000, 25000),
        ("logsumexp", 10, 25000),
    )
    assert [softmax_plan.plan_softmax(*s, "float32", HOPPER).step_blocks for s in shapes] == [8, 8, 4, 4]


def test_rows_are_taken_in_turns_where_one_part_fills_a_multiprocessor():
    shapes = {
        ("softmax", 512, 500009, "float32"): (70, 13),
        ("log_softmax", 40, 1000000, "bfloat16"): (7, 13),
        ("softmax", 15, 500009, "float32"): (None, None),
        ("softmax", 256, 1_000_000, "float32"): (35, 13),
        ("softmax", 28, 1_000_000, "float32"): (7, 13),
        ("softmax", 30, 1_400_000, "float32"): (None, None),
        ("softmax", 256, 2_000_000, "float32"): (35, 13),
        ("softmax", 256, 5_000_000, "float32"): (None, None),
        ("softmax_grad", 512, 500009, "float32"): (70, 13),
        ("log_softmax_grad", 28, 500009, "float32"): (7, 13),
        ("softmax_grad", 28, 1_000_000, "float32"): (None, None),
        ("softmax_grad", 256, 1_000_000, "float32"): (35, 13),
        ("softmax", 1024, 262144, "float32"): (None, None),
        ("softmax_grad", 1024, 262144, "float32"): (None, None),
        ("logsumexp", 512, 500009, "float32"): (None, None),
    }
    plans = {shape: softmax_plan.plan_softmax(*shape, HOPPER) for shape in shapes}
    assert {shape: (plan.teams, plan.slots) for shape, plan in plans.items()} == shapes


def test_the_mask_of_a_whole_part_is_loaded_ahead_in_few_registers():
    for vocab in (50257, 128256):
        for dtype in ("float32", "bfloat16"):
            plan = softmax_plan.plan_softmax("softmax", 1024, vocab, dtype, HOPPER, masked=True)
            assert plan.mask_steps_ahead >= plan.walk.steps
            assert plan.mask_steps_ahead * plan.step_blocks * plan.vec <= 4 * softmax_plan.MASK_REGISTERS


@settings(FREE, max_examples=150)
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
        # Barriers, and what is sent.
        assert arrays * plan.smem_elements * jnp.dtype(dtype).itemsize + 2048 <= smem


def check_tile(tile, vocab):
    """Vectors are whole; a thread holds no more than its registers do, and none only padding in every step."""
    columns = tile.lanes * tile.vec * tile.steps
    assert vocab % tile.vec == 0
    assert columns - tile.lanes * tile.vec < vocab <= columns
    assert tile.lanes in (2, 4, 8, 16, 32, hardware.WARPGROUP)
    assert tile.rows % (hardware.WARPGROUP // tile.lanes) == 0
    assert tile.rows * columns <= 12288


def check_parts(plan, rows, vocab, itemsize):
    """What the parts own is the row; what they hold lies in it; what is copied in bulk, on 16 bytes."""
    starts = np.asarray(plan.cut.start(np.arange(plan.count + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == vocab
    assert (0 < owned).all() and (owned <= plan.length).all() and (plan.length - owned <= plan.unit).all()
    assert (starts[:-1] + plan.length <= vocab).all()
    assert plan.count <= 16 or not plan.cluster
    assert plan.vec * itemsize == 16 and plan.body > 0 and plan.body % plan.vec == 0
    assert plan.walk.steps - plan.again <= plan.barriers <= 32
    assert plan.again < 0.85 * plan.walk.steps
    assert plan.again or plan.smem_elements >= plan.walk.padded_length
    assert (plan.teams is None) == (plan.slots is None) and plan.slots != 1
    assert 1 <= (plan.teams or rows) <= rows
    line = softmax_plan.LINE_BYTES // itemsize
    numbers = np.arange(min(rows, line))[:, None]
    firsts = numbers * vocab + starts[:-1]
    if not plan.edges:
        assert (owned == plan.length).all() and plan.body == plan.length
        assert (firsts % plan.vec == 0).all()
        return
    inner = plan.body_start(numbers, starts[:-1])  # in reach of the part's first elements
    assert ((firsts + inner) % line == 0).all()
    assert (0 < inner).all() and (inner + plan.body <= plan.length).all()
    assert (inner + plan.body >= plan.length - softmax_plan.EDGE).all() and plan.length >= softmax_plan.EDGE


@FREE
@given(st.integers(1, 100), st.integers(1, 10**6), st.sampled_from([4, 8]))
def test_aligned_view(rows, vocab, vec):
    """All elements; every row of the view starts on 16 bytes and holds whole rows, as few as can be."""
    view = layout.aligned_view(rows, vocab, vec)
    assert math.prod(view) == rows * vocab
    assert view[-1] % vocab == 0
    if len(view) == 2:
        assert view[-1] % vec == 0
        assert view[-1] // vocab == min(n for n in (1, 2, 4, 8) if n * vocab % vec == 0)
    else:
        assert not any(rows % n == 0 and n * vocab % vec == 0 for n in (1, 2, 4, 8))


@FREE
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=5))
def test_mask_rows_are_those_of_broadcasting(dimensions):
    batch = tuple(n for n, _ in dimensions)
    mask = tuple(1 if broadcast else n for n, broadcast in dimensions)
    of_mask = np.arange(math.prod(mask)).reshape(mask)
    rows = np.arange(math.prod(batch))
    want = np.broadcast_to(of_mask, batch).ravel()
    np.testing.assert_array_equal(folding.mask_rows(mask, batch)(rows), want)


@FREE
@given(st.integers(1, 16 * 1024), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4, 8]))
@example(1, 4, 8)
@example(216 * 64, 8, 4)
def test_walk(accesses, vec, group):
    """The steps hold each element once."""
    walk = layout.Walk(accesses * vec, vec, group)
    sizes = [walk.step_size] * walk.full_steps + [walk.rest] * (walk.rest > 0)
    assert len(sizes) == walk.steps >= 1
    assert sum(sizes) == walk.length
    row, end = StagedRow(walk, interpret=True), 0
    for i, size in enumerate(sizes):
        assert i * walk.step_size == end
        assert size % vec == 0  # a bulk copy
        for at, held in row.blocks(i, size):
            assert at.start == end
            assert 0 < held <= at.size == walk.block_size
            assert end + walk.block_size <= walk.padded_length
            end += held
    assert end == walk.length
    assert walk.padded_length - walk.length < walk.block_size


# --- Launch choices of top-k --------------------------------------------------------------------------

# (rows, V, k, dtype): parts of a row; "tile": its rows in registers.
TOPK_PLANS = {
    (1, 1, 1, "float32"): "tile",
    (4096, 100, 5, "float32"): "tile",
    (4096, 512, 1, "float32"): "tile",
    (4096, 1024, 8, "bfloat16"): "tile",
    (4096, 128, 128, "float32"): "tile",
    (4096, 512, 512, "float32"): "tile",
    (4096, 516, 256, "float32"): "tile",
    (4096, 1024, 1024, "float32"): "tile",
    (4096, 1024, 1024, "bfloat16"): "tile",
    (4096, 2048, 2048, "bfloat16"): "tile",
    (10, 1028, 1, "float32"): 1,  # too many elements for the lanes of a warp
    (10, 2056, 1, "bfloat16"): 1,
    (10, 1025, 1, "bfloat16"): 1,  # whose lanes load one element at a time
    (10, 2052, 1, "float32"): 1,
    (4096, 8000, 1, "float32"): 1,
    (4000, 25000, 5, "float32"): 1,
    (4000, 25000, 128, "bfloat16"): 1,
    (129, 25000, 5, "float32"): 1,
    (128, 25000, 5, "float32"): 4,
    (1, 20000, 5, "float32"): 1,
    (1, 50257, 5, "bfloat16"): 7,
    (1, 262144, 5, "float32"): 16,
    (4096, 50257, 64, "bfloat16"): 2,
    (4096, 50257, 64, "float32"): 3,
    (4096, 128256, 64, "float32"): 6,
    (3001, 33333, 128, "float32"): 2,  # of many winners longer parts, since each part is searched
    (4096, 50257, 65, "float32"): 1,  # or the whole row, if it fills a multiprocessor
    (4096, 50257, 256, "float32"): 1,
    (129, 40000, 128, "float32"): 1,
    (4096, 39999, 128, "float32"): 2,
    (4096, 60000, 128, "float32"): 3,  # more than one holds
    (777, 100003, 128, "bfloat16"): 2,
    (2048, 49152, 128, "bfloat16"): 1,
}


# (rows, V, k, dtype): whether candidates are listed by position. Where else one CTA would have a multiprocessor.
COMPACT = {
    (4000, 25000, 256, "float32"): False,
    (4000, 25000, 512, "float32"): True,
    (4000, 24576, 1024, "float32"): True,
    (4000, 25000, 1024, "float32"): True,
    (4000, 25000, 2048, "float32"): False,  # for which there is no room
    (4000, 18000, 2048, "float32"): True,
    (4000, 12289, 512, "float32"): False,
    (4000, 50000, 512, "bfloat16"): False,
    (4000, 50257, 512, "float32"): False,
}


@pytest.mark.parametrize("shape", COMPACT, ids=str)
def test_candidates_are_listed_by_position_where_two_ctas_fit_then(shape):
    assert topk_plan.plan_topk(*shape, HOPPER).compact == COMPACT[shape]


@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [
        (2_048, 512, "float32"),  # as many groups as winners
        (4_096, 1000, "float32"),
        (25_000, 1024, "float32"),  # a compact window
        (2_049, 300, "bfloat16"),
        (4_800, 2048, "bfloat16"),
        (16_000, 2048, "bfloat16"),
    ],
)
def test_bound_of_rows_in_any_order(vocab, k, dtype):
    """The list has room for the elements that reach the bound, and they are k at least, in rows of random numbers."""
    plan = topk_plan.plan_topk(4000, vocab, k, dtype, HOPPER)
    items, _ = topk_plan.listed_items(plan, k)
    room = items if plan.compact else items // 2
    rank = topk_plan.bound_rank(plan, k, room)
    size = plan.groups * plan.group_size
    for seed in range(10):
        window = np.full(size, -np.inf)
        window[:vocab] = np.random.default_rng(seed).random(vocab)
        largest = window.reshape(-1, plan.group_blocks, 128, plan.vec).max((1, 3))
        assert k <= np.sum(window >= np.sort(largest, None)[-rank]) <= room


@pytest.mark.parametrize("shape", TOPK_PLANS, ids=str)
def test_topk_plan(shape):
    """Few rows are split, and rows of which two would not lie in a multiprocessor."""
    plan = topk_plan.plan_topk(*shape, HOPPER)
    assert ("tile" if isinstance(plan, Tile) else plan.count) == TOPK_PLANS[shape]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 127, 128, 512, 1000, 1024])
def test_plans_of_the_backward_of_topk(vocab, dtype):
    """A row lies over lanes of one warp; rows that do not fit there have no plan."""
    plan = tile_plan.plan_topk_grad(vocab, dtype)
    assert plan is not None and plan.lanes <= 32 and plan.shape[1] >= vocab
    check_tile(plan, vocab)
    assert tile_plan.plan_topk_grad(1028, dtype) is None


# (vocab, k, dtype) to the lanes of a row, the elements in each, and the length of its list
MERGES = {
    (64, 6, "float32"): (4, 16, 7),
    (384, 8, "float32"): (16, 24, 5),
    (512, 64, "float32"): (16, 32, 14),
    (1024, 64, "float32"): (32, 32, 10),
    (256, 100, "float32"): (8, 32, 27),
    (512, 200, "float32"): (32, 16, 16),  # whose lanes would hold half as many winners as elements
    (1000, 256, "bfloat16"): (16, 64, 32),
    (1000, 257, "bfloat16"): (32, 32, 20),
    (128, 64, "float32"): (8, 16, 16),  # all, since a lane often has more than 15
    (64, 2, "float32"): (4, 16, 3),  # one more than winners
    (384, 8, "bfloat16"): (8, 48, 6),
    (2048, 5, "bfloat16"): (32, 64, 3),
    (500, 8, "bfloat16"): (16, 32, 5),  # whose lanes load 8 bytes at once
}


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_lanes_and_lists_of_merges(case):
    vocab, k, dtype = case
    tile = topk_plan.plan_topk(4096, vocab, k, dtype, HOPPER)
    assert isinstance(tile, Tile)
    length = tile_plan.list_length(tile, k, jnp.dtype(dtype).itemsize)
    assert (tile.lanes, tile.steps * tile.vec, length) == MERGES[case]


# (vocab, k): whether the row is sorted
SORTED = {
    (31, 31): False,
    (32, 32): True,
    (512, 256): False,  # not most of the row
    (512, 257): True,
    (513, 513): False,  # longer than a warp's lanes sort
}


@pytest.mark.parametrize("case", SORTED, ids=str)
def test_rows_of_which_most_are_winners_are_sorted(case):
    assert tile_plan.sorts(*case) == SORTED[case]


@settings(FREE, max_examples=100)
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
def test_topk_plans_cover_every_row_once(rows, vocab, k, dtype, capability):
    k = min(k, vocab)
    plan = topk_plan.plan_topk(rows, vocab, k, dtype, capability)
    if isinstance(plan, Tile):
        assert plan.shape[1] >= vocab and plan.lanes <= 32  # a row is a warp's
        check_tile(plan, vocab)
        itemsize = jnp.dtype(dtype).itemsize
        winners = tile_plan.winners_tile(plan, vocab, k)
        assert (winners.rows, winners.lanes) == (plan.rows, plan.lanes) and winners.shape[1] >= k
        length = tile_plan.list_length(plan, k, itemsize)
        assert tile_plan.sorts(vocab, k) or length * plan.lanes >= k
    else:
        check_window(plan, rows, k, jnp.dtype(dtype).itemsize)
        smem = {9: 227, 10: 227, 12: 99}[capability[0]] * 1024
        used = plan.size * jnp.dtype(dtype).itemsize + topk_plan.selection_bytes(plan, k)
        assert used + 2048 <= smem  # barriers, and scratch of the reductions
        assert topk_plan.candidate_slots(k) >= 2 * k


def check_window(plan, rows, k, itemsize):
    """The parts are the row, each with k elements at least; copies are of whole 16 bytes, inside each part."""
    starts = np.asarray(plan.cut.start(np.arange(plan.count + 1)))
    owned = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == plan.vocab
    assert owned.min() >= k and owned.max() == plan.cut.longest
    together = layout.aligned_view(rows, plan.vocab, plan.vec)[-1] // plan.vocab
    firsts = np.add.outer(np.arange(min(together, plan.vec)) * plan.vocab, starts[:-1])
    before = -firsts % plan.vec  # elements of a part before its body, which are filled in one by one
    assert (before <= plan.head).all()
    assert (before + plan.body <= owned).all()
    assert (owned - plan.body <= 2 * plan.vec + plan.cut.unit).all()
    assert (plan.head - before + owned <= plan.size).all()
    copies = plan.copies()
    assert plan.vec * itemsize == 16 and 1 <= len(copies) <= 32  # unrolled
    assert all(at % plan.vec == size % plan.vec == 0 < size for at, size in copies)
    ends = [at + size for at, size in copies]
    assert [plan.head, *ends] == [*(at for at, _ in copies), plan.head + plan.body]
    # steps: those before the last that its copy fills; groups: whole in a step, which is whole in the window
    assert plan.full in (len(copies), len(copies) - 1)
    assert all(end == (i + 1) * plan.step_blocks * plan.block for i, end in enumerate(ends[: plan.full]))
    assert 0 <= plan.rest <= plan.step_blocks + 1
    assert plan.step_blocks % plan.group_blocks == 0
    if plan.compact:
        assert itemsize == 4 and plan.count == 1
        assert 2 * (topk_plan.cta_bytes(plan, k, 4) + 1024) <= 228 * 1024  # with what CUDA keeps of each
        assert sum(topk_plan.ordering_words(k)) <= plan.size <= 2**16
        positions, groups = topk_plan.listed_items(plan, k)
        assert k + max(2, k // 16) <= groups  # as many as may reach the bound
        assert 2 * positions >= 4 * 512  # the counters of the search for a bound
    assert (
        plan.groups_per_thread * plan.group_blocks >= plan.blocks == plan.full * plan.step_blocks + plan.rest
    )


@FREE
@given(st.integers(1, topk_plan.MAX_K), st.integers(1, 1000))
def test_merges_come_to_an_end(k, count):
    """In a few launches, each of which has room for the lists that it merges."""
    group, launches = topk_plan.lists_per_merge(k), 0
    assert 2 <= group <= hardware.WARPGROUP
    slots = layout.power_of_two(group * k, hardware.WARPGROUP)
    assert 8 * slots + 8 * topk_plan.padded_winners(k) <= 95 * 1024
    while count > 1:
        count, launches = -(-count // group), launches + 1
    assert launches <= 10
