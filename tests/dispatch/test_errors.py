"""Bad input raises while tracing, with JAX's exception type and the argument's name and value."""

import functools
import inspect
import re
import warnings
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import pallas_softmax as ps
from tests.support import calls
from tests.support.calls import FUNCTIONS, WITHOUT_GRADIENT, plainly
from tests.support.cases import BF16, F32
from tests.support.covering import cover, first_values

NAMES = ["softmax", "log_softmax", "logsumexp"]
X = jnp.arange(6, dtype=F32).reshape(2, 3)
LABELS = jnp.zeros(2, int)
topk = ps.fused_topk


def test_a_known_temperature_may_be_closed_over():
    """Under jit, a comparison of a known array is traced."""
    temperature = jnp.float32(2)
    jax.eval_shape(lambda x: ps.linear_log_probs(x, X.T, LABELS, temperature=temperature), X)


@pytest.mark.parametrize(
    ("name", "implementation", "jitted"), cover(FUNCTIONS, ["mosaic_gpu", "triton"], [False, True])
)
def test_a_named_implementation_never_falls_back(name, implementation, jitted):
    """On a CPU no kernel can run, and the error says what it needs."""
    call = functools.partial(plainly, name, implementation=implementation)
    match = f"^{name}: implementation='{implementation}' cannot run"
    with pytest.raises(NotImplementedError, match=match) as error:
        (jax.jit(call) if jitted else call)()
    assert len(str(error.value)) > len(implementation) + 20


@pytest.mark.parametrize("name", first_values(3, FUNCTIONS))
def test_the_plain_implementation_can_be_named(name):
    ours, default = plainly(name, implementation="xla"), plainly(name)
    jax.tree.map(np.testing.assert_array_equal, ours, default)


# --- One table for all functions that have an argument --------------------------------------------------

ARRAY = "must be an array"
KEYS = jax.random.split(jax.random.key(0))
WIDE = np.int64(2**32 + 1)  # 1, if it is wrapped to 32 bits

