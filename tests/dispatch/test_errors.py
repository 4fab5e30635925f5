"""Bad input raises while tracing, with JAX's exception type and the argument's name and value."""

import functools
import warnings
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import pallas_softmax as ps
from tests.support.cases import BF16, F32
from tests.support.covering import first_values

NAMES = ["softmax", "log_softmax", "logsumexp"]
X = jnp.arange(6, dtype=F32).reshape(2, 3)
LABELS = jnp.zeros(2, int)
topk = ps.fused_topk


def traced(f):
    """Traces f, which must raise before anything is lowered or run."""
    return lambda *args, **kwargs: jax.eval_shape(functools.partial(f, **kwargs), *args)


# --- softmax, log_softmax, logsumexp ------------------------------------------------------------------


@pytest.mark.parametrize(
    "axis",
    [2, -3, (0, 0), (0, -2), (1, 2), 1.5, (0, 1.5), "0"],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_axis_raises_like_jax(name, axis):
    accepted = (TypeError, ValueError, NameError)
    with pytest.raises(accepted) as reference:
        getattr(jax.nn, name)(X, axis)
    # jax.nn takes a string as the name of a mapped axis; here a string has a wrong type.
    expected = TypeError if isinstance(axis, str) else reference.type
    with pytest.raises(expected):
        getattr(ps, name)(X, axis)
    with pytest.raises(expected):
        traced(getattr(ps, name))(X, axis=axis)


@pytest.mark.parametrize("name", NAMES)
def test_bad_axes_are_named(name):
    f = getattr(ps, name)
    for axis in (2, -3, (0, 2)):
        with pytest.raises(ValueError, match=rf"^{name}: axis.*(2|-3).*out of bounds"):
            f(X, axis)
    with pytest.raises(ValueError, match=rf"^{name}: axis must name each axis once, got \(0, -2\)"):
        f(X, (0, -2))
    with pytest.raises(ValueError, match="out of bounds"):
        f(jnp.float32(1), -1)  # a scalar has no last axis


@pytest.mark.parametrize("x", [[1.0, 2.0], (1.0, 2.0), [[1.0], [2.0]], None, "a", {}], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "fused_topk"])
def test_non_arrays_raise_type_error(name, x):
    """Lists raise as well, like in jax.nn."""
    args = (x, 1) if name == "fused_topk" else (x,)
    argument = {"logsumexp": "a", "fused_topk": "logits"}.get(name, "x")
    with pytest.raises(TypeError, match=rf"{name}.*\b{argument}\b"):
        getattr(ps, name)(*args)


BAD_MASKS = [
    *((ValueError, f"where.*{dtype}", jnp.ones((2, 3), dtype)) for dtype in ("int32", "float32", "uint8")),
    *((ValueError, f"where.*{n}", jnp.ones((n, *more), bool)) for n, *more in ((2,), (3, 3), (2, 2))),
    (TypeError, "where", [True, False, True]),
]


@pytest.mark.parametrize(("error", "match", "where"), BAD_MASKS)
@pytest.mark.parametrize("name", [*NAMES, "fused_topk", "top_k"])
def test_where_must_be_a_boolean_that_broadcasts(name, error, match, where):
    args = (X, 1) if "top" in name else (X, -1)
    with pytest.raises(error, match=match):
        getattr(ps, name)(*args, where=where)


@pytest.mark.parametrize("function", [ps.online.scan, ps.online.reduce])
def test_online_refuses_bad_axes_and_dtypes(function):
    name = f"online.{function.__name__}"
    for axis in (2, -3):
        with pytest.raises(ValueError, match=rf"{name}: axis {axis} is out of bounds for .* dimension 2"):
            traced(function)(X, axis=axis)
    with pytest.raises(ValueError, match=rf"{name}: axis .* is out of bounds for 2 dimensions"):
        function(X, 2**70)
    with pytest.raises(TypeError, match=rf"{name}: x must be a floating or complex array, got int32"):
        traced(function)(X.astype(int))
    with pytest.raises(TypeError, match=rf"{name}: axis must be an int"):
        function(X, None)


def test_online_reduce_refuses_bad_masks_and_chunks():
    with pytest.raises(ValueError, match=r"online.reduce: where of shape \(2, 2, 3\) does not broadcast to"):
        ps.online.reduce(X, where=jnp.ones((2, 2, 3), bool))
    with pytest.raises(ValueError, match="online.reduce: where must be None or boolean, got dtype int32"):
        ps.online.reduce(X, where=jnp.array([1, 0, 2]))
    with pytest.raises(ValueError, match="online.reduce: chunk must be at least 1, got 0"):
        ps.online.reduce(X, chunk=0)
    with pytest.raises(TypeError, match=r"online.reduce: chunk must be an integer, got 2\.5"):
        ps.online.reduce(X, chunk=2.5)  # pyright: ignore[reportArgumentType]


