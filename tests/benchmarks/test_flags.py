"""The flags of the benchmarks: flags per benchmark, accepted values, and the files of configs/."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from absl.flags import IllegalFlagValueError, UnrecognizedFlagError

from benchmarks import __main__ as both
from benchmarks import beam_search, paper, softmax, topk
from benchmarks.support import cases
from pallas_softmax import paper as algorithms
from tests.benchmarks.conftest import MODULES, flags_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_figure_flags_agree_with_the_paper(parse):
    for number, (batch, longest) in enumerate([(4000, 1032192), (10, 8257536)] * 2, start=1):
        chosen = parse(paper, f"--flagfile={ROOT}/configs/figure{number}.flags")
        found = paper.make_paper_cases(chosen)
        assert [case.vocab for case in found] == [63 * 2**i for i in range(len(found))]
        assert found[-1].vocab == longest
        assert {(case.batch, case.k, case.logits) for case in found} == {
            (batch, None if number < 3 else 5, "uniform")
        }
        wanted = tuple(algorithms.SOFTMAX if number < 3 else algorithms.TOPK)
        assert chosen.algorithms == wanted and "quack" in chosen.peers
    chosen = parse(paper, f"--flagfile={ROOT}/configs/k_sweep.flags")
    found = [(case.batch, case.vocab, case.k) for case in paper.make_paper_cases(chosen)]
    assert found == [(4000, 25000, k) for k in (5, 10, 15, 30, 64, 128)]


def test_k_beyond_the_row_is_refused(run_benchmark):
    with pytest.raises(SystemExit, match="k=41, from --k or --shapes, is more than the row length V=40"):
        run_benchmark(topk, "--k=5,41")
    with pytest.raises(SystemExit, match="k=41"):
        run_benchmark(topk, "--shapes=6x40,6x40x41")


def test_lists_become_tuples(parse):
    found = parse(softmax, "--batch=1,2,1", "--dtype=float16", "--seconds=3", "--peers=", "--shapes=4x5")
    assert (found.batch, found.dtype, found.seconds, found.peers) == ((1, 2), ("float16",), 3.0, ())
    assert (found.shapes, found.axis, found.vocab) == (((4, 5),), (-1,), (4096, 32000))


BINARIES = {"benchmarks": both} | {module.__name__: module for module in MODULES}
FLAG_FILES = sorted((ROOT / "configs").glob("*.flags"))


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
    assert done.returncode == 1 and not done.stderr  # absl exits with 1
    with flags_of(BINARIES[name]) as found:
        assert set(re.findall(r"^  --(?:\[no\])?(\w+):", done.stdout, re.MULTILINE)) == set(found)


def test_a_flag_of_another_benchmark_is_refused(parse):
    with pytest.raises(UnrecognizedFlagError, match="heads"):
        parse(softmax, "--heads=1")


@pytest.mark.parametrize("file", FLAG_FILES, ids=lambda file: file.stem)
def test_binaries_accept_their_flag_files(parse, monkeypatch, file):
    text = file.read_text()
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    (name,) = re.findall(rf"python -m (\S+) --flagfile=configs/{file.name}(?!\S)", comment)
    chosen = parse(BINARIES[name], f"--flagfile={file}")
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    for binary in (softmax, topk) if name == "benchmarks" else (BINARIES[name],):
        assert binary.BENCHMARK.cases(chosen)


def test_a_shape_may_have_its_own_k(parse):
    chosen = parse(both, "--shapes=4x10,2x30x20,2x30x7", "--k=3,5", "--dtype=float32,float16")
    found = [(case.batch, case.k, case.dtype) for case in cases.make_cases(chosen, chosen.k)]
    assert found == [
        *[(4, k, dtype) for dtype in ("float32", "float16") for k in (3, 5)],
        *[(2, k, dtype) for k in (20, 7) for dtype in ("float32", "float16")],
    ]
    assert [case.batch for case in cases.make_cases(chosen)] == [4, 4, 2, 2]


def test_shapes_replace_batch_and_vocab(parse):
    chosen = parse(
        softmax, "--batch=7", "--vocab=9", "--shapes=4x10,2x3,4x10", "--function=logsumexp", "--axis=-1,0"
    )
    found = cases.make_cases(chosen)
    shapes = [(case.batch, case.vocab, case.axis) for case in found]
    assert shapes == [(4, 10, -1), (4, 10, 0), (2, 3, -1), (2, 3, 0)]


@pytest.mark.parametrize(
    "binary, flag, accepted",
    [
        (softmax, "--batch=0", "positive integers"),
        (softmax, "--dtype=float8", "float32, bfloat16, float16"),
        (softmax, "--axis=1", "-1, 0"),
        (softmax, "--shapes=10x20,10x", "BATCHxV"),
        (softmax, "--shapes=0x20", "BATCHxV"),
        (softmax, "--shapes=10x20x5", "BATCHxV"),
        (topk, "--shapes=10x20x0", "BATCHxVxK"),
        (topk, "--shapes=10x20x5x1", "BATCHxVxK"),
        (softmax, "--implementations=cuda", "auto, mosaic_gpu, triton, xla"),
        (softmax, "--peers=jax_stable", "jax, torch, quack"),
        (topk, "--peers=jax", "jax_stable, jax_unstable, jax_raft, torch, quack"),
        (both, "--peers=numpy", "jax, torch, quack, jax_stable, jax_unstable, jax_raft"),
        (paper, "--algorithms=safe,fast", "naive, safe, online, topk, safe_unfused"),
        (paper, "--algorithms=naive,topk", "some of either naive, safe, online or topk, safe_unfused"),
        (softmax, "--logits=normal,x.np", "one_finite, nan and paths of .npy files"),
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


def test_words_that_are_not_flags_are_refused():
    with flags_of(softmax), pytest.raises(SystemExit, match="not a flag: 128"):
        softmax.main(["softmax", "128"])
