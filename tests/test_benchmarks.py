"""The benchmarks end to end on the CPU: what they check, what they write, and when they fail."""

import csv
import dataclasses
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import types
import weakref
from pathlib import Path

import absl.flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.flags import IllegalFlagValueError, UnrecognizedFlagError
from jax import lax

import pallas_softmax
from benchmarks import __main__ as both
from benchmarks import accuracy, beam_search, linear, paper, programs, sample, sharded, softmax, topk
from benchmarks.support import answers, cases, driver, flags, plot, timing
from benchmarks.support.contenders import jax_call, prepare_jax
from benchmarks.support.flags import Settings
from benchmarks.support.report import Row
from tests.support.covering import first

ROOT = Path(__file__).parent.parent
COLUMNS = """benchmark batch vocab dtype function where axis k direction logits seed contender ours ran
    status reason rows_checked error_eps error_share_of_bound samples p20_us p50_us p80_us elements_per_s bytes
    tb_per_s share_of_copy share_of_read slowdown speedup first_result_s extra_mb fits_cache explain copy_tb_per_s
    device driver jax jaxlib numpy python commit date command""".split()


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Settings of a quick run in this process: no peers, no picture, and no measuring of the bandwidths."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e10)
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 8e9)
    for module in (softmax, topk):
        blind = dataclasses.replace(module.BENCHMARK, draw=lambda *args: None)
        monkeypatch.setattr(module, "BENCHMARK", blind)

    def make(**changed):
        quick = {"batch": (6,), "vocab": (40,), "repeats": 3, "seconds": 0.0, "peers": ()}
        quick["output_dir"] = str(tmp_path)
        return Settings(**(quick | changed))

    return make


def case_of(**changed) -> cases.Case:
    """A case of 6 x 40 float32, forward."""
    usual = {"batch": 6, "vocab": 40, "dtype": "float32", "function": "softmax", "where": "none", "axis": -1}
    usual |= {"k": None, "direction": "forward", "logits": "normal", "seed": 0}
    return cases.Case(**(usual | changed))


def rows_of(chosen: Settings, name: str) -> dict[str, dict]:
    """The rows of a run's JSON by contender (the last case wins)."""
    document = json.loads((Path(chosen.output_dir) / f"{name}.json").read_text())
    return {row["contender"]: row for row in document["rows"]}


def assert_smoke(directory: Path, printed: str):
    """The files and the text of `python -m benchmarks` on 64 rows, in which all of ours is right."""
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


# These reach the code of every direction and dtype; the smoke test above has float32 and forward.
@pytest.mark.slow
@pytest.mark.parametrize(("direction", "dtype"), list(itertools.product(flags.DIRECTIONS, flags.DTYPES)))
def test_every_direction_and_dtype_passes(small, direction, dtype):
    chosen = small(dtype=(dtype,), direction=(direction,), logits=("peaked",))
    assert driver.run(softmax.BENCHMARK, chosen) == 0
    assert driver.run(topk.BENCHMARK, chosen) == 0


def assert_masks_and_axes(chosen: Settings, benchmark: driver.Benchmark, count: int):
    """All but torch's are right in so many cases; torch's says where it has no mask."""
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
)  # test_the_oracle_knows_every_function refuses the same results
def test_wrong_results_fail_the_run(small, monkeypatch, capsys, function, direction):
    # one part in a thousand off, in the output and so in the gradient
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


