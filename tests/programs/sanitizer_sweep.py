"""Runs every kernel over a few shapes; tests/kernels/test_sanitizers.py runs this under compute-sanitizer.

The arguments are the implementations, by default all that can run here. The shapes are small because racecheck slows
down accesses to shared memory by two orders of magnitude. Numbers are checked where that takes a line; the tests of the
operations on a GPU check all of them.
"""

import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_softmax._src.gpu.layout import Tile, Window
from pallas_softmax._src.linear import logits_kernel
from pallas_softmax._src.linear.losses import Coefficients, Head, Statistics
from pallas_softmax._src.linear.merge_kernel import merge_tiles
from pallas_softmax._src.sample import noise
from pallas_softmax._src.sample.plan import StreamPlan, plan_of
from pallas_softmax._src.sample.stream_kernel import draw_rows
from pallas_softmax._src.select.plan import SelectPlan
from pallas_softmax._src.softmax.columns_plan import Strips
from pallas_softmax._src.softmax.plan import Parts
from pallas_softmax._src.triton.checks import missing
from pallas_softmax._src.triton.plan import Block, Long, Slabs
from tests.programs import paper_traffic
from tests.route import kernels as route
from tests.sample import kernels as sample
from tests.softmax import kernels as softmax
from tests.support import bounds, cases, linear, oracle, routing, stats
from tests.support import triton_kernels as triton
from tests.support.draws import assert_cutoffs, assert_draws, without_filters
from tests.topk import kernels as topk
from tests.topk import select

TWO = ("softmax", "softmax_grad")  # where the other operations would add nothing
# (rows, V, dtype, plan, masked, operations). Rows in registers, in one CTA, in clusters, in two launches. If a CTA has
# several segments, they have whole blocks: otherwise the last block reads bytes of the next segment, which may not have
# arrived. They do not count, but racecheck reports them.
SHAPES = [
    (3, 1000, "float32", None, False, oracle.OPERATIONS),
    (3, 127, "bfloat16", None, True, TWO),
    (2, 1024, "float32", Parts(1024, 4, 1, 1, True), False, TWO),
    (3, 1003, "bfloat16", Parts(1003, 8, 2, 1, True), True, oracle.OPERATIONS),
    (2, 1003, "float32", Parts(1003, 4, 1, 2, True), True, oracle.OPERATIONS),
    (2, 2048, "bfloat16", Parts(2048, 8, 1, 4, True), False, TWO),
    (2, 8192, "bfloat16", Parts(8192, 8, 1, 2, True, per_cta=2), False, oracle.OPERATIONS),
    (2, 1003, "float32", Parts(1003, 4, 1, 2, False), False, TWO),
    (3, 1003, "float32", Parts(1003, 4, 1, 2, True, teams=1, slots=2), True, TWO),
    (3, 1503, "float32", Parts(1503, 4, 1, 2, True, teams=1, slots=2), False, ("softmax", "softmax_grad")),
]
# (rows, V, dtype, plan, masked, k). Rows in registers; in one CTA, not aligned to 16 bytes; in parts that are merged.
# Each selects winners in registers, or sorts them in shared memory.
TOPK = [
    (3, 100, "float32", None, False, (1, 5)),
    (3, 127, "bfloat16", None, True, (5,)),
    (2, 1003, "float32", Window(1003, 4, 2, 1), True, (1, 5, 300)),
    (2, 2048, "bfloat16", Window(2048, 8, 1, 1), False, (5, 300)),
    (2, 1003, "bfloat16", Window(1003, 8, 1, 1, 3), False, (1, 5, 300)),
    (2, 1003, "float32", Window(1003, 4, 1, 1, 2), True, (5,)),
    (2, 9203, "float32", Window(9203, 4, 8, 1, compact=True), True, (300, 1024)),
]
# (plan, dtype, masked) of selections: one CTA, and clusters. Lists overflow. Rows end within a vector.
SELECT = [
    (SelectPlan(5003, 300, 1, 2, 2048, 1), "bfloat16", False),
    (SelectPlan(9001, 700, 4, 1, 2112, 1), "bfloat16", True),
    (SelectPlan(9001, 2048, 2, 2, 6144, 1), "float16", False),
]

# (rows, V, dtype, k) of the gradient of top-k.
TOPK_GRAD = [(4, 100, "float32", 5), (4, 127, "bfloat16", 40)]

