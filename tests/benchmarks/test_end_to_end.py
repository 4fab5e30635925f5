"""Every benchmark end to end on the CPU, on tiny inputs: checks, output and failures."""

import functools
import gc
import importlib.util
import os
import sys
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_softmax
from benchmarks import accuracy, paper, quick_start, sample, softmax
from benchmarks.support import driver, result, timing
from benchmarks.support.contenders import Call, jax_call
from benchmarks.support.result import Record
from tests.benchmarks.conftest import case_of, output_of
from tests.support.covering import first, slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_softmax_and_topk_together(tmp_path):
    """`python -m benchmarks` in a process of its own: its files and its text, with ours right everywhere."""
    command = "benchmarks --batch=5 --vocab=60 --seconds=0 --repeats=3 --function=logsumexp,softmax"
    printed = output_of(*command.split(), f"--output_dir={tmp_path}")
    assert "No kernels on this device" in printed
    # top-k ignores --function
    for name, functions, share in (("softmax", {"logsumexp", "softmax"}, "copy"), ("topk", {"softmax"}, "read")):
        assert f"{name} on " in printed
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        document = result.read(tmp_path / f"{name}.json")
        (run,), rows = document["runs"], document["rows"]
        assert {"device", "jax", "commit", "date", "command"} <= set(run)
        assert run["flags"]["batch"] == [5] and "heads" not in run["flags"]
        derived = (tmp_path / f"{name}.csv").read_text().partition("\n")[0].split(",")[len(rows[0]) :]
        assert {"speedup", "elements_per_s", f"share_of_{share}"} < set(derived)
        ours = [row for row in rows if row["ours"]]
        assert {row["function"] for row in ours} == functions
        for row in ours:
            assert row["status"] == "ok" and row["ran"] == "xla" and row["explain"]
            assert row["p20_us"] <= row["p50_us"] <= row["p80_us"] and row["first_result_s"] > 0
            assert row["samples"] >= 3 and row["rows_checked"] == 5


def _best_left_out(found):
    return jax.tree.map(lambda a: jnp.concatenate([a[..., 1:], a[..., -1:]], -1), found)


WRONG = {
    "softmax": lambda y: y * (1 + 2.0**-9),
    "logsumexp": lambda y: y * jnp.nan,
    "verify": lambda found: found._replace(tokens=jnp.maximum(found.tokens, 0)),  # all drafts accepted
    **dict.fromkeys(
        ("log_softmax", "linear_cross_entropy", "linear_kl_divergence"),
        lambda y: 2 * y - lax.stop_gradient(y),  # twice the gradient
    ),
    **dict.fromkeys(("fused_topk", "top_k"), _best_left_out),
    **dict.fromkeys(("sample", "linear_sample", "route"), lambda found: found._replace(indices=0 * found.indices)),
    **dict.fromkeys(("token_stats", "linear_token_stats"), lambda found: found._replace(entropy=0 * found.entropy)),
}
# A benchmark with its flags, and the number of its rows. Torch counts as not installed.
MODEL = "--vocab=90 --tokens=64 --width=16"
DECODING = f"{MODEL} --sequence=4 --training_steps=2"
LOSS = f"linear {MODEL} --batch=40"
RUNS = {
    "topk --top_k --nosorted --lengths=even --implementations=auto,xla,triton --peers=lax_stable,torch_topk": 5,
    "softmax --function=softmax,log_softmax,logsumexp --where=full --direction=both --peers=jax": 3 * 3,
    "topk --direction=backward --dtype=bfloat16 --peers=jax_stable,jax_raft,torch": 5,
    "topk --logits=normal,nan,neg_inf --k=30": 3 * 2,
    "softmax --function=token_stats --axis=0 --logits=peaked --peers=jax,quack": 4,
    "sample --shapes=3x60 --filters=all --peers=jax,torch,flashinfer": 5,
    "verify --batch=20 --vocab=60 --drafts=4 --filters=top_p --peers=jax,flashinfer": 4,
    f"serve {DECODING} --batch=9": 3,
    f"beam_search {DECODING} --batch=3 --k=3": 4,
    "accuracy --shapes=20x300": 2,
    "route --shapes=9x64x6 --gates=groups --direction=both --peers=fused_topk,jax_dense,torch": 6,
    f"{LOSS} --training_steps=5 --direction=both --peers=torch": 5,
    f"{LOSS} --training_steps=0 --function=token_stats --w_shape=VxD --peers=log_probs": 5,
    f"{LOSS} --training_steps=0 --function=kl_divergence --direction=both --teacher_width=32 --beta=0.5"
    " --peers=jax_inexact,torch": 6,
    "head --batch=9 --filters=top_p": 6,
    f"programs {MODEL} --sequence=4 --heads=2 --programs=block_where,loss_lse,attention_causal": 3 + 3 + 4,
    "paper --k=5,7 --algorithms=safe_unfused,online_fused --peers=jax_stable": 2 * 5,
}


