"""The benchmark of the paper's figures on the CPU."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

from benchmarks import paper
from benchmarks.support import plot, result

pytestmark = pytest.mark.usefixtures("quick_compilation")
SWEEP = ("--k=5,7", "--algorithms=safe_unfused,online_fused")
PEERS = "--peers=jax,jax_stable"
TOPK = "--algorithms=topk,safe_unfused,safe_fused,online_fused"


@pytest.mark.slow
@pytest.mark.parametrize(
    "args, over, fast, baseline",
    [
        (SWEEP, "k", "online_fused", "safe_unfused"),
        (("--vocab=40,90", PEERS), "vocab", "online", "safe"),
        (("--vocab=40,90", PEERS, TOPK), "vocab", "online_fused", "safe_unfused"),
        ((*SWEEP, "--batch=6,2", PEERS), "k", "online_fused", "safe_unfused"),
    ],
    ids=["k_sweep", "softmax", "topk", "k_sweeps"],
)
def test_figures_of_the_paper(run_benchmark, tmp_path, monkeypatch, capsys, args, over, fast, baseline):
    titles = []
    monkeypatch.setattr(plot, "finish", lambda figure, file, document, title: titles.append(title))
    code, rows = run_benchmark(paper, *args, "--logits=uniform")
    assert code == 0 and all(row["status"] == "ok" and row["dtype"] == "float32" for row in rows)
    p50 = {(row["batch"], row["vocab"], row["k"], row["contender"]): row["p50_us"] for row in rows}
    frame = result.frame(result.read(tmp_path / "paper.json"), paper.VIEW)
    for row in frame.itertuples():
        np.testing.assert_allclose(row.elements_per_s, row.batch * row.vocab / row.p50_us * 1e6)
        np.testing.assert_allclose(row.speedup, p50[row.batch, row.vocab, row.k, baseline] / row.p50_us)
    (title,) = titles
    ratio = frame[frame.contender == fast].sort_values(over).speedup
    assert (
        "CPU figures" in title and "batch 6" in title and f"at {'V' if over == 'vocab' else 'k'} = " in title
    )
    assert len({row["batch"] for row in rows}) > 1 or f"{ratio.iloc[-1]:.1f} times as fast as" in title
    assert "elements_per_s" in capsys.readouterr().out


def _softmax_too(x, k):
    values, indices = lax.top_k(x, k)
    return jax.nn.softmax(values), indices


def _next_index(x, k):
    values, indices = lax.top_k(jax.nn.softmax(x), k)
    return values, (indices + 1) % x.shape[-1]


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("topk", _softmax_too),
        ("topk", lambda x, k: (lax.top_k(x, k)[0], _next_index(x, k)[1])),
        ("safe_unfused", _next_index),
        ("online_fused", _next_index),
    ],
)
def test_a_wrong_algorithm_fails_the_run(one, monkeypatch, name, wrong):
    broken = dataclasses.replace(paper._ALGORITHMS[name], plain=wrong)
    monkeypatch.setitem(paper._ALGORITHMS, name, broken)
    code, rows = one(paper, f"--algorithms={name},safe_fused", "--implementations=")
    assert code == 1
    assert {row["contender"] for row in rows.values() if row["status"] == "FAILED"} == {name}


def test_an_algorithm_of_the_paper_runs_as_its_kernel(one, monkeypatch):
    plain = paper._algorithm

    def as_if_kernel(name, case):
        return dataclasses.replace(plain(name, case), asked="mosaic_gpu")

    monkeypatch.setattr(paper, "_algorithm", as_if_kernel)
    code, rows = one(paper, "--algorithms=online", "--implementations=")
    assert code == 1 and "lowered to xla" in rows["online"]["reason"]
