"""Lets XLA divide a call among devices. Under Auto mesh axes, XLA chooses the shardings, after JAX has traced the call.

    tracing         `over_auto_axes` binds the call as one primitive
    lowering        `_lower` makes a custom call of it, with a text that describes the call (`text.py`)
    partitioning    XLA chooses how the arrays are sharded, and calls `_partition` with the text. `_partition` returns
                    the program of one device.

The text holds no Python object. So a program can be cached, serialized and exported. Another process can compile it, if
that process has imported this package.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src import jax_internals
from pallas_softmax._src.dispatch import text
from pallas_softmax._src.dispatch.choose import choose_unlisted
from pallas_softmax._src.dispatch.finer_mesh import decode
from pallas_softmax._src.dispatch.operation import Call, Choice
from pallas_softmax._src.dispatch.platform import compiled
from pallas_softmax._src.dispatch.refusal import refuse_unless_cuda

TARGET = "pallas_softmax_divided"


class Dimensions(NamedTuple):
    """The names of the dimensions of a call's arrays. Dimensions with the same name are divided alike."""

    arguments: Sequence[Sequence[str]]
    results: Sequence[Sequence[str]]
    undivided: Sequence[str]  # the dimensions that no mesh axis may divide
    # (specs of the arguments, as XLA has sharded them; the number of devices along each mesh axis) -> the specs to use
    # for arguments and results, and the mesh axes for `Division.on_shard`
    lay_out: Callable[[Sequence[P], Mapping[str, int]], tuple[list[P], list[P], Any]]


class Division(NamedTuple):
    """How a mesh divides one kind of calls. The functions take (choice, arrays, static arguments).

    `dimensions` also takes the types of the results, and `on_shard` what `lay_out` returns for it.
    """

    name: str  # in texts
    dimensions: Callable[[Choice, tuple, dict[str, Any], Any], Dimensions]
    whole: Callable[[Choice, tuple, dict[str, Any]], Any]  # runs the call on whole arrays
    on_shard: Callable[[Choice, tuple, dict[str, Any], Any], Any]


_divisions: dict[str, Division] = {}


def register(division: Division) -> Division:
    _divisions[division.name] = division
    return division


# The settings of JAX that change what a function computes, and their contexts.
_SETTINGS: dict[str, Callable] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_threefry_partitionable": jax.threefry_partitionable,
}


class _Divided(NamedTuple):
    """The description of a call, as tracing knows it."""

    division: str
    call: Call
    requested: str | None
    keywords: tuple[tuple[str, Any], ...]  # the static arguments, sorted by name
    arrays: Any  # the tree of arguments; array i is replaced by the number i
    results: Any  # the tree of results, likewise
    result_types: tuple[tuple[tuple[int, ...], Any], ...]  # (shape, dtype)
    settings: tuple[Any, ...]  # the values of `_SETTINGS`
    device: tuple | None  # the fields of the abstract device


def over_auto_axes(division: Division, choice: Choice, arrays: tuple, keywords: dict[str, Any]) -> Any:
    """Runs a call on arrays that XLA may divide over Auto mesh axes."""
    leaves, tree = jax.tree.flatten(arrays)

    def run(*leaves):
        return division.whole(choice, tree.unflatten(leaves), keywords)

    whole, results = jax.make_jaxpr(run, return_shape=True)(*leaves)  # lowered if XLA can divide nothing
    result_leaves, result_tree = jax.tree.flatten(results)
    device = jax.sharding.get_abstract_mesh().abstract_device
    divided = _Divided(
        division.name,
        choice.call,
        choice.requested,
        tuple(sorted(keywords.items())),
        tree.unflatten(range(len(leaves))),
        result_tree.unflatten(range(len(result_leaves))),
        tuple((a.shape, a.dtype) for a in result_leaves),
        tuple(getattr(jax.config, name) for name in _SETTINGS),
        None if device is None else dataclasses.astuple(device),
    )
    dimensions = division.dimensions(choice, arrays, keywords, results)
    # Shardy's rule: names of dimensions, as in "x0 x1, x0 w0 -> x0 x1"
    sides = (", ".join(map(" ".join, each)) for each in (dimensions.arguments, dimensions.results))
    rule = " -> ".join(sides), tuple(dimensions.undivided)
    description = text.dumps(divided)
    bound = _divided_p.bind(*leaves, whole=whole, divided=description, rule=rule, refusal=choice.refusal)
    return result_tree.unflatten(bound)


