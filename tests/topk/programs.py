"""The inline PTX of top-k as programs of their own, and keys that are hard to sort."""

import numpy as np

from pallas_softmax._src.gpu.layout import merged_tile
from pallas_softmax._src.gpu.ptx import merging, ranking
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.topk import candidates_ptx, merge_kernel
from pallas_softmax._src.topk.candidates_ptx import WindowProgram
from tests.support import oracle
from tests.support.cases import F32


def rank_ptx_of(capacity, k, dtype, vocab):
    """Returns the text that ranks the first <n> entries of the list <candidates>, with scratch <buckets>."""
    p = CtaProgram()
    candidates, n, buckets, ranked = p.operands("u32", "candidates", "n", "buckets", "ranked")
    put = merge_kernel.put_in_shared_memory(p, ranked, k)
    ranking.rank(p, ranking.CandidateList(candidates, n, capacity, buckets, ranked, put, k, dtype, vocab))
    return p


def bound_ptx_of(window, k):
    """Returns the text of the search for a bound; <bound> receives it."""
    p = WindowProgram(window, "float32", k)
    bound, _ = candidates_ptx.find_bound(p, k)
    p.set(p.operand("bound", "s32"), bound)
    return p


def collect_ptx_of(window, dtype, k, everywhere):
    """Returns the text that lists the elements that reach <bound>."""
    p = WindowProgram(window, dtype, k)
    candidates_ptx.collect(p, p.operand("bound", "s32"), all_groups=everywhere)
    return p


def merging_words_ptx_of(tile, vocab, k):
    """Returns the text of merges in a tile of 16-bit keys, and the tile of the packed keys <winner0_0>, ..."""
    return merging.take_words_program(tile, vocab, k), merged_tile(tile, k)


def merging_ptx_of(tile, vocab, k, lanes=None):
    """Returns the text of merges in a tile of 32-bit keys, and the tile of the columns <winner0_0>, ..."""
    return merging.take_program(tile, vocab, k, lanes), merged_tile(tile, k)


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
