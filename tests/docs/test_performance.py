"""The performance pages agree with the recorded results: their tables, and the numbers in the overview's sentences."""

import re
from typing import Any

import pytest

from benchmarks.support.result import number
from tests.docs.test_numbers import load, one_line

pytest.importorskip("pandas")
pages = load("performance_tables")
TEXTS = {name: path.read_text() for name, path in pages.PAGES.items()}


def test_the_tables_are_those_of_the_results():
    assert len(TEXTS) >= 8
    for name, text in TEXTS.items():
        assert text == pages.written(text), name
        found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        numbers = [table for table in found if re.search(r"\| [\d.,%]+ \|", table)]
        assert numbers == [table.partition("\n\n")[0].strip() + "\n" for table in pages.tables(text)], name


def test_sentences_of_the_overview_have_the_numbers_of_the_results():
    def ours(name: str, column: str = "p50_us", digits: int = 3, **where: Any) -> str:
        return number(pages.value(name, column, **{"contender": "auto"} | where), digits)

    def speedups(name: str, **where: Any) -> str:
        return pages.span(pages.chosen(name, contender="auto", **where).speedup.dropna())

    percent = "{:.0%}".format
    linear, top_k = "linear/linear", {"batch": 4096, "vocab": 128256, "k": 5, "dtype": "float32"}
    row = {"dtype": "float32", "batch": 1, "function": "none", "digits": 2}
    memory = {"column": "memory_gib", "digits": 2, "reduction": "mean"}
    long = pages.chosen("targets/softmax", "vocab >= 25000", contender="auto").share_of_copy
    read = pages.value("topk_targets/topk", "share_of_read", contender="auto", **top_k)
    mine, cudnn = (
        pages.chosen("attention/programs", contender=contender, remat=False).p50_us.to_numpy()
        for contender in ("auto", "cudnn")
    )
    for sentence in (
        f"`softmax` reaches {pages.span(long, percent)} of the speed of a plain copy",
        f"a read of the logits at {percent(read)} of the speed of a plain sum",
        f"{ours(linear, **memory)} GiB of temporaries instead of"
        f" {ours(linear, **memory, contender='jax_float32')} GiB",
        f"is {speedups('programs/programs', program='block')} times as fast as with `jax.nn`",
        f"cuDNN's kernel is {pages.span(mine / cudnn)} times as fast as ours",
        f"takes {ours(linear, 'p50_ms', reduction='none')} ms where plain JAX with bfloat16 logits takes"
        f" {ours(linear, 'p50_ms', reduction='none', contender='jax_inexact')} ms",
        f"without a filter takes {ours('sample/sample', **row)} µs where `jax.random.categorical` takes"
        f" {ours('sample/sample', **row, contender='jax')} µs",
    ):
        assert sentence in one_line(TEXTS["performance"])
