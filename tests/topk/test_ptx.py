"""The inline PTX of top-k's search, run in numpy (tests/support/ptx.py), against numpy.

In the interpreter the kernels run twins of this PTX in plain JAX. These tests run the PTX itself without a GPU.
"""

import itertools

import numpy as np
import pytest

from pallas_softmax._src.gpu import window_arrival
from pallas_softmax._src.gpu.layout import Tile, Window, merged_tile
from pallas_softmax._src.gpu.ptx import merging, ranking
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.topk import candidates_ptx, merge_kernel, window_kernel
from pallas_softmax._src.topk.candidates_ptx import WindowProgram
from pallas_softmax._src.topk.plan import candidate_capacity, plan_topk
from tests.support import oracle, ptx
from tests.support.cases import BF16, F32
from tests.support.covering import first, pairs
from tests.support.plans import HOPPER
from tests.topk import kernels

SMEM = 200 * 1024


def words(memory, at, count, dtype="uint32"):
    return memory[at : at + count * np.dtype(dtype).itemsize].view(dtype)


def raw_keys(x):
    """Returns keys in the order of floats with any bits, the sign first."""
    bits = x.view(f"i{x.dtype.itemsize}").astype("int64")
    return np.where(bits < 0, bits ^ np.iinfo(f"i{x.dtype.itemsize}").max, bits)


