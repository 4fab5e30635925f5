"""Top-k on a GPU: shapes, dtypes, special rows, masks, plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.layout import Tile, Window
from pallas_softmax._src.gpu.tiles import PREFETCHED_TILES
from pallas_softmax._src.topk import merge_kernel
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.covering import pairs
from tests.support.gpu import (
    VERY_LONG,
    assert_top_k,
    assert_topk,
    assert_topk_gradient,
    both,
    much_memory,
    of_repeated_rows,
    rows_to_test,
    top_k,
    topk,
    with_kernels,
)
from tests.topk import kernels
from tests.topk.kernels import CROWDED, TOPK_SHORT, WINDOWS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]
TOPK = [(1, F32, 1), (8, BF16, 2), (127, F16, 16), (128, BF16, 64), (512, F32, 5), (1000, F32, 128)]
TOPK += [(1000, F32, 1000), (2048, BF16, 5), (2048, BF16, 2000), (4096 + 8, F16, 64), (10000, BF16, 5)]
TOPK += [(25000, F32, k) for k in (1, 5, 64, 128, 300, 1024)]
TOPK += [(50257, F32, 5), (50257, BF16, 64), (50257, F16, 2048), (128256, F32, 5), (151936, BF16, 64)]
TOPK += [(262144, F32, 2048), (1000003, F32, 5)]


@pytest.mark.parametrize("many", [False, True])
@with_kernels(("v", "dtype", "k"), TOPK, ids=str)
def test_topk(implementation, v, dtype, k, many):
    """Few rows, split into parts if they are long, and many rows, with fewer parts or none."""
    names = VERY_LONG[:2] if v > 300_000 else rows_to_test(v)
    x = cases.rows(names, v, dtype)
    got = topk(implementation, jnp.tile(x, (1 + 128 // len(names) if many else 1, 1)), k)
    assert (len(got.values) > 128) == many
    assert got.values.dtype == dtype and got.indices.dtype == jnp.int32
    assert_topk(got, x, k, names)


def spoiled(mode, x):
    """Returns x with NaN and infinities where it is masked, the mask, and the arguments of top_k for a mode."""
    rng = np.random.default_rng(0)
    match mode:
        case "where":
            where = rng.random(x.shape) < 0.4
            where[0] = False
            return cases.spoil_masked(x, where), where, {"where": where}
        case "lengths" | "both":
            lengths = rng.integers(-9, x.shape[1] + 9, len(x)).astype(np.int32)
            lengths[:2] = 0, x.shape[1]
            where = rng.random((1, x.shape[1])) < 0.4 if mode == "both" else None
            kept = oracle.within(x, lengths, where)
            return cases.spoil_masked(x, kept), kept, {"where": where, "lengths": lengths}
    return x, None, {"sorted": mode != "unsorted"}


MODES = ["plain", "unsorted", "where", "lengths", "both"]


@with_kernels(
    ("v", "dtype", "k", "mode", "many"), [(*case, *how) for case, *how in pairs(TOPK, MODES, [False, True])], ids=str
)
def test_top_k(implementation, v, dtype, k, mode, many):
    """The winners as they are, bit by bit."""
    names = VERY_LONG[:2] if v > 300_000 else rows_to_test(v)
    x, where, options = spoiled(mode, cases.rows(names, v, dtype))
    repeats = 1 + 128 // len(names) if many else 1
    of_rows = {
        name: np.tile(a, (repeats, *[1] * (a.ndim - 1)))
        for name, a in options.items()
        if np.size(a) > v or name == "lengths"
    }
    got = top_k(implementation, jnp.tile(x, (repeats, 1)), k, **(options | of_rows))
    assert_top_k(got, x, k, names, where, mode != "unsorted")


@pytest.mark.parametrize(("v", "k"), [(100, 100), (1000, 7), (25000, 64), (131072, 2048)])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "uint16", "int8", "uint8", "bool"])
def test_top_k_of_integers(v, k, dtype):
    x = cases.integers(np.random.default_rng(0), v, np.dtype(dtype))
    assert_top_k(top_k("mosaic_gpu", x, k), x, k, [f"row {i}" for i in range(len(x))])


@pytest.mark.parametrize("v", [100, 50257])
def test_gradient_of_top_k(v):
    """The cotangent goes to the unmasked winners."""
    x, where, options = spoiled("both", cases.rows(FEW, v))
    g = cases.cotangent((len(x), 50))

    @jax.jit
    def grad(x, g):
        return jax.vjp(lambda x: top_k("mosaic_gpu", x, 50, **options).values, x)[1](g)[0]

    want = np.zeros_like(x)
    np.put_along_axis(want, oracle.topk_indices(x, 50, where), g, -1)
    np.testing.assert_array_equal(grad(x, g), np.where(where, want, 0))


@pytest.mark.parametrize(("v", "dtype"), [(63, F32), (63, BF16), (256, F16)], ids=str)
def test_many_short_rows(v, dtype):
    """So many rows that CTAs copy later tiles to the L2 cache. The last tile is not whole."""
    names = rows_to_test(v)
    x = cases.rows(names, v, dtype)
    many = jnp.tile(x, (70_000 // len(names) + 1, 1))
    tile = kernels.plan_topk(v, 8, dtype)
    assert isinstance(tile, Tile)
    assert len(many) >= 2 * PREFETCHED_TILES * tile.rows and len(many) % tile.rows
    assert_topk(topk("mosaic_gpu", many, 8), x, 8, names)


TOPK_MASKED = [(100, F32, 5, pattern) for pattern in cases.BROADCASTS]
TOPK_MASKED += [(20011, F32, 300, pattern) for pattern in ("bhqv", "1hqv", "b1q1")]
TOPK_MASKED += [(50257, BF16, 64, pattern) for pattern in ("bhqv", "b11v", "1h11")]
TOPK_MASKED += [(129, F16, 129, "bhqv"), (131072, F32, 2048, "bhqv")]


@with_kernels(
    ("v", "dtype", "k", "pattern", "log"), [(*case, i % 2 == 1) for i, case in enumerate(TOPK_MASKED)], ids=str
)
def test_where(implementation, v, dtype, k, pattern, log):
    """Masked elements are NaN or infinite; the first row of the mask keeps nothing; one temperature per row."""
    x, where, names = cases.broadcast_rows(pattern, v, dtype)
    t = np.resize(np.array([0.5, 1, 0, 3], F32), cases.BATCH)
    got = jax.tree.map(lambda a: np.asarray(a).reshape(-1, k), topk(implementation, x, k, t, where, log))
    np.testing.assert_array_equal(got.indices[0], np.arange(k))
    np.testing.assert_array_equal(got.values[0].astype(F32), -np.inf if log else 0)
    rows, where = x.reshape(-1, v), np.broadcast_to(where, x.shape).reshape(-1, v)
    assert_topk(got, rows, k, names, t.ravel(), where, log)


@with_kernels(
    ("v", "k", "log", "dtype"),
    [(*case, *how) for case, *how in pairs([(100, 5), (20011, 5), (50257, 300)], [False, True], [F32, F16])],
    ids=str,
)
def test_values_of_another_dtype(implementation, v, k, log, dtype):
    """One temperature for all rows."""
    x = cases.rows(rows_to_test(v), v, BF16)
    got = topk(implementation, x, k, 0.7, log=log, dtype=dtype.name)
    assert got.values.dtype == dtype
    assert_topk(got, x, k, rows_to_test(v), np.float32(0.7), log=log)


COMPACT = Window(4003, 4, 8, 4, compact=True)
WINDOW_PLANS = [
    *WINDOWS,
    (COMPACT, F32, 300, ALL),
    *((plan, dtype, k, None) for plan, dtype, k in [*CROWDED, (COMPACT, F32, 300)]),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("plan", "dtype", "k", "names"), WINDOW_PLANS, ids=str)
def test_every_window(plan, dtype, k, names, masked):
    if names is None:
        rows = {name: row for group in kernels.crowded(plan.vocab, k, dtype) for name, row in group.items()}
        names, x = [*rows], np.stack([*rows.values()]).astype(dtype)
    else:
        x = cases.rows(names, plan.vocab, dtype)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoil_masked(x, where) if masked else x
    assert_topk(kernels.topk_rows(x, k, plan, where, interpret=None)[0], x, k, names, where=where)


@pytest.mark.parametrize(("v", "dtype", "k", "names"), TOPK_SHORT, ids=str)
@both
def test_every_tile(implementation, v, dtype, k, names):
    """Few rows, which lie over more lanes, and many. The last tile is not full."""
    x = cases.rows(names, v, dtype)
    for repeats in (1, 37, 4400 // len(names)):
        got = topk(implementation, np.tile(x, (repeats, 1)), k, dtype="float32")
        assert_topk(got, x, k, names)


KEYS = [(2, 2), (8, 3), (64, 6), (64, 40), (128, 8), (128, 128), (257, 33), (512, 16), (512, 100), (1000, 5)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("v", "k"), [*KEYS, (1000, 100)])
def test_keys_that_differ_in_their_lowest_bits(v, k, masked):
    """Packed keys do not have the order of such keys. A warp has other rows as well. Few rows lie over more lanes."""
    rows = kernels.neighbours(v)
    for repeats in (19, 2200 // len(rows)):
        names, x = [*rows] * repeats, np.stack([*rows.values()] * repeats)
        where = cases.broadcast_mask("bv", x.shape) if masked else None
        x = cases.spoil_masked(x, where) if masked else x
        got = ps.fused_topk(x, k, where=where, dtype="float32", implementation="mosaic_gpu")
        assert_topk(got, x, k, names, where=where)


def test_merges_of_merges(monkeypatch):
    """A launch merges two lists at a time, so three launches follow the first."""
    monkeypatch.setattr(merge_kernel, "lists_per_merge", lambda k: 2)
    x = cases.rows(FEW, 2007)
    assert_topk(kernels.topk_rows(x, 5, Window(2007, 4, 1, 1, 5), interpret=None)[0], x, 5, FEW)


CROWDED_ROWS = [(4096 + 8, F32, 5), (4096 + 8, F32, 128), (4096 + 8, BF16, 5), (4096 + 8, F16, 64)]
CROWDED_ROWS += [(25000, F32, 300), (50257, BF16, 5), (50257, F32, 1024)]


@pytest.mark.parametrize("many", [False, True])
@with_kernels(("v", "dtype", "k"), CROWDED_ROWS, ids=str)
def test_more_candidates_than_room(implementation, v, dtype, k, many):
    """Mosaic takes its exact path: histograms of all keys, and ties in the order of their indices."""
    rows = {name: row for group in kernels.crowded(v, k, dtype) for name, row in group.items()}
    x = np.stack([*rows.values()]).astype(dtype)
    assert_topk(topk(implementation, jnp.tile(x, (10 if many else 1, 1)), k), x, k, list(rows))


@pytest.mark.parametrize(("v", "k"), [(4104, 100), (4104, 128), (4104, 300), (25000, 2048)], ids=str)
def test_winners_in_one_bucket(v, k):
    """One bucket's winners are ranked by counting, or by a sort if there is room for more than 256 candidates."""
    rows = kernels.bunched(v)
    assert_topk(topk("mosaic_gpu", np.stack([*rows.values()]), k), np.stack([*rows.values()]), k, [*rows])


