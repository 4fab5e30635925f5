"""Each measured number of the README and of the short pages is in the recorded results."""

import importlib.util
import re
from collections.abc import Iterable

import pytest

from tests.docs.test_docs import README, ROOT

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("index", "install", "migration", "recipes", "faq")))
UNITS = r"(?:µs|us|ms|GiB|GB|MiB|MB|%|times|s|seconds|tokens/s)"


def load(name: str):
    """Returns a module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


overview = load("overview_picture")


def comparison(name: str):
    """Returns the first comparison of this function."""
    return next(c for c in overview.COMPARISONS if c.name.startswith((f"`{name}`", f"{name},")))


def speedup(name: str) -> str:
    jax, ours = overview.microseconds(comparison(name))
    return overview.times(jax / ours)


def share(name: str) -> str:
    """Returns the share of the bandwidth of a copy, in percent."""
    c = comparison(name)
    return f"{100 * float(overview.recorded(c.file, contender='auto', **c.case)['share_of_copy']):.0f}%"


def off(contender: str) -> str:
    """Returns the error of a contender's loss and gradients, in percent."""
    row = overview.recorded(
        "linear/linear.csv", contender=contender, **comparison("linear_cross_entropy").case
    )
    return f"{100 * float(row['error']):.2f}%"


def seconds(contender: str, *files: str) -> float:
    """Returns the longest time to a first result."""
    rows = [row for file in files for row in overview.read(file) if row["contender"] == contender]
    return max(float(row["first_result_s"]) for row in rows if row["first_result_s"])


def unstable_us() -> str:
    row = overview.recorded(
        "topk_targets/topk.csv",
        contender="jax_unstable",
        batch="4096",
        vocab="128256",
        dtype="float32",
        k="64",
    )
    return f"{float(row['p50_us']):,.0f}"


# the sentences with measured numbers, without their line breaks, made from the results
README_SENTENCES = (
    f"softmax {speedup('softmax')} times as fast as plain JAX, top-k {speedup('fused_topk')} times",
    f"The loss is {speedup('linear_cross_entropy')} times as fast as with float32 logits in JAX, and needs "
    f"{overview.gibibytes('auto'):.1f} GiB of temporaries instead of {overview.gibibytes('jax_float32'):.1f} GiB. "
    f"It is {speedup('the same')} times as fast as with bfloat16 logits",
    f"With `is_stable=False`, JAX takes {unstable_us()} µs for k = 64",
    f"keeps the logits in float32 and its gradients are {off('auto')} off, while JAX with bfloat16 logits "
    f"rounds each logit and its gradients are {off('jax_inexact')} off",
    f"JAX with bfloat16 logits needs {overview.gibibytes('jax_inexact'):.1f} GiB of temporaries",
    f"moves data at {share('softmax')} of the speed of a plain copy",
)
NOT_MEASURED = ("creates an environment (800 MB)", "(Linux, 1 GB)")  # .ci/run checks the first one


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def measured(text: str, sentences: Iterable[str]) -> list[str]:
    """Returns the numbers with a unit in a page, without its code blocks, its comments and these sentences."""
    text = one_line(re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL))
    for sentence in sentences:
        text = text.replace(sentence, "")
    return re.findall(rf"\d[\d.,]* ?{UNITS}(?!\w)", text)


def test_the_table_of_the_readme_is_that_of_the_results():
    rows = []
    for c in overview.COMPARISONS:
        jax, ours = overview.microseconds(c)
        rows.append(
            f"| {c.name} | {c.shape} | {c.dtype} | {jax:,.0f} | {ours:,.0f} | {overview.times(jax / ours)} |"
        )
    assert re.findall(r"^\|.*\| [\d.]+ \|$", README, re.MULTILINE) == rows


@pytest.mark.parametrize("sentence", README_SENTENCES)
def test_a_sentence_of_the_readme_is_true(sentence):
    assert sentence in one_line(README)


@pytest.mark.parametrize("page", PAGES)
def test_no_other_number_is_measured(page):
    assert measured((ROOT / page).read_text(), (*README_SENTENCES, *NOT_MEASURED)) == []


def test_the_times_to_a_first_result():
    topk = "topk_targets/topk.csv", "topk_sweep/topk.csv"
    times = {
        "`softmax` along the last axis, forward or backward": ("jax", "targets/softmax.csv"),
        "`fused_topk`, k up to 2048": ("jax_stable", *topk),
        "`sample`": ("jax", "sample/sample.csv"),
        "`linear_cross_entropy`, forward and backward": ("jax_float32", "linear/linear.csv"),
    }
    rows = [
        f"| {call} | {seconds('auto', *files):.1f} | {seconds(jax, *files):.1f} |"
        for call, (jax, *files) in times.items()
    ]
    assert (
        re.findall(r"^\| `.* \| [\d.]+ \| [\d.]+ \|$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
        == rows
    )


@pytest.mark.parametrize("picture", [overview.PICTURE, overview.NARROW], ids=lambda path: path.stem)
def test_the_picture_is_that_of_the_results(picture):
    assert overview.description() in picture.read_text()
