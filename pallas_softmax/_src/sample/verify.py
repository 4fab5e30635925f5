"""verify: a step of speculative decoding, built from the cutoff of `filter_logits` and one draw for each sequence.

A small model drafts S tokens; the target computes its logits at the S positions and at the next one. p is the
distribution that `sample` draws from, and q the one that a draft was drawn from:

    position         0     1     2     3          S = 3
    draft           17     4    29     -
    accepted?      yes    no     -     -          with the probability min(1, p / q) of the draft
    tokens          17     8    -1    -1          the 8 is drawn from max(p - q, 0) of position 1

Drafts without q were not drawn but chosen, for instance by n-grams: q is 1 at the draft and 0 elsewhere. So a draft is
accepted with the probability p, and the token in its place is drawn from p without the draft. If rounding leaves no
mass to draw from, the token is drawn from p.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pallas_softmax._src import arguments, normalizers
from pallas_softmax._src.dispatch.choose import ImplementationName, check_name, choose_plain
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.mesh import as_rows
from pallas_softmax._src.dispatch.mesh_types import laid_like, vary_together, with_auto_axes
from pallas_softmax._src.dispatch.operation import describe
from pallas_softmax._src.masks import at, positions, row_at
from pallas_softmax._src.sample import api
from pallas_softmax._src.sample.noise import gumbel_array
from pallas_softmax._src.sample.operation import DRAW_BY_MASS
from pallas_softmax._src.sample.rows import Cutoff, as_float, is_kept
from pallas_softmax._src.sample.xla import noise_of_mass
from pallas_softmax._src.temperatures import Temperature


class Verified(NamedTuple):
    """The tokens that a step of speculative decoding adds to each sequence.

    Attributes:
      tokens: int32 (..., S + 1): the accepted drafts, one new token, then -1.
      accepted: int32 (...): how many drafts were accepted.
    """

    tokens: jax.Array
    accepted: jax.Array


@at_once("implementation", known=arguments.known_numbers)
def verify(
    key: jax.Array | np.ndarray,
    draft_tokens: "ArrayLike",
    logits: "ArrayLike",
    draft_log_probs: "ArrayLike | None" = None,
    *,
    temperature: "ArrayLike" = 1.0,
    top_k: "ArrayLike | None" = None,
    top_p: "ArrayLike | None" = None,
    min_p: "ArrayLike | None" = None,
    where: "ArrayLike | None" = None,
    implementation: ImplementationName | None = None,
) -> Verified:
    """Accepts or rejects draft tokens, and draws the token after them: a step of speculative decoding.

    The tokens are distributed as if `sample` had drawn them from the target one by one, with the same temperature and
    filters. At temperature 0 they are the greedy tokens. Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
    2302.01318.

    Args:
      key: one key, as for `sample`; or an array of typed keys (...), one per row, so that a row's tokens do not depend
        on the other rows.
      draft_tokens: integers (..., S). A negative one ends the drafts of its row. One of V or more is rejected.
      logits: real array (..., S + 1, V): the target's logits at the positions of the drafts, and at the next position.
      draft_log_probs: (..., S, V), the log-probabilities that the drafts were drawn from. A draft with log-probability
        -inf is rejected. None if the drafts were chosen, for instance by n-grams.
      temperature: as for `sample`, and so are `top_k`, `top_p` and `min_p`. Each is a scalar, has one number per row
        (...), or one per position (..., S + 1). The number of dimensions tells which.
      where: boolean, broadcastable to `logits`. A masked position is never a token.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      Verified(tokens, accepted). A position where `sample` would give -1 rejects its draft, and its token is -1.

    Raises:
      TypeError: an argument has the wrong dtype or is not an array.
      ValueError: an argument is out of range or does not fit, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.

    Examples:
      >>> logits = jnp.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])  # at one draft, and at the next position
      >>> verified = ps.verify(jax.random.key(0), jnp.array([2]), logits, temperature=0.0)
      >>> verified.tokens, verified.accepted
      (Array([2, 0], dtype=int32), Array(1, dtype=int32))
    """
    check_name("verify", implementation)
    drafts, x, log_q = _checked(draft_tokens, logits, draft_log_probs)
    where = None if where is None else arguments.mask("verify", where, x.shape)
    batch = x.shape[:-2]
    key = api.typed_keys("verify", key, batch)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: _per_position(name, value, x.shape[:-1]) for name, value in given.items()}
    # Otherwise, XLA might divide the logits like a small array.
    key, drafts, given = jax.tree.map(functools.partial(laid_like, x), (key, drafts, given))
    arrays = lax.stop_gradient((key, drafts, x, log_q, where, given))
    # JAX cannot gather along a dimension that Explicit mesh axes divide, but XLA can.
    by_batch = jax.typeof(x).sharding.spec[: len(batch)]
    specs = Verified._make((P(*by_batch, None), P(*by_batch)))
    return with_auto_axes(functools.partial(_verified, implementation), specs, *arrays)


def _verified(implementation: str | None, key, drafts, x, log_q, where, given: dict[str, Any]) -> Verified:
    batch, length = x.shape[:-2], x.shape[-2]
    target = _target_of(x, where, given, implementation)
    shape = (*batch, length + noise_of_mass(x.shape[-1]))
    noise = gumbel_array(key, shape, len(batch), target.cut.top.dtype)
    draft_log_q = jnp.zeros_like(drafts, noise.dtype) if log_q is None else _pick(log_q, drafts)[..., 0]
    end = [(0, 0)] * len(batch) + [(0, 1)]  # the last position is padding, and never accepted
    drafts, draft_log_q = jnp.pad(drafts, end, constant_values=-1), jnp.pad(draft_log_q, end)

    log_u = -jnp.exp(-noise[..., :length])  # u is uniform in (0, 1)
    log_p = _log_p(jax.tree.map(lambda a: _pick(a, drafts), target), drafts[..., None])[..., 0]
    drafts = jnp.where(draft_log_q > -jnp.inf, drafts, -1)
    is_accepted = log_u + draft_log_q < jnp.where(drafts >= 0, log_p, -jnp.inf)
    position = lax.broadcasted_iota(jnp.int32, drafts.shape, drafts.ndim - 1)
    accepted = jnp.min(jnp.where(is_accepted, length, position), -1, keepdims=True)

    def masses(here):  # what the new token is drawn from
        p = jnp.exp(_log_p(jax.tree.map(lambda a: row_at(a, here), target)))
        return _masses(p, row_at(drafts[..., None], here), log_q, here)

    # XLA would store masses that are used twice. To compute them twice is cheaper: the barrier keeps both computations.
    twice = [masses(here) for here in (accepted, lax.optimization_barrier(accepted))]
    call = choose_plain(describe(DRAW_BY_MASS, twice[0], (twice[0].ndim - 1,), None, function="verify"))
    new = as_rows(call, *vary_together(*twice, noise[..., length:]))
    after = jnp.where(position == accepted, new, -1)
    return Verified(jnp.where(position < accepted, drafts, after), accepted[..., 0])


class _Target(NamedTuple):
    """The target's distributions at all positions, (..., S + 1, V) or (..., S + 1, 1)."""

    logits: jax.Array
    distances: jax.Array | None  # of integer logits from the largest; None for floats
    where: jax.Array | None
    temperature: jax.Array
    cut: Cutoff  # for integer logits, `top` is 0


