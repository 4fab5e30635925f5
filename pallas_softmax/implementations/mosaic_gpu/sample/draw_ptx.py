"""`draw.draw` in inline PTX: the thresholds of the filters, and the draw, of a row over a cluster of CTAs."""

from pallas_softmax.implementations.mosaic_gpu.device.hardware import WARPGROUP
from pallas_softmax.implementations.mosaic_gpu.sample import threshold
from pallas_softmax.implementations.mosaic_gpu.sample.program import INF, NAN, NEG_INF, WHOLE_WARP, Program
from pallas_softmax.implementations.mosaic_gpu.topk.insert import insert
from pallas_softmax.implementations.mosaic_gpu.topk.plan import Window

_LN2 = "0f3F317218"
_ONE, _ZERO = "0f3F800000", "0f00000000"


def draw(window: Window, x_smem, scratch, m, scale, request, place, out) -> None:
    """Draws from a row; the arguments are those of `draw.draw`."""
    insert(
        text(window, x_smem.dtype),
        {"x": x_smem, "scratch": scratch, "index": out[0], "log_prob": out[1], "log_mass": out[2]},
        {"scale": scale, **request._asdict(), **place._asdict()},
        {"m": m},
    )


def text(window: Window, dtype) -> Program:
    """The text for a part of a row.

    The threads have met since the last of the part was written. <m> is the largest element that a thread has seen,
    or NaN.
    """
    p = Program(window, dtype)
    end = p.label("end")
    by_count, by_mass, filtered, count, share, least_weight = _set_up(p, end)
    kept = threshold.Kept(
        p.const("f32", NEG_INF), p.const("f32", _ZERO), p.const("f32", _ZERO), p.one("pred")
    )
    some = p.one("pred")
    p += f"setp.ne.u32 {kept.known}, {p.lane}, {p.lane};"
    total = _rescale(p)
    search = threshold.Search(p, total, kept)
    after = [p.label(name) for name in ("thresholds", "by_count", "by_mass")]
    p += f"or.pred {some}, {by_count}, {by_mass};"
    p.skip_unless(some, after[0])
    threshold.histogram(p)
    p.skip_unless(by_count, after[1])
    search.find(count, by_mass=False)
    p += f"{after[1]}:"
    p.skip_unless(by_mass, after[2])
    search.find(share, by_mass=True)
    p += f"{after[2]}: {after[0]}:"
    _draw(p, kept, search, total, least_weight, filtered)
    p += f"{end}:"
    return p


def _set_up(p: Program, end: str):
    """The maximum of the row, and what filters it; a row without a draw gets its results here."""
    m, share, least_weight = p.new("f32", 3)
    count = p.one("b32")
    good, greedy, by_count, by_mass, filtered, first = p.new("pred", 6)
    p += f"mov.f32 {m}, <m>;"
    p.over_warp("max.NaN.f32", "f32", m)
    p.send(p.scratch.max_mail, [m])
    p.cluster_barrier()
    (m,) = p.receive(p.scratch.max_mail, [("max.NaN.f32", "f32")])
    p += f"add.f32 {p.m}, {m}, {_ZERO}; abs.f32 {m}, {m}; setp.lt.f32 {good}, {m}, {INF};"
    p += f"setp.ge.and.f32 {good}, <temperature>, {_ZERO}, {good};"
    nan = p.label("drawable")
    p += f"@{good} bra {nan}; setp.eq.u32 {first}, <thread>, 0; setp.eq.and.u32 {first}, <part>, 0, {first};"
    _write(p, first, p.const("b32", -1), p.const("f32", NAN), p.const("f32", NAN))
    p.cluster_barrier()  # no CTA leaves while another one may read its shared memory
    p += f"bra {end}; {nan}:"
    # A temperature of 0, whose scale is that of the least one, takes the first entry.
    p += f"setp.eq.f32 {greedy}, <temperature>, {_ZERO};"
    p += f"selp.b32 {count}, 1, <top_k>, {greedy}; selp.f32 {share}, {_ONE}, <top_p>, {greedy};"
    p += f"selp.f32 {least_weight}, {_ZERO}, <min_p>, {greedy};"
    p += f"setp.lt.u32 {by_count}, {count}, {p.window.vocab}; setp.lt.f32 {by_mass}, {share}, {_ONE};"
    p += f"or.pred {filtered}, {by_count}, {by_mass}; setp.gt.or.f32 {filtered}, {least_weight}, {_ZERO}, {filtered};"
    return by_count, by_mass, filtered, count, share, least_weight


