"""The inline PTX of the search of top-k, run in numpy (tests/support/ptx.py), against what it is to compute.

On the CPU the kernels run twins of it in JAX, and on a GPU the PTX: this is the PTX without a GPU.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import kernels, oracle, ptx
from tests.support.cases import BF16, F32
from tests.support.kernels import Extent, Window

SMEM = 200 * 1024


class Ref:
    """A reference to shared memory, as far as the text of the PTX depends on it."""

    def __init__(self, size, dtype="int32"):
        self.shape, self.dtype = (size,), jnp.dtype(dtype)


def words(memory, at, count, dtype="uint32"):
    return memory[at : at + count * np.dtype(dtype).itemsize].view(dtype)


def slots_of(keys, indices):
    """The slots of candidates, as one number each."""
    high = (np.asarray(keys, "int64") + 2**31).astype("uint64") << np.uint64(32)
    return high | (np.uint64(0xFFFFFFFF) - np.asarray(indices).astype("uint64"))


def keys_of(rng, n, kind):
    match kind:
        case "spread":  # as the best of a normal sample are
            return oracle.order_key((2.5 + rng.exponential(0.4, n)).astype(F32))
        case "alike":
            return np.full(n, 5)
        case "one far above":
            return np.where(np.arange(n) == n // 2, 2**31 - 1, 100 * rng.permutation(n))
    return rng.integers(-(2**31), 2**31, n)


@pytest.mark.parametrize(
    ("k", "n", "kind"),
    [
        (5, 6, "spread"),
        (128, 140, "spread"),
        pytest.param(128, 256, "anything", marks=pytest.mark.slow),
        pytest.param(70, 110, "alike", marks=pytest.mark.slow),
        (70, 110, "one far above"),
        pytest.param(300, 340, "spread", marks=pytest.mark.slow),
        pytest.param(300, 340, "one far above", marks=pytest.mark.slow),
        pytest.param(2048, 2400, "spread", marks=pytest.mark.slow),
    ],
)
def test_rank(monkeypatch, k, n, kind):
    """The k best, in order: by counting, by buckets, and where one bucket has too many by counting and by sorting."""
    rng = np.random.default_rng(k)
    capacity, padded = kernels.candidate_slots(k), -(-k // 128) * 128
    slots, buckets, ranked = 0, 8 * capacity, 12 * capacity
    keys, indices = keys_of(rng, n, kind), rng.permutation(10**6)[:n]
    memory = np.zeros(SMEM, "u1")
    words(memory, slots, n, "uint64")[:] = slots_of(keys, indices)
    words(memory, buckets, capacity)[:] = 0xDEADBEEF
    code = kernels.ptx_of(
        monkeypatch, "rank", Ref(2 * capacity), n, Ref(capacity), Ref(2 * padded), k, padded
    )
    ptx.run(code, memory, slots=slots, buckets=buckets, ranked=ranked, n=n)
    best = np.lexsort((indices, -np.asarray(keys, "int64")))[:k]
    np.testing.assert_array_equal(words(memory, ranked, k, "int32"), keys[best])
    np.testing.assert_array_equal(words(memory, ranked + 4 * padded, k), indices[best])


@pytest.mark.parametrize(
    ("groups", "k", "kind"),
    [
        (896, 128, "spread"),
        pytest.param(128, 5, "one far above", marks=pytest.mark.slow),
        pytest.param(256, 200, "anything", marks=pytest.mark.slow),
        pytest.param(256, 200, "alike", marks=pytest.mark.slow),
        pytest.param(6272, 2048, "spread", marks=pytest.mark.slow),
    ],
)
def test_threshold(groups, k, kind):
    """At least k keys reach it, and few more, but for ties; the slots are empty again."""
    keys = keys_of(np.random.default_rng(k), groups, kind)
    memory = np.zeros(SMEM, "u1")
    words(memory, 0, groups, "int32")[:] = keys
    slots, counts = 4 * groups, SMEM - 512
    code = kernels.threshold_ptx_of(groups, k)
    machine = ptx.run(code, memory, group_keys=0, slots=slots, counts=counts, bound=0)
    (bound,) = set(machine.registers["%bound"].astype("uint32").view("int32").tolist())
    ties = int(np.sum(keys == bound))
    assert k <= np.sum(keys >= bound) < k + max(2, k // 16) + ties
    assert not words(memory, slots, 512).any()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(
    ("window", "dtype", "best"),
    [
        (Window(2007, 4, 8, 8), F32, 130),
        pytest.param(Window(1024, 4, 8, 8), F32, 40, marks=pytest.mark.slow),  # fewer blocks than a group has
        pytest.param(Window(2048, 4, 2, 2), F32, 40, marks=pytest.mark.slow),  # nothing is outside
        pytest.param(Window(1024, 4, 2, 1), F32, 200, marks=pytest.mark.slow),
        pytest.param(Window(1024, 4, 2, 2), F32, 1000, marks=pytest.mark.slow),  # more than there are slots
        pytest.param(Window(9003, 8, 4, 4), BF16, 140, marks=pytest.mark.slow),
        pytest.param(Window(2048, 8, 2, 2), BF16, 100, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_collect(monkeypatch, window, dtype, best, everywhere):
    """The elements that reach a bound, from the groups that do; around them, and in the window's tail, -inf."""
    capacity, low = kernels.candidate_slots(128), window.head // 2
    x = np.full(window.size, -np.inf).astype(dtype)
    x[low : low + window.vocab] = np.random.default_rng(best).standard_normal(window.vocab).astype(dtype)
    keys, at = oracle.order_key(x), np.arange(window.size)
    bound = np.sort(keys)[-best]
    group_keys = np.full(window.groups, -(2**31))
    np.maximum.at(
        group_keys, at // window.block // window.group_blocks * 128 + at % window.block // window.vec, keys
    )
    memory = np.zeros(SMEM, "u1")
    sizes = {
        "x": x.nbytes,
        "group_keys": 4 * window.groups,
        "hits": 4 * capacity,
        "slots": 8 * capacity,
        "counts": 16,
    }
    starts = dict(zip(sizes, np.cumsum([0, *(-(-size // 16) * 16 for size in sizes.values())]).tolist()))
    memory[: x.nbytes] = x.view("u1")
    words(memory, starts["group_keys"], window.groups, "int32")[:] = group_keys
    refs = [Ref(window.size, dtype), Ref(window.groups), Ref(capacity), Ref(2 * capacity), Ref(128)]
    extent = Extent(low, low + window.vocab, 7)
    code = kernels.ptx_of(monkeypatch, "collect", window, *refs, bound, extent, all_groups=everywhere)
    ptx.run(code, memory, **starts, bound=int(bound), **extent._asdict())
    reach = np.flatnonzero((keys >= bound) & (at >= low) & (at < extent.high))
    (n,) = words(memory, starts["counts"], 1)
    if len(reach) > capacity:
        assert n > capacity
    else:
        slots = words(memory, starts["slots"], n, "uint64")
        np.testing.assert_array_equal(np.sort(slots), np.sort(slots_of(keys[reach], reach + 7)))
