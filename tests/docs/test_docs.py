"""The documents are right: code blocks give the stated results, commands and links exist, and imports are light."""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.children import ROOT, output_of

README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
RUNNABLE = [name for name in DOCUMENTS[1:] if "\n```python\n" in (ROOT / name).read_text()]
RUNNABLE.remove("docs/recipes.md")  # its programs run one by one
RECIPES = (ROOT / "docs/recipes.md").read_text()
TITLES = re.findall(r"^## (.*)$", RECIPES, re.MULTILINE)
HEAVY = ("triton", "jax_triton", "matplotlib", "absl", "torch", "jax.experimental.pallas")


def blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def run(text: str) -> dict:
    """Executes the Python blocks in order; each must print the text of its comments `# -> `."""
    names: dict = {}
    for block in blocks(text, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        assert printed.getvalue().splitlines() == stated(block)
    return names


def stated(code: str) -> list[str]:
    return re.findall(r"^# -> (.*)$", code, re.MULTILINE)


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


@pytest.mark.slow
@pytest.mark.parametrize("document", RUNNABLE)
def test_python_blocks_give_the_stated_results(document, lowered_for_hopper):
    run((ROOT / document).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("program", blocks(RECIPES, "python"), ids=TITLES)  # a program for each title
def test_a_recipe_runs_by_itself(program, tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    assert output_of("-c", program, cwd=tmp_path, env=environment).splitlines() == stated(program)


def test_the_readme_can_be_traced(lowered_for_hopper):
    jax.eval_shape(lambda: run(README) and None)  # compiles nothing


@pytest.mark.slow
def test_the_readme_gives_the_stated_results_and_agrees_with_plain_jax(lowered_for_hopper, quick_compilation):
    names = run(README)

    def plain(w):
        logits = names["x"].astype("float32") @ w
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(64), names["labels"]])

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
    path, missing = ROOT / document, []
    text = path.read_text()
    for link in map("".join, re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"(.*?)\"", text)):
        if "://" not in link:
            target, _, anchor = link.partition("#")
            file = path.parent / target if target else path
            if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
                missing.append(link)
    assert not missing


@pytest.mark.slow
def test_import_is_light():
    loaded = "\nimport sys\nprint(*sys.modules)"
    ours, jaxs = (output_of("-c", f"import {name}{loaded}").split() for name in ("pallas_softmax", "jax"))
    assert set(HEAVY) & set(ours) <= set(jaxs)
    timed = "import time, jax; t = time.process_time(); import pallas_softmax; print(time.process_time() - t)"
    assert min(float(output_of("-c", timed)) for _ in range(3)) < 0.3