def _write(p: Program, predicate: str, index: str, log_prob: str, log_mass: str) -> None:
    """Writes the results of the row, in the thread where the predicate holds."""
    offset, address = p.new("b64", 2)
    p += f"mul.wide.u32 {offset}, <row>, 4;"
    for name, kind, value in (
        ("index", "b32", index),
        ("log_prob", "f32", log_prob),
        ("log_mass", "f32", log_mass),
    ):
        p += f"add.u64 {address}, <{name}>, {offset}; @{predicate} st.global.{kind} [{address}], {value};"


def _draw(p: Program, kept: threshold.Kept, search, total: str, least_weight: str, filtered: str) -> None:
    """The first kept entry, in the order of the row, at which the kept mass exceeds u times all of it.

    It is in the last CTA, group, thread and element that has kept mass, and of which no more than that lies before.
    """
    _masses(p, kept, search, least_weight, filtered)
    own = _sum_groups(p)
    # Over the cluster: the kept mass of each CTA, and of the row.
    at = p.scratch.kept_mail
    address, first = p.address(at), p.first_thread()
    p += f"@{first} st.shared.f32 [<scratch>+{4 * at}], {own};"
    p.send(p.scratch.total_mail, [total])
    p.cluster_barrier()
    of_ctas = []
    row_kept, target, before, here_before = (
        p.const("f32", _ZERO),
        p.one("f32"),
        p.const("f32", _ZERO),
        p.one("f32"),
    )
    for cta in range(p.ctas):
        (word,) = p.load_peer(cta, address, 1)
        x = p.one("f32")
        p += f"mov.b32 {x}, {word}; add.f32 {row_kept}, {row_kept}, {x};"
        of_ctas.append(x)
    (total,) = p.receive(p.scratch.total_mail, [("add.f32", "f32")])
    p += f"mul.f32 {target}, <u>, {row_kept}; @{kept.known} mov.f32 {total}, {kept.total};"
    p += f"@!{filtered} mov.f32 {total}, {row_kept};"
    chosen, fits, end = p.const("b32", 0), p.one("pred"), p.label("drawn")
    p += f"mov.f32 {here_before}, {_ZERO};"
    for cta, x in enumerate(of_ctas):
        p += f"setp.le.f32 {fits}, {before}, {target}; setp.gt.and.f32 {fits}, {x}, {_ZERO}, {fits};"
        p += f"@{fits} mov.b32 {chosen}, {cta}; @{fits} mov.f32 {here_before}, {before};"
        p += f"add.f32 {before}, {before}, {x};"
    p.cluster_barrier()  # no CTA leaves while another one may read its shared memory
    p += f"setp.eq.u32 {fits}, {chosen}, <part>;"
    p.skip_unless(fits, end)
    p += f"sub.f32 {target}, {target}, {here_before};"
    _draw_here(p, kept, least_weight, target, total, row_kept)
    p += f"{end}:"


def _is_kept(p: Program, x: str, weight: str, kept: threshold.Kept, least_weight: str) -> str:
    """A predicate of an element that all filters keep."""
    out = p.one("pred")
    p += f"setp.ge.f32 {out}, {x}, {kept.least}; setp.ge.and.f32 {out}, {weight}, {least_weight}, {out};"
    return out


def _rescale(p: Program) -> str:
    """Makes the masses of groups those relative to the row's maximum; returns the warp's total."""
    total, best, mass = p.const("f32", _ZERO), *p.new("f32", 2)
    at = p.one("b32")
    p += f"mad.lo.u32 {at}, <thread>, 4, <scratch>;"
    for i in range(p.scratch.groups):
        best_at, mass_at = (4 * (words + WARPGROUP * i) for words in (p.scratch.best, p.scratch.masses))
        p += f"ld.shared.f32 {best}, [{at}+{best_at}]; ld.shared.f32 {mass}, [{at}+{mass_at}];"
        p += f"mul.f32 {mass}, {mass}, {p.weight(p.distance(best))}; st.shared.f32 [{at}+{mass_at}], {mass};"
        p += f"add.f32 {total}, {total}, {mass};"
    p.over_warp("add.f32", "f32", total)
    return total


