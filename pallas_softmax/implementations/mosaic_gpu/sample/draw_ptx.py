"""`draw.draw` in inline PTX: the thresholds of the filters, and the draw, of a row over a cluster of CTAs.

    stage                              file               what all threads know after it
    the row's maximum                  (here)             m, which distances and weights are relative to
    masses of groups                   kept_ptx           the mass of the row
    threshold of top_k, then top_p     threshold_ptx      the least kept element; equal ones that are too many are -inf
        histogram                        histogram_ptx      about how many elements have which distance
        zone                             zone_ptx           between which distances the threshold is expected
        candidates                       candidates_ptx     which elements are there; what is above them
        rounds over keys                 rounds_ptx         the key of the threshold
            masses as integers             masses_ptx         sums that do not depend on the order
            bucket of a round              buckets_ptx        the next range of keys
        cut                              cut_ptx            how many entries of that key are kept
    kept masses of groups              kept_ptx           the kept mass of the row
    draw                               inverse_ptx        one thread: the element

They stand on `program` (elements as distances and weights), `walk_ptx` (loops over elements) and `cluster_ptx` (how
threads meet and tell each other).
"""

from typing import NamedTuple

from pallas_softmax.implementations.mosaic_gpu.device.inline_ptx import (
    INF,
    NAN,
    NEG_INF,
    ONE,
    ZERO,
    float_literal,
)
from pallas_softmax.implementations.mosaic_gpu.sample import (
    cluster_ptx,
    histogram_ptx,
    inverse_ptx,
    kept_ptx,
    threshold_ptx,
)
from pallas_softmax.implementations.mosaic_gpu.sample.program import Program, word
from pallas_softmax.implementations.mosaic_gpu.sample.search import Kept, Search, Target
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window

_LN2 = float_literal(0.6931471805599453)
_NEAR_ONE = float_literal(2.0**-6)  # |x - 1| below which 4 terms of a series are as good as float32


class _Filters(NamedTuple):
    """Registers with what filters a row.

    Attributes:
      by_count, by_mass: predicates: whether top_k filters, and top_p.
      some: predicate: whether anything filters.
      count: top_k, 1 for a temperature of 0 (b32).
      share: top_p (f32).
      least_weight: min_p (f32).
    """

    by_count: str
    by_mass: str
    some: str
    count: str
    share: str
    least_weight: str


def draw(window: Window, x_smem, scratch, m, scale, request, place, out) -> None:
    """Draws from a row; the arguments are those of `draw.draw`."""
    insert(
        text(window, x_smem.dtype),
        {"x": x_smem, "scratch": scratch, "index": out[0], "log_prob": out[1], "log_mass": out[2]},
        {"scale": scale, **request._asdict(), **place._asdict()},
        {"m": m},
    )


def text(window: Window, dtype) -> Program:
    """Returns the text for a part of a row.

    The threads have met since the last of the part was written. <m> is the largest element that a thread has seen,
    or NaN.
    """
    code = Program(window, dtype)
    end = code.label("end")
    _find_maximum(code, end)
    filters = _filters(code)
    kept = Kept(
        code.constant("f32", NEG_INF),
        code.constant("f32", ZERO),
        code.constant("f32", ZERO),
        code.one("pred"),
    )
    code.set_false(kept.known)
    total = kept_ptx.rescale(code)
    search = threshold_ptx.new_search(code, total, kept)
    _find_thresholds(code, filters, search)
    kept_ptx.write_masses(code, search, filters.least_weight, filters.some)
    _draw(code, filters, search)
    code += f"{end}:"
    return code