def test_what_cannot_run_is_a_row_that_says_so(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if not installed
    chosen = small(implementations=("auto", "mosaic_gpu"), peers=("torch",))
    for benchmark in (softmax.BENCHMARK, topk.BENCHMARK):
        assert driver.run(benchmark, chosen) == 0
        rows = rows_of(chosen, benchmark.name)
        assert rows["auto"]["status"] == "ok"
        assert rows["mosaic_gpu"]["status"] == "not run" and "mosaic_gpu" in rows["mosaic_gpu"]["reason"]
        assert rows["torch"]["status"] == "not run" and "torch" in rows["torch"]["reason"]


def test_quack_runs_where_it_is_and_can(small, monkeypatch):
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


def test_an_option_that_xla_does_not_know_is_a_row_that_says_so(small):
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


def test_bad_logits_are_checked_and_held_against_normal_ones(small, capsys):
    chosen = small(logits=("normal", "nan", "neg_inf"), k=(30,))
    assert driver.run(topk.BENCHMARK, chosen) == 0
    normal, *bad = json.loads((Path(chosen.output_dir) / "topk.json").read_text())["rows"]
    assert normal["slowdown"] is None and "slowdown" in capsys.readouterr().out
    for row in bad:
        np.testing.assert_allclose(row["slowdown"], row["p50_us"] / normal["p50_us"])


@pytest.mark.slow
def test_other_logits_alone_are_held_against_nothing(small, capsys):
    assert driver.run(topk.BENCHMARK, small(logits=("nan",))) == 0
    assert "slowdown" not in capsys.readouterr().out


def test_a_call_that_raises_keeps_nothing_alive():
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


def test_figure_flags_are_the_figures_of_the_paper(parse):
    for number, (batch, longest) in enumerate([(4000, 1032192), (10, 8257536)] * 2, start=1):
        chosen = parse(paper, f"--flagfile={ROOT}/configs/figure{number}.flags")
        found = paper.benchmark(chosen).cases(chosen)
        assert [case.vocab for case in found] == [63 * 2**i for i in range(len(found))]
        assert found[-1].vocab == longest
        assert {(case.batch, case.k, case.logits) for case in found} == {
            (batch, None if number < 3 else 5, "uniform")
        }
        wanted = flags.SOFTMAX_ALGORITHMS if number < 3 else flags.TOPK_ALGORITHMS
        assert chosen.algorithms == wanted and "quack" in chosen.peers
    chosen = parse(paper, f"--flagfile={ROOT}/configs/k_sweep.flags")
    found = [(case.batch, case.vocab, case.k) for case in paper.benchmark(chosen).cases(chosen)]
    assert found == [(4000, 25000, k) for k in (5, 10, 15, 30, 64, 128)]


def test_the_picture_has_every_row(tmp_path):
    rows = [
        Row("topk", case_of(k=k), name, ours=name == "auto", status=status, share_of_copy=share)
        for k in (5, 64)
        for name, status, share in (("auto", "ok", 0.9), ("torch", "differs", 0.1), ("jax", "not run", None))
    ]
    plot.draw(tmp_path / "topk.png", rows, {"copy": 3e12, "read": 3.2e12}, {"device": "a GPU", "jax": "1"})
    assert (tmp_path / "topk.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_memory_is_a_row_that_says_so(small, monkeypatch):
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


def test_k_beyond_the_row_is_refused(small):
    with pytest.raises(SystemExit, match="k=41, from --k or --shapes, is more than the row length V=40"):
        driver.run(topk.BENCHMARK, small(k=(5, 41)))
    with pytest.raises(SystemExit, match="k=41"):
        driver.run(topk.BENCHMARK, small(shapes=((6, 40), (6, 40, 41))))


def test_lists_and_flag_files_become_settings(parse):
    assert parse(softmax, "--batch=1,2,1", "--dtype=float16", "--seconds=3", "--peers=") == Settings(
        batch=(1, 2), dtype=("float16",), seconds=3.0, peers=()
    )


BINARIES = {
    "benchmarks": both,
    "benchmarks.accuracy": accuracy,
    "benchmarks.beam_search": beam_search,
    "benchmarks.linear": linear,
    "benchmarks.paper": paper,
    "benchmarks.programs": programs,
    "benchmarks.sample": sample,
    "benchmarks.sharded": sharded,
    "benchmarks.softmax": softmax,
    "benchmarks.topk": topk,
}
INPUT = {"batch", "vocab", "shapes", "dtype", "logits", "seed"}
CALL = {"direction", "implementations"}
SAMPLING = {"repeats", "seconds"}
OUTPUT = {"output_dir", "commit"}
FLAGS = {
    "benchmarks.accuracy": INPUT | CALL | OUTPUT | {"function", "where", "axis"},
    "benchmarks.beam_search": SAMPLING
    | OUTPUT
    | {
        "batch",
        "k",
        "vocab",
        "sequence",
        "tokens",
        "width",
        "training_steps",
        "dtype",
        "implementations",
        "seed",
    },
    "benchmarks.linear": SAMPLING
    | CALL
    | OUTPUT
    | {"head", "batch", "reduction", "dtype", "peers", "training_steps", "tokens", "width", "vocab", "seed"},
    "benchmarks.paper": (INPUT - {"dtype"})
    | SAMPLING
    | OUTPUT
    | {"k", "algorithms", "implementations", "peers"},
    "benchmarks.programs": SAMPLING
    | OUTPUT
    | {"programs", "sequence", "vocab", "tokens", "heads", "width", "dtype", "implementations", "seed"},
    "benchmarks.sample": INPUT | SAMPLING | OUTPUT | {"filters", "implementations", "peers"},
    "benchmarks.sharded": (INPUT - {"logits"})
    | SAMPLING
    | OUTPUT
    | {"k", "sharding", "devices", "axis_type"},
    "benchmarks.softmax": INPUT | CALL | SAMPLING | OUTPUT | {"function", "where", "axis", "peers"},
    "benchmarks.topk": INPUT | CALL | SAMPLING | OUTPUT | {"k", "peers"},
}
FLAGS["benchmarks"] = FLAGS["benchmarks.softmax"] | FLAGS["benchmarks.topk"]
FLAG_FILES = sorted((ROOT / "configs").glob("*.flags"))


def test_every_benchmark_is_a_binary():
    files = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "__main__"}
    assert {f"benchmarks.{name}" for name in files} | {"benchmarks"} == set(BINARIES) == set(FLAGS)


@pytest.mark.parametrize("name", BINARIES)
def test_a_binary_has_its_own_flags_alone(parse, monkeypatch, name):
    binary = BINARIES[name]
    monkeypatch.setattr(flags, "read", lambda argv: flags.defined())
    assert set(parse(binary)) == FLAGS[name]
    # absl lists under --help what the binary itself defines
    monkeypatch.setattr(
        flags, "read", lambda argv: absl.flags.FLAGS.get_key_flags_for_module(binary.__name__)
    )
    assert {flag.name for flag in parse(binary)} == FLAGS[name]
    fields = {field.name for field in dataclasses.fields(Settings)}
    for unknown in sorted(fields - FLAGS[name]):
        with pytest.raises(UnrecognizedFlagError, match=unknown):
            parse(binary, f"--{unknown}=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", BINARIES)
def test_help_lists_the_flags_of_the_binary(name):
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not done.stderr  # as absl ends it
    assert set(re.findall(r"^  --(?:\[no\])?(\w+):", done.stdout, re.MULTILINE)) == FLAGS[name]


@pytest.mark.parametrize("file", FLAG_FILES, ids=lambda file: file.stem)
def test_flag_files_are_accepted_by_the_binary_that_they_name(parse, monkeypatch, file):
    text = file.read_text()
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    (name,) = re.findall(rf"python -m (\S+) --flagfile=configs/{file.name}(?!\S)", comment)
    chosen = parse(BINARIES[name], f"--flagfile={file}")
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    todo = {
        "benchmarks.beam_search": beam_search.make_searches,
        "benchmarks.linear": linear.make_losses,
        "benchmarks.paper": lambda chosen: paper.benchmark(chosen).cases(chosen),
        "benchmarks.programs": programs.make_programs,
        "benchmarks.sample": sample.make_draws,
        "benchmarks.sharded": sharded.make_layouts,
        "benchmarks.topk": topk.BENCHMARK.cases,
    }.get(name, cases.make_cases)
    assert todo(chosen)
    if name == "benchmarks":
        assert topk.BENCHMARK.cases(chosen)


def test_targets_flags_are_the_table_of_targets(parse):
    chosen = parse(softmax, f"--flagfile={ROOT}/configs/targets.flags")
    found = {(case.batch, case.vocab, case.dtype, case.direction) for case in cases.make_cases(chosen)}
    assert len(found) == 7 * 2 * 2
    assert {(4000, 50257, "bfloat16", "backward"), (1024, 262144, "float32", "forward")} <= found


def test_a_shape_may_have_its_own_k(parse):
    chosen = parse(both, "--shapes=4x10,2x30x20,2x30x7", "--k=3,5", "--dtype=float32,float16")
    found = [(case.batch, case.k, case.short_dtype) for case in cases.make_cases(chosen, chosen.k)]
    assert found == [
        *[(4, 3, "f32"), (4, 5, "f32"), (4, 3, "f16"), (4, 5, "f16")],
        *[(2, 20, "f32"), (2, 20, "f16"), (2, 7, "f32"), (2, 7, "f16")],
    ]
    assert [case.batch for case in cases.make_cases(chosen)] == [4, 4, 2, 2]


def test_topk_flags_are_the_table_of_targets(parse):
    def found(name):
        chosen = parse(topk, f"--flagfile={ROOT}/configs/{name}.flags")
        return {(case.batch, case.vocab, case.dtype, case.k) for case in cases.make_cases(chosen, chosen.k)}

    targets = found("topk_targets")
    assert len(targets) == 12 * 2 and (1, 128256, "bfloat16", 64) in targets
    assert {k for *_, k in found("topk_sweep")} >= {1, 64, 1024, 2048}
    assert {(100000, 8, "float32", 2), (4000, 50257, "bfloat16", 64)} <= found("topk_shapes")
    assert parse(topk, f"--flagfile={ROOT}/configs/topk_worst.flags").logits == tuple(flags.LOGITS)


def test_shapes_replace_batch_and_vocab(parse):
    chosen = parse(
        softmax, "--batch=7", "--vocab=9", "--shapes=4x10,2x3,4x10", "--function=logsumexp", "--axis=-1,0"
    )
    found = cases.make_cases(chosen)
    shapes = [(case.batch, case.vocab, case.axis) for case in found]
    assert shapes == [(4, 10, -1), (4, 10, 0), (2, 3, -1), (2, 3, 0)]
    assert [case.label for case in found[:2]] == [
        "4x10 f32 logsumexp forward normal",
        "4x10 f32 logsumexp forward normal axis=0",
    ]


def test_topk_runs_as_if_function_where_and_axis_were_not_given(small):
    chosen = small(function=("logsumexp", "softmax"), where=("full", "rows"), axis=(0, -1))
    assert driver.run(topk.BENCHMARK, chosen) == 0
    (row,) = json.loads((Path(chosen.output_dir) / "topk.json").read_text())["rows"]
    assert (row["function"], row["where"], row["axis"], row["k"]) == ("softmax", "none", -1, 5)


@pytest.mark.parametrize(
    "case, least",
    [
        ({}, 6 * 40 * 4 * 2),
        ({"direction": "backward"}, 6 * 40 * 4 * 3),
        ({"function": "log_softmax", "direction": "both", "dtype": "bfloat16"}, 6 * 40 * 2 * 5),
        ({"function": "logsumexp"}, 6 * (40 + 1) * 4),
        ({"function": "logsumexp", "direction": "backward"}, 6 * (2 * 40 + 2) * 4),
        ({"where": "full"}, 6 * 40 * (4 * 2 + 1)),
        ({"where": "vocab", "direction": "both"}, 6 * 40 * 4 * 5 + 40),
        ({"where": "rows"}, 6 * 40 * 4 * 2 + 6),
        ({"k": 5}, 6 * (40 * 4 + 5 * 8)),
    ],
)
def test_least_bytes(case, least):
    assert case_of(**case).least_bytes == least


def test_large_cases_are_checked_on_first_last_and_random_rows():
    assert list(case_of(batch=4096, vocab=2**21).checked_rows) == [0, 4095]
    rows = case_of(batch=4096, vocab=2**15).checked_rows
    assert len(rows) == len(set(rows)) == 32 and rows[0] == 0 and rows[-1] == 4095


def test_masks_have_their_shapes_and_share():
    full = np.asarray(cases.mask(case_of(batch=100, vocab=500, where="full")))
    assert full.shape == (100, 500) and 0.68 < full.mean() < 0.72
    np.testing.assert_array_equal(cases.mask(case_of(batch=100, vocab=500, where="full", axis=0)), full.T)
    shapes = {("vocab", -1): (500,), ("vocab", 0): (500, 1), ("rows", -1): (100, 1), ("rows", 0): (1, 100)}
    for (where, axis), shape in shapes.items():
        found = cases.mask(case_of(batch=100, vocab=500, where=where, axis=axis))
        assert found is not None and found.shape == shape
    assert cases.mask(case_of()) is None


@pytest.mark.parametrize(
    "binary, flag, accepted",
    [
        (softmax, "--batch=0", "positive integers"),
        (softmax, "--vocab=10,ten", "positive integers"),
        (topk, "--k=-1", "positive integers"),
        (softmax, "--dtype=float8", "float32, bfloat16, float16"),
        (softmax, "--direction=sideways", "forward, backward, both"),
        (softmax, "--function=sparsemax", "softmax, log_softmax, logsumexp"),
        (softmax, "--where=some", "none, full, vocab, rows"),
        (softmax, "--axis=1", "-1, 0"),
        (softmax, "--shapes=10x20,10x", "BATCHxV"),
        (softmax, "--shapes=0x20", "BATCHxV"),
        (softmax, "--shapes=10x20x5", "BATCHxV"),
        (topk, "--shapes=10x20x0", "BATCHxVxK"),
        (topk, "--shapes=10x20x5x1", "BATCHxVxK"),
        (programs, "--sequence=0", "positive integers"),
        (softmax, "--implementations=cuda", "auto, mosaic_gpu, triton, xla"),
        (softmax, "--peers=jax_stable", "jax, torch, quack"),
        (topk, "--peers=jax", "jax_stable, jax_unstable, jax_raft, torch, quack"),
        (both, "--peers=numpy", "jax, torch, quack, jax_stable, jax_unstable, jax_raft"),
        (paper, "--algorithms=safe,fast", "naive, safe, online, topk, safe_unfused"),
        (paper, "--algorithms=naive,topk", "some of either naive, safe, online or topk, safe_unfused"),
        (softmax, "--logits=missing.npy", "one_finite, nan and paths of existing .npy files"),
        (softmax, "--repeats=0", "positive"),
        (softmax, "--dtype=", "float32, bfloat16, float16"),
        (beam_search, "--training_steps=0", "positive"),
    ],
)
def test_bad_values_are_refused_by_name(parse, binary, flag, accepted):
    name, value = flag.split("=")
    with pytest.raises(IllegalFlagValueError) as refused:
        parse(binary, flag)
    message = str(refused.value)
    assert name.removeprefix("--") in message and value.split(",")[-1] in message and accepted in message


def test_words_that_are_no_flags_are_refused(parse):
    with pytest.raises(SystemExit, match="not a flag: 128"):
        parse(softmax, "--batch=64", "128")


@jax.jit
def _of_jax(x, g):
    """Softmax, the indices of the 7 largest, and the gradient of the probabilities there."""
    _, indices = lax.top_k(x, 7)
    _, pull = jax.vjp(lambda x: jnp.take_along_axis(jax.nn.softmax(x), indices, -1), x)
    return jax.nn.softmax(x), indices, pull(g)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(
            kind, marks=[] if kind in ("peaked", "ties", "neg_inf", "one_finite", "nan") else pytest.mark.slow
        )
        for kind in flags.LOGITS
    ],
)
def test_the_oracle_agrees_with_jax(logits):
    case = case_of(batch=5, vocab=300, k=7, direction="both", logits=logits, seed=1)
    x, g = cases.logits(case), cases.cotangent(case)
    answer = answers.Answer(np.asarray(x), np.asarray(g), k=case.k)
    y, indices, dx = map(np.asarray, _of_jax(x, g))
    np.testing.assert_allclose(answer.output.want, y, rtol=1e-4, atol=1e-37)
    np.testing.assert_array_equal(answer.indices, indices)
    assert answer.check_gradient(dx).ok
    assert answer.check_gradient(1.001 * dx).ok == (logits in ("neg_inf", "nan", "one_finite"))  # NaN or 0


