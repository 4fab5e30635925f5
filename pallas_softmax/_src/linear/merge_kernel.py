"""The kernel that merges the tiles of each row, after a product of `logits_kernel`. A CTA takes 8 rows.

    values of each tile, (tiles, rows)              value of the row, (1, rows)
    m, d, t                                    ──►  their ⊕; or with one reference for all d, the sum of d
    the sum of the logits                      ──►  the sum
    the first column of the largest logit      ──►  the first of all
    the logit at the label, if it is there     ──►  the one of the label's tile
    the winner of a draw                       ──►  the best one

The values lie in registers as a `gpu.layout.Tile`, a block: its row i is tile start + i of the product, and its column
j is row first + j. Blocks of 256 tiles are joined element by element, and then along axis 0. So the order of a sum
depends only on the number of tiles, and is the same in each column. (The order of XLA's sums depends on the number of
rows too.)
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.gpu.layout import Tile
from pallas_softmax._src.linear.losses import Statistics
from pallas_softmax._src.linear.plan import TILE_N, rounded_up
from pallas_softmax._src.masks import is_column
from pallas_softmax._src.normalizers import Normalizer

_ROWS = 8  # rows of a CTA: their values of a tile are a sector of 32 bytes
_TILES_AT_ONCE = WARPGROUP // _ROWS  # each thread loads a value of one of these tiles
_MOST_TILES = 256  # of a block: 65,536 columns
_INT = jnp.iinfo(jnp.int32)


class Winners(NamedTuple):
    """The best sum of logit and noise in each row of each tile, (tiles, rows)."""

    key: Any  # int32, the sort key of the sum
    column: Any  # int32; `draw_ptx.HIGHEST` if another tile is better, or if no logit can win
    logit: Any  # float32, before the temperature divides it


class Winner(NamedTuple):
    """The winner of each row, (rows,)."""

    column: Any  # V - 1 in a row where no logit can win
    logit: Any


class _Rows:
    """The rows of a CTA, and how it reduces the values of their tiles."""

    def __init__(self, count: int):
        self.count = count  # number of tiles
        self.block = Tile(min(_MOST_TILES, rounded_up(count, _TILES_AT_ONCE)), _ROWS, 1, 1)
        self.small = Tile(_TILES_AT_ONCE, _ROWS, 1, 1)  # for arrays (1, rows)
        self.first = lax.axis_index("rows") * _ROWS

    def load(self, gmem, start, fill: float = 0):
        """Returns the values of the tiles from `start` on; `fill` after the last tile."""
        return tiles.load(gmem, self.block, start, fill, column=self.first)

    def load_one(self, gmem):
        """Returns the values of the rows, given an array (1, rows)."""
        copies = tiles.load(gmem, self.small, 0, column=self.first, last_row=0)
        return jnp.max(copies, 0)

    def store(self, gmem, value) -> None:
        tiles.store(gmem, self.small, 0, tiles.broadcast(value, self.small, 1), column=self.first)

    def tile(self, start):
        """Returns the number of each tile."""
        return lax.broadcasted_iota(jnp.int32, self.block.shape, 0) + start

    def spread(self, value):
        """Repeats the value of a row for all tiles."""
        return tiles.broadcast(value, self.block, 1)

    def joined(self, join: Callable, block: Callable):
        """Joins block(start) of all tiles, element by element: tile i of a block joins tile i of the next one."""
        size, first = self.block.rows, block(0)
        if self.count <= size:
            return first
        return lax.fori_loop(1, -(-self.count // size), lambda i, others: join(others, block(i * size)), first)

    def largest(self, block: Callable):
        return jnp.max(self.joined(jnp.maximum, block), 0)

    def least(self, block: Callable):
        return jnp.min(self.joined(jnp.minimum, block), 0)

    def total(self, block: Callable):
        return jnp.sum(self.joined(jnp.add, block), 0)

    def at_column(self, gmem, column):
        """Returns the value of the tile that has this column of the row; 0 if no tile has it."""
        tile = self.spread(column // TILE_N)
        return self.total(lambda start: jnp.where(self.tile(start) == tile, self.load(gmem, start), 0.0))


def merge_rows(count: int, vocab: int, one_reference: bool, sums: Statistics, winners, labels_gmem, *out_gmem) -> None:
    """The kernel, for `count` tiles. `one_reference` says that the d of all tiles of a row have the same one."""
    rows, winner = _Rows(count), None
    merged = Statistics(_merged(rows, one_reference, sums.normalizer), None, None)
    if sums.total is not None:
        merged = merged._replace(total=rows.total(functools.partial(rows.load, sums.total)))
    if sums.argmax is not None:
        m = rows.spread(merged.normalizer.m)

        def columns_of_largest(start):
            columns = rows.tile(start) * TILE_N + rows.load(sums.argmax, start)
            return normalizers.if_largest(columns, rows.load(sums.normalizer.m, start, -jnp.inf), m)

        merged = merged._replace(argmax=rows.least(columns_of_largest))
    if labels_gmem is not None:
        label = rows.load_one(labels_gmem)
        column = jnp.where(is_column(label, vocab), label, -TILE_N)  # no tile has number -1
        merged = merged._replace(label_logit=rows.at_column(sums.label_logit, column))
    if winners is not None:
        winner = _best(rows, winners, vocab)
    for gmem, value in zip(out_gmem, jax.tree.leaves((merged, winner)), strict=True):
        rows.store(gmem, value)


def _merged(rows: _Rows, one_reference: bool, parts):
    m = rows.largest(lambda start: rows.load(parts.m, start, -jnp.inf))
    if one_reference:
        return Normalizer(m, rows.total(functools.partial(rows.load, parts.d)))
    s = rows.spread(normalizers.shift(m))

    def magnitudes(start):
        others = [rows.load(gmem, start) for gmem in parts[1:]]
        return normalizers.magnitudes_from(type(parts)(rows.load(parts.m, start, -jnp.inf), *others), s)

    terms = rows.joined(lambda a, b: [*map(operator.add, a, b)], magnitudes)
    return normalizers.of_magnitudes(type(parts), m, *(jnp.sum(a, 0) for a in terms))


def _best(rows: _Rows, winners: Winners, vocab: int) -> Winner:
    def keys(start):
        return jnp.where(rows.tile(start) < rows.count, rows.load(winners.key, start), _INT.min)

    def columns_of_best(start):
        is_best = (rows.tile(start) < rows.count) & (keys(start) == best)
        return jnp.where(is_best, rows.load(winners.column, start), _INT.max)

    best = rows.spread(rows.largest(keys))
    column = jnp.minimum(rows.least(columns_of_best), vocab - 1)
    return Winner(column, rows.at_column(winners.logit, column))


def merge_tiles(
    sums: Statistics, labels=None, winners: Winners | None = None, *, rows: int, vocab: int, one_reference: bool = False
) -> tuple[Statistics, Winner | None]:
    """Merges the tiles of the first `rows` rows.

    Args:
      sums, winners: values of the tiles, (tiles, rows or more).
      labels: int32 (rows,); None if `sums` has no label_logit.
      one_reference: whether the d of all tiles of a row have the same reference. Then the row's d has it too.
    """
    static = {"rows": rows, "vocab": vocab, "one_reference": one_reference, "interpreted": interpret()}
    return _merge_tiles(sums, labels, winners, **static)


@functools.partial(jax.jit, static_argnames=("rows", "vocab", "one_reference", "interpreted"), inline=True)
def _merge_tiles(sums: Statistics, labels, winners: Winners | None, *, rows, vocab, one_reference, interpreted):
    del interpreted  # only tells calls apart
    of_winner = None if winners is None else Winner(winners.column, winners.logit)
    merged, tree = jax.tree.flatten((sums, of_winner))
    merged = gpu_kernel(
        functools.partial(merge_rows, len(sums.normalizer.m), vocab, one_reference),
        grid={"rows": -(-rows // _ROWS)},
        out_type=[jax.ShapeDtypeStruct((1, rows), a.dtype) for a in merged],
        name="linear_merge",
        approximate=False,  # the results are float32, and exp costs little here
    )(sums, winners, None if labels is None else labels[None])
    merged = tree.unflatten([a[0] for a in merged])
    return vary_together(merged, sums, labels, winners)[0]
