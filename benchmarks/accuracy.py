"""How many ulps are ours and XLA's off? python -m benchmarks.accuracy --flagfile=configs/accuracy.flags."""

import dataclasses

import numpy as np
from absl import app

from benchmarks import softmax
from benchmarks.support import flags, report
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.driver import note, progress, question, require_extra, rows_of


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one output of one of our implementations on one case."""

    case: Case
    output: str  # y or dx
    contender: str
    ran: str = ""
    status: str = "ok"  # ok, WORSE, not run, error
    reason: str = ""  # why it is not run or an error
    ulps: float | None = None
    xla_ulps: float | None = None


def worse(ulps: float, xla_ulps: float, dtype: str) -> bool:
    """Tells whether ours is less exact than XLA by more than is allowed.

    In 16 bits an ulp is allowed: the rounding of the result, or of the y that a backward starts from, may fall
    the other way. In float32 two are allowed: a term of d has passed two exponentials, of an ulp or so each,
    where XLA's has one. That is the price of one read (the online normalizer rescales what it has summed).
    """
    return not ulps <= 1.05 * xla_ulps + (2 if dtype == "float32" else 1)


def _compare(case: Case, chosen: flags.Settings) -> list[Row]:
    """Compares every output of every implementation with the answer, on all rows of the case.

    An error is in ulps of the output's dtype at the size that answers.Answer relates it to: the true value
    of y (of log_softmax 1 if that is more), and for dx its terms, which may cancel.
    """
    outputs = {"forward": ["y"], "backward": ["dx"], "both": ["y", "dx"]}[case.direction]
    everything = np.arange(case.batch)
    arrays, g, answer = question(case, everything)
    xla: dict[str, float] = {}
    rows = []
    contenders = softmax.contenders(dataclasses.replace(chosen, peers=("jax",)), case)
    for contender in reversed(contenders):  # the peer comes first
        found = {output: Row(case, output, contender.name) for output in outputs}
        try:
            call = contender.prepare(contender, case.direction, arrays, g)
            result = call.run()
            for output, row in found.items():
                expected = answer.output if output == "y" else answer.gradient
                got = rows_of(call.fetch, result[output], case, everything)
                row.ran, row.ulps = call.ran, expected.ulps(got)
        except Exception as error:
            if not contender.ours:
                raise
            for row in found.values():
                note(row, error)
        if not contender.ours:
            xla = {output: row.ulps for output, row in found.items() if row.ulps is not None}
            continue
        for output, row in found.items():
            row.xla_ulps = xla[output]
            if row.ulps is not None and worse(row.ulps, xla[output], case.dtype):
                row.status = "WORSE"
        rows += found.values()
    return rows


def table(rows: list[Row]) -> str:
    """Returns the rows as aligned text, below a heading for each case; what the columns are stands below."""
    head = ["  output", "contender", "ran", "ulps", "XLA's", ""]

    def cells(row: Row, notes: report.Notes) -> list[str]:
        ulps = map(report.cell, (row.ulps, row.xla_ulps))
        return [f"  {row.output}", row.contender, row.ran, *ulps, report.status_cell(row, notes)]

    texts = {
        "ran": report.RAN,
        "ulps": "the largest error against float64, in units of the last place of the true value (of dx: of its terms)",
        "XLA's": "that of jax.nn's function",
        "WORSE": "it is off by more than XLA's and what is allowed on top, an ulp or two",
    }
    return report.grouped(head, rows, lambda row: row.case.label, cells, texts)


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes()
    flags.define_dtype()
    flags.define_function()
    flags.define_direction()
    flags.define_implementations()
    flags.define_logits()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    require_extra()
    try:
        cases = make_cases(chosen)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    rows = [row for case in progress(cases, "accuracy") for row in _compare(case, chosen)]
    where = report.environment(chosen.commit)
    report.write("accuracy", rows, chosen, where)
    print(f"\naccuracy on {where['device']}, jax {where['jax']}; largest errors against float64")
    print(table(rows))
    print(f"files: {chosen.output_dir}/accuracy.csv, .json")
    return report.exit_code("accuracy", sum(row.status in ("WORSE", "error") for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
