"""A row has the same bits in any batch: benchmarks.invariance on a GPU, and what it counts."""

from types import SimpleNamespace

import pytest

from benchmarks import invariance
from tests.support.gpu import on_a_gpu

SHAPES = [
    (1000, "float32"),
    (32000, "bfloat16"),
    (128256, "float32"),
    (151936, "float16"),
    (127, "bfloat16"),
    (50257, "float32"),
    (50257, "bfloat16"),
]


def rows_that_differ(function, vocab, dtype, implementation):
    """Returns the record of three rows alone, and in a batch of 200."""
    lists = {"functions": [function], "vocab": [vocab], "dtype": [dtype], "batch": [3]}
    chosen = SimpleNamespace(**lists, whole=200, seed=0, implementations=(implementation,), orders=False)
    (part,) = invariance.make_parts(chosen)
    record, *_ = invariance.BENCHMARK.run(part, chosen)
    return record


@on_a_gpu
@pytest.mark.parametrize("function", invariance.FUNCTIONS)
@pytest.mark.parametrize(("vocab", "dtype"), SHAPES, ids=str)
def test_rows_have_the_same_bits_in_any_batch(function, vocab, dtype):
    record = rows_that_differ(function, vocab, dtype, "mosaic_gpu")
    assert record.status == "ok", record.reason
    assert "mosaic_gpu" in record.ran and record.found["rows_that_differ"] == 0


@pytest.mark.parametrize(("result", "count"), [(lambda x: x, 0), (lambda x: x.at[-1].add(len(x)), 2)])
def test_rows_that_differ_are_counted(monkeypatch, result, count):
    monkeypatch.setitem(invariance.FUNCTIONS, "softmax", lambda rows, implementation: result(rows.x))
    monkeypatch.setattr(invariance, "_whole", invariance._whole.__wrapped__)  # without its cache
    record = rows_that_differ("softmax", 16, "float32", "xla")
    assert record.found == {"rows_checked": 6, "rows_that_differ": count}
