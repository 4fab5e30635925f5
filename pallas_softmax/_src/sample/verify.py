"""verify: a step of speculative decoding, built from the cutoff of `filter_logits` and one draw for each sequence.

A small model drafts S tokens; the target computes its logits at the S positions and at the next one. p is the
distribution that `sample` draws from, and q the one that a draft was drawn from:

    position         0     1     2     3          S = 3
    draft           17     4    29     -
    accepted?      yes    no     -     -          with the probability min(1, p / q) of the draft
    tokens          17     8    -1    -1          the 8 is drawn from max(p - q, 0) of position 1

Drafts without q were not drawn but chosen, for instance by n-grams: q is 1 at the draft and 0 elsewhere. So a draft is
accepted with the probability p, and the token in its place is drawn from p without the draft.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from pallas_softmax._src import arguments
from pallas_softmax._src.dispatch.choose import ImplementationName, check_name, choose_plain
from pallas_softmax._src.dispatch.eager import at_once
from pallas_softmax._src.dispatch.vmap import as_rows
from pallas_softmax._src.sample import api
from pallas_softmax._src.sample.noise import each_key
from pallas_softmax._src.sample.operation import DRAW_BY_MASS
from pallas_softmax._src.sample.rows import Cutoff, as_float, is_kept, positions
from pallas_softmax._src.sample.xla import noise_of_mass

_INT32_MAX = np.iinfo(np.int32).max


class Verified(NamedTuple):
    """The tokens that a step of speculative decoding adds to each sequence.

    Attributes:
      tokens: int32 (..., S + 1): the accepted drafts, one new token, then -1.
      accepted: int32 (...): how many drafts were accepted.
    """

    tokens: jax.Array
    accepted: jax.Array


export.register_namedtuple_serialization(Verified, serialized_name="pallas_softmax.Verified")


def _known_numbers(given: dict[str, Any]) -> dict[str, Any]:
    drafts = arguments.known_labels("verify", given["draft_tokens"], "draft_tokens", _INT32_MAX)
    return api.known_numbers(given, function="verify") | {"draft_tokens": drafts}


@at_once("implementation", known=_known_numbers)
def verify(
    key: jax.Array | np.ndarray,
    draft_tokens: ArrayLike,
    logits: ArrayLike,
    draft_log_probs: ArrayLike | None = None,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    where: ArrayLike | None = None,
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
      temperature: as for `sample`, and so are the filters. Each is a scalar, has one number per row (...), or one per
        position (..., S + 1). The number of dimensions tells which.
      top_k: integer, at least -1. None, 0, -1, and V or more filter nothing.
      top_p: from 0 to 1; None or 1 filters nothing.
      min_p: from 0 to 1; None or 0 filters nothing.
      where: boolean, broadcastable to `logits`. A masked position is never a token.
      implementation: None chooses the best one (see `explain`); "mosaic_gpu" or "xla" names one.

    Returns:
      Verified(tokens, accepted). A position where `sample` would give -1 rejects its draft, and its token is -1.

    Raises:
      TypeError: an argument has the wrong dtype or is not an array.
      ValueError: an argument is out of range or does not fit, or `implementation` is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    check_name("verify", implementation)
    drafts, x, log_q = _checked(draft_tokens, logits, draft_log_probs)
    drafts = jnp.pad(drafts, [(0, 0)] * (drafts.ndim - 1) + [(0, 1)], constant_values=-1)
    where = None if where is None else arguments.mask("verify", where, x.shape)
    batch, length = x.shape[:-2], x.shape[-2]
    key = api.typed_keys("verify", key, batch)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: _per_position(name, value, batch) for name, value in given.items()}
    target = _Target.of(x, where, given, implementation)
    dtype = target.cut.logsumexp.dtype
    noise = _noise(key, batch, length + noise_of_mass(x.shape[-1]), dtype)

    log_u = -jnp.exp(-noise[..., :length])  # u is uniform in (0, 1)
    log_p, draft_log_q = target.log_p_of(drafts), _log_q_of(drafts, log_q, dtype)
    is_accepted = (draft_log_q > -jnp.inf) & (log_u + draft_log_q < log_p)
    position = lax.broadcasted_iota(jnp.int32, drafts.shape, drafts.ndim - 1)
    # The last position is padding, and never accepted.
    accepted = jnp.min(jnp.where(is_accepted, length, position), -1)

    draft, log_p, draft_log_q = (_at(a, accepted) for a in (drafts, log_p, draft_log_q))
    # XLA would store masses that are used twice. To compute them twice is cheaper: the barrier keeps both computations.
    residual, recomputed = (
        _residual(target.p_at(at), draft, draft_log_q, log_q, at)
        for at in (accepted, lax.optimization_barrier(accepted))
    )
    new = _draw(residual, recomputed, noise[..., length:])
    # Rounding may leave nothing of max(p - q, 0). Then p and q are equal, so the rejected draft is the new token.
    new = jnp.where((new < 0) & jnp.isfinite(log_p), draft, new)
    after = jnp.where(position == accepted[..., None], new[..., None], -1)
    return Verified(jnp.where(position < accepted[..., None], drafts, after), accepted)


class _Target(NamedTuple):
    """The target's distributions at all positions, (..., S + 1, V) or (..., S + 1, 1).

    Attributes:
      logits: as passed.
      where: as passed; or None.
      temperature: of each position.
      cut: what the filters keep.
    """

    logits: jax.Array
    where: jax.Array | None
    temperature: jax.Array
    cut: Cutoff

    @staticmethod
    def of(x: jax.Array, where, given: dict[str, Any], implementation: str | None) -> "_Target":
        """Returns the distributions of these logits."""
        rows = _Target(*api.cut_rows("verify", x, x.ndim - 1, where, None, implementation, **given))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])), rows)

    def log_p(self, indices=None) -> jax.Array:
        """Returns log p of the logits. `indices` are their indices in the rows; None means whole rows."""
        indices = positions(self.logits.ndim, self.logits.shape[-1]) if indices is None else indices
        kept = is_kept(self.logits, self.where, self.cut.key, self.cut.index, indices)
        greedy = (self.temperature == 0) | jnp.isinf(self.cut.logsumexp)
        scale = jnp.where(greedy, 0, 1 / self.temperature)  # products are faster than quotients
        normalizer = jnp.where(greedy, 0, self.cut.logsumexp + self.cut.log_mass)
        return jnp.where(kept, as_float(self.logits) * scale - normalizer, -jnp.inf)

    def log_p_of(self, drafts: jax.Array) -> jax.Array:
        """Returns log p of each draft (..., S + 1); -inf for a draft that is no token."""
        picked = self._replace(
            logits=_pick(self.logits, drafts)[..., None],
            where=None if self.where is None else _pick(self.where, drafts)[..., None],
        )
        log_p = picked.log_p(indices=drafts[..., None])[..., 0]
        return jnp.where(_is_token(drafts, self.logits), log_p, -jnp.inf)

    def p_at(self, position: jax.Array) -> jax.Array:
        """Returns p at one position of each row, (..., V)."""
        return jnp.exp(jax.tree.map(lambda a: _at(a, position), self).log_p())


def _checked(draft_tokens, logits, draft_log_probs) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the drafts (int32, -1 for a negative one), the logits, and the log-probabilities log q."""
    x, _ = api.checked_rows("verify", logits, -1)
    if x.ndim < 2 or not x.shape[-2]:
        raise ValueError(f"verify: logits must have a shape (..., S + 1, V), got {x.shape}")
    shape = (*x.shape[:-2], x.shape[-2] - 1)
    drafts = arguments.array("verify", "draft_tokens", draft_tokens)
    if not jnp.issubdtype(drafts.dtype, jnp.integer):
        raise TypeError(f"verify: draft_tokens must be integers, got {drafts.dtype.name}")
    if drafts.shape != shape:
        raise ValueError(f"verify: draft_tokens must have the shape {shape}, got {drafts.shape}")
    drafts = drafts if drafts.dtype.itemsize >= 4 else drafts.astype(jnp.int32)  # int8 cannot hold the bounds
    drafts = jnp.clip(drafts, -1 if jnp.iinfo(drafts.dtype).min else 0, _INT32_MAX).astype(jnp.int32)
    if draft_log_probs is None or shape[-1] == 0:
        return drafts, x, None
    log_q = arguments.array("verify", "draft_log_probs", draft_log_probs)
    if not jnp.issubdtype(log_q.dtype, jnp.floating):
        raise TypeError(f"verify: draft_log_probs must be floating, got {log_q.dtype.name}")
    if log_q.shape != (*shape, x.shape[-1]):
        raise ValueError(
            f"verify: draft_log_probs must have the shape {(*shape, x.shape[-1])}, got {log_q.shape}"
        )
    return drafts, x, log_q.astype(as_float(x).dtype)


