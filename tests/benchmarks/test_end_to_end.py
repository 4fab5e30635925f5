"""The benchmarks of softmax and top-k end to end on the CPU: checks, output and failures."""

import csv
import dataclasses
import gc
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
from benchmarks.support import answers, cases, driver, flags, plot, timing
from benchmarks.support.contenders import Contender, jax_call, prepare_jax
from benchmarks.support.flags import Settings
from benchmarks.support.report import Row
from tests.support.benchmark_cases import case_of, rows_of

ROOT = Path(__file__).parents[2]

COLUMNS = """benchmark batch vocab dtype function where axis k direction logits seed contender ours ran
    status reason rows_checked error_eps error_share_of_bound samples p20_us p50_us p80_us elements_per_s bytes
    tb_per_s share_of_copy share_of_read slowdown speedup first_result_s extra_mb fits_cache explain copy_tb_per_s
    device driver jax jaxlib numpy python commit date command""".split()

pytestmark = pytest.mark.usefixtures("quick_compilation")


def assert_smoke(directory: Path, printed: str):
    """Asserts the files and the text of `python -m benchmarks` on 64 rows, with ours right everywhere."""
    for name in ("softmax", "topk"):
        assert f"{name} on " in printed
        with open(directory / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [name for name in rows[0] if name != "read_tb_per_s"] == COLUMNS
        assert ("read_tb_per_s" in rows[0]) == (name == "topk")
        ours = [row for row in rows if row["ours"] == "True"]
        assert ours and all(row["status"] == "ok" and row["ran"] == "xla" for row in ours)
        assert all(row["explain"] for row in ours)
        assert all(float(row["first_result_s"]) > 0 for row in rows if row["status"] != "not run")
        for row in ours:
            assert float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
            assert int(row["samples"]) >= 3 and int(row["rows_checked"]) == 64
            rate = int(row["bytes"]) / float(row["p50_us"]) / 1e6
            np.testing.assert_allclose(float(row["tb_per_s"]), rate)
            rate = int(row["batch"]) * int(row["vocab"]) / float(row["p50_us"]) * 1e6
            np.testing.assert_allclose(float(row["elements_per_s"]), rate)
            if name == "topk":
                share = float(row["tb_per_s"]) / float(row["read_tb_per_s"])
                np.testing.assert_allclose(float(row["share_of_read"]), share)
        document = json.loads((directory / f"{name}.json").read_text())
        assert document["flags"]["batch"] == [64] and "heads" not in document["flags"]
        assert {"device", "jax", "commit", "date", "command"} <= set(document["environment"])
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")


SMOKE = ["--flagfile=configs/smoke.flags", "--vocab=1000", "--seconds=0", "--repeats=3"]


@pytest.mark.slow
def test_smoke_flags_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks", *SMOKE, f"--output_dir={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert_smoke(tmp_path, done.stdout)


@pytest.mark.slow
def test_smoke_flags_in_this_process(tmp_path, parse, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e10)
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 8e9)
    chosen = parse(
        both, *SMOKE, f"--output_dir={tmp_path}", "--vocab=33", "--dtype=float32", "--direction=forward"
    )
    monkeypatch.setattr(flags, "read", lambda argv: chosen)
    monkeypatch.setattr(flags, "defined", lambda: {"batch": chosen.batch})
    assert both.main([]) == 0
    assert_smoke(tmp_path, capsys.readouterr().out)


# These cases cover every direction and dtype; the smoke test above has float32 and forward.
@pytest.mark.slow
@pytest.mark.parametrize(("direction", "dtype"), list(itertools.product(flags.DIRECTIONS, flags.DTYPES)))
def test_every_direction_and_dtype_passes(small, direction, dtype):
    chosen = small(dtype=(dtype,), direction=(direction,), logits=("peaked",))
    assert driver.run(softmax.BENCHMARK, chosen) == 0
    assert driver.run(topk.BENCHMARK, chosen) == 0


def assert_masks_and_axes(chosen: Settings, benchmark: driver.Benchmark, count: int):
    """Asserts that all contenders are right in `count` cases, except torch, which says that it has no mask."""
    assert driver.run(benchmark, chosen) == 0
    rows = json.loads((Path(chosen.output_dir) / "softmax.json").read_text())["rows"]
    assert len(rows) == count * (1 + len(chosen.peers))
    for row in rows:
        if row["contender"] != "torch":
            assert row["status"] == "ok", row
        elif row["where"] != "none":
            assert row["status"] == "not run" and "mask" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("function", flags.FUNCTIONS)
def test_every_function_mask_and_axis_passes(small, function):
    chosen = small(
        shapes=((6, 33),),
        function=(function,),
        where=flags.WHERES,
        axis=(-1, 0),
        direction=("both",),
        logits=("peaked",),
        peers=("jax", "torch"),
    )
    assert_masks_and_axes(chosen, softmax.BENCHMARK, 4 * 2)


@pytest.mark.slow
def test_some_functions_masks_and_axes_pass(small):
    combined = (("log_softmax", "full", 0), ("logsumexp", "rows", 0))
    found = [
        case_of(vocab=33, direction="both", logits="peaked", function=function, where=where, axis=axis)
        for function, where, axis in combined
    ]
    benchmark = dataclasses.replace(softmax.BENCHMARK, cases=lambda chosen: found)
    assert_masks_and_axes(small(peers=("torch",)), benchmark, len(found))


@pytest.mark.parametrize(
    "function, direction",
    [
        pytest.param(
            *pair, marks=[] if pair in (("softmax", "forward"), ("softmax", "backward")) else pytest.mark.slow
        )
        for pair in itertools.product(flags.FUNCTIONS, flags.DIRECTIONS)
    ],
)  # test_the_oracle_has_every_function has the check alone
def test_wrong_results_fail_the_run(small, monkeypatch, capsys, function, direction):
    # the output, and therefore the gradient, is off by one part in a thousand
    def off(x, axis, where, implementation):
        return 1.001 * getattr(jax.nn, function)(x, axis=axis, where=where)

    monkeypatch.setattr(pallas_softmax, function, off)
    chosen = small(function=(function,), direction=(direction,), where=("full",), batch=(2,))
    assert driver.run(softmax.BENCHMARK, chosen) == 1
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "FAILED" and row["p50_us"] is None
    assert "FAILED" in capsys.readouterr().out


def test_wrong_order_of_ties_fails_the_run(small, monkeypatch):
    def last_index_first(x, k, implementation):
        values, indices = lax.top_k(jax.nn.softmax(x)[:, ::-1], k)
        return values, x.shape[-1] - 1 - indices

    monkeypatch.setattr(pallas_softmax, "fused_topk", last_index_first)
    assert driver.run(topk.BENCHMARK, small(logits=("normal",))) == 0
    chosen = small(logits=("ties",))
    assert driver.run(topk.BENCHMARK, chosen) == 1
    assert "indices of" in rows_of(chosen, "topk")["auto"]["reason"]


def test_a_wrong_peer_is_shown_but_does_not_fail_the_run(small, monkeypatch):
    monkeypatch.setattr(softmax, "_jax", lambda x, function, axis: (x, None))
    chosen = small(peers=("jax",))
    assert driver.run(softmax.BENCHMARK, chosen) == 0
    rows = rows_of(chosen, "softmax")
    assert rows["jax"]["status"] == "differs" and rows["auto"]["status"] == "ok"


def test_an_exception_of_ours_fails_the_run(small, monkeypatch):
    def broken(x, **kwargs):
        raise KeyError("no such kernel")

    monkeypatch.setattr(pallas_softmax, "softmax", broken)
    chosen = small()
    assert driver.run(softmax.BENCHMARK, chosen) == 1
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "error" and "KeyError: 'no such kernel'" in row["reason"]


def test_unavailable_contenders_are_rows_with_a_reason(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if not installed
    chosen = small(implementations=("auto", "mosaic_gpu"), peers=("torch",))
    for benchmark in (softmax.BENCHMARK, topk.BENCHMARK):
        assert driver.run(benchmark, chosen) == 0
        rows = rows_of(chosen, benchmark.name)
        assert rows["auto"]["status"] == "ok"
        assert rows["mosaic_gpu"]["status"] == "not run" and "mosaic_gpu" in rows["mosaic_gpu"]["reason"]
        assert rows["torch"]["status"] == "not run" and "torch" in rows["torch"]["reason"]


def test_quack_runs_if_it_can(small, monkeypatch):
    chosen = small(vocab=(32,), k=(4, 5), peers=("quack",), implementations=())

    def reasons(status):
        found = []
        for benchmark in (softmax.BENCHMARK, topk.BENCHMARK):
            assert driver.run(benchmark, chosen) == 0
            rows = json.loads((Path(chosen.output_dir) / f"{benchmark.name}.json").read_text())["rows"]
            found += [row["reason"] for row in rows if row["contender"] == "quack"]
            assert {row["status"] for row in rows if row["contender"] == "quack"} <= {status, "not run"}
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


def test_an_unknown_xla_option_is_a_row_with_a_reason(small):
    chosen = small(peers=("jax_raft",), implementations=())
    assert driver.run(topk.BENCHMARK, chosen) == 0
    row = rows_of(chosen, "topk")["jax_raft"]
    assert row["status"] == "not run" and "GPU" in row["reason"]
    with pytest.raises(jax.errors.JaxRuntimeError) as unknown:
        jax_call(jnp.sin, jnp.ones(3), options={"xla_no_such_option": True})
    found = Row("topk", case_of(k=5), "jax_raft", ours=False)
    driver.note(found, unknown.value)
    assert found.status == "not run" and "xla_no_such_option" in found.reason


def test_memory_beyond_the_arguments():
    call = jax_call(lambda x: jnp.broadcast_to(x, (1000, 250)) + 1.0, jnp.ones(250))
    assert call.extra_mb is not None and 1.0 <= call.extra_mb < 1.1


def test_bad_logits_are_checked_and_compared_with_normal_ones(small, capsys):
    chosen = small(logits=("normal", "nan", "neg_inf"), k=(30,))
    assert driver.run(topk.BENCHMARK, chosen) == 0
    normal, *bad = json.loads((Path(chosen.output_dir) / "topk.json").read_text())["rows"]
    assert normal["slowdown"] is None and "slowdown" in capsys.readouterr().out
    for row in bad:
        np.testing.assert_allclose(row["slowdown"], row["p50_us"] / normal["p50_us"])


@pytest.mark.slow
def test_other_logits_alone_are_compared_with_nothing(small, capsys):
    assert driver.run(topk.BENCHMARK, small(logits=("nan",))) == 0
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
        row = Row("softmax", case_of(), "call", ours=True)
        assert timing.interleave({"call": call}, 1, 0, lambda name, error: driver.note(row, error)) == {}
        del call, run_it, logits
        assert alive() is None and row.status == "not run"
    finally:
        gc.enable()


def test_the_picture_has_every_row(tmp_path):
    rows = [
        Row("topk", case_of(k=k), name, ours=name == "auto", status=status, share_of_copy=share)
        for k in (5, 64)
        for name, status, share in (("auto", "ok", 0.9), ("torch", "differs", 0.1), ("jax", "not run", None))
    ]
    plot.draw(tmp_path / "topk.png", rows, {"copy": 3e12, "read": 3.2e12}, {"device": "a GPU", "jax": "1"})
    assert (tmp_path / "topk.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_memory_is_a_row_with_a_reason(small, monkeypatch):
    monkeypatch.setattr(driver, "_memory", lambda: 100)
    chosen = small()
    assert driver.run(softmax.BENCHMARK, chosen) == 0
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "not run" and "memory" in row["reason"]


def test_nothing_is_timed_under_another_name(small, monkeypatch):
    plain = pallas_softmax.softmax
    monkeypatch.setattr(pallas_softmax, "softmax", lambda x, implementation, **kwargs: plain(x))
    chosen = small(implementations=("mosaic_gpu",))
    assert driver.run(softmax.BENCHMARK, chosen) == 1
    assert "asked for mosaic_gpu, explained as {'xla'}" in rows_of(chosen, "softmax")["mosaic_gpu"]["reason"]


def test_a_gradient_without_a_kernel_is_not_timed_under_its_name():
    contender = Contender("mosaic_gpu", True, pallas_softmax.logsumexp, prepare_jax, asked="mosaic_gpu")
    choices = pallas_softmax.explain(pallas_softmax.logsumexp, np.zeros((2, 3), np.float32))
    case = case_of(function="logsumexp", direction="backward")
    with pytest.raises(NotImplementedError, match="gradient of logsumexp is plain JAX"):
        driver._require_name(contender, case, choices, "xla")


def test_a_users_file_decides_the_result(small, tmp_path):
    logits = np.zeros((2, 3, 10), np.float64)
    logits[:, 1] = -1e3
    logits[:, 1, 7] = 50
    path = tmp_path / "logits.npy"
    np.save(path, logits)
    chosen = small(batch=(4, 100), logits=(str(path),), k=(2,))
    found = cases.make_cases(chosen, (2,))
    assert [(case.batch, case.vocab) for case in found] == [(4, 10), (6, 10)]
    x = cases.logits(found[0])
    np.testing.assert_array_equal(x, logits.reshape(6, 10)[:4])
    answer = answers.Answer(np.asarray(x), np.ones((4, 2)), k=2)
    np.testing.assert_array_equal(answer.indices, [[0, 1], [7, 0], [0, 1], [0, 1]])
    assert driver.run(topk.BENCHMARK, chosen) == 0
    assert rows_of(chosen, "topk")["auto"]["batch"] == 6


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int64), np.float32(1), np.zeros((0, 3))])
def test_unusable_files_are_refused(small, tmp_path, array):
    path = tmp_path / "logits.npy"
    np.save(path, array)
    with pytest.raises(SystemExit, match="--logits=.*logits.npy"):
        driver.run(softmax.BENCHMARK, small(logits=(str(path),)))


def test_topk_ignores_function_where_and_axis(small):
    chosen = small(function=("logsumexp", "softmax"), where=("full", "rows"), axis=(0, -1))
    assert driver.run(topk.BENCHMARK, chosen) == 0
    (row,) = json.loads((Path(chosen.output_dir) / "topk.json").read_text())["rows"]
    assert (row["function"], row["where"], row["axis"], row["k"]) == ("softmax", "none", -1, 5)
