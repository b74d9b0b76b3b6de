"""Mechanical repairs of a training, one for each kind of fault that has one; each changes a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch
from torchhook.core.findings import Finding
from torchhook.core.trees import leaves, mapped


@dataclass
class Setup:
    """A training that a repair may change: copies of model and optimizer, the batches, and the batches to judge by."""

    model: nn.Module
    optimizer: Any
    batches: list[Batch]
    held: list[Batch]
    in_units: Callable[[Any], Any] | None = None  # gives outputs the units of the original targets, to judge by


class Repair(NamedTuple):
    """What to change, in words and as a function of the setup.

    `cause` is what is at fault if that helps. If it `decides` and does not help, the finding does no harm. It helps
    only if it takes away this `share` of the loss, and what every repair has to.
    """

    change: str
    apply: Callable[[Setup], None]
    cause: str = ""
    decides: bool = True
    share: float = 0.0


def repairs_for(finding: Finding) -> list[Repair]:
    """The repairs worth trying for a finding, the likeliest first.

    >>> [repair.change for repair in repairs_for(Finding("TH501", "error", "each step is too large"))]
    ['a tenth of the learning rate', 'a hundredth of the learning rate']
    """
    made = _REPAIRS.get(finding.code)
    return [] if made is None else made(finding)


def _slower(finding: Finding) -> list[Repair]:
    return [
        Repair("a tenth of the learning rate", lambda setup: _scale_rate(setup, 0.1), "rate"),
        Repair("a hundredth of the learning rate", lambda setup: _scale_rate(setup, 0.01), "rate"),
    ]


def _faster(finding: Finding) -> list[Repair]:
    if finding.evidence.get("cause") == "no-gradient":  # of some parameters, while the others learn
        return []
    return [
        Repair("ten times the learning rate", lambda setup: _scale_rate(setup, 10.0), "rate"),
        Repair("a thousand times the learning rate", lambda setup: _scale_rate(setup, 1e3), "rate"),
    ]


def _scale_rate(setup: Setup, factor: float) -> None:
    for group in setup.optimizer.param_groups:
        group["lr"] *= factor


def _inputs(finding: Finding) -> list[Repair]:
    return [Repair("inputs standardised", _standardise_inputs, "input-scale")]


def _standardise_inputs(setup: Setup) -> None:
    """Give every floating-point input a mean of 0 and a deviation of 1: by feature in a table, else as a whole."""
    scales = {}
    for address, leaf in leaves(setup.batches[0].arguments):
        if leaf.is_floating_point():
            scales[address] = _scale([dict(leaves(batch.arguments))[address] for batch in setup.batches[:50]])
    for batches in (setup.batches, setup.held):
        batches[:] = [Batch(_scaled(batch.arguments, scales), batch.target) for batch in batches]


def _scaled(arguments: Any, scales: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    known = iter([scales.get(address) for address, _ in leaves(arguments)])

    def scaled(tensor: Tensor) -> Tensor:
        scale = next(known)
        return tensor if scale is None else ((tensor.double() - scale[0]) / scale[1]).to(tensor.dtype)

    return mapped(scaled, arguments)


def _scale(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation: of each feature if every sample is a row, else over all values."""
    is_table = tensors[0].dim() == 2 and sum(map(len, tensors)) > 2
    values = torch.cat(
        [tensor.detach().double().reshape(-1, tensor.shape[-1] if is_table else 1) for tensor in tensors]
    )
    spread = values.std(0, correction=0)
    return values.mean(0), torch.where(spread > 0, spread, torch.ones_like(spread))


_FEW = 8  # samples, or labels


def _one_batch(setup: Setup) -> None:
    """Train on the first batch alone, and judge by it: a sound model learns that by heart, whatever the labels are."""
    if not isinstance(target := setup.batches[0].target, Tensor) or target.dim() == 0 or len(target) < _FEW:
        raise ValueError("a few samples are learnt by heart by any model")
    setup.batches[:] = setup.batches[:1]
    setup.held[:] = setup.batches * len(setup.held)


def _learning(finding: Finding) -> list[Repair]:
    """What may let a loss fall at all; if only learning by heart does, the labels do not belong to the inputs."""
    tenth, hundredth = _slower(finding)
    if finding.evidence.get("cause") == "divergence":
        return [tenth, *_inputs(finding), hundredth]
    by_heart = Repair("one batch alone, learnt by heart", _one_batch, "labels", decides=False, share=0.5)
    return [*_faster(finding)[:1], *_inputs(finding), by_heart, tenth, hundredth]  # a rate that learns is not too high


