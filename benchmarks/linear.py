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
quack         chunked_linear_cross_entropy of QuACK, 4,096 tokens at a time
quack_exp     the same with its "scaled exp" kernels, which store exponentials in place of logits

With --function=token_stats the contenders compute a loss, entropy, logsumexp and argmax per token. They differentiate
the mean of loss + entropy. liger is then LigerFusedLinearScaledCrossEntropyFunction, which has loss and entropy only.
The other torch contenders have no entropy. Two yardsticks compute less, and are not checked:

logsumexp     linear_logsumexp, to compare forwards with
log_probs     linear_log_probs, to compare gradients with

With --function=kl_divergence the contenders compute the divergence --beta from a teacher of width --teacher_width.
torch's contenders have none. matmul is the student's projection, so a mean with gradients computes 4 products if the
teacher is as wide.

Before anything is timed, every loss and gradient is compared with jax_scan's.

products    The time relative to matmul. A forward computes 1 product, a mean with gradients 3. One loss per token
           with gradients computes 4 products if the logits are not kept.
memory_mib  Memory in addition to arguments and results: XLA's plan, or torch's peak. It includes any float32 dw.

--w_shape=VxD stores w as (V, D), and ours takes it with transpose_w=True. liger, cce and quack_exp need that shape.
With --w_shape=DxV their time does not include the copy of w.

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
from absl import flags as absl_flags
from jax import lax

import pallas_softmax
from benchmarks.support import driver, flags, plot, timing
from benchmarks.support.contenders import Call, jax_call, named, torch_and_wait
from benchmarks.support.driver import Benchmark
from benchmarks.support.language_model import adam, token_ids
from benchmarks.support.result import Record, View, case_columns

# Width D and columns V of models' heads.
HEADS = {
    "small": (64, 1000),
    "gpt2": (768, 50257),
    "llama3": (4096, 128256),
    "gemma2": (2304, 256000),
    "qwen3": (4096, 151936),
    "olmo": (2048, 50304),
    "bitnet": (2560, 128256),
    "llama2_70b": (8192, 32000),
}
W_SHAPES = ("DxV", "VxD")
TORCH = ("torch", "torch_compile", "liger", "cce", "quack", "quack_exp")
YARDSTICKS = ("matmul", "logsumexp", "log_probs")
PEERS = (*YARDSTICKS, "jax_scan", "jax_float32", "jax_inexact", *TORCH)
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
    w_shape: str = "DxV"
    workspace_mib: int = 512
    function: str = "cross_entropy"  # or token_stats, kl_divergence
    teacher_width: int = 0  # kl_divergence only
    beta: float = 0.0

    @property
    def stats(self) -> bool:
        return self.function == "token_stats"


def _logits(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)


def _divergence(z: jax.Array, u: jax.Array, beta: float) -> jax.Array:
    """Returns the divergence of each row of a student's logits z from a teacher's logits u."""
    log_q, log_p = jax.nn.log_softmax(z), jax.nn.log_softmax(u)

    def kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(log_a) * (log_a - log_b), -1)

    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def _plain(x: jax.Array, w: jax.Array, labels: Any, dtype: Any, stats: bool = False, beta=0.0) -> jax.Array:
    """Returns one loss per token, or what `_stacked` returns. The logits are in memory, in `dtype`.

    For a divergence, `labels` are teacher_x and teacher_w.
    """
    z = _logits(x, w, dtype)
    if isinstance(labels, tuple):
        teacher_x, teacher_w = labels
        return _divergence(z, _logits(teacher_x, teacher_w, dtype), beta)
    logsumexp = jax.nn.logsumexp(z, -1)
    losses = logsumexp - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    if not stats:
        return losses
    entropy = logsumexp - jnp.sum(jnp.exp(z - logsumexp[:, None]) * z, -1)
    return _stacked(-losses, entropy, logsumexp, jnp.argmax(z, -1))


