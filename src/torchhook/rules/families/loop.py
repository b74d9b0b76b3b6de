"""TH51: the loop around a training: what the script does, or forgets, between two steps."""

from __future__ import annotations

from collections.abc import Iterator

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History
from torchhook.rules.registry import register
from torchhook.rules.rule import Phase, Rule


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
