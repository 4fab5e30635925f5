"""The noise of a draw in inline PTX, run in numpy, against `jax.random`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.sample import race_ptx
from tests.support import ptx

COUNT = 128


def run(write, **operands):
    """Returns what 128 threads write, as 32-bit words: write(program, number of the thread)."""
    p = Program()
    thread = p.operand("thread", "u32")
    p.store(p.at(p.operand("out", "u32"), thread, 4), write(p, thread))
    memory = np.zeros(4 * COUNT, "u1")
    ptx.run(p, memory, out=0, **operands)
    return memory.view("u4")


@pytest.mark.parametrize("start", [0, 2**32 - 40, 5 * 2**32 - 1], ids=str)
@pytest.mark.parametrize("stride", [1, 3, 2**31], ids=str)
@pytest.mark.parametrize("seed", [0, 42])
def test_bits(seed, stride, start):
    """The words equal threefry2x32, and jax.random.bits at small counters."""
    key = jax.random.key(seed)
    words = np.asarray(jax.random.key_data(key))

    def write(p, thread):
        schedule = race_ptx.key_schedule(p, *p.operands("u32", "key0", "key1"))
        counter = p.multiply_add_wide(thread, stride, p.join(*p.operands("u32", "low", "high")))
        low, high = p.split(counter)
        keyed = high + schedule[0][0], low + schedule[0][1]
        first, second = race_ptx.words_at(p, schedule, [keyed, keyed])
        return p.select(first.equals(second), first, 0)

    got = run(write, key0=words[0], key1=words[1], low=start % 2**32, high=start // 2**32)
    counters = start + stride * np.arange(COUNT, dtype=np.uint64)
    halves = (counters >> np.uint64(32)).astype("u4"), counters.astype("u4")
    want = np.bitwise_xor(*jax.extend.random.threefry2x32_p.bind(*words, *map(jnp.asarray, halves)))
    np.testing.assert_array_equal(got, want)
    if start == 0 and stride == 1:
        with jax.threefry_partitionable(True):
            np.testing.assert_array_equal(got, jax.random.bits(key, (COUNT,)))


def test_gumbel():
    """The noise is accurate to two units in the last counter, at both ends and in the middle of the range."""
    ends = np.arange(24)
    others = [2**22, 2**22 + 1, 3086183, 3086184, *np.random.default_rng(0).integers(0, 2**23, 76)]
    fractions = np.concatenate([2**ends - 1, 2**23 - 2**ends, others])[:COUNT]
    p = Program()
    at = p.at(p.operand("words", "u32"), p.operand("thread", "u32"), 4)
    p.store(at, race_ptx.gumbel(p, race_ptx.one_plus_uniform(p, p.load(at, "u32"))))
    memory = (fractions << 9).astype("u4")
    ptx.run(p, memory.view("u1"), words=0)
    got = memory.view("f4")
    want = -np.log(-np.log(np.maximum(fractions * 2.0**-23, np.finfo("f4").tiny)))
    error = np.abs(got - want) / np.maximum(np.spacing(np.abs(want).astype("f4")), 2.0**-24)
    assert error.max() < 2
    assert got.max() == got[fractions.argmax()] <= race_ptx.MAX_NOISE
