"""The compositions of docs/migration.md keep what the samplers of other libraries keep: their rules, in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.docs.test_docs import ROOT, blocks

RNG = np.random.default_rng(0)
ROWS = (2 * RNG.standard_normal((20, 60))).astype(np.float32)
TIES = np.round(ROWS) + 0  # no -0, which lax.top_k orders below 0
SETTINGS = [*itertools.product((0.6, 1.7), (3, 20, 60), (0.3, 0.9, 1.0), (0.0, 0.1, 0.5))]


def page():
    """Returns the functions of the block that defines the compositions."""
    names = {"filter_logits": ps.filter_logits, "jnp": jnp}
    (block,) = [b for b in blocks((ROOT / "docs/migration.md").read_text(), "python") if "def vllm(" in b]
    exec(block, names)
    return names


# --- The rules: from float64 logits, -inf where left out, to the same -------------------------------------


def normalized(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def best_first(z):
    return np.argsort(-z, kind="stable")


def top_k(z, k):
    kept = np.full_like(z, -np.inf)
    kept[best_first(z)[:k]] = z[best_first(z)[:k]]
    return kept


def top_p(z, p, of=None):
    """Keeps an entry if its predecessors have less than p of the mass of `of`, or of z."""
    mass = normalized(z if of is None else of)
    order = best_first(z)
    before = np.cumsum(mass[order]) - mass[order]
    chosen = order[(before < p) | (np.arange(z.size) == 0)]
    kept = np.full_like(z, -np.inf)
    kept[chosen] = z[chosen]
    return kept


def min_p(z, m):
    mass = normalized(z)
    return np.where(mass >= m * mass.max(), z, -np.inf)


def all_ties(rule, z, *arguments):
    """Applies a rule that compares with a cutoff."""
    cutoff = np.min(z[np.isfinite(rule(z, *arguments))])
    return np.where(z >= cutoff, z, -np.inf)


RULES = {
    "hugging_face": lambda z, t, k, p, m: min_p(top_p(top_k(z / t, k), p), m),
    "vllm": lambda z, t, k, p, m: top_p(top_k(min_p(z / t, m), k), p),
    "flashinfer_joint": lambda z, t, k, p, m: top_p(top_k(z / t, k), p, of=z / t),
    "llama_cpp": lambda z, t, k, p, m: min_p(top_p(top_k(z, k), p), m) / t,
    "maxtext": lambda z, t, k, p, m: top_p(top_k(z, k), p) / t,
    # EasyDeL applies min_p to logits; the page says that ours is of the probabilities
    "easydel": lambda z, t, k, p, m: min_p(top_p(top_k(z, k), p) / t, m),
    "gemma": lambda z, t, k, p, m: all_ties(top_p, z / t, p),
}
ARGUMENTS = {"flashinfer_joint": 3, "maxtext": 3}


def ours(name, x, t, k, p, m):
    if name == "hugging_face":
        return ps.filter_logits(x, temperature=t, top_k=k, top_p=p, min_p=m)
    if name == "gemma":
        return page()["gemma"](x, t, p)
    return page()[name](x, *(t, k, p, m)[: ARGUMENTS.get(name, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("x", [ROWS, TIES], ids=["rows", "ties"])
@pytest.mark.parametrize("name", RULES)
def test_a_composition_is_the_rule_of_the_library(name, x):
    settings = np.array(SETTINGS, np.float32)
    t, k, p, m = (
        a[:, None] for a in (settings[:, 0], settings[:, 1].astype(int), settings[:, 2], settings[:, 3])
    )
    rows = np.broadcast_to(x, (len(SETTINGS), *x.shape))
    got = np.asarray(ours(name, rows, *(np.broadcast_to(a, rows.shape[:2]) for a in (t, k, p, m))))
    rule, other = RULES[name], 0
    for i, row in enumerate(rows.reshape(-1, x.shape[-1])):
        of_row = [float(a.ravel()[i // len(x)]) for a in (t, p, m)]
        arguments = of_row[0], int(k.ravel()[i // len(x)]), *of_row[1:]
        want = rule(row.astype(np.float64), *arguments)
        mine = got.reshape(-1, x.shape[-1])[i]
        if (np.isfinite(want) != np.isfinite(mine)).any():  # a sum on a boundary, to rounding
            near = [rule(row.astype(np.float64), arguments[0], arguments[1], arguments[2] + e, arguments[3] * (1 + d))
                    for e in (-1e-6, 1e-6) for d in (-1e-6, 1e-6)]  # fmt: skip
            assert any((np.isfinite(n) == np.isfinite(mine)).all() for n in near), (name, arguments)
            other += 1
        else:
            np.testing.assert_allclose(mine[np.isfinite(mine)], want[np.isfinite(want)], rtol=1e-5, atol=1e-6)
    assert other < 0.01 * len(got.reshape(-1, x.shape[-1]))


def test_the_orders_differ():
    """The libraries keep different tokens for the same settings: the test above can tell them apart."""
    kept = {
        name: tuple(tuple(np.isfinite(rule(row.astype(np.float64), 1.7, 20, 0.9, 0.1))) for row in TIES)
        for name, rule in RULES.items()
    }
    assert len({*kept.values()}) == len(RULES)
