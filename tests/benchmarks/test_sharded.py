"""The benchmark of several devices: its reading of compiled programs, measurements, output and predictions."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import sharded
from benchmarks.support import links, result, traces
from benchmarks.support.links import Collective

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def on_eight_devices(*command):
    """Runs Python in a process with eight CPU devices, because their number must be set before JAX starts."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_on_eight_devices():
    done = on_eight_devices("tests/programs/sharded_benchmark_checks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    failures = [f"{name}: {outcome}" for name, outcome in report.items() if outcome != "ok"]
    assert len(report) == 16 and not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("bf16[64]{0} all-gather(%p), replica_groups={{0,1},{2,3}}", ("all-gather", 128, 2)),
        (
            "((f32[4]{0}, s32[2]{0}), (f32[32]{0}, s32[16]{0})) all-gather-start(%p, %q), replica_groups=[1,8]<=[8]",
            ("all-gather", 192, 8),
        ),
        ("s4[3]{0} all-gather(%p), replica_groups={}", ("all-gather", 2, 8)),
        ("f32[<=8]{0} all-gather(%p), replica_groups={{0},{1,2}}", ("all-gather", 32, 2)),
        ("f32[] all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", ("all-reduce", 4, 2)),
        (
            "(f32[2,3]{1,0:T(8,128)S(1)}, /*index=1*/bf16[5]{0}) all-reduce-start(%p, %q), replica_groups={{0,1}}",
            ("all-reduce", 34, 2),
        ),
        (
            "((f32[6]{0}), f32[6]{0}, u32[]) all-reduce-start(%p), replica_groups={{0,1}}",
            ("all-reduce", 24, 2),
        ),
        ("f32[2]{0} all-reduce(%p), replica_groups=mesh['b'=2,'v'=4] {'b','v'}", ("all-reduce", 8, 8)),
        ("f32[2]{0} all-reduce(%p), replica_groups=mesh['d'=8] {'d':(2)4}, x=1", ("all-reduce", 8, 4)),
        ("f64[3]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}", ("reduce-scatter", 96, 4)),
        (
            "pred[7]{0} collective-permute(%p), source_target_pairs={{0,1},{2,0}}",
            ("collective-permute", 7, 2),
        ),
    ],
)
def test_collectives_are_read(line, expected):
    text = f"HloModule jit_f, is_scheduled=true, num_partitions=8\n\n  ROOT %found.1 = {line}\n"
    assert links.collectives(text) == [Collective(*expected)]


def test_other_operations_are_skipped():
    text = """HloModule jit_f, replica_count=1, num_partitions=4
  %done = f32[8]{0} all-gather-done(%all-gather-start)
  %all-reduce.2 = f32[4]{0} fusion(%p), metadata={op_name="a = f32[4] all-reduce(x)"}
  %x = f32[4]{0} ragged-all-to-all(%p), replica_groups={{0,1}}
  %found = f32[4]{0} all-reduce(%p), replica_groups={}
"""
    assert links.collectives(text) == [Collective("all-reduce", 16, 4)]
    with pytest.raises(ValueError, match="groups cannot be read"):
        links.collectives("  %a = f32[4]{0} all-reduce(%p), replica_groups=torus")


def test_bytes_that_a_device_receives():
    received = {kind: Collective(kind, 100, 4).received for kind in links.KINDS.split("|")}
    assert received == {"all-gather": 75, "all-reduce": 150, "reduce-scatter": 75, "all-to-all": 75} | {
        "collective-permute": 100
    }