@pytest.mark.parametrize(("v", "masked", "log"), pairs([100, 1000, 50257], [False, True], [False, True]))
@both
def test_gradient(implementation, v, masked, log):
    x = cases.rows(["normal", "peaked", "integers", "one_winner"], v)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoil_masked(x, where) if masked else x
    t, g = np.array([0.5, 1, 2, 3], F32), cases.cotangent((4, 5))

    @jax.jit
    def grad(x, t, g, where):
        return jax.vjp(lambda x, t: topk(implementation, x, 5, t, where, log).values, x, t)[1](g)

    dx, dt = grad(x, t, g, where)
    assert_topk_gradient(dx, x, g, 5, where, t, log)
    _, want = oracle.fused_topk_vjp(x, g, 5, where, t, log)
    _, unit = bounds.fused_topk_vjp_unit(x, g, 5, where, t, log)
    assert bounds.error_units(dt, want, unit) <= 4 * bounds.UNITS
    if masked:
        assert not np.asarray(dx)[~where].any()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("v", "dtype", "k"), [(64, F32, 6), (128, BF16, 8), (127, F16, 40), (1000, F32, 16)], ids=str)
def test_gradient_of_routers(v, dtype, k, log):
    """Short rows in many CTAs: the winners' elements are written twice, and a second run gives the same bits."""
    names = ["normal", "peaked", "integers", "one_winner"]
    x, g = np.tile(cases.rows(names, v, dtype), (301, 1)), cases.cotangent((1204, k), dtype)

    @jax.jit
    def grad(x, g):
        return jax.vjp(lambda x: topk("mosaic_gpu", x, k, log=log).values, x)[1](g)[0]

    assert "topk_grad" in grad.lower(x, g).as_text()
    got = np.asarray(grad(x, g))
    assert_topk_gradient(got, x, g, k, log=log)
    np.testing.assert_array_equal(got.view("u1"), np.asarray(grad(x, g)).view("u1"))


