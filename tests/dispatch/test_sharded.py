"""Arrays that are sharded over several devices: each check of tests/programs/sharded_checks.py is a test.

The number of devices must be set before JAX starts. So two child processes with eight CPU devices each run half of the
checks. On a machine with several GPUs, run `pytest -m gpu -n 0 tests/dispatch/test_sharded.py`.
"""

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src import sort_keys
from pallas_softmax._src.dispatch import finer_mesh as decode
from pallas_softmax._src.topk import mesh as topk_mesh
from tests.programs import sharded_checks
from tests.programs.sharded_checks import CHECKS, OPS, SLOW, TOPK
from tests.support.covering import cover, slow

PROGRAMS = Path(__file__).parents[1] / "programs"
HALVES = [list(CHECKS)[half::2] for half in (0, 1)]


def child(script, *arguments, cpu_devices=None):
    """Starts a program of tests/programs on `cpu_devices` CPU devices, or on the machine's GPUs."""
    path = os.pathsep.join([str(PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    if cpu_devices is not None:
        # Most of the time is compilation.
        flags = f"--xla_force_host_platform_device_count={cpu_devices} --xla_backend_optimization_level=0"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, PROGRAMS / script, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def report(request, tmp_path_factory):
    """Returns a function for the error of a check, or None. The first pytest worker that asks runs the check's half."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "function", None) is test_on_eight_cpu_devices
    }

    def error(name):
        (half,) = (i for i, names in enumerate(HALVES) if name in names)
        path = folder / f"sharded_{half}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                names = [n for n in HALVES[half] if n in selected]
                with child("sharded_checks.py", *names, cpu_devices=8) as process:
                    try:
                        out, err = process.communicate(timeout=600)
                    finally:
                        process.kill()
                found = {k: v for line in out.splitlines() for k, v in json.loads(line).items()}
                path.write_text(json.dumps({"": err[-4000:]} | found))
        found = json.loads(path.read_text())
        return found.get(name, found[""] + "\nthe child ended before this check")

    return error


@pytest.mark.parametrize(
    "name",
    [slow(name) if name in SLOW else name for half in HALVES for name in half],
)
def test_on_eight_cpu_devices(report, name):
    error = report(name)
    assert error is None, error


@pytest.mark.gpu
@pytest.mark.xdist_group("several GPUs")
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpus(name, implementation, monkeypatch):
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    if name.startswith(("axes-first", "axes-middle")):
        pytest.skip("XLA's sums over axes that are not the last ones have larger errors on a GPU")
    if name.startswith("named_kernel"):
        pytest.skip("is of a CPU")
    monkeypatch.setattr(sharded_checks, "IMPLEMENTATION", implementation)
    CHECKS[name]()


def test_float16_is_widened_in_order():
    """Every bit pattern keeps its order, including NaNs, which would lose their sign on a GPU."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wide = topk_mesh._widen(jax.numpy.asarray(x))
    order = np.argsort(np.asarray(sort_keys.key(jax.numpy.asarray(x))), kind="stable")
    assert (np.diff(np.asarray(sort_keys.key(wide), np.int64)[order]) > 0).all()
    np.testing.assert_array_equal(wide, x.astype(np.float32))


def tiles_of(dims, iota=None, order=None, replicas=1):
    """Returns the tile of each device for XLA's notation {devices=[dims, replicas]<=[iota]T(order)}."""
    n = math.prod(dims) * replicas
    devices = np.arange(n).reshape(iota or n).transpose(order).ravel()
    tiles = np.indices((*dims, replicas)).reshape(len(dims) + 1, n)[:-1]
    return tiles[:, np.argsort(devices)]


WHOLE = tiles_of((1, 1), replicas=8)


@pytest.mark.parametrize(
    ("sizes", "tiles", "finer", "axes"),
    [
        ((8,), [tiles_of((1, 8))], (8,), [[(), (0,)]]),
        ((8,), [WHOLE], (8,), [[(), ()]]),
        ((8,), [tiles_of((1, 4, 2))], (4, 2), [[(), (0,), (1,)]]),
        ((8,), [tiles_of((2, 2, 2))], (2, 2, 2), [[(0,), (1,), (2,)]]),
        ((8,), [tiles_of((2,), replicas=4), WHOLE], (2, 4), [[(0,)], [(), ()]]),
        # the first device's neighbours have the same tile
        ((8,), [tiles_of((2,), (4, 2), (1, 0), 4)], (4, 2), [[(1,)]]),
        ((8,), [tiles_of((2, 4)), tiles_of((4, 2))], (2, 2, 2), [[(0,), (1, 2)], [(0, 1), (2,)]]),
        ((2, 4), [tiles_of((2, 4))], (2, 4), [[(0,), (1,)]]),
        ((2, 4), [tiles_of((8,), (2, 4), (1, 0))], (2, 4), [[(1, 0)]]),
        ((2, 4), [tiles_of((4, 2))], (2, 2, 2), [[(0, 1), (2,)]]),
        ((4, 1, 2), [tiles_of((2, 4))], (2, 2, 1, 2), [[(0,), (1, 3)]]),
        ((2, 4), [tiles_of((4, 2), (2, 4), (1, 0))], (2, 4), [[(1,), (0,)]]),
        ((12,), [tiles_of((4, 3))], (4, 3), [[(0,), (1,)]]),
        # axes of 2 x 3 and of 3 x 2 devices have no common refinement: the second array is replicated
        (
            (6,),
            [tiles_of((2, 3)), tiles_of((3, 2)), tiles_of((6,))],
            (2, 3),
            [[(0,), (1,)], [(), ()], [(0, 1)]],
        ),
        ((12,), [tiles_of((3, 4)), tiles_of((4, 3))], (3, 4), [[(0,), (1,)], [(), ()]]),
        ((4,), [np.array([[0, 2, 1, 3]])], (2, 2), [[(1, 0)]]),
        # no order of mesh axes gives these orders of devices
        ((4,), [np.array([[0, 1, 3, 2]])], (4,), [[()]]),
        ((4,), [np.array([[1, 0, 2, 3]])], (4,), [[()]]),
        ((3, 2), [np.array([[0, 1, 1, 0, 0, 1]])], (3, 2), [[()]]),
        ((8,), [tiles_of((), replicas=8)], (8,), [[]]),
    ],
)
def test_mesh_of_tiles(sizes, tiles, finer, axes):
    assert decode.common_axes(sizes, tiles) == (finer, axes)


@pytest.mark.parametrize("sizes", [(24,), (4, 6), (2, 3, 4)])
def test_every_division_of_mesh_axes_is_found(sizes):
    """The mesh axes found give each device its tile, for random divisions of a finer mesh."""
    n = math.prod(sizes)
    rng = np.random.default_rng(0)
    for _ in range(50):
        prime_sizes = [p for size in sizes for p in rng.permutation(PRIMES[size])]
        order = rng.permutation(len(prime_sizes))
        first, second = sorted(rng.integers(0, len(order) + 1, 2))
        dims = [math.prod(prime_sizes[i] for i in part) for part in (order[:first], order[first:second])]
        tiles = tiles_of(dims, prime_sizes, order, n // math.prod(dims))
        finer, (axes,) = decode.common_axes(sizes, [tiles])
        left = [i for i in range(len(finer)) if i not in sum(axes, ())]
        assert [math.prod(finer[i] for i in of) for of in axes] == dims
        np.testing.assert_array_equal(
            tiles, tiles_of(dims, finer, [*sum(axes, ()), *left], n // math.prod(dims))
        )


PRIMES = {2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 24: [2, 2, 2, 3]}


def run_two_processes(devices):
    """Runs two processes with `devices` devices each, which check their parts of arrays over all devices."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    cpu_devices = 4 if devices == "cpu" else None
    processes = [child("two_processes.py", str(i), port, devices, cpu_devices=cpu_devices) for i in range(2)]
    try:
        ends = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(o + e[-3000:] for o, e in ends)


@pytest.mark.slow
def test_two_processes():
    """Arrays on a mesh over two processes."""
    run_two_processes("cpu")


@pytest.mark.gpu
@pytest.mark.xdist_group("several GPUs")
def test_two_processes_on_gpus():
    """The same with NCCL."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_two_processes(str(jax.device_count() // 2))


def assert_kernels_of_parts(op, text):
    """Asserts a kernel for 16384 elements per row and, for top-k, one that merges the winners of eight devices."""
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert any("tensor<128x16384xf32>" in line for line in calls), calls
    if op in TOPK:
        merged = f"tensor<128x{8 * TOPK[op]['k']}xi32>"
        assert any(merged in line for line in calls), calls


@pytest.mark.parametrize(("op", "how"), cover(OPS, ["shard_map", "auto"]))
def test_each_device_runs_kernels_on_its_part(op, how):
    """The test needs no devices. Under jit it lowers the function that `partition` returns for each device."""
    mesh = AbstractMesh((8,), ("v",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "v"))
    x = jax.ShapeDtypeStruct((128, 8 * 16384), "float32", sharding=sharding)
    at = sharded_checks.Split(mesh, (None, "v"))
    f = sharded_checks.on(at, how, op, lambda x, **kwargs: sharded_checks.ours(op, x, **kwargs))
    if how == "auto":
        (partition,) = partitions(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(x.shape, x.dtype)).jaxpr)
        columns, whole = (stand_in(lambda i: slice(i, i + 1)), stand_in(lambda _: slice(None)))
        arrays = [SimpleNamespace(shape=x.shape, sharding=columns)]
        arrays += [SimpleNamespace(shape=(1, 1), sharding=whole)] * (op in TOPK)  # the temperature
        _, part, outs, ins = partition(mesh, arrays, None)
        specs = [tuple(sharding.spec for sharding in each) for each in (ins, outs)]
        mapped = jax.shard_map(part, mesh=mesh, in_specs=specs[0], out_specs=list(specs[1]), check_vma=False)
        f = lambda x: mapped(x, *[jax.numpy.ones((1, 1))] * (len(ins) - 1))  # noqa: E731
    assert_kernels_of_parts(op, jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text())


def stand_in(columns):
    """Returns a stand-in for XLA's sharding of a matrix with eight columns over eight devices."""
    indices = {i: (slice(None), columns(i)) for i in range(8)}
    return SimpleNamespace(device_set={*indices}, devices_indices_map=lambda shape: indices)


def partitions(jaxpr):
    """Returns the partition function of every custom_partitioning equation."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "custom_partitioning":
            yield equation.params["partition"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from partitions(inner)