@pytest.mark.parametrize(("command", "count"), first(1, [*RUNS.items()]), ids=lambda value: str(value)[:60])
def test_every_benchmark_runs_and_rejects_a_wrong_result(
    run_benchmark, monkeypatch, capsys, titles, tmp_path, command, count
):
    """Every function of ours is wrong with implementation="xla". The other contenders are right."""

    def breakable(function, change, *args, implementation=None, **options):
        found = function(*args, implementation=implementation, **options)
        return change(found) if implementation == "xla" else found

    for function, change in WRONG.items():
        broken = functools.partial(breakable, getattr(pallas_softmax, function), change)
        monkeypatch.setattr(pallas_softmax, function, broken)
    monkeypatch.setitem(sys.modules, "torch", None)
    name, *args = command.split()
    benchmark = importlib.import_module(f"benchmarks.{name}")
    without_remat = lambda found: [case for case in found if not case.remat]  # noqa: E731
    choose = without_remat if name == "programs" else None
    code, rows = run_benchmark(benchmark, "--implementations=auto,xla", *args, choose=choose)
    printed, of = capsys.readouterr(), benchmark.BENCHMARK
    assert code == 1 and "records failed" in printed.err and len(rows) == count
    assert f"{name} on " in printed.out and bool(titles) == (of.draw is not None)
    header = (tmp_path / f"{name}.csv").read_text().partition("\n")[0].split(",")
    assert set(of.columns) - set(header) <= {"slowdown", "device_us_per_step"}
    for row in rows:
        timed = row.get("p50_us", 0) > 0
        if row["contender"] == "xla":
            assert row["status"] == ("WORSE" if name == "accuracy" else "FAILED") and not timed, row
        elif row["contender"] in ("triton", "torch", "torch_topk", "quack", "flashinfer", "jax_raft"):
            assert row["status"] == "not run" and not timed and row["reason"], row
        else:
            assert row["status"] == "ok" and timed == (name != "accuracy"), row
            assert row.get("same", 9) == 9 and row.get("draws_checked", 4 * 8) == 4 * 8
    if "--training_steps=5" in args:
        plain, ours = result.read(tmp_path / "linear_training.json")["rows"]
        np.testing.assert_allclose(plain["first_loss"], np.log(90), rtol=0.1)
        assert ours["largest_gap"] <= 1e-4 and ours["last_loss"] < ours["first_loss"]
    if name == "paper":  # the title has the paper's speed-up at both ends of the axis
        times = {(row["contender"], row["k"]): row["p50_us"] for row in rows if "p50_us" in row}
        at_5, at_7 = (f"{times['safe_unfused', k] / times['online_fused', k]:.1f} times" for k in (5, 7))
        assert titles[0].startswith("CPU figures") and f"is {at_7} as fast as safe softmax" in titles[0]
        assert f"{at_5} at k = 5" in titles[0]


@pytest.mark.parametrize("count", [1, slow(5)])
def test_the_quick_start(run_benchmark, capsys, count):
    rows = {"batch": 4, "vocab": 60}
    gate, loss = {"tokens": 8, "gate": "softmax"}, {"tokens": 8, "head": "small", "direction": "forward"}
    sizes = rows, rows, rows | {"function": "none"}, gate, loss

    def smaller(calls):
        assert len(calls) == len(sizes)
        found = [replace(call, case=replace(call.case, **size)) for call, size in zip(calls, sizes)]
        return found[:count]

    code, rows = run_benchmark(quick_start, choose=smaller)
    printed = capsys.readouterr()
    assert code == 0 and f"quick_start: case 1 of {count}: softmax 64 x 50,257 float32" in printed.err
    assert f"kernels run {count} of these {count} calls" in " ".join(printed.out.split())
    assert [row["contender"] for row in rows] == ["plain JAX", "pallas_softmax"] * count
    assert all(row["status"] == "ok" and row["p50_us"] > 0 for row in rows)