# argument: {what the error says: values}; {} stands for the value
BAD_TYPES = {
    "x": {ARRAY: [[1.0, 2.0], (1.0, 2.0), None, "a", {}], "must be .*(bool|key)": [calls.MASK, KEYS]},
    **dict.fromkeys(("a", "operand"), {ARRAY: [[1.0, 2.0], (1.0, 2.0), None, "a", {}]}),
    "logits": {
        ARRAY: [[1.0, 2.0], (1.0, 2.0), None, "a", {}],
        "must be a float or integer array, got (bool|complex64|key)": [calls.MASK, calls.X.astype("complex64"), KEYS],
    },
    "where": {ARRAY: [[True, False, True]]},
    "axis": {"must be ": [1.5, "0", (0, 1.5)]},
    "axis_name": {
        "must be None, a str or a tuple of str": [np.array(["v", "w"])],
        "must be None, a str or a tuple of str, got {}": [3, ("v", 1), ["v"], b"v"],
    },
    "temperature": {
        f"{ARRAY} or a scalar, got": ["1", None, [1.0, 1.0], Fraction(1, 2)],
        "must be a real number, or one per row, got (bool|complex)": [1j, True],
        "must be of (real )?numbers": [KEYS, np.array([None])],
    },
    "k": {"must be an integer, got": [1.0, 1.5, "1", None, (1,), F32.type(1), True]},
    "labels": {"must be integers, got float32": [calls.LABELS.astype(F32)], ARRAY: [[0, 1]]},
    "top_k": {
        "must be an integer, or one per row, got (float64|bool)": [2.0, True],
        "must be of real numbers, got dtype key": [KEYS[1]],
    },
    "top_p": {f"{ARRAY} or a scalar": ["0.9"]},
    "key": {
        "must be a key of jax.random": [0, np.zeros(2, F32)],
        "an array of keys must be typed, .*jax.random.wrap_key_data.key": [np.zeros((2, 2), np.uint32)],
    },
    "bias": {
        "must be .*, got (dtype )?(bool|complex64)": [np.zeros(12, bool), np.zeros(12, "complex64")],
        ARRAY: [[0.0] * 12],
    },
    "w": {"one dtype, got float32 and bfloat16": [calls.W.astype(BF16)]},
    **dict.fromkeys(
        ("log", "sorted", "is_stable", "keepdims", "rank", "renormalize", "transpose_w", "return_logsumexp"),
        {"must be True or False, got {}": [0, 1, "no"]},
    ),
    "lengths": {
        "must be an integer, or one per row, got (float64|bool)": [np.ones((2, 3)), True],
        f"{ARRAY} or a scalar": [[1] * 3],
    },
    "draft_tokens": {"must be integers, got float": [np.zeros((2, 2))]},
    "draft_log_probs": {"must be floating, got bool": [calls.X[:, :2] > 0]},
    "teacher_x": {"must be of float16": [calls.LABELS]},
    "teacher_w": {"and teacher_w must have one dtype": [calls.W.astype(BF16)]},
    "softcap": {f"{ARRAY} or a scalar, got '3'": ["3"]},
    "token_weights": {
        "must be None or of .*, got dtype bool": [calls.MASK[..., 0]],
        "must be None or of .*, got dtype complex64": [calls.LABELS * np.complex64(1j)],
        ARRAY: [[1, 2, 3]],
    },
    "dtype": {"must be None or a floating dtype": [jnp.int32, bool, jnp.complex64, "garbage", X]},
    "groups": {"must be .*2.0": [2.0]},
    "top_groups": {"must be .*1.0": [1.0]},
    "group_best": {"must be an integer, got 1.5": [1.5]},
    "scale": {f"{ARRAY} or a scalar, got '2'": ["2"], "must be a real number, got (bool|complex64)": [True, 1j]},
}
BAD_VALUES = {
    "operand": {"must be real, got complex64": [calls.X.astype("complex64")]},
    "lengths": {
        r"must .* the batch shape \(2, 3\), got \(5,\)": [np.ones(5, int)],
        "must be a scalar or broadcast": [np.ones((2, 3, 20), int)],
    },
    "draft_tokens": {r"must have the shape \(2, 2\), got \(2, 3\)": [calls.LABELS]},
    "draft_log_probs": {r"must have the shape \(2, 2, 20\), got \(2, 1, 20\)": [calls.X[:, :1]]},
    "teacher_w": {r"teacher_x must be \(..., D\) and teacher_w \(D, V\)": [calls.W[:5]]},
    "teacher_bias": {r"must have the shape \(12,\)": [calls.BIAS[:11]]},
    "beta": {"must be from 0 to 1, got {}": [1.5, np.nan], r"must be from 0 to 1, got shape \(2,\)": [np.ones(2)]},
    "teacher_softcap": {"must be None or from 1e-37": [0]},
    "implementation": {
        r"must be None or one of \('mosaic_gpu', 'triton', 'xla'\), got {}": ["cuda", "", "XLA", b"xla", 1, {}, []],
        "must be None or one of .*, got (a|A)rray": [np.array(["xla"]), jnp.ones(2)],
    },
    "where": {
        "must be None or boolean": [calls.MASK.astype(t) for t in ("int32", F32, "uint8")],
        "of shape": [np.ones((5, 5, 5, 5), bool), np.ones((2, 3, 7), bool)],
    },
    "axis": {".*{}.* out of bounds": [3, -4, 2**70]},
    "axis_name": {
        "must name mesh axes.*vocab": ["vocab", ("v", "vocab")],
        "must name each mesh axis once": [("v", "v")],
    },
    "temperature": {
        "must be .*got {}": [-1, -1.0, np.nan, -np.inf, F32.type(-1)],
        "must be a scalar(,| or).*got": [*map(np.ones, [(4,), (3, 3), (2, 3, 2)])],
        "must be within the range of floats": [10**400],
    },
    "k": {"must be .*got {}": [21, 100, -1, np.int64(-4)]},
    "labels": {
        r"must have .*\(2, 3\).*, got \(2, (2|3, 4, 1)\)": [calls.LABELS[:, :2], np.zeros((2, 3, 4, 1), int)],
        r"must be from -.* \(int(32|64)\), got {}": [2**70, -(2**70)],
    },
    "top_k": {"must be .*got {}": [-2, -3]},
    "top_p": {
        "must be .*got {}": [-0.1, 1.01, 1.00001, np.nan, WIDE],
        r"must be .* \(2, 3\), got (shape )?\(4,": [np.ones(4)],
    },
    "min_p": {"must be .*got {}": [-0.1, 2.0, WIDE], "must be a scalar(,| or).*got": [np.ones((2, 3, 20))]},
    "mode": {"must be None or one of": ["highest of all"]},
    "key": {r"must be one key or have the batch shape \(2,( 3)?\), got \(4,\)": [jax.random.split(KEYS[0], 4)]},
    "bias": {
        r"must have the shape \((20|12),\).*, got \((11,|1, 12|)\)": [np.zeros(n, F32) for n in (11, (1, 12), ())]
    },
    "w": {
        r"\(D, V\) for transpose_w=False, got \(2, 3, 20\) and \(12, 20\)": [calls.W.T],
        r"must have at least one column, got \(D, V\) = \(20, 0\)": [calls.W[:, :0]],
    },
    "transpose_w": {r"w \(V, D\) for transpose_w=True": [True]},
    "softcap": {
        "must be None or from 1e-37 to 1e37, got {}": [-1, 1e-40],
        r"must be None or from 1e-37 to 1e37, got 1e\+38": [1e38],
        "must be within the range of floats": [10**400],
        r"must be None or from .*, got shape \(3,\)": [np.ones(3)],
    },
    "workspace_bytes": {"must be positive, got 0": [0]},
    "token_weights": {r"must be a scalar or .*\(2, 3\), got \(2,\)": [np.ones(2)]},
    "z_loss": {
        r"must be a scalar or broadcast .*\(2, 3\), got \(2,\)": [np.ones(2)],
        "must be from 0 to 1e37, got -0.1": [-0.1],
    },
    "label_smoothing": {"must be from 0 to 1, got {}": [1.5, WIDE]},
    "reduction": {"must be 'mean', 'sum' or None, got": ["none", ["mean"], 1, np.array(["mean", "sum"])]},
    "groups": {"must .*divide the 20 experts, got 3": [3], "must be at least 1.*got {}": [0, -3]},
    "top_groups": {"must be from 1 to groups=4, got {}": [None, 0, 5]},
    "group_best": {"must be from 1 to the .* experts of a group, got {}": [0, 9]},
    "score": {"must be one of .*'softmax', 'sigmoid'.*got .*(relu|None|softmax)": ["relu", None, ["softmax"]]},
    "scale": {
        "must be a finite number in the range of float32, got (1000|nan|inf|1e)": [10**400, np.nan, np.inf, 1e39],
        r"must be a scalar, got an array of shape \(2,\)": [np.ones(2)],
    },
}
CASES = [
    (error, of, says, values)
    for error, cases in ((TypeError, BAD_TYPES), (ValueError, BAD_VALUES))
    for of, case in cases.items()
    for says, values in case.items()
]


