"""Does a model train alike with linear_cross_entropy? `python -m benchmarks.linear` runs this after its losses.

A perceptron over the last tokens of the text in data/ trains with Adam, once with each loss. Its embedding is also its
output layer.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.support.language_model import adam, mean_loss, token_ids
from benchmarks.support.result import Benchmark, Record
from pallas_softmax import linear_cross_entropy

_CONTEXT = 8  # previous tokens that the model sees
_LAST = 10  # the final loss is the mean over this many steps


@dataclasses.dataclass(frozen=True)
class Training:
    vocab: int
    width: int
    dtype: str
    tokens: int
    steps: int


def _train(contender: str, training: Training, seed: int) -> tuple[np.ndarray, float, float]:
    """Returns the losses, the seconds of a step, and the MiB of its temporaries."""
    vocab, width, dtype, tokens, steps = dataclasses.astuple(training)
    ids = jnp.asarray(token_ids(vocab))
    keys = jax.random.split(jax.random.key(seed), 4)
    weights = {
        "embed": width**-0.5 * jax.random.normal(keys[0], (vocab, width)),
        "input": (_CONTEXT * width) ** -0.5 * jax.random.normal(keys[1], (_CONTEXT * width, width)),
        "hidden": width**-0.5 * jax.random.normal(keys[2], (width, width)),
    }
    starts = jax.random.randint(keys[3], (steps, tokens), 0, len(ids) - _CONTEXT)

    def loss(weights: dict[str, jax.Array], start: jax.Array) -> jax.Array:
        text = ids[start[:, None] + jnp.arange(_CONTEXT + 1)]
        embed = weights["embed"].astype(dtype)
        x = embed[text[:, :-1]].reshape(len(text), -1)
        x = jax.nn.gelu(x @ weights["input"].astype(dtype)) @ weights["hidden"].astype(dtype)
        if contender == "jax":
            return mean_loss(jnp.matmul(x, embed.T, preferred_element_type=jnp.float32), text[:, -1])
        ours: Any = linear_cross_entropy(x, embed, text[:, -1], transpose_w=True)
        return ours

    init, step, _ = adam(loss, 2e-3)
    state = init(weights)
    step = jax.jit(step, donate_argnums=0).lower(state, jnp.float32(0), starts[0]).compile()
    memory = step.memory_analysis()
    values, begin = [], 0.0
    for i, start in enumerate(starts):
        if i == 1:  # the first step is not timed
            jax.block_until_ready(values)
            begin = time.perf_counter()
        state, value = step(state, jnp.float32(i), start)
        values.append(value)
    losses = np.asarray(jnp.stack(values))
    seconds = (time.perf_counter() - begin) / max(1, steps - 1)
    return losses, seconds, memory.temp_size_in_bytes / 2**20 if memory else 0.0


def run_training(training: Training, chosen: Any) -> list[Record]:
    records, reference = [], None
    for contender in ("jax", "ours"):
        losses, seconds, memory = _train(contender, training, chosen.seed)
        reference = losses if reference is None else reference
        found = {
            "first_loss": float(losses[0]),
            "last_loss": float(np.mean(losses[-_LAST:])),
            "largest_gap": float(np.abs(losses - reference).max()),
            "step_us": 1e6 * seconds,
            "memory_mib": memory,
        }
        records.append(Record(training, contender, contender == "ours", found=found))
    return records


def make_trainings(chosen: Any) -> list[Training]:
    sizes, dtypes = (chosen.tokens, chosen.training_steps), chosen.dtype if chosen.training_steps else ()
    return [Training(vocab, chosen.width, dtype, *sizes) for vocab in chosen.vocab for dtype in dtypes]


COLUMNS = "first_loss", "last_loss", "largest_gap", "step_us", "memory_mib"
BENCHMARK = Benchmark("linear_training", make_trainings, run_training, COLUMNS)
