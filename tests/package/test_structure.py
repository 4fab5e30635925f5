"""The package's structure: imports have no circles and go down the layers, and operations are complete."""

import ast
import functools
import graphlib
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

import pallas_softmax
from pallas_softmax._src.dispatch.operation import OPERATIONS, RowOperation
from tests.support.calls import WITH_KERNELS

ROOT = Path(pallas_softmax.__file__).parent

# The layers from the top down. A module imports from its own layer and from lower layers. A folder stands for all of
# its files that are not listed themselves.
LAYERS = (
    ("__init__",),
    ("online", "paper"),
    ("_src.linear", "_src.route"),
    ("_src.sample", "_src.select", "_src.softmax", "_src.stats", "_src.topk"),
    ("_src.arguments",),
    ("_src.triton", "_src.gpu"),
    ("_src.dispatch",),
    ("_src.folding", "_src.masks"),
    (
        "_src.normalizers",
        "_src.sort_keys",
        "_src.temperatures",
        "_src.misfits",
        "_src.target",
        "_src.jax_internals",
        "_src.__init__",
    ),
)


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def nodes(module):
    return list(ast.walk(ast.parse(FILES[module].read_text())))


@functools.cache
def imports(module):
    """Returns the modules of the package that a file imports, including imports in functions.

    `from a.b import c` imports a.b.c if that is a file, and otherwise a.b. The `__init__` of a package, which runs
    before its modules, does not count.
    """
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: an import by dots"
            of = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else str(node.module) for name in of}
    return found & set(FILES)


def layer(module):
    """Returns the number of the layer that names the longest prefix of the module."""
    name = module.removeprefix(pallas_softmax.__name__).removeprefix(".")
    if FILES[module].stem == "__init__":
        name = f"{name}.__init__".removeprefix(".")
    of = {prefix: i for i, prefixes in enumerate(LAYERS) for prefix in prefixes}
    parents = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    return next((of[parent] for parent in parents if parent in of), None)


def test_no_circle_of_imports():
    graphlib.TopologicalSorter({module: imports(module) for module in FILES}).prepare()  # raises for a circle


def test_imports_go_downwards():
    assert [module for module in FILES if layer(module) is None] == []
    upwards = [
        f"{module} imports {imported}"
        for module in FILES
        for imported in sorted(imports(module))
        if layer(imported) < layer(module)
    ]
    assert upwards == []


def test_imports_are_not_by_string():
    by_string = [
        f"{module}, line {node.lineno}"
        for module in FILES
        for node in nodes(module)
        if {getattr(node, field, None) for field in ("id", "attr", "name")} & {"import_module", "__import__"}
    ]
    assert by_string == []


def test_private_modules_are_hidden():
    shown = {name for name in dir(pallas_softmax) if not name.startswith("_")}
    assert shown - {"paper"} == set(pallas_softmax.__all__)  # paper is public, but must be imported by name


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_operations_are_complete(operation):
    """Each kernel can be imported. An operation with a gradient has all that derivatives need."""
    for kernel in operation.kernels.values():
        assert callable(kernel.plan) and callable(kernel.run)
    if isinstance(operation, RowOperation) and operation.gradient is not None:
        assert operation.gradient.is_gradient and operation.tangent is not None
        arguments, results = {*operation.argument_names}, {*operation.result_names}
        assert operation.variables and {*operation.variables} <= arguments
        assert operation.differentiable and {*operation.differentiable} <= results
        assert {*jax.tree.leaves(operation.saved)} <= arguments | results


MOST_FRAMES = 14


class _Launched(Exception):
    pass


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_few_frames_lead_to_a_kernel(name, monkeypatch):
    """Neither are files entered twice. A file counts once for calls within it."""

    def kernel(*args, **kwargs):
        raise _Launched

    monkeypatch.setattr(plgpu, "kernel", kernel)
    x = jnp.ones((64, 50_258), jnp.bfloat16)  # a shape of no other test: JAX caches a trace
    with pytest.raises(_Launched) as error, jax.disable_jit(False):
        WITH_KERNELS[name](x[:, :256] if name == "route" else x)
    files = [str(entry.path) for entry in error.traceback if str(ROOT) in str(entry.path)]
    assert 5 < len(files) <= MOST_FRAMES, files
    entered = [file for file, before in zip(files, ["", *files]) if file != before]
    assert len(set(entered)) == len(entered), entered
