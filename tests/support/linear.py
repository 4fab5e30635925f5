"""The projection and its loss in float64 NumPy, and the bounds that results are held against.

Bounds. What is compared with is `plain`, the same computation with the logits in memory, in float32 or, for 16-bit
inputs, in these 16 bits; both against the oracle:

  losses      of each token at most that of float32 logits, whichever token has its largest, and 2 ulps of what the
              loss is the difference of: logsumexp and the logit, so the larger of |z|
  gradients   their distance (norm) from float64 at most that of plain logits of the inputs' dtype, twice that in
              float32, where both are of one rounding and their order of summing decides
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.oracle import wide


def rounded_errors(got, want):
    """The distance of an array from what it should be, relative to that."""
    return np.linalg.norm(wide(got) - want) / max(np.linalg.norm(want), 1e-300)


def logits(x, w, *, bias=None, softcap=None, temperature=1.0, transpose_w=False):
    """z, and its derivative in what the softcap takes."""
    z = wide(x) @ (wide(w).T if transpose_w else wide(w))
    z = z if bias is None else z + wide(bias)
    slope = 1 / temperature
    if softcap is not None:
        capped = np.tanh(z / softcap)
        z, slope = softcap * capped, (1 - capped**2) / temperature
    return z / temperature, slope


def losses_and_gradients(
    x, w, labels, weights, *, bias=None, label_smoothing=0.0, z_loss=0.0, transpose_w=False, **head
):
    """The loss of each token, the largest of |z| of its row, and dx, dw, dbias of sum(weights * losses).

    Tokens of weight 0 are left out, whatever is in them. x is (n, D).
    """
    kept = np.asarray(weights) != 0
    x = np.where(kept[:, None], wide(x), 0)
    labels = np.where(kept, labels, 0)
    z, slope = logits(x, w, bias=bias, transpose_w=transpose_w, **head)
    rows = np.arange(len(z))
    m = z.max(1, keepdims=True)
    e = np.exp(z - m)
    lse = m[:, 0] + np.log(e.sum(1))
    losses = (m[:, 0] - z[rows, labels]) + np.log(e.sum(1))
    losses += label_smoothing * (z[rows, labels] - z.mean(1)) + z_loss * lse**2
    p = e / e.sum(1, keepdims=True)
    dz = p * (1 + 2 * z_loss * lse[:, None]) - label_smoothing / z.shape[1]
    if not label_smoothing:  # 1 - p without cancellation
        others = p.copy()
        others[rows, labels] = 0
        dz[rows, labels] = -others.sum(1) + p[rows, labels] * 2 * z_loss * lse
    else:
        dz[rows, labels] -= 1 - label_smoothing
    dz = dz * slope * np.where(kept, weights, 0)[:, None]
    w = wide(w)
    dx = dz @ (w if transpose_w else w.T)
    dw = dz.T @ x if transpose_w else x.T @ dz
    return losses, np.abs(z).max(1), dx, dw, dz.sum(0)


def plain(
    x,
    w,
    labels,
    *,
    dtype=jnp.float32,
    bias=None,
    softcap=None,
    temperature=1.0,
    label_smoothing=0.0,
    z_loss=0.0,
    transpose_w=False,
):
    """The losses as everybody writes them, by logits of `dtype` in memory."""
    z = lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (1 if transpose_w else 0,)), ((), ())),
        precision="highest",
        preferred_element_type=dtype,
    ).astype(jnp.float32)
    z = z if bias is None else z + bias.astype(z.dtype)
    z = (z if softcap is None else softcap * jnp.tanh(z / softcap)) / temperature
    lse = jax.nn.logsumexp(z, -1)
    at_label = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    loss = lse - (1 - label_smoothing) * at_label - label_smoothing * jnp.mean(z, -1)
    return loss + z_loss * lse**2


def arrays(n, depth, vocab, dtype, *, peak=1.0, bias=False, transpose_w=False, seed=0):
    """x, w, labels and bias (or None), with logits of some `peak` times 3; of peaked rows, the label is the peak."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, depth)), dtype)
    w = jnp.asarray(rng.standard_normal((depth, vocab)) * peak * depth**-0.5, dtype)
    labels = rng.integers(0, vocab, n)
    if peak > 5:
        labels[::2] = (wide(x) @ wide(w)).argmax(1)[::2]
    b = jnp.asarray(rng.standard_normal(vocab), "float32") if bias else None
    return x, w.T if transpose_w else w, jnp.asarray(labels, "int32"), b
