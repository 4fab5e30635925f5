"""Types: pyright knows the type of each public symbol; pyright and mypy refuse wrong arguments."""

import inspect
import json
import os
import subprocess
import sys
import typing

import pytest

import pallas_softmax as ps
from pallas_softmax import online, paper
from tests.programs import typing_checks
from tests.support.children import ROOT

PUBLIC = (online, paper)  # also the names of these modules without an underscore are public

pytestmark = pytest.mark.slow


def pyright(*args: str) -> dict:
    """Returns pyright's report on this checkout with this Python."""
    pytest.importorskip("pyright")
    # pyright uses the first Python on PATH
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pyright", "--outputjson", *args]
    return json.loads(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout)


def test_the_type_of_each_public_symbol_is_known():
    report = pyright("--verifytypes", ps.__name__, "--ignoreexternal")["typeCompleteness"]
    known = {symbol["name"]: symbol["isTypeKnown"] for symbol in report["symbols"]}
    exported = {f"{ps.__name__}.{name}" for name in ps.__all__}
    assert exported <= set(known)
    public_objects = [getattr(module, name) for module in (ps, online) for name in module.__all__]
    classes = [each for each in public_objects if inspect.isclass(each)]
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


def test_mypy_refuses_the_same():
    pytest.importorskip("mypy")
    options = "--strict", "--follow-imports=silent", "--cache-dir", os.devnull
    command = [sys.executable, "-m", "mypy", *options, typing_checks.__file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("function", [ps.logsumexp, ps.linear_cross_entropy])
def test_overloads_take_the_arguments_of_the_function(function):
    each = typing.get_overloads(inspect.unwrap(function))
    assert len(each) == 3
    for overload in each:
        assert [*inspect.signature(overload).parameters] == [*inspect.signature(function).parameters]
