"""The benchmark of the paper's figures on the CPU."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import lax

from benchmarks import paper
from benchmarks.support import driver, flags
from tests.support.benchmark_cases import rows_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
QUICK_SWEEP = {"k": (5, 7), "algorithms": ("safe_unfused", "online_fused")}
BOTH_PEERS = {"peers": ("jax", "jax_stable")}
OF_SOFTMAX = ("V", "online", "safe")
OF_TOPK = ("online_fused", "safe_unfused")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed, over, fast, baseline",
    [
        (QUICK_SWEEP, "K", *OF_TOPK),
        ({"vocab": (40, 90)} | BOTH_PEERS, *OF_SOFTMAX),
        ({"vocab": (40, 90), "algorithms": flags.TOPK_ALGORITHMS} | BOTH_PEERS, "V", *OF_TOPK),
        (QUICK_SWEEP | {"batch": (6, 2)} | BOTH_PEERS, "K", *OF_TOPK),
    ],
    ids=["k_sweep", "softmax", "topk", "k_sweeps"],
)
def test_figures_of_the_paper(small, capsys, changed, over, fast, baseline):
    chosen = small(**changed, logits=("uniform",))
    assert driver.run(paper.benchmark(chosen), chosen) == 0
    directory = Path(chosen.output_dir)
    rows = json.loads((directory / "paper.json").read_text())["rows"]
    peers = set(chosen.peers) & {*(flags.SOFTMAX_PEERS if baseline == "safe" else flags.TOPK_PEERS)}
    assert {row["contender"] for row in rows} == {*chosen.algorithms, "auto"} | peers
    p50 = {(row["batch"], row["vocab"], row["k"], row["contender"]): row["p50_us"] for row in rows}
    for row in rows:
        assert row["status"] == "ok" and row["dtype"] == "float32", row
        np.testing.assert_allclose(row["elements_per_s"], row["batch"] * row["vocab"] / row["p50_us"] * 1e6)
        base = p50[row["batch"], row["vocab"], row["k"], baseline]
        np.testing.assert_allclose(row["speedup"], base / row["p50_us"])
    with open(directory / "paper.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert (directory / "paper.png").read_bytes().startswith(b"\x89PNG")
    picture, printed = (directory / "paper.svg").read_text(), capsys.readouterr().out
    for text in (picture, printed):
        assert "CPU figures" in text and "batch 6" in text
    assert f">{over}, " in picture and re.search(rf"^ *{over}  ", printed, re.MULTILINE)
    assert f"speed-up of {fast} over {baseline}" in printed
    for row in rows:
        if row["contender"] == fast:
            assert f"{row['speedup']:.2f}x" in printed and f"{row['speedup']:.1f}x" in picture


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
def test_a_wrong_algorithm_fails_the_run(small, monkeypatch, name, wrong):
    broken = dataclasses.replace(paper._ALGORITHMS[name], plain=wrong)
    monkeypatch.setitem(paper._ALGORITHMS, name, broken)
    chosen = small(algorithms=(name, "safe_fused"), implementations=())
    bare = dataclasses.replace(paper.benchmark(chosen), draw=lambda *args: None)
    assert driver.run(bare, chosen) == 1
    rows = rows_of(chosen, "paper")
    assert {row["contender"] for row in rows.values() if row["status"] == "FAILED"} == {name}


def test_an_algorithm_of_the_paper_runs_as_its_kernel(small, monkeypatch):
    assert flags.SOFTMAX_ALGORITHMS + flags.TOPK_ALGORITHMS == tuple(paper._ALGORITHMS)
    plain = paper._algorithm

    def as_if_kernel(name, case):
        return dataclasses.replace(plain(name, case), asked="mosaic_gpu")

    monkeypatch.setattr(paper, "_algorithm", as_if_kernel)
    chosen = small(algorithms=("online",), implementations=())
    bare = dataclasses.replace(paper.benchmark(chosen), draw=lambda *args: None)
    assert driver.run(bare, chosen) == 1
    assert "lowered to xla" in rows_of(chosen, "paper")["online"]["reason"]
