"""The cases of the benchmarks: flags, the files of configs/, inputs, byte counts, and the oracle's answers."""

import importlib
import re

import jax
import numpy as np
import pytest
from absl.flags import IllegalFlagValueError, UnrecognizedFlagError

from benchmarks import __main__ as both
from benchmarks import beam_search, paper, programs, softmax, topk
from benchmarks.support import answers, cases
from tests.benchmarks.conftest import case_of, flags_of, parse
from tests.support.children import ROOT

pytestmark = pytest.mark.usefixtures("quick_compilation")


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
        (softmax, "--logits=normal,x", "one_finite, nan"),
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


def test_least_bytes():
    for least, case in (
        (6 * 40 * 4 * 3, {"direction": "backward"}),
        (6 * 40 * 2 * 5, {"function": "log_softmax", "direction": "both", "dtype": "bfloat16"}),
        (6 * (40 + 1) * 4, {"function": "logsumexp"}),
        (6 * (2 * 40 + 2) * 4, {"function": "logsumexp", "direction": "backward"}),
        (6 * 40 * (4 * 2 + 1), {"where": "full"}),
        (6 * 40 * 4 * 2 + 6, {"where": "rows"}),
        (6 * (40 * 4 + 5 * 8), {"k": 5}),
    ):
        assert case_of(**case).least_bytes == least, case


def test_large_cases_are_checked_on_first_last_and_random_rows():
    assert list(case_of(batch=4096, vocab=2**21).checked_rows) == [0, 4095]
    rows = case_of(batch=4096, vocab=2**15).checked_rows
    assert len(rows) == len(set(rows)) == 32 and rows[0] == 0 and rows[-1] == 4095


def test_ulps():
    for dtype, least in (("float32", 2.0**-126), ("float16", 2.0**-24)):
        size = np.array([0.3, 1.0, 7.0, 1000.0])
        spacing = np.spacing(size.astype(dtype))
        np.testing.assert_array_equal(answers.ulp([*size, 0.0], np.dtype(dtype)), [*spacing, least])


def test_the_oracle_allows_ties():
    x = np.array([[1.0, 2.0, 1.0, 0.0, 2.0 + 2.0**-22]], np.float32)
    answer = answers.Answer(x, None, k=3)
    np.testing.assert_array_equal(answer.indices, [[4, 1, 0]])
    for got, stable, unstable in [
        ([4, 1, 0], True, True),
        ([4, 1, 2], False, True),
        ([1, 4, 0], False, True),  # probabilities that rounding may make equal
        ([4, 4, 0], False, False),
        ([4, 1, 3], False, False),
    ]:
        assert answer.check_indices(np.array([got])).ok == stable
        assert answer.check_indices(np.array([got]), stable=False).ok == unstable
    assert answer.check_logits(x[:, [4, 1, 0]]).ok and not answer.check_logits(x[:, [1, 1, 0]]).ok


def test_logits_and_masks_have_the_promised_distributions():
    kinds = ("normal", "float32"), ("normal", "bfloat16"), ("peaked", "float32"), ("ties", "float32")
    drawn = [case_of(batch=4, vocab=50_000, dtype=dtype, logits=logits) for logits, dtype in kinds]
    drawn.append(case_of(batch=4, vocab=50, logits="one_finite"))
    shapes = {("full", 0): (500, 100), ("vocab", -1): (500,), ("vocab", 0): (500, 1), ("rows", 0): (1, 100)}
    masked = [case_of(batch=100, vocab=500, where=where, axis=axis) for where, axis in shapes]
    assert [jax.eval_shape(lambda case=case: cases.mask(case)).shape for case in masked] == [*shapes.values()]
    found, mask = jax.jit(lambda: ([*map(cases.logits, drawn)], cases.mask(masked[0])))()
    normal, rounded, peaked, ties, one_finite = (np.asarray(x, np.float32) for x in found)
    np.testing.assert_allclose(rounded, normal, rtol=2**-8)  # not another draw
    assert len(np.unique(normal)) > 100_000
    assert 40 < np.abs(peaked).max() < 120
    assert len(np.unique(ties)) < 15
    assert (np.isfinite(one_finite).sum(axis=1) == 1).all()
    assert 0.68 < mask.mean() < 0.72
