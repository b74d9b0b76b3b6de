"""`leakage`: what a model and its gradients give away of the samples that it was trained on."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.compare.auc import Estimate, auc_of, true_positives
from torchhook.compare.features import Gathering, Place, Pool, require_pool
from torchhook.compare.sample_gradients import GHOSTS, Backward, Flow, backward, not_by_sample
from torchhook.core.batch import Batch, Loss, batch_count, fitted, main_tensor, require_loader, samples_of
from torchhook.core.model_state import state_kept
from torchhook.core.progress import track
from torchhook.core.selection import Query, require_module, require_sites
from torchhook.core.tap import require_count
from torchhook.core.text import html_table, shape_of, table
from torchhook.core.trees import leaves, mapped

_FOLDS = 5
_IGNORED = -100  # a target that counts for nothing, as in torch's cross entropy
_PASS = "pass loss=, a function from the output and the target of one sample to its loss"
_EXACT = 1e-3  # how far, of its norm, what was inverted may be from the sample for it to be given away


class Signal(NamedTuple):
    """How well membership can be told from one thing: 0.5 of `auc`, and the rate itself of the others, is not at all.

    `tpr_0_1` and `tpr_1` are the shares of members that are told apart where 0.1 % and 1 % of the others are mistaken
    for members. Of `auc` the interval is DeLong's, of these it is by the bootstrap, and approximate.
    """

    name: str
    site: str  # of activations
    auc: Estimate
    tpr_0_1: Estimate
    tpr_1: Estimate


class Shared(NamedTuple):
    """What the gradient of one batch gives away of it, if it is shared.

    A unit of the first linear layer that is active for one sample alone has that sample's gradient, and dL/dW over
    dL/db is what the layer was given. `alone` are the numbers of the samples that have such a unit, `inverted` those
    that came out right when it was done.
    """

    size: int
    alone: tuple[int, ...]
    inverted: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Leakage:
    """What can be told of the training data.

    Args:
        members, non_members: How many samples there were.
        signals: The one that tells best first.
        layer: The linear layer whose gradient gives samples away; None if there is none.
        shared: What it gives away, by batch of the members.
        left_out: What could not be looked at, and why.
    """

    members: int
    non_members: int
    signals: tuple[Signal, ...]
    layer: str | None
    shared: tuple[Shared, ...]
    left_out: Mapping[str, str]

    @property
    def given_away(self) -> int:
        """How many members come out of the gradients of their batches exactly."""
        return sum(len(batch.inverted) for batch in self.shared)

    def __getitem__(self, name: str) -> Signal:
        found = next((signal for signal in self.signals if _title(signal) == name), None)
        if found is None:
            raise KeyError(f"there is no signal {name!r}, but {', '.join(map(_title, self.signals))}")
        return found

    def table(self) -> list[dict[str, Any]]:
        """A plain dictionary a signal, for pandas and the like."""
        return [
            {"signal": signal.name, "site": signal.site, **_flat(signal, "auc", "tpr_0_1", "tpr_1")}
            for signal in self.signals
        ]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows())}\n{self._given()}"

    def _repr_html_(self) -> str:
        title, given = html.escape(self._title()), html.escape(self._given())
        return f"<p>{title}</p>{html_table(_HEADER, self._rows())}<p>{given}</p>"

    def _title(self) -> str:
        return f"Leakage: {self.members} members and {self.non_members} others, 95 % intervals"

    def _rows(self) -> list[list[str]]:
        return [[_title(signal), *map(str, signal[2:])] for signal in self.signals]

    def _given(self) -> str:
        if self.layer is None:
            return f"Shared gradients: not looked at ({self.left_out.get(_SHARED, 'there is no batch')})"
        total = sum(batch.size for batch in self.shared)
        return (
            f"Shared gradients: that of {self.layer!r} gives away what {self.given_away} of {total} members"
            f" put into it, exactly, in batches of {max(batch.size for batch in self.shared)}"
        )


def leakage(
    model: nn.Module,
    members: Iterable[Any],
    non_members: Iterable[Any],
    loss: Loss | None = None,
    *,
    sites: Query | Iterable[Query] | None = None,
    pool: Pool = "mean",
    max_samples: int = 2000,
    draws: int = 500,
    generator: torch.Generator | None = None,
    progress: TextIO | None = sys.stderr,
) -> Leakage:
    """How well those that a model was trained on can be told from others, and what its gradients give away of them.

    This is a measurement for whoever owns the model, on data of their own: `members` it was trained on, and
    `non_members` of the same kind that it has never seen. The signals are each sample's loss, confidence (the logit of
    the right class against all others, as LiRA takes it), entropy, and the norm of its own gradient of all linear and
    convolution layers, from one backward a batch; and for each layer what it gives, by a linear classifier on samples
    that it was not fitted to. Buffers that a forward writes are afterwards as before.

    Args:
        members, non_members: Give batches: tuples whose last is the target, or mappings with ``labels``. What a shared
            gradient gives away depends on how large those of the members are.
        loss: From output and target to a number; it is called with one sample at a time. Without one it is cross
            entropy if the targets are classes (-100 does not count), the mean square if they look like the outputs. A
            model of sequences needs one, as does one whose output brings another loss along.
        sites: Queries for the layers; None means every leaf.
        pool: How the output of a layer becomes the features of a sample; see `compare.shift`.
        max_samples: Of each kind, as many are looked at, the first; the last batch is cut.
        draws: How often samples are drawn anew for a confidence interval.
        generator: Draws them; by itself the same every time.
        progress: Where to show it; only a terminal does.

    >>> from torchhook.compare.membership import leakage
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> draw = torch.Generator().manual_seed(0)
    >>> data = [(torch.randn(2, 4, generator=draw), torch.tensor([0, 1])) for _ in range(20)]
    >>> result = leakage(model, data[:10], data[10:])
    >>> result["loss"].auc.low < 0.5 < result["loss"].auc.high, result.layer, result.members
    (True, '0', 20)
    """
    require_module(model)
    require_loader(members, "members")
    require_loader(non_members, "non_members")
    require_pool(pool)
    require_sites(model, sites, "sites")
    require_count(max_samples, "max_samples")
    require_count(draws, "draws")
    draw = torch.Generator().manual_seed(0) if generator is None else generator
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(state_kept(model))
        gathering = stack.enter_context(Gathering(model, sites, pool))
        inside = Side(gathering, loss, shares=True).over(members, "members", max_samples, progress)
        outside = Side(gathering, loss, shares=False).over(non_members, "non_members", max_samples, progress)
    left_out = _never_counted(model) | outside.left_out | inside.left_out
    scores = {name: (inside.scores[name], outside.scores[name]) for name in inside.scores if name in outside.scores}
    signals = []
    for name, sides in (scores | _gradient_norms(inside, outside, left_out)).items():
        known = [score[~score.isnan()] for score in map(torch.cat, sides)]
        lost = [sum(map(len, rows)) - len(score) for rows, score in zip(sides, known, strict=True)]
        if any(lost):
            left_out[name] = f"it is NaN for {lost[0]} members and {lost[1]} others, which do not count in it"
        if min(map(len, known)) >= _FOLDS:
            signals.append(_signal(name, "", known[0], known[1], draws, draw))
    for place, rows in inside.features.items():
        if place not in outside.features or str(place) in left_out:
            left_out.setdefault(str(place), "it did not run for both")
            continue
        x, y = torch.cat(rows), torch.cat(outside.features[place])
        if x.shape[1] != y.shape[1]:
            left_out[str(place)] = f"it has {x.shape[1]} features for members and {y.shape[1]} for others"
        elif not (x.isfinite().all() and y.isfinite().all()):
            left_out[str(place)] = "it gave values that are not finite"
        else:
            signals.append(_signal("activations", place.path, *_told_apart(x, y, draw), draws, draw))
    signals.sort(key=lambda signal: -signal.auc.value)
    return Leakage(
        inside.count,
        outside.count,
        tuple(signals),
        inside.layer if inside.shared else None,
        tuple(inside.shared),
        left_out,
    )


class Side:
    """The members, or the others: a number a sample for every signal, and the features of every layer."""

    def __init__(self, gathering: Gathering, loss: Loss | None, *, shares: bool) -> None:
        self.gathering = gathering
        self.loss = loss
        self.shares = shares
        self.count = 0
        self.batches = 0
        self.scores: dict[str, list[Tensor]] = {}
        self.squares: dict[str, list[Tensor]] = {}  # of the gradients, by layer
        self.apart: set[str] | None = None  # layers that do not see a row a sample, once that is known
        self.features: dict[Place, list[Tensor]] = {}
        self.left_out: dict[str, str] = {}
        self.layer: str | None = None
        self.shared: list[Shared] = []

    def over(self, loader: Iterable[Any], argument: str, most: int, progress: TextIO | None) -> Side:
        """All batches, until there are `most` samples."""
        for data in track(loader, batch_count(loader), argument, progress):
            self._add(data, most - self.count)
            if self.count >= most:
                break
        if self.count < _FOLDS:
            raise ValueError(f"{argument} gave {self.count} samples, and {_FOLDS} are needed at least")
        return self

    def _add(self, data: Any, most: int) -> None:
        model = self.gathering.model
        count = samples_of(Batch.of(data)).length
        if not count:
            return
        data, count = _first_rows(data, most, count), min(most, count)
        self.gathering.run(data, self._take)
        batch = Batch.of(fitted(data, model))
        batch = Batch(batch.arguments, _target(batch))
        if self.apart is None and count > 1:
            fewer = fitted(_first_rows(data, count - 1, count), model)
            self.apart = not_by_sample(model, Batch.of(fewer), count - 1)
        found = backward(model, batch, _losses(self.loss, count))
        self._score("loss", -found.losses)
        for name, score in _confidence(found.output, batch.target, count).items():
            self._score(name, score)
        self._add_gradients(found, count)
        if self.shares:
            self._add_shared(found.flows)
        self.count += count
        self.batches += 1

    def _take(self, place: Place, rows: Tensor | str) -> None:
        if isinstance(rows, str):
            self.left_out[str(place)] = rows
        else:
            self.features.setdefault(place, []).append(rows.double().cpu())

    def _score(self, name: str, scores: Tensor) -> None:
        self.scores.setdefault(name, []).append(scores.double().cpu())

    def _add_gradients(self, found: Backward, count: int) -> None:
        unknown = found.losses.isnan()
        for path, flow in found.flows.items():
            squares = "it does not see a row a sample" if path in (self.apart or ()) else flow.squares(count)
            if isinstance(squares, str):
                self.left_out[f"gradient of {path!r}"] = squares
            else:
                self.squares.setdefault(path, []).append(squares.masked_fill(unknown, torch.nan).cpu())

    def _add_shared(self, flows: dict[str, Flow]) -> None:
        """What the gradient of the first linear layer gives away, if anything."""
        path = next((path for path, flow in flows.items() if isinstance(flow.module, nn.Linear)), None)
        reason = "there is no linear layer" if path is None else _no_inversion(path, flows[path])
        if reason or path is None:
            self.left_out[_SHARED] = reason
            return
        self.layer = path
        self.shared.append(_given_away(flows[path]))


def _never_counted(model: nn.Module) -> dict[str, str]:
    """Layers whose parameters have gradients that are not in the norm, by class."""
    names = {
        type(module).__name__: None
        for module in model.modules()
        if not isinstance(module, GHOSTS) and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    return {f"gradients of {name}": "the norm is that of linear and convolution layers" for name in names}


def _gradient_norms(
    inside: Side, outside: Side, left_out: dict[str, str]
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The norms over all layers that were counted in every batch: with others, samples could not be compared."""
    paths = []
    for path, module in inside.gathering.model.named_modules():
        if not isinstance(module, GHOSTS) or f"gradient of {path!r}" in left_out:
            continue
        if all(len(side.squares.get(path, ())) == side.batches for side in (inside, outside)):
            paths.append(path)
        else:
            left_out[f"gradient of {path!r}"] = "it was not called in every batch"
    if not paths:
        left_out["gradient norm"] = "there is no layer that it can be had of"
        return {}
    norms = [
        [-torch.stack(rows).sum(0).sqrt() for rows in zip(*(side.squares[path] for path in paths), strict=True)]
        for side in (inside, outside)
    ]
    return {"gradient norm": (norms[0], norms[1])}


