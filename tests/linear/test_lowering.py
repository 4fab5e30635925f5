"""The kernels of a projection lowered for CUDA, without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from tests.support.covering import first, slow
from tests.support.lowering import array, kernel_names, lowered

STATISTICS, EXPONENTIALS, DLOGITS = "linear_statistics", "linear_exponentials", "linear_logit_gradients"
MERGE = "linear_merge"
LABELS, SOFT = [array(256, dtype="int32")], [array(256, 5, dtype="int32"), array(256, 5)]
SIZES = [  # n, D, V, transpose_w, dtype, keywords of the loss
    (1, 64, 32000, True, "float16", {"z_loss": 1e-3}),
    (8193, 4096, 128256, False, "bfloat16", {}),
    (8192, 4096, 128256, False, "bfloat16", {}),
    (129, 768, 50257, True, "bfloat16", {"softcap": 30.0}),
    (127, 100, 257, False, "float16", {"label_smoothing": 0.1}),
]


def projection(n, depth, vocab, dtype="bfloat16", transpose_w=False):
    """Returns the shapes of x and w."""
    return array(n, depth, dtype=dtype), array(*(vocab, depth)[:: 1 if transpose_w else -1], dtype=dtype)


def total(f, **options):
    """Returns a function of arrays, and of a reduction, that sums the losses of the kernels."""
    f = functools.partial(f, implementation="mosaic_gpu", **options)
    return lambda *args, **reduction: jnp.sum(f(*args, **reduction))


def kernels_of(text):
    """Returns the names of the kernels, without merges. Products are merged at once, except gradients of logits."""
    names = kernel_names(text)
    merged = [name.startswith("linear_") and name not in (DLOGITS, MERGE) for name in names]
    assert [name == MERGE for name in names] == [False, *merged[:-1]][: len(names)] and not any(merged[-1:]), names
    return [name for name in names if name != MERGE]


def assert_kernels(of, loss, args, of_value, of_gradient, of_token):
    """Asserts that the loss, its gradient or the gradient of losses per token has these kernels; returns the text."""
    functions = {
        "loss": (loss, of_value),
        "gradient": (jax.grad(loss, (0, 1)), of_gradient),
        "gradient per token": (jax.grad(functools.partial(loss, reduction=None), (0, 1)), of_token),
    }
    f, kernels = functions[of]
    text = lowered(f, *args)
    assert kernels_of(text) == kernels
    return text


each = pytest.mark.parametrize("of", ["gradient", slow("loss"), slow("gradient per token")])


@each
@pytest.mark.parametrize(("n", "depth", "vocab", "transpose_w", "dtype", "keywords"), first(1, SIZES))
def test_lowered(n, depth, vocab, transpose_w, dtype, keywords, of):
    """A loss is one kernel. Its gradient stores exponentials (and may compute them again), or has two products."""
    x, w = projection(n, depth, vocab, dtype, transpose_w)
    loss = total(ps.linear_cross_entropy, transpose_w=transpose_w, **keywords)
    chunks = 2 if n > 2 * depth else 1  # in the text: the first chunk, and the loop
    twice = dtype == "float16" or "label_smoothing" in keywords
    of_chunk = [STATISTICS, DLOGITS] if twice else [EXPONENTIALS] * 2
    per_token = [STATISTICS] + [DLOGITS] * chunks
    args = x, w, array(n, dtype="int32")
    text = assert_kernels(of, loss, args, [STATISTICS], of_chunk * chunks, per_token)
    if of == "gradient":
        of_w = "x".join(str(-(-size // 64) * 64) for size in w.shape)
        directly = dtype == "bfloat16" and chunks == 1  # the product writes dw, and nothing is added to dw
        assert bool(re.search(rf"dot_general.*-> tensor<{of_w}xf32>", text)) != directly


DIVERGENCES = [  # n, D, D', V, transpose_w, dtype, dtype of the teacher, chunks in the text of a gradient
    (256, 64, 128, 512, False, "bfloat16", "float32", 1),
    (8192, 4096, 8192, 128256, False, "bfloat16", "bfloat16", 1),
    (127, 100, 40, 257, True, "float16", "bfloat16", 1),
    (16384, 4096, 4096, 128256, True, "bfloat16", "bfloat16", 2),
]


@each
@pytest.mark.parametrize(
    ("n", "depth", "teacher_depth", "vocab", "transpose_w", "dtype", "teacher_dtype", "chunks"), first(1, DIVERGENCES)
)
def test_lowered_divergence(n, depth, teacher_depth, vocab, transpose_w, dtype, teacher_dtype, chunks, of):
    """The logits of both come from kernels; XLA multiplies a float32 teacher. Two more products give dx and dw."""
    teacher = projection(n, teacher_depth, vocab, teacher_dtype, transpose_w)
    args = *projection(n, depth, vocab, dtype, transpose_w), *teacher
    loss = total(ps.linear_kl_divergence, transpose_w=transpose_w, beta=0.5, softcap=30.0)
    kernels = ["linear_logits"] * (1 if teacher_dtype == "float32" else 2)
    of_chunk = kernels if dtype == "bfloat16" else 2 * kernels
    text = assert_kernels(of, loss, args, kernels, of_chunk * chunks, kernels * (1 + chunks))
    if of == "gradient":
        assert text.count("stablehlo.dot_general") == (3 if teacher_dtype == "float32" else 2) * chunks


MESHED = {  # name: (function, its arrays in addition to x and w, kernels, products of a gradient outside of kernels)
    "mean": (ps.linear_cross_entropy, LABELS, [EXPONENTIALS] * 2, None),
    "several labels": (ps.linear_log_probs, SOFT[:1], [STATISTICS, DLOGITS], 2),
    "divergence": (ps.linear_kl_divergence, [], ["linear_logits"] * 2, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", ["v", None])
@pytest.mark.parametrize(
    ("name", "transpose_w"),
    [("mean", False), ("several labels", False), ("several labels", True), ("divergence", False)],
)
def test_lowered_in_shard_map(name, transpose_w, axis_name):
    """Numbers per row have types that vary over the mesh; the kernel's exponentials have a type that does not."""
    f, others, kernels, products = MESHED[name]
    x, w = projection(256, 64, 512, transpose_w=transpose_w)
    of_w = (P("v") if transpose_w else P(None, "v")) if axis_name else P()
    of_tokens = P() if axis_name else P("b")
    others, specs = (others, [of_tokens]) if others else ([x, w], [of_tokens, of_w])  # or a teacher
    loss = total(f, axis_name=axis_name, transpose_w=transpose_w)
    gradients = jax.shard_map(
        lambda *args: jax.tree.map(lambda a: a[None, None], jax.grad(loss, (0, 1))(*args)),
        mesh=jax.make_mesh((1, 1), ("b", "v"), axis_types=(AxisType.Auto,) * 2),
        in_specs=(of_tokens, of_w, *specs),
        out_specs=P("b", "v"),
    )
    text = lowered(gradients, x, w, *others)
    assert kernels_of(text) == kernels
    assert products is None or text.count("stablehlo.dot_general") == products


