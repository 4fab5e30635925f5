"""The projection and its loss in float64 NumPy, and the error bounds of the results.

The bounds come from `plain`, which computes the same with the logits in memory. Its logits are float32, or have the
inputs' 16-bit dtype. Both results are compared with the oracle:

  losses      The error of each token is at most twice the largest error with float32 logits, plus 3 ulps of the
              largest |z|: the loss is the difference of logsumexp and the logit. Tensor cores add in another order, so
              another token may have the largest error. The ulps are at least ulps of 1: d is the product of two
              exponentials, each with a relative error of 2^-22, and so log d has this absolute error. This matters with
              one column, where |z| may be 0.01: plain logits have d = 1 exactly.
  gradients   The distance (norm) from float64 is at most the distance with plain logits of the inputs' dtype, within
              the limits of `gradient_bound`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_softmax as ps
from pallas_softmax._src import normalizers
from pallas_softmax._src.dispatch.choose import choose_plain
from pallas_softmax._src.dispatch.operation import describe
from pallas_softmax._src.linear import losses as projection
from pallas_softmax._src.linear.losses import Columns, Head, Tokens, token_losses
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.operation import SAMPLE
from tests.support import oracle
from tests.support.oracle import wide
from tests.support.trees import floats_of

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
      name: the argument that the gradient is in.
      dtype: the dtype of x.
      of_plain: the distance of the gradient with plain logits.
      largest: the largest |z|.
    """
    if name == "label_probs":  # the losses of the labels
        return 1e-5
    if dtype == "float32":  # both round z once, and the order of the sum decides the direction
        return 2 * of_plain + 2**-24 * largest
    # both round dz and the result, but not the same numbers; the roundings at a few labels cause most of the distance
    half_ulp = {"bfloat16": 2**-8, "float16": 2**-11}[str(dtype)]
    if name == "bias":  # plain JAX adds a float32 bias to widened logits, and does not round the bias's dz
        return max(of_plain, half_ulp)
    return max(1.1 * of_plain, half_ulp)


# --- The oracle, and plain JAX --------------------------------------------------------------------------


def logits(x, w, *, bias=None, softcap=None, temperature=1.0, transpose_w=False):
    """Returns z, and its derivative with respect to the softcap's argument. A temperature may be one per token."""
    z = wide(x) @ (wide(w).T if transpose_w else wide(w))
    z = z if bias is None else z + wide(bias)
    t = np.reshape(np.asarray(temperature, "float64"), (-1, 1))
    slope = 1 / t
    if softcap is not None:
        capped = np.tanh(z / softcap)
        z, slope = softcap * capped, (1 - capped**2) / t
    return z / t, slope


def gradients_of(dz, x, w, transpose_w):
    x, w = wide(x), wide(w)
    return dz @ (w if transpose_w else w.T), dz.T @ x if transpose_w else x.T @ dz, dz.sum(0)


def losses_and_gradients(
    x, w, labels, weights, *, label_probs=None, label_smoothing=0.0, z_loss=0.0, transpose_w=False, **head
):
    """Returns the loss of each token, the largest |z| of its row, and gradients of sum(weights * losses).

    The gradients are in x, w, the bias and the label_probs. Tokens of weight 0 are left out, whatever x contains. A
    label out of range must have the weight or the probability 0; the gradient in this probability is 0.

    Args:
      labels: (n,), or (n, K). Without label_probs, each of K labels has a loss and a weight.
    """
    x, labels, weights = np.array(x), np.asarray(labels), wide(weights)
    n = len(labels)
    one_loss_per_label = labels.ndim == 2 and label_probs is None
    columns = labels.reshape(n, -1)
    q = np.ones(columns.shape) if label_probs is None else wide(label_probs)
    of_labels = q * weights.reshape(n, -1)
    of_token = weights.reshape(n, -1).sum(1)
    x[~weights.reshape(n, -1).any(1)] = 0
    z, slope = logits(x, w, transpose_w=transpose_w, **head)
    valid = (columns >= 0) & (columns < z.shape[1])
    assert (valid | (of_labels == 0)).all()
    at = np.arange(n)[:, None], np.where(valid, columns, 0)
    m = z.max(1, keepdims=True)
    e = np.exp(z - m)
    log_d = np.log(e.sum(1, keepdims=True))
    each = np.where(valid, (m - z[at]) + log_d, 0)
    lse = (m + log_d)[:, 0]
    losses = each if one_loss_per_label else (q * each).sum(1) + z_loss * lse**2
    dz = e / e.sum(1, keepdims=True) * (of_labels.sum(1) + 2 * z_loss * lse * of_token)[:, None]
    smoothing = np.reshape(label_smoothing, (-1, 1))
    np.add.at(dz, at, -(1 - smoothing) * of_labels)
    if smoothing.any():  # the mean is -inf where the bias masks a column
        losses = losses + label_smoothing * (z[at][:, 0] - z.mean(1))
        dz -= smoothing * of_token[:, None] / z.shape[1]
    gradients = gradients_of(dz * slope, x, w, transpose_w)
    return losses, np.abs(z).max(1), *gradients, each * weights.reshape(n, -1)


