"""A trial run of a model: which modules are called, in which order, and which of them return maps."""

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
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.token_grid import Fold, Grid, ImageLayout, fold_for

Result = TypeVar("Result")


class ModuleCall(NamedTuple):
    """One call of a module in a trial run, and how to fold its output into maps; None if it has no spatial extent."""

    path: str
    module: nn.Module
    call: int
    value: Any
    fold: Fold | None


def trial_run(model: nn.Module, given: Arguments) -> tuple[Any, list[ModuleCall]]:
    """Run the model with autograd on throughout: its output, and all module calls in the order in which they end."""
    calls, grids, batched = list[ModuleCall](), list[Grid](), BatchedArguments.of(given)
    recorder = Tap(_is_not_parametrization, _CallRecorder(calls, batched.layout(), grids))
    session = Session(model, [*patch_grid_taps(model, parts(model), grids), recorder])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fast paths, which a run with autograd does not take anyway
        session.open()
    try:
        with torch.enable_grad():
            given = mapped(_differentiable, given)
            images = () if batched.images is None else leaves(taken(given, batched.images))
            sources = [image.grad_fn for _, image in images if image.grad_fn is not None]
            return model(*given.args, **given.kwargs), _only_from_images(calls, sources)
    finally:
        session.abandon()


def on_first_sample(run: Callable[[Arguments], Result], given: Arguments) -> Result:
    """`run` on the first sample alone, or on the whole batch if it cannot be split or the first sample fails.

    An error that has nothing to do with the split is raised again by the whole batch, and then describes what the user
    passed.
    """
    first = BatchedArguments.of(given).first()
    if first is not None:
        with suppress(Exception):
            return run(first)
    return run(given)


def patch_grid_taps(model: nn.Module, modules: list[nn.Module], grids: list[Grid]) -> list[Tap]:
    """Taps that append to `grids` the grid of each of the `modules` that cuts an image into patches."""
    if not any(map(_cuts_patches, modules)):
        return []

    def note(event: Event) -> None:
        grids.append((event.value.shape[-2], event.value.shape[-1]))

    return [Tap(path, note) for path, module in walk(model) if _cuts_patches(module)]


def main_address(value: Any, path: str) -> Address:
    """The address of the main tensor in a layer's output: the only one, or the first of a tuple."""
    found = [address for address, _ in leaves(value)]
    if len(found) == 1 or (found and isinstance(value, tuple)):
        return found[0]
    kind = f"a {type(value).__name__}, {shape_of(dict(value) if isinstance(value, Mapping) else value)}"
    raise ValueError(f"layer {path!r} returns {kind}: name a module inside it that returns a single tensor")


class _CallRecorder(Edit):
    """Records every call, and passes on a copy of its output whose gradient is that of the later operations alone."""

    whole = True
    path: str
    module: nn.Module

    def __init__(self, calls: list[ModuleCall], layout: ImageLayout, grids: list[Grid]) -> None:
        super().__init__()
        self.calls = calls
        self.layout = layout
        self.grids = grids

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = copy.copy(self)
        twin.path, twin.module = site.path, module
        return twin

    def change(self, x: Any, call: int) -> Any:
        address = _main_address_or_none(x)
        value = None if address is None else lazily_copied(taken(x, address))
        fold = None if value is None else fold_for(value, self.module, self.layout._replace(grids=tuple(self.grids)))
        self.calls.append(ModuleCall(self.path, self.module, call, value, fold))
        return x if fold is None or address is None else put(x, address, value)


def _only_from_images(calls: list[ModuleCall], sources: list[Node]) -> list[ModuleCall]:
    """The calls, without a fold where the value does not depend on the images, such as the tokens of a prompt.

    If no value appears to depend on them, because the first layers run without autograd, the calls stay as they are.
    """
    nodes = [None if call.fold is None else call.value.grad_fn for call in calls]
    after = _nodes_after(sources, [node for node in nodes if node is not None])
    if not after.intersection(nodes):
        return calls
    return [call if node in after else call._replace(fold=None) for call, node in zip(calls, nodes, strict=True)]


def _nodes_after(sources: list[Node], ends: list[Node]) -> set[Node]:
    """The nodes in the graph of `ends` that depend on `sources`, including `sources`."""
    users: dict[Node, list[Node]] = {node: [] for node in ends}
    ahead = list(users)
    while ahead:
        node = ahead.pop()
        for earlier, _ in node.next_functions:
            if earlier is not None and earlier not in users:
                users[earlier] = []
                ahead.append(earlier)
            if earlier is not None:
                users[earlier].append(node)
    found, ahead = set(sources), list(sources)
    while ahead:
        new = set(users.get(ahead.pop(), ())) - found
        found |= new
        ahead.extend(new)
    return found


def _is_not_parametrization(path: str, module: nn.Module) -> bool:
    """Whether a module's output flows through the model; a parametrization returns a weight."""
    return "parametrizations" not in path.split(".")


def _cuts_patches(module: nn.Module) -> bool:
    """Whether it is a convolution whose kernels do not overlap."""
    return isinstance(module, nn.Conv2d) and module.stride == module.kernel_size != (1, 1)


def _main_address_or_none(value: Any) -> Address | None:
    try:
        return main_address(value, "")
    except ValueError:
        return None


def _differentiable(tensor: Tensor) -> Tensor:
    """A copy that has a graph and is not a leaf of it, since models may overwrite their inputs."""
    return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
