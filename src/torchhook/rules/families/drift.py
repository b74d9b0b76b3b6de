"""TH9: another distribution than before, by a stored profile."""

from __future__ import annotations

from collections.abc import Iterator

from torchhook.core.findings import Finding
from torchhook.rules.history import History, plain
from torchhook.rules.registry import register
from torchhook.rules.rule import Need, Rule


@register
class Drift(Rule):
    """The outputs of a layer are distributed otherwise than in the profile.

    By the Wasserstein distance of the histograms (of values further from zero than four deviations, for which bins are
    too wide, by that of normal distributions), in deviations of the profile: three times what each of the profile's
    own batches is away from the others, and a tenth of a deviation, is a warning; ten times, and half a deviation, an
    error. The finding is about the first such layer in the order of execution.
    """

    code, name = "TH901", "drift"
    needs = (Need("output", "histogram"),)
    facts = ("profile",)
    explains = ("TH2",)
    hint = "If it begins at the first layer, the inputs have changed: compare their preprocessing with the profile's."
    wrong = "Batches that are much smaller, or of fewer classes, than those of the profile."
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
                said = f"its outputs are {distance:.2g} deviations away from the profile (good batches: {noise:.2g})"
                yield self.finding(said, place[0], None, severity, distance=plain(distance), noise=plain(noise))

    def _severity(self, distance: float, noise: float) -> str | None:
        for severity, (times, least) in (("error", self.error), ("warning", self.warning)):
            if distance > max(times * noise, least):
                return severity
        return None
