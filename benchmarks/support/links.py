"""The traffic on the links between devices, read from the text of a compiled program."""

import dataclasses
import math
import re

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# An asynchronous collective counts at its start. No quote or percent sign precedes an operation's name.
_INSTRUCTION = re.compile(rf'^\s*(?:ROOT )?%?[\w.-]+ = ([^"%]*?) ({KINDS})(-start)?\((.*)$', re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, as each of its devices sees it."""

    kind: str  # as HLO calls it, such as all-gather
    bytes: int  # of the whole array: the result of an all-gather, the operand of a reduce-scatter
    group: int  # the number of devices that take part

    @property
    def received(self) -> float:
        """Bytes that one device receives in a ring. A target of a collective-permute receives all bytes."""
        if self.kind == "collective-permute":
            return self.bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.bytes * (self.group - 1) / self.group


def collectives(hlo_text: str) -> list[Collective]:
    """Returns the collectives of a compiled program in the order of its text. One in a loop counts once."""
    devices = math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", hlo_text)))
    found = []
    for shape, kind, start, attributes in _INSTRUCTION.findall(hlo_text):
        # A start returns (operands, results, ...). Only an all-reduce may return just its results.
        if start and (kind != "all-reduce" or shape.startswith("((")):
            shape = _elements(shape)[1]
        group = _group(attributes, devices)
        scattered = group if kind == "reduce-scatter" else 1
        found.append(Collective(kind, scattered * _bytes(shape), group))
    return found


def _elements(shape: str) -> list[str]:
    """Splits the text of a tuple into its elements. Nested brackets stay together."""
    elements, depth, start = [], 0, 1
    for i, c in enumerate(shape):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 or (c == "," and depth == 1):
            elements.append(shape[start:i].strip())
            start = i + 1
    return elements


def _bytes(shape: str) -> int:
    """Returns the bytes of an array, or of all arrays in a tuple."""
    total = 0
    for name, bits, dimensions in _ARRAY.findall(shape):
        size = math.prod(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
        total += -(-size * int(bits or {"pred": 8}.get(name, 0)) // 8)  # a token has no bits
    return total


def _group(attributes: str, devices: int) -> int:
    """Returns the size of the largest group of devices, from any of HLO's notations."""
    if pairs := re.search(r"source_target_pairs=\{([{}\d,]*)\}", attributes):
        return pairs[1].count("{")
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh[1]))
        chosen = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", mesh[2])  # an axis, or part of an axis
        return math.prod(int(part or sizes[axis]) for axis, part in chosen)
    if listed := re.search(r"replica_groups=\{([{}\d,]*)\}", attributes):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return max((group.count(",") + 1 for group in groups), default=devices)
    raise ValueError(f"a collective whose groups cannot be read: ({attributes[:200]}")