def _no_inversion(path: str, flow: Flow) -> str:
    """Why what a linear layer is given cannot be had from its gradient; empty if it can."""
    layer: Any = flow.module
    if layer.bias is None:
        return f"{path!r} has no bias, by whose gradient that of the weight would be divided"
    if not (layer.weight.requires_grad and layer.bias.requires_grad):
        return f"{path!r} is frozen, so it has no gradient that could be shared"
    if len(flow.inputs) > 1 or flow.inputs[0].dim() != 2:
        return f"{path!r} is called for several positions of a sample"
    if not all(total.isfinite().all() for total in flow.totals.values()):
        return f"the gradient of {path!r} is not finite"
    return ""


def _given_away(flow: Flow) -> Shared:
    """The samples that have a unit for themselves, and those that the gradient of that unit is inverted to."""
    x, gradient = flow.inputs[0], flow.gradients[0]
    active = gradient != 0
    mine = torch.where(active & (active.sum(0) == 1), gradient.abs(), 0.0)  # samples × units
    size, unit = mine.max(1)
    alone = size > 0
    inverted = flow.totals["weight"][unit] / flow.totals["bias"][unit, None]
    off = (inverted - x).norm(dim=1) / x.norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
    numbers = (tuple(mask.nonzero()[:, 0].tolist()) for mask in (alone, alone & (off < _EXACT)))
    return Shared(len(x), *numbers)


