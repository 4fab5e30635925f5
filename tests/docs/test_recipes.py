"""Each recipe is a complete program, which prints what its comments say."""

import re
import subprocess
import sys

import pytest

from tests.docs.test_docs import ROOT, blocks

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
TITLES = re.findall(r"^## (.*)$", RECIPES, re.MULTILINE)


def test_every_recipe_has_one_program():
    sections = re.split(r"^## ", RECIPES, flags=re.MULTILINE)[1:]
    assert [len(blocks(section, "python")) for section in sections] == [1] * len(TITLES)


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_a_recipe_runs_by_itself(title, tmp_path):
    program = blocks(RECIPES, "python")[TITLES.index(title)]
    file = tmp_path / "recipe.py"
    file.write_text(program)
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^# -> (.*)$", program, re.MULTILINE)
