"""TH6: the loss: where it starts, whether it falls, and whether it is the right one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median, variance

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, last_of, plain
from torchhook.rules.loss_graph import shown
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.rules.series import outliers


@register
class LossNotFalling(Rule):
    """The mean loss of the last quarter of the steps is not clearly below that of the first quarter, or even above it.

    Clearly means by two standard errors and by 5%. Judged after forty steps, and not if the loss started near zero. If
    the loss is negative now and then, as that of a policy is, or others are trained in turn, as in a GAN, this is only
    an info.
    """

    code, name = "TH601", "loss-not-falling"
    forgiving = True
    cause = "undertrained"
    phase = Phase.LOSS
    facts = ("losses",)
    uses = (Need("update_ratio"),)
    hint = "Try to overfit one batch. If that works, check the labels and their order; if not, the learning rate."
    wrong = "Losses that are not meant to fall, such as those of a GAN or a policy: do not pass them."
    least, share = 40, 0.05
    usual = (1e-4, 1e-2)  # the size of a step relative to the weights

    def find(self, history: History) -> Iterator[Finding]:
        values = finite(history.losses.values())
        if len(values) < self.least or self._is_small(history, values):
            return
        is_return = history.is_contest or sum(value < 0 for value in values) > 0.05 * len(values)  # of a policy, say
        quarter = len(values) // 4
        first, last = values[:quarter], values[-quarter:]
        error = math.sqrt((variance(first) + variance(last)) / quarter)
        fall = fmean(first) - fmean(last)
        evidence = {"first": plain(fmean(first)), "last": plain(fmean(last)), "error": plain(error)}
        if fall < -3 * error and fall < -self.share * abs(fmean(first)):
            message = f"the loss rises from {fmean(first):.3g} to {fmean(last):.3g}"
            yield self.finding(message, "", None, "info" if is_return else "error", **evidence, cause="divergence")
        elif fall < max(2 * error, self.share * abs(fmean(first))):
            message = f"the loss does not fall: {fmean(first):.3g} at the start, {fmean(last):.3g} at the end"
            cause = "rate" if self._moves_oddly(history) else self.cause
            yield self.finding(message, "", None, "info" if is_return else None, **evidence, cause=cause)

    def _moves_oddly(self, history: History) -> bool:
        """Whether the steps of the optimizer are far from the usual 0.1% of the weights."""
        table = history.summaries("update_ratio").values()
        sizes = finite(moments.mean for by_step in table for moments in by_step.values())
        return bool(sizes) and not self.usual[0] < median(sizes) < self.usual[1]

    def _is_small(self, history: History, values: list[float]) -> bool:
        """Whether the loss was so small from the start that there is little left to learn."""
        return history.classes > 1 and fmean(values[: len(values) // 4]) < 0.1 * math.log(history.classes)


@register
class Divergence(Rule):
    """The loss grows by orders of magnitude: it ends a hundred times above its start and its lowest value.

    Judged by the logarithm, over the steps since the loss was lowest: at least three of them, most of which raise it,
    or one if the loss is no longer finite after it, which is the end of the same growth. A loss that falls below zero
    counts if it ends at a hundred times the size of its start, and of one: it has no lower end. That is an info where
    others are trained in turn, as in a GAN.
    """

    code, name, severity = "TH606", "divergence", Severity.ERROR
    cause = "divergence"
    phase = Phase.LOSS
    facts = ("losses",)
    explains = ("TH1", "TH2", "TH4", "TH6", "TH7", "TH8")
    hint = "Lower the learning rate by ten; if that does not help, clip the gradient norm and check the loss's sign."
    wrong = "Losses that are not meant to fall, such as those of a GAN."
    times, least = 100.0, 3

    def find(self, history: History) -> Iterator[Finding]:
        yield from self._endless(history)
        known = {step: loss for step, loss in history.losses.items() if math.isfinite(loss) and loss > 0}
        breaks = bool(history.losses) and not math.isfinite(list(history.losses.values())[-1])
        least = 1 if breaks else self.least
        if len(known) <= least:
            return
        steps = list(known)
        lowest = min(steps, key=known.__getitem__)
        since = steps[steps.index(lowest) :]
        last = known[steps[-1]] if breaks else math.exp(fmean(math.log(known[step]) for step in steps[-2:]))
        growth = math.log(last / max(known[lowest], known[steps[0]]))
        rises = sum(known[b] > known[a] for a, b in pairwise(since))
        if len(since) <= least or growth < math.log(self.times) or rises < 0.6 * (len(since) - 1):
            return
        factor = math.exp((math.log(known[steps[-1]]) - math.log(known[lowest])) / (steps[-1] - lowest))
        message = f"the loss diverges: from {known[lowest]:.3g} to {known[steps[-1]]:.3g}, times {factor:.3g} per step"
        yield self.finding(message, "", lowest, factor=plain(factor), last=plain(known[steps[-1]]))

    def _endless(self, history: History) -> Iterator[Finding]:
        """A loss that falls below zero, and on and on."""
        values = finite(history.losses.values())
        quarter = len(values) // 4
        if not quarter or max(values[-quarter:]) > -self.times * max(abs(values[0]), 1.0):
            return
        message = f"the loss falls without end: from {values[0]:.3g} to {values[-1]:.3g}"
        severity = "info" if history.is_contest else None
        yield self.finding(message, "", history.first_step, severity, last=plain(values[-1]))


@register
class LossSpike(Rule):
    """The loss jumps for one step to over three times, and six robust deviations above, the median of eight before.

    Only if it is then nearly as high as at the start: a loss near zero jumps by itself. An info where others are
    trained in turn, as in a GAN.
    """

    code, name = "TH602", "loss-spike"
    cause = "divergence"
    phase = Phase.LOSS
    facts = ("losses",)
    explains = ("TH2", "TH403", "TH601")
    hint = "Inspect the batch of that step; clip the gradient norm; lower the learning rate."
    wrong = "Batches of very different difficulty or length; a loss near zero."
    noise = 32  # losses to judge the noise of the batches by: a few of small batches may be close by chance

    def find(self, history: History) -> Iterator[Finding]:
        for step, times in outliers(history.losses, factor=3, little=0.7, noise=self.noise):
            message = f"the loss jumped to {times:.0f} times its recent level"
            severity = "info" if history.is_contest else None
            yield self.finding(message, "", step, severity, loss=plain(history.losses[step]), times=plain(times))


@register
class InitialLoss(Rule):
    """The first cross entropy exceeds ln C, the loss of guessing among C classes, by more than half of it and by one.

    The model does not start undecided but confidently wrong: its logits are too large.
    """

    code, name = "TH603", "initial-loss"
    forgiving = True
    cause = "init"
    phase = Phase.LOSS
    uses = (Need("output"),)
    facts = ("terms", "losses")
    explains = ("TH602",)
    hint = "Make the initial weights of the last layer smaller, or zero."
    wrong = "Fine-tuning on labels that mean something different than before."

    def find(self, history: History) -> Iterator[Finding]:
        classes, loss = history.classes, history.losses.get(history.first_step, math.nan)
        if classes < 2 or not math.isfinite(loss):
            return
        chance = math.log(classes)
        if loss - chance > max(1.0, 0.5 * chance):
            message = f"the first loss is {loss:.3g}, but guessing would give ln {classes} = {chance:.3g}"
            yield self.finding(
                message, last_of(history, "weight"), history.first_step, loss=plain(loss), chance=plain(chance)
            )


@register
class Broadcast(Rule):
    """Output and target differ in shape, and the loss broadcasts them: it compares every output with every target.

    Detected by computing the loss with the targets in another order, which does not change it, or by the graph of the
    loss.
    """

    code, name, severity = "TH605", "broadcast-loss", Severity.ERROR
    cause = "output-target-mismatch"
    phase = Phase.REST
    facts = ("losses",)
    explains = ("TH601", "TH603")
    hint = "Give both the same shape: output.squeeze(-1), or target.unsqueeze(-1)."
    wrong = "A loss that compares all outputs with all targets on purpose."

    def find(self, history: History) -> Iterator[Finding]:
        task = history.task
        if task is not None:
            shapes = f"{shown(task.output_shape)} against {shown(task.target_shape)}" if task.broadcast else ""
        else:
            shapes = next((term.broadcast for term in history.comparisons if term.broadcast), "")
        if shapes:
            yield self.finding(f"the loss broadcasts output against target: {shapes}", "", output=shapes)
