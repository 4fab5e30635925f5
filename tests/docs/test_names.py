"""The documents name only files, functions and results that exist."""

import functools
import json
import re
from pathlib import Path

import pytest

from tests.docs.test_docs import DOCUMENTS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
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
    """Returns the paths of the repository's files."""
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
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[A-Za-z_]\w+", code)}
    assert {word for word in named - words() if not word.startswith("_ptx")} - OTHERS == set()


def test_the_report_on_the_paper_has_the_dates_and_commits_of_its_results():
    def run(folder: str) -> str:
        [run] = json.loads((RESULTS / folder / "paper.json").read_text())["runs"]
        return f"{run['date'][:10]}, commit {run['commit'][:7]}"

    text = " ".join((RESULTS / "README.md").read_text().split())
    assert f"Figures 1 and 2 are of {run('figure1')}." in text and run("figure1") == run("figure2")
    assert f"Figure 3 and the sweep over K are of {run('figure3')}." in text and run("figure3") == run(
        "k_sweep"
    )
    assert f"Figure 4 is of {run('figure4')}." in text
