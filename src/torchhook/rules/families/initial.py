"""TH3: how a training begins: the spread of activations over depth, identical weights, inputs out of scale."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import fmean

from torchhook.core.findings import Finding
from torchhook.rules.history import History, mean_unit_std, owner, plain, readings
from torchhook.rules.kinds import ACTIVATIONS, NORMS, kind_of
from torchhook.rules.registry import register
from torchhook.rules.rest import ParameterState
from torchhook.rules.rule import Need, Phase, Rule


@register
class PoorInit(Rule):
    """Before any training, signals have died out or blown up when they reach the last layer.

    Their spread is the standard deviation of each unit over the batch, averaged over the layer: over the whole tensor,
    biases would hide that a signal has died out. At the input of the last layer it is more than a thousand times that
    at the input of the first (or one), or less than a thousandth, and the last layer's biases drown what is left (a
    millionth is enough without them). In between, any spread is fine: queries, gates and small weights before a norm
    do no harm. The finding names the layer that changes the spread most, by its weights or by what follows it.
    """

    code, name = "TH301", "poor-init"
    cause = "init"
    needs = (Need("output", "channels", ("weight",)), Need("input", "channels", ("weight",)))
    uses = (Need("output", "channels", tuple(sorted(ACTIVATIONS | NORMS))),)
    explains = ("TH105", "TH2", "TH4", "TH5", "TH6", "TH8")
    hint = "Initialise with kaiming_normal_ (ReLU) or xavier_uniform_ (tanh), or add a norm after the layer."
    wrong = "Models that scale layers on purpose (muP, Fixup) and have no norms."
    ratio, drowned = 1e3, 1e-3

    def find(self, history: History) -> Iterator[Finding]:
        if history.windows[0].step > history.first_step:
            return
        spreads = self._spreads(history)
        if len(spreads) < 2:
            return
        first, last = spreads[0][1], spreads[-2][1]
        lost = self.ratio**2 if self._share_of_inputs(history) > self.drowned else self.ratio
        if first <= lost * last and last <= self.ratio * max(first, 1.0):  # a norm may lift small inputs to one
            return
        way = 1 if last > first else -1
        changes = [(path, way * math.log(now / before)) for (path, before), (_, now) in pairwise(spreads)]
        most = max(change for _, change in changes)
        site = next(path for path, change in changes if change > 0.5 * most)
        message = f"the spread of activations goes from {first:.2g} to {last:.2g} over the layers"
        cause = "activation" if way < 0 and self._squashes(history) else self.cause
        yield self.finding(message, site, history.first_step, first=plain(first), last=plain(last), cause=cause)

    def _squashes(self, history: History) -> bool:
        """Whether most activations are sigmoids, each of which takes at least three quarters of the spread."""
        kinds = [kind_of(reading.module_class) for reading in readings(history.first(), "output", "channels")]
        known = [kind for kind in kinds if kind in ACTIVATIONS]
        return known.count("sigmoid") > len(known) / 2

    def _share_of_inputs(self, history: History) -> float:
        """How much the outputs of the last layer vary with the inputs, as a share of their size."""
        *_, last = readings(history.first(), "output", "channels", "weight")
        size = float(last["channels"].abs_mean.mean())
        return (mean_unit_std(last) or 0.0) / size if size else 1.0

    def _spreads(self, history: History) -> list[tuple[str, float]]:
        """The spread of each layer's input and output, each with the path of the layer that changes it next."""
        snapshot = history.first()
        rows = list(readings(snapshot, "output", "channels"))
        found: list[tuple[str, float]] = []
        for number, reading in enumerate(rows):
            following = rows[number + 1].module_class if number + 1 < len(rows) else ""
            if kind_of(reading.module_class) == "weight" and kind_of(following) not in NORMS:
                given = snapshot.rows.get((reading.path, "input"))
                before = mean_unit_std(snapshot[reading.path, "input"]) if given is not None else None
                after = mean_unit_std(reading)
                if before and after:
                    if found:  # the module that ran last is what has changed it since
                        found[-1] = rows[number - 1].path, found[-1][1]
                    found += [(reading.path, before), (reading.path, after)]
        return found


@register
class SymmetricInit(Rule):
    """All units of a weight matrix have the same weights, so they all learn the same.

    Other parameters, such as those of state spaces, may have equal rows. LoRA, residual branches and new heads start
    with weights of zeros. Those count if training does not change them; if those of the same layer in other blocks are
    not zero; if the model was trained before, by the gains of its norms, and nothing of it is frozen (a last layer only
    if its outputs are the tokens of an embedding: others may be new); or if nothing of the input reaches the last
    layer.
    """

    code, name = "TH302", "symmetric-init"
    cause = "init"
    phase = Phase.REST
    facts = ("rest",)
    uses = (Need("output", "channels", ("weight",)), Need("input", "channels", ("weight",)))
    explains = ("TH2", "TH301", "TH4", "TH502", "TH6", "TH8")
    hint = "Initialise the weight randomly: nn.init.kaiming_uniform_(layer.weight); the gain of a norm starts at one."
    wrong = "Fixed filters, which are not trained: call requires_grad_(False) on them."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, parameter in history.rest.parameters.items():
            is_weight = _WEIGHT.search(path.rpartition(".")[2]) is not None
            if parameter.alike and parameter.is_matrix and parameter.trainable and is_weight and not parameter.is_zero:
                value = plain(parameter.summary.mean)
                yield self.finding("all units have the same weights", owner(path), None, "error", value=value)
            elif parameter.is_zero and parameter.trainable and (problem := self._zero(history, path)):
                yield self.finding(f"all weights are zero, {problem}", owner(path), None, "error")

    def _zero(self, history: History, path: str) -> str:
        """What is wrong with a weight of zeros; empty if nothing is."""
        assert history.rest is not None
        known, is_weight = history.rest.parameters, path.endswith("weight")
        after = history.after.parameters.get(path) if history.after is not None else None
        stays = after is not None and after.groups and after.trainable and after.is_zero
        if known[path].is_matrix and stays and _is_used(history, path):
            return "and training does not change them"
        if known[path].is_matrix and any(not known[other].is_zero for other in _siblings(path, known)):
            return "unlike those of the other blocks"
        if is_weight and _constant_end(history) not in ("", owner(path)):
            return "and nothing of the input reaches the last layer"
        if known[path].is_matrix and _was_trained(known) and not _may_be_new(history, path):
            return "in a model that was trained before"
        return ""


