"""The measured numbers of the README and of the FAQ equal the recorded results."""

import importlib.util
import re

from tests.docs.test_docs import README, ROOT


def load(name: str):
    """Returns a module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


overview = load("overview_picture")


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_table_and_the_pictures_of_the_readme_are_those_of_the_results():
    rows = []
    for c in overview.COMPARISONS:
        jax, ours = overview.microseconds(c)
        rows.append(
            f"| {c.name} | {c.shape} | {c.dtype} | {jax:,.0f} | {ours:,.0f} | {overview.times(jax / ours)} |"
        )
    assert re.findall(r"^\|.*\| [\d.]+ \|$", README, re.MULTILINE) == rows
    for picture in (overview.PICTURE, overview.NARROW):
        assert overview.description() in picture.read_text()


def test_the_sentences_of_the_readme_are_true():
    def comparison(name):
        return next(c for c in overview.COMPARISONS if c.name.startswith((f"`{name}`", f"{name},")))

    def speedup(name):
        jax, ours = overview.microseconds(comparison(name))
        return overview.times(jax / ours)

    def recorded(column, file, **case):
        return float(overview.recorded(file, **case)[column])

    copy = recorded("share_of_copy", "targets/softmax.csv", contender="auto", **comparison("softmax").case)
    loss = comparison("linear_cross_entropy").case
    ours, rounded = (
        recorded("error", "linear/linear.csv", contender=name, **loss) for name in ("auto", "jax_inexact")
    )
    case = {"batch": "4096", "vocab": "128256", "dtype": "float32", "k": "64"}
    unstable = recorded("p50_us", "topk_targets/topk.csv", contender="jax_unstable", **case)
    for sentence in (
        f"softmax {speedup('softmax')} times as fast as plain JAX, top-k {speedup('fused_topk')} times",
        f"The loss is {speedup('linear_cross_entropy')} times as fast as with float32 logits in JAX, and needs "
        f"{overview.gibibytes('auto'):.1f} GiB of temporaries instead of"
        f" {overview.gibibytes('jax_float32'):.1f} GiB. It is {speedup('the same')} times as fast as with bfloat16",
        f"With `is_stable=False`, JAX takes {unstable:,.0f} µs for k = 64",
        f"its gradients are {100 * ours:.2f}% off, while JAX with bfloat16 logits rounds each logit and its"
        f" gradients are {100 * rounded:.2f}% off",
        f"moves data at {100 * copy:.0f}% of the speed of a plain copy",
    ):
        assert sentence in one_line(README)


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
