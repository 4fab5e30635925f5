"""What the benchmarks share: flags, cases and their answers, contenders, timing, reports and pictures."""
