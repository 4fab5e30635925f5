"""How fast is sample? python -m benchmarks.sample --flagfile=configs/sample.flags

Every choice of FILTERS draws one entry from each row. Temperatures and filter parameters are traced, with one value per
row; after top_k, top_p is a share of the remaining mass.

Our draws are compared with the float64 oracle, given the noise of `jax.random.categorical`. A peer has its own random
numbers, or filters other logits, so its draws only need to be among the entries that the filters keep.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_softmax
from benchmarks.support import cases, driver, flags, plot
from benchmarks.support.cases import Case
from benchmarks.support.contenders import Call, Contender, fetch, jax_call, named, need_gpu, torch_and_wait
from benchmarks.support.result import Benchmark, Record
from tests.support import bounds, oracle

K, P, MIN_P = 50, 0.9, 0.05
FILTERS = {
    "none": {},
    "min_p": {"min_p": MIN_P},
    "top_k": {"top_k": K},
    "top_p": {"top_p": P},
    "top_k_top_p": {"top_k": K, "top_p": P},
    "all": {"min_p": MIN_P, "top_k": K, "top_p": P},
}


PEERS = {
    "jax": "jax.random.categorical, after lax.top_k or a sort for filters",
    "torch": "softmax and multinomial of torch, after its topk or sort",
    "flashinfer": "FlashInfer's softmax and sampling, by rejection for top_k and top_p",
}


def make_draws(chosen: Any) -> list[Case]:
    """The choice of filters is stored as the case's function."""
    usual = cases.make_cases(chosen)
    return [dataclasses.replace(case, function=name) for case in usual for name in chosen.filters]


def parameters(case: Case) -> dict[str, Any]:
    """Returns the arguments of `sample` with a value for each row."""
    rows = case.batch
    filters = {name: jnp.full((rows,), value) for name, value in FILTERS[case.function].items()}
    return {"temperature": jnp.linspace(0.7, 1.3, rows), **filters}


def within_top_p(x: jax.Array, best_first: jax.Array, top_p: Any) -> jax.Array:
    """Returns the logits, with -inf for those that top_p leaves out."""
    p = jax.nn.softmax(best_first)
    count = jnp.sum(jnp.cumsum(p, -1) - p < top_p, -1, keepdims=True)
    return jnp.where(x >= jnp.take_along_axis(best_first, count - 1, -1), x, -jnp.inf)


def by_jax(key: jax.Array, x: jax.Array, given: dict[str, Any]) -> jax.Array:
    x = x.astype(jnp.float32) / given["temperature"][:, None]
    tokens = None
    if "top_k" in given:  # static here, because `lax.top_k` takes no traced k
        x, tokens = lax.top_k(x, min(K, x.shape[-1]))
    if "top_p" in given:
        best_first = x if tokens is not None else jnp.sort(x, -1, descending=True)
        x = within_top_p(x, best_first, given["top_p"][:, None])
    if "min_p" in given:
        x = jnp.where(x >= jnp.max(x, -1, keepdims=True) + jnp.log(given["min_p"])[:, None], x, -jnp.inf)
    drawn = jax.random.categorical(key, x)
    return drawn if tokens is None else jnp.take_along_axis(tokens, drawn[:, None], -1)[:, 0]


def by_torch(x: Any, given: dict[str, Any]) -> tuple[Any, None]:
    import torch  # pyright: ignore[reportMissingImports]

    x = x.float() / given["temperature"][:, None]
    tokens = None
    if "top_k" in given:
        x, tokens = x.topk(min(K, x.shape[-1]), dim=-1)
    elif "top_p" in given:
        x, tokens = x.sort(dim=-1, descending=True)
    p = x.softmax(dim=-1)
    if "top_p" in given:
        p = torch.where(p.cumsum(-1) - p < given["top_p"][:, None], p, 0)
    if "min_p" in given:
        p = torch.where(p >= given["min_p"][:, None] * p.amax(-1, keepdim=True), p, 0)
    drawn = p.multinomial(1)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0], None


