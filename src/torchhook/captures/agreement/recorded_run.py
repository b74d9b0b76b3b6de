"""Run a model once and record every input, output and gradient of its modules.

Afterwards the buffers of the model and the random number generators are restored, so that every run starts from the
same state. No ``.grad`` is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook.captures.agreement.facts import KnownModules, ModuleFacts
from torchhook.captures.agreement.rounding import precision
from torchhook.core.batch import Batch, Loss, fitted, on_device
from torchhook.core.call_wrapper import compiled_among
from torchhook.core.eager import eagerly
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.model_state import state_kept
from torchhook.core.selection import Selector, plain, walk
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Tap
from torchhook.core.trees import Address, leaves, mapped


class Location(NamedTuple):
    """A site in one of its calls. For an output gradient, `leaf` is the number of the tensor in the output."""

    site: Site
    call: int
    leaf: int = 0


@dataclass(eq=False)
class Observation:
    """The tensors that flowed at a location, in order, and the module they belong to."""

    location: Location
    module: ModuleFacts
    tensors: Sequence[Tensor]
    addresses: list[Address] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)  # of each tensor
    growth: float = 1.0  # factor by which long sums, if added in order, may exceed the error of one rounding
    moved: Sequence[float] = ()  # how far rounding errors in what it is computed from move each tensor, if known


def in_order_of(observed: Observation, known: Observation) -> Observation:
    """The same arguments in the order in which another call got them: callers name them in any order."""
    addresses = observed.addresses
    same = len(addresses) == len(observed.tensors) and sorted(map(str, addresses)) == sorted(map(str, known.addresses))
    if addresses == known.addresses or not same:
        return observed
    numbers = [addresses.index(address) for address in known.addresses]
    moved = [observed.moved[number] for number in numbers] if len(observed.moved) == len(numbers) else ()
    return replace(
        observed,
        tensors=[observed.tensors[number] for number in numbers],
        addresses=known.addresses,
        requires_grad=[],
        moved=moved,
    )


class RecordedRun:
    """Everything that flowed in one run, by location, in execution order."""

    def __init__(self) -> None:
        self.observations: dict[Location, Observation] = {}
        self.known = KnownModules()
        self.modules: dict[str, ModuleFacts] = {}  # all of the model, by path
        self.parameters: Mapping[str, Tensor] = {}  # and buffers, by name
        self.coarsest = 0.0  # the machine epsilon of the coarsest parameter
        self.is_sketched = False  # whether values are only sketches, which no model can run on
        self.stand_ins: dict[str, tuple[str, ...]] = {}  # calls that were never made, and the modules they stand for

    def record(self, event: Event) -> None:
        """Add what a tap saw."""
        site, call = event.site, event.call
        if site.port == "grad_output":
            output = self.observations.get(Location(Site(site.path), call))
            if output is not None and event.leaf in output.addresses:
                location = Location(site, call, output.addresses.index(event.leaf))
                self.observations[location] = Observation(location, self.known[event.module], [event.value])
            return
        value = (event.value, snapshot(event.kwargs)) if event.args and event.kwargs else event.value
        found = list(leaves(value))
        location = Location(site, call)
        self.observations[location] = Observation(
            location,
            self.known[event.module],
            [tensor for _, tensor in found],
            [address for address, _ in found],
            [tensor.requires_grad for _, tensor in leaves(event.live)],
        )

    def find(self, location: Location) -> Observation | None:
        """What flowed at a location; an expected gradient that autograd never computed is zero."""
        if location.site.port != "grad_output" or location in self.observations:
            return self.observations.get(location)
        output = self.observations.get(Location(Site(location.site.path), location.call))
        if output is None or output.requires_grad[location.leaf : location.leaf + 1] != [True]:
            return None
        if self.is_sketched or not self.of("grad_output"):  # there was no backward
            return None
        return Observation(location, output.module, [torch.zeros_like(output.tensors[location.leaf])])

    def of(self, port: str) -> list[Observation]:
        """What flowed at one port, in execution order."""
        return [observed for observed in self.observations.values() if observed.location.site.port == port]

    @property
    def called(self) -> set[str]:
        """The paths of the modules that have returned something."""
        return {location.site.path for location in self.observations if location.site.port == "output"}

    def gradient_order(self) -> dict[Location, float]:
        """When each gradient was computed: those of parameters come after the last output gradient of their module."""
        gradients = self.of("grad_output")
        order = {observed.location: float(number) for number, observed in enumerate(gradients)}
        last = {observed.location.site.path: float(number) for number, observed in enumerate(gradients)}
        for observed in self.of("param_grad"):
            owner = observed.location.site.path.rpartition(".")[0]
            order[observed.location] = last.get(owner, float(len(gradients))) + 0.5
        return order


class CopiedOutputs(Edit):
    """Passes on a copy of a module's output.

    Without the copy, the gradient of an output that the module also uses itself, or that is its input, would include
    those other uses.
    """

    whole = True

    def change(self, x: Any, call: int) -> Any:
        return mapped(lambda tensor: tensor.clone() if tensor.requires_grad else tensor, x, faithful=True)


def everywhere(model: nn.Module) -> Selector:
    """All modules of `model` that can be tapped, including the model itself."""
    uncalled: set[str] = set()
    for path, module in walk(model):
        if isinstance(module, torch.fx.GraphModule):  # it may hold modules that its graph never calls
            called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
            inside = {name for name, _ in module.named_modules() if name} - called
            uncalled |= {f"{path}.{name}" if path else name for name in inside}
    parts = [path for path, _ in walk(model) if path and path not in uncalled]
    if not parts:
        return Selector.union([""])
    wanted = set(parts)
    return Selector.union(["", lambda path, module: path in wanted])


def record(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    where: Selector | None = None,
    change: Edit | None = None,
) -> RecordedRun:
    """Run `model` on a batch, and backward from `loss` if given, and record what flows.

    It is recorded everywhere, or only at the modules that `where` selects. `change` edits all outputs before that.
    """
    recorded = RecordedRun()
    recorded.modules = {path: recorded.known[module] for path, module in walk(model)}
    recorded.parameters = parameters_of(model)
    recorded.coarsest = precision(model.parameters())
    places = everywhere(model)
    where = where or places
    taps = [Tap(where, recorded.record, "input"), Tap(where, recorded.record, "output")]
    if loss is not None:
        taps = [Tap(where, CopiedOutputs()), *taps, Tap(where, recorded.record, "grad_output")]
    if change is not None:
        taps = [Tap(places, change), *taps]
    for location, gradient in run(model, batch, loss, taps).items():
        recorded.observations[location] = Observation(location, recorded.known[model], [gradient])
    return recorded


def run(
    model: nn.Module, batch: Batch, loss: Loss | None, taps: Sequence[Tap], eager: bool = False
) -> dict[Location, Tensor]:
    """Run `model` on a batch with `taps`, uncompiled if `eager`, and return the gradients of its parameters."""
    given = fitted(batch.arguments, model)
    stance = eagerly() if eager else nullcontext()
    taken = Session(model, taps, on_silent="ignore")
    with unchanged(model), torch.set_grad_enabled(loss is not None), stance, taken:
        output = model(*given.args, **given.kwargs)
        return {} if loss is None else _gradients(model, loss(output, on_device(batch.target, model)))


def _gradients(model: nn.Module, loss: Tensor) -> dict[Location, Tensor]:
    named = {plain(path): parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    if not named or not loss.requires_grad:
        raise ValueError("loss has no gradient: no parameter requires one, or the loss does not depend on the output")
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        Location(Site(path, "param_grad"), 0): torch.zeros_like(parameter) if gradient is None else gradient
        for (path, parameter), gradient in zip(named.items(), found, strict=True)
    }


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by every name that they have."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {plain(name): tensor for name, tensor in named if not is_lazy(tensor)}


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` or a part of it was compiled by torch.compile."""
    return bool(compiled_among(model.modules()))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """`state_kept`, without the warnings about slower paths: the taps are there for the comparison alone."""
    with state_kept(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a tap is inside")
        yield
