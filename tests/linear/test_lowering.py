"""The kernels of a projection lowered for CUDA, without a GPU."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_softmax as ps
from tests.support.covering import first, slow
from tests.support.lowering import array, kernel_names, lowered

SIZES = [  # n, D, V, transpose_w, dtype, keywords of the loss
    (127, 100, 257, False, "float16", {"label_smoothing": 0.1}),
    (129, 768, 50257, True, "bfloat16", {"softcap": 30.0}),
    (8192, 4096, 128256, False, "bfloat16", {}),
    (8193, 4096, 128256, False, "bfloat16", {}),
    (1, 64, 32000, True, "float16", {"z_loss": 1e-3}),
]


@pytest.mark.parametrize(("n", "depth", "vocab", "transpose_w", "dtype", "keywords"), first(1, SIZES[::-1]))
def test_lowered(n, depth, vocab, transpose_w, dtype, keywords):
    """A loss is one kernel. Its gradient stores exponentials (and may compute them again), or has two products."""
    w = array(*((vocab, depth) if transpose_w else (depth, vocab)), dtype=dtype)
    args = array(n, depth, dtype=dtype), w, array(n, dtype="int32")

    def loss(x, w, labels, reduction: Any = "mean"):
        return jnp.sum(
            ps.linear_cross_entropy(
                x,
                w,
                labels,
                transpose_w=transpose_w,
                reduction=reduction,
                implementation="mosaic_gpu",
                **keywords,
            )
        )

    assert kernel_names(lowered(loss, *args)) == ["linear_statistics"]
    of_chunk = ["linear_exponentials"] * 2
    if dtype == "float16" or "label_smoothing" in keywords:
        of_chunk = ["linear_statistics", "linear_logit_gradients"]
    chunks = 2 if n > 2 * depth else 1  # in the text: the first chunk, and the loop
    text = lowered(jax.grad(loss, (0, 1)), *args)
    assert kernel_names(text) == of_chunk * chunks
    of_w = "x".join(str(-(-size // 64) * 64) for size in w.shape)
    directly = dtype == "bfloat16" and chunks == 1  # the product writes dw, and nothing is added to dw
    assert bool(re.search(rf"dot_general.*-> tensor<{of_w}xf32>", text)) != directly
    per_token = functools.partial(loss, reduction=None)
    want = ["linear_statistics"] + ["linear_logit_gradients"] * chunks
    assert kernel_names(lowered(jax.grad(per_token, (0, 1)), *args)) == want


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", ["v", None])
def test_lowered_in_shard_map(axis_name):
    """Numbers per row have types that vary over the mesh; the kernel's exponentials have a type that does not."""
    x, w, labels = (
        array(256, 64, dtype="bfloat16"),
        array(64, 512, dtype="bfloat16"),
        array(256, dtype="int32"),
    )
    mean = functools.partial(ps.linear_cross_entropy, axis_name=axis_name, implementation="mosaic_gpu")
    specs = (P(), P(None, "v"), P()) if axis_name else (P("b"), P(), P("b"))
    gradients = jax.shard_map(
        lambda *args: jax.tree.map(lambda a: a[None, None], jax.grad(mean, (0, 1))(*args)),
        mesh=jax.make_mesh((1, 1), ("b", "v"), axis_types=(AxisType.Auto,) * 2),
        in_specs=specs,
        out_specs=P("b", "v"),
    )
    assert kernel_names(lowered(gradients, x, w, labels)) == ["linear_exponentials"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transpose_w", [False, slow(True)])
@pytest.mark.parametrize("axis_name", ["v", slow(None)])
def test_lowered_several_labels(axis_name, transpose_w):
    """Several labels take the kernels of one label, and no other product."""
    x, labels = array(256, 64, dtype="bfloat16"), array(256, 5, dtype="int32")
    w = array(*((512, 64) if transpose_w else (64, 512)), dtype="bfloat16")
    log_probs = functools.partial(
        ps.linear_log_probs, axis_name=axis_name, transpose_w=transpose_w, implementation="mosaic_gpu"
    )
    of_w = (P("v") if transpose_w else P(None, "v")) if axis_name else P()
    tokens = P() if axis_name else P("b")
    gradients = jax.shard_map(
        lambda x, w, labels: jax.tree.map(
            lambda a: a[None, None],
            jax.grad(lambda x, w: jnp.sum(log_probs(x, w, labels)), (0, 1))(x, w),
        ),
        mesh=jax.make_mesh((1, 1), ("b", "v"), axis_types=(AxisType.Auto,) * 2),
        in_specs=(tokens, of_w, tokens),
        out_specs=P("b", "v"),
    )
    text = lowered(gradients, x, w, labels)
    assert kernel_names(text) == ["linear_statistics", "linear_logit_gradients"]
    assert text.count("stablehlo.dot_general") == 2


@pytest.mark.slow
@pytest.mark.parametrize("with_x64", [False, True])
@pytest.mark.parametrize(("dtype", "transpose_w"), [("bfloat16", False), ("float16", True)])
def test_lowered_token_stats(dtype, transpose_w, with_x64):
    """Statistics are one kernel. The gradient computes the logits again, by the kernel of log-probabilities."""
    w = array(*((512, 64) if transpose_w else (64, 512)), dtype=dtype)

    def total(x, w, labels):
        stats = ps.linear_token_stats(x, w, labels, transpose_w=transpose_w, implementation="mosaic_gpu")
        return jnp.sum(stats.log_probs + stats.entropy * stats.logsumexp)

    args = array(256, 64, dtype=dtype), w, array(256, dtype="int32")
    with jax.enable_x64(with_x64):
        assert kernel_names(lowered(total, *args)) == ["linear_statistics"]
        of_gradient = ["linear_statistics", "linear_logit_gradients"]
        assert kernel_names(lowered(jax.grad(total, (0, 1)), *args)) == of_gradient


DIVERGENCES = [  # n, D, D', V, transpose_w, dtype, dtype of the teacher, chunks in the text of a gradient
    (8192, 4096, 8192, 128256, False, "bfloat16", "bfloat16", 1),
    (127, 100, 40, 257, True, "float16", "bfloat16", 1),
    (256, 64, 128, 512, False, "bfloat16", "float32", 1),
    (16384, 4096, 4096, 128256, True, "bfloat16", "bfloat16", 2),
]


@pytest.mark.parametrize(
    ("n", "depth", "teacher_depth", "vocab", "transpose_w", "dtype", "teacher_dtype", "chunks"),
    first(1, DIVERGENCES),
)
def test_lowered_divergence(n, depth, teacher_depth, vocab, transpose_w, dtype, teacher_dtype, chunks):
    """The logits of both come from kernels; XLA multiplies a float32 teacher. Two more products give dx and dw."""
    columns = lambda d, **kw: array(*((vocab, d) if transpose_w else (d, vocab)), **kw)  # noqa: E731
    args = array(n, depth, dtype=dtype), columns(depth, dtype=dtype)
    args += array(n, teacher_depth, dtype=teacher_dtype), columns(teacher_depth, dtype=teacher_dtype)
    options = {"transpose_w": transpose_w, "implementation": "mosaic_gpu", "beta": 0.5, "softcap": 30.0}
    kernels = ["linear_logits"] * (1 if teacher_dtype == "float32" else 2)
    products = 3 if teacher_dtype == "float32" else 2

    def loss(*args, reduction: Any = "mean"):
        return jnp.sum(ps.linear_kl_divergence(*args, reduction=reduction, **options))

    assert kernel_names(lowered(loss, *args)) == kernels
    text = lowered(jax.grad(loss, (0, 1)), *args)
    assert kernel_names(text) == (kernels if dtype == "bfloat16" else 2 * kernels) * chunks
    assert text.count("stablehlo.dot_general") == products * chunks
    per_token = functools.partial(loss, reduction=None)
    assert kernel_names(lowered(jax.grad(per_token, (0, 1)), *args)) == kernels * (1 + chunks)


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", ["v", None])
def test_lowered_divergence_in_shard_map(axis_name):
    x, w = array(256, 64, dtype="bfloat16"), array(64, 512, dtype="bfloat16")
    mean = functools.partial(ps.linear_kl_divergence, axis_name=axis_name, implementation="mosaic_gpu")
    specs = (P(), P(None, "v")) if axis_name else (P("b"), P())
    gradients = jax.shard_map(
        lambda *args: jax.tree.map(lambda a: a[None, None], jax.grad(mean, (0, 1))(*args)),
        mesh=jax.make_mesh((1, 1), ("b", "v"), axis_types=(AxisType.Auto,) * 2),
        in_specs=2 * specs,
        out_specs=P("b", "v"),
    )
    assert kernel_names(lowered(gradients, x, w, x, w)) == ["linear_logits"] * 2


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
    text = lowered(f, array(512, 64, dtype="bfloat16"), array(64, 512, dtype="bfloat16"))
    names = kernel_names(text)
    assert names[0] == "softmax_topk" and len(names) == (1 if axis_name is None else 2), names
    assert text.count("stablehlo.dot_general") == text.count("stablehlo.while") == 1


def test_lowered_under_x64():
    """In the kernel, a count of blocks and the number of stages have one dtype."""
    args = array(256, 64, dtype="bfloat16"), array(64, 512, dtype="bfloat16")
    with jax.enable_x64(True):
        logsumexp = functools.partial(ps.linear_logsumexp, implementation="mosaic_gpu")
        assert kernel_names(lowered(logsumexp, *args)) == ["linear_statistics"]


@pytest.mark.slow
def test_lowered_without_dw():
    """Without a gradient of w, logits cannot use the memory of a float32 dw, so there are chunks."""
    x, w, labels = (
        array(8192, 4096, dtype="bfloat16"),
        array(4096, 128256, dtype="bfloat16"),
        array(8192, dtype="int32"),
    )
    mean: Any = functools.partial(ps.linear_cross_entropy, implementation="mosaic_gpu")
    assert kernel_names(lowered(jax.grad(mean), x, w, labels)) == ["linear_exponentials"] * 4
    per_token = jax.grad(lambda *args: jnp.sum(mean(*args, reduction=None)))
    assert (
        kernel_names(lowered(per_token, x, w, labels))
        == ["linear_statistics"] + ["linear_logit_gradients"] * 2
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="plgpu.kernel has no cost_estimate")
def test_lowered_with_its_cost():
    """XLA's scheduler learns how long the product takes."""
    n, depth, vocab = 256, 128, 1024
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((n, depth), (depth, vocab)))
    text = lowered(functools.partial(ps.linear_logsumexp, implementation="mosaic_gpu"), x, w)
    assert rf"flops\22: {2 * n * depth * vocab}," in text


@pytest.mark.slow
def test_lowered_soft_labels():
    """A mean takes three products: one kernel, and one more for references that are far off."""
    x, w, labels, q = (
        array(256, 64, dtype="bfloat16"),
        array(64, 512, dtype="bfloat16"),
        array(256, 5, dtype="int32"),
        array(256, 5),
    )

    def mean(x, w, labels, q):
        return ps.linear_cross_entropy(x, w, labels, label_probs=q, implementation="mosaic_gpu")

    text = lowered(jax.grad(mean, (0, 1, 3)), x, w, labels, q)
    assert kernel_names(text) == ["linear_exponentials"] * 2
    assert kernel_names(lowered(mean, x, w, labels, q)) == ["linear_statistics"]
