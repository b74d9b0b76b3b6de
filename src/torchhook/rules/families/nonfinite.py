"""TH1: values that are NaN or infinite, or will soon overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stats.moments import Summary


@register
class NonfiniteValues(Rule):
    """The output of a module holds NaN or +Inf. -Inf alone is fine: masks are made of it.

    The finding names the first such module in the first such step; `catch_nonfinite` also finds the operation.
    """

    code, name, severity = "TH101", "nonfinite-values", Severity.ERROR
    cause = "nonfinite"
    needs = (Need("output"),)
    explains = ("TH101", "TH103", "TH104", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8", "TH9")
    hint = "Run the step inside torchhook.catch_nonfinite(model): it names the operation and its line."
    wrong = "Padding that is never read, and the branch that torch.where discards, may hold anything."

    def find(self, history: History) -> Iterator[Finding]:
        if history.origin is not None and history.origin.code == self.code:
            yield history.origin
            return
        for (path, _), by_step in history.summaries("output").items():
            for step, moments in by_step.items():
                if is_bad(moments):
                    infinite = moments.posinf + moments.neginf
                    yield self.finding(_amount(moments), path, step, nan=moments.nan, inf=infinite)
                    break


@register
class NonfiniteState(Rule):
    """A parameter or buffer holds NaN or Inf before anything has run (-Inf in a buffer is a mask, and fine).

    A nonfinite running variance has no effect in train mode, but breaks every output in eval mode. Also found is an
    update of the optimizer that is not finite although the parameter and its gradient are.
    """

    code, name, severity = "TH102", "nonfinite-state", Severity.ERROR
    cause = "nonfinite"
    phase = Phase.REST
    facts = ("rest",)
    uses = (Need("update_ratio"), Need("param_grad"))
    explains = ("TH1", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8", "TH9")
    hint = "Load a checkpoint from before it broke; if it was loaded like this, check how it was saved."
    wrong = "Memory that is allocated with torch.empty and filled before it is first used."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        parameters = {path: parameter.summary for path, parameter in history.rest.parameters.items()}
        broken = set()
        for path, moments in {**parameters, **history.rest.buffers}.items():
            if is_bad(moments) or (path in parameters and moments.neginf):
                broken.add(path)
                what = "parameter" if path in parameters else "buffer"
                message = f"the {what} is not finite: {_amount(moments)}"
                yield self.finding(message, path, nan=moments.nan, inf=moments.posinf)
        origin = history.origin
        if origin is not None and origin.code == self.code and origin.site not in broken:
            yield origin  # it broke later
        elif not broken:
            yield from self._updates(history)

    def _updates(self, history: History) -> Iterator[Finding]:
        """The parameters that the optimizer itself broke, which are broken before the step after."""
        before = {port: history.summaries(port) for port in ("param_norm", "step_grad_norm")}
        for (path, _), by_step in history.summaries("update_norm").items():
            step = next((step for step, moments in by_step.items() if moments.nonfinite), None)
            if step is None:
                continue
            given = [known.get((path, port), {}).get(step) for port, known in before.items()]
            if all(moments is not None and not moments.nonfinite for moments in given):
                message = f"the update of step {step} is not finite, although the parameter and its gradient are"
                finding = self.finding(message, path, step + 1)
                yield replace(finding, hint="Look at the optimizer's settings: its eps, its rate, and its state.")


@register
class NonfiniteGradient(Rule):
    """A gradient holds NaN or Inf although all values of the forward are finite.

    The finding names the last such module in the order of execution, the first in the backward. Overflows do not count
    while a GradScaler searches for its scale.
    """

    code, name, severity = "TH103", "nonfinite-gradient", Severity.ERROR
    cause = "nonfinite"
    phase = Phase.BACKWARD
    needs = (Need("grad_output"),)
    explains = ("TH101", "TH104", "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8")
    backward = True
    hint = "Run the step inside torchhook.catch_nonfinite(model); a sqrt, norm or division at zero is the usual cause."
    wrong = "A loss scaler of your own, whose overflows are expected."

    def find(self, history: History) -> Iterator[Finding]:
        if history.origin is not None and history.origin.code == self.code:
            yield history.origin
            return
        if history.scaled:
            return
        for port in ("grad_output", "param_grad"):
            for (path, _), by_step in history.summaries(port).items():
                step = next((step for step, moments in by_step.items() if moments.nonfinite), None)
                if step is not None:
                    message = f"its gradient is not finite: {_amount(by_step[step])}"
                    yield self.finding(message, path, step, nan=by_step[step].nan)


@register
class NonfiniteLoss(Rule):
    """The loss is NaN or infinite."""

    code, name, severity = "TH104", "nonfinite-loss", Severity.ERROR
    cause = "nonfinite"
    phase = Phase.LOSS
    facts = ("losses",)
    explains = ("TH101", "TH103", "TH2", "TH4", "TH5", "TH6", "TH7", "TH8")
    hint = "If all outputs are finite, the loss itself produces it: a log of zero, or the mean over an empty batch."
    wrong = "Never."

    def find(self, history: History) -> Iterator[Finding]:
        for step, loss in history.losses.items():
            if not math.isfinite(loss):
                yield self.finding(f"the loss is {loss}", step=step)
                return


@register
class OverflowHeadroom(Rule):
    """The largest value of an output or gradient is above 50% (warning) or 90% (error) of the maximum of its dtype.

    The maximum of float16 is 65,504; bfloat16 and float32 hardly ever overflow and are not checked.
    """

    code, name = "TH105", "overflow-headroom"
    cause = "precision"
    needs = (Need("output", "headroom"),)
    explains = ("TH101", "TH103", "TH104", "TH303", "TH204", "TH402")
    hint = "Use bfloat16, scale the values down before this layer, or keep this layer in float32."
    wrong = "Values that are clamped near the maximum on purpose."
    limits: tuple[float, float] = (0.5, 0.9)

    def find(self, history: History) -> Iterator[Finding]:
        warning, error = self.limits
        for place, row in history.whole().rows.items():
            reading = history.whole()[place]
            if any(stat.name == "headroom" for stat in row.stats) and (used := reading["headroom"]) >= warning:
                message = f"the largest value is {used:.0%} of the maximum of its dtype"
                yield self.finding(message, place[0], None, "error" if used >= error else "warning", used=plain(used))


def is_bad(moments: Summary) -> bool:
    """Whether there is NaN or +Inf among the values."""
    return moments.nan + moments.posinf > 0


def _amount(moments: Summary) -> str:
    """How many of the values are NaN and Inf."""
    counts = {"NaN": moments.nan, "Inf": moments.posinf + moments.neginf}
    kinds = [kind for kind, count in counts.items() if count]
    if sum(counts.values()) == moments.count:
        return f"all {moments.count:,} values are {' or '.join(kinds)}"
    return f"{' and '.join(f'{counts[kind]:,} {kind}' for kind in kinds)} among {moments.count:,} values"