@pytest.mark.slow
def test_end_to_end(tmp_path):
    command = ["-m", "benchmarks.sharded", "--flagfile=configs/sharded.flags", "--shapes=16x64x3,16x64"]
    command += [
        "--devices=1,2,16",
        "--sharding=vocab",
        f"--output_dir={tmp_path}",
        "--seconds=0",
        "--repeats=3",
    ]
    done = on_eight_devices(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--devices=16: passed over, there are 8" in done.stdout and "Traceback" not in done.stderr
    document = json.loads((tmp_path / "sharded.json").read_text())
    layouts = [("none", 1), ("vocab", 2)]
    names = {3: ["ours", "jax", "jax.nn.softmax"], None: ["ours", "jax.nn.softmax"]}
    found = [(row["k"], row["sharding"], row["devices"], row["contender"]) for row in document["rows"]]
    assert found == [(k, *layout, name) for k in names for layout in layouts for name in names[k]]
    for row in document["rows"]:
        assert row["status"] == "ok" and row["ran"] == ("xla" if row["contender"] == "ours" else "jax")
        assert not row["reason"] and row["rows_checked"] == 16 and row["wall_p50_us"] > 0
        if row["contender"] == "jax.nn.softmax" and row["sharding"] == "vocab":
            assert row["collectives"] == "2 all-reduce" and row["link_bytes"] == 2 * 2 * 16 * 4 * 1 / 2
    assert document["runs"][0]["device"].startswith("8 x ")
    assert not (tmp_path / "sharded.png").exists()  # the picture shows device times, which only GPUs have


@pytest.mark.slow
def test_a_wrong_peer_is_timed_and_fails_nothing(one, monkeypatch):
    wrong = sharded.functions

    def functions(case):
        return wrong(case) | {"jax": lambda x: jax.lax.top_k(x, case.k)}

    monkeypatch.setattr(sharded, "functions", functions)
    code, rows = one(sharded, "--shapes=6x40x5", "--k=5")
    assert code == 0 and rows["jax"]["status"] == "differs" and rows["jax"]["wall_p50_us"] > 0


def test_the_device_time_is_the_period_of_a_kernel():
    """A call has two kernels. One device clears memory before them, and the other device waits 50 µs once."""
    first = [0, 1000, 4000, 11000, 14000, 21000, 24000, 31000, 34000]
    late = [2000, 5000, 12000, 15000, 72000, 75000, 82000, 85000]
    assert traces.period([first, late], 4) == pytest.approx(10e-6)
    with pytest.raises(traces.NoKernels, match="3 kernels of 4 calls"):
        traces.period([first, late[:3]], 4)
    with pytest.raises(traces.NoKernels, match="0 kernels of 4 calls"):
        traces.period([], 4)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_record_says_how_its_device_time_was_found(kernels, monkeypatch):
    """Without kernels in the trace, it is what a further call adds to the wall time."""
    x, sleep = np.zeros(1), 0.002

    def seen(run):
        run()
        return [[1000.0 * i for i in range(sharded.CALLS)]] if kernels else [[]]

    monkeypatch.setattr(traces, "_kernel_starts", seen)
    found = sharded.device_time(lambda x: x, lambda x: time.sleep(sleep * (sharded.CALLS - 1)), x)
    assert found["timed_by"] == ("trace" if kernels else "host's clock")
    assert found["device_us"] == pytest.approx(1 if kernels else 1e6 * sleep, rel=0.5)


def test_how_rows_compare(parse):
    (layout,) = sharded.make_layouts(parse(sharded, "--shapes=8x64x5", "--devices=1"))
    spread = dataclasses.replace(layout, sharding="vocab", devices=4)
    times = {(layout, "ours"): (50, 40), (layout, "jax.nn.softmax"): (60, 50), (layout, "jax"): (500, 400)}
    times |= {(spread, "ours"): (30, 12.5), (spread, "jax.nn.softmax"): (25, 20), (spread, "jax"): (90, None)}
    rows = [
        result.flat(case)
        | {"contender": name, "ours": name == "ours", "ran": "", "status": "ok", "reason": ""}
        | {"wall_p50_us": wall, "device_us": device, "timed_by": "host's clock"}
        for (case, name), (wall, device) in times.items()
    ]
    frame = result.frame({"benchmark": "sharded", "runs": [{}], "rows": rows}, sharded.VIEW)
    text = result.table(frame, sharded.VIEW)
    assert text.count("host's clock") == len(rows) + 1 and "timed_by: how device_us was found" in text
    found = {(row.devices, row.contender): row for row in frame.itertuples()}
    ours = found[4, "ours"]
    assert (ours.of_linear, ours.of_softmax, ours.speedup_wall) == (0.8, 1.2, 3) and np.isnan(
        ours.speedup_device
    )
    assert found[1, "ours"].of_linear == 1 and found[1, "ours"].speedup_device == 10
    assert np.isnan(found[4, "jax"].of_linear) and found[4, "jax.nn.softmax"].of_linear == 50 / 80


def test_flags_become_layouts(parse, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    chosen = parse(sharded, "--shapes=8x64x5,12x20", "--devices=4,1,8,4", "--dtype=float32,bfloat16")
    assert (chosen.devices, chosen.sharding, chosen.axis_type) == ((4, 1, 8), ("batch", "vocab"), "Auto")
    found = [
        (each.case.batch, each.case.k, each.sharding, each.devices) for each in sharded.make_layouts(chosen)
    ]
    of_topk = [(8, 5, "batch", 4), (8, 5, "vocab", 4), (8, 5, "none", 1)]
    assert found == 2 * of_topk + 2 * [(12, None, *rest) for _, _, *rest in of_topk]
    found = sharded.make_layouts(
        parse(sharded, "--shapes=", "--batch=8", "--vocab=64", "--k=3", "--sharding=vocab")
    )
    assert {(each.case.k, each.sharding) for each in found} == {(3, "none"), (3, "vocab")}
    for shape in ("6x64", "8x66x5"):
        with pytest.raises(ValueError, match="4 devices cannot share 6"):
            sharded.make_layouts(parse(sharded, f"--shapes={shape}", "--sharding=batch,vocab"))
