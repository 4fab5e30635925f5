"""The language for inline PTX (gpu/ptx/values.py), run in numpy (tests/support/ptx.py)."""

import numpy as np
import pytest

from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.values import Program
from tests.support import ptx

THREADS = np.arange(128)


def run(write):
    """Runs a program on 128 threads. `write(p, x)` returns what each thread writes; x is the thread's number."""
    p = Program()
    address = p.at(p.operand("numbers", "u32"), p.operand("thread", "u32"), 4)
    p.store(address, write(p, p.load(address, "u32")))
    memory = THREADS.astype("uint32").view("u1")
    ptx.run(p, memory, numbers=0)
    return memory.view("uint32")


def test_control():
    """Each thread leaves blocks and loops, and repeats loops, independently of the others."""

    def collatz_steps(p, x):
        number, steps = p.var(x), p.var(0, "u32")
        with p.loop() as leave:
            leave(number <= 1)
            odd = (number & 1).equals(1)
            half = number >> 1
            p.set(number, number * 3 + 1, when=odd)
            p.set(number, half, when=~odd)
            p.increase(steps, 1)
        return steps

    def steps(n):
        return 0 if n <= 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    np.testing.assert_array_equal(run(collatz_steps), [steps(n) for n in range(128)])

    def sum_below_unless_multiple_of_four(p, x):
        total = p.var(1000, "u32")
        with p.block() as finish:
            finish((x & 3).equals(0))
            with p.when(x < 100):
                p.set(total, 0)
            left = p.var(x)
            with p.repeat() as again:
                p.update(left, "sub", 1)
                p.increase(total, left)
                again(left > 0)
        return total

    want = np.where(THREADS % 4, THREADS * (THREADS - 1) // 2 + np.where(THREADS < 100, 0, 1000), 1000)
    np.testing.assert_array_equal(run(sum_below_unless_multiple_of_four), want)


@pytest.mark.parametrize("change_between", [False, True])
def test_combined_comparison(change_between):
    """A comparison combined with a condition uses its operands at the time it was written."""

    def write(p, x):
        limit = p.var(50, "u32")
        odd, below = (x & 1).equals(1), x < limit
        if change_between:
            p.set(limit, 0)
        return p.select(odd & below, 1, 0, "u32") | p.select(~below, 2, 0, "u32")

    np.testing.assert_array_equal(run(write), np.where(THREADS < 50, THREADS % 2, 2))


def test_warp():
    """Lanes exchange 64-bit numbers, and reduce."""

    def write(p, x):
        lane = p.operand("thread", "u32") & 31
        low, high = p.split(p.shuffle(p.join(x, ~x), "bfly", 5))
        agree = low.equals(~high)
        lower, inside = p.shuffle_up(low, 3)
        some = p.select(inside & agree, lower, 77)
        return p.over_lanes("max", lane) + (some << 8) + (p.count_ones(p.ballot(lane < 7)) << 16)

    lower = np.where(THREADS % 32 < 3, 77, (THREADS - 3) ^ 5)
    np.testing.assert_array_equal(run(write), 31 + (lower << 8) + (7 << 16))


def test_floats():
    """Floats divide and convert to integers in three ways. The logarithm of a power of two is exact."""

    def write(p, x):
        quarters = p.divide(p.absolute(p.convert(x, "f32") - 64.0), 4.0)
        down, nearest, up = (p.convert(quarters, "u32", how) for how in ("rzi", "rni", "rpi"))
        power = p.var(1, "u32") << (x & 15)
        log = p.convert(p.log2(p.convert(power, "f32")), "u32")
        return down + (nearest << 8) + (up << 16) + (log << 24)

    x = np.abs(THREADS - 64) / 4
    down, nearest, up = (f(x).astype(int) for f in (np.floor, np.rint, np.ceil))
    np.testing.assert_array_equal(run(write), down + (nearest << 8) + (up << 16) + ((THREADS & 15) << 24))


def test_pairs():
    """The halves of a word add, compare and have signs independently."""

    def write(p, x):
        word = ((x - 100) & 0xFFFF) | ((50 - x) << 16)
        signs = word.bits("s16x2").sign()
        least = p.var(0xFFF6_000A, "s16x2")  # -10 and 10
        return p.op("add", "u16x2", p.max(word.bits("s16x2"), least).bits("u16x2"), signs.bits("u16x2"))

    low, high = THREADS - 100, 50 - THREADS
    low, high = np.maximum(low, 10) - (low < 0), np.maximum(high, -10) - (high < 0)
    np.testing.assert_array_equal(run(write), (low & 0xFFFF) | ((high & 0xFFFF) << 16))


def test_cluster():
    """A CTA reads what the next CTA wrote, and counts in adjacent words."""
    ctas = 3
    p = CtaProgram(ctas=ctas)
    thread, cta = p.operands("u32", "thread", "cta")
    own = p.at(p.operand("numbers", "u32"), thread, 4)
    p.store(own, p.load(own, "u32") + cta * 1000)
    meet = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    p += meet
    following = p.select(cta.equals(ctas - 1), 0, cta + 1)
    (x,) = p.of_cta(own, following, "u32")
    p += meet
    p.store(own, x)
    p.add_to(p.operand("counts", "u32"), 1, thread < 5, offset=4)
    memory = np.zeros((ctas, 520), "u1")
    memory[:, :512] = THREADS.astype("uint32").view("u1")
    machine = ptx.Machine(p, memory, 128, {"numbers": 0, "counts": 512, "cta": np.arange(ctas)})
    machine.run()
    numbers = memory.view("uint32")
    np.testing.assert_array_equal(numbers[:, :128], np.array([[1000], [2000], [0]]) + THREADS)
    np.testing.assert_array_equal(numbers[:, 128:], [[0, 5]] * ctas)


def test_functions_of_three_numbers():
    """One instruction computes any function of three numbers bit by bit."""
    p = Program()
    p.bitwise3(lambda key, low, ones: key & ~ones | low, *p.operands("u32", "a", "b", "c"))
    # 0xdc, as PTX's manual computes it from 0xf0, 0xcc and 0xaa.
    assert str(p).endswith("<a>, <b>, <c>, 220;")
