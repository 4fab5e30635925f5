"""The key at which a running sum reaches a goal (gpu/ptx/narrow.py), in numpy (tests/support/ptx.py)."""

import numpy as np
import pytest

from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.narrow import KeyRange, bucket_that_reaches, narrow
from tests.support import ptx
from tests.support.covering import first, pairs

BUCKETS = 64
SUMS, RESULTS = 1024, 2048  # addresses; items are at 0


def narrowed(keys, measures, high, low, goal):
    """Returns the last key and what its items must reach; each of 128 threads has an item, a key with a measure."""
    p = CtaProgram()
    key, measure = p.load_vector(p.thread * 8, "s32", 2)
    sums, rest = p.var(SUMS, "u32"), p.var(goal, "u32")
    keys_left = KeyRange(p, p.var(high, "s32"), p.var(low, "s32"))

    def one_round(bucket_of):
        p.barrier()
        p.store(sums + p.thread * 4, 0, when=p.thread < BUCKETS)
        p.barrier()
        bucket, inside = bucket_of(key)
        p.add_to(sums + bucket * 4, measure, when=inside)
        p.barrier()
        bucket, rest_of_bucket = bucket_that_reaches(p, p.load_vector(sums + p.lane * 8, "u32", 2), rest)
        p.set(rest, rest_of_bucket)
        return bucket

    narrow(p, keys_left, BUCKETS, one_round)
    p.store(p.thread * 8 + RESULTS, keys_left.high, rest.bits("s32"))
    memory = np.zeros(RESULTS + 1024, "u1")
    memory[:1024] = np.stack([keys, measures], 1).astype("int32").reshape(-1).view("u1")
    ptx.run(p, memory)
    results = memory[RESULTS:].view("int32").reshape(-1, 2)
    assert (results == results[0]).all()  # in all threads
    return tuple(results[0].tolist())


@pytest.mark.parametrize(("spread", "measure"), first(2, pairs([5, 2**31 - 1, 1, 1000], [10**6, 1])))
def test_narrow(spread, measure):
    """Few keys with many ties, and keys over the whole range of 32 bits, with counts and with masses."""
    rng = np.random.default_rng([spread, measure])
    for _ in range(3):
        keys = rng.integers(-spread, spread, 128)
        measures = rng.integers(1, measure + 1, 128)
        goal = int(rng.integers(1, measures.sum() + 1))
        order = np.argsort(-keys, kind="stable")
        last = keys[order][np.searchsorted(np.cumsum(measures[order]), goal)]
        want = last, goal - measures[keys > last].sum()
        assert narrowed(keys, measures, spread, -spread, goal) == want
    total = measures.sum()  # also takes the place of a larger goal
    assert narrowed(keys, measures, spread, -spread, total + 5) == (keys.min(), measures[keys == keys.min()].sum())