# (V, dtype, plan, operations) of columns. In registers; in one CTA that takes several strips; in clusters, with and
# without turns.
COLUMNS = [
    (21, "float32", Tile(32, 8, 4, 1), TWO),
    (127, "float32", Strips(127, 8, 1, 64, 2, turns=2), oracle.OPERATIONS),
    (300, "bfloat16", Strips(300, 8, 2, 64, 3), TWO),
    (300, "float32", Strips(300, 8, 4, 64, 3, turns=2), TWO),
    (300, "float32", Strips(300, 8, 1, 64, 1), ("logsumexp",)),  # slots are used again
]

# (rows, V, dtype, CTAs, warpgroups, masked) of sample. One CTA; a cluster with rows not aligned to 16 bytes.
SAMPLE = [(4, 1003, "float32", 1, 2, True), (4, 2048, "bfloat16", 2, 2, False), (4, 1501, "float32", 3, 1, True)]

# (V, dtype, CTAs) of sample without filters.
STREAM = [(2003, "float32", 1), (10_000, "bfloat16", 2)]

# (V, dtype, plan, whether there are a mask and temperatures) of token_stats: in registers, in clusters. A CTA has one
# segment, or two.
STATS = [
    (1000, "float32", None, True),
    (2048, "bfloat16", Parts(2048, 8, 1, 4, True), False),
    (8192, "bfloat16", Parts(8192, 8, 1, 2, True, per_cta=2), False),
]

# (gate, E, k, dtype) of route and its gradient. By words; by float keys; groups that share lanes, and that span lanes.
ROUTE = [
    ("softmax", 64, 6, "bfloat16"),
    ("softmax, bias", 100, 5, "float16"),
    ("sigmoid, bias, groups", 64, 6, "float32"),
    ("sigmoid, bias, groups", 384, 8, "float32"),
]

PAPER = [(3, 63), (2, 2007)]  # (rows, V)

# The same for Triton. Rows in registers; read twice; in parts.
TRITON = [
    (3, 1000, "float32", None, False, oracle.OPERATIONS),
    (3, 1003, "bfloat16", Block(2, 1024, 4), True, oracle.OPERATIONS),
    (2, 2100, "float32", Long(1, 3072, 2, 512, 4), False, oracle.OPERATIONS),
    (2, 2100, "bfloat16", Long(1, 3072, 1, 1024, 4), True, TWO),
    (2, 2100, "float32", Long(3, 1024, 1, 512, 4), True, TWO),
    (2, 2100, "bfloat16", Long(3, 1024, 1, 512, 4), False, (*TWO, "logsumexp")),
]
# The same for Triton's top-k. One part; several parts, merged by one warp and by two.
TRITON_TOPK = [
    (2, 1000, "float32", None, False, (1, 5)),
    (2, 2100, "bfloat16", None, True, (9,)),
    (2, 2100, "float32", Slabs(3, 1024, 8, 128, 4, 2), True, (5,)),
    (2, 2100, "bfloat16", Slabs(2, 2048, 256, 256, 8, 4), False, (200,)),
]

# (n, D, V, dtype, head, bias, peak). A cluster with a tile that ends half beyond the last row; one tile; less than one.
PROJECTIONS = [
    (136, 128, 640, "bfloat16", Head(transpose_w=True, softcap=9.0), True, 1),
    (40, 64, 256, "bfloat16", Head(), False, 30),
    (16, 64, 192, "float16", Head(), True, 1),
]


def logits(rows, v, dtype, *, ties=False, masked=False, seed=0):
    """Returns random rows and a mask or None. With `ties`, all elements of the first row tie."""
    x = np.random.default_rng(seed).standard_normal((rows, v)).astype(dtype)
    x[: int(ties)] = 1
    return x, np.arange(v)[None] % 3 > 0 if masked else None


def assert_rows(name, got, arrays, where=None):
    want, *_ = bounds.expected(name, arrays, where)
    np.testing.assert_allclose(np.asarray(got, "float32"), want, rtol=0.05, atol=0.05)


def assert_winners(got, x, k, where, as_they_are):
    values, indices = map(np.asarray, got)
    want, best = (oracle.top_k if as_they_are else oracle.fused_topk)(x, k, where)
    np.testing.assert_array_equal(indices, best)
    np.testing.assert_allclose(values, want, *((0, 0) if as_they_are else (0.05, 1e-6)))


