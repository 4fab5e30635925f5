"""Implementation `mosaic_gpu` of a projection and its softmax: which calls it takes, and arrays of any size."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_softmax._src.dispatch.operation import Call, Kernel, Refusal
from pallas_softmax._src.gpu import checks
from pallas_softmax._src.linear.chunk_kernels import FUNCTIONS
from pallas_softmax._src.linear.gradients import operations_of
from pallas_softmax._src.linear.losses import Head, Tokens
from pallas_softmax._src.linear.plan import ATOM_COLUMNS, ATOM_ROWS, FEWEST_COLUMNS, TILE_N, rounded_up

HOPPER = 9  # major compute capability of the GPUs that have wgmma


def plan(call: Call, capability: tuple[int, int]) -> None | Refusal:
    """Returns why the kernels cannot run the call, or None: each chunk of rows gets a plan of its own."""
    if (reason := checks.unsupported(call, capability)) is not None:
        return Refusal(reason)
    if capability[0] != HOPPER:
        return Refusal(
            f"the matrix product needs compute capability 9.0, not {capability[0]}.{capability[1]}"
        )
    if jnp.dtype(call.dtype).itemsize != 2:
        return Refusal(f"no matrix product for {call.dtype}, only bfloat16 and float16")
    if 0 in (call.rows, call.vocab, call.depth):
        return Refusal("an array is empty")
    # Most of a tile would be idle.
    if call.vocab < TILE_N:
        return Refusal(f"V={call.vocab} is less than the {TILE_N} columns of a tile")
    return None


def _on_whole_atoms(
    operation: Callable, name: str, x, w, bias, tokens: Tokens, *per_token, head: Head, **static
):
    """Runs an operation on arrays of whole swizzle atoms; other arrays are padded first.

    Padding copies w if D or V is not a multiple of 64. Few vocabularies need that; 50,257 is one. The new rows have
    weight 0, and the numbers of the last row: a temperature is then in range.
    """
    (n, depth), vocab = x.shape, head.vocab(w)
    rows = rounded_up(n, ATOM_ROWS)
    deep, wide = rounded_up(depth, ATOM_COLUMNS), rounded_up(vocab, ATOM_COLUMNS)
    wide = max(wide, FEWEST_COLUMNS)
    teacher_depth = 0 if head.teacher is None else tokens.teacher_x.shape[1]
    teacher_deep = rounded_up(teacher_depth, ATOM_COLUMNS)
    if (rows, deep, wide, teacher_deep) == (n, depth, vocab, teacher_depth):
        return operation(x, w, bias, tokens, *per_token, head=head, **static)

    def extended(a, *shape: int, mode: str = "constant"):
        sizes = zip(shape, a.shape)
        return jnp.pad(a, [(0, to - size) for to, size in sizes] + [(0, 0)] * (a.ndim - len(shape)), mode)

    def whole_w(w, deep: int):
        return extended(w, *((wide, deep) if head.transpose_w else (deep, wide)))

    w = whole_w(w, deep)
    tokens = jax.tree.map(lambda a: extended(a, rows, mode="edge"), tokens)
    per_token = jax.tree.map(lambda a: extended(a, rows), per_token)
    if head.teacher is not None:
        tokens = tokens._replace(teacher_x=extended(tokens.teacher_x, rows, teacher_deep))
        biases = jax.tree.map(lambda a: extended(a, wide), bias._replace(teacher_w=None))
        bias = biases._replace(teacher_w=whole_w(bias.teacher_w, teacher_deep))
        head = dataclasses.replace(head, teacher=dataclasses.replace(head.teacher, columns=vocab))
    elif bias is not None:
        bias = extended(bias, wide)
    head = dataclasses.replace(head, columns=vocab)
    results = operation(extended(x, rows, deep), w, bias, tokens, *per_token, head=head, **static)
    if name in ("projection", "projection_sample"):
        return jax.tree.map(lambda a: a[:n], results)
    *statistics, dx, dw, dbias = results
    dw = dw[:vocab, :depth] if head.transpose_w else dw[:depth, :vocab]
    dbias = None if dbias is None else dbias[:vocab]
    return *jax.tree.map(lambda a: a[:n], statistics), dx[:n, :depth], dw, dbias


def _kernel(function: Callable) -> Kernel:
    return Kernel(plan, lambda plan, *arrays, **static: function(*arrays, **static))


OPERATIONS: dict[str, Callable] = {
    name: functools.partial(_on_whole_atoms, operation, name)
    for name, operation in operations_of(FUNCTIONS).items()
}
KERNELS = {name: _kernel(function) for name, function in OPERATIONS.items()}
