"""The kernels of a projection in Pallas's interpreter, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax._src.linear import mosaic_gpu, product
from pallas_softmax._src.linear.gradients import _dz_of_chunk, _Rows
from pallas_softmax._src.linear.losses import Columns, Head, Tokens, coefficients
from pallas_softmax._src.linear.projection import Projection
from tests.support import divergence, linear, twins
from tests.support.covering import parameter_id

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the interpreter of jax 0.10 does not finish these kernels"
)


@pytest.fixture(autouse=True)
def _in_the_interpreter(monkeypatch):
    monkeypatch.setattr(product, "CTAS", 2)
    with twins.interpreted():
        yield


LARGE = 2**29  # bytes of workspace: one chunk
SOFTCAP = {"softcap": 5.0, "temperature": 0.7}
SOFT = {"soft": True, "temperature": 0.5, "z_loss": 0.1}
NUMBERS = [  # n, D, V, transpose_w, dtype, bias, peak, workspace in bytes, options
    (5, 72, 257, True, "bfloat16", True, 1, LARGE, {}),
    (130, 64, 320, False, "bfloat16", False, 300, LARGE, {}),  # exponentials are computed again
    (9, 64, 128, True, "float16", True, 4, LARGE, SOFTCAP | {"label_smoothing": 0.1}),
    (9, 64, 264, True, "bfloat16", True, 4, LARGE, SOFTCAP | {"z_loss": 1e-3}),
    (136, 64, 256, False, "bfloat16", False, 1, 48 * 512, {"z_loss": 0.5}),  # three chunks: n > 2 D
    # several labels
    (9, 64, 320, False, "bfloat16", False, 1, LARGE, {"k": 3, "temperature": 0.7}),
    (130, 72, 257, True, "bfloat16", True, 40, LARGE, SOFTCAP | {"k": 3}),
    (136, 64, 256, False, "float16", True, 4, 48 * 512, {"k": 3, "temperature": 0.7}),  # chunks of 16 rows
    # label_probs
    (9, 64, 320, False, "bfloat16", True, 2, LARGE, SOFT | {"k": 5}),
    (1, 64, 257, False, "bfloat16", True, 2, LARGE, SOFT | {"k": 1}),
    # chunks; the labels of a row are in one tile
    (130, 72, 520, False, "bfloat16", True, 2, 48 * 512, SOFT | {"k": 3, "softcap": 3.0, "spread": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", NUMBERS, ids=parameter_id)
def test_interpreted(case):
    linear.assert_operations(mosaic_gpu.OPERATIONS, *case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",  # n, D, V, dtype, dtype of the teacher, beta, transpose_w, workspace in bytes, options
    [
        (9, 64, 320, "bfloat16", "bfloat16", 0, False, LARGE, {}),
        (130, 72, 257, "bfloat16", "float16", 0.5, True, 8 * 257 * 48, {"softcap": 3.0, "temperature": 0.7}),
        (9, 64, 264, "float16", "float32", 1, False, LARGE, {}),
    ],
    ids=parameter_id,
)
def test_interpreted_divergence(case):
    """The kernel writes float32 logits. A chunk of dz holds several chunks of logits."""
    divergence.assert_operations(mosaic_gpu.OPERATIONS, *case)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "numbers"), [(Head(), {}), (Head(softcap=3.0, transpose_w=True), {"z_loss": 0.1})])
def test_interpreted_gradient_at_the_label(head, numbers):
    """The label's term is subtracted in float32 and rounded once, although the kernel does not know the normalizer."""
    x, w, labels, _ = linear.arrays(8, 64, 320, "bfloat16", transpose_w=head.transpose_w)
    labels = labels.at[3].set(-1)  # not a column: nothing is subtracted in this row
    weights = jnp.arange(1, 9) / 8.0
    tokens = linear.tokens_of(labels, **numbers)

    @jax.jit
    def run(x, w, tokens):
        layer = Projection(mosaic_gpu.FUNCTIONS, w, Columns(), head, LARGE)
        return _dz_of_chunk(layer, _Rows(x, tokens, weights, None))

    found, e, of_rows = run(x, w, tokens)
    dz = of_rows[:, None] * e.astype(jnp.float32)
    m, of_exp, of_label, *_ = coefficients(found, weights, tokens, 320)
    slope = 1 - (found.label_logit / head.softcap) ** 2 if head.softcap else 1
    want = (of_exp * jnp.exp(found.label_logit - m) - of_label) * slope
    rows = np.flatnonzero(labels >= 0)
    np.testing.assert_allclose(dz[jnp.arange(8), labels][rows], want[rows], rtol=2**-8)
    if head.softcap is None:
        np.testing.assert_allclose(jnp.max(dz[3]), of_exp[3], rtol=2**-7)


