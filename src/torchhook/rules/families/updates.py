"""TH5: the optimizer: how large its steps are, and which parameters it leaves out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median

import torch

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, owner, percent, plain, rms
from torchhook.rules.kinds import NORMS, kind_of
from torchhook.rules.registry import register
from torchhook.rules.rest import ParameterState
from torchhook.rules.rule import Need, Phase, Rule


class UpdateRatios(Rule):
    """The norm of an optimizer step divided by that of the parameter, for matrices."""

    phase = Phase.UPDATE
    needs = (Need("update_ratio"),)
    facts = ("rest", "own_optimizer")
    settling, enough = 10, 3  # the first steps do not count, if there are enough others

    def ratios(self, history: History) -> dict[str, float]:
        """The median ratio of each parameter, without those that start at zero."""
        assert history.rest is not None
        found = {}
        for (path, _), by_step in history.summaries("update_ratio").items():
            known = history.rest.parameters.get(path)
            if known is None or not known.is_matrix or known.summary.zero_fraction == 1:
                continue
            every = {step: moments.mean for step, moments in by_step.items()}
            late = {step: ratio for step, ratio in every.items() if step >= history.first_step + self.settling}
            if known_ratios := finite((late if len(late) >= self.enough else every).values()):
                found[path] = median(known_ratios)
        return found

    def has_settled(self, history: History) -> bool:
        """Whether there are enough steps after the first ones."""
        return sum(window.step >= history.first_step + self.settling for window in history.windows) >= self.enough

    def report(self, history: History, bad: dict[str, float], limit: float, verdict: str) -> Iterator[Finding]:
        """One finding about the learning rate if all parameters are bad, otherwise one per parameter."""
        ratios = self.ratios(history)
        if bad and len(bad) == len(ratios):
            middle = median(ratios.values())
            message = f"each optimizer step changes the weights by {percent(middle)}%: {verdict}"
            severity = "error" if self.code == "TH501" and middle > 3 * limit else None
            step = min(step for by_step in history.summaries("update_ratio").values() for step in by_step)
            yield self.finding(message, "", step, severity, median=plain(middle), parameters=len(bad))
            return
        for path, value in bad.items():
            yield self.finding(f"each step changes it by {percent(value)}%: {verdict}", path, ratio=plain(value))


@register
class UpdateTooLarge(UpdateRatios):
    """A step changes a matrix by more than 10% of its norm, in the median after the first ten steps.

    About 0.1% is healthy; 30% in all matrices is an error. A single step that changes half of the matrices by half of
    their norm counts, too, unless the loss falls then; by ten times their norm, it is an error. Vectors are not judged:
    they often start at zero. A single matrix is an info in the first ten steps, and if it has fewer than 64 values or
    started with values below 0.001. An optimizer that searches for its own steps, such as LBFGS, is not judged.
    """

    code, name = "TH501", "update-too-large"
    forgiving = True
    cause = "rate"
    explains = ("TH1", "TH2", "TH402", "TH403", "TH6", "TH7", "TH8", "TH401", "TH404")
    hint = "Lower the learning rate, by a factor of ten to begin with, or warm it up."
    wrong = "The first steps of an optimizer without warm-up; very small layers."
    limit, jump, leap, least, size = 0.1, 0.5, 10.0, 64, 1e-3

    def causes(self, finding: Finding) -> tuple[str, ...]:
        return ("TH6", "TH8") if finding.site else self.explains  # a single matrix breaks nothing else

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        if history.rest.searches:
            return
        bad = {path: ratio for path, ratio in self.ratios(history).items() if ratio > self.limit}
        for finding in self.report(history, bad, self.limit, "too much to learn"):
            is_harmless = finding.site and not (self.has_settled(history) and self._is_grown(history, finding.site))
            yield replace(finding, severity=Severity.INFO) if is_harmless else finding
        if not bad:
            yield from self._jump(history)

    def _is_grown(self, history: History, path: str) -> bool:
        """Whether a matrix has enough values, and they are not tiny by design."""
        assert history.rest is not None
        summary = history.rest.parameters[path].summary
        return summary.count >= self.least and rms(summary) >= self.size

    def _jump(self, history: History) -> Iterator[Finding]:
        """The first step that changed half of the matrices by more than half of their norm."""
        matrices = self.ratios(history)
        by_step: dict[int, list[float]] = {}
        for (path, _), moments in history.summaries("update_ratio").items():
            if path in matrices:
                for step, summary in moments.items():
                    by_step.setdefault(step, []).append(summary.mean)
        for step, values in by_step.items():
            if median(values) > self.jump and not _falls_after(history.losses, step):
                message = f"one step changed the weights by {percent(median(values))}% of their norm"
                severity = "error" if median(values) > self.leap else None
                yield self.finding(message, "", step, severity, ratio=plain(median(values)))
                return


def _falls_after(losses: Mapping[int, float], step: int) -> bool:
    """Whether the losses after a step are below those up to it, and the next one does not jump: it was a good step."""
    before = [loss for known, loss in losses.items() if known <= step][-3:]
    after = finite(loss for known, loss in losses.items() if step < known <= step + 5)
    return bool(before) and len(after) > 1 and median(after) < median(before) and after[0] < 3 * max(before)


@register
class UpdateTooSmall(UpdateRatios):
    """A step changes a matrix by less than three millionths of its norm, in the median after the first ten steps.

    No change at all counts, too, if there is a gradient: the step is lost in rounding. If others learn at the same
    rate, it is the gradient that is too small.
    """

    code, name = "TH502", "update-too-small"
    cause = "rate"
    uses = (Need("param_grad"),)
    explains = ("TH4", "TH601", "TH801")
    hint = "Raise the learning rate; check its schedule, the scale of the loss and the weight decay."
    wrong = "The end of a schedule; fine-tuning that is meant to be gentle."
    limit = 3e-6

    def find(self, history: History) -> Iterator[Finding]:
        moved = {path for path, ratio in self.ratios(history).items() if ratio > 0 or self._has_gradient(history, path)}
        bad = {path: ratio for path, ratio in self.ratios(history).items() if path in moved and ratio < self.limit}
        for finding in self.report(history, bad, self.limit, "too little to learn"):
            is_slow = not finding.site or self._is_slower(history, finding.site, bad)
            cause = self.cause if is_slow else "no-gradient"
            yield replace(finding, evidence={**finding.evidence, "cause": cause})

    def _is_slower(self, history: History, path: str, bad: Collection[str]) -> bool:
        """Whether a parameter has a lower rate than those that learn."""
        assert history.rest is not None
        known = history.rest.parameters
        rates = [known[other].lr for other in self.ratios(history) if other not in bad]
        return (known[path].lr or 0.0) < min((rate for rate in rates if rate is not None), default=0.0)

    def _has_gradient(self, history: History, path: str) -> bool:
        """Whether a parameter has a gradient in most windows, so that a step of zero was lost in rounding."""
        by_step = history.summaries("param_grad").get((path, "param_grad"), {})
        return sum(moments.l2 > 0 for moments in by_step.values()) > 0.5 * len(history.windows)


@register
class NotInOptimizer(Rule):
    """A parameter that requires a gradient is not in the optimizer: it is never trained.

    If the optimizer has parameters that are not in the model, or never get a gradient, the model was copied or moved,
    or its layers were replaced, after the optimizer was created. If all that the optimizer has is frozen, that is
    named, and so are layers that are frozen alone, less than half of a block whose other layers are trained; frozen
    blocks, embeddings and what is under adapters are not. If the optimizer has the last part of the model alone, the
    others may be left out on purpose, and this is an info. Parameters of another optimizer do not count. `diagnose`
    also finds parameters that the output depends on but the model does not list: its layers are in a plain list or
    dict, or are made in `forward`.
    """

    code, name, severity = "TH503", "not-in-optimizer", Severity.ERROR
    cause = "frozen"
    phase = Phase.REST
    facts = ("rest", "own_optimizer")
    explains = ("TH302", "TH601")
    hint = (
        "Create the optimizer last, of model.parameters(), once the model is moved, wrapped and complete; if a layer"
        " should stay frozen, call requires_grad_(False)."
    )
    wrong = "Several optimizers, each for a part of the model, where run does not see them."
    least = 3

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        if not history.rest.has_optimizer:
            return
        held = {path: p for path, p in history.rest.parameters.items() if p.groups}
        if history.unlisted:
            message = f"{history.unlisted} parameters are used but not listed in model.parameters(), and never trained"
            yield self.finding(f"{message}: are layers in a plain list, or made in forward?", count=history.unlisted)
        if held and not any(parameter.trainable for parameter in held.values()):
            for site, names in _by_owner(held).items():
                message = f"frozen, but the optimizer has no other parameters: {', '.join(names)}"
                yield self.finding(message, site, parameters=names)
        elif held and self._is_idle(history):
            message = "no parameter of the optimizer ever gets a gradient: they are no longer those of the model"
            yield self.finding(message, cause="loop", parameters=len(held))
        else:
            yield from self._left_out(history, held)
            yield from self._frozen_alone(history)

    def _frozen_alone(self, history: History) -> Iterator[Finding]:
        """The layers that are frozen while most of their block is trained."""
        assert history.rest is not None
        blocks: dict[str, dict[str, ParameterState]] = {}
        matrices = {path: p for path, p in history.rest.parameters.items() if _is_weight(path, p)}
        for path, parameter in matrices.items():
            blocks.setdefault(_block_of(path, matrices), {})[path] = parameter
        for block, inside in blocks.items():
            frozen = {path: p.summary.count for path, p in inside.items() if not p.trainable}
            if block and 0 < sum(frozen.values()) < 0.5 * sum(p.summary.count for p in inside.values()):
                for site, names in _by_owner(frozen).items():
                    message = f"frozen, while the rest of {block} is trained: {', '.join(names)}"
                    yield self.finding(message, site, parameters=names)

    def _left_out(self, history: History, held: Collection[str]) -> Iterator[Finding]:
        """The parameters that no optimizer trains, by module."""
        assert history.rest is not None
        elsewhere = history.loop.elsewhere if history.loop is not None else frozenset[str]()
        parameters, strangers = history.rest.parameters, history.rest.strangers
        left = [path for path, p in parameters.items() if p.trainable and not p.groups and path not in elsewhere]
        others = f" (the optimizer has {strangers} parameters that are not in the model)" if strangers else ""
        severity = "info" if not strangers and _is_last_part(list(parameters), left, held) else None
        cause = "loop" if strangers and not held else self.cause  # the optimizer is that of another model
        for site, names in _by_owner(left).items():
            message = f"not in the optimizer: {', '.join(names)}{others}"
            yield self.finding(message, site, None, severity, parameters=names, strangers=strangers, cause=cause)

    def _is_idle(self, history: History) -> bool:
        loop = history.loop
        return loop is not None and loop.looked >= self.least and loop.idle >= loop.looked


@register
class RateZero(Rule):
    """A parameter group has a learning rate of zero, and not because a schedule starts there."""

    code, name, severity = "TH504", "rate-zero", Severity.ERROR
    cause = "rate"
    phase = Phase.REST
    facts = ("rest", "own_optimizer")
    explains = ("TH302", "TH502", "TH601")
    hint = "Give the group a learning rate, or call requires_grad_(False) on parameters that should stay frozen."
    wrong = "A warm-up that starts at zero and is not one of torch's schedulers."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        still = {path: p for path, p in history.rest.parameters.items() if p.trainable and p.groups and p.lr == 0}
        if history.after is not None:  # a schedule may have raised it since
            still = {path: p for path, p in still.items() if history.after.parameters[path].lr == 0}
        for site, names in _by_owner(still).items():
            yield self.finding(f"its learning rate is 0: {', '.join(names)}", site, parameters=names)


@register
class EpsTooSmall(Rule):
    """The eps of an optimizer like Adam is zero in the precision of a parameter.

    It keeps a step from dividing zero by zero: 1e-8 is zero in float16. An eps of exactly zero is a warning, and one
    that is below the smallest normal number, which is 6e-5 in float16, an info.
    """

    code, name, severity = "TH505", "eps-too-small", Severity.ERROR
    cause = "precision"
    phase = Phase.REST
    facts = ("rest", "own_optimizer")
    explains = ("TH1", "TH2", "TH4", "TH501", "TH6", "TH8")
    hint = "Set eps=1e-4 or more, or keep the parameters in float32 and use torch.autocast."
    wrong = "An optimizer that computes in float32 and rounds at the end."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, known in history.rest.parameters.items():
            least = torch.finfo(known.dtype).tiny if known.dtype.is_floating_point else 0.0
            if known.eps is None or not known.trainable or known.eps >= least:
                continue
            dtype = str(known.dtype).removeprefix("torch.")
            is_lost = not torch.tensor(known.eps, dtype=known.dtype)
            message = f"the optimizer's eps of {known.eps:.1g} is {'zero' if is_lost else 'hardly a number'} in {dtype}"
            severity = "error" if is_lost and known.eps else "warning" if is_lost else "info"
            yield self.finding(message, path, None, severity, eps=known.eps, dtype=dtype)


@register
class DecayOfGains(Rule):
    """Weight decay pulls the gains of norms, or all weights, towards zero.

    An info if it alone takes away a fifth of the gains over the training, given the learning rate. A warning if it
    takes at least 0.05% in each step, and the gains really shrink to less than half, mostly by that; or if it takes 5%
    of the weights in each step.
    """

    code, name = "TH506", "decay-of-gains"
    cause = "rate"
    phase = Phase.UPDATE
    facts = ("rest", "own_optimizer", "after")
    explains = ("TH2", "TH401", "TH501", "TH601", "TH801")
    hint = "Put norms and biases into a parameter group of their own, with weight_decay=0."
    wrong = "A weight decay that is meant for the gains as well."
    taken, each, shrunk, most = 0.2, 5e-4, 0.5, 0.05

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        assert history.after is not None
        before, after = history.rest.parameters, history.after.parameters
        yield from self._of_weights(history, before)
        gains = [path for path, known in before.items() if _is_decaying_gain(path, known) and path in after]
        steps = max(history.losses, default=history.first_step - 1) - history.first_step + 1
        if not gains or not steps:
            return
        first, last = (fmean(parameters[path].summary.mean for path in gains) for parameters in (before, after))
        rate = _mean_rate(history, before[gains[0]])
        each = rate * max(before[path].decay for path in gains)
        if math.exp(-each * steps) > 1 - self.taken or not first > 0:
            return
        has_shrunk = 0 < last < self.shrunk * first and each * steps > 0.5 * math.log(first / last)
        message = f"weight decay takes {percent(each)}% of the gains of {len(gains)} norms in each step"
        severity = None if has_shrunk and each >= self.each else "info"
        yield self.finding(
            f"{message}: from {first:.2g} to {last:.2g}", owner(gains[0]), None, severity, each=plain(each)
        )

    def _of_weights(self, history: History, before: Mapping[str, ParameterState]) -> Iterator[Finding]:
        """The weights that lose half of themselves within some steps."""
        weights = {path: p for path, p in before.items() if _is_weight(path, p) and p.trainable and p.groups}
        each = {path: _mean_rate(history, p) * p.decay for path, p in weights.items()}
        worst = max(each, key=each.__getitem__, default=None)
        if worst is not None and each[worst] >= self.most:
            message = f"weight decay takes {percent(each[worst])}% of the weights in each step"
            finding = self.finding(message, owner(worst), history.first_step, each=plain(each[worst]))
            yield replace(finding, hint="Lower weight_decay: times the learning rate, it should be 0.0001 or less.")


def _mean_rate(history: History, parameter: ParameterState) -> float:
    return fmean(history.rates.values()) if history.rates else parameter.lr or 0.0


def _is_decaying_gain(path: str, parameter: ParameterState) -> bool:
    is_gain = kind_of(parameter.module) in NORMS and path.endswith("weight")
    return is_gain and parameter.decay > 0 and parameter.trainable


def _is_weight(path: str, parameter: ParameterState) -> bool:
    """Whether a parameter is the matrix of a layer, or of attention."""
    is_layer = kind_of(parameter.module) in ("weight", "recurrent", "attention")
    return is_layer and parameter.is_matrix and "weight" in path.rpartition(".")[2]


def _block_of(path: str, others: Collection[str]) -> str:
    """The innermost member of a list around a parameter that has other matrices, too; empty if there is none.

    >>> _block_of("layer.0.mlp.2.weight", ["layer.0.mlp.0.weight", "layer.0.mlp.2.weight"])
    'layer.0'
    """
    block = owner(path)
    while block:
        is_listed = block.rpartition(".")[2].isdigit()
        if is_listed and len({owner(other) for other in others if other.startswith(f"{block}.")}) > 1:
            return block
        block = owner(block)
    return ""


def _is_last_part(paths: list[str], left: Collection[str], held: Collection[str]) -> bool:
    """Whether what the optimizer has is the last part of a model, such as its head, and what is left comes before."""
    parts = {path.partition(".")[0] for path in held}
    return len(parts) == 1 and max(map(paths.index, left), default=0) < min(map(paths.index, held))


def _by_owner(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(owner(path), []).append(path.rpartition(".")[2])
    return found
