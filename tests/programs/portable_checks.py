"""Checks that programs with Auto mesh axes can be cached, serialized and exported, like any program.

tests/dispatch/test_partitioner.py runs each check as a test. The checks run in two processes, with eight CPU devices
each or with the GPUs of the machine. The first process compiles every call. It writes the results, the executable and
the export to a folder, and fills a compilation cache there. The second must get the same results from the folder:

  XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu PYTHONPATH=. \
      python tests/programs/portable_checks.py first FOLDER [CHECK ...] && (the same with `second`)

Each process prints the name of each check with its error or null.
"""

import functools
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from benchmarks.support import links
from tests.support.children import report
from tests.support.trees import assert_equal, assert_near, floats_of

ROWS, V, D, EXPERTS = 16, 4096, 64, 64


class Case(NamedTuple):
    """A function of arrays with its gradient, and how the arrays are sharded on a mesh with the axes "b" and "v"."""

    function: Any  # arrays -> results, a tree
    arrays: dict[str, Any]  # name: (shape, PartitionSpec)


def labels():
    return jnp.arange(ROWS) * 7 % V


def drawn(x):
    found = ps.sample(jax.random.key(0), x, top_k=50, top_p=0.9)
    return found._replace(log_mass=jax.lax.stop_gradient(found.log_mass))


LOGITS = {"x": ((ROWS, V), P("b", "v"))}
# `sample` may gather 256 entries of each shard. Only in long rows are these far fewer than the logits.
LONG_ROWS = {"x": ((ROWS, 4 * V), P("b", "v"))}
CASES = {
    "softmax": Case(lambda x: ps.softmax(x, where=x > -1), LOGITS),
    "fused_topk": Case(lambda x: ps.fused_topk(x, 4, log=True), LOGITS),
    "top_k": Case(lambda x: ps.top_k(x, 4, where=x < 2, lengths=16 * labels() + 9), LOGITS),
    "sample": Case(drawn, LONG_ROWS),
    "filter_logits": Case(lambda x: jnp.maximum(ps.filter_logits(x, top_k=50), -99), LONG_ROWS),
    "token_stats": Case(lambda x: ps.token_stats(x, labels()), LOGITS),
    "route": Case(lambda x: ps.route(x, 4), {"x": ((ROWS, EXPERTS), P(("b", "v"), None))}),
    "linear_cross_entropy": Case(
        lambda x, w: ps.linear_cross_entropy(x, w, labels()),
        {"x": ((ROWS, D), P("b", None)), "w": ((D, V), P(None, "v"))},
    ),
}


def weighted_sum(results):
    """Returns the sum of the floating results, weighted so that no gradient is 0."""
    return sum(jnp.vdot(jnp.cos(jnp.arange(a.size)).reshape(a.shape), a) for a in floats_of(results))


def with_gradient(case):
    """Returns arrays -> (results, gradients of their `weighted_sum`)."""

    def loss(*arrays):
        results = case.function(*arrays)
        return weighted_sum(results), results

    def call(*arrays):
        (_, results), gradients = jax.value_and_grad(loss, range(len(arrays)), has_aux=True)(*arrays)
        return results, gradients

    return call


def mesh(swapped=False):
    """Returns a mesh of 8, 4 or 2 devices, with two along "b"; if `swapped`, with two along "v"."""
    n = next(n for n in (8, 4, 2) if n <= jax.device_count())
    sizes = (n // 2, 2) if swapped else (2, n // 2)
    return jax.make_mesh(sizes, ("b", "v"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:n])


def arrays_of(case, on=None):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape, np.float32) for shape, _ in case.arrays.values()]
    if on is None:
        return values
    return [jax.device_put(a, NamedSharding(on, spec)) for a, (_, spec) in zip(values, case.arrays.values())]


def shapes_of(case, on, dtype: Any = np.float32):
    """Returns the shapes of `arrays_of`, without the arrays."""
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec)) for shape, spec in case.arrays.values()
    ]


