"""Softmax, top-k, sampling and softmax losses for JAX, by the online normalizer: few reads of the logits, or none.

The source of the normalizer is Milakov and Gimelshein (2018), arXiv 1805.02867.

The examples of the docstrings share these lines:

    import jax
    import jax.numpy as jnp
    import pallas_softmax as ps
    jnp.set_printoptions(precision=3)
"""

from jax import export as _export

from pallas_softmax import online
from pallas_softmax._src.arguments import Axis, AxisName
from pallas_softmax._src.dispatch.choose import IMPLEMENTATIONS, ImplementationName, explain
from pallas_softmax._src.dispatch.operation import Choice
from pallas_softmax._src.linear.api import (
    Reduction,
    linear_cross_entropy,
    linear_kl_divergence,
    linear_log_probs,
    linear_logsumexp,
    linear_token_stats,
)
from pallas_softmax._src.linear.decoding import linear_sample, linear_topk
from pallas_softmax._src.route.api import Routing, route
from pallas_softmax._src.sample.api import Sample, filter_logits, sample
from pallas_softmax._src.sample.verify import Verified, verify
from pallas_softmax._src.softmax.api import log_softmax, logsumexp, softmax
from pallas_softmax._src.stats.api import TokenStats, token_stats
from pallas_softmax._src.topk.api import fused_topk, top_k
from pallas_softmax._src.topk.xla import TopK

__version__ = "0.1.0"

# Programs of `jax.export` name the types of their results.
_register = _export.register_namedtuple_serialization
for _type in (Routing, Sample, TokenStats, TopK, Verified):
    _register(_type, serialized_name=f"pallas_softmax.{_type.__name__}")
for _type in (online.Candidates, online.Moments, online.Normalizer):
    _register(_type, serialized_name=f"pallas_softmax.online.{_type.__name__}")

__all__ = [
    "IMPLEMENTATIONS",
    "Axis",
    "AxisName",
    "Choice",
    "ImplementationName",
    "Reduction",
    "Routing",
    "Sample",
    "TokenStats",
    "TopK",
    "Verified",
    "explain",
    "filter_logits",
    "fused_topk",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
    "linear_logsumexp",
    "linear_sample",
    "linear_token_stats",
    "linear_topk",
    "log_softmax",
    "logsumexp",
    "online",
    "route",
    "sample",
    "softmax",
    "token_stats",
    "top_k",
    "verify",
]
