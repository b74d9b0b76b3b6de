"""Healthy trainings on pictures."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, backward, healthy, pick
from zoo.nets import ConvNet, EncoderBlock, FunctionalResidual, ResNet, UNet, ViT
from zoo.tasks import coins, digits, textures


@healthy
def convnet(seed: int) -> Case:
    torch.manual_seed(seed)
    model = ConvNet(width=pick(seed, 8, 12, 16), depth=pick(seed, 2, 3, 4))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


@healthy
def convnet_batchnorm(seed: int) -> Case:
    torch.manual_seed(seed)
    model = ConvNet(width=pick(seed, 8, 12, 16), depth=pick(seed, 2, 3), norm=nn.BatchNorm2d)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9))


@healthy
def convnet_textures(seed: int) -> Case:
    """Photographs instead of digits, GroupNorm and SiLU instead of BatchNorm and ReLU."""
    torch.manual_seed(seed)
    norm = partial(nn.GroupNorm, 4)
    model = ConvNet(width=pick(seed, 8, 12), norm=norm, act=nn.SiLU, classes=3, side=16)
    return Case(model, textures(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), 3e-3))


@healthy
def resnet_inplace(seed: int) -> Case:
    torch.manual_seed(seed)
    model = ResNet(width=pick(seed, 12, 16), depth=pick(seed, 2, 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return Case(model, digits(seed, size=40), F.cross_entropy, optimizer, steps=80)


@healthy
def resnet_functional(seed: int) -> Case:
    """``F.relu``, and residual branches that start at zero, as torchvision offers it."""
    torch.manual_seed(seed)
    model = ResNet(width=pick(seed, 12, 16), depth=pick(seed, 2, 3), block=FunctionalResidual, zero=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return Case(model, digits(seed, size=40), F.cross_entropy, optimizer, steps=100)


class SqueezeExcite(nn.Module):
    """Scales each channel by a sigmoid of the channel means."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


def _separable(width: int) -> nn.Sequential:
    depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
    pointwise = nn.Conv2d(width, width, 1, bias=False)
    norms = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
    return nn.Sequential(depthwise, norms[0], nn.Hardswish(), SqueezeExcite(width), pointwise, norms[1])


@healthy
def mobilenet(seed: int) -> Case:
    torch.manual_seed(seed)
    width = pick(seed, 16, 24)
    stem = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()
    body = (_separable(width) for _ in range(pick(seed, 1, 2)))
    model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


@healthy
def vit_encoder_layers(seed: int) -> Case:
    torch.manual_seed(seed)
    model = ViT(width=pick(seed, 24, 32), depth=pick(seed, 1, 2), block=EncoderBlock)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), 5e-3), steps=80)


@healthy
def vit_warmup(seed: int) -> Case:
    """Its learning rate rises over the first 20 steps, and falls again."""
    torch.manual_seed(seed)
    model = ViT(width=pick(seed, 24, 32), depth=2, heads=pick(seed, 2, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    case = Case(model, digits(seed), F.cross_entropy, optimizer, steps=80)

    def loop(watch) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=case.steps + 1, pct_start=0.25)
        for step in range(case.steps):
            loss = backward(case, case.data[step % len(case.data)])
            optimizer.step()
            schedule.step()
            watch.step(loss)

    case.loop = loop
    return case


@healthy
def unet(seed: int) -> Case:
    torch.manual_seed(seed)
    model = UNet(width=pick(seed, 6, 8))
    loss = F.binary_cross_entropy_with_logits
    return Case(model, coins(seed), loss, torch.optim.Adam(model.parameters(), 5e-3), steps=40)


@healthy
def same_pictures_as_the_profile(seed: int) -> Case:
    """Live data that are other samples from the same distribution as the profile: nothing drifts."""
    case = convnet_batchnorm.build(seed)
    case.profile_data = digits(seed + 100)
    return case


SPECIMENS = (
    convnet,
    convnet_batchnorm,
    convnet_textures,
    resnet_inplace,
    resnet_functional,
    mobilenet,
    vit_encoder_layers,
    vit_warmup,
    unet,
    same_pictures_as_the_profile,
)
