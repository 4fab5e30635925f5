"""The kernel of sample without filters: its inline PTX in numpy, the interpreter, the plan, and the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.hardware import MAX_CLUSTER, SMEM_BYTES
from pallas_softmax._src.sample import mosaic_gpu, stream_kernel
from pallas_softmax._src.sample.plan import StreamPlan, plan_stream
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import DRAWN, row_operands
from pallas_softmax._src.sample.stream_kernel import draw_rows
from tests.support import cases, ptx
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.covering import first, first_values
from tests.support.draws import assert_draws, without_filters
from tests.support.lowering import array, kernel_names, lowered
from tests.support.plans import HOPPER
from tests.support.twins import interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")

_SCRATCH = 1024  # address of the scratch words in shared memory


def plan_of(v, dtype, ctas):
    return StreamPlan(v, np.dtype(dtype).itemsize, ctas)


def run_row(plan, x, row, words, temperature, stride=1, rng=None):
    """Runs the program for one row of x, (rows, V), and returns the results as arrays of one."""
    results = {name: ptx.Device(np.full(len(x), -7, dtype)) for name, dtype in DRAWN.items()}
    operands = {
        **{name: np.asarray(a) for name, a in row_operands(row, 0, temperature).items()},
        **{"x": ptx.Device(x), "part": np.arange(plan.ctas), "scratch": _SCRATCH},
        **dict(zip(NOISE_OPERANDS, words)),
        **results,
    }
    rubbish = np.random.default_rng(0).integers(0, 256, (plan.ctas, _SCRATCH + 4 * plan.words))
    text = stream_kernel.row_program(plan, x.dtype, stride)
    ptx.Machine(text, rubbish.astype("u1"), plan.threads, operands, rng).run()
    return [result.array[row : row + 1] for result in results.values()]


def assert_all_right(names, v, dtype, ctas, step, stride=1, rng=None):
    """Asserts that results are right, for every `step`-th combination of a row and a temperature."""
    x, words, parameters, labels = without_filters(cases.rows(list(names), v, dtype), step)
    for i in range(len(x)):
        one = slice(i, i + 1)
        got = run_row(plan_of(v, dtype, ctas), x, i, words[i], parameters[0][i], stride, rng)
        assert_draws(got, x[one], words[one], labels[one], [a[one] for a in parameters], stride=stride)


CASES = [
    (1003, F32, 1, 1, 61), (4104, BF16, 2, 1, 97), (1003, F32, 1, 1, 31), (4099, BF16, 2, 1, 47),
    (1, F16, 1, 3, 31), (2, BF16, 1, 1, 7), (127, F32, 1, 1, 7), (128, F16, 1, 5, 7), (129, BF16, 1, 1, 7),
    (9000, F32, 4, 1, 7), (4099, F16, 1, 10**6, 11), (9001, F32, 1, 10**6, 11), (20_000, BF16, 1, 1, 23),
]  # fmt: skip


@pytest.mark.parametrize(("v", "dtype", "ctas", "stride", "step"), first(2, CASES), ids=str)
def test_ptx(v, dtype, ctas, stride, step):
    """Every kind of row, and every temperature. With a long stride, a row crosses several multiples of 2^32."""
    assert_all_right(ALL, v, dtype, ctas, step, stride)


@pytest.mark.parametrize(("v", "dtype"), [(1003, F32), (1003, BF16), (127, F32)], ids=str)
def test_a_row_has_the_same_bits_at_any_place(v, dtype):
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((1, v)).astype(dtype).repeat(4, 0)
        draws = [run_row(plan_of(v, dtype, 1), x, row, (1, 2, 0, 3), F32.type(5)) for row in range(4)]
        for draw in draws[1:]:
            np.testing.assert_array_equal(draw, draws[0])


@pytest.mark.parametrize(("dtype", "ctas"), [(F32, 1), (BF16, 2)], ids=str)
def test_the_first_entry_of_zeros(dtype, ctas):
    """At a temperature of 0, +0 is above -0, as in `lax.top_k`; in one lane, and in different ones."""
    v = 701 if ctas == 1 else 5001
    for at in (1, 5, 700):
        x = np.full((1, v), -0.0, dtype)
        x[0, at] = 0
        x[0, -1] = 0
        index, _, _ = run_row(plan_of(v, dtype, ctas), x, 0, (1, 2, 0, 3), F32.type(0))
        assert index[0] == at


@pytest.mark.parametrize(("v", "dtype"), first(1, [(20_000, F32), (9000, BF16), (60_000, F32)]), ids=str)
def test_any_number_of_ctas_gives_the_same_bits(v, dtype):
    x = (10 * np.random.default_rng(v).standard_normal((6, v))).astype(dtype)
    for row in range(len(x)):
        one, *others = (
            run_row(plan_of(v, dtype, ctas), x, row, (1, 2, 0, 3), F32.type(0.7))
            for ctas in (1, 2, 4, 8, 16)
            if ctas <= plan_of(v, dtype, 1).shares
        )
        for other in others:
            np.testing.assert_array_equal([a.view("u4") for a in one], [a.view("u4") for a in other])


@pytest.mark.parametrize("seed", first_values(1, range(5)))
def test_ptx_in_any_order(seed):
    """Warps run in random order, unless they wait for each other."""
    assert_all_right(["integers", "neg_inf_first"], 5003, F32, 2, 9, rng=np.random.default_rng(seed))


@pytest.mark.parametrize(("v", "dtype", "ctas"), first(1, [(1003, BF16, 1), (300, F32, 2)]), ids=str)
def test_interpreted(v, dtype, ctas):
    """The kernel uses the temperature and the words of the right row."""
    x, words, parameters, labels = without_filters(cases.rows(ALL, v, dtype), step=19)
    of_rows = [jnp.asarray(a) for a in (x, parameters[0], words)]
    with interpreted():
        got = draw_rows(*of_rows, plan_of(v, dtype, ctas), 1)
    assert_draws(got, x, words, labels, parameters)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_plans(dtype, capability):
    """Clusters have a possible size, and shared memory has room for the lists."""
    for v in (1, 1003, 50257, 151936, 2**20):
        for rows in (1, 5, 64, 100, 257, 1024, 70_000):
            plan = plan_stream(rows, v, dtype, capability)
            assert 1 <= plan.ctas <= min(plan.shares, MAX_CLUSTER[capability[0]])
            assert 4 * plan.words <= SMEM_BYTES[capability[0]]


# (rows, V): CTAs of a row, warpgroups
PLANS = {(1024, 151936): (1, 2), (512, 128256): (2, 2), (256, 128256): (1, 2), (180, 151936): (2, 2)}
PLANS |= {(64, 128256): (4, 2), (8, 128256): (16, 2), (64, 8192): (2, 2), (20_000, 4096): (1, 1)}


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_chosen_plans(shape):
    """Few rows have clusters, many have one CTA each. Three CTAs share a multiprocessor, or two in larger clusters."""
    plan = plan_stream(*shape, F32, HOPPER)
    assert (plan.ctas, plan.warpgroups) == PLANS[shape]
    assert (3 if plan.ctas <= 2 else 2) * (4 * plan.words + 3 * 1024) <= SMEM_BYTES[9]


CALLS = [
    (64, 1000, {}, "draw_rows"), (64, 1000, {"where": np.arange(1000) % 3 > 0}, "sample_rows"),
    (64, 1000, {"top_k": 5}, "sample_rows"), (64, 1000, {"min_p": np.zeros(64, F32)}, "sample_rows"),
    (1, 128256, {}, "draw_rows"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "v", "given", "kernel"),
    first(2, CALLS),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_chosen(monkeypatch, rows, v, given, kernel):
    """Calls without filters and without a mask have this kernel."""
    ran = []
    for module, name in ((stream_kernel, "draw_rows"), (mosaic_gpu, "sample_rows")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, real=real: ran.append(name) or real(*a))

    def draw(x):
        return ps.sample(jax.random.key(0), x, implementation="mosaic_gpu", **given)

    assert kernel_names(lowered(draw, array(rows, v))) == ["sample"]
    assert set(ran) == {kernel}
