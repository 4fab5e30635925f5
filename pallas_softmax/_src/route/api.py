"""route: what it promises, and how its gradient is wired."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_softmax._src import arguments
from pallas_softmax._src.dispatch.choose import ImplementationName
from pallas_softmax._src.dispatch.derivatives import choose_all, evaluate
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.mesh_types import reshard_along, vary_together
from pallas_softmax._src.dispatch.operation import describe
from pallas_softmax._src.dispatch.refusal import constant
from pallas_softmax._src.normalizers import float_dtype
from pallas_softmax._src.route.formulas import SCORES, Gate, Groups, Score
from pallas_softmax._src.route.operation import ROUTE


class Routing(NamedTuple):
    """The experts of each token, best first.

    Attributes:
      weights: (..., k) float32, the weights of the experts; float64 for float64 logits.
      indices: (..., k) int32, the experts.
      logsumexp: (...) of the dtype of the weights, the logsumexp of all logits of the token.
    """

    weights: jax.Array
    indices: jax.Array
    logsumexp: jax.Array


# A scale that is an array is not hashable, so `at_once` leaves such a call to its caller's program.
@at_once(
    *("k", "score", "groups", "top_groups", "group_best", "renormalize", "scale", "implementation"),
    known=arguments.known_numbers,
)
def route(
    logits: "ArrayLike",
    k: int | np.integer,
    *,
    score: Score = "softmax",
    bias: "ArrayLike | None" = None,
    groups: int = 1,
    top_groups: int | None = None,
    group_best: int | None = None,
    renormalize: bool = False,
    scale: "ArrayLike | None" = 1.0,
    implementation: ImplementationName | None = None,
) -> Routing:
    """Returns the k experts of each token, their weights, and the logsumexp of the logits, in one read of the logits.

    It is the gate of a mixture of experts. The recipes show the gates of Mixtral, DeepSeek-V3, Qwen3-MoE and GPT-OSS.
    Sources: Shazeer et al., arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, equations 13 to 16.

    Args:
      logits: real array (..., E): one row of E experts for each token. `route` needs whole rows: if a mesh
        divides the experts, it gathers the logits.
      k: static int, the number of experts of a token, 0 <= k <= E.
      score: "softmax", "sigmoid" or "sqrtsoftplus", the square root of log(1 + exp(x)): how logits become scores.
      bias: None, or a real array (E,). Experts are chosen by score + bias, and weighted by the score alone.
      groups: static int that divides E. The experts are divided into that many groups of neighbours.
      top_groups: static int from 1 to `groups`, needed with more than one group. Only experts of the best `top_groups`
        groups are chosen.
      group_best: static int from 1 to the size of a group. A group is ranked by the sum of so many of its best entries
        of score + bias: 2 for DeepSeek-V3, 1 for DeepSeek-V2. None is 2, or 1 in groups of one expert.
      renormalize: whether to divide the weights of a token by their sum. If all chosen scores are tiny, the weights are
        still right. If all chosen logits are -inf, the weights are NaN. With k = 1 the weight is always `scale`, so the
        logits get no gradient from it.
      scale: real number that multiplies the weights, after `renormalize`; None for 1. A Python or NumPy number is
        static. A JAX scalar may be traced; it has no gradient.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      Routing(weights, indices, logsumexp), best expert first.
      Without bias and groups, the indices equal the indices of `lax.top_k(logits, k)` exactly. Otherwise they are the k
      largest score + bias, computed in float32 (float64 for float64 logits). Two experts may then be exchanged if their
      exact numbers differ by less than 2^-20 max(1, score, |bias|), and so may two groups. Equal entries, and groups,
      are ordered by the lowest index first. A NaN counts as the largest number.
      With "softmax", a row with NaN or +inf has NaN weights. With any score, it has NaN gradients. Integer logits
      give float32 results (float64 for 64 bits). `weights` and `logsumexp` are differentiable in `logits`, in both
      modes and to any order. The choice and the bias have no derivative.

    Raises:
      TypeError: `logits` or `bias` is not a real array; `k`, `groups`, `top_groups` or `group_best` is not a
        static int; `renormalize` is not a bool; or `scale` is not a real number.
      ValueError: `k` is out of range, or more than the experts of `top_groups` groups; `groups` does not divide E;
        `top_groups` is not from 1 to `groups`; `group_best` is not from 1 to the size of a group; `bias` has another
        shape; `scale` is no scalar, or a static one that is not finite in float32 (float64 for float64
        logits); or `score` or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call (the message says why), or a gradient in
        `scale` is wanted.

    Examples:
      >>> routing = ps.route(jnp.array([0.0, 1.0, 2.0]), 2, renormalize=True)
      >>> routing.weights, routing.indices
      (Array([0.731, 0.269], dtype=float32), Array([2, 1], dtype=int32))
    """
    name = "route"
    x, axis = arguments.real_rows(name, "logits", logits, -1)
    floating = float_dtype(x.dtype)
    number, factor = _scale(name, scale, floating)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4:  # floats hold them
        x = x.astype(floating)
    x = reshard_along(x, -1, None)
    experts = x.shape[axis]
    if not isinstance(score, str) or score not in SCORES:
        raise ValueError(f"{name}: score must be one of {SCORES}, got {score!r}")
    gate = Gate(score, arguments.static_bool(name, "renormalize", renormalize), number)  # pyright: ignore[reportArgumentType]
    chosen = _groups(name, groups, top_groups, group_best, experts)
    k, most = arguments.winners(name, k, experts), chosen.top * (experts // chosen.count)
    if chosen.count > 1 and not k <= most:
        raise ValueError(
            f"{name}: k must be at most the {most} experts of top_groups={top_groups} of {groups} groups, got {k}"
        )
    wide = jnp.dtype(floating if jnp.finfo(floating).bits >= 32 else jnp.float32)
    added: Any = bias
    if bias is None and chosen.count > 1:  # the kernels of groups need a bias
        added = jnp.zeros((experts,), wide)
    if added is not None:
        added = arguments.real_array(name, "bias", added).astype(wide)
        if added.shape != (experts,):
            raise ValueError(f"{name}: bias must have the shape ({experts},) of the experts, got {added.shape}")
        added = added.reshape((1,) * (x.ndim - 1) + (experts,))
    x, added = vary_together(x, added)

    call = describe(ROUTE, x, (axis,), added, k=k, function=name)
    call = dataclasses.replace(call, groups=chosen.count, group_best=chosen.best)
    choice = choose_all(call, implementation, k=k, groups=chosen, gate=gate)
    weights, indices, logsumexp = evaluate(choice, x, added)
    if factor is not None:
        weights = weights * factor.astype(weights.dtype)
    return Routing(weights, indices, jnp.squeeze(logsumexp, -1))


def _groups(name: str, groups, top_groups, group_best, experts: int) -> Groups:
    """Returns the checked groups; one group if all take part."""

    def bounded(argument: str, value, most: int, wanted: str) -> int:
        number = 0 if value is None else arguments.static_int(name, argument, value)
        if not 1 <= number <= most:
            raise ValueError(f"{name}: {argument} must be from 1 to {wanted}, got {value}")
        return number

    groups = arguments.static_int(name, "groups", groups)
    if groups < 1 or experts % groups:
        raise ValueError(f"{name}: groups must be at least 1 and divide the {experts} experts, got {groups}")
    size = experts // groups
    best = min(2, size) if groups > 1 else 1
    if group_best is not None:
        best = bounded("group_best", group_best, size, f"the {size} experts of a group")
    if groups > 1 or top_groups is not None:
        top_groups = bounded("top_groups", top_groups, groups, f"groups={groups}")
    return Groups(1, 1, 1) if top_groups in (None, groups) else Groups(groups, top_groups, best)


def _scale(name: str, scale, dtype) -> tuple[float, jax.Array | None]:
    """Returns the static scale, and None; or 1 and a scale that may be traced, without a gradient.

    `dtype` is the dtype of the weights. They are computed in float32 or wider.
    """
    if scale is None:
        return 1.0, None
    if isinstance(scale, bool | np.bool_) or not isinstance(scale, int | float | np.integer | np.floating):
        scale = arguments.real_array(name, "scale", arguments.parameter(name, "scale", scale), "a real number")
        if scale.shape:
            raise ValueError(f"{name}: scale must be a scalar, got an array of shape {scale.shape}")
        return 1.0, constant(scale, f"{name}: there is no gradient in scale; wrap it in jax.lax.stop_gradient")
    try:
        number = float(scale)
    except OverflowError:
        number = np.inf
    wide = jnp.finfo(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)
    if not abs(number) <= float(wide.max):
        raise ValueError(f"{name}: scale must be a finite number in the range of {wide.dtype.name}, got {scale!r}")
    return number, None
