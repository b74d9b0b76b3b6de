"""TH51: the loop around a training: what the script does, or forgets, between two steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median, pstdev

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, percent, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule


class LoopRule(Rule):
    """A rule about the loop, which `torchhook run` sees."""

    cause = "loop"
    phase = Phase.BACKWARD
    facts = ("loop",)


@register
class ZeroGradMissing(LoopRule):
    """The gradients of the step before are still there when the backward of a step begins: they add up.

    Looked at in some parameters, in the first twenty steps and in measured ones. A step counts if none of its backwards
    began with gradients of zero, so several backwards per step are fine. At least three steps, and nine tenths of them.
    """

    code, name, severity = "TH511", "zero-grad-missing", Severity.ERROR
    explains = ("TH1", "TH2", "TH4", "TH5", "TH6", "TH7", "TH8")
    hint = "Call optimizer.zero_grad() before each backward, or after each step."
    wrong = "Gradients that are meant to add up over all steps."
    least, share = 3, 0.9

    def find(self, history: History) -> Iterator[Finding]:
        assert history.loop is not None
        after, unzeroed = history.loop.looked - 1, history.loop.unzeroed  # the first step has none before it
        if after >= self.least and unzeroed >= self.share * after:
            message = f"gradients are never set to zero: they add up over the steps, in {unzeroed} of {after}"
            yield self.finding(message, unzeroed=unzeroed, looked=after)


@register
class NotDivided(LoopRule):
    """Every step has the same number of backwards, each of a mean over its own batch, and none is divided by it.

    The gradients are then those of a loss that is larger by that number. It counts only if each backward has its own
    forward and, where the batches come from a loader, its own batch: the real and the fake batch of a GAN are one step.
    Without a loader, four backwards are needed. An info for optimizers such as Adam, which are free of scale.
    """

    code, name = "TH512", "accumulation-not-divided"
    explains = ("TH402", "TH403", "TH501", "TH6")
    hint = "Divide each loss by the number of backwards per step, or the learning rate."
    wrong = "A learning rate that was chosen for the sum."
    least, share, several = 5, 0.9, 4

    def find(self, history: History) -> Iterator[Finding]:
        loop = history.loop
        assert loop is not None
        number = _usual(loop.backwards, self.share)
        if loop.looked < self.least or number < 2 or _usual(loop.forwards, self.share) != number:
            return
        drawn = _usual(loop.fed, self.share) if loop.fed else None
        if (number < self.several if drawn is None else drawn != number) or loop.undivided < loop.total:
            return
        is_harmless = history.rest is None or history.rest.is_scale_free
        message = f"each step sums the gradients of {number} batches, and the losses are not divided by {number}"
        yield self.finding(message, "", None, "info" if is_harmless else None, backwards=number)


@register
class Scheduler(LoopRule):
    """A learning rate scheduler was made for the optimizer but never stepped, or it was stepped before the optimizer.

    Never stepped is judged at the end, after a hundred steps and, if the batches come from a loader, after one epoch.
    """

    code, name = "TH513", "scheduler"
    phase = Phase.UPDATE
    explains = ("TH502",)
    hint = "Call scheduler.step() after optimizer.step(): once per epoch or once per step, as its lengths were chosen."
    wrong = "A scheduler whose first value is skipped on purpose."
    least = 100

    def find(self, history: History) -> Iterator[Finding]:
        loop = history.loop
        assert loop is not None
        if not loop.schedules:
            return
        name = loop.schedules[0]
        epochs = max((feeding.iterators for feeding in loop.feedings), default=2)
        if loop.has_ended and not loop.scheduled and loop.steps >= self.least and epochs > 1:
            yield self.finding(
                f"the {name} is never stepped: the learning rate never changes", schedulers=loop.schedules
            )
        elif loop.hasty and not history.scaled:  # a GradScaler may have left out the optimizer's first step
            message = f"the {name} is stepped before the optimizer: the first value of its schedule is skipped"
            yield self.finding(message, "", history.first_step, schedulers=loop.schedules)


@register
class ClippedAway(Rule):
    """Clipping leaves less than a hundredth of the gradient's norm, in nine tenths of the measured steps.

    Judged from the norms before and after it; a division by a constant is none. It is a warning if the optimizer
    depends on the scale of gradients, as SGD does, and a step changes the weights by less than 0.03%; else an info.
    """

    code, name = "TH514", "clipped-away"
    cause = "loop"
    phase = Phase.UPDATE
    needs = (Need("param_grad"),)
    uses = (Need("update_ratio"),)
    facts = ("rest", "own_optimizer")
    explains = ("TH402", "TH502", "TH601")
    hint = (
        "Raise the limit of the clipping to about the usual norm of the gradients, so that only outliers are clipped."
    )
    wrong = "A learning rate that was chosen for gradients of this size."
    limit, share, least, slow = 1e-2, 0.9, 5, 3e-4

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        before, after = (_totals(history, port) for port in ("param_grad_norm", "step_grad_norm"))
        left = finite(after[step] / before[step] for step in before if before[step] > 0 and after.get(step, 0) > 0)
        clipped = sum(part < self.limit for part in left)
        if len(left) < self.least or clipped < self.share * len(left) or pstdev(map(math.log, left)) < 1e-3:
            return
        updates = history.summaries("update_ratio").values()
        ratios = finite(moments.mean for by_step in updates for moments in by_step.values())
        is_slow = bool(ratios) and median(ratios) < self.slow and not history.rest.is_scale_free
        message = f"clipping leaves {percent(median(left))}% of the gradient in every step"
        yield self.finding(message, "", None, None if is_slow else "info", left=plain(median(left)))


@register
class SameBatch(LoopRule):
    """The script trains on the same batch over and over, or on every batch several times in a row.

    Either each step makes a new iterator of a loader and takes its first batch, which is always the same although there
    are more; at least ten times. Or an IterableDataset is not split between the workers of its loader, so that each of
    them gives the same batches.
    """

    code, name = "TH515", "same-batch"
    phase = Phase.FORWARD
    explains = ("TH601",)
    hint = (
        "Iterate over the loader (for batch in loader); split an IterableDataset by torch.utils.data.get_worker_info()."
    )
    wrong = "Overfitting one batch on purpose."
    least, groups, share = 10, 4, 0.9

    def find(self, history: History) -> Iterator[Finding]:
        assert history.loop is not None
        for feeding in history.loop.feedings:
            if feeding.firsts >= self.least and feeding.batches > 1:
                message = f"every step takes the first batch of a new iterator: always the same of {feeding.batches}"
                yield self.finding(message, batches=feeding.batches, iterators=feeding.iterators)
            if feeding.groups >= self.groups and feeding.repeated >= self.share * feeding.groups:
                message = f"every batch comes {feeding.workers} times, once from each worker"
                yield self.finding(message, workers=feeding.workers)


@register
class UsedUp(LoopRule):
    """An iterator of a loader is asked for batches after its end: such an epoch has no steps."""

    code, name = "TH516", "used-up-iterator"
    phase = Phase.FORWARD
    explains = ("TH601",)
    hint = "Call iter(loader) again in every epoch, or write: for batch in loader."
    wrong = "A script that keeps asking an empty iterator on purpose, and trains on other batches."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.loop is not None
        for feeding in history.loop.feedings:
            if feeding.used_up:
                message = f"the loader's iterator is exhausted, but was asked for another batch {feeding.used_up} times"
                yield self.finding(message, times=feeding.used_up)


def _usual(counts: Mapping[int, int], share: float) -> int:
    """The number that nearly all steps have; 0 if there is none."""
    usual = max(counts, key=counts.__getitem__, default=0)
    return usual if counts and counts[usual] >= share * sum(counts.values()) else 0


def _totals(history: History, port: str) -> dict[int, float]:
    """The norm over all parameters that have a gradient before and after clipping, by step."""
    both = set.intersection(
        *({path for path, _ in history.summaries(known)} for known in ("param_grad_norm", "step_grad_norm"))
    )
    totals: dict[int, float] = {}
    for (path, _), by_step in history.summaries(port).items():
        for step, moments in by_step.items() if path in both else ():
            totals[step] = math.hypot(totals.get(step, 0.0), moments.mean)
    return totals
