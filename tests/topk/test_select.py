"""The selection of many winners: the PTX in numpy, the kernel in the interpreter, lowering, plans, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.gpu.hardware import RESERVED_SMEM_BYTES, SMEM_BYTES
from pallas_softmax._src.select.plan import MAX_SELECTED, MIN_VOCAB, SelectPlan, registers_plan
from pallas_softmax._src.topk.mosaic_gpu import MIN_VOCAB_OF_LENGTHS
from tests.support.calls import DTYPES
from tests.support.cases import BF16, F32
from tests.support.covering import first, pairs
from tests.support.gpu import on_a_gpu
from tests.support.lowering import array, kernel_names, lowered
from tests.support.plans import CAPABILITIES, HOPPER
from tests.topk import select
from tests.topk.select import PLANS, assert_rows, machine_launch, machine_select, offset_of, plan_selection, rows_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
NAMES = [*rows_of(64, 8, np.dtype("float32"))]


# masked rows are not held in registers
CASES = [
    (kind, *plan, is_sorted)
    for kind, plan, is_sorted in pairs(["whole", "both", "length", "mask"], PLANS[::-1], [True, False])
    if kind in ("whole", "length") or not plan[0].in_registers
]


@pytest.mark.parametrize(("kind", "plan", "dtype", "is_sorted"), first(1, CASES), ids=str)
def test_program(kind, plan, dtype, is_sorted):
    """Rows of every kind, and with fewer elements than winners. Elements that do not take part come last.

    Winners may crowd one bucket of the ranking. Rows are masked one by one, and nothing beyond a length may be read.
    """
    plan, rows = dataclasses.replace(plan, sorted=is_sorted), rows_of(plan.vocab, plan.k, jnp.dtype(dtype))
    v, k, rng = plan.vocab, plan.k, np.random.default_rng(0)
    if kind == "whole":
        x = np.stack([*rows.values()])
        *got, _ = machine_launch(x, None, None, k, plan, None)
        assert_rows(got, x, k, names=[*rows], sorted=is_sorted)
        return
    for name, length, share in (
        ("normal", 0, 0.5),
        ("special", k - 1, 0.02),
        ("normal", min(v, k + 1), 0.5),
        ("shifted", min(v, plan.capacity + 1), 0.9),
        ("ascending", v + 1, 0.5),
    ):
        mask = rng.random(v) < share if kind != "length" else None
        length = length if kind != "mask" else None
        fill, offset = np.array(-np.inf, jnp.dtype(dtype)), offset_of(plan)
        got, _ = machine_select(plan, rows[name], mask=mask, length=length, offset=offset, fill=fill)
        lengths = None if length is None else [length]
        assert_rows(got, rows[name][None], k, mask, lengths, [name], sorted=is_sorted)


@pytest.mark.parametrize("plan", [SelectPlan(4096, 700, 1, 1, 2112, 1), registers_plan(4096, 700, 1, 128)], ids=str)
def test_sorted_program_with_few_ties(plan):
    """Ties crowd one bucket, so that all entries are sorted; there are fewer of them than winners."""
    x, fill = np.full(4096, 1.5, np.float32), np.float32(-np.inf)
    got, _ = machine_select(dataclasses.replace(plan, sorted=True), x, length=300, fill=fill)
    assert_rows(got, x[None], 700, lengths=[300], sorted=True)


@pytest.mark.slow
@pytest.mark.parametrize(("plan_and_dtype", "name"), pairs(PLANS, NAMES)[:60], ids=str)
def test_program_in_any_order(plan_and_dtype, name):
    """Warps run in random order, unless they wait for each other."""
    plan, dtype = plan_and_dtype
    x = rows_of(plan.vocab, plan.k, jnp.dtype(dtype))[name]
    got, _ = machine_select(plan, x, offset=offset_of(plan), rng=np.random.default_rng(0))
    assert_rows(got, x[None], plan.k)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_address(masked, dtype):
    """The machine refuses accesses outside of the row, which starts and ends anywhere between multiples of 16 bytes."""
    dtype = jnp.dtype(dtype)
    for offset in range(16 // dtype.itemsize):
        v = 2071 - 3 * offset
        x = np.random.default_rng(v).standard_normal(v).astype(dtype)
        mask = x > -1 if masked else None
        got, _ = machine_select(SelectPlan(v, 5, 1, 1, 2048, 1), x, mask=mask, offset=offset)
        assert_rows(got, x[None], 5, mask, names=[f"{offset}"])


@pytest.mark.slow
def test_few_steps():
    """A row in random order, and one in a narrow band or with ties, is read once; no list overflows.

    A row in registers takes fewer steps if it is shorter, and if all of its elements win.
    """
    plan = SelectPlan(20000, 512, 1, 2, 2048, 4)
    rows = rows_of(plan.vocab, plan.k, np.dtype("float32"))
    names = "normal", "shifted", "band", "constant", "ascending"
    steps = {name: machine_select(plan, rows[name])[1] for name in names}
    assert max(steps.values()) < 1.5 * steps["normal"], steps
    plan = registers_plan(8192, 512, 4, 32)
    x = rows_of(plan.vocab, plan.k, np.dtype("bfloat16"))["normal"]
    whole, half, winners = (machine_select(plan, x, length=length)[1] for length in (8192, 4096, 512))
    assert half < 0.9 * whole and winners < 0.5 * whole, (whole, half, winners)


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"), first(1, [(1, 8_000_000, F32), (64, 8_000_000, F32), (8, 50_000_000, BF16)])
)
def test_a_length_far_below_the_vocabulary(rows, vocab, dtype):
    """The bound of a row that just does not fit in the list would have a rank beyond the sample."""
    plan = plan_selection(rows, vocab, 683, dtype, lengths=True)
    length = plan.capacity + 1
    x = np.random.default_rng(0).standard_normal(length).astype(dtype)
    got, _ = machine_select(plan, x, length=length, fill=np.array(-np.inf, dtype))
    assert_rows(got, x[None], plan.k, lengths=[length])


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 8])
def test_few_winners_of_a_length(k):
    """The program reads no more than the length: what follows makes no difference, and a short length is few steps."""
    plan = plan_selection(4096, 200_000, k, "float32", HOPPER)
    rows = rows_of(plan.vocab, k, np.dtype("float32"))
    fill, steps = np.array(-np.inf, np.float32), {}
    for name, length in [*(("normal", n) for n in (200_000, 4000, 0)), ("special", 3001), ("constant", 9000)]:
        x = np.where(np.arange(plan.vocab) < length, rows[name], np.inf).astype(np.float32)
        got, steps[name, length] = machine_select(plan, x, length=length, fill=fill, offset=1)
        assert_rows(got, x[None], k, lengths=[length], names=[name])
    assert steps["normal", 4000] < 0.2 * steps["normal", 200_000], steps


MASKINGS = ["mask and lengths", "whole", "one mask", "mask of rows", "lengths"]
KERNELS = [(2100, 5, "float16"), (2500, 700, "float32"), (2048, 2048, "bfloat16")]


@pytest.mark.parametrize(("masking", "shape", "in_order"), first(1, pairs(MASKINGS, KERNELS, [True, False])), ids=str)
def test_kernel(masking, shape, in_order):
    v, k, dtype = shape
    rows = rows_of(v, k, jnp.dtype(dtype))
    x = np.stack([rows[name] for name in ("normal", "special", "rounded", "constant")])
    mask = np.random.default_rng(1).random((4, v)) < 0.5
    masks = {"mask and lengths": mask, "one mask": mask[:1], "mask of rows": mask[:, :1]}
    mask = masks.get(masking)
    lengths = {"lengths": [0, k - 1, v, v + 3], "mask and lengths": [9, v, k, -1]}.get(masking)
    got = select.select_rows(x, k, plan_selection(4, v, k, dtype, HOPPER), mask, lengths, sorted=in_order)
    assert_rows(got, x, k, mask, lengths, sorted=in_order)


SHAPES = [(1, 131072, 2048, "float32"), (4096, 8192, 2048, "bfloat16"), (64, 1000003, 4096, "float16")]


@pytest.mark.parametrize(("shape", "masked"), first(1, pairs(SHAPES, [True, False])), ids=str)
def test_lowering(shape, masked):
    rows, v, k, dtype = shape
    plan = plan_selection(rows, v, k, dtype, HOPPER)

    def f(x, where, lengths):
        return select.select_rows(x, k, plan, where, lengths, sorted=True, interpret=None)

    where = array(1, v, dtype="bool") if masked else None
    text = lowered(f, array(rows, v, dtype=dtype), where, array(rows, dtype="int32") if masked else None)
    assert kernel_names(text) == ["top_k_select"]
    assert "stablehlo.sort" not in text


# (k, dtype), whether there are a mask and lengths, and the plans of (rows, V): CTAs of a row, warpgroups, whether
# registers hold the row
CHOSEN = [
    (2048, "float32", (), {(1, 8192): (1, 4, True), (1, 131072): (16, 4, False), (8, 131072): (8, 4, False)}),
    (2048, "float32", (), {(64, 32768): (1, 4, False), (64, 65536): (2, 4, False)}),
    (2048, "float32", (), {(100, 131072): (1, 4, False), (256, 131072): (1, 2, False)}),
    (2048, "bfloat16", (), {(64, 1_048_576): (2, 4, False), (256, 131072): (1, 2, False)}),
    (2048, "bfloat16", (), {(4096, 8192): (1, 1, True), (4096, 16384): (1, 2, False)}),
    (2048, "bfloat16", (False, True), {(1024, 16384): (1, 2, False)}),
    (512, "float32", (), {(4096, 8192): (1, 2, True), (4096, 8193): (1, 2, False), (4096, 16384): (1, 2, False)}),
    (512, "bfloat16", (), {(4096, 8192): (1, 1, False)}),
    (512, "bfloat16", (False, True), {(4096, 8192): (1, 1, True)}),
    (512, "bfloat16", (True, True), {(4096, 8192): (1, 1, False)}),
    (64, "bfloat16", (), {(64, 16384): (1, 4, True)}),
]


@pytest.mark.parametrize(("k", "dtype", "masking", "plans"), CHOSEN, ids=str)
def test_plan(k, dtype, masking, plans):
    for shape, chosen in plans.items():
        plan = plan_selection(*shape, k, dtype, HOPPER, *masking)
        assert plan is not None and (shape, plan.ctas, plan.warpgroups, plan.in_registers) == (shape, *chosen)


# rows, V, k, whether sorted and with lengths, and the kernel
CHOICES = [
    (64, 8192, 1, True, True, "top_k_select"), (64, 131072, 128, False, False, "top_k"),
    (64, 32768, 2048, False, False, "top_k_select"), (64, 32768, 2048, True, False, "top_k_select"),
    (64, 131072, 2048, True, False, "top_k_select"), (64, 8192, 4096, True, False, "top_k_select"),
    (64, 32768, 2048, True, True, "top_k_select"), (1, 131072, 2048, True, True, "top_k_select"),
    (64, MIN_VOCAB_OF_LENGTHS, 5, False, True, "top_k_select"),
    (64, MIN_VOCAB_OF_LENGTHS - 1, 5, False, True, "top_k"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "v", "k", "in_order", "has_lengths", "kernel"), first(2, CHOICES))
def test_choice(rows, v, k, in_order, has_lengths, kernel):
    """Many winners are selected, and with lengths any number in rows that are not short. XLA is no better choice."""

    def f(x, lengths):
        return ps.top_k(x, k, lengths=lengths, sorted=in_order, implementation="mosaic_gpu")

    x, lengths = array(rows, v), array(rows, dtype="int32") if has_lengths else None
    assert kernel_names(lowered(f, x, lengths))[0] == kernel
    if has_lengths:
        (choice,) = ps.explain(lambda x, n: ps.top_k(x, k, lengths=n, sorted=in_order), x, lengths)
        assert choice.cuda == "mosaic_gpu"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_plans(capability):
    """Every list has room for the winners and one warp, and for what the sample's bound lets through."""
    for rows in (1, 7, 8, 64, 256, 4096):
        for v in (MIN_VOCAB, 5001, 8192, 131072, 1_048_576, 10_000_000):
            for k in (1, 8, 129, 2048, MAX_SELECTED):
                for dtype in DTYPES:
                    plan = plan_selection(rows, v, k, dtype, capability)
                    if plan is None:
                        assert k > v or 24 * k > SMEM_BYTES[capability[0]] - RESERVED_SMEM_BYTES - 2048
                        continue
                    itemsize = jnp.dtype(dtype).itemsize
                    assert plan.room >= (k if plan.in_registers else min(v, k + plan.warp_elements(itemsize)))
                    assert plan.capacity % 2 == 0
                    if plan.in_registers:
                        assert v * itemsize <= plan.threads * plan.thread_bytes - (v * itemsize % 16 > 0) * 16
                        continue
                    a, b = plan.rank_coefficients(itemsize)
                    if v > plan.capacity:
                        assert a / v + b <= plan.sampled(itemsize)
                    assert 1 <= plan.ctas <= 16 and rows * plan.ctas <= max(rows, 132)


