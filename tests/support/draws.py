"""Parameters for tests of `sample`, and a test of how often each entry is drawn."""

import itertools

import numpy as np

from tests.support import bounds, cases
from tests.support.cases import F32

NONE = 2**31 - 1  # a top_k that filters nothing
LARGEST = (
    np.nextafter(F32.type(1), F32.type(0)).item() - 2.0**-24
)  # the largest number that jax.random.uniform returns

# (temperature, top_k, top_p, min_p)
PARAMETERS = {
    "none": (1.0, NONE, 1.0, 0.0),
    "greedy": (0.0, 3, 0.5, 0.1),
    "cold": (1e-3, NONE, 1.0, 0.0),
    "hot": (1e30, NONE, 0.7, 0.0),
    "top_k_1": (1.0, 1, 1.0, 0.0),
    "top_k": (1.3, 5, 1.0, 0.0),
    "top_p": (0.7, NONE, 0.9, 0.0),
    "top_p_one": (1.0, NONE, 1e-7, 0.0),
    "top_p_zero": (1.0, NONE, 0.0, 0.0),
    "top_p_most": (1.0, NONE, 1 - 2.0**-17, 0.0),
    "min_p": (1.0, NONE, 1.0, 0.1),
    "min_p_one": (1.0, NONE, 1.0, 1.0),
    "all": (2.0, 50, 0.8, 0.03),
}
U = (0.0, LARGEST, 0.37)


def masked_rows(names, v, dtype, masked):
    """Returns rows, with garbage where they are masked, and their mask or None."""
    rows = cases.rows(list(names), v, dtype)
    if not masked:
        return rows, None
    where = np.random.default_rng(0).random(rows.shape) < 0.6
    return cases.spoil_masked(rows, where), where


def all_combinations(x, where=None):
    """Returns every combination of a row, PARAMETERS and U: logits, mask, u, parameters, names."""
    n = len(x)
    combinations = list(itertools.product(range(n), PARAMETERS.items(), U))
    rows = [i for i, _, _ in combinations]
    columns = np.array([parameters for _, (_, parameters), _ in combinations]).T
    parameters = [columns[0].astype(F32), columns[1].astype(np.int32), *columns[2:].astype(F32)]
    u = np.array([u for _, _, u in combinations], F32)
    names = [(i, name, u) for i, (name, _), u in combinations]
    return x[rows], None if where is None else where[rows], u, parameters, names


def assert_draws(got, x, u, names, parameters, where=None):
    """Asserts that draws with (temperature, top_k, top_p, min_p) are right, by `bounds.assert_sample`."""
    temperature, *filters = parameters
    filters = dict(zip(("top_k", "top_p", "min_p"), filters))
    bounds.assert_sample(got, x, u, names, where, temperature, **filters)


def chi_square(counts, p):
    """Returns the error of the counts in standard deviations (Wilson and Hilferty). Rare entries count as one."""
    n = counts.sum()
    rare = n * p < 10
    assert counts[p == 0].sum() == 0
    counts, p = (np.append(a[~rare], a[rare].sum()) for a in (counts, p))
    counts, p = counts[p > 0], p[p > 0]
    freedom = len(p) - 1
    statistic = np.sum((counts - n * p) ** 2 / (n * p))
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / np.sqrt(2 / (9 * freedom))
