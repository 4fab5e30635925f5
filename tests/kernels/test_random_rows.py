"""Thousands of random and adversarial rows of random shapes on a GPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pallas_softmax as ps
from tests.support import cases, oracle
from tests.support.cases import BF16, F16, F32
from tests.support.gpu import MAX_K, THREADS, assert_forward_and_grad, assert_top_k, assert_topk, both, top_k, topk

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_a_gpu")]


def random_logits(rng, rows, v, dtype):
    """Returns rows of every scale, with ties, infinities and NaNs of both signs."""
    x = rng.standard_normal((rows, v)) * rng.choice([0.01, 1, 10, 1000], (rows, 1))
    x = np.where(rng.random((rows, 1)) < 0.3, np.round(x * rng.choice([0.2, 1])), x)  # ties
    for special in (-np.inf, np.inf, np.nan, cases.NEG_NAN, -0.0):
        share = rng.choice([0, 0, 0, 0.001, 0.5], (rows, 1))
        if share.any():
            x = np.where(rng.random(x.shape) < share, special, x)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


SEED = 20261121


def adversarial_logits(rng, rows, v, dtype):
    """Returns rows that are hard for top-k: ties, sorted rows, the best in few places, and NaN."""
    at = np.arange(v)
    start, size = rng.integers(v), rng.integers(1, 2 + v // 4)
    vec = 16 // dtype.itemsize
    normal = rng.standard_normal(v)
    kinds = [
        np.full(v, rng.choice([0.0, -0.0, 1.5, -7.0])),
        np.linspace(-20, 20, v),
        np.linspace(20, -20, v),
        rng.choice([1.0, -1.0], v),
        np.where((at >= start) & (at < start + size), normal + 30, normal),  # the best are adjacent
        np.where(at // vec % 128 == rng.integers(128), normal + 30, normal),  # the best belong to one thread
        np.where(at % 3 == 0, np.nan, normal),
        np.where(at % 3 == rng.integers(3), cases.NEG_NAN, normal),
        rng.choice([np.nan, cases.NEG_NAN, np.inf, -np.inf], v),
        np.full(v, cases.NEG_NAN),
        np.full(v, -np.inf),
        np.where(at == start, 1.0, -np.inf),
        np.where(at == start, 1.0, cases.NEG_NAN),
        np.where(at < start, -np.inf, cases.NEG_NAN),
    ]
    return np.stack([kinds[i] for i in rng.integers(len(kinds), size=rows)]).astype(dtype)


def random_shapes(count, max_k, longest=300_000):
    """Yields cases of top-k: log-uniform V and k (up to max_k), rows per call, calls, the mask's pattern, and log."""
    for shape in range(count):
        rng = np.random.default_rng([SEED, shape])
        v = int(np.exp(rng.uniform(0, np.log(longest))))
        v += (-v) % int(rng.choice([1, 8]))
        k = int(np.exp(rng.uniform(0, np.log(min(v, max_k) + 1))))
        dtype, pattern = rng.choice([F32, BF16, F16]), rng.choice([None, None, "bv", "1v", "b1"])
        log = rng.choice(2)
        some_calls = [(1, 30), (30, 1), (150, 1)] if v > 30_000 else [(1, 40), (5, 24), (25, 6), (150, 1)]
        rows, calls = some_calls[rng.integers(len(some_calls))]
        yield rng, v, k, dtype, pattern, bool(log), rows, calls