def stats(x, w, labels, **options):
    found = ps.linear_token_stats(x, w, labels, **options)
    return found.log_probs + found.entropy * found.logsumexp


def soft(x, w, labels, q, **options):
    return ps.linear_cross_entropy(x, w, labels, label_probs=q, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "others", "held", "dtype", "transpose_w", "kernels"),
    [
        (stats, LABELS, (0, 1), "bfloat16", False, [STATISTICS, DLOGITS]),
        (stats, LABELS, (0, 1), "float16", True, [STATISTICS, DLOGITS]),
        (soft, SOFT, (0, 1, 3), "bfloat16", False, [EXPONENTIALS] * 2),
    ],
)
def test_lowered_statistics(f, others, held, dtype, transpose_w, kernels):
    """Values are one kernel. The gradient of statistics computes the logits again, by the kernel of log-probabilities.

    A mean of soft labels takes three products: one kernel, and one more for references that are far off.
    """
    args = *projection(256, 64, 512, dtype, transpose_w), *others
    loss = total(f, transpose_w=transpose_w)
    assert kernels_of(lowered(loss, *args)) == [STATISTICS]
    assert kernels_of(lowered(jax.grad(loss, held), *args)) == kernels


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", [None, "v"])
def test_lowered_topk(axis_name):
    """The product is XLA's, and top-k of a chunk is one kernel. The program has one chunk, in a loop."""
    topk = functools.partial(
        ps.linear_topk, k=5, axis_name=axis_name, workspace_bytes=4 * 512 * 128, implementation="mosaic_gpu"
    )
    f = jax.shard_map(
        topk,
        mesh=jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P(None, axis_name)),
        out_specs=P(),
    )
    text = lowered(f, *projection(512, 64, 512))
    names = kernels_of(text)
    assert names[0] == "softmax_topk" and len(names) == (1 if axis_name is None else 2), names
    assert text.count("stablehlo.dot_general") == text.count("stablehlo.while") == 1


SAMPLES = [  # n, dtype, options, kernels
    (64, "bfloat16", {"top_p": 0.9}, ["linear_logits", "sample"]),
    (64, "bfloat16", {}, ["linear_draw"]),
    # the kernels of stored logits are for unusual temperatures
    (1, "float16", {"temperature": 0.7}, ["linear_draw", "linear_logits", "sample"]),
    (1000, "bfloat16", {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, ["linear_draw"]),  # these filter nothing
    (64, "float32", {"temperature": 0.7}, ["sample"]),  # XLA multiplies
    (64, "bfloat16", {"mode": "high", "top_k": 5}, ["linear_logits", "filter_cutoff"]),
]


@pytest.mark.parametrize(("n", "dtype", "options", "kernels"), first(1, SAMPLES))
def test_lowered_sample(n, dtype, options, kernels):
    f = functools.partial(ps.linear_sample, jax.random.key(0), **options)
    text = lowered(f, *projection(n, 4096, 128256, dtype))
    assert [name.removesuffix("_stream") for name in kernels_of(text)] == kernels


@pytest.mark.slow
def test_lowered_without_dw():
    """Without a gradient of w, logits cannot use the memory of a float32 dw, so there are chunks."""
    args = *projection(8192, 4096, 128256), array(8192, dtype="int32")
    mean = total(ps.linear_cross_entropy)
    assert kernels_of(lowered(jax.grad(mean), *args)) == [EXPONENTIALS] * 4
    per_token = functools.partial(mean, reduction=None)
    assert kernels_of(lowered(jax.grad(per_token), *args)) == [STATISTICS] + [DLOGITS] * 2


@pytest.mark.parametrize("with_x64", [True, slow(False)])
def test_lowered_with_its_cost(with_x64):
    """XLA's scheduler learns how long the product takes. Under x64, a count of blocks and of stages have one dtype."""
    n, depth, vocab = 256, 128, 1024
    logsumexp = functools.partial(ps.linear_logsumexp, implementation="mosaic_gpu")
    with jax.enable_x64(with_x64):
        text = lowered(logsumexp, *projection(n, depth, vocab))
    assert kernels_of(text) == [STATISTICS]
    if jax.__version_info__ >= (0, 12):  # before, plgpu.kernel has no cost_estimate
        assert rf"flops\22: {2 * n * depth * vocab}," in text
