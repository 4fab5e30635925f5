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
from absl import app

import pallas_softmax
from benchmarks.support import flags, report, timing
from benchmarks.support.contenders import jax_call, named
from benchmarks.support.driver import note, progress, require_extra, require_ran

# Peers that compute attention in one call.
FUSED: dict[str, Callable] = {
    "dot_product_attention": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}

# The largest relative error (norm of the difference over norm) of the loss and of every gradient, against the same
# program with jax.nn: a few eps. The matrix products of float32 may use TF32. In 16-bit dtypes both softmaxes round
# their results, and a gradient sums many of these.
TOLERANCE = {"float32": 4 * 2**-11, "bfloat16": 4 * 2**-7, "float16": 4 * 2**-10}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program on inputs of one size."""

    program: str
    size: int  # the sequence length, or V
    dtype: str
    remat: bool

    @property
    def label(self) -> str:
        """A short name of the program."""
        return f"{self.program} {self.size} {self.dtype}{' remat' if self.remat else ''}"


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender in one program. Empty columns were not measured."""

    program: Program
    contender: str  # jax, one of our implementations, or one of FUSED
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"  # ok, FAILED, not run, error
    reason: str = ""  # why the status is not ok
    loss: float | None = None
    error: float | None = None  # against jax, relative as in TOLERANCE
    samples: int = 0
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    speedup: float | None = None  # p50 of jax over this p50
    # jax runs first, so that its time includes XLA's tuning of the matrix products.
    first_result_s: float | None = None

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail. A fused attention never does: it need not support every case."""
        return self.status in ("FAILED", "error") and self.contender not in FUSED


def functions(implementation: str) -> SimpleNamespace:
    """Returns softmax, log_softmax and logsumexp over the last axis: jax.nn's for "jax", otherwise ours."""
    names = flags.FUNCTIONS
    if implementation == "jax":
        return SimpleNamespace(**{name: getattr(jax.nn, name) for name in names})

    def ours(function: Callable) -> Callable:
        return lambda x, axis=-1, where=None: function(
            x, axis=axis, where=where, implementation=named(implementation)
        )

    return SimpleNamespace(**{each: ours(getattr(pallas_softmax, each)) for each in names})


def _normed(x: jax.Array) -> jax.Array:
    """Returns x divided by its root mean square along the last axis."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(nn: Any, heads: int, mask_by_where: bool, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns a block's mean squared output, as a loss. x is (batch, sequence, width)."""
    batch, sequence, width = x.shape
    qkv = (_normed(x) @ weights["qkv"]).reshape(batch, sequence, 3, heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(x.dtype)
    causal = jnp.tri(sequence, dtype=bool)
    if mask_by_where:
        p = nn.softmax(scores, where=causal)
    else:
        p = nn.softmax(jnp.where(causal, scores, -jnp.inf))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(batch, sequence, width) @ weights["out"]
    x = x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def attention(nn: Any, causal: bool, keys_and_values: dict[str, jax.Array], queries: jax.Array) -> jax.Array:
    """Returns attention's mean squared output, as a loss. All arrays are (batch, sequence, heads, depth)."""
    keys, values = keys_and_values["keys"], keys_and_values["values"]
    if callable(nn):
        out: Any = nn(queries, keys, values, is_causal=causal)
    else:
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(queries.shape[-1]).astype(
            queries.dtype
        )
        where = jnp.tri(queries.shape[1], dtype=bool) if causal else None
        out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores, where=where), values)
    return jnp.mean(out.astype(jnp.float32) ** 2)


def loss(
    nn: Any, by_logsumexp: bool, labels: jax.Array, weights: dict[str, jax.Array], hidden: jax.Array
) -> jax.Array:
    """Returns the mean cross entropy of the logits hidden @ head against the labels."""
    logits = hidden @ weights["head"]

    def at_label(a: jax.Array) -> jax.Array:
        return jnp.take_along_axis(a, labels[:, None], -1)[:, 0].astype(jnp.float32)

    if by_logsumexp:
        return jnp.mean(nn.logsumexp(logits, axis=-1).astype(jnp.float32) - at_label(logits))
    return -jnp.mean(at_label(nn.log_softmax(logits)))


def make_programs(chosen: flags.Settings) -> list[Program]:
    """Returns every program on every size: sequence lengths for block and attention, V for the loss."""
    if chosen.width % chosen.heads:
        raise SystemExit(
            f"--width={chosen.width} is not accepted; with --heads={chosen.heads} it takes a multiple of"
            f" {chosen.heads}"
        )
    return [
        Program(name, size, dtype, remat)
        for name in chosen.programs
        for size in (chosen.vocab if name.startswith("loss") else chosen.sequence)
        for dtype in chosen.dtype
        for remat in (False, True)
    ]