def assert_no_gather(case, compiled):
    """Asserts that no collective moves a device's share of the logits, or of x and w."""
    shares = [np.prod(shape) * 4 // mesh().size for shape, _ in case.arrays.values()]
    sent = links.collectives(compiled.as_text())
    assert all(c.bytes < max(shares) for c in sent if c.kind == "all-gather" and c.group > 1), sent


# --- The first process --------------------------------------------------------------------------------


def write(name, folder):
    """One device gives the same values, and no logits are gathered."""
    case = CASES[name]
    compiled = jax.jit(with_gradient(case)).lower(*arrays_of(case, mesh())).compile()
    # before it runs: on a CPU, XLA cannot store a program with a sort that has run
    (folder / f"{name}.executable").write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    results = compiled(*arrays_of(case, mesh()))
    assert_near(results, jax.jit(with_gradient(case))(*arrays_of(case)), 1e-4, 1e-6)
    assert_no_gather(case, compiled)
    (folder / f"{name}.results").write_bytes(pickle.dumps([*map(np.asarray, jax.tree.leaves(results))]))
    exported = jax.export.export(jax.jit(with_gradient(case)), platforms=("cpu", "cuda"))(*shapes_of(case, mesh()))
    (folder / f"{name}.export").write_bytes(exported.serialize())


def two_meshes(name, folder):
    """One program with arrays on two meshes of the same devices, such as 2 x 4 and 4 x 2."""
    case = CASES[name]
    meshes = mesh(), mesh(swapped=True)
    f = with_gradient(case)

    def both(first, second):
        return f(*first), f(*second)

    shapes = jax.eval_shape(f, *arrays_of(case))
    out = tuple(jax.tree.map(lambda _, at=at: NamedSharding(at, P()), shapes) for at in meshes)
    given = [arrays_of(case, at) for at in meshes]
    got = jax.jit(both, out_shardings=out)(*given)
    want = jax.jit(f)(*arrays_of(case))
    assert_near(got, (want, want), 1e-4, 1e-6)


def exported_gradient(name, folder):
    """An export with vjp_order=1 under an Auto mesh, read back and differentiated."""
    case, f = CASES[name], lambda *arrays: jax.tree.leaves(CASES[name].function(*arrays))
    with jax.set_mesh(mesh()):
        arrays = arrays_of(case, mesh())
        stored = jax.export.export(jax.jit(f))(*arrays).serialize(vjp_order=1)
        call = jax.export.deserialize(stored).call

        def loss(call):
            return jax.jit(jax.grad(lambda *arrays: weighted_sum(call(*arrays)), range(len(arrays))))

        assert_near(loss(call)(*arrays), loss(f)(*arrays), 1e-4, 1e-6)


# --- The second process -------------------------------------------------------------------------------


def cache(name, folder):
    """The same program is found in the cache of the other process."""
    case = CASES[name]
    arrays = arrays_of(case, mesh())
    events = []
    lowered = jax.jit(with_gradient(case)).lower(*arrays)
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    try:
        compiled = lowered.compile()
    finally:
        jax.monitoring.clear_event_listeners()
    assert [e.rsplit("/", 1)[-1] for e in events if "cache_hits" in e or "cache_misses" in e] == ["cache_hits"], events
    assert_equal(jax.tree.leaves(compiled(*arrays)), pickle.loads((folder / f"{name}.results").read_bytes()))


def executable(name, folder):
    stored = pickle.loads((folder / f"{name}.executable").read_bytes())
    compiled = serialize_executable.deserialize_and_load(*stored)
    results = compiled(*arrays_of(CASES[name], mesh()))
    assert_equal(jax.tree.leaves(results), pickle.loads((folder / f"{name}.results").read_bytes()))


def export(name, folder):
    """The export of the other process, for several platforms, is divided without a gather."""
    case = CASES[name]
    stored = jax.export.deserialize(bytearray((folder / f"{name}.export").read_bytes()))
    compiled = jax.jit(stored.call).lower(*arrays_of(case, mesh())).compile()
    assert_no_gather(case, compiled)
    results = compiled(*arrays_of(case, mesh()))
    assert_near(jax.tree.leaves(results), pickle.loads((folder / f"{name}.results").read_bytes()), 1e-4, 1e-6)


def of_each(*checks, names=tuple(CASES)):
    return {f"{check.__name__}-{name}": (check, name) for check in checks for name in names}


CHECKS = {
    "first": of_each(write) | of_each(two_meshes, exported_gradient, names=("top_k", "sample", "linear_cross_entropy")),
    "second": of_each(cache, executable, export),
}


def main(process, folder, *asked):
    folder = Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    for label, (check, name) in CHECKS[process].items():
        if not asked or label in asked:
            report(label, functools.partial(check, name, folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
