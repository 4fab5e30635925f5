"""benchmarks.invariance --orders: other orders of a row's sums, and the cost of the planner's order."""

import contextlib
import csv
import functools

import jax
import pytest

from benchmarks import invariance
from benchmarks.support import timing
from tests.support.covering import first
from tests.support.lowering import kernel_names, kernel_results, lowered

CASES = {
    ("softmax", 128256, "float32"): ["16 parts", "256 parts", "4 parts", "8 parts"],
    ("softmax_where_gradient", 8192, "bfloat16"): ["1 parts", "2 parts", "4 parts"],
    ("token_stats", 8192, "float16"): ["128 lanes", "1 parts", "2 parts", "4 parts"],
    ("logsumexp", 50257, "float32"): ["4 parts", "1 parts", "2 parts", "8 parts", "16 parts"],
    ("log_softmax", 127, "bfloat16"): ["32 lanes", "4 lanes", "8 lanes", "16 lanes"],
    ("fused_topk_where", 128256, "float32"): ["8 parts", "5 parts", "16 parts"],
    ("sample_temperature", 32000, "float32"): ["8 shares", "1 shares", "2 shares", "4 shares"],
    ("sample_top_p", 128256, "bfloat16"): ["5 parts", "2 parts", "4 parts", "8 parts", "16 parts"],
    ("verify", 8192, "float32"): ["1 parts", "2 parts", "4 parts"],
    ("route", 256, "float32"): ["8 lanes", "16 lanes", "32 lanes"],
}


@pytest.mark.parametrize(("case", "orders"), first(0, [*CASES.items()]), ids=str)
def test_each_order_reaches_the_kernel(monkeypatch, case, orders):
    """Each order has another program for CUDA, and the planner's own comes back afterwards."""
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    function, vocab, dtype = case
    part = invariance.Part(function, vocab, dtype, batch=3, whole=3, seed=0)
    rows = jax.eval_shape(lambda: invariance._rows(part))

    def text():
        return lowered(functools.partial(invariance.FUNCTIONS[function], implementation=None), rows)

    planned = invariance._orders(part, rows)
    own, texts = text(), {}
    for order, context in planned.items():
        with context():
            texts[order] = text()
    assert [*planned] == orders and texts[orders[0]] == own == text()
    assert len(set(texts.values())) == len(orders) and all(kernel_names(text) for text in texts.values())
    if "256 parts" in orders:  # two launches: the first one writes the largest element and the sum of each part
        assert ["3x256xf32"] * 2 in kernel_results(texts["256 parts"])


def test_the_cost_of_the_order(run_benchmark, monkeypatch, tmp_path):
    terms = [1]

    @contextlib.contextmanager
    def with_terms(*other):
        terms[:] = other
        yield
        terms[:] = [1]

    planned = {
        "1 parts": contextlib.nullcontext,
        "2 parts": lambda: with_terms(2, -1),
        "4 parts": contextlib.nullcontext,  # the same program
        "8 parts": lambda: with_terms(2),  # another result
    }
    monkeypatch.setattr(invariance, "_orders", lambda part, rows: planned)
    monkeypatch.setitem(invariance.FUNCTIONS, "softmax", lambda rows, implementation: sum(n * rows.x for n in terms))
    args = "--functions=softmax", "--vocab=40", "--batch=3", "--whole=8", "--implementations=auto,xla", "--orders"
    code, _ = run_benchmark(invariance, *args)
    with open(tmp_path / "invariance.csv", newline="") as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert code == 0 and [row["status"] for row in rows.values()] == ["ok", "ok", "ok", "ok", "error", "differs"]
    auto, other = rows["auto"], rows["2 parts"]
    assert auto["order"] == "1 parts" and rows["xla"]["p50_us"] and not rows["jax"]["p50_us"]
    best = min(float(row["p50_us"]) for row in (auto, other))
    assert float(auto["best_us"]) == best and float(auto["cost"]) == pytest.approx(float(auto["p50_us"]) / best)
    assert not any(rows[name]["cost"] for name in rows if name != "auto")
