"""What rules read of a training on several ranks: by step, what each of them saw, and where their copies part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from torchhook.stats.reading import Place

TABLE = ("mean", "std", "min", "max", "zero_fraction", "nonfinite")
"""What is known of each rank at each place; all else is known of all ranks together. -Inf, of masks, is not counted."""


LOST = "lost"
"""The state of a rank whose connection ended before it said so."""


class Member(NamedTuple):
    """A rank: where it runs, its stage, the first rank that works on the same samples, and the last step it sent.

    The rest is known once it has ended: after how many steps, how, when by its own clock, with what error, and whether
    ranks may have different numbers of steps on purpose.
    """

    host: str = ""
    stage: int = 0
    lead: int = 0
    seen: int = -1
    steps: int | None = None
    state: str = ""
    ended: float = 0.0
    error: str = ""
    apart: bool = False


class Split(NamedTuple):
    """A parameter that does not have the same value on all ranks.

    Each of `values` has the value, the first rank that has it, and the number of ranks that do.
    """

    path: str
    port: str
    part: str
    values: tuple[tuple[float, int, int], ...]


@dataclass(frozen=True)
class RankStep:
    """One measured step, by rank. `tables` has the numbers of each rank at each of `places`, in the order of TABLE."""

    step: int
    world: int
    members: Mapping[int, Member] = field(default_factory=dict)
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    places: Sequence[Place] = ()
    tables: Mapping[int, Tensor] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()
    checked: frozenset[str] = frozenset()  # what was compared by checksums
    parameters: int = 0  # that were compared
    averages: bool = False  # whether gradients are averaged over the ranks, so that these should be copies
    split: bool = False  # whether the script says that it splits parameters itself, so that not all are copies

    @property
    def is_by_hand(self) -> bool:
        """Whether some parameters differ from the first, but not all: the script itself has split the model."""
        apart = {split.path for split in self.splits if split.port == "param"}
        return 0 < len(apart) < self.parameters

    @property
    def said(self) -> str:
        """How many ranks there are, for people.

        >>> RankStep(0, 8, {0: Member("a"), 1: Member("a")}).said
        '2 of 8 ranks on 1 host'
        """
        hosts = len({member.host for member in self.members.values()})
        of = f"{len(self.members)} of {self.world}" if len(self.members) < self.world else str(self.world)
        return f"{of} ranks on {hosts} host{'' if hosts == 1 else 's'}"
