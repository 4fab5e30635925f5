"""The operations that implementations compute: one table of what the rest of the package must know of them.

An operation is a function of rows: `softmax` and its gradient are two. Which arguments it takes is said by
three words, one for each array:

    ROW      has an element for each element of a row, (..., V)
    MASK     is boolean and broadcasts to that, or is None
    PER_ROW  has one number, or a few, for each row, (..., 1) or (..., k)

The operations of a projection take x, w and bias in place of logits (`implementations/projection.py`): for these
no words are needed, since `sharding/projection.py` divides them.

To add an operation, add its row here, and a function of its name to `functions` in each implementation that
has it: in `implementations/xla.py` at least. If its rows may be spread over a mesh, `sharding/exchange.py`
says what devices send.
"""

import dataclasses
from typing import Any

import jax

ROW, MASK, PER_ROW = "row", "mask", "per row"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What the package must know of an operation.

    Attributes:
      arguments: ROW, MASK or PER_ROW for each positional argument, in a tuple where that is a tuple of arrays.
      results: the same for what it returns; one word for a tuple means each of its arrays.
      gradient: the operation that is its backward: cotangents of results to cotangents of arguments; or None.
      tangent: the transpose of that gradient: an operation from tangents of arguments to tangents of results; or None.
      on_shard: the operation that each device computes on its shard of a row that is spread over a mesh; None
        if the plain JAX form is computed there, with sums over the mesh.
      is_gradient: whether it is the backward of another operation on logits.
      gradient_has_kernels: whether an implementation that is named must have a kernel for the gradient, too; else plain
        JAX takes a gradient for which there is none.
      divided_by_xla: whether XLA by itself divides the plain JAX form over a mesh as well as `sharding` does.
    """

    arguments: tuple
    results: Any
    gradient: str | None = None
    tangent: str | None = None
    on_shard: str | None = None
    is_gradient: bool = False
    gradient_has_kernels: bool = False
    divided_by_xla: bool = True

    @property
    def row_arrays(self) -> int:
        """Number of arrays of the full shape that a kernel reads, the mask not counted."""
        return jax.tree.leaves(self.arguments).count(ROW)


TABLE = {
    "softmax": Operation(
        (ROW, MASK),
        ROW,
        gradient="softmax_grad",
        tangent="softmax_grad",
        on_shard="logsumexp",
        gradient_has_kernels=True,
    ),
    "softmax_grad": Operation(((ROW,), MASK, ROW), ROW, is_gradient=True),  # symmetric: the tangent, too
    "log_softmax": Operation(
        (ROW, MASK),
        ROW,
        gradient="log_softmax_grad",
        tangent="log_softmax_tangent",
        on_shard="logsumexp",
        gradient_has_kernels=True,
    ),
    "log_softmax_grad": Operation(((ROW,), MASK, ROW), ROW, is_gradient=True),
    "log_softmax_tangent": Operation(((ROW,), MASK, ROW), ROW),
    "logsumexp": Operation(
        (ROW, MASK), PER_ROW, gradient="logsumexp_grad", tangent="logsumexp_tangent", on_shard="logsumexp"
    ),
    "logsumexp_grad": Operation(((ROW, PER_ROW, PER_ROW), MASK, PER_ROW, PER_ROW), ROW, is_gradient=True),
    "logsumexp_tangent": Operation(((ROW, PER_ROW, PER_ROW), MASK, ROW), PER_ROW),
    "topk": Operation(
        (ROW, MASK, PER_ROW),
        PER_ROW,
        gradient="topk_grad",
        tangent="topk_tangent",
        on_shard="topk",
        divided_by_xla=False,
    ),
    "topk_grad": Operation(
        ((ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW), MASK, PER_ROW, PER_ROW),
        (ROW, PER_ROW),
        is_gradient=True,
        divided_by_xla=False,
    ),
    "topk_tangent": Operation(
        ((ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW), MASK, ROW, PER_ROW), PER_ROW, divided_by_xla=False
    ),
    "projection": Operation((), (), on_shard="projection"),
    "projection_grad": Operation((), (), on_shard="projection_grad"),
    "projection_with_grad": Operation((), (), on_shard="projection_with_grad"),
    "sample": Operation(  # u, temperature, top_k, top_p and min_p; and indices, log_probs and log_mass
        (ROW, MASK, PER_ROW, PER_ROW, PER_ROW, PER_ROW, PER_ROW),
        PER_ROW,
        gradient="sample_grad",
        tangent="sample_tangent",
        divided_by_xla=False,
    ),
    "sample_grad": Operation(  # logits, temperature, index and log-probability
        ((ROW, PER_ROW, PER_ROW, PER_ROW), MASK, PER_ROW),
        (ROW, PER_ROW),
        is_gradient=True,
        divided_by_xla=False,
    ),
    "sample_tangent": Operation(
        ((ROW, PER_ROW, PER_ROW, PER_ROW), MASK, ROW, PER_ROW), PER_ROW, divided_by_xla=False
    ),
    "merge": Operation((ROW, MASK, ROW, PER_ROW, PER_ROW), PER_ROW),  # of the winners of several devices
}