def _masses(p: Program, kept: threshold.Kept, search, least_weight: str, filtered: str) -> None:
    """Makes the masses of groups those of what is kept.

    After a threshold without min_p they are that but for those in the zone. With min_p they take a sweep.
    """
    end, sweep = p.label("masses"), p.label("sweep_masses")
    simple, listed = p.new("pred", 2)
    p += f"@!{filtered} bra {end};"
    p += f"setp.le.and.f32 {simple}, {least_weight}, {_ZERO}, {kept.known}; "
    p += f"not.pred {listed}, {search.whole}; vote.sync.all.pred {listed}, {listed}, {WHOLE_WARP};"
    p += f"and.pred {simple}, {simple}, {listed}; @!{simple} bra {sweep};"
    search.add_kept()
    p += f"bra {end}; {sweep}:"
    least, of_weight = p.new("f32", 2)  # the least distance of both, or a little less
    p += f"lg2.approx.f32 {of_weight}, {least_weight}; sub.f32 {of_weight}, {of_weight}, 0f3A000000;"
    p += f"max.f32 {least}, {p.distance(kept.least)}, {of_weight}; mul.f32 {least}, {least}, 0f3F800100;"
    p += f"sub.f32 {least}, {least}, 0f3A000000;"

    def group(floats, step):
        masses = p.new("f32", len(floats))
        for mass, x in zip(masses, floats):
            weight = p.weight(p.distance(x))
            p.emit(f"selp.f32 {mass}, {weight}, {_ZERO}, {_is_kept(p, x, weight, kept, least_weight)};")
        return p.tree("add.f32", "f32", masses)

    p.sweep(group, least)
    p += f"{end}:"
    p.barrier()


def _sum_groups(p: Program) -> str:
    """Sums the kept masses of each group over the threads, a warp every fourth group; returns the CTA's kept mass."""
    groups = p.scratch.groups
    group, address, out = p.new("b32", 3)
    parts, (total, of_group) = p.new("f32", 4), p.new("f32", 2)
    more, first = p.new("pred", 2)
    again, done = p.label("sum"), p.label("sums_done")
    p += f"mov.b32 {group}, {p.warp}; setp.eq.u32 {first}, {p.lane}, 0;"
    p += f"{again}: setp.lt.u32 {more}, {group}, {groups}; @!{more} bra {done};"
    p += f"mad.lo.u32 {address}, {group}, {4 * WARPGROUP}, <scratch>; mad.lo.u32 {address}, {p.lane}, 16, {address};"
    p += f"ld.shared.v4.f32 {{{', '.join(parts)}}}, [{address}+{4 * p.scratch.masses}];"
    p += f"mov.f32 {of_group}, {p.tree('add.f32', 'f32', list(parts))};"
    p.over_warp("add.f32", "f32", of_group)
    p += f"mad.lo.u32 {out}, {group}, 4, <scratch>; @{first} st.shared.f32 [{out}+{4 * p.scratch.sums}], {of_group};"
    p += f"add.u32 {group}, {group}, 4; bra {again}; {done}:"
    p.barrier()
    p += f"mov.f32 {total}, {_ZERO};"
    for x in _group_sums(p):
        p += f"add.f32 {total}, {total}, {x};"
    return total


def _group_sums(p: Program) -> list[str]:
    """Loads the kept masses of all groups."""
    out = p.new("f32", p.scratch.groups)
    for i, x in enumerate(out):
        p += f"ld.shared.f32 {x}, [<scratch>+{4 * (p.scratch.sums + i)}];"
    return out


