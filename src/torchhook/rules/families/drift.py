"""TH9: outputs that are distributed differently than in a stored profile."""

from __future__ import annotations

from collections.abc import Iterator

from torchhook.core.findings import Finding
from torchhook.rules.history import History, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Rule


@register
class Drift(Rule):
    """The outputs of a layer are distributed differently than in the profile.

    Measured by the Wasserstein distance of the histograms, in standard deviations of the profile. Where the mean is
    more than four deviations from zero, bins are too wide, and normal distributions are compared instead. A warning if
    the distance is above a tenth of a deviation and three times the largest distance of one of the profile's own
    batches from the others; an error above half a deviation and ten times. The finding names the first such layer in
    the order of execution.
    """

    code, name = "TH901", "drift"
    needs = (Need("output", "histogram"),)
    facts = ("profile",)
    explains = ("TH2",)
    hint = "If it begins at the first layer, the inputs have changed: check their preprocessing against the profile's."
    wrong = "Batches that are much smaller, or have fewer classes, than those of the profile."
    warning, error = (3.0, 0.1), (10.0, 0.5)

    def find(self, history: History) -> Iterator[Finding]:
        assert history.profile is not None
        live = history.whole()
        for place, known in history.profile.places.items():
            if place not in live.rows:
                continue
            distance = known.distance(live[place])
            noise = known.noise * max(1.0, known.size / max(live[place].count, 1)) ** 0.5  # small batches vary more
            severity = self._severity(distance, noise)
            if severity:
                message = f"its outputs are {distance:.2g} standard deviations from the profile"
                message += f" (normal: up to {noise:.2g})"
                yield self.finding(message, place[0], None, severity, distance=plain(distance), noise=plain(noise))

    def _severity(self, distance: float, noise: float) -> str | None:
        for severity, (times, least) in (("error", self.error), ("warning", self.warning)):
            if distance > max(times * noise, least):
                return severity
        return None
