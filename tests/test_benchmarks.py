"""The benchmarks end to end on the CPU: what they check, what they write, and when they fail."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from jax import lax

import pallas_softmax
from benchmarks import cases, oracle, run, settings, softmax, timing, topk
from benchmarks.settings import Settings

ROOT = Path(__file__).parent.parent
COLUMNS = """benchmark batch vocab dtype k direction logits seed contender ours ran status reason
    rows_checked error_eps error_share_of_bound samples p20_us p50_us p80_us bytes tb_per_s
    share_of_copy speedup fits_cache explain copy_tb_per_s device driver jax jaxlib numpy python
    commit date command""".split()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Settings of a quick run in this process, without the copy measurement."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e10)

    def make(**changed):
        quick = {"batch": (6,), "vocab": (40,), "repeats": 3, "seconds": 0.0, "output_dir": str(tmp_path)}
        return Settings(**(quick | changed))

    return make


def rows_of(chosen: Settings, name: str) -> dict[str, dict]:
    """The rows of a run's JSON by contender (the last case wins)."""
    document = json.loads((Path(chosen.output_dir) / f"{name}.json").read_text())
    return {row["contender"]: row for row in document["rows"]}


def test_smoke_flags_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--flagfile=configs/smoke.flags"]
    command += [f"--output_dir={tmp_path}", "--vocab=1000", "--seconds=0", "--repeats=3"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for name in ("softmax", "topk"):
        assert f"{name} on " in done.stdout
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == COLUMNS
        ours = [row for row in rows if row["ours"] == "True"]
        assert ours and all(row["status"] == "ok" and row["ran"] == "xla" for row in ours)
        assert all(row["explain"] for row in ours)
        for row in ours:
            assert float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
            assert int(row["samples"]) >= 3 and int(row["rows_checked"]) == 64
            rate = int(row["bytes"]) / float(row["p50_us"]) / 1e6
            np.testing.assert_allclose(float(row["tb_per_s"]), rate)
        document = json.loads((tmp_path / f"{name}.json").read_text())
        assert document["flags"]["batch"] == [64]
        assert {"device", "jax", "commit", "date", "command"} <= set(document["environment"])
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_direction_and_dtype_passes(small):
    chosen = small(
        dtype=settings.DTYPES,
        direction=settings.DIRECTIONS,
        logits=("peaked",),
        implementations=("auto",),
        peers=(),
    )
    assert run.run(softmax.BENCHMARK, chosen) == 0
    assert run.run(topk.BENCHMARK, chosen) == 0


@pytest.mark.parametrize("direction", settings.DIRECTIONS)
def test_wrong_softmax_fails_the_run(small, monkeypatch, capsys, direction):
    # one part in a thousand off, in the output and so in the gradient
    monkeypatch.setattr(pallas_softmax, "softmax", lambda x, implementation: 1.001 * jax.nn.softmax(x))
    chosen = small(direction=(direction,))
    assert run.run(softmax.BENCHMARK, chosen) == 1
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "FAILED" and row["p50_us"] is None
    assert "FAILED" in capsys.readouterr().out


def test_wrong_order_of_ties_fails_the_run(small, monkeypatch):
    def last_index_first(x, k, implementation):
        values, indices = lax.top_k(jax.nn.softmax(x)[:, ::-1], k)
        return values, x.shape[-1] - 1 - indices

    monkeypatch.setattr(pallas_softmax, "fused_topk", last_index_first)
    assert run.run(topk.BENCHMARK, small(logits=("normal",))) == 0
    chosen = small(logits=("ties",))
    assert run.run(topk.BENCHMARK, chosen) == 1
    assert "indices of" in rows_of(chosen, "topk")["auto"]["reason"]


def test_a_wrong_peer_is_shown_but_does_not_fail_the_run(small, monkeypatch):
    monkeypatch.setattr(softmax, "_jax", lambda x: (x, None))
    chosen = small()
    assert run.run(softmax.BENCHMARK, chosen) == 0
    rows = rows_of(chosen, "softmax")
    assert rows["jax"]["status"] == "differs" and rows["auto"]["status"] == "ok"


def test_an_exception_of_ours_fails_the_run(small, monkeypatch):
    def broken(x, implementation):
        raise KeyError("no such kernel")

    monkeypatch.setattr(pallas_softmax, "softmax", broken)
    chosen = small()
    assert run.run(softmax.BENCHMARK, chosen) == 1
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "error" and "KeyError: 'no such kernel'" in row["reason"]


def test_what_cannot_run_is_a_row_that_says_so(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if not installed
    chosen = small(implementations=("auto", "mosaic_gpu"), peers=("jax", "jax_stable", "torch"))
    for benchmark in (softmax.BENCHMARK, topk.BENCHMARK):
        assert run.run(benchmark, chosen) == 0
        rows = rows_of(chosen, benchmark.name)
        assert rows["auto"]["status"] == "ok"
        assert rows["mosaic_gpu"]["status"] == "not run" and "mosaic_gpu" in rows["mosaic_gpu"]["reason"]
        assert rows["torch"]["status"] == "not run" and "torch" in rows["torch"]["reason"]


def test_too_little_memory_is_a_row_that_says_so(small, monkeypatch):
    monkeypatch.setattr(run, "_memory", lambda: 100)
    chosen = small()
    assert run.run(softmax.BENCHMARK, chosen) == 0
    row = rows_of(chosen, "softmax")["auto"]
    assert row["status"] == "not run" and "memory" in row["reason"]


def test_nothing_is_timed_under_another_name(small, monkeypatch):
    plain = pallas_softmax.softmax
    monkeypatch.setattr(pallas_softmax, "softmax", lambda x, implementation: plain(x))
    chosen = small(implementations=("mosaic_gpu",))
    assert run.run(softmax.BENCHMARK, chosen) == 1
    assert "asked for mosaic_gpu, explained as {'xla'}" in rows_of(chosen, "softmax")["mosaic_gpu"]["reason"]


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
    answer = oracle.Answer(np.asarray(x), np.ones((4, 2)), "float32", 2)
    np.testing.assert_array_equal(answer.indices, [[0, 1], [7, 0], [0, 1], [0, 1]])
    assert run.run(topk.BENCHMARK, chosen) == 0
    assert rows_of(chosen, "topk")["auto"]["batch"] == 6


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int64), np.float32(1), np.zeros((0, 3))])
def test_unusable_files_are_refused(small, tmp_path, array):
    path = tmp_path / "logits.npy"
    np.save(path, array)
    with pytest.raises(SystemExit, match="--logits=.*logits.npy"):
        run.run(softmax.BENCHMARK, small(logits=(str(path),)))


