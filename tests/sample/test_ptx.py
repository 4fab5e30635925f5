"""The inline PTX of sample and filter_logits, run in numpy (tests/support/ptx.py), against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.gpu.ptx.program import Program
from pallas_softmax._src.sample import race_ptx
from pallas_softmax._src.sample.mosaic_gpu import _OF_CUTOFF, row_program
from pallas_softmax._src.sample.plan import plan_of, plan_sample
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import DRAWN, row_operands
from tests.support import ptx
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.covering import first, first_values, parameter_id
from tests.support.draws import all_combinations, assert_cutoffs, assert_draws, bits_at, masked_rows
from tests.support.plans import HOPPER

pytestmark = pytest.mark.usefixtures("quick_compilation")

LONG = ["normal", "ascending", "integers", "constant"]  # thresholds are among thousands of ties
WORDS_OF_ONE = np.array([1, 2, 3, 4], np.uint32)
_X = 1024  # address of the part in shared memory
_UNSET = -7  # what a result holds that the program did not write


def part_of(plan, x, i):
    """Returns part i of a row, as shared memory holds it, and the index of its first element."""
    window = plan.window
    start, end = int(window.cut.start(i)), int(window.cut.start(i + 1))
    part = np.full(window.smem_size, -np.inf, x.dtype)
    part[shift_of(window) :][: end - start] = x[start:end]
    return part, start


def shift_of(window):
    return window.vec - 1 if window.shifted else 0


def run_row(plan, x, words, temperature, top_k, top_p, min_p, rng=None):
    """Runs a draw from a row x, which is -inf where masked; without words it finds the cutoff.

    Returns the machine, and the results as arrays of one.
    """
    count, dtypes = plan.window.count, _OF_CUTOFF if words is None else DRAWN
    results = {name: ptx.Device(np.full(1, _UNSET, dtype)) for name, dtype in dtypes.items()}
    parts, starts = zip(*(part_of(plan, x, i) for i in range(count)))
    size = parts[0].nbytes
    of_row = {name: np.asarray(a) for name, a in row_operands(0, 0, jnp.asarray(temperature, F32)).items()}
    operands = {
        **of_row,
        **{"top_k": np.int32(top_k), "top_p": F32.type(top_p), "min_p": F32.type(min_p)},
        **{"part": np.arange(count), "start": np.array(starts), "shift": shift_of(plan.window)},
        **{"x": _X, "scratch": _X + size, **results},
        **({} if words is None else dict(zip(NOISE_OPERANDS, words))),
    }
    rubbish = np.random.default_rng(0).integers(0, 256, (count, -(-(_X + size + 4 * plan.words) // 16) * 16))
    memory = rubbish.astype("u1")
    memory[:, _X : _X + size] = [part.view("u1") for part in parts]
    text = row_program(plan, x.dtype, None if words is None else 1)
    machine = ptx.Machine(text, memory, plan.threads, operands, rng)
    machine.run()
    return machine, [result.array for result in results.values()]


def assert_right(plan, x, words, parameters, labels, where=None, rng=None):
    kept = x if where is None else np.where(where, x, np.array(-np.inf, x.dtype))
    of_row, mask = [np.array([a]) for a in parameters], None if where is None else where[None]
    assert_draws(run_row(plan, kept, words, *parameters, rng=rng)[1], x[None], words[None], labels, of_row, mask)
    assert_cutoffs(run_row(plan, kept, None, *parameters, rng=rng)[1], x[None], labels, of_row, mask)


def assert_all_right(names, v, dtype, count, warpgroups, masked, step, rng=None, start=0):
    """Asserts that results are right, for every `step`-th combination of a row, parameters and noise."""
    x, where, words, parameters, labels = all_combinations(*masked_rows(names, v, dtype, masked))
    plan = plan_of(v, dtype, count, warpgroups)
    for i in range(start, len(x), step):
        one = None if where is None else where[i]
        assert_right(plan, x[i], words[i], [a[i] for a in parameters], labels[i : i + 1], one, rng)


CASES = [
    (ALL, 1003, F32, 2, 1, False, 211), (ALL, 1000, BF16, 1, 2, True, 271), (ALL, 129, F16, 1, 1, True, 53),
    (ALL, 1, F32, 1, 1, False, 53), (ALL, 2, BF16, 1, 1, False, 53), (ALL, 127, F16, 3, 2, True, 53),
    (ALL, 128, F32, 2, 2, False, 53), (ALL, 129, F32, 1, 4, True, 53), (ALL, 1003, BF16, 3, 2, True, 37),
    (ALL, 1000, F32, 8, 1, False, 53), (ALL, 4099, F32, 3, 1, True, 37), (ALL, 4104, F16, 2, 1, True, 37),
    (ALL, 4099, BF16, 2, 1, False, 37),
    # a zone has more keys than the lists have room for
    (LONG, 128256, F32, 10, 2, False, 13), (LONG, 151936, BF16, 6, 2, False, 13),
    (LONG, 50257, F16, 16, 1, False, 13),
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "v", "dtype", "count", "warpgroups", "masked", "step"), first(2, CASES), ids=parameter_id
)
def test_ptx(names, v, dtype, count, warpgroups, masked, step):
    assert_all_right(names, v, dtype, count, warpgroups, masked, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "step"),
    [
        ([-(2.0**-20), -(2.0**-16), -(2.0**-13), -0.5, -0.25, -1], 3),
        ([-2e-39, -1e-39], 1),
        ([-5, -6, -1e-20], 1),
        ([-5, -6, -7], 1),
        ([0, -0.0, -1e-30, 1e-30], 1),
        ([1, 2.0**-14, 2.0**-14 * (1 + 2.0**-7), 2.0**-14 * (1 + 2.0**-6), 0, -0.0, -(2.0**-13)], 3),
    ],
    ids=str,
)
def test_ptx_of_values_near_zero(row, step):
    """bfloat16 values near 0 share buckets. These are the first buckets if the maximum is negative and near 0."""
    x, _, words, parameters, labels = all_combinations(np.array([row], BF16))
    plan = plan_of(len(row), BF16, 1, 1)
    for i in range(0, len(x), step):
        assert_right(plan, x[i], words[i], [a[i] for a in parameters], labels[i : i + 1])


@pytest.mark.parametrize(
    ("row", "dtype", "more"),
    first(1, [([-1, 0], BF16, 0), ([0, -0.0], BF16, 0), ([0], BF16, 0), ([0, 1], BF16, 0), ([0, -0.0], F32, 1)]),
    ids=str,
)
def test_ptx_of_zeros_is_fast(row, dtype, more):
    """Rows with many zeros, such as padding of a batch, need no slow search digit by digit."""
    v = 2100
    plan = plan_of(v, dtype, 2, 1)
    parameters = 1.0, v, 0.7, 0.0
    zeros, others = (np.resize(np.array(of, dtype), v) for of in (row, [3, 2]))
    machines = [run_row(plan, x, None, *parameters)[0] for x in (zeros, others)]
    barriers = [machine.arrived.max() for machine in machines]  # arrivals at the cluster's barrier
    assert barriers[0] == barriers[1] + more
    assert_right(plan, zeros, WORDS_OF_ONE, parameters, [str(row)])


def test_ptx_of_sorted_rows():
    """With a small top_k, the bound comes from the CTA with the lowest elements. Most of the row exceeds it, so the
    lists overflow.

    The elements above the best CTA's bound fit. These lists then serve all filters, at the cost of two more cluster
    barriers.
    """
    v, count = 4099, 3
    plan = plan_of(v, F32, count, 1)
    assert v // count > plan.list_size
    x = np.random.default_rng(0).standard_normal(v).astype(F32)
    rows = x, np.sort(x), -np.sort(-x)
    barriers = [run_row(plan, row, None, 1.0, 5, 0.9, 0.0)[0].arrived.max() for row in rows]
    assert barriers[1:] == [barriers[0] + 2] * 2
    # Among the 39 combinations of a row, this picks one with top_k = 5 and one with all filters.
    assert_all_right(["ascending", "descending"], v, F32, count, 1, masked=False, step=20, start=16)


@pytest.mark.parametrize("seed", first_values(1, range(5)))
@pytest.mark.parametrize(("dtype", "warpgroups"), first(1, [(F32, 1), (BF16, 2)]), ids=str)
def test_ptx_in_any_order(dtype, warpgroups, seed):
    """Warps run in random order, unless they wait for each other."""
    rng = np.random.default_rng(seed)
    names = ["integers", "neg_inf_first"]
    assert_all_right(names, 1003, dtype, 2, warpgroups, masked=False, step=67, rng=rng, start=seed)


THREADS = 128


@pytest.mark.parametrize("start", [0, 2**32 - 40, 5 * 2**32 - 1], ids=str)
@pytest.mark.parametrize("stride", [1, 3, 2**31], ids=str)
@pytest.mark.parametrize("seed", [0, 42])
def test_bits_of_the_noise(seed, stride, start):
    """The words equal threefry2x32, and jax.random.bits at small counters."""
    key = jax.random.key(seed)
    words = np.asarray(jax.random.key_data(key))
    p = Program()
    thread = p.operand("thread", "u32")
    schedule = race_ptx.key_schedule(p, *p.operands("u32", "key0", "key1"))
    counter = p.multiply_add_wide(thread, stride, p.join(*p.operands("u32", "low", "high")))
    low, high = p.split(counter)
    keyed = high + schedule[0][0], low + schedule[0][1]
    first, second = race_ptx.words_at(p, schedule, [keyed, keyed])
    p.store(p.at(p.operand("out", "u32"), thread, 4), p.select(first.equals(second), first, 0))
    got, counter = np.zeros(THREADS, "u4"), {"low": start % 2**32, "high": start // 2**32}
    ptx.run(p, got.view("u1"), out=0, key0=words[0], key1=words[1], **counter)
    (want,) = bits_at([[*words, start // 2**32, start % 2**32]], np.arange(THREADS), stride)
    np.testing.assert_array_equal(got, want)
    if start == 0 and stride == 1:
        with jax.threefry_partitionable(True):
            np.testing.assert_array_equal(got, jax.random.bits(key, (THREADS,)))


def test_gumbel_noise():
    """The noise is accurate to two units in the last counter, at both ends and in the middle of the range."""
    ends = np.arange(24)
    others = [2**22, 2**22 + 1, 3086183, 3086184, *np.random.default_rng(0).integers(0, 2**23, 76)]
    fractions = np.concatenate([2**ends - 1, 2**23 - 2**ends, others])[:THREADS]
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


def rounded_goals():
    """Yields rows where rounding may move the cutoff, with their temperature, top_k, top_p and min_p."""
    rng = np.random.default_rng(1)
    yield (3 * rng.standard_normal(1500)).astype(F32), (0.7, 50, F32.type(1 - 2.0**-23), 0)  # 51 entries reach it
    yield (2 * np.random.default_rng(3).standard_normal(1500)).astype(BF16), (1, 50, F32.type(1 - 2.0**-24), 0)
    # a tail of masses of u units of 2^-31, and an element in the bucket of zeros of bfloat16
    v, u = 20_000, 0.49
    tail = np.full(v, 1e-6, BF16)
    tail[7] = 21.5
    yield tail, (21.5 / np.log(2.0**31 / u), v, F32.type(1 - (v - 1) * u * 2.0**-32), 0)
    # many elements of the least bfloat16 above the bucket of zeros, one in it, and zeros, at a tiny temperature
    v, n, t = 40_000, 8000, 2.0**-14 / 9.8
    low = np.where(np.arange(v) < n, 2.0**-14 * (1 + 2.0**-6), 0).astype(BF16)
    low[n] = 1e-9
    zeros = (v - n) * np.exp(-float(low[0]) / t)
    yield low, (t, v, F32.type((n + 0.8 * zeros) / (n + zeros)), 0)


@pytest.mark.parametrize(("x", "parameters"), first(1, [*rounded_goals()]), ids=lambda a: str(getattr(a, "dtype", "")))
def test_goals_that_rounding_decides(x, parameters):
    plan = plan_sample(x.size, x.dtype, HOPPER)
    of_row = [np.array([a], d) for a, d in zip(parameters, (F32, "int32", F32, F32))]
    assert_cutoffs(run_row(plan, x, None, *parameters)[1], x[None], ["row"], of_row)
