"""The projection and its loss in float64 NumPy, and the error bounds of the results.

The bounds come from `plain`, which computes the same with the logits in memory. Its logits are float32, or have the
inputs' 16-bit dtype. Both results are compared with the oracle:

  losses      The error of each token is at most the largest error with float32 logits, plus 2 ulps of the largest |z|:
              the loss is the difference of logsumexp and the logit. These are at least ulps of 1. d is the product of
              two exponentials, each with a relative error of 2^-22, and so log d has this absolute error. This matters
              with one column, where |z| may be 0.01: plain logits have d = 1 exactly.
  gradients   The distance (norm) from float64 is at most the distance with plain logits of the inputs' dtype, within
              the limits of `gradient_bound`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_softmax as ps
from pallas_softmax._src import normalizers
from pallas_softmax._src.linear import losses as projection
from pallas_softmax._src.linear.losses import Head, Tokens
from tests.support import oracle
from tests.support.oracle import wide

ROWS = 40  # rows of a chunk: fewer than the tokens, and not a divisor of their number
FEATURES = {
    "": {},
    "transposed": {"transpose_w": True},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0, "transpose_w": True, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "bias": True},
    "z_loss": {"z_loss": 0.01},
    "all": {"softcap": 20.0, "label_smoothing": 0.2, "z_loss": 0.02, "bias": True, "transpose_w": True},
}


def rounded_errors(got, want):
    """Returns the distance of an array from the expected one, relative to the expected one."""
    return np.linalg.norm(wide(got) - want) / max(np.linalg.norm(want), 1e-300)


def gradient_bound(name, dtype, of_plain, largest):
    """Returns the allowed distance of a gradient from float64, relative to its norm.

    Args:
      name: the operand, "x", "w" or "b".
      dtype: the name of the dtype of x.
      of_plain: the distance of the gradient with plain logits.
      largest: the largest |z|.
    """
    if dtype == "float32":  # both round z once, and the order of the sum decides the direction
        return 2 * of_plain + 2**-24 * largest
    # both round dz and the result, but not the same numbers; the roundings at a few labels cause most of the distance
    half_ulp = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    if name == "b":  # plain JAX adds a float32 bias to widened logits, and does not round the bias's dz
        return max(of_plain, half_ulp)
    return max(1.1 * of_plain, half_ulp)


def logits(x, w, *, bias=None, softcap=None, temperature=1.0, transpose_w=False):
    """Returns z, and its derivative with respect to the softcap's argument."""
    z = wide(x) @ (wide(w).T if transpose_w else wide(w))
    z = z if bias is None else z + wide(bias)
    slope = 1 / temperature
    if softcap is not None:
        capped = np.tanh(z / softcap)
        z, slope = softcap * capped, (1 - capped**2) / temperature
    return z / temperature, slope


def _gradients(dz, x, w, transpose_w):
    """Returns dx, dw and dbias."""
    x, w = wide(x), wide(w)
    return dz @ (w if transpose_w else w.T), dz.T @ x if transpose_w else x.T @ dz, dz.sum(0)


def losses_and_gradients(
    x, w, labels, weights, *, bias=None, label_smoothing=0.0, z_loss=0.0, transpose_w=False, **head
):
    """Returns the loss of each token, the largest |z| of its row, and dx, dw, dbias of sum(weights * losses).

    Tokens of weight 0 are left out, whatever they contain. x is (n, D).
    """
    kept = np.asarray(weights) != 0
    x = np.array(x)
    x[~kept] = 0
    labels = np.where(kept, labels, 0)
    z, slope = logits(x, w, bias=bias, transpose_w=transpose_w, **head)
    rows = np.arange(len(z))
    m = z.max(1, keepdims=True)
    e = np.exp(z - m)
    lse = m[:, 0] + np.log(e.sum(1))
    losses = (m[:, 0] - z[rows, labels]) + np.log(e.sum(1))
    losses += z_loss * lse**2
    if label_smoothing:  # the mean is -inf where the bias masks a column
        losses += label_smoothing * (z[rows, labels] - z.mean(1))
    p = e / e.sum(1, keepdims=True)
    dz = p * (1 + 2 * z_loss * lse[:, None]) - label_smoothing / z.shape[1]
    if not label_smoothing:  # 1 - p without cancellation
        others = p.copy()
        others[rows, labels] = 0
        dz[rows, labels] = -others.sum(1) + p[rows, labels] * 2 * z_loss * lse
    else:
        dz[rows, labels] -= 1 - label_smoothing
    dz = dz * slope * np.where(kept, weights, 0)[:, None]
    return losses, np.abs(z).max(1), *_gradients(dz, x, w, transpose_w)


