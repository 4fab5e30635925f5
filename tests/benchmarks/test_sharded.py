"""The benchmark of several devices: its reading of compiled programs, measurements and output."""

import functools
import json
import time

import jax
import pytest

import pallas_softmax
from benchmarks import sharded
from benchmarks.support import links, timing
from benchmarks.support.contenders import Call
from benchmarks.support.links import Collective
from tests.benchmarks.conftest import output_of, parse

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_on_eight_devices(tmp_path):
    """A process of its own has eight CPU devices, because their number must be set before JAX starts."""
    eight = "--xla_force_host_platform_device_count=8"
    printed = output_of("tests.programs.sharded_benchmark_checks", str(tmp_path), XLA_FLAGS=eight)
    assert "--devices=16: passed over, there are 8" in printed
    document = json.loads((tmp_path / "sharded.json").read_text())
    found = [(row["k"], row["contender"]) for row in document["rows"]]
    assert found == [(3, "ours"), (3, "jax"), (3, "jax.nn.softmax"), (None, "ours"), (None, "jax.nn.softmax")]
    for row in document["rows"]:
        assert (row["sharding"], row["devices"]) == ("vocab", 2)
        assert row["status"] == "ok" and row["ran"] == ("xla" if row["contender"] == "ours" else "jax")
        assert not row["reason"] and row["rows_checked"] == 16 and row["wall_p50_us"] > 0
        if row["contender"] == "jax.nn.softmax":
            assert row["collectives"] == "2 all-reduce" and row["link_bytes"] == 2 * 2 * 16 * 4 * 1 / 2
    assert document["runs"][0]["device"].startswith("8 x ")
    assert not (tmp_path / "sharded.png").exists()  # the picture shows device times, which only GPUs have


@pytest.mark.slow
def test_wrong_results_of_ours_and_of_a_peer(run_benchmark, monkeypatch):
    real = sharded.functions
    changed = {"jax": lambda x: jax.lax.top_k(x, 5), "ours": lambda x: pallas_softmax.fused_topk(-x, 5)}
    monkeypatch.setattr(sharded, "functions", lambda case: real(case) | changed)
    code, (ours, jaxs, _) = run_benchmark(sharded, "--shapes=6x40x5")
    assert code == 1 and ours["status"] == "FAILED" and "wall_p50_us" not in ours
    assert jaxs["status"] == "differs" and jaxs["wall_p50_us"] > 0


def test_collectives_are_read():
    """Many of these notations are of GPUs. tests/programs reads the programs of a CPU."""
    kinds = "all-gather", "all-reduce", "collective-permute"
    all_gather, all_reduce, permute = (functools.partial(Collective, kind) for kind in kinds)
    start = "((f32[4]{0}, s32[2]{0}), (f32[32]{0}, s32[16]{0})) all-gather-start"
    for line, expected in (
        (f"{start}(%p, %q), replica_groups=[1,8]<=[8]", all_gather(192, 8)),
        ("s4[3]{0} all-gather(%p), replica_groups={}", all_gather(2, 8)),
        ("f32[<=8]{0} all-gather(%p), replica_groups={{0},{1,2}}", all_gather(32, 2)),
        ("f32[] all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", all_reduce(4, 2)),
        ("(f32[6]{0:T(8)S(1)}, bf16[5]{0}) all-reduce-start(%p), replica_groups={{0,1}}", all_reduce(34, 2)),
        ("f32[2]{0} all-reduce(%p), replica_groups=mesh['b'=2,'v'=4] {'b','v'}", all_reduce(8, 8)),
        ("f32[2]{0} all-reduce(%p), replica_groups=mesh['d'=8] {'d':(2)4}, x=1", all_reduce(8, 4)),
        ("f64[3]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}", Collective("reduce-scatter", 96, 4)),
        ("f32[64]{0} all-to-all(%p), replica_groups=[1,8]<=[8]", Collective("all-to-all", 256, 8)),
        ("f32[9] collective-permute(%p), source_target_pairs={{0,1},{1,0}}", permute(36, 2)),
    ):
        text = f"HloModule jit_f, is_scheduled=true, num_partitions=8\n\n  ROOT %found.1 = {line}\n"
        assert links.collectives(text) == [expected], line
    text = """HloModule jit_f, replica_count=1, num_partitions=4
  %done = f32[8]{0} all-gather-done(%all-gather-start)
  %all-reduce.2 = f32[4]{0} fusion(%p), metadata={op_name="a = f32[4] all-reduce(x)"}
  %x = f32[4]{0} ragged-all-to-all(%p), replica_groups={{0,1}}
"""
    assert links.collectives(text) == []
    with pytest.raises(ValueError, match="groups cannot be read"):
        links.collectives("  %a = f32[4]{0} all-reduce(%p), replica_groups=torus")
    received = [kind(100, 4).received for kind in (all_gather, all_reduce, permute)]
    assert received == [75, 150, 100]


def test_the_device_time_is_the_period_of_a_kernel():
    """A call has two kernels. One device clears memory before them, and the other device waits 50 µs once."""
    first = [0, 1000, 4000, 11000, 14000, 21000, 24000, 31000, 34000]
    late = [2000, 5000, 12000, 15000, 72000, 75000, 82000, 85000]
    assert timing.period([first, late], 4) == pytest.approx(10e-6)
    with pytest.raises(timing.NoKernels, match="3 kernels of 4 calls"):
        timing.period([first, late[:3]], 4)


def test_a_device_time_says_how_it_was_found(monkeypatch):
    """Without kernels in the trace, it is what a further call adds to the wall time."""
    kernels, sleep = [1000.0 * i for i in range(8)], 0.002
    for starts, timed_by, us in ((kernels, "trace", 1), ([], "host's clock", 1e6 * sleep)):
        monkeypatch.setattr(timing, "_kernel_starts", lambda call, starts=starts: [starts])
        one, many = (Call(run, "jax") for run in (lambda: 0, lambda: time.sleep(sleep * 7)))
        assert timing.call_seconds(one, many, 8) == (pytest.approx(us / 1e6, rel=0.5), timed_by)


def test_flags_become_layouts(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    chosen = parse(sharded, "--shapes=8x64x5,12x20", "--devices=4,1,8")
    found = [(each.case.batch, each.case.k, each.sharding, each.devices) for each in sharded.make_layouts(chosen)]
    of_topk = [(8, 5, "batch", 4), (8, 5, "vocab", 4), (8, 5, "none", 1)]
    assert found == of_topk + [(12, None, *rest) for _, _, *rest in of_topk]
    with pytest.raises(ValueError, match="4 devices cannot share 6"):
        sharded.make_layouts(parse(sharded, "--shapes=8x66x5", "--sharding=vocab"))
