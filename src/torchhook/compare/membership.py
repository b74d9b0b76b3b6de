"""`leakage`: what a model and its gradients reveal about the samples that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.compare.auc import Estimate, auc_of, true_positives
from torchhook.compare.features import FeatureReader, Pool, require_pool
from torchhook.compare.gradient_inversion import SharedGradient
from torchhook.compare.membership_signals import FOLDS, SHARED, SampleSignals, gradient_norms, uncounted_layers
from torchhook.core.batch import InputBatches, Loss, ToInputs
from torchhook.core.model_state import state_kept
from torchhook.core.progress import Progress
from torchhook.core.result import Result
from torchhook.core.selection import Sites, require_module, require_sites
from torchhook.core.tap import require_count

_HEADER = ("signal", "AUC", "TPR at 0.1 % FPR", "TPR at 1 % FPR")


class Signal(NamedTuple):
    """How well one signal separates members from others: an `auc` of 0.5 means not at all.

    `tpr_0_1` and `tpr_1` are the true positive rates at false positive rates of 0.1 % and 1 %: the share of members
    found if that share of others is mistaken for members. The interval of `auc` is DeLong's; those of the rates are
    bootstrapped and approximate.
    """

    name: str
    site: str  # of activations
    auc: Estimate
    tpr_0_1: Estimate
    tpr_1: Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Leakage(Result):
    """What a model reveals about its training data.

    Args:
        members, non_members: The numbers of samples.
        signals: The signals, the one that separates best first.
        layer: The linear layer whose gradient reveals samples; None if there is none.
        shared: What its gradient reveals, one entry per batch of members.
        left_out: What could not be examined, and why.
    """

    members: int
    non_members: int
    signals: tuple[Signal, ...]
    layer: str | None
    shared: tuple[SharedGradient, ...]
    left_out: Mapping[str, str]

    @property
    def given_away(self) -> int:
        """How many members can be recovered exactly from the gradients of their batches."""
        return sum(len(batch.inverted) for batch in self.shared)

    def __getitem__(self, name: str) -> Signal:
        found = next((signal for signal in self.signals if _title(signal) == name), None)
        if found is None:
            raise KeyError(f"no signal {name!r}; there are {', '.join(map(_title, self.signals))}")
        return found

    def _records(self) -> list[dict[str, Any]]:
        return [
            {"signal": signal.name, "path": signal.site, **_flat(signal, "auc", "tpr_0_1", "tpr_1")}
            for signal in self.signals
        ]

    def _title(self) -> str:
        return f"Leakage: {self.members} members and {self.non_members} others, 95 % intervals"

    def _foot(self) -> Sequence[str]:
        out = [f"{len(self.left_out)} things were left out: see .left_out"] if self.left_out else []
        return [*out, self._gradients()]

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        return _HEADER, [[_title(signal), *map(str, signal[2:])] for signal in self.signals]

    def _gradients(self) -> str:
        if self.layer is None:
            return f"Shared gradients: not examined ({self.left_out.get(SHARED, 'there are no batches')})"
        total = sum(batch.size for batch in self.shared)
        return (
            f"Shared gradients: that of {self.layer!r} reveals its exact input for {self.given_away} of {total}"
            f" members, in batches of {max(batch.size for batch in self.shared)}"
        )


def leakage(
    model: nn.Module,
    members: Any,
    non_members: Any,
    loss: Loss | None = None,
    *,
    sites: Sites = None,
    pool: Pool = "mean",
    max_samples: int = 2000,
    draws: int = 500,
    generator: torch.Generator | None = None,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Leakage:
    """How well the training samples of a model can be told from others, and what its gradients reveal about them.

    This is a measurement for the owner of a model, on their own data: `members` that it was trained on, and
    `non_members` of the same kind that it has never seen. The signals are each sample's loss, confidence (the logit of
    the correct class against all others, as in LiRA), entropy, and gradient norm over all linear and convolution
    layers, from one backward per batch. In addition, a linear classifier on the output of each layer is scored on
    held-out samples. Buffers that a forward changes are restored.

    Args:
        members, non_members: Yield batches: tuples whose last element is the target, or mappings with ``labels``. What
            a shared gradient reveals depends on the batch size of the members.
        loss: From output and target to a number; it is called with one sample at a time. The default is cross entropy
            if the targets are classes (-100 does not count), and the mean squared error if they have the shape of the
            outputs. Models of sequences need a loss, as do models whose output contains a different loss.
        sites: Queries for the layers; None means every leaf module.
        pool: How the output of a layer becomes the features of a sample; see `compare.shift`.
        max_samples: How many members and how many others to use: the first ones; the last batch is cut.
        draws: How often samples are redrawn for a confidence interval.
        generator: Draws them; by default with the same seed every time.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.compare.membership import leakage
    >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> draw = torch.Generator().manual_seed(0)
    >>> data = [(torch.randn(2, 4, generator=draw), torch.tensor([0, 1])) for _ in range(20)]
    >>> result = leakage(model, data[:10], data[10:])
    >>> result["loss"].auc.low < 0.5 < result["loss"].auc.high, result.layer, result.members
    (True, '0', 20)
    """
    require_module(model)
    members = InputBatches(members, model, batch_to_inputs, "members", targets=True)
    non_members = InputBatches(non_members, model, batch_to_inputs, "non_members", targets=True)
    require_pool(pool)
    require_sites(model, sites, "sites")
    require_count(max_samples, "max_samples")
    require_count(draws, "draws")
    draw = torch.Generator().manual_seed(0) if generator is None else generator
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(state_kept(model))
        reader = stack.enter_context(FeatureReader(model, sites, pool))
        inside = SampleSignals(reader, loss, invert=True).over(members, "members", max_samples, progress)
        outside = SampleSignals(reader, loss, invert=False).over(non_members, "non_members", max_samples, progress)
    left_out = uncounted_layers(model) | outside.left_out | inside.left_out
    signals = [
        *_from_scores(inside, outside, left_out, draws, draw),
        *_from_activations(inside, outside, left_out, draws, draw),
    ]
    signals.sort(key=lambda signal: -signal.auc.value)
    return Leakage(
        inside.count,
        outside.count,
        tuple(signals),
        inside.layer if inside.shared else None,
        tuple(inside.shared),
        left_out,
    )


def _from_scores(
    inside: SampleSignals, outside: SampleSignals, left_out: dict[str, str], draws: int, draw: torch.Generator
) -> list[Signal]:
    """The signals with one score per sample; notes in `left_out` for how many samples a signal is NaN."""
    scores = {name: (inside.scores[name], outside.scores[name]) for name in inside.scores if name in outside.scores}
    signals = []
    for name, sides in (scores | gradient_norms(inside, outside, left_out)).items():
        known = [score[~score.isnan()] for score in map(torch.cat, sides)]
        lost = [sum(map(len, rows)) - len(score) for rows, score in zip(sides, known, strict=True)]
        if any(lost):
            left_out[name] = f"it is NaN for {lost[0]} members and {lost[1]} others, which do not count"
        if min(map(len, known)) >= FOLDS:
            signals.append(_signal(name, "", known[0], known[1], draws, draw))
    return signals


def _from_activations(
    inside: SampleSignals, outside: SampleSignals, left_out: dict[str, str], draws: int, draw: torch.Generator
) -> list[Signal]:
    """One signal per layer, from a classifier on its features; notes in `left_out` which layers have none."""
    signals = []
    for layer_call, rows in inside.features.items():
        if layer_call not in outside.features or str(layer_call) in left_out:
            left_out.setdefault(str(layer_call), "it did not run for both members and others")
            continue
        x, y = torch.cat(rows), torch.cat(outside.features[layer_call])
        if x.shape[1] != y.shape[1]:
            left_out[str(layer_call)] = f"it has {x.shape[1]} features for members and {y.shape[1]} for others"
        elif not (x.isfinite().all() and y.isfinite().all()):
            left_out[str(layer_call)] = "it has values that are not finite"
        else:
            signals.append(_signal("activations", layer_call.path, *_held_out_scores(x, y, draw), draws, draw))
    return signals


def _held_out_scores(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The scores of members and others by a ridge regression, each fitted to the other folds."""
    both = torch.cat([x, y])
    both = (both - both.mean(0)) / both.std(0, correction=0).clamp(min=1e-12)
    side = torch.where(torch.arange(len(both)) < len(x), 1.0 / len(x), -1.0 / len(y)).double()
    folds = torch.cat([torch.randperm(len(part), generator=generator) % FOLDS for part in (x, y)])
    products = both @ both.T / both.shape[1]
    scores = torch.empty(len(both), dtype=torch.float64)
    for fold in range(FOLDS):
        seen, new = (folds != fold).nonzero()[:, 0], (folds == fold).nonzero()[:, 0]
        inner = products[seen][:, seen] + torch.eye(len(seen), dtype=torch.float64)
        scores[new] = products[new][:, seen] @ torch.linalg.solve(inner, side[seen])
    return scores[: len(x)], scores[len(x) :]


def _signal(name: str, site: str, inside: Tensor, outside: Tensor, draws: int, generator: torch.Generator) -> Signal:
    low, high = (true_positives(inside, outside, rate, draws, generator) for rate in (0.001, 0.01))
    return Signal(name, site, auc_of(inside, outside), low, high)


def _title(signal: Signal) -> str:
    return signal.name if signal.name != "activations" else f"activations of {signal.site or 'the model'}"


def _flat(signal: Signal, *names: str) -> dict[str, float]:
    estimates = {name: getattr(signal, name) for name in names}
    return {
        key: number
        for name, found in estimates.items()
        for key, number in zip((name, f"{name}_low", f"{name}_high"), found, strict=True)
    }