def log_probs_and_gradients(x, w, labels, g, *, bias=None, transpose_w=False, **head):
    """Returns the log-probabilities of the labels (n, K), the largest |z| of each row, and dx, dw, dbias of their sum.

    The sum is weighted by g, (n, K).
    """
    z, slope = logits(x, w, bias=bias, transpose_w=transpose_w, **head)
    log_p = z - z.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    g = wide(g)
    dz = -np.exp(log_p) * g.sum(1, keepdims=True)
    np.add.at(dz, (np.arange(len(z))[:, None], labels), g)
    return np.take_along_axis(log_p, labels, 1), np.abs(z).max(1), *_gradients(dz * slope, x, w, transpose_w)


def soft_labels(
    x, w, labels, probs, weights, *, bias=None, z_loss=0.0, temperature=1.0, transpose_w=False, **head
):
    """Returns the loss of each token with label_probs, the largest |z| of its row, and gradients.

    The gradients of sum(weights * losses) are in x, w, the bias and the label_probs, (n, K). A label out of range must
    have the probability 0; the gradient in this probability is 0.
    """
    t = np.reshape(wide(temperature), (-1, 1))
    z, slope = logits(x, w, bias=bias, temperature=t, transpose_w=transpose_w, **head)
    labels, q = np.asarray(labels), wide(probs)
    valid = (labels >= 0) & (labels < z.shape[1])
    assert (valid | (q == 0)).all()
    columns, rows = np.where(valid, labels, 0), np.arange(len(z))[:, None]
    m = z.max(1, keepdims=True)
    e = np.exp(z - m)
    log_d = np.log(e.sum(1, keepdims=True))
    each = np.where(valid, (m - z[rows, columns]) + log_d, 0)
    lse = (m + log_d)[:, 0]
    dz = e / e.sum(1, keepdims=True) * (q.sum(1) + 2 * z_loss * lse)[:, None]
    np.add.at(dz, (rows, columns), -q)
    gradients = _gradients(dz * slope * wide(weights)[:, None], x, w, transpose_w)
    losses = (q * each).sum(1) + z_loss * lse**2
    return losses, np.abs(z).max(1), *gradients, each * wide(weights)[:, None]


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
    """Returns the losses from logits of `dtype` in memory, the usual way to write them."""
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
    """Returns x, w, labels and bias (or None). Logits are about 3 * `peak`; a peaked row has its label at the peak."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, depth)), dtype)
    w = jnp.asarray(rng.standard_normal((depth, vocab)) * peak * depth**-0.5, dtype)
    labels = rng.integers(0, vocab, n)
    if peak > 5:
        labels[::2] = (wide(x) @ wide(w)).argmax(1)[::2]
    b = jnp.asarray(rng.standard_normal(vocab), "float32") if bias else None
    return x, w.T if transpose_w else w, jnp.asarray(labels, "int32"), b


def arrays_of(features, n, depth, vocab, dtype, peak):
    """Returns the keywords of FEATURES without the bias, and arrays."""
    keywords = {"transpose_w": False, **FEATURES[features]}
    bias = keywords.pop("bias", False)
    return keywords, arrays(n, depth, vocab, dtype, peak=peak, bias=bias, transpose_w=keywords["transpose_w"])


def assert_gradients(dtype, size, held, got, theirs, want):
    """Asserts that gradients in the arrays `held` are within `gradient_bound`. `theirs` are of plain logits."""
    for name, a, their, of, array in zip("xwb", got, theirs, want, held):
        assert a.dtype == array.dtype and a.shape == array.shape
        bound = gradient_bound(name, dtype, rounded_errors(their, of), size.max())
        assert rounded_errors(a, of) <= bound, (name, rounded_errors(a, of), bound)


def run_all(operations, static, *arrays):
    """Returns the results of the three operations. Arguments: XLA would take seconds to sort constant labels."""

    @jit
    def run(x, w, b, tokens, weights):
        found = operations["projection"](x, w, b, tokens, **static)
        known = operations["projection_grad"](x, w, b, tokens, weights, found, **static)
        return found, known, operations["projection_with_grad"](x, w, b, tokens, weights, **static)

    return run(*arrays)


def tokens_of(labels, *, temperature=None, label_smoothing=None, z_loss=None):
    """Returns `Tokens` with numbers that all tokens share, or that are given as (n,) or (n, 1)."""
    n = len(labels)
    numbers = (temperature, label_smoothing, z_loss)
    return Tokens(
        labels, *(a if a is None else jnp.broadcast_to(jnp.ravel(jnp.float32(a)), (n,)) for a in numbers)
    )


def assert_operations(operations, n, depth, vocab, dtype, *, options, bias, peak, workspace_bytes):
    """Asserts that the three operations of an implementation are right, with gradients to 16-bit precision.

    Args:
      options: keywords of `plain`. A temperature doubles from the first token to the last.
    """
    options = dict(options)
    if "temperature" in options:
        options["temperature"] = (options["temperature"] * np.linspace(1, 2, n, dtype="float32"))[:, None]
    transpose_w = options.get("transpose_w", False)
    x, w, labels, b = arrays(n, depth, vocab, dtype, peak=peak, bias=bias, transpose_w=transpose_w)
    tokens = tokens_of(labels, **{k: v for k, v in options.items() if k not in ("softcap", "transpose_w")})
    weights = jnp.asarray((np.random.default_rng(1).random(n) - 0.25) * (np.arange(n) % 5 != 1), "float32")
    static = {"head": Head(transpose_w, options.get("softcap")), "workspace_bytes": workspace_bytes}
    losses, size, *gradients = losses_and_gradients(x, w, labels, weights, bias=b, **options)
    kept = np.asarray(weights) != 0

    def theirs(x, w, b):
        return jnp.sum(weights * plain(x, w, labels, dtype=x.dtype, bias=b, **options))

    found, known, (with_grad, *together) = run_all(operations, static, x, w, b, tokens, weights)
    token = jit(functools.partial(plain, dtype=jnp.float32, **options))(x, w, labels, bias=b)
    ulp = np.spacing(np.maximum(np.maximum(size, 1), np.abs(losses)).astype("float32"))
    # tensor cores sum z in another order and truncate, so another token may have as large an error
    allowed = 2 * np.abs(wide(token) - losses)[kept].max() + 3 * ulp
    for statistics in (found, with_grad):
        error = np.abs(wide(projection.losses(statistics, tokens, vocab)) - losses)
        assert (error <= allowed)[kept].all(), (error[kept].max(), allowed.max())
    their_grads = jit(jax.grad(theirs, (0, 1) if b is None else (0, 1, 2)))(x, w, b)
    for ours in (known, together):
        assert_gradients(dtype, size, [a for a in (x, w, b) if a is not None], ours, their_grads, gradients)


def workspace(vocab, rows=ROWS):
    """Returns the bytes of a workspace that holds `rows` rows of float32 logits."""
    return 4 * vocab * rows


def jit(f):
    """Compiles a function. On a GPU, XLA takes cuBLAS's first algorithm for each matrix product.

    Otherwise XLA compiles and tries many. In 14 processes, this took up to two minutes for a test in float32.
    """
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(f, compiler_options=options if jax.default_backend() == "gpu" else None)


def value_and_grads(f, *args):
    return jit(jax.value_and_grad(f, tuple(range(len(args)))))(*args)


def assert_losses_and_gradients(
    dtype, features, reduction, peak, *, n=101, depth=24, vocab=1003, rows=ROWS, weighted=False
):
    """Asserts that losses and gradients of `linear_cross_entropy` are right, in chunks of `rows` float32 rows.

    With `weighted`, there are token weights, including negative ones and 0.
    """
    keywords, (x, w, labels, bias) = arrays_of(features, n, depth, vocab, dtype, peak)
    where = np.arange(n) % 5 != 1
    token_weights = None
    weights = where * 1.0
    if weighted:
        token_weights = np.random.default_rng(2).uniform(-0.5, 1.5, n).astype("float32")
        token_weights[::7] = 0
        weights = weights * token_weights
    weights = weights / (weights.sum() if reduction == "mean" else 1)
    g = np.random.default_rng(1).standard_normal(n).astype("float32")
    if reduction is None:
        weights = weights * g
    held = [a for a in (x, w, bias) if a is not None]

    def ours(x, w, bias=None, reduction=reduction):
        given = {"bias": bias, "where": where, "token_weights": token_weights, **keywords}
        static = {"reduction": reduction, "workspace_bytes": workspace(vocab, rows)}
        loss = ps.linear_cross_entropy(x, w, labels, **given, **static)
        return jnp.sum(loss * g) if reduction is None else loss

    def theirs(x, w, bias=None, dtype=dtype):
        return jnp.sum(jnp.asarray(weights) * plain(x, w, labels, dtype=dtype, bias=bias, **keywords))

    losses, size, *gradients = losses_and_gradients(x, w, labels, weights, bias=bias, **keywords)
    token = jit(functools.partial(ps.linear_cross_entropy, reduction=None, **keywords))(
        x, w, labels, bias=bias
    )
    stored = jit(functools.partial(plain, **keywords))(x, w, labels, bias=bias)
    kept = weights != 0  # the oracle leaves out the other tokens
    ulp = np.spacing(np.maximum(size, np.abs(losses)).astype("float32"))
    error, their_error = (np.abs(wide(a) - losses) / ulp for a in (token, stored))
    assert (error <= their_error.max() + 2)[kept].all(), (error[kept].max(), their_error[kept].max())

    total, ours_grads = value_and_grads(ours, *held)
    _, their_grads = value_and_grads(theirs, *held)
    want = np.sum(np.where(kept, weights * losses, 0))
    unit = np.sum(np.where(kept, np.abs(weights) * (their_error.max() + 3) * ulp, 0))
    assert abs(float(total) - want) <= unit + 1e-6 * abs(want)
    assert_gradients(dtype, size, held, ours_grads, their_grads, gradients)


def assert_several_labels(run, dtype, features, peak, *, n=101, depth=24, vocab=1003, k=5, temperature=1.0):
    """Asserts that log-probabilities and gradients of several labels per token are right.

    Some tokens repeat a label. Some have cotangents that are all 0, or that add up to 0.

    Args:
      run: (x, w, bias, labels, g, keywords) -> the log-probabilities, and the gradients of the sum of g times them.
    """
    keywords, (x, w, first, bias) = arrays_of(features, n, depth, vocab, dtype, peak)
    keywords["temperature"] = temperature
    rng = np.random.default_rng(3)
    labels = rng.integers(0, vocab, (n, k)).astype("int32")
    labels[:, 0] = first
    labels[::3, -1] = labels[::3, 0]
    g = rng.standard_normal((n, k)).astype("float32")
    g[3::8] = 0
    g[4::8, 0] = -g[4::8, 1:].sum(1)
    held = [a for a in (x, w, bias) if a is not None]

    def theirs(x, w, bias=None, dtype=jnp.float32):
        of_label = functools.partial(plain, x, w, dtype=dtype, bias=bias, **keywords)
        return -jax.vmap(of_label, 1, 1)(jnp.asarray(labels))

    log_probs, size, *gradients = log_probs_and_gradients(x, w, labels, g, bias=bias, **keywords)
    values, ours_grads = run(x, w, bias, jnp.asarray(labels), jnp.asarray(g), keywords)
    ulp = np.spacing(np.maximum(np.maximum(size, 1)[:, None], np.abs(log_probs)).astype("float32"))
    error, their_error = (np.abs(wide(a) - log_probs) / ulp for a in (values, jit(theirs)(*held)))
    assert values.shape == (n, k) and values.dtype == jnp.float32 and (values <= 0).all()
    # Ours takes z at the labels from another sum than m and d. Each of the two sums has an error like theirs,
    # which of few numbers can be small by chance: at least an ulp is allowed.
    assert error.max() <= 2 * max(their_error.max(), 1) + 2, (error.max(), their_error.max())
    _, their_grads = value_and_grads(lambda *held: jnp.sum(g * theirs(*held, dtype=held[0].dtype)), *held)
    assert_gradients(dtype, size, held, ours_grads, their_grads, gradients)


def probs_of(first, k, vocab, spread=None):
    """Returns labels and label_probs (n, K). The first labels are given; some rows repeat one.

    A few label_probs are negative, or 0 at a bad label; a few rows are 0 or sum to 0.
    """
    n, rng = len(first), np.random.default_rng(7)
    labels = np.random.default_rng(3).integers(0, spread or vocab, (n, k)).astype("int32")
    labels[:, 0], labels[::3, -1] = first, first[::3]
    q = rng.normal(0.3, 0.5, (n, k)).astype("float32")
    q[1::9, 1:2] = 0  # a slice, since K may be 1
    labels[1::9, 1:2] = rng.choice([-100, vocab, 2**31 - 1], (len(labels[1::9]), 1))
    q[2::9] = 0
    q[3::9] = np.resize([1, -1], k)
    q[3::9, -1] -= q[3::9].sum(1)
    return labels, q


def assert_soft_labels(
    dtype, features, reduction, peak, *, n=101, depth=24, vocab=1003, rows=ROWS, k=5, spread=None, **more
):
    """Asserts that losses with label_probs and their gradients are right, with a mask, weights and temperatures.

    Args:
      spread: the labels are below this number; None for the number of columns.
      more: further arguments of `linear_cross_entropy`.
    """
    keywords, (x, w, label, bias) = arrays_of(features, n, depth, vocab, dtype, peak)
    labels, q = probs_of(label, k, vocab, spread)
    where = np.arange(n) % 5 != 1
    token_weights = np.random.default_rng(2).uniform(-0.5, 1.5, n).astype("float32")
    t = np.linspace(0.5, 2, n, dtype="float32")
    weights = where * token_weights / ((where * token_weights).sum() if reduction == "mean" else 1)
    g = np.random.default_rng(1).standard_normal(n).astype("float32") if reduction is None else 1
    bad = np.where(where[:, None], labels, -7)

    def ours(x, w, q, bias=None):
        arguments = {"where": where, "token_weights": token_weights, "temperature": t, "bias": bias}
        static = {"reduction": reduction, "workspace_bytes": workspace(vocab, rows), **keywords, **more}
        return jnp.sum(g * ps.linear_cross_entropy(x, w, bad, label_probs=q, **arguments, **static))

    def each(x, w, q, bias=None, dtype=jnp.float32):
        columns = jnp.clip(jnp.asarray(labels), 0, vocab - 1)
        options = {"bias": bias, "temperature": t[:, None], **keywords}
        z_loss = options.pop("z_loss", 0)
        of_labels = jax.vmap(lambda y: plain(x, w, y, dtype=dtype, **options), 1, 1)(columns)
        both = plain(x, w, columns[:, 0], dtype=dtype, z_loss=1.0, **options) - of_labels[:, 0]
        return jnp.sum(q * of_labels, 1) + z_loss * both

    def theirs(x, w, q, bias=None):
        return jnp.sum(jnp.asarray(weights * g) * each(x, w, q, bias, dtype))

    held = [a for a in (x, w, jnp.asarray(q), bias) if a is not None]
    losses, size, dx, dw, dbias, dq = soft_labels(
        x, w, labels, q, weights * g, bias=bias, temperature=t, **keywords
    )
    total, gradients = value_and_grads(ours, *held)
    _, their_gradients = value_and_grads(theirs, *held)
    unit = np.spacing(np.float32(1 + size)) * (np.abs(q).sum(1) + keywords.get("z_loss", 0) * size)
    assert abs(float(total) - (weights * g * losses).sum()) <= (8 * np.abs(weights * g) * unit).sum() + 1e-6
    for name, got, their, want in zip("xwqb", gradients, their_gradients, (dx, dw, dq, dbias)):
        bound = 1e-5 if name == "q" else gradient_bound(name, dtype, rounded_errors(their, want), size.max())
        assert rounded_errors(got, want) <= bound, (name, rounded_errors(got, want), bound)


def assert_operations_of_soft_labels(
    operations, n, depth, vocab, k, workspace_bytes, *, spread=None, softcap=None
):
    """Asserts that losses and gradients with label_probs are right, from the operations of an implementation."""
    x, w, label, bias = arrays(n, depth, vocab, "bfloat16", peak=2, bias=True)
    labels, q = probs_of(label, k, vocab, spread)
    t = np.linspace(0.5, 2, n, dtype="float32")
    weights = np.random.default_rng(2).uniform(-0.5, 1.5, n).astype("float32") * (np.arange(n) % 5 != 1)
    losses, size, *gradients, _ = soft_labels(
        x, w, labels, q, weights, bias=bias, temperature=t, z_loss=0.1, softcap=softcap
    )
    columns = jnp.where(labels < vocab, jnp.maximum(labels, -1), -1).astype(jnp.int32)
    tokens = Tokens(columns, jnp.asarray(t), None, jnp.full(n, 0.1), jnp.asarray(q))
    static = {"head": Head(softcap=softcap), "workspace_bytes": workspace_bytes}

    alone, known, (found, *together) = run_all(operations, static, x, w, bias, tokens, weights)
    lse = size + np.log(vocab)
    unit = np.spacing(np.float32(1 + lse)) * (np.abs(q).sum(1) + 0.2 * lse)
    for statistics in (alone, found):
        error = np.abs(wide(projection.losses(statistics, tokens, vocab)) - losses)
        assert (error <= 8 * unit)[weights != 0].all(), (error / unit)[weights != 0].max()
    for ours in (known, together):
        for name, got, want in zip("xwb", ours, gradients):
            assert rounded_errors(got, want) <= 6e-3, (name, rounded_errors(got, want))


def run_log_probs(x, w, bias, labels, g, keywords, rows=ROWS, **more):
    """The `run` of `assert_several_labels` for the public function."""
    keywords = {**keywords, "workspace_bytes": workspace(1003, rows), **more}

    @jit
    def run(x, w, bias):
        f = lambda x, w, bias: ps.linear_log_probs(x, w, labels, bias=bias, **keywords)  # noqa: E731
        values, pullback = jax.vjp(f, x, w, bias)
        return values, pullback(g)

    return run(x, w, bias)


def run_operations(operations, workspace_bytes, x, w, bias, labels, g, keywords):
    """The `run` of `assert_several_labels` for the operations of an implementation."""
    static = {
        "head": Head(keywords["transpose_w"], keywords.get("softcap")),
        "workspace_bytes": workspace_bytes,
    }
    temperature = keywords["temperature"]
    tokens = Tokens(labels, jnp.full(len(x), temperature, "float32"))

    @jit
    def run(x, w, bias, tokens, g):
        found = operations["projection"](x, w, bias, tokens, **static)
        gradients = operations["projection_grad"](x, w, bias, tokens, -g, found, **static)
        return -projection.losses(found, tokens, None), gradients

    return run(x, w, bias, tokens, g)


def assert_stats(dtype, features, peak, *, n=101, depth=24, vocab=1003, rows=ROWS, temperature=True, **more):
    """Asserts that statistics and gradients of `linear_token_stats` are right, in chunks of `rows` float32 rows."""

    def run(x, w, bias, labels, t, g, keywords):
        keywords = {**keywords, "workspace_bytes": workspace(vocab, rows), **more}

        @jit
        def run(x, w, bias):
            def floats(x, w, bias):
                stats = ps.linear_token_stats(
                    x, w, labels, bias=bias, temperature=t if temperature else 1.0, **keywords
                )
                return stats[:3], stats

            _, pull, stats = jax.vjp(floats, x, w, bias, has_aux=True)
            return stats, pull(tuple(g))

        return run(x, w, bias)

    _assert_stats(run, n, depth, vocab, dtype, features, peak, temperature)


def assert_operations_of_stats(operations, n, depth, vocab, dtype, features, peak, workspace_bytes):
    """Asserts that statistics and gradients are right, from the operations of an implementation."""

    def run(x, w, bias, labels, t, g, keywords):
        head = Head(keywords.get("transpose_w", False), keywords.get("softcap"), entropy=True)
        static = {"head": head, "workspace_bytes": workspace_bytes}
        weights = jnp.asarray(np.stack([-g[0], g[1], g[2]], -1))

        @jit
        def run(x, w, bias):
            tokens = Tokens(labels, jnp.asarray(t))
            found = operations["projection"](x, w, bias, tokens, **static)
            gradients = operations["projection_grad"](x, w, bias, tokens, weights, found, **static)
            log_probs, lse = -projection.losses(found, tokens, vocab), normalizers.log_of(found.normalizer)
            return (log_probs, normalizers.entropy(found.moments), lse, found.argmax), gradients

        return run(x, w, bias)

    _assert_stats(run, n, depth, vocab, dtype, features, peak, True)


def assert_argmax_of_zeros(implementation):
    """Asserts that 0 and -0 tie, also in different tiles. The products underflow when the temperature divides them."""
    n, vocab = 4, 600
    w = np.full((64, vocab), -(2.0**-50), "float32")
    w[:, 5::300] *= -1
    x = np.zeros((n, 64), "float32")
    x[:, 0] = 2.0**-50 * np.array([1, -1, 2.0**100, -(2.0**100)])  # two rows do not underflow
    x, w = jnp.asarray(x, "bfloat16"), jnp.asarray(w, "bfloat16")
    f = functools.partial(ps.linear_token_stats, temperature=2.0**60, implementation=implementation)
    np.testing.assert_array_equal(jit(f)(x, w).argmax, [0, 0, 5, 0])


def _assert_stats(run, n, depth, vocab, dtype, features, peak, temperature):
    """Asserts that statistics and gradients are right. The argmax is exact if its logit is clearly the largest.

    Args:
      run: (x, w, bias, labels, temperatures, cotangents, keywords) -> (statistics, gradients).
      temperature: whether the temperatures differ from 1.
    """
    keywords, (x, w, labels, bias) = arrays_of(features, n, depth, vocab, dtype, peak)
    g = np.random.default_rng(1).standard_normal((3, n)).astype("float32")
    g[:, ::5] = 0
    t = np.linspace(0.5, 2, n, dtype="float32") if temperature else np.ones(n, "float32")
    stats, gradients = run(x, w, bias, labels, t, g, keywords)
    *values, argmax = stats[:4]
    z, slope = logits(x, w, bias=bias, temperature=wide(t)[:, None], **keywords)
    *want, want_argmax = oracle.token_stats(z, labels)
    ulp = np.spacing(np.float32(1 + np.abs(z).max()))
    for got, of in zip(values, want):
        assert got.dtype == jnp.float32 and got.shape == (n,)
        assert np.abs(wide(got) - of).max() <= 24 * ulp, np.abs(wide(got) - of).max() / ulp
    others = np.where(np.arange(vocab) == want_argmax[:, None], -np.inf, z)
    clear = z.max(1) - others.max(1) > 64 * ulp
    assert argmax.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(argmax)[clear], want_argmax[clear])
    dz = (oracle.token_stats_vjp(z, labels, g)[0] * slope).astype("float64")
    wanted = _gradients(dz, x, w, keywords["transpose_w"])
    bound = {"float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}[dtype]
    for name, of, got, array in zip("xwb", wanted, gradients, (x, w, bias)):
        if array is not None:
            assert got.dtype == array.dtype and got.shape == array.shape
            assert rounded_errors(got, of) <= bound, (name, rounded_errors(got, of))


def assert_topk(dtype, features, k, *, log=False, n=101, depth=24, vocab=1003, rows=ROWS, **more):
    """Asserts that `linear_topk` has the values and, except for near ties, the indices of the oracle's top-k."""
    keywords, (x, w, _, bias) = arrays_of(features, n, depth, vocab, dtype, 2)
    t = np.linspace(0.5, 2, n, dtype="float32")
    static = {"workspace_bytes": workspace(vocab, rows), "log": log, **keywords, **more}
    f = functools.partial(ps.linear_topk, k=k, temperature=t, **static)
    values, indices = jit(lambda x, w, bias: f(x, w, bias=bias))(x, w, bias)
    assert (values.dtype, indices.dtype) == (jnp.float32, jnp.int32)
    assert values.shape == indices.shape == (n, k)
    z, _ = logits(x, w, bias=bias, temperature=wide(t)[:, None], **keywords)
    want, best = oracle.fused_topk(z, k, log=log)
    ulp = np.spacing(np.float32(1 + np.abs(z).max()))
    row = oracle.log_softmax(z) if log else oracle.softmax(z)
    at_indices = np.take_along_axis(row, np.asarray(indices), -1)
    for got in values, at_indices:  # a near tie may be in another order
        assert (np.abs(wide(got) - want) <= 24 * ulp * (1 if log else want)).all()
    assert (np.asarray(indices) == best).mean() > 0.99
    assert all(len(set(row)) == k for row in np.asarray(indices).tolist())


