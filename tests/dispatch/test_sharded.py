"""Arrays that are sharded over several devices: each check of tests/programs/sharded_checks.py is a test.

The number of devices must be set before JAX starts. So a child process with eight CPU devices runs the fast checks, and
two others each run half of the slow ones. On a machine with several GPUs, run
`pytest -m gpu -n 0 tests/dispatch/test_sharded.py`.
"""

import functools
import math
import re
import socket

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_softmax._src import normalizers, sort_keys
from pallas_softmax._src.dispatch import finer_mesh as decode
from pallas_softmax._src.temperatures import Temperature
from pallas_softmax._src.topk import mesh as topk_mesh
from tests.programs import sharded_checks
from tests.programs.sharded_checks import CHECKS, OPS, TOPK
from tests.support.children import assert_no_error, child, once, reports, selected_names
from tests.support.covering import first_values, slow
from tests.support.lowering import array, kernel_names, lowered

# The fast set has the first check of each kind, except for kinds that take long.
LONG = ("partition", "axes", "tokens", "verified", "linear_statistics", "linear_left_out", "linear_draws")
LONG += ("mask_of_rows", "numbers_of_tokens")
FIRST = {name.partition("-")[0]: name for name in reversed(CHECKS)}
FAST = [name for kind, name in FIRST.items() if not kind.startswith(LONG)]
SLOW = [name for name in CHECKS if name not in FAST]
PARTS = [FAST, SLOW[::2], SLOW[1::2]]


@pytest.fixture(scope="session")
def report(request, tmp_path_factory):
    """Returns a function for the reports of a check's part. The first pytest worker that asks runs the part."""
    selected = selected_names(request, test_on_eight_cpu_devices)

    def found(name):
        (part,) = (i for i, names in enumerate(PARTS) if name in names)
        names = [n for n in CHECKS if n in PARTS[part] and n in selected]
        return once(tmp_path_factory, f"sharded_{part}", lambda _: reports("sharded_checks.py", *names))

    return found


@pytest.mark.parametrize("name", [*FAST, *map(slow, SLOW)])
def test_on_eight_cpu_devices(report, name):
    assert_no_error(report(name), name)


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
    if name.startswith("divided_inside_shard_map") and jax.device_count() < 8:
        pytest.skip("needs a mesh of three axes")
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
    many = normalizers.Normalizer(*(np.pad(a, ((0, 0), (0, 3)), constant_values=v) for a, v in ((m, -np.inf), (d, 0))))
    assert len(normalizers.split_if_few(few)) == 8
    assert len(normalizers.split_if_few(many)) == 1
    merged = (normalizers.combine_parts(parts, Temperature.of(temperature)) for parts in (few, many))
    for got, expected in zip(*merged):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for join in normalizers._REDUCTIONS:
        few_sum, many_sum = (normalizers.reduce_split(join, parts) for parts in (normalizers.split_if_few(d), [d]))
        np.testing.assert_allclose(few_sum, many_sum, rtol=1e-6)


def tiles_of(dims, iota=None, order=None, replicas=1):
    """Returns the tile of each device for XLA's notation {devices=[dims, replicas]<=[iota]T(order)}."""
    n = math.prod(dims) * replicas
    devices = np.arange(n).reshape(iota or n).transpose(order).ravel()
    tiles = np.indices((*dims, replicas)).reshape(len(dims) + 1, n)[:-1]
    return tiles[:, np.argsort(devices)]


WHOLE = tiles_of((1, 1), replicas=8)


@pytest.mark.parametrize(
    ("devices", "tiles", "sizes", "axes"),
    [
        (8, [tiles_of((1, 8))], (8,), [[(), (0,)]]),
        (8, [WHOLE], (8,), [[(), ()]]),
        (8, [tiles_of((1, 4, 2))], (4, 2), [[(), (0,), (1,)]]),
        (8, [tiles_of((2, 2, 2))], (2, 2, 2), [[(0,), (1,), (2,)]]),
        (8, [tiles_of((2,), replicas=4), WHOLE], (2, 4), [[(0,)], [(), ()]]),
        # the first device's neighbours have the same tile
        (8, [tiles_of((2,), (4, 2), (1, 0), 4)], (4, 2), [[(1,)]]),
        (8, [tiles_of((2, 4)), tiles_of((4, 2))], (2, 2, 2), [[(0,), (1, 2)], [(0, 1), (2,)]]),
        (8, [tiles_of((2, 4))], (2, 4), [[(0,), (1,)]]),
        (8, [tiles_of((8,), (2, 4), (1, 0))], (2, 4), [[(1, 0)]]),
        (8, [tiles_of((4, 2), (2, 4), (1, 0))], (2, 4), [[(1,), (0,)]]),
        (12, [tiles_of((4, 3))], (4, 3), [[(0,), (1,)]]),
        # axes of 2 x 3 and of 3 x 2 devices have no common refinement: the second array is replicated
        (6, [tiles_of((2, 3)), tiles_of((3, 2)), tiles_of((6,))], (2, 3), [[(0,), (1,)], [(), ()], [(0, 1)]]),
        (12, [tiles_of((3, 4)), tiles_of((4, 3))], (3, 4), [[(0,), (1,)], [(), ()]]),
        (4, [np.array([[0, 2, 1, 3]])], (2, 2), [[(1, 0)]]),
        # no order of mesh axes gives these orders of devices
        (4, [np.array([[0, 1, 3, 2]])], (4,), [[()]]),
        (4, [np.array([[1, 0, 2, 3]])], (4,), [[()]]),
        (6, [np.array([[0, 1, 1, 0, 0, 1]])], (6,), [[()]]),
        (8, [tiles_of((), replicas=8)], (8,), [[]]),
    ],
)
def test_mesh_of_tiles(devices, tiles, sizes, axes):
    assert decode.common_axes(devices, tiles) == (sizes, axes)


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
        finer, (axes,) = decode.common_axes(n, [tiles])
        left = [i for i in range(len(finer)) if i not in sum(axes, ())]
        assert [math.prod(finer[i] for i in of) for of in axes] == dims
        np.testing.assert_array_equal(tiles, tiles_of(dims, finer, [*sum(axes, ()), *left], n // math.prod(dims)))


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
    run_two_processes("cpu")


@pytest.mark.gpu
@pytest.mark.xdist_group("several GPUs")
def test_two_processes_on_gpus():
    """The same with NCCL."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_two_processes(str(jax.device_count() // 2))


@pytest.mark.parametrize("op", first_values(2, OPS[::-1]))
def test_each_device_runs_kernels_on_its_part(op):
    """Inside shard_map, without devices. test_partitioner.py has the programs that XLA asks for."""
    mesh = AbstractMesh((8,), ("v",), axis_types=(AxisType.Auto,))
    at = sharded_checks.Split(mesh, (None, "v"))
    x = array(128, 8 * 16384, sharding=NamedSharding(mesh, P(*at.spec)))
    f = sharded_checks.on(at, "shard_map", op, functools.partial(sharded_checks.ours, op))
    text = lowered(f, x)
    # the last kernel merges the winners of the eight devices
    assert kernel_names(text) == (["softmax_topk", "topk_merge"] if op in TOPK else ["logsumexp_forward"])
    assert re.search(r"custom_call @mosaic_gpu.* : \(tensor<128x16384xf32>", text)
