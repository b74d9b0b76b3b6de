"""The zoo: nothing is found in healthy trainings, and every planted fault is what is found first, at its place.

By one seed; `benchmarks/rules.py` does the same by many, on which no threshold was set.
"""

import pytest

from zoo import FAULTS, HEALTHY
from zoo.inspecting import inspected, is_at

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SEED = 1000


def worth_a_look(specimen):
    return [finding for finding in inspected(specimen, SEED).findings if finding.severity >= "warning"]


@pytest.mark.filterwarnings("ignore")  # of torch, about what is planted
@pytest.mark.parametrize("specimen", HEALTHY, ids=lambda specimen: specimen.name)
def test_nothing_is_found_in_a_healthy_training(specimen):
    assert not worth_a_look(specimen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("specimen", FAULTS, ids=lambda specimen: specimen.name)
def test_a_planted_fault_is_found_first_and_at_its_place(specimen):
    found = worth_a_look(specimen)
    assert found, f"nothing, where {', '.join(specimen.codes)} was planted"
    sites = specimen.sites_for(SEED)
    assert found[0].code in specimen.codes and is_at(found[0].site, sites), f"{found[0]}, planted at {sites[:5]}"
