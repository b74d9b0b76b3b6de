"""TH8: representations that lose information: their rank, and collapsed attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchhook.core.findings import Finding
from torchhook.rules.history import History, last_of, plain, readings
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Rule
from torchhook.stats.covariance import Spread
from torchhook.stats.reading import Snapshot


@register
class RankCollapse(Rule):
    """The outputs of a layer vary in far fewer directions than possible: an effective rank below 5%, or below 1.1.

    The possible rank is the smaller of the rank of the inputs and the number of units, and must be at least six. Below
    15% is an info: a layer that has learnt an easy task needs no more. The effective rank is the exponential of the
    entropy of the covariance's spectrum.
    """

    code, name = "TH801", "rank-collapse"
    cause = "capacity"
    needs = (Need("output", "covariance", ("weight",)), Need("input", "covariance", ("weight",)))
    uses = (Need("output"),)
    explains = ("TH2", "TH401", "TH601")
    hint = "Check the rank of the layer's weight: its initialisation, or the weight decay if the rank fell over time."
    wrong = "Bottlenecks that have a low rank by design."
    low, share, one, least = 0.05, 0.15, 1.1, 6

    def find(self, history: History) -> Iterator[Finding]:
        half = len(history.windows) // 2
        since = {path: history.first_step for path, *_ in self._collapsed(history.before(0.5))}
        last = last_of(history, "weight")  # a confident classifier is fine
        for path, rank, possible in self._collapsed(history.whole(0.5)):
            if path == last:
                continue
            message = f"its outputs vary in only {rank:.1f} of {possible:.0f} possible directions"
            step = since.get(path, history.windows[half].step)
            severity = None if rank < max(self.low * possible, self.one) else "info"
            yield self.finding(message, path, step, severity, rank=plain(rank), possible=plain(possible))

    def _collapsed(self, window: Snapshot) -> Iterator[tuple[str, float, float]]:
        """Layers that have lost most directions, how many are left, and how many are possible."""
        inputs = {reading.path: reading for reading in readings(window, "input", "covariance", "weight")}
        for reading in readings(window, "output", "covariance", "weight"):
            if reading.path in inputs:
                before, after = inputs[reading.path]["covariance"], reading["covariance"]
                given, rank = _rank(before), _rank(after)
                possible = min(given, len(after.mean))
                if rank and possible >= self.least and rank < max(self.share * possible, self.one):
                    yield reading.path, rank, possible


def _rank(spread: Spread) -> float:
    """The effective rank; 0 if it is unknown, for example with too few samples."""
    enough = spread.count > 2 * len(spread.mean)
    return spread.effective_rank if enough and bool(spread.covariance.isfinite().all()) else 0.0


@register
class AttentionCollapse(Rule):
    """More than half of the heads of a layer attend to a single key: their mean entropy is below 10% of the maximum.

    The maximum is the logarithm of the number of keys that a position sees; positions that see one key do not count.
    """

    code, name = "TH802", "attention-collapse"
    forgiving = True
    cause = "init"
    needs = (Need("attention", "attention"),)
    explains = ("TH401", "TH601", "TH801")
    hint = "Normalise queries and keys (QK norm), lower the learning rate, or shrink the initial query and key weights."
    wrong = "Layers that copy or attend to one position by design; heads that park on the first token."
    entropy, share = 0.1, 0.5

    def find(self, history: History) -> Iterator[Finding]:
        for reading in readings(history.whole(0.5), "attention", "attention"):
            heads = reading["attention"].entropy
            low = float((heads < self.entropy).double().mean())
            if low > self.share:
                message = f"{100 * low:.0f}% of the heads attend to a single key"
                yield self.finding(message, reading.path, entropy=plain(heads.mean()), heads=len(heads))


@register
class AttentionLogits(Rule):
    """An attention logit (the product of query and key before the softmax) is above a hundred, or has grown tenfold.

    Logits grow before a training diverges; at a hundred, the softmax is saturated. Growth counts only above sixty:
    small models that learn well reach forty.
    """

    code, name = "TH803", "attention-logits"
    cause = "precision"
    needs = (Need("attention", "attention"),)
    explains = ("TH101", "TH103", "TH4", "TH601", "TH801", "TH802")
    hint = "Normalise queries and keys (QK norm), cap the logits, or check the scale of 1/√d."
    wrong = "Models that cap the logits afterwards."
    limit, growth, least = 100.0, 10.0, 60.0

    def find(self, history: History) -> Iterator[Finding]:
        begun = readings(history.before(0.5), "attention", "attention")
        first = {reading.path: reading["attention"].largest for reading in begun}
        for reading in readings(history.whole(0.5), "attention", "attention"):
            largest, before = reading["attention"].largest, first.get(reading.path, math.inf)
            if largest > self.limit:
                message = f"attention logits reach {largest:.3g}"
                yield self.finding(message, reading.path, largest=plain(largest))
            elif largest > max(self.growth * before, self.least):
                message = f"attention logits have grown from {before:.3g} to {largest:.3g}"
                yield self.finding(message, reading.path, largest=plain(largest), before=plain(before))
