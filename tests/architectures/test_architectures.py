"""Standard architectures, small, fresh and in a sane recipe: ten steps of it, in which nothing is found."""

import warnings

import pytest
import torch

from architectures import timm_models, transformers_models
from torchhook import diagnose

pytestmark = pytest.mark.usefixtures("one_thread")

_MADE_FOR_MORE = "TH603: its classifier is initialised for 1000 classes; with ten, drawing it again lowers the loss"

EXCEPTIONS = {
    "cait_xxs24_224": "TH301: its branches start at 1e-5; with other weights the loss is a tenth after seventy steps",
    "clipseg": "TH803: its decoder's logits really are above 100, since the features of its layers are added unscaled",
    "cpmant": "TH803, TH603: its attention and its logits are not scaled, and start far above what guessing gives",
    "funnel": "TH603: its first loss is 30.9, where guessing gives 4.2; with weights of 0.02 it falls faster",
    "dla46_c": _MADE_FOR_MORE,
    "efficientnet_b0": _MADE_FOR_MORE,
    "inception_v3": _MADE_FOR_MORE,
    "mixnet_s": _MADE_FOR_MORE,
    "mnasnet_small": _MADE_FOR_MORE,
    "mobilenetv2_035": _MADE_FOR_MORE,
    "mobilenetv4_conv_small_035": _MADE_FOR_MORE,
    "rexnet_100": _MADE_FOR_MORE,
    "tinynet_e": _MADE_FOR_MORE,
}
"""Architectures of which something is said that is true, and why."""

FEW = ("bert", "gpt2", "llama", "t5", "resnet", "swin")


def alarms(models, name):
    """The findings of warning or above on a fresh model."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and timm, about themselves
        model, batches = models.MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), models.RATES.get(name, 1e-3))
        report = diagnose(model, batches, getattr(models, "LOSS", None), optimizer, steps=10)
    assert all(0 < loss < 1000 for loss in report.losses.values())
    return [str(finding) for finding in report.findings if finding.severity >= "warning"]


@pytest.mark.parametrize("name", FEW)
def test_nothing_is_found_in_a_well_known_model(name):
    assert not alarms(transformers_models, name)


@pytest.mark.slow
@pytest.mark.long_list(sample=9)
@pytest.mark.parametrize("name", sorted(set(transformers_models.MODELS) - EXCEPTIONS.keys()))
def test_nothing_is_found_in_a_model_of_transformers(name):
    assert not alarms(transformers_models, name)


@pytest.mark.slow
@pytest.mark.long_list(sample=1)
@pytest.mark.parametrize("name", sorted(set(timm_models.MODELS) - EXCEPTIONS.keys()))
def test_nothing_is_found_in_a_model_of_timm(name):
    pytest.importorskip("timm")
    assert not alarms(timm_models, name)


@pytest.mark.slow
@pytest.mark.long_list(sample=1)
@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_what_is_said_of_an_exception_is_said_still(name):
    models = transformers_models if name in transformers_models.MODELS else timm_models
    assert alarms(models, name)


def test_there_are_enough_of_them():
    assert len(transformers_models.MODELS) >= 80 and len(timm_models.MODELS) >= 60
