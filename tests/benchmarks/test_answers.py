"""The inputs and expected results of the benchmarks: logits, masks, the oracle's answers, and byte counts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.support import answers, cases, flags
from tests.support.benchmark_cases import case_of
from tests.support.covering import first

pytestmark = pytest.mark.usefixtures("quick_compilation")


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


@jax.jit
def _jax_answers(x, g):
    """Returns softmax, the indices of the 7 largest, and the gradient of their probabilities."""
    _, indices = lax.top_k(x, 7)
    _, pull = jax.vjp(lambda x: jnp.take_along_axis(jax.nn.softmax(x), indices, -1), x)
    return jax.nn.softmax(x), indices, pull(g)[0]


@pytest.mark.slow
@pytest.mark.parametrize("logits", flags.LOGITS)
def test_the_oracle_agrees_with_jax(logits):
    case = case_of(batch=5, vocab=300, k=7, direction="both", logits=logits, seed=1)
    x, g = cases.logits(case), cases.cotangent(case)
    answer = answers.Answer(np.asarray(x), np.asarray(g), k=case.k)
    y, indices, dx = map(np.asarray, _jax_answers(x, g))
    np.testing.assert_allclose(answer.output.want, y, rtol=1e-4, atol=1e-37)
    np.testing.assert_array_equal(answer.indices, indices)
    assert answer.check_gradient(dx).ok
    assert answer.check_gradient(1.001 * dx).ok == (logits in ("neg_inf", "nan", "one_finite"))  # NaN or 0


@pytest.mark.parametrize(
    ("function", "where"), first(1, list(itertools.product(flags.FUNCTIONS, ["full", "none"])))
)
def test_the_oracle_has_every_function(function, where):
    case = case_of(batch=5, vocab=300, function=function, where=where, direction="both", logits="peaked")
    x, g, mask = cases.logits(case), cases.cotangent(case), cases.mask(case)
    kept = None if mask is None else np.asarray(mask)
    answer = answers.Answer(np.asarray(x), np.asarray(g), function, mask=kept)

    @jax.jit  # one compilation instead of one per operation
    def reference(x, g):
        y, pull = jax.vjp(lambda x: getattr(jax.nn, function)(x, axis=-1, where=mask), x)
        return y, pull(g)[0], getattr(jax.nn, function)(x, axis=-1)

    y, dx, unmasked = map(np.asarray, reference(x, g))
    np.testing.assert_allclose(
        y, answer.output.want, rtol=1e-4, atol=1e-6 if function == "log_softmax" else 1e-37
    )
    assert answer.check_output(y).ok and answer.check_gradient(dx).ok
    assert not answer.check_output(1.001 * y).ok and not answer.check_gradient(1.001 * dx).ok
    if mask is not None:  # masked elements must not matter
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
    for dtype, least in (("float32", 2.0**-126), ("float16", 2.0**-24), ("bfloat16", 2.0**-126)):
        size = np.array([0.3, 1.0, 7.0, 1000.0])
        spacing = [float(jnp.nextafter(v, jnp.inf) - v) for v in jnp.asarray(size, dtype)]
        np.testing.assert_array_equal(answers.ulp([*size, 0.0], jnp.dtype(dtype)), [*spacing, least])


def test_the_oracle_orders_special_values_like_top_k():
    x = np.array([[0.0, -0.0, np.nan, -np.inf, np.inf, 1.0, 1.0, -np.nan]], np.float32)
    order = [2, 4, 5, 6, 0, 1, 3, 7]
    for k in range(1, 9):
        np.testing.assert_array_equal(answers.Answer(x, None, k=k).indices, [order[:k]])


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


def drawn(logits, dtype="float32"):
    """Returns four rows of a kind of logits, as float32."""
    return np.asarray(cases.logits(case_of(batch=4, vocab=50_000, dtype=dtype, logits=logits)), np.float32)


def test_logits_are_the_same_numbers_in_every_dtype():
    normal = drawn("normal")
    np.testing.assert_allclose(drawn("normal", "bfloat16"), normal, rtol=2**-8)  # not another draw
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
