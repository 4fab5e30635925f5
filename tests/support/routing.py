"""Routers: the definition in float64 NumPy, its derivative, and the judge of a result.

The definition follows the published code of DeepSeek-V3 (its `MoEGate`), with all arithmetic in float64.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

import pallas_softmax as ps
from tests.support import cases, oracle

# Two experts, or two groups, may be exchanged if their exact numbers differ by less than this times max(1, |bias|).
NEAR = 2.0**-20
UNITS = 32.0  # the error of weights and gradients, in roundings of float32


class Gate(NamedTuple):
    """The arguments of `route` that say how logits become weights, and which groups take part."""

    score: str = "softmax"
    biased: bool = False
    groups: int = 1
    top_groups: int | None = None
    renormalize: bool = False
    scale: float = 1.0
    group_best: int | None = None

    def keywords(self, bias) -> dict[str, Any]:
        options = self._asdict() | {"bias": bias if self.biased else None}
        del options["biased"]
        return options

    @property
    def steered(self):
        """Whether experts are chosen by score + bias in floats, and not by the order of the logits."""
        return self.biased or self.groups > 1


GATES = {
    "softmax": Gate(),
    "softmax, renormalized": Gate(renormalize=True),
    "sigmoid": Gate("sigmoid", scale=1.5),
    "sigmoid, renormalized": Gate("sigmoid", renormalize=True),
    "softmax, bias": Gate("softmax", True),
    "sigmoid, bias": Gate("sigmoid", True, renormalize=True, scale=2.5),
    "softmax, groups": Gate("softmax", False, 8, 3, scale=16.0),
    "sigmoid, bias, groups": Gate("sigmoid", True, 8, 4, True, 2.5),
    "sqrtsoftplus": Gate("sqrtsoftplus", scale=1.5),
    "sqrtsoftplus, renormalized": Gate("sqrtsoftplus", renormalize=True),
    "sqrtsoftplus, bias, groups": Gate("sqrtsoftplus", True, 8, 3, True, 2.5, group_best=1),
}


def rows(experts, dtype, mild):
    """Returns logits and a bias: mild rows, ties, peaked rows, large and small scores, infinities and NaN."""
    rng = np.random.default_rng(experts)
    x = [2 * rng.standard_normal((mild, experts)), rng.integers(-2, 3, (40, experts)), np.zeros((3, experts))]
    x += [shift + rng.standard_normal((9, experts)) for shift in (60, -60, 300, -300)]
    x += [30 * rng.standard_normal((9, experts))]
    special = rng.standard_normal((13, experts))
    special[:8][rng.random((8, experts)) < 0.2] = -np.inf
    special[8, 3], special[9, 5], special[10, 1:4], special[11] = np.inf, np.nan, -np.nan, -np.inf
    special[12, 2:] = -np.inf  # fewer numbers than experts are chosen
    bias = 0.2 * rng.standard_normal(experts)
    return np.concatenate([*x, special]).astype(dtype), bias.astype(np.float32)


def sigmoid(x):
    with np.errstate(all="ignore"):
        return 1 / (1 + np.exp(-oracle.wide(x)))


@np.errstate(all="ignore")
def log_score(x, score):
    """Returns the logarithm of a score that depends on no other logit."""
    x = oracle.wide(x)
    if score == "sigmoid":
        return -np.logaddexp(0, -x)
    return np.where(x < -40, x, np.log(np.logaddexp(0, x))) / 2


def score_of(x, score):
    if score != "sqrtsoftplus":
        return oracle.softmax(x) if score == "softmax" else sigmoid(x)
    with np.errstate(all="ignore"):
        return np.exp(log_score(x, score))


def largest_if_nan(keys):
    """Returns the keys with +inf for NaN, which counts as the largest number."""
    return np.where(np.isnan(keys), np.inf, keys)


def choice(x, gate, bias):
    """Returns score + bias, and which groups take part may be decided by rounding: (choice, in, near)."""
    score = score_of(x, gate.score)
    keys = largest_if_nan(score + (oracle.wide(bias) if gate.biased else 0))
    takes_part = np.ones(keys.shape, bool)
    near = np.zeros(len(keys), bool)
    if gate.groups > 1 and gate.top_groups < gate.groups:
        of_groups = keys.reshape(len(keys), gate.groups, -1)
        best = gate.group_best or 2
        rank = largest_if_nan(np.sort(of_groups, -1)[..., ::-1][..., :best].sum(-1))
        order = np.argsort(-rank, axis=-1, kind="stable")
        sorted_rank = np.take_along_axis(rank, order, -1)
        gap = gaps(sorted_rank)[:, gate.top_groups - 1]
        near = (gap > 0) & (gap < bound(gate, bias))
        chosen = np.zeros(rank.shape, bool)
        np.put_along_axis(chosen, order[:, : gate.top_groups], True, -1)
        takes_part = np.repeat(chosen, of_groups.shape[-1], -1)
    return keys, takes_part, near


def gaps(ordered):
    """Returns the differences of neighbours in each row, 0 for equal infinities."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(ordered[:, :-1] - ordered[:, 1:], nan=0.0, posinf=np.inf)


