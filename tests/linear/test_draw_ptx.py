"""The PTX of a draw in the kernel of a product, run in numpy: it finds the best sum of each row of a tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src import sort_keys
from pallas_softmax._src.linear import draw_ptx
from pallas_softmax._src.linear.plan import TILE_N, WARPGROUP_ROWS
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.race_ptx import NOISE_OPERANDS
from pallas_softmax._src.sample.row_ptx import HIGHEST
from tests.support.covering import first_values, slow
from tests.support.ptx import WARPGROUP, Device, run

SHAPE = WARPGROUP_ROWS, TILE_N
FIRST_ROW, FIRST_COLUMN, VOCAB = 64, 512, 128256
THREADS = np.arange(WARPGROUP)
ROWS_OF_THREAD = [16 * (THREADS // 32) + THREADS % 32 // 4 + 8 * i for i in range(2)]


def operands(words, t):
    numbers = {"thread": THREADS, "column": FIRST_COLUMN, "row": FIRST_ROW, "bounds": 0}
    for name, of_rows in zip((*NOISE_OPERANDS, "temperature"), (*words.T, t)):
        numbers |= {f"{name}_{i}": of_rows[rows] for i, rows in enumerate(ROWS_OF_THREAD)}
    return numbers


def bounds_of(numbers, columns_at_once):
    memory = np.zeros(4 * np.prod(draw_ptx.BOUNDS), "u1")
    for number in range(0, 64, columns_at_once):
        run(draw_ptx._bounds_program(columns_at_once), memory, number=number, **numbers)
    return memory


def draw(z, memory, numbers, best_of_rows):
    """Returns the key, index and x of each row of z, and what other tiles know then."""
    of_groups = z.reshape(len(z), -1, 4, 2)  # a thread has two columns of every eight
    each = [of_groups[rows, g, THREADS % 4, i] for g in range(TILE_N // 8) for rows in ROWS_OF_THREAD for i in range(2)]
    device = Device(best_of_rows)
    logits = {f"z{i}": x for i, x in enumerate(each)}
    machine = run(draw_ptx._best_program(), memory, best_of_rows=device, **numbers, **logits)
    found = []
    for name, dtype in zip(draw_ptx.WINNER, ("i4", "i4", "f4")):
        of_row = np.zeros(WARPGROUP_ROWS, dtype)
        for i, rows in enumerate(ROWS_OF_THREAD):
            registers = machine.registers[f"%{name}{i}"].astype("u4")
            assert (registers.reshape(-1, 4) == registers.reshape(-1, 4)[:, :1]).all()
            of_row[rows] = registers.view(dtype)
        found.append(of_row)
    return *found, device.array


def rows_of(kind):
    """Returns logits and temperatures; rows at a temperature of 0 draw the largest logit."""
    rng = np.random.default_rng(0)
    z, t = 2 * rng.standard_normal(SHAPE), np.exp(rng.standard_normal(len(ROWS_OF_THREAD[0]) // 2))
    mixed = np.where(np.arange(len(t)) % 3, t, 0)
    return {
        "mixed": lambda: (z, mixed),
        "masked": lambda: (np.where((rng.random(SHAPE) < 0.98) | (np.arange(len(t)) % 5 == 0)[:, None], -np.inf, z), t),
        "constant": lambda: (np.full(SHAPE, 3.0), mixed),
        "rounded": lambda: (np.round(z), mixed),
        "peaked": lambda: (z / 9 + 40 * (np.arange(TILE_N) % 97 == 5), t),
        "zeros": lambda: (np.where(z > 0, 0.0, -0.0), 0 * t),
        "equal": lambda: (np.where(np.arange(len(t))[:, None] % 2, np.round(z / 4), 0), 0 * t),
        "subnormal": lambda: (rng.integers(-40, 40, SHAPE) * 1.4e-45, mixed),
        "large": lambda: (z * 1e36, t),
        "cold": lambda: (z, np.full_like(t, 1e-37)),
        "hot": lambda: (z * 1e35, np.full_like(t, 9e36)),
        "not finite": lambda: (np.where(z > 4, np.inf, np.where(z < -4, np.nan, z)), t),
    }[kind]()


KINDS = ["mixed", "zeros", "masked", "constant", "rounded", "peaked", "subnormal", "large", "cold", "hot", "equal"]


@pytest.mark.parametrize("kind", first_values(1, KINDS))
@pytest.mark.parametrize("key_for_each_row", [False, slow(True)])
def test_best_sums(kind, key_for_each_row):
    z, t = (a.astype("f4") for a in rows_of(kind))
    key = jax.random.key(3)
    if key_for_each_row:
        key = jax.random.split(key, len(z))
    words = np.concatenate(noise.words(key, (len(z), VOCAB), 1), -1)
    nothing_known = np.zeros(FIRST_ROW + len(z), "u4")
    numbers = operands(words, t)
    memory = bounds_of(numbers, 1 if key_for_each_row else 16)
    _, index, x, _ = draw(z, memory, numbers, nothing_known)

    columns = np.broadcast_to(np.arange(TILE_N) + FIRST_COLUMN, SHAPE)
    gumbel = np.asarray(noise.gumbel_at(jnp.asarray(words), jnp.asarray(columns), 1))
    with np.errstate(all="ignore"):
        sums = np.where(t[:, None] == 0, z, (z / t[:, None]).astype("f4") + gumbel + np.float32(0)).astype("f4")
    keys = np.asarray(sort_keys.key(jnp.asarray(np.where(np.isfinite(z), sums, -np.inf))))
    best = keys.argmax(1)
    drawn = np.isfinite(z).any(1)
    np.testing.assert_array_equal(index[~drawn], HIGHEST)
    at = index[drawn] - FIRST_COLUMN
    some = np.flatnonzero(drawn)
    np.testing.assert_array_equal(x[some], z[some, at])
    ulp = np.spacing(np.abs(sums[some, best[some]]))  # of a logarithm that XLA computes on a CPU
    assert (np.abs(sums[some, at] - sums[some, best[some]]) <= 4 * ulp * (t[some] > 0)).all()
    assert (at == best[some]).mean() > 0.95 and (at == best[some])[t[some] == 0].all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "masked", "rounded"])
def test_known_sums(kind):
    """A tile that is as good draws again. A tile that another one has beaten finds nothing, except at temperature 0."""
    z, t = (a.astype("f4") for a in rows_of(kind))
    numbers = operands(np.concatenate(noise.words(jax.random.key(3), (len(z), VOCAB), 1), -1), t)
    memory = bounds_of(numbers, 16)
    _, index, _, known = draw(z, memory, numbers, np.zeros(FIRST_ROW + len(z), "u4"))
    np.testing.assert_array_equal(draw(z, memory, numbers, known)[1], index)
    beaten = np.where(known > 0, np.uint32(0xFF7FFFFF), 0).astype("u4")  # the order of the largest float32
    assert (draw(z, memory, numbers, beaten)[1] == HIGHEST)[t > 0].all()


@pytest.mark.slow
def test_rows_that_are_not_finite_end():
    z, t = (a.astype("f4") for a in rows_of("not finite"))
    numbers = operands(np.zeros((len(z), 4), "u4"), np.where(np.arange(len(t)) % 2, t, np.nan).astype("f4"))
    draw(z, bounds_of(numbers, 16), numbers, np.zeros(FIRST_ROW + len(z), "u4"))
