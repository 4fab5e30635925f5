"""One case of softmax, topk or paper: every contender is compared with the float64 oracle, then all are timed."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.support import answers, cases, driver, timing
from benchmarks.support.cases import Case
from benchmarks.support.contenders import Call, Contender, fetch
from benchmarks.support.result import Record


def run_case(contenders_of: Callable[[Case, Any], list[Contender]], case: Case, chosen: Any) -> list[Record]:
    """Checks every contender of a case, then times them together. `contenders_of` maps the case and the flags to them.

    A wrong result of ours is not timed. A peer that differs is timed, and the table shows the difference.
    """
    cache, cache_bytes = timing.cache()
    named = {contender.name: contender for contender in contenders_of(case, chosen)}

    @functools.cache
    def asked() -> Any:
        _require_memory(case)
        return question(case, case.checked_rows)

    def prepare(record: Record) -> Call | None:
        contender = named[record.contender]
        arrays, g, answer = asked()
        if contender.torch and len(arrays) > 1:
            raise NotImplementedError(f"{contender.name}'s softmax takes no mask")
        # explain comes later: it would do part of the tracing, which first_result_s should include.
        call = contender.call(case.direction, arrays, g)
        options = {"direction": case.direction, "asked": contender.asked, "extra_mb": call.extra_mb}
        driver.describe(record, call, contender.function, *arrays, **options)
        check = _check(call, contender, case, answer)
        record.add(rows_checked=len(case.checked_rows))
        if np.isfinite(check.error_share):
            record.add(error_eps=check.error_eps, error_share_of_bound=check.error_share)
        if not check.ok:
            driver.note(record, driver.Wrong(check.detail))
        return call if check.ok or not contender.ours else None

    found = {"bytes": case.least_bytes, "fits_cache": cache if case.least_bytes <= cache_bytes else ""}
    ours = [name for name, contender in named.items() if contender.ours]
    return driver.measure(case, named, prepare, chosen, ours=ours, **found)


def rows_of(array: Any, case: Case, rows: np.ndarray) -> np.ndarray:
    """Returns some rows of an input or a result of the case. With axis 0, these are columns of the array."""
    if case.axis == 0:
        return fetch(array, rows, array.ndim - 1).T
    return fetch(array, rows, 0)


def question(case: Case, rows: np.ndarray) -> tuple[tuple[jax.Array, ...], jax.Array | None, answers.Answer]:
    """Returns the case's arrays (x and any mask), its cotangent (or None), and the answer for the rows."""
    x, mask = cases.logits(case), cases.mask(case)
    g = None if case.direction == "forward" else cases.cotangent(case)
    arrays = (x,) if mask is None else (x, mask)
    if case.where == "lengths":
        kept = np.arange(case.vocab) < np.asarray(mask)[rows, None]
    else:
        kept = None if mask is None else rows_of(jnp.broadcast_to(mask, x.shape), case, rows)
    g_rows = None if g is None else rows_of(g, case, rows)
    function = "softmax" if case.k else case.function
    return arrays, g, answers.Answer(rows_of(x, case, rows), g_rows, function, case.k, kept)


def _check(call: Call, contender: Contender, case: Case, answer: answers.Answer) -> answers.Check:
    """Runs the call once and compares the result with the answer."""
    result, rows, checks = call.result(), case.checked_rows, []
    found = {name: fetch(result[name], rows, 0) for name in ("y", "indices") if name in result and case.k}
    if not contender.ordered:
        found = answer.in_order(found)
    if "y" in result:
        check = answer.check_logits if contender.of_logits else answer.check_output
        checks.append(check(found["y"] if case.k else rows_of(result["y"], case, rows)))
    if "indices" in result:
        checks.append(answer.check_indices(found["indices"], contender.stable))
    if "dx" in result:
        chosen = None
        if not contender.ours and case.k is not None:  # a peer may order ties freely
            chosen = fetch(result.get("indices", call.indices), rows, 0)
        checks.append(answer.gradient(chosen).check("dx", rows_of(result["dx"], case, rows)))
    return answers.all_of(checks)


def _require_memory(case: Case) -> None:
    """Raises if a case does not fit a CPU's memory. Running it would kill the process, not only the call."""
    if timing.on_gpu() or not hasattr(os, "sysconf"):
        return
    # Eight float32 arrays hold x, its gradient, outputs, values that peers keep, and float32 copies of 16-bit rows.
    needed = 8 * case.batch * case.vocab * 4
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise MemoryError(f"needs about {needed / 1e9:.3g} GB of memory, there are {present / 1e9:.3g}")
