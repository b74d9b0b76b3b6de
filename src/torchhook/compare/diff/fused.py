"""Puts what one model computes at once, such as queries, keys and values, into the terms of one that does not.

A run gets calls that were never made: the parts of a module's output, each as if a module of its own had returned it
(``qkv[0]``), or several outputs as one (``q+k+v``). They take the place of the calls that they stand for.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.captures.agreement.rounding import Absent, gap, shapes_of
from torchhook.compare.diff.match import Counterparts
from torchhook.compare.recordings.sketch import Sketch
from torchhook.core.site import Site

Change = Callable[[Tensor, int], Tensor | None]
"""Takes a tensor and the dimension of its features; None if it cannot be told what it would be."""

_TRANSPOSED = ("Conv1D",)  # classes whose weights have inputs × outputs
_PARTS, _HEADS = "parts", "heads"


def split(
    run: RecordedRun, pair: Counterparts, whole: str, parts: Sequence[str], others: RecordedRun
) -> dict[str, str]:
    """Replace the calls of `whole` by those of its parts; returns what stands for each of `parts` of the other run."""
    sizes = _sizes(others, parts, run, whole)
    made = {path: f"{whole}[{number}]" for number, path in enumerate(parts)}
    run.stand_ins |= dict.fromkeys(made.values(), (whole,))
    for path, places in reversed(
        list(zip(parts, _places(sizes, pair.heads), strict=True))
    ):  # each goes before the last
        _add(run, made[path], whole, lambda tensor, dim, places=places: _taken(tensor, places, dim))  # type: ignore[misc]  # mypy does not infer the defaults of a lambda
    _remove(run, [whole])
    return made


def join(run: RecordedRun, pair: Counterparts, parts: Sequence[str], whole: str, others: RecordedRun) -> str:
    """Replace the calls of `parts` by one that returns what `whole` of the other run does; returns its name."""
    sizes = _sizes(run, parts, others, whole)
    places = _places(sizes, pair.heads)
    name = "+".join(parts)
    run.stand_ins[name] = tuple(parts)
    calls = {location.call for location in run.observations if location.site == Site(parts[0])}
    for call in calls:
        found = [run.observations.get(Location(Site(path), call)) for path in parts]
        last = found[-1]
        given = run.observations.get(Location(Site(parts[0], "input"), call))
        if last is None or any(one is None or len(one.tensors) != 1 for one in found):
            continue
        tensor = _joined([cast("Observation", one).tensors[0] for one in found], places)
        if tensor is not None and given is not None:
            facts = replace(last.module, parameters={}, sizes={_PARTS: tuple(sizes), _HEADS: (pair.heads or 1,)})
            _insert(run, last.location, name, facts, given, replace(last, tensors=[tensor], moved=()))
    _remove(run, parts)
    return name


def reorder(run: RecordedRun, path: str, size: int, interleave: bool) -> None:
    """Put the features of each head of so many into another order: from halves to interleaved ones, or back."""
    width = _width(run, path)
    if width % size or size % 2:
        raise ValueError(f"match: {path!r} returns {width} features, which are not heads of {size}, an even number")
    shape = (-1, 2, size // 2) if interleave else (-1, size // 2, 2)
    order = torch.arange(width).view(shape).transpose(1, 2).flatten()

    def changed(tensor: Tensor, dim: int) -> Tensor | None:
        return None if isinstance(tensor, Absent) else tensor.index_select(dim, order.to(tensor.device))

    _add(run, path, path, changed)


def oriented(run: RecordedRun, path: str) -> None:
    """Turn the weight of a layer around, and its gradient; a sketch, which cannot be turned, is left out."""
    name = f"{path}.weight"
    if name in run.parameters:
        run.parameters = _overlaid(run, {name: _turned(run.parameters[name])})
    found = run.observations.pop(location := Location(Site(name, "param_grad"), 0), None)
    turned = [] if found is None else [_turned(tensor) for tensor in found.tensors]
    if found is not None and all(tensor is not None for tensor in turned):
        run.observations[location] = replace(found, tensors=cast("list[Tensor]", turned))


def is_turned(facts: ModuleFacts) -> bool:
    """Whether a layer has its weight the other way around than nn.Linear."""
    return facts.kind in _TRANSPOSED


def real_module(run: RecordedRun, path: str, tensors: tuple[Tensor, Tensor] | None) -> str:
    """The module that a call stands for; of several that are joined, the first one whose part is at fault."""
    real = run.stand_ins.get(path, (path,))
    if len(real) == 1 or tensors is None:
        return real[0]
    sizes = run.modules[path].sizes
    places = _places(sizes[_PARTS], sizes[_HEADS][0])
    parts = [[_taken(tensor, place, tensor.dim() - 1) for tensor in tensors] for place in places]
    errors = [gap(mine, theirs).error for mine, theirs in parts if mine is not None and theirs is not None]
    return next(name for name, error in zip(real, errors, strict=True) if error > 0.5 * max(errors))


def copied(run: RecordedRun) -> RecordedRun:
    """The same run, to be changed."""
    twin = copy.copy(run)
    twin.observations, twin.modules, twin.stand_ins = dict(run.observations), dict(run.modules), {}
    return twin


def _add(run: RecordedRun, path: str, source: str, change: Change) -> None:
    """Add calls of `path` that return what those of `source` return, changed; the same path replaces them."""
    facts = run.modules[source]
    own = {name: shape for name, shape in facts.parameters.items() if "." not in name}
    prefix = f"{source}."
    news = {}
    for name in own:
        whole = run.parameters.get(prefix + name)
        turned = is_turned(facts) and len(own[name]) > 1
        found = None if whole is None else change(whole, 1 if turned else 0)
        if found is not None:
            news[f"{path}.{name}"] = found
    run.parameters = _overlaid(run, news)
    shapes = {name.removeprefix(f"{path}."): tuple(tensor.shape) for name, tensor in news.items()}
    run.modules[path] = replace(facts, is_leaf=True, parameters=shapes)
    for location, observed in list(run.observations.items()):
        if location.site == Site(source):
            given = run.observations.get(Location(Site(source, "input"), location.call))
            tensors = [change(tensor, tensor.dim() - 1) for tensor in observed.tensors]
            if given is not None and all(tensor is not None for tensor in tensors):
                changed = replace(observed, tensors=cast("list[Tensor]", tensors))
                _insert(run, location, path, run.modules[path], given, changed)
        elif location.site == Site(source, "grad_output"):
            (tensor,) = (change(tensor, tensor.dim() - 1) for tensor in observed.tensors)
            if tensor is not None:
                _insert_gradient(run, location, Site(path, "grad_output"), replace(observed, tensors=[tensor]))


def _insert(
    run: RecordedRun, after: Location, path: str, facts: ModuleFacts, given: Observation, output: Observation
) -> None:
    """Add a call of `path` after a location: its input and its output."""
    run.modules.setdefault(path, facts)
    input_at, output_at = Location(Site(path, "input"), after.call), Location(Site(path), after.call)
    new = {
        input_at: replace(given, location=input_at, module=facts),
        output_at: replace(output, location=output_at, module=facts),
    }
    _place(run, after, new)


def _insert_gradient(run: RecordedRun, after: Location, site: Site, gradient: Observation) -> None:
    location = after._replace(site=site)
    _place(run, after, {location: replace(gradient, location=location)})


def _place(run: RecordedRun, after: Location, new: dict[Location, Observation]) -> None:
    """Put observations behind the one at a location; what is there already is replaced where it is."""
    if new.keys() <= run.observations.keys():
        run.observations.update(new)
        return
    ordered: dict[Location, Observation] = {}
    for location, observed in run.observations.items():
        ordered[location] = observed
        if location == after:
            ordered |= new
    run.observations = ordered


def _remove(run: RecordedRun, paths: Sequence[str]) -> None:
    gone = set(paths)
    run.observations = {at: observed for at, observed in run.observations.items() if at.site.path not in gone}


def _places(sizes: Sequence[int], heads: int | None) -> list[list[slice]]:
    """Where the features of each part are in the whole.

    >>> _places([4, 2], heads=2)
    [[slice(0, 2, None), slice(3, 5, None)], [slice(2, 3, None), slice(5, 6, None)]]
    """
    if heads and any(size % heads for size in sizes):
        raise ValueError(f"match: {', '.join(map(str, sizes))} features cannot be split into {heads} heads")
    count = heads or 1
    found: list[list[slice]] = []
    begin = 0
    for size in sizes:
        each = size // count
        found.append([slice(start, start + each) for start in (begin + n * sum(sizes) // count for n in range(count))])
        begin += each
    return found


def _taken(tensor: Tensor, places: Sequence[slice], dim: int) -> Tensor | None:
    """Some of the features of a tensor."""
    if isinstance(tensor, Sketch):
        return cast("Tensor | None", tensor.part(places) if tensor.dim_of_features == dim else None)
    return torch.cat([tensor.narrow(dim, place.start, place.stop - place.start) for place in places], dim)


def _joined(tensors: Sequence[Tensor], places: Sequence[Sequence[slice]]) -> Tensor | None:
    """All features of some outputs, each at its places."""
    if any(isinstance(tensor, Absent) for tensor in tensors):
        return None
    whole = torch.cat(list(tensors), -1)
    order = torch.cat([torch.arange(place.start, place.stop) for part in places for place in part])
    return torch.empty_like(whole).index_copy_(-1, order.to(whole.device), whole)


def _overlaid(run: RecordedRun, news: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
    """The parameters of a run, some of them others, or unknown (None); those on disk are not read for this."""
    return cast("Mapping[str, Tensor]", ChainMap(cast("dict[str, Any]", news), cast("dict[str, Any]", run.parameters)))


def _turned(tensor: Tensor) -> Tensor | None:
    if tensor.dim() != 2:
        return tensor
    return None if isinstance(tensor, Absent) else tensor.T


def _sizes(run: RecordedRun, parts: Sequence[str], others: RecordedRun, whole: str) -> list[int]:
    """How many features each of `parts` returns; raises unless these are together those of `whole`."""
    sizes, width = [_width(run, path) for path in parts], _width(others, whole)
    if width != sum(sizes):
        raise ValueError(f"match: {whole!r} returns {width} features, and {', '.join(parts)} return {sum(sizes)}")
    return sizes


def _width(run: RecordedRun, path: str) -> int:
    """How many features the first output of a module has."""
    for location, observed in run.observations.items():
        if location.site == Site(path):
            for shape in shapes_of(observed.tensors):
                return shape[-1] if shape else 0
    raise ValueError(f"match: {path!r} was not called, so its output is not known")