@jax.jit
def gradients(x, indices, m, d, g, g_d):
    t = np.ones(1, "float32")
    return topk.topk_grad_rows(x, t, indices, m, d, g, g_d, log=False, interpret=None)


def mosaic_gpu():
    for rows, v, dtype, plan, masked, names in SHAPES:
        x, where = logits(rows, v, dtype, masked=masked)
        for name in names:
            arrays = cases.operands(name, x, where)
            kernel = jax.jit(functools.partial(softmax.softmax_results, name, plan=plan, interpret=None))
            assert_rows(name, kernel(arrays, where)[0], arrays, where)
    for rows, v, dtype, plan, masked, ks in TOPK:
        x, where = logits(rows, v, dtype, ties=True, masked=masked)  # ties take the exact path
        for k in ks:
            choice = plan or topk.plan_topk(v, k, dtype)
            kernel = functools.partial(topk.topk_rows, k=k, plan=choice, interpret=None)
            assert_winners(jax.jit(kernel)(x, where=where)[0], x, k, where, False)
        kernel = functools.partial(kernel, temperature=None, dtype=x.dtype)
        assert_winners(jax.jit(kernel)(x, where=where)[0], x, k, where, True)
    for plan, dtype, masked in SELECT:
        rows = select.rows_of(plan.vocab, plan.k, jnp.dtype(dtype))
        x = np.stack([rows[name] for name in ("normal", "special", "constant", "ascending")])
        where = np.arange(plan.vocab)[None] % 3 > 0 if masked else None
        lengths = np.array([200, 4000, plan.vocab, plan.vocab]) if masked else None
        got = select.select_rows(x, plan.k, plan, where, lengths, interpret=None)
        select.assert_rows(got, x, plan.k, where, lengths)
    for rows, v, dtype, k in TOPK_GRAD:
        x, _ = logits(rows, v, dtype)
        won, ones, g = oracle.topk_indices(x, k), np.ones(rows, "float32"), cases.cotangent((rows, k))
        jax.block_until_ready(gradients(x, won, ones, ones, g, ones))
    for v, dtype, plan, names in COLUMNS:
        x, _ = logits(32, v, dtype)  # two arrays of 16 columns
        for name in names:
            arrays = cases.operands(name, x)
            assert_rows(name, softmax.columns_rows(name, arrays, plan, interpret=None), arrays)
    for rows, v, dtype, count, warpgroups, masked in SAMPLE:
        x, where = logits(rows, v, dtype, ties=True, masked=masked)
        where = np.broadcast_to(where, x.shape) if masked else None
        plan = plan_of(v, dtype, count, warpgroups)
        kernel = jax.jit(functools.partial(sample.sample_rows, plan=plan, interpret=None))
        words = np.array([(5, row, 0, row * v) for row in range(rows)], "uint32")
        for k, p, m in ((v, 1, 0), (9, 0.7, 0.01), (v // 2, 0.9, 0)):
            parameters = [np.float32([1]), np.int32([k]), np.float32([p]), np.float32([m])]
            assert_draws(kernel(x, words, parameters, where), x, words, range(rows), parameters, where)
            assert_cutoffs(kernel(x, None, parameters, where), x, range(rows), parameters, where)
    for v, dtype, count in STREAM:
        x, words, parameters, labels = without_filters(logits(4, v, dtype, ties=True)[0], step=5)
        kernel = functools.partial(draw_rows, plan=StreamPlan(v, x.dtype.itemsize, count), stride=1)
        assert_draws(jax.jit(kernel)(x, parameters[0], words), x, words, labels, parameters)
    for name, experts, k, dtype in ROUTE:
        gate, (x, _) = routing.GATES[name], logits(5, experts, dtype, ties=True)
        run = jax.jit(route.results_and_gradient(k, gate, interpret=None))
        routing.check(run, x, k, gate, np.linspace(-0.1, 0.1, experts, dtype="float32"))
    for rows, v in PAPER:
        paper_traffic.main(rows, v)
    for v, dtype, plan, options in STATS:
        x, (labels, _, where, t) = stats.rows(v, dtype), stats.operands(v)
        given = (where, t) if options else (None, None)
        plan = plan or softmax.plan_softmax("token_stats", len(x), v, dtype)
        got = jax.jit(functools.partial(stats.kernel_stats, plan))(x, labels, *given)
        *_, argmax = oracle.token_stats(x, labels, given[0], t if options else 1.0)
        np.testing.assert_array_equal(got.argmax, argmax)
    print("swept mosaic_gpu", SHAPES, TOPK, TOPK_GRAD, COLUMNS, SAMPLE, STREAM, ROUTE, STATS, PAPER)


@functools.partial(jax.jit, static_argnames="head")
def projection_kernels(x, w, b, tokens, coefficients, **known):
    words = jnp.concatenate(noise.words(jax.random.key(0), (len(x), known["head"].vocab(w)), 1), -1)
    drawn = logits_kernel.row_draws(x, w, b, tokens._replace(labels=None, draw=(words,)), **known)
    sums, _ = logits_kernel.row_sums(x, w, b, tokens, **known)
    of_reference, e = logits_kernel.row_sums(x, w, b, tokens, coefficients.m, **known)
    dz = logits_kernel.logit_gradients(x, w, b, tokens, coefficients, **known)
    known["head"] = dataclasses.replace(known["head"], entropy=True)
    with_t, _ = logits_kernel.row_sums(x, w, b, tokens, **known)
    merge = functools.partial(merge_tiles, rows=len(x), vocab=known["head"].vocab(w))
    merged = merge(Statistics(drawn[0], None, None), None, drawn[1]), *(merge(a, tokens.labels) for a in (sums, with_t))
    merged += (merge(of_reference, tokens.labels, one_reference=True),)
    coefficients = coefficients._replace(entropy_factor=0 * coefficients.m)
    return drawn, sums, e, dz, with_t, merged, logits_kernel.logit_gradients(x, w, b, tokens, coefficients, **known)


def projection():
    """Runs the kernels without the cuBLAS products: loading cuBLAS takes minutes under compute-sanitizer."""
    for n, depth, vocab, dtype, head, bias, peak in PROJECTIONS:
        options = {"bias": bias, "peak": peak, "transpose_w": head.transpose_w}
        x, w, labels, b = linear.arrays(n, depth, vocab, dtype, **options)
        tokens = linear.tokens_of(labels, temperature=np.linspace(1, 2, n))
        coefficients = Coefficients(*jnp.ones((4, n)))
        jax.block_until_ready(projection_kernels(x, w, b, tokens, coefficients, head=head))
    print("swept projection", PROJECTIONS)


def triton_rows(rows, v, dtype, plan, masked, name):
    """Compiles a kernel, and returns a function that runs and checks it."""
    x, where = logits(rows, v, dtype, masked=masked)
    arrays = cases.operands(name, x, where)
    kernel = jax.jit(lambda arrays, where: triton.softmax_rows(name, arrays, where, (1,), plan))
    run = functools.partial(kernel.lower(arrays, where).compile(), arrays, where)
    return lambda: assert_rows(name, jax.tree.leaves(run())[0], arrays, where)


def triton_topk(rows, v, dtype, plan, masked, k, as_they_are=False):
    """Does the same for top-k, with a normalizer or with the winners as they are."""
    x, where = logits(rows, v, dtype, ties=not as_they_are, masked=masked, seed=int(as_they_are))
    values, t = (x.dtype, None) if as_they_are else (np.dtype("float32"), np.ones((1, 1), "float32"))
    kernel = jax.jit(functools.partial(triton.topk, k=k, log=False, dtype=values, plan=plan))
    run = functools.partial(kernel.lower(x, where, t).compile(), x, where, t)
    return lambda: assert_winners(run()[0], x, k, where, as_they_are)


def triton_sweep():
    with ThreadPoolExecutor(14) as pool:  # to compile
        checks = [pool.submit(triton_rows, *case, name) for *case, names in TRITON for name in names]
        checks += [pool.submit(triton_topk, *case, k) for *case, ks in TRITON_TOPK for k in ks]
        checks += [pool.submit(triton_topk, *case, ks[0], True) for *case, ks in TRITON_TOPK]
    for check in checks:
        check.result()()
    print("swept triton", TRITON, TRITON_TOPK)


if __name__ == "__main__":
    sweeps = {"mosaic_gpu": mosaic_gpu, "projection": projection, "triton": triton_sweep}
    if missing() is not None:
        del sweeps["triton"]
    for implementation in sys.argv[1:] or sweeps:
        sweeps[implementation]()
