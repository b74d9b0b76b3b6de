"""TH7: batch norms, whose state is not what was trained but what was seen, and the two modes of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, joined, plain, readings, samples
from torchhook.rules.kinds import kind_of
from torchhook.rules.registry import register
from torchhook.rules.rest import Norm
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stats.channels import Units
from torchhook.stats.reading import Place, Snapshot


@register
class RunningStatistics(Rule):
    """The running mean of a batch norm is a deviation off that of the batches, or the variances differ by 2.2 times.

    On average over the channels, once it has averaged over enough batches for its momentum (a momentum below 0.005 is
    too small to wait for), of at least 40 values a channel. Then eval mode computes something else.
    """

    code, name = "TH701", "running-statistics"
    needs = (Need("input", "channels", ("batchnorm",)),)
    facts = ("rest",)
    explains = ("TH704",)
    hint = "Check the momentum (0.1 is usual); run some batches in train mode before evaluating; use larger batches."
    wrong = "Very small batches; the first steps of a training; frozen norms on data of another domain."
    shift, factor, samples = 1.0, 2.2, 40

    def find(self, history: History) -> Iterator[Finding]:
        rest = history.after or history.rest
        assert rest is not None
        batches = history.modes.batches if history.modes is not None else [history.whole(0.25)]
        for reading in readings(joined(batches), "input", "channels", "batchnorm"):
            norm = rest.norms.get(reading.path)
            if norm is None or not has_settled(norm) or samples(reading) < self.samples:
                continue
            mean, var = _within((reading.path, reading.port), batches)
            shift = float(((mean - norm.mean).abs() / var.sqrt().clamp(min=1e-12)).mean())
            factor = _factor(var, norm.var)
            if shift > self.shift or factor > self.factor:
                said = (
                    f"running statistics are {shift:.2g} deviations and {factor:.2g} times in variance off the batches"
                )
                yield self.finding(said, reading.path, shift=plain(shift), factor=plain(factor), momentum=norm.momentum)


def has_settled(norm: Norm) -> bool:
    """Whether a batch norm has seen enough batches: next to nothing is left of the variance of one that it began with.

    Too small a momentum is not waited for.
    """
    if norm.batches is None or norm.batches < 10:
        return False
    momentum = norm.momentum or 1.0
    left = (1 - momentum) ** norm.batches if momentum >= 0.005 else 0.0
    return left <= 0.05 * float(norm.var.median())


def _within(place: Place, batches: Sequence[Snapshot]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the channels in a batch, on average over the batches, which is what running ones are of."""
    units = [batch[place]["channels"] for batch in batches if place in batch.rows]
    known = [one for one in units if bool(one.std.isfinite().all())] or units
    return torch.stack([one.mean for one in known]).mean(0), torch.stack([one.std.square() for one in known]).mean(0)


def _factor(a: Tensor, b: Tensor) -> float:
    """By what factor two variances differ, as a mean over the channels that vary."""
    varied = (a > 1e-12) & (b > 0)
    logs = (a[varied].log() - b[varied].log()).abs()
    return math.exp(float(logs.mean())) if len(logs) else 1.0


@register
class UntrainedNorm(Rule):
    """A batch norm is in eval mode and has never seen a batch: it divides by one and subtracts zero."""

    code, name, severity = "TH702", "untrained-norm", Severity.ERROR
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH2", "TH3", "TH4", "TH6", "TH701", "TH704", "TH8")
    hint = "Load the buffers of the checkpoint too (strict=True), or train before model.eval()."
    wrong = "A norm whose running statistics were set by hand."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, norm in history.rest.norms.items():
            fresh = bool((norm.mean == 0).all()) and bool((norm.var == 1).all())
            if not norm.training and not norm.batches and fresh:
                yield self.finding("in eval mode, and it has never seen a batch", path)


@register
class RunningVariance(Rule):
    """A running variance is negative, or below 1e-8 in a channel: eval mode divides by next to nothing."""

    code, name, severity = "TH703", "running-variance", Severity.ERROR
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH101", "TH103", "TH104", "TH2", "TH4", "TH6", "TH701", "TH704")
    hint = "The channel was constant when it was averaged, or the checkpoint is broken: reset it and run some batches."
    wrong = "Channels that are pruned."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, norm in history.rest.norms.items():
            low = int((norm.var < 1e-8).sum())
            if low:
                least = float(norm.var.nan_to_num(1).min())
                said = f"the running variance of {low} of {len(norm.var)} channels is too small: down to {least:.1e}"
                yield self.finding(said, path, channels=low)


@register
class ModesDisagree(Rule):
    """In eval mode the model computes something else than in train mode, on the same batches.

    That is a batch norm whose outputs are shifted by a tenth of their size (root mean square), or changed by 12 % in
    size, on average over the channels; a dropout that makes them 2.3 times as large; or a loss that is twice as large,
    and by a half.
    Batch norms are given thirty batches to catch up with the weights before.
    """

    code, name = "TH704", "modes-disagree"
    facts = ("modes",)
    explains = ("TH601",)
    hint = "Look at the dropout probability, the batch size of batch norms and their momentum."
    wrong = "Strong regularisation that is meant; batches that differ much from each other."
    shift, samples = 0.1, 20
    factors: ClassVar[dict[str, float]] = {"batchnorm": 1.12, "dropout": 2.3}
    times, least = 2.0, 0.5

    def find(self, history: History) -> Iterator[Finding]:
        modes, rest = history.modes, history.after or history.rest
        assert modes is not None
        norms = rest.norms if rest is not None else {}
        if not all(has_settled(norm) for norm in norms.values() if norm.training):
            return  # too few steps to judge by
        named = False
        for reading in readings(modes.train, "output", "channels", *self.factors):
            place = reading.path, reading.port
            if place not in modes.eval.rows:
                continue
            units, kind = reading["channels"], kind_of(reading.module_class)
            shift, factor = _difference(units, modes.eval[place]["channels"])
            if samples(reading) < self.samples:
                continue
            if factor > self.factors[kind] or (kind == "batchnorm" and shift > self.shift):
                said = f"in eval mode outputs are shifted by {shift:.2g} of their size, and {factor:.2g} times as large"
                yield self.finding(said, reading.path, shift=plain(shift), factor=plain(factor))
                named = True
        low, high = sorted((modes.train_loss, modes.eval_loss))
        if not named and low >= 0 and high > self.times * low and high - low > self.least:
            said = f"the loss is {modes.train_loss:.3g} in train mode and {modes.eval_loss:.3g} in eval mode"
            yield self.finding(said, train=plain(modes.train_loss), eval=plain(modes.eval_loss))


def _difference(a: Units, b: Units) -> tuple[float, float]:
    """How far apart the means are, in sizes, and by what factor the sizes differ; means over the channels.

    The size is the root of the mean square, so that what hardly varies is not told from noise.
    """
    size, other = (units.std.square().add(units.mean.square()).sqrt() for units in (a, b))
    known = (size > 1e-6) & (other > 1e-6)
    shift = (a.mean - b.mean).abs() / torch.maximum(size, other).clamp(min=1e-6)
    logs = (size[known] / other[known]).log().abs()
    return float(shift.mean()), math.exp(float(logs.mean())) if len(logs) else 1.0