def _find_maximum(code: Program, end: str) -> None:
    """Finds the maximum of the row; a row without a draw gets its results here, and goes on at `end`."""
    m, good, drawable = code.one("f32"), code.one("pred"), code.label("drawable")
    code += f"mov.f32 {m}, <m>;"
    cluster_ptx.reduce_warp(code, "max.NaN.f32", "f32", m)
    cluster_ptx.send(code, code.scratch.max_mail, [m])
    cluster_ptx.meet_cluster(code)
    (m,) = cluster_ptx.receive(code, code.scratch.max_mail, [("max.NaN.f32", "f32")])
    # A -0 becomes a +0. Neither a NaN, in the row or for a temperature, nor an infinity is good.
    code += f"add.f32 {code.row_max}, {m}, {ZERO}; abs.f32 {m}, {m}; setp.lt.f32 {good}, {m}, {INF};"
    code += f"setp.ge.and.f32 {good}, <temperature>, {ZERO}, {good}; @{good} bra {drawable};"
    writes = code.one("pred")
    code += f"setp.eq.u32 {writes}, <thread>, 0; setp.eq.and.u32 {writes}, <part>, 0, {writes};"
    nothing = code.constant("b32", -1), code.constant("f32", NAN), code.constant("f32", NAN)
    _write(code, writes, *nothing)
    cluster_ptx.meet_cluster(code)  # no CTA leaves while another one may read its shared memory
    code += f"bra {end}; {drawable}:"


def _filters(code: Program) -> _Filters:
    """Returns what filters the row. A temperature of 0, whose scale is that of the least one, takes the first entry."""
    share, least_weight = code.new("f32", 2)
    count = code.one("b32")
    greedy, by_count, by_mass, some = code.new("pred", 4)
    code += f"setp.eq.f32 {greedy}, <temperature>, {ZERO};"
    code += f"selp.b32 {count}, 1, <top_k>, {greedy}; selp.f32 {share}, {ONE}, <top_p>, {greedy};"
    code += f"selp.f32 {least_weight}, {ZERO}, <min_p>, {greedy};"
    code += f"setp.lt.u32 {by_count}, {count}, {code.window.vocab}; setp.lt.f32 {by_mass}, {share}, {ONE};"
    code += f"or.pred {some}, {by_count}, {by_mass}; setp.gt.or.f32 {some}, {least_weight}, {ZERO}, {some};"
    return _Filters(by_count, by_mass, some, count, share, least_weight)


def _find_thresholds(code: Program, filters: _Filters, search: Search) -> None:
    """Finds the thresholds of top_k and of top_p, where these filter."""
    no_threshold, no_count, no_mass = (code.label(name) for name in ("thresholds", "by_count", "by_mass"))
    searches = code.one("pred")
    code += f"or.pred {searches}, {filters.by_count}, {filters.by_mass};"
    code.skip_unless(searches, no_threshold)
    histogram_ptx.count(code)
    code.skip_unless(filters.by_count, no_count)
    threshold_ptx.find(code, search, Target(filters.count, by_mass=False))
    code += f"{no_count}:"
    code.skip_unless(filters.by_mass, no_mass)
    threshold_ptx.find(code, search, Target(filters.share, by_mass=True))
    code += f"{no_mass}: {no_threshold}:"


def _draw(code: Program, filters: _Filters, search: Search) -> None:
    """Draws from what is kept, and writes the row's results."""
    masses, kept_of_row = _kept_masses(code, search.total)
    (total,) = cluster_ptx.receive(code, code.scratch.total_mail, [("add.f32", "f32")])
    target, end = code.one("f32"), code.label("drawn")
    code += (
        f"mul.f32 {target}, <u>, {kept_of_row}; @{search.kept.known} mov.f32 {total}, {search.kept.total};"
    )
    code += f"@!{filters.some} mov.f32 {total}, {kept_of_row};"
    cta, before = inverse_ptx.cta_reaching(code, masses, target)
    cluster_ptx.meet_cluster(code)  # no CTA leaves while another one may read its shared memory
    here = code.one("pred")
    code += f"setp.eq.u32 {here}, {cta}, <part>;"
    code.skip_unless(here, end)
    code += f"sub.f32 {target}, {target}, {before};"
    _draw_here(code, search.kept, filters.least_weight, target, total, kept_of_row)
    code += f"{end}:"


