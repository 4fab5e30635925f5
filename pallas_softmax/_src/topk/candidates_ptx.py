"""Inline PTX that finds the candidates for the k best elements of a part, with the 128 threads of a CTA.

`find_bound` finds a lower bound for the k best elements. It looks only at the largest key of each group, and counts
these keys in buckets of equal length. One bucket holds the k-th largest key. At least k keys reach the least key of
that bucket, which is the bound. If many more than k keys reach it, `narrow` cuts the bucket into buckets again:

    keys       2 9 4 8 7 4 7 1      k = 3
    bucket     3 0 2 0 1 2 1 4      (9 - key) / 2
    counts     2 2 2 1 1            the third largest key is in bucket 1, keys 6 and 7: four keys reach 6

`collect` lists the candidates, the elements that reach the bound. First it lists the groups that reach the bound. Each
thread takes every 128th group of that list. It handles 32 elements at once, and makes a mask with one bit for each. An
example with four groups of 8 elements:

    its groups    12         71         130        388
    mask          00100001   00000010   00000001   01000000       a bit for each element that reaches the bound
    candidates    | 12: 0 | 12: 5 | 71: 1 | 130: 0 | 388: 6 |     appended, two or four at a time
"""

from collections.abc import Callable

from pallas_softmax._src.gpu.hardware import ACCESS_BYTES, LANES, WARPGROUP, WARPS
from pallas_softmax._src.gpu.layout import Window, log2
from pallas_softmax._src.gpu.ptx.cta import CtaProgram
from pallas_softmax._src.gpu.ptx.elements import Elements
from pallas_softmax._src.gpu.ptx.narrow import Histogram, KeyRange, find_rank
from pallas_softmax._src.gpu.ptx.ranking import (
    CANDIDATE_BYTES,
    LOADED_AT_ONCE,
    LOWEST_KEY,
    POSITION_BYTES,
    CandidateList,
    candidate_of,
)
from pallas_softmax._src.gpu.ptx.values import Condition, Value
from pallas_softmax._src.topk.plan import listed_items

# Offsets in <counts>, after the number of candidates: the number of groups that reach the bound, and the scratch.
HITS_BYTE, SCRATCH_BYTE = 4, 16


