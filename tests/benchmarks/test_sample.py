"""benchmarks.sample: every contender is checked, and a wrong one is not timed."""

import functools

import numpy as np
import pytest

from benchmarks import sample


@pytest.fixture
def run(run_benchmark):
    """Runs the benchmark on a small input."""
    return functools.partial(run_benchmark, sample, "--shapes=3x60")


@pytest.mark.slow
def test_every_filter_and_contender(run, capsys):
    code, rows = run("--dtype=float32,bfloat16", "--peers=jax,torch", "--logits=normal,ties")
    assert code == 0
    assert len(rows) == 2 * 2 * len(sample.FILTERS) * 3
    for row in rows:
        if row["status"] != "not run":  # torch may not be there
            assert row["status"] == "ok" and row["p50_us"] > 0, row
    assert "sample on" in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_draw_fails(run, monkeypatch):
    """A wrong draw of ours fails, and a peer's draw outside the kept set differs. Neither is timed."""
    draw = sample.pallas_softmax.sample
    wrong = lambda *args, **kwargs: draw(*args, **kwargs)._replace(indices=np.zeros(3, np.int32))  # noqa: E731
    monkeypatch.setattr(sample.pallas_softmax, "sample", wrong)
    monkeypatch.setattr(sample, "by_jax", lambda key, x, given: x.argmin(-1))
    code, rows = run("--filters=top_k", "--peers=jax")
    assert code == 1
    assert [row["status"] for row in rows] == ["FAILED", "differs"]
    assert not any("p50_us" in row for row in rows)


def test_flashinfer_is_not_run_without_a_gpu(run):
    code, rows = run("--filters=none", "--peers=flashinfer")
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "not run"] and "GPU" in rows[1]["reason"]
