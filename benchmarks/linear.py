"""How fast is the cross entropy of a projection? python -m benchmarks.linear --flagfile=configs/linear.flags

This is the loss of a language model: --batch tokens of width D are projected to V columns. The contenders, in
addition to our implementations, are:

matmul        the projection alone, stored in the dtype of x: every contender has to compute it
jax_scan      the usual code: a scan over 2,048 tokens at a time, under jax.checkpoint, float32 logits and dw
jax_float32   plain JAX, float32 logits in memory
jax_inexact   plain JAX, logits in memory in the dtype of x; a 16-bit dtype rounds them, which changes the loss
torch         F.cross_entropy(x @ w, labels)
torch_compile the same under torch.compile
liger         LigerFusedLinearCrossEntropyFunction of liger-kernel, dw summed in float32
cce           linear_cross_entropy of cut-cross-entropy, which skips small gradients

Before anything is timed, every loss and gradient is compared with jax_scan's.

products   The time relative to matmul. A forward computes 1 product, a mean with gradients 3. One loss per token
           with gradients computes 4 products if the logits are not kept.
MiB        Memory in addition to arguments and results: XLA's plan, or torch's peak. It includes any float32 dw.

liger and cce take w as (V, D). Their time does not include the copy of w into that layout.

With --training_steps, a small language model trains on the text in data/, once with the plain loss and once with
ours. The two loss curves are compared. The embedding of the model is also its head.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax import lax

import pallas_softmax
from benchmarks import beam_search
from benchmarks.support import flags, plot, report, timing
from benchmarks.support.contenders import Call, fetch_jax, jax_call, named
from benchmarks.support.driver import note, progress, require_extra, require_ran

# Width D and columns V of models' heads.
HEADS = {
    "small": (64, 1000),
    "gpt2": (768, 50257),
    "llama3": (4096, 128256),
    "gemma2": (2304, 256000),
    "qwen3": (4096, 151936),
}
TORCH = ("torch", "torch_compile", "liger", "cce")
PEERS = ("matmul", "jax_scan", "jax_float32", "jax_inexact", *TORCH)
REFERENCE = "jax_scan"
_SCANNED = 2048  # tokens per step of jax_scan
# The largest relative error (norm of the difference over norm) allowed against jax_scan: a few eps of the dtype to
# which dz is rounded. jax_scan's float32 products may use TF32, with an eps of 2^-10.
TOLERANCE = {"float32": 4 * 2**-10, "bfloat16": 4 * 2**-8, "float16": 4 * 2**-10}
# These may round the logits to a 16-bit dtype, so that their error grows with |z|. The error is shown, but allowed.
INEXACT = ("jax_inexact", *TORCH)


@dataclasses.dataclass(frozen=True)
class Loss:
    """One loss of one size: the case that contenders share."""

    tokens: int
    head: str
    dtype: str
    reduction: str  # mean or none
    direction: str  # forward or both

    @property
    def label(self) -> str:
        """A short name of the loss."""
        width, vocab = HEADS[self.head]
        size = f"[{self.tokens}, {width}] @ [{width}, {vocab}]"
        return f"{self.head} {size} {self.dtype} {self.reduction} {self.direction}"


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender in one loss. Empty columns were not measured."""

    loss: Loss
    contender: str  # one of PEERS, or one of our implementations
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"  # ok, differs (a peer), FAILED, not run, error
    reason: str = ""  # why the status is not ok
    value: float | None = None  # the mean loss
    # The largest error of the loss and the gradients against jax_scan, relative as in TOLERANCE.
    error: float | None = None
    memory_mib: float | None = None  # temporaries: XLA's plan, or torch's peak
    samples: int = 0
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    products: float | None = None  # p50 over matmul's p50
    first_result_s: float | None = None

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail."""
        return self.status in ("FAILED", "error")


# --- The contenders -------------------------------------------------------------------------------------


def _plain(x: jax.Array, w: jax.Array, labels: jax.Array, dtype: Any) -> jax.Array:
    """Returns one loss per token. The logits are in memory, in `dtype`."""
    z = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)
    return jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]


def _scanned(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns one loss per token, computing float32 logits of a few tokens at a time. dw is summed in float32."""
    wide = w.astype(jnp.float32)
    step = jax.checkpoint(lambda tokens: _plain(tokens[0], wide.astype(w.dtype), tokens[1], jnp.float32))
    size = min(_SCANNED, len(x))
    whole = len(x) // size * size
    parts = x[:whole].reshape(-1, size, x.shape[1]), labels[:whole].reshape(-1, size)
    losses = lax.map(step, parts).ravel()
    return losses if whole == len(x) else jnp.concatenate([losses, step((x[whole:], labels[whole:]))])