_divided_p = Primitive("pallas_softmax_divided")
_divided_p.multiple_results = True
_divided_p.def_impl(compiled(_divided_p.bind, "whole", "divided", "rule", "refusal"))
_divided_p.def_abstract_eval(lambda *_, whole, **__: whole.out_avals)


def _lower(ctx, *values, whole, divided, rule, refusal, platform=None):
    refuse_unless_cuda(ctx, refusal)  # not in `_partition`: XLA would replace the error by its own
    devices = jax_internals.divisible_over(ctx)
    if devices == 1:
        return mlir.lower_fun(jaxpr_as_fun(whole), multiple_results=True)(ctx, *values)
    platform = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    description = text.dumps((text.loads(divided), devices, platform, _versions()))
    return jax_internals.partitioned_call(ctx, TARGET, values, description, *rule)


mlir.register_lowering(_divided_p, _lower)
for _platform in ("cpu", "cuda", "rocm", "tpu"):  # a module for several platforms needs a text for each
    mlir.register_lowering(_divided_p, functools.partial(_lower, platform=_platform), platform=_platform)


@functools.cache
def _versions() -> tuple[str, str]:
    """Without these in the text, the persistent compilation cache would return what an older source compiled."""
    return jax.__version__, digest(Path(__file__).parents[2])


def digest(folder: Path) -> str:
    """Returns a digest of all Python files in a folder."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        sha256.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return sha256.hexdigest()[:16]


# XLA asks for each call of a program. Those of equal layers are equal.
@functools.lru_cache(256)
def _partition(shapes: tuple, tiles: tuple, description: bytes) -> tuple[bytes, list, list]:
    """The `partition` of `jax_internals.register_partitioner`; `description` is the text of `_lower`.

    It may run in another process, without the context of the call.
    """
    divided, devices, platform, _ = text.loads(description)
    division, keywords = _divisions[divided.division], dict(divided.keywords)
    with _context_of(divided):
        leaves = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        numbers, tree = jax.tree.flatten(divided.arrays)
        assert numbers == [*range(len(leaves))]  # each array once, in order
        choice = choose_unlisted(divided.call, divided.requested)
        wholes = [jax.ShapeDtypeStruct(*each) for each in divided.result_types]
        results_of_call = jax.tree.structure(divided.results).unflatten(wholes)
        dimensions = division.dimensions(choice, tree.unflatten(leaves), keywords, results_of_call)
        mesh, given = decode(devices, tiles, [leaf.ndim for leaf in leaves])
        in_specs, out_specs, axes = dimensions.lay_out(given, mesh.shape)
        arguments, results = ([NamedSharding(mesh, s) for s in specs] for specs in (in_specs, out_specs))

        def on_shard(*leaves):
            return jax.tree.leaves(division.on_shard(choice, tree.unflatten(leaves), keywords, axes))

        jaxpr = jax.make_jaxpr(on_shard, axis_env=list(mesh.shape.items()))(*map(_shard, leaves, arguments))
        found: list[Any] = jaxpr.out_avals
        if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in map(_shard, wholes, results)]:
            raise ValueError(f"a device's program returns {found}")  # XLA would read beyond them
        module = jax_internals.module_of_shard(jaxpr, mesh, platform)
    of_arguments = [jax_internals.hlo_sharding(s, a.ndim) for s, a in zip(arguments, leaves)]
    of_results = [jax_internals.hlo_sharding(s, a.ndim) for s, a in zip(results, wholes)]
    return module, of_arguments, of_results


def _shard(whole, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(whole.shape), whole.dtype)


@contextlib.contextmanager
def _context_of(divided: _Divided):
    """Restores the settings of JAX and the abstract device that the call was traced with."""
    device = None if divided.device is None else AbstractDevice(*divided.device)
    with contextlib.ExitStack() as contexts:
        for setting, value in zip(_SETTINGS.values(), divided.settings):
            contexts.enter_context(setting(value))
        mesh = AbstractMesh((), (), abstract_device=device)
        contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
        contexts.enter_context(jax_internals.stage_constants())
        yield


jax_internals.register_partitioner(TARGET, _partition)
