"""Few combinations of test parameters that cover every pair of values, and which of them are in the fast set."""

import collections
import itertools

import pytest


def pairs(*parameters):
    """Returns combinations, one value per parameter, that cover every pair of values of two parameters.

    The first combinations cover every value of each parameter. The others each add as many new pairs as possible. Among
    equally good combinations, the one with the least used values comes first.
    """
    parameters = [list(values) for values in parameters]
    combinations = list(itertools.product(*map(range, map(len, parameters))))
    bit_of_pair = {}  # `masks` and `missing` have a bit for each pair
    masks = [
        sum(1 << bit_of_pair.setdefault(pair, len(bit_of_pair)) for pair in _pairs_of(combination))
        for combination in combinations
    ]
    missing = (1 << len(bit_of_pair)) - 1
    chosen = []
    used = collections.Counter()

    def gain(i):
        uses = [used[value] for value in enumerate(combinations[i])]
        return uses.count(0), (masks[i] & missing).bit_count(), -sum(uses)

    while missing:
        best = max(range(len(combinations)), key=gain)
        missing &= ~masks[best]
        used.update(enumerate(combinations[best]))
        chosen.append(tuple(values[i] for values, i in zip(parameters, combinations[best])))
    return chosen


def _pairs_of(combination):
    return list(itertools.combinations(enumerate(combination), 2)) or [(0, combination[0])]


def cover(*parameters):
    """Returns parameters for pytest that cover every pair of values; the fast set covers every value."""
    return first(max(map(len, parameters)), pairs(*parameters))


def values(*parameters):
    """Returns combinations, one value per parameter, that cover every value: the first ones of `pairs`."""
    return pairs(*parameters)[: max(map(len, parameters))]


def in_turn(names, values, n=2):
    """Returns every name with n of the values. Neighbouring names have the values that come next."""
    values = list(values)
    return [(name, values[(n * i + j) % len(values)]) for i, name in enumerate(names) for j in range(n)]


def first(n, combinations):
    """Returns parameters for pytest; only the first n are in the fast set."""
    return [*combinations[:n], *(slow(*combination) for combination in combinations[n:])]


def first_values(n, values):
    """Returns the values of one parameter for pytest; only the first n are in the fast set."""
    values = list(values)
    return [*values[:n], *map(slow, values[n:])]


def slow(*values):
    """Returns a combination of parameters that only the complete set has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def parameter_id(value):
    """Returns the name of a parameter in pytest's report. A list of rows shows as their number."""
    if isinstance(value, tuple):
        return "-".join(map(parameter_id, value))
    return f"{len(value)} rows" if isinstance(value, list) else str(value)
