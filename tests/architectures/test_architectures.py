"""Standard architectures, freshly initialised, in ten steps of a sane recipe: there is nothing to warn of."""

import pytest
import torch

from architectures import timm_models, transformers_models
from torchhook import diagnose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TRUE_ALARMS: dict[str, tuple[tuple[str, ...], str]] = {}
"""By the name of an architecture, the codes that are right to be found in it, and why."""


def alarms(models, name, loss=None):
    """What is worth a look in a model, except where it is known and true."""
    torch.manual_seed(0)
    model, batches = models.MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), models.RATES.get(name, 1e-3))
    report = diagnose(model, batches, loss, optimizer, steps=10)
    known, _ = TRUE_ALARMS.get(name, ((), ""))
    return [str(found) for found in report.findings if found.severity >= "warning" and found.code not in known]


@pytest.mark.long_list(sample=6)
@pytest.mark.filterwarnings("ignore")  # of transformers and timm, about themselves
@pytest.mark.parametrize("name", transformers_models.MODELS)
def test_nothing_is_found_in_a_model_of_transformers(name):
    assert not alarms(transformers_models, name)


@pytest.mark.long_list(sample=6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", timm_models.MODELS)
def test_nothing_is_found_in_a_model_of_timm(name):
    pytest.importorskip("timm")
    assert not alarms(timm_models, name, timm_models.LOSS)


def test_every_exception_is_of_a_model_that_is_listed():
    assert TRUE_ALARMS.keys() <= transformers_models.MODELS.keys() | timm_models.MODELS.keys()
