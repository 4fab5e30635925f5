"""Softmax and fused softmax + top-k for JAX, in one read of the logits."""

from pallas_softmax import online
from pallas_softmax.choice import IMPLEMENTATIONS, explain
from pallas_softmax.sample import Sample, sample
from pallas_softmax.softmax import log_softmax, logsumexp, softmax
from pallas_softmax.topk import TopK, fused_topk

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "Sample",
    "TopK",
    "explain",
    "fused_topk",
    "log_softmax",
    "logsumexp",
    "online",
    "sample",
    "softmax",
]
