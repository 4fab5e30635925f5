"""Comparisons of trees of results."""

import jax
import jax.numpy as jnp
import numpy as np


def floats_of(results):
    return [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]


def types_of(results):
    return [(a.dtype, a.shape) for a in jax.tree.leaves(results)]


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_near(got, want, rtol=1e-5, atol=2e-6):
    """Asserts that two trees have equal integers, and numbers that differ by a few roundings."""

    def compare(a, b):
        exact = not jnp.issubdtype(b.dtype, jnp.inexact)
        np.testing.assert_allclose(np.asarray(a, b.dtype), b, 0 if exact else rtol, 0 if exact else atol)

    jax.tree.map(compare, got, want)
