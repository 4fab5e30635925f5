"""The Triton kernels in Triton's interpreter, against the oracle: run by test_triton.py, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported. What no kernel says, the interpreter does in numpy, but for three
things that are here: arguments that are no torch tensors, bfloat16 (rounded, and as GPUs do NaN), and reductions, which
it does element by element, a millisecond each; here by halves, as GPUs do.
"""

import os
import warnings
from types import SimpleNamespace

import cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import triton.language as tl
from cases import BF16, F16, F32
from triton.runtime import interpreter

from pallas_softmax.implementations.triton import implementation
from pallas_softmax.implementations.triton import plan as triton_plan
from pallas_softmax.implementations.triton.launch import launch_p
from pallas_softmax.implementations.triton.plan import Block, Long, Slabs

assert os.environ.get("TRITON_INTERPRET") == "1"
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1", "int32": "i32"}


class Run(interpreter.GridExecutor):
    """Of arguments that are on the host."""

    def _init_args_hst(self, args, kwargs):
        return args, kwargs

    def _restore_args_dev(self, *_):
        pass


@launch_p.def_impl
def _interpret(*inputs, kernel, out_type, grid, warps, constants, capability):
    """The outputs start as what no kernel writes, and none writes beside them."""
    inputs = [np.array(a) for a in inputs]
    margin = 4096
    held = [np.full(2 * margin + out.size * out.dtype.itemsize, 0xA5, np.uint8) for out in out_type]
    outputs = [a[margin:-margin].view(out.dtype) for a, out in zip(held, out_type)]
    arrays = [*inputs, *outputs]
    pointers = [
        SimpleNamespace(data_ptr=lambda a=a: a.ctypes.data, dtype=TYPES[a.dtype.name]) for a in arrays
    ]
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        Run(kernel.rewrite(), kernel.arg_names, grid)(*pointers, **dict(constants))
    for a in held:
        assert (a[:margin] == 0xA5).all() and (a[-margin:] == 0xA5).all()
    return [jnp.asarray(a.reshape(out.shape)) for a, out in zip(outputs, out_type)]


def _cast(self, src, dst, *_):
    def as_is(of):
        return ml_dtypes.bfloat16 if of == tl.bfloat16 else interpreter._get_np_dtype(of)

    held = src.data.view(as_is(src.dtype.scalar)) if src.dtype.scalar == tl.bfloat16 else src.data
    out = held.astype(as_is(dst.scalar))
    return interpreter.TensorHandle(out.view(interpreter._get_np_dtype(dst.scalar)), dst.scalar)


