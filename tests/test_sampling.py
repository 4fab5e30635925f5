"""The program of `sample` for clusters of several warpgroups: run in numpy against the oracle, and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax.implementations import folding
from pallas_softmax.implementations.mosaic_gpu.device.hardware import SMEM_BYTES
from pallas_softmax.implementations.mosaic_gpu.sample.draw import Request
from pallas_softmax.implementations.mosaic_gpu.sampling import draw_ptx, kernel
from pallas_softmax.implementations.mosaic_gpu.sampling.plan import MAX_BLOCKS, layout_of, plan_sample
from tests.support import cases, kernels
from tests.support.cases import BF16, F16, F32
from tests.support.covering import first, first_values
from tests.support.draws import crossed, judged
from tests.support.lowering import kernel_names
from tests.support.ptx import Machine

_X = 1024  # address of the part in shared memory
_OUT = [i << 32 for i in (1, 2, 3)]  # addresses of the results in device memory
EVERY = (*cases.FINITE, *cases.SPECIAL)


def draw(layout, x, u, temperature, top_k, top_p, min_p, rng=None):
    """Runs the program on a row, whose masked elements are -inf: index, log_prob and log_mass."""
    window, parts, origins = layout.window, [], []
    for i in range(window.count):
        start, end = int(window.cut.start(i)), int(window.cut.start(i + 1))
        low = window.head - -start % window.vec if window.head else 0
        part = np.full(window.size, -np.inf, x.dtype)
        part[low : low + end - start] = x[start:end]
        parts.append(part.view(np.uint8))
        origins.append(start - low)
    size = len(parts[0])
    scale = np.maximum(F32.type(1 / np.log(2)) / np.maximum(temperature, kernel._TINY), kernel._TINY)
    numbers = {"u": u, "temperature": temperature, "top_p": top_p, "min_p": min_p, "scale": scale}
    operands = {
        **{name: F32.type(number) for name, number in numbers.items()},
        **dict(zip(("index", "log_prob", "log_mass"), map(np.uint64, _OUT))),
        "top_k": np.int32(top_k),
        "part": np.arange(window.count, dtype=np.uint32),
        "row": np.uint32(0),
        "origin": np.array(origins, np.int32),
        "x": np.uint32(_X),
        "scratch": np.uint32(_X + size),
    }
    bytes_ = -(-(_X + size + 4 * layout.words) // 16) * 16
    memory = np.random.default_rng(0).integers(0, 256, (window.count, bytes_)).astype(np.uint8)
    memory[:, _X : _X + size] = parts
    machine = Machine(draw_ptx.text(layout, x.dtype), memory, layout.threads, operands, rng)
    machine.run()
    assert sorted(machine.stored) == _OUT
    index, *logs = (np.array([machine.stored[at]], np.uint32) for at in _OUT)
    return index.view(np.int32), *(bits.view(np.float32) for bits in logs)


def assert_drawn(names, v, dtype, count, warpgroups, masked, step, rng=None, offset=0):
    """Draws from some of the rows with all parameters: each `step`-th."""
    rows = cases.rows(list(names), v, dtype)
    where = np.random.default_rng(0).random(rows.shape) < 0.6 if masked else None
    x, where, u, parameters, labels = crossed(rows if where is None else cases.spoilt(rows, where), where)
    layout = layout_of(v, dtype, count, warpgroups)
    for i in range(offset, len(x), step):
        one = slice(i, i + 1)
        kept = x[i] if where is None else np.where(where[i], x[i], np.array(-np.inf, dtype))
        got = draw(layout, kept, u[i], *(a[i] for a in parameters), rng=rng)
        judged(
            got,
            x[one],
            u[one],
            labels[one],
            [a[one] for a in parameters],
            None if where is None else where[one],
        )


@pytest.mark.parametrize(
    ("v", "dtype", "count", "warpgroups", "masked", "step"),
    first(
        2,
        [
            (1003, F32, 2, 1, False, 311),
            (1000, BF16, 1, 2, True, 401),
            (129, F16, 1, 1, True, 23),
            (1, F32, 1, 1, False, 29),
            (2, BF16, 1, 1, False, 29),
            (127, F16, 3, 2, True, 23),
            (129, F32, 1, 4, True, 23),
            (1003, BF16, 3, 2, True, 17),
            (1000, F32, 8, 1, False, 23),
            (4099, F32, 3, 1, True, 17),
            (4104, F16, 2, 1, True, 17),
            (4099, BF16, 2, 1, False, 17),
        ],
    ),
    ids=str,
)
def test_run(v, dtype, count, warpgroups, masked, step):
    """Every kind of row, with every filter, in one CTA and in clusters."""
    assert_drawn(EVERY, v, dtype, count, warpgroups, masked, step)


@pytest.mark.parametrize(
    ("v", "dtype", "count", "warpgroups"),
    first(0, [(128256, F32, 10, 2), (151936, BF16, 6, 2), (50257, F16, 16, 1)]),
    ids=str,
)
def test_long_rows(v, dtype, count, warpgroups):
    """More keys in a zone than its list has room for; thresholds among thousands of ties."""
    assert_drawn(["normal", "ascending", "integers", "constant"], v, dtype, count, warpgroups, False, 13)


@pytest.mark.parametrize("seed", first_values(1, range(5)))
@pytest.mark.parametrize(("dtype", "warpgroups"), first(1, [(F32, 1), (BF16, 2)]), ids=str)
def test_any_order(dtype, warpgroups, seed):
    """Warps run in any order, as far as they do not wait for each other."""
    rng = np.random.default_rng(seed)
    assert_drawn(["integers", "neg_inf_first"], 1003, dtype, 2, warpgroups, False, 67, rng, seed)


@pytest.mark.parametrize(
    ("v", "dtype", "warpgroups", "masked"),
    first(0, [(1003, BF16, 2, True), (4099, F32, 2, False), (129, F16, 4, True), (2, BF16, 1, False)]),
    ids=str,
)
@pytest.mark.usefixtures("quick_compilation")
def test_interpreted(v, dtype, warpgroups, masked):
    """Where rows lie in shared memory, what is masked there, and which row has which parameters."""
    rows = cases.rows(["normal", "nan_last", "peaked"], v, dtype)
    where = np.random.default_rng(0).random(rows.shape) < 0.6 if masked else None
    some = [
        None if a is None else np.asarray(a)[::51]
        for a in crossed(rows if where is None else cases.spoilt(rows, where), where)[:3]
    ]
    *_, parameters, names = crossed(rows, where)
    x, where, u = some
    parameters, names = [a[::51] for a in parameters], names[::51]
    mask = None if where is None else folding.fold_mask(jnp.asarray(where), x.shape, 1)
    request = Request(*map(jnp.asarray, (u, *parameters)))
    layout = layout_of(v, dtype, 1, warpgroups)
    got = kernel.sample_rows(jnp.asarray(x), mask, request, layout, interpret=kernels.INTERPRET)
    judged(got, x, u, names, parameters, where)


def lowered(rows, v, dtype, masked):
    layout = plan_sample(rows, v, dtype, (9, 0))

    def sample(x, where, *numbers):
        mask = None if where is None else folding.fold_mask(where, x.shape, 1)
        return kernel.sample_rows(x, mask, Request(*numbers), layout)

    shapes = [
        jax.ShapeDtypeStruct((rows,), d)
        for d in (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    ]
    where = jax.ShapeDtypeStruct((rows, v), bool) if masked else None
    x = jax.ShapeDtypeStruct((rows, v), dtype)
    return jax.jit(sample).trace(x, where, *shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("rows", "v", "dtype", "masked"),
    first(
        1,
        [(5, 50257, BF16, True), (1, 1, F32, False), (64, 128256, F16, False), (1024, 151936, F32, True)],
    ),
    ids=str,
)
def test_lowered(rows, v, dtype, masked):
    assert kernel_names(lowered(rows, v, dtype, masked).as_text()) == ["sample"]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_plans(dtype):
    """Every part fits, and three CTAs share a multiprocessor where rows are many."""
    smem = SMEM_BYTES[9]
    for rows in (1, 64, 256, 1024):
        for v in (1, 1003, 50257, 128256, 151936, 262144):
            layout = plan_sample(rows, v, dtype, (9, 0))
            assert layout is not None
            assert layout.smem_bytes <= smem
            assert layout.window.step_blocks <= MAX_BLOCKS
    for v in (50257, 128256, 151936):
        layout = plan_sample(1024, v, dtype, (9, 0))
        assert layout is not None
        assert 3 * (layout.smem_bytes + 1024) <= smem + 1024
    assert plan_sample(4, 2**22, dtype, (9, 0)) is None
