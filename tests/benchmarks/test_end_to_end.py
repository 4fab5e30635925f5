"""The benchmarks end to end on the CPU: checks, output and failures."""

import csv
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_softmax
from benchmarks import __main__ as both
from benchmarks import (
    accuracy,
    beam_search,
    linear,
    programs,
    route,
    sample,
    serve,
    sharded,
    softmax,
    topk,
    verify,
)
from benchmarks.support import cases, checked, driver, result, timing
from benchmarks.support.contenders import Contender, jax_call, prepare_jax
from benchmarks.support.result import Record
from tests.support.benchmark_cases import case_of
from tests.support.covering import first

ROOT = Path(__file__).parents[2]
CASE = (
    "batch vocab dtype function where axis k direction logits seed contender ours ran status reason".split()
)
MEASURED = "rows_checked error_eps error_share_of_bound samples p20_us p50_us p80_us bytes fits_cache".split()
MEASURED += ["first_result_s", "extra_mb", "explain"]
DERIVED = "elements_per_s tb_per_s share_of_copy speedup".split()
SMALL = "--batch=64 --vocab=1000 --dtype=float32,bfloat16 --k=5 --direction=forward,backward --seconds=0 --repeats=3"

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_softmax_and_topk_together(tmp_path):
    """`python -m benchmarks` on 64 rows: its files and its text, with ours right everywhere."""
    command = [sys.executable, "-m", "benchmarks", *SMALL.split(), f"--output_dir={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for name in ("softmax", "topk"):
        assert f"{name} on " in done.stdout
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        document = json.loads((tmp_path / f"{name}.json").read_text())
        (run,) = document["runs"]
        assert {"device", "jax", "commit", "date", "command", "copy_tb_per_s"} <= set(run)
        assert ("read_tb_per_s" in run) == (name == "topk")
        assert run["flags"]["batch"] == [64] and "heads" not in run["flags"]
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0])[: len(CASE)] == CASE
        assert set(rows[0]) - {"share_of_read"} == {*CASE, *MEASURED, *DERIVED}
        assert not set(DERIVED) & set(document["rows"][0])  # the JSON has only what cannot be computed again
        ours = [row for row in rows if row["ours"] == "True"]
        assert ours and all(row["status"] == "ok" and row["ran"] == "xla" for row in ours)
        assert all(row["explain"] for row in ours)
        assert all(float(row["first_result_s"]) > 0 for row in rows if row["status"] != "not run")
        for row in ours:
            assert float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
            assert float(row["samples"]) >= 3 and float(row["rows_checked"]) == 64
            seconds = float(row["p50_us"]) / 1e6
            rate = int(row["bytes"]) / seconds / 1e12
            np.testing.assert_allclose(float(row["tb_per_s"]), rate)
            np.testing.assert_allclose(float(row["elements_per_s"]), 64 * int(row["vocab"]) / seconds)
            for limit in {"copy", "read"} & {each.split("_")[0] for each in run}:
                np.testing.assert_allclose(float(row[f"share_of_{limit}"]), rate / run[f"{limit}_tb_per_s"])


