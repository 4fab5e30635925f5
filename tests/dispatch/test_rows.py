"""Axes, dtypes, masks and batches in all functions: rows do not depend on where or how they are given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import calls, cases
from tests.support.calls import BATCH, CALLS, X, call, logits_of, plainly, pullback, total, with_gradient
from tests.support.cases import F32
from tests.support.covering import first, first_values, in_turn, pairs, slow
from tests.support.trees import assert_equal, assert_near

pytestmark = pytest.mark.usefixtures("quick_compilation")

DIFFERENTIABLE = [name for name in CALLS if CALLS[name][3]]


@functools.cache
def program(name, call=call):
    """Returns the results and the gradients, if there are some, as a compiled function of the arrays of a call."""
    both = lambda given: (call(name, **given), pullback(name, given, call) if name in DIFFERENTIABLE else {})  # noqa: E731
    return jax.jit(both)


# --- dtypes, under strict promotion ---------------------------------------------------------------------

KEEP = ("softmax", "log_softmax", "logsumexp", "fused_topk", "top_k")  # results have the dtype of the logits
FLOATS = ["bfloat16", "float64", "float16"]
OF_ROWS = [name for name in CALLS if not name.startswith("linear")]
DTYPES = dict.fromkeys(
    [
        *zip(
            [*KEEP, "filter_logits", "sample", "route"],
            ["int32", "bfloat16", "int64", "float16", "int8", "float64", "uint8", "int4"],
        ),
        *in_turn(CALLS, FLOATS, 1),
        ("token_stats", "float64"),
        *in_turn(OF_ROWS, ["int32", "int8", "uint8", "int16", "int64", "int4", "uint32"], 1),
        *in_turn((*KEEP[:4], "sample"), ["float8_e5m2", "float8_e4m3fn"], 1),
        *((name, "float4_e2m1fn") for name in ("sample", "token_stats, rank")),
    ]
)


@pytest.mark.parametrize(("name", "dtype"), first(2, [*DTYPES]))
def test_dtypes(name, dtype):
    """Results equal the results of float32 logits, rounded once. Gradients have the dtype of their arguments."""
    x = np.round(X).clip(0 if dtype[0] == "u" else -3, 3)
    wide = "float64" if dtype in ("float64", "int64") else "float32"
    with jax.enable_x64(wide == "float64"), jax.numpy_dtype_promotion("strict"):
        given, like = ({logits_of(name): jnp.asarray(x, d)} for d in (dtype, wide))
        if name.startswith("linear"):
            w = jnp.asarray(calls.W, dtype)
            given, like = given | {"w": w}, like | {"w": w.astype(wide)}
        got, want = plainly(name, **given), plainly(name, **like)
        floating = jnp.issubdtype(dtype, jnp.floating)
        eps = float(jnp.finfo(dtype).eps) if floating else 0
        kept = name.split(",")[0] in KEEP and (floating or name == "top_k")
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            integers = jnp.issubdtype(b.dtype, jnp.integer)
            assert a.dtype == ("int32" if integers else dtype if kept else wide)
            assert_near(a, b, max(eps, 1e-5), 2.0**-8 if "float8" in dtype else 1e-5)
        if name in DIFFERENTIABLE and dtype in FLOATS and name != "logsumexp":  # b has a dtype
            gradient = jax.jit(lambda given: pullback(name, CALLS[name][2] | given))
            got, want = gradient(given), gradient(like)
            for of, a in got.items():
                assert a.dtype == (dtype if of in given else F32)
                assert_near(a, want[of], 0, max(8 * eps, 1e-5) * np.abs(want[of]).max())


@pytest.mark.parametrize(
    ("name", "dtype"),
    first(1, pairs(["softmax", "log_softmax", "logsumexp, rows", "fused_topk"], ["int8", "uint8", "int4"])),
)
def test_many_short_integers(name, dtype):
    """A long array, which XLA for CPUs fuses: it once turned negative int8 into 0 of uint8."""
    low, high = {"int4": (-8, 8), "int8": (-128, 128), "uint8": (0, 256)}[dtype]
    x = np.random.default_rng(0).integers(low, high, (400, 16))
    assert_near(*(plainly(name, **{logits_of(name): jnp.asarray(x, d)}) for d in (dtype, F32)))


def moved(axis, arrays):
    """Moves the row's axis of the arrays that have it."""
    return {of: jnp.moveaxis(a, -1, axis) if of in (*calls.LOGITS, "where") else a for of, a in arrays.items()}


WITH_AXIS = [*KEEP[:2], "logsumexp, rows", *KEEP[3:], "sample", "filter_logits", "token_stats"]


@pytest.mark.parametrize(("name", "axis"), first(2, in_turn(WITH_AXIS, [1, 0, -2, -3])))
def test_axis(name, axis):
    """Results and gradients are those along the last axis. Numbers for each row are as before."""

    def along_axis(name, **given):
        results = call(name, **moved(axis, given) | {"axis": axis})
        return jax.tree.map(lambda a: jnp.moveaxis(a, axis, -1) if a.ndim == 3 else a, results)

    key = {"key": jax.random.split(jax.random.key(0), BATCH)} if name == "sample" else {}
    given = CALLS[name][2] | key
    assert_near(program(name, along_axis)(given), program(name)(given))


