"""The kernel that merges the tiles of each row, after a product of `logits_kernel`. Each row has a CTA.

    numbers of each tile, (tiles, rows)             number of the row
    m, d, t                                    ──►  their ⊕; or with one reference for all d, the sum of d
    the sum of the logits                      ──►  the sum
    the first column of the largest logit      ──►  the first of all
    the logit at the label, if it is there     ──►  the one of the label's tile
    the winner of a draw                       ──►  the best one

Thread t takes tiles t, t + 128, and so on. So the order of a sum depends only on the number of tiles. (The order of
XLA's sums depends on the number of rows too.)
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.mesh_types import vary_together
from pallas_softmax._src.gpu import blocks
from pallas_softmax._src.gpu.hardware import WARPGROUP
from pallas_softmax._src.gpu.interpreter import interpret
from pallas_softmax._src.gpu.kernel import gpu_kernel
from pallas_softmax._src.linear.losses import Statistics, is_column
from pallas_softmax._src.linear.plan import TILE_N
from pallas_softmax._src.normalizers import Normalizer

_BLOCKS = 8  # most blocks of 128 tiles that a CTA loads at once; 8 hold 262,144 columns
_INT = jnp.iinfo(jnp.int32)


class Winners(NamedTuple):
    """The best sum of logit and noise in each row of each tile, (tiles, rows)."""

    key: Any  # int32, the sort key of the sum
    column: Any  # int32, its column; `HIGHEST` if another tile is better, or if no logit can win
    logit: Any  # float32, before the temperature divides it


class Winner(NamedTuple):
    """What a draw found in each row, (rows,)."""

    column: Any  # any column in a row where no logit can win
    logit: Any


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of the tiles. The arrays are (1, tiles * stride): the row's number of tile i is at i * stride + row."""

    row: Any
    tiles: int
    stride: int

    def load(self, gmem, first, fill: float = 0):
        """Returns a block with a number of each tile, from tile number `first` on; `fill` after the last one."""
        start, held = first * self.stride + self.row, self.tiles - first
        return blocks.load_from_row(gmem, 0, start=start, held=held, fill=fill, stride=self.stride)

    def at_column(self, gmem, column):
        """Returns the number of the tile that has this column."""
        return gmem[0, column // TILE_N * self.stride + self.row]

    def joined(self, join: Callable, empty, block: Callable):
        """Returns the join of block(first) for all blocks of tiles."""
        count = -(-self.tiles // WARPGROUP)

        def step(i, joined):
            parts = [block((i * _BLOCKS + j) * WARPGROUP) for j in range(min(count, _BLOCKS))]
            return join(joined, normalizers.tree(join, parts))

        return lax.fori_loop(0, -(-count // _BLOCKS), step, empty)

    def least(self, block: Callable):
        return jnp.min(self.joined(jnp.minimum, blocks.filled(_INT.max, jnp.int32), block))


def merge_row(tiles: int, vocab: int, plain: bool, sums: Statistics, winners, labels_gmem, *merged_gmem) -> None:
    """The kernel. `plain` says that the d of all tiles have one reference."""
    row = lax.axis_index("row")
    of_row = _Row(row, tiles, sums.normalizer.m.shape[1] // tiles)
    merged, winner = _merged_sums(of_row, plain, sums), None
    if sums.argmax is not None:

        def columns_of_largest(first):
            columns = (blocks.positions() + first) * TILE_N + of_row.load(sums.argmax, first)
            return normalizers.if_largest(columns, of_row.load(sums.normalizer.m, first, -jnp.inf), merged.normalizer.m)

        merged = merged._replace(argmax=of_row.least(columns_of_largest))
    if labels_gmem is not None:
        label = labels_gmem[row]
        is_own = is_column(label, vocab)
        logit = of_row.at_column(sums.label_logit, jnp.where(is_own, label, 0))
        merged = merged._replace(label_logit=jnp.where(is_own, logit, 0.0))
    if winners is not None:
        winner = _best(of_row, winners, vocab)
    for gmem, number in zip(merged_gmem, jax.tree.leaves((merged, winner)), strict=True):
        gmem[row] = number


def _merged_sums(of_row: _Row, plain: bool, sums: Statistics) -> Statistics:
    """Returns the normalizer of the row, and the sum of its logits."""
    kind = type(sums.normalizer)

    def combine(a, b):
        return kind(jnp.maximum(a.m, b.m), a.d + b.d) if plain else normalizers.combine(a, b)

    def numbers(first):
        m, *others = sums.normalizer
        return kind(of_row.load(m, first, -jnp.inf), *(of_row.load(a, first) for a in others))

    empty = kind(*(blocks.filled(-jnp.inf if name == "m" else 0.0) for name in kind._fields))
    lanes = of_row.joined(combine, empty, numbers)
    merged = Normalizer(jnp.max(lanes.m), jnp.sum(lanes.d)) if plain else normalizers.combine_lanes(lanes)
    if sums.total is None:
        return Statistics(merged, None, None)
    total = of_row.joined(operator.add, blocks.filled(0.0), functools.partial(of_row.load, sums.total))
    return Statistics(merged, None, jnp.sum(total))


def _best(of_row: _Row, winners: Winners, vocab: int) -> Winner:
    def inside(first, gmem, other: int):
        """Returns a block of int32 numbers of tiles; `other` after the last tile."""
        return jnp.where(blocks.positions() + first < of_row.tiles, of_row.load(gmem, first), other)

    def keys(first):
        return inside(first, winners.key, _INT.min)

    def columns_of_best(first):
        return jnp.where(keys(first) == best, inside(first, winners.column, _INT.max), _INT.max)

    best = jnp.max(of_row.joined(jnp.maximum, blocks.filled(_INT.min, jnp.int32), keys))
    column = jnp.minimum(of_row.least(columns_of_best), vocab - 1)
    return Winner(column, of_row.at_column(winners.logit, column))


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
        functools.partial(merge_row, len(sums.normalizer.m), vocab, plain),
        grid={"row": rows},
        out_type=[jax.ShapeDtypeStruct((rows,), a.dtype) for a in merged],
        name="linear_merge",
        approximate=False,
    )(*jax.tree.map(lambda a: a.reshape(1, -1), (sums, winners)), labels)
    return vary_together(tree.unflatten(merged), sums, labels, winners)[0]
