"""Arrays, integers and options of NumPy's and Python's types, strict promotion, and x64, in all public functions."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_softmax as ps
from tests.support.calls import ARRAYS, FUNCTIONS, LABELS, MASK, WITHOUT_GRADIENT, V, W, X, call, float_sum, plainly
from tests.support.covering import first, first_values, pairs, values
from tests.support.trees import assert_equal, assert_near

WIDE = 2**32 + 1  # 1, if it is wrapped to 32 bits
pytestmark = pytest.mark.usefixtures("quick_compilation")


# --- Arrays that JAX would misread ----------------------------------------------------------------------

# name: (an array in place of another, the error, what it says)
MISFITS = {
    "masked": (np.ma.array, ValueError, "must be an array without a mask, got a masked array of numpy.ma"),
    "structured": (lambda a: np.zeros(a.shape, [("f", "f4")]), TypeError, "must be of numbers that JAX has"),
    "bytes": (lambda a: np.zeros(a.shape, "V4"), TypeError, "must be of numbers that JAX has"),
    "byte order": (
        lambda a: np.zeros(a.shape, np.dtype(np.float32).newbyteorder()),
        TypeError,
        "must be of numbers that JAX has in the byte order of the machine, got dtype",
    ),
    "string": (lambda a: a.astype(str).astype(np.dtypes.StringDType()), TypeError, "must be of numbers"),
    "float0": (lambda a: np.zeros(a.shape, jax.dtypes.float0), TypeError, "must be of numbers that JAX has"),
}


@pytest.mark.parametrize(("case", "argument"), first(12, pairs(MISFITS, ARRAYS)[: len(ARRAYS)]), ids=str)
def test_misfits_are_refused_by_name(case, argument):
    name, of = argument
    make, error, match = MISFITS[case]
    misfit = make(FUNCTIONS[name][2][of])
    for _ in range(2):  # the second call would use what the first one compiled
        with pytest.raises(error, match=f"^{name}: {of} {match}"):
            call(name, **{of: misfit})
    with pytest.raises(error, match=f"^{name}: {of} {match}"):
        jax.eval_shape(lambda: call(name, **{of: misfit}))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2])
def test_floats_of_8_bits_are_no_misfits(dtype):
    """float8_e4m3fnuz and NumPy's complex long doubles share the code G."""
    x = np.maximum(X, -9).astype(dtype)
    assert_equal(ps.softmax(x), ps.softmax(jnp.asarray(x)))


def test_factors_without_a_common_dtype_are_named():
    with pytest.raises(ValueError, match="^logsumexp: a of float32 and b of float8_e5m2 have no common dtype"):
        ps.logsumexp(X, b=X.astype(ml_dtypes.float8_e5m2))


# --- Integers of 64 bits --------------------------------------------------------------------------------

REAL = ("a", "b", "temperature", "top_p", "min_p", "token_weights", "label_smoothing", "z_loss")
INTEGERS = [(name, of) for name, of in ARRAYS if of not in (*REAL, "labels", "draft_tokens", "top_k", "lengths")]
INTEGERS.remove(("route", "bias"))


@pytest.mark.parametrize(("name", "of"), first(8, INTEGERS))
@pytest.mark.parametrize("dtype", [int, np.int64, np.uint64])
def test_integers_that_would_wrap_are_named(name, of, dtype):
    wide = dtype(WIDE) if dtype is int else np.full(FUNCTIONS[name][2][of].shape, WIDE, dtype)
    for f in (call, lambda *args, **changed: jax.eval_shape(lambda: call(*args, **changed))):
        with pytest.raises(ValueError, match=rf"^{name}: {of} must be from -?\d+ to \d+ \(u?int32\), got {WIDE}"):
            f(name, **{of: wide})


