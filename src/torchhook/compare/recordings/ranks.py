"""The recordings of several ranks as one run, as if one process had computed it.

Parameters say themselves which part of a tensor they are, if they are DTensors. Other tensors are joined so that they
get the shape that they have in the run to compare with; without one, those that are equal on all ranks are copies, and
others are parts of the features. Modules that only some ranks have, such as the stages of a pipeline, are put together.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.captures.agreement.rounding import are_alike
from torchhook.compare.recordings.recording import RecordedRank, StoredParameters, Turn
from torchhook.compare.recordings.sketch import GROUP, Sketch

Shape = tuple[int, ...]
Expected = Callable[[Location], "Sequence[Shape | None]"]
"""From a location to the shapes of its tensors in the run to compare with; none if it has no counterpart there."""


def joined(
    ranks: Sequence[RecordedRank], turn: Turn, like: RecordedRun | None, expected: Expected, after: bool = False
) -> RecordedRun:
    """What all ranks had in one pass, together: those with the same modules joined, then all stages in their order.

    The parameters are those before the step, or `after` it.
    """
    stages: dict[frozenset[str], list[RecordedRun]] = {}
    for rank in ranks:
        if turn in rank.turns:
            stages.setdefault(frozenset(rank.about.modules), []).append(rank.run(turn, after))
    return _in_sequence([_side_by_side(runs, like, expected) for runs in stages.values()])


def _side_by_side(runs: Sequence[RecordedRun], like: RecordedRun | None, expected: Expected) -> RecordedRun:
    """What ranks with the same modules had."""
    if len(runs) == 1:
        return runs[0]
    whole = RecordedRun()
    whole.modules, whole.is_sketched = runs[0].modules, runs[0].is_sketched
    whole.coarsest = max(run.coarsest for run in runs)
    for location in dict.fromkeys(at for run in runs for at in run.observations):
        parts = [run.observations[location] for run in runs if location in run.observations]
        found = _joined(parts, expected(location))
        if found is not None:
            whole.observations[location] = found
    whole.parameters = JoinedParameters([cast("StoredParameters", run.parameters) for run in runs], like)
    return whole


def _in_sequence(stages: Sequence[RecordedRun]) -> RecordedRun:
    """What the stages of a pipeline had: of what they share, the first input and the last output."""
    if len(stages) == 1:
        return stages[0]
    whole = RecordedRun()
    whole.is_sketched = stages[0].is_sketched
    whole.coarsest = max(stage.coarsest for stage in stages)
    whole.parameters = ChainMap(*(cast("dict[str, Tensor]", stage.parameters) for stage in stages))
    for stage in stages:
        whole.modules = {**stage.modules, **whole.modules}
        for location, observed in stage.observations.items():
            if location.site.port == "output":
                whole.observations.pop(location, None)  # its place is behind what came since
            whole.observations.setdefault(location, observed)
    return whole


def _joined(parts: Sequence[Observation], shapes: Sequence[Shape | None]) -> Observation | None:
    """The tensors of several ranks at one location, together; None if they cannot be told to fit."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({len(part.tensors) for part in parts}) > 1:
        return None
    tensors = []
    for number in range(len(first.tensors)):
        target = shapes[number] if number < len(shapes) else None
        one = together([part.tensors[number] for part in parts], target)
        if one is None:
            return None
        tensors.append(one)
    moved = [max(by) for by in zip(*(part.moved for part in parts), strict=False)]
    return replace(first, tensors=tensors, moved=moved)


def together(parts: Sequence[Tensor], target: Shape | None) -> Tensor | None:
    """The parts of several ranks as one tensor of shape `target`, if that is known; None if they do not fit.

    >>> together([torch.zeros(2, 3), torch.ones(2, 3)], (2, 6))
    tensor([[0., 0., 0., 1., 1., 1.],
            [0., 0., 0., 1., 1., 1.]])
    """
    shapes = [tuple(part.shape) for part in parts]
    if target is not None and all(are_alike(shape, target) for shape in shapes):
        return parts[0]
    if target is not None and len(shapes[0]) == 2 < len(target):  # all samples and positions are in one dimension
        target = math.prod(target[:-1]), target[-1]
    if target is None:
        if _are_equal(parts):
            return parts[0]
        target = (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if shapes[0] else ()
    for dim in range(len(target)):
        fits = all(shape[:dim] + shape[dim + 1 :] == target[:dim] + target[dim + 1 :] for shape in shapes)
        if fits and sum(shape[dim] for shape in shapes) == target[dim]:
            return concatenated(parts, dim)
    return None


def concatenated(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The parts side by side; sketches only along their features, and if groups of them stay whole."""
    if not isinstance(parts[0], Sketch):
        return torch.cat(list(parts), dim)
    sketches = cast("Sequence[Sketch]", parts)
    first = sketches[0]
    if first.dim_of_features != dim or any(part.shape[dim] % GROUP for part in sketches):
        return None
    shape = [sum(part.shape[at] for part in sketches) if at == dim else size for at, size in enumerate(first.shape)]
    sums = torch.cat([part.sums for part in sketches], 1)
    return cast("Tensor", Sketch(shape, first.dtype, dim, sums, *first.blank()))


class JoinedParameters(Mapping[str, Tensor]):
    """The parameters of several ranks, each joined when it is looked up."""

    def __init__(self, ranks: Sequence[StoredParameters], like: RecordedRun | None) -> None:
        self._ranks = ranks
        self._like = like  # has the shapes of parameters that do not know where they belong
        self._names = dict.fromkeys(name for rank in ranks for name in rank)

    def __getitem__(self, name: str) -> Tensor:
        having = [rank for rank in self._ranks if name in rank]
        parts = [rank[name] for rank in having]
        shards = [rank.stored[name].shards for rank in having]
        if any(shards):
            found = _by_shards(parts, shards)
        else:  # plain tensors: without a shape to compare with, only copies can be told
            target = self._target(name)
            found = together(parts, target) if target or _are_equal(parts) else None
        if found is None:
            raise KeyError(name)
        return found

    def _target(self, name: str) -> Shape | None:
        owner, _, own = name.rpartition(".")
        facts = None if self._like is None else self._like.modules.get(owner)
        return None if facts is None else facts.parameters.get(own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _by_shards(parts: Sequence[Tensor], shards: Sequence[tuple[tuple[int, int, int], ...]]) -> Tensor | None:
    """Parts that know where they belong, as one tensor: joined along the last of their meshes first."""
    found = dict(reversed(list(zip(shards, parts, strict=True))))  # of copies, the first
    while any(found):
        groups: dict[tuple[tuple[int, int, int], ...], dict[int, tuple[int, Tensor]]] = {}
        for place, part in found.items():
            dim, number, _ = place[-1]
            groups.setdefault(place[:-1], {})[number] = dim, part
        found = {}
        for place, held in groups.items():
            dim = next(iter(held.values()))[0]
            one = concatenated([held[number][1] for number in sorted(held)], dim)
            if one is None:
                return None
            found[place] = one
    return found[()]


def _are_equal(parts: Sequence[Tensor]) -> bool:
    if isinstance(parts[0], Sketch):
        return all(cast("Sketch", part).sums.equal(parts[0].sums) for part in parts)
    return all(part.equal(parts[0]) for part in parts)
