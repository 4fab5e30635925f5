"""The inline PTX for moments of logits and for ranks, run in numpy (tests/support/ptx.py), against float64."""

import numpy as np
import pytest

from pallas_softmax._src.softmax import label_rank, states_ptx
from tests.support import oracle, ptx
from tests.support.covering import cover, first, pairs

F32 = np.float32
EPS = 2.0**-23
KINDS = ["normal", "peaked", "far", "huge", "-inf", "all -inf", "+inf", "nan", "ties"]


def logits(kind, count):
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
    factors = {"a": F32(scale * states_ptx.LOG2_E)} | ({} if again is None else {"first": F32(1), "again": F32(again)})
    for at in range(0, len(x), step):
        operands = {f"x{i}": row for i, row in enumerate(x[at : at + step])}
        program = states_ptx.add_program(len(operands), scaled=again is not None)
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
@pytest.mark.parametrize(("kind", "case"), first(4, pairs(KINDS, [(64, 16, 1.0), (35, 32, 0.7), (3, 1, 3.0)])))
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


# The fields of a state, whether there is a temperature, and the number of segments.
FORMS = [
    (("m", "d", "t", "place", "before"), True, 16),
    (("m", "d"), False, 8),
    (("m", "d", "t", "place"), False, 4),
    (("d",), False, 16),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("kind", "form"), first(4, pairs(KINDS, FORMS)), ids=str)
def test_merges(kind, form):
    """Each thread has 8 logits of each segment, and its number counts down, so that the last of the largest wins.

    Any number of CTAs gives the same bits.
    """
    fields, scaled, segments = form
    rng = np.random.default_rng(segments)
    x = logits(kind, 8 * segments).reshape(segments, 8, 128)
    place = np.arange(128 * segments, dtype=F32)[::-1].reshape(segments, 128)
    before = rng.integers(0, 9, (segments, 128)).astype(F32)
    factors = {"a": F32(states_ptx.LOG2_E)} | ({"first": F32(1), "again": F32(1)} if scaled else {})
    found = []
    for ctas in (1, 2, segments):
        each = segments // ctas
        memory = rng.integers(0, 256, (ctas, 4 * states_ptx.words(fields, each))).astype("u1")
        for segment in range(segments):
            state = dict(zip(("m", "d", "t"), added(x[segment], 1.0, 8)))
            state |= {"place": place[segment], "before": before[segment]}
            operands = {name: state[name] for name in fields} | factors
            own = memory[segment // each]
            program = states_ptx.record_program(fields, scaled=scaled)
            ptx.run(program, own, **operands, records=0, segment=segment % each)
        program = states_ptx.merge_program(fields, segments, ctas, scaled=scaled)
        machine = ptx.Machine(program, memory, 128, factors | {"records": 0}, np.random.default_rng(0))
        machine.run()
        found.append(np.stack(results(machine, *fields)))
    assert all((other.view("u4") == found[0][:, :1].view("u4")).all() for other in found)
    got = dict(zip(fields, found[0][:, 0]))
    m, d, t = moments(x.reshape(-1, 1), 1.0)
    if fields == ("d",):
        each_d = np.stack([added(part, 1.0, 8)[1] for part in x]).astype("float64")
        np.testing.assert_allclose(got["d"], each_d.sum(), rtol=8 * EPS)
        return
    assert_moments((got["m"], got["d"], got.get("t", F32(t[0]))), (m, d, t))
    if "place" in fields:
        is_largest = ((x == m) | np.isnan(x)).any(1)
        assert got["place"] == place[is_largest].min()
    if "before" in fields:
        assert got["before"] == before.sum()
