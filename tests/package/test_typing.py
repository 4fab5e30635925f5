"""What a type checker sees: pyright knows the type of each public symbol, and refuses wrong arguments."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_softmax as ps
from pallas_softmax import online, paper
from tests.programs import typing_checks

ROOT = Path(ps.__file__).parent.parent
PUBLIC = (online, paper)  # modules whose names without an underscore are public, in addition to `__all__`

pytestmark = pytest.mark.slow


def pyright(*args: str) -> dict:
    """Returns what pyright reports when it runs on this checkout and this Python."""
    pytest.importorskip("pyright")
    path = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ["PATH"])
    )  # its Python is the first one
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *args],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_the_type_of_each_public_symbol_is_known():
    report = pyright("--verifytypes", ps.__name__, "--ignoreexternal")["typeCompleteness"]
    known = {symbol["name"]: symbol["isTypeKnown"] for symbol in report["symbols"]}
    exported = {f"{ps.__name__}.{name}" for name in ps.__all__}
    assert exported <= set(known)
    classes = [each for name in ps.__all__ if inspect.isclass(each := getattr(ps, name))]
    prefixes = tuple(f"{each.__module__}.{each.__qualname__}." for each in classes)
    prefixes += tuple(f"{module.__name__}." for module in PUBLIC)
    for prefix in prefixes:
        assert any(name.startswith(prefix) for name in known)
    public = {name for name in known if name in exported or name.startswith(prefixes)}
    assert [name for name in sorted(public) if not known[name]] == []


def test_wrong_arguments_are_refused():
    report = pyright(typing_checks.__file__)
    assert report["summary"]["filesAnalyzed"] == 1
    assert report["generalDiagnostics"] == []
