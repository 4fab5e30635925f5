"""The Mosaic GPU kernels lowered for CUDA, without a GPU: that they lower, and which path a call takes.

Registers, shared memory, alignment and deadlocks do not show here, but on the GPU only (gpu/).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from tests.support import cases, kernels, oracle
from tests.support.covering import cover, first, first_values, pairs
from tests.support.kernels import Parts, Tile, Window
from tests.support.lowering import array, kernel_names, kernel_results, lowered

ROWS, V, K = 128, 16384, 5  # enough for the automatic choice of a kernel, in every dtype
DTYPES = ("float32", "bfloat16", "float16")
X = array(ROWS, V)


def topk(x, **kwargs):
    return ps.fused_topk(x, K, **kwargs)


def square_sum(f):
    return lambda x: jnp.sum(f(x).astype("float32") ** 2)


def values(x):
    return topk(x).values


# A public call, and the results of its kernel: X's shape, or the winners, m and d.
FUNCTIONS = {
    "softmax": (ps.softmax, lambda rows: [f"{rows}x{V}xf32"]),
    "topk": (topk, lambda rows: [f"{rows}x{K}xf32", f"{rows}x{K}xi32", f"{rows}xf32", f"{rows}xf32"]),
}
each = pytest.mark.parametrize("name", FUNCTIONS)


# --- Every kernel -------------------------------------------------------------------------------------


def lowered_rows(op, rows, v, dtype, plan=None, mask=None):
    """Returns the lowered kernel of an operation on `rows` rows, with a mask of this shape."""
    arrays = [array(rows, v, dtype=dtype)] * (2 if op in oracle.BACKWARD else 1)
    where = None if mask is None else array(*mask, dtype="bool")

    def f(arrays, where):
        return kernels.softmax_results(op, arrays, where, (1,), plan, interpret=None)

    return lowered(f, arrays, where)


def names_of(op, plan=None):
    """Returns the names of the kernels that an operation runs as."""
    kernel = op if op in oracle.BACKWARD else f"{op}_forward"
    if not isinstance(plan, Parts) or plan.cluster:
        return [kernel]
    return [f"{kernel}_reduce"] if op == "logsumexp" else [f"{kernel}_reduce", kernel]


MASKS = {"full": lambda v: (5, v), "along rows": lambda v: (1, v), "per row": lambda v: (5, 1)}
SHORT = (1, 2, 3, 7, 8, 15, 31, 127, 512, 1000, 1003, 5000)


def test_short_rows_are_over_every_number_of_lanes():
    lanes = {kernels.plan_softmax("softmax", 5, v, "float32").lanes for v in SHORT}
    assert lanes == {2, 4, 8, 16, 32, 128}


@pytest.mark.parametrize(("op", "v", "dtype"), first(3, pairs(oracle.OPERATIONS, SHORT, DTYPES)))
def test_short_rows(op, v, dtype):
    assert kernel_names(lowered_rows(op, 5, v, dtype)) == names_of(op)


# A vector of one element, of eight, and of one in rows that have the CTA.
MASKED = [(15, "float16"), (512, "bfloat16"), (1003, "float32")]


@pytest.mark.parametrize(("op", "shape", "mask"), first(3, pairs(oracle.OPERATIONS, MASKED, MASKS)), ids=str)
def test_short_rows_with_masks(op, shape, mask):
    v, dtype = shape
    assert kernel_names(lowered_rows(op, 5, v, dtype, mask=MASKS[mask](v))) == names_of(op)


# (V, the CTAs of a row, whether they are a cluster)
LONG = {
    "one CTA": (8192, 1, True),
    "one CTA, unaligned": (10003, 1, True),
    "cluster": (65536, 4, True),
    "cluster of unequal parts": (20008, 2, True),
    "cluster, unaligned": (50257, 8, True),
    "largest cluster": (151935, 16, True),
    "two launches": (1048576, 256, False),
    "two launches, unaligned": (1000003, 256, False),
}


@pytest.mark.parametrize(
    ("op", "kind", "shape"),
    first(3, pairs(oracle.OPERATIONS, LONG, [(5, "float32"), (8, "bfloat16")])),
    ids=str,
)
def test_long_rows(op, kind, shape):
    (v, count, cluster), (rows, dtype) = LONG[kind], shape
    plan = Parts(v, 16 // jnp.dtype(dtype).itemsize, 4, count, cluster)
    assert kernel_names(lowered_rows(op, rows, v, dtype, plan)) == names_of(op, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "slots", "mask"),
    [
        ("softmax", 9, None),
        ("log_softmax_grad", 9, None),
        ("softmax", 9, "full"),
        ("softmax", 5, None),
        ("softmax_grad", 5, None),
    ],
)
def test_rows_in_turns(op, slots, mask):
    """With slots for more than a row, and for less."""
    plan = Parts(50257, 4, 4, 4, True, teams=3, slots=slots)
    text = lowered_rows(op, 5, 50257, "float32", plan, mask and MASKS[mask](50257))
    assert kernel_names(text) == names_of(op, plan)


@pytest.mark.parametrize(
    ("op", "kind", "mask"),
    first(
        1,
        pairs(
            ["softmax", "logsumexp", "log_softmax_grad"],
            ["cluster, unaligned", "one CTA", "two launches, unaligned"],
            MASKS,
        ),
    ),
)
def test_long_rows_with_masks(op, kind, mask):
    v, count, cluster = LONG[kind]
    plan = Parts(v, 8, 4, count, cluster)
    text = lowered_rows(op, 5, v, "float16", plan, MASKS[mask](v))
    assert kernel_names(text) == names_of(op, plan)


def lowered_topk(rows, v, k, dtype, plan, mask=None, temperatures=1, log=False):
    """Returns the lowered kernels of top-k on `rows` rows, with a mask of this shape."""

    def f(x, temperature, where):
        return kernels.topk_rows(x, k, plan, where, temperature, log, dtype, interpret=None)

    where = None if mask is None else array(*mask, dtype="bool")
    return lowered(f, array(rows, v, dtype=dtype), array(temperatures), where)


def names_of_topk(plan, k):
    """Returns the names of the kernels that top-k runs as."""
    return ["softmax_topk"] + ["topk_merge"] * kernels.launches_that_merge(plan, k)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    first(3, pairs([(1, 1), (2, 2), (7, 7), (8, 1), (100, 17), (129, 3), (512, 8), (1024, 1000)], DTYPES)),
    ids=str,
)
def test_topk_of_short_rows(shape, dtype):
    v, k = shape
    plan = kernels.plan_topk(5, v, k, dtype)
    assert isinstance(plan, Tile)
    assert kernel_names(lowered_topk(5, v, k, dtype, plan)) == ["softmax_topk"]


@pytest.mark.parametrize(
    ("shape", "mask", "log"),
    first(1, pairs([(15, "float16"), (512, "bfloat16"), (129, "float32")], MASKS, [False, True])),
    ids=str,
)
def test_topk_of_short_rows_with_masks(shape, mask, log):
    v, dtype = shape
    plan = kernels.plan_topk(5, v, 5, dtype)
    assert isinstance(plan, Tile)
    assert kernel_names(lowered_topk(5, v, 5, dtype, plan, MASKS[mask](v), 5, log)) == ["softmax_topk"]


# (rows, V, k). As planned: one CTA a row; parts of it, merged at once or in several launches; winners that are compared
# with all where buckets fail, and more of them, which are sorted then.
WINDOWS = {
    "one CTA, unaligned": (251, 20011, 128),
    "parts": (5, 50257, 64),
    "fewer groups than winners": (5, 2003, 2003),
    "aligned parts": (8, 131072, 1),
    "more than are compared": (256, 10000, 300),
    "listed by position": (256, 25000, 512),
    "one CTA": (256, 25000, 5),
    "most winners of the shortest row": (5, 2056, 2048),
    "parts merged twice": (5, 262144, 2048),
    "hundreds of parts": (5, 20_000_003, 5),
}


@pytest.mark.parametrize(("kind", "dtype"), first(2, pairs(list(WINDOWS), ["float32", "bfloat16"])))
def test_topk_of_long_rows(kind, dtype):
    rows, v, k = WINDOWS[kind]
    plan = kernels.plan_topk(rows, v, k, dtype)
    assert isinstance(plan, Window)
    assert (plan.count > 1) == ("parts" in kind)
    assert kernel_names(lowered_topk(rows, v, k, dtype, plan, temperatures=rows)) == names_of_topk(plan, k)


def test_topk_merges_in_one_launch_or_in_several():
    merges = {
        kernels.launches_that_merge(kernels.plan_topk(rows, v, k, "float32"), k)
        for rows, v, k in WINDOWS.values()
    }
    assert merges >= {0, 1, 2}


@pytest.mark.parametrize(
    ("kind", "mask"), first(1, pairs(["one CTA, unaligned", "parts", "aligned parts"], MASKS))
)
def test_topk_of_long_rows_with_masks(kind, mask):
    _, v, k = WINDOWS[kind]
    plan = kernels.plan_topk(5, v, k, "float16")
    text = lowered_topk(5, v, k, "float16", plan, MASKS[mask](v), log=True)
    assert kernel_names(text) == names_of_topk(plan, k)


@pytest.mark.parametrize(
    ("shape", "masked"), first(1, pairs([(5, 128), (256, 10003), (5, 30000)], [True, False])), ids=str
)
def test_topk_under_x64(shape, masked, x64):
    """No number becomes one of 64 bits."""
    rows, v = shape
    plan = kernels.plan_topk(rows, v, 5, "float32")
    text = lowered_topk(rows, v, 5, "float32", plan, (rows, v) if masked else None)
    assert kernel_names(text) == names_of_topk(plan, 5)


# --- Which path ran -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), cover(FUNCTIONS, DTYPES))
def test_what_explain_says_is_what_is_lowered(name, dtype):
    """The kernel for CUDA and only there."""
    f, x = FUNCTIONS[name][0], array(ROWS, V, dtype=dtype)
    choice = ps.explain(f, x)[0]
    assert (choice.cuda, choice.elsewhere) == ("mosaic_gpu", "xla")
    assert len(kernel_results(lowered(f, x))) == 1
    assert kernel_results(lowered(f, x, platform="cpu")) == []


# (what calls the function, and the functions that then have no kernel)
NOT_TAKEN = {
    "implementation": (lambda x, f: f(x, implementation="xla"), list(FUNCTIONS)),
    "axis": (lambda x, f: f(x, axis=0), ["topk"]),
    "float64": (lambda x, f: f(x.astype("float64")), list(FUNCTIONS)),
    "where": (lambda x, f: f(x, where=x > 0), []),
    "alignment": (lambda x, f: f(x[:, :-1]), []),
    "length": (lambda x, f: f(x.reshape(1, -1)), []),
}


@pytest.mark.parametrize(("name", "case"), first(3, pairs(FUNCTIONS, NOT_TAKEN)))
def test_no_kernel_where_explain_says_xla(name, case, x64):
    call, without = NOT_TAKEN[case]
    f = functools.partial(call, f=FUNCTIONS[name][0])
    assert ps.explain(f, X)[0].cuda == ("xla" if name in without else "mosaic_gpu")
    assert (kernel_results(lowered(f, X)) == []) == (name in without)


def test_no_topk_kernel_for_integers():
    x = array(ROWS, V, dtype="int32")
    assert ps.explain(topk, x)[0].cuda == "xla"
    assert kernel_results(lowered(topk, x)) == []


@pytest.mark.parametrize("f", [ps.softmax, lambda x, **kwargs: ps.softmax(x, 0, where=x > 0, **kwargs)])
def test_a_named_kernel_is_lowered_where_the_automatic_choice_is_xla(f):
    x = array(ROWS, 4096)
    assert ps.explain(f, x)[0].cuda == "xla"
    assert kernel_results(lowered(f, x)) == []
    assert kernel_names(lowered(functools.partial(f, implementation="mosaic_gpu"), x)) == ["softmax_forward"]


# What is made of a function of (5, 3, V).
CALLS = {
    "call": lambda f: f,
    "where": lambda f: lambda x: f(x, where=x[:1] > 0),
    "axis": lambda f: lambda x: f(x, axis=0),
    "axes": lambda f: lambda x: f(x, axis=(0, 2)),
    "vmap": jax.vmap,
    "vmap with one mask": lambda f: lambda x: jax.vmap(lambda x, w: f(x, where=w), (0, None))(x, x[0] > 0),
    "grad": lambda f: jax.grad(square_sum(f)),
    "grad with where": lambda f: jax.grad(square_sum(lambda x: f(x, where=x > 0))),
    "vmap of grad": lambda f: jax.vmap(jax.grad(square_sum(f))),
}


@pytest.mark.parametrize(("op", "call", "v"), first(2, pairs(oracle.FORWARD, CALLS, [100, 20011])))
def test_public_functions(op, call, v):
    """Each runs its kernel, and the backward its own; that of logsumexp is plain."""

    def f(x, axis=-1, where=None):
        return getattr(ps, op)(x, axis, where=where, implementation="mosaic_gpu")

    forward, backward = [f"{op}_forward"], [f"{op}_grad"]
    want = forward + backward if "grad" in call and op != "logsumexp" else forward
    text = lowered(CALLS[call](f), array(5, 3, v))
    assert [name for name in kernel_names(text) if not name.endswith("_reduce")] == want


@pytest.mark.parametrize(
    ("call", "v"), first(3, pairs([name for name in CALLS if not name.startswith("ax")], [100, 20011, 30000]))
)
def test_public_topk(call, v):
    """One kernel, and one that merges the parts of a long row; the backward of short rows without a mask has one."""

    def f(x, where=None):
        return topk(x, where=where, implementation="mosaic_gpu").values

    want = ["softmax_topk"] + ["topk_merge"] * (v == 30000)
    want += ["topk_grad"] * (v == 100 and call in ("grad", "vmap of grad"))
    assert kernel_names(lowered(CALLS[call](f), array(5, 3, v))) == want


def test_integers_and_leading_axes_are_folded():
    assert kernel_results(lowered(ps.softmax, array(16, 8, V))) == [[f"128x{V}xf32"]]
    assert kernel_results(lowered(lambda x: ps.softmax(x, (1, 2)), array(ROWS, 2, V // 2))) == [
        [f"128x{V}xf32"]
    ]
    assert kernel_results(lowered(ps.softmax, array(ROWS, V, dtype="int32"))) == [[f"128x{V}xf32"]]


# --- Transformations ----------------------------------------------------------------------------------


def test_grad_of_softmax():
    """One kernel forward, one backward."""
    assert kernel_results(lowered(jax.grad(square_sum(ps.softmax)), X)) == [[f"{ROWS}x{V}xf32"]] * 2


def test_grad_of_topk():
    assert kernel_results(lowered(jax.grad(square_sum(values)), X)) == [FUNCTIONS["topk"][1](ROWS)]


@pytest.mark.slow
def test_grad_of_grad_of_softmax():
    """The second derivative is plain; what it differentiates still runs as kernels."""
    second = jax.grad(square_sum(jax.grad(square_sum(ps.softmax))))
    assert len(kernel_results(lowered(second, X))) >= 2


def test_grad_by_temperature():
    f = jax.grad(lambda t, x: jnp.sum(topk(x, temperature=t).values))
    assert len(kernel_results(lowered(f, array(ROWS), X))) == 1


@pytest.mark.parametrize(("name", "in_axis"), cover(FUNCTIONS, [0, 1]))
def test_vmap_is_one_call_over_all_rows(name, in_axis):
    """Not a grid of batches, and not a loop."""
    f, results = FUNCTIONS[name]
    shape = (3, ROWS, V) if in_axis == 0 else (ROWS, 3, V)
    assert kernel_results(lowered(jax.vmap(f, in_axis), array(*shape))) == [results(3 * ROWS)]


@each
def test_nested_vmap_is_one_call_over_all_rows(name):
    f, results = FUNCTIONS[name]
    assert kernel_results(lowered(jax.vmap(jax.vmap(f)), array(2, 3, ROWS, V))) == [results(6 * ROWS)]


def test_vmap_over_single_rows_is_one_call_over_all_of_them():
    assert kernel_results(lowered(jax.vmap(ps.softmax), X)) == kernel_results(lowered(ps.softmax, X))


def test_the_choice_under_vmap_is_that_of_all_rows():
    """So many winners of a single row as long as this are XLA's, those of three are a kernel's."""
    f, row = functools.partial(ps.fused_topk, k=1025), array(65_600)
    assert not kernel_results(lowered(f, row))
    assert kernel_results(lowered(jax.vmap(f), array(3, *row.shape)))


@pytest.mark.slow
def test_vmap_of_grad_is_two_calls_over_all_rows():
    f = jax.vmap(jax.grad(square_sum(ps.softmax)))
    assert kernel_results(lowered(f, array(3, ROWS, V))) == [[f"{3 * ROWS}x{V}xf32"]] * 2


@pytest.mark.parametrize(
    ("axes", "shape"), first(1, [((0, 0), (3,)), ((0, None), ()), ((0, 0), (3, ROWS))]), ids=str
)
def test_vmap_with_temperatures(axes, shape):
    f = jax.vmap(lambda x, t: topk(x, temperature=t), axes)
    assert kernel_results(lowered(f, array(3, ROWS, V), array(*shape))) == [FUNCTIONS["topk"][1](3 * ROWS)]


@each
def test_scan(name):
    f, results = FUNCTIONS[name]
    text = lowered(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x), array(3, ROWS, V))
    assert kernel_results(text) == [results(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("f", [ps.softmax, values], ids=["softmax", "topk"])
def test_checkpoint(f):
    """The forward kernel runs again in the backward."""
    count = len(kernel_results(lowered(jax.grad(square_sum(f)), X)))
    f = jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
    assert len(kernel_results(lowered(jax.grad(square_sum(f)), X))) == count + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grad", *FUNCTIONS])
def test_shard_map(name):
    """Each device runs the kernel over its own rows. The four devices need not exist."""
    mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    x = array(4 * ROWS, V, sharding=NamedSharding(mesh, P("rows")))
    f = ps.softmax if name == "grad" else FUNCTIONS[name][0]
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    if name == "grad":
        assert kernel_results(lowered(jax.grad(square_sum(mapped)), x)) == [[f"{ROWS}x{V}xf32"]] * 2
    else:
        assert kernel_results(lowered(mapped, x)) == [FUNCTIONS[name][1](ROWS)]


# --- Export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", first_values(1, ["float8_e4m3fn", "float8_e5m2"]))
def test_topk_values_of_8_bits(dtype):
    """The kernel's are of float32, rounded afterwards."""
    text = lowered(lambda x: ps.fused_topk(x, 5, dtype=dtype, implementation="mosaic_gpu"), X)
    assert len(kernel_results(text)) == 1