# --- Memory at the size of a large language model: D = 4096, V = 128256 ---------------------------------


def of_size(n, depth=4096, vocab=128256, dtype="bfloat16"):
    shapes = ((n, depth), dtype), ((depth, vocab), dtype), ((n,), "int32")
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


DW = 4 * 4096 * 128256
MEMORY = {  # (function, products in the program, bytes of dw). A gradient has its products twice: first chunk and loop.
    "mean": (jax.grad(ps.linear_cross_entropy, (0, 1)), 2 * 3, DW),
    "evaluated": (ps.linear_cross_entropy, 1, 0),
    "none": (
        jax.grad(lambda *a: jnp.sum(ps.linear_cross_entropy(*a, reduction=None)), (0, 1)),
        1 + 2 * 3,
        DW,
    ),
    "frozen w": (jax.grad(ps.linear_cross_entropy), 2 * 2, 0),
}


def assert_left_out_tokens_do_not_matter(dtype, share, reduction, n=1100, depth=24, vocab=300, **options):
    """With and without the tokens that are left out, values and gradients agree. Their x is NaN."""
    x, w, labels, bias = arrays(n, depth, vocab, dtype, bias=True)
    where = np.random.default_rng(5).random(n) < share
    bad_x, bad_labels = jnp.where(where[:, None], x, jnp.nan), jnp.where(where, labels, -100)
    g = np.linspace(-1, 2, n).astype("float32")

    def total(x, w, bias, labels, g, where=None):
        options_of_all = {"bias": bias, "where": where, **options}
        loss = ps.linear_cross_entropy(x, w, labels, reduction=reduction, **options_of_all)
        two_labels = jnp.stack([labels, jnp.where(labels < 0, labels, labels // 2)], 1)
        log_probs = ps.linear_log_probs(x, w, two_labels, temperature=0.7, **options_of_all)
        return jnp.sum(loss * (g if reduction is None else 1)) + jnp.sum(log_probs * g[:, None])

    gradients = jit(jax.value_and_grad(total, (0, 1, 2)))
    got, (dx, dw, dbias) = gradients(bad_x, w, bias, bad_labels, g, where)
    assert not wide(dx[~where]).any()
    want, (want_dx, *want_others) = gradients(x[where], w, bias, labels[where], g[where])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    bound = 1e-5 if dtype == "float32" else 0.02  # products of other sizes may round differently
    for a, b in zip((dx[where], dw, dbias), (want_dx, *want_others)):
        assert not a.size or rounded_errors(a, wide(b)) <= bound
