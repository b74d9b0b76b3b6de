"""TH6, continued: whether outputs, loss and targets fit, by the autograd graph of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, last_of, plain
from torchhook.rules.loss_graph import Extent, LossTerm
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule

_BOUNDS = {"relu": (0.0, math.inf), "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0)}
_NAMES = {"relu": "ReLU", "log_softmax": "log-softmax"}


class Fit(Rule):
    """How the loss compares outputs with targets."""

    cause = "output-target-mismatch"
    severity = Severity.ERROR
    phase = Phase.REST
    uses = (Need("output"),)
    facts = ("terms",)

    def finding_at(self, history: History, term: LossTerm, message: str, **more: str) -> Finding:
        """A finding at the function that was applied to the output, with the line that called it."""
        evidence = {"loss": term.kind, **({"line": term.line} if term.line else {})}
        return self.finding(
            message, term.site or last_of(history), None, more.pop("severity", None), **evidence, **more
        )


@register
class WrongOutputs(Fit):
    """The loss gets outputs of the wrong kind: probabilities or bounded values instead of logits, or the reverse.

    A cross entropy applies softmax itself and expects logits; after a softmax, it cannot fall below ln(1 + (C - 1)/e).
    ``nll_loss`` expects log-probabilities, and a binary cross entropy without logits expects probabilities. A softmax
    over the samples of a batch, not over the classes, compares samples with each other, and a reshape that swaps the
    sizes of two dimensions gives each class the outputs of others.
    """

    code, name = "TH604", "softmax-twice"
    explains = ("TH101", "TH104", "TH201", "TH401", "TH404", "TH502", "TH601", "TH603", "TH203", "TH607")
    endless = ("TH402", "TH403", "TH501", "TH602", "TH606")
    hint = "Give the loss what it expects: logits for cross_entropy and binary_cross_entropy_with_logits."
    wrong = "A second function that is there on purpose."

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            problem = self._problem(term)
            if problem:
                severity = "warning" if term.squash == "tanh" else "error"  # with few classes, a tanh may be enough
                yield self.finding_at(history, term, problem, severity=severity)

    def causes(self, finding: Finding) -> tuple[str, ...]:
        is_endless = finding.evidence.get("loss") == "nll"  # raw outputs may grow, and the loss falls, without end
        return (*self.explains, *self.endless) if is_endless else self.explains

    def _problem(self, term: LossTerm) -> str:
        name = _NAMES.get(term.squash, term.squash)
        if term.reshaped:
            return f"the outputs are reshaped from {term.reshaped}, which mixes them up: transpose them"
        if term.is_over_samples:
            return "the softmax runs over the samples of the batch (dimension 0), not over the classes"
        if term.kind in ("cross-entropy", "binary-logits"):
            again = "softmax" if term.kind == "cross-entropy" else "sigmoid"
            if term.squash == "softmax" and term.units > 1:
                return f"the outputs are already probabilities, and the loss applies {again} again"
            if term.squash == "sigmoid":
                return f"the outputs went through a sigmoid, and the loss applies {again} to them"
            if term.squash == "relu":
                return "the outputs went through a ReLU, so that no logit can be negative"
            if term.squash == "tanh":
                return "the outputs went through a tanh, so that no logit can be beyond -1 and 1"
        if term.kind == "nll" and term.squash in ("", "softmax", "sigmoid", "relu"):
            given = f"the outputs of a {name}" if name else "raw outputs"
            return f"nll_loss expects log-probabilities, but gets {given}"
        if term.kind in ("binary", "log") and term.squash == "relu":
            return "the loss expects probabilities, but gets the outputs of a ReLU"
        return ""


@register
class OutOfReach(Fit):
    """The last activation cannot produce the targets: they are negative after a ReLU, or beyond the ends of a sigmoid.

    A softmax over a single unit is always 1, and one over several cannot say yes to several labels.
    """

    code, name = "TH607", "targets-out-of-reach"
    explains = ("TH201", "TH203", "TH204", "TH401", "TH404", "TH502", "TH601")
    hint = "Remove the last activation, or choose one whose range covers the targets."
    wrong = "A few outliers among the targets that may be missed."
    margin = 0.25  # of the spread of the targets

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            problem = self._alone(term) or self._several(term) or self._beyond(term)
            if problem:
                cause = "no-gradient" if self._alone(term) else self.cause
                yield self.finding_at(history, term, problem, cause=cause)

    def _alone(self, term: LossTerm) -> str:
        value = {"softmax": 1, "log_softmax": 0}.get(term.squash)
        if term.units != 1 or value is None:
            return ""
        return f"a {_NAMES.get(term.squash, term.squash)} over a single unit is always {value}: use a sigmoid"

    def _several(self, term: LossTerm) -> str:
        is_multiple = term.kind == "binary" and term.squash == "softmax" and term.units > 2 and (term.sums or 0) >= 1
        return "a softmax expects one label per sample, but some samples have several or none" if is_multiple else ""

    def _beyond(self, term: LossTerm) -> str:
        target = term.target
        if term.kind not in ("squared", "absolute") or target is None or term.squash not in _BOUNDS:
            return ""
        low, high = _BOUNDS[term.squash]
        margin = self.margin * max(target.std, 1e-12)
        if low - margin <= target.low and target.high <= high + margin:
            return ""
        ends = f"between {low:g} and {high:g}" if math.isfinite(high) else "never negative"
        return (
            f"the outputs of a {_NAMES.get(term.squash, term.squash)} are {ends}, but the targets are {_span(target)}"
        )


@register
class Labels(Fit):
    """The labels are all alike, or are not what the loss takes: below 0 or above 1 for a binary cross entropy.

    Labels of a single class count once there are fifty of them, or two hundred (before, an info) of two classes. Binary
    labels of at most 0.1 were probably divided by something.
    """

    code, name = "TH608", "labels"
    cause = "labels"
    explains = ("TH104", "TH201", "TH601", "TH603", "TH606", "TH611")
    hint = "Look at a batch of labels: how they are read, shuffled and scaled."
    wrong = "Batches that were sorted by class, of which only the first were seen."
    least, many = 50, 200

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            target = term.target
            if target is None or target.count < self.least:
                continue
            is_binary = term.kind in ("binary", "binary-logits")
            if is_binary and (target.low < -1e-6 or target.high > 1 + 1e-6):
                yield self._at(term, f"the loss expects labels from 0 to 1, but they are {_span(target)}")
            elif is_binary and 0 < target.high <= 0.1 and target.std > 0:
                yield self._at(term, f"the labels are at most {target.high:.2g}: were they divided?")
            elif term.kind == "cross-entropy" and target.low == target.high:
                severity = None if term.classes > 2 or target.count >= self.many else "info"
                message = f"all {target.count} labels are {target.low:g}, of {term.classes} classes"
                yield self._at(term, message, severity)

    def _at(self, term: LossTerm, message: str, severity: str | None = None) -> Finding:
        assert term.target is not None
        return self.finding(message, "", None, severity, low=plain(term.target.low), high=plain(term.target.high))


@register
class TargetScale(Fit):
    """The targets of a regression have a mean or a standard deviation beyond a hundred.

    An error beyond a million, where no usual rate reaches them; otherwise a warning if the loss of the last quarter of
    the steps is still above half of the targets' mean square, an info if not.
    """

    code, name = "TH609", "target-scale"
    cause = "target-scale"
    severity = Severity.WARNING
    explains = ("TH402", "TH403", "TH501", "TH502", "TH601", "TH602", "TH606", "TH104", "TH101", "TH103", "TH201")
    hint = "Standardise the targets, and scale the outputs back where they are used."
    wrong = "Targets in units that the last layer is initialised for."
    limit, huge = 100.0, 1e6

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            target = term.target
            if term.kind not in ("squared", "absolute") or target is None:
                continue
            size = max(abs(target.mean), target.std)
            if size > self.limit:
                message = f"the targets have a mean of {target.mean:.3g} and a standard deviation of {target.std:.3g}"
                severity = "error" if size > self.huge else None if self._is_stuck(history, term) else "info"
                yield self.finding(
                    message, "", history.first_step, severity, mean=plain(target.mean), std=plain(target.std)
                )

    def _is_stuck(self, history: History, term: LossTerm) -> bool:
        """Whether the loss is still of the size of the targets, or not finite."""
        assert term.target is not None
        last = list(history.losses.values())[-max(1, len(history.losses) // 4) :]
        square = term.target.mean**2 + term.target.std**2
        level = math.sqrt(square) if term.kind == "absolute" else square
        return not last or not all(map(math.isfinite, last)) or sum(last) / len(last) > 0.5 * level


@register
class LogByHand(Fit):
    """The loss takes the log of a softmax, a sigmoid or a raw output by hand.

    An error if an argument of the log is zero or negative; otherwise an info: it will be infinite as soon as one is.
    """

    code, name = "TH610", "log-by-hand"
    cause = "nonfinite"
    explains = ("TH1", "TH2", "TH404", "TH601", "TH602", "TH603")
    hint = "Use log_softmax, logsigmoid, cross_entropy or binary_cross_entropy_with_logits, which never take log(0)."
    wrong = "Values that are known to stay away from zero."

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            if term.kind != "log" or term.output is None:
                continue
            of = f"a {_NAMES.get(term.squash, term.squash)}" if term.squash else "raw outputs"
            low = term.output.low
            if low <= 0 or math.isnan(low):
                message = f"the loss takes the log of {of}, whose values go down to {low:.3g}"
                yield self.finding_at(history, term, message)
            elif term.squash in ("softmax", "sigmoid"):
                message = f"the loss takes the log of {of}, which is infinite when its argument is 0"
                yield self.finding_at(history, term, message, severity="info")


@register
class NegativeLoss(Fit):
    """A loss that cannot be negative is: a cross entropy, a squared or an absolute difference."""

    code, name = "TH611", "negative-loss"
    explains = ("TH601", "TH606", "TH602")
    hint = "Check the sign of the loss, and whether outputs and labels are in the range that it expects."
    wrong = "Losses with a term that may be negative, such as a likelihood of continuous values."
    positive = ("cross-entropy", "binary", "binary-logits", "squared", "absolute")

    def find(self, history: History) -> Iterator[Finding]:
        known = {term.kind for term in history.comparisons}
        low = next((step for step, loss in history.losses.items() if loss < -1e-6), None)
        if low is not None and known and known <= set(self.positive) and len(history.comparisons) == 1:
            yield self.finding(f"the loss is {history.losses[low]:.3g}, below zero", "", low)


@register
class OnlyLinear(Fit):
    """Two or more weight layers follow each other from the inputs to the loss with nothing between them.

    Together they are a single linear layer.
    """

    code, name, severity = "TH612", "only-linear", Severity.WARNING
    cause = "activation"
    explains = ("TH601", "TH801")
    hint = "Put an activation such as ReLU between the layers."
    wrong = "A factorised or linear model on purpose."

    def find(self, history: History) -> Iterator[Finding]:
        for term in history.comparisons:
            if term.linear > 1:
                message = f"{term.linear} weight layers in a row have no activation between them"
                yield self.finding(message, last_of(history, "weight"), layers=term.linear)
                return


def _span(values: Extent) -> str:
    return f"between {values.low:.3g} and {values.high:.3g}"


@register
class UserError(Rule):
    """The model, the loss or the data raised an exception in the middle of the inspection, which ended there.

    A label that is out of range for the number of outputs is the usual one.
    """

    code, name, severity = "TH613", "raised", Severity.ERROR
    phase = Phase.LOSS
    facts = ("rest",)
    hint = "Run this batch by itself. If a label is out of range, compare the labels with the number of outputs."
    wrong = "Never."

    def find(self, history: History) -> Iterator[Finding]:
        raised = history.raised
        if raised is None:
            return
        cause = "labels" if raised.kind == "IndexError" and "out of bounds" in raised.message else self.cause
        at = f", at {raised.line}" if raised.line else ""
        message = f"{raised.kind}: {raised.message}{at}"
        yield self.finding(message, "", raised.step, cause=cause, exception=raised.kind)
