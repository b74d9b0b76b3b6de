"""What a program of `tests/real/programs` is, and how it runs as a plain script.

``PYTHONPATH=tests python tests/real/programs/xor_softmax.py [--repaired] [--seed 0]`` trains it and prints its metric.
A program imports this file as ``real.program``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Program(NamedTuple):
    """A training that is ready to begin; `data` is one epoch."""

    model: nn.Module
    data: list[tuple[Any, Any]]
    loss: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    epochs: int


def train(program: Program, repaired: bool = False) -> None:
    """The ordinary loop."""
    model, data, loss, optimizer, epochs = program
    model.train()
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()


def main(build: Callable[..., Program], metric: Callable[[Program], float], loop: Callable[..., None] = train) -> None:
    """Build a program, train it and print ``metric(program)``.

    A program whose fault is in the loop gives its own, which is called as ``loop(program, repaired)``.
    """
    arguments = _arguments()
    repaired = {"repaired": True} if arguments.repaired else {}  # a healthy program's build has no such parameter
    program = build(seed=arguments.seed, **repaired)
    loop(program, **repaired)
    print(f"{metric(program):.4g}")


def script(train: Callable[[bool, int], float]) -> None:
    """Run a program of bare tensors, which has no `build`: ``train(repaired, seed)`` returns its metric."""
    arguments = _arguments()
    print(f"{train(arguments.repaired, arguments.seed):.4g}")


def batches(x: torch.Tensor, y: torch.Tensor, size: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch in random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[at], y[at]) for at in order.split(size)]


def keras_init(model: nn.Module) -> None:
    """Glorot-uniform weights and zero biases, which Keras has as its default."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def mean_loss(program: Program) -> float:
    """The loss over one epoch, in evaluation mode."""
    program.model.eval()
    losses = [program.loss(program.model(x), y) for x, y in program.data]
    return float(sum(losses) / len(losses))


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of samples whose largest output is at their label, in evaluation mode; 0 where outputs are NaN."""
    model.eval()
    output = model(x)
    return float((output.isfinite().all(1) & (output.argmax(1) == y)).float().mean())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repaired", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
