"""TH5: what the optimizer does: how large its steps are, and whom it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, owner, percent, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule


class Ratios(Rule):
    """The norm of a step over that of the parameter, for matrices."""

    phase = Phase.UPDATE
    needs = (Need("update_ratio"),)
    facts = ("rest", "own_optimizer")
    settling, enough = 10, 3  # steps after which the first ones no longer count, if there are so many others

    def ratios(self, history: History) -> dict[str, float]:
        """The median by parameter, without those that begin as zero."""
        assert history.rest is not None
        found = {}
        for (path, _), by_step in history.summaries("update_ratio").items():
            known = history.rest.parameters.get(path)
            if known is None or not known.is_matrix or known.summary.zero_fraction == 1:
                continue
            late = {step: said.mean for step, said in by_step.items() if step >= history.first_step + self.settling}
            values = late if len(late) >= self.enough else {step: said.mean for step, said in by_step.items()}
            if numbers := finite(values.values()):
                found[path] = median(numbers)
        return found

    def report(self, history: History, bad: dict[str, float], limit: float, said: str) -> Iterator[Finding]:
        """One finding about the learning rate if all parameters are meant, else one a parameter."""
        ratios = self.ratios(history)
        if bad and len(bad) == len(ratios):
            middle = median(ratios.values())
            text = f"the steps of the optimizer are {percent(middle)} % of the weights: {said}"
            severity = "error" if self.code == "TH501" and middle > 3 * limit else None
            step = min(step for by_step in history.summaries("update_ratio").values() for step in by_step)
            yield self.finding(text, "", step, severity, median=plain(middle), parameters=len(bad))
            return
        for path, value in bad.items():
            yield self.finding(f"its steps are {percent(value)} % of it: {said}", path, ratio=plain(value))


@register
class UpdateTooLarge(Ratios):
    """A step changes a matrix by more than a tenth of its norm, in the median after the first ten steps.

    About 1e-3 is healthy; three tenths in all matrices is an error, and so is a single step that changes half of
    the matrices by half of their norm. Vectors begin as zero too often to be judged.
    """

    code, name = "TH501", "update-too-large"
    explains = ("TH1", "TH2", "TH402", "TH403", "TH6", "TH7", "TH8", "TH401", "TH404")
    hint = "Lower the learning rate, by ten to begin with, or warm it up."
    wrong = "The first steps of an optimizer without warm-up; very small layers."
    limit, jump = 0.1, 0.5

    def causes(self, finding: Finding) -> tuple[str, ...]:
        return ("TH6", "TH8") if finding.site else self.explains  # a single matrix breaks nothing else

    def find(self, history: History) -> Iterator[Finding]:
        bad = {path: ratio for path, ratio in self.ratios(history).items() if ratio > self.limit}
        yield from self.report(history, bad, self.limit, "too large to learn")
        if not bad:
            yield from self._jump(history)

    def _jump(self, history: History) -> Iterator[Finding]:
        """A step that changed half of the matrices by more than their norm."""
        matrices = self.ratios(history)
        by_step: dict[int, list[float]] = {}
        for (path, _), said in history.summaries("update_ratio").items():
            if path in matrices:
                for step, summary in said.items():
                    by_step.setdefault(step, []).append(summary.mean)
        for step, values in by_step.items():
            if median(values) > self.jump:
                text = f"one step changes the weights by {percent(median(values))} % of their norm"
                yield self.finding(text, "", step, "error", ratio=plain(median(values)))
                return


@register
class UpdateTooSmall(Ratios):
    """A step changes a matrix by less than three millionths of its norm, in the median after the first ten steps.

    Nothing at all counts as well, if there is a gradient: the step is lost in rounding.
    """

    code, name = "TH502", "update-too-small"
    uses = (Need("param_grad"),)
    explains = ("TH4", "TH601", "TH801")
    hint = "Raise the learning rate; check its schedule, the loss's scale and the weight decay."
    wrong = "The end of a schedule; fine-tuning that is meant to be gentle."
    limit = 3e-6

    def find(self, history: History) -> Iterator[Finding]:
        moved = {path for path, ratio in self.ratios(history).items() if ratio > 0 or self._has_gradient(history, path)}
        bad = {path: ratio for path, ratio in self.ratios(history).items() if path in moved and ratio < self.limit}
        yield from self.report(history, bad, self.limit, "too small to learn")

    def _has_gradient(self, history: History, path: str) -> bool:
        """Whether a parameter mostly has a gradient, so that a step of zero was lost in rounding."""
        by_step = history.summaries("param_grad").get((path, "param_grad"), {})
        return sum(said.l2 > 0 for said in by_step.values()) > 0.5 * len(history.windows)


@register
class NotInOptimizer(Rule):
    """A parameter that requires a gradient is in no group of the optimizer: it is never trained.

    If the optimizer has parameters that the model has not, the model was copied, or its layers were replaced, after the
    optimizer was made.
    """

    code, name, severity = "TH503", "not-in-optimizer", Severity.ERROR
    phase = Phase.REST
    facts = ("rest", "own_optimizer")
    explains = ("TH302", "TH601")
    hint = "Pass model.parameters() of the complete model; if the layer is meant to rest, requires_grad_(False)."
    wrong = "Several optimizers, each with its part of the model."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        if history.rest.has_optimizer:
            left = {path: p for path, p in history.rest.parameters.items() if p.trainable and not p.groups}
            strangers = history.rest.strangers
            others = f", but {strangers} that are not the model's" if strangers else ""
            for site, names in _by_owner(left).items():
                said = f"the optimizer does not have it: {', '.join(names)}{others}"
                yield self.finding(said, site, parameters=names, strangers=strangers)


@register
class RateZero(Rule):
    """A parameter group has a learning rate of zero, and not because a schedule begins there."""

    code, name, severity = "TH504", "rate-zero", Severity.ERROR
    phase = Phase.REST
    facts = ("rest", "own_optimizer")
    explains = ("TH302", "TH502", "TH601")
    hint = "Give the group a learning rate, or requires_grad_(False) to what is not to be trained."
    wrong = "A warm-up that begins at zero and is not one of torch's schedules."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        still = {path: p for path, p in history.rest.parameters.items() if p.trainable and p.groups and p.lr == 0}
        if history.after is not None:  # a schedule may have raised it since
            still = {path: p for path, p in still.items() if history.after.parameters[path].lr == 0}
        for site, names in _by_owner(still).items():
            yield self.finding(f"its learning rate is 0: {', '.join(names)}", site, parameters=names)


def _by_owner(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(owner(path), []).append(path.rpartition(".")[2])
    return found
