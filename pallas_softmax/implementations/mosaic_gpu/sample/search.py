"""The registers of a search for a threshold, which the files `*_ptx.py` of this folder pass to each other."""

import dataclasses

from pallas_softmax.implementations.mosaic_gpu.sample.program import Program


@dataclasses.dataclass(frozen=True)
class Target:
    """What the kept entries are to reach.

    Attributes:
      amount: register with a number of entries (b32), or with a share of the kept mass (f32).
      by_mass: which of them.
    """

    amount: str
    by_mass: bool


@dataclasses.dataclass(frozen=True)
class Kept:
    """Registers with what the thresholds have left of the row.

    Attributes:
      least: the least element that is kept (f32).
      mass: the mass that is kept (f32).
      total: the mass of the whole row (f32).
      known: predicate: whether `total` and `mass` are known, as they are after the first search.
    """

    least: str
    mass: str
    total: str
    known: str


@dataclasses.dataclass(frozen=True)
class Zone:
    """Registers with the distances between which the threshold is expected.

    Attributes:
      upper, lower: the zone has the elements with lower < distance <= upper (f32).
      everything: predicate: whether the zone is the whole row, as it is after a search that failed.
    """

    upper: str
    lower: str
    everything: str

    def has(self, code: Program, distance: str, inside: str) -> None:
        """Writes the predicate `inside`: whether an element of this distance is in the zone."""
        code += f"setp.gt.f32 {inside}, {distance}, {self.lower};"
        code += f"setp.le.and.f32 {inside}, {distance}, {self.upper}, {inside};"


@dataclasses.dataclass(frozen=True)
class Above:
    """Registers with what is above the zone.

    Attributes:
      mass: mass of the warp's elements (f32).
      count: number of the warp's elements (b32); it stays 0 in a search for a mass.
      count_of_row: number of elements in the row, of the last search for a number (b32).
    """

    mass: str
    count: str
    count_of_row: str


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Registers with which of its elements a thread takes for candidates.

    Attributes:
      listed: number of elements in the thread's list (b32).
      dropped: predicate: whether the thread has dropped its list, and takes all its elements.
    """

    listed: str
    dropped: str


@dataclasses.dataclass(frozen=True)
class Alike:
    """Registers of a thread that has dropped its list, and whose elements in the zone are all the same number.

    Attributes:
      holds: predicate: whether that is so. It never is for 0, since +0 and -0 have two keys.
      x: the number (f32).
      count: how many they are (b32).
    """

    holds: str
    x: str
    count: str


@dataclasses.dataclass(frozen=True)
class Search:
    """The registers of a search by number, and after it of one by mass.

    Attributes:
      total: mass of the warp's elements (f32).
      kept: what the thresholds have left.
      zone, above, candidates, alike: where the search looks.
      lowest_key: a key below which no kept element is: that of the last threshold (b32).
    """

    total: str
    kept: Kept
    zone: Zone
    above: Above
    candidates: Candidates
    alike: Alike
    lowest_key: str
