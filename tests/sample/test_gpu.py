"""The kernels of sample and filter_logits on a GPU: inline PTX, clusters, and the tokens of jax.random.categorical."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.sample.plan import StreamPlan, plan_of
from pallas_softmax._src.sample.stream_kernel import draw_rows
from tests.sample import kernels
from tests.support import bounds, cases
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.covering import parameter_id
from tests.support.draws import (
    all_combinations,
    assert_cutoffs,
    assert_draws,
    assert_share,
    masked_rows,
    noise_at,
    without_filters,
)
from tests.support.gpu import much_memory, of_repeated_rows
from tests.support.lowering import kernel_names
from tests.support.trees import assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


LONG = ["normal", "ascending", "integers", "constant"]  # thresholds are among thousands of ties


CASES = [
    (ALL, 2, BF16, 1, 1, False), (ALL, 129, F32, 1, 1, True), (ALL, 129, F32, 8, 2, False),
    (ALL, 127, F16, 3, 1, True), (ALL, 1003, BF16, 2, 2, True), (ALL, 1024, F32, 1, 4, False),
    (ALL, 1000, F32, 8, 1, False), (ALL, 4099, F32, 3, 2, True), (ALL, 4104, F16, 2, 4, False),
    (ALL, 4099, BF16, 5, 2, True),
    # a zone has more keys than the lists have room for
    (LONG, cases.GPT2, F32, 16, 4, False), (LONG, cases.GPT2, F16, 7, 1, False),
    (LONG, cases.LARGE[0], F32, 10, 2, False), (LONG, cases.LARGE[0], BF16, 5, 2, False),
]  # fmt: skip


@pytest.mark.parametrize(("names", "v", "dtype", "count", "warpgroups", "masked"), CASES, ids=parameter_id)
def test_every_row_with_every_filter(names, v, dtype, count, warpgroups, masked):
    x, where, words, parameters, labels = all_combinations(*masked_rows(names, v, dtype, masked))
    plan = plan_of(v, dtype, count, warpgroups)
    run = jax.jit(functools.partial(kernels.sample_rows, plan=plan, interpret=None))
    per_call = 64 if v > 10_000 else len(x)
    for at in range(0, len(x), per_call):
        some = slice(at, at + per_call)
        chunk, mask = [a[some] for a in parameters], None if where is None else where[some]
        got, again = (run(x[some], words[some], chunk, mask) for _ in range(2))
        assert_equal(got, again)
        assert_draws(got, x[some], words[some], labels[some], chunk, mask)
        assert_cutoffs(run(x[some], None, chunk, mask), x[some], labels[some], chunk, mask)


STREAMED = [
    (ALL, 1, F32, 1), (ALL, 129, BF16, 1), (ALL, 1003, F16, 1), (ALL, 9001, F32, 4), (ALL, 10_000, BF16, 2),
    ([*LONG, "descending"], cases.LARGE[0], F32, 1), ([*LONG, "descending"], cases.LARGE[0], BF16, 16),
]  # fmt: skip


@pytest.mark.parametrize(("names", "v", "dtype", "ctas"), STREAMED, ids=parameter_id)
def test_without_filters(names, v, dtype, ctas):
    """Every row with every temperature, in CTAs and in clusters. Two runs have the same bits."""
    x, words, parameters, labels = without_filters(cases.rows(names, v, dtype))
    plan = StreamPlan(v, np.dtype(dtype).itemsize, ctas)
    run = jax.jit(functools.partial(draw_rows, plan=plan, stride=1))
    got, again = (run(jnp.asarray(x), parameters[0], jnp.asarray(words)) for _ in range(2))
    assert_equal(got, again)
    assert_draws(got, x, words, labels, parameters)


def assert_categorical(key, x, most=0, **filters):
    """Asserts that the kernel runs, and that at most `most` tokens differ from jax.random.categorical.

    These must have nearly the same sum of logit and noise.
    """
    draw = jax.jit(lambda x: ps.sample(key, x, **filters).indices)
    assert kernel_names(draw.lower(x).as_text()) == ["sample"]

    @jax.jit
    def want(x):
        z = ps.filter_logits(x, **filters)
        if key.ndim == 0:
            return z + jax.random.gumbel(key, x.shape), jax.random.categorical(key, z)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:]))(key)
        return z + noise, jax.vmap(jax.random.categorical)(key, z)

    got, (perturbed, tokens) = np.asarray(draw(x)), map(np.asarray, want(x))
    differ = np.flatnonzero(got != tokens)
    assert len(differ) <= most
    a, b = perturbed[differ, got[differ]], perturbed[differ, tokens[differ]]
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "v", "dtype"),
    [(1, 50257, F32), (64, 50257, BF16), (300, 128256, F32), (2000, 1000, F16), (40, 262144, BF16)],
    ids=str,
)
def test_tokens_of_categorical(rows, v, dtype):
    """With one key for all rows, and with a key for each row; XLA's logarithm has the same bits as the kernel's."""
    x = (np.random.default_rng(rows).standard_normal((rows, v)) * 3).astype(dtype)
    temperature = np.linspace(0.5, 2, rows, dtype=F32)
    for key in (jax.random.key(1), jax.random.split(jax.random.key(1), rows)):
        for filters in ({}, {"top_k": 100, "top_p": np.float32(0.9)}, {"min_p": np.float32(1e-3)}):
            assert_categorical(key, x, temperature=temperature, **filters)
        assert_categorical(key, np.round(x))
        assert_categorical(key, np.full_like(x, 2.5))


@pytest.mark.parametrize("scale", [0, 1e-3, 3, 30], ids=str)
def test_tokens_of_many_rows(scale):
    """All elements of a row can win, or few can. In 1 of 1600 rows the first goal is missed."""
    rows, v = 20_000, 3000
    x = (np.random.default_rng(0).standard_normal((rows, v)) * scale).astype(F32)
    assert_categorical(jax.random.key(5), x)


@much_memory
@pytest.mark.parametrize("filters", [{}, {"top_k": 100, "top_p": np.float32(0.9)}], ids=str)
def test_more_than_2_to_the_31_elements(filters):
    """Eight rows and keys are repeated: all copies have the same bits, and the first ones are right."""
    rows, v, few = 70_000, 30_720, 8
    x = np.random.default_rng(2).standard_normal((few, v)).astype(BF16)
    keys = jax.random.split(jax.random.key(3), few)

    draw = functools.partial(ps.sample, **filters, implementation="mosaic_gpu")
    got = of_repeated_rows(lambda x, keys: draw(keys, x), rows, x, keys)
    words = np.concatenate([jax.random.key_data(keys), np.zeros((few, 2), np.uint32)], 1)
    bounds.assert_sample(got, x, noise_at(words, v), range(few), **filters)


@pytest.mark.parametrize(
    ("v", "spread", "filters"),
    [(128256, 6.0, {}), (128256, 6.0, {"top_k": 40}), (1000, 1.0, {"top_p": 0.9}), (1000, 1.0, {"min_p": 0.02})],
    ids=str,
)
def test_distribution(v, spread, filters):
    """10^6 draws of one row."""
    x = (np.random.default_rng(5).standard_normal((1, v)) * spread).astype(F32)

    @jax.jit
    def counts(key):
        rows = jnp.broadcast_to(x, (2000, v))
        drawn = ps.sample(key, rows, implementation="mosaic_gpu", **filters).indices
        return jnp.zeros(v, int).at[drawn].add(1)

    total = sum(np.asarray(counts(key)) for key in jax.random.split(jax.random.key(2), 500))
    assert_share(total, x, **filters)
