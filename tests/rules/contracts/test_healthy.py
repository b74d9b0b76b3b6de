"""Nothing is said of healthy models that look unusual."""

import pytest
import torch
from healthy_models import HEALTHY

from torchhook import contracts, verify
from torchhook.rules.contracts.contract import CONTRACTS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of(name, monkeypatch):
    monkeypatch.setitem(CONTRACTS, "modes", contracts.modes(compile=None))
    torch.manual_seed(0)
    model, batch, *loss = HEALTHY[name]()
    report = verify(model, batch, *loss, progress=False)
    assert not [str(one) for one in report.findings if one.severity >= "warning"]
    assert not [why for why in report.skipped.values() if "could not be checked" in why]
    assert not [note for note in report.notes if note.startswith("padding: not checked")]
