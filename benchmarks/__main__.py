"""Softmax and top-k, one after the other: python -m benchmarks --flagfile=configs/smoke.flags.

This runs benchmarks.softmax and then benchmarks.topk, and has the flags of both and no others. Each passes
over the peers of the other one, and top-k over --function, --where and --axis.
"""

from absl import app

from benchmarks import softmax, topk
from benchmarks.support import flags


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes(with_k=True)
    flags.define_dtype()
    flags.define_function()
    flags.define_direction()
    flags.define_implementations()
    flags.define_peers(flags.SOFTMAX_PEERS, flags.TOPK_PEERS)
    flags.define_logits()
    flags.define_sampling()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs both and returns the larger exit code."""
    return max(softmax.main(argv), topk.main(argv))


if __name__ == "__main__":
    define_flags()
    app.run(main)
