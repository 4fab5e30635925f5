"""How fast is sample? python -m benchmarks.sample --flagfile=configs/sample.flags

Every choice of filters draws one entry from each row. Temperatures and filter parameters are traced, with one value
per row:

none         a temperature only
min_p        entries with at least 0.05 of the largest probability
top_k        the 50 best entries
top_p        the best entries that together have 0.9 of the mass
top_k_top_p  top_k, then the best entries that together have 0.9 of the remaining mass
all          all three filters

Our draws are compared with the float64 oracle, given the same u. A peer has its own random numbers, so its draws only
need to be among the entries that the filters keep.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax import lax

import pallas_softmax
from benchmarks.support import cases, flags, plot, report, timing
from benchmarks.support.cases import Case
from benchmarks.support.contenders import (
    Call,
    Contender,
    fetch_jax,
    jax_call,
    named,
    prepare_jax,
    prepare_torch,
)
from benchmarks.support.driver import note, progress, require_extra, write_times
from benchmarks.support.report import Row
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


def make_draws(chosen: flags.Settings) -> list[Case]:
    """Returns every choice of filters on every input. The choice is stored as the case's function."""
    usual = cases.make_cases(cases.only_softmax(chosen))
    return [dataclasses.replace(case, function=name) for case in usual for name in chosen.filters]


def parameters(case: Case) -> dict[str, Any]:
    """Returns the temperature and filter parameters of each row, by the argument names of `sample`."""
    rows = case.batch
    filters = {name: jnp.full((rows,), value) for name, value in FILTERS[case.function].items()}
    return {"temperature": jnp.linspace(0.7, 1.3, rows), **filters}


def by_jax(key: jax.Array, x: jax.Array, given: dict[str, Any]) -> jax.Array:
    """Returns the draws of the usual JAX code: `jax.random.categorical`, after `lax.top_k` or a sort."""
    x = x.astype(jnp.float32) / given["temperature"][:, None]
    tokens = None
    if "top_k" in given:  # static here, because `lax.top_k` takes no traced k
        x, tokens = lax.top_k(x, min(K, x.shape[-1]))
    if "top_p" in given:
        best_first = x if tokens is not None else jnp.sort(x, -1, descending=True)
        p = jax.nn.softmax(best_first)
        count = jnp.sum(jnp.cumsum(p, -1) - p < given["top_p"][:, None], -1, keepdims=True)
        x = jnp.where(x >= jnp.take_along_axis(best_first, count - 1, -1), x, -jnp.inf)
    if "min_p" in given:
        x = jnp.where(x >= jnp.max(x, -1, keepdims=True) + jnp.log(given["min_p"])[:, None], x, -jnp.inf)
    drawn = jax.random.categorical(key, x)
    return drawn if tokens is None else jnp.take_along_axis(tokens, drawn[:, None], -1)[:, 0]