def bound(gate, bias):
    return NEAR * max(1.0, float(np.abs(bias).max()) if gate.biased else 0.0)


def indices(x, k, gate, bias):
    """Returns the experts by the definition, and which rows have a near tie that rounding may decide."""
    if not gate.steered:
        return oracle.topk_indices(x, k), np.zeros(len(x), bool)
    keys, takes_part, near = choice(x, gate, bias)
    keys = np.where(takes_part, keys, -np.inf)
    order = np.argsort(-keys, axis=-1, kind="stable")
    best = np.take_along_axis(keys, order[:, : k + 1], -1)
    gap = gaps(best)
    if gate.score == "sqrtsoftplus":  # scores have no bound, and one may be infinite where another is NaN
        near |= np.any(x > 1e3, -1)
    return order[:, :k], near | np.any((gap > 0) & (gap < bound(gate, bias)), -1)


@np.errstate(all="ignore")
def weights(x, chosen, gate):
    x = oracle.wide(x)
    won = np.take_along_axis(x, chosen, -1)
    if not gate.renormalize:
        return gate.scale * np.take_along_axis(score_of(x, gate.score), chosen, -1)
    log = won if gate.score == "softmax" else log_score(won, gate.score)
    share = oracle.softmax(log)
    if gate.score == "sqrtsoftplus":  # an infinite score takes the others' share
        share = np.where((log < np.inf) & (log.max(-1, keepdims=True) == np.inf), 0, share)
    return gate.scale * share


@np.errstate(all="ignore")
def vjp(x, chosen, gate, g, g_logsumexp):
    """Returns the cotangent of the logits, and the sum of the absolute values of its terms."""
    x, g, g_logsumexp = oracle.wide(x), oracle.wide(g), oracle.wide(g_logsumexp)[:, None]
    p, won, w = oracle.softmax(x), np.take_along_axis(x, chosen, -1), weights(x, chosen, gate)
    slope = 1 if gate.score == "softmax" else sigmoid(-won)
    if gate.score == "sqrtsoftplus":
        slope = np.where(won < -40, 0.5, sigmoid(won) / np.logaddexp(0, won) / 2)
    rest, size = g_logsumexp, np.abs(g_logsumexp)
    if gate.renormalize:
        mean = np.sum(g * w, -1, keepdims=True) / gate.scale
        direct = w * (g - mean) * slope
        of_winner = w * (np.abs(g) + np.sum(np.abs(g * w), -1, keepdims=True) / gate.scale)
    else:
        direct = g * w * slope
        of_winner = np.abs(direct)
        if gate.score == "softmax":
            rest = rest - np.sum(direct, -1, keepdims=True)
            size = size + np.sum(of_winner, -1, keepdims=True)
    dx, unit = p * rest, p * size
    np.put_along_axis(dx, chosen, np.take_along_axis(dx, chosen, -1) + direct, -1)
    np.put_along_axis(unit, chosen, np.take_along_axis(unit, chosen, -1) + of_winner, -1)
    return dx, unit


def same_entries_in_order(x, chosen, gate, bias):
    """Asserts that equal entries (the same logit and bias, in the same group) come in the order of their indices."""
    entries = oracle.wide(x)
    steer = oracle.wide(bias) if gate.biased else np.zeros(x.shape[-1])
    group = np.arange(x.shape[-1]) // (x.shape[-1] // gate.groups)
    for row, found in zip(entries, chosen):
        for place, i in enumerate(found):
            same = (row == row[i]) & (steer == steer[i]) & (group == group[i])
            lower = np.flatnonzero(same[:i])
            assert set(lower) <= set(found[:place]), (row[i], lower, found)


