"""Tests of the Triton kernels in Triton's interpreter; tests/triton/test_compiled.py runs this file in a process.

Triton reads TRITON_INTERPRET at import. The interpreter computes each operation of a kernel in numpy. This file makes
it take numpy arrays instead of torch tensors, and round to bfloat16 like a GPU. It also makes the interpreter fast:
reductions work by halves instead of element by element, sorts use numpy instead of Triton's network of hundreds of
operations, and integer additions are not checked for overflow.
"""

import dataclasses
import itertools
import os
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from pallas_softmax import online
from pallas_softmax._src import sort_keys
from pallas_softmax._src.triton import language
from pallas_softmax._src.triton import plan as triton_plan
from pallas_softmax._src.triton.launch import launch, launch_p
from pallas_softmax._src.triton.plan import Block, Long, Slabs
from tests.support import bounds, cases, oracle, triton_kernels
from tests.support.cases import ALL, BF16, F16, F32, FEW
from tests.support.gpu import assert_top_k
from tests.topk.kernels import ONE, judge_topk, temperatures

assert os.environ.get("TRITON_INTERPRET") == "1"
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1", "int32": "i32"}


class Run(interpreter.GridExecutor):
    """Runs a kernel with arguments that are already on the host."""

    def _init_args_hst(self, args, kwargs):
        return args, kwargs

    def _restore_args_dev(self, *_):
        pass


@launch_p.def_impl
def _interpret(*inputs, kernel, out_type, grid, warps, constants, capability):
    """Interprets a launch. Outputs start with bytes that no kernel writes. Kernels must not write around them."""
    inputs = [np.array(a) for a in inputs]
    margin = 4096
    held = [np.full(2 * margin + out.size * out.dtype.itemsize, 0xA5, np.uint8) for out in out_type]
    outputs = [a[margin:-margin].view(out.dtype) for a, out in zip(held, out_type)]
    arrays = [*inputs, *outputs]
    pointers = [SimpleNamespace(data_ptr=lambda a=a: a.ctypes.data, dtype=TYPES[a.dtype.name]) for a in arrays]
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


def _topk(x, k, dim=None, descending=True):
    best = np.sort(x.handle.data)[::-1][: tl.core._unwrap_if_constexpr(k)]
    return tl.tensor(interpreter.TensorHandle(best.copy(), x.dtype), tl.block_type(x.dtype, list(best.shape)))


# The interpreter does this once, instead of before every call of a device function.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
tl.tensor.__index__ = lambda self: self.handle.data.item()  # triton 3.6's own fails with numpy 2.5
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_fp_to_fp = _cast
interpreter.ReduceOps.generic_reduce = _reduce
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
TRITONS_TOPK, tl.topk = tl.topk, _topk


