"""The programs are what their files say: they are built, take a step, and name causes and sites that there are."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from torchhook.rules.rule import CAUSES

pytestmark = pytest.mark.slow

FILES = sorted(path.stem for path in (Path(__file__).parent / "programs").glob("*.py"))
PRETRAINED = ("bert_zero_query", "bert_zero_value", "gpt2_zero_head")  # minutes, to pretrain what they break


def programs_of(name):
    """The program as it was asked about and its repaired twin, or the healthy one."""
    module = importlib.import_module(f"real.programs.{name}")
    if not hasattr(module, "build") or name in PRETRAINED:
        return module, []
    has_twin = "repaired" in inspect.signature(module.build).parameters
    return module, [module.build(**({"repaired": True} if twin else {})) for twin in range(1 + has_twin)]


@pytest.mark.parametrize("name", FILES)
def test_a_program_is_what_its_file_says(name):
    module, programs = programs_of(name)
    assert set(module.CAUSES) <= set(CAUSES) and bool(module.CAUSES) != name.startswith("healthy")
    assert "Source" in module.__doc__ or name.startswith("healthy")
    for model, data, loss, optimizer, epochs in programs:
        assert set(module.SITES) <= {path for path, _ in model.named_modules()} and epochs > 0
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x, y = data[0]
        value = loss(model(x), y)
        assert isinstance(value, torch.Tensor) and value.dim() == 0
        value.backward()
        optimizer.step()
        assert len(before) == len(list(model.parameters()))


def test_there_are_enough_of_them():
    assert len(FILES) >= 35 and sum(name.startswith("healthy") for name in FILES) >= 7
