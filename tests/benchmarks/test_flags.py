"""The flags of the benchmarks: accepted values, the cases they ask for, and the files of configs/."""

import importlib
import re
from pathlib import Path

import jax
import pytest
from absl.flags import IllegalFlagValueError, UnrecognizedFlagError

from benchmarks import __main__ as both
from benchmarks import beam_search, paper, programs, softmax, topk
from benchmarks.support import cases
from tests.benchmarks.conftest import flags_of, parse

ROOT = Path(__file__).parents[2]


def test_lists_become_tuples_and_shapes_replace_batch_and_vocab():
    found = parse(softmax, "--batch=7,2,7", "--seconds=3", "--peers=", "--shapes=4x10,2x3", "--axis=-1,0")
    assert (found.batch, found.seconds, found.peers, found.vocab) == ((7, 2), 3.0, (), (4096, 32000))
    shapes = [(case.batch, case.vocab, case.axis) for case in cases.make_cases(found)]
    assert shapes == [(4, 10, -1), (4, 10, 0), (2, 3, -1), (2, 3, 0)]
    chosen = parse(both, "--shapes=4x10,2x30x20,2x30x7", "--k=3,5", "--dtype=float32,float16")
    found = [(case.batch, case.k, case.dtype) for case in cases.make_cases(chosen, chosen.k)]
    assert found == [
        *[(4, k, dtype) for dtype in ("float32", "float16") for k in (3, 5)],
        *[(2, k, dtype) for k in (20, 7) for dtype in ("float32", "float16")],
    ]


def test_binaries_accept_their_flag_files(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    files = sorted((ROOT / "configs").glob("*.flags"))
    for file in files:
        comment = " ".join(re.findall(r"^# *(.*)$", file.read_text(), re.MULTILINE))
        (name,) = re.findall(rf"python -m (\S+) --flagfile=configs/{file.name}(?!\S)", comment)
        binary = both if name == "benchmarks" else importlib.import_module(name)
        chosen = parse(binary, f"--flagfile={file}")
        for each in (softmax, topk) if binary is both else (binary,):
            assert each.BENCHMARK.cases(chosen), file
    assert len(files) > 20


@pytest.mark.parametrize(
    "binary, flag, accepted",
    [
        (softmax, "--batch=0", "positive integers"),
        (softmax, "--dtype=float8", "float32, bfloat16, float16"),
        (softmax, "--shapes=10x20x5", "BATCHxV"),
        (both, "--peers=numpy", "jax, torch, quack, jax_stable, jax_unstable, jax_raft"),
        (softmax, "--logits=normal,x.np", "one_finite, nan and paths of .npy files"),
        (beam_search, "--training_steps=0", "positive"),
    ],
)
def test_bad_values_are_refused_by_name(binary, flag, accepted):
    name, value = flag.split("=")
    with pytest.raises(IllegalFlagValueError) as refused:
        parse(binary, flag)
    message = str(refused.value)
    assert name.removeprefix("--") in message and value.split(",")[-1] in message and accepted in message


def test_what_does_not_fit_is_refused():
    with pytest.raises(UnrecognizedFlagError, match="heads"):
        parse(softmax, "--heads=1")
    for binary, args, reason in (
        (topk, ("--vocab=40", "--k=5,41"), "k=41, from --k or --shapes, is more than the row length V=40"),
        (beam_search, ("--vocab=90", "--k=3,91"), "--k=91 is more than the vocabulary V=90"),
        (programs, ("--width=10", "--heads=3"), "--width=10 is not accepted; with --heads=3"),
        (paper, ("--algorithms=naive,topk",), "some of either naive, safe, online or topk, safe_unfused"),
    ):
        with flags_of(binary, *args), pytest.raises(SystemExit, match=reason):
            binary.main(["name"])
    with flags_of(softmax), pytest.raises(SystemExit, match="not a flag: 128"):
        softmax.main(["softmax", "128"])
