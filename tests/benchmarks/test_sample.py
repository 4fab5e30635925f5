"""The peers of the benchmarks of sampling."""

import jax
import numpy as np
import pytest

from benchmarks import sample, serve
from tests.support import oracle


@pytest.mark.slow
def test_flashinfer_is_not_run_without_a_gpu(run_benchmark):
    code, rows = run_benchmark(sample, "--shapes=3x60", "--filters=none", "--peers=flashinfer")
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "not run"] and "GPU" in rows[1]["reason"]


def test_a_wrong_draw_of_a_peer_differs(run_benchmark, monkeypatch):
    monkeypatch.setattr(sample, "by_jax", lambda key, x, given: x.argmin(-1))
    args = "--shapes=3x60", "--filters=top_k", "--peers=jax", "--implementations="
    code, (row,) = run_benchmark(sample, *args)
    assert code == 0 and row["status"] == "differs" and "p50_us" not in row


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