@with_kernels(
    ("rows", "v", "k", "masked"),
    [(1031, 100, 5, True), (1031, 25000, 64, False), (1031, 50257, 5, True), (3, 262144, 300, False)],
    ids=str,
)
def test_repeated_runs_give_the_same_bits(implementation, rows, v, k, masked):
    x = np.random.default_rng(1).standard_normal((rows, v)).astype(F32)
    x[::7] = np.round(x[::7])
    where = x[:1] < 2 if masked else None
    runs = [[np.asarray(a).tobytes() for a in topk(implementation, x, k, where=where)] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


MANY_OF_TOPK = [(4_194_312, 512), (70000, 30720), (42744, 50257), (8200, 262144)]


@much_memory
@pytest.mark.parametrize(
    ("implementation", "masked", "rows", "v"),
    [
        *((name, True, *shape) for name in ("mosaic_gpu", "triton") for shape in MANY_OF_TOPK),
        *(("mosaic_gpu", False, *shape) for shape in MANY_OF_TOPK[::3]),
    ],
)
def test_more_than_2_to_the_31_elements(implementation, rows, v, masked):
    """Eight rows are repeated, and all copies have the same bits: in registers, in one CTA, in two and more parts."""
    few, k = 8, 5
    x = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)
    where = np.random.default_rng(3).random((few, v)) < 0.7 if masked else None

    got = of_repeated_rows(lambda x, where: topk(implementation, x, k, where=where), rows, x, where)
    assert_topk(got, x, k, [f"row {i}" for i in range(few)], where=where)


