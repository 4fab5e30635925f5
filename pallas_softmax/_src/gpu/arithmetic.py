"""Arithmetic in plain JAX that the softmax and top-k kernels share."""

import jax.numpy as jnp


def log_of_sum(d):
    """Returns log(d) of a sum d >= 1 of exponentials. It is accurate near 1, unlike the GPU's fast logarithm.

    d is 1 plus the terms of all logits except the largest. If these terms are small, the Taylor series of log(1 + u)
    keeps the digits of u = d - 1. Up to |u| = 2^-6 its four terms are exact to float32.
    """
    u = d - 1
    return jnp.where(jnp.abs(u) < 2**-6, u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4))), jnp.log(d))
