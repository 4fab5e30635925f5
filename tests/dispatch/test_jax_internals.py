"""The private names of JAX that the package uses: each does what its wrapper promises, in every supported version."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src import jax_internals
from pallas_softmax._src.dispatch.partitioner import TARGET
from pallas_softmax._src.jax_internals import stage_constants
from tests.support.lowering import array

MESH = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def test_stage_constants():
    def is_staged():
        found = []
        jax.make_jaxpr(lambda: found.append(isinstance(jnp.ones(()) + 1, Tracer)))()
        return found == [True]

    with jax.ensure_compile_time_eval():
        assert not is_staged()
        with stage_constants():
            assert is_staged()
        assert not is_staged()


@pytest.mark.parametrize(
    ("spec", "tiles"),
    [
        (P(), None),
        (P("a"), [[0] * 4 + [1] * 4, [0] * 8]),
        (P(None, "b"), [[0] * 8, [0, 1, 2, 3] * 2]),
        (P("b", "a"), [[0, 1, 2, 3] * 2, [0] * 4 + [1] * 4]),
        (P(("b", "a")), [[0, 2, 4, 6, 1, 3, 5, 7], [0] * 8]),
    ],
)
def test_tiles(spec, tiles):
    found = jax_internals.tiles(jax_internals.hlo_sharding(NamedSharding(MESH, spec), 2))
    if tiles is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, tiles)


def lower_with(rule, f, *arrays, mesh=MESH):
    """Lowers f, which gets a function that JAX lowers by `rule`, for arrays sharded over a mesh."""
    probe = Primitive("probe")
    probe.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(probe, rule)
    arrays = [array(*a, sharding=NamedSharding(mesh, P())) for a in arrays]
    return jax.jit(lambda *a: f(probe.bind, *a)).trace(*arrays).lower(lowering_platforms=("cpu",))


def test_number_of_devices():
    """The number of devices is known where an operation is lowered; it is 1 inside shard_map."""
    found = []

    def rule(ctx, x):
        found.append(jax_internals.divisible_over(ctx))
        return [x]

    own = P(("a", "b"))
    lower_with(rule, lambda probe, x: probe(x), (8, 8))
    lower_with(
        rule, lambda probe, x: jax.shard_map(probe, mesh=MESH, in_specs=own, out_specs=own, check_vma=False)(x), (8, 8)
    )
    lower_with(rule, lambda probe, x: probe(x), (8, 8), mesh=AbstractMesh((1,), ("a",), axis_types=(AxisType.Auto,)))
    assert found == [8, 1, 1]


def test_partitioned_call():
    def rule(ctx, x):
        return jax_internals.partitioned_call(ctx, TARGET, [x], 'a "text"', "i j -> i j", ["j"])

    text = lower_with(rule, lambda probe, x: probe(x), (8, 16)).as_text()
    (call,) = (line for line in text.splitlines() if f"custom_call @{TARGET}" in line)
    assert r"a \22text\22" in call
    assert "([i, j])->([i, j]) {i=8, j=16} need_replication={j}" in call


def test_export_accepts_the_target():
    """`jax.export` refuses custom calls of unknown targets, because they may change."""

    def exported(target):
        def call(x):
            return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

        return jax.export.export(jax.jit(call))(array(8))

    exported(TARGET)
    with pytest.raises(ValueError, match="not_ours"):
        exported("not_ours")


def test_module_of_shard():
    """A device's program has the collectives of the mesh, for a platform and devices that need not be there."""
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "b"), axis_env=[*MESH.shape.items()])(array(8))
    module = jax_internals.module_of_shard(jaxpr, MESH, "cuda")
    with mlir.make_ir_context():
        text = str(mlir.ir.Module.parse(module))
    assert "all_reduce" in text
    assert "tensor<8xf32>" in text
