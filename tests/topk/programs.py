"""The inline PTX of merges in tiles, and keys that are hard to sort."""

import numpy as np

from pallas_softmax._src.gpu.layout import merged_tile
from pallas_softmax._src.gpu.ptx import merging
from tests.support import oracle, ptx
from tests.support.cases import F32


def best_of(keys, k):
    """Returns the places of the k best keys of each row, the lower place first among ties."""
    keys = np.asarray(keys, "int64")
    return np.lexsort((np.broadcast_to(np.arange(keys.shape[-1]), keys.shape), -keys), -1)[..., :k]


def assert_merged(tile, vocab, k, keys, lanes=None):
    """Asserts that the program of merges finds the columns of the k best in rows of 32-bit keys."""
    program = merging.search_program(tile, vocab, k, lanes)
    columns = ptx.tile_of(
        ptx.run_on_tile(program, ptx.held_by_threads(tile, keys)), merged_tile(tile, k), "winner"
    )
    np.testing.assert_array_equal(columns[:, :k], best_of(keys[:, :vocab], k))


def near_keys(rng, shape, kind):
    """Returns keys that a sort of packed keys leaves in the wrong order in few places, in many, or nowhere."""
    x = rng.standard_normal(shape).astype(F32)
    match kind:
        case "few":  # two or three keys differ in their lowest bits or are equal
            bits = x.view("i4")
            for row in bits:
                places = rng.choice(len(row), 6, replace=False)
                row[places] = np.repeat(row[places[::3]], 3) ^ rng.integers(0, 3, 6)
        case "many":
            x = 5 + 1e-5 * x
        case "ties":
            x = np.round(2 * x)
    return oracle.order_key(x).astype("int64")
