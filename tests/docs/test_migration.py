"""The compositions of docs/migration.md keep what the samplers of other libraries keep: their rules, in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.docs.test_docs import ROOT, blocks
from tests.support import oracle

RNG = np.random.default_rng(0)
ROWS = (2 * RNG.standard_normal((20, 60))).astype(np.float32)
TIES = np.round(ROWS) + 0  # no -0, which lax.top_k orders below 0
SETTINGS = [*itertools.product((0.6, 1.7), (3, 20, 60), (0.3, 0.9, 1.0), (0.0, 0.1, 0.5))]


def page():
    names = {"filter_logits": ps.filter_logits, "jnp": jnp}
    (block,) = [b for b in blocks((ROOT / "docs/migration.md").read_text(), "python") if "def vllm(" in b]
    exec(block, names)
    return names


# --- The rules: from float64 logits, -inf where left out, to the same -------------------------------------


def filtered(z, **filters):
    return np.where(oracle.sample_kept(z[None], z[None] > -np.inf, **filters)[0], z, -np.inf)


def top_k(z, k):
    return filtered(z, top_k=k)


def top_p(z, p):
    """Keeps an entry if its predecessors have less than p of the mass."""
    return filtered(z, top_p=p)


def min_p(z, m):
    return filtered(z, min_p=m)


def with_ties(z, kept):
    return np.where(z >= z[np.isfinite(kept)].min(), z, -np.inf)


# Each rule, and how many of the settings k, p and m the composition takes.
RULES = {
    "hugging_face": (lambda z, t, k, p, m: min_p(top_p(top_k(z / t, k), p), m), "kpm"),
    "vllm": (lambda z, t, k, p, m: top_p(top_k(min_p(z / t, m), k), p), "kpm"),
    "flashinfer_joint": (lambda z, t, k, p, m: np.minimum(top_k(z / t, k), top_p(z / t, p)), "kp"),
    "llama_cpp": (lambda z, t, k, p, m: min_p(top_p(top_k(z, k), p), m) / t, "kpm"),
    "maxtext": (lambda z, t, k, p, m: top_p(top_k(z, k), p) / t, "kp"),
    # EasyDeL applies min_p to logits; the page says that ours is of the probabilities
    "easydel": (lambda z, t, k, p, m: min_p(top_p(top_k(z, k), p) / t, m), "kpm"),
    "gemma": (lambda z, t, k, p, m: with_ties(z / t, top_p(z / t, p)), "p"),
}


@pytest.mark.slow
@pytest.mark.parametrize("x", [ROWS, TIES], ids=["rows", "ties"])
@pytest.mark.parametrize("name", RULES)
def test_a_composition_is_the_rule_of_the_library(name, x):
    rule, names = RULES[name]
    settings = [(*of, row) for of in SETTINGS for row in x]
    t, k, p, m = (np.array(of, type(of[0])) for of in list(zip(*settings))[:4])
    t, p, m = (of.astype(np.float32) for of in (t, p, m))
    given = [{"k": k, "p": p, "m": m}[of] for of in names]
    rows = np.tile(x, (len(SETTINGS), 1))
    if name == "hugging_face":
        got = ps.filter_logits(rows, temperature=t, top_k=k, top_p=p, min_p=m)
    else:
        got = page()[name](rows, t, *given)
    other = 0
    for i, mine in enumerate(np.asarray(got)):
        z, kept = rows[i].astype(np.float64), np.isfinite(mine)
        want = rule(z, t[i], k[i], p[i], m[i])
        if (np.isfinite(want) != kept).any():  # a sum on a boundary, to rounding
            near = itertools.product((-1e-6, 1e-6), repeat=2)
            near = [rule(z, t[i], k[i], p[i] + e, m[i] * (1 + d)) for e, d in near]
            assert any((np.isfinite(each) == kept).all() for each in near), (name, settings[i][:4])
            other += 1
        else:
            np.testing.assert_allclose(mine[kept], want[kept], rtol=1e-5, atol=1e-6)
    assert other < 0.01 * len(rows)


def test_the_orders_differ():
    """The libraries keep different tokens for the same settings: the test above can tell them apart."""
    kept = {
        np.isfinite([rule(row.astype(np.float64), 1.7, 20, 0.9, 0.1) for row in TIES]).tobytes()
        for rule, _ in RULES.values()
    }
    assert len(kept) == len(RULES)
