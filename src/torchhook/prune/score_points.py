"""Where to score the channels of a layer: behind the norm and the activation that follow it.

Removing a channel also removes it from the norm and the activation behind the layer, so its score is read there, at
the layer's score point. Which modules follow is observed in a pass, by the identity of the tensors that they receive,
and not guessed from names. If anything else uses a tensor as well, even plain code, the score point is that tensor,
because behind it the channels go two ways.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, call
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector, select
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import BATCH_AND_INSTANCE_NORMS, DispatchMode, version_of
from torchhook.core.trees import leaves
from torchhook.prune.layers import LAYERS

_NORMS = (BATCH_AND_INSTANCE_NORMS,)
_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Softplus,
    nn.Sigmoid,
    nn.Tanh,
)  # nn.Identity returns the same tensor, so it needs no entry


class ModuleCall(NamedTuple):
    """One call of a module in a pass."""

    path: str
    call: int


class TrackedTensor(NamedTuple):
    """A tensor with the channels of a layer: from which call of it, and how many modules it has passed since."""

    tensor: weakref.ref[Tensor]
    version: int
    layer: ModuleCall
    steps: int

    def is_(self, x: Any) -> bool:
        """Whether this is `x`, and nothing has been written to it since, as ``out += identity`` does."""
        return isinstance(x, Tensor) and self.tensor() is x and self.version == version_of(x)


@dataclass(frozen=True)
class ScorePoints:
    """The layers of a model that ran, in execution order, and the score point of each of their calls."""

    layers: dict[str, nn.Module]
    chains: dict[ModuleCall, tuple[str, ...]]  # for each call of a layer, the paths from it to its score point
    norms: dict[str, list[nn.Module | None]]  # for each layer, the norm right behind each of its calls

    def paths(self) -> list[str]:
        """All modules between a layer and its score point, including both."""
        return list(dict.fromkeys(path for chain in self.chains.values() for path in chain))

    def chain(self, layer: ModuleCall) -> tuple[str, ...]:
        """The paths from a call to its score point; for a call that the first pass did not have, as in all others."""
        if layer in self.chains:
            return self.chains[layer]
        known = self.of(layer.path)
        return known[0] if len(set(known)) == 1 else (layer.path,)

    def of(self, path: str) -> list[tuple[str, ...]]:
        """The chains of all calls of a layer."""
        return [chain for layer, chain in self.chains.items() if layer.path == path]


class TensorTracker(Sink):
    """Tracks the outputs of layers from module to module, by the identity of the tensors."""

    lazy = True

    def __init__(self) -> None:
        self.tracked: dict[int, TrackedTensor] = {}
        self.inside: dict[ModuleCall, TrackedTensor] = {}  # calls in progress, with the tensor they received

    @abstractmethod
    def see(self, module_call: ModuleCall, port: str, module: nn.Module, value: Any) -> None:
        """A module received a value, or returned one."""

    def receive(self, event: Event) -> None:
        """Look at one value. It is not copied: a copy would be a use of the tensor."""
        self.see(ModuleCall(event.path, event.call), event.port, event.module, event.live)

    def track(self, tensor: Any, layer: ModuleCall, steps: int) -> None:
        """Remember which layer a tensor comes from."""
        if isinstance(tensor, Tensor):
            self.tracked[id(tensor)] = TrackedTensor(weakref.ref(tensor), version_of(tensor), layer, steps)

    def origin_of(self, x: Any) -> TrackedTensor | None:
        """Which layer a tensor comes from, if it is tracked."""
        found = self.tracked.get(id(x))
        return found if found is not None and found.is_(x) else None


class _ScorePointFinder(TensorTracker):
    """Finds, in a first pass, the chain of modules from each call of a layer to its score point."""

    def __init__(self) -> None:
        super().__init__()
        self.chains: dict[ModuleCall, list[tuple[ModuleCall, nn.Module]]] = {}
        self.forked: set[ModuleCall] = set()  # calls of layers whose channels go two ways

    def see(self, module_call: ModuleCall, port: str, module: nn.Module, value: Any) -> None:
        """A module received a value, or returned one: extend the chain of its layer."""
        if port == "input":
            self._enter(module_call, value)
        elif isinstance(module, LAYERS):
            self.chains[module_call] = [(module_call, module)]
            self.track(value, module_call, 0)
        elif module_call in self.inside:
            before = self.inside.pop(module_call)
            if before.layer not in self.forked:
                self.chains[before.layer].append((module_call, module))
                self.track(value, before.layer, before.steps + 1)

    def _enter(self, module_call: ModuleCall, x: Any) -> None:
        origin = self.origin_of(x)
        if origin is None or origin.layer in self.forked:
            return
        if len(self.chains[origin.layer]) == origin.steps + 1:
            self.inside[module_call] = origin
        else:  # another module has used it before
            self._fork(origin)

    def use(self, x: Any) -> None:
        """An operation uses `x`: unless it belongs to the module that received `x`, the channels go two ways here."""
        origin = self.origin_of(x)
        if origin is not None and origin not in self.inside.values():
            self._fork(origin)

    def _fork(self, origin: TrackedTensor) -> None:
        del self.chains[origin.layer][origin.steps + 1 :]
        self.forked.add(origin.layer)


class _Uses(DispatchMode):
    """Reports every tensor argument of every operation to the finder."""

    def __init__(self, finder: _ScorePointFinder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.finder = finder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for _, leaf in leaves((args, kwargs or {})):
            self.finder.use(leaf)
        return func(*args, **(kwargs or {}))


def score_points(model: nn.Module, batch: Batch, layers: Query | Iterable[Query] | None = None) -> ScorePoints:
    """Run a batch and find the score points of `layers` (None: every convolution and linear layer).

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)).eval()
    >>> score_points(model, Batch.of(torch.ones(1, 2))).chains
    {ModuleCall(path='0', call=0): ('0', '1', '2'), ModuleCall(path='3', call=0): ('3',)}
    """
    wanted = _wanted(model, layers)
    finder = _ScorePointFinder()
    after = Selector.of(lambda path, module: isinstance(module, (*_NORMS, *_ELEMENTWISE)))
    taps = [Tap(Selector.union(wanted), finder)]
    if any(isinstance(module, (*_NORMS, *_ELEMENTWISE)) for module in model.modules()):
        taps += [Tap(after, finder, "input"), Tap(after, finder)]
    with torch.inference_mode(False), torch.no_grad(), Session(model, taps, on_silent="ignore"), _Uses(finder):
        output = call(model, batch)
    for _, leaf in leaves(output):  # returning a tensor is a use, too
        finder.use(leaf)
    if not finder.chains:
        raise SelectionError("layers: none of them ran on the first batch of loader")
    found: dict[str, nn.Module] = {}
    norms: dict[str, list[nn.Module | None]] = {}
    for layer, chain in finder.chains.items():
        found.setdefault(layer.path, chain[0][1])
        behind = chain[1][1] if len(chain) > 1 else None
        norms.setdefault(layer.path, []).append(behind if isinstance(behind, _NORMS) else None)
    chains = {layer: tuple(each.path for each, _ in chain) for layer, chain in finder.chains.items()}
    return ScorePoints(found, chains, norms)


def _wanted(model: nn.Module, layers: Query | Iterable[Query] | None) -> list[str]:
    if layers is None:
        queries: list[Any] = [lambda path, module: isinstance(module, LAYERS)]
    elif isinstance(layers, Iterable) and not isinstance(layers, (str, nn.Module)):
        queries = list(layers)
    else:
        queries = [layers]
    found = [path for path, module in select(model, *queries).items() if isinstance(module, LAYERS)]
    if not found:
        raise SelectionError("layers: none of the selected modules is a convolution or a linear layer")
    return found