@pytest.mark.parametrize(
    ("function", "where"), first(1, list(itertools.product(flags.FUNCTIONS, ["full", "none"])))
)
def test_the_oracle_knows_every_function(function, where):
    case = case_of(batch=5, vocab=300, function=function, where=where, direction="both", logits="peaked")
    x, g, mask = cases.logits(case), cases.cotangent(case), cases.mask(case)
    kept = None if mask is None else np.asarray(mask)
    answer = answers.Answer(np.asarray(x), np.asarray(g), function, mask=kept)

    @jax.jit  # one compilation in place of one for each of its steps
    def theirs(x, g):
        y, pull = jax.vjp(lambda x: getattr(jax.nn, function)(x, axis=-1, where=mask), x)
        return y, pull(g)[0], getattr(jax.nn, function)(x, axis=-1)

    y, dx, unmasked = map(np.asarray, theirs(x, g))
    np.testing.assert_allclose(
        y, answer.output.want, rtol=1e-4, atol=1e-6 if function == "log_softmax" else 1e-37
    )
    assert answer.check_output(y).ok and answer.check_gradient(dx).ok
    assert not answer.check_output(1.001 * y).ok and not answer.check_gradient(1.001 * dx).ok
    if mask is not None:  # what is masked must not leak
        assert not answer.check_output(unmasked).ok