def assert_ranked(memory, at, keys, indices):
    """Asserts that the winners at an address are these, in the format of `merge_kernel.put_in_shared_memory`."""
    k = len(keys)
    np.testing.assert_array_equal(words(memory, at, k, "int32"), keys)
    np.testing.assert_array_equal(words(memory, at + 4 * (-(-k // 128) * 128), k), indices)


def candidates_of(keys, indices):
    """Returns candidates as one uint64 each."""
    high = (np.asarray(keys, "int64") + 2**31).astype("uint64") << np.uint64(32)
    return high | (np.uint64(0xFFFFFFFF) - np.asarray(indices).astype("uint64"))


def keys_of(rng, n, kind):
    match kind:
        case "around 0":
            return oracle.order_key(rng.standard_normal(n).astype(F32))
        case "bfloat16 around 0":
            kept = rng.choice([0.0, 1.0], n, p=[0.03, 0.97])
            return oracle.order_key((rng.standard_normal(n) * kept).astype(BF16))
        case "bfloat16":
            return oracle.order_key((1.4 + rng.exponential(0.4, n)).astype(BF16))
        case "uniform":
            return oracle.order_key((0.9 + 0.1 * rng.random(n)).astype(BF16))
        case "spread":  # like the best of a normal sample
            return oracle.order_key((2.5 + rng.exponential(0.4, n)).astype(F32))
        case "special" | "bfloat16 special":
            dtype = BF16 if kind.startswith("bf") else F32
            x = rng.choice(np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, -np.nan], dtype), n)
            masked = -(2 ** (8 * dtype.itemsize - 1))
            return np.where(rng.random(n) < 0.1, masked, oracle.order_key(x))
        case "few":
            return rng.integers(-40, 40, n)
        case "equal":
            return np.full(n, 5)
        case "one far above":
            return np.where(np.arange(n) == n // 2, 2**31 - 1, 100 * rng.permutation(n))
    return rng.integers(-(2**31), 2**31, n)


RANKED = [
    (300, 500, "bfloat16 around 0"), (70, 110, "one far above"), (128, 140, "special"),
    (5, 6, "spread"), (128, 140, "spread"), (128, 256, "anything"), (70, 110, "equal"),
    (300, 340, "spread"), (300, 340, "one far above"), (2048, 2400, "spread"),
    (300, 500, "around 0"), (300, 500, "bfloat16"), (90, 96, "bfloat16 special"),
    (300, 500, "special"), (300, 500, "bfloat16 special"), (1024, 1400, "uniform"),
]  # fmt: skip


@pytest.mark.parametrize(("k", "n", "kind"), first(4, RANKED))
def test_rank(k, n, kind):
    """The k best are ranked by counting, by buckets, and if one bucket has too many, by counting or sorting."""
    rng = np.random.default_rng(k)
    capacity = candidate_capacity(k)
    candidates, buckets, ranked = 0, 8 * capacity, 12 * capacity
    dtype_and_vocab = (BF16, 10**6) if kind[:4] in ("bflo", "unif") else (F32, None)
    keys, indices = keys_of(rng, n, kind), rng.permutation(10**6)[:n]
    memory = np.zeros(SMEM, "u1")
    words(memory, candidates, n, "uint64")[:] = candidates_of(keys, indices)
    words(memory, buckets, capacity)[:] = 0xDEADBEEF
    p = CtaProgram()
    *at, out = p.operands("u32", "candidates", "n", "buckets", "ranked")
    lists = ranking.CandidateList(
        p, *at[:2], capacity, at[2], out, merge_kernel.put_in_shared_memory(p, out, k), k, *dtype_and_vocab
    )
    lists.rank()
    machine = ptx.run(p, memory, candidates=candidates, buckets=buckets, ranked=ranked, n=n)
    if kind in ("around 0", "bfloat16", "uniform"):
        assert machine.steps < 8 * n  # a sort takes three times as many
    best = np.lexsort((indices, -np.asarray(keys, "int64")))[:k]
    assert_ranked(memory, ranked, keys[best], indices[best])


def sorted_lists(rng, lists, k, kind):
    """Returns the keys and indices of sorted lists, and the keys and indices of the k best."""
    keys, indices = (a.reshape(lists, k) for a in (keys_of(rng, lists * k, kind), rng.permutation(10**6)[: lists * k]))
    order = np.lexsort((indices, -keys))
    keys, indices = np.take_along_axis(keys, order, -1), np.take_along_axis(indices, order, -1)
    best = np.lexsort((indices.ravel(), -keys.ravel()))[:k]
    return keys, indices, keys.ravel()[best], indices.ravel()[best]


@pytest.mark.parametrize(
    ("shape", "kind"),
    first(
        3,
        pairs(
            [(3, 100), (2, 1), (8, 5), (2, 128), (3, 300), (16, 256)],
            ["special", "anything", "few", "bfloat16 special"],
        ),
    ),
)
def test_rank_lists(shape, kind):
    """The k best of sorted lists, with ties in and between lists; the lower index comes first.

    The first list belongs to another merge.
    """
    lists, k = shape
    padded, capacity = -(-k // 128) * 128, max(256, 1 << (lists * k - 1).bit_length())
    candidates, buckets, ranked, counts = np.cumsum([0, 8 * capacity, 4 * capacity, 8 * padded]).tolist()
    listed, listed_indices, keys, indices = sorted_lists(np.random.default_rng(k), lists, k, kind)
    bound = max(listed[:, -(-k // lists) - 1].min(), listed[:, -1].max())
    memory = np.full(SMEM, 0xAB, "u1")
    of_other_merge = np.full(k, 2**31 - 1)
    in_device = {
        name: ptx.Device(np.append(of_other_merge, of_lists).astype("int32"))
        for name, of_lists in (("keys", listed), ("indices", listed_indices))
    }
    scratch = {"candidates": candidates, "buckets": buckets, "ranked": ranked, "counts": counts}
    part = {"first": k, "n": lists * k, "bound": int(bound)}
    dtype = BF16 if kind.startswith("bf") else F32
    code = merge_kernel.rank_lists_program((lists + 1) * k, capacity, k, np.dtype(dtype))
    ptx.run(code, memory, row=0, **in_device, **scratch, **part)
    assert_ranked(memory, ranked, keys, indices)


BOUNDS = [
    (896, 128, "spread"), (256, 30, "special"), (128, 5, "one far above"), (256, 200, "anything"),
    (256, 200, "equal"), (6272, 2048, "spread"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "k", "kind"), first(2, BOUNDS))
def test_bound(groups, k, kind):
    """At least k keys reach the bound, and few more, apart from ties. The list is empty afterwards."""
    keys = keys_of(np.random.default_rng(k), groups, kind)
    memory = np.zeros(SMEM, "u1")
    words(memory, 0, groups, "int32")[:] = keys
    candidates, counts = 4 * groups, SMEM - 512
    p = WindowProgram(Window(4 * groups, 4, 1, 1), "float32", k)
    p.set(p.operand("bound", "s32"), candidates_ptx.find_bound(p, k)[0])
    machine = ptx.run(p, memory, group_keys=0, candidates=candidates, counts=counts, bound=0)
    (bound,) = set(machine.registers["%bound"].astype("uint32").view("int32").tolist())
    ties = int(np.sum(keys == bound))
    assert k <= np.sum(keys >= bound) < k + max(2, k // 16) + ties
    assert not words(memory, candidates, 512).any()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_shifted_vectors(dtype):
    """The words of elements at any place, 512 bytes apart in a thread."""
    element, count = Elements(dtype), 2
    run, vec = 4 // element.itemsize, 16 // element.itemsize
    memory = np.random.default_rng(0).integers(0, 256, 16 * (128 * count + 1)).astype("u1")
    x = memory.view(f"u{element.itemsize}").copy()
    for shift in range(vec):
        p = CtaProgram()
        addresses = [p.at(p.operand("x", "u32"), p.thread, 4) + 2048 * i for i in range(count)]
        found = element.vectors(p, addresses, p.operand("shift", "u32"), 512)
        results = {f"{i}_{j}": word for i, vector in enumerate(found) for j, word in enumerate(vector)}
        for name, word in results.items():
            p.set(p.operand(f"out{name}", "s32"), word)
        machine = ptx.run(p, memory.copy(), x=0, shift=shift, **{f"out{name}": 0 for name in results})
        words_ = [machine.registers[f"%out{name}"].astype("uint32") for name in results]
        got = np.stack(words_, -1).view(x.dtype).reshape(128, 4 * count, run).swapaxes(0, 1).reshape(-1)
        np.testing.assert_array_equal(got, x[shift:][: 128 * count * vec])


ARRIVALS = [
    (Window(1003, 4, 2, 1), F32), (Window(2501, 8, 2, 1, 2), BF16), (Window(1004, 4, 2, 1), F32),
    (Window(5, 8, 1, 1), BF16), (Window(1025, 4, 2, 1), F32),
]  # fmt: skip


@pytest.mark.parametrize(
    ("window", "dtype", "columns", "infinite"),
    first(2, [(*arrival, *mask) for arrival in ARRIVALS for mask in ((None, True), (0, False), (1, True))]),
    ids=str,
)
def test_arrival(window, dtype, columns, infinite):
    """The tail and the mask of each part of five rows, after the bulk copies. `columns` 0: a mask for each column."""
    rng, v, rows = np.random.default_rng(0), window.vocab, 5
    x, bits = rng.standard_normal((rows, v)).astype(dtype), f"u{dtype.itemsize}"
    columns = v if columns == 0 else columns
    mask = rng.random(columns or 1) < (1 if columns is None else 0.6)  # one row, for all rows
    masked = np.array(-np.inf if infinite else 0, dtype).view(bits) if infinite else np.array(-1).astype(bits)
    for row, part in itertools.product(range(rows), range(window.count)):
        start, end = int(window.cut.start(part)), int(window.cut.start(part + 1))
        place = {"first": row * v + start, "owned": end - start, "start": start, "row": 0}
        shift = place["first"] % window.vec if window.shifted else 0
        memory = rng.integers(0, 256, 16 * (window.smem_size // window.vec + 1)).astype("u1")
        in_smem = words(memory, 0, window.smem_size, bits)
        raw = x.view(bits).reshape(-1)[place["first"] - shift :]
        in_smem[: window.body] = raw[: window.body]
        arrays = {"x": ptx.Device(x), "mask": ptx.Device(mask.view("u1"))}
        tail = window_arrival.tail_program(window, dtype, columns, infinite=infinite)
        ptx.run(tail, memory, **arrays, **place, smem=0, shift=shift)
        for i, _ in enumerate(window.copies() if columns else []):
            count = window.step_blocks if i < window.full else window.rest
            at = np.arange(i * window.step_blocks, i * window.step_blocks + count)[:, None] * window.block_size
            at = at + np.arange(window.block_size)  # the positions of each block
            keep = np.broadcast_to(mask, v)[np.minimum(start + at, v - 1)] & (at < window.body)
            kept = keep.astype("u1").reshape(count, 128, -1, 4).view("uint32")[..., 0]
            operands = {f"keep{b}_{j}": kept[b, :, j] for b, j in np.ndindex(count, window.vec // 4)}
            program = window_arrival.mask_program(window, dtype, count, infinite=infinite)
            ptx.run(program, memory, x=0, step=i, shift=shift, **operands)
        want = np.where(mask[start:end] if columns == v else mask, x.view(bits)[row, start:end], masked)
        np.testing.assert_array_equal(in_smem[shift:][: end - start], want)
        after = in_smem[shift + end - start :].view(dtype)
        assert (after.astype(F32) == -np.inf).all()


def search_memory(window, x, k):
    """Returns shared memory with a part that has arrived, and the operands of its search."""
    capacity, shift = candidate_capacity(k), window.vec - 1 if window.shifted else 0
    full = np.full(window.size, -np.inf).astype(x.dtype)
    full[: window.vocab] = x
    keys, at = oracle.order_key(full), np.arange(window.size)
    keys[np.isnan(full)] = keys.dtype.type(2 ** (8 * x.dtype.itemsize - 1) - 1)
    group_keys = np.full(window.groups, -(2**31))
    np.maximum.at(
        group_keys, at // window.block_size // window.group_blocks * 128 + at % (128 * window.run) // window.run, keys
    )
    sizes = {
        "x": max(window.smem_size * x.dtype.itemsize, 16 * capacity + 8 * k + 2048),
        "group_keys": max(4 * window.groups, 8 * (k + 128)),
        "hits": 4 * capacity,
        "candidates": 8 * capacity,
        "counts": 512,
    }
    starts = dict(zip(sizes, np.cumsum([0, *(-(-size // 16) * 16 for size in sizes.values())]).tolist()))
    memory = np.zeros(SMEM, "u1")
    words(memory, 0, shift + window.size, x.dtype)[shift:] = full
    words(memory, starts["group_keys"], window.groups, "int32")[:] = group_keys
    return memory, {**starts, "owned": window.vocab, "start": 0, "shift": shift}


COLLECTED = [
    (Window(2007, 4, 8, 8), F32, 130), (Window(2007, 4, 8, 4, compact=True), F32, 130),
    (Window(1024, 4, 8, 8), F32, 40),  # fewer blocks than a group has
    (Window(2048, 4, 2, 2), F32, 40),  # no element is outside the row
    (Window(1024, 4, 2, 2), F32, 1000),  # more than the list has room for
    (Window(1024, 4, 2, 1), F32, 200), (Window(9003, 8, 4, 4), BF16, 140), (Window(2048, 8, 2, 2), BF16, 100),
    (Window(4001, 4, 8, 1, compact=True), F32, 255), (Window(2048, 4, 2, 2, compact=True), F32, 1500),
]  # fmt: skip


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("window", "dtype", "best"), first(2, COLLECTED), ids=str)
def test_collect(window, dtype, best, everywhere):
    """The elements that reach a bound are listed, from the groups that reach it. A compact window lists positions."""
    k = 128
    x = np.random.default_rng(best).standard_normal(window.vocab).astype(dtype)
    memory, operands = search_memory(window, x, k)
    keys = oracle.order_key(x)
    bound = np.sort(keys)[-best]
    code = WindowProgram(window, dtype, k)
    candidates_ptx.collect(code, code.operand("bound", "s32"), all_groups=everywhere)
    ptx.run(code, memory, **operands, bound=int(bound))
    reach = np.flatnonzero(keys >= bound)
    (n,) = words(memory, operands["counts"], 1)
    if len(reach) > code.capacity:
        assert n > code.capacity
        return
    listed = words(memory, operands["candidates"], code.capacity, "uint16" if window.compact else "uint64")
    expected = reach if window.compact else candidates_of(keys[reach], reach)
    np.testing.assert_array_equal(np.sort(listed[:n]), np.sort(expected))
    assert not listed[n:].any()  # a sort of the whole list relies on empty entries


SEARCHES = [
    (Window(300, 4, 1, 1), F32, 200),  # fewer groups than winners
    (Window(2048, 8, 4, 2), BF16, 64),
    (Window(2007, 4, 8, 4), F32, 130),
    (Window(2007, 4, 8, 4), F32, 5),
    (Window(3001, 4, 8, 2, compact=True), F32, 300),
]


def rows_of_bits(rng, v, dtype):
    """Yields rows where the usual bound fails: any bits, few numbers, NaNs of arithmetic, the best side by side."""
    normal, bits = rng.standard_normal(v).astype(dtype), f"u{dtype.itemsize}"
    ones = np.iinfo(bits).max  # the lowest key; without the sign a NaN with the highest key
    anything = rng.integers(0, ones, v, bits, endpoint=True)
    for share in (0.02, 0.3):
        some = rng.random(v) < share
        yield np.where(some, ones >> 1, normal.view(bits))
        yield np.where(some, anything, ones)
    yield anything
    yield rng.choice(anything[:3], v)
    for width in (100, 250):  # in few groups
        yield (normal + 10 * (np.arange(v) < width)).astype(dtype).view(bits)
    yield (1 + rng.integers(0, 2**13, v) * 2.0**-23).astype(dtype).view(bits)
    yield np.sort(normal).view(bits)


@pytest.mark.parametrize(
    ("kind", "search"), first(2, [*itertools.product(("quantized", "normal", "crowded", "bits"), SEARCHES)]), ids=str
)
def test_search(kind, search):
    """The k best of a part, in order, ties by index: by the usual bound, or by an exact one."""
    window, dtype, k = search
    rng, dtype = np.random.default_rng(k), np.dtype(dtype)
    normal = rng.standard_normal(window.vocab)
    if kind == "bits":
        rows = [bits.astype(f"u{dtype.itemsize}").view(dtype) for bits in rows_of_bits(rng, window.vocab, dtype)]
    elif kind == "crowded":
        rows = [row for named in kernels.crowded(window.vocab, k, dtype) for row in named.values()]
    else:
        rows = [normal if kind == "normal" else np.round(2 * normal)]
    code = window_kernel.search_program(window, dtype, k)
    for row in rows:
        x = row.astype(dtype)
        memory, operands = search_memory(window, x, k)
        ptx.run(code, memory, **operands)
        at = 12 * candidate_capacity(k) if window.compact else operands["group_keys"]
        best = kernels.best_of(raw_keys(x), k)
        assert_ranked(memory, at, raw_keys(x)[best], best)


MERGED = [
    (Tile(32, 4, 8, 2), 57, 8),  # the list of a lane halves with each merge
    (Tile(4, 32, 8, 1), 256, 8),  # short lists
    (Tile(256, 2, 2, 1), 3, 1),  # several rows per thread
    (Tile(8, 16, 1, 3), 47, 2),  # more lanes than winners; single elements
    (Tile(32, 4, 8, 4), 128, 5), (Tile(8, 16, 4, 5), 319, 16), (Tile(64, 2, 8, 4), 64, 15),
    (Tile(4, 32, 8, 8), 2048, 5), (Tile(4, 32, 8, 8), 2041, 2000), (Tile(16, 8, 8, 8), 512, 200),
    (Tile(16, 8, 8, 6), 384, 8),
]  # fmt: skip


@pytest.mark.parametrize(("tile", "vocab", "k"), first(2, MERGED), ids=str)
def test_merges(tile, vocab, k):
    """The k best of 16-bit rows, with lower columns first among ties, and without padding beyond the row.

    Some lanes have more winners than their lists have room for.
    """
    rng = np.random.default_rng(k)
    bits = rng.integers(0, 2**16, tile.shape).astype("u2")
    bits[1::3] = np.sort(bits[1::3] & 0x7FFF)  # the winners are in few lanes
    bits[::3] = rng.choice(np.array([0, 0x8000, 0x7FC0, 0xFFFF], "u2"), tile.shape)[::3]
    held = ptx.held_by_threads(tile, bits)
    if held.shape[-1] % 2:
        held = np.concatenate([held, held[..., -1:]], -1)
    machine = ptx.run_on_tile(merging.search_words_program(tile, vocab, k), np.ascontiguousarray(held).view("u4"))
    words = ptx.tile_of(machine, merged_tile(tile, k), "winner", "u4")[:, :k].astype("int64")
    keys = raw_keys(bits[:, :vocab].copy())
    best = kernels.best_of(keys, k)
    np.testing.assert_array_equal(0xFFFF - (words & 0xFFFF), best)
    np.testing.assert_array_equal((words >> 16).astype("int16"), np.take_along_axis(keys, best, -1))


@pytest.mark.parametrize(("vocab", "k", "lowest"), [(1, 1, 1), (3, 3, 1), (5, 2, 5), (6, 5, 2), (100, 100, 1)])
def test_the_lowest_key_comes_before_padding(vocab, k, lowest):
    """A -NaN with all bits set has the lowest key. `tiles.load` pads a tile with -inf beyond the row."""
    tile = kernels.plan_topk(vocab, k, "float32")
    x = np.full(tile.shape, -np.inf, F32)
    x[:, :vocab] = np.random.default_rng(0).standard_normal((tile.rows, vocab))
    x[0, vocab - lowest : vocab] = np.array(-1, "i4").view(F32)
    kernels.assert_merged(tile, vocab, k, raw_keys(x))


# Tile(16, 16, 1, 5) has two rows per thread.
MERGED_32 = [
    (Tile(32, 4, 4, 4), 64, 2), (Tile(8, 16, 4, 2), 128, 33), (Tile(16, 16, 1, 5), 77, 76),
    (Tile(4, 32, 4, 4), 512, 16), (Tile(4, 32, 4, 4), 512, 64), (Tile(4, 32, 4, 4), 512, 512),
    (Tile(8, 16, 4, 8), 500, 200), (Tile(4, 32, 4, 8), 1021, 1000), (Tile(16, 8, 4, 8), 256, 8),
    (Tile(16, 8, 4, 4), 128, 4), (Tile(16, 16, 1, 5), 77, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tile", "vocab", "k"),
    first(3, [(kind, *case) for kind in ("ties", "normal", "few", "many", "one lane") for case in MERGED_32]),
    ids=str,
)
def test_merges_of_32_bit_keys(kind, tile, vocab, k):
    """The k best of 32-bit rows, with lower columns first among ties, also if packed keys have the wrong order.

    One lane may have more winners than its list has room for.
    """
    keys = kernels.near_keys(np.random.default_rng(k), tile.shape, "normal" if kind == "one lane" else kind)
    if kind == "one lane":
        keys.reshape(len(keys), tile.steps, tile.lanes, tile.vec)[::3, :, 1] += 2**25
    kernels.assert_merged(tile, vocab, k, keys)


@pytest.mark.parametrize(("k", "greater"), [(4, (480, 17)), (2, (480, 17, 18))])
def test_near_ties_that_are_equal(k, greater):
    """The one in the lower column comes first, though the lane with the higher column is lower."""
    tile = plan_topk(511, k, F32, HOPPER)
    x = np.sort(np.random.default_rng(0).uniform(-9, 0, tile.shape).astype(F32))
    x[0, :k], x[0, [*greater]] = 1, np.nextafter(F32.type(1), F32.type(2))
    program = merging.search_program(tile, 511, k)
    machine = ptx.run_on_tile(program, ptx.held_by_threads(tile, oracle.order_key(x)))
    winners = ptx.tile_of(machine, merged_tile(tile, k), "winner")[0, :k]
    np.testing.assert_array_equal(winners, oracle.topk_indices(x[:1, :511], k)[0])