def _losses(contender: str, reduction: str) -> Callable:
    """Returns the loss (x, w, labels) -> mean or one loss per token, of a JAX contender."""
    mean = jnp.mean if reduction == "mean" else lambda losses: losses
    match contender:
        case "matmul":
            return lambda x, w, labels: x @ w
        case "jax_scan":
            return lambda *args: mean(_scanned(*args))
        case "jax_float32":
            return lambda x, w, labels: mean(_plain(x, w, labels, jnp.float32))
        case "jax_inexact":
            return lambda x, w, labels: mean(_plain(x, w, labels, x.dtype))
    return functools.partial(
        pallas_softmax.linear_cross_entropy,
        reduction="mean" if reduction == "mean" else None,
        implementation=named(contender),
    )


def _jax_call(row: Row, arrays: tuple) -> Call:
    """Returns the call of a JAX contender, and writes into its row the memory that XLA plans."""
    function = _losses(row.contender, row.loss.reduction)

    def forward(x: jax.Array, w: jax.Array, labels: jax.Array) -> dict[str, Any]:
        return {"y": function(x, w, labels)}

    def both(x: jax.Array, w: jax.Array, labels: jax.Array) -> dict[str, Any]:
        y, pull = jax.vjp(lambda x, w: function(x, w, labels), x, w)
        dx, dw = pull(jnp.full_like(y, 1 / y.size))
        return {"y": y, "dx": dx, "dw": dw}

    run = forward if row.contender == "matmul" or row.loss.direction == "forward" else both
    call = jax_call(run, *arrays, ran="" if row.ours else "jax")
    if call.extra_mb is not None:  # it includes the results
        results = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(run, *arrays)))
        row.memory_mib = (1e6 * call.extra_mb - results) / 2**20
    return call


def _torch_losses(contender: str, reduction: str) -> Callable:
    """Returns the loss (x, w, labels) of a torch contender. Its w is (V, D)."""
    import torch  # pyright: ignore[reportMissingImports]

    match contender:
        case "liger":
            from liger_kernel.ops import (  # pyright: ignore[reportMissingImports]
                LigerFusedLinearCrossEntropyFunction,
            )

            options = (None, None, -100, 0.0, 0.0, reduction, None, False, torch.float32)
            return lambda x, w, labels: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels, *options)[0]
        case "cce":
            from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

            return functools.partial(linear_cross_entropy, reduction=reduction)

    def losses(x: Any, w: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ w.T, labels, reduction=reduction)

    return torch.compile(losses) if contender == "torch_compile" else losses


