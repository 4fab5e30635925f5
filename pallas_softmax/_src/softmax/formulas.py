"""The math of the softmax kernels, in jax.numpy on float32 numbers: how rows are reduced, and what outputs follow."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_softmax._src import normalizers
from pallas_softmax._src.folding import Mask
from pallas_softmax._src.normalizers import Moments, Normalizer, log_of_sum, shift
from pallas_softmax._src.softmax.states_ptx import add_logits

F32 = jnp.float32


class Reduction(NamedTuple):
    """An associative and commutative reduction. Its state is one array, or a NamedTuple of arrays."""

    states: Callable[[Any], Any]  # x -> an array of states, one for each element of x
    # (state, blocks, step) -> the state with the blocks added. Each thread adds its own elements. `step` is
    # the number of the step in the row that the blocks are.
    add: Callable[[Any, list, Any], Any]
    # state -> one state that merges all lanes. (state, axis, broadcast) -> states merged along an axis of a
    # tile; `broadcast` expands a per-row value to the shape of the tile.
    combine_lanes: Callable[..., Any]
    empty: Any  # the state of an empty set
    neutral: float  # an element that leaves every state unchanged
    fields: tuple[str, ...]  # the leaves of a state, as `states_ptx` calls them
    scale: Any = None  # the `Scale` of a temperature
    combine: Any = None  # (state, state) -> the merged state; None if no second launch writes elements


ONLINE = Reduction(
    # d is 1 even for -inf: `combine_lanes` multiplies it by 0
    states=lambda x: Normalizer(x, jnp.ones_like(x)),
    add=lambda lanes, blocks, step: normalizers.add_logits(lanes, blocks),
    combine_lanes=normalizers.combine_lanes,
    empty=Normalizer(-jnp.inf, 0.0),  # pyright: ignore[reportArgumentType]
    neutral=-jnp.inf,
    fields=("m", "d"),
    combine=normalizers.combine,
)
SUM = Reduction(
    states=lambda x: x,
    add=lambda total, blocks, step: total + normalizers.tree_sum(blocks),
    combine_lanes=lambda total, axis=None, broadcast=None: jnp.sum(total, axis),
    empty=0.0,
    neutral=0.0,
    fields=("d",),
    combine=operator.add,
)


class Located(NamedTuple):
    """Moments of logits, and where the first of the largest logits is."""

    moments: Moments  # (m, d, t)
    # Its position in the row. Before that is known: the last step that raised the thread's m. It is a whole
    # number in float32, the dtype that CTAs exchange. So a row has at most `MOST_POSITIONS` elements.
    at: Any
    before: Any = None  # how many logits come before the label's in the order of top-k, in float32; or None


MOST_POSITIONS = 2**24  # float32 holds all whole numbers up to this


def located(scale=None, *, counted: bool = False) -> Reduction:
    """Returns the reduction to `Located`. `counted` says whether it has `before`; kernels add to that."""

    def add(lanes: Located, blocks: list, step) -> Located:
        before, moments = lanes.moments.m, add_logits(lanes.moments, blocks, scale)
        grew = (moments.m > before) | ((moments.m != moments.m) & (before == before))
        return lanes._replace(moments=moments, at=jnp.where(grew, jnp.float32(step), lanes.at))

    def combine_lanes(lanes: Located, axis=None, broadcast=None) -> Located:
        moments = normalizers.combine_lanes(lanes.moments, axis, broadcast, scale)
        if lanes.at is None:
            return Located(moments, None)
        m = moments.m if broadcast is None else broadcast(moments.m)
        before = None if lanes.before is None else jnp.sum(lanes.before, axis)
        return Located(moments, jnp.min(normalizers.if_largest(lanes.at, lanes.moments.m, m), axis), before)

    return Reduction(
        states=lambda x: Located(Moments(x, jnp.ones_like(x), jnp.zeros_like(x)), None),
        add=add,
        combine_lanes=combine_lanes,
        empty=Located(Moments(-jnp.inf, 0.0, 0.0), 0.0, 0.0 if counted else None),  # pyright: ignore[reportArgumentType]
        neutral=-jnp.inf,
        fields=("m", "d", "t", "place", *["before"] * counted),
        scale=scale,
    )


class Formula(NamedTuple):
    """An operation of the softmax family, on the rows of one or two arrays."""

    reduction: Reduction
    constants: Callable[[Any], tuple]  # the row's reduction -> the per-row constants
    term: Callable[..., Any] = lambda x: x  # (*elements), one from each array -> the element to reduce
    # (*elements, *constants) -> the output element. None if the outputs are the constants themselves, each in
    # an array with one number per row.
    value: Callable[..., Any] | None = None
    masked_value: float = 0.0  # the output element where the mask is False
    # The dtypes of the constants, if they are the outputs; None stands for the dtype of the elements.
    row_dtypes: tuple = ()
    at_scale: Any = None  # the `Scale` of a row -> the formula with this temperature; None if it has none

    def scaled(self, scale) -> "Formula":
        """Returns the formula with the temperature of `normalizers.encoded_scale`, if there is one."""
        return self if scale is None else self.at_scale(normalizers.scale_of(scale))

    @property
    def locates(self) -> bool:
        return isinstance(self.reduction.empty, Located)

    @property
    def counts(self) -> bool:
        return self.locates and self.reduction.empty.before is not None

    def out_type(self, whole: tuple, per_row: tuple, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the outputs: elements of the shape `whole`, or constants of the shape `per_row`."""
        if self.value is not None:
            return [jax.ShapeDtypeStruct(whole, dtype)]
        return [jax.ShapeDtypeStruct(per_row, own or dtype) for own in self.row_dtypes]