# --- implementation -----------------------------------------------------------------------------------

CALLS = {
    "softmax": lambda **kwargs: ps.softmax(X, **kwargs),
    "log_softmax": lambda **kwargs: ps.log_softmax(X, **kwargs),
    "logsumexp": lambda **kwargs: ps.logsumexp(X, -1, **kwargs),
    "fused_topk": lambda **kwargs: ps.fused_topk(X, 1, **kwargs),
    "top_k": lambda **kwargs: ps.top_k(X, 1, **kwargs),
    "sample": lambda **kwargs: ps.sample(jax.random.key(0), X, **kwargs),
    "filter_logits": lambda **kwargs: ps.filter_logits(X, **kwargs),
    "verify": lambda **kwargs: ps.verify(jax.random.key(0), jnp.zeros(len(X) - 1, int), X, **kwargs),
    "token_stats": lambda **kwargs: ps.token_stats(X, **kwargs),
    "route": lambda **kwargs: ps.route(X, 1, **kwargs),
    "linear_logsumexp": lambda **kwargs: ps.linear_logsumexp(X, X.T, **kwargs),
    "linear_cross_entropy": lambda **kwargs: ps.linear_cross_entropy(X, X.T, LABELS, **kwargs),
    "linear_log_probs": lambda **kwargs: ps.linear_log_probs(X, X.T, LABELS, **kwargs),
    "linear_token_stats": lambda **kwargs: ps.linear_token_stats(X, X.T, LABELS, **kwargs),
    "linear_topk": lambda **kwargs: ps.linear_topk(X, X.T, 1, **kwargs),
}


def test_a_known_temperature_may_be_closed_over():
    """Under jit, a comparison of a known array is traced."""
    temperature = jnp.float32(2)
    ps_of = jax.jit(lambda x: ps.linear_log_probs(x, X.T, LABELS, temperature=temperature))
    np.testing.assert_allclose(ps_of(X), ps.linear_log_probs(X, X.T, LABELS, temperature=2.0), rtol=1e-6)


LABELED = {
    "token_stats": lambda labels: ps.token_stats(X, labels),
    "linear_cross_entropy": lambda labels: ps.linear_cross_entropy(X, X.T, labels),
    "linear_log_probs": lambda labels: ps.linear_log_probs(X, X.T, labels),
    "linear_token_stats": lambda labels: ps.linear_token_stats(X, X.T, labels),
}


@pytest.mark.parametrize("labels", [2**70, -(2**70)], ids=["large", "negative"])
@pytest.mark.parametrize("name", LABELED)
def test_labels_beyond_the_integers_of_jax_are_named(name, labels):
    with pytest.raises(ValueError, match=rf"^{name}: labels must be from -.* \(int(32|64)\), got {labels}"):
        LABELED[name](labels)


@pytest.mark.parametrize("implementation", ["cuda", "", "XLA", "mosaic"])
@pytest.mark.parametrize("name", CALLS)
def test_unknown_implementation_lists_the_valid_ones(name, implementation):
    with pytest.raises(ValueError) as error:
        CALLS[name](implementation=implementation)
    for word in (f"{name}: implementation", repr(implementation), "mosaic_gpu", "triton", "xla"):
        assert word in str(error.value)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_a_named_implementation_never_falls_back(name, implementation, jitted):
    """On a CPU no kernel can run, and the error says what it needs."""
    call = functools.partial(CALLS[name], implementation=implementation)
    match = f"^{name}: implementation='{implementation}' cannot run"
    with pytest.raises(NotImplementedError, match=match) as error:
        (jax.jit(call) if jitted else call)()
    assert len(str(error.value)) > len(implementation) + 20


@pytest.mark.parametrize("name", first_values(5, CALLS))
def test_the_plain_implementation_can_be_named(name):
    ours, default = CALLS[name](implementation="xla"), CALLS[name]()
    jax.tree.map(np.testing.assert_array_equal, ours, default)


# --- fused_topk ---------------------------------------------------------------------------------------


BAD_OPTIONS = [  # an option of fused_topk, the error of its values, and what it says of each
    ("k", ValueError, r"\bk\b.*{}", [4, 100, -1, np.int64(4)]),
    ("k", TypeError, r"\bk\b", [1.0, 1.5, "1", None, (1,), np.float32(1)]),
    ("axis", ValueError, "axis.*{}", [2, -3]),
    ("axis", TypeError, "axis", [None, (0,), (0, 1), 1.0, "1"]),
    ("temperature", ValueError, "temperature", [-1, -1.0, float("nan"), float("-inf"), np.float32(-1)]),
    ("temperature", TypeError, "temperature", ["1", None, [1.0, 1.0], 1j, True, Fraction(1, 2)]),
    ("temperature", ValueError, r"temperature.*\(2,\)", [*map(np.ones, ((3,), (2, 3), (3, 1), (1, 2, 1)))]),
    ("dtype", TypeError, "dtype", [jnp.int32, bool, jnp.complex64]),  # integer probabilities would all be 0
]