@pytest.mark.slow
def test_the_quick_start_tells_what_runs_and_that_it_is_alive(tmp_path):
    """Its output goes to files, and its table has five calls of each contender."""
    command = [sys.executable, "-m", "benchmarks.quick_start", "--seconds=0", f"--output_dir={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("quick_start: case ")]
    assert len(lines) == 5 and lines[0] == "quick_start: case 1 of 5: softmax 64 x 50,257 float32"
    before, _, table = done.stdout.partition("\ncall ")
    assert "No kernels on this device" in before and "kernels run 5 of these 5 calls" in before
    assert all(name in table for name in ("softmax", "fused_topk", "sample", "route", "linear_cross_entropy"))
    rows = json.loads((tmp_path / "quick_start.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["plain JAX", "pallas_softmax"] * 5
    assert all(row["status"] == "ok" and row["p50_us"] > 0 for row in rows)


def test_without_pandas_the_json_is_written(tmp_path, run_benchmark, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    (tmp_path / "softmax.csv").write_text("a\n1\n")
    code, (row,) = run_benchmark(softmax)
    assert code == 0 and row["status"] == "ok" and (tmp_path / "softmax.csv").read_text() == "a\n1\n"
    assert "benchmarks.support.redraw" in capsys.readouterr().out


# A benchmark, its flags, and the number of its rows. Torch may not be installed.
DTYPES = "--dtype=float32,bfloat16,float16 --direction=forward,backward,both --logits=peaked"
MASKS = "--shapes=6x33 --function=softmax,log_softmax,logsumexp --where=none,full,vocab,rows --axis=-1,0"
DECODING = (
    "--vocab=90 --sequence=6 --tokens=64 --width=16 --training_steps=4 --implementations=auto,mosaic_gpu"
)
PROGRAMS = "--sequence=16 --vocab=50 --tokens=32 --heads=2 --width=16 --implementations=auto,mosaic_gpu"
LINEAR = "--batch=40 --vocab=50 --tokens=32 --width=16 --training_steps=5 --implementations=auto,mosaic_gpu"
SELECT = "--top_k --nosorted --shapes=6x90x20"
RUNS = [
    (softmax, DTYPES, 9),
    (topk, DTYPES, 9),
    (topk, f"{SELECT} --lengths=none,even --peers=lax_stable,lax_unstable --logits=ties,shifted", 2 * 2 * 3),
    (softmax, f"{MASKS} --direction=both --logits=peaked --peers=jax,torch", 3 * 4 * 2 * 3),
    (
        softmax,
        "--function=token_stats --dtype=float32,bfloat16 --direction=both --axis=-1,0 --where=none,full"
        " --logits=ties,peaked --peers=jax",
        16 * 2,
    ),
    (sample, "--shapes=3x60 --dtype=float32,bfloat16 --peers=jax,torch --logits=normal,ties", 4 * 6 * 3),
    (verify, "--batch=20 --vocab=60 --drafts=1,4 --dtype=float32,bfloat16 --peers=sample,jax", 8 * 3),
    (serve, f"{DECODING} --batch=9 --dtype=float32,bfloat16", 2 * 3),
    (beam_search, f"{DECODING} --batch=3 --k=3 --dtype=bfloat16", 4),
    (accuracy, "--shapes=20x300 --function=softmax,log_softmax --implementations=xla,mosaic_gpu", 4),
    (sharded, "--shapes=6x40,6x40x5", 5),
    (route, "--shapes=9x64x6,9x12x2 --direction=forward,both --peers=fused_topk,jax_dense", 5 * 2 * 4),
    (linear, f"{LINEAR} --reduction=mean,none --direction=both --w_shape=DxV,VxD --peers=quack", 4 * 5),
    (linear, f"{LINEAR} --function=token_stats --direction=forward,both --peers=liger,log_probs", 2 * 6),
    (programs, f"{PROGRAMS} --programs=block_where,loss_lse,attention_causal --dtype=bfloat16", 2 * 10),
]


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "args", "count"), RUNS)
def test_every_benchmark_runs(run_benchmark, capsys, benchmark, args, count):
    code, rows = run_benchmark(benchmark, *args.split())
    assert code == 0 and len(rows) == count
    for row in rows:
        if row["contender"] in ("mosaic_gpu", "torch", "quack", "liger") and row["status"] == "not run":
            assert row["contender"] in row["reason"] or "torch" in row["reason"] or "mask" in row["reason"]
        else:
            assert row["status"] == "ok", row
            assert benchmark is accuracy or row.get("p50_us", row.get("wall_p50_us")) > 0
            assert row.get("same", 9) == 9 and row.get("draws_checked", 6 * 8) == 6 * 8
    assert f"{benchmark.__name__.split('.')[-1]} on " in capsys.readouterr().out


def _second_passed_over(topk, x, k, **options):
    found = topk(x, k + 1, **options)
    return jax.tree.map(lambda a: jnp.delete(a, 1, axis=-1, assume_unique_indices=True), found)


def _first_entry(sample, *args, **options):
    drawn = sample(*args, **options)
    return drawn._replace(indices=jnp.zeros_like(drawn.indices))


def _accepts_all(verify, key, draft_tokens, *args, **options):
    found = verify(key, draft_tokens, *args, **options)
    return found._replace(tokens=jnp.pad(draft_tokens, [(0, 0), (0, 1)]))


def _without_gradient(loss, x, w, *args, **options):
    return lax.stop_gradient(loss(x, w, *args, **options)) + 0 * x.sum() * w.sum()


def _no_entropy(token_stats, *args, **options):
    return (stats := token_stats(*args, **options))._replace(entropy=0 * stats.entropy)


def _off(softmax, x, **options):
    return softmax(x, **options) * (1 + 2.0**-6)


WRONG = [  # a function of ours, a wrong one, and a benchmark with its flags
    ("softmax", _off, softmax, "--where=full --batch=2"),
    ("log_softmax", _off, softmax, "--function=log_softmax --direction=backward"),
    ("fused_topk", _second_passed_over, sharded, "--shapes=6x40x5 --k=5"),
    ("fused_topk", _second_passed_over, beam_search, f"{DECODING} --batch=3 --k=3"),
    ("top_k", _second_passed_over, topk, SELECT),
    ("softmax", _off, sharded, "--shapes=6x40"),
    ("softmax", _off, accuracy, "--shapes=20x300 --implementations=xla"),
    ("sample", _first_entry, sample, "--shapes=3x60 --filters=top_k --peers=jax"),
    ("sample", _first_entry, serve, f"{DECODING} --batch=9"),
    ("verify", _accepts_all, verify, "--batch=20 --vocab=60 --filters=none --peers=jax"),
    ("route", _first_entry, route, "--shapes=9x64x6"),
    ("logsumexp", _off, programs, f"{PROGRAMS} --programs=loss_lse"),
    ("linear_cross_entropy", _without_gradient, linear, "--batch=40 --direction=both --training_steps=0"),
    ("linear_token_stats", _no_entropy, linear, "--batch=40 --function=token_stats --training_steps=0"),
    ("token_stats", _no_entropy, softmax, "--function=token_stats"),
]


@pytest.mark.parametrize(("name", "wrong", "benchmark", "args"), first(1, WRONG))
def test_a_wrong_result_of_ours_is_not_timed(
    run_benchmark, monkeypatch, capsys, name, wrong, benchmark, args
):
    monkeypatch.setattr(pallas_softmax, name, functools.partial(wrong, getattr(pallas_softmax, name)))
    code, rows = run_benchmark(benchmark, *args.split())
    assert code == 1 and "records failed" in capsys.readouterr().err
    wrong = "WORSE" if benchmark is accuracy else "FAILED"
    for row in rows:
        assert row["status"] in ((wrong, "not run") if row["ours"] else ("ok",))
        assert not row["ours"] or not {"p50_us", "wall_p50_us"} & set(row)


@pytest.mark.slow
def test_training_gives_the_same_losses(run_benchmark, tmp_path):
    args = "--batch=40 --vocab=50 --tokens=32 --width=16 --training_steps=5 --peers="
    run_benchmark(linear, *args.split())
    plain, ours = result.read(tmp_path / "linear_training.json")["rows"]
    np.testing.assert_allclose(plain["first_loss"], np.log(50), rtol=0.1)
    assert ours["largest_gap"] <= 1e-4 and ours["last_loss"] < ours["first_loss"]


def test_wrong_order_of_ties_fails_the_run(one, monkeypatch):
    def last_index_first(x, k, implementation):
        values, indices = lax.top_k(jax.nn.softmax(x)[:, ::-1], k)
        return values, x.shape[-1] - 1 - indices

    monkeypatch.setattr(pallas_softmax, "fused_topk", last_index_first)
    assert one(topk)[0] == 0
    code, rows = one(topk, "--logits=ties")
    assert code == 1 and "indices of" in rows["auto"]["reason"]


def test_a_wrong_peer_is_shown_but_does_not_fail_the_run(one, monkeypatch):
    monkeypatch.setattr(softmax, "_jax", lambda x, function, axis: (x, None))
    code, rows = one(softmax, "--peers=jax")
    assert code == 0 and rows["jax"]["status"] == "differs" and rows["auto"]["status"] == "ok"
    assert rows["jax"]["p50_us"] > 0


def test_an_exception_of_ours_fails_the_run(one, monkeypatch):
    def broken(x, **kwargs):
        raise KeyError("no such kernel")

    monkeypatch.setattr(pallas_softmax, "softmax", broken)
    code, rows = one(softmax)
    assert code == 1 and rows["auto"]["status"] == "error"
    assert "KeyError: 'no such kernel'" in rows["auto"]["reason"]


def test_unavailable_contenders_are_rows_with_a_reason(one, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if not installed
    for benchmark in (softmax, topk):
        code, rows = one(benchmark, "--implementations=auto,mosaic_gpu", "--peers=torch")
        assert code == 0 and rows["auto"]["status"] == "ok"
        for name in ("mosaic_gpu", "torch"):
            assert rows[name]["status"] == "not run" and name in rows[name]["reason"]


def test_quack_is_not_run_without_a_gpu():
    x = types.SimpleNamespace(is_cuda=False, shape=(6, 32))
    for run in (lambda: softmax._quack(x, function="softmax", axis=-1), lambda: topk._quack(x, 4)):
        with pytest.raises(NotImplementedError, match="GPUs only"):
            run()
    with pytest.raises(NotImplementedError, match="powers of 2"):
        topk._quack(x, 5)


def test_an_unknown_xla_option_is_a_row_with_a_reason(one):
    code, rows = one(topk, "--peers=jax_raft", "--implementations=")
    assert code == 0
    assert rows["jax_raft"]["status"] == "not run" and "GPU" in rows["jax_raft"]["reason"]
    with pytest.raises(jax.errors.JaxRuntimeError) as unknown:
        jax_call(jnp.sin, jnp.ones(3), options={"xla_no_such_option": True})
    found = Record(case_of(k=5), "jax_raft", ours=False)
    driver.note(found, unknown.value)
    assert found.status == "not run" and "xla_no_such_option" in found.reason


def test_memory_beyond_the_arguments():
    call = jax_call(lambda x: jnp.broadcast_to(x, (1000, 250)) + 1.0, jnp.ones(250))
    assert call.extra_mb is not None and 1.0 <= call.extra_mb < 1.1


def test_bad_logits_are_checked_and_compared_with_normal_ones(run_benchmark, tmp_path, capsys):
    code, (normal, *bad) = run_benchmark(topk, "--logits=normal,nan,neg_inf", "--k=30")
    assert code == 0 and "slowdown" in capsys.readouterr().out
    rows = result.frame(result.read(tmp_path / "topk.json"), topk.VIEW)
    assert np.isnan(rows.slowdown[0])
    np.testing.assert_allclose(rows.slowdown[1:], [row["p50_us"] / normal["p50_us"] for row in bad])
    run_benchmark(topk, "--logits=nan")
    assert "slowdown" not in capsys.readouterr().out  # nothing to compare with


def test_a_call_that_raises_keeps_no_arrays_alive():
    class Logits:
        pass

    logits = Logits()
    alive = weakref.ref(logits)

    def run_it(logits=logits):
        raise MemoryError("no room for a second result")

    call = dataclasses.replace(jax_call(jnp.sin, jnp.ones(3)), run=run_it)
    gc.disable()
    try:
        record = Record(case_of(), "call", ours=True)
        assert timing.interleave({"call": call}, 1, 0, lambda name, error: driver.note(record, error)) == {}
        del call, run_it, logits
        assert alive() is None and record.status == "not run"
    finally:
        gc.enable()


def test_too_little_memory_is_a_row_with_a_reason(one, monkeypatch):
    monkeypatch.setattr(checked, "_memory", lambda: 100)
    code, rows = one(softmax)
    assert code == 0 and rows["auto"]["status"] == "not run" and "memory" in rows["auto"]["reason"]


def test_nothing_is_timed_under_another_name(one, monkeypatch):
    plain = pallas_softmax.softmax
    monkeypatch.setattr(pallas_softmax, "softmax", lambda x, implementation, **kwargs: plain(x))
    code, rows = one(softmax, "--implementations=mosaic_gpu")
    assert code == 1
    assert "asked for mosaic_gpu, explained as {'xla'}" in rows["mosaic_gpu"]["reason"]


def test_a_gradient_without_a_kernel_is_not_timed_under_its_name():
    contender = Contender("mosaic_gpu", True, pallas_softmax.logsumexp, prepare_jax, asked="mosaic_gpu")
    choices = pallas_softmax.explain(pallas_softmax.logsumexp, np.zeros((2, 3), np.float32))
    case = case_of(function="logsumexp", direction="backward")
    with pytest.raises(NotImplementedError, match="gradient of logsumexp is plain JAX"):
        checked.require_name(contender, case, choices, "xla")


def test_a_users_file_decides_the_result(run_benchmark, parse, tmp_path):
    logits = np.arange(60.0).reshape(2, 3, 10)
    path = tmp_path / "logits.npy"
    np.save(path, logits)
    args = ("--batch=4,100", f"--logits={path}", "--k=2")
    found = topk.BENCHMARK.cases(parse(topk, *args))
    assert [(case.batch, case.vocab) for case in found] == [(4, 10), (6, 10)]
    np.testing.assert_array_equal(cases.logits(found[0]), logits.reshape(6, 10)[:4])
    code, (_, row) = run_benchmark(topk, *args)
    assert code == 0 and row["batch"] == 6


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int64), np.float32(1), np.zeros((0, 3))])
def test_unusable_files_are_refused(run_benchmark, tmp_path, array):
    np.save(tmp_path / "logits.npy", array)
    with pytest.raises(SystemExit, match="--logits=.*logits.npy"):
        run_benchmark(softmax, f"--logits={tmp_path / 'logits.npy'}")
    with pytest.raises(SystemExit, match="--logits=missing.npy: .*No such file"):
        run_benchmark(softmax, "--logits=missing.npy")


@pytest.mark.slow
def test_topk_ignores_function_where_and_axis(run_benchmark):
    args = ("--function=logsumexp,softmax", "--where=full,rows", "--axis=0,-1")
    code, (row,) = run_benchmark(both, "--batch=6", "--vocab=40", "--peers=", *args, name="topk")
    assert code == 0
    assert (row["function"], row["where"], row["axis"], row["k"]) == ("softmax", "none", -1, 5)


def test_heads_that_do_not_divide_the_width_are_refused(run_benchmark):
    with pytest.raises(SystemExit, match="--width=10 is not accepted; with --heads=3"):
        run_benchmark(programs, "--width=10", "--heads=3")


def test_worse_than_xla():
    better = (1.0, 0.5, "bfloat16"), (3.0, 3.0, "float16"), (4.0, 2.0, "float32")
    worse = (1.6, 0.5, "bfloat16"), (4.2, 2.0, "float32"), (np.nan, 2.0, "float32"), (np.inf, 2.0, "bfloat16")
    assert not any(accuracy.worse(*each) for each in better) and all(accuracy.worse(*each) for each in worse)