def plain_logits(x, w, dtype, *, bias=None, softcap=None, temperature=1.0, transpose_w=False):
    """Returns float32 logits from products of `dtype`, the usual way to write them."""
    products = ((1,), (1 if transpose_w else 0,)), ((), ())
    z = lax.dot_general(x, w, products, precision="highest", preferred_element_type=dtype)
    z = z.astype(jnp.float32)
    z = z if bias is None else z + bias.astype(z.dtype)
    return (z if softcap is None else softcap * jnp.tanh(z / softcap)) / jnp.reshape(temperature, (-1, 1))


def plain(x, w, labels, *, dtype=jnp.float32, label_probs=None, label_smoothing=0.0, z_loss=0.0, **head):
    """Returns the losses of `losses_and_gradients` from logits in memory."""
    z = plain_logits(x, w, dtype, **head)
    lse = jax.nn.logsumexp(z, -1)
    if labels.ndim == 2:
        each = lse[:, None] - jnp.take_along_axis(z, jnp.clip(labels, 0, z.shape[1] - 1), -1)
        return each if label_probs is None else jnp.sum(label_probs * each, -1) + z_loss * lse**2
    at_label = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    loss = lse - (1 - label_smoothing) * at_label - label_smoothing * jnp.mean(z, -1)
    return loss + z_loss * lse**2


class Expected(NamedTuple):
    """The oracle's losses and gradients, and the allowed distances from them.

    Attributes:
      weights: of the losses, in the sum that has the gradients.
      losses, errors: (n,), or (n, K) for K losses per token.
      gradients, distances: by the name of the argument; the distances are relative.
    """

    weights: np.ndarray
    losses: np.ndarray
    errors: np.ndarray
    gradients: dict
    distances: dict

    def check_losses(self, losses, factors=1.0):
        """Asserts that losses, which were multiplied by factors, are right in tokens with a weight."""
        error, allowed = np.abs(wide(losses) - factors * self.losses), np.abs(factors) * self.errors
        assert ((error <= allowed) | (self.weights == 0)).all(), np.max(error / allowed)

    def check_gradients(self, gradients, arguments):
        check_gradients(gradients, self.gradients, self.distances, arguments)


def check_gradients(gradients, wanted, distances, arguments):
    for name, want in wanted.items():
        got, distance = gradients[name], rounded_errors(gradients[name], want)
        assert got.dtype == arguments[name].dtype and got.shape == arguments[name].shape
        assert distance <= distances[name], (name, distance, distances[name])


