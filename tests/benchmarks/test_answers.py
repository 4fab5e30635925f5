"""The inputs and expected results of the benchmarks: logits, masks, the oracle's answers, and byte counts."""

import jax
import numpy as np
import pytest

from benchmarks.support import answers, cases
from tests.benchmarks.conftest import case_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


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
