"""What was seen of the loop around a training: what the script does between two steps, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Feeding:
    """How the script takes batches from a loader while it trains."""

    batches: int = 0  # of an epoch; 0 if unknown
    iterators: int = 0  # that were made
    taken: int = 0  # batches
    firsts: int = 0  # of iterators that gave their first batch only, which was always the same
    workers: int = 0
    repeated: int = 0  # groups of equal batches in a row, one from each worker
    groups: int = 0  # that were looked at
    used_up: int = 0  # times that an iterator was asked for more after its end


@dataclass(frozen=True)
class Loop:
    """What the script does between two steps. Only the first steps and the measured ones were looked at."""

    looked: int = 0  # steps whose backwards were looked at
    unzeroed: int = 0  # those of them without a backward that began with gradients of zero
    idle: int = 0  # those of them in which no parameter of the optimizer had a gradient
    elsewhere: frozenset[str] = frozenset()  # parameters that other optimizers have
    backwards: Mapping[int, int] = field(default_factory=dict)  # the number of steps, by their number of backwards
    forwards: Mapping[int, int] = field(default_factory=dict)  # … by their number of forwards with gradients
    fed: Mapping[int, int] = field(default_factory=dict)  # … by the number of batches they took from loaders
    undivided: int = 0  # backwards of a mean that nothing divides
    total: int = 0  # backwards that were looked at
    schedules: tuple[str, ...] = ()  # classes of the schedulers that were made for the optimizer
    scheduled: bool = False  # whether one of them was stepped
    hasty: bool = False  # whether one was stepped before the optimizer
    switches: tuple[str, ...] = ()  # paths of dropouts and batch norms
    trained: int = 0  # backwards after a forward whose mode is known
    trained_in_eval: int = 0  # those of them after a forward with everything in eval mode
    evaluated_in_eval: int = 0  # forwards in eval mode
    evaluated_in_train: int = 0  # forwards in train mode without gradients, of several in a row
    rivals: int = 0  # steps by which others have trained on losses of their own in between, as in a GAN
    feedings: tuple[Feeding, ...] = ()
    steps: int = 0  # of the optimizer, all in all
    has_ended: bool = False  # whether the script has come to its own end
