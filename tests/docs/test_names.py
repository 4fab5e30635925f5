"""The documents name only files, functions and results that exist, and the files of a release agree."""

import functools
import json
import re
import tomllib
from pathlib import Path

import pytest

import pallas_softmax as ps
from tests.docs.test_docs import DOCUMENTS, ROOT, without_blocks

RESULTS = ROOT / "benchmarks" / "results"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILDERS = [
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("dev/design", "dev/ptx", "dev/extending", "limits", "sharding")),
]
FOLDERS = ("pallas_softmax", "tests", "benchmarks", "docs", "configs", ".ci", ".github")
# words in code that no source file has: of pytest, PyPI and JAX, the program of a profile, and text of PTX
OTHERS = {"pdb", "maxprocesses", "publish", "pypi", "jit_softmax", "triton_kernel_call_ffi", "checking_leaks"}
OTHERS |= {"r4", "venv", "xFFFF0000"}


@functools.cache
def files() -> tuple[str, ...]:
    paths = (*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
    return tuple(path.relative_to(ROOT).as_posix() for path in paths if path.suffix != ".pyc")


@functools.cache
def words() -> set[str]:
    """Returns the words of the other source files, and of all paths."""
    sources = (ROOT / name for name in files() if name.endswith((".py", ".flags")))
    texts = (path.read_text() for path in sources if path != Path(__file__))
    return {word for text in (*texts, *files()) for word in re.findall(r"\w+", text)}


def exists(name: str) -> bool:
    return any(f"/{path}".endswith(f"/{name}") for path in files())


@pytest.mark.parametrize("document", [*DOCUMENTS, "benchmarks/results/README.md"])
def test_each_file_exists_that_a_document_names(document):
    """A name may be the end of a path, in text, in code and in drawings."""
    text = (ROOT / document).read_text()
    named = re.findall(r"(?<![\w/.*<-])(?:\.\./)*((?:\.?\w+/)*\w+\.(?:py|flags|toml|yml|cff))\b", text)
    assert [name for name in named if not exists(name)] == []


@pytest.mark.parametrize("document", BUILDERS)
def test_each_name_exists_that_a_page_of_builders_has_in_code(document):
    text = without_blocks((ROOT / document).read_text())
    named = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[A-Za-z_]\w+", code)}
    assert {word for word in named - words() if not word.startswith("_ptx")} - OTHERS == set()


def test_the_report_on_the_paper_has_the_dates_and_commits_of_its_results():
    text = " ".join((RESULTS / "README.md").read_text().split())
    for sentence, *folders in (
        ("Figures 1 and 2 are of {}.", "figure1", "figure2"),
        ("Figure 3 and the sweep over K are of {}.", "figure3", "k_sweep"),
        ("Figure 4 is of {}.", "figure4"),
    ):
        for folder in folders:
            [run] = json.loads((RESULTS / folder / "paper.json").read_text())["runs"]
            assert sentence.format(f"{run['date'][:10]}, commit {run['commit'][:7]}") in text


# --- A release -------------------------------------------------------------------------------------------


def test_install_names_every_extra():
    text = re.split(r"^## ", (ROOT / "docs/install.md").read_text().split("\n## Extras\n")[1], flags=re.M)[0]
    cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(PYPROJECT["optional-dependencies"])


def test_the_version_is_the_same_everywhere():
    assert f"\n## [{ps.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {ps.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pre_commit_runs_the_ruff_of_the_developers():
    [pinned] = re.findall(r"ruff==([\d.]+)", " ".join(PYPROJECT["optional-dependencies"]["dev"]))
    assert f"rev: v{pinned} " in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_workflows_run_the_same_ci_and_pythons():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: bash .ci/run\n" in workflow
    matrix = re.findall(r"^MATRIX=.*$", (ROOT / ".ci/run").read_text(), re.M)[0]
    pythons = set(re.findall(r'"(3\.\d+)', matrix))
    assert pythons == set(re.findall(r"^ +(3\.\d+)$", workflow, re.M))
    classifiers = " ".join(PYPROJECT["classifiers"])
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", classifiers))