class WindowProgram(CtaProgram):
    """A program for the part of a row in a `Window`, with the arrays of `SearchMemory` and numbers of `WindowPart`."""

    def __init__(self, window: Window, dtype, k: int):
        super().__init__()
        self.window, self.element, self.k = window, Elements(dtype), k
        # The lists have room for `capacity` candidates, in `list_bytes` bytes, and for `hits_capacity` groups.
        items, self.hits_capacity = listed_items(window, k)
        self.capacity, self.list_bytes = (items, 2 * items) if window.compact else (items // 2, 4 * items)
        self.x, self.group_keys = self.operands("u32", "x", "group_keys")
        self.candidates, self.hits, self.counts = self.operands("u32", "candidates", "hits", "counts")
        self.owned, self.start = self.operands("s32", "owned", "start")
        self.shift = self.operand("shift", "u32") if window.shifted else None
        self.block_bytes = window.block_size * self.element.itemsize

    def load_bits(self, position: Value, when: Condition = None) -> Value:
        """Returns the bits of the element at a position."""
        address = self.at(self.x, position, self.element.itemsize)
        address = address if self.shift is None else self.at(address, self.shift, self.element.itemsize)
        return self.element.load_bits(self, address, when=when)

    def vectors(self, *addresses: Value) -> list[Value]:
        """Returns the words of the vectors at some addresses, which leave the shift out."""
        return sum(self.element.vectors(self, addresses, self.shift, 4 * WARPGROUP), [])

    def first_position(self, group: Value) -> Value:
        window = self.window
        first_in_block = (group >> log2(WARPGROUP)) * (window.group_blocks * window.block_size)
        return self.multiply_add(group & (WARPGROUP - 1), window.run, first_in_block)

    def hit(self, at: Value) -> Value:
        return self.at(self.hits, at, 2 if self.window.compact else 4)

    def load_hit(self, at: Value, when: Value, default: int | None = None) -> Value:
        address = self.hit(at)
        if self.window.compact:
            return self.convert(self.load(address, "u16", when=when, default=default), "u32")
        if default is not None:
            return self.load(address, "u32", when=when, default=default)
        self.load_into([address], address, when=when)  # overwriting the address saves a register
        return address


def find_bound(p: WindowProgram, rank: int) -> tuple[Value, Value]:
    """Returns a key that at least `rank` group_keys reach, and the highest group_key.

    The histogram uses the list of candidates, which must be empty, and leaves it empty.
    """
    p.barrier()  # all threads have written their group_keys
    own, scratch = p.at(p.group_keys, p.thread, 4), p.counts + SCRATCH_BYTE
    keys = [p.load(own, "s32", offset=4 * i) for i in range(0, p.window.groups, WARPGROUP)]

    # Each thread divides its keys into sets, so that all threads together have at least `rank` sets. The least of the
    # sets' maxima is a key that every set reaches.
    sets = -(-rank // WARPGROUP)
    largest = p.reduce("max", keys)
    least = p.reduce("min", [p.reduce("max", keys[i::sets]) for i in range(sets)])
    least_and_largest = [p.over_lanes("min", least), p.over_lanes("max", largest)]
    lows, highs = p.of_warps(least_and_largest, scratch, lane=0)
    left = KeyRange(p, p.reduce("max", highs), p.reduce("min", lows))
    highest, histogram = p.var(left.high), Histogram(p, p.candidates, 4, scratch, scratch + ACCESS_BYTES)

    def count(bucket_of):
        for key in keys:
            histogram.count(*bucket_of(key))

    # A sixteenth more than `rank` may reach the bound, within the same multiple of 128.
    enough = min(rank + max(2, rank // 16), -(-rank // WARPGROUP) * WARPGROUP)
    find_rank(histogram, left, rank, enough, count)
    return left.least(), highest


_BITS = 32  # elements that a thread tests together, one for each bit of a word
_ALL_ONES = 2**32 - 1
# Up to this capacity of the list, a thread has so few candidates that it appends two at once, instead of four.
_FEW_CANDIDATES = 256


def collect(p: WindowProgram, bound: Value, *, all_groups: bool = False) -> None:
    """Appends the elements that reach the bound to the list. A thread handles 32 at once, from one or several groups.

    The first word of <counts> gets the number of candidates, even if they do not fit. The list of groups may be too
    short for the groups. Then all threads leave at once, and the number is the capacity + 1. With `all_groups` there is
    no such list: threads take all groups, and skip those below the bound.
    """
    with p.block() as finish:
        n = p.var(p.window.groups, "u32") if all_groups else _list_hits(p, bound, finish)
        finish((p.thread & (WARPGROUP - LANES)) >= n)  # the first thread of the warp has no group
        turn = p.var(p.thread)
        with p.repeat() as again:
            mask = _mask_turn(p, bound, turn, n, listed=not all_groups)
            count = p.count_ones(mask)
            entry = p.take_from(p.counts, count, when=count.differs(0))
            _append(p, mask, turn, entry, listed=not all_groups)
            p.increase(turn, _BITS // p.window.group_size * WARPGROUP)
            again((turn & -LANES) < n)
    p.barrier()


def _list_hits(p: WindowProgram, bound: Value, give_up: Callable[..., None]) -> Value:
    """Lists the groups that reach the bound in any order, and returns how many; give_up() if they do not fit."""
    own = p.at(p.group_keys, p.thread, 4)
    lower_lanes = p.special("lanemask_lt")
    each = p.window.groups_per_thread
    for start in range(0, each, LOADED_AT_ONCE):
        turns = range(start, min(start + LOADED_AT_ONCE, each))
        keys = [p.load(own, "s32", offset=4 * WARPGROUP * i) for i in turns]
        count, hits = p.var(0, "u32"), []
        for i, key in zip(turns, keys):
            reaches = key >= bound
            ballot = p.ballot(reaches)
            hits.append((i, reaches, p.count_ones(ballot & lower_lanes) + count))
            count = count + p.count_ones(ballot)
        with p.block() as leave:
            leave(count.equals(0))
            reserved = p.take_from(p.counts, count, offset=HITS_BYTE, when=lower_lanes.equals(0), default=0)
            first = p.shuffle(reserved, "idx", 0)
            for i, reaches, lower in hits:
                at, group = lower + first, p.thread + WARPGROUP * i
                group = p.convert(group, "u16") if p.window.compact else group
                p.store(p.hit(at), group, when=reaches & (at < p.hits_capacity))
    p.barrier()
    n = p.load(p.counts, "u32", offset=HITS_BYTE)
    with p.when(n > p.hits_capacity):
        p.store(p.counts, p.capacity + 1, when=p.thread.equals(0))
        give_up()
    return n


def _mask_turn(p: WindowProgram, bound: Value, turn: Value, n: Value, *, listed: bool) -> Value:
    """Returns a mask of the elements in groups turn, turn + 128, ... that are in the part and reach the bound.

    These numbers count the listed groups if `listed`, else all groups. Raw bits are compared instead of keys:

      * If the bound is not negative, this gives the same result. As integers, the bits of negative elements are < 0.
      * If the bound is negative, all bits except the signs are inverted first. This turns negative elements into their
        keys, and leaves the others above the bound.
    """
    window, element = p.window, p.element
    groups, have = [], []
    for i in range(_BITS // window.group_size):
        number = turn + i * WARPGROUP
        has = number < n
        if listed:
            groups.append(p.load_hit(number, has, default=0))
        else:
            key = p.load(p.at(p.group_keys, number, 4), "s32", when=has, default=LOWEST_KEY)
            has = has & (key >= bound)
            groups.append(p.select(has, number, 0))
        have.append(has)
    firsts = [p.first_position(group) for group in groups]
    vectors = [_group_words(p, first) for first in firsts]
    mask, flip = p.var(0, "u32"), bound.sign() & element.flip
    bound = bound << (16 if element.halves else 0)
    for i, (first, has, words) in enumerate(zip(firsts, have, vectors)):
        bits = _bits_reaching(p, words, bound, flip)
        if window.groups * window.group_size > window.cut.shortest:  # some are outside
            bits = _in_part(p, first, bits)
        mask = mask | p.select(has, bits, 0) << i * window.group_size
    return mask


def _bits_reaching(p: WindowProgram, words: list[Value], bound: Value, flip: Value) -> Value:
    """Returns a mask of the elements that are not below `bound`, after an xor with `flip`."""
    each = _BITS // 4  # bits per register: several registers make shorter dependency chains
    elements = []
    for word in words:
        flipped = word ^ flip
        elements += [flipped << 16, flipped] if p.element.halves else [flipped]
    bits = [p.var(0, "u32") for _ in range(0, len(elements), each)]
    for i, x in enumerate(elements):
        p.update(bits[i // each], "or", 1 << i, when=x >= bound)
    return p.reduce("or", bits)


def _group_words(p: WindowProgram, first: Value) -> list[Value]:
    window, itemsize = p.window, p.element.itemsize
    addresses = [p.at(p.x, first, itemsize) + b * p.block_bytes for b in range(window.group_blocks)]
    if window.blocks % window.group_blocks:
        # Reads beyond the last block are redirected to it. Positions beyond it are never in the part.
        last_block = (first & (window.block_size - 1)) + (window.blocks - 1) * window.block_size
        addresses = [p.min(address, p.at(p.x, last_block, itemsize)) for address in addresses]
    return p.vectors(*addresses)


def _in_part(p: WindowProgram, first: Value, bits: Value) -> Value:
    """Clears the bits of elements outside the part."""
    window = p.window
    rest = p.max(p.owned - first.bits("s32"), 0).bits("u32")
    each = WARPGROUP * window.run  # positions from one run of a thread to its next one
    in_run = p.min(rest & (each - 1), window.run)
    return bits & ~(p.var(_ALL_ONES, "u32") << p.multiply_add(rest >> log2(each), window.run, in_run))


def _append(p: WindowProgram, mask: Value, turn: Value, entry: Value, *, listed: bool) -> None:
    """Appends the elements with bits in `mask`, two or four at once. Clears `mask` and advances `entry`."""
    window = p.window
    with p.loop() as leave:
        leave(mask.equals(0) | (entry >= p.capacity))
        chosen, elements = [], []
        for i in range(2 if p.capacity <= _FEW_CANDIDATES else 4):
            inside = entry + i < p.capacity
            choose, bit = inside & mask.differs(0), p.lowest_bit(mask)
            p.update(mask, "and", mask - 1)
            group = p.multiply_add(bit >> log2(window.group_size), WARPGROUP, turn)
            chosen.append((choose, bit, p.load_hit(group, choose) if listed else group))
        for choose, bit, group in chosen:
            in_group = bit & (window.group_size - 1)
            run, in_run = in_group >> log2(window.run), in_group & (window.run - 1)
            position = p.first_position(group) + p.multiply_add(run, WARPGROUP * window.run, in_run)
            # Loads the element again, because registers cannot be indexed.
            bits = None if window.compact else p.load_bits(position, when=choose)
            elements.append((choose, position, bits))
        for choose, position, bits in elements:
            key = None if bits is None else p.element.key(bits)
            _store_entry(p, entry, key, position, choose)
            p.increase(entry, 1)


def _store_entry(p: WindowProgram, entry: Value, key: Value | None, position: Value, when: Condition = None) -> None:
    if p.window.compact:
        p.store(p.at(p.candidates, entry, POSITION_BYTES), p.convert(position, "u16"), when=when)
    else:
        assert key is not None
        candidate = candidate_of(p, key, position.bits("s32") + p.start)
        p.store(p.at(p.candidates, entry, CANDIDATE_BYTES), candidate, when=when)


def collect_ties(p: WindowProgram, tie: Value, first: Value) -> None:
    """Writes the elements with the key `tie` to entries `first` to k - 1 of the list, in order of index.

    base = first
    for each run of all threads, while base < k:
        before = base + ties of lower lanes of this warp + ties of lower warps
        for each tie in the thread's run:
            if before < k: write it to entry `before`
            before += 1
        base += ties in all runs
    """
    window, k = p.window, p.k
    base, parity = p.var(first), p.var(0, "u32")
    lower_lanes, scratch = p.special("lanemask_lt"), p.counts + SCRATCH_BYTE
    position, each = p.var((p.thread * window.run).bits("s32")), WARPGROUP * window.run
    with p.loop() as leave:
        leave((position >= window.size) | (base >= k))
        in_warp, before, tied = p.var(0, "s32"), p.var(0, "s32"), []
        if window.shifted:
            keys = [p.element.key(p.load_bits(position + j)) for j in range(window.run)]
        else:
            keys = p.element.keys(p.vectors(p.at(p.x, position.bits("u32"), p.element.itemsize)))
        for j, key in enumerate(keys):
            at = position + j
            tied.append(key.equals(tie) & (at < p.owned))
            ballot = p.ballot(tied[-1])
            p.increase(in_warp, p.count_ones(ballot))
            p.increase(before, p.count_ones(ballot & lower_lanes))
        # Two parts of the scratch alternate, so that one barrier for each block suffices.
        lower, all_ = p.lower_warps(in_warp, p.at(scratch, parity, 4 * WARPS))
        p.increase(before, base + lower.bits("s32"))
        p.increase(base, all_.bits("s32"))
        for j, is_tied in enumerate(tied):
            with p.when(is_tied & (before < k)):
                _store_entry(p, before, tie, position + j)
            p.increase(before, 1, when=is_tied)
        p.increase(position, each)
        p.update(parity, "xor", 1)
    p.barrier()


def expand_positions(p: WindowProgram, candidates: CandidateList) -> None:
    """Turns the list of positions into the list `candidates`, which overwrites the row.

    Entries after the last candidate become empty, as they are in a window that is not compact.
    """
    each = p.capacity // WARPGROUP
    own = p.at(p.candidates, p.thread, POSITION_BYTES)
    values = [p.var(0, "u64") for _ in range(candidates.capacity // WARPGROUP)]
    with p.block() as leave:
        for first in range(0, each, LOADED_AT_ONCE):
            leave(candidates.n <= WARPGROUP * first)
            loaded = []
            for i in range(first, min(first + LOADED_AT_ONCE, each)):
                listed = p.thread + WARPGROUP * i < candidates.n
                offset = POSITION_BYTES * WARPGROUP * i
                position = p.convert(p.load(own, "u16", offset=offset, when=listed, default=0), "u32")
                loaded.append((i, listed, position, p.load_bits(position)))
            for i, listed, position, bits in loaded:
                candidate = candidate_of(p, p.element.key(bits), position.bits("s32") + p.start)
                p.set(values[i], candidate, when=listed)
    p.barrier()
    at = candidates.at(p.thread)
    for i, value in enumerate(values):
        p.store(at, value, offset=CANDIDATE_BYTES * WARPGROUP * i)
    p.barrier()
