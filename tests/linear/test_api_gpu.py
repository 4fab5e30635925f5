"""The projections on a GPU, through the public functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import linear
from tests.support.covering import pairs
from tests.support.gpu import much_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


DTYPES = ["bfloat16", "float16", "float32"]
SIZES = {"n": 301, "depth": 200, "vocab": 5003, "rows": 128}  # n, D and V are not multiples of a tile


@pytest.mark.parametrize(
    ("dtype", "features", "reduction", "peak", "weighted", "k"),
    [
        *pairs(DTYPES, linear.FEATURES, ["mean", None, "sum"], [1, 40], [False, True], [None]),
        # these failed while the gradient used the forward's m and d
        *(("float32", features, None, 40, False, None) for features in ("bias", "smoothing")),
        ("bfloat16", "", "mean", 4, True, 64),
        ("bfloat16", "softcap", "sum", 4, True, 64),
        ("bfloat16", "z_loss", None, 4, True, 64),
        ("float16", "bias", "mean", 4, True, 64),
        ("float32", "transposed", "mean", 4, True, 64),
    ],
)
def test_losses_and_gradients(dtype, features, reduction, peak, weighted, k):
    """float32 does not use TF32."""
    linear.assert_losses_and_gradients(dtype, features, reduction, peak, weighted=weighted, k=k, **SIZES)


@pytest.mark.parametrize(("dtype", "features", "peak"), pairs(DTYPES, ["", "bias", "softcap", "transposed"], [1, 40]))
def test_log_probs_and_token_stats(dtype, features, peak):
    linear.assert_log_probs(dtype, features, peak, k=64, **SIZES)
    workspace = linear.workspace(5003, 128)
    linear.assert_stats(dtype, features, peak, n=301, depth=200, vocab=5003, workspace_bytes=workspace)


@pytest.mark.parametrize(
    ("dtype", "features", "k"), [("bfloat16", "softcap", 5), ("float16", "bias", 64), ("float32", "transposed", 1)]
)
def test_topk(dtype, features, k):
    linear.assert_topk(dtype, features, k, n=301, depth=200, vocab=50257, rows=128)


@pytest.mark.parametrize(("dtype", "share", "loss"), pairs(DTYPES, [0.2, 0.5, 0.7, 1.0], ["mean", "loss"]))
def test_many_left_out_tokens(dtype, share, loss):
    linear.assert_left_out_tokens_do_not_matter([loss, "several"], dtype, share, n=1301, depth=200, vocab=5003)


@much_memory
@pytest.mark.parametrize("n", [8192, 65536])
@pytest.mark.parametrize("name", linear.MEMORY)
def test_memory_in_addition_to_dw(name, n):
    f, _, sums = linear.MEMORY[name]
    memory = jax.jit(f).lower(*linear.of_size(n)).compile().memory_analysis()
    assert memory.temp_size_in_bytes - sums * 4 * 4096 * 128256 <= 0.6 * 2**30


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
