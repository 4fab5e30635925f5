"""The draw of `linear_sample`: from the logits of a projection, chunk by chunk.

x @ w ──► z, and the normalizer of z / temperature    as in `linear_log_probs`; here its kernel also writes z
z ──► the tokens, and the mass that the filters keep  as in `sample`
z at the tokens, the normalizer ──► log_probs         as in `linear_log_probs`

One kernel sums the rows for both functions, and both divide z by the temperature with the same rounding. So their
log-probabilities have the same bits.

Without filters, the kernel of the product also draws, and stores no z (`draw_ptx.py`). With an unusual temperature, all
tokens of the chunk are drawn again, from stored z.
"""

import jax.numpy as jnp
from jax import lax

from pallas_softmax._src.dispatch import mesh
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.linear.chunks import changed_if
from pallas_softmax._src.linear.losses import Statistics, Tokens, at_columns, is_temperature, token_losses
from pallas_softmax._src.linear.projection import Projection
from pallas_softmax._src.masks import positions, stored
from pallas_softmax._src.normalizers import widen
from pallas_softmax._src.sample.operation import SAMPLE
from pallas_softmax._src.sample.rows import Cutoff, drawn_results
from pallas_softmax._src.sample.xla import draw


def projection_sample(functions, x, w, columns, tokens: Tokens, *, sampler: Choice, **static) -> tuple:
    """Returns the three results of `linear_sample`, each (n,).

    `tokens` have the temperature as `sample` takes it, and the draw. `sampler` is the choice of the operation SAMPLE,
    or of CUTOFF if the noise is given element by element. The other arguments are as for `gradients.projection`.
    """
    layer = Projection(functions, w, columns, **static)
    dtype, vocab, mesh_axes = widen(x).dtype, layer.vocab, layer.mesh_axes
    first = lax.axis_index(mesh_axes) * vocab if mesh_axes else 0  # of this device's columns
    assert tokens.draw is not None
    _, *filters = tokens.draw
    unfiltered = all(a is None for a in filters)
    in_product = functions.draw is not None and sampler.call.operation is SAMPLE and unfiltered and not mesh_axes

    def log_prob(normalizer, z_at_index, indices, tokens: Tokens):
        # stored: XLA must not fuse the product with the temperature into a sum, which would round once only
        label_logit = stored(tokens.divided(z_at_index))
        statistics = Statistics(normalizer, label_logit, None).merged(mesh_axes, vocab)
        tokens_drawn = tokens._replace(labels=indices)
        return 0 - token_losses("linear_log_probs", statistics, tokens_drawn, layer.whole_vocab)  # not -0

    def is_usual(normalizer, z_at_index, tokens: Tokens):
        """Returns which rows the kernel of the product can draw: quotients are finite, however they are rounded."""
        finite = jnp.isfinite(normalizer.m) & jnp.isfinite(z_at_index / tokens.divisor)
        return finite & is_temperature(tokens.temperature)

    def mass_of_all(tokens: Tokens, log_probs):
        """Returns the log of the mass without filters; at a temperature of 0, a number below `log_probs`."""
        return tokens.at_0(-jnp.inf, jnp.zeros_like(log_probs))

    def from_logits(x, tokens: Tokens) -> tuple:
        z, normalizer = functions.logits(x, w, columns.bias, tokens, head=layer.head)
        indices, of_sampler, log_mass = _draw(sampler, z, tokens, first, vocab, mesh_axes)
        z_at_index = at_columns(z, indices - first, vocab)
        log_probs = log_prob(normalizer, z_at_index, indices, tokens)
        if tokens.temperature is not None:  # `sample` takes more temperatures than `linear_log_probs`
            log_probs = jnp.where(is_temperature(tokens.temperature), log_probs, of_sampler)
            if in_product:  # other tokens of the chunk must not change it
                usual = is_usual(normalizer, z_at_index, tokens)
                log_mass = jnp.where(usual, mass_of_all(tokens, log_probs), log_mass)
        # Rounding must not make the mass of what is kept less than the mass of the drawn entry.
        return indices, log_probs, jnp.maximum(log_mass, log_probs)

    def drawn_in_product(x, tokens: Tokens) -> tuple:
        column, logit, normalizer = functions.draw(x, w, columns.bias, tokens, head=layer.head)
        indices = jnp.where(jnp.isfinite(normalizer.m), column, -1)
        log_probs = log_prob(normalizer, logit, indices, tokens)
        results = indices, log_probs, jnp.maximum(mass_of_all(tokens, log_probs), log_probs)
        if tokens.temperature is None:
            return results
        unusual = ~(is_usual(normalizer, logit, tokens) | jnp.isnan(normalizer.m))  # with a NaN, nothing is drawn
        unusual = unusual if tokens.kept is None else unusual & tokens.kept
        return changed_if(jnp.any(unusual), lambda _: from_logits(x, tokens), results)

    if in_product and tokens.temperature is None:
        return layer.on_kept_rows(drawn_in_product, x, tokens, functions.bytes_per_logit(x.dtype.itemsize)[0])
    # plain JAX stores z / temperature too
    arrays = 2 if functions.are_plain and tokens.temperature is not None else 1
    step = drawn_in_product if in_product else from_logits
    return layer.on_kept_rows(step, x, tokens, arrays * dtype.itemsize)


def _draw(sampler: Choice, z, tokens: Tokens, first, vocab: int, mesh_axes) -> tuple:
    """Returns the index drawn from each row of z, its log-probability, and its log_mass, by the sampler.

    z has the `vocab` columns of this device, from `first` on. Columns of -inf may follow, which are never drawn.
    """
    assert tokens.draw is not None
    noise, *filters = tokens.draw
    t = jnp.ones((z.shape[0], 1), z.dtype) if tokens.temperature is None else tokens.temperature[:, None]
    numbers = (t, *filters)
    is_sample = sampler.call.operation is SAMPLE
    if mesh_axes or not is_sample:  # indices count the columns before these
        z = z[:, :vocab]
    if is_sample:
        found = mesh.on_shard(sampler, (z, None, noise, *numbers), {"stride": 1}, mesh_axes)
    else:
        cut = Cutoff(*mesh.on_shard(sampler, (z, None, *numbers), {}, mesh_axes))
        own = lax.dynamic_slice_in_dim(noise, first, vocab, 1)
        index = draw(z, None, positions(z, mesh_axes), own, numbers[0], cut, mesh_axes)
        at_index = lax.psum(at_columns(z, index[:, 0] - first, vocab), mesh_axes)
        found = drawn_results(index, at_index[:, None], cut.top, cut, numbers[0])
    indices, log_probs, log_mass = (a[:, 0] for a in found)
    return indices, log_probs, log_mass
