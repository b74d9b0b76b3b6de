"""What a specimen of the zoo is, and what one seed of it builds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Case:
    """A training that is ready to begin: what one seed of a specimen builds.

    A batch of `data` is a tuple (x, y), a tensor, or a dictionary of the model's keyword arguments. `loss` is called
    with the output and the target, or, where a batch has no target, with the output and the batch; without a `loss`
    the output carries it. `loop` is there where this does not describe the training: it trains the case's own model
    for `steps` steps and calls ``watch.step(loss)`` after each. A stored profile is made of `profile_data`.
    """

    model: nn.Module
    data: list
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    steps: int = 60
    profile_data: list | None = None
    loop: Callable[[Any], None] | None = None


Sites = tuple[str, ...]


@dataclass(frozen=True)
class Specimen:
    """A kind of training. Without `codes` it is healthy; otherwise, any of them at any of its `sites` names its fault.

    `step` is the first step (counted from 0, as the batches are) at which a fault of mid-training shows.
    """

    name: str
    build: Callable[[int], Case]
    codes: tuple[str, ...] = ()
    sites: Sites | Callable[[int], Sites] = ()
    step: int | None = None

    def sites_for(self, seed: int) -> Sites:
        """The places that count as the fault's own, for this seed."""
        return self.sites(seed) if callable(self.sites) else self.sites


def healthy(build: Callable[[int], Case]) -> Specimen:
    """Turn a function that builds cases into a healthy specimen."""
    return Specimen(build.__name__, build)


def fault(*codes: str, sites: Sites | Callable[[int], Sites] = ("",), step: int | None = None):
    """Turn a function that builds cases into a specimen with a planted fault."""

    def made(build: Callable[[int], Case]) -> Specimen:
        return Specimen(build.__name__, build, codes, sites, step)

    return made


def pick(seed: int, *options):
    """One of the options, the same one for the same seed and options, in every process."""
    names = [getattr(option, "name", None) or getattr(option, "__name__", None) or repr(option) for option in options]
    return options[random.Random(f"{seed} {names}").randrange(len(options))]


def anywhere(model: nn.Module) -> Sites:
    """All places of a model, for faults that are not specific to a layer."""
    return (*(path for path, _ in model.named_modules()), *(path for path, _ in model.named_parameters()))


def inside(model: nn.Module, *paths: str) -> Sites:
    """All places of these submodules, themselves included."""
    return tuple(at for at in anywhere(model) if any(at == path or at.startswith(path + ".") for path in paths))


def backward(case: Case, batch) -> torch.Tensor:
    """One forward and backward pass of a training loop; returns the loss."""
    x, y = batch
    case.optimizer.zero_grad()
    loss = case.loss(case.model(x), y)
    loss.backward()
    return loss.detach()
