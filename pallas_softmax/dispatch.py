"""Which implementation runs a call, and why. The only place that knows the implementations."""

import contextvars
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_softmax import partition

# In order of preference on a CUDA device. Each is a module of this package with those of the functions of
# `xla` (`softmax`, `softmax_grad`, ...) that it has kernels for, and, but for `xla`, the reasons
# `unsupported(call, capability)` why a call cannot run and `slower(call)` why it should not unless named.
# What `xla` does better than any of them is in its own `preferred(call)`.
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")

# Compute capabilities by device kind, for lowering with an abstract device only.
_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A800": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "RTX 30": (8, 6),
    "L4": (8, 9),
    "RTX 40": (8, 9),
    "B200": (10, 0),
    "RTX 50": (12, 0),
}
_HOPPER = (9, 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """What the choice depends on: one operation over `rows` rows of `vocab` elements.

    Attributes:
      trailing: the reduced axes are the last ones, so that a row is contiguous.
      masked: there is a `where`.
      k: of top-k.
      objection: why no kernel can take the arrays, whatever it computes.
      names: the mesh axes of shard_map that the row is spread over; `vocab` is of a device's part.
    """

    op: str
    dtype: str
    rows: int
    vocab: int
    trailing: bool = True
    masked: bool = False
    k: int | None = None
    objection: str | None = None
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        k = "" if self.k is None else f", k={self.k}"
        over = f" over {', '.join(self.names)}" if self.names else ""
        return f"{self.op} {self.dtype}[{self.rows}, {self.vocab}]{k}{over}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one call on CUDA devices and elsewhere, and why others were passed over.

    None where a named implementation cannot run.
    """

    call: Call
    cuda: str | None
    elsewhere: str | None
    reasons: tuple[tuple[str, str], ...] = ()
    requested: str | None = None

    def plain(self, op: str) -> "Choice":
        """The choice for an operation that only `xla` has, on the same rows."""
        return Choice(dataclasses.replace(self.call, op=op), "xla", "xla", requested="xla")

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


_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


def choose(call: Call, implementation: str | None) -> Choice:
    """The choice for `call`: the named implementation or, if None, the first that supports the call.

    Raises:
      ValueError: the name is unknown.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    choice = _choose(call, implementation)
    if (record := _recorder.get()) is not None:
        record.append(choice)
    return choice


def _choose(call: Call, implementation: str | None) -> Choice:
    reasons = []
    cuda = None
    part = call  # what a device computes of its part of a row that is spread
    if call.names and call.op.endswith("_grad"):
        return Choice(call, "xla", "xla", requested=implementation)
    if call.names and call.op != "topk":
        part = dataclasses.replace(call, op="logsumexp")
    for name in IMPLEMENTATIONS if implementation is None else (implementation,):
        reason = _objection(name, part, automatic=implementation is None)
        if reason is None:
            cuda = name
            break
        reasons.append((name, reason))
    elsewhere = "xla" if implementation in (None, "xla") else None
    return Choice(call, cuda, elsewhere, tuple(reasons), requested=implementation)


def run(choice: Choice, *args: Any, axes: tuple[int, ...] | None = None, **static: Any) -> Any:
    """Calls the chosen implementation, decided by the platform that the computation is lowered for.

    Under vmap the batch becomes a leading dimension, and the choice is made anew for all its rows. Of arrays that
    are sharded each device takes its part, for which, too, the choice is made anew.

    Args:
      choice: what to call.
      *args: its arrays, of equal rank, the first of the full shape.
      axes: the reduced axes, where the operation has them as an argument.
      **static: its other arguments.

    Raises:
      NotImplementedError: a named implementation does not support the call.
    """
    _required(choice)

    @custom_vmap
    def call(*args):
        keywords = static if axes is None else {"axes": axes, **static}
        part = functools.partial(_part, choice, keywords)
        if choice.call.names:
            return part(*args, names=choice.call.names)
        whole = lambda *args: _run(choice, args, keywords)  # noqa: E731
        if choice.requested == "xla" and not choice.call.op.startswith("topk"):
            return whole(*args)  # which XLA divides as well
        return partition.divided(
            choice.call.op,
            _row_axes(args, keywords),
            args,
            shapes=functools.partial(differentiable(choice.call.op, ()), **keywords),
            whole=whole,
            part=part,
            none=functools.partial(placeholder, reason="mesh axes that a vmap has taken"),
            refusal=_refusal(choice) if choice.elsewhere is None else None,
        )

    @call.def_vmap
    def _(axis_size, in_batched, *args):
        leaves, tree = jax.tree.flatten(args)
        batched = jax.tree.leaves(in_batched)
        full = leaves[0].shape[batched[0] :]
        leaves = [a if b else a[None] for a, b in zip(leaves, batched)]
        leaves = [jnp.broadcast_to(a, (axis_size, *full)) if a.shape[1:] == full else a for a in leaves]
        objection = choice.call.objection or symbolic((axis_size,))
        batch = dataclasses.replace(choice.call, rows=choice.call.rows * axis_size, objection=objection)
        shifted = None if axes is None else tuple(a + 1 for a in axes)
        out = run(_choose(batch, choice.requested), *jax.tree.unflatten(tree, leaves), axes=shifted, **static)
        return out, jax.tree.map(lambda _: True, out)

    return call(*args)


def _row_axes(args: tuple, static: dict[str, Any]) -> tuple[int, ...]:
    return static.get("axes", (jax.tree.leaves(args)[0].ndim - 1,))


def _part(choice: Choice, static: dict[str, Any], *args: Any, names: tuple[str, ...]) -> Any:
    """The call on what a device has; the row is spread over the mesh axes `names`."""

    def local(op: str, *args: Any, **static: Any) -> Any:
        x, axes = jax.tree.leaves(args)[0], _row_axes(args, static)
        vocab = math.prod(x.shape[a] for a in axes)
        rows = x.size // vocab if vocab else 0
        sizes = {"rows": rows, "vocab": vocab, "dtype": x.dtype.name, "k": static.get("k")}
        call = dataclasses.replace(choice.call, op=op, masked=args[1] is not None, names=(), **sizes)
        requested = choice.requested
        if op == "merge":  # which only these two have
            requested = None if requested in (None, "mosaic_gpu") else "xla"
        return _run(_choose(call, requested), args, static)

    if not names:
        return local(choice.call.op, *args, **static)
    spread = importlib.import_module("pallas_softmax.spread")
    return getattr(spread, choice.call.op)(local, *args, names=names, **static)


def _required(choice: Choice) -> str:
    """The implementation on CUDA devices."""
    if choice.cuda is None:
        ((name, reason),) = choice.reasons
        raise NotImplementedError(f"implementation={name!r} cannot run {choice.call}: {reason}")
    return choice.cuda


def _run(choice: Choice, args: tuple, static: dict[str, Any]) -> Any:
    on_cuda = _required(choice)

    def function(name: str) -> Callable:
        module = importlib.import_module(f"pallas_softmax.{name}")
        return functools.partial(getattr(module, choice.call.op), **static)

    if on_cuda == choice.elsewhere:
        return function(on_cuda)(*args)
    elsewhere = functools.partial(_refuse, choice, static) if choice.elsewhere is None else function("xla")

    def varying(function: Callable) -> Callable:  # a kernel's outputs do not vary over shard_map's axes yet
        return lambda *args: jax.tree.map(lambda out: vary_together(out, *args)[0], function(*args))

    return lax.platform_dependent(*args, cuda=varying(function(on_cuda)), default=varying(elsewhere))


def differentiable(op: str, names: tuple[str, ...]) -> Callable:
    """The operation in plain JAX, for derivatives that no kernel has; the row is spread over the mesh axes."""
    if names:
        return functools.partial(
            getattr(importlib.import_module("pallas_softmax.spread"), op), None, names=names
        )
    return getattr(importlib.import_module("pallas_softmax.xla"), op)


def symbolic(shape: tuple) -> str | None:
    """The objection to a shape that is not known while tracing."""
    return None if all(isinstance(d, int) for d in shape) else f"the shape {shape} is symbolic"


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def vary_together(*arrays: Any, over: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> Any:
    """The arrays (or None), varying over every mesh axis of shard_map that one of them varies over, and `over`.

    Not over `but`, unless they do.
    """
    axes = frozenset(over).union(*map(_varying, jax.tree.leaves(arrays))) - frozenset(but)

    def vary(a):
        missing = tuple(axes - _varying(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(vary, arrays)


def varies(x: Any, names: tuple[str, ...]) -> bool:
    """Whether the types say that the array is not the same along these mesh axes."""
    return bool(_varying(x) & set(names))


def tracked(names: tuple[str, ...]) -> bool:
    """Whether types say what varies over these mesh axes (shard_map's check_vma).

    Where they do not, each device has a copy of what is the same on all, and a cotangent of its own for it.
    """
    return _varying(lax.axis_index(names)) >= set(names)


def summed(cotangents: Any, names: tuple[str, ...]) -> Any:
    """Of what is the same on all devices, the whole cotangents."""
    return cotangents if not names or tracked(names) else lax.psum(cotangents, names)


def shared(cotangent: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The other way: each device's share of the whole cotangent of what is the same on all."""
    return cotangent if not names or tracked(names) else cotangent / lax.axis_size(names)


def explain(function: Callable, *args: Any, **kwargs: Any) -> list[Choice]:
    """The implementations that `function(*args, **kwargs)` would run, in the order of the calls.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. Each choice prints as one line. Inside jax.vmap
    it is the choice for one slice; the batch chooses again, for all its rows.

    Of arrays sharded by mesh axes it is the choice for the whole; each device chooses again, for its part.

      >>> explain(softmax, jax.ShapeDtypeStruct((4, 50257), "float32"))  # doctest: +SKIP

    Args:
      function: a function of this package, or one of yours that calls them. A part of it that jax.jit has
        traced before with the same arguments is not traced again, so its calls are not listed.
      *args, **kwargs: as for the call itself.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def call(arrays):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    choices: list[Choice] = []
    token = _recorder.set(choices)
    try:
        jax.eval_shape(call, arrays)
    except NotImplementedError:
        if not choices or choices[-1].cuda is not None:
            raise
    finally:
        _recorder.reset(token)
    return choices


def _objection(name: str, call: Call, automatic: bool) -> str | None:
    """Why the implementation does not take the call, or is not the choice for it; None if it is."""
    if name == "xla":
        return None
    if call.objection is not None:
        return call.objection
    module = importlib.import_module(f"pallas_softmax.{name}")
    reason = module.unsupported(call, capability())
    if reason is None and automatic:
        reason = importlib.import_module("pallas_softmax.xla").preferred(call) or module.slower(call)
    return reason


def capability() -> tuple[int, int]:
    """Compute capability to lower for: the abstract device's if set, a visible GPU's, or else Hopper's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return next((c for kind, c in _CAPABILITIES.items() if kind in device.device_kind), _HOPPER)
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:  # no CUDA device: jax.export, or a test of the lowering
        return _HOPPER
    major, minor = capability.split(".")
    return int(major), int(minor)


# What a named GPU implementation is on other platforms: an operation that cannot be lowered, so that the
# error comes from the lowering and only there (the same trace may still be lowered for CUDA).
_refuse_p = Primitive("pallas_softmax_refuse")
_refuse_p.multiple_results = True


def _refuse(choice: Choice, static: dict, *args: Any) -> Any:
    """Outputs shaped like those of `xla`, from an operation that raises when lowered."""
    shapes = jax.eval_shape(functools.partial(differentiable(choice.call.op, ()), **static), *args)
    return placeholder(shapes, _refusal(choice))


def _refusal(choice: Choice) -> str:
    return f"implementation={choice.cuda!r} cannot run {choice.call}: it needs an NVIDIA GPU"


def placeholder(shapes: Any, reason: str) -> Any:
    """Outputs of these shapes, from an operation that raises when lowered."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, _refuse_p.bind(reason=reason, shapes=tuple(leaves)))


@_refuse_p.def_abstract_eval
def _(*, reason, shapes):
    return [ShapedArray(s.shape, s.dtype) for s in shapes]


def _refuse_lowering(ctx, *, reason, shapes):
    partition.refuse(ctx, reason)
    raise NotImplementedError(reason)


mlir.register_lowering(_refuse_p, _refuse_lowering)
