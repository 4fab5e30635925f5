"""The matrix products of the linear_* functions and their precision, their memory, and the rows of chunks."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_softmax as ps
from pallas_softmax._src.linear.chunks import chunk_rows
from pallas_softmax._src.linear.gradients import gradient_rows
from tests.support.covering import first_values
from tests.support.linear import EACH, MEMORY, arrays, of_size
from tests.support.lowering import array
from tests.support.trees import floats_of


def dots(program):
    return program.as_text().count(" dot(")


ARRAYS = {
    **{"x": array(64, 8), "w": array(8, 100), "labels": array(64, dtype="int32"), "weights": array(64)},
    **{"several": array(64, 5, dtype="int32"), "probs": array(64, 5)},
    **{"teacher_x": array(64, 24), "teacher_w": array(24, 100)},
    **{"slices": array(8, 8, 8), "labels_of_slices": array(8, 8, dtype="int32")},
}


def divergence(of, **options):
    arrays = {name: of[name] for name in ("x", "w", "teacher_x", "teacher_w")}
    return ps.linear_kl_divergence(**arrays, token_weights=of["weights"], beta=0.5, **options)


def loss(of, **options):
    return ps.linear_cross_entropy(of["x"], of["w"], of["labels"], **options)


def soft(of, **options):
    return ps.linear_cross_entropy(of["x"], of["w"], of["several"], label_probs=of["probs"], **options)


in_slices = jax.vmap(functools.partial(ps.linear_cross_entropy, reduction=None), (0, None, 0))
COUNTS = {  # name: (losses, the arguments that they are differentiated in, products)
    "logsumexp": (lambda of: loss(of, return_logsumexp=True)[0], ("x", "w"), 3),
    "divergence": (divergence, ("x", "w", "weights"), 4),
    "soft labels": (soft, ("x", "w", "probs"), 3),
    "several labels": (lambda of: ps.linear_log_probs(of["x"], of["w"], of["several"]) ** 2, ("x", "w"), 4),
    "weights": (lambda of: loss(of, token_weights=of["weights"]), ("x", "w", "weights"), 3),
    "soft labels, sum": (lambda of: soft(of, reduction="sum"), ("x", "w", "probs"), 3),
    "divergence, sum": (lambda of: divergence(of, reduction="sum"), ("x", "w", "weights"), 4),
    "divergence, value": (divergence, (), 2),
    "logsumexp, value": (lambda of: loss(of, return_logsumexp=True), (), 1),
    "vmap": (lambda of: in_slices(of["slices"], of["w"], of["labels_of_slices"]), (), 1),
}


@pytest.mark.parametrize("name", first_values(1, COUNTS))
def test_products(name):
    """Each value and gradient has as few products as possible. Several labels take the products of one label."""
    losses, held, count = COUNTS[name]

    def total(differentiated, of):
        results = losses(of | differentiated)
        return sum(map(jnp.sum, jax.tree.leaves(results))), results

    f = jax.value_and_grad(total, has_aux=True) if held else total
    assert dots(jax.jit(f).lower({name: ARRAYS[name] for name in held}, ARRAYS).compile()) == count


@pytest.mark.parametrize("name", first_values(1, ["loss", "logsumexp", "gradient of stats", "topk"]))
def test_products_of_kept_tokens(name):
    """A program has four sizes of its products: 17, 33, 49 and 64 of 64 parts of the tokens, in multiples of 128.

    A call runs one of them.
    """
    x, w, labels, _ = arrays(2048, 8, 100, "float32")

    def f(x, where):
        return sum(map(jnp.sum, floats_of(EACH[name.removeprefix("gradient of ")](x, w, labels, where=where))))

    def rows(where):
        text = str(jax.make_jaxpr(jax.grad(f) if name.startswith("gradient") else f)(x, where))
        return {int(rows) for rows in re.findall(r":f32\[(\d+),100\] = dot_general", text)} - {8}  # without dw

    assert rows(jnp.arange(2048) % 2 == 0) == {640, 1152, 1664, 2048}
    assert rows(None) == {2048}


def test_the_caller_chooses_the_precision_of_float32():
    """All products of a call, forward and backward, use the same precision: TF32 only if the caller asks for it."""

    def precisions():
        f = jax.make_jaxpr(jax.grad(ps.linear_cross_entropy, (0, 1)))
        text = str(f(*of_size(16, 8, 100, "float32")))
        return re.findall(r"precision=\(?([\w.]*)", text)

    assert set(precisions()) == {"Precision.HIGHEST"} and len(precisions()) >= 3
    with jax.default_matmul_precision("high"):
        assert set(precisions()) == {"Precision.HIGH"}


@pytest.mark.slow
@pytest.mark.parametrize("n", [8192, 65536])
@pytest.mark.parametrize("name", MEMORY)
def test_memory_in_addition_to_dw(name, n):
    """Memory does not grow with n, each chunk has each product once, and unused results are not computed.

    On a CPU, a product of dw is stored before it is added. With D = 256, it is smaller than the logits of a chunk.
    """
    f, count, sums = MEMORY[name]
    program = jax.jit(f).lower(*of_size(n, 256)).compile()
    assert dots(program) == count
    assert program.memory_analysis().temp_size_in_bytes - sums * 4 * 256 * 128256 <= 0.6 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "reduction"), [(0, "mean"), (0.5, "mean"), (1, None)])
def test_memory_of_a_divergence(beta, reduction):
    """The logits of student and teacher stay within the workspace. A loss per token takes six products."""
    f = functools.partial(ps.linear_kl_divergence, beta=beta, reduction=reduction)
    shapes = *of_size(8192, 256)[:2], *of_size(8192, 8192)[:2]
    program = jax.jit(jax.grad(lambda *arrays: jnp.sum(f(*arrays)), (0, 1))).lower(*shapes).compile()
    # dw, and a product of dw. jax 0.10 drops the barrier between the two passes on a CPU
    limit = 0.6 if jax.__version_info__ >= (0, 11) else 0.8
    assert program.memory_analysis().temp_size_in_bytes - 2 * 4 * 256 * 128256 <= limit * 2**30
    assert dots(program) == (8 if reduction else 10)  # first chunk and loop


@pytest.mark.slow
def test_memory_of_soft_labels():
    many = array(8192, 64, dtype="int32"), array(8192, 64)

    def temporaries(*labels):
        f = lambda x, w, y, q=None: ps.linear_cross_entropy(x, w, y, label_probs=q)  # noqa: E731
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(*of_size(8192)[:2], *labels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(*many) <= temporaries(array(8192, dtype="int32")) + 16 * 4 * 8192 * 64


@pytest.mark.slow
def test_a_cotangent_of_1_is_a_constant():
    """So XLA leaves out the product of dw with it: dw is read and written once."""
    x, w, labels, _ = arrays(64, 8, 4000, "bfloat16")
    text = jax.jit(jax.grad(ps.linear_cross_entropy, (0, 1))).lower(x, w, labels).compile().as_text()
    entry = text[text.index("ENTRY") :]
    writes = [line for line in entry.splitlines() if re.match(r"\s*(ROOT )?%\S+ = bf16\[8,4000\]", line)]
    made = [line for line in writes if not re.search(r"parameter|get-tuple-element", line)]
    assert len(made) == 1, made


def test_rows_of_a_chunk():
    gpt2, llama = 50257, 128256
    default = 512 * 2**20
    assert chunk_rows(8192, llama, 2, default) == 2048  # kernels that store 16 bits
    assert chunk_rows(8192, llama, 6, default) == 640  # plain JAX: float32 and 16 bits
    assert chunk_rows(16384, gpt2, 2, default) == 4096  # 5248 fit: four even chunks
    assert chunk_rows(100, llama, 6, default) == 100
    assert chunk_rows(101, 1000, 4, 4 * 1000 * 40) == 40  # fewer than a kernel's tile: a multiple of 8
    assert chunk_rows(50, 10**9, 4, default) == 8  # the minimum
    for n in (1, 127, 129, 8191, 10**6):
        for vocab in (1, 1000, llama):
            rows = chunk_rows(n, vocab, 6, default)
            assert 1 <= rows <= n and (rows == 1 or rows * vocab * 6 <= default)


def test_rows_of_a_gradient():
    """All rows at once if their logits take no more memory than a float32 dw: n <= 2 D in 16-bit dtypes."""
    dw = 4 * 4096 * 128256
    assert gradient_rows(8192, 128256, 2, 512 * 2**20, dw) == 8192
    assert gradient_rows(8193, 128256, 2, 512 * 2**20, dw) == 2816  # three even chunks of up to 4096, D
    assert gradient_rows(16384, 50304, 2, 512 * 2**20, 4 * 768 * 50304) == 4096  # more than D
    assert gradient_rows(8192, 128256, 2, 512 * 2**20, 0) == 2048  # without dw
