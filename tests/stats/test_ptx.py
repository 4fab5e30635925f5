"""The inline PTX for moments of logits and for ranks, run in numpy (tests/support/ptx.py), against float64."""

import numpy as np
import pytest

from pallas_softmax._src.softmax import label_rank, moments_ptx
from tests.support import oracle, ptx
from tests.support.covering import cover, slow

F32 = np.float32
EPS = 2.0**-23
KINDS = ["normal", "peaked", "far", "huge", "-inf", "all -inf", "+inf", "nan", "ties"]


def logits(kind, count):
    """Returns the logits of 128 threads, (count, 128)."""
    rng = np.random.default_rng(count)
    x = 3 * rng.standard_normal((count, 128))
    x *= {"peaked": 40}.get(kind, 1)
    x += {"far": -1e5}.get(kind, 0)
    match kind:
        case "huge":
            x[:] = rng.choice([3e38, -3e38, 3.4e38], x.shape)
        case "-inf":
            x[::3], x[:, 7] = -np.inf, -np.inf
        case "all -inf":
            x[:] = -np.inf
        case "+inf" | "nan":
            x[3, [5, 77]] = float(kind)
        case "ties":
            x = np.round(x)
    return x.astype(F32)


def moments(x, scale):
    """Returns m, d and t of the columns of x in float64."""
    x, m = x.astype("float64"), x.max(0).astype("float64")
    u = scale * (x - np.where(m == -np.inf, 0, m))
    e = np.exp(u)
    with np.errstate(invalid="ignore"):
        return m, e.sum(0), np.where(u == -np.inf, 0, u * e).sum(0)


def results(machine, *names):
    return [machine.registers[f"%new_{name}"].astype("uint32").view(F32) for name in names]


def added(x, scale, step, again=None):
    """Returns the moments of each thread after all steps of `step` logits. `again` is a `Scale`'s last factor."""
    state = np.full(128, -np.inf, F32), np.zeros(128, F32), np.zeros(128, F32)
    factors = {"a": F32(scale * moments_ptx.LOG2_E)} | (
        {} if again is None else {"first": F32(1), "again": F32(again)}
    )
    form = moments_ptx.Form(scaled=again is not None)
    for first in range(0, len(x), step):
        operands = {f"x{i}": row for i, row in enumerate(x[first : first + step])}
        program = moments_ptx.add_program(len(operands), form)
        machine = ptx.run(program, np.zeros(0, "uint8"), **dict(zip("mdt", state)), **factors, **operands)
        state = results(machine, *"mdt")
    return state


def assert_moments(got, want):
    """Asserts that m is exact, that d is right to 8 eps, and the entropy to 8 eps (1 + log 128)."""
    m, d, t = (np.asarray(part, "float64") for part in got)
    np.testing.assert_array_equal(m, want[0])
    np.testing.assert_allclose(d, want[1], rtol=8 * EPS)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy, exact = (np.log(d) - t / d for d, t in ((d, t), want[1:]))
    np.testing.assert_allclose(entropy, exact, rtol=0, atol=8 * EPS * (1 + np.log(128)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kind", "case"), cover(KINDS, [(64, 16, 1.0), (35, 32, 0.7), (3, 1, 3.0)]))
def test_add_logits(kind, case):
    count, step, scale = case
    x = logits(kind, count) if count > 3 else logits(kind, 8)[1:4]
    assert_moments(added(x, scale, step), moments(x, scale))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*KINDS, "subnormal"])
def test_temperature_0(kind):
    """d counts the logits that are equal to the largest, and t is 0; with the factors of a `Scale`."""
    x = logits("ties" if kind == "subnormal" else kind, 35)
    x = x * F32(2.0**-149) if kind == "subnormal" else x
    m, d, t = (np.asarray(a, "float64") for a in added(x, 2.0**100, 8, 2.0**100))
    np.testing.assert_array_equal(m, x.max(0))
    ordinary = np.isfinite(x.max(0))
    np.testing.assert_array_equal(d[ordinary], (x == x.max(0)).sum(0)[ordinary])
    assert not t[ordinary].any() and np.isnan(d[np.isnan(m) | (m == np.inf)]).all()


