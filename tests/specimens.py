"""Models that the tests share, and the hooks that a model carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def hooks_of(model: nn.Module) -> dict:
    """All that a session might leave on a model: every hook, by identity, and the slot of its call."""
    found = {}
    for path, module in model.named_modules():
        for name in HOOK_DICTS:
            found[path, name] = {key: id(hook) for key, hook in getattr(module, name).items()}
        found[path, "call"] = module.__dict__.get("_compiled_call_impl")
        found[path, "attributes"] = sorted(module.__dict__)
    for path, parameter in model.named_parameters():
        found[path, "hooks"] = (
            len(parameter._backward_hooks or ()),
            len(parameter._post_accumulate_grad_hooks or ()),
        )
    return found


def resnet18(**options) -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(**options)


class InPlace(nn.Module):
    """A residual block that overwrites what its layers return, as ResNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        out = self.last(self.relu(self.norm(self.conv(x))))
        out += x
        return self.relu(out)


class OutOfPlace(InPlace):
    """The same without overwriting anything: the oracle."""

    def forward(self, x):
        return torch.relu(self.last(torch.relu(self.norm(self.conv(x)))) + x)


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict


class Containers(nn.Module):
    """A layer for each container that a forward may return."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Returning(lambda x: (x * 2, [x * 3, None]))
        self.mapping = Returning(lambda x: {"a": x * 2, "b": {"c": x * 3}})
        self.data = Returning(lambda x: Result(x * 2, {"n": 7, "h": x * 3}))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        first, (second, _) = self.pair(x)
        mapping = self.mapping(first + second)
        result = self.data(mapping["a"] + mapping["b"]["c"])
        return self.head(result.hidden + result.extra["h"])


class Returning(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Shared(nn.Module):
    """One layer under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.first(self.relu(self.second(self.relu(self.first(x)))))


class UpDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    """Blocks, one of them called twice, and an op in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([UpDown(), UpDown()])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.blocks[0](x)))
        x *= 2
        return self.head(x)
