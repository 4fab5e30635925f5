"""The performance pages agree with the recorded results: their tables, and the numbers in their sentences."""

import re
from typing import Any

import pytest

from benchmarks.support.result import number
from tests.docs.test_numbers import load, measured, one_line

pytest.importorskip("pandas")
pages = load("performance_tables")
chosen, rows_of, span, times, value = pages.chosen, pages.rows_of, pages.span, pages.times, pages.value
TEXTS = {name: path.read_text() for name, path in pages.PAGES.items()}


# --- The sentences --------------------------------------------------------------------------------------


def speedups(name: str, **where: Any) -> str:
    """Returns the range of our speed-ups in a result."""
    return span(chosen(name, **{"contender": "auto"} | where).speedup.dropna())


def ratios(name: str, peer: str, by: tuple[str, ...], **where: Any) -> str:
    """Returns the range of a peer's time over ours, by case."""
    mine, theirs = (
        chosen(name, contender=contender, **where).set_index(list(by)).p50_us for contender in ("auto", peer)
    )
    return span((theirs / mine).dropna())


def percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}%"


def ours(name: str, column: str = "p50_us", digits: int = 3, **where: Any) -> str:
    """Returns one number of a result, by default of the implementation that users get."""
    return number(value(name, column, **{"contender": "auto"} | where), digits)


def cudnn() -> str:
    """Returns the range of our time divided by the time of cuDNN's fused attention."""
    mine, theirs = (
        chosen("attention/programs", contender=contender, remat=False).p50_us.to_numpy()
        for contender in ("auto", "cudnn")
    )
    return span(mine / theirs)


def of_devices(call: str, sharding: str, clock: str = "device") -> str:
    """Returns the range of our speed-ups on several GPUs. `call` is a query."""
    rows = chosen("sharded/sharded", call, contender="ours", sharding=sharding)
    return span(rows[f"speedup_{clock}"].dropna())


def block_over_faster_jax(remat: bool, sizes: tuple[int, ...] = (1024, 4096, 16384)) -> str:
    """Returns how many times as fast our block with `where=` is as the faster of two forms in plain JAX."""
    block = {"size": sizes, "remat": remat}
    ours = (
        chosen("programs/programs", program="block_where", contender="auto", **block).set_index("size").p50_us
    )
    jax = chosen("programs/programs", program=("block", "block_where"), contender="jax", **block)
    return span(sorted({times(ratio) for ratio in jax.groupby("size").p50_us.min() / ours}), str)


