"""The same numbers as pytorch-grad-cam and Captum, before their own scaling, wherever they are right.

pytorch-grad-cam is not where an op in place follows the layer: it keeps what the layer gave by reference. Captum is.
"""

import warnings

import numpy
import pytest
import torch
from torch import nn

from torchhook.explain import cams

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = [1, 3]


def theirs(kind, model, layer, x, fold=None):
    """The maps that pytorch-grad-cam makes, before it clips, scales and resizes them."""
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    raw = []
    with getattr(pytorch_grad_cam, kind)(model, [model.get_submodule(layer)], reshape_transform=fold) as cam:
        original = cam.get_cam_image
        cam.get_cam_image = lambda *args, **options: raw.append(original(*args, **options)) or raw[0]
        cam(x, [ClassifierOutputTarget(one) for one in CLASSES])
    model.zero_grad()
    return torch.from_numpy(numpy.ascontiguousarray(raw[0]))


def captums(kind, model, layer, x):
    import captum.attr

    attribution = getattr(captum.attr, kind)(model, model.get_submodule(layer))
    return attribution.attribute(x, target=CLASSES).detach()


def assert_close(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def resnet18():
    from torchvision.models import resnet18

    return resnet18(num_classes=5), 64, "layer4.1", None


def vgg11():
    from torchvision.models import vgg11

    model = vgg11()
    model.classifier = nn.Linear(512 * 49, 5)  # a hundred million parameters less
    return model, 48, "features.19", None


def densenet():
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), 16, num_classes=5), 64, "features.denseblock3", None


def timm_vit():
    from timm.models import VisionTransformer

    model = VisionTransformer(img_size=64, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=5)
    return model, 64, "blocks.2.norm1", lambda tokens: tokens[:, 1:].reshape(-1, 8, 8, 48).permute(0, 3, 1, 2)


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 8, 2, 3, 48, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    fold = timm_vit()[3]
    return model, 64, "encoder.layers.encoder_layer_1.ln_1", fold


def torchvision_swin():
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=5)
    return model, 64, "features.3.1.norm1", lambda maps: maps.permute(0, 3, 1, 2)


MODELS = [resnet18, vgg11, densenet, timm_vit, torchvision_vit, torchvision_swin]
METHODS = {
    "grad_cam": "GradCAM",
    "hires_cam": "HiResCAM",
    "layer_cam": "LayerCAM",
    "x_grad_cam": "XGradCAM",
    "grad_cam_pp": "GradCAMPlusPlus",
    "eigen_cam": "EigenCAM",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_the_same_numbers_as_pytorch_grad_cam(make):
    model, size, layer, fold = make()
    model.eval()
    x = torch.randn(2, 3, size, size)
    for ours, name in METHODS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(cams, ours)(model, x, CLASSES, layer).maps
            expected = theirs(name, model, layer, x, fold)
        if ours == "eigen_cam":  # which has no sign there
            signs = (found * expected).sum((1, 2), keepdim=True).sign()
            expected = expected * signs
        assert expected.abs().max() > 0, ours
        # the denominator of XGradCAM may be next to zero, where sums in another order differ
        assert_close(found, expected, 1e-3 if ours == "x_grad_cam" else 5e-5)


@pytest.mark.parametrize("make", [resnet18, vgg11, densenet])
def test_the_same_numbers_as_captum(make):
    model, size, layer, _ = make()
    model.eval()
    x = torch.randn(2, 3, size, size)
    assert_close(cams.grad_cam(model, x, CLASSES, layer).maps, captums("LayerGradCam", model, layer, x)[:, 0])
    product = captums("LayerGradientXActivation", model, layer, x)
    assert_close(cams.hires_cam(model, x, CLASSES, layer).maps, product.sum(1))


@pytest.mark.parametrize("make", [timm_vit, torchvision_swin])
def test_the_same_products_as_captum_for_tokens(make):
    model, size, layer, fold = make()
    model.eval()
    x = torch.randn(2, 3, size, size)
    product = captums("LayerGradientXActivation", model, layer, x)
    assert_close(cams.hires_cam(model, x, CLASSES, layer).maps, fold(product).sum(1))


@pytest.mark.parametrize(("make", "layer"), [(resnet18, "layer4.1.bn1"), (vgg11, "features.18"), (densenet, None)])
def test_before_an_op_in_place_captum_is_right_and_so_are_we(make, layer):
    model, size, _, _ = make()
    model.eval()
    layer = layer or "features.norm5"  # densenet's ReLU after it is a function
    x = torch.randn(2, 3, size, size)
    for module in model.modules():  # so that zero is not what batch norm gives on average
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
    ours = cams.grad_cam(model, x, CLASSES, layer).maps
    assert_close(ours, captums("LayerGradCam", model, layer, x)[:, 0])
    wrong = theirs("GradCAM", model, layer, x)
    assert (ours - wrong).abs().max() > 1e-2 * ours.abs().max()


def test_captums_own_known_answer():
    """Its LayerGradCam test: two windows of arange(16), one convolution, all weights known."""

    class OneConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 2, 3, 1)
            self.relu1 = nn.ReLU()
            self.fc1 = nn.Linear(8, 4)
            self.conv1.weight = nn.Parameter(torch.ones(2, 1, 3, 3))
            self.conv1.bias = nn.Parameter(torch.tensor([-50.0, -75.0]))
            self.fc1.weight = nn.Parameter(torch.cat([torch.ones(4, 5), -1 * torch.ones(4, 3)], dim=1))
            self.fc1.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return self.fc1(self.relu1(self.conv1(x)).view(-1, 8))

    heat = cams.grad_cam(OneConv(), torch.arange(16.0).view(1, 1, 4, 4), 0, "conv1")
    assert heat.maps.tolist() == [[[11.25, 13.5], [20.25, 22.5]]]
