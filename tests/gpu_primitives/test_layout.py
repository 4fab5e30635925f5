"""The layout of rows, masks and steps in memory: pure functions that the kernels of mosaic_gpu share."""

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pallas_softmax._src import folding
from pallas_softmax._src.gpu import layout
from tests.support.calls import FREE


@FREE
@given(st.integers(1, 100), st.integers(1, 10**6), st.sampled_from([4, 8]))
def test_aligned_view(rows, vocab, vec):
    """A view has all elements. Its rows are aligned to 16 bytes and hold as few whole rows as possible."""
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
def test_mask_rows_agree_with_broadcasting(dimensions):
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
    """The steps contain each element once."""
    walk = layout.Walk(accesses * vec, vec, group)
    sizes = [walk.step_size] * walk.full_steps + [walk.rest] * (walk.rest > 0)
    assert len(sizes) == walk.steps >= 1
    assert sum(sizes) == walk.length
    assert all(size % vec == 0 for size in sizes)  # bulk copies
    assert walk.padded_length - walk.length < walk.block_size
