"""Checked and timed comparisons, one program per question: see `python -m benchmarks.softmax --help`."""
