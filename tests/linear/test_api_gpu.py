"""The projections on a GPU, through the public functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.covering import pairs
from tests.support.gpu import much_memory
from tests.support.linear import (
    FEATURES,
    MEMORY,
    assert_left_out_tokens_do_not_matter,
    assert_losses_and_gradients,
    assert_several_labels,
    assert_soft_labels,
    assert_stats,
    assert_topk,
    of_size,
    run_log_probs,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


@pytest.mark.parametrize(
    ("dtype", "features", "reduction", "peak"),
    [
        *pairs(["bfloat16", "float16", "float32"], FEATURES, ["mean", None], [1, 40]),
        # these failed while the gradient used the forward's m and d
        *(("float32", features, None, 40) for features in ("bias", "smoothing")),
    ],
)
def test_losses_and_gradients(dtype, features, reduction, peak):
    """Neither n, D nor V is a multiple of a tile. float32 does not use TF32."""
    assert_losses_and_gradients(dtype, features, reduction, peak, n=301, depth=200, vocab=5003, rows=128)


@pytest.mark.parametrize(
    ("dtype", "features", "reduction"),
    [
        ("bfloat16", "", "mean"),
        ("bfloat16", "softcap", "sum"),
        ("bfloat16", "z_loss", None),
        ("float16", "bias", "mean"),
        ("float32", "transposed", "mean"),
    ],
)
def test_soft_labels(dtype, features, reduction):
    assert_soft_labels(dtype, features, reduction, peak=4, n=301, depth=200, vocab=5003, rows=128, k=64)


@pytest.mark.parametrize(
    ("dtype", "features", "reduction"),
    pairs(["bfloat16", "float16", "float32"], ["", "all"], ["mean", "sum", None]),
)
def test_token_weights(dtype, features, reduction):
    shape = {"n": 301, "depth": 200, "vocab": 5003, "rows": 128}
    assert_losses_and_gradients(dtype, features, reduction, 4, weighted=True, **shape)


@pytest.mark.parametrize(
    ("dtype", "features", "peak"),
    pairs(["bfloat16", "float16", "float32"], ["", "bias", "softcap", "transposed"], [1, 40]),
)
def test_several_labels(dtype, features, peak):
    shape = {"n": 301, "depth": 200, "vocab": 5003, "k": 64}
    assert_several_labels(run_log_probs, dtype, features, peak, temperature=0.7, **shape)


@pytest.mark.parametrize(
    ("dtype", "features", "peak"),
    pairs(["bfloat16", "float16", "float32"], ["", "bias", "softcap", "transposed"], [1, 40]),
)
def test_token_stats(dtype, features, peak):
    assert_stats(dtype, features, peak, n=301, depth=200, vocab=5003, rows=128)


@pytest.mark.parametrize(
    ("dtype", "features", "k"),
    [("bfloat16", "softcap", 5), ("float16", "bias", 64), ("float32", "transposed", 1)],
)
def test_topk(dtype, features, k):
    assert_topk(dtype, features, k, n=301, depth=200, vocab=50257, rows=128)


@pytest.mark.parametrize(
    ("dtype", "share", "reduction"),
    pairs(["bfloat16", "float16", "float32"], [0.2, 0.5, 0.7, 1.0], ["mean", None]),
)
def test_many_left_out_tokens(dtype, share, reduction):
    assert_left_out_tokens_do_not_matter(dtype, share, reduction, n=1301, depth=200, vocab=5003)


@much_memory
@pytest.mark.parametrize("n", [8192, 65536])
@pytest.mark.parametrize("name", MEMORY)
def test_memory_in_addition_to_dw(name, n):
    f, _, dw = MEMORY[name]
    memory = jax.jit(f).lower(*of_size(n)).compile().memory_analysis()
    assert memory.temp_size_in_bytes - dw <= 0.6 * 2**30


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_has_the_same_bits_in_any_batch(dtype):
    rng, vocab = np.random.default_rng(0), 32_100
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((1100, 256), (256, vocab)))
    labels = jnp.asarray(rng.integers(0, vocab, 1100))

    @jax.jit
    def results(x, labels):
        stats = ps.linear_token_stats(x, w, labels, temperature=0.7)
        losses = ps.linear_cross_entropy(x, w, labels, reduction=None, label_smoothing=0.1)
        return ps.linear_log_probs(x, w, labels), ps.linear_logsumexp(x, w), losses, stats

    want = results(x, labels)
    for first, n in ((0, 1), (3, 2), (700, 3), (5, 8), (1, 13), (64, 64), (9, 100), (77, 512), (0, 1024)):
        for got, whole in zip(*map(jax.tree.leaves, (results(x[first:][:n], labels[first:][:n]), want))):
            np.testing.assert_array_equal(got, whole[first:][:n])