def expected(arguments, labels, weights, **options):
    """Returns what losses and gradients must be, for x, w and perhaps bias and label_probs in `arguments`."""
    losses, size, *gradients = losses_and_gradients(labels=labels, weights=weights, **arguments, **options)
    dtype, labels = arguments["x"].dtype, jnp.asarray(labels)
    gradients = dict(zip(("x", "w", "bias", "label_probs"), gradients))

    def theirs(arguments, labels):
        total = jnp.sum(jnp.asarray(weights) * plain(**arguments, labels=labels, dtype=dtype, **options))
        return total, plain(**arguments, labels=labels, **options)

    (_, stored), their_gradients = jit(jax.value_and_grad(theirs, has_aux=True))(arguments, labels)
    of_rows = (slice(None), None) if losses.ndim == 2 else slice(None)
    ulp = np.spacing(np.maximum(np.maximum(size, 1)[of_rows], np.abs(losses)).astype("float32"))
    if "label_probs" in arguments:
        ulp = ulp * (1 + np.abs(arguments["label_probs"]).sum(1) + 2 * options.get("z_loss", 0) * size)
    their_errors = np.where(np.asarray(weights) == 0, 0, np.abs(wide(stored) - losses) / ulp)
    return Expected(
        weights=np.asarray(weights),
        losses=losses,
        errors=(2 * their_errors.max() + 3) * ulp,
        gradients={name: gradients[name] for name in arguments},
        distances={
            name: gradient_bound(name, dtype, rounded_errors(their, gradients[name]), size.max())
            for name, their in their_gradients.items()
        },
    )


# --- Arrays ---------------------------------------------------------------------------------------------


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


def arguments_of(features, n, depth, vocab, dtype, peak):
    """Returns the options of FEATURES without the bias, the labels, and a dictionary of x, w and perhaps a bias."""
    options = {"transpose_w": False, **FEATURES[features]}
    bias = options.pop("bias", False)
    x, w, labels, b = arrays(n, depth, vocab, dtype, peak=peak, bias=bias, transpose_w=options["transpose_w"])
    return options, labels, {"x": x, "w": w} | ({"bias": b} if bias else {})


def several_labels(first, k, vocab):
    """Returns labels (n, K), and cotangents of their losses. The first labels are given; some rows repeat one.

    Some rows of the cotangents are all 0, or add up to 0.
    """
    n, rng = len(first), np.random.default_rng(3)
    labels = rng.integers(0, vocab, (n, k)).astype("int32")
    labels[:, 0], labels[::3, -1] = first, first[::3]
    g = rng.standard_normal((n, k)).astype("float32")
    g[3::8] = 0
    g[4::8, 0] = -g[4::8, 1:].sum(1)
    return labels, g


def soft_labels(first, k, vocab, spread=None):
    """Returns labels and label_probs (n, K). A few label_probs are negative; a few rows are 0 or sum to 0.

    Some label_probs are 0 at a bad label.

    Args:
      spread: the labels are below this number; None for the number of columns.
    """
    labels, _ = several_labels(first, k, spread or vocab)
    rng = np.random.default_rng(7)
    q = rng.normal(0.3, 0.5, labels.shape).astype("float32")
    q[1::9, 1:2] = 0  # a slice, since K may be 1
    labels[1::9, 1:2] = rng.choice([-100, vocab, 2**31 - 1], (len(labels[1::9]), 1))
    q[2::9] = 0
    q[3::9] = np.resize([1, -1], k)
    q[3::9, -1] -= q[3::9].sum(1)
    return labels, jnp.asarray(q)


def tokens_of(labels, *, label_probs=None, **numbers):
    """Returns `Tokens`. Its numbers are shared by all tokens, or given as (n,) or (n, 1)."""
    n = len(labels)
    numbers = {name: jnp.broadcast_to(jnp.ravel(jnp.float32(a)), (n,)) for name, a in numbers.items()}
    return Tokens(labels, label_probs=label_probs, **numbers)


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


# --- Losses and log-probabilities -----------------------------------------------------------------------


