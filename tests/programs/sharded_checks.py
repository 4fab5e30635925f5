"""Checks of arrays that are sharded over 2, 4 or 8 devices; tests/dispatch/test_sharded.py runs each as a test.

The command below runs some of them on eight CPU devices; without its first line, on the machine's GPUs. It prints the
name of each check with its error or null:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
      PYTHONPATH=. python tests/programs/sharded_checks.py 'partition-topk-*'
"""

import contextlib
import fnmatch
import functools
import inspect
import itertools
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from benchmarks.support import links
from pallas_softmax._src import jax_internals
from pallas_softmax._src.dispatch import mesh_types, partitioner
from pallas_softmax._src.dispatch.finer_mesh import decode
from pallas_softmax._src.sample import mesh as sample_mesh
from tests.programs.linear_checks import CHECKS, HOW, lay, register
from tests.support import bounds, calls, cases, covering, draws, gpu, oracle
from tests.support.cases import BF16, F16, F32
from tests.support.children import report
from tests.support.trees import assert_equal, assert_near

V = 256
IMPLEMENTATION = None  # the implementation to name in calls, if every call has its kernels
ELEMENTWISE = ("softmax", "log_softmax")
TOPK = {"topk": {"k": 5}, "topk_log": {"k": 40, "log": True}}  # 40 is more than the V / 8 elements of a part
OPS = (*oracle.FORWARD, *TOPK)
SOME = ("softmax", "logsumexp", "topk")  # without log_softmax, which is much like softmax


def each(most=None, **parameters):
    """Registers a check for combinations of the parameters that cover every pair of values, or for the first `most`."""

    def decorate(check):
        assert [*parameters] == [*inspect.signature(check).parameters][: len(parameters)], check
        return register(*covering.pairs(*parameters.values())[:most])(check)

    return decorate


# --- Devices ------------------------------------------------------------------------------------------


