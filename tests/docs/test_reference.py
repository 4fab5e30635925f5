"""docs/reference.md and docstrings have each public name, with examples that print what they state."""

import doctest
import inspect
import pydoc
import re
import typing

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax import paper
from tests.docs.test_docs import ROOT, blocks
from tests.docs.test_numbers import load

REFERENCE = (ROOT / "docs" / "reference.md").read_text()
ENTRIES = re.split(r"^<!-- ::: pallas_softmax\.(\w+)\b", REFERENCE, flags=re.MULTILINE)


def functions(module):
    named = ((name, getattr(module, name)) for name in module.__all__)
    return {name: value for name, value in named if inspect.isfunction(value)}


FUNCTIONS = functions(ps)
DOCUMENTED = FUNCTIONS | {f"online.{name}": f for name, f in functions(ps.online).items()} | {"paper": paper}
ONLINE = re.findall(r"\w+", re.findall(r"members: \[(\w.*)\]", REFERENCE)[0])


def test_the_reference_has_each_public_name_once():
    assert sorted(ENTRIES[1::2]) == sorted([*ps.__all__, "paper"])
    assert sorted(ONLINE) == sorted(ps.online.__all__)


def test_the_reference_shows_an_example_of_each_function():
    texts = dict(zip(ENTRIES[1::2], ENTRIES[2::2]))
    assert [name for name in FUNCTIONS if f"ps.{name}(" not in "".join(blocks(texts[name], "python"))] == []


@pytest.mark.slow
def test_the_site_gets_every_entry():
    pytest.importorskip("mkdocs")
    site = load("site_hook").for_the_site(REFERENCE)
    assert re.findall(r"^::: pallas_softmax\.(\w+)$", site, re.MULTILINE) == ENTRIES[1::2]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_describes_the_parameters(name):
    text, parameters = inspect.getdoc(FUNCTIONS[name]), {*inspect.signature(FUNCTIONS[name]).parameters}
    arguments = text.split("Args:\n")[1].split("\nReturns:")[0]
    documented = {*re.findall(r"^  \**([\w, ]+): ", arguments, re.MULTILINE)}
    assert documented <= parameters  # one name per line, which the site requires
    assert parameters <= {*documented, *re.findall(r"`(\w+)`", text)}


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"online.{name}" for name in ONLINE)])
def test_help_shows_array_like_by_its_name(name):
    """In quotes, ArrayLike and DTypeLike stay one word; otherwise Python shows the long unions that they stand for."""
    value = FUNCTIONS.get(name) or getattr(ps.online, name.partition(".")[2])
    assert not re.search(r"numpy\.bool|SupportsDType", pydoc.render_doc(value))
    typing.get_type_hints(value)  # the words in quotes exist


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_example_prints_what_it_states(name, quick_compilation):
    text = inspect.getdoc(DOCUMENTED[name]) or ""
    names = {"jax": jax, "jnp": jnp, "ps": ps}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert "\nExamples:\n" in text and test.examples
    report: list[str] = []
    with jnp.printoptions(precision=3):
        doctest.DocTestRunner().run(test, out=report.append)
    assert not report, "".join(report)