def test_k_beyond_the_row_is_refused(small):
    with pytest.raises(SystemExit, match="--k=41 is more than the row length V=40"):
        run.run(topk.BENCHMARK, small(k=(5, 41)))


@pytest.fixture
def parse():
    """Parses a command line; the flags are as before at the end."""
    if "batch" not in flags.FLAGS:
        settings.define()
    with flagsaver.flagsaver():
        yield lambda *args: settings.from_flags(flags.FLAGS(["benchmarks", *args]))


def test_lists_and_flag_files_become_settings(parse):
    assert parse("--batch=1,2,1", "--dtype=float16", "--seconds=3") == Settings(
        batch=(1, 2), dtype=("float16",), seconds=3.0
    )


@pytest.mark.parametrize("name", ["smoke", "h100", "llm_vocab"])
def test_flag_files_are_accepted(parse, name):
    chosen = parse(f"--flagfile={ROOT}/configs/{name}.flags")
    assert cases.make_cases(chosen, chosen.k)


@pytest.mark.parametrize(
    "flag, accepted",
    [
        ("--batch=0", "positive integers"),
        ("--vocab=10,ten", "positive integers"),
        ("--k=-1", "positive integers"),
        ("--dtype=float8", "float32, bfloat16, float16"),
        ("--direction=sideways", "forward, backward, both"),
        ("--implementations=cuda", "auto, mosaic_gpu, triton, xla"),
        ("--peers=numpy", "jax, jax_stable, jax_unstable, torch"),
        ("--logits=missing.npy", "normal, peaked, ties and paths of existing .npy files"),
        ("--repeats=0", "positive"),
        ("--dtype=", "float32, bfloat16, float16"),
    ],
)
def test_bad_values_are_refused_by_name(parse, flag, accepted):
    name, value = flag.split("=")
    with pytest.raises(flags.IllegalFlagValueError) as refused:
        parse(flag)
    message = str(refused.value)
    assert name in message and value.split(",")[-1] in message and accepted in message


def test_words_that_are_no_flags_are_refused(parse):
    with pytest.raises(SystemExit, match="not a flag: 128"):
        parse("--batch=64", "128")


@pytest.mark.parametrize("logits", settings.LOGITS)
def test_the_oracle_agrees_with_jax(logits):
    case = cases.Case(5, 300, "float32", 7, "both", logits, seed=1)
    x, g = cases.logits(case), cases.cotangent(case)
    answer = oracle.Answer(np.asarray(x), np.asarray(g), case.dtype, case.k)
    np.testing.assert_allclose(answer.y, jax.nn.softmax(x), rtol=1e-4, atol=1e-37)
    assert answer.indices is not None
    np.testing.assert_array_equal(answer.indices, lax.top_k(x, 7)[1])
    _, pull = jax.vjp(lambda x: jnp.take_along_axis(jax.nn.softmax(x), answer.indices, -1), x)
    dx = np.asarray(pull(g)[0])
    assert answer.check_gradient(dx, None).ok
    assert not answer.check_gradient(1.001 * dx, None).ok


def test_the_oracle_orders_special_values_as_top_k():
    x = np.array([[0.0, -0.0, np.nan, -np.inf, np.inf, 1.0, 1.0, -np.nan]], np.float32)
    np.testing.assert_array_equal(oracle.top_indices(x, 8), lax.top_k(x, 8)[1])


def test_logits_have_the_promised_distributions():
    def draw(logits, dtype):
        return np.asarray(cases.logits(cases.Case(4, 50_000, dtype, None, "forward", logits, 0)), np.float32)

    assert 40 < np.abs(draw("peaked", "float32")).max() < 120
    assert len(np.unique(draw("ties", "float32"))) < 15
    # the same numbers in 16 bits, rounded: not another, coarser draw
    np.testing.assert_allclose(draw("normal", "bfloat16"), draw("normal", "float32"), rtol=2**-8)