@pytest.mark.parametrize(
    "function, nothing", [("softmax", 0), ("log_softmax", -np.inf), ("logsumexp", -np.inf)]
)
def test_the_oracle_of_a_masked_row(function, nothing):
    x, mask = np.ones((1, 4), np.float32), np.zeros((1, 4), bool)
    answer = answers.Answer(x, np.ones(1 if function == "logsumexp" else (1, 4)), function, mask=mask)
    np.testing.assert_array_equal(answer.output.want, np.full(answer.output.want.shape, nothing))
    assert answer.check_output(answer.output.want).ok
    assert not answer.check_output(np.full_like(answer.output.want, 0.5)).ok
    assert not answer.check_output(np.full_like(answer.output.want, np.nan)).ok
    assert answer.check_gradient(np.zeros((1, 4))).ok
    assert not answer.check_gradient(np.full((1, 4), np.nan)).ok


def test_ulps():
    found = answers.ulp(np.array([1.0, 1.99, -2.0, 0.0]), np.dtype("float32"))
    np.testing.assert_array_equal(found, [2.0**-23, 2.0**-23, 2.0**-22, 2.0**-126])
    found = answers.ulp(np.array([1.0, 2.0**-20]), np.dtype("float16"))
    np.testing.assert_array_equal(found, [2.0**-10, 2.0**-24])
    for dtype in flags.DTYPES:
        size = np.array([0.3, 7.0, 1000.0])
        spacing = [float(jnp.nextafter(v, jnp.inf) - v) for v in jnp.asarray(size, dtype)]
        np.testing.assert_array_equal(answers.ulp(size, jnp.dtype(dtype)), spacing)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["softmax", pytest.param("softmax,log_softmax", marks=pytest.mark.slow)])
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
def test_what_is_worse_than_xla(ulps, xla, dtype, expected):
    assert accuracy.worse(ulps, xla, dtype) == expected