def _targets(finding: Finding) -> list[Repair]:
    return [Repair("targets standardised", _standardise_targets)]


def _standardise_targets(setup: Setup) -> None:
    values = torch.cat([batch.target.detach().double().flatten() for batch in setup.batches])
    mean, spread = float(values.mean()), float(values.std(correction=0)) or 1.0
    setup.batches[:] = [batch._replace(target=((batch.target - mean) / spread)) for batch in setup.batches]
    setup.in_units = lambda output: mapped(lambda tensor: tensor * spread + mean, output)


def _activations(finding: Finding) -> list[Repair]:
    return [Repair("ReLU instead of sigmoids and tanhs inside", _with_relu, "activation")]


def _with_relu(setup: Setup) -> None:
    """Replace sigmoids and tanhs by ReLU, except the last of them, which shapes the output."""
    found = [(p, n, c) for p, n, c in _children(setup.model) if isinstance(c, (nn.Sigmoid, nn.Tanh))]
    if not found:
        raise LookupError("there is no sigmoid or tanh")
    last = list(setup.model.modules())[-1]
    for parent, name, child in found:
        if child is not last:
            setattr(parent, name, nn.ReLU())
            _draw_again(parent)


def _if_slower(finding: Finding) -> list[Repair]:
    return [repair._replace(decides=False) for repair in _slower(finding)]  # units may be dead for another reason


def _weights(finding: Finding) -> list[Repair]:
    site = finding.site
    return (
        [Repair(f"weights of {site!r} drawn again", lambda setup: _draw_again(_at(setup.model, site)))] if site else []
    )


def _draw_again(module: nn.Module) -> None:
    """Initialise a layer, or all layers inside a module, as torch does by default."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()


_REDRAWN = Repair("all weights drawn again", lambda setup: _draw_again(setup.model))


def _all_weights(finding: Finding) -> list[Repair]:
    return [_REDRAWN, *_activations(finding), *_weights(finding)]


def _saturated(finding: Finding) -> list[Repair]:
    first = [_REDRAWN] if finding.evidence.get("cause") == "init" else []
    return [*first, *_activations(finding)]


def _bare(finding: Finding) -> list[Repair]:
    site = finding.site

    def apply(setup: Setup) -> None:
        if not isinstance(_at(setup.model, site), (nn.ReLU, nn.Sigmoid, nn.Softmax, nn.Tanh)):
            raise LookupError("the function is not a module")
        owner, _, name = site.rpartition(".")
        setattr(_at(setup.model, owner), name, nn.Identity())

    return [Repair(f"without {site!r}", apply)] if site else []


def _activated(finding: Finding) -> list[Repair]:
    return [Repair("ReLU between the layers", _with_relu_between)]


def _with_relu_between(setup: Setup) -> None:
    layers = [(p, n, c) for p, n, c in _children(setup.model) if isinstance(c, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    for parent, name, child in layers[:-1]:
        setattr(parent, name, nn.Sequential(child, nn.ReLU()))


def _thawed(finding: Finding) -> list[Repair]:
    site = finding.site

    def apply(setup: Setup) -> None:
        parameters = [parameter.requires_grad_(True) for parameter in _at(setup.model, site).parameters()]
        held = {id(p) for group in setup.optimizer.param_groups for p in group["params"]}
        new = [parameter for parameter in parameters if id(parameter) not in held]
        if new:
            setup.optimizer.add_param_group({"params": new})

    trained = Repair(f"{site!r} trained as well", apply, decides=False)  # it is left out by mistake in any case
    return [trained] if site else []


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Every module inside with its parent and its name there."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child


def _at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, or the one that holds the parameter of this path."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return model.get_submodule(path.rpartition(".")[0])


_REPAIRS: dict[str, Callable[[Finding], list[Repair]]] = {
    "TH201": _if_slower,
    "TH203": _saturated,
    "TH301": _all_weights,
    "TH302": _weights,
    "TH303": _inputs,
    "TH401": _activations,
    "TH402": _slower,
    "TH501": _slower,
    "TH502": _faster,
    "TH503": _thawed,
    "TH601": _learning,
    "TH603": _all_weights,
    "TH604": _bare,
    "TH606": _slower,
    "TH607": _bare,
    "TH609": _targets,
    "TH612": _activated,
}
