"""`importance`: a score for each channel of each layer, from one pass over a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, InputBatches, Loss, ToInputs, batch_count, call, loss_of, on_device, samples_of
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.model_state import buffers_kept, inference, random_state_kept
from torchhook.core.progress import Progress, track
from torchhook.core.renamed import renamed
from torchhook.core.selection import Selector, Sites, require_module, unwrapped
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.tabular import Tabular
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.prune.layers import channel_dim, first_of
from torchhook.prune.score_point_tracker import ScorePointTracker
from torchhook.prune.score_points import ModuleCall, ScorePoints, score_points

By = Literal["taylor", "fisher", "l1", "activation", "apoz", "wanda"]


@dataclass(frozen=True, eq=False, repr=False)
class Importance(Tabular, Mapping[str, Tensor]):
    """Scores of channels: for each layer, by path, a float64 tensor with one score per output channel.

    Layers are in execution order. The higher the score, the more is lost with the channel.

    Args:
        scores: The scores.
        by: The kind of score.
        n: The number of samples; 0 if the scores use the weights alone.
        model, x, loss: The model, its first batch and the loss, for `plan` and `apply`.
        left_out: Layers that cannot be scored this way, and why.

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
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, path: str) -> Tensor:
        return self.scores[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def comparable(self) -> bool:
        """Whether scores of different layers can be compared, being in units of the loss."""
        return self.by in ("taylor", "fisher")

    def _records(self) -> list[dict[str, Any]]:
        return [
            {"path": path, "channel": number, "score": float(score)}
            for path, scores in self.scores.items()
            for number, score in enumerate(scores)
        ]

    def _title(self) -> str:
        samples = f", {self.n} samples" if self.n else ""
        return f"{self.by} importance of {len(self)} layer{'s' if len(self) != 1 else ''}{samples}"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        return _HEADER, [
            [path or "''", len(scores), *(f"{float(scores.quantile(q)):.3g}" for q in (0.0, 0.5, 1.0))]
            for path, scores in self.scores.items()
        ]


@renamed(layers="sites")
def importance(
    model: nn.Module,
    loader: Any,
    by: By = "taylor",
    loss: Loss | None = None,
    *,
    sites: Sites = None,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Importance:
    """A score for each output channel of each convolution and linear layer, in one pass over `loader`.

    The value `a` of a channel is taken behind the batch norm and the activation that follow its layer, because they are
    pruned with it. The model is not changed: it runs in eval mode, and no ``.grad`` is written.

    Args:
        loader: Yields batches: tuples whose last element is the target, tensors, or mappings of keyword arguments.
        by: ``"taylor"``, how much the loss of a sample would change without the channel, to first order: the mean over
            samples of |Σ a · dL/da| over positions. ``"fisher"``, half the mean of its square. ``"l1"``, Σ |w| of its
            filter, scaled as by the batch norm behind it (of several norms behind several calls, the largest scale).
            ``"wanda"``, the same with each weight times the root mean square of its input. ``"activation"``, the mean
            of |a|. ``"apoz"``, the share of values above zero: one minus the average percentage of zeros.
        loss: From output and target to a number, a mean over the batch like torch's losses. The default is the loss in
            the output if it has one, cross entropy if the targets are classes, and the mean squared error if they have
            the shape of the outputs. For mappings the targets are the ``labels``.
        sites: Queries for some of the layers; None means all.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.prune.scores import importance
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with torch.no_grad():
    ...     _ = model[2].weight.copy_(torch.tensor([[1.0, 0.0, 2.0]])), model[0].bias.fill_(9.0)
    >>> found = importance(model, [(torch.rand(8, 2), torch.zeros(8, 1))])
    >>> found["0"].argmin().item()
    1
    """
    require_module(model)
    loader = InputBatches(loader, model, batch_to_inputs, targets=True)
    if by not in _SCORERS:
        raise ValueError(f"by must be one of {', '.join(map(repr, _SCORERS))}, not {by!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be callable on output and target, not {loss!r}")
    whole, model = model, unwrapped(model)  # inside a compiled graph tensors cannot be identified
    with random_state_kept(model), buffers_kept(model), inference(model):
        batches = iter(loader)
        first = next(batches, _NOTHING)
        if first is _NOTHING:
            raise ValueError("loader has no batches")
        found = score_points(model, Batch.of(on_device(first, model)), sites)
        scorer = _SCORERS[by](found)
        n = 0
        with Session(model, scorer.taps(), on_silent="ignore"):
            for data in track(chain([first], batches) if scorer.runs else [], batch_count(loader), by, progress):
                batch = Batch.of(on_device(data, model))
                count = samples_of(batch).length
                scorer.run(model, batch, loss, count)
                n += count
    scored = {path: layer for path, layer in found.layers.items() if path not in scorer.left_out}
    scores = {path: scorer.score(path, layer, n).cpu() for path, layer in scored.items()}
    for path, values in scores.items():
        if not values.isfinite().all():
            raise ValueError(
                f"the {by} scores of {path!r} are not finite; torchhook.diagnose finds the cause, and sites= can leave"
                " the layer out"
            )
    return Importance(scores, by, n, whole, first, loss, scorer.left_out)


class Scorer(ABC):
    """Accumulates scores batch by batch."""

    runs = True  # whether it needs the data

    def __init__(self, found: ScorePoints) -> None:
        self.found = found
        self.tracker = ScorePointTracker(found)
        self.left_out: dict[str, str] = {}

    @abstractmethod
    def taps(self) -> list[Tap]:
        """The taps of the scorer."""

    def run(self, model: nn.Module, batch: Batch, loss: Loss | None, count: int) -> None:
        """Run one batch of `count` samples."""
        self.tracker.begin()
        with torch.no_grad():
            call(model, batch)
        self.tracker.end()

    @abstractmethod
    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        """The scores of a layer after `n` samples."""


class _Gates(Edit):
    """Multiplies each channel of each sample by 1; the gradient of that 1 is Σ a · dL/da over positions."""

    by_call = True

    def __init__(self, scorer: _ByLoss, path: str = "") -> None:
        super().__init__()
        self.scorer = scorer
        self.path = path

    def bound(self, site: Site, module: nn.Module) -> Edit:
        return _Gates(self.scorer, site.path)

    def change(self, x: Any, call: int) -> Any:
        layer = self.scorer.tracker.layer_at(ModuleCall(self.path, call), x)
        return x if layer is None else self.scorer.gated(layer, x)


class _ByLoss(Scorer):
    """The first-order change of the loss without each channel, sample by sample."""

    power = 1

    def __init__(self, found: ScorePoints) -> None:
        super().__init__(found)
        self.count = 0
        self.gates: dict[str, Tensor] = {}  # samples × channels, shared by all calls of a layer
        self.sums: dict[str, Tensor] = {}
        self.firsts: dict[str, Tensor] = {}  # outputs for the first sample, of layers whose first row it may not be
        self.checked = False

    def taps(self) -> list[Tap]:
        return [*self.tracker.taps(), Tap(Selector.union(self.found.paths()), _Gates(self))]

    def gated(self, path: str, x: Tensor) -> Tensor:
        """`x`, which has the channels of a layer, times the gates of these channels."""
        dim = channel_dim(self.found.layers[path]) % x.dim()
        if not torch.is_grad_enabled():
            self.left_out[path] = "it runs without autograd"
        elif not dim or not len(x) or len(x) % self.count:
            self.left_out[path] = (
                f"its output does not have one row per sample: {shape_of(x)} for a batch of {self.count}"
            )
        if path in self.left_out:
            return x
        if path not in self.gates:
            self.gates[path] = x.new_ones(self.count, x.shape[dim]).requires_grad_()
        parts: Tensor = x.unflatten(0, (self.count, -1))  # samples may be cut into rows, like tokens or windows
        if not self.checked and (self.count == 1 or len(x) != self.count or self.count in _others(x, dim)):
            self.firsts.setdefault(path, parts[0].detach().clone())
        sizes = [size if position in (0, dim + 1) else 1 for position, size in enumerate(parts.shape)]
        return (parts * self.gates[path].to(x.dtype).view(sizes)).flatten(0, 1)

    def run(self, model: nn.Module, batch: Batch, loss: Loss | None, count: int) -> None:
        self.count = count
        self.gates.clear()
        self.tracker.begin()
        with torch.enable_grad():
            guess = loss_of(call(model, batch), target_of(batch, loss), loss)
            self.tracker.end()
            if not guess.real:
                raise ValueError("cannot guess a loss: the batches of loader have no suitable target; pass loss=")
            if not self.gates and self.left_out:
                reasons = "; ".join(f"{path!r}: {why}" for path, why in self.left_out.items())
                raise ValueError(f"no layer can be scored by the loss: {reasons}")
            if not guess.loss.requires_grad:
                raise ValueError("the loss does not depend on any layer, as far as autograd can see")
            found = torch.autograd.grad(guess.loss, list(self.gates.values()), allow_unused=True)
        for (path, gate), gradient in zip(self.gates.items(), found, strict=True):
            total = self.sums.setdefault(path, torch.zeros(gate.shape[1], dtype=torch.float64, device=gate.device))
            if gradient is not None:
                total += (gradient.double() * count).abs().pow(self.power).sum(0)
        if count > 1 and not self.checked:
            self._check(model, batch)
            self.checked = True
        self.firsts.clear()
        self.gates.clear()

    def _check(self, model: nn.Module, batch: Batch) -> None:
        """Leave out layers whose first row is not the output for the first sample alone, as if time comes first."""
        if not self.firsts:
            return
        expected, self.firsts, self.count = self.firsts, {}, 1
        self.gates.clear()
        self.tracker.begin()
        reason = "its output does not have one row per sample: the first row is not that of the first sample"
        try:
            with torch.enable_grad():
                call(model, first_of(batch, 1))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            reason = f"cannot check for one row per sample, because the model does not run on one sample ({why})"
        for path, values in expected.items():
            if path not in self.firsts or not _alike(values, self.firsts[path]):
                self.left_out[path] = reason

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        return self.sums[path] / (n * self.power)


class _Fisher(_ByLoss):
    power = 2


class _Values(Scorer, Sink):
    """Sums over the values of each channel."""

    def __init__(self, found: ScorePoints) -> None:
        super().__init__(found)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def taps(self) -> list[Tap]:
        return [*self.tracker.taps(), Tap(Selector.union(self.found.paths()), self)]

    def receive(self, event: Event) -> None:
        """Add the output of one call."""
        layer = self.tracker.layer_at(ModuleCall(event.path, event.call), event.live)
        if layer is not None:
            self.add(layer, event.live.detach(), channel_dim(self.found.layers[layer]))

    def add(self, path: str, x: Tensor, dim: int) -> None:
        """Add the values in `x`, whose channels are in `dim`."""
        values = x.movedim(dim, -1).flatten(0, -2)
        total = self.of(values).sum(0, dtype=torch.float64)
        self.sums[path] = self.sums[path] + total if path in self.sums else total
        self.counts[path] = self.counts.get(path, 0) + len(values)

    @abstractmethod
    def of(self, values: Tensor) -> Tensor:
        """What is summed up of each value."""

    def mean(self, path: str) -> Tensor:
        """The mean of each channel."""
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
    """Weights, each times the root mean square of its input."""

    def taps(self) -> list[Tap]:
        return [Tap(Selector.union(list(self.found.layers)), self, "input")]

    def receive(self, event: Event) -> None:
        """Add the input of one call."""
        x = event.args[0] if event.args else event.kwargs["input"]
        self.add(event.path, x.detach(), channel_dim(event.module))

    def of(self, values: Tensor) -> Tensor:
        return values.double().square()

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        size = self.mean(path).sqrt()
        weights = _filters(layer)  # channels × inputs of a group × kernel
        groups = getattr(layer, "groups", 1)
        by_group = size.reshape(groups, -1, 1).repeat_interleave(len(weights) // groups, 0)
        return (weights * by_group).sum((1, 2)) * _scales(self.found.norms[path])


class _L1(Scorer):
    """Weights alone."""

    runs = False

    def taps(self) -> list[Tap]:
        return []

    def score(self, path: str, layer: nn.Module, n: int) -> Tensor:
        return _filters(layer).sum((1, 2)) * _scales(self.found.norms[path])


def _filters(layer: nn.Module) -> Tensor:
    """The absolute weights: output channels × input channels of a group × kernel."""
    weight = layer.weight.detach().double().abs()  # type: ignore[operator]  # a tensor, in these modules
    assert isinstance(weight, Tensor)
    if getattr(layer, "transposed", False):  # inputs × outputs of a group × kernel
        groups = layer.groups
        assert isinstance(groups, int)
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(2) if weight.dim() > 2 else weight[..., None]


def _scales(norms: list[nn.Module | None]) -> Tensor | float:
    """The factor of each channel in the norms behind a layer; the largest if there are several norms."""
    scales = [torch.as_tensor(_scale(norm), dtype=torch.float64) for norm in dict.fromkeys(norms)]
    return torch.stack(torch.broadcast_tensors(*scales)).amax(0)


def _scale(norm: nn.Module | None) -> Tensor | float:
    """The factor of each channel in a norm."""
    if norm is None:
        return 1.0
    scale: Any = 1.0
    if isinstance(norm.weight, Tensor):
        scale = norm.weight.detach().double().abs()
    if isinstance(norm.running_var, Tensor):
        scale = scale / (norm.running_var.double() + norm.eps).sqrt()  # type: ignore[operator]  # a tensor, in these modules
    return scale  # type: ignore[no-any-return]  # a tensor, as its parts


def _others(x: Tensor, dim: int) -> list[int]:
    """The sizes of `x` except the first and that of the channels."""
    return [size for position, size in enumerate(x.shape) if position not in (0, dim)]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal up to rounding."""
    if one.shape != other.shape:
        return False
    most = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return not bool((one - other).abs().max() > most)


def target_of(batch: Batch, loss: Loss | None) -> Any:
    """The target of the loss; a guessed loss uses the ``labels`` of a mapping."""
    target = batch.target
    return target["labels"] if loss is None and isinstance(target, Mapping) and "labels" in target else target


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
