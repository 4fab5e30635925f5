"""Fixtures of the tests of dispatch."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _whole_tracebacks():
    """A call that fails spends most of its time in the shortening of its traceback."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)
