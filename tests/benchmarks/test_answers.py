"""The inputs and expected results of the benchmarks: logits, masks, the oracle's answers, and byte counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.support import answers, cases, flags
from tests.support.benchmark_cases import case_of
from tests.support.covering import first_values

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


def test_masks_have_their_shapes_and_share():
    full = np.asarray(cases.mask(case_of(batch=100, vocab=500, where="full")))
    assert full.shape == (100, 500) and 0.68 < full.mean() < 0.72
    shapes = {("full", 0): (500, 100), ("vocab", -1): (500,), ("vocab", 0): (500, 1), ("rows", 0): (1, 100)}
    for (where, axis), shape in shapes.items():
        assert cases.mask(case_of(batch=100, vocab=500, where=where, axis=axis)).shape == shape


@pytest.mark.parametrize("logits", first_values(1, ["ties", "nan", "peaked"]))
def test_the_oracle_of_top_k_agrees_with_jax(logits):
    case = case_of(batch=5, vocab=300, k=7, direction="both", logits=logits, seed=1)
    x, g = cases.logits(case), cases.cotangent(case)
    answer = answers.Answer(np.asarray(x), np.asarray(g), k=case.k)

    @jax.jit
    def reference(x, g):
        _, indices = lax.top_k(x, 7)
        _, pull = jax.vjp(lambda x: jnp.take_along_axis(jax.nn.softmax(x), indices, -1), x)
        return jax.nn.softmax(x), indices, pull(g)[0]

    y, indices, dx = map(np.asarray, reference(x, g))
    np.testing.assert_allclose(answer.output.want, y, rtol=1e-4, atol=1e-37)
    np.testing.assert_array_equal(answer.indices, indices)
    assert answer.check_gradient(dx).ok
    assert answer.check_gradient(1.001 * dx).ok == (logits == "nan")  # all of it is NaN


@pytest.mark.parametrize("function", flags.FUNCTIONS)
def test_the_oracle_agrees_with_jax_under_a_mask(function):
    case = case_of(batch=5, vocab=300, function=function, where="full", direction="both", logits="peaked")
    x, g, mask = cases.logits(case), cases.cotangent(case), cases.mask(case)
    answer = answers.Answer(np.asarray(x), np.asarray(g), function, mask=np.asarray(mask))

    @jax.jit  # one compilation instead of one per operation
    def reference(x, g):
        y, pull = jax.vjp(lambda x: getattr(jax.nn, function)(x, axis=-1, where=mask), x)
        return y, pull(g)[0], getattr(jax.nn, function)(x, axis=-1)

    y, dx, unmasked = map(np.asarray, reference(x, g))
    np.testing.assert_allclose(
        y, answer.output.want, rtol=1e-4, atol=1e-6 if function == "log_softmax" else 1e-37
    )
    assert answer.check_output(y).ok and answer.check_gradient(dx).ok
    for wrong in (1.001 * y, np.full_like(y, np.nan), unmasked):
        assert not answer.check_output(wrong).ok
    assert not answer.check_gradient(1.001 * dx).ok


def test_ulps():
    for dtype, least in (("float32", 2.0**-126), ("float16", 2.0**-24)):
        size = np.array([0.3, 1.0, 7.0, 1000.0])
        spacing = [float(jnp.nextafter(v, jnp.inf) - v) for v in jnp.asarray(size, dtype)]
        np.testing.assert_array_equal(answers.ulp([*size, 0.0], jnp.dtype(dtype)), [*spacing, least])


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


def test_logits_have_the_promised_distributions():
    normal = drawn("normal")
    np.testing.assert_allclose(drawn("normal", "bfloat16"), normal, rtol=2**-8)  # not another draw
    assert len(np.unique(normal)) > 100_000
    assert 40 < np.abs(drawn("peaked")).max() < 120
    assert len(np.unique(drawn("ties"))) < 15
    assert (np.isfinite(drawn("one_finite")).sum(axis=1) == 1).all()
