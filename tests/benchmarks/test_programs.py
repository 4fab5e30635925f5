"""The benchmarks of accuracy, whole programs and projections on the CPU."""

import csv
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax
from benchmarks import accuracy, linear, programs
from benchmarks.support import flags

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax", "softmax,log_softmax"])
def test_accuracy_says_how_ours_compares(small, parse, monkeypatch, capsys, function):
    args = ["--shapes=20x300", "--implementations=xla,mosaic_gpu", "--direction=forward"]
    args += [f"--output_dir={small().output_dir}", f"--function={function}"]
    chosen = parse(accuracy, *args, "--dtype=float32,bfloat16")
    monkeypatch.setattr(flags, "read", lambda argv: chosen)
    assert accuracy.main([]) == 0
    with open(Path(small().output_dir) / "accuracy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(chosen.function) and {row["status"] for row in rows} == {"ok", "not run"}
    for row in rows:
        if row["contender"] == "xla":
            assert float(row["ulps"]) < (1 if row["dtype"] == "bfloat16" else 10)
            assert float(row["xla_ulps"]) < 20

    def off(x, axis, where, implementation):
        return jax.nn.softmax(x, axis=axis, where=where) * (1 + 2.0**-6)

    monkeypatch.setattr(pallas_softmax, "softmax", off)
    chosen = dataclasses.replace(chosen, function=("softmax",), dtype=("bfloat16",))
    assert accuracy.main([]) == 1
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
def test_programs_end_to_end(small, monkeypatch, capsys, every):
    chosen = small(
        sequence=(16,),
        vocab=(50,),
        tokens=32,
        heads=2,
        width=16,
        dtype=("bfloat16",),
        implementations=("auto", "mosaic_gpu"),
    )
    monkeypatch.setattr(flags, "read", lambda argv: chosen)
    todo = programs.make_programs(chosen)
    assert len(todo) == 6 * 2
    todo = [each for each in todo if each.remat == (each.program in ("block_where", "loss_take"))]
    todo = todo if every else [each for each in todo if each.program == "loss_take"]
    monkeypatch.setattr(programs, "make_programs", lambda chosen: todo)
    assert programs.main([]) == 0
    with open(Path(chosen.output_dir) / "programs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    fused = [row["program"] for row in rows if row["contender"] == "dot_product_attention"]
    assert fused == ([] if not every else ["attention", "attention_causal"])
    assert len(rows) == len(todo) * 3 + len(fused)
    for row in rows:
        if row["contender"] == "mosaic_gpu":
            assert row["status"] == "not run" and "mosaic_gpu" in row["reason"]
        else:
            assert row["status"] == "ok" and float(row["p50_us"]) > 0 and float(row["speedup"]) > 0
            assert float(row["error"]) <= programs.TOLERANCE["bfloat16"]
    losses = {row["loss"] for row in rows if row["program"].startswith("loss") and row["contender"] == "jax"}
    np.testing.assert_allclose([float(loss) for loss in losses], np.log(50), rtol=0.3)
    assert "1.00x" in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_with_wrong_gradients_fails(small, monkeypatch):
    monkeypatch.setattr(pallas_softmax, "logsumexp", lambda x, axis, where, implementation: jnp.max(x, axis))
    chosen = small(tokens=32, width=16, dtype=("float32",))
    program = programs.Program("loss_lse", 50, "float32", remat=True)
    reference, ours = programs.run_program(program, chosen)
    assert reference.status == "ok" and ours.status == "FAILED" and ours.p50_us is None and ours.fails


@pytest.mark.slow
def test_linear_end_to_end(small, monkeypatch, capsys):
    chosen = small(
        head=("small",),
        batch=(40,),
        vocab=(50,),
        tokens=32,
        width=16,
        training_steps=5,
        reduction=("mean", "none"),
        direction=("both",),
        dtype=("float32",),
        implementations=("auto", "mosaic_gpu"),
        peers=("jax_float32",),
    )
    monkeypatch.setattr(flags, "read", lambda argv: chosen)
    assert linear.main([]) == 0
    with open(Path(chosen.output_dir) / "linear.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == [
        "jax_scan",
        "matmul",
        "jax_float32",
        "auto",
        "mosaic_gpu",
    ] * 2
    for row in rows:
        if row["contender"] == "mosaic_gpu":
            assert row["status"] == "not run" and "mosaic_gpu" in row["reason"]
        else:
            assert row["status"] == "ok" and float(row["products"]) > 0
            assert row["contender"] == "matmul" or float(row["error"]) <= 1e-6
    with open(Path(chosen.output_dir) / "linear_training.csv", newline="") as file:
        plain, ours = csv.DictReader(file)
    np.testing.assert_allclose(float(plain["first_loss"]), np.log(50), rtol=0.1)
    assert float(ours["largest_gap"]) <= 1e-4 and float(ours["last_loss"]) < float(ours["first_loss"])
    assert "small [40, 64] @ [64, 1000]" in capsys.readouterr().out


@pytest.mark.slow
def test_a_linear_loss_with_wrong_gradients_fails(small, monkeypatch):
    def wrong(x, w, labels, reduction, implementation):
        return (
            jax.lax.stop_gradient(jnp.mean(linear._plain(x, w, labels, jnp.float32))) + 0 * x.sum() * w.sum()
        )

    monkeypatch.setattr(pallas_softmax, "linear_cross_entropy", wrong)
    loss = linear.Loss(40, "small", "float32", "mean", "both")
    *_, ours = linear.run_loss(loss, small(peers=(), implementations=("auto",)))
    assert ours.status == "FAILED" and ours.p50_us is None and ours.fails


def test_heads_that_do_not_divide_the_width_are_refused(small):
    with pytest.raises(SystemExit, match="--width=10 is not accepted; with --heads=3"):
        programs.make_programs(small(width=10, heads=3))