@pytest.mark.slow
def test_interpreted_labels_of_other_shards():
    """A label of V or more is not a column, even if a tile or a padded w has a column there."""
    x, w, _, _ = linear.arrays(8, 64, 260, "bfloat16")
    labels = jnp.array([-3, 259, 260, 262, 319, 320, 511, 600], jnp.int32)
    projection = mosaic_gpu.OPERATIONS["projection"]
    found = projection(x, w, Columns(), Tokens(labels), head=Head(), workspace_bytes=2**29).label_logit
    z, _ = linear.logits(x, w)
    np.testing.assert_allclose(found, np.where(np.arange(8) == 1, z[:, 259], 0), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "depth", "vocab", "dtype", "features", "peak", "workspace"),
    [
        (9, 64, 320, "bfloat16", "softcap", 1, LARGE),
        (130, 72, 257, "bfloat16", "", 40, 48 * 512),  # chunks
        (9, 64, 264, "float16", "bias", 4, LARGE),
    ],
)
def test_interpreted_token_stats(n, depth, vocab, dtype, features, peak, workspace):
    run = functools.partial(linear.operation_stats, mosaic_gpu.OPERATIONS)
    linear.assert_stats(dtype, features, peak, n=n, depth=depth, vocab=vocab, workspace_bytes=workspace, run=run)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [None, 0.9])
@pytest.mark.parametrize(("n", "depth", "vocab", "temperature"), [(9, 64, 320, 0.7), (3, 72, 257, None)])
def test_interpreted_sample(n, depth, vocab, temperature, top_p):
    """The kernel writes the logits before it divides them. Log-probabilities have the bits of `linear_log_probs`."""
    x, w, _, _ = linear.arrays(n, depth, vocab, "bfloat16", peak=2)
    t = None if temperature is None else jnp.full(n, temperature)
    tokens = Tokens(jnp.full(n, -1), temperature=t)
    sizes = {"head": Head(undivided=True), "x": x, "w": w, "bias": None, "tokens": tokens}
    if depth % 64 == 0:  # otherwise `OPERATIONS` pad the arrays
        z, _ = mosaic_gpu.logits(**sizes)
        np.testing.assert_allclose(z[:, :vocab], linear.logits(x, w)[0], rtol=1e-5, atol=1e-5)
    linear.assert_sample(mosaic_gpu.OPERATIONS, x, w, t, top_p)


@pytest.mark.slow
@pytest.mark.parametrize("unusual", [1e-38, np.nan])
def test_interpreted_sample_beside_an_unusual_temperature(unusual):
    """If the chunk is drawn again, from stored logits, the other tokens have the same bits."""
    x, w, _, _ = linear.arrays(6, 64, 320, "bfloat16", peak=2)
    x = x.at[1].set(0)  # all logits are equal
    usual, again = (
        [a[:-1] for a in linear.draws(mosaic_gpu.OPERATIONS, x, w, jnp.float32([0, 0, 0.7, 1, 30, last]))]
        for last in (1, unusual)
    )
    jax.tree.map(np.testing.assert_array_equal, usual, again)


@pytest.mark.slow
def test_interpreted_sample_where_only_the_quotient_overflows():
    """z / t is infinite, and z * (1 / t) is finite. `sample` takes such a row as at a temperature of 0."""
    z, t = np.float32(1.27001509491848e18), np.float32(3.732238923839261e-21)
    with np.errstate(over="ignore"):
        assert np.isinf(z / t) and np.isfinite(z * (1 / t))
    x, w = jnp.zeros((2, 64), "bfloat16").at[:, 0].set(1), jnp.full((64, 320), z, "bfloat16")
    drawn = linear.draws(mosaic_gpu.OPERATIONS, x, w, jnp.float32([t, 1]))
    assert drawn[0][0] == 0
    np.testing.assert_allclose(drawn[2][0], -np.log(320), rtol=1e-5)
