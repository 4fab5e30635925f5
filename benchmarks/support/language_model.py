"""A small language model (a GRU), trained on the text in data/, and its decoding.

The text has only about 3,500 different tokens (words, punctuation, line ends). The output layer has all V tokens, and
learns by the full cross entropy that the others are improbable.
"""

import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.example_libraries import optimizers

TEXT = Path(__file__).parents[1] / "data" / "romeo_and_juliet.txt"
UNKNOWN = 0
PROMPT = 8  # tokens of a prompt: the speaker and the first words of a speech
_TRAINED = 32  # tokens of a training sequence

Weights = dict[str, jax.Array]


@functools.cache
def text_tokens() -> tuple[list[str], list[str]]:
    """Returns the text as tokens, and the vocabulary: the unknown token, then the others from the most frequent on."""
    text = re.findall(r"\n\n|\n|--|[\w']+(?:-[\w']+)*|[^\w\s]", TEXT.read_text())
    return text, ["<unknown>", *(word for word, _ in collections.Counter(text).most_common())]


def token_ids(vocab: int) -> np.ndarray:
    text, words = text_tokens()
    known = {word: i for i, word in enumerate(words[:vocab])}
    return np.array([known.get(word, UNKNOWN) for word in text], np.int32)


def choose_prompts(vocab: int, batch: int) -> np.ndarray:
    """Returns the first tokens of `batch` speeches, spread evenly over the text, as ids below vocab."""
    text, _ = text_tokens()
    ends = np.flatnonzero([word == "\n\n" for word in text])
    starts = ends[:-1][np.diff(ends) > PROMPT] + 1
    chosen = starts[np.arange(batch) * len(starts) // batch]
    return token_ids(vocab)[chosen[:, None] + np.arange(PROMPT)]


def _gru(weights: Weights, hidden: jax.Array, token: jax.Array) -> jax.Array:
    x = weights["embed"][token].astype(jnp.float32) @ weights["input"] + weights["bias"]
    h = hidden @ weights["hidden"]
    x_update, x_reset, x_new = jnp.split(x, 3, -1)
    h_update, h_reset, h_new = jnp.split(h, 3, -1)
    update = jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + jax.nn.sigmoid(x_reset + h_reset) * h_new)
    return update * hidden + (1 - update) * new


def model(weights: Weights, hidden: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the next hidden state, and the logits in the dtype of the output layer (the embedding).

    The barriers give all programs the same logits: the compiler can neither fuse the model with a selection nor
    skip the rounding to a 16-bit dtype.
    """
    hidden, token = lax.optimization_barrier((hidden, token))
    hidden = _gru(weights, hidden, token)
    embed = weights["embed"]
    return lax.optimization_barrier((hidden, hidden.astype(embed.dtype) @ embed.T))


def adam(loss: Callable[..., jax.Array], rate: Any) -> tuple[Callable, Callable, Callable]:
    """Returns Adam: weights -> state; (state, i, batch) -> (the next state, the loss); state -> weights.

    `loss` maps weights and a batch to a number, and `rate` may map i to a learning rate.
    """
    init, update, weights_of = optimizers.adam(rate, b2=0.99)

    def step(state: Any, i: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights_of(state), batch)
        return update(i, grads, state), value

    return init, step, weights_of


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    at_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - at_label)


@functools.cache  # the same model is trained once
def _trained(vocab: int, width: int, steps: int, tokens: int, seed: int) -> tuple[Weights, float]:
    ids = jnp.asarray(token_ids(vocab))
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"embed": (vocab, width), "input": (width, 3 * width), "hidden": (width, 3 * width)}
    weights = {name: width**-0.5 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys)}
    weights["bias"] = jnp.zeros(3 * width)
    count = max(1, tokens // _TRAINED)
    starts = jax.random.randint(keys[3], (steps, count), 0, len(ids) - _TRAINED)

    def loss(weights: Weights, start: jax.Array) -> jax.Array:
        text = ids[start + jnp.arange(_TRAINED + 1)[:, None]]

        def step(hidden: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = _gru(weights, hidden, token)
            return hidden, hidden

        _, hidden = lax.scan(step, jnp.zeros((len(start), width)), text[:-1])
        return mean_loss(hidden @ weights["embed"].T, text[1:])

    init, step, weights_of = adam(loss, lambda i: 5e-3 * (1 - i / steps))
    scanned = jax.jit(lambda state, over: lax.scan(lambda state, now: step(state, *now), state, over))
    state, losses = scanned(init(weights), (jnp.arange(steps), starts))
    return weights_of(state), float(jnp.mean(losses[-20:]))


def trained(case: Any, chosen: Any) -> tuple[Weights, jax.Array, float]:
    """Trains for a case with batch, vocab and dtype (of the output layer).

    Returns the weights, the prompts (batch, PROMPT), and the mean of the last losses.
    """
    sizes = chosen.width, chosen.training_steps, chosen.tokens
    weights, loss = _trained(case.vocab, *sizes, chosen.seed)
    weights = weights | {"embed": weights["embed"].astype(case.dtype)}
    return weights, jnp.asarray(choose_prompts(case.vocab, case.batch)), loss


def prefill(weights: Weights, prompts: jax.Array) -> jax.Array:
    """Returns the hidden state before the last token of each prompt, (batch, width)."""
    hidden = jnp.zeros((len(prompts), weights["hidden"].shape[0]))
    return lax.scan(lambda h, token: (_gru(weights, h, token), None), hidden, prompts[:, :-1].T)[0]


def generate(choose: Callable, weights: Weights, prompts: jax.Array, given: jax.Array) -> Any:
    """Continues the prompts by a token for each entry of `given`.

    `choose` maps logits and an entry of `given` to the next token of each prompt, and to what to return of the step.
    """

    def step(carry: Any, now: jax.Array) -> tuple[Any, Any]:
        hidden, logits = model(weights, *carry)
        token, found = choose(logits, now)
        return (hidden, token), found

    return lax.scan(step, (prefill(weights, prompts), prompts[:, -1]), given)[1]