def assert_losses_and_gradients(
    dtype, features, reduction, peak, *, n=101, depth=24, vocab=1003, rows=ROWS, weighted=False, k=None
):
    """Asserts that losses and gradients of `linear_cross_entropy` are right, in chunks of `rows` float32 rows.

    Tokens that are left out have a NaN in x and a bad label.

    Args:
      weighted: with temperatures and with token weights, including negative ones and 0.
      k: with this number of labels and label_probs per token; None for one label.
    """
    options, labels, arguments = arguments_of(features, n, depth, vocab, dtype, peak)
    if k is not None:
        labels, arguments["label_probs"] = soft_labels(labels, k, vocab)
    held, where, token_weights = dict(arguments), np.arange(n) % 5 != 1, np.ones(n)
    if weighted:
        token_weights = np.random.default_rng(2).uniform(-0.5, 1.5, n).astype("float32")
        token_weights[::7] = 0
        held["token_weights"], options["temperature"] = token_weights, np.linspace(0.5, 2, n, dtype="float32")
    weights = where * token_weights.astype("float64")
    kept = weights != 0
    held["x"] = np.array(held["x"])
    held["x"][~kept] = np.nan
    bad = np.where(kept if k is None else kept[:, None], labels, -100)
    divisor = weights.sum() if reduction == "mean" else 1
    g = np.random.default_rng(1).standard_normal(n).astype("float32") if reduction is None else 1

    def ours(held):
        static = {"reduction": reduction, "workspace_bytes": workspace(vocab, rows)}
        loss = ps.linear_cross_entropy(**held, labels=bad, where=where, **options, **static)
        return jnp.sum(g * loss), loss

    (total, losses), gradients = jit(jax.value_and_grad(ours, has_aux=True))(held)
    want = expected(arguments, labels, weights / divisor * g, **options)
    allowed = np.sum(np.abs(want.weights) * want.errors)
    np.testing.assert_allclose(total, np.sum(want.weights * want.losses), rtol=1e-6, atol=allowed)
    want.check_gradients(gradients, held)
    if reduction is None:
        want.check_losses(losses, token_weights)
    if weighted:
        mean = np.sum(weights * want.losses) / divisor if reduction == "mean" else 0
        of_weights = np.where(kept, g * (want.losses - mean) / divisor, 0)
        assert rounded_errors(gradients["token_weights"], of_weights) <= 1e-5


def assert_log_probs(dtype, features, peak, *, n=101, depth=24, vocab=1003, rows=ROWS, k=5):
    """Asserts that log-probabilities and gradients of K labels per token are right."""
    options, labels, arguments = arguments_of(features, n, depth, vocab, dtype, peak)
    labels, g = several_labels(labels, k, vocab)
    options["temperature"] = 0.7

    @jit
    def run(arguments, g):
        f = functools.partial(ps.linear_log_probs, workspace_bytes=workspace(vocab, rows), **options)
        values, pullback = jax.vjp(lambda arguments: f(labels=labels, **arguments), arguments)
        return values, *pullback(g)

    values, gradients = run(arguments, g)
    assert values.shape == (n, k) and values.dtype == jnp.float32 and (values <= 0).all()
    want = expected(arguments, labels, -g, **options)
    want.check_losses(-values)
    want.check_gradients(gradients, arguments)


def run_all(operations, static, *arrays, together=True):
    """Returns the statistics and the gradients of the operations of an implementation.

    `together` adds the results of `projection_grad` without known statistics. Labels are arguments: XLA would take
    seconds to sort constant ones.
    """

    @jit
    def run(x, w, b, tokens, weights):
        found = operations["projection"](x, w, b, tokens, **static)
        _, *known = operations["projection_grad"](x, w, b, tokens, weights, found, **static)
        if not together:
            return [found], [known]
        again, *gradients = operations["projection_grad"](x, w, b, tokens, weights, **static)
        return [found, again], [known, gradients]

    return run(*arrays)