def _torch_call(row: Row, arrays: tuple) -> Call:
    """Returns the call of a torch contender on the JAX arrays' memory, and writes torch's peak memory into its row."""
    import torch  # pyright: ignore[reportMissingImports]

    if timing.on_gpu() and not torch.cuda.is_available():
        raise NotImplementedError("this torch has no CUDA device")
    x, w, labels = map(torch.from_dlpack, arrays)
    labels, w = labels.long(), w.T  # a view of shape (V, D)
    if row.contender in ("liger", "cce"):
        w = w.contiguous()
    function = _torch_losses(row.contender, row.loss.reduction)

    def forward() -> dict[str, Any]:
        with torch.no_grad():
            return {"y": function(x, w, labels)}

    leaves = [a.detach().requires_grad_() for a in (x, w)]

    def both() -> dict[str, Any]:
        y = function(*leaves, labels)
        dx, dw = torch.autograd.grad(y, leaves, torch.full_like(y, 1 / y.numel()))
        return {"y": y.detach(), "dx": dx, "dw": dw.T}

    def wait(_: Any) -> None:
        if timing.on_gpu():
            torch.cuda.synchronize()

    run = forward if row.loss.direction == "forward" else both
    if timing.on_gpu():
        run()  # compiles, and allocates what stays, such as cuBLAS's workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        torch.cuda.synchronize()
        kept = sum(a.numel() * a.element_size() for a in result.values())
        row.memory_mib = (torch.cuda.max_memory_allocated() - before - kept) / 2**20
    return Call(run=run, wait=wait, fetch=fetch_jax, ran="torch")


# --- One loss -------------------------------------------------------------------------------------------


def make_losses(chosen: flags.Settings) -> list[Loss]:
    """Returns every loss that the flags ask for.

    A forward has one reduction only, because a mean and one loss per token cost the same.
    """
    return [
        Loss(tokens, head, dtype, reduction, direction)
        for head in chosen.head
        for tokens in chosen.batch
        for dtype in chosen.dtype
        for reduction in chosen.reduction
        for direction in chosen.direction
        if direction == "both" or reduction == chosen.reduction[0]
    ]


def _arrays(loss: Loss, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    width, vocab = HEADS[loss.head]
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (loss.tokens, width), loss.dtype)
    w = jax.random.normal(keys[1], (width, vocab), loss.dtype) * jnp.asarray(2 * width**-0.5, loss.dtype)
    return x, w, jax.random.randint(keys[2], (loss.tokens,), 0, vocab)


@jax.jit
def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the norm of the difference, relative to the norm of `want`."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(jnp.ravel(got - want)) / jnp.linalg.norm(jnp.ravel(want))


def run_loss(loss: Loss, chosen: flags.Settings) -> list[Row]:
    """Compares all contenders of one loss with jax_scan, then times them together."""
    names = dict.fromkeys([REFERENCE, "matmul", *chosen.peers, *chosen.implementations])
    rows = {name: Row(loss, name, ours=name not in PEERS) for name in names}
    calls: dict[str, Call] = {}
    want: dict[str, jax.Array] = {}
    try:
        arrays = _arrays(loss, chosen.seed)
    except Exception as error:
        for row in rows.values():
            note(row, error)
        return list(rows.values())
    for name, row in rows.items():
        try:
            call = (_torch_call if name in TORCH else _jax_call)(row, arrays)
            row.ran, row.first_result_s = call.ran, call.first_result_s
            require_ran(row)
            result = call.run()
            call.wait(result)
            if name != "matmul":
                got = result
                if row.ran == "torch":
                    got = {key: jnp.from_dlpack(a.contiguous()) for key, a in result.items()}
                row.value = float(jnp.mean(got["y"]))
                want = want or got
                row.error = float(np.max([_error(got[key], want[key]) for key in want]))  # np.max keeps a NaN
            calls[name] = call
        except Exception as error:
            note(row, error)
            continue
        if row.error is not None and not row.error <= TOLERANCE[loss.dtype]:
            row.status = "differs" if name in INEXACT else "FAILED"
            row.reason = f"{row.error:.3g} off {REFERENCE}'s, more than {TOLERANCE[loss.dtype]:.3g}"
            if row.status == "FAILED":
                del calls[name]
    want.clear()
    times = timing.interleave(
        calls, chosen.repeats, chosen.seconds, lambda name, error: note(rows[name], error)
    )
    for name, seconds in times.items():
        row = rows[name]
        timing.write_samples(row, seconds)
        if "matmul" in times:
            row.products = float(np.median(seconds) / np.median(times["matmul"]))
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """Returns the rows as aligned text, with a heading per loss and the columns explained at the end."""
    head = ["  contender", "ran", "check", "loss", "error", "p50 us", "products", "MiB"]

    def cells(row: Row, notes: report.Notes) -> list[str]:
        line = [f"  {row.contender}", row.ran, report.status_cell(row, notes)]
        return [*line, *map(report.cell, (row.value, row.error, row.p50_us, row.products, row.memory_mib))]

    texts = {
        "ran": report.RAN,
        "check": "ok if the error is no larger than a few eps of the dtype",
        "error": f"the largest error of the loss or a gradient against {REFERENCE}, relative to the norm",
        "p50 us": "the median time of a call",
        "products": "the median time relative to matmul, the projection alone",
        "MiB": "temporaries, including any float32 dw: XLA's plan, or torch's peak",
    }
    return report.grouped(head, rows, lambda row: row.loss.label, cells, texts)


