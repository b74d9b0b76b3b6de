"""TH7: batch norms, whose running statistics are measured rather than trained, and train against eval mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, Modes, joined, plain, readings, samples
from torchhook.rules.registry import register
from torchhook.rules.rest import NormState
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stats.channels import Units
from torchhook.stats.reading import Place, Reading, Snapshot

_YOUNG = 30  # steps


@register
class RunningStatistics(Rule):
    """A batch norm's running mean is off by more than a standard deviation, or its variance by a factor above 2.2.

    Compared with the batches, averaged over the channels, with at least 40 values per channel, and once it has seen
    enough batches for its momentum (a momentum below 0.005 is too small to wait for). Eval mode then computes something
    different from train mode. A training of fewer than thirty steps is too young to judge.
    """

    code, name = "TH701", "running-statistics"
    cause = "mode"
    needs = (Need("input", "channels", ("batchnorm",)),)
    facts = ("rest",)
    explains = ("TH704",)
    hint = "Check the momentum (0.1 is usual); run some batches in train mode before evaluating; use larger batches."
    wrong = "Very small batches; the first steps of a training; frozen norms on data from another domain."
    shift, factor, samples = 1.0, 2.2, 40

    def find(self, history: History) -> Iterator[Finding]:
        rest = history.after or history.rest
        assert rest is not None
        if is_young(history):
            return
        batches = history.modes.batches if history.modes is not None else [history.whole(0.25)]
        for reading in readings(joined(batches), "input", "channels", "batchnorm"):
            norm = rest.norms.get(reading.path)
            if norm is None or not has_settled(norm) or samples(reading) < self.samples:
                continue
            mean, var = _within((reading.path, reading.port), batches)
            shift = float(((mean - norm.mean).abs() / var.sqrt().clamp(min=1e-12)).mean())
            factor = _factor(var, norm.var)
            if shift > self.shift or factor > self.factor:
                message = (
                    f"its running mean is {shift:.2g} standard deviations from that of the batches,"
                    f" and its running variance differs by a factor of {factor:.2g}"
                )
                yield self.finding(
                    message, reading.path, shift=plain(shift), factor=plain(factor), momentum=norm.momentum
                )


def is_young(history: History) -> bool:
    """Whether so few steps were taken that the weights, and with them the running statistics, still change fast."""
    return history.after is not None and len(history.losses) < _YOUNG


def has_settled(norm: NormState) -> bool:
    """Whether a batch norm has seen enough batches: hardly anything is left of its initial variance of one.

    If the momentum is very small, ten batches are enough.
    """
    if norm.batches is None or norm.batches < 10:
        return False
    momentum = norm.momentum or 1.0
    left = (1 - momentum) ** norm.batches if momentum >= 0.005 else 0.0
    return left <= 0.05 * float(norm.var.median())


def _within(place: Place, batches: Sequence[Snapshot]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the channels within a batch, averaged over the batches, as running statistics are."""
    units = [batch[place]["channels"] for batch in batches if place in batch.rows]
    known = [one for one in units if bool(one.std.isfinite().all())] or units
    return torch.stack([one.mean for one in known]).mean(0), torch.stack([one.std.square() for one in known]).mean(0)


def _factor(a: Tensor, b: Tensor) -> float:
    """The factor by which two variances differ, averaged over the channels that vary."""
    varied = (a > 1e-12) & (b > 0)
    logs = (a[varied].log() - b[varied].log()).abs()
    return math.exp(float(logs.mean())) if len(logs) else 1.0


@register
class UntrainedNorm(Rule):
    """A batch norm is in eval mode but has never seen a batch: it subtracts zero and divides by one."""

    code, name, severity = "TH702", "untrained-norm", Severity.ERROR
    cause = "mode"
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH2", "TH3", "TH4", "TH6", "TH701", "TH704", "TH8")
    hint = "Load the buffers of the checkpoint as well (strict=True), or train before model.eval()."
    wrong = "A norm whose running statistics were set by hand."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, norm in history.rest.norms.items():
            fresh = bool((norm.mean == 0).all()) and bool((norm.var == 1).all())
            if not norm.training and not norm.batches and fresh:
                yield self.finding("it is in eval mode but has never seen a batch", path)


@register
class RunningVariance(Rule):
    """The running variance of a channel is negative or below 1e-8: eval mode divides by almost zero."""

    code, name, severity = "TH703", "running-variance", Severity.ERROR
    cause = "mode"
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH101", "TH103", "TH104", "TH2", "TH4", "TH6", "TH701", "TH704")
    hint = "The channel was constant, or the checkpoint is corrupt: reset it and run some batches in train mode."
    wrong = "Pruned channels."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, norm in history.rest.norms.items():
            low = int((norm.var < 1e-8).sum())
            if low:
                least = float(norm.var.nan_to_num(1).min())
                message = f"the running variance of {low} of {len(norm.var)} channels is too small: down to {least:.1e}"
                yield self.finding(message, path, channels=low)