def _is_used(history: History, path: str) -> bool:
    """Whether a parameter is part of the graph: a mask token of zeros may not be, and then another rule says so."""
    gradients = history.summaries("param_grad")
    return history.effects.get(path, True) and (not gradients or (path, "param_grad") in gradients)


_WEIGHT = re.compile(r"weight|kernel|proj|^w(_|\d|$)", re.IGNORECASE)


def _siblings(path: str, known: Mapping[str, ParameterState]) -> list[str]:
    """The parameters of the same name and size in other blocks: ``"layer.1.fc.weight"`` for ``"layer.0.fc.weight"``."""
    pattern = re.compile(re.sub(r"\\\.\d+(?=(\\\.\w+){2,})", r"\\.\\d+", re.escape(path)))
    size = known[path].summary.count
    return [
        other for other in known if other != path and known[other].summary.count == size and pattern.fullmatch(other)
    ]


def _was_trained(known: Mapping[str, ParameterState]) -> bool:
    """Whether the gains of norms, which start at one, differ, and hardly any parameter is frozen, as with LoRA."""
    gains = [state.summary for path, state in known.items() if path.endswith("weight") and not state.is_matrix]
    frozen = sum(state.summary.count for state in known.values() if not state.trainable)
    is_whole = frozen < 0.1 * sum(state.summary.count for state in known.values())
    return is_whole and bool(gains) and sum(0 < gain.std < gain.mean / 2 for gain in gains) > len(gains) / 2


def _may_be_new(history: History, path: str) -> bool:
    """Whether a weight is that of the last layer, which fine-tuning replaces unless its outputs are the tokens."""
    assert history.rest is not None
    known = history.rest.parameters
    vocabularies = {state.units for state in known.values() if kind_of(state.module) == "embedding"}
    layers = list(readings(history.first(), "output", "channels", "weight"))
    is_last = bool(layers) and owner(path) == layers[-1].path
    return is_last and known[path].units not in vocabularies


def _constant_end(history: History) -> str:
    """The path of the last layer, if what it gets is the same for every sample of the first batch; else empty."""
    snapshot = history.first()
    layers = list(readings(snapshot, "output", "channels", "weight"))
    if not layers or history.windows[0].step > history.first_step:
        return ""
    last = layers[-1]
    units = (snapshot[last.path, "input"] if (last.path, "input") in snapshot.rows else last)["channels"]
    is_constant = float(units.std.max()) <= 1e-6 * max(float(units.abs_mean.max()), 1e-30)
    return last.path if is_constant else ""


@register
class InputScale(Rule):
    """The inputs of the first layer have a mean or a standard deviation beyond ten; a size beyond 100 is an error.

    Images with values from 0 to 255 and raw measurements are the usual cause; inputs of a size below 0.02 were often
    divided twice, and are an info as long as the loss falls. Only inputs of the model itself count. If a norm follows
    the layer, which undoes the scale, this is only an info.
    """

    code, name = "TH303", "input-scale"
    forgiving = True
    cause = "input-scale"
    needs = (Need("input", "moments", ("weight", "recurrent")), Need("output"))
    explains = ("TH105", "TH2", "TH301", "TH4", "TH501", "TH6", "TH7", "TH8")
    hint = "Normalise the inputs to a mean of about 0 and a standard deviation of about 1."
    wrong = "A model that normalises its inputs itself, or whose first layer expects raw values."
    limit, error, least = 10.0, 100.0, 0.02

    def find(self, history: History) -> Iterator[Finding]:
        snapshot = history.first()
        order = list(readings(snapshot, "output", "moments"))
        first = order[0] if order else None
        if first is None or (first.path, "input") not in snapshot.rows:
            return
        given = snapshot[first.path, "input"]
        if "moments" not in given:  # of a norm, which undoes any scale
            return
        inputs = given["moments"]
        size = math.hypot(inputs.mean, inputs.std)
        is_small = 0 < size < self.least
        if max(abs(inputs.mean), inputs.std) > self.limit or is_small:
            message = f"the inputs have a mean of {inputs.mean:.3g} and a standard deviation of {inputs.std:.3g}"
            is_undone = len(order) > 1 and kind_of(order[1].module_class) in NORMS
            is_harmless = is_undone or (is_small and not _is_stuck(history))
            severity = "info" if is_harmless else "error" if size > self.error else None
            step = history.windows[0].step
            yield self.finding(message, first.path, step, severity, mean=plain(inputs.mean), std=plain(inputs.std))


def _is_stuck(history: History) -> bool:
    """Whether the loss is about where it began, after some steps."""
    values = list(history.losses.values())
    quarter = len(values) // 4
    return quarter > 2 and fmean(values[-quarter:]) > 0.9 * fmean(values[:quarter])
