"""README.md holds: its code gives what it says, its commands and links exist, and imports are light."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_softmax import target

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HEAVY = ("triton", "jax_triton", "matplotlib", "tqdm", "absl", "torch", "jax.experimental.pallas")


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def heavy_modules(statement: str) -> set[str]:
    """Which of HEAVY a new process has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(HEAVY) & set(done.stdout.split())


def seconds_of_import() -> float:
    """What `import pallas_softmax` takes beyond importing jax, in a new process, without its waiting."""
    code = """if True:
        import time, jax
        start = time.process_time()
        import pallas_softmax
        print(time.process_time() - start)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_python_blocks_give_what_they_claim(monkeypatch):
    monkeypatch.setattr(target, "capability", lambda: (9, 0))  # whatever GPU is here
    jax.clear_caches()
    names = {}
    for block in blocks(README, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        assert printed.getvalue().splitlines() == re.findall(r"^# -> (.*)$", block, re.MULTILINE)

    def plain(q):
        p = jax.nn.softmax(q @ names["k"].T / jnp.sqrt(q.shape[-1]))
        return jnp.sum((p @ names["v"]) ** 2)

    dq = jax.grad(plain)(names["q"])
    np.testing.assert_allclose(names["dq"], dq, rtol=1e-4, atol=1e-5)
    scores, best = jax.lax.top_k(jax.nn.log_softmax(names["logits"]).ravel(), 4)
    np.testing.assert_allclose(names["scores"], scores, rtol=1e-6)
    np.testing.assert_array_equal(names["parents"], best // 32000)
    np.testing.assert_array_equal(names["tokens"], best % 32000)


def test_quick_start_is_two_command_lines():
    first, second = blocks(section("Quick start"))[:2]
    for line in (first, second):
        assert line.count("\n") == 1 and not line.startswith("$")
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
    assert first.startswith("python3 ")
    assert shlex.split(second)[0] == ".venv/bin/python"


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md"])
def test_commands_and_links_name_what_exists(file):
    text = (ROOT / file).read_text()
    flagfiles = re.findall(r"--flagfile=([^\s`]+)", text)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert flagfiles and links
    for path in flagfiles + links:
        assert (ROOT / path).exists(), path


def test_install_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cells = re.findall(r"^\| (`.*?) \|", section("Install"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(extras)


def test_import_is_light():
    assert heavy_modules("import pallas_softmax") <= heavy_modules("import jax")
    assert min(seconds_of_import() for _ in range(3)) < 0.3
