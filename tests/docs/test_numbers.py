"""The recorded results hold the measured numbers of the README, the FAQ and the performance pages."""

import importlib.util
import re

from benchmarks.support.result import number
from tests.docs.test_docs import README, ROOT


def load(name: str):
    """Returns a module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


overview, pages = load("overview_picture"), load("performance_tables")
PAGES = {name: path.read_text() for name, path in pages.PAGES.items()}


def missing(text: str, *sentences: str) -> list[str]:
    text = " ".join(text.split())
    return [sentence for sentence in sentences if sentence not in text]


def test_the_table_and_the_pictures_of_the_readme_are_those_of_the_results():
    rows = []
    for c in overview.COMPARISONS:
        jax, ours = overview.microseconds(c)
        times = f"{jax:,.0f} | {ours:,.0f} | {overview.times(jax / ours)}"
        rows.append(f"| {c.name} | {c.shape} | {c.dtype} | {times} |")
    assert re.findall(r"^\|.*\| [\d.]+ \|$", README, re.MULTILINE) == rows
    for picture in (overview.PICTURE, overview.NARROW):
        assert overview.description() in picture.read_text()


def test_the_sentences_of_the_readme_are_true():
    def comparison(name):
        return next(c for c in overview.COMPARISONS if c.name.startswith((f"`{name}`", f"{name},")))

    def speedup(name):
        jax, ours = overview.microseconds(comparison(name))
        return overview.times(jax / ours)

    def recorded(column, file, contender, case):
        return float(overview.recorded(file, contender=contender, **case)[column])

    loss = comparison("linear_cross_entropy").case
    copy = recorded("share_of_copy", "targets/softmax.csv", "auto", comparison("softmax").case)
    ours, rounded = (recorded("error", "linear/linear.csv", name, loss) for name in ("auto", "jax_inexact"))
    case = {"batch": "4096", "vocab": "128256", "dtype": "float32", "k": "64"}
    unstable = recorded("p50_us", "topk_targets/topk.csv", "jax_unstable", case)
    assert not missing(
        README,
        f"softmax {speedup('softmax')} times as fast as plain JAX, top-k {speedup('fused_topk')} times",
        f"The loss is {speedup('linear_cross_entropy')} times as fast as with float32 logits in JAX, and needs "
        f"{overview.gibibytes('auto'):.1f} GiB of temporaries instead of"
        f" {overview.gibibytes('jax_float32'):.1f} GiB. It is {speedup('the same')} times as fast as with bfloat16",
        f"With `is_stable=False`, JAX takes {unstable:,.0f} µs for k = 64",
        f"its gradients are {100 * ours:.2f}% off, while JAX with bfloat16 logits rounds each logit and its"
        f" gradients are {100 * rounded:.2f}% off",
        f"moves data at {100 * copy:.0f}% of the speed of a plain copy",
    )


def test_the_times_to_a_first_result():
    def seconds(contender, files):
        rows = [row for file in files for row in overview.read(file) if row["contender"] == contender]
        return max(float(row["first_result_s"]) for row in rows if row["first_result_s"])

    times = {
        "`softmax` along the last axis, forward or backward": ("jax", "targets/softmax.csv"),
        "`fused_topk`, k up to 2048": ("jax_stable", "topk_targets/topk.csv", "topk_sweep/topk.csv"),
        "`sample`": ("jax", "sample/sample.csv"),
        "`linear_cross_entropy`, forward and backward": ("jax_float32", "linear/linear.csv"),
    }
    rows = [
        f"| {call} | {seconds('auto', files):.1f} | {seconds(jax, files):.1f} |"
        for call, (jax, *files) in times.items()
    ]
    faq = (ROOT / "docs/faq.md").read_text()
    assert re.findall(r"^\| `.* \| [\d.]+ \| [\d.]+ \|$", faq, re.MULTILINE) == rows


def test_the_tables_of_the_performance_pages_are_those_of_the_results():
    assert len(PAGES) >= 8
    for name, text in PAGES.items():
        assert text == pages.written(text), name
        found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        numbers = [table for table in found if re.search(r"\| [\d.,%]+ \|", table)]
        assert numbers == [table.partition("\n\n")[0].strip() + "\n" for table in pages.tables(text)], name


def test_the_sentences_of_the_performance_overview_are_true():
    def ours(name, column="p50_us", digits=3, contender="auto", **where):
        return number(pages.value(name, column, contender=contender, **where), digits)

    percent = "{:.0%}".format
    linear, top_k = "linear/linear", {"batch": 4096, "vocab": 128256, "k": 5, "dtype": "float32"}
    row = {"dtype": "float32", "batch": 1, "function": "none", "digits": 2}
    memory = {"column": "memory_gib", "digits": 2, "reduction": "mean"}
    ms = {"column": "p50_ms", "reduction": "none"}
    long = pages.chosen("targets/softmax", "vocab >= 25000", contender="auto").share_of_copy
    read = pages.value("topk_targets/topk", "share_of_read", contender="auto", **top_k)
    block = pages.chosen("programs/programs", contender="auto", program="block").speedup.dropna()
    attention = (pages.chosen("attention/programs", contender=name, remat=False).p50_us for name in ("auto", "cudnn"))
    mine, cudnn = (times.to_numpy() for times in attention)
    assert not missing(
        PAGES["performance"],
        f"`softmax` reaches {pages.span(long, percent)} of the speed of a plain copy",
        f"a read of the logits at {percent(read)} of the speed of a plain sum",
        f"{ours(linear, **memory)} GiB of temporaries instead of {ours(linear, **memory, contender='jax_float32')} GiB",
        f"is {pages.span(block)} times as fast as with `jax.nn`",
        f"cuDNN's kernel is {pages.span(mine / cudnn)} times as fast as ours",
        f"takes {ours(linear, **ms)} ms where plain JAX with bfloat16 logits takes"
        f" {ours(linear, **ms, contender='jax_inexact')} ms",
        f"without a filter takes {ours('sample/sample', **row)} µs where `jax.random.categorical` takes"
        f" {ours('sample/sample', **row, contender='jax')} µs",
    )
