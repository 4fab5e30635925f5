"""All private names of JAX that the package uses. `tests/dispatch/test_jax_internals.py` fails if one of them moves."""

from contextlib import AbstractContextManager

from jax._src import config


def stage_constants() -> AbstractContextManager:
    """Returns a context in which JAX stages operations on constants, even in `jax.ensure_compile_time_eval`.

    There JAX would evaluate such operations while it traces. It cannot do so in a kernel, or in `jax.shard_map`.
    """
    return config.eager_constant_folding(False)