def assert_operations(operations, n, depth, vocab, transpose_w, dtype, bias, peak, workspace_bytes, options):
    """Asserts that the operations of an implementation are right, with gradients to 16-bit precision.

    Args:
      options: "softcap", and numbers: "temperature", which doubles from the first token to the last, "label_smoothing"
        and "z_loss". "k" labels per token; with "soft", they have label_probs. "spread" is as for `soft_labels`.
    """
    numbers = dict(options)
    softcap, k, soft, spread = (numbers.pop(name, None) for name in ("softcap", "k", "soft", "spread"))
    x, w, labels, b = arrays(n, depth, vocab, dtype, peak=peak, bias=bias, transpose_w=transpose_w)
    arguments = {"x": x, "w": w} | ({"bias": b} if bias else {})
    weights = (np.random.default_rng(1).random(n) - 0.25) * (np.arange(n) % 5 != 1)
    probs = None
    if soft:
        labels, probs = soft_labels(labels, k, vocab, spread)
        arguments["label_probs"] = probs
    elif k is not None:
        labels, weights = several_labels(labels, k, vocab)
    if "temperature" in numbers:
        numbers["temperature"] = numbers["temperature"] * np.linspace(1, 2, n, dtype="float32")
    weights = weights.astype("float32")
    columns = jnp.where(labels < vocab, jnp.maximum(labels, -1), -1).astype(jnp.int32)
    tokens = tokens_of(columns, label_probs=probs, **numbers)
    static = {"head": Head(transpose_w, softcap), "workspace_bytes": workspace_bytes}
    found, gradients = run_all(
        operations, static, x, w, Columns(b), tokens, jnp.asarray(weights), together=k is None or soft
    )
    want = expected(arguments, labels, weights, softcap=softcap, transpose_w=transpose_w, **numbers)
    want.gradients.pop("label_probs", None)
    for statistics, of in zip(found, gradients):
        want.check_losses(projection.losses(statistics, tokens, vocab))
        want.check_gradients(dict(zip(("x", "w", "bias"), of)), arguments)


# --- Statistics and winners -----------------------------------------------------------------------------


def function_stats(arguments, labels, t, g, **options):
    def floats(arguments):
        stats = ps.linear_token_stats(labels=labels, temperature=t, **arguments, **options)
        return stats[:3], stats

    _, pullback, stats = jax.vjp(floats, arguments, has_aux=True)
    return stats, *pullback(tuple(g))


def operation_stats(operations, arguments, labels, t, g, *, transpose_w, workspace_bytes, softcap=None):
    static = {"head": Head(transpose_w, softcap, entropy=True), "workspace_bytes": workspace_bytes}
    held = arguments["x"], arguments["w"], Columns(arguments.get("bias")), Tokens(labels, t)
    found = operations["projection"](*held, **static)
    weights = jnp.stack([-g[0], g[1], g[2]], -1)
    _, *gradients = operations["projection_grad"](*held, weights, found, **static)
    log_probs, lse = -projection.losses(found, held[-1], None), normalizers.log_of(found.normalizer)
    stats = log_probs, normalizers.entropy(found.normalizer), lse, found.argmax
    return stats, dict(zip(("x", "w", "bias"), gradients))


def assert_stats(
    dtype, features, peak, *, n=101, depth=24, vocab=1003, workspace_bytes=None, warm=True, run=function_stats
):
    """Asserts that statistics and gradients are right. The argmax is exact if its logit is clearly the largest.

    Args:
      workspace_bytes: None for chunks of a few rows.
      warm: whether the temperatures differ from 1.
      run: returns statistics and gradients, as `function_stats`.
    """
    options, labels, arguments = arguments_of(features, n, depth, vocab, dtype, peak)
    g = np.random.default_rng(1).standard_normal((3, n)).astype("float32")
    g[:, ::5] = 0
    t = np.linspace(0.5, 2, n, dtype="float32") if warm else np.ones(n, "float32")
    run = functools.partial(run, workspace_bytes=workspace_bytes or workspace(vocab), **options)
    stats, gradients = jit(run)(arguments, labels, t, g)
    *values, argmax = stats[:4]
    z, slope = logits(**arguments, temperature=t, **options)
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
    wanted = gradients_of(dz, arguments["x"], arguments["w"], options["transpose_w"])
    check_gradients(gradients, dict(zip(arguments, wanted)), rounded_to(dtype), arguments)


def rounded_to(dtype):
    """Returns the allowed distances of gradients if dz and the results are rounded: to the dtype, or to float32."""
    distance = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}[dtype]
    return {"x": distance, "w": distance} | dict.fromkeys(("bias", "token_weights"), max(distance, 1e-6))


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