def _losses(loss: Loss | None, count: int) -> Callable[[Any, Any], Tensor]:
    """A function of output and target that gives each sample's loss."""

    def by_sample(output: Any, target: Any) -> Tensor:
        if loss is not None:
            rows = [(_row(output, number, count), _row(target, number, count)) for number in range(count)]
            return torch.stack([loss(*row).mean() for row in rows])
        prediction = main_tensor(output)
        if _are_classes(prediction, target):
            _require_no_sequence(prediction, target)
            each = F.cross_entropy(prediction, target.long(), reduction="none", ignore_index=_IGNORED)
            counts = (target != _IGNORED).reshape(count, -1)
        elif isinstance(target, Tensor) and target.shape == prediction.shape and target.is_floating_point():
            each = (prediction - target).square()
            counts = torch.ones_like(each, dtype=torch.bool).reshape(count, -1)
        else:
            raise ValueError(f"the targets are neither classes nor like the outputs, so the loss is not known; {_PASS}")
        _require_same(output, each.sum() / counts.sum())
        mean = each.reshape(count, -1).sum(1) / counts.sum(1).clamp(min=1)
        return torch.where(counts.any(1), mean, torch.nan)

    return by_sample


def _require_no_sequence(prediction: Tensor, target: Tensor) -> None:
    """Raise for scores of tokens: whether they are of this token or the next, nothing here tells."""
    if target.dim() > 1 and prediction.shape[:-1] == target.shape:
        raise ValueError(
            f"the outputs are {shape_of(prediction)} and the targets {shape_of(target)}, as those of a sequence, and"
            f" which output is of which target is not known; {_PASS}"
        )


