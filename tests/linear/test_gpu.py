"""The kernels of a projection on a Hopper GPU: edge cases, the kernels that run, memory, and compute-sanitizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_softmax as ps
from pallas_softmax._src.linear import mosaic_gpu
from pallas_softmax._src.linear.losses import Columns, Head, Tokens
from tests.support import divergence, linear
from tests.support.covering import parameter_id
from tests.support.gpu import much_memory, one_process, sanitize
from tests.support.lowering import array, kernel_names
from tests.support.oracle import wide
from tests.support.racecheck import hazards

hopper = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability.startswith("9.")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("needs_a_gpu"),
    pytest.mark.skipif(not hopper, reason="needs a Hopper GPU"),
]
LARGE = 2**29  # bytes of workspace: one chunk
SOFT = {"soft": True, "temperature": 0.5, "z_loss": 0.1}
CASES = [  # n, D, V, transpose_w, dtype, bias, peak, workspace in bytes, options
    (1, 64, 257, False, "bfloat16", False, 1, LARGE, {}),
    (1, 1024, 4000, True, "bfloat16", False, 1, LARGE, {}),
    (127, 100, 1000, True, "bfloat16", True, 1, LARGE, {}),
    (128, 64, 256, False, "float16", False, 1, LARGE, {}),
    (129, 128, 50257, True, "bfloat16", False, 2, LARGE, {}),
    (129, 64, 1000, False, "float16", True, 1, LARGE, {"softcap": 3.0}),
    (257, 64, 264, True, "bfloat16", True, 1, LARGE, {"z_loss": 0.1}),
    (300, 128, 8000, False, "bfloat16", False, 30, 2**21, {}),  # chunks; the last one overlaps
    (136, 64, 50257, False, "bfloat16", True, 200, 2**23, {}),  # exponentials are computed again
    (513, 256, 1000, True, "bfloat16", True, 10, 2**18, {"softcap": 20.0, "z_loss": 1e-3}),
    (300, 192, 1280, False, "float16", False, 60, LARGE, {"label_smoothing": 0.1, "temperature": 0.5}),
    (300, 128, 1280, True, "bfloat16", False, 3, 2**18, {"label_smoothing": 0.1, "softcap": 9.0}),  # chunks
    (400, 64, 256, True, "bfloat16", False, 1, LARGE, {"z_loss": 0.5}),
    (300, 64, 1000, True, "bfloat16", True, 3, 2**18, {"softcap": 9.0, "temperature": 0.6}),
    (260, 192, 2000, False, "bfloat16", True, 3, 2**18, {}),  # one chunk instead of a float32 dw: n <= 2 D
    (1100, 1024, 2048, True, "bfloat16", False, 1000, LARGE, {}),  # several tiles per CTA, and many steps
    # w has fewer rows than a copy, and one CTA of a cluster may copy none. The plan refuses so few columns, but the
    # kernels take them. An output of 64 columns would be wrong: see `product.store`.
    *((257, 64, few, True, "bfloat16", True, 1, LARGE, {"z_loss": 0.1}) for few in (65, 255)),
    # K labels per token; the second case has chunks
    (300, 128, 50257, False, "bfloat16", False, 1, LARGE, {"k": 64, "temperature": 0.7}),
    (513, 128, 1000, True, "bfloat16", True, 40, 2**18, {"k": 7, "softcap": 5.0, "temperature": 0.7}),
    (1, 128, 257, False, "float16", True, 4, LARGE, {"k": 2, "temperature": 0.7}),
    (300, 128, 8000, True, "bfloat16", False, 1, 2**21, {"k": 64, "temperature": 0.7}),
    # label_probs; the second case has chunks, and in the third one, the labels of a row are in one tile
    (300, 128, 50257, False, "bfloat16", True, 2, LARGE, SOFT | {"k": 64}),
    (513, 64, 1000, False, "bfloat16", True, 2, 2**18, SOFT | {"k": 7, "softcap": 9.0}),
    (300, 64, 512, False, "bfloat16", True, 2, LARGE, SOFT | {"k": 300, "spread": 40}),
    (1, 64, 257, False, "bfloat16", True, 2, LARGE, SOFT | {"k": 1}),
]


@pytest.mark.parametrize("case", CASES, ids=parameter_id)
def test_operations(case):
    linear.assert_operations(mosaic_gpu.OPERATIONS, *case)


OF_DRAWS = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}]


@pytest.mark.parametrize("softcap", [None, 9.0])
@pytest.mark.parametrize("options", OF_DRAWS, ids=str)
@pytest.mark.parametrize(
    ("n", "vocab", "dtype"), [(1, 128256, "bfloat16"), (64, 50257, "float16"), (1025, 32000, "bfloat16")]
)
def test_sample(n, vocab, dtype, options, softcap):
    """Log-probabilities have the bits of `linear_log_probs`, also in batches of another size."""
    x, w, _, _ = linear.arrays(n, 256, vocab, dtype, peak=2)
    log_probs = functools.partial(ps.linear_log_probs, temperature=options.get("temperature", 1.0), softcap=softcap)
    drawn = ps.linear_sample(jax.random.key(0), x, w, softcap=softcap, **options)
    np.testing.assert_array_equal(drawn.log_probs, log_probs(x, w, drawn.indices))
    z, _ = linear.logits(x, w, softcap=softcap)
    want = ps.sample(jax.random.key(0), jnp.asarray(z, jnp.float32), **options)
    assert np.mean(np.asarray(drawn.indices) == want.indices) > 0.99
    np.testing.assert_array_equal(drawn.log_probs[-1:], log_probs(x[-1:], w, drawn.indices[-1:]))


@pytest.mark.parametrize("unusual", [1e-38, 3e38])
@pytest.mark.parametrize("vocab", [327, 32000])
def test_sample_beside_an_unusual_temperature(vocab, unusual):
    """If the chunk is drawn again, from stored logits, the other tokens have the same bits."""
    x, w, _, _ = linear.arrays(70, 128, vocab, "bfloat16", peak=2)
    x = x.at[1:3].set(0)  # all logits are equal
    keys, t = jax.random.split(jax.random.key(0), len(x)), jnp.linspace(0.5, 2, len(x)).at[:2].set(0)
    usual, again = (ps.linear_sample(keys, x, w, temperature=t.at[-1].set(last)) for last in (1, unusual))
    for a, b in zip(usual, again):
        np.testing.assert_array_equal(a[:-1], b[:-1])


@pytest.mark.parametrize(
    "case",  # n, D, V, dtype, dtype of the teacher, beta, transpose_w, workspace in bytes, options
    [
        (1, 64, 257, "bfloat16", "bfloat16", 0, False, LARGE, {}),
        (129, 128, 50257, "bfloat16", "bfloat16", 0.5, True, LARGE, {}),
        (300, 192, 1000, "bfloat16", "float16", 1, True, 2**20, {"softcap": 9.0, "temperature": 0.6}),
        (1100, 1024, 2048, "bfloat16", "float32", 0.1, False, 2**22, {}),
        (260, 100, 4000, "float16", "bfloat16", 0, False, 2**22, {"softcap": 3.0}),
    ],
    ids=parameter_id,
)
def test_divergences(case):
    """Chunks of logits fill a chunk of dz."""
    divergence.assert_operations(mosaic_gpu.OPERATIONS, *case)


@pytest.mark.parametrize(
    ("n", "depth", "vocab", "dtype", "features", "peak", "workspace"),
    [
        (300, 128, 50257, "bfloat16", "", 3, LARGE),
        (513, 64, 1000, "bfloat16", "softcap", 40, 2**18),  # chunks
        (129, 100, 5000, "float16", "bias", 3, LARGE),
        (9, 64, 257, "bfloat16", "transposed", 1e-3, LARGE),
    ],
)
def test_token_stats(n, depth, vocab, dtype, features, peak, workspace):
    run = functools.partial(linear.operation_stats, mosaic_gpu.OPERATIONS)
    linear.assert_stats(dtype, features, peak, n=n, depth=depth, vocab=vocab, workspace_bytes=workspace, run=run)


def test_argmax_of_zeros():
    linear.assert_argmax_of_zeros("mosaic_gpu")


def test_one_column():
    """If one column is not masked, m must equal the label's logit, and d be 1 up to the errors of two exponentials.

    The kernel computes exp(z - r) and XLA computes exp(r - m), and r rounds z = m differently from the kernel. So log d
    is up to 3e-7, in a loss with logits of about 0.01. Therefore `tests/support/linear.py` allows ulps of 1.
    """
    x, w, _, _ = linear.arrays(257, 64, 320, "bfloat16", transpose_w=True)
    labels, bias = jnp.full(257, 77), jnp.full(320, -jnp.inf).at[77].set(0.25)
    static = {"head": Head(transpose_w=True), "workspace_bytes": LARGE}
    run = {name: jax.jit(functools.partial(f, **static)) for name, f in mosaic_gpu.OPERATIONS.items()}
    found = run["projection"](x, w, Columns(bias), Tokens(labels))
    together, *_ = run["projection_grad"](x, w, Columns(bias), Tokens(labels), jnp.ones(257))
    z, _ = linear.logits(x, w, bias=bias, transpose_w=True)
    for m, label_logit in [(s.normalizer.m, s.label_logit) for s in (found, together)]:
        np.testing.assert_array_equal(m, label_logit)
        np.testing.assert_allclose(m, z[:, 77], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(found.normalizer.d, 1)
    np.testing.assert_allclose(together.normalizer.d, 1, rtol=0, atol=2**-21)


@pytest.mark.parametrize("first_columns", [0, -300, -np.inf])
def test_exponentials_are_computed_again(first_columns):
    """The first columns set the reference. The largest logits are 300 above it, or the first columns are masked."""
    x, w, labels, _ = linear.arrays(256, 128, 2048, "bfloat16")
    bias = np.zeros(2048, "float32")
    bias[:128] = first_columns
    labels = jnp.maximum(labels, 128)
    weights = np.ones(256)
    losses, _, dx, dw, *_ = linear.losses_and_gradients(x, w, labels, weights, bias=bias)
    f = functools.partial(ps.linear_cross_entropy, bias=jnp.asarray(bias), reduction="sum", implementation="mosaic_gpu")
    value, (got_dx, got_dw) = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w, labels)
    np.testing.assert_allclose(value, losses.sum(), rtol=1e-6)
    assert linear.rounded_errors(got_dx, dx) < 0.01 and linear.rounded_errors(got_dw, dw) < 0.01


@pytest.mark.parametrize("where", ["nan in x", "inf in w"])
def test_not_finite(where):
    """A NaN in x affects its row's loss only; an infinity in w affects all losses."""
    x, w, labels, _ = linear.arrays(200, 64, 1000, "bfloat16")
    if where == "nan in x":
        x = x.at[77].set(jnp.nan)
    else:
        w = w.at[:, 500].set(jnp.inf)
    loss = jax.jit(functools.partial(ps.linear_cross_entropy, reduction=None, implementation="mosaic_gpu"))
    bad = ~np.isfinite(wide(loss(x, w, labels)))
    assert bad.all() if where == "inf in w" else (np.flatnonzero(bad) == [77]).all()


@much_memory
def test_memory_of_soft_labels():
    """At Llama 3's size only exponentials run. They take 0.5 of the 0.6 GiB of memory in addition to a float32 dw."""
    x, w, _ = linear.of_size(8192)

    def soft(x, w, labels, q):
        return ps.linear_cross_entropy(x, w, labels, label_probs=q)

    lowered = jax.jit(jax.grad(soft, (0, 1))).lower(x, w, array(8192, 64, dtype="int32"), array(8192, 64))
    assert set(kernel_names(lowered.as_text())) == {"linear_exponentials", "linear_merge"}
    memory: Any = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * 4096 * 128256 + 0.6 * 2**30


@one_process("sanitizers of projections")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool):
    done = sanitize(tool, "projection")
    report = f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert not hazards(done.stdout, "mosaic_gpu") if tool == "racecheck" else done.returncode == 0, report
    assert "swept projection" in done.stdout, report