def build(program: Program, chosen: flags.Settings) -> tuple[Callable[[str], Callable], tuple]:
    """Returns (implementation's name) -> program, and the program's arguments: weights, inputs and maybe labels."""
    width, tokens = chosen.width, chosen.tokens
    keys = iter(jax.random.split(jax.random.key(chosen.seed), 8))

    def normal(shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(program.dtype)

    def matrix(rows: int, columns: int) -> jax.Array:
        return normal((rows, columns), rows**-0.5)

    if program.program.startswith("block"):
        weights = {
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width),
        }
        args = (weights, normal((max(1, tokens // program.size), program.size, width)))
    elif program.program.startswith("attention"):
        shape = (max(1, tokens // program.size), program.size, chosen.heads, width // chosen.heads)
        args = ({"keys": normal(shape), "values": normal(shape)}, normal(shape))
    else:
        labels = jax.random.randint(next(keys), (tokens,), 0, program.size)
        args = ({"head": matrix(width, program.size)}, normal((tokens, width)), labels)

    def with_implementation(name: str) -> Callable:
        nn = FUSED[name] if name in FUSED else functions(name)

        def function(weights: dict[str, jax.Array], x: jax.Array, *labels: jax.Array) -> jax.Array:
            if labels:
                return loss(nn, program.program == "loss_lse", labels[0], weights, x)
            if program.program.startswith("attention"):
                return attention(nn, program.program == "attention_causal", weights, x)
            return block(nn, chosen.heads, program.program == "block_where", weights, x)

        function = jax.checkpoint(function) if program.remat else function
        differentiated = jax.value_and_grad(function, argnums=(0, 1))
        return lambda *args: {"y": differentiated(*args)}

    return with_implementation, args


@jax.jit
def _errors(got: Any, want: Any) -> Any:
    """Returns the relative error of each array: the norm of the difference over the norm of `want`."""

    def error(got: jax.Array, want: jax.Array) -> jax.Array:
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.linalg.norm(jnp.ravel(got - want)) / jnp.linalg.norm(jnp.ravel(want))

    return jax.tree.map(error, got, want)


def run_program(program: Program, chosen: flags.Settings) -> list[Row]:
    """Compares all contenders of one program with jax.nn's results, then times them together."""
    peers = ["jax", *(FUSED if program.program.startswith("attention") else ())]
    if not timing.on_gpu() and "cudnn" in peers:
        peers.remove("cudnn")
    rows = {name: Row(program, name, ours=name not in peers) for name in [*peers, *chosen.implementations]}
    calls = {}
    want = None
    try:
        with_implementation, args = build(program, chosen)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())
    for name, row in rows.items():
        try:
            call = jax_call(with_implementation(name), *args, ran="" if row.ours else name)
            row.ran, row.first_result_s = call.ran, call.first_result_s
            require_ran(row)
            got = call.run()["y"]
            row.loss = float(got[0])
            if want is None:
                want = got
            row.error = float(np.max([np.asarray(e) for e in jax.tree.leaves(_errors(got, want))]))
        except Exception as error:
            note(row, error)
            continue
        if row.error <= TOLERANCE[program.dtype]:  # false for a NaN
            calls[name] = call
        else:
            row.status = "FAILED" if row.ours else "error"
            row.reason = f"{row.error:.3g} off jax.nn's, more than {TOLERANCE[program.dtype]:.3g}"
    times = timing.interleave(
        calls, chosen.repeats, chosen.seconds, lambda name, error: note(rows[name], error)
    )
    for name, seconds in times.items():
        row = rows[name]
        timing.write_samples(row, seconds)
        if "jax" in times:
            row.speedup = float(np.median(times["jax"]) / np.median(seconds))
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Returns the rows as aligned text, with a heading per program and the columns explained at the end."""
    head = ["  contender", "ran", "check", "loss", "error", "p50 us", "speed-up", "first s"]

    def cells(row: Row, notes: report.Notes) -> list[str]:
        line = [f"  {row.contender}", row.ran, report.status_cell(row, notes)]
        line += map(report.cell, (row.loss, row.error, row.p50_us))
        return [*line, report.cell(row.speedup, "{:.2f}x"), report.cell(row.first_result_s, "{:.2f}")]

    texts = {
        "ran": report.RAN,
        "check": "ok if the error is no larger than a few eps of the dtype",
        "error": "the largest error of the loss or a gradient against jax, relative to the norm",
        "p50 us": "the median time of a call",
        "speed-up": report.SPEEDUP,
        "first s": f"{report.FIRST}; jax runs first, so its time includes XLA's tuning of the matrix products",
    }
    return report.grouped(head, rows, lambda row: row.program.label, cells, texts)


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_words("programs", flags.PROGRAMS, "Which programs to run.")
    flags.define_integers("sequence", "Sequence lengths of the transformer block and of attention.")
    flags.define_integers("vocab", "Row lengths V of the classifier's logits.")
    flags.define_integer(
        "tokens",
        "Tokens per batch: rows of the classifier's logits, or the total over the sequences of block and attention"
        " (which have at least one sequence).",
    )
    flags.define_integer("heads", "Attention heads.")
    flags.define_integer("width", "Size of a token's hidden state.")
    flags.define_dtype()
    flags.define_implementations()
    flags.define_seed()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    require_extra()
    programs = make_programs(chosen)
    rows = [row for program in progress(programs, "programs") for row in run_program(program, chosen)]
    where = report.environment(chosen.commit)
    report.write("programs", rows, chosen, where)
    kind = "device time" if timing.on_gpu() else "wall time"
    print(f"\nprograms on {where['device']}, jax {where['jax']}; {kind} of one value_and_grad")
    print(table(rows))
    print(f"files: {chosen.output_dir}/programs.csv, .json")
    return report.exit_code("programs", sum(row.fails for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