def functions_with(argument):
    return [name for name, (f, *_) in FUNCTIONS.items() if argument in inspect.signature(f).parameters]


def traced(name, **options):
    return jax.eval_shape(lambda: plainly(name, **options))


@pytest.mark.parametrize(("error", "argument", "match", "values"), CASES, ids=lambda value: str(value)[:40])
def test_bad_values_are_named(error, argument, match, values):
    """Every message starts with the function, and names the argument, its value and what is accepted."""
    for name in functions_with(argument):
        for i, value in enumerate(values):
            if argument == "k" and name == "top_k" and value == 1:
                continue  # `lax.top_k` takes 1.0 and True
            says = match.replace("{}", re.escape(repr(value) if isinstance(value, str) else str(value)))
            for f in (plainly, traced)[: 1 if i else 2]:
                with pytest.raises(error, match=rf"(?s)^{name}: (?=.*\b{argument}\b).*{says}"):
                    f(name, **{argument: value})


@pytest.mark.parametrize("axis", [None, (0,), (0, 1), 1.0, "1"], ids=str)
@pytest.mark.parametrize("name", [name for name in functions_with("axis") if name not in NAMES])
def test_one_axis_is_an_integer(name, axis):
    with pytest.raises(TypeError, match=f"^{name}: axis must be an int"):
        plainly(name, axis=axis)


