"""Comparisons across devices: rounding of a GPU is no difference, and a mistake on it is one."""

import copy

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer, resnet18

from torchhook import diff

pytestmark = pytest.mark.gpu


def residual():
    torch.manual_seed(0)
    return resnet18(num_classes=10).eval()


def transformer():
    torch.manual_seed(0)
    model = VisionTransformer(64, 16, 3, 4, 64, 128, num_classes=10).eval()
    nn.init.normal_(model.heads.head.weight)
    return model


@pytest.fixture(params=[False, True], ids=["in full", "tf32"])
def _shortcuts(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_shortcuts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [residual, transformer])
def test_a_model_on_another_device_is_the_same(make, dtype):
    a = make()
    result = diff(a, copy.deepcopy(a).cuda().to(dtype), torch.randn(2, 3, 64, 64))
    assert result.first is None, result.verdict


@pytest.mark.parametrize("make", [residual, transformer])
def test_a_mistake_on_another_device_is_found(make):
    a = make()
    b = copy.deepcopy(a).cuda()
    path, norm = next((p, m) for p, m in b.named_modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm)))
    norm.eps *= 1000
    assert diff(a, b, torch.randn(2, 3, 64, 64)).first.path == path