@pytest.mark.parametrize("dtype", first_values(1, [np.int64, np.uint64, jnp.int64]))
@pytest.mark.parametrize("name", first_values(1, [name for name, of in ARRAYS if of == "labels"][::-1]))
def test_labels_never_wrap(name, dtype):
    """A label that int32 cannot hold is out of range."""
    labels, out = LABELS.astype(np.int64), LABELS.copy()
    labels[0, 1], out[0, 1] = WIDE, -1
    if dtype is jnp.int64:
        with jax.enable_x64(True):
            labels = jnp.asarray(labels)
    else:
        labels = labels.astype(dtype)
    assert_equal(call(name, labels=labels), call(name, labels=out))
    assert_near(jax.jit(lambda: call(name, labels=labels))(), call(name, labels=out), 1e-6, 0)
    with pytest.raises(ValueError, match=rf"^{name}: labels must be from -\d+ to \d+ \(int32\), got {WIDE}"):
        call(name, labels=WIDE)


TAKEN = [(name, of) for name, of in ARRAYS if of in ("a", "b", "temperature", "token_weights", "z_loss", "top_k")]


@pytest.mark.parametrize(
    ("dtype", "name", "of"), first(2, [(dtype, *taken) for dtype, taken in values([int, np.int64, np.uint64], TAKEN)])
)
def test_wide_integers_of_real_arguments_become_floats(name, of, dtype):
    shape = () if dtype is int else FUNCTIONS[name][2][of].shape
    wide = 2**40 if dtype is int else np.full(shape, 2**40, dtype)
    same = np.full(shape, 2**31 - 1) if of == "top_k" else np.full(shape, 2.0**40, np.float32)
    expected = plainly(name, **{of: same})
    assert_equal(plainly(name, **{of: wide}), expected)
    if name != "sample":  # it takes long to compile
        assert_near(jax.jit(lambda: plainly(name, **{of: wide}))(), expected, 1e-6, 0)


def test_a_wide_bias_of_the_router_steers():
    assert (ps.route(X, 1, bias=np.where(np.arange(V) == 1, 2**32, 0)).indices == 1).all()


def test_integers_of_64_bits_that_fit_are_as_before():
    assert_equal(ps.softmax(np.array([1, 2**31 - 1])), jax.nn.softmax(np.array([1, 2**31 - 1])))
    with jax.enable_x64(True):
        x = np.array([2**40, 2**40 + 1])
        assert_equal(ps.softmax(x), ps.softmax(np.array([0, 1])))
        assert np.isnan(ps.token_stats(X[0, 0], np.int64(WIDE)).log_probs)


@pytest.mark.parametrize(
    "temperature", [np.float16(-1e-7), ml_dtypes.bfloat16(1e-38), jnp.full((), -1, jnp.int4)], ids=str
)
def test_the_range_of_a_narrow_number_is_checked_in_float32(temperature):
    """1e-37 is 0 in float16."""
    with pytest.raises(ValueError, match="temperature must be 0, or from 1e-37 to 1e37"):
        call("linear_log_probs", temperature=temperature)


# --- Options --------------------------------------------------------------------------------------------

OPTIONS = [
    ("softmax", "axis", [np.int64(0), (0, 1), 0, np.int32(1), (np.int64(0), 1)]),
    ("logsumexp", "axis", [np.int64(0), (0, 1), None]),
    ("fused_topk", "k", [np.int64(1), 1, np.uint8(2)]),
    ("fused_topk", "dtype", [np.dtype(np.float32), "float16", jnp.bfloat16]),
    ("top_k", "axis", [np.int64(2), 2, -1]),
    ("top_k", "is_stable", [np.bool_(False), True]),
    ("sample", "mode", [np.str_("high"), "low", "high", None]),
    ("token_stats", "axis", [np.int64(-1), -1, np.int32(-1)]),
    ("route", "score", [np.str_("sigmoid"), "softmax", "sigmoid"]),
    ("route", "renormalize", [np.bool_(True), True, False]),
    ("linear_logsumexp", "softcap", [np.float32(30), None, 30, 30.0]),
    ("linear_cross_entropy", "softcap", [np.float32(30), 30]),
    ("linear_token_stats", "implementation", [np.str_("xla"), None, "xla"]),
    ("linear_sample", "transpose_w", [np.bool_(False), False]),
    ("linear_topk", "log", [np.bool_(True), False]),
]


