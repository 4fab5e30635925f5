"""How many ulps off are our results and XLA's? python -m benchmarks.accuracy --flagfile=configs/accuracy.flags."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import softmax
from benchmarks.support import driver, flags
from benchmarks.support.cases import Case, make_cases
from benchmarks.support.checked import question, rows_of
from benchmarks.support.result import Benchmark, Record


@dataclasses.dataclass(frozen=True)
class Output:
    case: Case
    output: str  # y or dx


def worse(ulps: float, xla_ulps: float, dtype: str) -> bool:
    """Tells whether our error exceeds XLA's by more than the allowance.

    The allowance for 16-bit dtypes is one ulp: our result, or the y that a backward starts from, may round the
    other way. The allowance for float32 is two ulps: each term of our d passes two exponentials, because the online
    normalizer rescales its partial sum, and each costs about an ulp. A term of XLA's d passes one.
    """
    return not ulps <= 1.05 * xla_ulps + (2 if dtype == "float32" else 1)


def _compare(case: Case, chosen: Any) -> list[Record]:
    """Compares all rows. An error is in ulps of the output's dtype, at the size given by answers.Answer."""
    outputs = {"forward": ["y"], "backward": ["dx"], "both": ["y", "dx"]}[case.direction]
    everything = np.arange(case.batch)
    arrays, g, answer = question(case, everything)

    asked = SimpleNamespace(implementations=chosen.implementations, peers=("jax",))
    contenders = {contender.name: contender for contender in softmax.contenders(case, asked)}

    @functools.cache
    def ulps_of(name: str) -> tuple[str, dict[str, float]]:
        call = contenders[name].call(case.direction, arrays, g)
        result, expected = call.result(), {"y": lambda: answer.output, "dx": answer.gradient}
        return call.ran, {of: expected[of]().ulps(rows_of(result[of], case, everything)) for of in outputs}

    def prepare(record: Record) -> None:
        record.ran, ulps = ulps_of(record.contender)
        own, xlas = (each[record.case.output] for each in (ulps, ulps_of("jax")[1]))
        record.add(ulps=own, xla_ulps=xlas)
        if worse(own, xlas, case.dtype):
            record.status = "WORSE"

    measured = [driver.measure(Output(case, of), chosen.implementations, prepare, chosen) for of in outputs]
    return sum(measured, [])


BENCHMARK = Benchmark("accuracy", make_cases, _compare, ("ran", "status", "ulps", "xla_ulps"))


def define_flags() -> None:
    flags.define("batch", "vocab", "shapes", "dtype", "function", "where", "axis", "direction")
    flags.define("implementations", "logits", "seed")


main = driver.program(__name__, define_flags, BENCHMARK)
