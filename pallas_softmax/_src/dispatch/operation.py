"""Values that describe a call and the implementations that may run it; they compute nothing."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
from jax.core import min_dim

KERNEL_DTYPES = ("float32", "bfloat16", "float16")  # the dtypes of the logits that kernels read


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation over `rows` rows of `vocab` elements: all that the choice of an implementation depends on.

    Attributes:
      op: the name of the operation, a key of `operations.TABLE`.
      dtype: the name of the logits' dtype.
      rows: the number of rows.
      vocab: the number of elements of a row; of a row that is spread over a mesh, of one device's shard.
      inner: how far apart neighbours in a row are in memory, in elements: 1 if the reduced axes are the last ones. None
        if the reduced axes are not side by side, so that no number says it.
      masked: whether there is a `where`.
      k: the number of winners, for top-k; None for other operations.
      objection: why no kernel can take the arrays, whatever it computes; None if one can.
      mesh_axes: names of the mesh axes of `jax.shard_map` that each row is spread over.
      depth: for a projection x @ w, the length D of the rows of x; None for other operations.
      function: the public function that the user called, for messages.
    """

    op: str
    dtype: str
    rows: int
    vocab: int
    inner: int | None = 1
    masked: bool = False
    k: int | None = None
    objection: str | None = None
    mesh_axes: tuple[str, ...] = ()
    depth: int | None = None
    function: str = dataclasses.field(kw_only=True)

    def of(self, op: str) -> "Call":
        """Returns the call of another operation on the same rows."""
        return dataclasses.replace(self, op=op)

    def __str__(self) -> str:
        k = "" if self.k is None else f", k={self.k}"
        over = f" over {', '.join(self.mesh_axes)}" if self.mesh_axes else ""
        logits = f"[{self.rows}, {self.vocab}]"
        if self.depth is not None:
            logits = f"[{self.rows}, {self.depth}] @ [{self.depth}, {self.vocab}]"
        return f"{self.op} {self.dtype}{logits}{k}{over}"


def describe(
    op: str,
    x: jax.Array,
    axes: tuple[int, ...],
    where: jax.Array | None,
    k: int | None = None,
    mesh_axes: tuple[str, ...] = (),
    *,
    function: str,
) -> Call:
    """Returns the `Call` of operation `op` on the rows of `x` along `axes`, for a user's call of `function`."""
    vocab = math.prod(x.shape[a] for a in axes)
    return Call(
        op=op,
        dtype=x.dtype.name,
        rows=math.prod(d for a, d in enumerate(x.shape) if a not in axes),
        vocab=vocab,
        inner=distance(x.shape, axes),
        masked=where is not None,
        k=None if k is None else min_dim(k, vocab),
        objection=symbolic(x.shape, k),
        mesh_axes=mesh_axes,
        function=function,
    )


def distance(shape: tuple[int, ...], axes: tuple[int, ...]) -> int | None:
    """Returns the number of elements from one of a row to the next; None if the sorted axes are not side by side."""
    if not axes:
        return 1
    return math.prod(shape[axes[-1] + 1 :]) if axes[-1] - axes[0] == len(axes) - 1 else None


def symbolic(shape: tuple, k: int | None = None) -> str | None:
    """Returns why a shape, or a number of winners, that is not known while tracing is refused; None if it is known."""
    if not all(isinstance(d, int) for d in shape):
        return f"the shape {shape} is symbolic"
    return None if k is None or isinstance(k, int) else f"k={k} is symbolic"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one call on CUDA devices and on all other ones, and why others were passed over.

    Attributes:
      call: what is to be run.
      cuda: the implementation on CUDA devices; None where the named one cannot run the call.
      elsewhere: the implementation on other platforms; None where the named one needs a GPU.
      reasons: (implementation, why it was passed over), in the order in which they were tried.
      requested: the implementation that the user named, or None.
    """

    call: Call
    cuda: str | None
    elsewhere: str | None
    reasons: tuple[tuple[str, str], ...] = ()
    requested: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why the call cannot be lowered for platforms other than CUDA; None if it can."""
        if self.elsewhere is not None:
            return None
        return f"{self.call.function}: implementation={self.cuda!r} cannot run {self.call}: it needs an NVIDIA GPU"

    def required_cuda(self) -> str:
        """Returns the implementation on CUDA devices.

        Raises:
          NotImplementedError: the named implementation cannot run the call; the message says why.
        """
        if self.cuda is None:
            ((name, reason),) = self.reasons
            raise NotImplementedError(
                f"{self.call.function}: implementation={name!r} cannot run {self.call}: {reason}"
            )
        return self.cuda

    def __str__(self) -> str:
        if self.cuda is None:
            where = "nothing"
        elif self.elsewhere is None:
            where = f"{self.cuda} on cuda only"
        elif self.cuda == self.elsewhere:
            where = self.cuda
        else:
            where = f"{self.cuda} on cuda, {self.elsewhere} elsewhere"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons)
        return f"{self.call}: {where}" + (f" ({reasons})" if reasons else "")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """What an implementation offers.

    Attributes:
      functions: for each operation that it has, the function; all implementations of one operation take the
        same arguments, described in `implementations/xla.py`, or, of a projection, in `implementations/projection.py`.
      unsupported: (call, compute capability) -> why it cannot run the call, or None if it can.
      slower: call -> why another implementation should be chosen for a call that this one can run, or None.
    """

    functions: Mapping[str, Callable]
    unsupported: Callable[[Call, tuple[int, int]], str | None]
    slower: Callable[[Call], str | None]
