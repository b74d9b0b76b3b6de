"""Which layer of a model and which of its calls, and a run of the model in which its value and gradient are had.

Up to the layer nothing needs a graph. There what the layer gave is replaced by a twin that begins one, and from then on
autograd is on, so that the gradient of a score costs a backward to the layer and not a step further. The model is in
eval mode for the time, since batch statistics would mix the samples; nothing else of it is touched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from torchhook.core.edit import Edit
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.model_state import parts
from torchhook.core.selection import Query, select, walk
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import frozen, lazily_copied
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.torch_internals import submodules
from torchhook.core.trees import Address, Arguments, leaves, mapped, put, taken
from torchhook.explain.samples import Samples
from torchhook.explain.targets import Score, Target, first_target
from torchhook.explain.token_grid import Fold, Grid, Setting, checked, folding, is_like

Found = TypeVar("Found")

_NEAR = 3  # layers that an error names
_ROUNDED = 0.02  # what half precision makes of a sum of weights


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


def settle(
    model: nn.Module,
    given: Arguments,
    target: Target,
    layer: Query | None,
    call: int | None = None,
    fold: Fold | None = None,
    *,
    scored: bool = True,
) -> Place:
    """The layer that is meant, and which of its calls; inside `running`.

    If none is named, it is the last that the target depends on, or, unless it is to be `scored`, the last of all where
    the model says nothing that a target could be of.
    """
    if call is not None and (isinstance(call, bool) or not isinstance(call, int)):
        raise TypeError(f"call must be a whole number or None, not {call!r}")
    if layer is None:
        if call is not None or fold is not None:
            raise ValueError(f"{'fold' if call is None else 'call'} speaks of one layer: say with layer= of which")
        return _tried(
            lambda some: _last_that_matters(model, some, target if some is given else first_target(target), scored),
            given,
        )
    found = select(model, layer)
    if len({id(module) for module in found.values()}) > 1:
        some = ", ".join(map(repr, list(found)[:_NEAR]))
        raise SelectionError(f"layer must be one module, and {layer!r:.80} selects {len(found)}: {some}, …; name one")
    path, module = next(iter(found.items()))
    if call is not None and call < 0:
        calls = _tried(lambda some: _count(model, some, path), given)
        if call + calls < 0:
            raise _no_call(path, call, calls)
        call += calls
    return Place(path, module, call)


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
    taps = [*_seeing_patches(model, grids), Tap(place.path, beginning)]
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
        raise _no_call(place.path, place.call, calls)
    setting = Samples.of(given).setting()._replace(grids=tuple(grids))
    return Reached(place, calls, beginning.leaf, _unfolded, output, setting)


class _Call(NamedTuple):
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

    def __init__(self, seen: list[_Call], setting: Setting, grids: list[Grid]) -> None:
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
        self.seen.append(_Call(self.path, self.module, call, value, fold))
        return x if fold is None or address is None else put(x, address, value)


def _trial(model: nn.Module, given: Arguments) -> tuple[Any, list[_Call]]:
    """Run the model with a graph throughout: what it says, and all calls of its modules in the order of their ends."""
    seen, grids, samples = list[_Call](), list[Grid](), Samples.of(given)
    seeing = Tap(_is_no_parametrization, _Seeing(seen, samples.setting(), grids))
    session = Session(model, [*_seeing_patches(model, grids), seeing])
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


def _flattened(seen: list[_Call], sources: list[Node]) -> list[_Call]:
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


def _tried(run: Callable[[Arguments], Found], given: Arguments) -> Found:
    """What comes of the first sample alone, or, where it cannot be had alone or fails, of all.

    A fault that is not due to that comes again, and then speaks of what the user passed.
    """
    first = Samples.of(given).first()
    if first is not None:
        with suppress(Exception):
            return run(first)
    return run(given)


def _last_that_matters(model: nn.Module, given: Arguments, target: Target, scored: bool) -> Place:
    """The last call with a spatial extent on which the target depends.

    In a model that reads its class token alone it is one before the last attention: what happens to the patches after
    that, nobody sees. The parts of an attention come into question only if there is nothing else, and what the target
    could depend on only if it depends on nothing, as with a head of zeros.
    """
    output, seen = _trial(model, given)
    setting, score = Samples.of(given).setting(), None
    if scored or target is not None or _has_classes(output):
        with torch.enable_grad():
            score = Score.of(target, output, setting.samples)(output)
    calls = _candidates(seen, model, setting.size)
    possible = calls if score is None else _leading_to(score, calls)
    if possible:
        return _placed(possible[-1], seen)
    raise ValueError(
        "the model has no layer with a spatial extent that the target depends on; name one with layer=, and say with"
        " fold= how to make samples × channels × height × width of what it gives"
    )


def _leading_to(score: Tensor, calls: Sequence[_Call]) -> list[_Call]:
    """The calls on which the score depends, or, if it depends on none, those on which it could."""
    calls = [call for call in calls if call.value.requires_grad] if score.requires_grad else []
    if not calls:
        return []
    gradients = torch.autograd.grad(score, [call.value for call in calls], torch.ones_like(score), allow_unused=True)
    possible = [(call, found) for call, found in zip(calls, gradients, strict=True) if found is not None]
    for call, found in reversed(possible):
        if call.fold is not None and call.fold(found).count_nonzero():  # of tokens without a patch nothing counts
            return [call]
    return [call for call, _ in possible]


def _candidates(seen: list[_Call], model: nn.Module, size: Grid | None) -> list[_Call]:
    """Those of the calls that gave maps: not what only looks so, as heads × tokens × features of an attention do."""
    tokens, spatial, attending = set[int](), list[_Call](), set[str]()
    for call in seen:
        if call.fold is None:
            continue
        shape = call.value.shape
        if len(shape) == 3:
            tokens.add(shape[1])
        elif tokens.intersection(shape[2:]) and _are_weights(call.value):
            attending.add(call.path.rpartition(".")[0])
            continue
        elif tokens.intersection(shape[1:]) and size is not None and not is_like((shape[2], shape[3]), size):
            continue
        spatial.append(call)
    hidden = _inside_attention(model, attending)
    return [call for call in spatial if call.path not in hidden] or spatial


def _are_weights(value: Tensor) -> bool:
    """Whether these are the weights of an attention, which are in rows that sum to 1."""
    value = value.detach().float()
    return bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < _ROUNDED).all())


def _placed(call: _Call, seen: list[_Call]) -> Place:
    calls = sum(other.path == call.path for other in seen)
    return Place(call.path, call.module, call.call if calls > 1 else None)


def _flat(model: nn.Module, given: Arguments, found: Reached) -> ValueError:
    """Why there can be no maps of a layer, and of which there can."""
    path, setting = found.place.path, found.setting
    _, seen = _tried(lambda some: _trial(model, some), given)
    before = seen[: next((number for number, call in enumerate(seen) if call.path == path), len(seen))]
    near = list(dict.fromkeys(call.path for call in reversed(before or seen) if call.fold is not None))[:_NEAR]
    samples = "" if setting.samples is None else f" for {setting.samples} sample{'s' * (setting.samples != 1)}"
    others = f"name one that has, as {' or '.join(map(repr, near))}, or " if near else ""
    return ValueError(
        f"layer {path!r} has no spatial extent: it gave {shape_of(found.value)}{samples}; {others}say with fold= how to"
        " make samples × channels × height × width of that"
    )


def _seeing_patches(model: nn.Module, grids: list[Grid]) -> list[Tap]:
    """Taps that note the grids into which convolutions cut images: those whose kernels lie side by side."""
    if not any(map(_cuts_patches, parts(model))):
        return []

    def note(event: Event) -> None:
        grids.append((event.value.shape[-2], event.value.shape[-1]))

    return [Tap(path, note) for path, module in walk(model) if _cuts_patches(module)]


def _cuts_patches(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.stride == module.kernel_size != (1, 1)


def _inside_attention(model: nn.Module, known: set[str]) -> set[str]:
    """The paths of what lies inside one that is `known`, or whose class is named so: queries, keys and the like."""
    inside = set[str]()
    for path, module in walk(model):  # from above
        owner = path.rpartition(".")[0]
        if owner in inside:
            inside.add(path)
        elif path and (path in known or any(word in type(module).__name__.lower() for word in ("attention", "attn"))):
            inside.update(f"{path}.{name}" for name in submodules(module))
    return inside


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


def _count(model: nn.Module, given: Arguments, path: str) -> int:
    """How often a layer is called in a pass."""
    calls: list[int] = []
    given = mapped(Tensor.clone, given)
    with Session(model, [Tap(path, lambda event: calls.append(event.call))]):
        model(*given.args, **given.kwargs)
    return len(calls)


def _no_call(path: str, call: int | None, calls: int) -> ValueError:
    last = f"call=0 to call={calls - 1}" if calls > 1 else "call=0, or leave it out"
    return ValueError(f"call {call} of layer {path!r} does not exist, which is called {calls} times in a pass: {last}")


def _has_classes(output: Any) -> bool:
    try:
        Score.of(None, output)
    except ValueError:
        return False
    return True


def _differentiable(tensor: Tensor) -> Tensor:
    """A copy with a graph, and no leaf of it, since models may overwrite what they are given."""
    return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()


def _precise(maps: Tensor) -> Tensor:
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _unfolded(value: Tensor) -> Tensor:
    return value