def _require_same(output: Any, mean: Tensor) -> None:
    """Raise if the output brings a loss along that is another than the one that is guessed."""
    brought = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(brought, Tensor):
        return
    own, guessed = brought.detach().mean().item(), mean.detach().item()
    if abs(own - guessed) > max(1e-3, 4 * torch.finfo(mean.dtype).eps) * max(abs(own), abs(guessed)):
        raise ValueError(f"the model's own loss of a batch is {own:.4g}, and what is guessed {guessed:.4g}; {_PASS}")


def _confidence(output: Any, target: Any, count: int) -> dict[str, Tensor]:
    """Confidence and entropy of each sample, of a model that classifies."""
    logits = next((leaf for _, leaf in leaves(output) if leaf.is_floating_point()), None)
    if logits is None:
        return {}
    logits = main_tensor(output).detach().double()
    if not (_are_classes(logits, target) and logits.dim() == 2 and logits.shape[1] > 1 and len(logits) == count):
        return {}
    ignored = target == _IGNORED
    right = target.long().masked_fill(ignored, 0)[:, None]
    others = logits.scatter(1, right, -torch.inf).logsumexp(1)
    entropy = torch.special.entr(logits.softmax(1)).sum(1)
    found = {"confidence": logits.gather(1, right)[:, 0] - others, "entropy": -entropy}
    return {name: score.masked_fill(ignored, torch.nan) for name, score in found.items()}


