"""TH3: how a training begins: the spread of signals over depth, weights that are all alike, inputs out of scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from torchhook.core.findings import Finding
from torchhook.rules.history import History, finite, owner, plain, readings
from torchhook.rules.kinds import ACTIVATIONS, NORMS, kind_of
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stats.reading import Reading


@register
class PoorInit(Rule):
    """The spread of units over the samples differs by more than a thousand between layers, before any training.

    The spread is the standard deviation of each unit over the batch, averaged over the layer: over the whole tensor
    biases would hide that a signal has died out. Layers before a norm, and those that begin as zero, do not count.
    The finding is about the layer that changes the spread most, by its weights or by what is done to its output.
    """

    code, name = "TH301", "poor-init"
    needs = (Need("output", "channels", ("weight",)), Need("input", "channels", ("weight",)))
    uses = (Need("output", "channels", tuple(sorted(ACTIVATIONS | NORMS))),)
    explains = ("TH105", "TH2", "TH4", "TH5", "TH6", "TH8")
    hint = "Initialise with kaiming_normal_ (ReLU) or xavier_uniform_ (tanh), or put a norm after the layer."
    wrong = "Models that scale layers on purpose (muP, fixup) and have no norms."
    ratio = 1e3

    def find(self, history: History) -> Iterator[Finding]:
        if history.windows[0].step > history.first_step:
            return
        spreads = self._spreads(history)
        known = [spread for _, spread in spreads]
        if len(known) < 2 or max(known) <= self.ratio * min(known):
            return
        changes = [(path, abs(math.log(now / before))) for (path, before), (_, now) in pairwise(spreads)]
        most = max(change for _, change in changes)
        site = next(path for path, change in changes if change > 0.5 * most)
        said = f"signals change in spread from {known[0]:.2g} to {known[-1]:.2g} over the layers"
        yield self.finding(said, site, history.first_step, largest=plain(max(known)), smallest=plain(min(known)))

    def _spreads(self, history: History) -> list[tuple[str, float]]:
        """The spread of what each layer is given and gives, by the layer that changes it next."""
        snapshot = history.first()
        rows = list(readings(snapshot, "output", "channels"))
        found: list[tuple[str, float]] = []
        for number, reading in enumerate(rows):
            following = rows[number + 1].module_class if number + 1 < len(rows) else ""
            if kind_of(reading.module_class) == "weight" and kind_of(following) not in NORMS:
                given = snapshot.rows.get((reading.path, "input"))
                before = _spread(snapshot[reading.path, "input"]) if given is not None else 0.0
                after = _spread(reading)
                if before > 0 and after > 0:
                    if found:  # what has changed it since then is what ran last
                        found[-1] = rows[number - 1].path, found[-1][1]
                    found += [(reading.path, before), (reading.path, after)]
        return found


def _spread(reading: Reading) -> float:
    """The mean over units of their standard deviation."""
    known = finite(reading["channels"].std.tolist()) if "channels" in reading else []
    return sum(known) / len(known) if known else 0.0


@register
class SymmetricInit(Rule):
    """All units of a weight matrix have the same weights, so all of them learn the same.

    Matrices of zeros are how LoRA and residual branches begin; they count only if training does not change them.
    """

    code, name = "TH302", "symmetric-init"
    phase = Phase.REST
    facts = ("rest",)
    explains = ("TH2", "TH301", "TH4", "TH502", "TH6", "TH8")
    hint = "Initialise the weight at random: nn.init.kaiming_uniform_(layer.weight)."
    wrong = "Fixed filters, which need no gradient: say so with requires_grad_(False)."

    def find(self, history: History) -> Iterator[Finding]:
        assert history.rest is not None
        for path, parameter in history.rest.parameters.items():
            is_zero = parameter.summary.zero_fraction == 1
            if parameter.alike and parameter.is_matrix and parameter.trainable and not is_zero:
                yield self.finding("all units have the same weights", owner(path), value=plain(parameter.summary.mean))
            after = history.after.parameters.get(path) if history.after is not None else None
            stays = after is not None and bool(after.groups) and after.trainable and after.summary.zero_fraction == 1
            if is_zero and parameter.is_matrix and stays:
                yield self.finding("the weight is zero, and training leaves it so", owner(path), None, "error")


@register
class InputScale(Rule):
    """The inputs of the first layer have a mean or a standard deviation beyond ten.

    Images of 0 to 255 and raw measurements are the usual cause. It is the input itself, not what a layer made of it.
    """

    code, name = "TH303", "input-scale"
    needs = (Need("input", "moments", ("weight", "recurrent")), Need("output"))
    explains = ("TH105", "TH2", "TH301", "TH4", "TH501", "TH6", "TH7", "TH8")
    hint = "Normalise the inputs to a mean of about 0 and a deviation of about 1."
    wrong = "A model that normalises inside, or whose first layer is meant to take raw values."
    limit = 10.0

    def find(self, history: History) -> Iterator[Finding]:
        snapshot = history.first()
        first = next(iter(readings(snapshot, "output", "moments")), None)
        if first is None or (first.path, "input") not in snapshot.rows:
            return
        said = snapshot[first.path, "input"]["moments"]
        if max(abs(said.mean), said.std) > self.limit:
            text = f"the inputs have a mean of {said.mean:.3g} and a deviation of {said.std:.3g}"
            step = history.windows[0].step
            yield self.finding(text, first.path, step, mean=plain(said.mean), std=plain(said.std))
