"""All private names of JAX that the package uses. `tests/dispatch/test_jax_internals.py` fails if one of them moves."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config, core, xla_bridge
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir, str_to_sdy_sharding_rule
from jax._src.export import _export
from jax._src.interpreters.mlir import build_mlir_module_helper, custom_call
from jax._src.lax.lax import _convert_element_type
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding


def stage_constants() -> contextlib.AbstractContextManager:
    """Returns a context where JAX stages operations on constants, even in `jax.ensure_compile_time_eval`.

    `ensure_compile_time_eval` makes JAX evaluate such operations while it traces. JAX cannot evaluate them in a kernel
    or in `jax.shard_map`.
    """
    # an eager call takes 20 µs longer if a setting of JAX changes, even to the same value
    return config.eager_constant_folding(False) if config.eager_constant_folding.value else contextlib.nullcontext()


def as_weak_as(x: jax.Array, like: jax.Array) -> Any:
    """Returns `x`, with a weak type if `like` has one. No public function of JAX makes a weak type."""
    return _convert_element_type(x, x.dtype, weak_type=True) if like.weak_type else x


# ---- A custom call that XLA asks Python to partition, as in `jax.experimental.custom_partitioning`


def register_partitioner(target: str, partition: Callable) -> None:
    """Registers how XLA divides the custom calls with the name `target`, on every platform. `jax.export` accepts them.

    XLA calls partition(shapes, tiles, text) for each custom call:

        shapes   (shape, dtype) of each argument, a tuple
        tiles    the result of `tiles` for each argument, a tuple
        text     the text of the call

    It returns the MLIR bytecode of a device's program, and lists of `hlo_sharding`s of arguments and results.
    """

    def called(arg_shapes, arg_shardings, result_shape, result_sharding, text):
        shapes = tuple((tuple(s.dimensions()), s.numpy_dtype()) for s in arg_shapes)
        module, arguments, results = partition(shapes, tuple(map(tiles, arg_shardings)), text)
        if not result_shape.is_tuple():
            return module, arguments, results[0]
        return module, arguments, xla_client.HloSharding.tuple_sharding(result_shape, results)

    def infer(*_):
        raise NotImplementedError(f"{target} needs Shardy, which infers shardings by the call's rule")

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        target,
        lambda sharding, shape, text: sharding,
        called,
        infer,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)
    _export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE.add(target)


def hlo_sharding(sharding: NamedSharding, rank: int) -> Any:
    return sharding._to_xla_hlo_sharding(rank)


def tiles(sharding) -> tuple[tuple[int, ...], ...] | None:
    """Returns which tile of an array each device has, as indices [dimension][device]; None for a replicated array."""
    if not sharding.is_tiled():
        return None
    dims, devices = sharding.tile_assignment_dimensions(), sharding.tile_assignment_devices()
    # the last tile dimensions are no dimensions of the array: devices along them have the same tile
    rank = len(dims) - len(sharding.subgroup_types()) - sharding.replicate_on_last_tile_dim()
    tiles = np.indices(dims).reshape(len(dims), -1)[:rank]
    return tuple(map(tuple, tiles[:, np.argsort(devices)].tolist()))


def divisible_over(ctx: mlir.LoweringRuleContext) -> int:
    """Returns the number of devices that XLA may divide an operation over; 1 if all mesh axes are Manual."""
    context = ctx.module_context.axis_context
    if not isinstance(context, mlir.SPMDAxisContext):
        return getattr(context, "num_devices", 1)
    return 1 if set(context.manual_axes) == set(context.mesh.axis_names) else context.mesh.size


def partitioned_call(
    ctx: mlir.LoweringRuleContext, target: str, values: Sequence, text: str, rule: str, whole: Sequence[str]
) -> Sequence:
    """Lowers to a custom call that XLA divides, by Shardy's `rule` with its factors that must stay `whole`."""
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = custom_call(target, result_types=types, operands=values, backend_config=text)
    parsed = str_to_sdy_sharding_rule(rule, need_replication_factors=tuple(whole))
    call.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(parsed, [v.type for v in values], types)
    return call.results


def module_of_shard(jaxpr: Any, mesh: AbstractMesh, platform: str) -> bytes:
    """Returns the MLIR bytecode of a device's program. Its collectives may use all axes of the mesh."""
    of_devices: Any = mesh  # only names and sizes of the axes matter
    context = mlir.SPMDAxisContext(of_devices, frozenset(mesh.axis_names))
    with core.extend_axis_env_nd(mesh.shape.items()):
        module = build_mlir_module_helper(
            jaxpr, name="shard", platforms=(platform,), backend=None, axis_context=context
        )
    return mlir.module_to_bytecode(module)
