"""Checked and timed comparisons, one program per question: `python -m benchmarks --help` lists them.

How a benchmark works:

1. Its flags are absl's. `support/flags.py` defines those that several benchmarks share.
2. Its module gives a `Benchmark`: the cases that the flags ask for, how to measure one, and how to show the result.
3. `driver.measure` gives one `Record` per contender of a case: each contender is compiled, its result is checked, and
   then all are timed in turn.
4. `driver.main` writes the records to NAME.json, with the provenance: what cannot be computed again.
5. `result.frame` makes a pandas table of the JSON, and derives rates, shares and speed-ups. From it come NAME.csv,
   the printed table (`result.table`) and NAME.png (`support/plot.py`). `support/redraw.py` repeats only this step.

softmax, topk and paper share their cases (`cases.py`), contenders (`contenders.py`) and checks (`checked.py`,
against the float64 oracle of `answers.py`).
"""