# --- Batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_values(1, CALLS))
def test_no_rows(name):
    """A batch may be empty. Its gradients are 0 in what all rows share."""
    of_rows = {of: a for of, a in CALLS[name][2].items() if a.shape[:1] == BATCH[:1] and of != "key"}
    like = jax.eval_shape(functools.partial(call, name), **of_rows)
    results, gradients = program(name)(CALLS[name][2] | {of: a[:0] for of, a in of_rows.items()})
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(like)):
        assert a.dtype == b.dtype and a.shape == ((0, *b.shape[1:]) if b.ndim else ())
    for of, a in gradients.items():
        assert not np.any(a) and a.shape[:1] == ((0,) if of in of_rows else CALLS[name][2][of].shape[:1])


MEANS = ("linear_cross_entropy", "linear_kl_divergence")
OF_EACH_ROW = [name for name in CALLS if name not in ("logsumexp", "verify", *MEANS)]


@pytest.mark.parametrize("name", first_values(1, OF_EACH_ROW))
def test_nan_and_infinities_stay_in_their_rows(name):
    clean = np.maximum(X, -9)
    x = clean.copy()
    x[0, 0, 5], x[0, 2, 6], x[1, 0] = np.nan, np.inf, -np.inf
    bad = np.array([[True, False, True], [True, False, False]])
    key = {"key": jax.random.split(jax.random.key(0), BATCH)} if name == "sample" else {}
    given = {of: None if of == "where" else a for of, a in CALLS[name][2].items()} | key
    got, want = (program(name)(given | {logits_of(name): of_x}) for of_x in (x, clean))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        if b.shape[:2] == BATCH:
            assert_near(a[~bad], b[~bad])


@pytest.mark.parametrize("name", first_values(2, [name for name in CALLS if "where" in CALLS[name][2]]))
def test_masked_garbage_does_not_matter(name):
    """Results and gradients have the same bits with NaN and infinities at masked positions, which get no gradient."""
    given, of = CALLS[name][2], logits_of(name)
    where = given["where"] if given["where"].ndim == 3 else given["where"][..., None]
    x = np.maximum(given[of], -99)
    labels = {}
    if of == "x" and "labels" in given:
        labels["labels"] = given["labels"].copy()
        labels["labels"][0, ~given["where"][0]] = -100
    got = program(name)(given | labels | {of: cases.spoil_masked(x, where)})
    assert_equal(got, program(name)(given | {of: x}))
    assert name not in DIFFERENTIABLE or not np.any(np.where(where, 0, got[1][of]))


def broadcast(name):
    """Returns the arguments of a call that may be given once for all rows."""
    return [of for of, a in CALLS[name][2].items() if a.shape[:1] == BATCH[:1] and of not in SHAPED]


SHAPED = ("key", "labels", "label_probs", "draft_tokens", "draft_log_probs", "teacher_x", *calls.LOGITS)


@pytest.mark.parametrize(
    ("name", "ones"), first(1, in_turn([name for name in CALLS if broadcast(name)], ["100", "010", "110", "scalar"], 1))
)
def test_arguments_broadcast(name, ones):
    """Masks, temperatures and filters may have size 1 along any dimension of the batch, or be scalars."""
    given, at = CALLS[name][2], tuple(slice(0, 1 if i == "1" else None) for i in ones[:2])
    few = {of: given[of][0, 0] if ones == "scalar" else given[of][at] for of in broadcast(name)}
    full = {of: np.broadcast_to(a, given[of].shape) for of, a in few.items()}
    assert_near(call(name, **given | few), call(name, **given | full))


@pytest.mark.parametrize("dtype", first_values(0, ["uint8", "int16", "uint32", "int64"]))
def test_labels_of_any_dtype(dtype):
    for name in [name for name in CALLS if "labels" in CALLS[name][2]]:
        with jax.enable_x64(dtype == "int64"):
            got = plainly(name, labels=jnp.asarray(CALLS[name][2]["labels"], dtype))
        assert_near(got, plainly(name), 1e-6)


# --- Results that are not finite, and temperature 0 -----------------------------------------------------

MODES = {
    "grad": lambda f, held: jax.grad(f)(held),
    "jvp of grad": lambda f, held: jax.jvp(jax.grad(f), (held,), (jax.tree.map(jnp.ones_like, held),))[1],
    "grad of jvp": lambda f, held: jax.grad(lambda h: jax.jvp(f, (h,), (jax.tree.map(jnp.ones_like, h),))[1])(held),
}
OF_BAD_ROWS = [
    *[(name, mode) for mode in MODES for name in ("token_stats", "sample", "filter_logits")],
    *[(name, "grad") for name in CALLS if name.startswith("linear") and CALLS[name][3]],
]


