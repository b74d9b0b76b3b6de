"""Run a model and keep the value of one layer, with the graph from there to the output.

Before the layer, the run needs no graph. At the layer, its output is replaced by a copy that starts a graph, and
autograd is on from there, so that the gradient of a score costs a backward to the layer and no further.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.edit import Edit
from torchhook.core.errors import SilentError
from torchhook.core.model_state import parts
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import frozen, lazily_copied
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments, leaves, mapped, put, taken
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.module_calls import main_address, on_first_sample, patch_grid_taps, trial_run
from torchhook.explain.targets import Score
from torchhook.explain.token_grid import Fold, Grid, ImageLayout, checked_fold, fold_for

_SHOWN = 3  # layers that an error suggests


class LayerCall(NamedTuple):
    """One call of a layer."""

    path: str
    module: nn.Module
    call: int | None  # None if the layer must be called only once


class ReachedLayer(NamedTuple):
    """One pass through a model: the value of a layer, how to fold it into maps, and the output of the model."""

    layer: LayerCall
    calls: int
    value: Tensor  # a leaf of the output's graph, unless the model ran without one
    fold: Fold
    output: Any
    layout: ImageLayout

    @property
    def call(self) -> int:
        """The index of the call among those of the layer."""
        return self.layer.call or 0

    @property
    def maps(self) -> Tensor:
        """The value as samples × channels × height × width, detached, in at least single precision."""
        return _precise(self.fold(self.value.detach()))

    def gradient(self, score: Score) -> Tensor:
        """The gradient of each sample's score, in the shape of the maps."""
        with torch.enable_grad():
            numbers = score(self.output)
        found = None
        if numbers.requires_grad:
            (found,) = torch.autograd.grad(numbers, self.value, torch.ones_like(numbers), allow_unused=True)
        if found is None:
            raise ValueError(
                f"the target does not depend on the output of layer {self.layer.path!r}, as far as autograd can see;"
                " name a layer between the input and the target, or pass sites=None"
            )
        return _precise(self.fold(found))


def reach_layer(
    model: nn.Module,
    given: Arguments,
    layer: LayerCall,
    fold: Fold | None = None,
    *,
    graph: bool = True,
    modules: list[nn.Module] | None = None,
) -> ReachedLayer:
    """Run `model` once, with a graph from the layer on unless `graph` is False; called inside `inference`.

    `modules` are those of the model, if they are known already.
    """
    modules = parts(model) if modules is None else modules
    reached = _run(model, modules, given, layer, graph, autograd=False)
    if graph and not any(tensor.requires_grad for _, tensor in leaves(reached.output)):
        # The layer is inside a block that switched autograd off, and whose end restored "off": restore "on" instead.
        reached = _run(model, modules, given, layer, graph, autograd=True)
    layout = reached.layout
    found = fold_for(reached.value, layer.module, layout) if fold is None else checked_fold(fold, layout.samples)
    if found is None:
        raise _no_spatial_extent(model, given, reached)
    return reached._replace(fold=found)


def no_such_call(path: str, call: int | None, calls: int) -> ValueError:
    """The error for a call index that the layer does not have."""
    remedy = f"pass call=0 to call={calls - 1}" if calls > 1 else "pass call=0, or leave it out"
    return ValueError(f"layer {path!r} has no call {call}: it is called {calls} times in a pass; {remedy}")


def never_ran(path: str, session: Session) -> SilentError:
    """The error for a layer that the model has, but did not call while `session` watched it."""
    reason = session.silent.get(Site(session.aliases.get(path, path)), "it was not called")
    return SilentError(
        f"layer {path!r} has no output to explain: {reason}; name a layer that runs for this x, or leave sites= out"
    )


class _GraphStart(Edit):
    """Replaces the output of one call of a layer by a copy that starts a graph."""

    whole = True

    def __init__(self, layer: LayerCall, graph: bool) -> None:
        super().__init__()
        self.layer = layer
        self.graph = graph
        self.calls = 0
        self.leaf: Tensor | None = None

    def change(self, x: Any, call: int) -> Any:
        self.calls = call + 1
        if call != (self.layer.call or 0):
            return x
        address = main_address(x, self.layer.path)
        self.leaf = frozen(taken(x, address))
        if not self.graph or not self.leaf.is_floating_point():
            return x
        self.leaf.requires_grad_()
        torch.set_grad_enabled(True)  # for the rest of the pass
        return put(x, address, lazily_copied(self.leaf))  # a copy, since the next operation may work in place

    def __repr__(self) -> str:
        return "edit of explain"


def _run(
    model: nn.Module, modules: list[nn.Module], given: Arguments, layer: LayerCall, graph: bool, *, autograd: bool
) -> ReachedLayer:
    """Run the model once and keep the value of the layer, not folded yet."""
    start, grids = _GraphStart(layer, graph), list[Grid]()
    taps = [*patch_grid_taps(model, modules, grids), Tap(layer.path, start)]
    given = mapped(Tensor.clone, given)  # since models may overwrite their inputs
    with torch.set_grad_enabled(autograd), Session(model, taps, on_silent="ignore") as session:
        output = model(*given.args, **given.kwargs)
    if not start.calls:
        raise never_ran(layer.path, session)
    if layer.call is None and start.calls > 1:
        raise ValueError(
            f"layer {layer.path!r} is called {start.calls} times in a pass, each time with a different value;"
            f" say which one you mean: call=0 to call={start.calls - 1}"
        )
    if start.leaf is None:
        raise no_such_call(layer.path, layer.call, start.calls)
    layout = BatchedArguments.of(given).layout()._replace(grids=tuple(grids))
    return ReachedLayer(layer, start.calls, start.leaf, _unfolded, output, layout)


def _no_spatial_extent(model: nn.Module, given: Arguments, reached: ReachedLayer) -> ValueError:
    """The error for a layer without maps, which names the nearest layers that have them."""
    path, samples = reached.layer.path, reached.layout.samples
    _, calls = on_first_sample(lambda some: trial_run(model, some), given)
    before = calls[: next((number for number, call in enumerate(calls) if call.path == path), len(calls))]
    near = list(dict.fromkeys(call.path for call in reversed(before or calls) if call.fold is not None))[:_SHOWN]
    count = "" if samples is None else f" for {samples} sample{'s' * (samples != 1)}"
    others = f"name one that has, such as {' or '.join(map(repr, near))}, or " if near else ""
    return ValueError(
        f"layer {path!r} has no spatial extent: its output is {shape_of(reached.value)}{count}; {others}pass a function"
        " fold= that turns it into samples × channels × height × width"
    )


def _precise(maps: Tensor) -> Tensor:
    return maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps


def _unfolded(value: Tensor) -> Tensor:
    return value
