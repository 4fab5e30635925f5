"""Softmax and top-k, one after the other: python -m benchmarks --flagfile=configs/cpu.flags.

This runs benchmarks.softmax, then benchmarks.topk, and has exactly their flags. Each of the two ignores the
other one's peers. Top-k also ignores --function, --where and --axis. Every other benchmark is a separate
program, and its --help lists its flags:

benchmarks.quick_start      Are five calls right, and how fast are they here?
benchmarks.softmax          How fast are softmax, log_softmax and logsumexp?
benchmarks.topk             How fast are fused_topk and top_k?
benchmarks.paper            Do the paper's figures hold?
benchmarks.accuracy         How many ulps off are our results and XLA's?
benchmarks.invariance       How many rows have other bits in another batch?
benchmarks.programs         How much time do whole programs save?
benchmarks.linear           How fast is the cross entropy of a projection?
benchmarks.head             How fast are a language model's head and its draw?
benchmarks.beam_search      How fast is beam search with fused_topk?
benchmarks.sample           How fast is sample?
benchmarks.verify           How fast is verify?
benchmarks.route            How fast is route?
benchmarks.serve            How fast does a server decode with sample?
benchmarks.sharded          How do softmax and top-k scale over devices?
benchmarks.support.redraw   Makes the CSV, the table and the picture of results again
"""

from benchmarks import softmax, topk
from benchmarks.support import driver, flags


def define_flags() -> None:
    flags.define("batch", "vocab", "k", "shapes", "dtype", "function", "where", "axis", "direction")
    flags.define("implementations", "logits", "seed", "repeats")
    flags.define_peers(softmax.PEERS, topk.PEERS)


main = driver.program(__name__, define_flags, softmax.BENCHMARK, topk.BENCHMARK)
