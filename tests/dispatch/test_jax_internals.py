"""The private names of JAX that the package uses: each does what its wrapper promises, in every supported version."""

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_softmax._src.jax_internals import stage_constants


def test_stage_constants():
    def is_staged():
        found = []
        jax.make_jaxpr(lambda: found.append(isinstance(jnp.ones(()) + 1, Tracer)))()
        return found == [True]

    with jax.ensure_compile_time_eval():
        assert not is_staged()
        with stage_constants():
            assert is_staged()
        assert not is_staged()
