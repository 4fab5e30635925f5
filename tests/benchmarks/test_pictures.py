"""The pictures and tables of the benchmarks, drawn and printed again from the committed results."""

import json
from pathlib import Path

import matplotlib.figure
import matplotlib.patches
import matplotlib.text
import numpy as np
import pytest
from matplotlib.colors import to_hex

from benchmarks import __main__ as both
from benchmarks import accuracy, beam_search, linear, paper, programs, sample, serve, sharded, softmax, topk
from benchmarks.support import flags, plot, redraw, report
from benchmarks.support.report import Row
from tests.support.benchmark_cases import case_of
from tests.support.covering import first_values

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LOCAL = RESULTS / "local"  # results of this machine's runs, which are not committed
FILES = sorted(file for file in RESULTS.glob("*/*.json") if file.parent != LOCAL)
PICTURES = sorted(file.parent.name for file in RESULTS.glob("*/*.png") if file.parent != LOCAL)
MODULES = {
    module.__name__.split(".")[-1]: module
    for module in (accuracy, beam_search, linear, programs, serve, sharded)
}


def rows_of(file: Path) -> tuple[list, dict, dict]:
    """Returns the rows of a result's JSON, the bandwidths of its run, and where it ran."""
    if file.stem == "linear_training":
        return report.read(file, linear.Curve)
    return report.read(file, getattr(MODULES.get(file.stem), "Row", Row))


@pytest.fixture
def figures(monkeypatch):
    """Returns a function that draws the picture of a result's name or of rows, without a file."""
    plt = plot.pyplot()
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda figure: None)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *args, **kwargs: None)

    def drawn(of):
        if isinstance(of, str):
            redraw.redraw(RESULTS / of)
        else:
            plot.draw(Path("x.png"), of, {"copy": 3e12}, {"device": "a GPU", "jax": "1"})
        return plt.gcf()

    yield drawn
    close("all")


def texts(figure) -> list[str]:
    """Returns all texts of a figure."""
    found = (text.get_text() for text in figure.findobj(matplotlib.text.Text))
    return [text for text in found if text]


def legend_colors(figure) -> dict[str, str]:
    """Returns the colours of a figure's legend, by label."""
    (legend,) = figure.legends
    found = {}
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        is_bar = isinstance(handle, matplotlib.patches.Patch)
        found[text.get_text()] = to_hex(handle.get_facecolor() if is_bar else handle.get_color())
    return found


def bars(figure) -> list:
    """Returns the bars of the contenders, without the legend."""
    return [bar for axis in figure.axes for bars in axis.containers for bar in bars]


# --- Pictures -------------------------------------------------------------------------------------------


def test_ours_names_the_package(figures):
    assert "pallas_softmax (auto)" in legend_colors(figures("topk_targets"))
    assert {"pallas_softmax (mosaic_gpu)", "pallas_softmax (xla)"} < set(legend_colors(figures("targets")))
    assert "pallas_softmax.softmax (auto)" in legend_colors(figures("figure1"))
    assert {"pallas_softmax, batch", "pallas_softmax, vocab"} < set(legend_colors(figures("sharded")))


def test_a_contender_has_one_colour_in_all_pictures(figures):
    bar, line, devices = (legend_colors(figures(name)) for name in ("topk_targets", "figure3", "sharded"))
    ours = bar["pallas_softmax (auto)"]
    assert ours == line["pallas_softmax.fused_topk (auto)"] == devices["pallas_softmax, vocab"]
    stable = "jax.nn.softmax + lax.top_k"
    assert bar["jax_stable"] == line[stable] == devices[f"{stable}, batch"] != ours
    assert bar["torch"] == line["torch"] == legend_colors(figures("targets"))["torch"]
    assert devices["jax.nn.softmax, batch"] == legend_colors(figures("targets"))["jax"]


def test_a_colour_depends_on_the_name_only(figures):
    names = ["torch", "somebody", "jax", "auto"]
    rows = [Row("softmax", case_of(), name, ours=name == "auto", share_of_copy=0.5) for name in names]
    every, some = legend_colors(figures(rows)), legend_colors(figures(rows[:0:-1]))
    assert some.items() < every.items() and every["somebody"] == "#b8a62e"  # the same in every process
    assert plot.color("somebody") != plot.color("somebody else")
    names = [*flags.IMPLEMENTATIONS, *(flags.SOFTMAX_PEERS | flags.TOPK_PEERS)]
    assert len({plot.COLORS[name] for name in names}) == len(names)
    for algorithms in (flags.SOFTMAX_ALGORITHMS, flags.TOPK_ALGORITHMS):
        listed = [plot.COLORS[name] for name in (*names, *algorithms)]
        assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", first_values(3, PICTURES))
def test_axes_have_labels_with_units_and_the_logits_are_explained(figures, name):
    figure = figures(name)
    seen = [axis for axis in figure.axes if axis.axison]
    assert all(axis.get_xlabel() for axis in seen if axis.xaxis.get_visible())
    labels = " ".join(axis.get_xlabel() + axis.get_ylabel() for axis in seen)
    unit = {
        "paper": "elements per second",
        "sharded": "device time of a call, us",
        "linear": "GiB of temporaries",
    }
    (file,) = (RESULTS / name).glob("*.json")
    assert unit.get(file.stem, "bandwidth, % of 3.") in labels
    kinds = {row["logits"] for row in json.loads(file.read_text())["rows"] if "logits" in row}
    written = " ".join("\n".join(texts(figure)).split())
    assert all(f"{kind} ({flags.LOGITS[kind]})" in written for kind in kinds)


