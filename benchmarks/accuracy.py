"""How many ulps off are our results and XLA's? python -m benchmarks.accuracy --flagfile=configs/accuracy.flags."""

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
    reason: str = ""  # why the status is "not run" or "error"
    ulps: float | None = None
    xla_ulps: float | None = None


def worse(ulps: float, xla_ulps: float, dtype: str) -> bool:
    """Tells whether our error exceeds XLA's by more than the allowance.

    The allowance for 16-bit dtypes is one ulp: our result, or the y that a backward starts from, may round the
    other way. The allowance for float32 is two ulps: each term of our d passes two exponentials, and each costs
    about an ulp. A term of XLA's d passes one. This is the price of a single read, because the online
    normalizer rescales its partial sum.
    """
    return not ulps <= 1.05 * xla_ulps + (2 if dtype == "float32" else 1)


def _compare(case: Case, chosen: flags.Settings) -> list[Row]:
    """Compares every output of every implementation with the answer, on all rows of the case.

    An error is in ulps of the output's dtype, at the size given by answers.Answer. For y that size is the true
    value (for log_softmax at least 1). For dx it is the size of the terms, because they may cancel.
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
    """Returns the rows as aligned text, with a heading per case and the columns explained at the end."""
    head = ["  output", "contender", "ran", "ulps", "XLA's", ""]

    def cells(row: Row, notes: report.Notes) -> list[str]:
        ulps = map(report.cell, (row.ulps, row.xla_ulps))
        return [f"  {row.output}", row.contender, row.ran, *ulps, report.status_cell(row, notes)]

    texts = {
        "ran": report.RAN,
        "ulps": "the largest error against float64, in units of the last place of the true value (dx: of its terms)",
        "XLA's": "the largest error of jax.nn's function, in the same units",
        "WORSE": "our error exceeds XLA's by more than the allowance of one or two ulps",
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
