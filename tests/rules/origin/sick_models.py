"""Modules that produce NaN or Inf, each on a line with a comment by which `line_of` finds it."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import nn


def line_of(thing, mark: str) -> str:
    """The line of `thing`'s source that has the comment `mark`, as an origin shows it."""
    lines, start = inspect.getsourcelines(thing)
    (offset,) = [number for number, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return f"{Path(inspect.getsourcefile(thing)).name}:{start + offset}: {lines[offset].strip()}"


class Log(nn.Module):
    def forward(self, x):
        return x.log()  # log


class Sqrt(nn.Module):
    def forward(self, x):
        return x.sqrt()  # sqrt


class Divide(nn.Module):
    """Divides by itself minus itself when the switch is on."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on

    def forward(self, x):
        return x / (x - x) if self.on else x  # divide


class Between(nn.Module):
    """The op is in the forward of the container, between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        h = h / (h - h)  # between
        return self.second(h)


class Attention(nn.Module):
    def forward(self, x, mask):
        scores = (x @ x.transpose(-1, -2)).masked_fill(mask, float("-inf"))
        return scores.softmax(-1) @ x  # softmax


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function, **children) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def linear(width: int = 4) -> nn.Linear:
    """A layer that passes its input on."""
    layer = nn.Linear(width, width)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width))
        layer.bias.zero_()
    return layer
