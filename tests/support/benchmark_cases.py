"""Small cases of the benchmarks."""

from benchmarks.support import cases


def case_of(**changed) -> cases.Case:
    """Returns a forward case of 6 x 40 float32."""
    usual = {"batch": 6, "vocab": 40, "dtype": "float32", "function": "softmax", "where": "none", "axis": -1}
    usual |= {"k": None, "direction": "forward", "logits": "normal", "seed": 0}
    return cases.Case(**(usual | changed))
