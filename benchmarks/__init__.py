"""Checked and timed comparisons: one program per question, such as `python -m benchmarks.softmax --help`."""
