"""The language for inline PTX (gpu/ptx), run in numpy (tests/support/ptx.py)."""

import functools
import operator

import numpy as np
import pytest

from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.program import Program
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


def test_device_memory():
    """Threads copy an array in device memory. The machine refuses accesses before or after an array."""
    x = np.arange(130, dtype="uint16")

    def copy(first):
        p, y = Program(), ptx.Device(np.zeros(128, x.dtype), 6)
        at = p.multiply_wide(p.operand("thread", "u32"), 2)
        element = p.load(p.operand("x", "u64") + at, "u16", offset=2 * first)
        p.store(p.operand("y", "u64") + at, element)
        ptx.run(p, np.zeros(16, "u1"), x=ptx.Device(x, 4), y=y)
        return y.array

    np.testing.assert_array_equal(copy(2), x[2:])
    for first in (-1, 3):
        with pytest.raises(AssertionError, match="outside: ld.global.b16"):
            copy(first)


@pytest.mark.parametrize("change_between", [False, True])
def test_combined_comparison(change_between):
    """Comparisons combine with conditions on either side, and use their operands at the time they were written."""

    def write(p, x):
        limit = p.var(50, "u32")
        odd, below = (x & 1).equals(1), x < limit
        if change_between:
            p.set(limit, 0)
        conditions = odd & below, (x < 50) & odd, ~below, (x > 99) | odd
        return functools.reduce(operator.or_, (p.select(c, 1 << i, 0, "u32") for i, c in enumerate(conditions)))

    odd, below = THREADS % 2, THREADS < 50
    want = 3 * (odd & below) + 4 * ~below + 8 * (odd | (THREADS > 99))
    np.testing.assert_array_equal(run(write), want)


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


def registers():
    p = Program()
    kinds = ("f32", "f16", "u32", "s32", "u64", "u16", "s16x2", "u16x2", "f16x2", "pred")
    return p, {kind: p.fresh(kind) for kind in kinds}


# By the instruction and both types that the message must name.
MIXED = {
    ("add.rn.f32", "f32", "u32"): lambda p, r: r["f32"] + r["u32"],
    ("add.u32", "i32", "f32"): lambda p, r: r["u32"] + r["f32"],
    ("add.u32", "i32", "u64"): lambda p, r: r["u32"] + r["u64"],
    ("sub.u64", "i64", "u32"): lambda p, r: r["u64"] - r["u32"],
    ("mul.lo.s32", "i32", "pred"): lambda p, r: r["s32"] * r["pred"],
    ("mad.lo.u32", "i32", "u64"): lambda p, r: p.at(r["u64"], r["u32"], 4),
    ("fma.rn.f32", "f32", "s32"): lambda p, r: p.multiply_add(r["f32"], 2.0, r["s32"]),
    ("add.u16x2", "i16x2", "u32"): lambda p, r: r["u16x2"] + r["u32"],
    ("and.b32", "b32", "f32"): lambda p, r: r["u32"] & r["f32"],
    ("or.pred", "pred", "u32"): lambda p, r: r["pred"] | r["u32"],
    ("setp.lt.and.s32", "pred", "u32"): lambda p, r: r["u32"] & (r["s32"] < 1),
    ("shl.b32", "i32", "u64"): lambda p, r: r["u32"] << r["u64"],
    ("setp.lt.s32", "s32", "u32"): lambda p, r: r["s32"] < r["u32"],  # the order depends on the sign
    ("setp.eq.f32", "f32", "u32"): lambda p, r: r["f32"].equals(r["u32"]),
    ("min.u32", "u32", "s32"): lambda p, r: p.min(r["u32"], r["s32"]),
    ("max.NaN.f32", "f32", "f16"): lambda p, r: p.reduce("max.NaN", [r["f32"], r["f16"]]),
    ("mul.hi.u32", "u32", "s32"): lambda p, r: p.multiply_high(r["u32"], r["s32"]),
    ("mul.wide.u32", "u32", "u64"): lambda p, r: p.multiply_wide(r["u64"], 4),
    ("ex2.approx.ftz.f32", "f32", "f16"): lambda p, r: p.exp2(r["f16"]),
    ("lop3.b32", "b32", "f32"): lambda p, r: p.bitwise3(lambda a, b, c: a & b | c, r["u32"], r["f32"], 1),
    ("selp.b32", "b32", "f32"): lambda p, r: p.select(r["pred"], r["u32"], r["f32"]),
    ("selp.f32", "pred", "u32"): lambda p, r: p.select(r["u32"], r["f32"], 0),
    ("popc.b32", "b32", "u64"): lambda p, r: p.count_ones(r["u64"]),
    ("bfind.u32", "u32", "s32"): lambda p, r: p.highest_bit(r["s32"]),
    ("mov.b64", "32 bits", "u16"): lambda p, r: p.split(r["u64"], "u16"),
    ("mov.b64", "32 bits", "f16"): lambda p, r: p.join(r["u32"], r["f16"]),
    ("mov.b32", "f32", "u32"): lambda p, r: p.set(r["f32"], r["u32"]),
    ("mov.b32", "b32", "u64"): lambda p, r: p.var(r["u64"], "u32"),
    ("add.s32", "i32", "f32"): lambda p, r: p.increase(r["s32"], r["f32"]),
    ("max.s32", "s32", "u32"): lambda p, r: p.update(r["s32"], "max", r["u32"]),
    ("ld.shared.b32", "i32", "f32"): lambda p, r: p.load(r["f32"], "u32"),
    ("st.shared.b32", "32 bits", "u64"): lambda p, r: p.store(r["u32"], r["u32"], r["u64"]),
    ("red.relaxed.cta.shared::cta.add.u32", "i32", "f32"): lambda p, r: p.add_to(r["u32"], r["f32"]),
    ("atom.relaxed.cta.shared::cta.add.u32", "i32", "u64"): lambda p, r: p.take_from(r["u32"], r["u64"]),
    ("shfl.sync.idx.b32", "i32", "u64"): lambda p, r: p.shuffle(r["f32"], "idx", r["u64"]),
    ("shfl.sync.up.b32", "32", "u64"): lambda p, r: p.shuffle_up(r["u64"], 1),
    ("vote.sync.any.pred", "pred", "u32"): lambda p, r: p.any(r["u32"]),
    ("condition", "pred", "u32"): lambda p, r: p.set(r["u32"], 1, when=r["u32"]),
    ("bits", "f32", "u64"): lambda p, r: r["f32"].bits("u64"),
}


