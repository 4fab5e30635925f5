"""The kernel that merges the tiles of each row, after a product of `logits_kernel`. A CTA takes 8 rows.

    numbers of each tile, (tiles, rows)             number of the row, (1, rows)
    m, d, t                                    ──►  their ⊕; or with one reference for all d, the sum of d
    the sum of the logits                      ──►  the sum
    the first column of the largest logit      ──►  the first of all
    the logit at the label, if it is there     ──►  the one of the label's tile
    the winner of a draw                       ──►  the best one

The tiles of the product lie along axis 0 of a `gpu.layout.Tile`, 256 at a time. So the order of a sum depends only on
the number of tiles. (The order of XLA's sums depends on the number of rows too.)
"""

import functools
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
from pallas_softmax._src.normalizers import Normalizer
from pallas_softmax._src.stats.xla import is_column

_ROWS = 8  # rows of a CTA: 32 bytes of each line of device memory
_LINES = WARPGROUP // _ROWS  # lines that the threads of a CTA load together
_MOST_LINES = 256  # of an array, in registers at a time: 65,536 columns
_INT = jnp.iinfo(jnp.int32)


class Winners(NamedTuple):
    """The best sum of logit and noise in each row of each tile, (tiles, rows)."""

    key: Any  # int32, the sort key of the sum
    column: Any  # int32, its column; `HIGHEST` if another tile is better, or if no logit can win
    logit: Any  # float32, before the temperature divides it


class Winner(NamedTuple):
    """The winner of each row, (rows,)."""

    column: Any  # any column in a row where no logit can win
    logit: Any


class _Rows:
    """The rows of a CTA, and how it reduces numbers of their tiles, (tiles, rows)."""

    def __init__(self, count: int):
        self.count = count  # number of tiles
        self.held = Tile(min(_MOST_LINES, rounded_up(count, _LINES)), _ROWS, 1, 1)
        self.result = Tile(_LINES, _ROWS, 1, 1)
        self.first = lax.axis_index("rows") * _ROWS

    def load(self, gmem, start, fill: float = 0):
        """Returns numbers of the tiles from `start` on; `fill` after the last tile."""
        return tiles.load(gmem, self.held, start, fill, column=self.first)

    def load_one(self, gmem):
        """Returns a number of each row, given an array (1, rows)."""
        return jnp.max(tiles.load(gmem, self.result, 0, column=self.first, last_row=0), 0)

    def store(self, gmem, number) -> None:
        tiles.store(gmem, self.result, 0, tiles.broadcast(number, self.result, 1), column=self.first)

    def numbers(self, start):
        """Returns the numbers of the tiles."""
        return lax.broadcasted_iota(jnp.int32, self.held.shape, 0) + start

    def spread(self, number):
        """Repeats a number of each row for all of its tiles."""
        return tiles.broadcast(number, self.held, 1)

    def joined(self, join: Callable, block: Callable):
        """Returns the join of block(start) over all tiles, `held.rows` at a time."""
        size, first = self.held.rows, block(0)
        if self.count <= size:
            return first
        return lax.fori_loop(1, -(-self.count // size), lambda i, others: join(others, block(i * size)), first)

    def least(self, block: Callable):
        return jnp.min(self.joined(jnp.minimum, block), 0)

    def total(self, block: Callable):
        return jnp.sum(self.joined(jnp.add, block), 0)

    def at_column(self, gmem, column):
        """Returns the number of the tile that has a column of the row; 0 if no tile has it."""
        tile = self.spread(column // TILE_N)
        return self.total(lambda start: jnp.where(self.numbers(start) == tile, self.load(gmem, start), 0.0))


def merge_rows(count: int, vocab: int, plain: bool, sums: Statistics, winners, labels_gmem, *merged_gmem) -> None:
    """The kernel, for `count` tiles. `plain` says that the d of all tiles of a row have one reference."""
    rows, winner = _Rows(count), None
    merged = Statistics(_merged(rows, plain, sums.normalizer), None, None)
    if sums.total is not None:
        merged = merged._replace(total=rows.total(functools.partial(rows.load, sums.total)))
    if sums.argmax is not None:
        m = rows.spread(merged.normalizer.m)

        def columns_of_largest(start):
            columns = rows.numbers(start) * TILE_N + rows.load(sums.argmax, start)
            return normalizers.if_largest(columns, rows.load(sums.normalizer.m, start, -jnp.inf), m)

        merged = merged._replace(argmax=rows.least(columns_of_largest))
    if labels_gmem is not None:
        label = rows.load_one(labels_gmem)
        label = jnp.where(is_column(label, vocab), label, -TILE_N)
        merged = merged._replace(label_logit=rows.at_column(sums.label_logit, label))
    if winners is not None:
        winner = _best(rows, winners, vocab)
    for gmem, number in zip(merged_gmem, jax.tree.leaves((merged, winner)), strict=True):
        rows.store(gmem, number)


def _merged(rows: _Rows, plain: bool, normalizers_gmem):
    kind = type(normalizers_gmem)

    def join(a, b):
        return kind(jnp.maximum(a.m, b.m), a.d + b.d) if plain else normalizers.combine(a, b)

    def block(start):
        m, *others = normalizers_gmem
        return kind(rows.load(m, start, -jnp.inf), *(rows.load(a, start) for a in others))

    lanes = rows.joined(join, block)
    if plain:
        return Normalizer(jnp.max(lanes.m, 0), jnp.sum(lanes.d, 0))
    return normalizers.combine_lanes(lanes, 0, rows.spread)


def _best(rows: _Rows, winners: Winners, vocab: int) -> Winner:
    def keys(start):
        return jnp.where(rows.numbers(start) < rows.count, rows.load(winners.key, start), _INT.min)

    def columns_of_best(start):
        is_best = (rows.numbers(start) < rows.count) & (keys(start) == best)
        return jnp.where(is_best, rows.load(winners.column, start), _INT.max)

    best = rows.spread(jnp.max(rows.joined(jnp.maximum, keys), 0))
    column = jnp.minimum(rows.least(columns_of_best), vocab - 1)
    return Winner(column, rows.at_column(winners.logit, column))


def merge_tiles(
    sums: Statistics, labels=None, winners: Winners | None = None, *, rows: int, vocab: int, plain: bool = False
) -> tuple[Statistics, Winner | None]:
    """Merges the tiles of the first `rows` rows.

    Args:
      sums, winners: numbers of the tiles, (tiles, rows or more).
      labels: int32 (rows,); None if `sums` has no label_logit.
      plain: whether the d of all tiles of a row have one reference. Then the row's d has it too.
    """
    return _merge_tiles(sums, labels, winners, rows=rows, vocab=vocab, plain=plain, interpreted=interpret())


@functools.partial(jax.jit, static_argnames=("rows", "vocab", "plain", "interpreted"), inline=True)
def _merge_tiles(sums: Statistics, labels, winners: Winners | None, *, rows, vocab, plain, interpreted):
    del interpreted  # only tells calls apart
    of_winner = None if winners is None else Winner(winners.column, winners.logit)
    merged, tree = jax.tree.flatten((sums, of_winner))
    merged = gpu_kernel(
        functools.partial(merge_rows, len(sums.normalizer.m), vocab, plain),
        grid={"rows": -(-rows // _ROWS)},
        out_type=[jax.ShapeDtypeStruct((1, rows), a.dtype) for a in merged],
        name="linear_merge",
        approximate=False,
    )(sums, winners, None if labels is None else labels[None])
    merged = tree.unflatten([a[0] for a in merged])
    return vary_together(merged, sums, labels, winners)[0]
