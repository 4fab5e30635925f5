"""Softmax and fused softmax + top-k for JAX, in one read of the logits."""

from pallas_softmax import online
from pallas_softmax.choice import IMPLEMENTATIONS, explain
from pallas_softmax.linear import linear_cross_entropy, linear_log_probs, linear_logsumexp
from pallas_softmax.softmax import log_softmax, logsumexp, softmax
from pallas_softmax.topk import TopK, fused_topk

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "TopK",
    "explain",
    "fused_topk",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_logsumexp",
    "log_softmax",
    "logsumexp",
    "online",
    "softmax",
]