@pytest.mark.parametrize(
    ("option", "error", "match", "value"),
    [(option, error, match, value) for option, error, match, values in BAD_OPTIONS for value in values],
)
def test_bad_options_of_topk(option, error, match, value):
    for f in (topk, traced(topk)):
        with pytest.raises(error, match=match.format(value)):
            f(X, **{"k": 1, option: value})


def test_k_is_compared_with_the_length_of_the_axis():
    assert topk(X, 2, axis=0).values.shape == (2, 3)
    with pytest.raises(ValueError, match=r"\bk\b.*3"):
        topk(X, 3, axis=0)


def test_a_traced_k_says_that_it_must_be_static():
    with pytest.raises(TypeError, match=r"(?s)\bk\b.*static"):
        jax.jit(topk)(X, 2)


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
        with pytest.raises(
            NotImplementedError, match="logsumexp: axis_name must be None with b, .*, got 'v'"
        ):
            ps.logsumexp(X, axis_name="v", **arguments)


@pytest.mark.parametrize("dtype", [bool, complex])
@pytest.mark.parametrize("name", ["fused_topk", "sample", "token_stats", "linear_log_probs"])
def test_a_traced_temperature_must_be_real(name, dtype):
    call = CALLS[name]
    with pytest.raises(TypeError, match=f"^{name}: temperature must be .*real.*, got {dtype.__name__}"):
        jax.eval_shape(lambda t: call(temperature=t), jnp.ones((), dtype))


# --- Sizes --------------------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements_can_be_traced():
    """Shapes beyond 32-bit offsets are accepted; this test allocates nothing."""
    x = jax.ShapeDtypeStruct((2**15, 2**17), BF16)
    assert jax.eval_shape(ps.softmax, x).shape == x.shape
    assert jax.eval_shape(ps.logsumexp, x).shape == ()
    assert jax.eval_shape(functools.partial(topk, k=8), x).indices.shape == (2**15, 8)


@pytest.mark.parametrize(
    "f", [ps.softmax, ps.log_softmax, ps.logsumexp, lambda x: ps.fused_topk(x, 2).values]
)
def test_jet_names_the_way_out(f):
    x = jnp.arange(4.0)
    with pytest.raises(NotImplementedError, match="jet knows no kernels; nest jax.jvp"):
        jet.jet(f, (x,), ((jnp.ones(4), jnp.zeros(4)),))


# --- Arguments of numpy, Python and jit -----------------------------------------------------------------