def test_without_pandas_the_json_is_written(tmp_path, run_benchmark, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    (tmp_path / "softmax.csv").write_text("a\n1\n")
    code, (row,) = run_benchmark(softmax)
    assert code == 0 and row["status"] == "ok" and (tmp_path / "softmax.csv").read_text() == "a\n1\n"
    assert "benchmarks.support.redraw" in capsys.readouterr().out


def test_a_wrong_peer_is_shown_but_does_not_fail_the_run(run_benchmark, monkeypatch):
    monkeypatch.setitem(softmax._FUNCTIONS, "jax", lambda x, function, axis: (x, None))
    code, (auto, jaxs) = run_benchmark(softmax, "--peers=jax")
    assert code == 0 and (auto["contender"], auto["status"]) == ("auto", "ok")
    assert (jaxs["contender"], jaxs["status"]) == ("jax", "differs") and jaxs["p50_us"] > 0
    monkeypatch.setattr(sample, "by_jax", lambda key, x, given: x.argmin(-1))
    args = "--peers=jax", "--shapes=3x60", "--filters=min_p", "--implementations="
    code, (jaxs,) = run_benchmark(sample, *args)
    assert code == 0 and jaxs["status"] == "differs" and "p50_us" not in jaxs


def test_a_wrong_algorithm_of_the_paper_fails_the_run(run_benchmark, monkeypatch):
    broken = replace(paper._ALGORITHMS["topk"], plain=lambda x, k: lax.top_k(x + 1, k))
    monkeypatch.setitem(paper._ALGORITHMS, "topk", broken)
    code, rows = run_benchmark(paper, "--algorithms=topk,safe_fused", "--implementations=")
    assert code == 1 and [row["status"] for row in rows] == ["FAILED", "ok"]


def test_a_call_that_is_not_what_its_name_says_fails_the_run(run_benchmark, monkeypatch):
    plain = pallas_softmax.softmax

    def raises(x, **options):
        raise KeyError("no such kernel")

    for wrong, reason in (
        (raises, "KeyError: 'no such kernel'"),
        (lambda x, **options: plain(x), "asked for triton, explained as {'xla'}, lowered to xla"),
    ):
        monkeypatch.setattr(pallas_softmax, "softmax", wrong)
        code, (row,) = run_benchmark(softmax, "--implementations=triton")
        assert code == 1 and row["status"] == "error" and reason in row["reason"]


def test_a_gradient_without_a_kernel_is_not_timed_under_its_name():
    record, call = Record(case_of(), "mosaic_gpu", ours=True), Call(lambda: None, "xla")
    explained = pallas_softmax.logsumexp, np.zeros((2, 3), np.float32)
    with pytest.raises(NotImplementedError, match="gradient of logsumexp is plain JAX"):
        driver.describe(record, call, *explained, direction="backward")


def test_memory_beyond_the_arguments(run_benchmark, monkeypatch):
    call = jax_call(lambda x: jnp.broadcast_to(x, (1000, 250)) + 1.0, jnp.ones(250))
    assert call.extra_mb is not None and 1.0 <= call.extra_mb < 1.1
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    code, (row,) = run_benchmark(softmax)
    assert code == 0 and row["status"] == "not run" and "memory" in row["reason"]


def test_a_call_that_raises_keeps_no_arrays_alive():
    logits = np.zeros(3)
    alive = weakref.ref(logits)

    def run_it(logits=logits):
        raise MemoryError("no room for a second result")

    call, record = Call(run_it, "jax"), Record(case_of(), "call", ours=True)
    gc.disable()
    try:
        assert timing.interleave({"call": call}, 1, 0, lambda name, error: driver.note(record, error)) == {}
        del call, run_it, logits
        assert alive() is None and record.status == "not run"
    finally:
        gc.enable()


def test_worse_than_xla():
    better = (1.0, 0.5, "bfloat16"), (3.0, 3.0, "float16"), (4.0, 2.0, "float32")
    worse = (1.6, 0.5, "bfloat16"), (4.2, 2.0, "float32"), (np.nan, 2.0, "float32"), (np.inf, 2.0, "bfloat16")
    assert not any(accuracy.worse(*each) for each in better) and all(accuracy.worse(*each) for each in worse)
