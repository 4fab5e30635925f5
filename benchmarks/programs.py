"""How much time do whole programs save? python -m benchmarks.programs --flagfile=configs/programs.flags

Each program runs with our functions and with jax.nn's:

block, block_where   A pre-norm transformer block with causal attention. The mask is -inf in the scores, or
                     `where`.
attention,           A softmax between two matrix products, without a mask or with the causal mask as `where`.
attention_causal     Here jax.nn.dot_product_attention runs as well: XLA's form, and cuDNN's fused kernel.
loss_take, loss_lse  A classifier's mean cross entropy: log_softmax at the label, or logsumexp minus the label's
                     logit.

A call is jax.value_and_grad with respect to weights and inputs, with and without jax.checkpoint.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import DEFINE_integer

import pallas_softmax
from benchmarks.support import driver, flags, timing
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.result import Benchmark, Record

PROGRAMS = ("block", "block_where", "attention", "attention_causal", "loss_take", "loss_lse")
# Peers that compute attention in one call.
FUSED: dict[str, Callable] = {
    "dot_product_attention": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}

# The largest relative error (norm of the difference over norm) against the same program with jax.nn: a few eps. The
# products of float32 may use TF32. In 16-bit dtypes both softmaxes round, and a gradient sums many of their results.
TOLERANCE = {"float32": 4 * 2**-11, "bfloat16": 4 * 2**-7, "float16": 4 * 2**-10}


@dataclasses.dataclass(frozen=True)
class Program:
    program: str
    size: int  # the sequence length, or V
    dtype: str
    remat: bool


def functions(implementation: str) -> Any:
    """Returns a namespace with softmax, log_softmax and logsumexp."""
    options = {"implementation": named(implementation)}
    ours = {name: functools.partial(getattr(pallas_softmax, name), **options) for name in flags.FUNCTIONS}
    return jax.nn if implementation == "jax" else SimpleNamespace(**ours)


def _normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x.astype(jnp.float32) ** 2)


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    depth = np.sqrt(queries.shape[-1]).astype(queries.dtype)
    return jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / depth


def block(nn: Any, weights: dict[str, jax.Array], x: jax.Array, heads: int, mask_by_where: bool) -> jax.Array:
    """Returns a block's mean squared output, as a loss. x is (batch, sequence, width)."""
    batch, sequence, _ = x.shape
    qkv = (_normed(x) @ weights["qkv"]).reshape(batch, sequence, 3, heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores, causal = _scores(q, k), jnp.tri(sequence, dtype=bool)
    if mask_by_where:
        p = nn.softmax(scores, where=causal)
    else:
        p = nn.softmax(jnp.where(causal, scores, -jnp.inf))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape) @ weights["out"]
    return _mean_square(x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"])


def attention(nn: Any, keys_and_values: dict[str, jax.Array], queries: jax.Array, causal: bool) -> jax.Array:
    """Returns attention's mean squared output, as a loss. All arrays are (batch, sequence, heads, depth)."""
    keys, values = keys_and_values["keys"], keys_and_values["values"]
    if callable(nn):
        out: Any = nn(queries, keys, values, is_causal=causal)
        return _mean_square(out)
    where = jnp.tri(queries.shape[1], dtype=bool) if causal else None
    p = nn.softmax(_scores(queries, keys), where=where)
    return _mean_square(jnp.einsum("bhqk,bkhd->bqhd", p, values))


def loss(nn: Any, weights: dict[str, jax.Array], hidden: jax.Array, labels: jax.Array, by_logsumexp: bool) -> jax.Array:
    logits = hidden @ weights["head"]

    def at_label(a: jax.Array) -> jax.Array:
        return jnp.take_along_axis(a, labels[:, None], -1)[:, 0].astype(jnp.float32)

    if by_logsumexp:
        return jnp.mean(nn.logsumexp(logits, axis=-1).astype(jnp.float32) - at_label(logits))
    return -jnp.mean(at_label(nn.log_softmax(logits)))


def make_programs(chosen: Any) -> list[Program]:
    if chosen.width % chosen.heads:
        refused = f"--width={chosen.width} is not accepted; with --heads={chosen.heads}"
        raise ValueError(f"{refused} it takes a multiple of {chosen.heads}")
    return [
        Program(name, size, dtype, remat)
        for name in chosen.programs
        for size in (chosen.vocab if name.startswith("loss") else chosen.sequence)
        for dtype in chosen.dtype
        for remat in (False, True)
    ]


def build(program: Program, chosen: Any) -> tuple[Callable[[str], Callable], tuple]:
    """Returns (implementation's name) -> program, and the program's arguments: weights, inputs and maybe labels."""
    kind, size = program.program, program.size
    width, tokens = chosen.width, chosen.tokens
    batch = max(1, tokens // size)
    keys = iter(jax.random.split(jax.random.key(chosen.seed), 8))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(program.dtype)

    def matrix(rows: int, columns: int) -> jax.Array:
        return normal(rows, columns, scale=rows**-0.5)

    if kind.startswith("block"):
        sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
        weights = {name: matrix(rows * width, columns * width) for name, (rows, columns) in sizes.items()}
        args = weights, normal(batch, size, width)
        body = functools.partial(block, heads=chosen.heads, mask_by_where=kind == "block_where")
    elif kind.startswith("attention"):
        shape = batch, size, chosen.heads, width // chosen.heads
        args = {"keys": normal(*shape), "values": normal(*shape)}, normal(*shape)
        body = functools.partial(attention, causal=kind == "attention_causal")
    else:
        labels = jax.random.randint(next(keys), (tokens,), 0, size)
        args = {"head": matrix(width, size)}, normal(tokens, width), labels
        body = functools.partial(loss, by_logsumexp=kind == "loss_lse")

    def with_implementation(name: str) -> Callable:
        function = functools.partial(body, FUSED[name] if name in FUSED else functions(name))
        function = jax.checkpoint(function) if program.remat else function
        differentiated = jax.value_and_grad(function, argnums=(0, 1))
        return lambda *args: {"y": differentiated(*args)}

    return with_implementation, args


def run_program(program: Program, chosen: Any) -> list[Record]:
    """A fused attention need not support every case, so its failure does not fail the run."""
    fused = FUSED if program.program.startswith("attention") else ()
    peers = ["jax", *(name for name in fused if name != "cudnn" or timing.on_gpu())]
    wanted: dict[str, Any] = {}
    built = functools.cache(lambda: build(program, chosen))

    def prepare(record: Record) -> Call:
        with_implementation, args = built()
        name = record.contender
        call = jax_call(with_implementation(name), *args, ran="" if record.ours else name)
        # jax runs first, so that its first_result_s includes XLA's tuning of the matrix products
        driver.describe(record, call)
        got = call.result()
        record.add(loss=float(got["y"][0]))
        driver.compare(record, got, wanted, TOLERANCE[program.dtype], "jax.nn")
        return call

    return driver.measure(program, [*peers, *chosen.implementations], prepare, chosen, required=["jax"])


COLUMNS = "ran", "status", "loss", "error", "p50_us", "speedup", "first_result_s"
BENCHMARK = Benchmark("programs", make_programs, run_program, COLUMNS, ("jax",))


def define_flags() -> None:
    flags.define("dtype", "implementations", "seed", "repeats", "width")
    flags.define(
        sequence="Sequence lengths of the transformer block and of attention.",
        vocab="Row lengths V of the classifier's logits.",
        tokens="Tokens per batch: rows of the classifier's logits, or the total over the sequences of block and"
        " attention (which have at least one sequence).",
    )
    flags.define_words("programs", PROGRAMS, "Which programs to run.")
    DEFINE_integer("heads", 8, "Attention heads.", 1)


main = driver.program(__name__, define_flags, BENCHMARK)
