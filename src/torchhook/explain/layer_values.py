"""A run of a model in which the value of one layer and its gradient are had.

Up to the layer nothing needs a graph. There what the layer gave is replaced by a twin that begins one, and from then on
autograd is on, so that the gradient of a score costs a backward to the layer and not a step further. The model is in
eval mode for the time, since batch statistics would mix the samples; nothing else of it is touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.edit import Edit
from torchhook.core.session import Session
from torchhook.core.snapshot import frozen, lazily_copied
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments, leaves, mapped, put, taken
from torchhook.explain.batched_arguments import Samples
from torchhook.explain.module_calls import main_tensor, seeing_patches, trial_run, tried
from torchhook.explain.targets import Score
from torchhook.explain.token_grid import Fold, Grid, Setting, checked, folding

_NEAR = 3  # layers that an error names


class Place(NamedTuple):
    """One call of a layer."""

    path: str
    module: nn.Module
    call: int | None  # None where it must be the only one


class Reached(NamedTuple):
    """A pass in which a layer was reached: what it gave there, how to make maps of it, what the model said."""

    place: Place
    calls: int
    value: Tensor  # a leaf of the graph of the output, unless it was run without
    fold: Fold
    output: Any
    setting: Setting

    @property
    def call(self) -> int:
        """Which of the calls of the layer."""
        return self.place.call or 0

    @property
    def maps(self) -> Tensor:
        """What the layer gave, samples × channels × height × width, detached, at least in single precision."""
        return _precise(self.fold(self.value.detach()))

    def gradient(self, score: Score) -> Tensor:
        """The gradient of the score of each sample, in the shape of the maps."""
        with torch.enable_grad():
            numbers = score(self.output)
        found = None
        if numbers.requires_grad:
            (found,) = torch.autograd.grad(numbers, self.value, torch.ones_like(numbers), allow_unused=True)
        if found is None:
            raise ValueError(
                f"the target does not depend on what layer {self.place.path!r} gave, at least in no way that autograd"
                " sees; name a layer between the input and what the target is made of, or pass layer=None"
            )
        return _precise(self.fold(found))


def reach(model: nn.Module, given: Arguments, place: Place, fold: Fold | None = None, *, graph: bool = True) -> Reached:
    """Run `model` once, with a graph from the layer on unless that is not wanted; inside `running`."""
    found = _run(model, given, place, graph, autograd=False)
    if graph and not any(tensor.requires_grad for _, tensor in leaves(found.output)):
        # The layer lies in a part that runs without autograd, whose end switched it off again: now it ends with it on.
        found = _run(model, given, place, graph, autograd=True)
    setting = found.setting
    how = folding(found.value, place.module, setting) if fold is None else checked(fold, setting.samples)
    if how is None:
        raise _flat(model, given, found)
    return found._replace(fold=how)


class _Beginning(Edit):
    """Puts a twin that begins a graph in the place of what the layer gives at one call."""

    whole = True

    def __init__(self, place: Place, graph: bool) -> None:
        super().__init__()
        self.place = place
        self.graph = graph
        self.calls = 0
        self.leaf: Tensor | None = None

    def change(self, x: Any, call: int) -> Any:
        self.calls = call + 1
        if call != (self.place.call or 0):
            return x
        address = main_tensor(x, self.place.path)
        self.leaf = frozen(taken(x, address))
        if not self.graph or not self.leaf.is_floating_point():
            return x
        self.leaf.requires_grad_()
        torch.set_grad_enabled(True)  # for the rest of the pass
        return put(x, address, lazily_copied(self.leaf))  # a copy, for what comes next may work in place

    def __repr__(self) -> str:
        return "edit of explain"


def _run(model: nn.Module, given: Arguments, place: Place, graph: bool, *, autograd: bool) -> Reached:
    beginning, grids = _Beginning(place, graph), list[Grid]()
    taps = [*seeing_patches(model, grids), Tap(place.path, beginning)]
    given = mapped(Tensor.clone, given)  # for models may overwrite what they are given
    with torch.set_grad_enabled(autograd), Session(model, taps):
        output = model(*given.args, **given.kwargs)
    calls = beginning.calls
    if place.call is None and calls > 1:
        raise ValueError(
            f"layer {place.path!r} is called {calls} times in a pass, each time with a value of its own;"
            f" say which is meant: call=0 to call={calls - 1}"
        )
    if beginning.leaf is None:
        raise no_call(place.path, place.call, calls)
    setting = Samples.of(given).setting()._replace(grids=tuple(grids))
    return Reached(place, calls, beginning.leaf, _unfolded, output, setting)


def _flat(model: nn.Module, given: Arguments, found: Reached) -> ValueError:
    """Why there can be no maps of a layer, and of which there can."""
    path, setting = found.place.path, found.setting
    _, seen = tried(lambda some: trial_run(model, some), given)
    before = seen[: next((number for number, call in enumerate(seen) if call.path == path), len(seen))]
    near = list(dict.fromkeys(call.path for call in reversed(before or seen) if call.fold is not None))[:_NEAR]
    samples = "" if setting.samples is None else f" for {setting.samples} sample{'s' * (setting.samples != 1)}"
    others = f"name one that has, as {' or '.join(map(repr, near))}, or " if near else ""
    return ValueError(
        f"layer {path!r} has no spatial extent: it gave {shape_of(found.value)}{samples}; {others}say with fold= how to"
        " make samples × channels × height × width of that"
    )


def no_call(path: str, call: int | None, calls: int) -> ValueError:
    """The error for a call that the layer does not have."""
    last = f"call=0 to call={calls - 1}" if calls > 1 else "call=0, or leave it out"
    return ValueError(f"call {call} of layer {path!r} does not exist, which is called {calls} times in a pass: {last}")


def _precise(maps: Tensor) -> Tensor:
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _unfolded(value: Tensor) -> Tensor:
    return value
