"""TH2: units that contribute nothing: dead, dormant, saturated, or constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.core.findings import Finding, Severity
from torchhook.rules.history import History, finite, last_of, plain, readings, samples
from torchhook.rules.kinds import ACTIVATIONS, NORMS, kind_of
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Rule
from torchhook.stats.channels import Units
from torchhook.stats.reading import Reading, Snapshot

_LAYERS = ("weight", *sorted(NORMS), *sorted(ACTIVATIONS))
_GIVEN = (Need("input", "channels", ("weight",)), Need("input", "moments", ("weight",)))
_STUCK = ("TH202", "TH204", "TH301", "TH401", "TH404", "TH502", "TH601", "TH603", "TH701", "TH801")


@register
class DeadUnits(Rule):
    """Units of a ReLU that are positive on less than 0.1% of at least 200 positions.

    A quarter of a layer's units is an info, 68% are a warning (75% if they fired at first: training may leave some
    idle), 80% an error. Less than 80% stay an info where more than a third of the other units always fire, since then
    the inputs hardly vary; and before a global pooling if units fired at first, since a classifier may need few. A ReLU
    that is called as a function counts, too: by units of the layer before it that are never positive, and zero for the
    layer after it. A quarter of the outputs that the loss gets is a warning if the training does not work. The share of
    zeros alone says nothing: a healthy ResNet has 40% zeros and no dead unit.
    """

    code, name = "TH201", "dead-units"
    cause = "activation"
    needs = (Need("output", "channels", _LAYERS),)
    uses = (Need("output"), *_GIVEN)
    explains = _STUCK
    hint = (
        "These units no longer learn. Lower the learning rate or the weight decay of the layer before,"
        " look for a large negative bias, or use LeakyReLU or GELU."
    )
    wrong = "Experts and adapters that these inputs do not use; pruned networks; few or very similar samples."
    active, least, always = 0.001, 200, 0.98
    info, warning, lost, error = 0.25, 0.68, 0.75, 0.8

    def find(self, history: History) -> Iterator[Finding]:
        half, quarter = history.whole(0.5), history.whole(0.25)  # a quarter may have too few samples
        pooled = _last_before_pooling(half)
        outputs = {last_of(history)} if any(term.squash == "relu" for term in history.comparisons) else set[str]()
        for site, (dead, fires) in {**self._dead(half), **self._dead(quarter)}.items():
            share = float(dead.double().mean())
            if share >= self.info and len(dead) >= 8:
                step = _since(history, site, dead, self.active)
                have_fired = step is not None and step > history.first_step
                is_meant = bool((fires[~dead] > self.always).double().mean() > 1 / 3) or (have_fired and site == pooled)
                message = f"{100 * share:.0f}% of the units never fire"
                severity = self._severity(share, have_fired, is_meant)
                if severity == Severity.INFO and site in outputs and not history.works:
                    severity = Severity.WARNING
                yield self.finding(message, site, step, severity, dead=int(dead.sum()), units=len(dead))

    def _dead(self, window: Snapshot) -> dict[str, tuple[Tensor, Tensor]]:
        """Which units of each rectifier are dead, and on which part of the positions each of them is positive."""
        return {**self._modules(window), **self._functions(window)}

    def _severity(self, share: float, have_fired: bool, is_meant: bool) -> Severity:
        if share >= self.error:
            return Severity.ERROR
        is_much = share >= (self.lost if have_fired else self.warning) and not is_meant
        return Severity.WARNING if is_much else Severity.INFO

    def _modules(self, window: Snapshot) -> dict[str, tuple[Tensor, Tensor]]:
        """Rectifiers that are modules."""
        found = {}
        for reading in readings(window, "output", "channels", "rectifier"):
            fires = reading["channels"].active_fraction
            if samples(reading) >= self.least:
                found[reading.path] = fires < self.active, fires
        return found

    def _functions(self, window: Snapshot) -> dict[str, tuple[Tensor, Tensor]]:
        """Rectifiers that are functions between two modules."""
        found = {}
        for pair in _pairs(window):
            if pair.samples >= self.least and pair.least >= 0:
                fires = pair.before.active_fraction
                found[pair.path] = (fires < self.active) & (pair.given < 1e-12), fires
        return found


class _Pair(NamedTuple):
    """A layer, and what the next layer gets from its units."""

    path: str
    samples: int
    before: Units
    given: Tensor  # the mean absolute value of each unit, as the next layer gets it
    least: float  # the smallest value that the next layer gets

    @property
    def is_direct(self) -> bool:
        """Whether nothing is between the two layers: what is small then is small on purpose."""
        return torch.allclose(self.given, self.before.abs_mean, rtol=1e-3, atol=0)


def _pairs(window: Snapshot) -> Iterator[_Pair]:
    """Pairs of layers that follow each other in execution, where the second takes some values from each unit."""
    before, between = None, None  # the last layer with weights, or norm; and the activation since then
    rows = {place: window[place] for place, row in window.rows.items() if row.label}
    for (path, port), reading in rows.items():
        if port != "output" or "channels" not in reading:
            continue
        if kind_of(reading.module_class) in ACTIVATIONS:
            between = reading
            continue
        after = rows.get((path, "input"))
        if before is not None and after is not None and "channels" in after and not _is_its_own(between, before):
            units: Units = before["channels"]
            given: Tensor = after["channels"].abs_mean
            if len(given) % len(units.mean) == 0:
                given = given.view(len(units.mean), -1).amax(1)
                least = after["moments"].min if "moments" in after else 0.0
                yield _Pair(before.path, samples(before), units, given, least)
        before, between = reading, None


def _last_before_pooling(window: Snapshot) -> str:
    """The activation, or layer before a function, that is pooled before the last layer; empty if there is none."""
    layers = list(readings(window, "output", "channels", *_LAYERS))
    is_pooled = len(layers) > 1 and samples(layers[-2]) > samples(layers[-1])
    return layers[-2].path if is_pooled else ""


def _is_its_own(activation: Reading | None, layer: Reading) -> bool:
    """Whether an activation is a module used by this layer alone, so that its own outputs can be judged."""
    return activation is not None and samples(activation) == samples(layer)


@register
class DormantUnits(Rule):
    """More than two fifths of a layer's units have a mean absolute output below a fortieth of the layer's mean.

    This is relative to the layer, so it finds the idle units of GELU and SiLU, called as modules or as functions before
    a layer with weights. It does not apply to ReLU, where healthy units may rarely fire.
    """

    code, name = "TH202", "dormant-units"
    cause = "activation"
    needs = (Need("output", "channels", _LAYERS),)
    uses = (Need("output"), *_GIVEN)
    explains = ("TH204", "TH401", "TH502", "TH601", "TH801")
    hint = "Much of the layer is idle: check the initialisation and the learning rate of the layer before, or prune it."
    wrong = "Gates that are meant to be closed; pruned layers; one-hot or sparse features."
    tau, share, least = 0.025, 0.4, 256

    def find(self, history: History) -> Iterator[Finding]:
        window = history.whole(0.5)
        sizes = {
            reading.path: (reading["channels"].abs_mean, samples(reading))
            for reading in readings(window, "output", "channels", "leaky")
        }
        for pair in _pairs(window):
            if pair.least < 0 and not pair.is_direct:
                sizes.setdefault(pair.path, (pair.given, pair.samples))
        for site, (size, count) in sizes.items():
            dormant = size <= self.tau * size.mean()
            share = float(dormant.double().mean())
            if count >= self.least and len(size) >= 4 and share > self.share and size.mean() > 0:
                message = f"{100 * share:.0f}% of the units are nearly inactive"
                yield self.finding(message, site, dormant=int(dormant.sum()), units=len(size))


@register
class Saturated(Rule):
    """Units of a sigmoid or tanh at the ends of their range (beyond 0.02 and 0.98, or ±0.97) on 60% of positions.

    80% of a layer's units are a warning, 90% an error. The last activation of a model does not count: a confident
    classifier saturates it. If they are before any training, the initial weights are at fault.
    """

    code, name = "TH203", "saturated"
    forgiving = True
    cause = "activation"
    needs = (Need("output", "saturation", ("sigmoid", "tanh")),)
    uses = (Need("output"),)
    explains = ("TH204", "TH301", "TH401", "TH404", "TH502", "TH601", "TH801")
    hint = (
        "Hardly any gradient passes. Make the weights of the layer before smaller, normalise its inputs,"
        " or use ReLU or GELU."
    )
    wrong = "Gates, which are open or closed by design."
    part = 0.6
    limits: tuple[float, float] = (0.8, 0.9)

    def find(self, history: History) -> Iterator[Finding]:
        last = history.order.get(last_of(history, "weight"), -1)
        is_known = history.windows[0].step == history.first_step
        before = self._shares(history.first()) if is_known else {}
        for path, (share, part) in self._shares(history.whole(0.5)).items():
            if share >= self.limits[0] and history.order[path] < last:
                message = f"{100 * share:.0f}% of the units are saturated"
                severity = "error" if share >= self.limits[1] else "warning"
                cause = "init" if path in before and before[path][0] >= self.limits[0] else self.cause
                yield self.finding(message, path, None, severity, mean_part=plain(part), cause=cause)

    def _shares(self, window: Snapshot) -> dict[str, tuple[float, float]]:
        """The share of saturated units of each module, and on which part of the positions a unit is, on average."""
        found = {}
        for reading in readings(window, "output", "saturation", "sigmoid", "tanh"):
            part: Tensor = reading["saturation"]
            found[reading.path] = float((part > self.part).double().mean()), float(part.mean())
        return found


@register
class ConstantOutput(Rule):
    """All units of a layer vary by less than a millionth of their size: its output is the same for every input.

    Its own inputs do vary: a layer that gets learned queries or a class token, the same for every sample, is not at
    fault, nor is one after a layer that is. A norm counts if all its weights are zero. Judged after some training,
    since layers that start at zero on purpose (LoRA, residual branches) do not stay there. If all targets are the same,
    this is only an info: the answer is right. If the model's own inputs do not vary, nor what it makes of them,
    although the targets do, they are named.
    """

    code, name, severity = "TH204", "constant-output", Severity.ERROR
    cause = "activation"
    needs = (Need("output", "channels", _LAYERS),)
    uses = (Need("input", "channels", ("weight",)),)
    explains = ("TH202", "TH204", "TH401", "TH404", "TH502", "TH601", "TH801")
    hint = "No information passes this layer: look for zero weights, a dead layer before it, or identical inputs."
    wrong = "Position embeddings and other inputs that are the same in every batch."
    least = 5  # windows

    def find(self, history: History) -> Iterator[Finding]:
        if len(history.windows) < self.least:
            return
        window = history.whole(0)
        severity = "info" if history.has_one_answer else None
        before: Reading | None = None
        layers = list(readings(window, "output", "channels", *_LAYERS))
        if layers and _is_constant(layers[-1]) and self._gets_one_input(layers[0], history):
            yield self.finding("every sample has the same inputs", layers[0].path, None, severity, cause="other")
        for reading in layers:
            if _is_constant(reading) and not self._gets_the_same(reading, before, history):
                message = "its output is the same for every input"
                units: Units = reading["channels"]
                spread, size = max(finite(units.std.tolist())), units.abs_mean.max()
                yield self.finding(message, reading.path, None, severity, spread=plain(spread), size=plain(size))
            before = reading

    def _gets_one_input(self, first: Reading, history: History) -> bool:
        """Whether the inputs of the first layer do not vary, but the targets do."""
        given = history.whole(0).rows.get((first.path, "input"))
        targets = [term.target for term in history.comparisons]
        return (
            given is not None
            and _is_constant(history.whole(0)[first.path, "input"])
            and any(target is not None and target.std > 0 for target in targets)
        )

    def _gets_the_same(self, reading: Reading, before: Reading | None, history: History) -> bool:
        """Whether the inputs of a layer do not vary either; of an activation, what ran before it."""
        kind = kind_of(reading.module_class)
        if kind in NORMS:
            rest = history.after or history.rest
            weight = rest.parameters.get(f"{reading.path}.weight") if rest is not None else None
            return weight is None or weight.summary.zero_fraction < 1
        if kind in ACTIVATIONS:
            return before is not None and _is_constant(before, 1e-5)
        window = history.whole(0)
        return (reading.path, "input") in window.rows and _is_constant(window[reading.path, "input"], 1e-3)


def _is_constant(reading: Reading, most: float = 1e-6) -> bool:
    """Whether no unit varies by more than this part of the layer's size."""
    if "channels" not in reading or samples(reading) < 2:
        return False
    units: Units = reading["channels"]
    spread = finite(units.std.tolist())
    return bool(spread) and max(spread) <= most * max(float(units.abs_mean.max()), 1e-30)


def _since(history: History, site: str, dead: Tensor, active: float) -> int | None:
    """The step since which most of the `dead` units have been dead."""
    since = None
    for step, snapshot in reversed(history.windows):
        rows = [place for place in snapshot.rows if place[0] == site and place[1].startswith("output")]
        if not rows or "channels" not in (reading := snapshot[rows[0]]):
            continue
        fires = reading["channels"].active_fraction[dead] > active
        if float(fires.double().mean()) > 0.5:
            break
        since = step
    return since
