"""All private names of JAX that the package uses. `tests/dispatch/test_jax_internals.py` fails if one of them moves."""

import contextlib

from jax._src import config


def stage_constants() -> contextlib.AbstractContextManager:
    """Returns a context in which JAX stages operations on constants, even in `jax.ensure_compile_time_eval`.

    There JAX would evaluate such operations while it traces. It cannot do so in a kernel, or in `jax.shard_map`.
    """
    # an eager call takes 20 µs longer if a setting of JAX changes, even to the same value
    return config.eager_constant_folding(False) if config.eager_constant_folding.value else contextlib.nullcontext()