def _per_position(name: str, value: Any, batch: tuple[int, ...]) -> Any:
    """Returns a parameter as a scalar or with one number per position; None stays None."""
    if value is None or jnp.ndim(value) == 0:
        return value
    if jnp.ndim(value) not in (len(batch), len(batch) + 1):
        raise ValueError(
            f"verify: {name} must be a scalar, one per row {batch}, or one per position, got shape {jnp.shape(value)}"
        )
    return jnp.asarray(value)[..., None] if jnp.ndim(value) == len(batch) else value


def _noise(key: jax.Array, batch: tuple[int, ...], n: int, dtype) -> jax.Array:
    """Returns n Gumbel numbers for each row, (..., n), from one key, or from the key of the row."""
    rows = () if key.ndim else batch
    return each_key(lambda key: jax.random.gumbel(key, (*rows, n), dtype), key)


def _log_q_of(drafts: jax.Array, log_q: jax.Array | None, dtype) -> jax.Array:
    """Returns log q of each draft, (..., S + 1); -inf for a draft that is no token if there are q."""
    if log_q is None:
        return jnp.zeros_like(drafts, dtype)
    padding = [(0, 0)] * (drafts.ndim - 1) + [(0, 1)]
    return jnp.pad(_pick(log_q, drafts[..., :-1]), padding, constant_values=-jnp.inf)


