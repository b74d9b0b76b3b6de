"""Standard architectures, small: they are built, and a step of their recipe has a finite loss and a gradient."""

import pytest
import torch

from architectures import timm_models, transformers_models
from torchhook.core.batch import Batch, call, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def step(models, name, loss=None):
    """The loss of the first step, and how many parameters it moves."""
    torch.manual_seed(0)
    model, batches = models.MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), models.RATES.get(name, 1e-3))
    batch = Batch.of(batches[0])
    value = loss_of(call(model, batch), batch.target, loss).loss
    value.backward()
    optimizer.step()
    return float(value.detach()), sum(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.long_list(sample=6)
@pytest.mark.filterwarnings("ignore")  # of transformers and timm, about themselves
@pytest.mark.parametrize("name", transformers_models.MODELS)
def test_a_model_of_transformers_takes_a_step(name):
    value, moved = step(transformers_models, name)
    assert 0 < value < 1000 and moved > 2


@pytest.mark.long_list(sample=6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", timm_models.MODELS)
def test_a_model_of_timm_takes_a_step(name):
    pytest.importorskip("timm")
    value, moved = step(timm_models, name, timm_models.LOSS)
    assert 0 < value < 1000 and moved > 2


def test_there_are_enough_of_them():
    assert len(transformers_models.MODELS) >= 80 and len(timm_models.MODELS) >= 60
