"""The norm of each sample's own gradient, from one backward of the whole batch.

The gradient of a weight is a sum over samples and positions of products of the layer's input a and the gradient g of
its output. So its norm for one sample follows from both without computing the gradient itself: |a|² |g|² for one
position, and for several the sum over pairs of positions, (a·a') (g·g'). Several calls of a module count as further
positions. That is the whole gradient only if nothing else uses the weight, which is checked against autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.core.batch import Batch, call
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import CONVOLUTIONS
from torchhook.core.trees import leaves

COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers whose gradients count."""


@dataclass
class Flow:
    """The inputs of one layer in a pass and the gradients of its outputs, call by call."""

    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    totals: dict[str, Tensor] = field(default_factory=dict)  # the gradients of weight and bias over the whole batch

    def squares(self, count: int) -> Tensor | str:
        """For each sample the squared norm of the gradient of weight and bias, or why it is unknown."""
        if not self.totals:
            return "it is frozen"
        if any(not x.dim() or len(x) != count for x in (*self.inputs, *self.gradients)):
            return f"its inputs do not have one row per sample for a batch of {count}"
        pairs = [_positions(self.module, *pair) for pair in zip(self.inputs, self.gradients, strict=True)]
        a, g = (torch.cat(some, 1) for some in zip(*pairs, strict=True))
        squares = []
        if "weight" in self.totals:
            squares.append(_squares(a, g))
            if _differ(torch.einsum("ntgd,ntgc->gcd", a, g), self.totals["weight"], squares[-1]):
                return "its weight is also used elsewhere, or computed from other parameters"
        if "bias" in self.totals:
            squares.append(g.sum(1).double().square().sum((1, 2)))
            if _differ(g.sum((0, 1)), self.totals["bias"], squares[-1]):
                return "its bias is also used elsewhere, or computed from other parameters"
        return torch.stack(squares).sum(0)


class _Offsets(Edit):
    """Adds zeros to the outputs of layers: the gradients of these zeros are those of the outputs."""

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
    """Keeps the inputs of layers."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}

    def receive(self, event: Event) -> None:
        """Keep one input."""
        flow = self.flows.setdefault(event.path, Flow(event.module))
        flow.inputs.append(next(leaf for _, leaf in leaves(event.value)))  # it may be a keyword


@dataclass(frozen=True)
class Backward:
    """A forward and backward of a batch: the output, the loss of each sample, and what flowed through the layers."""

    output: Any
    losses: Tensor
    flows: dict[str, Flow]


def backward(model: nn.Module, batch: Batch, losses: Callable[[Any, Any], Tensor]) -> Backward:
    """Run a batch forward and backward; no ``.grad`` is written.

    `losses` maps output and target to one number per sample.

    >>> model = nn.Linear(2, 1)
    >>> found = backward(model, Batch.of(torch.ones(3, 2)), lambda output, target: output[:, 0])
    >>> [round(float(square), 3) for square in found.flows[""].squares(3)]
    [3.0, 3.0, 3.0]
    """
    zeros: dict[str, list[Tensor]] = {}
    inputs = _Inputs()
    taps = _taps(model, inputs, _Offsets(zeros))
    with torch.enable_grad():
        with Session(model, taps, on_silent="ignore"):
            output = call(model, batch)
        by_sample = losses(output, batch.target)
        wanted = {
            (path, name): parameter
            for path, flow in inputs.flows.items()
            for name in ("weight", "bias")
            if (parameter := getattr(flow.module, name)) is not None and parameter.requires_grad
        }
        sources = [*(zero for some in zeros.values() for zero in some), *wanted.values()]
        found = iter(_gradients(by_sample.sum(), sources))
    for path, some in zeros.items():
        inputs.flows[path].gradients += [next(found) for _ in some]
    for (path, name), total in zip(wanted, found, strict=True):
        inputs.flows[path].totals[name] = total
    return Backward(output, by_sample.detach(), inputs.flows)


def not_by_sample(model: nn.Module, batch: Batch, count: int) -> set[str]:
    """The layers whose inputs do not have `count` rows, the number of samples in the batch.

    If time is the first dimension, it may have the size of a batch by chance, but not also after the batch is cut.

    >>> sorted(not_by_sample(nn.Sequential(nn.Flatten(0, 1), nn.Linear(2, 1)), Batch.of(torch.ones(1, 3, 2)), 1))
    ['1']
    """
    inputs = _Inputs()
    with torch.no_grad(), Session(model, _taps(model, inputs), on_silent="ignore"):
        call(model, batch)
    return {path for path, flow in inputs.flows.items() if any(not x.dim() or len(x) != count for x in flow.inputs)}


def _taps(model: nn.Module, inputs: Sink, outputs: Edit | None = None) -> list[Tap]:
    paths = [path for path, module in model.named_modules() if isinstance(module, COUNTED)]
    if not paths:
        return []
    where = Selector.union(paths)
    return [Tap(where, inputs, "input"), *([Tap(where, outputs)] if outputs is not None else [])]


def _gradients(loss: Tensor, sources: list[Tensor]) -> Iterable[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(source) for source in sources]
    return torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True) if sources else []


def _positions(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and gradients as samples × positions × groups × channels."""
    if isinstance(layer, nn.Linear):
        return tuple(t.reshape(len(t), -1, 1, t.shape[-1]) for t in (x, gradient))  # type: ignore[return-value]  # of two
    assert isinstance(layer, CONVOLUTIONS)
    windows = _windows(layer, x)
    return (
        windows.unflatten(2, (layer.groups, -1)).flatten(3),
        gradient.flatten(2).movedim(1, 2).unflatten(2, (layer.groups, -1)),
    )


def _windows(layer: Any, x: Tensor) -> Tensor:
    """The inputs under the kernel of a convolution: samples × positions × channels × kernel."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, _padding(layer), mode)
    dims = len(layer.kernel_size)
    for dim, (size, stride, apart) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), 2):
        x = x.unfold(dim, apart * (size - 1) + 1, stride)[..., ::apart]
    return x.flatten(2 + dims).flatten(2, 1 + dims).movedim(1, 2)


def _padding(layer: Any) -> list[int]:
    """What `F.pad` adds before and after each dimension, the last one first."""
    if layer.padding == "same":
        both = [apart * (size - 1) for size, apart in zip(layer.kernel_size, layer.dilation, strict=True)]
        return [part for total in reversed(both) for part in (total // 2, total - total // 2)]
    widths = [0] * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    return [width for width in reversed(widths) for _ in range(2)]


def _squares(a: Tensor, g: Tensor) -> Tensor:
    """For each sample the sum over groups of |Σ g a'|², computed with the smaller matrices."""
    if a.shape[1] ** 2 <= a.shape[-1] * g.shape[-1]:
        products = torch.einsum("ntgd,nugd->ngtu", a, a) * torch.einsum("ntgc,nugc->ngtu", g, g)
        return products.sum((1, 2, 3), dtype=torch.float64).clamp(min=0)
    return torch.einsum("ntgd,ntgc->ngdc", a, g).double().square().sum((1, 2, 3))


def _differ(seen: Tensor, total: Tensor, squares: Tensor) -> bool:
    """Whether a gradient differs by more than rounding from the sum over samples."""
    off = (seen.flatten().double() - total.flatten().double()).norm()
    return bool(off > torch.finfo(total.dtype).eps ** 0.5 * squares.sqrt().sum())
