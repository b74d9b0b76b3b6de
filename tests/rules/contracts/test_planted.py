"""Each planted violation is found by its contract, at its module; nothing is said of the healthy twin."""

import pytest
import torch
from contract_faults import PLANTED

from torchhook import contracts, verify
from torchhook.rules.contracts.contract import CONTRACTS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _nothing_is_compiled_without_need(request, monkeypatch):
    """The one that is wrong when it is compiled is."""
    if "when_compiled" not in request.node.name:
        monkeypatch.setitem(CONTRACTS, "modes", contracts.modes(compile=None))


def found(name, broken):
    """The report on a planted model, or on its twin."""
    torch.manual_seed(0)
    case = PLANTED[name]
    wanted = getattr(contracts, case.contract)(**case.options) if case.options else case.contract
    chosen = None if not broken and not case.options else [wanted]
    return verify(case.make(broken), case.batch(), contracts=chosen, progress=False)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_at_its_module(name):
    first = found(name, broken=True).findings[0]
    assert (first.evidence["contract"], first.site.removesuffix(".inner")) == (
        PLANTED[name].contract,
        PLANTED[name].site,
    ), str(first)
    assert first.severity >= "warning"


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_is_said_of_its_healthy_twin(name):
    assert not [str(one) for one in found(name, broken=False).findings if one.severity >= "warning"]


def test_there_are_enough_of_them():
    assert len(PLANTED) >= 70 and {case.contract for case in PLANTED.values()} >= {
        "deterministic", "independent", "padding", "causal", "cached", "accumulation", "modes", "used", "shapes",
        "equivariant",
    }  # fmt: skip
