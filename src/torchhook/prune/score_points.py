"""Where the channels of a layer come out: after the norm and the activation that take the very tensor it gave.

To remove a channel is to remove it there, too, so what it is worth is read off there. Which modules follow is seen in a
pass, by the identity of the tensors that they are called with, and not guessed from names. A tensor that somebody else
uses, too, be it plain code, is where the channels come out: behind it they go two ways.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, call, samples_of
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector, select
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import BATCH_AND_INSTANCE_NORMS, CONVOLUTIONS, DispatchMode, version_of
from torchhook.core.trees import leaves, mapped

LAYERS = (nn.Linear, CONVOLUTIONS)
_NORMS = (BATCH_AND_INSTANCE_NORMS,)
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
)  # an nn.Identity hands on the very tensor, so nobody has to follow it


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
        return isinstance(x, Tensor) and self.tensor() is x and self.version == version_of(x)


@dataclass(frozen=True)
class Outlets:
    """The layers of a model that ran, in execution order, and for each of their calls where the channels come out."""

    layers: dict[str, nn.Module]
    chains: dict[Place, tuple[str, ...]]  # by call of a layer, the paths from it to what comes last
    norms: dict[str, list[nn.Module | None]]  # by layer, the norm right behind each of its calls

    def paths(self) -> list[str]:
        """All modules that channels go through on their way out."""
        return list(dict.fromkeys(path for chain in self.chains.values() for path in chain))

    def chain(self, layer: Place) -> tuple[str, ...]:
        """The way that the channels of a call go; if it is one that the first pass did not have, that of all others."""
        if layer in self.chains:
            return self.chains[layer]
        known = self.of(layer.path)
        return known[0] if len(set(known)) == 1 else (layer.path,)

    def of(self, path: str) -> list[tuple[str, ...]]:
        """The ways from all calls of a layer."""
        return [chain for place, chain in self.chains.items() if place.path == path]


class _Following(Sink):
    """Follows the tensors that layers give from module to module."""

    lazy = True

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.inside: dict[Place, Held] = {}

    @abstractmethod
    def see(self, place: Place, port: str, module: nn.Module, value: Any) -> None:
        """A module is called with something, or gave something."""

    def receive(self, event: Event) -> None:
        """Look at one value. It is not copied: a copy would be a use of the tensor."""
        self.see(Place(event.path, event.call), event.port, event.module, event.live)

    def hold(self, tensor: Any, layer: Place, steps: int) -> None:
        """Remember where a tensor comes from."""
        if isinstance(tensor, Tensor):
            self.held[id(tensor)] = Held(weakref.ref(tensor), version_of(tensor), layer, steps)

    def known(self, x: Any) -> Held | None:
        """Where a tensor comes from."""
        found = self.held.get(id(x))
        return found if found is not None and found.is_(x) else None


class Trail(_Following):
    """Tells in any later pass whose channels come out of which call. It has to see what modules are called with."""

    def __init__(self, found: Outlets) -> None:
        super().__init__()
        self.found = found
        self.calls: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()

    def taps(self) -> list[Tap]:
        """Where it looks."""
        behind = [path for path in self.found.paths() if path not in self.found.layers]
        return [Tap(Selector.union(behind), self, "input")] if behind else []

    def begin(self) -> None:
        """Forget the pass before."""
        self.held.clear()
        self.inside.clear()
        self.calls.clear()
        self.arrived.clear()

    def see(self, place: Place, port: str, module: nn.Module, value: Any) -> None:
        """A module is called with something."""
        known = self.known(value)
        if known is not None and self.found.chain(known.layer)[known.steps + 1] == place.path:
            self.inside[place] = known

    def given(self, place: Place, x: Any) -> str | None:
        """The layer whose channels come out in `x`, which a call gave, if it is that of any."""
        if place.path in self.found.layers:
            self.calls[place.path] += 1
            layer, steps = place, 0
        elif place in self.inside:
            before = self.inside.pop(place)
            layer, steps = before.layer, before.steps + 1
        else:
            return None
        if len(self.found.chain(layer)) == steps + 1:
            self.arrived[layer.path] += 1
            return layer.path
        self.hold(x, layer, steps)
        return None

    def end(self) -> None:
        """Raise if channels went another way than they did in the first pass."""
        for path, calls in self.calls.items():
            known = self.found.of(path)
            if self.arrived[path] != calls or (len(set(known)) > 1 and calls != len(known)):
                raise ValueError(
                    f"what {path!r} gives goes another way in some batch of loader than in the first, so its channels"
                    " cannot be told apart from what follows; name the other layers with layers="
                )


class _Follower(_Following):
    """Finds out which way the tensors go."""

    def __init__(self) -> None:
        super().__init__()
        self.chains: dict[Place, list[tuple[Place, nn.Module]]] = {}
        self.parted: set[Place] = set()  # calls of layers whose output went two ways

    def see(self, place: Place, port: str, module: nn.Module, value: Any) -> None:
        """A module is called with something, or gave something."""
        if port == "input":
            self._taken(place, value)
        elif isinstance(module, LAYERS):
            self.chains[place] = [(place, module)]
            self.hold(value, place, 0)
        elif place in self.inside:
            before = self.inside.pop(place)
            if before.layer not in self.parted:
                self.chains[before.layer].append((place, module))
                self.hold(value, before.layer, before.steps + 1)

    def _taken(self, place: Place, x: Any) -> None:
        known = self.known(x)
        if known is None or known.layer in self.parted:
            return
        if len(self.chains[known.layer]) == known.steps + 1:
            self.inside[place] = known
        else:  # somebody else has taken it before
            self._part(known)

    def used(self, x: Any) -> None:
        """Something is done with `x`: by the module that has taken it, or else it goes two ways from here."""
        known = self.known(x)
        if known is not None and known not in self.inside.values():
            self._part(known)

    def _part(self, known: Held) -> None:
        del self.chains[known.layer][known.steps + 1 :]
        self.parted.add(known.layer)


class _Uses(DispatchMode):
    """Tells the follower of every tensor that any operation is given."""

    def __init__(self, follower: _Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.follower = follower

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for _, leaf in leaves((args, kwargs or {})):
            self.follower.used(leaf)
        return func(*args, **(kwargs or {}))


def outlets(model: nn.Module, batch: Batch, layers: Query | Iterable[Query] | None = None) -> Outlets:
    """Run a batch, and see which of `layers` (none: every convolution and linear layer) it goes through.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 1)).eval()
    >>> outlets(model, Batch.of(torch.ones(1, 2))).chains
    {Place(path='0', call=0): ('0', '1', '2'), Place(path='3', call=0): ('3',)}
    """
    wanted = _wanted(model, layers)
    follower = _Follower()
    after = Selector.of(lambda path, module: isinstance(module, (*_NORMS, *_BY_VALUE)))
    taps = [Tap(Selector.union(wanted), follower)]
    if any(isinstance(module, (*_NORMS, *_BY_VALUE)) for module in model.modules()):
        taps += [Tap(after, follower, "input"), Tap(after, follower)]
    with torch.inference_mode(False), torch.no_grad(), Session(model, taps, on_silent="ignore"), _Uses(follower):
        output = call(model, batch)
    for _, leaf in leaves(output):  # which is a use, too
        follower.used(leaf)
    if not follower.chains:
        raise SelectionError("layers: none of them ran in a pass on the first batch of loader")
    found: dict[str, nn.Module] = {}
    norms: dict[str, list[nn.Module | None]] = {}
    for layer, chain in follower.chains.items():
        found.setdefault(layer.path, chain[0][1])
        behind = chain[1][1] if len(chain) > 1 else None
        norms.setdefault(layer.path, []).append(behind if isinstance(behind, _NORMS) else None)
    chains = {layer: tuple(place.path for place, _ in chain) for layer, chain in follower.chains.items()}
    return Outlets(found, chains, norms)


def channels_of(layer: nn.Module) -> int:
    """How many output channels a layer has."""
    found = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(found, int)
    return found


def inputs_of(layer: nn.Module) -> int:
    """How many input channels a layer has."""
    found = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert isinstance(found, int)
    return found


def channel_dim(layer: nn.Module) -> int:
    """Which dimension they are in, counted from the last."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]  # a tuple


def first_of(batch: Batch, count: int) -> Batch:
    """The first samples of a batch, without a target."""
    size = samples_of(batch).length
    return Batch(mapped(lambda x: x[:count] if x.dim() and len(x) == size else x, batch.arguments), None)


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