@register
class ModesDisagree(Rule):
    """On the same batches, the model computes something different in eval mode than in train mode, and does worse.

    The outputs of a batch norm are shifted by a tenth of their size (root mean square) or change in size by 12%,
    averaged over the channels, and the loss is a fifth higher in eval mode, or there are at most eight values per
    channel and batch; a change in size by 50% is enough by itself. The outputs of a dropout change in size by a factor
    of 2.3, beyond what the dropouts before it do. Or the loss is twice as high in eval mode, and higher by a half. Or a
    function such as ``F.dropout`` is active in eval mode.
    Batch norms first see thirty batches, to catch up with the weights; a training of fewer steps is too young to judge.
    """

    code, name = "TH704", "modes-disagree"
    cause = "mode"
    facts = ("modes",)
    explains = ("TH601",)
    hint = "Check the dropout probability, and the batch size and momentum of batch norms."
    wrong = "Strong regularisation or dropout in eval mode on purpose; batches that differ a lot from each other."
    shift, factor, much, dropped = 0.1, 1.12, 1.5, 2.3
    worse, times, least = 1.2, 2.0, 0.5
    samples, few = 20, 8

    def find(self, history: History) -> Iterator[Finding]:
        modes, rest = history.modes, history.after or history.rest
        assert modes is not None
        for line, path in modes.dropping.items():
            message = f"dropout is active in eval mode; pass training=self.training to it: {line}"
            yield self.finding(message, path, line=line)
        norms = [norm for norm in (rest.norms if rest is not None else {}).values() if norm.training]
        if not all(map(has_settled, norms)) or (norms and is_young(history)):
            return
        named = False
        for path, shift, factor in (*self._norms(modes), *self._dropouts(modes)):
            message = (
                f"in eval mode its outputs shift by {shift:.2g} of their size and change in size"
                f" by a factor of {factor:.2g}"
            )
            yield self.finding(message, path, shift=plain(shift), factor=plain(factor))
            named = True
        train, evaluated = modes.train_loss, modes.eval_loss
        if not named and train >= 0 and evaluated > self.times * train and evaluated - train > self.least:
            message = f"the loss is {train:.3g} in train mode and {evaluated:.3g} in eval mode"
            yield self.finding(message, train=plain(train), eval=plain(evaluated))

    def _norms(self, modes: Modes) -> Iterator[tuple[str, float, float]]:
        """Batch norms that do something else in eval mode: the path, the shift and the factor."""
        is_worse = modes.eval_loss > self.worse * modes.train_loss
        for reading, shift, factor in self._compared(modes, "batchnorm"):
            is_tiny = samples(reading) <= self.few * len(modes.batches)
            differs = factor > self.factor or shift > self.shift
            if factor > self.much or (differs and (is_worse or is_tiny)):
                yield reading.path, shift, factor

    def _dropouts(self, modes: Modes) -> Iterator[tuple[str, float, float]]:
        """Dropouts that drop too much: the path, the shift and the factor."""
        before = 1.0  # what the dropouts so far have done: it adds up over the layers
        for reading, shift, factor in self._compared(modes, "dropout"):
            if factor > self.dropped * before:
                yield reading.path, shift, factor
            before = max(before, factor)

    def _compared(self, modes: Modes, kind: str) -> Iterator[tuple[Reading, float, float]]:
        """The modules of a kind in train mode, and how far their outputs shift and by which factor they change."""
        for reading in readings(modes.train, "output", "channels", kind):
            place = reading.path, reading.port
            if place in modes.eval.rows and samples(reading) >= self.samples:
                yield reading, *_difference(reading["channels"], modes.eval[place]["channels"])


@register
class WrongMode(Rule):
    """A model with dropout or batch norms is trained in eval mode, or evaluated in train mode.

    Trained: all backwards that were seen follow a forward with the whole model in eval mode; batch norms that alone are
    in eval mode are frozen on purpose. Evaluated: there are at least three forwards in a row without gradients in train
    mode, after training has begun, and none in eval mode.
    """

    code, name = "TH705", "wrong-mode"
    cause = "mode"
    facts = ("loop",)
    explains = ("TH601", "TH701", "TH702")
    hint = "Call model.train() before training and model.eval() before evaluating."
    wrong = "Dropout that stays on in evaluation on purpose; a fine-tuning that is meant to run in eval mode."
    least = 5

    def find(self, history: History) -> Iterator[Finding]:
        loop = history.loop
        assert loop is not None
        if not loop.switches:
            return
        what = f"{len(loop.switches)} dropouts and batch norms"
        if loop.trained >= self.least and loop.trained_in_eval == loop.trained:
            yield self.finding(f"it is trained in eval mode, in which its {what} do nothing", modules=loop.switches[:5])
        if loop.evaluated_in_train and not loop.evaluated_in_eval:
            message = f"it is evaluated in train mode, {loop.evaluated_in_train} times: its {what} are active"
            yield self.finding(message, modules=loop.switches[:5], forwards=loop.evaluated_in_train)


def _difference(a: Units, b: Units) -> tuple[float, float]:
    """The distance of the means, relative to the size, and the factor between the sizes; averaged over the channels.

    The size is the root mean square rather than the deviation, so that channels that hardly vary do not amplify noise.
    """
    size, other = (units.std.square().add(units.mean.square()).sqrt() for units in (a, b))
    known = (size > 1e-6) & (other > 1e-6)
    shift = (a.mean - b.mean).abs() / torch.maximum(size, other).clamp(min=1e-6)
    logs = (size[known] / other[known]).log().abs()
    return float(shift.mean()), math.exp(float(logs.mean())) if len(logs) else 1.0
