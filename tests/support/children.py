"""Child processes of tests: the number of JAX's devices must be set before JAX starts."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"


def output_of(*arguments, **options):
    """Runs Python with these arguments in a process of its own. Returns what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **{"cwd": ROOT} | options)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def environment(**changed):
    """Returns the environment of a program that imports the package and the tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | changed


def child(script, *arguments, cpu_devices=None):
    """Starts a program of tests/programs on `cpu_devices` CPU devices, or on the machine's GPUs."""
    env = environment()
    if cpu_devices is not None:
        # Most of the time is compilation.
        flags = f"--xla_force_host_platform_device_count={cpu_devices} --xla_backend_optimization_level=0"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, PROGRAMS / script, *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def report(name, check):
    """Runs a check in a child, and prints its name with its error or null."""
    error = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # JAX prints to stdout
            check()
    except (Exception, pytest.fail.Exception):
        error = traceback.format_exc()[-3000:]
    print(json.dumps({name: error}), flush=True)


def reports(script, *arguments, cpu_devices=8):
    """Returns what a program prints: the error of each check, or None; and the end of stderr as ""."""
    with child(script, *arguments, cpu_devices=cpu_devices) as process:
        try:
            out, err = process.communicate(timeout=1500)
        finally:
            process.kill()
    found = {k: v for line in out.splitlines() for k, v in json.loads(line).items()}
    return {"": err[-4000:]} | found


def once(tmp_path_factory, name, make):
    """Returns make(folder) of the first pytest worker that asks, with a folder that all workers share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / f"{name}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make(folder)))
    return json.loads(path.read_text())


def selected_names(request, test):
    """Returns the parameters `name` of the test's cases that this run of pytest selects."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test]
    return {item.callspec.params["name"] for item in items}


def assert_no_error(found, name):
    error = found.get(name, found[""] + "\nthe child ended before this check")
    assert error is None, error
