"""Where the channels of a layer come out: after the norm and the activation that take the very tensor it gave.

To remove a channel is to remove it there, too, so what it is worth is read off there. Which modules follow is seen in a
pass, by the identity of the tensors that they are called with, and not guessed from names.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.calling import Batch, call
from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector, select
from torchhook.core.session import Session
from torchhook.core.tap import Sink, Tap
from torchhook.core.trees import leaves
from torchhook.errors import SelectionError

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_NORMS = (nn.modules.batchnorm._NormBase,)
_BY_VALUE = (  # what looks at one value at a time
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
    nn.Identity,
)


class Place(NamedTuple):
    """One call of a module in a pass."""

    path: str
    call: int


class Held(NamedTuple):
    """A tensor on its way: of which call of which layer it is, and how many modules it has been through."""

    tensor: weakref.ref[Tensor]
    version: int
    layer: Place
    steps: int

    def is_(self, x: Any) -> bool:
        """Whether this is `x`, and nothing was written to it since, as ``out += identity`` does."""
        return isinstance(x, Tensor) and self.tensor() is x and self.version == x._version


@dataclass(frozen=True)
class Outlets:
    """The layers of a model that ran, in execution order, and for each of their calls where the channels come out."""

    layers: dict[str, nn.Module]
    places: dict[Place, Place]  # from a call of a layer to the call of what comes last
    norms: dict[str, nn.Module]  # by layer, the norm right behind it

    def owners(self) -> dict[Place, str]:
        """Whose channels come out of which call."""
        return {outlet: layer.path for layer, outlet in self.places.items()}


@dataclass
class _Follower(Sink):
    """Follows the tensors that layers give from module to module."""

    chains: dict[Place, list[tuple[Place, nn.Module]]] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    inside: dict[Place, Held] = field(default_factory=dict)
    parted: set[Place] = field(default_factory=set)  # calls of layers whose output went two ways

    def receive(self, event: Event) -> None:
        """A module was called with something, or gave something."""
        place = Place(event.path, event.call)
        if event.port == "input":
            self._taken(place, event.live)
        elif isinstance(event.module, LAYERS):
            self.chains[place] = [(place, event.module)]
            self._hold(event.live, place, 0)
        elif place in self.inside:
            before = self.inside.pop(place)
            if before.layer in self.parted:
                return
            self.chains[before.layer].append((place, event.module))
            self._hold(event.live, before.layer, before.steps + 1)

    def _taken(self, place: Place, x: Any) -> None:
        known = self.held.get(id(x))
        if known is None or not known.is_(x) or known.layer in self.parted:
            return
        chain = self.chains[known.layer]
        if len(chain) == known.steps + 1:
            self.inside[place] = known
        else:  # somebody else has taken it before: this far the channels go one way
            del chain[known.steps + 1 :]
            self.parted.add(known.layer)

    def _hold(self, tensor: Any, layer: Place, steps: int) -> None:
        if isinstance(tensor, Tensor):
            self.held[id(tensor)] = Held(weakref.ref(tensor), tensor._version, layer, steps)


def outlets(model: nn.Module, batch: Batch, layers: Query | Iterable[Query] | None = None) -> Outlets:
    """Run a batch, and see which of `layers` (none: every convolution and linear layer) it goes through.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)).eval()
    >>> outlets(model, Batch.of(torch.ones(1, 2))).places
    {Place(path='0', call=0): Place(path='2', call=0), Place(path='3', call=0): Place(path='3', call=0)}
    """
    wanted = _wanted(model, layers)
    follower = _Follower()
    after = Selector.of(lambda path, module: isinstance(module, (*_NORMS, *_BY_VALUE)))
    taps = [Tap(Selector.union(wanted), follower)]
    if any(isinstance(module, (*_NORMS, *_BY_VALUE)) for module in model.modules()):
        taps += [Tap(after, follower, "input"), Tap(after, follower)]
    with torch.inference_mode(False), torch.no_grad(), Session(model, taps, on_silent="ignore"):
        call(model, batch)
    if not follower.chains:
        raise SelectionError("layers: none of them ran in a pass on the first batch of loader")
    found: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    for layer, chain in follower.chains.items():
        found.setdefault(layer.path, chain[0][1])
        if len(chain) > 1 and isinstance(chain[1][1], _NORMS):
            norms[layer.path] = chain[1][1]
    return Outlets(found, {layer: chain[-1][0] for layer, chain in follower.chains.items()}, norms)


def channels_of(layer: nn.Module) -> int:
    """How many output channels a layer has."""
    found = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(found, int)
    return found


def channel_dim(layer: nn.Module) -> int:
    """Which dimension they are in, counted from the last."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]  # a tuple


def samples_of(batch: Batch) -> int:
    """How many samples there are in a batch."""
    first = next((leaf for _, leaf in leaves(batch.arguments) if leaf.dim()), None)
    if first is None:
        raise ValueError("a batch of loader has no tensor with a dimension for the samples in it")
    return len(first)


def _wanted(model: nn.Module, layers: Query | Iterable[Query] | None) -> list[str]:
    if layers is None:
        queries: list[Any] = [lambda path, module: isinstance(module, LAYERS)]
    elif isinstance(layers, Iterable) and not isinstance(layers, (str, nn.Module)):
        queries = list(layers)
    else:
        queries = [layers]
    found = [path for path, module in select(model, *queries).items() if isinstance(module, LAYERS)]
    if not found:
        raise SelectionError("layers: there is no convolution and no linear layer among what they select")
    return found
