"""The benchmarks of accuracy, whole programs and projections on the CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax
from benchmarks import accuracy, linear, programs
from benchmarks.support import driver, result

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax", "softmax,log_softmax"])
def test_accuracy_says_how_ours_compares(run_benchmark, monkeypatch, capsys, function):
    args = ["--shapes=20x300", "--direction=forward", "--implementations=xla,mosaic_gpu"]
    code, rows = run_benchmark(accuracy, *args, f"--function={function}", "--dtype=float32,bfloat16")
    assert code == 0 and len(rows) == 4 * len(function.split(","))
    assert {row["status"] for row in rows} == {"ok", "not run"}
    for row in rows:
        if row["contender"] == "xla":
            assert row["ulps"] < (1 if row["dtype"] == "bfloat16" else 10) and row["xla_ulps"] < 20

    def off(x, axis, where, implementation):
        return jax.nn.softmax(x, axis=axis, where=where) * (1 + 2.0**-6)

    monkeypatch.setattr(pallas_softmax, "softmax", off)
    assert run_benchmark(accuracy, *args, "--dtype=bfloat16")[0] == 1
    assert "WORSE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ulps, xla, dtype, expected",
    [
        (1.0, 0.5, "bfloat16", False),
        (1.6, 0.5, "bfloat16", True),
        (3.0, 3.0, "float16", False),
        (4.0, 2.0, "float32", False),
        (4.2, 2.0, "float32", True),
        (np.nan, 2.0, "float32", True),
        (np.inf, 2.0, "bfloat16", True),
    ],
)
def test_worse_than_xla(ulps, xla, dtype, expected):
    assert accuracy.worse(ulps, xla, dtype) == expected


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True], ids=["one_loss", "every_program"])
def test_programs_end_to_end(run_benchmark, monkeypatch, capsys, every):
    make = programs.make_programs

    def some(chosen):
        todo = make(chosen)
        assert len(todo) == 6 * 2
        todo = [each for each in todo if each.remat == (each.program in ("block_where", "loss_take"))]
        return todo if every else [each for each in todo if each.program == "loss_take"]

    monkeypatch.setattr(programs, "BENCHMARK", dataclasses.replace(programs.BENCHMARK, cases=some))
    monkeypatch.setattr(programs, "main", functools.partial(driver.main, programs.BENCHMARK))
    args = ["--sequence=16", "--vocab=50", "--tokens=32", "--heads=2", "--width=16", "--dtype=bfloat16"]
    code, rows = run_benchmark(programs, *args, "--implementations=auto,mosaic_gpu")
    fused = [row["program"] for row in rows if row["contender"] == "dot_product_attention"]
    assert code == 0 and fused == ([] if not every else ["attention", "attention_causal"])
    assert len(rows) == (6 if every else 1) * 3 + len(fused)
    for row in rows:
        if row["contender"] == "mosaic_gpu":
            assert row["status"] == "not run" and "mosaic_gpu" in row["reason"]
        else:
            assert row["status"] == "ok" and row["p50_us"] > 0
            assert row["error"] <= programs.TOLERANCE["bfloat16"]
    losses = {row["loss"] for row in rows if row["program"].startswith("loss") and row["contender"] == "jax"}
    np.testing.assert_allclose(list(losses), np.log(50), rtol=0.3)
    assert "speedup" in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_with_wrong_gradients_fails(parse, monkeypatch):
    monkeypatch.setattr(pallas_softmax, "logsumexp", lambda x, axis, where, implementation: jnp.max(x, axis))
    program = programs.Program("loss_lse", 50, "float32", remat=True)
    chosen = parse(programs, "--tokens=32", "--width=16", "--seconds=0", "--repeats=3")
    reference, ours = programs.run_program(program, chosen)
    assert reference.status == "ok" and ours.status == "FAILED" and "p50_us" not in ours.found and ours.fails


@pytest.mark.slow
def test_linear_end_to_end(run_benchmark, tmp_path, capsys):
    args = ["--batch=40", "--vocab=50", "--tokens=32", "--width=16", "--training_steps=5", "--direction=both"]
    args += ["--reduction=mean,none", "--w_shape=DxV,VxD", "--implementations=auto,mosaic_gpu"]
    code, rows = run_benchmark(linear, *args, "--peers=jax_float32,quack")
    names = ["jax_scan", "matmul", "jax_float32", "quack", "auto", "mosaic_gpu"]
    assert code == 0 and [row["contender"] for row in rows] == names * 4
    for row in rows:
        if row["contender"] in ("quack", "mosaic_gpu"):
            assert row["status"] == "not run" and ("mosaic_gpu" in row["reason"] or not row["ours"])
        else:
            assert row["status"] == "ok" and row["p50_us"] > 0
            assert row["contender"] == "matmul" or row["error"] <= 1e-6
    plain, ours = result.read(tmp_path / "linear_training.json")["rows"]
    np.testing.assert_allclose(plain["first_loss"], np.log(50), rtol=0.1)
    assert ours["largest_gap"] <= 1e-4 and ours["last_loss"] < ours["first_loss"]
    printed = capsys.readouterr().out
    assert "products" in printed and "head small" in printed and "step_us" in printed


@pytest.mark.slow
def test_a_linear_loss_with_wrong_gradients_fails(parse, monkeypatch):
    def wrong(x, w, labels, **options):
        loss = jnp.mean(linear._plain(x, w, labels, jnp.float32))
        return jax.lax.stop_gradient(loss) + 0 * x.sum() * w.sum()

    monkeypatch.setattr(pallas_softmax, "linear_cross_entropy", wrong)
    loss = linear.Loss(40, "small", "float32", "mean", "both")
    *_, ours = linear.run_loss(loss, parse(linear, "--peers=", "--seconds=0", "--repeats=3"))
    assert ours.status == "FAILED" and "p50_us" not in ours.found and ours.fails


def test_heads_that_do_not_divide_the_width_are_refused(run_benchmark):
    with pytest.raises(SystemExit, match="--width=10 is not accepted; with --heads=3"):
        run_benchmark(programs, "--width=10", "--heads=3")
