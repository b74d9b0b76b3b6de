"""The diagnosis of a specimen: by `diagnose`, by its own training loop, or against a profile."""

from __future__ import annotations

from torchhook.core.findings import Report
from torchhook.rules import chosen
from torchhook.rules.check import check
from torchhook.rules.diagnose import diagnose
from torchhook.rules.profile import Profile
from torchhook.rules.watch import Watch
from zoo.case import Specimen


def inspected(specimen: Specimen, seed: int) -> Report:
    """What is found in a specimen of the zoo."""
    case = specimen.build(seed)
    if case.profile_data is not None:
        return Profile.of(case.model, case.profile_data).check(case.model, case.data)
    if case.loop is not None:
        with Watch(case.model, chosen(), case.optimizer) as watch:
            case.loop(watch)
        return check(watch.history)
    return diagnose(case.model, case.data, loss=case.loss, optimizer=case.optimizer, steps=case.steps)


def is_at(site: str, sites: tuple[str, ...]) -> bool:
    """Whether a finding's site is one of `sites`, or a parameter of one."""
    return any(site == known or (known and site.startswith(f"{known}.")) for known in sites)
