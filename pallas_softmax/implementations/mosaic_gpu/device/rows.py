"""Where in device memory the part of a row lies that a CTA works on."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_softmax.implementations.mosaic_gpu.device.layout import Cut


class PartPlace(NamedTuple):
    """The part of a row that this CTA holds, and where it lies in an `aligned_view` of the array of rows.

    Here 6 rows have a view of shape (2, 3 * vocab), and each row is cut into two parts. For part 1 of row 4,
    view_row is 1 and first is vocab + start:

        view row 0    | row 0           | row 1           | row 2           |
        view row 1    | row 3           | row 4           | row 5           |
                                        | part 0 | part 1 |

    Attributes:
      row: number of the row in the array (rows, vocab).
      index: number of the part in the row.
      start: first element of the row that is in the part.
      owned: number of elements of the part.
      view_row: number of the view's row that holds the part; None if the view is one-dimensional.
      first: first element of the part, counted from the start of that row of the view.
    """

    row: Any
    index: Any
    start: Any
    owned: Any
    view_row: Any
    first: Any

    def in_view(self, gmem):
        """The row of the view `gmem` that holds the part, from whose element `first` on it lies."""
        return gmem if self.view_row is None else gmem.at[self.view_row]


def part_place(cut: Cut, view: tuple[int, ...], *, rows: int, backwards: bool = False) -> PartPlace:
    """The place of the part that belongs to this CTA of a grid with the axes "row" and, of several parts, "part".

    Args:
      cut: how each row is cut into parts.
      view: the shape of the arrays in device memory, from `aligned_view`.
      rows: number of rows.
      backwards: whether the CTAs take the rows and their parts from the last one on.
    """
    row = lax.axis_index("row")
    index = lax.axis_index("part") if cut.count > 1 else jnp.int32(0)
    if backwards:
        row, index = rows - 1 - row, cut.count - 1 - index
    start = cut.start(index)
    owned = cut.start(index + 1) - start
    rows_together = view[-1] // cut.vocab
    view_row = row // rows_together if len(view) > 1 else None
    return PartPlace(row, index, start, owned, view_row, row % rows_together * cut.vocab + start)