@much_memory
def test_more_than_2_to_the_31_elements_of_a_gradient():
    (rows, v), few, k = MANY_OF_TOPK[0], 8, 5
    x, g = np.random.default_rng(2).standard_normal((few, v)).astype(BF16), cases.cotangent((few, k), BF16)

    @jax.jit
    def grad(x, g):
        return jax.vjp(lambda x: topk("mosaic_gpu", x, k).values, x)[1](g)[0]

    assert "topk_grad" in grad.lower(x, g).as_text()
    assert_topk_gradient(of_repeated_rows(grad, rows, x, g), x, g, k)


@both
@pytest.mark.parametrize("masked", [False, True])
def test_little_memory(implementation, masked):
    """In addition to the logits and the mask, top-k needs a hundredth of the 2 GB of a softmax."""
    x = jax.ShapeDtypeStruct((4096, 128256), "float32")
    where = jax.ShapeDtypeStruct((1, 128256), "bool") if masked else None
    memory = topk.lower(implementation, x, 64, where=where).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 64 * 2**20


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("v", [100, 10000, 50257, 1000003])
@both
def test_differences_of_subnormal_numbers_at_temperature_0(implementation, v, log):
    """They count: only equal values tie, in registers, in a window, and in parts that are merged."""
    x = np.full((3, v), -1, F32)
    x[0, [0, v // 2, v - 1]] = 2.0**-130, 2.0**-149 + 2.0**-130, 2.0**-130
    x[1, [0, v // 3, v - 1]] = -(2.0**-149), 0, -0.0
    x[2, [1, v // 2, v - 1]] = 1, 1, 1 - 2.0**-20
    got = topk(implementation, x, 3, np.zeros(3, F32), log=log)
    values, indices = oracle.fused_topk(x, 3, None, np.zeros(3), log)
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.values, values, rtol=1e-6)