TARGETS, TOPK, SAMPLE, LINEAR = "targets/softmax", "topk_targets/topk", "sample/sample", "linear/linear"
CASE = ("batch", "vocab", "dtype", "direction")
DRAW = ("batch", "dtype", "function")
LONG = span(
    [row.share_of_copy for row in chosen(TARGETS, contender="auto").itertuples() if row.vocab >= 25000],
    percent,
)
KERNEL = {"contender": "mosaic_gpu", "dtype": "float32", "direction": "forward"}
FULL_READ = value(TOPK, "share_of_read", contender="auto", batch=4096, vocab=128256, k=5, dtype="float32")
ONE_ROW = {"dtype": "float32", "batch": 1, "function": "none"}
MANY = chosen(SAMPLE, contender="auto", batch=(64, 256, 1024)).speedup
TIES = chosen("topk_short/topk", contender="auto", logits="ties").slowdown
WORST = span(rows_of("topk_worst/topk").slowdown.dropna())
PEERS = "linear_peers/linear"
GAP = value("linear_training/linear_training", "largest_gap", contender="ours")
ERROR = value(LINEAR, "error", contender="auto", reduction="mean")
SENTENCES = {
    "performance": (
        f"`softmax` reaches {LONG} of the speed of a plain copy",
        f"a read of the logits at {percent(FULL_READ)} of the speed of a plain sum",
        f"{ours(LINEAR, 'memory_gib', 2, reduction='mean')} GiB of temporaries instead of"
        f" {ours(LINEAR, 'memory_gib', 2, reduction='mean', contender='jax_float32')} GiB",
        f"is {speedups('programs/programs', program='block')} times as fast as with `jax.nn`",
        f"given as `where=` it is {speedups('programs/programs', program='block_where')} times as fast",
        f"Our block is {block_over_faster_jax(False, (1024,)).split()[0]} times as fast as that form",
        f"With V sharded over 2 or 4 GPUs, `softmax` is {of_devices('k != k', 'vocab', 'wall')} times as fast in wall",
        f"cuDNN's kernel is {cudnn()} times as fast as ours",
        f"takes {ours(LINEAR, 'p50_ms', reduction='none')} ms where plain JAX with bfloat16 logits takes"
        f" {ours(LINEAR, 'p50_ms', reduction='none', contender='jax_inexact')} ms",
        f"without a filter takes {ours(SAMPLE, digits=2, **ONE_ROW)} µs where `jax.random.categorical` takes"
        f" {ours(SAMPLE, digits=2, **ONE_ROW, contender='jax')} µs",
    ),
    "softmax": (
        f"Forward, `softmax` is {speedups(TARGETS, direction='forward')} times as fast as `jax.nn.softmax`",
        f"Backward, it is {speedups(TARGETS, direction='backward')} times as fast",
        f"From 25,000 elements on it reaches {LONG} of the bandwidth of a plain copy",
        f"QuACK 0.6.5 takes {ratios(TARGETS, 'quack', CASE)} times as long as `softmax`",
        f"torch takes {ratios(TARGETS, 'torch', CASE)} times as long",
        f"torch takes {ratios('few_rows/softmax', 'torch', CASE)} times as long as `softmax` on few rows",
        f"`logsumexp` is {speedups('logsumexp/softmax')} times as fast as `jax.nn.logsumexp`",
        f"takes {ours(TARGETS, digits=2, vocab=1000, **KERNEL)} µs at 4,000 × 1,000 and"
        f" {ours(TARGETS, vocab=4096, **KERNEL)} µs at 4,000 × 4,096",
    ),
    "topk": (
        f"`fused_topk` is {speedups(TOPK)} times as fast as `jax.nn.softmax` and `lax.top_k`",
        f"torch takes {ratios(TOPK, 'torch', (*CASE, 'k'))} times as long as `fused_topk`",
        f"RAFT takes {ours('topk_sweep/topk', contender='jax_raft', k=64)} µs at k = 64",
        f"other logits take {WORST} times as long as normal ones",
        f"the largest slowdown is {times(TIES.max())} times",
    ),
    "sampling": (
        f"from {times(MANY.min())} to {times(MANY.max())} times as fast",
        f"torch takes {ratios(SAMPLE, 'torch', DRAW)} times as long as `sample`",
        f"`sample` makes the server {speedups('serve/serve')} times as fast",
    ),
    "loss": (
        f"{ours(LINEAR, 'products', reduction='mean')} times the projection alone",
        f"{ours(LINEAR, 'products', reduction='none')} times the projection alone",
        f"{100 * ERROR:.2f}% off the gradients of the scan",
        f"logits are {100 * value(LINEAR, 'error', contender='jax_inexact', reduction='mean'):.2f}% off",
        f"differ by at most {GAP:.4f}",
        f"{ours('linear_long/linear', 'products')} times the projection alone at 65,536 tokens",
        f"QuACK's gradients are {100 * value(PEERS, 'error', contender='quack', w_shape='VxD'):.2f}% off, ours"
        f" {100 * value(PEERS, 'error', contender='auto', w_shape='VxD'):.2f}%",
    ),
    "programs": (
        f"block with `where=` is {block_over_faster_jax(False)} times as fast as the faster form of each length in"
        f" plain JAX, and {block_over_faster_jax(True)} times with",
        f"ours is {speedups('attention/programs', remat=False)} times as fast as plain JAX",
        f"all {value('beam_search/beam_search', 'same', contender='auto', vocab=32000, dtype='float32'):.0f}"
        " hypotheses",
        f"cuDNN's kernel is {cudnn()} times as fast as ours",
    ),
    "several_gpus": (
        f"k = 64: {of_devices('k == 64', 'batch')} with a sharded batch, {of_devices('k == 64', 'vocab')} with",
        f"k = 5: {of_devices('k == 5', 'batch')} with a sharded batch, {of_devices('k == 5', 'vocab')} with",
        f"{of_devices('k != k', 'vocab', 'wall')} in wall time and {of_devices('k != k', 'vocab')} in device time",
        f"it is {of_devices('k != k', 'batch', 'wall')} and {of_devices('k != k', 'batch')}",
    ),
    "triton": (),
    "cpu": (),
}


@pytest.mark.parametrize("page", TEXTS)
def test_the_tables_are_those_of_the_results(page):
    assert TEXTS[page] == pages.written(TEXTS[page])
    found = re.findall(r"(?:^\|.*\n)+", TEXTS[page], re.MULTILINE)
    numbers = [table for table in found if re.search(r"\| [\d.,%]+ \|", table)]
    assert numbers == [table.partition("\n\n")[0].strip() + "\n" for table in pages.tables(TEXTS[page])]


@pytest.mark.parametrize("page", TEXTS)
def test_sentences_have_the_numbers_of_the_results(page):
    """Each sentence is on the page, and nothing else there is measured."""
    text = one_line(TEXTS[page])
    assert [sentence for sentence in SENTENCES[page] if sentence not in text] == []
    prose = TEXTS[page]
    for table in pages.tables(prose):
        prose = prose.replace(table, "")
    assert measured(prose.replace("80GB", ""), SENTENCES[page]) == []


def test_the_overview_is_short():
    assert TEXTS["performance"].count("\n") <= 150