@pytest.mark.parametrize(("name", "option", "values"), first(1, OPTIONS))
def test_options_of_any_type_in_any_order(name, option, values):
    """JAX compares the options of several calls. A NumPy number, compared with a tuple, has no truth value."""
    expected = [jax.jit(functools.partial(plainly, name, **{option: value}))() for value in values]
    for value, result in [*zip(values, expected), *zip(values[::-1], expected[::-1])]:
        assert_near(plainly(name, **{option: value}), result, 1e-6, 0)
    # each of these is accepted, or refused by name
    for value in (np.float32(0.5), np.longdouble(1), np.array([1, 2]), np.ones(3), [None], (0, 1)):
        try:
            plainly(name, **{option: value})
        except (TypeError, ValueError) as error:
            assert str(error).startswith(f"{name}: {option}")


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("linear_logsumexp", "softcap", [30, 30.0, np.float32(30), jnp.float32(30)]),
        ("linear_topk", "softcap", [20, np.float64(20)]),
        ("fused_topk", "k", [3, np.int64(3), np.int8(3)]),
        ("top_k", "sorted", [False, np.bool_(False)]),
        ("softmax", "axis", [(0, 1), (np.int64(0), np.int32(1))]),
        ("logsumexp", "keepdims", [True, np.bool_(True)]),
        ("linear_log_probs", "workspace_bytes", [12345, np.int64(12345), 12345.0, np.float32(12345)]),
    ],
)
def test_equal_options_compile_once(name, option, values):
    plainly(name, **{option: values[0]})
    with jax.no_tracing():
        for value in values[1:]:
            plainly(name, **{option: value})


# --- Strict promotion -----------------------------------------------------------------------------------

PROMOTION = {
    "rank": functools.partial(jax.numpy_rank_promotion, "raise"),
    "dtype": functools.partial(jax.numpy_dtype_promotion, "strict"),
}


@pytest.mark.parametrize(
    ("name", "setting", "dtype", "wide"), first(4, pairs(FUNCTIONS, PROMOTION, ["float32", "bfloat16"], [False, True]))
)
def test_strict_promotion(name, setting, dtype, wide):
    """Each argument has a dtype and a rank of its own: the call promotes none without a cast."""
    narrow = {
        **{"where": MASK[0, 0], "temperature": np.float16(2), "labels": LABELS.astype(np.uint8)},
        **{"lengths": np.int8(2), "top_k": np.int8(2), "top_p": np.float16(0.5), "min_p": np.float64(0.1)},
        **{"token_weights": np.arange(3), "label_smoothing": np.float16(0.5), "z_loss": np.int32(1)},
    }
    narrow |= {"bias": np.arange(V)} if name == "route" else {"bias": W[0].astype(np.float16)}
    narrow |= {"where": MASK[0, :, 0]} if name.startswith("linear") else {}
    arrays = FUNCTIONS[name][2]
    changed = {of: narrow[of] for of in arrays if of in narrow}
    dtypes = {of: jnp.asarray(arrays[of], dtype) for of in ("x", "w", "a", "b", "logits", "operand") if of in arrays}
    of = next(iter(dtypes.keys() & {"x", "a", "logits", "operand"}))

    def value(x):
        return call(name, **{**dtypes, **changed, of: x})

    with jax.enable_x64(wide), PROMOTION[setting]():
        jax.eval_shape(value, dtypes[of])
        if name not in WITHOUT_GRADIENT:
            jax.eval_shape(jax.grad(lambda x: float_sum(value(x))), dtypes[of])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("setting", PROMOTION)
def test_strict_promotion_of_top_k_values_of_another_dtype(dtype, wide, setting, x64):
    def value(x):
        return float_sum(ps.fused_topk(x, 2, dtype=dtype).values)

    x = jnp.asarray(X, wide)
    with PROMOTION[setting]():
        jax.eval_shape(jax.grad(value), x)
        jax.eval_shape(lambda x: jax.jvp(value, (x,), (x,)), x)