def _stacked(log_probs: Any, entropy: jax.Array, logsumexp: jax.Array, argmax: jax.Array) -> jax.Array:
    """Returns four numbers per token, (tokens, 4): the loss and the other statistics."""
    return jnp.stack([-log_probs, entropy, logsumexp, argmax.astype(jnp.float32)], -1)


def _scanned(x: jax.Array, w: jax.Array, labels: Any, stats: bool, beta: float) -> jax.Array:
    """Returns what `_plain` returns, from float32 logits of a few tokens at a time. dw is summed in float32."""
    wide = w.astype(jnp.float32)
    of_tokens, *teacher_w = labels if isinstance(labels, tuple) else (labels,)

    @jax.checkpoint
    def step(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        others = (tokens[1], *teacher_w) if teacher_w else tokens[1]
        return _plain(tokens[0], wide.astype(w.dtype), others, jnp.float32, stats, beta)

    size = min(_SCANNED, len(x))
    whole = len(x) // size * size
    parts = tuple(a[:whole].reshape(-1, size, *a.shape[1:]) for a in (x, of_tokens))
    losses = lax.map(step, parts)
    losses = losses.reshape(whole, *losses.shape[2:])
    return losses if whole == len(x) else jnp.concatenate([losses, step((x[whole:], of_tokens[whole:]))])


def _losses(contender: str, loss: Loss) -> Callable:
    """Returns the function (x, w, labels) -> mean, one loss per token, or `_stacked`, of a JAX contender."""
    mean = jnp.mean if loss.reduction == "mean" else lambda losses: losses
    transposed = loss.w_shape == "VxD"
    columns = (lambda w: w.T) if transposed else (lambda w: w)
    if loss.function == "kl_divergence" and contender not in ("matmul", "logsumexp", "log_probs"):
        return _divergences(contender, loss, mean, columns)
    options: dict[str, Any] = {"transpose_w": transposed, "workspace_bytes": loss.workspace_mib * 2**20}
    match contender:
        case "matmul":
            return lambda x, w, labels: x @ columns(w)
        case "jax_scan":
            return lambda x, w, labels: mean(_scanned(x, columns(w), labels, loss.stats, 0.0))
        case "jax_float32":
            return lambda x, w, labels: mean(_plain(x, columns(w), labels, jnp.float32, loss.stats))
        case "jax_inexact":
            return lambda x, w, labels: mean(_plain(x, columns(w), labels, x.dtype, loss.stats))
        case "logsumexp":
            return lambda x, w, labels: pallas_softmax.linear_logsumexp(x, w, **options)
        case "log_probs":
            return functools.partial(pallas_softmax.linear_log_probs, **options)
    options["implementation"] = named(contender)
    if loss.stats:
        return lambda x, w, labels: _stacked(*pallas_softmax.linear_token_stats(x, w, labels, **options)[:4])
    reduction = "mean" if loss.reduction == "mean" else None
    return functools.partial(pallas_softmax.linear_cross_entropy, reduction=reduction, **options)


def _divergences(contender: str, loss: Loss, mean: Callable, columns: Callable) -> Callable:
    """Does what `_losses` does, for a divergence: the function takes (teacher_x, teacher_w) in place of labels."""

    def stored(x: jax.Array, w: jax.Array, teacher: tuple, dtype: Any) -> jax.Array:
        return mean(_plain(x, columns(w), (teacher[0], columns(teacher[1])), dtype, beta=loss.beta))

    match contender:
        case "jax_scan":
            return lambda x, w, teacher: mean(
                _scanned(x, columns(w), (teacher[0], columns(teacher[1])), False, loss.beta)
            )
        case "jax_float32":
            return functools.partial(stored, dtype=jnp.float32)
        case "jax_inexact":
            return lambda x, w, teacher: stored(x, w, teacher, x.dtype)
    ours = functools.partial(
        pallas_softmax.linear_kl_divergence,
        beta=loss.beta,
        reduction="mean" if loss.reduction == "mean" else None,
        transpose_w=loss.w_shape == "VxD",
        workspace_bytes=loss.workspace_mib * 2**20,
        implementation=named(contender),
    )
    return lambda x, w, teacher: ours(x, w, *teacher)


def _jax_call(record: Record, arrays: tuple) -> Call:
    """Returns the call of a JAX contender, and writes into its record the memory that XLA plans."""
    function = _losses(record.contender, record.case)

    def forward(x: jax.Array, w: jax.Array, labels: jax.Array) -> dict[str, Any]:
        y = function(x, w, labels)
        return {"y": y} if record.contender == "matmul" else _by_name(y)

    def both(x: jax.Array, w: jax.Array, labels: jax.Array) -> dict[str, Any]:
        y, pull = jax.vjp(lambda x, w: function(x, w, labels), x, w)
        g = jnp.full_like(y, 1 / (len(y) if y.ndim else 1))
        dx, dw = pull(g if y.ndim < 2 else g.at[:, 2:].set(0))
        return _by_name(y) | {"dx": dx, "dw": dw}

    run = forward if record.contender == "matmul" or record.case.direction == "forward" else both
    call = jax_call(run, *arrays, ran="" if record.ours else "jax")
    if call.extra_mb is not None:  # it includes the results
        results = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(run, *arrays)))
        record.add(memory_mib=(1e6 * call.extra_mb - results) / 2**20)
    return call


