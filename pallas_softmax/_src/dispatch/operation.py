"""The vocabulary of the dispatch: an operation, its kernels, a call of it, and the choice of an implementation.

An operation is a function of rows: softmax is one, its gradient is another. Three words say what its arrays are:

    ROW      one element per element of a row, (..., V)
    MASK     a boolean that broadcasts to that, or None
    PER_ROW  one number, or a few, per row: (..., 1) or (..., k)
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import min_dim

ROW, MASK, PER_ROW = "row", "mask", "per row"
KERNEL_DTYPES = ("float32", "bfloat16", "float16")  # the dtypes of the logits that kernels read


class Refusal(NamedTuple):
    """A planner's answer for a call that its kernel cannot run."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation of one operation, other than plain JAX."""

    plan: Callable[["Call", tuple[int, int]], Any]  # (call, compute capability) -> a plan or a `Refusal`
    run: Callable[..., Any]  # (plan, *arrays, **static) -> the results, as of the plain function
    # call -> why another implementation is faster at a call that this one can run, or None
    slower: Callable[["Call"], str | None] = lambda call: None


OPERATIONS: dict[str, "Operation"] = {}
"""All operations by name, for the texts of sharded calls. If two have one name, the second has no text."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation with implementations."""

    name: str  # in profiles and texts, and the key of its kernels; ends in "_grad" if it returns gradients
    plain: Callable[..., Any]  # in plain JAX: the reference for arguments and results
    # Imports the kernels of the operation's folder. It returns them by implementation, then by name of the operation.
    import_kernels: Callable[[], Mapping[str, Mapping[str, Kernel]]] = dict
    kernel_dtypes: tuple[str, ...] = KERNEL_DTYPES  # of x, that some kernel takes

    def __post_init__(self) -> None:
        OPERATIONS.setdefault(self.name, self)

    @property
    def is_gradient(self) -> bool:
        return self.name.endswith("_grad")

    @property
    def kernels(self) -> dict[str, Kernel]:
        """The kernels of this operation, by implementation."""
        of_folder = self.import_kernels().items()
        return {implementation: kernels[self.name] for implementation, kernels in of_folder if self.name in kernels}

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RowOperation(Operation):
    """An operation on rows: all that the package must know of it. Fields name the positional parameters of `plain`."""

    # ROW, MASK or PER_ROW for each argument and result. One word for a tuple means each of its arrays.
    arguments: tuple[Any, ...]
    results: Any = PER_ROW

    # Derivatives, by the names of arguments and results
    result_names: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # the arguments that the results have derivatives in
    differentiable: tuple[str, ...] = ()  # the results that have derivatives; the others are constants
    # The leading arguments of the derivatives, a tree of names. saved[0] is a tuple: an array of the shape of the
    # logits, then the temperature, if there is one.
    saved: tuple[Any, ...] = ()
    # (*saved, *cotangents of the differentiable results) -> cotangents of the variables. It gets those static
    # arguments of this operation that it accepts.
    plain_gradient: Callable[..., Any] | None = None
    plain_tangent: Callable[..., Any] | None = None  # its transpose
    gradient_needs_kernel: bool = False  # whether a named implementation must have a kernel for the gradient

    # Meshes and vmaps
    # (run_shard, *arrays, **static, mesh_axes=) -> the results, on each device, where a row is spread over devices.
    # run_shard(operation, arrays, static) runs the best kernel on a shard; None stands for the shard step. Without
    # `on_mesh`, each device runs plain(..., mesh_axes=).
    on_mesh: Callable[..., Any] | None = None
    shard_step: "RowOperation | None" = None  # what `on_mesh` runs on each shard, if not this operation
    whole_rows: bool = False  # whether rows that a mesh divides are gathered first
    divided_by_xla: bool = False  # whether XLA divides the plain form over a mesh equally well
    elementwise_derivatives: bool = False  # the same for the derivatives, even if not `divided_by_xla`
    # Whether the plain form must also see a vmap as more rows. JAX's own vmap would run both branches of conditions.
    vmap_adds_rows: bool = False

    # The operations of `plain_gradient` and `plain_tangent`
    gradient: "RowOperation | None" = dataclasses.field(init=False, default=None)
    tangent: "RowOperation | None" = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plain_gradient is None or self.plain_tangent is None:
            return
        kind_of = dict.fromkeys(self.result_names, self.results) | dict(zip(self.argument_names, self.arguments))
        saved, inputs, outputs = (
            jax.tree.map(kind_of.get, names) for names in (self.saved, self.variables, self.differentiable)
        )
        derivative = functools.partial(
            RowOperation,
            import_kernels=self.import_kernels,
            divided_by_xla=self.divided_by_xla or self.elementwise_derivatives,
            whole_rows=self.whole_rows,
        )
        gradient = tangent = derivative(
            name=f"{self.name}_grad",
            plain=self.plain_gradient,
            arguments=(*saved, *outputs),
            results=inputs if len(inputs) > 1 else inputs[0],
        )
        if self.plain_tangent is not self.plain_gradient:
            tangent = derivative(
                name=f"{self.name}_tangent", plain=self.plain_tangent, arguments=(*saved, *inputs), results=self.results
            )
        object.__setattr__(self, "gradient", gradient)
        object.__setattr__(self, "tangent", tangent)

    @functools.cached_property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.plain).parameters)[: len(self.arguments)]


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation over `rows` rows of `vocab` elements: all that the choice of an implementation depends on."""

    operation: Operation
    dtype: str  # of the logits
    rows: int
    vocab: int  # the length of a row, or of one device's shard of a row that is spread over a mesh
    inner: int | None = 1  # the distance in memory between neighbours of a row, in elements, if there is a single one
    masked: bool = False  # whether there is a `where` or, for a router, a bias: the second array of the call
    k: int | None = None  # the number of winners
    groups: int = 1  # for a router, the number of groups of experts
    group_best: int = 1  # for a router, how many entries of a group rank it
    sorted: bool = True  # whether the winners must be in order
    lengths: bool = False  # whether each row has a length of its own
    objection: str | None = None  # a reason that rules out every kernel, such as a symbolic shape
    mesh_axes: tuple[str, ...] = ()  # of `jax.shard_map`, that each row is spread over
    depth: int | None = None  # for a projection x @ w, the length D of the rows of x
    function: str = dataclasses.field(kw_only=True)  # the public function that the user called, for messages

    @property
    def op(self) -> str:
        return self.operation.name

    @property
    def row_operation(self) -> RowOperation:
        assert isinstance(self.operation, RowOperation)
        return self.operation

    def of(self, operation: Operation) -> "Call":
        return dataclasses.replace(self, operation=operation)

    def __repr__(self) -> str:
        k = "" if self.k is None else f", k={self.k}"
        over = f" over {', '.join(self.mesh_axes)}" if self.mesh_axes else ""
        logits = f"[{self.rows}, {self.vocab}]"
        if self.depth is not None:
            logits = f"[{self.rows}, {self.depth}] @ [{self.depth}, {self.vocab}]"
        gradient = "gradient of " if self.operation.is_gradient else ""
        return f"{gradient}{self.function} {self.dtype}{logits}{k}{over}"


def describe(
    operation: Operation,
    x: jax.Array,
    axes: tuple[int, ...],
    where: jax.Array | None,
    mesh_axes: tuple[str, ...] = (),
    k: int | None = None,
    *,
    function: str,
) -> Call:
    sizes = sizes_of(x, axes)
    return Call(
        operation=operation,
        **sizes,
        masked=where is not None,
        k=None if k is None else min_dim(k, sizes["vocab"]),
        objection=symbolic(x.shape, k),
        mesh_axes=mesh_axes,
        function=function,
    )


def sizes_of(x: jax.Array, axes: tuple[int, ...]) -> dict[str, Any]:
    """Returns the fields of a `Call` that the logits and the reduced axes, in ascending order, decide."""
    return {
        "dtype": x.dtype.name,
        "rows": math.prod(n for a, n in enumerate(x.shape) if a not in axes),
        "vocab": math.prod(x.shape[a] for a in axes),
        "inner": _distance(x.shape, axes),
    }


def _distance(shape: tuple[int, ...], axes: tuple[int, ...]) -> int | None:
    """Returns `Call.inner`: 1 if the axes are the last ones, and None if they are not adjacent."""
    if not axes:
        return 1
    return math.prod(shape[axes[-1] + 1 :]) if axes[-1] - axes[0] == len(axes) - 1 else None


def symbolic(shape: tuple, k: int | None = None) -> str | None:
    """Returns why kernels refuse a shape or a number of winners that is unknown while tracing, or None."""
    if not all(isinstance(d, int) for d in shape):
        return f"the shape {shape} is symbolic"
    return None if k is None or isinstance(k, int) else f"k={k} is symbolic"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one call on CUDA devices and elsewhere, and why others were passed over.

    Attributes:
      call: the call.
      cuda: the implementation on CUDA devices; None where the named one cannot run the call.
      elsewhere: the implementation on other platforms; None where the named one needs a GPU.
      reasons: (implementation, why it was passed over), in the order of the attempts.
      requested: the implementation that the user named, or None.
      plan: the plan of the kernel on CUDA devices. None for plain JAX, and for a kernel with a single plan.
    """

    call: Call
    cuda: str | None
    elsewhere: str | None
    reasons: tuple[tuple[str, str], ...] = ()
    requested: str | None = None
    plan: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def refusal(self) -> str | None:
        """Why the call cannot be lowered for platforms other than CUDA; None if it can."""
        if self.elsewhere is not None:
            return None
        return f"{self.call.function}: implementation={self.cuda!r} cannot run {self.call}: it needs an NVIDIA GPU"

    def required_cuda(self) -> str:
        """Returns the implementation on CUDA devices. Raises if the named one cannot run the call."""
        if self.cuda is None:
            ((name, reason),) = self.reasons
            raise NotImplementedError(f"{self.call.function}: implementation={name!r} cannot run {self.call}: {reason}")
        return self.cuda

    def __repr__(self) -> str:
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
