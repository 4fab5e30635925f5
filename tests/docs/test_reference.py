"""docs/reference.md has the signatures of the code, and the site's form of it loses nothing."""

import ast
import inspect
import pydoc
import re
import typing

import pytest

import pallas_softmax as ps
from tests.docs.test_docs import blocks
from tests.docs.test_numbers import load

signatures = load("reference_signatures")
REFERENCE = signatures.REFERENCE.read_text()
SIGNATURES = "".join(blocks(REFERENCE, "py"))
FUNCTIONS = {name: getattr(ps, name) for name in ps.__all__ if inspect.isfunction(getattr(ps, name))}
FUNCTIONS |= {
    name: f for name, f in vars(ps.online).items() if inspect.isfunction(f) and f"\n{name}(" in SIGNATURES
}


def test_the_reference_is_current():
    assert REFERENCE == signatures.written(REFERENCE), "run python docs/reference_signatures.py"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_is_that_of_the_function(name):
    """The names, the kinds and the defaults agree."""
    (text,) = re.findall(rf"^{name}(\((?:.*|\n(?:    .*\n)*)\).*)$", SIGNATURES, re.MULTILINE)
    (node,) = ast.parse(f"def {name}{text}: ...").body
    expected = inspect.signature(FUNCTIONS[name]).parameters
    kinds = inspect.Parameter
    positional = node.args.posonlyargs + node.args.args
    assert [a.arg for a in positional] == [
        p.name for p in expected.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    assert [a.arg for a in node.args.kwonlyargs] == [
        p.name for p in expected.values() if p.kind is kinds.KEYWORD_ONLY
    ]
    given = dict(zip([a.arg for a in positional][::-1], node.args.defaults[::-1]))
    given |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if d is not None}
    assert given.keys() == {p.name for p in expected.values() if p.default is not p.empty}
    for parameter, default in given.items():
        if not isinstance(default, ast.Name | ast.Attribute):  # of a type, such as Normalizer
            assert eval(ast.unparse(default)) == expected[parameter].default


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_array_like_by_its_name(name):
    """In quotes, ArrayLike and DTypeLike stay one word; otherwise Python shows the long unions that they stand for."""
    assert not re.search(r"numpy\.bool|SupportsDType", pydoc.render_doc(FUNCTIONS[name]))
    typing.get_type_hints(FUNCTIONS[name])  # the words in quotes exist


def test_the_site_gets_every_entry_and_example():
    site = signatures.for_the_site(REFERENCE)
    assert blocks(site, "python") == blocks(REFERENCE, "python") and "```py\n" not in site
    assert all(
        f"/{name}/api.py)" in site for name in ("softmax", "topk", "route", "sample", "stats", "linear")
    )
    listed = re.findall(r"^::: pallas_softmax\.(\w+)$", site, re.MULTILINE)
    assert sorted(listed) == sorted([*ps.__all__, "paper"])


def test_a_new_entry_gets_its_signature():
    text = "# R\n\n## Softmax\n\nWords.\n\n::: pallas_softmax.softmax\n\n**Example.** Words.\n\n*More.*\n"
    once = signatures.written(text)
    assert (
        "### `softmax`\n\n<!-- ::: pallas_softmax.softmax\n-->\n\n```py\nsoftmax(\n    x: ArrayLike,\n"
        in once
    )
    assert once.endswith("**Example.** Words.\n\n*More.*\n") and signatures.written(once) == once
