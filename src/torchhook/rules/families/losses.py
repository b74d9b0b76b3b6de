"""TH6: the loss: where it begins, whether it falls, and whether it is the right one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, variance

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, last_of, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.rules.series import outliers


@register
class LossNotFalling(Rule):
    """The mean loss of the last quarter of steps is not clearly below that of the first quarter, or even above it.

    Clearly is two standard errors and a twentieth. Asked after forty steps, and not of a loss that began near zero.
    """

    code, name = "TH601", "loss-not-falling"
    phase = Phase.LOSS
    facts = ("losses",)
    hint = "Overfit one batch first. If that works, look at the labels and their order; if not, at the learning rate."
    wrong = "Losses that are not meant to fall: of a GAN or a policy. Pass none."
    least, share = 40, 0.05

    def find(self, history: History) -> Iterator[Finding]:
        values = finite(history.losses.values())
        if len(values) < self.least or self._is_small(history, values):
            return
        quarter = len(values) // 4
        first, last = values[:quarter], values[-quarter:]
        error = math.sqrt((variance(first) + variance(last)) / quarter)
        fall = fmean(first) - fmean(last)
        evidence = {"first": plain(fmean(first)), "last": plain(fmean(last)), "error": plain(error)}
        if fall < -3 * error and fall < -self.share * abs(fmean(first)):
            said = f"the loss rises, from {fmean(first):.3g} to {fmean(last):.3g}"
            yield self.finding(said, "", None, "error", **evidence)
        elif fall < max(2 * error, self.share * abs(fmean(first))):
            said = f"the loss does not fall: {fmean(first):.3g} at first, {fmean(last):.3g} at last"
            yield self.finding(said, "", None, None, **evidence)

    def _is_small(self, history: History, values: list[float]) -> bool:
        """Whether there is little left to learn."""
        chance = math.log(history.task.classes) if history.task is not None and history.task.classes else None
        return chance is not None and fmean(values[: len(values) // 4]) < 0.1 * chance


@register
class LossSpike(Rule):
    """The loss is for a step more than three times, and six robust deviations, above the median of eight before."""

    code, name = "TH602", "loss-spike"
    phase = Phase.LOSS
    facts = ("losses",)
    explains = ("TH2", "TH403", "TH601")
    hint = "Look at the batch of that step; clip the gradient norm; lower the learning rate."
    wrong = "Batches of very different difficulty or length; a loss near zero."

    def find(self, history: History) -> Iterator[Finding]:
        for step, times in outliers(history.losses, factor=3):
            said = f"the loss is {times:.0f} times what it was"
            yield self.finding(said, "", step, loss=plain(history.losses[step]), times=plain(times))


@register
class InitialLoss(Rule):
    """The first cross entropy is far above ln C, what guessing among C classes costs: by half of it, and by one.

    The model is not ignorant at first but wrong with confidence: its logits are too large.
    """

    code, name = "TH603", "initial-loss"
    phase = Phase.LOSS
    uses = (Need("output"),)
    facts = ("task",)
    explains = ("TH2", "TH4", "TH501", "TH601", "TH602")
    hint = "Make the initial weights of the last layer smaller, or zero."
    wrong = "Fine-tuning on labels that mean something else than before."

    def find(self, history: History) -> Iterator[Finding]:
        task = history.task
        assert task is not None
        if not task.classes or task.classes < 2 or not math.isfinite(task.loss):
            return
        chance = math.log(task.classes)
        if task.loss - chance > max(1.0, 0.5 * chance):
            said = f"the first loss is {task.loss:.3g}, where guessing costs ln {task.classes} = {chance:.3g}"
            yield self.finding(
                said, last_of(history, "weight"), history.first_step, loss=plain(task.loss), chance=plain(chance)
            )


@register
class SoftmaxTwice(Rule):
    """The cross entropy is given probabilities: rows that are positive and add up to one. It takes logits.

    The loss then cannot fall below ln(1 + (C - 1)/e), and learning is slow.
    """

    code, name, severity = "TH604", "softmax-twice", Severity.ERROR
    phase = Phase.REST
    uses = (Need("output"),)
    facts = ("task",)
    explains = ("TH401", "TH502", "TH601", "TH603", "TH203")
    hint = "Remove the softmax at the end of the model, or use nll_loss on the log of its output."
    wrong = "Never, unless the temperature is meant."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.task is not None
        if history.task.classes and history.task.probabilities:
            yield self.finding(
                "the outputs are probabilities already, and the loss takes their softmax", last_of(history)
            )


@register
class Broadcast(Rule):
    """Output and target have different shapes, and the loss does not care which target belongs to which output.

    It broadcasts: every output is compared with every target. Seen by computing it with the targets in another order.
    """

    code, name, severity = "TH605", "broadcast-loss", Severity.ERROR
    phase = Phase.REST
    facts = ("task",)
    explains = ("TH601", "TH603")
    hint = "Give both the same shape: output.squeeze(-1), or target.unsqueeze(-1)."
    wrong = "A loss that is meant to compare all with all."

    def find(self, history: History) -> Iterator[Finding]:
        task = history.task
        assert task is not None
        if task.broadcast:
            shapes = f"{_shape(task.output_shape)} against {_shape(task.target_shape or ())}"
            yield self.finding(f"the loss compares {shapes}, and broadcasts", "", output=shapes)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
