"""Plain JAX on a GPU, compared with the oracle that judges the kernels, and the choice of an implementation there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_softmax as ps
from tests.support import bounds, cases, oracle
from tests.support.cases import ALL, BF16, F16, F32
from tests.support.gpu import LONG, both, each, forward_and_grad, function, operands, topk

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


@pytest.mark.parametrize(
    ("v", "dtype", "k", "repeats", "masked"),
    [
        (7, F32, 7, 1, False),
        (129, F16, 33, 5, True),
        (1000, BF16, 64, 1, False),
        (1003, F32, 5, 20, True),
        (20011, F32, 256, 1, False),
        (50257, F32, 5, 1, True),
        (50257, BF16, 64, 20, False),
        (128256, BF16, 128, 1, False),
    ],
    ids=str,
)
def test_plain_winners(v, dtype, k, repeats, masked):
    x = np.tile(cases.rows(ALL if v <= 20011 else LONG, v, dtype), (repeats, 1))
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x = cases.spoil_masked(x, where) if masked else x
    got, (values, indices) = topk("xla", x, k, where=where), oracle.fused_topk(x, k, where)
    np.testing.assert_array_equal(got.indices, indices)
    tolerance = {"rtol": max(2e-4, 3 * bounds.eps(dtype)), "atol": 2 * bounds.slack(dtype)}
    np.testing.assert_allclose(np.asarray(got.values).astype(F32), values, **tolerance)


@pytest.mark.parametrize("masked", [False, True])
@each
def test_plain_gradients(op, masked):
    x = cases.rows(ALL, 1003)
    where = cases.broadcast_mask("bv", x.shape) if masked else None
    x, dy = operands(op, x, where)
    seen = dy if where is None or op == "logsumexp" else np.where(where, dy, 0)
    y, dx = forward_and_grad("xla", op, x, dy, where)
    flushed = 1 + np.sum(np.abs(seen), -1, keepdims=True)  # a denormal p may be flushed
    for got, name, arguments, slack in (y, op, (x,), 1), (dx, f"{op}_vjp", (x, seen), flushed):
        value, unit = getattr(oracle, name), getattr(bounds, f"{name}_unit")
        want, unit = (of(*arguments, -1, where).reshape(len(x), -1) for of in (value, unit))
        assert bounds.error_units(got, want, unit, slack_times=slack) <= 5 * bounds.UNITS


@both
@pytest.mark.parametrize("v", [1000, 50257])
@pytest.mark.parametrize("name", [*oracle.FORWARD, "topk"])
def test_the_named_implementation_runs(implementation, name, v):
    """No other implementation runs, forward or backward."""
    x, sums = jax.ShapeDtypeStruct((64, v), BF16), jax.ShapeDtypeStruct((64, 1), BF16)
    if name == "topk":
        lowered = topk.lower(implementation, x, 5)
    else:
        lowered = forward_and_grad.lower(implementation, name, x, sums if name == "logsumexp" else x)
    program = lowered.compile().as_text()
    for other, call in {"mosaic_gpu": "mosaic_gpu", "triton": "triton_kernel_call"}.items():
        assert (call in program) == (other == implementation), program[:2000]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("v", [25000, 50257])
@pytest.mark.parametrize("chosen", [ps.softmax, lambda x: ps.fused_topk(x, 5)], ids=["softmax", "topk"])
def test_the_automatic_choice_runs_the_kernel(chosen, v, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((256, v)).astype(dtype))
    assert ps.explain(chosen, x)[0].cuda == "mosaic_gpu"
    compiled = jax.jit(chosen).lower(x).compile()
    assert "mosaic_gpu" in compiled.as_text()
    named = function("mosaic_gpu", "softmax") if chosen is ps.softmax else functools.partial(topk, "mosaic_gpu", k=5)
    for a, b in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(jax.jit(named)(x)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_computation_on_the_cpu_runs_the_plain_implementation():
    x = jax.device_put(np.ones((256, 4096), F32), jax.devices("cpu")[0])
    assert "mosaic_gpu" not in jax.jit(ps.softmax).lower(x).compile().as_text()
    np.testing.assert_allclose(jax.jit(ps.softmax)(x), 1 / 4096, rtol=1e-6)


# Calls of (x, labels, numbers from 0.5 to 1, keep), arrays with a row for each row.
OF_SLICES = {
    "softmax": lambda x, labels, t, keep, **named: ps.softmax(x, where=keep, **named),
    "gradient": lambda x, labels, t, keep, **named: jax.grad(lambda x: jnp.sum(ps.softmax(x, **named) ** 2))(x),
    "topk": lambda x, labels, t, keep, **named: ps.fused_topk(x, 5, where=keep, temperature=t, **named),
    "stats": lambda x, labels, t, keep, **named: ps.token_stats(x, labels, temperature=t, **named),
    "sample": lambda x, labels, t, keep, **named: ps.sample(KEY, x, temperature=t, **named),
    "filtered": lambda x, labels, t, keep, **named: ps.sample(KEY, x, temperature=t, top_p=t, top_k=labels, **named),
    "log_probs": lambda x, labels, t, keep, **named: ps.linear_log_probs(halves(x), W, labels, temperature=t, **named),
}
KEY = jax.random.key(0)
W = np.random.default_rng(5).standard_normal((64, 1003)).astype(BF16)


def halves(x):
    return x[:, :64].astype(jnp.bfloat16)


def run_whole(f, *arrays):
    return f(*(a[1:65] for a in arrays))


def run_in_a_loop(f, *arrays):
    """Rows 0 to 63, then 1 to 64: XLA knows the offsets, and writes each step's results into larger arrays."""

    def step(i, results):
        part = f(*(lax.dynamic_slice_in_dim(a, i, 64) for a in arrays))
        return jax.tree.map(lambda whole, new: lax.dynamic_update_slice_in_dim(whole, new, i, 0), results, part)

    shapes = jax.eval_shape(f, *(a[1:65] for a in arrays))
    empty = jax.tree.map(lambda s: jnp.zeros((65, *s.shape[1:]), s.dtype), shapes)
    return jax.tree.map(lambda a: a[1:], lax.fori_loop(0, 2, step, empty))


@both
@pytest.mark.parametrize("run", [run_whole, run_in_a_loop])
@pytest.mark.parametrize("name", OF_SLICES)
def test_slices(implementation, name, run):
    """64 rows are a multiple of 256 bytes, so XLA would pass the address of a slice, although row 1 is not aligned."""
    if implementation == "triton" and name not in ("softmax", "gradient", "topk"):
        pytest.skip("no Triton kernel")
    rng = np.random.default_rng(4)
    x, labels, t = rng.standard_normal((66, 1003)), rng.integers(1, 1003, 66), np.linspace(0.5, 1, 66)[:, None]
    labels = labels[:, None] if name == "filtered" else labels
    t = t[:, 0] if name == "log_probs" else t
    arrays = [jnp.asarray(a) for a in (x.astype(F32), labels.astype("int32"), t.astype(F32), rng.random(x.shape) < 0.8)]
    f = functools.partial(OF_SLICES[name], implementation=implementation)
    got = jax.jit(functools.partial(run, f))(*arrays)
    want = f(*(a[1:65] for a in arrays))
    jax.tree.map(np.testing.assert_array_equal, got, want)
