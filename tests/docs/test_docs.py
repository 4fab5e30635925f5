"""The documents are right: code blocks give the stated results, commands and links exist, and imports are light."""

import contextlib
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
]
RUNNABLE = [name for name in DOCUMENTS[1:] if "\n```python\n" in (ROOT / name).read_text()]
RUNNABLE.remove("docs/recipes.md")  # its programs run one by one, in test_recipes.py
HEAVY = ("triton", "jax_triton", "matplotlib", "tqdm", "absl", "torch", "jax.experimental.pallas")


def blocks(text: str, language: str = "") -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(title: str, text: str = README) -> str:
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run(text: str) -> dict:
    """Executes the Python blocks in order; each must print the text of its comments `# -> `."""
    names: dict = {}
    for block in blocks(text, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        assert printed.getvalue().splitlines() == re.findall(r"^# -> (.*)$", block, re.MULTILINE)
    return names


@pytest.fixture
def lowered_for_hopper(monkeypatch):
    """Hides the machine's GPUs: without a GPU, `explain` answers for Hopper on every machine."""
    devices = jax.devices

    def without_gpus(backend=None):
        if backend == "cuda":
            raise RuntimeError("hidden by the test")
        return devices(backend)

    monkeypatch.setattr(jax, "devices", without_gpus)
    jax.clear_caches()  # explain does not list calls that jit traced before


def heavy_modules(statement: str) -> set[str]:
    """Returns the HEAVY modules that a new process loads in `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(HEAVY) & set(done.stdout.split())


def seconds_of_import() -> float:
    """Returns the CPU time of `import pallas_softmax` in addition to jax, in a new process."""
    code = """if True:
        import time, jax
        start = time.process_time()
        import pallas_softmax
        print(time.process_time() - start)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("document", RUNNABLE)
def test_python_blocks_give_the_stated_results(document, lowered_for_hopper):
    run((ROOT / document).read_text())


def test_the_readme_gives_the_stated_results_and_agrees_with_plain_jax(lowered_for_hopper, quick_compilation):
    names = run(README)

    def plain(w):
        return -jnp.mean(
            jax.nn.log_softmax(names["x"].astype("float32") @ w)[jnp.arange(64), names["labels"]]
        )

    loss, dw = jax.value_and_grad(plain)(names["w"].astype("float32"))
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(names["dw"].astype("float32"), dw, rtol=0.02, atol=1e-4 * jnp.abs(dw).max())
    p = jax.nn.softmax(names["logits"][:, :-1])
    np.testing.assert_allclose(names["probabilities"][:, :-1], p, rtol=1e-5)
    values, tokens = jax.lax.top_k(jax.nn.softmax(names["logits"]), 5)
    np.testing.assert_allclose(names["values"], values, rtol=1e-6)
    np.testing.assert_array_equal(names["tokens"], tokens)
    assert names["drawn"].shape == names["log_probs"].shape == names["log_mass"].shape == (4,)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_links_exist(document):
    path = ROOT / document
    text = path.read_text()
    missing = [
        flagfile for flagfile in re.findall(r"configs/\w+\.flags", text) if not (ROOT / flagfile).is_file()
    ]
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"(.*?)\"", text):
        link = "".join(link)
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            missing.append(link)
    assert not missing


def test_install_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cells = re.findall(
        r"^\| (`.*?) \|", section("Extras", (ROOT / "docs/install.md").read_text()), re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(extras)


@pytest.mark.slow
def test_import_is_light():
    assert heavy_modules("import pallas_softmax") <= heavy_modules("import jax")
    assert min(seconds_of_import() for _ in range(3)) < 0.3