def by_flashinfer(x: Any, given: dict[str, Any]) -> tuple[Any, None]:
    """FlashInfer's draw applies the last filter; one function applies top_k and top_p together.

    Its top_k keeps every tie of the k-th entry, so that a following top_p may keep more entries than ours.
    """
    from flashinfer import sampling  # pyright: ignore[reportMissingImports]

    filters = [of for of in ("top_k", "top_p", "min_p") if of in given]  # in our order
    if not filters:
        return sampling.sampling_from_logits(x / given["temperature"][:, None]), None
    if filters == ["top_k", "top_p"]:
        scaled = x / given["temperature"][:, None]
        return sampling.top_k_top_p_sampling_from_logits(scaled, given["top_k"], given["top_p"]), None
    p = sampling.softmax(x, given["temperature"])
    for of in filters[:-1]:
        p = getattr(sampling, f"{of}_renorm_probs")(p, given[of])
    return getattr(sampling, f"{filters[-1]}_sampling_from_probs")(p, given[filters[-1]]), None


def ours(name: str, key: jax.Array, x: jax.Array, given: dict[str, Any]) -> dict[str, Any]:
    return {"sample": pallas_softmax.sample(key, x, **given, implementation=named(name))}


def check(result: dict[str, Any], case: Case, key, x, given) -> int:
    """Raises if a draw of some rows is wrong. Returns how many rows were checked."""
    rows = case.checked_rows
    logits = fetch(x, rows, 0)
    temperature, *_ = of_row = [fetch(a, rows, 0) for a in given.values()]
    filters = dict(zip(list(given)[1:], of_row[1:]))
    if "sample" in result:
        noise = fetch(jax.random.gumbel(key, x.shape, jnp.float32), rows, 0)
        got = [fetch(a, rows, 0) for a in result["sample"]]
        bounds.assert_sample(got, logits, noise, rows, None, temperature, **filters)
    else:
        indices = fetch(result["y"], rows, 0)
        scaled, mass = oracle.sample_terms(logits, None, temperature)
        lenient = {"lean": 1e-3 * np.sum(mass, -1), "min_p_lean": -1e-3}  # allows for the peer's rounding
        kept = oracle.sample_kept(logits, None, temperature, **filters, **lenient)
        least = np.min(np.where(kept, scaled, np.inf), -1)  # a peer may break ties at the boundary otherwise
        outside = scaled[np.arange(len(rows)), indices] < least
        drawable = np.sum(mass, -1) >= 1
        assert not np.any(outside & drawable), f"{np.sum(outside & drawable)} draws that no filter keeps"
    return len(rows)


def _run(case: Case, chosen: Any) -> list[Record]:
    key, x, given = jax.random.key(case.seed), cases.logits(case), parameters(case)

    def prepare(record: Record) -> Call:
        """Ours returns {"sample": Sample}, a peer {"y": indices}."""
        name, own = record.contender, functools.partial(ours, record.contender)
        if name == "jax":
            call = Contender(name, lambda x: (by_jax(key, x, given), None)).call("forward", (x,), None)
        elif name in PEERS:
            if name == "flashinfer":
                need_gpu("FlashInfer")
            torch, _ = torch_and_wait()
            draw = by_torch if name == "torch" else by_flashinfer
            shared = {of: torch.from_dlpack(a) for of, a in given.items()}
            peer = Contender(name, functools.partial(draw, given=shared), torch=True)
            call = peer.call("forward", (x,), None)
        else:
            call = jax_call(own, key, x, given)
        driver.describe(record, call, own, key, x, given)
        record.add(extra_mb=call.extra_mb)
        with driver.wrong_if_refuted():
            record.add(rows_checked=check(call.result(), case, key, x, given))
        return call

    return driver.measure(case, [*chosen.implementations, *chosen.peers], prepare, chosen, bytes=x.nbytes)


BENCHMARK = Benchmark(
    "sample",
    make_draws,
    _run,
    ("ran", "status", "rows_checked", "p50_us", "share_of_read", "speedup", "first_result_s"),
    baselines=("jax",),
    draw=lambda rows, document, file: plot.heat(rows, document, file, "jax.random.categorical", "sample"),
    bandwidths=("copy", "read"),
)


def define_flags() -> None:
    flags.define("batch", "vocab", "shapes", "dtype", "implementations", "logits", "seed", "repeats")
    flags.define_words("filters", FILTERS, "Which filters restrict the draw.")
    flags.define_peers(PEERS)


main = driver.program(__name__, define_flags, BENCHMARK)
