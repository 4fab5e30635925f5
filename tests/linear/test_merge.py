"""The merge of the tiles of each row, in Pallas's interpreter, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.linear.draw_ptx import HIGHEST
from pallas_softmax._src.linear.losses import Statistics
from pallas_softmax._src.linear.merge_kernel import Winners, merge_tiles
from pallas_softmax._src.linear.plan import TILE_N
from pallas_softmax._src.normalizers import Moments, Normalizer
from tests.support import twins
from tests.support.covering import first_values

ROWS, STRIDE = 13, 16  # rows that are merged, by two CTAs, and rows of the arrays
TILES = first_values(2, [3, 501, 1, 16, 17, 256, 257, 1100])


@pytest.fixture(autouse=True)
def _in_the_interpreter():
    with twins.interpreted():
        yield


def moments_of(tiles: int, seed: int = 0) -> tuple:
    """Returns m, d and t of tiles, and the first column of the largest logit. Rows 1 to 5 are unusual."""
    rng = np.random.default_rng(seed)
    m = rng.normal(0, 20, (tiles, STRIDE)).astype("f4")
    m[:, 1] = -np.inf
    m[::2, 2] = -np.inf
    m[tiles // 2, 3] = np.inf
    m[:, 4] = np.float32(7)
    m[tiles // 3, 5] = np.nan
    d = np.where(m == -np.inf, 0, rng.uniform(1, TILE_N, m.shape)).astype("f4")
    d[(m == np.inf) | np.isnan(m)] = np.nan
    t = (-d * rng.uniform(0, 3, m.shape)).astype("f4")
    return m, d, t, rng.integers(0, TILE_N, m.shape).astype("i4")


def merged(*arrays, **options):
    return jax.tree.map(np.asarray, merge_tiles(*arrays, **options))


@pytest.mark.parametrize("tiles", TILES)
def test_moments(tiles):
    m, d, t, argmax = moments_of(tiles)
    total = np.random.default_rng(1).normal(0, 1, m.shape).astype("f4")
    vocab = tiles * TILE_N
    labels = [0, 5, -3, vocab - 1, vocab, TILE_N - 1, TILE_N, TILE_N + 1, 600, -1, -(2**31), 2**31 - 1, 2**30]
    labels = np.array(labels, "i4")
    at_label = np.arange(1.0, tiles * STRIDE + 1, dtype="f4").reshape(tiles, STRIDE)
    sums = Statistics(Moments(m, d, t), at_label, total, argmax)
    found, _ = merged(jax.tree.map(jnp.asarray, sums), jnp.asarray(labels), rows=ROWS, vocab=vocab)

    m, d, t, total = (a[:, :ROWS].astype("f8") for a in (m, d, t, total))
    largest = m.max(0)
    with np.errstate(invalid="ignore"):
        below = m - largest
        below = np.where(m == -np.inf, -1e4, np.where(m == np.inf, np.nan, below))
        e = np.exp(below)
        want = largest, (d * e).sum(0), ((t + below * d) * e).sum(0)
    for got, expected in zip(found.normalizer, want):
        np.testing.assert_allclose(got, expected, rtol=2e-6)
    np.testing.assert_allclose(found.total, total.sum(0), rtol=1e-5, atol=1e-4)
    first = ((m == largest) | np.isnan(m)).argmax(0)  # the first tile
    np.testing.assert_array_equal(found.argmax, first * TILE_N + argmax[first, range(ROWS)])
    inside = (labels >= 0) & (labels < vocab)
    tile = np.where(inside, labels, 0) // TILE_N
    np.testing.assert_array_equal(found.label_logit, np.where(inside, at_label[tile, range(ROWS)], 0))


@pytest.mark.parametrize("tiles", TILES)
def test_one_reference(tiles):
    m, d, *_ = moments_of(tiles)
    sums = Statistics(Normalizer(jnp.asarray(m), jnp.asarray(d)), None, None)
    found, winner = merged(sums, rows=ROWS, vocab=tiles * TILE_N, one_reference=True)
    assert winner is None
    np.testing.assert_array_equal(found.normalizer.m, m.max(0)[:ROWS])
    np.testing.assert_allclose(found.normalizer.d, d.sum(0, "f8")[:ROWS], rtol=1e-6)


@pytest.mark.parametrize("tiles", TILES)
def test_winners(tiles):
    """The lowest column of the best key wins. In row 0 no logit can win, and in row 1 all keys are equal."""
    rng, vocab = np.random.default_rng(2), tiles * TILE_N - 3
    key = rng.integers(-(2**31), 2**31, (tiles, STRIDE)).astype("i4")
    key[:, 1] = -(2**31)
    column = np.minimum(np.arange(tiles)[:, None] * TILE_N + rng.integers(0, TILE_N, key.shape), vocab - 1).astype("i4")
    column[:, 0] = HIGHEST
    if tiles > 1:
        column[0, 1] = HIGHEST  # as if another tile were better
    logit = np.arange(tiles * STRIDE, dtype="f4").reshape(tiles, STRIDE)
    m, d, *_ = moments_of(tiles)
    sums = Statistics(Normalizer(jnp.asarray(m), jnp.asarray(d)), None, None)
    winners = Winners(*map(jnp.asarray, (key, column, logit)))
    _, winner = merged(sums, None, winners, rows=ROWS, vocab=vocab)
    best = np.where(key == key.max(0), column, HIGHEST).min(0)[:ROWS]
    np.testing.assert_array_equal(winner.column, np.minimum(best, vocab - 1))
    np.testing.assert_array_equal(winner.logit, logit[winner.column // TILE_N, range(ROWS)])