def _by_name(y: Any) -> dict[str, Any]:
    """Returns losses as y, and statistics one by one, because each has an error of its own."""
    return {"y": y} if y.ndim < 2 else dict(zip(("y", "entropy", "logsumexp", "argmax"), y.T))


def _torch_losses(contender: str, loss: Loss) -> Callable:
    """Returns the function (x, w, labels) of a torch contender. Its w is (V, D). Statistics are loss and entropy."""
    import torch  # pyright: ignore[reportMissingImports]

    reduction = loss.reduction
    if loss.function == "kl_divergence":
        raise NotImplementedError(f"{contender} has no divergence")
    if loss.stats and contender != "liger":
        raise NotImplementedError(f"{contender} has no entropy")
    match contender:
        case "liger" if loss.stats:
            from liger_kernel.ops import (  # pyright: ignore[reportMissingImports]
                LigerFusedLinearScaledCrossEntropyFunction,
            )

            options = (1.0, -100, 1, True)  # temperature, ignored label, tiles per cluster, with the entropy
            function = LigerFusedLinearScaledCrossEntropyFunction.apply
            return lambda x, w, labels: torch.stack(function(x, w, labels, *options), -1)
        case "liger":
            from liger_kernel.ops import (  # pyright: ignore[reportMissingImports]
                LigerFusedLinearCrossEntropyFunction,
            )

            options = (None, None, -100, 0.0, 0.0, reduction, None, False, torch.float32)
            return lambda x, w, labels: LigerFusedLinearCrossEntropyFunction.apply(x, w, labels, *options)[0]
        case "cce":
            from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

            return functools.partial(linear_cross_entropy, reduction=reduction)
        case "quack" | "quack_exp":
            return _quack(contender == "quack_exp", reduction)

    def losses(x: Any, w: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ w.T, labels, reduction=reduction)

    return torch.compile(losses) if contender == "torch_compile" else losses


def _quack(scaled_exp: bool, reduction: str) -> Callable:
    """Returns the loss (x, w, labels) of QuACK. It raises NotImplementedError for what QuACK does not take."""
    from quack import linear_cross_entropy as quack  # pyright: ignore[reportMissingImports]

    chunk = {"chunk_size": 4096, "reduction": reduction}

    def losses(x: Any, w: Any, labels: Any) -> Any:
        if not x.is_cuda:
            raise NotImplementedError("QuACK has kernels for NVIDIA GPUs only")
        if reduction == "none" or len(x) % 8 or len(w) % 8:
            raise NotImplementedError("QuACK takes means, of a multiple of 8 tokens, with V a multiple of 8")
        if scaled_exp and not quack.scaled_exp_lce_supported(x, w, **chunk):
            raise NotImplementedError(
                "QuACK's scaled exp takes bfloat16, V a multiple of 128, and an H100 or H200"
            )
        return quack.chunked_linear_cross_entropy(x, w, labels, **chunk, use_scaled_exp=scaled_exp)

    return losses