def _told_apart(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores of members and of others by a ridge regression that was fitted to the other folds."""
    both = torch.cat([x, y])
    both = (both - both.mean(0)) / both.std(0, correction=0).clamp(min=1e-12)
    side = torch.where(torch.arange(len(both)) < len(x), 1.0 / len(x), -1.0 / len(y)).double()
    folds = torch.cat([torch.randperm(len(part), generator=generator) % _FOLDS for part in (x, y)])
    products = both @ both.T / both.shape[1]
    scores = torch.empty(len(both), dtype=torch.float64)
    for fold in range(_FOLDS):
        seen, new = (folds != fold).nonzero()[:, 0], (folds == fold).nonzero()[:, 0]
        inner = products[seen][:, seen] + torch.eye(len(seen), dtype=torch.float64)
        scores[new] = products[new][:, seen] @ torch.linalg.solve(inner, side[seen])
    return scores[: len(x)], scores[len(x) :]


def _signal(name: str, site: str, inside: Tensor, outside: Tensor, draws: int, generator: torch.Generator) -> Signal:
    low, high = (true_positives(inside, outside, rate, draws, generator) for rate in (0.001, 0.01))
    return Signal(name, site, auc_of(inside, outside), low, high)


def _target(batch: Batch) -> Any:
    target = batch.target
    return target["labels"] if isinstance(target, Mapping) and "labels" in target else target


def _are_classes(prediction: Tensor, target: Any) -> bool:
    return (
        isinstance(target, Tensor)
        and target.dtype in (torch.int64, torch.int32)
        and target.dim() == prediction.dim() - 1
    )


def _first_rows(data: Any, most: int, count: int) -> Any:
    """A batch of `count` samples, or the first `most` of it."""
    return data if most >= count else mapped(lambda x: x[:most] if x.dim() and len(x) == count else x, data)


def _row(value: Any, number: int, count: int) -> Any:
    """One sample of every tensor in `value`."""
    return mapped(lambda x: x[number : number + 1] if x.dim() and len(x) == count else x, value)


def _title(signal: Signal) -> str:
    return signal.name if signal.name != "activations" else f"activations of {signal.site or 'the model'}"


def _flat(signal: Signal, *names: str) -> dict[str, float]:
    estimates = {name: getattr(signal, name) for name in names}
    return {
        key: number
        for name, found in estimates.items()
        for key, number in zip((name, f"{name}_low", f"{name}_high"), found, strict=True)
    }


_HEADER = ("signal", "AUC", "TPR at 0.1 % FPR", "TPR at 1 % FPR")
_SHARED = "shared gradients"