@pytest.mark.parametrize(("name", "mode"), first(1, OF_BAD_ROWS))
def test_results_that_are_not_finite_have_derivatives_of_0(name, mode):
    """Logits, temperatures, weights and labels are bad; the last row is good. A mean or sum has them everywhere."""
    x, labels = np.maximum(X, -9), np.array([[1, 3, -100], [7, 9, 11]])
    x[0, 0, 5], x[0, 1, 6] = np.nan, np.nan if name.startswith("linear") else np.inf
    if not name.startswith("linear"):
        x[1, 0, 7], x[0, 2] = -np.inf, -np.inf  # at the label, and a whole row
    bad = {
        "temperature": np.array([[1, 1, 1], [1, -1, 1]], F32),
        "token_weights": np.array([[1, 1, 1], [1, np.nan, 1]], F32),
        "labels": np.stack([labels] * 3, -1) if name.endswith(("several", "soft")) else labels,
        "bias": np.where(np.arange(calls.COLUMNS) == 7, -np.inf, 0).astype(F32),
    }
    filters = ("where", "top_k", "top_p", "min_p")
    given = {of: None if of in filters else bad.get(of, a) for of, a in CALLS[name][2].items()}
    # This bias masks a column only if no smoothing is known.
    known = {"label_smoothing": 0.0} if "label_smoothing" in given else {}
    run = jax.jit(lambda given: MODES[mode](*total(name, given | known)))
    derivatives = run(given | {logits_of(name): x})
    for d in derivatives.values():
        assert np.isfinite(d).all()
    if name in MEANS:  # the result is NaN
        sums = jax.jit(lambda given: MODES[mode](*total(name, given | known | {"reduction": "sum"})))
        assert not any(map(np.any, (*derivatives.values(), *sums(given | {logits_of(name): x}).values())))
        return
    dx = np.asarray(derivatives[logits_of(name)])
    assert not dx[0, : 2 if name.startswith("linear") else 3].any() and dx[1, 2].any()
    assert "temperature" not in given or not dx[1, 1].any()
    if "entropy" in name or "divergence" in name:  # as if `where` removed the token of a loss
        results = jax.jit(lambda given: call(name, **given | known))(given | {logits_of(name): x})
        kept = np.isfinite(jax.tree.leaves(results)[0])
        assert_near(derivatives, run(given | {logits_of(name): x, "where": kept}))


@pytest.mark.parametrize("name", first_values(1, [name for name in CALLS if "labels" in CALLS[name][2]]))
def test_labels_out_of_range(name):
    """In this row, results that depend on the label are NaN. Other results and rows are as before."""
    labels = np.array(CALLS[name][2]["labels"])
    columns = calls.COLUMNS if name[:6] == "linear" else calls.V
    labels[0, 1], labels[1, 0], labels[1, 1] = -1, 2**31 - 1, columns
    good = np.array([[True, False, True], [False, False, True]])

    @jax.jit
    def results_and_gradient(labels):
        of_logits = pullback(name, CALLS[name][2] | {"labels": labels})[logits_of(name)]
        return plainly(name, labels=labels), of_logits

    (got, dx), (want, clean) = map(results_and_gradient, (labels, CALLS[name][2]["labels"]))
    if name == "linear_cross_entropy":
        assert np.isnan(got)
        return
    of_label, *others = jax.tree.leaves(got)
    assert_near(of_label[good], jax.tree.leaves(want)[0][good])
    assert np.isnan(of_label[~good]).all()
    if name != "token_stats, rank":
        assert_near(others, jax.tree.leaves(want)[1:])
    assert_near(dx[good], clean[good])
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("transform", [jax.grad, slow(jax.jacfwd), slow(lambda f, n: jax.jacfwd(jax.grad(f, n), n))])
@pytest.mark.parametrize(
    "name", first_values(0, ["fused_topk", "token_stats", "fused_topk, log", "sample", "filter_logits"])
)
def test_gradients_at_temperature_0_are_0(name, transform):
    """Rows have ties, zeros of both signs, subnormal and huge numbers; the last one has another temperature."""
    x = np.array([*cases.AT_0.values()], F32)
    x[5] /= 1 if name.startswith("fused_topk") else 1e38
    labels = {"labels": np.arange(7) % 5} if name == "token_stats" else {}

    def total(x, t):
        floats = with_gradient(plainly(name, logits=x, temperature=t, **labels))
        return sum(jnp.sum((jnp.where(jnp.isfinite(a), a, 0).T * np.arange(1, 8)).T ** 2) for a in floats)

    for t in (np.where(np.arange(7) == 6, F32.type(2), 0), F32.type(0))[: 2 if transform is jax.grad else 1]:
        for d in jax.tree.leaves(jax.jit(transform(total, (0, 1)))(x, t)):
            assert np.isfinite(d).all() and not np.any(np.asarray(d)[:-1] if t.ndim else d)
            assert not t.ndim or np.asarray(d)[-1].any()