def _torch_call(record: Record, arrays: tuple) -> Call:
    """Returns the call of a torch contender on the JAX arrays' memory, and records torch's peak memory."""
    torch, wait = torch_and_wait()
    function = _torch_losses(record.contender, record.case)
    x, w, labels = map(torch.from_dlpack, arrays)
    transposed = record.case.w_shape == "VxD"
    labels, w = labels.long(), w if transposed else w.T  # a view of shape (V, D)
    if record.contender in ("liger", "cce", "quack_exp"):
        w = w.contiguous()

    def forward() -> dict[str, Any]:
        with torch.no_grad():
            return _by_name(function(x, w, labels))

    leaves = [a.detach().requires_grad_() for a in (x, w)]

    def both() -> dict[str, Any]:
        y = function(*leaves, labels)
        dx, dw = torch.autograd.grad(y, leaves, torch.full_like(y, 1 / (len(y) if y.ndim else 1)))
        return _by_name(y.detach()) | {"dx": dx, "dw": dw if transposed else dw.T}

    run = forward if record.case.direction == "forward" else both
    if timing.on_gpu():
        run()  # compiles, and allocates what stays, such as cuBLAS's workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        torch.cuda.synchronize()
        kept = sum(a.numel() * a.element_size() for a in result.values())
        record.add(memory_mib=(torch.cuda.max_memory_allocated() - before - kept) / 2**20)
    return Call(run, "torch", wait)


def make_losses(chosen: Any) -> list[Loss]:
    """Returns every loss that the flags ask for.

    A forward has one reduction only, because a mean and one loss per token cost the same. Statistics are per token.
    """
    return [
        Loss(tokens, head, dtype, reduction, direction, w_shape, workspace, function, *teacher)
        for function in chosen.function
        for head in chosen.head
        for tokens in chosen.batch
        for dtype in chosen.dtype
        for w_shape in chosen.w_shape
        for workspace in chosen.workspace_mib
        for teacher in _teachers(function, head, chosen)
        for reductions in [("none",) if function == "token_stats" else chosen.reduction]
        for reduction in reductions
        for direction in chosen.direction
        if direction == "both" or reduction == reductions[0]
    ]


def _teachers(function: str, head: str, chosen: Any) -> list[tuple[int, float]]:
    """Returns the teacher's width and beta of each divergence; one pair for another function."""
    if function != "kl_divergence":
        return [(0, 0.0)]
    return [
        (width or HEADS[head][0], float(beta))
        for width in chosen.teacher_width or (0,)
        for beta in chosen.beta
    ]