def test_the_legend_says_why_a_bar_is_hollow(figures):
    assert "hollow: the peer's result differs,\nfor it rounds to 16 bits between its steps" in legend_colors(
        figures("targets")
    )
    for figure in (
        figures("sharded"),
        figures([Row("softmax", case_of(), "jax", False, status="differs", share_of_copy=1)]),
    ):
        (text,) = (text for text in legend_colors(figure) if "hollow" in text)
        assert "16" not in text and "order" in text
    assert not any("hollow" in text for text in legend_colors(figures("topk_worst")))


def test_a_bar_too_small_to_be_seen_has_its_number(figures):
    shares = {"auto": 0.8, "torch": 0.03, "jax": 0.00012}
    rows = [
        Row("softmax", case_of(), name, name == "auto", share_of_copy=share) for name, share in shares.items()
    ]
    figure = figures(rows)
    (number,) = (text for text in texts(figure) if text.endswith("%") and "." in text)
    assert number == "0.012%" and len(bars(figure)) == 3


def test_several_kinds_of_logits_are_one_chart(figures):
    figure = figures("topk_worst")
    (axis,) = figure.axes
    rows, *_ = report.read(RESULTS / "topk_worst" / "topk.json", Row)
    np.testing.assert_allclose(
        [bar.get_width() for bar in bars(figure)], [row.share for row in sorted(rows, key=kind)]
    )
    ticks = [tick.get_text() for tick in axis.get_yticklabels()]
    assert (
        axis.get_ylabel().startswith("kind of logits")
        and len(ticks) == len(rows) == 60
        and {*ticks} == {f"k={k}, {dtype}" for k in (5, 64) for dtype in ("float32", "bfloat16")}
    )


def kind(row: Row) -> int:
    """Returns the index of a row's logits among the kinds."""
    return list(flags.LOGITS).index(row.case.logits)


def test_the_model_states_its_errors(figures):
    (text,) = (text for text in texts(figures("sharded")) if text.startswith("grey"))
    assert "nothing was measured beyond 4 devices" in text and "+29% on 4" in text
    assert "-50% on 1, +0% on 8" in sharded.misses({1: 20.0, 8: 10.0}, lambda n: 10.0)


def test_rows_survive_writing_and_reading():
    for file in FILES:
        rows, bandwidths, where = rows_of(file)
        document = json.loads(file.read_text())
        assert where == document["environment"]
        assert all(document[f"{name}_tb_per_s"] * 1e12 == bandwidth for name, bandwidth in bandwidths.items())
        for row, columns in zip(rows, document["rows"], strict=True):
            assert columns.items() <= report.record(row).items()


# --- Tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", first_values(3, FILES), ids=lambda file: file.parent.name)
def test_tables_fit_and_explain_their_columns(file):
    module = MODULES.get(file.stem)
    rows, bandwidths, _ = rows_of(file)
    if file.stem == "linear_training":
        text = linear.training_table(rows)
    elif module:
        text = module.table(rows)
    else:
        text = (paper if file.stem == "paper" else report).table(rows, bandwidths)
    assert_fits(text)
    for column, explained in {
        "first s": "\nfirst s: sec",
        "of copy": "\nof copy: ",
        "ok: ": " eps: the larg",
    }.items():
        if column in text:
            assert explained in text
    assert all(row.contender in text for row in rows)


def assert_fits(text: str):
    """Asserts that no line is longer than the limit of a table."""
    assert max(map(len, text.splitlines())) <= report.WIDTH == 120


def test_wide_tables_fit():
    case = case_of(
        batch=100_000, vocab=1_000_000, function="log_softmax", where="vocab", axis=0, logits="two_values"
    )
    measured = {"ran": "mosaic_gpu", "p50_us": 1234567.0, "tb_per_s": 0.0123, "share_of_copy": 0.001}
    measured |= {"speedup": 123.4, "slowdown": 12.3, "first_result_s": 123.4, "rows_checked": 100_000}
    reasons = {"ok": "", "differs": "values 9.04x its bound, indices of 41 rows", "not run": "no " * 100}
    rows = [
        Row("softmax", case, "jax_unstable", False, status=status, reason=reasons[status], **measured)
        for status in reasons
    ]
    text = report.table(rows, {"copy": 3e12})
    assert_fits(text)
    assert "differs [1]" in text and "[1] values 9.04x its bound, indices of 41 rows" in text
    assert "not run [2]" in text and "[2] no no" in text

    names = [*flags.TOPK_ALGORITHMS, *flags.IMPLEMENTATIONS, *flags.TOPK_PEERS]
    rows = [
        Row(
            "paper",
            case_of(k=5, vocab=v),
            name,
            name not in flags.TOPK_PEERS,
            elements_per_s=1.23e10,
            speedup=1.0,
        )
        for v in (63, 8257536)
        for name in names
    ]
    text = paper.table(rows, {"copy": 3e12, "read": 3e12})
    assert_fits(text)
    heads = [line.split() for line in text.splitlines() if line.split()[0] == "V"]
    assert heads == [["V", *flags.TOPK_ALGORITHMS, "speed-up"], ["V", *names[4:]]]


# --- Help -----------------------------------------------------------------------------------------------


def test_help_lists_every_benchmark():
    files = {file.stem for file in (RESULTS.parent).glob("*.py")} - {"__init__", "__main__"}
    modules = [*MODULES.values(), paper, sample, softmax, topk, redraw]
    assert {f"benchmarks.{name}" for name in files} | {redraw.__name__} == {
        module.__name__ for module in modules
    }
    lines = (both.__doc__ or "").splitlines()  # absl prints the docstring
    for module in modules:
        what = (module.__doc__ or "").split(" python -m")[0].rstrip(":")
        assert [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{module.__name__} ")] == [
            what
        ]