def _draw_here(p: Program, kept, least_weight: str, target: str, total: str, row_kept: str) -> None:
    """The draw in this CTA, before whose kept mass exceeds `target` it is; writes the row's results."""
    before, here, p0 = p.const("f32", _ZERO), p.one("f32"), p.one("pred")
    group, first, count, address = p.const("b32", 0), *p.new("b32", 3)
    p += f"mov.f32 {here}, {_ZERO};"
    for i, x in enumerate(_group_sums(p)):
        p += f"setp.le.f32 {p0}, {before}, {target}; setp.gt.and.f32 {p0}, {x}, {_ZERO}, {p0};"
        p += f"@{p0} mov.b32 {group}, {i}; @{p0} mov.f32 {here}, {before}; add.f32 {before}, {before}, {x};"
    p += f"sub.f32 {target}, {target}, {here};"
    # A thread takes neighbouring vectors of the group, as many as the group has blocks.
    blocks = p.group_blocks
    p += f"mul.lo.u32 {first}, {group}, {blocks}; sub.u32 {count}, {p.window.blocks}, {first};"
    p += f"min.u32 {count}, {count}, {blocks}; mul.lo.u32 {first}, {first}, {WARPGROUP};"
    p += f"mad.lo.u32 {first}, <thread>, {count}, {first}; mad.lo.u32 {address}, {first}, 16, <x>;"
    p += f"mul.lo.u32 {first}, {first}, {p.window.vec};"

    def each(body):
        turn, at = p.new("b32", 2)
        again = p.label("vector")
        p.emit(f"mov.b32 {turn}, 0; mov.b32 {at}, {address}; {again}:")
        (words,) = p.kind.vectors(p, at, [0])
        for j, x in enumerate(p.kind.floats(p, words, False)):
            distance = p.distance(x)
            weight, mass, position = p.weight(distance), p.one("f32"), p.one("b32")
            p.emit(f"selp.f32 {mass}, {weight}, {_ZERO}, {_is_kept(p, x, weight, kept, least_weight)};")
            p.emit(f"mad.lo.u32 {position}, {turn}, {p.window.vec}, {j};")
            body(mass, distance, position)
        p.emit(f"add.u32 {turn}, {turn}, 1; add.u32 {at}, {at}, 16;")
        p.emit(f"setp.lt.u32 {p0}, {turn}, {count}; @{p0} bra {again};")

    own = p.const("f32", _ZERO)
    each(lambda mass, distance, position: p.emit(f"add.f32 {own}, {own}, {mass};"))
    lower, _ = p.scan_cta(own, "f32", p.scratch.scans)
    mine, p1 = p.const("b32", -1), p.one("pred")
    p += f"setp.le.f32 {p1}, {lower}, {target}; setp.gt.and.f32 {p1}, {own}, {_ZERO}, {p1};"
    p += f"@{p1} mov.b32 {mine}, <thread>;"
    p.over_warp("max.s32", "b32", mine)
    p.send(p.scratch.scans + 8, [mine])
    p.barrier()
    words, end = p.new("b32", 4), p.label("not_mine")
    p += f"ld.shared.v4.b32 {{{', '.join(words)}}}, [<scratch>+{4 * (p.scratch.scans + 8)}];"
    p += f"setp.eq.s32 {p1}, <thread>, {p.tree('max.s32', 'b32', words)};"
    p.skip_unless(p1, end)
    drawn, at = p.const("b32", 0), p.const("f32", _ZERO)

    def take(mass, distance, position):
        p.emit(f"setp.le.f32 {p1}, {lower}, {target}; setp.gt.and.f32 {p1}, {mass}, {_ZERO}, {p1};")
        p.emit(f"@{p1} mov.b32 {drawn}, {position}; @{p1} mov.f32 {at}, {distance};")
        p.emit(f"add.f32 {lower}, {lower}, {mass};")

    each(take)
    log_prob, share = p.new("f32", 2)
    p += f"add.u32 {drawn}, {drawn}, {first}; add.u32 {drawn}, {drawn}, <origin>;"
    p += f"mul.f32 {log_prob}, {at}, {_LN2}; sub.f32 {log_prob}, {log_prob}, {_log(p, total)};"
    p += f"div.rn.f32 {share}, {row_kept}, {total}; min.f32 {share}, {share}, {_ONE};"
    log_mass = _log(p, share)
    p += f"setp.eq.u32 {p1}, <thread>, <thread>;"
    _write(p, p1, drawn, log_prob, log_mass)
    p += f"{end}:"


def _log(p: Program, x: str) -> str:
    """log(x): near 1 the series of log(1 + y), y = x - 1, since the GPU's logarithm is not accurate there."""
    y, series, out = p.new("f32", 3)
    near = p.one("pred")
    p += f"sub.f32 {y}, {x}, {_ONE}; fma.rn.f32 {series}, {y}, 0fBE800000, 0f3EAAAAAB;"  # 1/3 - y/4
    p += f"neg.f32 {series}, {series}; fma.rn.f32 {series}, {y}, {series}, 0f3F000000; neg.f32 {series}, {series};"
    p += f"fma.rn.f32 {series}, {y}, {series}, {_ONE}; mul.f32 {series}, {y}, {series};"
    p += f"lg2.approx.f32 {out}, {x}; mul.f32 {out}, {out}, {_LN2}; abs.f32 {y}, {y};"
    p += f"setp.lt.f32 {near}, {y}, 0f3C800000; selp.f32 {out}, {series}, {out}, {near};"
    return out
