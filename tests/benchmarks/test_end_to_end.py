"""The benchmarks of softmax and top-k end to end on the CPU: checks, output and failures."""

import csv
import dataclasses
import gc
import importlib.util
import itertools
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
from benchmarks import softmax, topk
from benchmarks.support import answers, cases, checked, driver, flags, result, timing
from benchmarks.support.contenders import Contender, jax_call, prepare_jax
from benchmarks.support.result import Record
from tests.support.benchmark_cases import case_of

ROOT = Path(__file__).parents[2]
CASE = (
    "batch vocab dtype function where axis k direction logits seed contender ours ran status reason".split()
)
MEASURED = "rows_checked error_eps error_share_of_bound samples p20_us p50_us p80_us bytes fits_cache".split()
MEASURED += ["first_result_s", "extra_mb", "explain"]
DERIVED = "elements_per_s tb_per_s share_of_copy speedup".split()
SMOKE = ["--flagfile=configs/smoke.flags", "--vocab=1000", "--seconds=0", "--repeats=3"]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def assert_smoke(directory: Path, printed: str):
    """Asserts the files and the text of `python -m benchmarks` on 64 rows, with ours right everywhere."""
    for name in ("softmax", "topk"):
        assert f"{name} on " in printed
        document = json.loads((directory / f"{name}.json").read_text())
        (run,) = document["runs"]
        assert {"device", "jax", "commit", "date", "command", "copy_tb_per_s"} <= set(run)
        assert ("read_tb_per_s" in run) == (name == "topk")
        with open(directory / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0])[: len(CASE)] == CASE and set(rows[0]) - {"share_of_read"} == {
            *CASE,
            *MEASURED,
            *DERIVED,
        }
        assert not set(DERIVED) & set(document["rows"][0])  # the JSON has only what cannot be computed again
        ours = [row for row in rows if row["ours"] == "True"]
        assert ours and all(row["status"] == "ok" and row["ran"] == "xla" for row in ours)
        assert all(row["explain"] for row in ours)
        assert all(float(row["first_result_s"]) > 0 for row in rows if row["status"] != "not run")
        for row in ours:
            assert float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
            assert float(row["samples"]) >= 3 and float(row["rows_checked"]) == 64
            rate = int(row["bytes"]) / float(row["p50_us"]) / 1e6
            np.testing.assert_allclose(float(row["tb_per_s"]), rate)
            np.testing.assert_allclose(
                float(row["elements_per_s"]), 64e6 * int(row["vocab"]) / float(row["p50_us"])
            )
            for limit in {"copy", "read"} & {each.split("_")[0] for each in run}:
                np.testing.assert_allclose(float(row[f"share_of_{limit}"]), rate / run[f"{limit}_tb_per_s"])


