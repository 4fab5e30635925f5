"""The kernels of softmax and top-k in text lowered for CUDA, under every transformation and in exports."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from tests.support import cases
from tests.support.calls import DTYPES, WITH_KERNELS, float_sum, topk
from tests.support.covering import cover, first, first_values, pairs
from tests.support.lowering import array, kernel_names, kernel_results, lowered, square_sum

ROWS, V, K = 128, 16384, 5  # enough for the automatic choice of a kernel, in every dtype
X = array(ROWS, V)


# name: (public function, results of its kernel: X's shape, or the winners, m and d)
FUNCTIONS = {
    "softmax": (ps.softmax, lambda rows: [f"{rows}x{V}xf32"]),
    "topk": (topk, lambda rows: [f"{rows}x{K}xf32", f"{rows}x{K}xi32", f"{rows}xf32", f"{rows}xf32"]),
    "top_k": (functools.partial(ps.top_k, k=K), lambda rows: [f"{rows}x{K}xf32", f"{rows}x{K}xi32"]),
}


# name: (a call of the function, the functions without a kernel for it)
CALLS = {
    **{dtype: (lambda x, f, dtype=dtype: f(x.astype(dtype)), []) for dtype in DTYPES},
    "implementation": (lambda x, f: f(x, implementation="xla"), list(FUNCTIONS)),
    "axis": (lambda x, f: f(x, axis=0), ["topk"]),
    "float64": (lambda x, f: f(x.astype("float64")), list(FUNCTIONS)),
    "where": (lambda x, f: f(x, where=x > 0), []),
    "alignment": (lambda x, f: f(x[:, :-1]), []),
    "length": (lambda x, f: f(x.reshape(1, -1)), []),
}


@pytest.mark.parametrize(("name", "case"), first(6, pairs(FUNCTIONS, CALLS)))
def test_explain_agrees_with_the_lowered_text(name, case):
    """A kernel is lowered for CUDA, if explain says so, and for no other platform."""
    call, without = CALLS[case]
    f = functools.partial(call, f=FUNCTIONS[name][0])
    with jax.enable_x64(case == "float64"):
        choice = ps.explain(f, X)[0]
        assert (choice.cuda, choice.elsewhere) == ("xla" if name in without else "mosaic_gpu", "xla")
        launches = 1 + (case == "length")  # a single row has parts
        assert len(kernel_results(lowered(f, X))) == (0 if name in without else launches)
        assert kernel_results(lowered(f, X, platform="cpu")) == []


MESH = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Auto,))
SHARDED = array(4 * ROWS, V, sharding=NamedSharding(MESH, P("rows")))


def shard_map(f):
    return jax.shard_map(f, mesh=MESH, in_specs=P("rows"), out_specs=P("rows"))


# name: (transformation, its array, the rows of the only kernel)
TRANSFORMATIONS = {
    "vmap of the first axis": (jax.vmap, array(6, ROWS, V), 6 * ROWS),
    "vmap of the second axis": (lambda f: jax.vmap(f, 1), array(ROWS, 6, V), 6 * ROWS),
    "vmap of vmap": (lambda f: jax.vmap(jax.vmap(f)), array(2, 3, ROWS, V), 6 * ROWS),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x), array(3, ROWS, V), ROWS),
    "shard_map": (shard_map, SHARDED, ROWS),
}


@pytest.mark.parametrize(("name", "way"), cover(FUNCTIONS, TRANSFORMATIONS))
def test_a_transformation_has_one_kernel(name, way):
    """vmap makes neither a grid of batches nor a loop. In shard_map, a device has its own rows; it needs no devices."""
    (f, results), (transform, x, rows) = FUNCTIONS[name], TRANSFORMATIONS[way]
    assert kernel_results(lowered(transform(f), x)) == [results(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("f", [ps.softmax, lambda x: topk(x).values], ids=["softmax", "topk"])
def test_kernels_of_gradients(f):
    """The forward kernel runs again after a checkpoint, and each device runs the kernels on its own rows."""
    gradient = jax.grad(square_sum(f))
    kernels = kernel_results(lowered(gradient, X))
    forgetful = jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
    assert len(kernel_results(lowered(jax.grad(square_sum(forgetful)), X))) == len(kernels) + 1
    assert kernel_results(lowered(jax.grad(square_sum(shard_map(f))), SHARDED)) == kernels
    assert kernel_results(exported(gradient, X, ("cpu", "cuda")).mlir_module()) == kernels


NAMED = WITH_KERNELS | {"route in groups": functools.partial(ps.route, k=K, groups=4, top_groups=2)}


@pytest.mark.parametrize("name", first_values(2, NAMED))
def test_a_named_gradient_on_a_mesh(name):
    """Each device runs the kernels that one device runs. It chooses them again for its shard. Needs no devices."""
    gradient = jax.grad(lambda x: float_sum(NAMED[name](x, implementation="mosaic_gpu")))
    mesh = AbstractMesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        divided = lowered(gradient, array(160, 256, sharding=NamedSharding(mesh, P("rows", None))))
    names = kernel_names(lowered(gradient, array(40, 256)))
    assert names and kernel_names(divided) == names


SLICED = NAMED | {
    "gradient": lambda x, **named: jax.grad(lambda x: float_sum(ps.softmax(x, where=x > 0, **named)))(x),
    "filtered draw": lambda x, **named: ps.sample(jax.random.key(0), x, temperature=x[:, 0], top_p=x[:, 1], **named),
    "projection": lambda x, **named: ps.linear_log_probs(*two_halves(x), jnp.arange(32), bias=x[0], **named),
    "draw of a projection": lambda x, **named: ps.linear_sample(jax.random.key(0), *two_halves(x), **named),
}


def two_halves(x):
    return x[:32].astype("bfloat16"), x[:256].astype("bfloat16")


@pytest.mark.parametrize("name", first_values(3, [*reversed(SLICED)]))
def test_a_kernel_gets_no_slice(name):
    """A barrier is before and after each kernel. Without one, XLA passes the address of a slice, however aligned."""
    text = lowered(functools.partial(SLICED[name], implementation="mosaic_gpu"), array(257, 256))
    assert kernel_names(text)
    for function in text.split("\n  func.func ")[1:]:
        barriers = re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier (.*) : ", function)
        semaphores = re.findall(r"(%\w+) = stablehlo.broadcast_in_dim %c\w*, dims = \[\]", function)
        own = {name for name, _ in barriers}.union(semaphores)
        after = {name for _, operands in barriers for name in _names(operands)}
        for results, operands in re.findall(r"(%\w+)(?::\d+)? = .*custom_call @mosaic_gpu\w*\((.*?)\)", function):
            assert _names(operands) <= own
            assert results in after


def _names(operands):
    return set(re.findall(r"%\w+", operands))


def exported(f, x, platforms=("cuda",)):
    return export.export(jax.jit(f), platforms=platforms)(x)


@pytest.mark.slow
def test_export_and_its_gradient_can_be_serialised():
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialise")
    again = export.deserialize(exported(ps.softmax, X).serialize(vjp_order=1))
    assert again.platforms == ("cuda",)
    assert kernel_results(again.mlir_module()) == [[f"{ROWS}x{V}xf32"]]
    assert kernel_results(again.vjp().mlir_module()) == [[f"{ROWS}x{V}xf32"]] * 2  # y again, and dx


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu",)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_export_with_a_symbolic_batch(name, platforms):
    """A grid needs a static size, so there is no kernel, and explain says so."""
    f, x = FUNCTIONS[name][0], array(*export.symbolic_shape("rows"), V)
    assert kernel_results(exported(f, x, platforms).mlir_module()) == []
    choice = ps.explain(f, x)[0]
    assert choice.cuda == "xla"
    assert dict(choice.reasons)["mosaic_gpu"]


@pytest.mark.parametrize(
    ("name", "platforms"), first(1, pairs(FUNCTIONS, [("cpu", "cuda"), ("cuda", "tpu", "rocm", "cpu")])), ids=str
)
def test_export_for_several_platforms(name, platforms):
    """One module has the kernel for CUDA and plain JAX for the other platforms."""
    f, results = FUNCTIONS[name]
    both = exported(f, X, platforms)
    assert kernel_results(both.mlir_module()) == [results(ROWS)]
    x = cases.rows(["normal", "integers"] * (ROWS // 2), V)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), both.call(x), f(x))
