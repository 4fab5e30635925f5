"""Arrays that are sharded over several devices: each check of tests/programs/sharded_checks.py is a test.

The number of devices must be set before JAX starts. So a child process with eight CPU devices runs the fast checks, and
two others each run half of the slow ones. On a machine with several GPUs, run
`pytest -m gpu -n 0 tests/dispatch/test_sharded.py`.
"""

import math
import socket

import jax
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch import finer_mesh as decode
from pallas_softmax._src.dispatch import partitioner
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk import mesh as topk_mesh
from tests.programs import sharded_checks
from tests.programs.sharded_checks import CHECKS, OPS, SLOW, TOPK
from tests.support.children import child, once, reports
from tests.support.covering import first, pairs, slow
from tests.support.lowering import divided_calls, lowered

PARTS = [[name for name in CHECKS if name not in SLOW]]
PARTS += [[name for name in CHECKS if name in SLOW][half::2] for half in (0, 1)]


@pytest.fixture(scope="session")
def report(request, tmp_path_factory):
    """Returns a function for the error of a check, or None. The first pytest worker that asks runs the check's part."""
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "function", None) is test_on_eight_cpu_devices
    }

    def error(name):
        (part,) = (i for i, names in enumerate(PARTS) if name in names)
        names = [n for n in PARTS[part] if n in selected]
        found = once(tmp_path_factory, f"sharded_{part}", lambda _: reports("sharded_checks.py", *names))
        return found.get(name, found[""] + "\nthe child ended before this check")

    return error


@pytest.mark.parametrize(
    "name",
    [slow(name) if name in SLOW else name for part in PARTS for name in part],
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
    wide = topk_mesh.wide_logits(jax.numpy.asarray(x))
    order = np.argsort(np.asarray(sort_keys.key(jax.numpy.asarray(x))), kind="stable")
    assert (np.diff(np.asarray(sort_keys.key(wide), np.int64)[order]) > 0).all()
    np.testing.assert_array_equal(wide, x.astype(np.float32))


@pytest.mark.slow
def test_few_shards_merge_like_many():
    """Few shards are merged by elementwise operations. With empty shards added, reductions give the same results."""
    rng = np.random.default_rng(0)
    m, d = rng.normal(size=(2, 6, 8)).astype(np.float32) * 4
    m[0, 3], m[1, 5], m[2], m[3, ::2], m[4, 1] = np.nan, np.inf, -np.inf, -np.inf, 2**-140
    d = np.where(m == -np.inf, 0, np.exp(d)).astype(np.float32)
    temperature = np.asarray([[1], [0.5], [1], [0], [0], [2]], np.float32)
    few = normalizers.Normalizer(m, d)
    many = normalizers.Normalizer(
        *(np.pad(a, ((0, 0), (0, 3)), constant_values=v) for a, v in ((m, -np.inf), (d, 0)))
    )
    assert len(normalizers.split_if_few(few)) == 8
    assert len(normalizers.split_if_few(many)) == 1
    merged = (normalizers.combine_parts(parts, Temperature.of(temperature)) for parts in (few, many))
    for got, expected in zip(*merged):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for join in normalizers._REDUCTIONS:
        few_sum, many_sum = (
            normalizers.reduce_split(join, parts) for parts in (normalizers.split_if_few(d), [d])
        )
        np.testing.assert_allclose(few_sum, many_sum, rtol=1e-6)


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


@pytest.mark.parametrize(("op", "how"), first(3, pairs(OPS, ["shard_map", "auto"])))
def test_each_device_runs_kernels_on_its_part(op, how):
    """The test needs no devices. Under jit it asks for the program of each device, in XLA's place."""
    mesh = AbstractMesh((8,), ("v",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "v"))
    x = jax.ShapeDtypeStruct((128, 8 * 16384), "float32", sharding=sharding)
    at = sharded_checks.Split(mesh, (None, "v"))
    f = sharded_checks.on(at, how, op, lambda x, **kwargs: sharded_checks.ours(op, x, **kwargs))
    text = lowered(f, x)
    if how == "auto":
        ((shapes, call),) = divided_calls(text)
        tiles = (tuple(map(tuple, tiles_of((1, 8)))), *[None] * (op in TOPK))  # the temperature is whole
        module, _, _ = partitioner._partition(tuple(shapes), tiles, call.encode())
        with mlir.make_ir_context():
            text = str(ir.Module.parse(module))
    assert_kernels_of_parts(op, text)