def _kept_masses(code: Program, total: str) -> tuple[list[str], str]:
    """Returns the kept mass of each CTA, and of the row (f32); the warps send each other the masses `total`."""
    own, at = kept_ptx.sum_groups(code), code.scratch.kept_mail
    address, first_thread = cluster_ptx.address_of_word(code, at), cluster_ptx.is_first_thread(code)
    code += f"@{first_thread} st.shared.f32 [{word(at)}], {own};"
    cluster_ptx.send(code, code.scratch.total_mail, [total])
    cluster_ptx.meet_cluster(code)
    of_row, masses = code.constant("f32", ZERO), []
    for cta in range(code.ctas):
        (bits,) = cluster_ptx.load_from(code, cta, address, 1)
        mass = code.one("f32")
        code += f"mov.b32 {mass}, {bits}; add.f32 {of_row}, {of_row}, {mass};"
        masses.append(mass)
    return masses, of_row


def _draw_here(
    code: Program, kept: Kept, least_weight: str, target: str, total: str, kept_of_row: str
) -> None:
    """Finds the element of the draw in this CTA, and writes the row's results.

    Args:
      kept, least_weight: what the filters keep.
      target: the mass to go in this CTA.
      total: mass of the row.
      kept_of_row: mass of what is kept of it.
    """
    group = inverse_ptx.group_reaching(code, target)
    vectors = inverse_ptx.vectors_of_group(code, group)
    here, before = inverse_ptx.thread_reaching(code, vectors, kept, least_weight, target)
    end = code.label("not_mine")
    code.skip_unless(here, end)
    index, distance = inverse_ptx.element_reaching(code, vectors, kept, least_weight, target, before)
    log_prob, share = code.new("f32", 2)
    code += f"add.u32 {index}, {index}, {vectors.position}; add.u32 {index}, {index}, <origin>;"
    log_total = _log(code, total)
    code += f"mul.f32 {log_prob}, {distance}, {_LN2}; sub.f32 {log_prob}, {log_prob}, {log_total};"
    code += f"div.rn.f32 {share}, {kept_of_row}, {total}; min.f32 {share}, {share}, {ONE};"
    log_mass, always = _log(code, share), code.one("pred")
    code += f"setp.eq.u32 {always}, <thread>, <thread>;"
    _write(code, always, index, log_prob, log_mass)
    code += f"{end}:"


def _write(code: Program, predicate: str, index: str, log_prob: str, log_mass: str) -> None:
    """Writes the results of the row, in the thread where the predicate holds."""
    offset, address = code.new("b64", 2)
    code += f"mul.wide.u32 {offset}, <row>, 4;"
    results = ("index", "b32", index), ("log_prob", "f32", log_prob), ("log_mass", "f32", log_mass)
    for name, kind, value in results:
        code += f"add.u64 {address}, <{name}>, {offset}; @{predicate} st.global.{kind} [{address}], {value};"


def _log(code: Program, x: str) -> str:
    """Returns log(x); near 1 by a series of log(1 + y), since the GPU's logarithm is not accurate there:

    y - y^2 / 2 + y^3 / 3 - y^4 / 4  =  y (1 - y (1/2 - y (1/3 - y / 4)))
    """
    y, series, out = code.new("f32", 3)
    near = code.one("pred")
    fourth, third, half = (float_literal(value) for value in (-1 / 4, 1 / 3, 1 / 2))
    code += f"sub.f32 {y}, {x}, {ONE}; fma.rn.f32 {series}, {y}, {fourth}, {third};"
    code += f"neg.f32 {series}, {series}; fma.rn.f32 {series}, {y}, {series}, {half};"
    code += f"neg.f32 {series}, {series}; fma.rn.f32 {series}, {y}, {series}, {ONE};"
    code += f"mul.f32 {series}, {y}, {series};"
    code += f"lg2.approx.f32 {out}, {x}; mul.f32 {out}, {out}, {_LN2}; abs.f32 {y}, {y};"
    code += f"setp.lt.f32 {near}, {y}, {_NEAR_ONE}; selp.f32 {out}, {series}, {out}, {near};"
    return out