def _reduce(self, operands):
    axis = self.axis % operands[0].handle.data.ndim
    parts = [np.moveaxis(a.handle.data, axis, 0) for a in operands]
    types = [a.dtype for a in operands]

    def tensors(parts):
        return [self.to_tensor(np.ascontiguousarray(a), of) for a, of in zip(parts, types)]

    while (n := len(parts[0])) > 1:
        assert n % 2 == 0
        out = self.combine_fn.fn(*tensors(a[: n // 2] for a in parts), *tensors(a[n // 2 :] for a in parts))
        parts = [a.handle.data for a in (out if isinstance(out, tuple) else (out,))]
    kept = [np.expand_dims(a[0], axis) if self.keep_dims else a[0] for a in parts]
    return tuple(self.to_tensor(a, of) for a, of in zip(kept, types))


# Once for all: as it is, before every call of a device function
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
tl.tensor.__index__ = lambda self: self.handle.data.item()  # that of triton 3.6 fails with numpy 2.5
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_fp_to_fp = _cast
interpreter.ReduceOps.generic_reduce = _reduce

ALL = [*cases.FINITE, *cases.SPECIAL]
FEW = ["normal", "peaked", "integers", "ascending", "everything", "neg_inf_last", "nan_last"]


# --- softmax, log_softmax, logsumexp and their backwards ----------------------------------------------


def check(op, x, names, where=None, plan=None):
    arrays = cases.operands(op, x, where)
    mask = None
    if where is not None:
        arrays = [cases.spoilt(a, where) if a is arrays[-1] else a for a in arrays]
        mask = jnp.asarray(where)
    axes = (x.ndim - 1,)
    out = implementation.softmax_rows(op, [jnp.asarray(a) for a in arrays], mask, axes, plan)
    y = out[0].astype(x.dtype) if op == "logsumexp" else out
    oracle.assert_operation(op, y, arrays, names, where)
    if op == "logsumexp":
        m, d = oracle.normalizer(x if where is None else arrays[0], where)
        oracle.assert_close(out[1], m, np.zeros_like(m), names)
        oracle.assert_close(out[2], d, oracle.normalizer_unit(arrays[0], where), names)


# One row a program and several; rows of one element; whole vectors and not; the choice itself. Then long rows: steps
# of one and two, whole and not; parts, the last short, whose number is no power of two.
PLANS = [
    (1, F32, FEW, None),
    (3, BF16, FEW, Block(4, 4, 1)),
    (128, F16, ALL, Block(8, 128, 1)),
    (1000, F32, ALL, None),
    (1000, BF16, ALL, None),
    (1003, F32, ALL, Long(1, 1024, 2, 128, 4)),
    (1024, BF16, ALL, Long(1, 1024, 4, 64, 4)),
    (1003, F32, FEW, Long(3, 384, 1, 128, 4)),
    (2003, F16, FEW, Long(5, 448, 1, 64, 4)),
    (40000, BF16, FEW[:1], None),
]


@pytest.mark.parametrize(("v", "dtype", "names", "plan"), PLANS, ids=str)
@pytest.mark.parametrize("op", oracle.OPERATIONS)
def test_rows(op, v, dtype, names, plan):
    check(op, cases.rows(names, v, dtype), names, plan=plan)


def test_plans_are_of_every_kind():
    chosen = [plan or triton_plan.plan_softmax("softmax", len(names), v, d) for v, d, names, plan in PLANS]
    assert {type(plan) for plan in chosen} == {Block, Long}
    assert any(
        isinstance(plan, Block) and len(names) % plan.rows for plan, (*_, names, _) in zip(chosen, PLANS)
    )
    assert {plan.parts > 1 for plan in chosen if isinstance(plan, Long)} == {True, False}


MASKED = [(100, Block(4, 128, 1), pattern) for pattern in cases.BROADCASTS]
MASKED += [(503, Long(1, 512, 2, 64, 4), pattern) for pattern in ("bhqv", "b11v", "bhq1")]
MASKED += [(503, Long(3, 192, 1, 64, 4), pattern) for pattern in ("1hqv", "b1q1")]


@pytest.mark.parametrize(("v", "plan", "pattern"), MASKED, ids=str)
@pytest.mark.parametrize("op", oracle.OPERATIONS)
def test_where(op, v, plan, pattern):
    """NaN and infinities where it masks; the first row of the mask keeps nothing; of one row it keeps -inf."""
    shape = (*cases.BATCH, v)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], v), shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    check(op, x, names, cases.broadcast_mask(pattern, shape), plan)


@pytest.mark.parametrize("axes", [(0,), (0, 2)], ids=str)
def test_axes(axes):
    """Any: as where they are moved to the end, with a mask that one of the axes lacks."""
    rng = np.random.default_rng(4)
    y, dy = rng.standard_normal((2, 20, 3, 10)).astype(F32)
    where = rng.random((1, 3, 10)) < 0.7
    got = implementation.softmax_grad((jnp.asarray(y),), jnp.asarray(where), jnp.asarray(dy), axes=axes)
    moved = [
        np.moveaxis(np.broadcast_to(a, y.shape), axes, range(-len(axes), 0)) for a in (y, dy, where, got)
    ]
    y, dy, where, got = (a.reshape(*a.shape[: -len(axes)], -1) for a in moved)
    oracle.assert_operation("softmax_grad", got, (y, dy), [str(at) for at in np.ndindex(y.shape[:-1])], where)


# --- top-k --------------------------------------------------------------------------------------------

ONE = np.ones(1, F32)


def assert_topk(x, k, names, plan=None, where=None, temperature=ONE, log=False, dtype=F32):
    """Indices exactly; values as test_gpu.py has them; m and d where they are numbers."""
    mask = None if where is None else jnp.asarray(where)
    t = temperature.reshape(*x.shape[:-1], 1) if temperature.size > 1 else temperature.reshape((1,) * x.ndim)
    got, (m, d) = implementation.topk(
        jnp.asarray(x), mask, jnp.asarray(t), k=k, log=log, dtype=jnp.dtype(dtype), plan=plan
    )
    assert got.values.shape == got.indices.shape == (*x.shape[:-1], k)
    assert m.shape == d.shape == (*x.shape[:-1], 1)
    assert got.indices.dtype == jnp.int32 and got.values.dtype == dtype
    v = x.shape[-1]
    where = None if where is None else np.broadcast_to(where, x.shape).reshape(-1, v)
    x = x.reshape(-1, v)
    t = temperature[0] if temperature.size == 1 else temperature.ravel()
    want, best = oracle.fused_topk(x, k, where, t, log)
    indices = np.asarray(got.indices).reshape(-1, k)
    for i, name in enumerate(names):
        np.testing.assert_array_equal(indices[i], best[i], err_msg=name)
    with np.errstate(all="ignore"):
        tempered = x.astype(F32) / np.reshape(t, (-1, 1))
        terms = np.nansum(oracle.softmax_unit(tempered, where=where), -1, keepdims=True)
        unit = oracle.fused_topk_unit(x, k, where, t, log) + terms * (1 if log else want)
        want_m, want_d = oracle.normalizer(x, where)[0], oracle.normalizer(tempered, where)[1]
    oracle.assert_close(np.asarray(got.values).reshape(-1, k), want, unit, names)
    m, d = np.asarray(m).ravel(), np.asarray(d).ravel()
    ordinary = np.isfinite(want_m[:, 0])  # otherwise p is NaN, whatever they are
    np.testing.assert_array_equal(m[ordinary], want_m[ordinary, 0])
    np.testing.assert_allclose(d[ordinary], want_d[ordinary, 0], rtol=2e-5)


# One part: of one slab, of several, whole and not; a group of one element; fewer elements than groups. Parts that one
# merge takes, the last list missing; and the choice itself.
TOPK = [
    (1, F32, 1, FEW, None),
    (100, F32, 5, ALL, None),
    (100, BF16, 100, FEW, Slabs(1, 128, 128, 128, 1, 2)),
    (1003, F32, 5, ALL, Slabs(1, 1024, 8, 32, 4, 2)),
    (1003, BF16, 5, ALL, Slabs(1, 1024, 8, 16, 8, 2)),
    (2048, F16, 64, FEW, Slabs(1, 2048, 64, 64, 8, 2)),
    (2000, F32, 16, FEW, Slabs(1, 2048, 16, 16, 4, 2)),  # three levels
    (1003, F32, 5, FEW, Slabs(3, 384, 8, 16, 4, 2)),
    (1003, F16, 1, FEW, Slabs(3, 384, 2, 16, 8, 2)),
    (16000, BF16, 1, FEW[:3], None),
]


@pytest.mark.parametrize(("v", "dtype", "k", "names", "plan"), TOPK, ids=str)
def test_topk(v, dtype, k, names, plan):
    assert_topk(cases.rows(names, v, dtype), k, names, plan)


def test_topk_plans_are_of_every_kind():
    plans = [plan or triton_plan.plan_topk(len(names), v, k, d) for v, d, k, names, plan in TOPK]
    assert {len(plan.levels) for plan in plans} >= {0, 1, 2, 3}
    assert {plan.parts > 1 for plan in plans} == {True, False}


@pytest.mark.parametrize("parts", [5, 9])
def test_merges_of_merges(parts, monkeypatch):
    """In three launches and four, of two lists each; the last list of the last merge is missing."""
    monkeypatch.setattr(triton_plan, "lists_per_merge", lambda slots: 2)
    v, names = 128 * parts - 25, ["normal", "integers", "everything"]
    assert_topk(cases.rows(names, v), 5, names, Slabs(parts, 128, 8, 16, 4, 1), log=True)


ONE_PART, PARTS = Slabs(1, 512, 32, 32, 4, 2), Slabs(2, 256, 32, 32, 4, 2)


@pytest.mark.parametrize(("plan", "log"), [(ONE_PART, False), (PARTS, True)], ids=["one", "parts"])
def test_topk_with_a_temperature_per_row(plan, log):
    names = FEW if log else list(cases.FINITE)
    assert_topk(
        cases.rows(names, 503), 5, names, plan, None, np.geomspace(0.1, 10, len(names)).astype(F32), log
    )


@pytest.mark.parametrize(("plan", "dtype"), [(ONE_PART, F16), (PARTS, BF16)], ids=["one", "parts"])
def test_topk_values_of_another_dtype(plan, dtype):
    """And one temperature for all rows."""
    assert_topk(cases.rows(FEW[:3], 503), 5, FEW[:3], plan, None, np.full(1, 0.7, F32), dtype=dtype)


TOPK_MASKED = [(ONE_PART, pattern, F32) for pattern in ("111v", "bhq1", "1h11")]
TOPK_MASKED += [(ONE_PART, "bhqv", BF16), (PARTS, "b11v", F32), (PARTS, "1hqv", F16), (PARTS, "b1q1", F32)]


@pytest.mark.parametrize(("plan", "pattern", "dtype"), TOPK_MASKED, ids=str)
def test_topk_where(plan, pattern, dtype):
    """NaN and infinities where it masks; the first row of the mask keeps nothing: 0, 1, 2, ... with p = 0."""
    shape = (*cases.BATCH, 503)
    x = np.resize(cases.rows(["normal", "peaked", "integers", "negative", "all_neg_inf"], 503), shape)
    where = cases.broadcast_mask(pattern, shape)
    names = [f"row {at}" for at in np.ndindex(cases.BATCH)]
    assert_topk(cases.spoilt(x.astype(dtype), where), 5, names, plan, where)


@pytest.mark.parametrize(("plan", "log"), [(ONE_PART, False), (PARTS, True)], ids=["one", "parts"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_topk_of_fewer_unmasked_than_winners(plan, log, dtype):
    """Then -NaN is before what is masked, which comes in order of its indices, with p = 0 also beside NaN."""
    names = ["normal", "everything", "every_third_neg_nan", "all_neg_nan"]
    where = np.zeros((4, 503), bool)
    where[:, 2:40:3] = where[:, -1] = True
    assert_topk(cases.rows(names, 503, dtype), 20, names, plan, where, log=log)


@pytest.mark.parametrize("plan", [ONE_PART, PARTS], ids=["one", "parts"])
def test_topk_of_ties_and_order(plan):
    """The best in one group, in every group, in one slab, in one place of each."""
    at = np.arange(503)
    rows = {
        "one group": np.where(at // 4 % 32 == 7, 500.0 - at, at / 503),
        "one slab": np.where(at // 128 == 2, 500.0 - at, at / 503),
        "one place": np.where(at % 4 == 3, 500.0 - at, -1.0),
        "rising": at - 200.0,
        "two values": np.where(at % 2, 1.0, -1.0),
        "all_neg_nan": np.full(503, cases.NEG_NAN),
        "a third NaN": np.where(at % 3, 1.0, np.nan),
        "+0 and -0": np.where(at % 3, -0.0, 0.0),
    }
    assert_topk(np.stack([*rows.values()]).astype(F32), 32, [*rows], plan)