@pytest.mark.parametrize(("size", "special"), cover([(1, 2), (2, 4), (4, 3), (8, 2)], [True, False]))
def test_count_before(size, special):
    """Labels at every place of a vector, and before and after the step; equal logits, zeros, and NaNs."""
    vec, blocks = size
    rng = np.random.default_rng(vec)
    for _ in range(20):
        x = np.round(1.5 * rng.standard_normal((blocks, 128, vec))).astype(F32)
        x[rng.random(x.shape) < 0.1] = -0.0
        for value in (np.nan, -np.nan, np.inf, -np.inf) if special else ():
            x[rng.random(x.shape) < 0.05] = value
        keys = oracle.order_key(x.reshape(-1))
        column = int(rng.integers(-5, keys.size + 5))
        key = keys[np.clip(column, 0, keys.size - 1)]
        vector = np.arange(keys.size) // vec * vec
        before = (keys > key) | ((keys == key) & (vector < column))  # all of the label's vector, or none
        operands = {f"x{b * vec + e}": x[b, :, e] for b in range(blocks) for e in range(vec)}
        program = label_rank.count_program(blocks * vec, vec)
        count = np.full(128, 7, F32)
        machine = ptx.run(program, np.zeros(0, "uint8"), count=count, column=column, key=int(key), **operands)
        (got,) = results(machine, "count")
        np.testing.assert_array_equal(got, 7 + before.reshape(blocks, 128, vec).sum((0, 2)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ctas", [2, slow(1), slow(16)])
def test_merges(kind, ctas):
    """Each thread has 8 logits, and its number counts down, so that the last of the largest wins.

    With more than one CTA, counts are added as well; with 16, there is a temperature, which is 1.
    """
    x = logits(kind, 8 * ctas).reshape(ctas, 8, 128)
    form = moments_ptx.Form(scaled=ctas == 16, counted=ctas > 1)
    at = np.arange(128 * ctas, dtype=F32)[::-1].reshape(ctas, 128)
    before = np.random.default_rng(ctas).integers(0, 9, (ctas, 128)).astype(F32)
    sent = np.zeros((ctas, len(form.fields), 128), F32)
    factors, scratch_bytes = {"a": F32(moments_ptx.LOG2_E)}, 4 * (moments_ptx.SCRATCH_WORDS + 4)
    factors |= {"first": F32(1), "again": F32(1)} if form.scaled else {}
    for cta in range(ctas):
        state = dict(zip(form.fields, (*added(x[cta], 1.0, 8), at[cta], before[cta])))
        program, scratch = moments_ptx.combine_threads_program(form), np.zeros(scratch_bytes, "uint8")
        sent[cta] = results(ptx.run(program, scratch, **state, **factors, scratch=0), *form.fields)
    words = sent.reshape(ctas, -1).view("uint8")
    memory = np.concatenate([words, np.zeros((ctas, scratch_bytes), "uint8")], 1)
    operands = {name: 512 * i for i, name in enumerate([*form.fields, "scratch"])} | factors
    program = moments_ptx.combine_ctas_program(ctas, form)
    machine = ptx.Machine(program, memory, 128, operands, np.random.default_rng(0))
    machine.run()
    *got, place = results(machine, "m", "d", "t", "place")
    whole = x.transpose(1, 0, 2).reshape(8, -1)
    m, d, t = moments(whole.reshape(-1, 1), 1.0)
    assert_moments(got, [np.broadcast_to(part, got[0].shape) for part in (m, d, t)])
    is_largest = (whole == m) | np.isnan(whole)
    assert (place == at.reshape(-1)[is_largest.any(0)].min()).all()
    if form.counted:
        (count,) = results(machine, "before")
        np.testing.assert_array_equal(count, np.full_like(count, before.sum()))
