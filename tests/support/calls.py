"""Every public function with arguments that fit, and calls that test the choice and the launch plans of kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_softmax as ps
from pallas_softmax._src.dispatch.operation import OPERATIONS, Call, Refusal
from tests.support.trees import floats_of

# --- One table of all functions: the tests of a property run over (function, property) ------------------

BATCH, V, COLUMNS = (2, 3), 20, 12
_rng = np.random.default_rng(0)
X = 2 * _rng.standard_normal((*BATCH, V), np.float32)
X[0, 1], X[1, 2, ::2] = np.round(X[0, 1]), -np.inf  # a row with ties, and one that is masked in its logits
W = _rng.standard_normal((V, COLUMNS), np.float32) / 4
LABELS = np.array([[1, 3, 5], [7, 9, 11]], np.int32)
MASK = _rng.random(X.shape) < 0.6
MASK[..., :4], MASK[0, 2] = True, False  # at least four entries are kept, or none
TEMPERATURE = np.linspace(0.5, 2, 6, dtype=np.float32).reshape(BATCH)
KEY = np.array([1, 2], np.uint32)
BIAS = np.linspace(-1, 1, V, dtype=np.float32)
FILTERS = {
    "temperature": TEMPERATURE,
    "top_k": np.array([[9, 3, 0], [15, 7, 5]]),
    "top_p": np.linspace(1, 0.5, 6, dtype=np.float32).reshape(BATCH),
    "min_p": np.linspace(0, 0.1, 6, dtype=np.float32).reshape(BATCH),
}
HEAD = {"x": np.maximum(X, -9), "w": W, "bias": BIAS[:COLUMNS], "where": MASK[..., 7]}
HEAD["temperature"] = TEMPERATURE
TEACHER = {
    "teacher_x": np.maximum(X[..., ::-2], -9),
    "teacher_w": W[::2] + W[1::2],
    "teacher_bias": BIAS[4 : COLUMNS + 4],
}
LOG_Q = np.maximum(X, -9)[:, :2] - 4
SEVERAL = np.stack([LABELS, LABELS // 2, LABELS], -1)
OF_LOSS = {"token_weights": TEMPERATURE - 1, "label_smoothing": TEMPERATURE / 9, "z_loss": TEMPERATURE / 5}
COLD = {of: a for of, a in HEAD.items() if of != "temperature"}
EACH = {"reduction": None, "workspace_bytes": 1}
PROBS = np.linspace(-0.2, 1, 18, dtype=np.float32).reshape(2, 3, 3)


def _calls(table):
    """Returns, by name, (function, its static arguments, its arrays, those that have a gradient)."""

    def call_of(name, variables, arguments):
        arrays = {of: a for of, a in arguments.items() if isinstance(a, np.ndarray)}
        static = {of: a for of, a in arguments.items() if of not in arrays}
        return getattr(ps, name.partition(",")[0]), static, arrays, variables

    return {name: call_of(name, *described) for name, described in table.items()}


# name of a function: (arguments that have a gradient, all arguments)
FUNCTIONS = _calls(
    {
        "softmax": ("x", dict(x=X, where=MASK)),
        "log_softmax": ("x", dict(x=X, where=MASK)),
        "logsumexp": ("a b", dict(a=X, b=1 + BIAS * TEMPERATURE[..., None] / 9, where=MASK)),
        "fused_topk": ("logits temperature", dict(k=3, logits=X, where=MASK, temperature=TEMPERATURE)),
        "top_k": ("operand", dict(k=3, operand=X, where=MASK, lengths=2 * LABELS - 1)),
        "sample": ("logits temperature", dict(key=KEY, logits=X, where=MASK, **FILTERS)),
        "filter_logits": ("logits temperature", dict(logits=X, where=MASK, **FILTERS)),
        "verify": (
            "",
            dict(key=KEY, draft_tokens=LABELS[:, :2], logits=X, draft_log_probs=LOG_Q, where=MASK, **FILTERS),
        ),
        "token_stats": ("logits temperature", dict(logits=X, labels=LABELS, where=MASK, temperature=TEMPERATURE)),
        "route": ("logits", dict(k=3, groups=4, top_groups=2, logits=X, bias=BIAS / 9)),
        "linear_logsumexp": ("x w bias", dict(softcap=30, **HEAD)),
        "linear_cross_entropy": ("x w bias token_weights", dict(**HEAD, labels=LABELS, **OF_LOSS)),
        "linear_kl_divergence": (
            "x w bias token_weights",
            dict(teacher_softcap=20, **HEAD, **TEACHER, token_weights=TEMPERATURE - 1),
        ),
        "linear_log_probs": ("x w bias", dict(**HEAD, labels=LABELS)),
        "linear_token_stats": ("x w bias", dict(**HEAD, labels=LABELS)),
        "linear_sample": ("", dict(key=KEY, **(HEAD | FILTERS))),
        "linear_topk": ("", dict(k=2, **HEAD)),
    }
)
WITHOUT_GRADIENT = tuple(name for name, (_, _, _, variables) in FUNCTIONS.items() if not variables)
# the same functions by other paths. With EACH, chunks have one token.
CALLS = FUNCTIONS | _calls(
    {
        "logsumexp, rows": ("a", dict(axis=-1, a=X, where=MASK)),
        "fused_topk, log": ("logits temperature", dict(k=3, log=True, logits=X, temperature=TEMPERATURE)),
        "token_stats, rank": ("logits", dict(rank=True, logits=X, labels=LABELS)),
        "route, shares": ("logits", dict(k=3, score="sigmoid", renormalize=True, logits=X)),
        "linear_cross_entropy, none": (
            "x w bias token_weights",
            dict(return_logsumexp=True, **EACH, **COLD, labels=LABELS, **OF_LOSS),
        ),
        "linear_cross_entropy, soft": ("x w bias label_probs", dict(**EACH, **HEAD, labels=SEVERAL, label_probs=PROBS)),
        "linear_kl_divergence, none": ("x w bias", dict(beta=0.3, **EACH, **COLD, **TEACHER)),
        "linear_log_probs, several": ("x w bias", dict(workspace_bytes=1, **HEAD, labels=SEVERAL)),
    }
)
ARRAYS = [(name, of) for name, (_, _, arrays, _) in FUNCTIONS.items() for of in arrays]
LOGITS = ("x", "a", "logits", "operand")  # what functions call the array that they reduce


def logits_of(name):
    """Returns the name of the argument that a call reduces."""
    return next(of for of in CALLS[name][2] if of in LOGITS)


def call(name, **changed):
    """Calls a function with its arguments above, except for those that are given."""
    function, static, arrays, _ = CALLS[name]
    return function(**(static | arrays | changed))


def plainly(name, **options):
    """Calls a function with the arrays that it needs, so that other options fit."""
    function, static, arrays, _ = CALLS[name]
    needed = ("key", "w", "labels", "label_probs", "draft_tokens", "teacher_x", "teacher_w", *LOGITS)
    return function(**{**static, **{of: a for of, a in arrays.items() if of in needed}, **options})


def with_gradient(results):
    """Returns the results that are floats and have a gradient."""
    return floats_of(results.log_probs if isinstance(results, ps.Sample) else results)  # log_mass has none


def float_sum(results):
    return sum(jnp.sum(a.astype(jnp.float32)) for a in with_gradient(results))


def total(name, arguments, call=call):
    """Returns a weighted sum of the finite results, as a function of the arguments that have a gradient, and these.

    Results pass through exp before those that are not finite are dropped, so these get cotangents of NaN.
    """

    def of_held(held):
        floats = with_gradient(call(name, **arguments | held))
        kept = (jnp.where(jnp.isfinite(a), jnp.exp(a / 9), 0).astype(jnp.float32) for a in floats)
        return sum(jnp.sum(jnp.cos(1 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) * a) for a in kept)

    return of_held, {of: arguments[of] for of in CALLS[name][3].split()}


def pullback(name, arguments, call=call):
    """Returns the gradients of `total`."""
    f, held = total(name, arguments, call)
    return jax.grad(f)(held)


# --- Kernels --------------------------------------------------------------------------------------------

# name: a function of rows that has kernels
WITH_KERNELS = {
    "softmax": ps.softmax,
    "log_softmax": ps.log_softmax,
    "logsumexp": functools.partial(ps.logsumexp, axis=-1),
    "fused_topk": functools.partial(ps.fused_topk, k=5),
    "top_k": functools.partial(ps.top_k, k=5),
    "route": functools.partial(ps.route, k=5),
    "token_stats": ps.token_stats,
    "sample": functools.partial(ps.sample, KEY),
    "filter_logits": functools.partial(ps.filter_logits, top_p=0.9),
}

# --- Choices and plans ----------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")
FREE = settings(max_examples=200, deadline=None, derandomize=True)
lengths = st.one_of(st.integers(1, 20_000), st.integers(1, 3_000_000))


def named(f, name):
    return lambda *args, **kwargs: f(*args, implementation=name, **kwargs)


def topk(x, **kwargs):
    return ps.fused_topk(x, 5, **kwargs)


def device(kind):
    """Returns a context that makes JAX lower for this kind of GPU, without the GPU."""
    gpu = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def described(op="softmax", dtype="float32", rows=128, vocab=16384, **kwargs):
    if op == "topk":
        kwargs = {"k": 5, "function": "fused_topk"} | kwargs
    return Call(OPERATIONS[op], dtype, rows, vocab, **({"function": op} | kwargs))


def refusal(implementation, call, capability):
    """Returns why the implementation refuses the call; None if it has a plan."""
    plan = call.operation.kernels[implementation].plan(call, capability)
    return plan.reason if isinstance(plan, Refusal) else None


def slower(implementation, call):
    """Returns why XLA is faster than the implementation; None if it is not."""
    return call.operation.kernels[implementation].slower(call)
