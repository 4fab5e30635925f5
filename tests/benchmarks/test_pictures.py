"""The pictures, tables and CSVs of the benchmarks, made again from the committed results."""

import colorsys
from pathlib import Path

import matplotlib.colors
import matplotlib.text
import numpy as np
import pytest

from benchmarks import __main__ as both
from benchmarks import linear, softmax, topk
from benchmarks.support import flags, plot, redraw, result
from tests.benchmarks.conftest import MODULES
from tests.support.benchmark_cases import case_of
from tests.support.covering import first_values

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LOCAL = RESULTS / "local"  # results of this machine's runs, which are not committed
FILES = sorted(file for file in RESULTS.glob("*/*.json") if file.parent != LOCAL)
PICTURES = [f"{file.parent.name}/{file.stem}" for file in FILES if file.with_suffix(".png").exists()]
FOLDER = {"ids": lambda file: file.parent.name}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws the picture of a result, such as targets/softmax, or of rows; returns the figure."""
    plt = plot.pyplot()
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(of, view=softmax.VIEW):
        if isinstance(of, str):
            file = RESULTS / f"{of}.json"
            document, view = result.read(file), redraw.benchmark_of(file.stem).view
        else:
            run = {"device": "a GPU", "jax": "1", "commit": "abc", "date": "2026-11-24", "copy_tb_per_s": 3.0}
            document = {"benchmark": "softmax", "runs": [run], "rows": of}
        view.draw(result.frame(document, view), document, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
        return plt.gcf()

    yield draw
    close("all")


def row_of(contender, p50_us=1.0, status="ok", **changed):
    """Returns a row of the benchmark of softmax."""
    measured = {"p50_us": p50_us, "bytes": 10**6, "error_eps": 1.0, "fits_cache": "", "first_result_s": 1.0}
    named = {"contender": contender, "ours": contender in flags.IMPLEMENTATIONS, "ran": contender}
    found = {name: changed.pop(name) for name in ("ran", "fits_cache") if name in changed}
    return result.flat(case_of(**changed)) | named | {"status": status, "reason": ""} | measured | found


def texts(figure) -> list[str]:
    """Returns all texts of a figure."""
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


@pytest.mark.parametrize("name", first_values(3, PICTURES))
def test_a_picture_states_its_finding_and_its_provenance(drawn, name):
    figure = drawn(name)
    assert "times" in figure.get_suptitle()
    file = RESULTS / f"{name}.json"
    for run in result.read(file)["runs"]:
        footer = figure.get_supxlabel().replace("\n", " ")
        assert run["commit"][:7] in footer and run["device"] in footer and run["date"][:10] in footer
    seen = " ".join(axis.get_xlabel() + axis.get_ylabel() + axis.get_title() for axis in figure.axes)
    units = {"paper": "elements per second", "sharded": "µs", "linear": "GiB", "route": "time relative to"}
    assert units.get(file.stem, "%") in seen or ("elements per second" in seen and file.stem == "topk")
    if file.stem != "sharded":
        assert "speed-up over" in seen or "time relative to" in seen
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert -0.05 < box.x0 and box.x1 < figure.get_figwidth() + 0.05, box


def test_contenders_can_be_told_apart():
    names = {name: (color, line) for name, (_, color, line) in plot.STYLES.items()}
    for group in (
        [*flags.IMPLEMENTATIONS, *softmax.PEERS, "naive", "safe", "online"],
        [
            *flags.IMPLEMENTATIONS,
            *topk.PEERS_OF_FUSED_TOPK,
            "topk",
            "safe_unfused",
            "safe_fused",
            "online_fused",
        ],
        [*flags.IMPLEMENTATIONS, *topk.PEERS_OF_TOP_K],
        [*flags.IMPLEMENTATIONS[:1], *linear.PEERS],
        ["ours", "jax_stable", "jax.nn.softmax"],
    ):
        assert len({names[name] for name in group}) == len(group), group
    palette = {color for _, color, _ in plot.STYLES.values()}
    assert len(palette) == 8  # of Okabe and Ito
    hues = [colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(color)) for color in palette]
    assert len({tuple(np.round(hue, 2)) for hue in hues}) == 8


@pytest.mark.slow
def test_the_chart_of_the_loss(drawn):
    """Its bars tell three kinds of code apart. Its title compares ours with the fastest other code."""
    figure = drawn("linear_peers/linear")
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    colors = {
        name: matplotlib.colors.to_hex(bar.get_facecolor())
        for name, bar in zip(names, figure.axes[0].patches)
    }
    ours, jax = colors["pallas_softmax"], colors["plain JAX, 16-bit logits"]
    assert colors["QuACK"] == colors["Liger"] and len({ours, jax, colors["QuACK"]}) == 3
    rows = result.frame(result.read(RESULTS / "linear_peers/linear.json"), linear.VIEW)
    ratios = set()
    for _, own in rows[~rows.contender.isin(linear.YARDSTICKS)].groupby("w_shape"):
        best = own[own.contender != "auto"].p50_us.min()
        ratios.add(f"{best / own.p50_us[own.contender == 'auto'].item():.2f}")
    claim = f"{' to '.join(sorted(ratios))} times as fast as the fastest other code"
    assert claim in figure.get_suptitle().replace("\n", " ")


def test_pictures_and_tables_say_if_no_kernel_ran(drawn):
    rows = [row_of("jax", 4.0), row_of("auto", 2.0, ran="xla", fits_cache="L3")]
    rows[1] |= {"explain": "softmax float32[6, 40]: mosaic_gpu on cuda, xla elsewhere"}
    figure = drawn(rows)
    assert figure.get_suptitle().replace("\n", " ").endswith("ours is plain JAX on this device")
    assert "fits the L3 cache" in " ".join(texts(figure))
    frame = result.frame({"runs": [{}], "rows": rows}, softmax.VIEW)
    text = result.table(frame, softmax.VIEW)
    assert text.startswith("No kernels on this device") and "run 1 of these 1 calls" in text
    frame["ran"] = "mosaic_gpu"
    assert "No kernels" not in result.table(frame, softmax.VIEW)


def test_legends_are_words(drawn):
    (legend,) = drawn("figure3/paper").legends
    found = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    assert "pallas_softmax" in found and "jax.nn.softmax + lax.top_k" in found
    assert not any("_" in text.replace("pallas_softmax", "").replace("lax.top_k", "") for text in found)


def test_a_hollow_point_has_its_reason(drawn):
    (reason,) = (text for text in texts(drawn("sharded/sharded")) if text.startswith("hollow"))
    assert "order" in reason and "16" not in reason


def test_the_speed_up_is_the_first_axis_and_the_share_the_second(drawn):
    rows = [row_of("jax", 4.0), row_of("auto", 2.0), row_of("jax", 3.0, vocab=50)]
    rows += [row_of("auto", 2.0, vocab=50), row_of("auto", 1.0, vocab=60)]
    left, right = drawn(rows).axes
    assert left.get_title() == "speed-up over jax.nn.softmax, times" and "copy" in right.get_title()
    assert [text.get_text() for text in left.texts] == ["2.0", "1.5", "peer did not run"]
    assert [text.get_text() for text in right.texts] == [f"{100 / us / 3:.0f}" for us in (2, 2, 1)]
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["6 × 40", "6 × 50", "6 × 60"]


def test_several_kinds_of_logits_are_one_chart(drawn):
    slowdown, share = drawn("topk_worst/topk").axes
    assert len(slowdown.texts) == len(share.texts) == 14 * 4
    ticks = {tick.get_text() for tick in slowdown.get_yticklabels()}
    others = flags.LOGITS.keys() - {"normal", "shifted", "scaled"}  # the last two are of select.flags
    assert ticks == {f"{kind} ({flags.LOGITS[kind]})" for kind in others}


def test_no_baseline_no_picture(tmp_path):
    document = {"benchmark": "softmax", "runs": [{"copy_tb_per_s": 3.0}], "rows": [row_of("auto")]}
    softmax.VIEW.draw(result.frame(document, softmax.VIEW), document, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("file", FILES, **FOLDER)
def test_a_csv_follows_from_its_json(file):
    rows = result.frame(result.read(file), redraw.benchmark_of(file.stem).view)
    assert rows.to_csv(index=False, lineterminator="\n") == file.with_suffix(".csv").read_text()
    assert not {"command", "jax", "commit", "date"} & set(rows.columns)


@pytest.mark.parametrize("file", first_values(3, FILES), **FOLDER)
def test_tables_fit_and_explain_their_columns(file):
    view = redraw.benchmark_of(file.stem).view
    rows = result.frame(result.read(file), view)
    text = result.table(rows, view)
    assert_fits(text)
    assert all(contender in text for contender in rows.contender)
    head = text.split(" contender")[0].splitlines()
    shown = [name for name in view.columns if any(name in line.split() for line in head)]
    assert shown and all(f"\n{name}: " in text for name in shown)


def assert_fits(text: str):
    """Asserts that no line is longer than the limit of a table."""
    assert max(map(len, text.splitlines())) <= result.WIDTH == 120


def test_wide_tables_fit():
    wide = {"batch": 100_000, "function": "log_softmax", "where": "vocab", "axis": 0, "logits": "two_values"}
    reasons = {"ok": "", "differs": "values 9.04x its bound, indices of 41 rows", "not run": "no " * 100}
    rows = [
        row_of("jax_unstable", 1234567.0, status, **wide) | {"reason": reasons[status]} for status in reasons
    ]
    rows += [row_of("mosaic_gpu"), row_of("jax", dtype="bfloat16", direction="backward")]
    text = result.table(result.frame({"runs": [{}], "rows": rows}, softmax.VIEW), softmax.VIEW)
    assert_fits(text)
    assert "differs [1]" in text and "[1] values 9.04x its bound, indices of 41 rows" in text
    assert "not run [2]" in text and "[2] no no" in text


@pytest.mark.parametrize(
    "value, text",
    [(0.0123, "0.0123"), (1.5, "1.50"), (2079.4, "2,079"), (99.96, "100"), (3e-6, "3.0e-06"), (7, "7")],
)
def test_numbers(value, text):
    assert result.number(value) == text


def test_help_lists_every_benchmark():
    lines = (both.__doc__ or "").splitlines()  # absl prints the docstring
    for module in [*MODULES, redraw]:
        what = (module.__doc__ or "").split(" python -m")[0].rstrip(":")
        found = [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{module.__name__} ")]
        assert found == [what]
