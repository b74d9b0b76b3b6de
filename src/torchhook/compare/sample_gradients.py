"""The norm of each sample's own gradient, from one backward of the whole batch.

The gradient of a weight is a sum, over samples and positions, of products of what the layer was given and the gradient
of what it gave, so its norm for one sample follows from both without ever being made: |a|² |g|² for one position, and
for several the sum over pairs of them, (a·a') (g·g'). Calls of one module are further positions. That is the whole
gradient only if nothing else uses the weight, which is checked against autograd's.
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

GHOSTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Flow:
    """What one layer was given in a pass, and the gradient of what it gave, call by call."""

    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    totals: dict[str, Tensor] = field(default_factory=dict)  # the gradients of weight and bias that require one

    def squares(self, count: int) -> Tensor | str:
        """The square of the norm of the gradient of weight and bias, by sample; or why there is none."""
        if not self.totals:
            return "it is frozen"
        if any(not x.dim() or len(x) != count for x in (*self.inputs, *self.gradients)):
            return f"it does not see a row a sample for a batch of {count}"
        pairs = [_positions(self.module, *pair) for pair in zip(self.inputs, self.gradients, strict=True)]
        a, g = (torch.cat(some, 1) for some in zip(*pairs, strict=True))
        squares = []
        if "weight" in self.totals:
            squares.append(_squares(a, g))
            if _differ(torch.einsum("ntgd,ntgc->gcd", a, g), self.totals["weight"], squares[-1]):
                return "its weight is used elsewhere, too, or made of other parameters"
        if "bias" in self.totals:
            squares.append(g.sum(1).double().square().sum((1, 2)))
            if _differ(g.sum((0, 1)), self.totals["bias"], squares[-1]):
                return "its bias is used elsewhere, too, or made of other parameters"
        return torch.stack(squares).sum(0)


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
        flow.inputs.append(next(leaf for _, leaf in leaves(event.value)))  # it may be a keyword


@dataclass(frozen=True)
class Backward:
    """A forward and a backward of a batch: what the model said, each sample's loss, and what flowed in the layers."""

    output: Any
    losses: Tensor
    flows: dict[str, Flow]


def backward(model: nn.Module, batch: Batch, losses: Callable[[Any, Any], Tensor]) -> Backward:
    """Run a batch forward and backward; no ``.grad`` is written.

    `losses` gives a number a sample, of output and target.

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
    """The layers that do not see `count` rows, as many as the batch has samples.

    Where time is the first dimension it may be as long as a batch by chance; it is not if the batch is cut.

    >>> sorted(not_by_sample(nn.Sequential(nn.Flatten(0, 1), nn.Linear(2, 1)), Batch.of(torch.ones(1, 3, 2)), 1))
    ['1']
    """
    inputs = _Inputs()
    with torch.no_grad(), Session(model, _taps(model, inputs), on_silent="ignore"):
        call(model, batch)
    return {path for path, flow in inputs.flows.items() if any(not x.dim() or len(x) != count for x in flow.inputs)}


def _taps(model: nn.Module, inputs: Sink, outputs: Edit | None = None) -> list[Tap]:
    paths = [path for path, module in model.named_modules() if isinstance(module, GHOSTS)]
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


def _differ(seen: Tensor, total: Tensor, squares: Tensor) -> bool:
    """Whether a gradient is another than the sum of what was seen of each sample, by more than it is rounded."""
    off = (seen.flatten().double() - total.flatten().double()).norm()
    return bool(off > torch.finfo(total.dtype).eps ** 0.5 * squares.sqrt().sum())
