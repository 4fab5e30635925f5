"""The generators of pictures, tables and CSVs, each on a result."""

import matplotlib.text
import pytest

from benchmarks import softmax
from benchmarks.support import flags, plot, redraw, result
from tests.benchmarks.conftest import case_of
from tests.support.children import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(file for file in RESULTS.glob("*/*.json") if file.parent.name != "local")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws the picture of a result; returns the figure."""
    plt = plot.pyplot()
    close = plt.close
    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(document, benchmark, name="x.png"):
        benchmark.draw(result.frame(document, benchmark), document, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        return plt.gcf()

    yield draw
    close("all")


def row_of(contender, p50_us=1.0, status="ok", **changed):
    """Returns a row of the benchmark of softmax."""
    measured = {"p50_us": p50_us, "bytes": 10**6, "error_eps": 1.0, "fits_cache": "", "first_result_s": 1.0}
    named = {"contender": contender, "ours": contender in flags.IMPLEMENTATIONS, "ran": contender}
    return result.flat(case_of(**changed)) | named | {"status": status, "reason": ""} | measured


def document_of(rows):
    run = {"device": "a GPU", "jax": "1", "commit": "abcdefgh", "date": "2026-11-24T10", "copy_tb_per_s": 3.0}
    return {"benchmark": "softmax", "runs": [run], "rows": rows}


def test_a_heat_map_shows_speed_ups_shares_and_where_they_come_from(drawn):
    rows = [row_of("jax", 4.0), row_of("auto", 2.0), row_of("jax", 3.0, vocab=50)]
    rows += [row_of("auto", 2.0, vocab=50) | {"fits_cache": "L2"}, row_of("auto", 1.0, vocab=60)]
    figure = drawn(document_of(rows), softmax.BENCHMARK)
    left, right = figure.axes
    assert left.get_title() == "speed-up over jax.nn.softmax, times"
    assert "fits the L2 cache" in right.get_title()
    assert [text.get_text() for text in left.texts] == ["2.0", "1.5", "peer did not run"]
    assert [text.get_text() for text in right.texts] == ["17", "17 *", "33"]
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["6 × 40", "6 × 50", "6 × 60"]
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "softmax: 1.5 to 2.0 times as fast as jax.nn.softmax, median 1.8"
    assert figure.get_supxlabel() == "a GPU, jax 1, commit abcdefg, 2026-11-24"
    with pytest.raises(FileNotFoundError):  # no baseline, no picture
        drawn(document_of([row_of("auto")]), softmax.BENCHMARK, "y.png")


def test_the_picture_of_several_gpus(drawn):
    """No CPU makes this picture. A hollow point has its reason."""
    document = result.read(RESULTS / "sharded/sharded.json")
    figure = drawn(document, redraw.benchmark_of("sharded"))
    (ours,) = [line for line in figure.axes[1].lines if line.get_label() == "pallas_softmax"]
    rows = [row for row in document["rows"] if (row["vocab"], row["k"], row["contender"]) == (262144, 64, "ours")]
    times = {row["devices"]: row["device_us"] for row in rows if row["sharding"] != "batch"}
    assert dict(zip(ours.get_xdata(), ours.get_ydata())) == times and len(times) > 2
    texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    assert any(text.startswith("hollow") and "order" in text for text in texts)


def test_the_committed_csvs_follow_from_their_json():
    assert len(FILES) > 40
    for file in FILES:
        rows = result.frame(result.read(file), redraw.benchmark_of(file.stem))
        assert rows.to_csv(index=False, lineterminator="\n") == file.with_suffix(".csv").read_text(), file


def test_a_table_fits_and_explains_itself():
    wide = {"batch": 100_000, "function": "log_softmax", "where": "vocab", "axis": 0, "logits": "two_values"}
    rows = [row_of("auto", 1234567.0, **wide) | {"ran": "xla", "explain": "mosaic_gpu on cuda, xla elsewhere"}]
    reasons = {"differs": "values 9.04x its bound, indices of 41 rows", "not run": "no " * 100}
    rows += [row_of("jax_unstable", 2.0, status, **wide) | {"reason": reasons[status]} for status in reasons]
    rows += [row_of("jax", 4.0, dtype="bfloat16", direction="backward")]
    text = result.table(result.frame({"runs": [{}], "rows": rows}, softmax.BENCHMARK), softmax.BENCHMARK.columns)
    assert max(map(len, text.splitlines())) <= result.WIDTH == 120
    assert text.startswith("No kernels on this device") and "run 1 of these 1 calls" in text
    assert "1,234,567" in text and "\np50_us: the median time" in text
    assert "differs [1]" in text and "[1] values 9.04x its bound, indices of 41 rows" in text
    assert "not run [2]" in text and "[2] no no" in text