def draw(path: Path, rows: list[Row], where: dict[str, str]) -> None:
    """Writes the PNG: for each loss, its contenders' times at the left and their memory at the right."""
    plt = plot.pyplot()
    losses = list(dict.fromkeys(row.loss for row in rows))
    most = max(sum(row.loss == loss for row in rows) for loss in losses)
    size = (9.5, 1 + len(losses) * (0.6 + 0.2 * most))
    figure, axes = plt.subplots(len(losses), 2, squeeze=False, layout="constrained", figsize=size)
    for (times, memory), loss in zip(axes, losses):
        own = [row for row in reversed(rows) if row.loss == loss and row.p50_us]
        names = [plot.label(row.contender, row.ours) for row in own]
        colors = [plot.color(row.contender) for row in own]
        for axis, values, unit in (
            (times, [row.p50_us / 1e3 for row in own if row.p50_us], "ms"),
            (memory, [(row.memory_mib or 0) / 1024 for row in own], "GiB of temporaries"),
        ):
            bars = axis.barh(names, values, color=colors)
            axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
            axis.margins(x=0.12)
            axis.set_xlabel(unit, fontsize=8)
            axis.tick_params(labelsize=7)
        times.set_title(loss.label, fontsize=9, loc="left")
        memory.tick_params(axis="y", labelleft=False)
    figure.suptitle(
        f"the cross entropy of a projection on {where['device']}, jax {where['jax']}", fontsize=10
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --- A language model -----------------------------------------------------------------------------------

_CONTEXT = 8  # previous tokens that the model sees
_LAST = 10  # the final loss is the mean over this many steps


@dataclasses.dataclass
class Curve:
    """The columns of the CSV for one training run."""

    contender: str  # jax, or ours
    vocab: int
    width: int
    dtype: str
    tokens: int
    steps: int
    first_loss: float
    last_loss: float  # the mean of the last steps
    largest_gap: float  # the largest difference from jax's loss, over all steps
    step_us: float  # wall time
    memory_mib: float  # temporaries of a step: XLA's plan


def train(contender: str, vocab: int, dtype: str, chosen: flags.Settings) -> tuple[np.ndarray, float, float]:
    """Trains a perceptron over the last tokens with Adam. Its embedding is also its output layer.

    Returns:
      The losses, the seconds of a step, and the MiB of its temporaries.
    """
    width, steps = chosen.width, chosen.training_steps
    ids = jnp.asarray(beam_search.token_ids(vocab))
    keys = jax.random.split(jax.random.key(chosen.seed), 4)
    weights = {
        "embed": width**-0.5 * jax.random.normal(keys[0], (vocab, width)),
        "input": (_CONTEXT * width) ** -0.5 * jax.random.normal(keys[1], (_CONTEXT * width, width)),
        "hidden": width**-0.5 * jax.random.normal(keys[2], (width, width)),
    }
    starts = jax.random.randint(keys[3], (steps, chosen.tokens), 0, len(ids) - _CONTEXT)

    def loss(weights: dict[str, jax.Array], start: jax.Array) -> jax.Array:
        text = ids[start[:, None] + jnp.arange(_CONTEXT + 1)]
        embed = weights["embed"].astype(dtype)
        x = embed[text[:, :-1]].reshape(len(text), -1)
        x = jax.nn.gelu(x @ weights["input"].astype(dtype)) @ weights["hidden"].astype(dtype)
        if contender == "jax":
            return jnp.mean(_plain(x, embed.T, text[:, -1], jnp.float32))
        return pallas_softmax.linear_cross_entropy(x, embed, text[:, -1], transpose_w=True)

    def adam(state: tuple, i: jax.Array, start: jax.Array) -> tuple[tuple, jax.Array]:
        weights, mean, square = state
        value, grads = jax.value_and_grad(loss)(weights, start)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, grads)
        rate = 2e-3 * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
        weights = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), weights, mean, square)
        return (weights, mean, square), value

    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))
    step = jax.jit(adam, donate_argnums=0).lower(state, jnp.float32(0), starts[0]).compile()
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


