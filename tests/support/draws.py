"""Parameters for tests of `sample`, and a test of how often each entry is drawn."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from tests.support import bounds, cases, oracle
from tests.support.cases import F32

NO_TOP_K = 2**31 - 1  # a top_k that filters nothing

# (temperature, top_k, top_p, min_p)
PARAMETERS = {
    "none": (1.0, NO_TOP_K, 1.0, 0.0),
    "greedy": (0.0, 3, 0.5, 0.1),
    "cold": (1e-3, NO_TOP_K, 1.0, 0.0),
    "hot": (1e30, NO_TOP_K, 0.7, 0.0),
    "top_k_1": (1.0, 1, 1.0, 0.0),
    "top_k": (1.3, 5, 1.0, 0.0),
    "top_p": (0.7, NO_TOP_K, 0.9, 0.0),
    "top_p_one": (1.0, NO_TOP_K, 1e-7, 0.0),
    "top_p_zero": (1.0, NO_TOP_K, 0.0, 0.0),
    "top_p_most": (1.0, NO_TOP_K, 1 - 2.0**-17, 0.0),
    "min_p": (1.0, NO_TOP_K, 1.0, 0.1),
    "min_p_one": (1.0, NO_TOP_K, 1.0, 1.0),
    "all": (2.0, 50, 0.8, 0.03),
}
SEEDS = (0, 1)


def masked_rows(names, v, dtype, masked):
    """Returns rows, with garbage where they are masked, and their mask or None."""
    rows = cases.rows(list(names), v, dtype)
    if not masked:
        return rows, None
    where = np.random.default_rng(0).random(rows.shape) < 0.6
    return cases.spoil_masked(rows, where), where


def all_combinations(x, where=None):
    """Returns every combination of a row, PARAMETERS and SEEDS: logits, mask, words, parameters, names.

    The words (n, 4) say where each row's noise is; see `noise_at`. The counters cross a multiple of 2^32.
    """
    n = len(x)
    combinations = list(itertools.product(range(n), PARAMETERS.items(), SEEDS))
    rows = [i for i, _, _ in combinations]
    columns = np.array([parameters for _, (_, parameters), _ in combinations]).T
    parameters = [columns[0].astype(F32), columns[1].astype(np.int32), *columns[2:].astype(F32)]
    words = np.array([(7, i, seed, 2**32 - 50) for i, (_, _, seed) in enumerate(combinations)], np.uint32)
    names = [(i, name, seed) for i, (name, _), seed in combinations]
    return x[rows], None if where is None else where[rows], words, parameters, names


def without_filters(x, step=1):
    """Returns combinations of a row and a temperature: logits, words, parameters that filter nothing, names."""
    combinations = list(itertools.product(range(len(x)), (1.0, 0.0, 0.7, 1e-3, 1e-37, 1e30, np.nan)))
    words = np.array([(7, i, 1, 2**32 - 50) for i in range(len(combinations))], np.uint32)[::step]
    rows, temperatures = zip(*combinations[::step])
    off = [(NO_TOP_K, np.int32), (1, F32), (0, F32)]
    parameters = np.array(temperatures, F32), *(np.full(len(rows), value, dtype) for value, dtype in off)
    return x[[*rows]], words, parameters, combinations[::step]


def bits_at(words, index, stride=1):
    """Returns the bits of `jax.random.bits` at these indices of rows, which are `stride` counters apart.

    The words of a row are its threefry key, and the high and the low word of its first element's counter.
    """
    words, index = np.asarray(words).astype(np.uint64), np.asarray(index, np.uint64)
    counters = (words[:, 2:3] << np.uint64(32) | words[:, 3:]) + np.uint64(stride) * index
    keys = (np.broadcast_to(words[:, i : i + 1], counters.shape) for i in (0, 1))
    arrays = (jnp.asarray(a.astype(np.uint32)) for a in (*keys, counters >> np.uint64(32), counters))
    return functools.reduce(np.bitwise_xor, map(np.asarray, threefry2x32_p.bind(*arrays)))


def noise_at(words, v, stride=1):
    """Returns the noise of rows with v elements, in float64: `jax.random.gumbel` in the mode "low"."""
    bits = bits_at(words, np.arange(v), stride)
    uniform = np.maximum((bits >> np.uint32(9)) * 2.0**-23, np.finfo(F32).tiny)
    return -np.log(-np.log(uniform))


def assert_draws(got, x, words, names, parameters, where=None, stride=1):
    """Asserts that draws with (temperature, top_k, top_p, min_p) are right."""
    bounds.assert_sample(got, x, noise_at(words, x.shape[-1], stride), names, where, *parameters)


def assert_cutoffs(got, x, names, parameters, where=None):
    """Asserts that cutoffs with (temperature, top_k, top_p, min_p) are right."""
    bounds.assert_cutoff(got, x, names, where, *parameters)


def rows_without_a_draw(v, dtype):
    """Returns six rows: four have failed, one has nothing to draw from, and the last one has a draw."""
    x = np.full((6, v), -np.inf, F32)
    x[0], x[0, v // 2] = 1, np.nan
    x[1, v // 2] = np.copysign(np.nan, F32.type(-1))  # after -inf in the order of `lax.top_k`
    x[2, : v // 2], x[2, v // 2] = 2, np.inf
    x[3], x[5] = np.nan, np.arange(v) % 7
    return x.astype(dtype)


def assert_failed_and_empty(filtered):
    """Asserts that these are filtered logits of `rows_without_a_draw`."""
    filtered = np.asarray(filtered)
    assert np.isnan(filtered[:4]).all() and (filtered[4] == -np.inf).all(), filtered
    assert (filtered[5] > -np.inf).any() and (filtered[5] < np.inf).all(), filtered


def assert_share(counts, x, temperature=1.0, **filters):
    """Asserts that the entries of one row x, (1, V), were drawn as often as the filters say."""
    mass = np.where(
        oracle.sample_kept(x, None, temperature, **filters), oracle.sample_terms(x, None, temperature)[1], 0
    )[0]
    assert abs(chi_square(counts, mass / mass.sum())) < 5


def chi_square(counts, p):
    """Returns the error of the counts in standard deviations (Wilson and Hilferty). Rare entries count as one."""
    n = counts.sum()
    rare = n * p < 10  # with fewer expected draws, the statistic is far from a chi-square distribution
    assert counts[p == 0].sum() == 0
    counts, p = (np.append(a[~rare], a[rare].sum()) for a in (counts, p))
    counts, p = counts[p > 0], p[p > 0]
    freedom = len(p) - 1
    statistic = np.sum((counts - n * p) ** 2 / (n * p))
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / np.sqrt(2 / (9 * freedom))
