"""A rule is a pure function of what was measured: it reads a `History` and yields findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from torchhook.core.findings import Finding, Severity, json_value
from torchhook.rules.history import History

CAUSES = (
    "no-gradient",
    "output-target-mismatch",
    "divergence",
    "loop",
    "labels",
    "input-scale",
    "target-scale",
    "rate",
    "init",
    "activation",
    "mode",
    "precision",
    "undertrained",
    "capacity",
    "unused-part",
    "frozen",
    "nonfinite",
    "rank-difference",
    "other",
)
"""The causes that a finding can have, in one word each: ``evidence["cause"]``. The list is closed."""


class Phase(IntEnum):
    """Which part of a step a rule is about, in the order in which they come."""

    REST = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    UPDATE = 4


@dataclass(frozen=True)
class Need:
    """A statistic that a rule needs: at which port, and of which kinds of modules (none: every leaf)."""

    port: str
    stat: str = "moments"
    kinds: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.port == self.stat:
            return self.port
        of = f" of a {' or '.join(self.kinds)} module" if self.kinds and len(self.kinds) < 4 else ""
        return f"the {self.stat} of the {self.port.replace('_', ' ')}{of}"


class Rule(ABC):
    """One thing that can be wrong with a model.

    The docstring says what the rule finds and by which numbers; `hint` says what to do about it, `wrong` when the rule
    is mistaken. `needs` are the statistics and `facts` the other parts of a `History` that the rule requires: without
    them it is skipped. `uses` are statistics that help it but are not required. Only what the chosen rules ask for is
    measured.

    `explains` are the codes, or beginnings of codes, of possible consequences: their findings are folded under this
    rule's, unless they came earlier, by step and `phase`. Findings of the same rule are folded under the first in the
    order of execution, or under the last if the fault travels with the gradients (`backward`).

    `forgiving` rules are about what healthy trainings have, too: where the training works, they only inform.

    `cause` says in one word of `CAUSES` what is at fault; it is part of the evidence of every finding.

    A rule of your own needs a code, a name and `find`:

    >>> class Negative(Rule):
    ...     '''The mean of an output is negative.'''
    ...     code, name, needs = "MY001", "negative-mean", (Need("output"),)
    ...
    ...     def find(self, history):
    ...         for (path, _), by_step in history.summaries("output").items():
    ...             step, summary = list(by_step.items())[-1]
    ...             if summary.mean < 0:
    ...                 yield self.finding(f"the mean is {summary.mean:.2g}", path, step)
    >>> Negative().finding("the mean is -1", "fc", 3).where
    'fc, step 3'
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity] = Severity.WARNING
    needs: ClassVar[tuple[Need, ...]] = ()
    uses: ClassVar[tuple[Need, ...]] = ()
    facts: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[Phase] = Phase.FORWARD
    backward: ClassVar[bool] = False
    forgiving: ClassVar[bool] = False
    cause: ClassVar[str] = "other"
    hint: ClassVar[str] = ""
    wrong: ClassVar[str] = ""

    @abstractmethod
    def find(self, history: History) -> Iterator[Finding]:
        """Yield what is wrong, place by place."""

    def missing(self, history: History) -> str:
        """What the rule needs but `history` does not have; empty if nothing is missing."""
        absent = [_FACTS[name] for name in self.facts if not getattr(history, name)]
        absent += [str(need) for need in self.needs if not history.has(need.port, need.stat)]
        return f"needs {', and '.join(absent)}" if absent else ""

    def causes(self, finding: Finding) -> tuple[str, ...]:
        """The codes, or beginnings of codes, that a finding of this rule may explain."""
        return self.explains

    def finding(
        self, message: str, site: str = "", step: int | None = None, severity: str | None = None, **evidence: Any
    ) -> Finding:
        """A finding of this rule."""
        known = {name: json_value(value) for name, value in evidence.items()}
        known.setdefault("cause", self.cause)
        return Finding(self.code, Severity(severity or self.severity), message, site, step, known, self.hint)

    def __repr__(self) -> str:
        return f"<{self.code} {self.name}>"


_FACTS = {
    "rest": "the state of the model at rest",
    "after": "the state of the model after some steps",
    "own_optimizer": "an optimizer",
    "losses": "losses",
    "task": "outputs, targets and a loss",
    "terms": "a loss whose autograd graph could be read",
    "modes": "a comparison of train and eval mode, which only diagnose makes, with a loss and a model in train mode",
    "ranks": "several ranks, all of them watched",
    "loop": "a view of the training loop, which only torchhook run has",
    "profile": "a stored profile",
}
