"""The files of a release agree with each other."""

import re
import tomllib

import pallas_softmax as ps
from tests.docs.test_docs import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere():
    assert f"\n## [{ps.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {ps.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pre_commit_runs_the_ruff_of_the_developers():
    [pinned] = re.findall(r"ruff==([\d.]+)", " ".join(PYPROJECT["optional-dependencies"]["dev"]))
    assert f"rev: v{pinned} " in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_workflows_run_the_same_ci_and_pythons():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: bash .ci/run\n" in workflow
    pythons = set(
        re.findall(r'"(3\.\d+)', re.findall(r"^MATRIX=.*$", (ROOT / ".ci/run").read_text(), re.M)[0])
    )
    assert pythons == set(re.findall(r"^ +(3\.\d+)$", workflow, re.M))
    classifiers = " ".join(PYPROJECT["classifiers"])
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", classifiers))
