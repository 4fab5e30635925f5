"""The hook of the site says where lines may break."""

import sys

import pytest

from tests.docs.test_docs import ROOT
from tests.docs.test_numbers import load

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hook():
    sys.path.insert(0, str(ROOT / "docs"))  # the hook imports its neighbour; mkdocs adds the folder
    yield load("site_hook")
    sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (
            "<table><td><code>jax.nn.log_softmax(x, -jnp.inf)</code></td></table>",
            "<table><td><code>jax.nn.<wbr>log_<wbr>softmax(x, "
            '<span class="flag">-jnp.inf)</span></code></td></table>',
        ),
        ("<table><td><code>top_k</code></td></table>", "<table><td><code>top_k</code></td></table>"),
        (
            "<table><td><code>LigerLoss</code></td></table>",
            "<table><td><code>Liger<wbr>Loss</code></td></table>",
        ),
        (
            "<p><code>python -m x_y --a=1</code></p>",
            '<p><code>python <span class="flag">-m</span> x_y <span class="flag">--a=1</span></code></p>',
        ),
        (
            "<p>only -inf, or -1 (-2): 1-2, bfloat16-like</p>",
            "<p>only -\u2060inf, or -\u20601 (-\u20602): 1-2, bfloat16-like</p>",
        ),
        (
            "<pre><code>a -1 --b</code></pre><code>-1</code>",
            "<pre><code>a -1 --b</code></pre><code>-1</code>",
        ),
    ],
)
def test_where_lines_may_break(hook, page, expected):
    assert hook.on_post_page(page, None, None) == expected