@pytest.mark.parametrize(
    "every",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.slow)],
    ids=["one_loss", "every_program"],
)
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


def test_the_oracle_orders_special_values_as_top_k():
    x = np.array([[0.0, -0.0, np.nan, -np.inf, np.inf, 1.0, 1.0, -np.nan]], np.float32)
    order = [2, 4, 5, 6, 0, 1, 3, 7]
    for k in range(1, 9):
        np.testing.assert_array_equal(answers.Answer(x, None, k=k).indices, [order[:k]])


def test_the_oracle_of_winners_that_may_tie():
    x = np.array([[1.0, 2.0, 1.0, 0.0, 2.0 + 2.0**-22]], np.float32)
    answer = answers.Answer(x, None, k=3)
    np.testing.assert_array_equal(answer.indices, [[4, 1, 0]])
    for got, stable, unstable in [
        ([4, 1, 0], True, True),
        ([4, 1, 2], False, True),
        ([1, 4, 0], False, True),  # of probabilities that rounding may make equal
        ([4, 4, 0], False, False),
        ([4, 1, 3], False, False),
    ]:
        assert answer.check_indices(np.array([got])).ok == stable
        assert answer.check_indices(np.array([got]), stable=False).ok == unstable
    assert answer.check_logits(x[:, [4, 1, 0]]).ok and not answer.check_logits(x[:, [1, 1, 0]]).ok


def drawn(logits, dtype="float32"):
    """Four rows of a kind of logits, as float32."""
    return np.asarray(cases.logits(case_of(batch=4, vocab=50_000, dtype=dtype, logits=logits)), np.float32)


def test_logits_are_the_same_numbers_in_every_dtype():
    normal = drawn("normal")
    np.testing.assert_allclose(drawn("normal", "bfloat16"), normal, rtol=2**-8)  # not another, coarser draw
    assert len(np.unique(normal)) > 100_000


@pytest.mark.slow
def test_logits_have_the_promised_distributions():
    assert 40 < np.abs(drawn("peaked")).max() < 120
    assert len(np.unique(drawn("ties"))) < 15
    assert len(np.unique(drawn("close"))) > 4000 and (drawn("close", "bfloat16") == 1).all()
    assert len(np.unique(drawn("quantized"))) < 2000
    assert (np.isfinite(drawn("one_finite")).sum(axis=1) == 1).all()
    ascending = drawn("ascending")
    assert (np.diff(ascending) > 0).all() and -4 <= ascending.min() and ascending.max() < 4
