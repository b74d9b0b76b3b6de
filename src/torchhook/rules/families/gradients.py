"""TH4: whether gradients reach the layers, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import ClassVar

import torch

from torchhook.core.findings import Finding, Severity
from torchhook.rules.effects import has_used_siblings, reached, unreached, unused_part
from torchhook.rules.history import History, finite, is_within, last_of, norm, owner, plain, readings, rms
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.rules.series import jumps, outliers
from torchhook.stats.moments import Summary

_OUTPUTS = Need("grad_output", "moments", ("weight", "recurrent", "embedding"))


class GradientFlow(Rule):
    """How gradient norms change from the end of a model to its beginning."""

    phase = Phase.BACKWARD
    needs = (_OUTPUTS,)
    uses: ClassVar[tuple[Need, ...]] = (Need("param_grad"),)

    def norms(self, history: History) -> dict[str, float]:
        """The norm of the gradient of each layer's output, in the order of execution.

        Layers without a gradient, or with a nonfinite one, are left out.
        """
        found: dict[str, float] = {}
        for path, moments in _gradients(history):
            found[path] = math.hypot(found.get(path, 0), moments.l2)
        return found

    def sums(self, history: History) -> dict[str, float]:
        """The sum of the absolute values of each layer's gradient, which a mean over positions leaves as it is."""
        found: dict[str, float] = {}
        for path, moments in _gradients(history):
            found[path] = found.get(path, 0) + moments.abs_mean * moments.count
        return found

    def weights(self, history: History) -> dict[str, float]:
        """The norm of the gradient of each layer's largest matrix or vector, in the order of execution."""
        found = dict.fromkeys(self.norms(history), 0.0)
        for (path, _), by_step in history.summaries("param_grad").items():
            sizes = finite(moments.l2 for moments in by_step.values() if not moments.nonfinite)
            if sizes and owner(path) in found:
                found[owner(path)] = max(found[owner(path)], median(sizes))
        return {path: size for path, size in found.items() if size}

    def splits(self, norms: Mapping[str, float]) -> dict[str, float]:
        """For each layer, the largest norm up to it, divided by the largest norm after it.

        The largest on either side is that of the main path: the gradients of queries, keys, gates and other side
        branches are much smaller, which is healthy.
        """
        paths, values = list(norms), list(norms.values())
        most = len(paths) - max(1, len(paths) // 8)  # one of the last few layers alone is not enough to compare with
        return {paths[n - 1]: max(values[:n]) / max(values[n:]) for n in range(1, most + 1)}


@register
class VanishingGradient(GradientFlow):
    """The gradients of all layers up to some layer are less than a thousandth, in norm, of those after it.

    This must hold for the outputs of the layers, for the sums of their absolute values as well, and for the weights to
    less than 1/3000: pooling over n positions divides the norm by the square root of n, but neither the sum nor the
    gradients of the weights, which add them up. The comparison is relative, since the absolute size depends on the loss
    and its reduction. If gradients shrink at a single layer, the finding names that one, otherwise the first layer of
    the model. With an optimizer such as Adam, which divides gradients by their size, this is an info unless they are
    below 1e-7, where its eps takes over.
    """

    code, name = "TH401", "vanishing-gradient"
    cause = "activation"
    explains = ("TH502",)
    hint = "Use ReLU or GELU instead of sigmoids, residual connections, norms, or a scale-preserving initialisation."
    wrong = "Models with several parts, the first of which has little weight in the loss."
    ratio, of_weights, least = 1e-3, 3e-4, 1e-7

    def find(self, history: History) -> Iterator[Finding]:
        by_sums = self.splits(self.sums(history))
        splits = {path: max(split, by_sums[path]) for path, split in self.splits(self.norms(history)).items()}
        by_weights = self.splits(self.weights(history))
        if min(splits.values(), default=1.0) >= self.ratio or min(by_weights.values(), default=0.0) >= self.of_weights:
            return
        first = min(splits, key=splits.__getitem__)
        falls = {path: now / after for (path, now), (_, after) in pairwise(splits.items())}
        steepest = min(falls, key=falls.__getitem__, default=first)
        is_alone = falls.get(steepest, 1.0) < math.sqrt(splits[first]) and splits[steepest] < self.ratio
        site = steepest if is_alone else first
        message = f"gradient norms up to this layer are only {splits[site]:.1e} times those after it"
        severity = "info" if self._is_undone(history, first) else "error" if splits[site] < self.ratio**2 else None
        yield self.finding(message, site, None, severity, ratio=plain(splits[site]))

    def _is_undone(self, history: History, site: str) -> bool:
        """Whether the optimizer divides gradients by their size, and those of a layer are far above its eps."""
        if history.rest is None or not history.rest.is_scale_free:
            return False
        gradients = history.summaries("param_grad").items()
        sizes = [median(map(rms, by_step.values())) for (path, _), by_step in gradients if owner(path) == site]
        return max(sizes, default=0.0) > self.least


@register
class ExplodingGradient(GradientFlow):
    """Gradient norms up to some layer are more than a thousand times those after it.

    Even if gradients of outputs below one are multiplied by their size: small values before a norm have large
    gradients, which does no harm. Also if the gradient of a matrix is more than a thousand times as large as the
    matrix, in the median over the steps, where values count as at least 0.01. Unless the loss is a cross entropy, its
    gradients are divided by its first value: a loss that sums over many terms has gradients as large as itself.

    `check` does not know the values of the parameters. It finds gradients of outputs that are above 1000 in the root
    mean square, or above 10 if those of a parameter are above 1000: one of the two alone may be a sum over many terms.
    Gradients in float16 are left alone, since a GradScaler may have multiplied them.
    """

    code, name, severity = "TH402", "exploding-gradient", Severity.ERROR
    cause = "init"
    uses = (*GradientFlow.uses, Need("output"))
    explains = ("TH101", "TH103", "TH104", "TH2", "TH403", "TH501", "TH6", "TH801")
    hint = "Clip the gradient norm, lower the initial scale of the layer, or put norms between the layers."
    wrong = "A loss that sums over very many terms; targets that are not normalised."
    ratio, value = 1e3, 0.01
    size, beside = 1e3, 10.0

    def find(self, history: History) -> Iterator[Finding]:
        norms, sizes = self.norms(history), self._sizes(history)
        by_size = self.splits({path: size * sizes[path] for path, size in norms.items()})
        splits = {path: min(split, by_size[path]) for path, split in self.splits(norms).items()}
        worst = max(splits, key=splits.__getitem__, default=None)
        if worst is not None and splits[worst] > self.ratio:
            site = max(norms, key=norms.__getitem__)
            message = f"its gradient norm is {splits[worst]:.1e} times that of the layers after {worst}"
            yield self.finding(message, site, ratio=plain(splits[worst]))
        elif history.rest is None and not _may_be_scaled(history):
            yield from self._absolute(history, sizes)
        yield from self._of_parameters(history)

    def _sizes(self, history: History) -> dict[str, float]:
        """How large the outputs of each layer are, at most 1."""
        known = {reading.path: rms(reading["moments"]) for reading in readings(history.whole(), "output", "moments")}
        return {path: min(1.0, known.get(path) or 1.0) for path, _ in _gradients(history)}

    def _absolute(self, history: History, sizes: Mapping[str, float]) -> Iterator[Finding]:
        """What is too large by itself, where the values of the parameters are unknown."""
        of_outputs = {path: rms(moments) * sizes[path] for path, moments in _gradients(history)}
        site = max(of_outputs, key=of_outputs.__getitem__, default="")
        largest = of_outputs.get(site, 0.0)
        of_parameters = {
            path: median(known)
            for (path, _), by_step in history.summaries("param_grad").items()
            if (known := finite(map(rms, by_step.values())))
        }
        beside = max(of_parameters.values(), default=0.0)
        if largest > self.size or (largest > self.beside and beside > self.size):
            message = f"its gradients are {largest:.1e} in the root mean square"
            message += f", those of a parameter {beside:.1e}" if beside > self.size else ""
            yield self.finding(message, site, size=plain(largest))

    def _of_parameters(self, history: History) -> Iterator[Finding]:
        parameters = history.rest.parameters if history.rest is not None else {}
        has_mean = history.classes > 0
        loss = 1.0 if has_mean else max([1.0, *map(abs, finite(list(history.losses.values())[:1]))])
        for (path, _), by_step in history.summaries("param_grad").items():
            known = parameters.get(path)
            if known is None or not known.is_matrix:
                continue
            least = max(known.summary.l2, self.value * math.sqrt(known.summary.count))
            sizes = finite(moments.l2 / least / loss for moments in by_step.values() if not moments.nonfinite)
            if sizes and (size := median(sizes)) > self.ratio:
                yield self.finding(f"its gradient is {size:.1e} times as large as its values", path, ratio=plain(size))


@register
class GradientSpike(Rule):
    """The total gradient norm jumps for one step to more than five times, and six robust deviations above, its level.

    The level is the median of the eight steps before, on a log scale; with clipping, the clipped norm counts. Unless
    the loss jumps as well, by a third, or if others are trained in turn, as in a GAN, this is only an info: healthy
    trainings have such steps.
    """

    code, name = "TH403", "gradient-spike"
    cause = "divergence"
    phase = Phase.BACKWARD
    needs = (Need("param_grad"),)
    explains = ("TH2", "TH501", "TH601", "TH602")
    hint = "Inspect the batch of that step; clip the gradient norm; lower the learning rate or warm it up."
    wrong = "Batches of very different lengths."
    loss = 1.33

    def find(self, history: History) -> Iterator[Finding]:
        totals: dict[int, float] = {}
        taken = history.summaries("step_grad_norm")  # one value per step
        for by_step in (taken or history.summaries("param_grad")).values():
            for step, moments in by_step.items():
                size = norm(moments) if not taken or moments.nonfinite else moments.mean
                totals[step] = math.hypot(totals.get(step, 0), size)
        for step, times in outliers(totals, factor=5):
            has_calm_loss = bool(history.losses) and not jumps(history.losses, step, self.loss)
            is_harmless = has_calm_loss or history.is_contest
            message = f"the total gradient norm jumped to {times:.0f} times its recent level"
            yield self.finding(
                message, "", step, "info" if is_harmless else None, norm=plain(totals[step]), times=plain(times)
            )


@register
class NoGradient(Rule):
    """A trainable parameter gets no gradient, or only zeros, in at least three steps in which others get one.

    The finding names the module. It is an error if the loss needs the parameter all the same: something between them
    blocks the gradient. `diagnose` tries that, by changing the parameter; otherwise a module that is called counts. A
    part that the loss does not need is a warning, or an info if it and the code that does not use it are from installed
    packages, which know what they do, or if others of the same list are used, as experts are.
    """

    code, name, severity = "TH404", "no-gradient", Severity.ERROR
    cause = "no-gradient"
    phase = Phase.BACKWARD
    needs = (Need("param_grad"),)
    uses = (Need("output"),)
    facts = ("rest",)
    backward = True
    explains = ("TH502", "TH6", "TH302")
    hint = "Look for detach(), no_grad(), argmax or .data after it; if it should be frozen, call requires_grad_(False)."
    wrong = "Experts that no sample was routed to; heads of another task."
    least = 3

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        seen = reached(history)
        if not any(seen.values()) and len(history.windows) >= self.least:
            yield self._nowhere(history)
        if max(seen.values(), default=0) < self.least:
            return
        called = {path for path, port in history.whole().rows if port.startswith("output")}
        missed: dict[str, list[str]] = {}
        for path in unreached(history):
            missed.setdefault(owner(path), []).append(path)
        used = [path for path, count in seen.items() if count]
        for site, paths in missed.items():
            names = [path.removeprefix(f"{site}.") for path in paths]
            part, user = unused_part(site, used)
            is_part_of = {user, site} <= history.rest.installed
            is_called = any(is_within(path, site) for path in called)
            effects = [history.effects[path] for path in paths if path in history.effects]
            if any(effects) or (not effects and is_called and not is_part_of):
                severity = "info" if history.has_one_answer else None  # then nothing has to be learnt here
                yield self.finding(
                    f"no gradient reaches it: {', '.join(names)}", site, None, severity, parameters=names
                )
                continue
            problem = "the loss does not depend on it" if is_called else "it is never called"
            is_meant = is_part_of or history.has_one_answer or has_used_siblings(part, used)
            severity = "info" if is_meant else "warning"
            message = f"{problem}: {', '.join(names)}"
            yield self.finding(message, site, None, severity, parameters=names, cause="unused-part")

    def missing(self, history: History) -> str:
        """As for every rule, but a training that never had a gradient is what it looks for."""
        can_train = history.rest is not None and any(known.trainable for known in history.rest.parameters.values())
        return "" if can_train and history.after is not None and history.losses else super().missing(history)

    def _nowhere(self, history: History) -> Finding:
        """What to say if no parameter at all gets a gradient."""
        why, site = "the loss does not depend on them", last_of(history)
        for term in history.comparisons:
            if term.squash == "relu" and term.output is not None and term.output.high == 0:
                why, site = "the ReLU on the output is zero for every sample", term.site or site
        return self.finding(f"no gradient reaches any parameter: {why}", site, history.first_step)


@register
class GradientUnderflow(Rule):
    """All gradients are zero, in at least three steps, where the model computes in float16 and the loss does vary.

    The smallest float16 is 6e-8: gradients of a small loss, or of a mean over very many values, are zero there.
    """

    code, name, severity = "TH405", "gradient-underflow", Severity.ERROR
    cause = "precision"
    phase = Phase.BACKWARD
    needs = (Need("param_grad"), Need("output", "headroom"))
    uses = (Need("output"),)
    facts = ("rest", "losses")
    explains = ("TH404", "TH502", "TH6")
    hint = "Scale the loss with torch.amp.GradScaler, or use bfloat16."
    wrong = "A model whose output does not depend on its parameters."
    least = 3

    def find(self, history: History) -> Iterator[Finding]:
        seen = {path: by_step for (path, _), by_step in history.summaries("param_grad").items()}
        if not self._is_half(history) or len({loss for loss in history.losses.values() if math.isfinite(loss)}) < 2:
            return
        steps = {step for by_step in seen.values() for step in by_step}
        if len(steps) >= self.least and all(
            m.zero_fraction == 1 for by_step in seen.values() for m in by_step.values()
        ):
            message = "all gradients are zero: they are too small for float16"
            yield self.finding(message, last_of(history), min(steps), steps=len(steps))

    def _is_half(self, history: History) -> bool:
        assert history.rest is not None
        if any(parameter.dtype == torch.float16 for parameter in history.rest.parameters.values()):
            return True
        return any(reading["headroom"] > 0 for reading in readings(history.whole(), "output", "headroom"))


def _gradients(history: History) -> Iterator[tuple[str, Summary]]:
    """The gradients of the outputs of layers with weights, without those that are zero or not finite."""
    for reading in readings(history.whole(), "grad_output", "moments", *_OUTPUTS.kinds):
        if 0 < norm(reading["moments"]) < math.inf:
            yield reading.path, reading["moments"]


def _may_be_scaled(history: History) -> bool:
    """Whether some layer has gradients in float16, by the extremes: then a GradScaler may have multiplied them."""
    return any(
        moments.min != moments.max and all(_is_half(value) for value in (moments.min, moments.max))
        for _, moments in _gradients(history)
    )


def _is_half(value: float) -> bool:
    """Whether a number is exactly one of float16.

    >>> _is_half(0.5), _is_half(0.1), _is_half(1e6)
    (True, False, False)
    """
    return float(torch.tensor(value).half()) == value
