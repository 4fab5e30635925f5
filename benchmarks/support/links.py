"""The traffic on the links between devices: read from a compiled program, and predicted by a model.

`collectives` reads the text of `jax.jit(f).lower(x).compile().as_text()`. `predicted` and `model_table` model the
cost of top-k with the rows sharded along V.
"""

import dataclasses
import math
import re

from benchmarks.support.result import number

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
# An asynchronous collective counts at its start. No quote or percent sign precedes an operation's name.
_INSTRUCTION = re.compile(rf'^\s*(?:ROOT )?%?[\w.-]+ = ([^"%]*?) ({_KINDS})(-start)?\((.*)$', re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
_MODEL_MESHES = (
    (1,),
    (2,),
    (4,),
    (8,),
    (64,),
    (8, 8),
    (16, 16),
    (4, 8, 8),
    (32, 32),
    (8, 16, 8),
    (16, 16, 16),
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, as each of its devices sees it.

    Attributes:
      kind: as HLO calls it, such as all-gather.
      bytes: the size of the whole array: the result of an all-gather, the operand of a reduce-scatter. For the
        other kinds, operand and result have the same size.
      group: the number of devices that take part.
    """

    kind: str
    bytes: int
    group: int

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


@dataclasses.dataclass(frozen=True)
class Machine:
    """The measured constants of devices and their links.

    Attributes:
      bandwidth: bytes per second that top-k reads from a device's memory.
      link_bandwidth: bytes per second that one device receives.
      latency: the least seconds of an all-gather of candidates, including the kernels before and after it.
      hop: extra seconds per further device, because its message waits for the previous one.
      merge_cost: seconds per candidate that a device merges, counting the candidates of all rows.
    """

    bandwidth: float
    link_bandwidth: float
    latency: float
    hop: float
    merge_cost: float


# H200s of one host (NVLink), fitted to the times in benchmarks/results/sharded. The README there shows the misfit.
H200 = Machine(bandwidth=3.5e12, link_bandwidth=1.3e11, latency=5e-5, hop=2e-6, merge_cost=1.8e-11)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The seconds of one call, by cause."""

    read: float  # reading the device's shard of the logits
    latency: float  # starting the collectives and their steps
    links: float  # receiving bytes over the links
    merge: float  # merging the devices' candidates

    @property
    def seconds(self) -> float:
        return self.read + self.latency + self.links + self.merge


def predicted(
    rows: int, vocab: int, k: int, itemsize: int, mesh: tuple[int, ...], machine: Machine
) -> Prediction:
    """Predicts the time of fused_topk on logits with V sharded over the axes of a mesh.

    Each device reads its shard. Then, over one mesh axis after another, the devices all-gather and merge k values, k
    indices and (m, d) for each row, at 4 bytes each. The model assumes that a shard has at least k elements per row.
    """
    gathers = [Collective("all-gather", n * rows * (2 * k + 2) * 4, n) for n in mesh if n > 1]
    return Prediction(
        read=rows * vocab * itemsize / (math.prod(mesh) * machine.bandwidth),
        latency=sum(machine.latency + machine.hop * (each.group - 1) for each in gathers),
        links=sum(each.received for each in gathers) / machine.link_bandwidth,
        merge=machine.merge_cost * rows * k * sum(each.group for each in gathers),
    )


def model_table(rows: int, vocab: int, k: int, itemsize: int, machine: Machine) -> str:
    """Returns a table of the terms of `predicted` in µs, for up to 4096 devices on one or several mesh axes."""
    head = ("mesh", "read", "latency", "links", "merge", "us", "of linear")
    lines: list[tuple[str, ...]] = [head]
    one = predicted(rows, vocab, k, itemsize, (1,), machine).seconds
    for mesh in _MODEL_MESHES:
        cost = predicted(rows, vocab, k, itemsize, mesh, machine)
        values = (cost.read, cost.latency, cost.links, cost.merge, cost.seconds)
        cells = [" x ".join(map(str, mesh)), *(number(1e6 * value) if value else "0" for value in values)]
        cells.append(f"{one / (math.prod(mesh) * cost.seconds):.0%}")
        lines.append(tuple(cells))
    return "\n".join(f"{first:<13}" + "".join(f"{cell:>10}" for cell in rest) for first, *rest in lines)