def _arrays(loss: Loss, seed: int) -> tuple[jax.Array, jax.Array, Any]:
    width, vocab = HEADS[loss.head]
    keys = jax.random.split(jax.random.key(seed), 5)

    def projection(keys: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(keys[0], (loss.tokens, width), loss.dtype)
        w = jax.random.normal(keys[1], (width, vocab), loss.dtype) * jnp.asarray(2 * width**-0.5, loss.dtype)
        return x, w.T if loss.w_shape == "VxD" else w

    x, w = projection(keys[:2], width)
    if loss.function == "kl_divergence":
        return x, w, projection(keys[3:], loss.teacher_width)
    return x, w, jax.random.randint(keys[2], (loss.tokens,), 0, vocab)


def run_loss(loss: Loss, chosen: Any) -> list[Record]:
    """Compares all contenders of one loss with jax_scan, then times them together.

    A failure of a torch library does not fail the run.
    """
    names = dict.fromkeys([REFERENCE, "matmul", *chosen.peers, *chosen.implementations])
    records = [Record(loss, name, ours=name not in PEERS, required=name not in TORCH) for name in names]
    arrays = functools.cache(lambda: _arrays(loss, chosen.seed))
    wanted: dict[str, jax.Array] = {}

    def prepare(record: Record) -> Call:
        name, allowed = record.contender, TOLERANCE[loss.dtype]
        call = (_torch_call if name in TORCH else _jax_call)(record, arrays())
        driver.describe(record, call)
        got = call.run()
        call.wait(got)
        if name in YARDSTICKS:
            return call
        if name in TORCH:
            got = {key: jnp.from_dlpack(a.contiguous()) for key, a in got.items()}
        wanted.update(wanted or got)
        error = driver.largest_error(got, {key: wanted[key] for key in got})
        record.add(value=float(jnp.mean(got["y"])), error=error)
        if not error <= allowed:
            reason = f"{error:.3g} off {REFERENCE}'s, more than {allowed:.3g}"
            if name not in INEXACT:
                raise driver.Wrong(reason)
            record.status, record.reason = "differs", reason
        if record is records[-1]:
            wanted.clear()
        return call

    driver.measure(records, prepare, chosen)
    return records


def _derive(rows: Any, of: Callable) -> None:
    rows["products"] = rows.p50_us / of("p50_us", "matmul")


def _beside_fastest(losses: list[Any]) -> str:
    """Returns our speed relative to the fastest other code that computes the same, such as "0.8 to 1.1 times"."""
    found = []
    for own in losses:
        others = own[~own.ours.astype(bool) & ~own.contender.isin(YARDSTICKS)]
        found += list(others.p50_us.min() / own.p50_us[own.contender == "auto"])
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    """Draws for each loss its contenders' speed-up at the left and their memory at the right."""
    rows = rows[rows.speedup.notna() & (rows.contender != "matmul")]
    if rows.empty:
        return
    baseline = rows[rows.speedup == 1].contender.iloc[0]
    losses = [own for _, own in rows.groupby(case_columns(rows), sort=False)]
    plt = plot.pyplot()
    height = 1.4 + sum(0.9 + 0.28 * len(own) for own in losses)
    figure, axes = plt.subplots(len(losses), 2, squeeze=False, layout="constrained", figsize=(11, height))
    for (speed, memory), own in zip(axes, losses):
        own = own.sort_values("speedup", ascending=False)
        plot.bars(speed, own, own.speedup, f"speed-up over {plot.words(baseline)}, times")
        plot.bars(memory, own, own.memory_mib / 1024, "temporaries, GiB")
        memory.tick_params(axis="y", labelleft=False)
        loss = own.iloc[0]
        what = {"mean": "mean", "none": "a loss per token"}[loss.reduction]
        what = "statistics of each token" if loss.get("function") == "token_stats" else what
        passes = {"both": "forward and backward", "forward": "forward"}[loss.direction]
        width, vocab = HEADS[loss["head"]]
        size = f"{loss.tokens:,} tokens, {width:,} to {vocab:,}, {loss['dtype']}"
        if loss.get("function") == "kl_divergence":
            size += f", teacher of {loss.teacher_width:,}, beta = {loss.beta:g}"
        size += ", w as (V, D)" * (loss.get("w_shape") == "VxD")
        workspace = loss.get("workspace_mib", 512)
        size += f", {workspace:,} MiB" * (workspace != 512)
        speed.set_title(f"{what}, {passes}: {size}", loc="left", fontsize=10)
    ours = rows[rows.contender == "auto"]
    peak = rows.memory_mib[rows.contender == "jax_float32"].max()
    functions = rows.function.unique() if "function" in rows else ("cross_entropy",)
    title = ", ".join(f"linear_{name}" for name in functions)
    title += f": {plot.span(ours.speedup)} as fast as {plot.words(baseline)}"
    has_others = set(rows.contender[~rows.ours.astype(bool)]) - {*YARDSTICKS, baseline}
    if has_others and len(ours):  # a wrong result of ours has no time
        title += f", {_beside_fastest(losses)} as fast as the fastest other code"
    if peak == peak:
        title += f", in {ours.memory_mib.max() / 1024:.1f} GiB of temporaries instead of {peak / 1024:.1f}"
    plot.finish(figure, file, document, title)


VIEW = View(
    ("ran", "status", "value", "error", "p50_us", "speedup", "products", "memory_mib"),
    baselines=("jax_float32", "jax_scan"),
    derive=_derive,
    draw=_draw,
)
BENCHMARK = Benchmark("linear", make_losses, run_loss, VIEW)


_CONTEXT = 8  # previous tokens that the model sees
_LAST = 10  # the final loss is the mean over this many steps


@dataclasses.dataclass(frozen=True)
class Training:
    """One training run of the language model."""

    vocab: int
    width: int
    dtype: str
    tokens: int
    steps: int


def train(contender: str, vocab: int, dtype: str, chosen: Any) -> tuple[np.ndarray, float, float]:
    """Trains a perceptron over the last tokens with Adam. Its embedding is also its output layer.

    Returns:
      The losses, the seconds of a step, and the MiB of its temporaries.
    """
    width, steps = chosen.width, chosen.training_steps
    ids = jnp.asarray(token_ids(vocab))
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
        ours: Any = pallas_softmax.linear_cross_entropy(x, embed, text[:, -1], transpose_w=True)
        return ours

    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))
    step = (
        jax.jit(adam(loss, lambda i: 2e-3), donate_argnums=0)
        .lower(state, jnp.float32(0), starts[0])
        .compile()
    )
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
    records, reference = [], np.zeros(0)
    for contender in ("jax", "ours"):
        losses, seconds, memory = train(contender, training.vocab, training.dtype, chosen)
        reference = losses if contender == "jax" else reference
        records.append(Record(training, contender, contender == "ours"))
        records[-1].add(
            first_loss=float(losses[0]),
            last_loss=float(np.mean(losses[-_LAST:])),
            largest_gap=float(np.abs(losses - reference).max()),
            step_us=1e6 * seconds,
            memory_mib=memory,
        )
    return records