def by_torch(x: Any, given: dict[str, Any]) -> tuple[Any, None]:
    """Returns torch's draws: softmax and multinomial, with topk or a sort for the filters."""
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
    """Returns FlashInfer's draws. Its draw applies the last filter; one function applies top_k and top_p together.

    FlashInfer has its own random numbers, and draws by rejection for top_k and top_p. Its top_k keeps every tie of
    the k-th entry, so that a following top_p may keep more entries than ours.
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


def prepared(name: str, case: Case, key: jax.Array, x: jax.Array, given: dict[str, Any]) -> Call:
    """Returns the call of a contender. Ours returns {"sample": Sample}, a peer {"y": indices}."""
    if name == "jax":
        peer = Contender(name, False, lambda x: (by_jax(key, x, given), None), prepare_jax)
        return prepare_jax(peer, "forward", (x,), None)
    if name in ("torch", "flashinfer"):
        if name == "flashinfer" and not timing.on_gpu():
            raise NotImplementedError("FlashInfer has kernels for NVIDIA GPUs only")
        import torch  # pyright: ignore[reportMissingImports]

        draw = by_torch if name == "torch" else by_flashinfer
        shared = {of: torch.from_dlpack(a) for of, a in given.items()}
        return prepare_torch(
            Contender(name, False, functools.partial(draw, given=shared), prepare_torch),
            "forward",
            (x,),
            None,
        )
    call = jax_call(functools.partial(ours, name), key, x, given)
    (choice,) = pallas_softmax.explain(functools.partial(ours, name), key, x, given)
    said = choice.cuda if timing.on_gpu() else choice.elsewhere
    if said != call.ran or name not in ("auto", said):
        raise AssertionError(f"asked for {name}, explained as {said}, lowered to {call.ran}")
    return call


def ours(name: str, key: jax.Array, x: jax.Array, given: dict[str, Any]) -> dict[str, Any]:
    """Returns our draws, computed by the named implementation."""
    return {"sample": pallas_softmax.sample(key, x, **given, implementation=named(name))}


def check(result: dict[str, Any], fetch: Callable, case: Case, key, x, given) -> int:
    """Checks the draws of some rows and raises if any is wrong. Returns how many rows were checked."""
    rows = case.checked_rows
    logits = fetch_jax(x, rows, 0)
    temperature, *_ = of_row = [fetch_jax(a, rows, 0) for a in given.values()]
    filters = dict(zip(list(given)[1:], of_row[1:]))
    if "sample" in result:
        u = fetch_jax(jax.random.uniform(key, (case.batch,), jnp.float32), rows, 0)
        got = [fetch(a, rows, 0) for a in result["sample"]]
        bounds.assert_sample(got, logits, u, rows, None, temperature, **filters)
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


def run_draw(case: Case, chosen: flags.Settings, bandwidths: dict[str, float]) -> list[Row]:
    """Checks every contender of one case, then times them together."""
    key, x, given = jax.random.key(case.seed), cases.logits(case), parameters(case)
    names = [*chosen.implementations, *(peer for peer in chosen.peers if peer in flags.SAMPLE_PEERS)]
    rows = {name: Row("sample", case, name, name in chosen.implementations, bytes=x.nbytes) for name in names}
    calls: dict[str, Call] = {}
    for name, row in rows.items():
        try:
            call = prepared(name, case, key, x, given)
            row.ran, row.first_result_s, row.extra_mb = call.ran, call.first_result_s, call.extra_mb
            result = call.run()
            call.wait(result)
            row.rows_checked = check(result, call.fetch, case, key, x, given)
        except AssertionError as error:
            row.status, row.reason = "FAILED" if row.ours else "differs", str(error)[:400]
        except Exception as error:
            note(row, error)
        else:
            calls[name] = call
    times = timing.interleave(
        calls, chosen.repeats, chosen.seconds, lambda name, error: note(rows[name], error)
    )
    write_times(rows, times, "jax", bandwidths)
    return list(rows.values())


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_shapes()
    flags.define_dtype()
    flags.define_words("filters", flags.SAMPLE_FILTERS, "Which filters restrict the draw.")
    flags.define_implementations()
    flags.define_peers(flags.SAMPLE_PEERS)
    flags.define_logits()
    flags.define_timing()
    flags.define_output()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    require_extra()
    bandwidths = {"copy": timing.copy_bandwidth(), "read": timing.read_bandwidth()}
    todo = make_draws(chosen)
    rows = [row for case in progress(todo, "sample") for row in run_draw(case, chosen, bandwidths)]
    where = report.environment(chosen.commit)
    report.write(
        "sample", rows, chosen, where, **{f"{of}_tb_per_s": b / 1e12 for of, b in bandwidths.items()}
    )
    plot.draw(Path(chosen.output_dir) / "sample.png", rows, bandwidths, where)
    kind = "device time" if timing.on_gpu() else "wall time"
    print(f"\nsample on {where['device']}, jax {where['jax']}; {kind}")
    print(report.table(rows, bandwidths))
    print(f"files: {chosen.output_dir}/sample.*")
    return report.exit_code("sample", sum(row.fails for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