def results_and_gradient(k, gate, implementation):
    """Returns (x, bias, g, g_logsumexp) -> the results of `route`, and the cotangent of the logits."""

    def results(x, bias, g, g_logsumexp):
        def f(x):
            got = ps.route(x, k, implementation=implementation, **gate.keywords(bias))
            return (got.weights, got.logsumexp), got.indices

        (weights, logsumexp), pullback, indices = jax.vjp(f, x, has_aux=True)
        return ps.Routing(weights, indices, logsumexp), pullback((g, g_logsumexp))[0]

    return results


def check(run, x, k, gate, bias):
    """Asserts that results and cotangents of `run`, a function as `results_and_gradient` returns, are right."""
    g, g_logsumexp = cases.cotangent((len(x), k)), cases.cotangent((len(x),))
    got, dx = run(x, bias, g, g_logsumexp)
    judge(got, x, k, gate, bias)
    judge_vjp(dx, x, np.asarray(got.indices), gate, g, g_logsumexp)
    return got, dx


def judge(got, x, k, gate, bias):
    """Asserts that indices (except near ties), weights and logsumexp are right. Returns the rows with near ties."""
    got_weights, got_indices, got_logsumexp = map(np.asarray, got)
    want, near = indices(x, k, gate, bias)
    assert got_indices.dtype == np.int32 and got_weights.shape == got_indices.shape == (len(x), k)
    np.testing.assert_array_equal(got_indices[~near], want[~near])
    if gate.steered and near.any():
        keys, _, _ = choice(x[near], gate, bias)
        found = np.take_along_axis(keys, got_indices[near], -1)
        exact = np.take_along_axis(keys, want[near], -1)
        if gate.groups == 1:  # with groups, another group may take part
            assert_near(found, exact, bound(gate, bias))
    assert all(len(set(row)) == k for row in got_indices)
    if gate.steered:  # otherwise the indices are exact, and -0 comes after +0
        same_entries_in_order(x, got_indices, gate, bias)
    eps = np.finfo(np.float32).eps
    w = weights(x, got_indices, gate)
    m = oracle.row_max(oracle.wide(x), np.ones(x.shape, bool), -1)
    with np.errstate(all="ignore"):
        distance = 1 + np.nan_to_num(
            np.abs(np.take_along_axis(oracle.wide(x), got_indices, -1) - m), posinf=0, neginf=0
        )
    least = np.finfo(np.float32).tiny * max(1.0, gate.scale)  # a GPU flushes smaller scores to 0
    assert_near(got_weights, w, UNITS * eps * distance * np.abs(w) + least)
    lse = oracle.logsumexp(x, -1)
    assert_near(got_logsumexp, lse, UNITS * eps * (1 + np.abs(lse)))
    return near


def judge_vjp(got, x, chosen, gate, g, g_logsumexp):
    """Asserts that the cotangents of the logits are right, in rows where the definition has finite ones."""
    got, wide = np.asarray(got), oracle.wide(x)
    assert got.dtype == x.dtype and got.shape == x.shape
    want, unit = vjp(x, chosen, gate, g, g_logsumexp)
    with np.errstate(all="ignore"):
        distance = 1 + np.nan_to_num(np.abs(wide - wide.max(-1, keepdims=True)), posinf=0, neginf=0)
    rtol, atol = (UNITS * 2.0**-23, 1e-36) if x.dtype == np.float32 else (2.0**-7, 1e-6)
    limit = rtol * unit * distance + atol
    finite = np.isfinite(want).all(-1)
    assert_near(got[finite], want[finite], limit[finite])


def assert_near(got, want, bound):
    """Asserts that numbers differ by at most the bound, and that NaN and infinities are the same."""
    got, want = oracle.wide(got), oracle.wide(want)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        fine = same | (np.isfinite(want) & (np.abs(got - want) <= bound))
    if not fine.all():
        at = tuple(np.argwhere(~fine)[0])
        raise AssertionError(f"{(~fine).sum()} wrong; first at {at}: {got[at]}, expected {want[at]}")