KEYS = jax.random.split(jax.random.key(0))
# what the error says: the call
TYPE_ERRORS = {
    "softmax: x must be of numbers that JAX has, got dtype": lambda: ps.softmax(np.array(["a"])),
    "x must be of numbers": lambda: ps.softmax(np.ones(3, np.longdouble)),
    "softmax: x must be a float, integer or complex array, got key": lambda: ps.softmax(KEYS),
    "softmax: x must be .*bool": lambda: ps.softmax(X > 2),
    "log_softmax: x must be .*bool": lambda: ps.log_softmax(X > 2),
    "fused_topk: logits must be .*bool": lambda: topk(X > 2, 1),
    "logits must be a float or integer array, got key": lambda: topk(KEYS, 1),
    "logits must be .*complex64": lambda: topk(X.astype(jnp.complex64), 1),
    "softmax: axis must be .*static_argnames='axis'": lambda: jax.jit(ps.softmax)(X, axis=0),
    "softmax: axis must be None, an int or a sequence of ints, got 1.5": lambda: ps.softmax(X, 1.5),
    "fused_topk: log must be .*static_argnames='log'": lambda: jax.jit(lambda log: topk(X, 1, log=log))(True),
    "fused_topk: log must be True or False, got 'no'": lambda: topk(X, 1, log="no"),
    "fused_topk: log must be True or False, got 1": lambda: topk(X, 1, log=1),
    "transpose_w must be True or False, got 0": lambda: ps.linear_logsumexp(X, X.T, **{"transpose_w": 0}),
    "transpose_w must be True or False, got 'F": lambda: ps.linear_logsumexp(X, X.T, **{"transpose_w": "F"}),
    "logsumexp: keepdims must be True or False, got 1": lambda: ps.logsumexp(X, **{"keepdims": 1}),
    "logsumexp: keepdims must be a static": lambda: jax.jit(lambda k: ps.logsumexp(X, keepdims=k))(True),
    "fused_topk: dtype must be None or a floating dtype, got 'garbage'": lambda: topk(X, 1, dtype="garbage"),
    "fused_topk: dtype must be None or a floating": lambda: topk(X, 1, dtype=X),
    "temperature must be of numbers": lambda: topk(X, 1, temperature=np.array([None])),
    "fused_topk: temperature must be of real numbers, got dtype key": lambda: topk(X, 1, temperature=KEYS),
    "sample: top_k must be of real numbers, got dtype key": lambda: ps.sample(KEYS[0], X, top_k=KEYS[1]),
    "logsumexp: b must be of numbers, got dtype key": lambda: ps.logsumexp(X, b=KEYS[0]),
    "online.combine: b must be a Normalizer, got None": lambda: ps.online.combine(
        ps.online.identity(),
        None,  # pyright: ignore[reportArgumentType]
    ),
    r"(?s)explain: function must be callable, .* explain\(softmax, x\); got Array": lambda: ps.explain(
        ps.softmax(X)  # pyright: ignore[reportArgumentType]
    ),
    "argument.*'initial'": lambda: ps.softmax(X, **{"initial": 0.0}),  # jax.nn.softmax once had it
    "softmax.*takes.*positional": lambda: ps.softmax(*(X, -1, None, "xla")),
    "fused_topk.*takes.*positional": lambda: topk(*(X, 1, -1)),
}
VALUE_ERRORS = {
    "softmax: axis .* is out of bounds": lambda: ps.softmax(X, 2**70),
    "fused_topk: .*axis": lambda: topk(jnp.float32(1), 1),
    r"fused_topk: k\b": lambda: topk(jnp.zeros((3, 0)), 1),
    "softmax: axis_name must name each mesh axis once": lambda: ps.softmax(X, axis_name=("v", "v")),
    "softmax: where of shape .* do not broadcast": lambda: ps.softmax(X, where=jnp.ones((5, 5, 5), bool)),
    r"logsumexp: b of shape \(2,\) and a of shape \(2, 3\) do not": lambda: ps.logsumexp(X, b=jnp.ones(2)),
    "logsumexp: where must be None or boolean": lambda: ps.logsumexp(X, b=2.0, where=X),
    "fused_topk: temperature must be within the range of floats": lambda: topk(X, 1, temperature=10**400),
}


@pytest.mark.parametrize("match", [*TYPE_ERRORS, *VALUE_ERRORS])
def test_errors_name_the_argument(match):
    with pytest.raises(TypeError if match in TYPE_ERRORS else ValueError, match=match):
        (TYPE_ERRORS | VALUE_ERRORS)[match]()


def test_refusals_after_a_call_with_an_equal_value():
    """0 and False are equal, so a cache of compiled calls might confuse them."""
    x, labels = jnp.ones((3, 4)), jnp.zeros(3, int)
    ps.linear_cross_entropy(x, x.T, labels, z_loss=0)
    with pytest.raises(TypeError, match="z_loss must be a real number, or one per row, got bool"):
        ps.linear_cross_entropy(x, x.T, labels, z_loss=False)


def test_64_bit_dtypes_warn_like_jax():
    with pytest.warns(UserWarning, match="^fused_topk: dtype float64 is not available") as warned:
        assert topk(X, 1, dtype="float64").values.dtype == jnp.float32
    assert len(warned) == 1  # no warning names jnp.zeros
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert topk(X, 2, dtype=float).values.dtype == jnp.float32


# --- Forward mode, which linear_* do not support -------------------------------------------------------


@pytest.mark.parametrize(
    "name", first_values(1, ["linear_logsumexp", "linear_cross_entropy", "linear_log_probs"])
)
def test_forward_mode_names_the_function_and_the_way_out(name):
    w, labels = jnp.ones((3, 4)), () if name == "linear_logsumexp" else (LABELS,)

    def f(x, w=w):
        return getattr(ps, name)(x, w, *labels)

    advice = rf"^{name}: forward-mode .* not available.*reverse mode.*pallas_softmax.logsumexp"
    for of in (f, jax.jit(f)):
        for forward in (
            lambda x, of=of: jax.jvp(of, (x,), (x,)),
            lambda x, of=of: jax.jvp(lambda w: of(x, w), (w,), (w,)),
            jax.jacfwd(of),
            lambda x, of=of: jax.linearize(of, x)[1](x),
        ):
            with pytest.raises(TypeError, match=advice):
                forward(X)
            with pytest.raises(TypeError, match=advice):
                jax.jit(forward).lower(X)
    constant = jax.jvp(lambda s: s * f(X), (2.0,), (1.0,))[1]  # the arguments of f have no tangents
    np.testing.assert_array_equal(constant, f(X))
