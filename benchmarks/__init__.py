"""Checked and timed comparisons; `python -m benchmarks --help` lists every flag."""
