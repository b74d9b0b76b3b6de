"""TH1: values that are not numbers any more, and values that soon will not be."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stats.moments import Summary


@register
class NonfiniteValues(Rule):
    """The output of a module holds NaN or +Inf. -Inf alone is legal: masks are made of it.

    The finding is about the first such module of the first such step; `catch_nonfinite` also finds the operation.
    """

    code, name, severity = "TH101", "nonfinite-values", Severity.ERROR
    needs = (Need("output"),)
    explains = ("TH101", "TH103", "TH104", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8", "TH9")
    hint = "Run the step inside torchhook.catch_nonfinite(model): it names the operation and its line."
    wrong = "Padding that is never read may hold anything; so may the branch that a torch.where throws away."

    def find(self, history: History) -> Iterator[Finding]:
        if history.origin is not None and history.origin.code == self.code:
            yield history.origin
            return
        for (path, _), by_step in history.summaries("output").items():
            for step, said in by_step.items():
                if is_bad(said):
                    yield self.finding(_amount(said), path, step, nan=said.nan, inf=said.posinf + said.neginf)
                    break


@register
class NonfiniteState(Rule):
    """A parameter or a buffer holds NaN or +Inf before anything has run (-Inf in a buffer is a mask).

    In train mode a broken running variance does not show, in eval mode it breaks every output.
    """

    code, name, severity = "TH102", "nonfinite-state", Severity.ERROR
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH1", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8", "TH9")
    hint = "Load a checkpoint from before it broke; if it was loaded like this, check how it was saved."
    wrong = "Memory that is allocated with torch.empty and filled before its first use."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        parameters = {path: parameter.summary for path, parameter in history.rest.parameters.items()}
        broken = set()
        for path, said in {**parameters, **history.rest.buffers}.items():
            if is_bad(said) or (path in parameters and said.neginf):
                broken.add(path)
                what = "parameter" if path in parameters else "buffer"
                yield self.finding(f"the {what} is broken: {_amount(said)}", path, nan=said.nan, inf=said.posinf)
        origin = history.origin
        if origin is not None and origin.code == self.code and origin.site not in broken:
            yield origin  # it broke later


@register
class NonfiniteGradient(Rule):
    """A gradient holds NaN or Inf although all values of the forward are finite.

    The finding is about the last module in the order of execution, which is the first in the backward. While a
    GradScaler looks for its scale, overflows are its way of finding it and do not count.
    """

    code, name, severity = "TH103", "nonfinite-gradient", Severity.ERROR
    phase = Phase.BACKWARD
    needs = (Need("grad_output"),)
    explains = ("TH101", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8")
    backward = True
    hint = "Run the step inside torchhook.catch_nonfinite(model); a sqrt, norm or division at zero is the usual cause."
    wrong = "With a GradScaler whose overflows are wanted."

    def find(self, history: History) -> Iterator[Finding]:
        if history.origin is not None and history.origin.code == self.code:
            yield history.origin
            return
        if history.scaled:
            return
        for port in ("grad_output", "param_grad"):
            for (path, _), by_step in history.summaries(port).items():
                step = next((step for step, said in by_step.items() if said.nonfinite), None)
                if step is not None:
                    said = by_step[step]
                    yield self.finding(f"of the gradient, {_amount(said)}", path, step, nan=said.nan)


@register
class NonfiniteLoss(Rule):
    """The loss is NaN or infinite."""

    code, name, severity = "TH104", "nonfinite-loss", Severity.ERROR
    phase = Phase.LOSS
    facts = ("losses",)
    explains = ("TH103", "TH2", "TH4", "TH5", "TH6", "TH7", "TH8")
    hint = "If all outputs are finite, the loss itself makes it: a log of zero, or a division by an empty batch."
    wrong = "Never."

    def find(self, history: History) -> Iterator[Finding]:
        for step, loss in history.losses.items():
            if not math.isfinite(loss):
                yield self.finding(f"the loss is {loss}", step=step)
                return


@register
class OverflowHeadroom(Rule):
    """The largest value of an output or gradient is above half (warning) or nine tenths (error) of its dtype's largest.

    Float16 ends at 65,504; bfloat16 and float32 do not end in practice and are not looked at.
    """

    code, name = "TH105", "overflow-headroom"
    needs = (Need("output", "headroom"),)
    explains = ("TH101", "TH103", "TH104", "TH303", "TH204", "TH402")
    hint = "Use bfloat16, scale the values before this layer, or keep this layer in float32."
    wrong = "Values that are clamped there on purpose."
    limits: tuple[float, float] = (0.5, 0.9)

    def find(self, history: History) -> Iterator[Finding]:
        warning, error = self.limits
        for place, row in history.whole().rows.items():
            reading = history.whole()[place]
            if any(stat.name == "headroom" for stat in row.stats) and (used := reading["headroom"]) >= warning:
                said = f"the largest value is {used:.0%} of what its dtype holds"
                yield self.finding(said, place[0], None, "error" if used >= error else "warning", used=plain(used))


def is_bad(said: Summary) -> bool:
    """Whether there is NaN or +Inf among the values."""
    return said.nan + said.posinf > 0


def _amount(said: Summary) -> str:
    bad = said.nan + said.posinf + said.neginf
    kinds = [f"{count:,} {name}" for name, count in (("NaN", said.nan), ("Inf", said.posinf + said.neginf)) if count]
    return (
        f"{' and '.join(kinds)} among {said.count:,} values"
        if bad < said.count
        else f"all {bad:,} values are {kinds[0].split()[1]}"
    )
