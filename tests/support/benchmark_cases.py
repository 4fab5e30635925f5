"""Small cases of the benchmarks, and the results of a run."""

import json
from pathlib import Path

from benchmarks.support import cases
from benchmarks.support.flags import Settings


def case_of(**changed) -> cases.Case:
    """Returns a forward case of 6 x 40 float32."""
    usual = {"batch": 6, "vocab": 40, "dtype": "float32", "function": "softmax", "where": "none", "axis": -1}
    usual |= {"k": None, "direction": "forward", "logits": "normal", "seed": 0}
    return cases.Case(**(usual | changed))


def rows_of(chosen: Settings, name: str) -> dict[str, dict]:
    """Returns the rows of a run's JSON by contender; the last case of a contender replaces earlier ones."""
    document = json.loads((Path(chosen.output_dir) / f"{name}.json").read_text())
    return {row["contender"]: row for row in document["rows"]}
