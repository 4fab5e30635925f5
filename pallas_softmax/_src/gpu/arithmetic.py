"""Arithmetic in plain JAX that the kernels of softmax and of top-k share."""

import jax.numpy as jnp


def log_of_sum(d):
    """Returns log(d) of a sum d >= 1 of exponentials, accurate also where the GPU's fast logarithm is not, near 1.

    d is 1 plus what all logits but the largest add. Where they add little, the Taylor series of log(1 + u) keeps
    the digits of u = d - 1; up to |u| = 2^-6 its four terms are exact to float32.
    """
    u = d - 1
    return jnp.where(jnp.abs(u) < 2**-6, u * (1 - u * (1 / 2 - u * (1 / 3 - u / 4))), jnp.log(d))