@functools.cache
def mesh(how="auto", line=False):
    """Returns a mesh of 8, 4 or 2 devices: 2 x 4, 2 x 2 or 1 x 2, or a line."""
    n = next(n for n in (8, 4, 2) if n <= jax.device_count())
    shape, names = ((n,), ("v",)) if line else ((1, 2) if n == 2 else (2, n // 2), ("b", "v"))
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[:n])


def names_of(entry):
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


class Split(NamedTuple):
    """The sharding of an array on a mesh, and the array axes that make up a row."""

    mesh: Any
    spec: tuple  # an entry for each array axis
    axes: tuple[int, ...] = (1,)

    @property
    def row(self):
        """The mesh axes that shard a row."""
        return tuple(name for a in self.axes for name in names_of(self.spec[a]))

    @property
    def axis_name(self):
        return None if not self.row else self.row[0] if len(self.row) == 1 else self.row

    def size(self, names):
        return math.prod(self.mesh.shape[name] for name in names)

    def result(self, op):
        """Returns the PartitionSpec of the result."""
        if op in ELEMENTWISE:
            return P(*self.spec)
        left = [None if a in self.axes else entry for a, entry in enumerate(self.spec)]
        return P(*(e for a, e in enumerate(left) if op in TOPK or a not in self.axes))

    def place(self, x):
        at = NamedSharding(self.mesh, P(*self.spec))
        return jax.make_array_from_callback(x.shape, at, lambda index: x[index])

    def local_rows(self, shape):
        batch = [a for a in range(len(shape)) if a not in self.axes]
        held = [name for a in batch for name in names_of(self.spec[a])]
        return math.prod(shape[a] for a in batch) // self.size(held)


LAYOUTS = {
    "batch": ("b v", None),
    "line": (None, "v"),  # on a mesh of one axis, with all devices
    "both": ("b", "v"),
    "spread": (None, "v b"),  # not in device order
}


def split(layout, how):
    spec = (e if e is None or " " not in e else tuple(e.split()) for e in LAYOUTS[layout])
    return Split(mesh(how, layout == "line"), tuple(spec))


def split_for_noise(how):
    """Returns the layout "both"; for shard_map, which makes the noise for its local batch, whole batches."""
    at = split("both", how)
    return at._replace(spec=(None, "v")) if how == "shard_map" else at


def mapped(at: Split, how, f, in_specs, out_specs, **options):
    """Returns f; for how="shard_map", f is mapped and gets the axis_name."""
    if how != "shard_map":
        return f
    f = functools.partial(f, axis_name=at.axis_name)
    return jax.shard_map(f, mesh=at.mesh, in_specs=in_specs, out_specs=out_specs, **options)


def execute(f, *args):
    """Returns the results under jit, and the collectives of the compiled program."""
    program = jax.jit(f).lower(*args).compile()
    return program(*args), links.collectives(program.as_text() or "")


def assert_sent(sent, at: Split, shape, reduces, gathered=0):
    """Asserts that only the devices of a row communicate, and how much.

    They all-reduce at most `reduces` numbers per row, and all-gather at most `gathered` numbers per row. If a row is
    sharded over two mesh axes, JAX may gather over one axis after the other.
    """
    rows, n = at.local_rows(shape), [at.mesh.shape[name] for name in at.row]
    groups = {math.prod(some) for i in range(len(n)) for some in itertools.combinations(n, i + 1)}
    sent = [c for c in sent if c.group > 1]
    numbers = {"all-reduce": reduces, "all-gather": gathered}
    for kind, most in numbers.items():
        assert sum(c.bytes for c in sent if c.kind == kind) <= 4 * rows * most, sent
    assert sum(c.kind == "all-reduce" for c in sent) <= reduces, sent
    assert {c.kind for c in sent} <= {*numbers}, sent
    assert {c.group for c in sent} <= groups, sent


# --- Rows, functions and expected results -------------------------------------------------------------

# name: (pattern, reason). A pattern sets eighths of a row: (which, value). The other eighths are integers, so that
# there are ties across all parts.
PARTS = {
    "neg_inf_parts": ([(slice(2, 4), -np.inf)], "parts without a maximum in the middle"),
    "neg_inf_but_last": ([(slice(0, 7), -np.inf)], "no part before the last has a maximum"),
    "neg_inf_but_first": ([(slice(1, 8), -np.inf)], "no part after the first has a maximum"),
    "inf_after_neg_inf": ([(slice(0, 7), -np.inf), (7, np.inf)], "NaN from one part only"),
    "nan_part": ([(5, np.nan)], "the maximum over the parts must keep NaN"),
    "neg_nan_but_last": ([(slice(0, 7), cases.NEG_NAN)], "candidates of the earlier parts come last"),
    "nan_after_neg_nan": ([(slice(0, 4), cases.NEG_NAN), (slice(4, 8), np.nan)], "later parts come first"),
    "zeros": ([(slice(0, 5), -0.0), (slice(5, 8), 0.0)], "+0 in a later part precedes -0 in an earlier one"),
    "one_part_best": ([(6, 3)], "one part has all winners"),
}
NAMES = [*cases.FINITE, *cases.SPECIAL, *PARTS]


def logits(dtype: Any = F32):
    x = cases.rows(["integers"] * len(PARTS), V, dtype, seed=4).reshape(len(PARTS), 8, V // 8)
    for row, (pattern, _) in zip(x, PARTS.values()):
        for at, value in pattern:
            row[at] = value
    return np.concatenate([cases.rows([*cases.FINITE, *cases.SPECIAL], V, dtype), x.reshape(len(PARTS), V)])


def masks():
    """Returns masks by name. The full mask leaves some parts of rows with nothing or with -inf only."""
    full = np.random.default_rng(5).random((len(NAMES), V)) < 0.6
    full[0], full[1, : V // 2], full[2, V // 8 :] = False, False, False
    full[NAMES.index("neg_inf_but_last"), 7 * V // 8 :] = False
    full[NAMES.index("nan_part"), 5 * V // 8 : 6 * V // 8] = False
    return {"full": full, "per_column": full[3:4], "per_row": full[:, 5:6]}


def ours(op, x, axis: Any = -1, *, implementation: Any = "", **kwargs) -> tuple:
    """Returns the package's result, and for top-k the indices."""
    kwargs["implementation"] = IMPLEMENTATION if implementation == "" else implementation
    if op not in TOPK:
        return getattr(ps, op)(x, axis, **kwargs), None
    return tuple(ps.fused_topk(x, axis=axis, **TOPK[op], **kwargs))


def assert_value(op, got, x, names):
    """Asserts that results of rows along the last axis are right."""
    y, indices = got
    if op in TOPK:
        assert indices.dtype == np.int32
        return gpu.assert_topk(got, x, names=names, **TOPK[op])
    bounds.assert_operation(op, np.asarray(y)[:, None] if op == "logsumexp" else y, (x,), names)


def on(at: Split, how, op, f):
    return mapped(at, how, f, P(*at.spec), at.result(op))


def run(op, how, at: Split, x, f: Any = ours):
    """Returns (y, indices), the cotangent and dx of `f(op, x)`; asserts shardings and communication."""
    f = on(at, how, op, functools.partial(f, op))

    def forward(x) -> Any:
        return jax.vjp(f, x, has_aux=True)

    (y, pullback, indices), sent = execute(forward, at.place(x))
    k, n = TOPK[op]["k"] if op in TOPK else 0, at.size(at.row)
    # the winners and the normalizer of each device
    # where plain JAX runs everywhere, XLA divides it, and all-reduces both numbers
    assert_sent(sent, at, x.shape, 2, n * (2 * min(k, x.shape[at.axes[0]] // n) + 2))
    g = cases.cotangent(y.shape, y.dtype)
    (dx,), sent = execute(lambda pullback, g: pullback(g), pullback, jax.device_put(g, y.sharding))
    assert_sent(sent, at, x.shape, 0 if op == "logsumexp" else 1)
    for a, spec in ((y, at.result(op)), (indices, at.result(op)), (dx, P(*at.spec))):
        want = NamedSharding(at.mesh, spec)
        assert a is None or a.sharding.is_equivalent_to(want, a.ndim), (a.sharding, want)
    return (y, indices), g, dx


def judge(op, results, x, names):
    """Asserts that the values and the gradient of `run` are right."""
    (y, indices), g, dx = results
    if op not in TOPK:
        y, g = (np.asarray(a)[:, None] if op == "logsumexp" else a for a in (y, g))
        return gpu.judge(op, (y, dx), x, g, names, None)
    assert_value(op, (y, indices), x, names)
    arguments = {"x": x, "g": g, "log": False} | TOPK[op]
    with np.errstate(all="ignore"):
        want, unit = (of(**arguments)[0] for of in (oracle.fused_topk_vjp, bounds.fused_topk_vjp_unit))
    bounds.assert_close(dx, want, unit, names, 1 + np.sum(np.abs(g.astype(F32)), -1, keepdims=True))


@each(op=OPS[:4], layout=LAYOUTS, how=HOW)
@each(op=OPS[4:], layout=["both", "spread"], how=HOW)
@each(op=OPS[:4], layout=["both"], how=HOW, dtype=[BF16], most=4)
@each(op=["softmax", "topk"], layout=["both"], how=HOW, dtype=[F16], most=3)
def partition(op, layout, how, dtype=F32):
    """Values and gradient, their shardings, and the communication."""
    x = logits(dtype)
    judge(op, run(op, how, split(layout, how), x), x, NAMES)


# (shape, spec, axis)
AXES = {
    "middle": ((8, V, 3), ("b", "v", None), 1),
    "rank_1": ((V,), (("b", "v"),), -1),
    "two_first_sharded": ((8, 4, 32), ("b", "v", None), (-2, -1)),
    "two_apart": ((4, 3, 32), ("b", None, "v"), (0, 2)),
    "all": ((4, 32), ("b", "v"), None),
    "first": ((V, 8), ("v", "b"), 0),
    "two_last_sharded": ((8, 4, 32), ("b", None, "v"), (-2, -1)),
    "two_both_sharded": ((3, 4, 32), (None, "b", "v"), (-2, -1)),
}


@each(case=AXES, how=HOW, most=12)
def axes(case, how):
    """Arrays of rank 1 to 3, and every axis."""
    shape, spec, axis = AXES[case]
    reduced = tuple(range(len(shape))) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    at = Split(mesh(how), spec, tuple(a % len(shape) for a in reduced))
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(F32)
    n = x.size // math.prod(shape[a] for a in at.axes)

    def rows(a):  # puts rows along the last axis, unless there is one number per row
        kept = a.ndim - len(shape) + len(reduced)
        return np.moveaxis(a, reduced[:kept], range(a.ndim - kept, a.ndim)).reshape(n, *[-1] * (kept > 0))

    for op in ("softmax", "topk") if isinstance(axis, int) else ("log_softmax", "logsumexp"):
        # top-k has kernels for the last axis only
        f = functools.partial(ours, axis=axis, implementation=None)
        results = jax.tree.map(lambda a: rows(np.asarray(a)), run(op, how, at, x, f))
        judge(op, results, rows(x), range(n))


@each(how=HOW)
def too_many_winners(how):
    at = split("both", how)
    f = on(at, how, "topk", lambda x, **axis_name: tuple(ps.fused_topk(x, V + 1, **axis_name)))
    with pytest.raises(ValueError, match=f"k must be from 0 to the row's length {V}, got {V + 1}"):
        jax.eval_shape(f, at.place(logits()))


FILTERS = {
    "none": {},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"top_p": np.float32(0.9)},
    # some rows keep everything: they also draw from their shards
    "mixed": {"temperature": np.linspace(0, 1.4, 8, dtype=F32), "top_k": np.arange(-1, 7)},
    "many": {"temperature": 5, "top_p": np.float32(0.99)},  # the devices exchange their shards
}


@contextlib.contextmanager
def by_lists():
    """Lets small shards of `sample` exchange their best entries, like large shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_mesh, "_EXCHANGED_BYTES", 0)
        jax.clear_caches()
        partitioner._partition.cache_clear()
        yield
    jax.clear_caches()
    partitioner._partition.cache_clear()


@each(filters=FILTERS, how=HOW, impl=("threefry2x32", "rbg"), exchanged=(False, True), masked=(False, True), most=12)
def tokens(filters, how, impl, exchanged, masked):
    """With one key, tokens and filtered logits equal the results of one device. Few collectives always run.

    Half of the elements may be masked. The masked ones are larger than the others.
    """
    options = FILTERS[filters]
    x, at = cases.rows(["normal", "integers"] * 4, 4096), split_for_noise(how)
    key, mask = jax.random.key(6, impl=impl), np.random.default_rng(0).random(x.shape) < 0.5
    x = np.where(mask, x, x + F32.type(9)) if masked else x

    def both(x, mask, axis_name=None):
        on = {"where": mask if masked else None, "axis_name": axis_name, "implementation": IMPLEMENTATION}
        return ps.filter_logits(x, **options, **on), tuple(ps.sample(key, x, **options, **on))

    want = both(x, mask)
    f = mapped(at, how, both, (P(None, "v"),) * 2, (P(None, "v"), P()))
    placed = at.place(x), at.place(mask)
    with contextlib.nullcontext() if exchanged else by_lists():
        program = jax.jit(f).lower(*placed).compile()
    filtered, got = program(*placed)
    np.testing.assert_array_equal(filtered, want[0])
    np.testing.assert_array_equal(got[0], want[1][0])
    np.testing.assert_allclose(np.stack(got[1:]), np.stack(want[1][1:]), rtol=1e-5, atol=1e-5)
    text = program.as_text() or ""
    entry = text[text.index("\nENTRY ") :]  # without the branches of conditionals
    every, always = ([c for c in links.collectives(t) if c.group > 1] for t in (text, entry))
    # filter_logits and sample each exchange whole rows, at once or in a branch; XLA may merge the cutoffs of both. A
    # mask is exchanged like the logits.
    kinds, exchanged_arrays = [c.kind for c in every], 1 + masked
    assert kinds.count("all-to-all") in ((exchanged_arrays, 2 * exchanged_arrays) if options else (0,)), every
    # rbg takes the largest sum of all devices, its first index, and the statistics of the token
    lists, kinds_of_rbg = (2, []) if impl == "threefry2x32" else (5, ["all-reduce"])
    assert {*kinds} <= {"all-to-all", "all-gather", *kinds_of_rbg}, every
    if exchanged and options:
        # On a GPU, XLA moves an all-reduce into a computation of its own.
        in_entry, anywhere = ([c for c in found if c.kind != "all-reduce"] for found in (always, every))
        assert in_entry == anywhere, every
        assert len(every) <= 2 * (lists + masked), every
        return
    assert len(always) <= lists, always
    numbers = 2 * 256 + 4 if options else 5  # of a row on each device: the best entries, with their indices
    most = lists * 4 * at.local_rows(x.shape) * at.size(at.row) * numbers
    assert sum(c.bytes for c in always) <= most, always


@each(op=TOPK)
def asked_once(op):
    """XLA gets the program of a device from a cache if a program has equal calls."""
    at, x = split("both", "auto"), logits().repeat(128, 1)
    misses = [partitioner._partition.cache_info().misses]
    for times in (1, 4):
        f = lambda xs: [ours(op, x + 1)[0] for x in xs]  # noqa: E731
        jax.jit(f).lower([at.place(x)] * times).compile()
        misses.append(partitioner._partition.cache_info().misses)
    assert misses[0] < misses[1] == misses[2], misses


VERIFIED = {
    "V": ("b", None, "v"),
    "positions": ("b", "v", None),
    "all but the batch": (None, "b", "v"),
    "batch": ("b",),
}


@each(layout=VERIFIED, drawn=[True, False], how=HOW[:2])
def verified(layout, drawn, how):
    """Speculative decoding has the same tokens as on one device, and no row of V is gathered.

    Explicit mesh axes may divide drafts, keys and probabilities otherwise than logits.
    """
    at = split("both", how)._replace(spec=VERIFIED[layout])
    x = cases.rows(["normal", "integers"] * 8, 4096).reshape(4, 4, 4096)
    q = np.asarray(jax.nn.log_softmax(x[:, :-1] * 0.7)) if drawn else None
    drafts = jax.random.categorical(jax.random.key(1), x[:, :-1] * 0.7)
    keys = jax.random.split(jax.random.key(2), len(x))
    per_row = lay((keys, drafts), at.mesh, [P("v" if how == "explicit" else "b")] * 2)
    for options in ({}, {"top_p": np.float32(0.8)}):
        f = functools.partial(ps.verify, **options)
        arrays = [at.place(x), *(lay((q,), at.mesh, (P("b", None, "v"),)) if drawn else [])]
        got, sent = execute(f, *per_row, *arrays)
        assert_equal(got, f(keys, drafts, x, q))
        row = 4 * 4096 * (len(x) // at.mesh.shape["b"])  # bytes of one position of each sequence of a device
        gathered = sum(c.bytes for c in sent if c.group > 1 and c.kind != "all-to-all")
        assert gathered < 3.5 * row, sent  # of 4 positions


@each(exchanged=(False, True), filters=("none", "top_p"), how=HOW)
def filtered_rows_without_a_draw(exchanged, filters, how):
    """A failed row is NaN on all devices, even if the NaN of one device comes after the -inf of all others."""
    x, at, t = draws.rows_without_a_draw(4096, F32), split_for_noise(how), np.array([0, 1, 1] * 2, F32)
    f = functools.partial(ps.filter_logits, temperature=t, **FILTERS[filters])
    f = mapped(at, how, f, P(None, "v"), P(None, "v"))
    with contextlib.nullcontext() if exchanged else by_lists():
        draws.assert_failed_and_empty(jax.jit(f)(at.place(x)))


@each(name=["top_k", "fused_topk", "token_stats, rank", "route", "sample", "filter_logits", "verify"])
def results_without_derivatives(name):
    """Integers may be computed inside a function that is differentiated."""
    arrays, of = calls.CALLS[name][2], calls.logits_of(name)

    def integers(x):
        depend = {other: a + 0 * x[0, 0, 0] for other, a in arrays.items() if a.dtype == F32}
        found = jax.tree.leaves(calls.call(name, **depend | {of: x}))
        return sum(
            jnp.sum(a > -np.inf if name == "filter_logits" else a)
            for a in found
            if a.dtype == np.int32 or name == "filter_logits"
        )

    x, loss = jnp.maximum(arrays[of], -9), lambda x: x.sum() * integers(x)
    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda x: jax.jvp(loss, (x,), (x,))[1] / x.sum()):
        np.testing.assert_allclose(derivative(x), np.broadcast_to(integers(x), jnp.shape(derivative(x))), rtol=1e-5)


# --- One table of all functions -------------------------------------------------------------------------

BY_HAND = ("shard_map", "unchecked")  # without the check of varying mesh axes


def arrays_of(name, dtype, **changed):
    """Returns the arrays of a call for the 40 rows, with a mask, parameters, labels and a key of each row."""
    n, rng = len(NAMES), np.random.default_rng(1)
    x = logits(dtype) if np.dtype(dtype).kind not in "iu" else largest_integers(n, dtype)
    where = changed.get("where", masks()["full"])
    found = {
        **dict.fromkeys(calls.LOGITS, x if where is None or x.dtype.kind in "iu" else cases.spoil_masked(x, where)),
        "where": where,
        "temperature": np.geomspace(0.5, 2, n, dtype=F32) * (np.arange(n) % 3 > 0),
        "lengths": rng.integers(-9, V + 9, n, np.int32),
        "labels": rng.integers(-1, V, n, np.int32),
        "key": jax.random.split(jax.random.key(5, impl=changed.get("impl")), n),
        "top_k": np.resize([100, 0, 5], n),
        "top_p": np.resize(np.array([0.3, 0.9, 1, 0], F32), n),
        "min_p": np.resize(np.array([0.01, 0], F32), n),
        "bias": (0.1 * rng.standard_normal(V)).astype(F32),
    }
    return {of: a for of in calls.CALLS[name][2] if (a := (found | changed)[of]) is not None}


def largest_integers(rows, dtype):
    """Returns integers near the maximum of the dtype: differences are exact, so that neighbours stay apart."""
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.max - 9, info.max, (rows, V), dtype, endpoint=True)
    x[0], x[1, :-1] = info.min, info.min
    return x


PLAIN = {"where": None, "lengths": None}
# name: (a call of tests/support/calls.py, the dtype of the 40 rows, changes)
ROWS = {
    **{name: (name, F32, {}) for name in calls.CALLS if name not in ("logsumexp", "verify") and name[:6] != "linear"},
    **{f"fused_topk, k={k}": ("fused_topk", F32, {"k": k}) for k in (0, 33, V - 1, V)},
    **{f"top_k, {dtype}": ("top_k", np.dtype(dtype), {"k": 40}) for dtype in (BF16, "int8")},
    **{f"top_k, sorted={s}": ("top_k", BF16, {"k": 40, "sorted": s} | PLAIN) for s in (True, False)},
    **{f"{name}, bfloat16": (name, BF16, {"where": None}) for name in ("sample", "token_stats", "fused_topk, log")},
    **{
        f"{name}, {how}": (name, how if how[-1].isdigit() else F32, {"where": masks().get(how)})
        for name in ("softmax", "logsumexp, rows", "fused_topk")
        for how in ("int8", "uint32", "per_column", "per_row")
    },
}
# V / 8 elements of a part are fewer than 33 and 40 winners.
LOW = np.finfo(F32).min / np.linspace(1, 4, len(NAMES) * V, dtype=F32).reshape(len(NAMES), V)
OVERFLOWS = {  # x / temperature is -inf in a whole shard, or in the whole row
    "padded": np.where(np.arange(V) < V // 8, F32.type(0), LOW),
    "rbg": LOW,
    "integers": np.full((len(NAMES), V), np.iinfo("int32").min, "int32"),
}
for name, x in OVERFLOWS.items():
    t = np.resize(np.array([0.7, 1e-3, 0], F32), len(NAMES))
    unfiltered = {"logits": x, "temperature": t, **dict.fromkeys(("where", "top_k", "top_p", "min_p"))}
    ROWS[f"sample, {name}"] = "sample", x.dtype, unfiltered | ({"impl": "rbg"} if name == "rbg" else {})


def spec_of(of, a, n, v, spec):
    """Returns how an array of a call lies: its first axis if it is of n rows, and its last one if it is of a row."""
    dims = np.shape(a)
    if v is None and of in ("w", "bias", "teacher_w", "teacher_bias"):  # columns of a projection
        return P(*[None] * (len(dims) - 1), spec[1])
    rows = spec[0] if dims[:1] == (n,) and not (of == "key" and a.dtype == np.uint32) else None
    row = [spec[1] if dims[-1] == v else None] if len(dims) > 1 else []
    return P(*[rows][: len(dims)], *[None] * (len(dims) - 2), *row)


def agrees(name, layout, how):
    """Results and gradients equal the ones of a single device, and lie like their rows."""
    call, dtype, changed = ROWS.get(name, (name, F32, {})) if layout else (name, F32, {})
    function, _, given, held = calls.CALLS[call]
    at = split(layout or "both", how)
    arrays = arrays_of(call, dtype, **changed) if layout else given
    # without a layout, a call of a small batch: a mean over all rows, and one key
    spec = at.spec if layout or how not in BY_HAND else (None, "v")
    linear, options = (call.startswith("linear"), {of: a for of, a in changed.items() if of not in (*given, "impl")})
    n, v = (len(NAMES), V) if layout else (calls.BATCH[0], calls.V)
    specs = {of: spec_of(of, a, n, None if linear else v, spec) for of, a in arrays.items()}
    of_floats = np.dtype(dtype).kind not in "iu"
    has_kernels = layout and call != "route" or call == "fused_topk"
    if has_kernels and of_floats and options.get("k") != 0:
        options["implementation"] = IMPLEMENTATION

    def one(name, **given):
        results = function(**calls.CALLS[name][1] | options | given)
        # in any order, which a device chooses
        return results if options.get("sorted", True) else jax.tree.map(lambda a: jnp.sort(a, -1), results)

    sharded, wide = one, call in ("softmax", "log_softmax", "filter_logits")
    if how in BY_HAND:
        first = P(spec[0]) if spec[0] else P()
        of_result = spec_of("", arrays[calls.logits_of(call)], n, v, spec) if wide else first
        out = jax.tree.map(lambda _: of_result, jax.eval_shape(functools.partial(one, call), **arrays))
        on = {"axis_name": at.axis_name} if at.axis_name else {}
        f = jax.shard_map(
            lambda given: one(call, **given, **on),
            **{"mesh": at.mesh, "in_specs": (specs,), "out_specs": out, "check_vma": how == "shard_map"},
        )
        sharded = lambda name, **given: f(given)  # noqa: E731

    def program(given, call_it=one):
        gradient = calls.pullback(call, given, call_it) if held and of_floats else {}
        return call_it(call, **given), gradient

    laid = dict(zip(arrays, lay(arrays.values(), at.mesh, specs.values())))
    found, sent = execute(functools.partial(program, call_it=sharded), laid)
    assert_near(found, jax.jit(program)(arrays), *((0, 0) if call == "top_k" else (1e-4, 1e-5)))
    for of, a in found[1].items() if how == "explicit" else ():
        assert a.sharding.is_equivalent_to(NamedSharding(at.mesh, specs[of]), a.ndim), (of, a.sharding)
    if call.startswith("route"):  # divided experts are gathered
        assert {c.kind for c in sent if c.group > 1} <= {"all-gather", "all-reduce"}, sent
    if layout and call in ("top_k", "token_stats"):
        _, sent = execute(lambda given: sharded(call, **given), laid)
        parts = at.size(at.row)
        of_part = 2 * min(options.get("k", 3), V // parts) if call == "top_k" else 9
        assert_sent(sent, at, (n, V), 0, parts * of_part if parts > 1 else 0)
        steps = sum(at.mesh.shape[name] > 1 for name in at.row)  # one mesh axis after the other
        assert call == "top_k" or sum(c.group > 1 for c in sent) == steps, sent


PLACES = [*itertools.product(("line", "both", "spread"), HOW), ("batch", "shard_map")]
PLACES += [(layout, "unchecked") for layout in ("both", "spread")]
AGREE = [(name, *place) for name, place in covering.in_turn(ROWS, PLACES)]
AGREE += [(name, "", how) for name, how in covering.in_turn(calls.CALLS, ("auto", *BY_HAND, "explicit"), 2)]
for name, layout, how in AGREE:
    no_axis_name = name in ("logsumexp", "verify") or name.startswith("route") and layout != "batch"
    if not (no_axis_name and how in BY_HAND):
        CHECKS["-".join(["agrees", name, *[layout] * (layout != ""), how])] = functools.partial(
            agrees, name, layout, how
        )


# --- Transformations ----------------------------------------------------------------------------------

THREE = cases.rows(["normal", "integers"] * 16, V).reshape(4, 8, V)


def pulled(f):
    """Returns the gradient for a cotangent that is a function of the value, element by element."""

    def gradient(x):
        y, pullback = jax.vjp(f, x)
        return pullback(jnp.cos(3 * y))[0]

    return gradient


def along(f):
    """Returns the forward-mode derivative in a direction that is a function of the argument."""
    return lambda x: jax.jvp(f, (x,), (jnp.cos(3 * x),))[1]


def scanned(f):
    return lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x)[1]


# Transformations of a function of (8, V), for an array (4, 8, V).
TRANSFORMS = {
    "vmap": jax.vmap,
    "vmap_of_grad": lambda f: jax.vmap(pulled(f)),
    "grad_of_scan_of_checkpoint": lambda f: pulled(scanned(jax.checkpoint(f))),
    "second_grad": lambda f: pulled(pulled(f)),
    "jvp": along,
    "vmap_of_jvp": lambda f: jax.vmap(along(f)),
    "jvp_of_grad": lambda f: along(pulled(f)),
}


@each(transform=TRANSFORMS, op=SOME, how=HOW, most=12)
def transformed(transform, op, how):
    """The results agree with one device. Under vmap, the mapped axis may be sharded."""

    def f(x, **kwargs):
        return TRANSFORMS[transform](lambda x: ours(op, x, **kwargs)[0])(x)

    want = jax.jit(functools.partial(f, implementation="xla"))(THREE)
    for batch in [(None, "b"), ("b", None)][: 1 + ("vmap" in transform)]:
        at = Split(mesh(how), (*batch, "v"), (2,))
        got = jax.jit(on(at, how, "softmax" if "grad" in transform else op, f))(at.place(THREE))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=3e-5, err_msg=str(batch))


def plain(op, x, axis_name):
    """Returns the result in plain JAX, as a user writes it for a part of a row."""
    winners = x
    if op in TOPK:
        found = lax.top_k(x, TOPK[op]["k"])[0]
        winners = lax.top_k(lax.all_gather(found, axis_name, axis=-1, tiled=True), TOPK[op]["k"])[0]
    m = lax.pmax(lax.stop_gradient(jnp.max(x, -1, keepdims=True)), axis_name)
    d = lax.psum(jnp.sum(jnp.exp(x - m), -1, keepdims=True), axis_name)
    if op == "logsumexp":
        return (m + jnp.log(d))[..., 0]
    return winners - m - jnp.log(d) if op == "log_softmax" else jnp.exp(winners - m) / d


@each(op=OPS[:4], inside=[False, True])
def shard_map_without_check_vma(op, inside):
    """Both derivatives, in reverse and forward mode, agree with the same function in plain JAX."""
    at, x = split("both", "shard_map"), 3 * cases.rows(["normal"] * 8, V)
    for derivative, out in ((pulled, P(*at.spec)), (along, at.result(op))):
        found = []
        for f in (lambda x: ours(op, x, axis_name="v")[0], lambda x: plain(op, x, "v")):
            f = derivative(f) if inside else f
            out_specs = out if inside else at.result(op)
            f = jax.shard_map(f, mesh=at.mesh, in_specs=P(*at.spec), out_specs=out_specs, check_vma=False)
            found.append(jax.jit(f if inside else derivative(f))(at.place(x)))
        assert np.abs(found[1]).max() > 1e-2
        np.testing.assert_allclose(*found, rtol=1e-4, atol=3e-5)


@each(op=OPS[:4])
def shard_map_over_one_axis_of_two(op):
    """shard_map maps the row's axis only; the compiler shards the batch."""
    at, x = split("both", "shard_map"), logits()
    out = P(None, *at.result(op)[1:])
    f = functools.partial(ours, op, axis_name="v")
    f = jax.shard_map(f, mesh=at.mesh, in_specs=P(None, "v"), out_specs=out, axis_names={"v"})
    assert_value(op, jax.jit(f)(at.place(x)), x, NAMES)


@each(how=("auto", "explicit"))
def context_mesh(how):
    """Arrays without a sharding, in the context of a mesh; and without jit."""
    x = logits()
    with jax.set_mesh(mesh(how)):
        assert_value("softmax", jax.jit(functools.partial(ours, "softmax"))(x), x, NAMES)
        if how == "auto":
            f = jax.jit(lambda x: ours("topk", lax.with_sharding_constraint(x, P("b", "v"))))
            assert_value("topk", f(x), x, NAMES)
    with jax.disable_jit():
        assert_value("softmax", ours("softmax", jnp.asarray(x), implementation=None), x, NAMES)


@each(how=("auto", "explicit"))
def sharded_by_the_mask(how):
    """An unsharded array takes the sharding of the mask, and so does its gradient."""
    at = split("both", how)
    x, where = cases.rows(["normal"] * 8, V), np.random.default_rng(0).random((8, V)) < 0.7
    x = jax.device_put(x, NamedSharding(at.mesh, P())) if how == "explicit" else x
    f = lambda x, where: jax.value_and_grad(lambda x: jnp.sum(ps.softmax(x, where=where) ** 2))(x)  # noqa: E731
    (got, sent), want = execute(f, x, at.place(where)), f(np.asarray(x), where)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)
    f = lambda x, where: ps.softmax(x, where=where)  # noqa: E731
    _, sent = execute(f, x, at.place(where))
    assert {each.kind for each in sent} == {"all-gather"}, sent


@each(op=["topk"])
def named_kernel_on_the_cpu(op):
    at = split("both", "auto")
    with pytest.raises(NotImplementedError, match="it needs an NVIDIA GPU"):
        jax.jit(functools.partial(ours, op, implementation="mosaic_gpu")).lower(at.place(logits()))


@each(how=["shard_map"])
def temperature_of_each_device(how):
    at, x = split("both", how), logits()
    f = jax.shard_map(
        lambda x, t: ps.fused_topk(x, 5, temperature=t[0], axis_name="v"),
        mesh=at.mesh, in_specs=(P(*at.spec), P("v")), out_specs=P("b"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="temperature must be the same on all devices"):
        jax.jit(f)(at.place(x), np.ones(at.mesh.shape["v"], F32))


@each(how=["shard_map"])
def mask_of_rows_and_chunks_of_tokens(how):
    """All devices have the same mask, one number per row; and a projection takes its tokens in several chunks."""
    at, x, rows = split("both", how), logits(), np.arange(len(logits()))[:, None] != 3
    run = lambda x, where, **options: ps.sample(jax.random.key(0), x, where=where, **options)  # noqa: E731
    f = functools.partial(run, axis_name="v")
    got = jax.jit(jax.shard_map(f, mesh=at.mesh, in_specs=(P(None, "v"), P()), out_specs=P()))(x, rows)
    assert_near(got, run(x, rows))
    tokens, w = (np.random.default_rng(0).standard_normal(shape).astype(F32) for shape in ((32, 8), (8, 64)))
    f = lambda tokens, w: ps.linear_logsumexp(tokens, w, workspace_bytes=1, axis_name="v")  # noqa: E731
    f = jax.shard_map(f, mesh=at.mesh, in_specs=(P(), P(None, "v")), out_specs=P(), axis_names={"v"})
    assert_near(jax.jit(f)(tokens, w), ps.linear_logsumexp(tokens, w))


@each(how=["explicit"])
def numbers_of_tokens_sharded_unlike_x(how):
    rng, named = np.random.default_rng(0), mesh(how)
    x, w, number = (rng.standard_normal(shape).astype(F32) for shape in ((8, 8, 16), (16, 64), (8, 8)))
    labels, keys = rng.integers(0, 64, (8, 8)), jax.random.split(jax.random.key(0), (8, 8))
    put = lambda a, *spec: jax.device_put(a, NamedSharding(named, P(*spec)))  # noqa: E731

    def loss(x, labels, where, weights):
        return ps.linear_cross_entropy(x, w, labels, where=where, token_weights=weights, temperature=1 + weights)

    arrays = labels, number > -1, np.abs(number)
    with jax.set_mesh(named):
        got = jax.jit(jax.value_and_grad(loss))(put(x, "b"), *(put(a, s) for a, s in zip(arrays, ("v", "b", None))))
        drawn = jax.jit(ps.linear_sample)(put(keys, "b"), put(x, "b"), w)
    assert_near(got, jax.value_and_grad(loss)(x, *arrays))
    assert_near(drawn, ps.linear_sample(keys, x, w))


# --- Reshapes after which XLA splits a mesh axis over two dimensions ------------------------------------

HEAD = np.random.default_rng(0).standard_normal((16, 16)).astype(F32)


def labels_of(x):
    return jnp.where(x[..., 0] > 0, 3, 9)


# name: a function of (8, heads, V), or of (heads, tokens, D) for a projection
RESHAPED = {
    "softmax": lambda x: ps.softmax(x, where=jnp.tri(*x.shape[1:], dtype=bool)),  # a mask that all rows share
    "topk": lambda x: ps.fused_topk(x, 2),
    "logsumexp": lambda x: ps.logsumexp(x, -1),
    "log_softmax": ps.log_softmax,
    "sample": lambda x: ps.sample(jax.random.key(0), x, top_p=0.9),
    "linear_cross_entropy": lambda x: ps.linear_cross_entropy(x, HEAD, labels_of(x), reduction=None),
    "linear_logsumexp": lambda x: ps.linear_logsumexp(x, HEAD),
    "linear_log_probs": lambda x: ps.linear_log_probs(x, HEAD, labels_of(x)),
}
HEADS = (4, 12, 2, 6, 8, 16)
MESHES = {"line": lambda n: (n,), "rows": lambda n: (2, n // 2), "columns": lambda n: (n // 2, 2)}


@functools.cache
def mesh_of(shape):
    """Returns a mesh of 8, 4 or 2 devices with the Auto axes "a" and "b"."""
    devices = mesh().devices.ravel()
    sizes = MESHES[shape](devices.size)
    return jax.sharding.Mesh(devices.reshape(sizes), ("a", "b")[: len(sizes)])


@functools.cache
def by_heads(op, heads):
    """Returns a function of an array that has a dimension for all heads, the array, and what one device computes.

    The function returns its results and the gradient of the first one. They have no dimension of heads: JAX gathers a
    result if no PartitionSpec describes its sharding.
    """
    # `sample` gathers 256 entries of each shard, which is little of a long row only
    batch, row = ((), (128, 16)) if op.startswith("linear") else ((8,), (2**14 if op == "sample" else 128,))
    shape = (*batch, heads * row[0], *row[1:])

    def f(x):
        results = RESHAPED[op](x.reshape(*batch, heads, *row))
        return jax.tree.map(lambda a: a.reshape(*batch, -1), results)

    def both(x):
        return f(x), pulled(lambda x: calls.with_gradient(f(x))[0])(x)

    x = np.random.default_rng(heads).standard_normal(shape).astype(F32)
    return both, x, jax.jit(both)(x)


@each(op=("softmax", "topk", "logsumexp", "log_softmax"), shape=MESHES, heads=HEADS, most=6)
@each(op=("sample",), shape=MESHES, heads=HEADS, most=3)
@each(op=[op for op in RESHAPED if op.startswith("linear")], shape=MESHES, heads=HEADS, most=6)
def reshaped(op, shape, heads):
    """Results and gradients agree with one device, and no collective moves a whole shard."""
    f, x, want = by_heads(op, heads)
    at = mesh_of(shape)
    spec = P(at.axis_names) if op.startswith("linear") else P(None, at.axis_names)
    got, sent = execute(f, jax.device_put(x, NamedSharding(at, spec)))
    assert_near(got, want, 1e-4, 1e-5)
    if heads % at.size == 0 or at.size % heads == 0:  # otherwise the reshape itself gathers
        # `sample` exchanges whole rows
        gathered = [c for c in sent if c.group > 1 and (op, c.kind) != ("sample", "all-to-all")]
        assert all(c.bytes < x.nbytes // at.size for c in gathered), sent


@each(spec=(("b", "v"), (None, ("v", "b")), ("v", "b")))
def decoded(spec):
    """The mesh that is found from XLA's sharding alone gives each device the same part."""
    given = NamedSharding(mesh(), P(*spec))
    n = given.mesh.size
    found, (found_spec,) = decode(n, [jax_internals.tiles(jax_internals.hlo_sharding(given, 2))], [2])
    devices = jax.sharding.Mesh(given.mesh.devices.reshape(found.axis_sizes), found.axis_names)
    assert NamedSharding(devices, found_spec).is_equivalent_to(given, 2), found_spec


@each(op=OPS[:4])
def one_device(op):
    """An unsharded array needs no communication."""
    for f in (ours, lambda op, x: (pulled(lambda x: ours(op, x)[0])(x), None)):
        assert not execute(functools.partial(f, op), jnp.asarray(logits()))[1]


@each(op=OPS[:4], how=HOW)
def explained(op, how):
    at = split("both", how)
    choices = ps.explain(on(at, how, op, functools.partial(ours, op)), at.place(logits()))
    assert [choice.call.op for choice in choices][:1] == ["topk" if op in TOPK else op]
    if how == "shard_map":  # the part of a device is known
        local = (len(NAMES) // at.size("b"), V // at.size("v"))
        assert (choices[0].call.rows, choices[0].call.vocab) == local


MERGED = {
    "topk": lambda x, **of: ps.fused_topk(x, 5, **of),
    "token_stats": lambda x, **of: ps.token_stats(x, **of)[1:],
    "sample": lambda x, **of: ps.sample(jax.random.key(0), x, **of),
    "topk_log": lambda x, **of: ps.fused_topk(x, 40, log=True, **of),
}


@each(op=MERGED, layout=["line", "spread"], rows=[13, 40], dtype=(F32, BF16), most=6)
def many_devices(op, layout, rows, dtype):
    """With more devices than one all-gather is for, each merges its share of the rows; the results are the same."""
    at, x = split(layout, "shard_map"), logits(dtype)[-rows:]
    f = mapped(at, "shard_map", MERGED[op], P(*at.spec), P())
    few, sent_by_few = execute(f, at.place(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_types, "GATHERED_DEVICES", 1)
        jax.clear_caches()
        many, sent = execute(lambda x: f(x), at.place(x))
    jax.clear_caches()
    for got, want in zip(jax.tree.leaves(many), jax.tree.leaves(few)):
        # the order of a sum is XLA's choice; indices are integers, and equal
        rtol = 4e-7 if want.dtype.itemsize >= 4 else 2**-7
        np.testing.assert_allclose(np.asarray(got, "float64"), np.asarray(want, "float64"), rtol=rtol)
    steps = sum(at.mesh.shape[name] > 1 for name in at.row)  # one mesh axis after the other
    assert [c.kind for c in sent_by_few if c.group > 1] == ["all-gather"] * steps
    assert sorted(c.kind for c in sent if c.group > 1) == ["all-gather"] * steps + ["all-to-all"] * steps
    # a device gathers the results, and no longer the numbers of all devices; of 2 devices, these are as many
    if jax.device_count() >= 8 and layout == "line":
        assert sum(c.received for c in sent) < sum(c.received for c in sent_by_few)


# --- Functions of the rows of a device ------------------------------------------------------------------

# name: a function of (rows, V)
FUNCTIONS = calls.WITH_KERNELS | {
    "sample": lambda x: ps.sample(jax.random.key(0), x, top_p=0.9),
    "filter_logits": lambda x: jnp.maximum(ps.filter_logits(x, top_p=0.9), -99),
    "verify": lambda x: ps.verify(
        jax.random.key(0), np.zeros((len(x) // 2, 1), int), x.reshape(-1, 2, x.shape[-1]), top_p=0.9
    ),
    "token_stats": lambda x: ps.token_stats(x)[1:],
    "linear_logsumexp": lambda x: ps.linear_logsumexp(x[:, :4], x[:4]),
    "linear_log_probs": lambda x: ps.linear_log_probs(x[:, :4], x[:4], np.zeros(x.shape[0], int)),
    "linear_cross_entropy": lambda x: ps.linear_cross_entropy(x[:, :4], x[:4], np.zeros(x.shape[0], int)),
    "linear_token_stats": lambda x: ps.linear_token_stats(x[:, :4], x[:4])[1:],
    "linear_sample": lambda x: ps.linear_sample(jax.random.key(0), x[:, :4], x[:4], top_p=0.9),
    "linear_topk": lambda x: ps.linear_topk(x[:, :4], x[:4], 5),
}


def total_of(name):
    return lambda x: calls.float_sum(FUNCTIONS[name](x))


@each(name=[name for name in FUNCTIONS if name not in calls.WITHOUT_GRADIENT and name[:6] != "linear"])
def gradient_of_no_rows(name):
    f = jax.shard_map(jax.grad(total_of(name)), mesh=mesh(), in_specs=P("b"), out_specs=P("b"))
    assert jax.jit(f)(np.zeros((0, V), F32)).shape == (0, V)


AROUND = {
    "eager": contextlib.nullcontext,
    "debug_nans": lambda: jax.debug_nans(True),
    "compile_time_eval": jax.ensure_compile_time_eval,
}


@each(name=[name for name in FUNCTIONS if name != "verify"], around=AROUND, most=13)
def shard_map_without_jit(name, around):
    """Values and gradients equal the results of the jitted `jax.shard_map`."""
    at, x = split("batch", "shard_map"), cases.rows(["normal"] * 8, V)

    def over_rows(f):
        return jax.shard_map(f, mesh=at.mesh, in_specs=P("b"), out_specs=P("b"))

    total = over_rows(lambda x: total_of(name)(x).reshape(1))
    functions = [total if name == "linear_cross_entropy" else over_rows(FUNCTIONS[name])]
    # In compile_time_eval, the gradient of jax.nn.softmax fails as well.
    if name not in calls.WITHOUT_GRADIENT and around != "compile_time_eval":
        functions.append(jax.grad(lambda x: jnp.sum(total(x))))
    wanted = [jax.jit(f)(x) for f in functions]
    with AROUND[around]():
        got = [f(x) for f in functions]
    assert_near(got, wanted, 1e-5, 1e-6)


VMAPS = {
    "once": (jax.vmap, THREE, P("b", None, "v")),
    "twice": (lambda f: jax.vmap(jax.vmap(f)), THREE.reshape(2, 4, 4, V), P("b", "v")),
    "named": (functools.partial(jax.vmap, spmd_axis_name="b"), THREE, P("b", None, "v")),
    "rows": (jax.vmap, THREE, P("b", "v")),
}


@each(name=FUNCTIONS, form=VMAPS, most=20)
def vmap_along_an_explicit_axis(name, form):
    """Results and gradients agree with one device, and devices still divide the slices."""
    vmap, x, spec = VMAPS[form]
    if name.startswith("linear"):  # a slice is x and w at once
        spec = P(*spec[: x.ndim - 2])
    placed = jax.device_put(x, NamedSharding(mesh("explicit"), spec))
    gradient = [] if name in calls.WITHOUT_GRADIENT else [jax.grad(total_of(name))]
    for f in [FUNCTIONS[name], *gradient]:
        with jax.set_mesh(mesh("explicit")):  # JAX needs it under vmap
            got = jax.jit(vmap(f))(placed)
        assert_near(got, jax.jit(vmap(f))(x), 1e-4, 1e-5)
        for a in jax.tree.leaves(got):
            assert jax.typeof(a).sharding.spec[: x.ndim - 2] == spec[: x.ndim - 2]


@each(name=FUNCTIONS, batch=["r"])
@each(name=[*FUNCTIONS][::3], batch=[None])
def divided_inside_shard_map(name, batch):
    """XLA divides the rows over the mesh axes that a shard_map leaves. A bug of XLA would end this process."""
    x = cases.rows(["normal"] * 8, 300)  # 300 columns are two chunks of the search
    x[:, ::3] = -0.0
    three = jax.make_mesh((2, 2, 2), ("b", "r", "v"), axis_types=(AxisType.Auto,) * 3)

    def divided(x):
        return FUNCTIONS[name](lax.with_sharding_constraint(x, P(batch, "v")))

    def run(f):
        with jax.set_mesh(three if batch else mesh()):
            f_of_rows = lambda x: jax.tree.map(jnp.atleast_1d, f(x))  # noqa: E731
            return jax.jit(jax.shard_map(f_of_rows, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}))(x)

    assert_near(run(divided), run(FUNCTIONS[name]), 1e-4, 1e-5)


def main(*patterns):
    for name, check in CHECKS.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            report(name, check)


if __name__ == "__main__":
    main(*sys.argv[1:] or "*")