@on_a_gpu
@pytest.mark.parametrize("kind", ["whole", "length", "mask", "both"])
@pytest.mark.parametrize(("plan", "dtype"), PLANS, ids=str)
def test_every_plan_on_a_gpu(plan, dtype, kind):
    """A thousand rows, so that CTAs start while others run; the same bits in each run."""
    if plan.in_registers and kind in ("mask", "both"):
        pytest.skip("masked rows are not held in registers")
    v, k, rng = plan.vocab, plan.k, np.random.default_rng(0)
    x = np.stack([*rows_of(v, k, jnp.dtype(dtype)).values()])
    lengths = rng.integers(-1, v + 3, len(x)) if kind in ("length", "both") else None
    shares = rng.choice([0.02, 0.5, 0.9], (len(x), 1))
    where = rng.random(x.shape) < shares if kind in ("mask", "both") else None
    repeated = functools.partial(np.resize, new_shape=(1020, v))
    select_rows = jax.jit(functools.partial(select.select_rows, k=k, plan=plan, interpret=None))
    of_rows = {
        "where": None if where is None else repeated(where),
        "lengths": None if lengths is None else np.resize(lengths, 1020),
    }
    runs = [jax.tree.map(np.asarray, select_rows(repeated(x), **of_rows)) for _ in range(2)]
    assert_rows(runs[0], x, k, where, lengths)
    for a, b in zip(*runs):
        np.testing.assert_array_equal(a.view("u1"), b.view("u1"))
    # Rows with other addresses have other samples, so the same winners may come in another order.
    order = np.argsort(runs[0].indices, -1)
    for a in runs[0]:
        a = np.take_along_axis(a, order, -1)
        first = a[: len(x)].view("u1")
        np.testing.assert_array_equal(a.view("u1"), np.resize(first, (1020, *first.shape[1:])))