@triton.jit
def combine_kernel(m1_ptr, d1_ptr, m2_ptr, d2_ptr, m_ptr, d_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    m1, d1, m2, d2 = tl.load(m1_ptr + at), tl.load(d1_ptr + at), tl.load(m2_ptr + at), tl.load(d2_ptr + at)
    m, d = language.combine(m1, d1, m2, d2)
    tl.store(m_ptr + at, m)
    tl.store(d_ptr + at, d)


def test_combine_agrees_with_online():
    """⊕ in language.py agrees with `online.combine`, also for empty and non-finite normalizers."""
    each = [-np.inf, -1e38, -90, -1.5, -0.0, 0, 2, 2.5, 88, 1e38, np.inf, np.nan]
    m = np.array([*each, *each[1:5]], F32)
    d = np.where(m == -np.inf, 0, np.where(np.isfinite(m), np.linspace(1, 9, len(m)), np.nan)).astype(F32)
    m1, m2 = (a.ravel() for a in np.meshgrid(m, m))
    d1, d2 = (a.ravel() for a in np.meshgrid(d, d))
    with np.errstate(all="ignore"):
        want = online.combine(*(online.Normalizer(jnp.asarray(m), jnp.asarray(d)) for m, d in [(m1, d1), (m2, d2)]))
    out = [jax.ShapeDtypeStruct(m1.shape, F32)] * 2
    got = launch(combine_kernel, [jnp.asarray(a) for a in (m1, d1, m2, d2)], out, (1,), 4, N=m1.size)
    np.testing.assert_array_equal(got[0], want.m)
    np.testing.assert_allclose(got[1], want.d, rtol=1e-5)


@triton.jit
def sort_key_kernel(x_ptr, key_ptr, back_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    key = language.sort_key(tl.load(x_ptr + at))
    tl.store(key_ptr + at, key)
    tl.store(back_ptr + at, language.from_sort_key(key, x_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_sort_keys_agree_with_jax(dtype):
    x = np.resize(cases.rows(["everything", "huge", "denormals", "alternating"], 64, dtype).ravel(), 256)
    out = [jax.ShapeDtypeStruct(x.shape, jnp.int32), jax.ShapeDtypeStruct(x.shape, F32)]
    key, back = launch(sort_key_kernel, [jnp.asarray(x)], out, (1,), 4, N=x.size)
    np.testing.assert_array_equal(key, sort_keys.key(jnp.asarray(x)).astype(jnp.int32))
    np.testing.assert_array_equal(back, x.astype(F32))


@triton.jit
def topk_of(x_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, K), TOPK(tl.load(x_ptr + tl.arange(0, N)), K))


@pytest.mark.parametrize(("n", "k"), [(8, 8), (128, 2), (64, 32)])
def test_tritons_top_k_agrees_with_numpy(n, k):
    x = np.random.default_rng(n).integers(-9, 9, n).astype(np.int32)
    out = [jax.ShapeDtypeStruct((k,), jnp.int32)]
    for sort in (TRITONS_TOPK, _topk):
        (got,) = launch(topk_of, [jnp.asarray(x)], out, (1,), 1, N=n, K=k, TOPK=sort)
        np.testing.assert_array_equal(got, np.sort(x)[::-1][:k])


def check(op, x, names, where=None, plan=None):
    arrays = cases.operands(op, x, where)
    mask = None
    if where is not None:
        arrays = [cases.spoil_masked(a, where) if a is arrays[-1] else a for a in arrays]
        mask = jnp.asarray(where)
    axes = (x.ndim - 1,)
    out = triton_kernels.softmax_rows(op, [jnp.asarray(a) for a in arrays], mask, axes, plan)
    y = out[0] if op == "logsumexp" else out
    bounds.assert_operation(op, y, arrays, names, where)
    if op == "logsumexp":
        m, d = oracle.normalizer(x if where is None else arrays[0], where)
        bounds.assert_close(out[1], m, np.zeros_like(m), names)
        bounds.assert_close(out[2], d, bounds.normalizer_unit(arrays[0], where), names)


# Short rows: one or several per program; of one element, with and without whole vectors; None is the plan of
# plan_softmax. Long rows: one step or several, with and without a short one; three or five parts, the last one short.
PLANS = [
    (1, F32, FEW, None),
    (3, BF16, FEW, Block(4, 4, 1)),
    (128, F16, ALL, Block(8, 128, 1)),
    (1000, F32, ALL, None),
    (1000, BF16, ALL, Block(4, 1024, 4)),
    (1003, F32, ALL, Long(1, 1024, 2, 128, 4)),
    (1024, BF16, FEW, Long(1, 1024, 4, 64, 4)),
    (1003, F32, FEW[::2], Long(3, 384, 1, 128, 4)),
    (2003, F16, ["normal", "everything", "neg_inf_last"], Long(5, 448, 1, 64, 4)),
    (40000, BF16, FEW[:1], None),
]


@pytest.mark.parametrize(("v", "dtype", "names", "plan"), PLANS, ids=str)
@pytest.mark.parametrize("op", oracle.OPERATIONS)
def test_rows(op, v, dtype, names, plan):
    check(op, cases.rows(names, v, dtype), names, plan=plan)


# The mask of a part starts with the part in every operation; a backward reads two arrays in addition to the mask.
MASKED = [(100, Block(4, 128, 1), *case) for case in itertools.product(cases.BROADCASTS, oracle.OPERATIONS)]
MASKED += [
    (503, Long(1, 512, 2, 64, 4), *case) for case in itertools.product(("bhqv", "b11v", "bhq1"), oracle.OPERATIONS)
]
OF_PARTS = [("1hqv", "log_softmax"), ("1hqv", "softmax_grad"), ("b1q1", "logsumexp")]
MASKED += [(503, Long(3, 192, 1, 64, 4), *case) for case in OF_PARTS]


@pytest.mark.parametrize(("v", "plan", "pattern", "op"), MASKED, ids=str)
def test_where(op, v, plan, pattern):
    """Masked elements are NaN or infinite. The first row of the mask keeps nothing, and another row keeps only -inf."""
    x, where, names = cases.broadcast_rows(pattern, v)
    check(op, x, names, where, plan)


@pytest.mark.parametrize("axes", [(0,), (0, 2)], ids=str)
def test_axes(axes):
    rng = np.random.default_rng(4)
    y, dy = rng.standard_normal((2, 20, 3, 10)).astype(F32)
    where = rng.random((1, 3, 10)) < 0.7
    arrays = jnp.asarray(y), jnp.asarray(dy)
    got = triton_kernels.softmax_rows("softmax_grad", arrays, jnp.asarray(where), axes)
    whole = (np.broadcast_to(a, y.shape) for a in (y, dy, where, got))
    y, dy, where, got = (cases.along_last(a, axes) for a in whole)
    bounds.assert_operation("softmax_grad", got, (y, dy), where=where)


def topk_rows(x, k, plan, where=None, temperature=ONE, log=False, dtype=F32):
    """Returns the kernel's winners and normalizers with flat rows, like `kernels.topk_rows`."""
    t, mask = temperature, None if where is None else jnp.asarray(where)
    if t is not None:
        t = jnp.asarray(t.reshape((*x.shape[:-1], 1) if t.size > 1 else (1,) * x.ndim))
    scaled = temperature is not ONE
    options = {"k": k, "log": log, "dtype": jnp.dtype(dtype), "plan": plan, "scaled": scaled}
    results = triton_kernels.topk(jnp.asarray(x), mask, t, **options)
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), results)


def assert_topk(x, k, names, plan=None, where=None, temperature=ONE, log=False, dtype=F32):
    got = topk_rows(x, k, plan, where, temperature, log, dtype)
    judge_topk(got, x, k, names, where, temperature, log, dtype, exact_exp=False)


# (V, dtype, k, rows, plan). One part: one slab or several, whole or not; groups of one element; fewer elements than
# groups. Several parts, merged with a missing last list. None is the plan of plan_topk.
TOPK = [
    (1, F32, 1, FEW, None),
    (100, F32, 5, ALL, Slabs(1, 512, 8, 128, 4, 2)),
    (100, BF16, 100, FEW, Slabs(1, 128, 128, 128, 1, 2)),
    (1003, F32, 5, ALL, Slabs(1, 1024, 8, 32, 4, 2)),
    (1003, BF16, 5, ALL, Slabs(1, 1024, 8, 16, 8, 2)),
    (2048, F16, 64, FEW, Slabs(1, 2048, 64, 64, 8, 2)),
    (2000, F32, 16, FEW, Slabs(1, 2048, 16, 16, 4, 2)),  # three levels
    (1003, F32, 5, FEW, Slabs(3, 384, 8, 16, 4, 2)),
    (1003, F16, 1, FEW, Slabs(3, 384, 2, 16, 8, 2)),
    (16000, BF16, 1, FEW[:3], None),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("v", "dtype", "k", "names", "plan"), TOPK, ids=str)
def test_topk(v, dtype, k, names, plan, masked):
    """Winners have their probabilities, or are as they are."""
    x = cases.rows(names, v, dtype)
    where = np.random.default_rng(0).random(x.shape) < 0.5 if masked else None
    assert_topk(x, k, names, plan, where)
    got, normalizer = topk_rows(x, k, plan, where, None, dtype=dtype)
    assert normalizer is None
    assert_top_k(got, x, k, names, where)


@pytest.mark.parametrize("parts", [5, 9])
def test_merges_of_merges(parts, monkeypatch):
    """Each merge takes two lists, so there are three or four merges, and the last merge lacks a list."""
    monkeypatch.setattr(triton_plan, "MERGED_CANDIDATES", 2 * 8)
    v, names = 128 * parts - 25, ["normal", "integers", "everything"]
    assert_topk(cases.rows(names, v), 5, names, Slabs(parts, 128, 8, 16, 4, 1), log=True)


ONE_PART, PARTS = Slabs(1, 512, 32, 32, 4, 2), Slabs(2, 256, 32, 32, 4, 2)


@pytest.mark.parametrize(
    ("plan", "log", "dtype"),
    [(ONE_PART, False, F32), (PARTS, True, F32), (ONE_PART, False, F16), (PARTS, False, BF16)],
    ids=str,
)
def test_topk_with_temperatures(plan, log, dtype):
    assert_topk(cases.rows(FEW, 503), 5, FEW, plan, None, temperatures(dtype), log, dtype)


TOPK_MASKED = [(ONE_PART, pattern, F32) for pattern in ("111v", "bhq1", "1h11")]
TOPK_MASKED += [(ONE_PART, "bhqv", BF16), (PARTS, "b11v", F32), (PARTS, "1hqv", F16), (PARTS, "b1q1", F32)]


@pytest.mark.parametrize(("plan", "pattern", "dtype"), TOPK_MASKED, ids=str)
def test_topk_where(plan, pattern, dtype):
    """The mask's first row keeps nothing, so 0, 1, 2, ... win with p = 0."""
    x, where, names = cases.broadcast_rows(pattern, 503, dtype)
    assert_topk(x, 5, names, plan, where)


@pytest.mark.parametrize(("plan", "log"), [(ONE_PART, False), (PARTS, True)], ids=["one", "parts"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_topk_of_fewer_unmasked_than_winners(plan, log, dtype):
    """A -NaN wins before masked elements. These win in the order of their indices, with p = 0 even in a NaN row."""
    x, where, names = cases.few_unmasked(503, dtype)
    assert_topk(x, 20, names, plan, where, log=log)


@pytest.mark.parametrize("plan", [ONE_PART, PARTS], ids=["one", "parts"])
def test_topk_of_ties_and_order(plan):
    """The best elements are in one group, in every group, in one slab, or at one place of every slab."""
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