OPTIONS = {
    **{"axis": 0, "k": 2, "log": True, "keepdims": True, "groups": 4, "top_groups": 2, "group_best": 1},
    **{"renormalize": True, "softcap": 1.0, "transpose_w": False, "rank": True, "sorted": True, "beta": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_traced_options_are_named(option):
    for name in functions_with(option):
        advice = "(static|traced)" if option in ("softcap", "beta") else f"static_argnames='{option}'"
        with pytest.raises(TypeError, match=rf"(?s)^{name}: {option} must .*{advice}"):
            jax.jit(lambda value, name=name: plainly(name, **{option: value}))(OPTIONS[option])


NO_GRADIENT = [(name, "temperature") for name in functions_with("workspace_bytes")]
NO_GRADIENT += [("linear_cross_entropy", "z_loss"), ("linear_cross_entropy", "label_smoothing"), ("route", "scale")]


@pytest.mark.parametrize(("name", "argument"), [case for case in NO_GRADIENT if case[0] not in WITHOUT_GRADIENT])
def test_arguments_without_a_gradient_are_named(name, argument):
    def total(a):
        results = jax.tree.leaves(plainly(name, **{argument: a}))
        return sum(jnp.sum(a) for a in results if a.dtype == F32)

    with pytest.raises(NotImplementedError, match=f"^{name}: there is no gradient in {argument}"):
        jax.eval_shape(jax.grad(total), 0.5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mapped_k_says_that_it_must_be_the_same_for_all(wrap):
    with pytest.raises(TypeError, match="fused_topk: k must .* the same for all slices of jax.vmap") as error:
        wrap(jax.vmap(lambda x, k: topk(x, k)))(X, jnp.array([1, 2]))
    assert "static_argnames" not in str(error.value)
    assert jax.vmap(topk, in_axes=(0, None))(X, 2).values.shape == (2, 2)  # the advice of the error


def test_options_of_logsumexp_without_a_kernel():
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        ps.logsumexp(X, b=X, implementation="cuda")
    for arguments in ({"b": X}, {"return_sign": True}):
        with pytest.raises(
            NotImplementedError,
            match="logsumexp: implementation must be None or 'xla' with b, return_sign or complex a, got 'mosaic_gpu'",
        ):
            ps.logsumexp(X, implementation="mosaic_gpu", **arguments)
        with pytest.raises(NotImplementedError, match="logsumexp: axis_name must be None with b, .*, got 'v'"):
            ps.logsumexp(X, axis_name="v", **arguments)


@pytest.mark.parametrize("dtype", [bool, complex])
@pytest.mark.parametrize("name", ["fused_topk", "sample", "token_stats", "linear_log_probs"])
def test_a_traced_temperature_must_be_real(name, dtype):
    with pytest.raises(TypeError, match=f"^{name}: temperature must be .*real.*, got {dtype.__name__}"):
        jax.eval_shape(lambda t: plainly(name, temperature=t), jnp.ones((), dtype))


def test_more_than_2_to_the_31_elements_can_be_traced():
    """Shapes beyond 32-bit offsets are accepted; this test allocates nothing."""
    x = jax.ShapeDtypeStruct((2**15, 2**17), BF16)
    assert jax.eval_shape(ps.softmax, x).shape == x.shape
    assert jax.eval_shape(ps.logsumexp, x).shape == ()
    assert jax.eval_shape(functools.partial(topk, k=8), x).indices.shape == (2**15, 8)


@pytest.mark.parametrize("f", [ps.softmax, ps.log_softmax, ps.logsumexp, lambda x: ps.fused_topk(x, 2).values])
def test_jet_names_the_way_out(f):
    x = jnp.arange(4.0)
    with pytest.raises(NotImplementedError, match="jet knows no kernels; nest jax.jvp"):
        jet.jet(f, (x,), ((jnp.ones(4), jnp.zeros(4)),))


SOFT = np.stack([calls.LABELS] * 3, -1)
Q = SOFT.astype(F32)


FOUND = ps.online.Candidates(LABELS, LABELS)


def soft(label_probs, labels=SOFT, **options):
    return plainly("linear_cross_entropy", labels=labels, label_probs=label_probs, **options)


# what the error says: the call
TYPE_ERRORS = {
    "linear_cross_entropy: label_probs must be None or of real numbers, got dtype bool": lambda: soft(SOFT > 1),
    "linear_cross_entropy: label_probs must be an array": lambda: soft([[1, 2, 3]]),
    "online.scan: x must be a floating or complex array, got int32": lambda: ps.online.scan(LABELS),
    "online.reduce: x must be a floating or complex array, got int32": lambda: ps.online.reduce(LABELS),
    "online.scan: axis must be an int": lambda: ps.online.scan(X, axis=None),
    "online.reduce: axis must be an int": lambda: ps.online.reduce(X, axis=None),
    r"online.reduce: chunk must be an integer, got 2\.5": lambda: ps.online.reduce(
        X,
        chunk=2.5,  # pyright: ignore[reportArgumentType]
    ),
    "softmax: x must be of numbers that JAX has, got dtype": lambda: ps.softmax(np.array(["a"])),
    "x must be of numbers": lambda: ps.softmax(np.ones(3, np.longdouble)),
    "logsumexp: b must be of numbers, got dtype key": lambda: ps.logsumexp(X, b=KEYS[0]),
    "online.scan: x must be a floating array, got complex64": lambda: ps.online.scan(X * 1j),
    "online.identity: dtype must be .* with infinity, got": lambda: ps.online.identity((), jnp.float8_e4m3fn),
    "online.identity: of must be Normalizer or Moments": lambda: ps.online.identity(of=ps.online.Candidates),
    "online.combine: scale must be a real number .*, got complex64": lambda: ps.online.combine(
        *[ps.online.identity()] * 2, scale=1j
    ),
    "online.entropy: moments must be Moments, got Normalizer": lambda: ps.online.entropy(
        ps.online.identity()  # pyright: ignore[reportArgumentType]
    ),
    "online.merge: k must be an integer, got True": lambda: ps.online.merge(*[FOUND] * 2, True),
    "online.merge: .* one dtype, got int32 and float32": lambda: ps.online.merge(
        FOUND, FOUND._replace(values=Q[0, 0]), 1
    ),
    "linear_kl_divergence: teacher_x must be an array": lambda: plainly("linear_kl_divergence", teacher_x=None),
    "verify: draft_log_probs must be floating, got int32": lambda: ps.verify(
        KEYS[0], LABELS[:0], X[:1], draft_log_probs=LABELS
    ),
    "online.combine: b must be a Normalizer, got None": lambda: ps.online.combine(
        ps.online.identity(),
        None,  # pyright: ignore[reportArgumentType]
    ),
    r"(?s)explain: function must be callable, .* explain\(softmax, x\); got Array": lambda: ps.explain(
        ps.softmax(X)  # pyright: ignore[reportArgumentType]
    ),
    "linear_log_probs: labels must be an array": lambda: ps.linear_log_probs(X, X.T, None),  # once -logsumexp
    "labels must be an array or a scalar, got None": lambda: ps.linear_cross_entropy(X, X.T, None, reduction=None),
    "linear_logsumexp: x must be of float16": lambda: ps.linear_logsumexp(X.astype(int), X.T),
    "linear_logsumexp: bias must be of": lambda: ps.linear_logsumexp(X, X.T, bias=LABELS),
    # Python functions raise the same
    r"softmax\(\) takes from 1 to 3 positional arguments but 4 were given": lambda: ps.softmax(*(X, -1, None, "xla")),
    "fused_topk.*takes.*positional": lambda: topk(*(X, 1, -1)),
    r"fused_topk\(\) missing 1 required positional argument: 'k'": lambda: topk(*(X,)),
    r"softmax\(\) got multiple values for argument 'axis'": lambda: ps.softmax(*(X, 1), **{"axis": 1}),
    r"softmax\(\) got an unexpected keyword argument 'dim'": lambda: ps.softmax(X, **{"dim": 1}),
}
VALUE_ERRORS = {
    "online.merge: k must be from 0 to .* 4, got 5": lambda: ps.online.merge(FOUND, FOUND, 5),
    r"online.merge: values and indices must fit, .* \(\(2,\), \(1,\)\)": lambda: ps.online.merge(
        FOUND, FOUND._replace(indices=LABELS[:1]), 1
    ),
    r"verify: temperature must be .* per row \(2,\), or .* \(2, 1\), got shape \(3,\)": lambda: ps.verify(
        KEYS[0], LABELS[:, None][:, :0], X[:, None], temperature=np.ones(3)
    ),
    "linear_cross_entropy: z_loss must be from 0 to 1e37, got 1e": lambda: plainly(
        "linear_cross_entropy", z_loss=1e300
    ),
    "fused_topk: k must be .* 2, got 3": lambda: topk(X, 3, axis=0),
    "^softmax: .* out of bounds": lambda: ps.softmax(jnp.float32(1), -1),  # a scalar has no last axis
    "^logsumexp: .* out of bounds": lambda: ps.logsumexp(jnp.float32(1), -1),
    "online.scan: axis -3 is out of bounds for .* dimension 2": lambda: ps.online.scan(X, axis=-3),
    "online.reduce: axis 2 is out of bounds for .* dimension 2": lambda: ps.online.reduce(X, axis=2),
    "online.reduce: axis .* is out of bounds for 2 dimensions": lambda: ps.online.reduce(X, 2**70),
    r"online.reduce: where of shape \(2, 2, 3\) does not broadcast to": lambda: ps.online.reduce(
        X, where=jnp.ones((2, 2, 3), bool)
    ),
    "online.reduce: where must be None or boolean, got dtype int32": lambda: ps.online.reduce(X, where=LABELS),
    "online.reduce: chunk must be at least 1, got 0": lambda: ps.online.reduce(X, chunk=0),
    "fused_topk: .*axis": lambda: topk(jnp.float32(1), 1),
    r"fused_topk: k\b": lambda: topk(jnp.zeros((3, 0)), 1),
    r"logsumexp: b of shape \(2,\) and a of shape \(2, 3\) do not": lambda: ps.logsumexp(X, b=jnp.ones(2)),
    "route: k must be at most the 10 experts of top_groups=2.*got 11": lambda: plainly("route", k=11),
    "route: top_groups must be from 1 to groups=1, got 2": lambda: ps.route(X, 1, top_groups=2),
    "route: .* is out of bounds for logits": lambda: ps.route(F32.type(1), 1),
    "token_stats: rank=True needs labels, got labels=None": lambda: ps.token_stats(X, rank=True),
    r"sample: logits of shape \(2, 0\) have nothing to draw": lambda: ps.sample(KEYS[0], X[:, :0]),
    **{
        rf"^{name}: axis must name each axis once, got \(0, {i}\)": functools.partial(getattr(ps, name), X, (0, i))
        for name in NAMES
        for i in (0, -2)
    },
    **{f"^{name}: axis 2 is out": functools.partial(getattr(ps, name), X, (0, 2)) for name in NAMES},
    "top_k: axis -1 is out of bounds": lambda: ps.top_k(jnp.float32(1), 1),
    r"verify: .*logits must have a shape \(..., S \+ 1, V\), got \(20,\)": lambda: plainly(
        "verify", logits=calls.X[0, 0]
    ),
    r"cross_entropy: label_probs must have .* \(2, 3, 3\), got \(2, 3, 2\)": lambda: soft(Q[..., :2]),
    r"cross_entropy: labels must have .*, \(2, 3, K\), got \(2, 3\)": lambda: soft(Q, calls.LABELS),
    r"cross_entropy: labels must have .*, \(2, 3\), got \(2, 3, 3\)": lambda: soft(None),
    "cross_entropy: label_smoothing must be 0 with label_probs, got 0.1": lambda: soft(Q, label_smoothing=0.1),
    "label_smoothing must be 0 with label_probs, got .*Trace": lambda: jax.eval_shape(
        lambda s: soft(Q, label_smoothing=s), 0.0
    ),
    "divergence: the teacher must have the tokens and columns": lambda: plainly(
        "linear_kl_divergence", teacher_x=calls.X[:1, :, ::-2]
    ),
    r"divergence: .* \(2, 3\) and V=12, got \(2, 3\) and V=11": lambda: plainly(
        "linear_kl_divergence", teacher_w=calls.TEACHER["teacher_w"][:, 1:]
    ),
}


@pytest.mark.parametrize("match", [*TYPE_ERRORS, *VALUE_ERRORS])
def test_errors_name_the_argument(match):
    with pytest.raises(TypeError if match in TYPE_ERRORS else ValueError, match=match):
        (TYPE_ERRORS | VALUE_ERRORS)[match]()


@pytest.mark.parametrize(
    ("name", "argument", "good", "bad"),
    [("fused_topk", "k", 1, True), ("fused_topk", "k", 1, 1.0), ("linear_cross_entropy", "z_loss", 0, False)],
)
def test_refusals_after_a_call_with_an_equal_value(name, argument, good, bad):
    """0 and False are equal, so a cache of compiled calls might confuse them."""
    plainly(name, **{argument: good})
    with pytest.raises(TypeError, match=f"{argument} must be an? (integer|real number).*, got"):
        plainly(name, **{argument: bad})


def test_64_bit_dtypes_warn_like_jax():
    with pytest.warns(UserWarning, match="^fused_topk: dtype float64 is not available") as warned:
        assert topk(X, 1, dtype="float64").values.dtype == jnp.float32
    assert len(warned) == 1  # no warning names jnp.zeros
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert topk(X, 2, dtype=float).values.dtype == jnp.float32


LINEAR = [name for name, (*_, held) in calls.CALLS.items() if name.startswith("linear") and held]


@pytest.mark.parametrize("name", first_values(1, LINEAR))
def test_forward_mode_names_the_function_and_the_way_out(name):
    f, held = calls.total(name, calls.CALLS[name][2])
    ones = jax.tree.map(jnp.ones_like, held)
    advice = rf"^{name.partition(',')[0]}: forward-mode .* not available.*reverse mode.*pallas_softmax.logsumexp"
    for of in (f, jax.jit(f)):
        for forward in (
            *(lambda h, of=of, v=v: jax.jvp(lambda a: of(h | {v: a}), (h[v],), (ones[v],)) for v in held),
            jax.jacfwd(of),
            lambda h, of=of: jax.linearize(of, h)[1](ones),
        ):
            with pytest.raises(TypeError, match=advice):
                forward(held)
            with pytest.raises(TypeError, match=advice):
                jax.jit(forward).lower(held)
    constant = jax.jvp(lambda s: s * f(held), (2.0,), (1.0,))[1]  # the arguments of f have no tangents
    np.testing.assert_allclose(constant, f(held), rtol=1e-6)