def _residual(
    p: jax.Array, draft: jax.Array, draft_log_q: jax.Array, log_q: jax.Array | None, position: jax.Array
):
    """Returns the masses that the new token is drawn from, (..., V), at one position of each row.

    After a rejected draft they are max(p - q, 0); without q, p without the draft. Without a draft, or if its q is 0,
    they are p.
    """
    if log_q is None:
        return jnp.where(lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1) == draft[..., None], 0, p)
    q = jnp.exp(_at(log_q, jnp.minimum(position, log_q.shape[-2] - 1)))
    return jnp.where(draft_log_q[..., None] > -jnp.inf, jnp.maximum(p - q, 0), p)


def _draw(mass: jax.Array, again: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns the draw of each row (...), as `xla.draw_by_mass` does."""
    named, axis = [("logits", again), ("key", noise)], mass.ndim - 1  # the names are for messages only
    call, (mass, _, *others) = arguments.last_axis(DRAW_BY_MASS, "verify", mass, axis, None, None, named)
    return as_rows(choose_plain(call), mass, *others)[..., 0]


def _at(a: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the element, or the row, of a (..., S) or (..., S, n) at a position (...) of each row."""
    axis = position.ndim
    index = jnp.expand_dims(position, tuple(range(axis, a.ndim)))
    return jnp.squeeze(jnp.take_along_axis(a, index, axis, mode="promise_in_bounds"), axis)


def _pick(a: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns the elements of a (..., S, V) at the drafts (..., S); for a draft that is no token, the least number."""
    is_integer = jnp.issubdtype(a.dtype, jnp.integer)
    least = jnp.iinfo(a.dtype).min if is_integer else False if a.dtype == bool else -jnp.inf
    nothing = jnp.asarray(least, a.dtype)
    is_divided = any(jax.typeof(a).sharding.spec[-1:])  # by Explicit mesh axes
    if is_divided:  # JAX cannot gather along such an axis
        at_draft = lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 1) == drafts[..., None]
        return jnp.max(jnp.where(at_draft, a, nothing), -1)
    index = jnp.where(_is_token(drafts, a), drafts, 0)[..., None]
    picked = jnp.take_along_axis(a, index, -1, mode="promise_in_bounds")[..., 0]
    return jnp.where(_is_token(drafts, a), picked, nothing)


def _is_token(drafts: jax.Array, a: jax.Array) -> jax.Array:
    return (drafts >= 0) & (drafts < a.shape[-1])
