"""`importance`: what each channel of each layer is worth, from one pass over a data set."""

from __future__ import annotations

import html
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TextIO

import torch
from torch import Tensor, nn

from torchhook.calling import Batch, Loss, call, loss_of, on_device
from torchhook.compare.gathering import as_before, length_of, require_loader
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector, require_module, unwrapped
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Sink, Tap
from torchhook.explain.places import running
from torchhook.progress import shown
from torchhook.prune.outlets import Outlets, Place, channel_dim, channels_of, outlets, samples_of
from torchhook.text import html_table, table

By = Literal["taylor", "fisher", "l1", "activation", "apoz", "wanda"]


@dataclass(frozen=True, eq=False, repr=False)
class Importance(Mapping[str, Tensor]):
    """What channels are worth: a tensor with a number an output channel, in float64, by the path of the layer.

    Layers are in execution order. The larger a number, the more is lost with the channel.

    Args:
        scores: The numbers.
        by: What they are.
        n: How many samples they are from; 0 where they are from the weights alone.
        model, x, loss: The model, its first batch and the loss, for `plan` and `apply`.

    >>> scores = {"conv": torch.tensor([0.5, 0.0, 2.0])}
    >>> Importance(scores, "taylor", 64, nn.Identity(), None)
    taylor importance of 1 layer, 64 samples
    layer  channels  least  median  most
    conv          3  0      0.5     2
    """

    scores: Mapping[str, Tensor]
    by: str
    n: int
    model: nn.Module
    x: Any
    loss: Loss | None = None

    def __getitem__(self, path: str) -> Tensor:
        return self.scores[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def comparable(self) -> bool:
        """Whether a number in one layer can be compared with one in another: those in units of the loss can."""
        return self.by in ("taylor", "fisher")

    def table(self) -> list[dict[str, Any]]:
        """A plain dictionary a channel, for pandas and the like."""
        return [
            {"layer": path, "channel": number, "score": float(score)}
            for path, scores in self.scores.items()
            for number, score in enumerate(scores)
        ]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>{html_table(_HEADER, self._rows())}"

    def _title(self) -> str:
        samples = f", {self.n} samples" if self.n else ""
        return f"{self.by} importance of {len(self)} layer{'s' if len(self) != 1 else ''}{samples}"

    def _rows(self) -> list[list[Any]]:
        return [
            [path or "''", len(scores), *(f"{float(scores.quantile(q)):.3g}" for q in (0.0, 0.5, 1.0))]
            for path, scores in self.scores.items()
        ]


def importance(
    model: nn.Module,
    loader: Iterable[Any],
    by: By = "taylor",
    loss: Loss | None = None,
    *,
    layers: Query | Iterable[Query] | None = None,
    progress: TextIO | None = sys.stderr,
) -> Importance:
    """What each output channel of each convolution and linear layer is worth, in one pass over `loader`.

    The value of a channel is read off behind the batch norm and the activation that follow its layer, for they go with
    it. Nothing of the model is touched: it is in eval mode for the time, and no ``.grad`` is written.

    Args:
        loader: Gives batches: tuples whose last is the target, tensors, or mappings, which are keyword arguments.
        by: ``"taylor"``, by how much the loss of a sample would change without the channel, to first order: the mean
            over samples of |Σ a · dL/da| over its positions. ``"fisher"``, half the mean of its square.
            ``"l1"``, Σ |w| of its filter, scaled as the batch norm behind it does. ``"wanda"``, the same with each
            weight times the root mean square of the input that it is for. ``"activation"``, the mean of |a|.
            ``"apoz"``, the share of values above zero, which is one less the average percentage of zeros.
        loss: From output and target to a number, a mean over the batch as torch's are. Without one it is the loss
            that the output has, cross entropy if the targets are classes, the mean square if they look like the
            outputs.
        layers: Queries for some of the layers; None means all.
        progress: Where to show it; only a terminal does.

    >>> from torchhook.prune.scores import importance
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with torch.no_grad():
    ...     _ = model[2].weight.copy_(torch.tensor([[1.0, 0.0, 2.0]])), model[0].bias.fill_(9.0)
    >>> found = importance(model, [(torch.rand(8, 2), torch.zeros(8, 1))])
    >>> found["0"].argmin().item()
    1
    """
    require_module(model)
    require_loader(loader, "loader")
    if by not in _SCORERS:
        raise ValueError(f"by must be one of {', '.join(map(repr, _SCORERS))}, not {by!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be callable on output and target, not {loss!r}")
    batches = iter(loader)
    first = next(batches, _NOTHING)
    if first is _NOTHING:
        raise ValueError("loader gave no batch")
    whole, model = model, unwrapped(model)  # inside a compiled graph nobody sees which tensor is which
    with as_before(model), running(model):
        found = outlets(model, Batch.of(on_device(first, model)), layers)
        scorer = _SCORERS[by](found)
        n = 0
        with Session(model, scorer.taps(), on_silent="ignore"):
            for data in shown(chain([first], batches) if scorer.runs else [], length_of(loader), by, progress):
                batch = Batch.of(on_device(data, model))
                count = samples_of(batch)
                scorer.run(model, batch, loss, count)
                n += count
    scores = {path: scorer.score(path, layer, n).cpu() for path, layer in found.layers.items()}
    for path, values in scores.items():
        if not values.isfinite().all():
            raise ValueError(
                f"the {by} scores of {path!r} are not finite; torchhook.diagnose tells where that comes from, layers="
                " leaves it out"
            )
    return Importance(scores, by, n, whole, first, loss)


class Scorer(ABC):
    """Adds up, batch by batch, what the scores are made of."""

    runs = True  # whether it needs the data

    def __init__(self, found: Outlets) -> None:
        self.found = found
        self.owners = found.owners()

    @abstractmethod
    def taps(self) -> list[Tap]:
        """What to look at, or to do, in a pass."""

    def run(self, model: nn.Module, batch: Batch, loss: Loss | None, count: int) -> None:
        """One batch of `count` samples."""
        with torch.no_grad():
            call(model, batch)

    @abstractmethod
    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        """The scores of a layer after `n` samples."""


class _Gates(Edit):
    """Multiplies each channel of each sample by a one, whose gradient is Σ a · dL/da over the positions."""

    by_call = True

    def __init__(self, found: Outlets) -> None:
        super().__init__()
        self.found = found
        self.owners = found.owners()
        self.path = ""
        self.ones: dict[tuple[str, torch.Size], Tensor] = {}

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = _Gates(self.found)
        twin.path, twin.ones = site.path, self.ones
        return twin

    def change(self, x: Any, call: int) -> Any:
        layer = self.owners.get(Place(self.path, call))
        if layer is None or not torch.is_grad_enabled():
            return x
        dim = channel_dim(self.found.layers[layer]) % x.dim()
        shape = [size if place in (0, dim) else 1 for place, size in enumerate(x.shape)]
        key = layer, torch.Size(shape)  # calls of a layer in one pass share a gate, for they share the channel
        gate = self.ones.get(key)
        if gate is None:
            gate = self.ones[key] = x.new_ones(shape).requires_grad_()
        return x * gate


class _ByLoss(Scorer):
    """What the loss would lose to first order, channel by channel and sample by sample."""

    power = 1

    def __init__(self, found: Outlets) -> None:
        super().__init__(found)
        self.gates = _Gates(found)
        self.sums: dict[str, Tensor] = {}

    def taps(self) -> list[Tap]:
        return [Tap(Selector.union([place.path for place in self.owners]), self.gates)]

    def run(self, model: nn.Module, batch: Batch, loss: Loss | None, count: int) -> None:
        self.gates.ones.clear()
        with torch.enable_grad():
            guess = loss_of(call(model, batch), batch.target, loss)
            if not guess.real:
                raise ValueError("the batches of loader have no target that a loss could be guessed from; pass loss=")
            gates = self.gates.ones
            if not guess.loss.requires_grad:
                raise ValueError("the loss does not depend on any layer, at least in no way that autograd sees")
            found = torch.autograd.grad(guess.loss, list(gates.values()), allow_unused=True)
        for (path, shape), gradient in zip(list(gates), found, strict=True):
            layer = self.found.layers[path]
            total = self.sums.setdefault(path, _zeros(layer, next(iter(gates.values()))))
            if gradient is not None:
                dim = channel_dim(layer) % len(shape)
                change = gradient.double().movedim(dim, -1).reshape(-1, shape[dim]) * count
                total += change.abs().pow(self.power).sum(0)
        self.gates.ones.clear()

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        return self.sums[path] / (n * self.power)


class _Fisher(_ByLoss):
    power = 2


class _Values(Scorer, Sink):
    """Sums of what comes out of each channel."""

    def __init__(self, found: Outlets) -> None:
        super().__init__(found)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def taps(self) -> list[Tap]:
        return [Tap(Selector.union([place.path for place in self.owners]), self)]

    def receive(self, event: Event) -> None:
        """Add what one call gave."""
        layer = self.owners.get(Place(event.path, event.call))
        if layer is not None:
            self.add(layer, event.live.detach(), channel_dim(self.found.layers[layer]))

    def add(self, path: str, x: Tensor, dim: int) -> None:
        """Add the values in `x`, whose channels are in `dim`."""
        values = x.movedim(dim, -1).flatten(0, -2)
        said = self.of(values).sum(0, dtype=torch.float64)
        self.sums[path] = self.sums[path] + said if path in self.sums else said
        self.counts[path] = self.counts.get(path, 0) + len(values)

    @abstractmethod
    def of(self, values: Tensor) -> Tensor:
        """What is added up of each value."""

    def mean(self, path: str) -> Tensor:
        """The mean by channel."""
        return self.sums[path] / max(self.counts[path], 1)

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        return self.mean(path)


class _Activation(_Values):
    def of(self, values: Tensor) -> Tensor:
        return values.abs()


class _Apoz(_Values):
    def of(self, values: Tensor) -> Tensor:
        return values > 0


class _Wanda(_Values):
    """Weights, each times the size of the input that it is for."""

    def taps(self) -> list[Tap]:
        return [Tap(Selector.union(list(self.found.layers)), self, "input")]

    def receive(self, event: Event) -> None:
        """Add what one call was given."""
        x = event.args[0] if event.args else event.kwargs["input"]
        self.add(event.path, x.detach(), channel_dim(event.module))

    def of(self, values: Tensor) -> Tensor:
        return values.double().square()

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        size = self.mean(path).sqrt()
        weights = _filters(layer)  # channels × inputs of a group × kernel
        groups = getattr(layer, "groups", 1)
        by_group = size.reshape(groups, -1, 1).repeat_interleave(len(weights) // groups, 0)
        return (weights * by_group).sum((1, 2)) * _scale(self.found.norms.get(path))


class _L1(Scorer):
    """Weights alone."""

    runs = False

    def taps(self) -> list[Tap]:
        return []

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        return _filters(layer).sum((1, 2)) * _scale(self.found.norms.get(path))


def _filters(layer: nn.Module) -> Tensor:
    """The sizes of the weights: output channels × input channels of a group × kernel."""
    weight = layer.weight.detach().double().abs()  # type: ignore[operator]
    assert isinstance(weight, Tensor)
    if getattr(layer, "transposed", False):  # inputs × outputs of a group × kernel
        groups = layer.groups
        assert isinstance(groups, int)
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(2) if weight.dim() > 2 else weight[..., None]


def _scale(norm: nn.Module | None) -> Tensor | float:
    """What a norm multiplies each channel by."""
    if norm is None:
        return 1.0
    scale: Any = 1.0
    if isinstance(norm.weight, Tensor):
        scale = norm.weight.detach().double().abs()
    if isinstance(norm.running_var, Tensor):
        scale = scale / (norm.running_var.double() + norm.eps).sqrt()  # type: ignore[operator]
    return scale  # type: ignore[no-any-return]


def _zeros(layer: nn.Module, like: Tensor) -> Tensor:
    return torch.zeros(channels_of(layer), dtype=torch.float64, device=like.device)


_HEADER = ("layer", "channels", "least", "median", "most")
_NOTHING = object()
_SCORERS: dict[str, type[Scorer]] = {
    "taylor": _ByLoss,
    "fisher": _Fisher,
    "l1": _L1,
    "activation": _Activation,
    "apoz": _Apoz,
    "wanda": _Wanda,
}
