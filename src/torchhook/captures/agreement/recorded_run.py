"""One run of a model with all that flows written down, and everything as before afterwards.

What a run does to the model (buffers of batch norms) and to the random number generators is undone, so that each run
begins where the first one did. No gradient is left in a parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, fitted, on_device
from torchhook.core.call_wrapper import compiled_among
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.model_state import state_kept
from torchhook.core.selection import Selector, plain, walk
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Tap
from torchhook.core.trees import Address, leaves, mapped

ToNumber = Callable[[Any, Any], Tensor]
"""A loss of the output and the target."""


class Place(NamedTuple):
    """A site at one of its calls; of a gradient, that of the `leaf`-th tensor there."""

    site: Site
    call: int
    leaf: int = 0


@dataclass(eq=False)
class Moment:
    """What flowed at a place: its tensors, in order, and whose they are."""

    place: Place
    module: nn.Module
    tensors: list[Tensor]
    addresses: list[Address] = field(default_factory=list)
    graded: list[bool] = field(default_factory=list)  # which of the tensors require a gradient
    growth: float = 1.0  # how much more than a spacing sums of many numbers may be off, where they are summed in order


class Recording:
    """All that flowed in one run, by place, in the order in which it did."""

    def __init__(self) -> None:
        self.moments: dict[Place, Moment] = {}

    def note(self, event: Event) -> None:
        """What a tap is told."""
        site, call = event.site, event.call
        if site.port == "grad_output":
            output = self.moments.get(Place(Site(site.path), call))
            if output is not None and event.leaf in output.addresses:
                place = Place(site, call, output.addresses.index(event.leaf))
                self.moments[place] = Moment(place, event.module, [event.value])
            return
        value = (event.value, snapshot(event.kwargs)) if event.args and event.kwargs else event.value
        found = list(leaves(value))
        place = Place(site, call)
        self.moments[place] = Moment(
            place,
            event.module,
            [tensor for _, tensor in found],
            [address for address, _ in found],
            [tensor.requires_grad for _, tensor in leaves(event.live)],
        )

    def find(self, place: Place) -> Moment | None:
        """What flowed at a place; a gradient that should have come and did not is zero."""
        if place.site.port != "grad_output" or place in self.moments:
            return self.moments.get(place)
        output = self.moments.get(Place(Site(place.site.path), place.call))
        if output is None or output.graded[place.leaf : place.leaf + 1] != [True]:
            return None
        return Moment(place, output.module, [torch.zeros_like(output.tensors[place.leaf])])

    def of(self, port: str) -> list[Moment]:
        """What flowed at the places of one port, in order."""
        return [moment for moment in self.moments.values() if moment.place.site.port == port]


class Apart(Edit):
    """A copy of what a module returns.

    Without it the gradient of a tensor that the module uses itself, or was given, would not be that of its output.
    """

    whole = True

    def change(self, x: Any, call: int) -> Any:
        return mapped(lambda tensor: tensor.clone() if tensor.requires_grad else tensor, x, faithful=True)


def everywhere(model: nn.Module) -> Selector:
    """All modules of `model` that can be tapped, the model itself too."""
    uncalled: set[str] = set()
    for path, module in walk(model):
        if isinstance(module, torch.fx.GraphModule):  # which may hold modules that nobody calls
            called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
            inside = {name for name, _ in module.named_modules() if name} - called
            uncalled |= {f"{path}.{name}" if path else name for name in inside}
    parts = [path for path, _ in walk(model) if path and path not in uncalled]
    if not parts:
        return Selector.union([""])
    wanted = set(parts)
    return Selector.union(["", lambda path, module: path in wanted])


def record(model: nn.Module, batch: Batch, loss: ToNumber | None) -> Recording:
    """Run `model` on a batch, and backwards from `loss` if there is one, and write down what flows."""
    recording = Recording()
    where = everywhere(model)
    taps = [Tap(where, recording.note, "input"), Tap(where, recording.note, "output")]
    if loss is not None:
        taps = [Tap(where, Apart()), *taps, Tap(where, recording.note, "grad_output")]
    for place, gradient in run(model, batch, loss, taps).items():
        recording.moments[place] = Moment(place, model, [gradient])
    return recording


def run(
    model: nn.Module, batch: Batch, loss: ToNumber | None, taps: Sequence[Tap], eager: bool = False
) -> dict[Place, Tensor]:
    """Run `model` on a batch with `taps`, `eager` even if it is compiled; the gradients of its parameters by loss."""
    given = fitted(batch.arguments, model)
    stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
    taken = Session(model, taps, on_silent="ignore")
    with unchanged(model), torch.set_grad_enabled(loss is not None), stance, taken:
        output = model(*given.args, **given.kwargs)
        return {} if loss is None else _gradients(model, loss(output, on_device(batch.target, model)))


def _gradients(model: nn.Module, loss: Tensor) -> dict[Place, Tensor]:
    named = {plain(path): parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    if not named or not loss.requires_grad:
        raise ValueError("loss has no gradient: no parameter requires one, or loss is not made of the output")
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        Place(Site(path, "param_grad"), 0): torch.zeros_like(parameter) if gradient is None else gradient
        for (path, parameter), gradient in zip(named.items(), found, strict=True)
    }


def is_compiled(model: nn.Module) -> bool:
    """Whether some of `model` is compiled by torch.compile."""
    return bool(compiled_among(model.modules()))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """`state_kept`, without the warnings of taps inside compiled graphs: they are there for the comparison alone."""
    with state_kept(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a tap is inside")
        yield
