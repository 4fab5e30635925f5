"""The language in which inline PTX is written (device/ptx_values.py): its text, run by tests/support/ptx.py."""

import numpy as np
import pytest

from tests.support import kernels, ptx

THREADS = np.arange(128)


def run(write):
    """Runs a program on 128 threads: `write(p, x)`, where x is a thread's number, returns what the thread writes."""
    p = kernels.Program()
    address = p.at(p.operand("numbers", "u32"), p.operand("thread", "u32"), 4)
    p.store(address, write(p, p.load(address, "u32")))
    memory = THREADS.astype("uint32").view("u1")
    ptx.run(p, memory, numbers=0)
    return memory.view("uint32")


def test_control():
    """A block is left, a loop is left, and a repetition runs again, by each thread for itself."""

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
    """A comparison that is combined with a condition is that of its operands when it was written."""

    def write(p, x):
        limit = p.var(50, "u32")
        odd, below = (x & 1).equals(1), x < limit
        if change_between:
            p.set(limit, 0)
        return p.select(odd & below, 1, 0, "u32") | p.select(~below, 2, 0, "u32")

    np.testing.assert_array_equal(run(write), np.where(THREADS < 50, THREADS % 2, 2))


def test_warp():
    """Lanes exchange numbers of 64 bits, and reduce."""

    def write(p, x):
        lane = p.operand("thread", "u32") & 31
        low, high = p.split(p.shuffle(p.join(x, ~x), "bfly", 5))
        agree = low.equals(~high)
        lower, inside = p.shuffle_up(low, 3)
        some = p.select(inside & agree, lower, 77)
        return p.over_lanes("max", lane) + (some << 8) + (p.count_ones(p.ballot(lane < 7)) << 16)

    lower = np.where(THREADS % 32 < 3, 77, (THREADS - 3) ^ 5)
    np.testing.assert_array_equal(run(write), 31 + (lower << 8) + (7 << 16))


def test_functions_of_three_numbers():
    """One instruction computes any function of three numbers bit by bit."""
    p = kernels.Program()
    p.bitwise3(lambda key, low, ones: key & ~ones | low, *p.operands("u32", "a", "b", "c"))
    assert str(p).endswith(
        "<a>, <b>, <c>, 220;"
    )  # 0xdc, as PTX's manual computes it from 0xf0, 0xcc and 0xaa