@both
@pytest.mark.parametrize("function", ["fused_topk", "top_k"])
def test_random_winners(implementation, function, capsys):
    """Random and adversarial rows, in half of the calls each. A third of the shapes of top_k has lengths.

    fused_topk gets more than 5,000 rows of 60 shapes, and for triton 2,500 of 30; top_k 20,000 of 60, and 5,000 of 20.
    """
    fused, slow = function == "fused_topk", implementation == "triton"
    count, each = (30 if slow else 60, None) if fused else (20, 250) if slow else (60, 350)
    shapes, total = list(random_shapes(count, MAX_K[implementation])), 0

    def run(shape, x, k, t, where, lengths, log):
        if fused:
            return topk(implementation, x, k, t, where, log)
        return top_k(implementation, x, k, where, lengths, bool(shape % 2))

    def compile_it(shape):
        _, v, k, dtype, pattern, log, rows, _ = shapes[shape]
        where = None if pattern is None else cases.broadcast_mask(pattern, (rows, v))
        lengths = np.zeros(rows, np.int32) if shape % 3 == 0 else None
        run(shape, np.zeros((rows, v), dtype), k, np.ones(rows, F32), where, lengths, log)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(compile_it, range(count)))
    with ThreadPoolExecutor() as pool:  # the oracle spends its time in NumPy
        for shape, (rng, v, k, dtype, pattern, log, rows, calls) in enumerate(shapes):
            has_lengths = shape % 3 == 0 and not fused
            for call in range(calls if fused else -(-each // rows)):
                make = adversarial_logits if call % 2 or rng.random() < 0.5 else random_logits
                x, t = make(rng, rows, v, dtype), rng.choice([0.5, 1, 2], rows).astype(F32)
                where = None if pattern is None else cases.broadcast_mask(pattern, x.shape, seed=call)
                x = cases.spoil_masked(x, where) if fused and where is not None else x
                lengths = rng.integers(-9, v + 9, rows).astype(np.int32) if has_lengths else None
                kept = None if where is None else np.broadcast_to(where, x.shape)
                kept = oracle.within(x, lengths, kept) if has_lengths else kept
                got = [*map(np.asarray, run(shape, x, k, t, where, lengths, log))]
                name = f"seed {SEED}, {shape}.{call}: {rows}x{v} {dtype} k={k} {pattern} {log} {has_lengths}"

                def check(at, got=got, x=x, t=t, kept=kept, name=name, k=k, log=log, shape=shape):
                    some = slice(at, at + 8)
                    names = [f"{name} row {i}" for i in range(len(x))[some]]
                    winners, mask = ps.TopK(*(a[some] for a in got)), None if kept is None else kept[some]
                    if fused:
                        assert_topk(winners, x[some], k, names, t[some], mask, log)
                    else:
                        assert_top_k(winners, x[some], k, names, mask, bool(shape % 2))

                list(pool.map(check, range(0, rows, 8)))
                total += rows
    with capsys.disabled():
        print(f"\n{total} random rows of {function} by {implementation}, seed {SEED}")
    assert total >= ((2500 if slow else 5000) if fused else count * each)


@both
def test_random_rows(implementation, capsys):
    """5,000 random rows, forward and backward: 40 shapes of log-uniform V, with 125 rows each."""
    shapes, rows_each = 40, 125
    with capsys.disabled():
        print(f"\n{shapes * rows_each} random rows by {implementation}, seed {SEED}")

    def check_shape(shape):
        rng, op = np.random.default_rng([SEED, shape]), oracle.FORWARD[shape % 3]
        v = int(np.exp(rng.uniform(0, np.log(300_000))))
        v, dtype = v + (-v) % rng.choice([1, 8]), rng.choice([F32, BF16, F16])
        rows, pattern = int(rng.choice([1, 5, 25, 125])), rng.choice([None, None, "bv", "1v", "b1"])
        for draw in range(rows_each // rows):
            x = random_logits(rng, rows, v, dtype)
            name = f"seed {SEED}, {shape}.{draw}: {op} {rows}x{v} {dtype} {pattern}"
            where = None if pattern is None else cases.broadcast_mask(pattern, x.shape, seed=draw)
            dy = rng.standard_normal((rows, 1 if op == "logsumexp" else v))
            dy = (dy * rng.choice([0.01, 1, 10], (rows, 1))).astype(dtype)
            names = [f"{name} row {i}" for i in range(rows)]
            assert_forward_and_grad(implementation, op, x, names, where, dy)

    with ThreadPoolExecutor(THREADS) as pool:  # for Triton's compilation, and for the oracle
        list(pool.map(check_shape, range(shapes)))
