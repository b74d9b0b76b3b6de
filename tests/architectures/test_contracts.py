"""Standard architectures obey their contracts, except where a released library breaks one: then the reason is here."""

import time
import warnings

import pytest
import torch

from architectures import timm_models, transformers_models
from torchhook import contracts, verify
from torchhook.rules.contracts.contract import CONTRACTS

pytestmark = pytest.mark.usefixtures("one_thread")

_SOURCE = "https://github.com/huggingface/transformers/blob/main/src/transformers/models"

BROKEN = {
    "autoformer": (
        "TV102 TV107",
        "its weights are repeated in the wrong order, so that heads get those of other samples; delays are chosen by"
        " the batch in train mode",
        f"{_SOURCE}/autoformer/modeling_autoformer.py",
    ),
    "canine": (
        "TV103",
        "a strided convolution puts four characters together, of which some may be padding",
        f"{_SOURCE}/canine/modeling_canine.py",
    ),
    "convbert": (
        "TV103",
        "its convolutions over positions do not mask padding",
        f"{_SOURCE}/convbert/modeling_convbert.py",
    ),
    "cpmant": (
        "TV103 TV104 TV105",
        "it takes an attention mask but does not use it, attends to all of the text in both directions, and raises with"
        " its cache",
        f"{_SOURCE}/cpmant/modeling_cpmant.py",
    ),
    "fsmt": (
        "TV105",
        "it leaves the causal mask out whenever it has a cache, which is right for single tokens only",
        f"{_SOURCE}/fsmt/modeling_fsmt.py",
    ),
    "funnel": ("TV103", "it pools pairs of positions, of which one may be padding", "https://arxiv.org/abs/2006.03236"),
    "gcvit_xxtiny": (
        "TV102",
        "its global queries are repeated in the wrong order, so that windows get those of other samples",
        "https://github.com/NVlabs/GCVit/issues/10",
    ),
    "informer": (
        "TV101",
        "it draws the keys to compare at random, in eval mode, too",
        "https://arxiv.org/abs/2012.07436",
    ),
    "nllb_moe": (
        "TV107",
        "its experts are scaled down in eval mode, although dropout has scaled them up in training already",
        f"{_SOURCE}/nllb_moe/modeling_nllb_moe.py",
    ),
    "paligemma": (
        "TV103 TV107",
        "without token_type_ids and without padding it attends in both directions, otherwise in one",
        f"{_SOURCE}/paligemma/modeling_paligemma.py",
    ),
    "vit_mae": (
        "TV101",
        "it masks patches at random in eval mode, too; pass noise=",
        "https://arxiv.org/abs/2111.06377",
    ),
    "yoso": (
        "TV103",
        "its mask is meant for 0 and -10000, and is given 1 and 0, so that padding counts",
        f"{_SOURCE}/yoso/modeling_yoso.py",
    ),
}
"""Architectures that break a contract: the codes, why, and where to read about it."""

FEW = ("bert", "gpt2", "llama", "mamba", "mistral", "t5", "vit", "resnet")
MODELS = {**transformers_models.MODELS, **timm_models.MODELS}


def broken(name):
    """The codes of the contracts that an architecture breaks."""
    torch.manual_seed(0)
    models = transformers_models if name in transformers_models.MODELS else timm_models
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and timm, about themselves
        model, (batch, *_) = models.MODELS[name]()
        report = verify(model, batch, getattr(models, "LOSS", None), progress=False)
    return sorted({finding.code for finding in report.findings if finding.severity >= "warning"}), report


@pytest.mark.parametrize("name", FEW)
def test_a_well_known_model_obeys_its_contracts(name, monkeypatch):
    monkeypatch.setitem(CONTRACTS, "modes", contracts.modes(compile=None))
    found, report = broken(name)
    assert not found, str(report)


def test_a_tiny_transformer_takes_seconds():
    """With all contracts, torch.compile and all kinds of cache; of the processor, since others may use it, too."""
    begin = time.process_time()
    broken("llama")
    assert time.process_time() - begin < 20


@pytest.mark.slow
@pytest.mark.long_list(sample=6)
@pytest.mark.parametrize("name", sorted(transformers_models.MODELS.keys() - BROKEN))
def test_a_model_of_transformers_obeys_its_contracts(name):
    found, report = broken(name)
    assert not found, str(report)


@pytest.mark.slow
@pytest.mark.long_list(sample=2)
@pytest.mark.parametrize("name", sorted(timm_models.MODELS.keys() - BROKEN))
def test_a_model_of_timm_obeys_its_contracts(name):
    pytest.importorskip("timm")
    found, report = broken(name)
    assert not found, str(report)


@pytest.mark.slow
@pytest.mark.long_list(sample=2)
@pytest.mark.parametrize("name", BROKEN)
def test_what_a_released_library_breaks_is_found(name):
    codes, _, _ = BROKEN[name]
    found, report = broken(name)
    assert found == codes.split(), str(report)


def test_there_are_enough_of_them():
    assert len(transformers_models.MODELS) >= 60 and len(timm_models.MODELS) >= 40
    assert all(reason and link.startswith("https://") for _, reason, link in BROKEN.values())