def _logsumexp(total: Normalizer) -> tuple:
    m, d = total
    return jnp.where(m == jnp.inf, m, m + log_of_sum(d)), m, d  # with a logit of +inf, d is NaN


def _token_stats(scale=None, *, counted: bool = False) -> Formula:
    """Returns the formula of logsumexp, the entropy, (m, d, t), and the numbers of `Located`."""

    def constants(total: Located) -> tuple:
        m, d, t = total.moments
        log_d = log_of_sum(d)
        lse = jnp.where(m == jnp.inf, m, normalizers.below(m, 0.0, scale) + log_d)
        return lse, log_d - t / d, m, d, t, total.at, *([total.before] if counted else [])

    row_dtypes = (F32,) * 5 + (jnp.int32,) * (1 + counted)
    at_scale = functools.partial(_token_stats, counted=counted)
    reduction = located(scale, counted=counted)
    return Formula(reduction, constants, row_dtypes=row_dtypes, at_scale=at_scale)


class Label(NamedTuple):
    """The label of each row, for a formula that counts the elements before it in the order of top-k; int32, (rows,)."""

    column: Any  # any number; a column in this row, or in another shard of it
    key: Any  # the sort key of its logit, by `sort_keys.key32`; more than the least int32
    wide_key: Any = None  # the same in float32; the tile kernel does not need it


def comes_before(key, column, label: Label):
    """Returns 1 where an element with this sort key comes before the label in the order of top-k, else 0."""
    return jnp.where(key > jnp.where(column < label.column, label.key - 1, label.key), 1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Job:
    """A formula to compute on arrays of one shape: (rows, vocab), or for columns (outer, vocab, inner)."""

    formula: Formula
    arrays: list[jax.Array]
    plan: Any  # a `Tile` or `Parts`, or for columns a `Tile` or `Strips`
    name: str  # of the kernel, in profiles; if there are two launches, the first has the suffix "_reduce"
    mask: Mask | None = None
    scale: jax.Array | None = None  # `normalizers.encoded_scale`, (rows,) or (1,), for a formula with a temperature
    label: Label | None = None  # for a formula that `counts`

    @property
    def rows(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def dtype(self) -> Any:  # of the output elements
        return self.arrays[-1].dtype


FORMULAS = {
    "softmax": Formula(
        ONLINE,
        constants=lambda total: (shift(total.m), 1 / total.d),
        value=lambda x, m, inverse_d: jnp.exp(x - m) * inverse_d,
    ),
    "log_softmax": Formula(
        ONLINE,
        constants=lambda total: (total.m, log_of_sum(total.d)),
        value=lambda x, m, log_d: x - m - log_d,
        masked_value=-jnp.inf,
    ),
    "token_stats": _token_stats(),
    "counted_stats": _token_stats(counted=True),
    "logsumexp": Formula(ONLINE, constants=_logsumexp, row_dtypes=(None, F32, F32)),
    "softmax_grad": Formula(
        SUM, term=lambda y, dy: y * dy, constants=lambda total: (total,), value=lambda y, dy, total: y * (dy - total)
    ),
    "log_softmax_grad": Formula(
        SUM, term=lambda y, dy: dy, constants=lambda total: (total,), value=lambda y, dy, total: dy - jnp.exp(y) * total
    ),
}