def assert_topk(dtype, features, k, *, log=False, n=101, depth=24, vocab=1003, rows=ROWS):
    """Asserts that `linear_topk` has the values and, except for near ties, the indices of the oracle's top-k."""
    options, _, arguments = arguments_of(features, n, depth, vocab, dtype, 2)
    t = np.linspace(0.5, 2, n, dtype="float32")
    static = {"k": k, "workspace_bytes": workspace(vocab, rows), "log": log, **options}
    values, indices = jit(lambda held: ps.linear_topk(**held, temperature=t, **static))(arguments)
    assert (values.dtype, indices.dtype) == (jnp.float32, jnp.int32)
    assert values.shape == indices.shape == (n, k)
    z, _ = logits(**arguments, temperature=t, **options)
    want, best = oracle.fused_topk(z, k, log=log)
    ulp = np.spacing(np.float32(1 + np.abs(z).max()))
    row = oracle.log_softmax(z) if log else oracle.softmax(z)
    at_indices = np.take_along_axis(row, np.asarray(indices), -1)
    for got in values, at_indices:  # a near tie may be in another order
        assert (np.abs(wide(got) - want) <= 24 * ulp * (1 if log else want)).all()
    assert (np.asarray(indices) == best).mean() > 0.99
    assert all(len(set(row)) == k for row in np.asarray(indices).tolist())


def draws(operations, x, w, temperature, top_p=None):
    """Returns the results of `linear_sample` with the key 3, by these operations."""
    n, vocab = x.shape[0], w.shape[1]
    call = describe(SAMPLE, jax.ShapeDtypeStruct((n, vocab), jnp.float32), (1,), None, function="linear_sample")
    words = jnp.concatenate(noise.words(jax.random.key(3), (n, vocab), 1), -1)
    tokens = Tokens(None, temperature=temperature, draw=(words, None, top_p and jnp.full((n, 1), top_p), None))
    static = {"head": Head(undivided=True), "workspace_bytes": workspace(vocab), "sampler": choose_plain(call)}
    return jit(functools.partial(operations["projection_sample"], **static))(x, w, Columns(), tokens)


def assert_sample(operations, x, w, temperature, top_p=None):
    """Asserts that `linear_sample` draws as `sample`, with the bits of `linear_log_probs`, by these operations."""
    indices, log_probs, log_mass = draws(operations, x, w, temperature, top_p)
    t = 1.0 if temperature is None else temperature
    want = ps.sample(jax.random.key(3), jnp.asarray(logits(x, w)[0], jnp.float32), temperature=t, top_p=top_p)
    np.testing.assert_array_equal(indices, want.indices)
    np.testing.assert_allclose(log_mass, want.log_mass, atol=1e-4)
    labels = Tokens(indices, temperature=temperature)
    static = {"head": Head(), "workspace_bytes": workspace(w.shape[1])}
    statistics = jit(functools.partial(operations["projection"], **static))(x, w, Columns(), labels)
    np.testing.assert_array_equal(log_probs, 0 - token_losses("linear_log_probs", statistics, labels, w.shape[1]))


# --- Tokens that are left out ---------------------------------------------------------------------------


