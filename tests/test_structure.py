"""The package's files: imports without circles, downwards only, by name; operations that the table lists."""

import ast
import functools
from pathlib import Path

import pytest

import pallas_softmax
from pallas_softmax._src.dispatch import table as operations
from pallas_softmax._src.dispatch import xla
from pallas_softmax._src.dispatch.choose import IMPLEMENTATIONS
from pallas_softmax._src.dispatch.load import load

ROOT = Path(pallas_softmax.__file__).parent
PACKAGE = pallas_softmax.__name__

# From the top down: what is in a layer imports from the layers below it, or from its own. A folder is named for all
# files in it that are not named themselves.
LAYERS = (
    ("__init__",),
    ("softmax", "topk", "sample", "linear", "paper"),
    ("temperature",),
    ("arguments", "derivatives"),
    ("eager",),
    ("execution",),
    ("sharding",),
    ("platforms",),
    ("choice",),
    ("implementations.__init__", "implementations.load"),
    ("implementations.mosaic_gpu.__init__", "implementations.mosaic_gpu.implementation"),
    ("implementations.triton.__init__", "implementations.triton.implementation"),
    ("implementations.mosaic_gpu", "implementations.triton", "implementations.xla"),
    ("implementations.xla_projection",),
    ("implementations.projection",),
    ("implementations.mosaic_gpu.device",),
    ("implementations.folding", "implementations.xla_sample"),
    ("projection",),
    ("online", "refusal", "varying", "target", "compiled"),
    ("call",),
    ("operations",),
)


def module_name(path):
    """Returns the name by which a file is imported."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def imports(module):
    """Returns the modules of the package that a file imports, inside functions too.

    `from a.b import c` is an import of a.b.c if that is a file, else of a.b; that a package's `__init__` runs before
    its modules does not count.
    """
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: an import by dots"
            of = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else str(node.module) for name in of}
    return found & set(FILES)


def circle(module, above=()):
    """Returns the modules of a circle of imports that is reached from this one; None if there is none."""
    if module in above:
        return (*above[above.index(module) :], module)
    if module in _free:
        return None
    for imported in sorted(imports(module)):
        if found := circle(imported, (*above, module)):
            return found
    _free.add(module)
    return None


_free: set[str] = set()  # what no circle is reached from


def layer(module):
    """Returns the number of the layer that names the longest prefix of the module."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    if FILES[module].stem == "__init__":
        name = f"{name}.__init__".removeprefix(".")
    of = {prefix: i for i, prefixes in enumerate(LAYERS) for prefix in prefixes}
    parents = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
    return next((of[parent] for parent in parents if parent in of), None)


def test_no_circle_of_imports():
    circles = [" imports ".join(found) for module in FILES if (found := circle(module))]
    assert not circles, circles[0]


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
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if {getattr(node, field, None) for field in ("id", "attr", "name")} & {"import_module", "__import__"}
    ]
    assert by_string == []


def test_every_operation_has_a_plain_function():
    assert set(xla.functions) == set(operations.TABLE)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_implementations_have_operations_of_the_table(name):
    assert set(load(name).functions) <= set(operations.TABLE)


def test_operations_name_operations():
    for operation in operations.TABLE.values():
        for named in (operation.gradient, operation.tangent, operation.on_shard):
            assert named is None or named in operations.TABLE
        if operation.gradient is not None:
            assert operations.TABLE[operation.gradient].is_gradient