def _target_of(x: jax.Array, where, given: dict[str, Any], implementation: str | None) -> _Target:
    logits, where, t, cut = api.cut_rows("verify", x, x.ndim - 1, where, None, implementation, **given)
    distances = None
    if jnp.issubdtype(x.dtype, jnp.integer):
        distances = normalizers.to_float(logits, (-1,), where)
        cut = cut._replace(top=jnp.zeros_like(cut.top))
    target = _Target(logits, distances, where, t, cut)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])), target)


def _log_p(target: _Target, indices=None) -> jax.Array:
    """Returns log p of the logits, which have these indices in the rows; None means whole rows."""
    logits, distances, where, temperature, cut = target
    indices = positions(logits) if indices is None else indices
    kept = is_kept(logits, where, cut.key, cut.index, indices)
    x = as_float(logits if distances is None else distances)
    below = Temperature.of(temperature).distance(x, cut.top)
    return jnp.where(kept, below - (cut.log_total + cut.log_mass), -jnp.inf)


def _checked(draft_tokens, logits, draft_log_probs) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the drafts (int32, -1 for one that is no token), the logits, and the log-probabilities log q."""
    x, _ = api.checked_rows("verify", logits, -1)
    if x.ndim < 2 or not x.shape[-2]:
        raise ValueError(f"verify: logits must have a shape (..., S + 1, V), got {x.shape}")
    shape = (*x.shape[:-2], x.shape[-2] - 1)
    drafts = arguments.integers("verify", "draft_tokens", draft_tokens, shape)
    drafts = jnp.where(drafts < x.shape[-1], drafts, -1)
    if draft_log_probs is None:
        return drafts, x, None
    log_q, shape = arguments.array("verify", "draft_log_probs", draft_log_probs), (*shape, x.shape[-1])
    if not jnp.issubdtype(log_q.dtype, jnp.floating):
        raise TypeError(f"verify: draft_log_probs must be floating, got {log_q.dtype.name}")
    if log_q.shape != shape:
        raise ValueError(f"verify: draft_log_probs must have the shape {shape}, got {log_q.shape}")
    return drafts, x, log_q.astype(as_float(x).dtype) if shape[-2] else None


def _per_position(name: str, value: Any, positions: tuple[int, ...]) -> Any:
    if value is None or jnp.ndim(value) == 0:
        return value
    given, batch = jnp.shape(value), positions[:-1]
    per_row = len(given) == len(batch)
    if len(given) < len(batch) or not arguments.broadcasts(given, batch if per_row else positions):
        raise ValueError(
            f"verify: {name} must be a scalar, one per row {batch}, or one per position {positions}, got shape {given}"
        )
    return jnp.asarray(value)[..., None] if per_row else value


def _masses(p: jax.Array, draft: jax.Array, log_q: jax.Array | None, position: jax.Array) -> jax.Array:
    """Returns what the new token of each row is drawn from by `draw_by_mass`, (..., V), at one position of the row.

    `draft` and `position` are (..., 1). After a rejected draft, the result is p - q where p > q, except at the draft.
    Without q, q is 1 at the draft. Without a draft, q is 0. Elsewhere the result is -p, for rows where rounding leaves
    nothing of p - q. NaN where q is NaN.
    """
    q = 0
    if log_q is not None:
        log_q = row_at(log_q, jnp.minimum(position, log_q.shape[-2] - 1))
        q = jnp.where(draft >= 0, jnp.exp(log_q), 0)
    # The other computation of p and q may round differently. A smaller p might be 0 there.
    least = 2 * jnp.finfo(p.dtype).tiny
    is_left = ~(p - q <= least) & (positions(p) != draft)
    return jnp.where(is_left, p - q, -p)


def _pick(a: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns a (..., S, V or 1) at the drafts, (..., S, 1). A draft of -1 gets some element."""
    return a if a.shape[-1] == 1 else at(a, jnp.maximum(drafts, 0)[..., None])