def make_trainings(chosen: Any) -> list[Training]:
    sizes = chosen.tokens, chosen.training_steps
    return [Training(vocab, chosen.width, dtype, *sizes) for vocab in chosen.vocab for dtype in chosen.dtype]


TRAINING = Benchmark(
    "linear_training",
    make_trainings,
    run_training,
    View(("first_loss", "last_loss", "largest_gap", "step_us", "memory_mib")),
)


def define_flags() -> None:
    flags.define("dtype", "implementations", "seed", "repeats")
    flags.define(
        batch="How many tokens are projected.",
        tokens="Tokens per training step.",
        width="Width of the language model.",
        vocab="Columns of the language model's head.",
    )
    flags.define_list(
        "head", flags.words(HEADS), "small", "The models to take the projection's width and columns from."
    )
    flags.define_list("w_shape", flags.words(W_SHAPES), "DxV", "How w is stored.")
    flags.define_list("workspace_mib", flags.INTEGERS, "512", "workspace_bytes of our losses, in MiB.")
    functions = flags.words(("cross_entropy", "token_stats", "kl_divergence"))
    flags.define_list("function", functions, "cross_entropy", "The function of the projection.")
    of_head = flags.Items(flags.INTEGERS.pattern.pattern, "positive integers", int, empty=True)
    flags.define_list("teacher_width", of_head, "", "Widths of teachers; by default the width of the head.")
    flags.define_list(
        "beta", flags.words(("0", "0.1", "0.5", "0.9", "1")), "0", "Divergences from a teacher."
    )
    flags.define_list("reduction", flags.words(("mean", "none")), "mean", "One mean, or one loss per token.")
    flags.define_list(
        "direction", flags.words(("forward", "both")), "forward", "The loss alone, or with its gradients."
    )
    flags.define_peers(dict.fromkeys(PEERS, ""), default=PEERS[3:6])
    absl_flags.DEFINE_integer("training_steps", 400, "Training steps of the language model; 0: none.", 0)


def main(argv: list[str]) -> int:
    """Times the losses, then trains with them. Returns the larger exit code."""
    code = driver.main(BENCHMARK, argv)
    return max(code, driver.main(TRAINING, argv)) if flags.FLAGS.training_steps else code


if __name__ == "__main__":
    define_flags()
    app.run(main)
