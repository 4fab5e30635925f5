"""The GPUs that plans are made for, and what every tile of mosaic_gpu must satisfy."""

from pallas_softmax._src.gpu import hardware

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (10, 0), (10, 3), (12, 0))


def check_tile(tile, vocab):
    """Asserts that vectors are whole, that the registers suffice, and that no step consists of padding only."""
    columns = tile.lanes * tile.vec * tile.steps
    assert vocab % tile.vec == 0
    assert columns - tile.lanes * tile.vec < vocab <= columns
    assert tile.lanes in (2, 4, 8, 16, 32, hardware.WARPGROUP)
    assert tile.rows % (hardware.WARPGROUP // tile.lanes) == 0
    assert tile.rows * columns <= 12288