def two(labels):
    return jnp.stack([labels, jnp.where(labels < 0, labels, labels // 2)], -1)


def soft(x, w, labels, **options):
    probs = jnp.broadcast_to(jnp.float32([0.7, 0.2]), (len(labels), 2))
    return ps.linear_cross_entropy(x, w, two(labels), label_probs=probs, reduction=None, **options)


loss = functools.partial(ps.linear_cross_entropy, reduction=None)
EACH = {  # of (x, w, labels): results, one per token or K per token
    "logsumexp": lambda x, w, labels, **options: ps.linear_logsumexp(x, w, **options),
    "log_probs": ps.linear_log_probs,
    "several": lambda x, w, labels, **options: ps.linear_log_probs(x, w, two(labels), **options),
    "loss": loss,
    "loss with options": functools.partial(loss, z_loss=0.1, label_smoothing=0.2),
    "soft": soft,
    "divergence": lambda x, w, labels, **options: ps.linear_kl_divergence(
        x, w, x[:, ::-1], w, beta=0.5, reduction=None, **options
    ),
    "stats": ps.linear_token_stats,
    "stats without labels": lambda x, w, labels, **options: ps.linear_token_stats(x, w, **options)[1:],
    "topk": lambda x, w, labels, bias=None, **options: ps.linear_topk(
        *lax.stop_gradient((x, w)), 3, bias=lax.stop_gradient(bias), log=True, **options
    ),
    "sample": lambda x, w, labels, bias=None, **options: ps.linear_sample(
        jnp.broadcast_to(jax.random.key(0), x.shape[:1]),  # one for each token: noise does not count tokens
        *lax.stop_gradient((x, w)),
        bias=lax.stop_gradient(bias),
        **options,
    ),
}
MEANS = {
    "mean": ps.linear_cross_entropy,
    "mean of divergences": lambda x, w, labels, **options: ps.linear_kl_divergence(x, w, x[:, ::-1], w, **options),
}


def assert_left_out_tokens_do_not_matter(names, dtype, share, *, n=1100, depth=24, vocab=300, offset=0, **static):
    """Asserts that results and gradients are those without the tokens that are left out, which get 0.

    Tokens that are left out have a NaN in x and a bad label.

    Args:
      names: of functions in EACH and MEANS.
      share: the share of the tokens that are kept.
      offset: is added to the bias.
    """
    x, w, labels, bias = map(np.asarray, arrays(n, depth, vocab, dtype, bias=True))
    where = np.random.default_rng(5).random(n) < share
    bad_x, bad_labels = x.copy(), np.where(where, labels, -100)
    bad_x[~where] = np.nan
    g = np.linspace(-1, 2, n).astype("float32")

    @jit
    def run(x, w, bias, labels, g, where=None):
        def total(x, w, bias):
            options = {"bias": bias + offset, "where": where, "temperature": 0.7, **static}
            results = {name: (EACH | MEANS)[name](x, w, labels, **options) for name in names}
            return sum(jnp.sum(a.T * (g if a.ndim else 1)) for a in floats_of(results)), results

        return jax.grad(total, (0, 1, 2), has_aux=True)(x, w, bias)

    found = run(bad_x, w, bias, bad_labels, g, where), run(x[where], w, bias, labels[where], g[where])
    ((dx, *others), results), ((want_dx, *want_others), want) = jax.tree.map(np.asarray, found)
    for got, of in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
        if got.ndim:
            assert not np.any(got[~where])
            got = got[where]
        if got.dtype == jnp.int32:  # a near tie may be in another order
            assert not got.size or np.mean(np.asarray(got) == of) > 0.99
        else:
            np.testing.assert_allclose(got, of, rtol=2e-5, atol=1e-4)
    assert not wide(dx[~where]).any()
    bound = 5e-5 if dtype == "float32" else 0.02  # products of other sizes may round differently
    for got, of in zip((dx[where], *others), (want_dx, *want_others)):
        assert rounded_errors(got, wide(of)) <= bound


# --- Memory at the size of a large language model: D = 4096, V = 128256 ---------------------------------


def of_size(n, depth=4096, vocab=128256, dtype="bfloat16"):
    """Returns the shapes of x, w and labels."""
    shapes = ((n, depth), dtype), ((depth, vocab), dtype), ((n,), "int32")
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


MEMORY = {  # (function, products, sums of dw in float32). A gradient has its products twice: first chunk and loop.
    "mean": (jax.grad(ps.linear_cross_entropy, (0, 1)), 2 * 3, 1),
    "evaluated": (ps.linear_cross_entropy, 1, 0),
    "none": (jax.grad(lambda *arrays: jnp.sum(loss(*arrays)), (0, 1)), 1 + 2 * 3, 1),
    "frozen w": (jax.grad(ps.linear_cross_entropy), 2 * 2, 0),
}
