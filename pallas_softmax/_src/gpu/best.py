"""The k best elements of rows in registers, for top-k and for routers; `ptx/merging.py` is the search."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src import sort_keys
from pallas_softmax._src.gpu import tiles
from pallas_softmax._src.gpu.interpreter import twin
from pallas_softmax._src.gpu.layout import Tile, merged_tile
from pallas_softmax._src.gpu.ptx.merging import take_program, take_words_program


def search_input(x) -> tuple[Any, int]:
    """Returns what the search takes, and its value for a masked element: bits of 16-bit elements, keys of others."""
    if x.dtype.itemsize == 2:
        return lax.bitcast_convert_type(x, jnp.int16), -1
    return sort_keys.key32(x), sort_keys.lowest_key(x.dtype)


@twin
def best_indices(tile: Tile, vocab: int, k: int, key, lanes: float | None = None):
    """Returns the indices of the k best of each row of `vocab` elements, as a tile of `merged_tile`.

    `key` has the keys of the elements, and may have columns beyond the row. `list_length` documents `lanes`.
    """
    program = take_program(tile, vocab, k, lanes)
    return tiles.insert_in_tile(program, key, "i32", {"winner": merged_tile(tile, k)})[0]


def best_keys_and_indices(tile: Tile, vocab: int, k: int, bits):
    """Returns keys and indices of the k best of each row, as two tiles like the result of `best_indices`.

    `bits` has the bits of the row's 16-bit elements, all ones for masked elements.
    """
    word = _best_words(tile, vocab, k, bits)
    return word >> 16, ~word & 0xFFFF


@twin
def _best_words(tile: Tile, vocab: int, k: int, bits):
    """Returns the k best of each row as packed words: the key, and the complement of the index in the lower half."""
    program = take_words_program(tile, vocab, k)
    return tiles.insert_in_tile(program, bits, "i32", {"winner": merged_tile(tile, k)})[0]
