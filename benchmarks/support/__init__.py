"""Shared parts of the benchmarks: flags, cases and their answers, contenders, timing, reports and pictures."""