@pytest.mark.slow
def test_smoke_flags_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks", *SMOKE, f"--output_dir={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert_smoke(tmp_path, done.stdout)
    for name in ("softmax", "topk"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        (run,) = json.loads((tmp_path / f"{name}.json").read_text())["runs"]
        assert run["flags"]["batch"] == [64] and "heads" not in run["flags"]


@pytest.mark.slow
def test_smoke_flags_in_this_process(tmp_path, run_benchmark, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code, _ = run_benchmark(both, *SMOKE, "--vocab=33", "--dtype=float32", "--direction=forward", name="topk")
    assert code == 0
    assert_smoke(tmp_path, capsys.readouterr().out)


def test_without_pandas_the_json_is_written(tmp_path, run_benchmark, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    (tmp_path / "softmax.csv").write_text("a\n1\n")
    code, (row,) = run_benchmark(softmax)
    assert code == 0 and row["status"] == "ok" and (tmp_path / "softmax.csv").read_text() == "a\n1\n"
    assert "benchmarks.support.redraw" in capsys.readouterr().out


# These cases cover every direction and dtype; the smoke test above has float32 and forward.
@pytest.mark.slow
@pytest.mark.parametrize(("direction", "dtype"), list(itertools.product(flags.DIRECTIONS, flags.DTYPES)))
def test_every_direction_and_dtype_passes(run_benchmark, direction, dtype):
    for benchmark in (softmax, topk):
        args = (f"--dtype={dtype}", f"--direction={direction}", "--logits=peaked")
        assert run_benchmark(benchmark, *args)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("function", flags.FUNCTIONS)
def test_every_function_mask_and_axis_passes(run_benchmark, function):
    args = ["--shapes=6x33", f"--function={function}", "--where=none,full,vocab,rows", "--axis=-1,0"]
    args += ["--direction=both", "--logits=peaked", "--peers=jax,torch"]
    code, rows = run_benchmark(softmax, *args)
    assert code == 0 and len(rows) == 4 * 2 * 3
    for row in rows:
        if row["contender"] != "torch":
            assert row["status"] == "ok", row
        elif row["where"] != "none":
            assert row["status"] == "not run" and "mask" in row["reason"]


_FAST = (("softmax", "forward"), ("softmax", "backward"))


@pytest.mark.parametrize(
    "function, direction",
    [
        pytest.param(*pair, marks=[] if pair in _FAST else pytest.mark.slow)
        for pair in itertools.product(flags.FUNCTIONS, flags.DIRECTIONS)
    ],
)  # test_the_oracle_has_every_function has the check alone
def test_wrong_results_fail_the_run(one, monkeypatch, capsys, function, direction):
    # the output, and therefore the gradient, is off by one part in a thousand
    def off(x, axis, where, implementation):
        return 1.001 * getattr(jax.nn, function)(x, axis=axis, where=where)

    monkeypatch.setattr(pallas_softmax, function, off)
    args = (f"--function={function}", f"--direction={direction}", "--where=full", "--batch=2")
    code, rows = one(softmax, *args)
    assert code == 1 and rows["auto"]["status"] == "FAILED" and "p50_us" not in rows["auto"]
    assert "FAILED" in capsys.readouterr().out


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


def test_quack_runs_if_it_can(run_benchmark, monkeypatch):
    def reasons(status):
        found = []
        for benchmark, k in ((softmax, []), (topk, ["--k=4,5"])):
            code, rows = run_benchmark(benchmark, "--vocab=32", "--peers=quack", "--implementations=", *k)
            found += [row["reason"] for row in rows]
            assert code == 0 and {row["status"] for row in rows} <= {status, "not run"}
        return found

    assert all("GPU" in reason for reason in reasons("not run"))
    for module in (softmax, topk):
        monkeypatch.setattr(module, "prepare_quack", prepare_jax)
    monkeypatch.setitem(sys.modules, "quack", None)
    absent, also, powers = reasons("not run")
    assert "quack" in absent and "quack" in also and "powers of 2" in powers

    def refuse(*args):
        raise AssertionError("Unsupported dtype")

    monkeypatch.setitem(sys.modules, "quack", types.SimpleNamespace(softmax=refuse))
    monkeypatch.setitem(sys.modules, "quack.topk", types.SimpleNamespace(topk=refuse))
    assert all("AssertionError: Unsupported" in reason for reason in reasons("error")[:2])


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


@pytest.mark.slow
def test_other_logits_alone_are_compared_with_nothing(run_benchmark, capsys):
    assert run_benchmark(topk, "--logits=nan")[0] == 0
    assert "slowdown" not in capsys.readouterr().out


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
    logits = np.zeros((2, 3, 10), np.float64)
    logits[:, 1] = -1e3
    logits[:, 1, 7] = 50
    path = tmp_path / "logits.npy"
    np.save(path, logits)
    args = ("--batch=4,100", f"--logits={path}", "--k=2")
    found = topk.BENCHMARK.cases(parse(topk, *args))
    assert [(case.batch, case.vocab) for case in found] == [(4, 10), (6, 10)]
    x = cases.logits(found[0])
    np.testing.assert_array_equal(x, logits.reshape(6, 10)[:4])
    answer = answers.Answer(np.asarray(x), np.ones((4, 2)), k=2)
    np.testing.assert_array_equal(answer.indices, [[0, 1], [7, 0], [0, 1], [0, 1]])
    code, (_, row) = run_benchmark(topk, *args)
    assert code == 0 and row["batch"] == 6


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int64), np.float32(1), np.zeros((0, 3))])
def test_unusable_files_are_refused(run_benchmark, tmp_path, array):
    np.save(tmp_path / "logits.npy", array)
    with pytest.raises(SystemExit, match="--logits=.*logits.npy"):
        run_benchmark(softmax, f"--logits={tmp_path / 'logits.npy'}")


def test_topk_ignores_function_where_and_axis(run_benchmark):
    args = ("--function=logsumexp,softmax", "--where=full,rows", "--axis=0,-1")
    code, (row,) = run_benchmark(both, "--batch=6", "--vocab=40", "--peers=", *args, name="topk")
    assert code == 0
    assert (row["function"], row["where"], row["axis"], row["k"]) == ("softmax", "none", -1, 5)
