"""How fast is the cross entropy of a projection? python -m benchmarks.linear --flagfile=configs/linear.flags

This is the loss of a language model: --batch tokens of width D are projected to V columns. PEERS has the contenders in
addition to our implementations.

With --function=token_stats the contenders compute a loss, entropy, logsumexp and argmax per token. They differentiate
the mean of loss + entropy. liger is then LigerFusedLinearScaledCrossEntropyFunction, which has loss and entropy only.
The other torch contenders have no entropy. Two yardsticks, logsumexp and log_probs, compute less and are not checked.

With --function=kl_divergence the contenders compute the divergence --beta from a teacher of width --teacher_width.
torch's contenders have none. matmul is the student's projection, so a mean with gradients computes 4 products if the
teacher is as wide.

Before anything is timed, every loss and gradient is compared with jax_scan's. The column `products` is the time
relative to matmul. A forward computes 1 product, a mean with gradients 3. One loss per token with gradients computes 4
products if the logits are not kept.

--w_shape=VxD stores w as (V, D), and ours takes it with transpose_w=True. liger, cce and quack_exp need that shape.
With --w_shape=DxV their time does not include the copy of w. With --training_steps, benchmarks.linear_training runs
as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import DEFINE_integer
from jax import lax

import pallas_softmax
from benchmarks import linear_training
from benchmarks.support import driver, flags, plot, timing
from benchmarks.support.contenders import Call, from_torch, jax_call, named, need_gpu, torch_and_wait
from benchmarks.support.result import Benchmark, Record, case_columns

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
TORCH = ("torch", "torch_compile", "liger", "cce", "quack", "quack_exp")
YARDSTICKS = ("matmul", "logsumexp", "log_probs")
PEERS = {
    "matmul": "the projection alone, stored in the dtype of x: every contender has to compute it",
    "logsumexp": "linear_logsumexp, to compare forwards of token_stats with",
    "log_probs": "linear_log_probs, to compare gradients of token_stats with",
    "jax_scan": "the usual code: a scan over 2,048 tokens at a time, under jax.checkpoint, float32 logits and dw",
    "jax_float32": "plain JAX, float32 logits in memory",
    "jax_inexact": "plain JAX, logits in memory in the dtype of x: a 16-bit dtype rounds them",
    "torch": "F.cross_entropy(x @ w, labels)",
    "torch_compile": "the same under torch.compile",
    "liger": "LigerFusedLinearCrossEntropyFunction of liger-kernel, dw summed in float32",
    "cce": "linear_cross_entropy of cut-cross-entropy, which skips small gradients",
    "quack": "chunked_linear_cross_entropy of QuACK, 4,096 tokens at a time",
    "quack_exp": 'the same with its "scaled exp" kernels, which store exponentials in place of logits',
}
REFERENCE = "jax_scan"
_SCANNED = 2048  # tokens per step of jax_scan
# The largest relative error (norm of the difference over norm) allowed against jax_scan: a few eps of the dtype to
# which dz is rounded. jax_scan's float32 products may use TF32, with an eps of 2^-10.
TOLERANCE = {"float32": 4 * 2**-10, "bfloat16": 4 * 2**-8, "float16": 4 * 2**-10}
# These may round the logits to a 16-bit dtype, so that their error grows with |z|. The error is shown, but allowed.
INEXACT = ("jax_inexact", *TORCH)


@dataclasses.dataclass(frozen=True)
class Loss:
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


def _logits(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)


def _divergence(z: jax.Array, u: jax.Array, beta: float) -> jax.Array:
    """z are a student's logits, u a teacher's."""
    log_q, log_p = jax.nn.log_softmax(z), jax.nn.log_softmax(u)

    def kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(log_a) * (log_a - log_b), -1)

    if beta in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def _plain(x: jax.Array, w: jax.Array, target: Any, dtype: Any, function: str, beta: float) -> jax.Array:
    """Returns one loss per token, or what `_stacked` returns. The logits are in memory, in `dtype`.

    For a divergence, `target` is (teacher_x, teacher_w), otherwise the labels.
    """
    z = _logits(x, w, dtype)
    if function == "kl_divergence":
        teacher_x, teacher_w = target
        return _divergence(z, _logits(teacher_x, teacher_w, dtype), beta)
    logsumexp = jax.nn.logsumexp(z, -1)
    losses = logsumexp - jnp.take_along_axis(z, target[:, None], -1)[:, 0]
    if function == "cross_entropy":
        return losses
    entropy = logsumexp - jnp.sum(jnp.exp(z - logsumexp[:, None]) * z, -1)
    return _stacked(-losses, entropy, logsumexp, jnp.argmax(z, -1))


def _stacked(log_probs: Any, entropy: jax.Array, logsumexp: jax.Array, argmax: jax.Array) -> jax.Array:
    """Returns four numbers per token, (tokens, 4): the loss and the other statistics."""
    return jnp.stack([-log_probs, entropy, logsumexp, argmax.astype(jnp.float32)], -1)


def _scanned(x: jax.Array, w: jax.Array, target: Any, **what: Any) -> jax.Array:
    """Returns what `_plain` returns, from float32 logits of a few tokens at a time. dw is summed in float32."""
    wide = w.astype(jnp.float32)
    of_tokens, *teacher_w = target if isinstance(target, tuple) else (target,)

    @jax.checkpoint
    def step(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        target = (tokens[1], *teacher_w) if teacher_w else tokens[1]
        return _plain(tokens[0], wide.astype(w.dtype), target, jnp.float32, **what)

    size = min(_SCANNED, len(x))
    whole = len(x) // size * size
    parts = tuple(a[:whole].reshape(-1, size, *a.shape[1:]) for a in (x, of_tokens))
    losses = lax.map(step, parts)
    losses = losses.reshape(whole, *losses.shape[2:])
    return losses if whole == len(x) else jnp.concatenate([losses, step((x[whole:], of_tokens[whole:]))])


def _losses(contender: str, loss: Loss) -> Callable:
    """Returns the function (x, w, target) -> mean, one loss per token, or `_stacked`, of a JAX contender."""
    transposed, mean = loss.w_shape == "VxD", loss.reduction == "mean"

    def of_plain(x: jax.Array, w: jax.Array, target: Any) -> jax.Array:
        if transposed:
            w, target = w.T, (target[0], target[1].T) if isinstance(target, tuple) else target
        if contender == "matmul":
            return x @ w
        what: dict[str, Any] = {"function": loss.function, "beta": loss.beta}
        if contender == "jax_scan":
            losses = _scanned(x, w, target, **what)
        else:
            losses = _plain(x, w, target, jnp.float32 if contender == "jax_float32" else x.dtype, **what)
        return jnp.mean(losses) if mean else losses

    if contender == "matmul" or contender.startswith("jax_"):
        return of_plain
    options: dict[str, Any] = {"transpose_w": transposed, "workspace_bytes": loss.workspace_mib * 2**20}
    if contender == "logsumexp":
        return lambda x, w, labels: pallas_softmax.linear_logsumexp(x, w, **options)
    if contender == "log_probs":
        return functools.partial(pallas_softmax.linear_log_probs, **options)
    options["implementation"] = named(contender)
    if loss.function == "token_stats":
        return lambda x, w, labels: _stacked(*pallas_softmax.linear_token_stats(x, w, labels, **options)[:4])
    options["reduction"] = "mean" if mean else None
    if loss.function == "kl_divergence":
        divergence = functools.partial(pallas_softmax.linear_kl_divergence, beta=loss.beta, **options)
        return lambda x, w, teacher: divergence(x, w, *teacher)
    return functools.partial(pallas_softmax.linear_cross_entropy, **options)


def _jax_call(record: Record, arrays: tuple) -> Call:
    function, is_matmul = _losses(record.contender, record.case), record.contender == "matmul"

    def forward(x: jax.Array, w: jax.Array, target: Any) -> dict[str, Any]:
        y = function(x, w, target)
        return {"y": y} if is_matmul else _by_name(y)

    def both(x: jax.Array, w: jax.Array, target: Any) -> dict[str, Any]:
        y, pull = jax.vjp(lambda x, w: function(x, w, target), x, w)
        g = jnp.full_like(y, 1 / (len(y) if y.ndim else 1))
        dx, dw = pull(g if y.ndim < 2 else g.at[:, 2:].set(0))
        return _by_name(y) | {"dx": dx, "dw": dw}

    run = forward if is_matmul or record.case.direction == "forward" else both
    call = jax_call(run, *arrays, ran="" if record.ours else "jax")
    if call.extra_mb is not None:  # it includes the results
        results = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(run, *arrays)))
        record.add(memory_mib=(1e6 * call.extra_mb - results) / 2**20)
    return call


def _by_name(y: Any) -> dict[str, Any]:
    """Returns statistics one by one, because each has an error of its own."""
    return {"y": y} if y.ndim < 2 else dict(zip(("y", "entropy", "logsumexp", "argmax"), y.T))


def _torch_losses(contender: str, loss: Loss) -> Callable:
    """Returns a function of x, w of shape (V, D), and labels. Statistics are loss and entropy."""
    import torch  # pyright: ignore[reportMissingImports]

    if loss.function == "kl_divergence":
        raise NotImplementedError(f"{contender} has no divergence")
    stats = loss.function == "token_stats"
    if stats and contender != "liger":
        raise NotImplementedError(f"{contender} has no entropy")
    reduction = {"reduction": loss.reduction}
    match contender:
        case "liger":
            from liger_kernel import ops  # pyright: ignore[reportMissingImports]

            if stats:
                options = (1.0, -100, 1, True)  # temperature, ignored label, tiles per cluster, entropy
                function = ops.LigerFusedLinearScaledCrossEntropyFunction.apply
                return lambda x, w, labels: torch.stack(function(x, w, labels, *options), -1)
            options = (None, None, -100, 0.0, 0.0, loss.reduction, None, False, torch.float32)
            function = ops.LigerFusedLinearCrossEntropyFunction.apply
            return lambda x, w, labels: function(x, w, labels, *options)[0]
        case "cce":
            from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

            return functools.partial(linear_cross_entropy, **reduction)
        case "quack" | "quack_exp":
            return functools.partial(_quack, scaled_exp=contender == "quack_exp", **reduction)

    def losses(x: Any, w: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(x @ w.T, labels, **reduction)

    return torch.compile(losses) if contender == "torch_compile" else losses


def _quack(x: Any, w: Any, labels: Any, scaled_exp: bool, reduction: str) -> Any:
    from quack import linear_cross_entropy as quack  # pyright: ignore[reportMissingImports]

    need_gpu("QuACK")
    if reduction == "none" or len(x) % 8 or len(w) % 8:
        raise NotImplementedError("QuACK takes means, of a multiple of 8 tokens, with V a multiple of 8")
    chunk = {"chunk_size": 4096, "reduction": reduction}
    if scaled_exp and not quack.scaled_exp_lce_supported(x, w, **chunk):
        raise NotImplementedError("QuACK's scaled exp takes bfloat16, V % 128 == 0, and an H100 or H200")
    return quack.chunked_linear_cross_entropy(x, w, labels, **chunk, use_scaled_exp=scaled_exp)


def _torch_call(record: Record, arrays: tuple) -> Call:
    torch, wait = torch_and_wait()
    function = _torch_losses(record.contender, record.case)
    x, w, labels = map(torch.from_dlpack, arrays)
    transposed = record.case.w_shape == "VxD"
    labels, w = labels.long(), w if transposed else w.T  # a view of shape (V, D)
    if record.contender in ("liger", "cce", "quack_exp"):
        w = w.contiguous()
    leaves = [a.detach().requires_grad_() for a in (x, w)]

    def forward() -> dict[str, Any]:
        with torch.no_grad():
            return _by_name(function(x, w, labels))

    def both() -> dict[str, Any]:
        y = function(*leaves, labels)
        dx, dw = torch.autograd.grad(y, leaves, torch.full_like(y, 1 / (len(y) if y.ndim else 1)))
        return _by_name(y.detach()) | {"dx": dx, "dw": dw if transposed else dw.T}

    call = Call(forward if record.case.direction == "forward" else both, "torch", wait)
    if timing.on_gpu():
        call.run()  # compiles, and allocates what stays, such as cuBLAS's workspace
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = sum(a.nbytes for a in call.result().values())
        record.add(memory_mib=(torch.cuda.max_memory_allocated() - before - kept) / 2**20)
    return call


def make_losses(chosen: Any) -> list[Loss]:
    """A forward has one reduction only, because a mean and one loss per token cost the same."""
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
    widths = chosen.teacher_width or (HEADS[head][0],)
    return [(width, float(beta)) for width in widths for beta in chosen.beta]


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
    names = [*dict.fromkeys((REFERENCE, "matmul", *chosen.peers, *chosen.implementations))]
    arrays = functools.cache(lambda: _arrays(loss, chosen.seed))
    wanted: dict[str, jax.Array] = {}

    def prepare(record: Record) -> Call:
        name = record.contender
        call = (_torch_call if name in TORCH else _jax_call)(record, arrays())
        driver.describe(record, call)
        if record.ours:
            driver.explain(record, _losses(name, loss), *arrays())
        got = call.result()
        if name in YARDSTICKS:
            return call
        got = from_torch(got) if name in TORCH else got
        record.add(value=float(jnp.mean(got["y"])))
        try:
            driver.compare(record, got, wanted, TOLERANCE[loss.dtype], REFERENCE)
        except driver.Wrong as wrong:
            if name not in INEXACT:
                raise
            record.status, record.reason = "differs", str(wrong)
        if name == names[-1]:
            wanted.clear()
        return call

    return driver.measure(loss, names, prepare, chosen, required=set(PEERS) - set(TORCH))


def _derive(rows: Any, of: Callable) -> None:
    rows["products"] = rows.p50_us / of("p50_us", "matmul")


def _panel(loss: Any) -> str:
    function, workspace = loss.get("function"), loss.get("workspace_mib", 512)
    what = {"mean": "mean", "none": "a loss per token"}[loss.reduction]
    what = "statistics of each token" if function == "token_stats" else what
    passes = {"both": "forward and backward", "forward": "forward"}[loss.direction]
    width, vocab = HEADS[loss["head"]]
    size = f"{loss.tokens:,} tokens, {width:,} to {vocab:,}, {loss['dtype']}"
    if function == "kl_divergence":
        size += f", teacher of {loss.teacher_width:,}, beta = {loss.beta:g}"
    size += ", w as (V, D)" * (loss.get("w_shape") == "VxD") + f", {workspace:,} MiB" * (workspace != 512)
    return f"{what}, {passes}: {size}"


def _draw(rows: Any, document: dict[str, Any], file: Path) -> None:
    """Draws for each loss its contenders' speed-up at the left and their memory at the right."""
    rows = rows[rows.speedup.notna() & (rows.contender != "matmul")]
    if rows.empty:
        return
    baseline = rows[rows.speedup == 1].contender.iloc[0]
    losses = [own for _, own in rows.groupby(case_columns(rows), sort=False)]
    height = 1.4 + sum(0.9 + 0.28 * len(own) for own in losses)
    figure, axes = plot.pyplot().subplots(len(losses), 2, squeeze=False, layout="constrained", figsize=(11, height))
    for (speed, memory), own in zip(axes, losses):
        own = own.sort_values("speedup", ascending=False)
        plot.bars(speed, own, own.speedup, f"speed-up over {plot.words(baseline)}, times")
        plot.bars(memory, own, own.memory_mib / 1024, "temporaries, GiB")
        memory.tick_params(axis="y", labelleft=False)
        speed.set_title(_panel(own.iloc[0]), loc="left", fontsize=10)
    ours, others = rows[rows.contender == "auto"], rows[~rows.ours.astype(bool)]
    others = others[~others.contender.isin(YARDSTICKS)]
    functions = rows.function.unique() if "function" in rows else ("cross_entropy",)
    title = ", ".join(f"linear_{name}" for name in functions)
    title += f": {plot.span(ours.speedup)} as fast as {plot.words(baseline)}"
    if set(others.contender) - {baseline} and len(ours):  # a wrong result of ours has no time
        fastest = others.groupby(case_columns(rows), dropna=False).p50_us.min()
        ratios = fastest / ours.set_index(case_columns(rows)).p50_us
        title += f", {plot.span(ratios, digits=2)} as fast as the fastest other code"
    peak = rows.memory_mib[rows.contender == "jax_float32"].max()
    if peak == peak:
        title += f", in {ours.memory_mib.max() / 1024:.1f} GiB of temporaries instead of {peak / 1024:.1f}"
    plot.finish(figure, file, document, title)


