"""The norm of each sample's own gradient, from one backward of the whole batch.

The gradient of a weight is a sum, over samples and positions, of products of what the layer was given and the gradient
of what it gave, so its norm for one sample follows from both without ever being made: |a|² |g|² for one position, and
for several the sum over pairs of them, (a·a') (g·g'). Calls of one module are further positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.calling import Batch, call
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Sink, Tap

GHOSTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Flow:
    """What one layer was given in a pass, and the gradient of what it gave, call by call."""

    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def squares(self, count: int) -> Tensor | str:
        """The square of the norm of the gradient of weight and bias, by sample; or why there is none."""
        if any(len(x) != count for x in (*self.inputs, *self.gradients)):
            return f"it does not see a row a sample for a batch of {count}"
        pairs = [_positions(self.module, *pair) for pair in zip(self.inputs, self.gradients, strict=True)]
        a, g = (torch.cat(some, 1) for some in zip(*pairs, strict=True))
        found = _squares(a, g)
        if self.module.bias is not None:
            found = found + g.sum(1).double().square().sum((1, 2))
        return found


class _Offsets(Edit):
    """Adds zeros to what layers give, whose gradients are those of what they give."""

    def __init__(self, zeros: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.zeros = zeros
        self.path = ""

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = _Offsets(self.zeros)
        twin.path = site.path
        return twin

    def change(self, x: Any, call: int) -> Any:
        zeros = torch.zeros_like(x).requires_grad_()
        self.zeros.setdefault(self.path, []).append(zeros)
        return x + zeros


class _Inputs(Sink):
    """Keeps what layers were given."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}

    def receive(self, event: Event) -> None:
        """Keep one input."""
        flow = self.flows.setdefault(event.path, Flow(event.module))
        flow.inputs.append(event.value)


@dataclass(frozen=True)
class Backward:
    """A forward and a backward of a batch: what the model said, each sample's loss, and what flowed in the layers."""

    output: Any
    losses: Tensor
    flows: dict[str, Flow]
    parameters: dict[str, Tensor]  # gradients of the sum of the losses, of those that were asked for


def backward(
    model: nn.Module,
    batch: Batch,
    losses: Callable[[Any, Any], Tensor],
    parameters: Callable[[dict[str, Flow]], dict[str, nn.Parameter]] = lambda flows: {},
) -> Backward:
    """Run a batch forward and backward; no ``.grad`` is written.

    `losses` gives a number a sample, of output and target, and `parameters` those whose gradients are wanted, too.

    >>> model = nn.Linear(2, 1)
    >>> found = backward(model, Batch.of(torch.ones(3, 2)), lambda output, target: output[:, 0])
    >>> [round(float(square), 3) for square in found.flows[""].squares(3)]
    [3.0, 3.0, 3.0]
    """
    zeros: dict[str, list[Tensor]] = {}
    inputs = _Inputs()
    paths = [path for path, module in model.named_modules() if isinstance(module, GHOSTS)]
    taps = [Tap(Selector.union(paths), inputs, "input"), Tap(Selector.union(paths), _Offsets(zeros))] if paths else []
    with torch.enable_grad():
        with Session(model, taps, on_silent="ignore"):
            output = call(model, batch)
        by_sample = losses(output, batch.target)
        wanted = parameters(inputs.flows)
        sources = [*(zero for some in zeros.values() for zero in some), *wanted.values()]
        found = iter(_gradients(by_sample.sum(), sources))
    for path, some in zeros.items():
        inputs.flows[path].gradients += [next(found) for _ in some]
    return Backward(output, by_sample.detach(), inputs.flows, dict(zip(wanted, found, strict=True)))


def _gradients(loss: Tensor, sources: list[Tensor]) -> Iterable[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(source) for source in sources]
    return torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True) if sources else []


def _positions(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and gradients as samples × positions × groups × channels."""
    if isinstance(layer, nn.Linear):
        return tuple(t.reshape(len(t), -1, 1, t.shape[-1]) for t in (x, gradient))  # type: ignore[return-value]
    assert isinstance(layer, nn.modules.conv._ConvNd)
    windows = _windows(layer, x)
    return (
        windows.unflatten(2, (layer.groups, -1)).flatten(3),
        gradient.flatten(2).movedim(1, 2).unflatten(2, (layer.groups, -1)),
    )


def _windows(layer: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """What the kernel of a convolution lies on: samples × positions × channels × kernel."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    dims = len(layer.kernel_size)
    for dim, (size, stride, apart) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), 2):
        x = x.unfold(dim, apart * (size - 1) + 1, stride)[..., ::apart]
    return x.flatten(2 + dims).flatten(2, 1 + dims).movedim(1, 2)


def _squares(a: Tensor, g: Tensor) -> Tensor:
    """By sample, the sum over groups of |Σ g a'|²; whichever way has the smaller matrices."""
    if a.shape[1] ** 2 <= a.shape[-1] * g.shape[-1]:
        products = torch.einsum("ntgd,nugd->ngtu", a, a) * torch.einsum("ntgc,nugc->ngtu", g, g)
        return products.sum((1, 2, 3), dtype=torch.float64).clamp(min=0)
    return torch.einsum("ntgd,ntgc->ngdc", a, g).double().square().sum((1, 2, 3))
