"""Sorting networks of values in registers: comparisons that a program writes one after the other."""

from pallas_softmax._src.gpu.layout import powers_below
from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.gpu.ptx.values import Value

LOWEST = -(2**31)  # pads the results: the least int32


def best(p: Program, words: list[Value], count: int, run: int = 1) -> list[Value]:
    """Returns the `count` largest words, the largest first, padded with LOWEST.

    The words may be in order already, the largest first, within each `run` of them; then these runs are only merged. A
    comparison computes its minimum and its maximum only if a result depends on them.
    """
    comparisons, positions = network(len(words), count, run)
    out, needed, steps = list(words), set(positions), []
    for i, j in reversed(comparisons):
        if {i, j} & needed:
            steps.append((i, j, i in needed, j in needed))
            needed |= {i, j}
    for i, j, needs_max, needs_min in reversed(steps):
        a, b = out[i], out[j]
        if needs_min:
            out[j] = p.min(a, b)
        if needs_max:
            out[i] = p.max(a, b)
    return [out[i] for i in positions] + [p.var(LOWEST, "s32") for _ in range(count - len(positions))]


def sorted_bitonic(p: Program, words: list[Value]) -> list[Value]:
    """Returns bitonic words in order, the largest first. Their number is a power of two."""
    out = list(words)
    for stride in reversed(powers_below(len(words))):
        for i in range(len(out)):
            if not i & stride:
                a, b = out[i], out[i + stride]
                out[i + stride], out[i] = p.min(a, b), p.max(a, b)
    return out


def network(n: int, count: int, run: int = 1) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the comparisons that find the best `count` of n elements, and their final positions, the best first.

    A comparison (i, j) leaves the larger element in position i. This is Batcher's odd-even merge sort (Knuth, volume 3,
    5.3.4), but each list keeps only `count` elements. The best 8 of 32 elements take 248 minima and maxima, instead of
    280.
    """
    comparisons: list[tuple[int, int]] = []

    def merge_sorted(a: list[int], b: list[int]) -> list[int]:
        if not (a and b):
            return a + b
        if len(a) == len(b) == 1:
            comparisons.append((a[0], b[0]))
            return a + b
        even, odd = merge_sorted(a[::2], b[::2]), merge_sorted(a[1::2], b[1::2])
        out = even[:1]
        for i, j in zip(odd, even[1:]):
            comparisons.append((i, j))
            out += [i, j]
        pairs = min(len(odd), len(even) - 1)
        return out + odd[pairs:] + even[1 + pairs :]

    def best_of(positions: list[int]) -> list[int]:
        """Returns where the best of these positions are after the comparisons, the best first."""
        if len(positions) <= run:
            return positions
        half = (len(positions) + 1) // 2
        return merge_sorted(best_of(positions[:half]), best_of(positions[half:]))[:count]

    return comparisons, best_of(list(range(n)))