def curves(chosen: flags.Settings) -> list[Curve]:
    """Trains with the plain loss (float32 logits) and with ours, from the same weights on the same text."""
    found = []
    for vocab in chosen.vocab if chosen.training_steps else ():
        for dtype in chosen.dtype:
            reference = np.zeros(0)
            for contender in ("jax", "ours"):
                losses, seconds, memory = train(contender, vocab, dtype, chosen)
                reference = losses if contender == "jax" else reference
                found.append(
                    Curve(
                        contender,
                        vocab,
                        chosen.width,
                        dtype,
                        chosen.tokens,
                        len(losses),
                        float(losses[0]),
                        float(np.mean(losses[-_LAST:])),
                        float(np.abs(losses - reference).max()),
                        1e6 * seconds,
                        memory,
                    )
                )
    return found


def training_table(found: list[Curve]) -> str:
    """Returns the training runs as aligned text."""
    lines = [["  contender", "V", "dtype", "first loss", "last loss", "largest gap", "step us", "MiB"]]
    for curve in found:
        numbers = (curve.first_loss, curve.last_loss, curve.largest_gap, curve.step_us, curve.memory_mib)
        lines.append(
            [f"  {curve.contender}", str(curve.vocab), curve.dtype]
            + [report.number(value, 5) if value else "0" for value in numbers]
        )
    return report.columns(lines, left=3)


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_words("head", tuple(HEADS), "The models to take the projection's width and columns from.")
    flags.define_integers("batch", "How many tokens are projected.")
    flags.define_words("reduction", ("mean", "none"), "One mean, or one loss per token.")
    flags.define_words("direction", ("forward", "both"), "The loss alone, or with its gradients.")
    flags.define_dtype()
    flags.define_implementations()
    flags.define_words("peers", PEERS, "The contenders to compare with.", PEERS[1:4])
    flags.define_integer("training_steps", "Training steps of the language model; 0 skips the training.", 0)
    flags.define_integer("tokens", "Tokens per training step.")
    flags.define_integer("width", "Width of the language model.")
    flags.define_integers("vocab", "Columns of the language model's head.")
    flags.define_seed()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    require_extra()
    rows = [row for loss in progress(make_losses(chosen), "losses") for row in run_loss(loss, chosen)]
    where = report.environment(chosen.commit)
    report.write("linear", rows, chosen, where)
    draw(Path(chosen.output_dir) / "linear.png", rows, where)
    kind = "device time" if timing.on_gpu() else "wall time"
    print(f"\nlinear on {where['device']}, jax {where['jax']}; {kind} of one call")
    print(table(rows))
    if trained := curves(chosen):
        report.write("linear_training", trained, chosen, where)
        print(f"\ntraining, {chosen.training_steps} steps of {chosen.tokens} tokens; wall time of a step")
        print(training_table(trained))
    print(f"files: {chosen.output_dir}/linear*.csv, .json, .png")
    return report.exit_code("linear", sum(row.fails for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
