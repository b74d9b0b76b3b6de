"""A trial run of a model: every call of its modules, in order, and which of them gave maps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.model_state import parts
from torchhook.core.selection import walk
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import lazily_copied
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.trees import Address, Arguments, leaves, mapped, put, taken
from torchhook.explain.batched_arguments import Samples
from torchhook.explain.token_grid import Fold, Grid, Setting, folding

Found = TypeVar("Found")


class ModuleCall(NamedTuple):
    """One call that was seen in a trial, and how to make maps of what it gave, if it has a spatial extent."""

    path: str
    module: nn.Module
    call: int
    value: Any
    fold: Fold | None


class _Seeing(Edit):
    """Lists every call, and hands on a copy of what it gave, whose gradient is that of what comes after it alone."""

    whole = True
    path: str
    module: nn.Module

    def __init__(self, seen: list[ModuleCall], setting: Setting, grids: list[Grid]) -> None:
        super().__init__()
        self.seen = seen
        self.setting = setting
        self.grids = grids

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = copy.copy(self)
        twin.path, twin.module = site.path, module
        return twin

    def change(self, x: Any, call: int) -> Any:
        address = _main_or_none(x)
        value = None if address is None else lazily_copied(taken(x, address))
        fold = None if value is None else folding(value, self.module, self.setting._replace(grids=tuple(self.grids)))
        self.seen.append(ModuleCall(self.path, self.module, call, value, fold))
        return x if fold is None or address is None else put(x, address, value)


def trial_run(model: nn.Module, given: Arguments) -> tuple[Any, list[ModuleCall]]:
    """Run the model with a graph throughout: what it says, and all calls of its modules in the order of their ends."""
    seen, grids, samples = list[ModuleCall](), list[Grid](), Samples.of(given)
    seeing = Tap(_is_no_parametrization, _Seeing(seen, samples.setting(), grids))
    session = Session(model, [*seeing_patches(model, grids), seeing])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fast paths, which a trial with autograd does not take anyway
        session.attach()
    try:
        with torch.enable_grad():
            given = mapped(_differentiable, given)
            images = () if samples.images is None else leaves(taken(given, samples.images))
            sources = [image.grad_fn for _, image in images if image.grad_fn is not None]
            return model(*given.args, **given.kwargs), _flattened(seen, sources)
    finally:
        session.abandon()


def _flattened(seen: list[ModuleCall], sources: list[Node]) -> list[ModuleCall]:
    """The calls, with no fold where the value does not come of the images, as the tokens of a prompt do not.

    Where none shows to, as when what comes first in the model runs without autograd, they are as they were.
    """
    nodes = [None if call.fold is None else call.value.grad_fn for call in seen]
    after = _following(sources, [node for node in nodes if node is not None])
    if not after.intersection(nodes):
        return seen
    return [call if node in after else call._replace(fold=None) for call, node in zip(seen, nodes, strict=True)]


def _following(sources: list[Node], ends: list[Node]) -> set[Node]:
    """The nodes of the graph of `ends` that come after `sources`, and those themselves."""
    next_to: dict[Node, list[Node]] = {node: [] for node in ends}
    ahead = list(next_to)
    while ahead:
        node = ahead.pop()
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in next_to:
                next_to[earlier] = []
                ahead.append(earlier)
            if earlier is not None:
                next_to[earlier].append(node)
    found, ahead = set(sources), list(sources)
    while ahead:
        new = set(next_to.get(ahead.pop(), ())) - found
        found |= new
        ahead.extend(new)
    return found


def _is_no_parametrization(path: str, module: nn.Module) -> bool:
    """Whether what a module gives flows through the model, and is no weight."""
    return "parametrizations" not in path.split(".")


def tried(run: Callable[[Arguments], Found], given: Arguments) -> Found:
    """What comes of the first sample alone, or, where it cannot be had alone or fails, of all.

    A fault that is not due to that comes again, and then speaks of what the user passed.
    """
    first = Samples.of(given).first()
    if first is not None:
        with suppress(Exception):
            return run(first)
    return run(given)


def seeing_patches(model: nn.Module, grids: list[Grid]) -> list[Tap]:
    """Taps that note the grids into which convolutions cut images: those whose kernels lie side by side."""
    if not any(map(_cuts_patches, parts(model))):
        return []

    def note(event: Event) -> None:
        grids.append((event.value.shape[-2], event.value.shape[-1]))

    return [Tap(path, note) for path, module in walk(model) if _cuts_patches(module)]


def _cuts_patches(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.stride == module.kernel_size != (1, 1)


def main_tensor(value: Any, path: str) -> Address:
    """Where the tensor is that a layer is about: the only one, or the first of a tuple."""
    found = [address for address, _ in leaves(value)]
    if len(found) == 1 or (found and isinstance(value, tuple)):
        return found[0]
    kind = f"a {type(value).__name__}, {shape_of(dict(value) if isinstance(value, Mapping) else value)}"
    raise ValueError(f"layer {path!r} gives {kind}: name a module inside it that gives the one tensor which is meant")


def _main_or_none(value: Any) -> Address | None:
    try:
        return main_tensor(value, "")
    except ValueError:
        return None


def _differentiable(tensor: Tensor) -> Tensor:
    """A copy with a graph, and no leaf of it, since models may overwrite what they are given."""
    return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
