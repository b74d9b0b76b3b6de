"""TH4: whether gradients reach the layers, and how large they are on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, norm, owner, plain, readings
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.rules.series import jumps, outliers

_OUTPUTS = Need("grad_output", "moments", ("weight", "recurrent", "embedding"))


class Flow(Rule):
    """How gradients change from the end of a model to its beginning."""

    phase = Phase.BACKWARD
    needs = (_OUTPUTS,)

    def norms(self, history: History) -> dict[str, float]:
        """The norms of the gradients of what layers return, in the order of execution.

        Without layers that no gradient reaches, or whose gradient is not finite.
        """
        found: dict[str, float] = {}
        for reading in readings(history.whole(), "grad_output", "moments", *_OUTPUTS.kinds):
            said = reading["moments"]
            if 0 < norm(said) < math.inf:
                found[reading.path] = math.hypot(found.get(reading.path, 0), said.l2)
        return found

    def splits(self, history: History) -> dict[str, float]:
        """The largest norm up to each layer, over the largest behind it.

        The largest on either side is that of the main path: queries and keys, gates and other side branches have
        gradients that are far smaller, and healthy.
        """
        norms = self.norms(history)
        paths, values = list(norms), list(norms.values())
        most = len(paths) - max(1, len(paths) // 8)  # the last few are not told by a single one of them
        return {paths[n - 1]: max(values[:n]) / max(values[n:]) for n in range(1, most + 1)}


@register
class VanishingGradient(Flow):
    """Up to some layer, no gradient has a thousandth of the norm that there is behind it.

    Relative to other layers, since the absolute size follows the loss and its reduction. If gradients fall at a single
    layer, the finding is about that one, else about the first of the model.
    """

    code, name = "TH401", "vanishing-gradient"
    explains = ("TH502",)
    hint = (
        "Use ReLU or GELU instead of sigmoids, residual connections, norms, or an initialisation that keeps the scale."
    )
    wrong = "Models of several parts, the first of which has a small weight in the loss."
    ratio = 1e-3

    def find(self, history: History) -> Iterator[Finding]:
        splits = self.splits(history)
        if not splits or min(splits.values()) >= self.ratio:
            return
        first = min(splits, key=splits.__getitem__)
        falls = {path: now / after for (path, now), (_, after) in pairwise(splits.items())}
        steepest = min(falls, key=falls.__getitem__, default=first)
        is_alone = falls.get(steepest, 1.0) < math.sqrt(splits[first]) and splits[steepest] < self.ratio
        site = steepest if is_alone else first
        said = f"up to here gradients have {splits[site]:.1e} of the norm that they have behind it"
        severity = "error" if splits[site] < self.ratio**2 else None
        yield self.finding(said, site, None, severity, ratio=plain(splits[site]))


@register
class ExplodingGradient(Flow):
    """Up to some layer gradients have a thousand times the norm that they have behind it.

    Or the gradient of a parameter is a thousand times as large as itself, in the median over the steps.
    """

    code, name, severity = "TH402", "exploding-gradient", Severity.ERROR
    uses = (Need("param_grad"),)
    explains = ("TH101", "TH103", "TH104", "TH2", "TH403", "TH501", "TH6", "TH801")
    hint = "Clip the gradient norm, lower the initial scale of the layer, or put norms between the layers."
    wrong = "A loss that is a sum over very many terms; targets that are not normalised."
    ratio = 1e3

    def find(self, history: History) -> Iterator[Finding]:
        splits = self.splits(history)
        worst = max(splits, key=splits.__getitem__, default=None)
        if worst is not None and splits[worst] > self.ratio:
            norms = self.norms(history)
            site = max(norms, key=norms.__getitem__)
            said = f"its gradient has {splits[worst]:.1e} times the norm that there is behind {worst}"
            yield self.finding(said, site, ratio=plain(splits[worst]))
        parameters = history.rest.parameters if history.rest is not None else {}
        for (path, _), by_step in history.summaries("param_grad").items():
            known = parameters.get(path)
            if known is None or not known.is_matrix or not known.summary.l2 > 0:
                continue
            sizes = finite(said.l2 / known.summary.l2 for said in by_step.values() if not said.nonfinite)
            if sizes and (size := median(sizes)) > self.ratio:
                yield self.finding(f"its gradient is {size:.1e} times as large as itself", path, ratio=plain(size))


@register
class GradientSpike(Rule):
    """The norm of all gradients is for a step more than five times, and six robust deviations, above what it was.

    By the logarithm, against the median of eight steps before; after clipping, if there is any. Without a jump of the
    loss as well, by a third, it is only worth knowing: healthy trainings have such steps.
    """

    code, name = "TH403", "gradient-spike"
    phase = Phase.BACKWARD
    needs = (Need("param_grad"),)
    explains = ("TH2", "TH501", "TH601", "TH602")
    hint = "Look at the batch of that step; clip the gradient norm; lower the learning rate or warm it up."
    wrong = "Batches of very different lengths."
    loss = 1.33

    def find(self, history: History) -> Iterator[Finding]:
        totals: dict[int, float] = {}
        taken = history.summaries("step_grad_norm")  # one a step
        for by_step in (taken or history.summaries("param_grad")).values():
            for step, said in by_step.items():
                size = norm(said) if not taken or said.nonfinite else said.mean
                totals[step] = math.hypot(totals.get(step, 0), size)
        for step, times in outliers(totals, factor=5):
            is_harmless = bool(history.losses) and not jumps(history.losses, step, self.loss)
            text = f"the norm of all gradients is {times:.0f} times what it was"
            yield self.finding(
                text, "", step, "info" if is_harmless else None, norm=plain(totals[step]), times=plain(times)
            )


@register
class NoGradient(Rule):
    """A trainable parameter gets no gradient, or one of zeros alone, in three steps or more while others get theirs.

    The finding names the module. If it is never called, that is a warning, for experts and spare heads may wait for
    their turn; if it is called, something behind it stops the gradient.
    """

    code, name, severity = "TH404", "no-gradient", Severity.ERROR
    phase = Phase.BACKWARD
    needs = (Need("param_grad"),)
    uses = (Need("output"),)
    facts = ("rest",)
    backward = True
    explains = ("TH502", "TH6", "TH204", "TH302")
    hint = "Look for detach(), no_grad(), argmax or .data behind it; if it is meant to rest, requires_grad_(False)."
    wrong = "Experts that no sample was routed to; heads of another task."
    least = 3

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        reached = self._reached(history)
        if max(reached.values(), default=0) < self.least:
            return
        called = {path for path, port in history.whole().rows if port.startswith("output")}
        missed: dict[str, list[str]] = {}
        for path, known in history.rest.parameters.items():
            if known.trainable and not reached.get(path) and (known.groups or not history.rest.has_optimizer):
                missed.setdefault(owner(path), []).append(path)
        for site, paths in missed.items():
            names = [path.removeprefix(f"{site}.") for path in paths]
            is_called = site in called or any(owner(path) == site and reached.get(path) for path in reached)
            said = "no gradient reaches it" if is_called else "it is never called"
            severity = "error" if is_called else "warning"
            yield self.finding(f"{said}: {', '.join(names)}", site, None, severity, parameters=names)

    def _reached(self, history: History) -> dict[str, int]:
        """In how many windows a gradient was seen, by parameter."""
        found: dict[str, int] = {}
        for (path, _), by_step in history.summaries("param_grad").items():
            found[path] = sum(said.nonfinite > 0 or said.l2 > 0 for said in by_step.values())
        return found
