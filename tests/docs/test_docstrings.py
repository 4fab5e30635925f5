"""Each public function has an example in its docstring, and the examples print what they state."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax import paper


def functions(module):
    """Returns the public functions of a module by name."""
    named = ((name, getattr(module, name)) for name in module.__all__)
    return {f"{module.__name__}.{name}": value for name, value in named if inspect.isfunction(value)}


DOCUMENTED = functions(ps) | functions(ps.online) | {paper.__name__: paper}


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
