"""benchmarks.serve: draws are compared with the oracle, and a wrong draw fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import serve
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def run(run_benchmark):
    """Runs the benchmark on a small model."""
    small = "--batch=9", "--vocab=90", "--sequence=3", "--tokens=64", "--width=16", "--training_steps=2"
    return functools.partial(run_benchmark, serve, *small)


@pytest.mark.slow
def test_every_contender(run, capsys):
    code, rows = run("--dtype=float32,bfloat16", "--implementations=auto,xla")
    assert code == 0
    assert [row["contender"] for row in rows] == 2 * ["sort", "auto", "xla"]
    for row in rows:
        assert row["status"] == "ok" and row["p50_us"] > 0
        assert row.get("draws_checked") == (3 * 8 if row["ours"] else None)
    printed = capsys.readouterr().out
    assert "serve on" in printed and "tokens_per_s" in printed


@pytest.mark.slow
def test_a_wrong_token_fails(run, monkeypatch):
    """A contender with a wrong token is not timed."""
    draw = serve.pallas_softmax.sample
    wrong = lambda *args, **kwargs: draw(*args, **kwargs)._replace(indices=jnp.zeros(9, np.int32))  # noqa: E731
    monkeypatch.setattr(serve.pallas_softmax, "sample", wrong)
    code, (sort, ours) = run()
    assert code == 1
    assert (sort["status"], ours["status"]) == ("ok", "FAILED") and "p50_us" not in ours


def test_sorted_draws_are_in_the_kept_set():
    x = np.random.default_rng(0).standard_normal((70, 200)).astype("float32") * 2
    asked = serve.requests(70)
    temperature, *filters = map(np.asarray, asked.values())
    (tokens,) = jax.jit(serve.by_sort)(serve.keys_of(jax.random.split(jax.random.key(0), 70), 3), x, asked)
    kept = oracle.sample_kept(
        x, None, temperature, **dict(zip(("top_k", "top_p", "min_p"), filters)), lean=1e-4, min_p_lean=-1e-4
    )
    assert kept[np.arange(70), tokens].all()
    np.testing.assert_array_equal(tokens[::7], x[::7].argmax(-1))  # greedy
    assert len(np.unique(tokens[6::7])) > 5  # no filter