COLUMNS = "ran", "status", "value", "error", "p50_us", "speedup", "products", "memory_mib"
BENCHMARK = Benchmark("linear", make_losses, run_loss, COLUMNS, ("jax_float32", "jax_scan"), _derive, _draw)


def define_flags() -> None:
    flags.define("dtype", "implementations", "seed", "repeats")
    flags.define(
        batch="How many tokens are projected.",
        tokens="Tokens per training step.",
        width="Width of the language model.",
        vocab="Columns of the language model's head.",
    )
    of_head = flags.Items(flags.INTEGERS.pattern.pattern, "positive integers", int, empty=True)
    functions, passes = ("cross_entropy", "token_stats", "kl_divergence"), ("forward", "both")
    for name, parser, default, text in (
        ("head", flags.words(HEADS), "small", "The models to take the projection's width and columns from."),
        ("w_shape", flags.words(("DxV", "VxD")), "DxV", "How w is stored."),
        ("workspace_mib", flags.INTEGERS, "512", "workspace_bytes of our losses, in MiB."),
        ("function", flags.words(functions), "cross_entropy", "The function of the projection."),
        ("teacher_width", of_head, "", "Widths of teachers; by default the width of the head."),
        ("beta", flags.words(("0", "0.1", "0.5", "0.9", "1")), "0", "Divergences from a teacher."),
        ("reduction", flags.words(("mean", "none")), "mean", "One mean, or one loss per token."),
        ("direction", flags.words(passes), "forward", "The loss alone, or with its gradients."),
    ):
        flags.define_list(name, parser, default, text)
    flags.define_peers(PEERS, default=("jax_scan", "jax_float32", "jax_inexact"))
    DEFINE_integer("training_steps", 400, "Training steps of the language model; 0: none.", 0)


main = driver.program(__name__, define_flags, BENCHMARK, linear_training.BENCHMARK)
