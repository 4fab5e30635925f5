"""Parameters of tests that are crossed: few combinations that still have every pair of values."""

import collections
import itertools

import pytest


def pairs(*parameters):
    """Returns combinations, a value of each parameter, in which every two values of two parameters come together.

    The first ones have every value of each parameter, and each next one the most pairs that are new; of those alike,
    it has the values that are in the fewest before it.
    """
    parameters = [list(values) for values in parameters]
    combinations = list(itertools.product(*map(range, map(len, parameters))))
    missing = {pair for combination in combinations for pair in _pairs_of(combination)}
    chosen = []
    used = collections.Counter()

    def gain(combination):
        uses = [used[value] for value in enumerate(combination)]
        return uses.count(0), len(_pairs_of(combination) & missing), -sum(uses)

    while missing:
        best = max(combinations, key=gain)
        missing -= _pairs_of(best)
        used.update(enumerate(best))
        chosen.append(tuple(values[i] for values, i in zip(parameters, best)))
    return chosen


def _pairs_of(combination):
    return set(itertools.combinations(enumerate(combination), 2)) or {(0, combination[0])}


def cover(*parameters):
    """Returns parameters for pytest that have every pair of values, and in the fast set every value.

    The others are marked slow: they are of the complete set only.
    """
    return first(max(map(len, parameters)), pairs(*parameters))


def first(n, combinations):
    """Returns parameters for pytest, of which the first n are of the fast set, too."""
    return [*combinations[:n], *(slow(*combination) for combination in combinations[n:])]


def first_values(n, values):
    """Returns the values of one parameter for pytest, of which the first n are of the fast set, too."""
    values = list(values)
    return [*values[:n], *map(slow, values[n:])]


def slow(*values):
    """Returns one combination of parameters that only the complete set has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def described(value):
    """Returns the name of a parameter in pytest's report: of a list of rows their number."""
    if isinstance(value, tuple):
        return "-".join(map(described, value))
    return f"{len(value)} rows" if isinstance(value, list) else str(value)