@pytest.mark.parametrize("message", MIXED, ids=" ".join)
def test_operands_agree(message):
    """An error names the instruction, what it takes, and what it got."""
    with pytest.raises(TypeError) as error:
        MIXED[message](*registers())
    assert all(word in str(error.value) for word in message)


def test_operands_of_either_sign():
    """Instructions that compute the same bits for signed and unsigned integers take both. Bits may be of pairs."""
    p, r = registers()
    signed, unsigned, pair = r["s32"], r["u32"], r["s16x2"]
    p.set(signed, unsigned + signed * unsigned)
    p.store(unsigned, signed, r["f32"], when=unsigned.equals(signed) & r["pred"])
    p.set(unsigned, p.select(r["pred"], signed ^ pair, unsigned << signed))
    assert [line.split()[0] for line in p.lines if "@" not in line] == [
        *("mul.lo.s32", "add.u32", "mov.b32", "setp.eq.u32", "and.pred"),
        *("xor.b32", "shl.b32", "selp.b32", "mov.b32"),
    ]


NUMBERS = {
    ("u32", 0xFFFFFFFF): "4294967295",
    ("s32", -(2**31)): "-2147483648",
    ("u64", np.int64(5)): "5",
    ("f32", 1): "0f3F800000",
    ("f32", -np.inf): "0fFF800000",
    ("f32", np.float32(0.5)): "0f3F000000",
    ("pred", True): "1",
}
NOT_NUMBERS = {
    ("u32", 1.0): TypeError,
    ("u32", 1.5): TypeError,
    ("s32", np.float32(2)): TypeError,
    ("u64", None): TypeError,
    ("f32", None): TypeError,
    ("f32", 1j): TypeError,
    ("f16", 1): TypeError,  # PTX has no such numbers
    ("u32", -1): ValueError,
    ("u32", 2**32): ValueError,
    ("s32", 2**31): ValueError,
    ("u16", 2**16): ValueError,
    ("f32", 1e39): ValueError,
}


@pytest.mark.parametrize("kind, number", NUMBERS)
def test_numbers_take_the_kind_of_the_register(kind, number):
    p = Program()
    p.var(number, kind)
    assert p.lines[-1].endswith(f", {NUMBERS[kind, number]};")


@pytest.mark.parametrize("kind, number", NOT_NUMBERS, ids=str)
def test_numbers_that_a_kind_cannot_hold(kind, number):
    p = Program()
    with pytest.raises(NOT_NUMBERS[kind, number], match=f"max.{kind} takes {kind}"):
        p.max(p.fresh(kind), number)


def test_masks_may_have_any_sign():
    """An operand of either sign takes the numbers of both signs."""
    p, r = registers()
    for instruction, value, mask in ("and.b32", r["s32"], 0xFFFFFFFF), ("and.b64", r["u64"], -16):
        out = value & mask
        assert p.lines[-1] == f"{instruction} {out}, {value}, {mask};"
    with pytest.raises(ValueError, match="and.b32 takes b32, a number from -2147483648 to 4294967295"):
        r["u32"] & 2**32


def test_values_have_no_truth():
    """Python cannot decide by a value: `if`, `and`, `not`, max(), == and `in` raise instead of writing wrong text."""
    x = Program().operand("x", "u32")
    for use in (
        lambda: 1 if x < 1 else 0,
        lambda: x and 1,
        lambda: not x,
        lambda: max(x, x),
        lambda: any([x]),
        lambda: x == 1,
        lambda: x != 1,
        lambda: x in (1, 2),
    ):
        with pytest.raises(TypeError, match="PTX value"):
            use()
    assert x in {x}