def exported(f, x, platforms=("cuda",)):
    return export.export(jax.jit(f), platforms=platforms)(x)


@each
def test_export(name):
    f, results = FUNCTIONS[name]
    assert kernel_results(exported(f, X).mlir_module()) == [results(ROWS)]


@pytest.mark.slow
def test_export_and_its_gradient_can_be_serialised():
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialise")
    again = export.deserialize(exported(ps.softmax, X).serialize(vjp_order=1))
    assert again.platforms == ("cuda",)
    assert kernel_results(again.mlir_module()) == [[f"{ROWS}x{V}xf32"]]
    assert kernel_results(again.vjp().mlir_module()) == [[f"{ROWS}x{V}xf32"]] * 2  # y once more, and dx


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu",)], ids=str)
@each
def test_export_with_a_symbolic_batch(name, platforms):
    """A grid has a static size: no kernel, and explain says so."""
    f, x = FUNCTIONS[name][0], array(*export.symbolic_shape("rows"), V)
    assert kernel_results(exported(f, x, platforms).mlir_module()) == []
    choice = ps.explain(f, x)[0]
    assert choice.cuda == "xla"
    assert dict(choice.reasons)["mosaic_gpu"]


@pytest.mark.parametrize(
    ("name", "platforms"),
    first(1, pairs(FUNCTIONS, [("cpu", "cuda"), ("cuda", "tpu", "rocm", "cpu")])),
    ids=str,
)
def test_export_for_several_platforms(name, platforms):
    """The kernel for CUDA and plain JAX for all others, in one module."""
    f, results = FUNCTIONS[name]
    both = exported(f, X, platforms)
    assert kernel_results(both.mlir_module()) == [results(ROWS)]
    x = cases.rows(["normal", "integers"] * (ROWS // 2), V)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), both.call(x), f(x))


@pytest.mark.slow
@pytest.mark.parametrize("f", [ps.softmax, values], ids=["softmax", "topk"])
def test_gradients_are_exported_for_several_platforms(f):
    gradient = jax.grad(square_sum(f))
    text = exported(gradient, X, ("cpu", "cuda")).mlir_module()
    assert kernel_results(text) == kernel_results(lowered(gradient, X))


def test_a_named_kernel_is_not_exported_for_a_cpu():
    with pytest.raises(
        NotImplementedError, match="needs an NVIDIA GPU, but this computation is lowered for cpu"
    ):
        exported(lambda x: ps.softmax(x, implementation="mosaic_gpu"), X, ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("v", "dtype", "masked", "own"),
    first(
        2,
        [
            (128, "bfloat16", False, True),
            (1028, "float32", False, False),
            (1000, "float16", False, True),
            (128, "float32", True, False),
            (7, "float32", False, True),
        ],
    ),
)
def test_the_backward_of_topk(v, dtype, masked, own):
    """Rows in the registers of a warp have a kernel; longer and masked ones are plain JAX."""
    where = jnp.ones((ROWS, v), bool) if masked else None
    names = kernel_names(
        lowered(jax.grad(square_sum(lambda x: topk(x, where=where).values)), array(ROWS, v, dtype=dtype))
    )
    assert ("topk_grad" in names) == own and len(names) == 1 + own
