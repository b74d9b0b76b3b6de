"""`ModelDiagnostics`: the features and gradients of a model in one object, and what is wrong with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchhook.captures.capture import capture
from torchhook.captures.result import Capture
from torchhook.core.findings import Report
from torchhook.core.selection import Query, walk
from torchhook.core.site import Port, Site
from torchhook.core.torch_internals import CONVOLUTIONS
from torchhook.core.trees import leaves
from torchhook.rules.check import check
from torchhook.stats import Moments
from torchhook.stats.reduce import Reduce


class ModelDiagnostics:
    """The latest features of the selected layers (default: every convolution, or else every leaf) and their gradients.

    It attaches hooks when it is created; `close`, or the end of a ``with`` block, removes them.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with ModelDiagnostics(model) as diagnostics:
    ...     model(torch.ones(1, 1, 8, 8)).sum().backward()
    >>> {name: tuple(feature.shape) for name, feature in diagnostics.features.items()}
    {'0': (1, 2, 6, 6)}
    >>> sorted(diagnostics.compute_activation_stats()["0"])
    ['max', 'mean', 'min', 'std']
    """

    def __init__(self, model: nn.Module, *queries: Query) -> None:
        has_convolutions = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
        default: tuple[Query, ...] = (CONVOLUTIONS,) if has_convolutions else ()
        self.model = model
        # A pooling divides the gradients of what it pools: how large they are is seen behind it, at the head.
        self._head = _last_linear(model) if has_convolutions and not queries else ()
        self._capture: Capture = capture(model, *(queries or default), *self._head, grads=True, on_silent="ignore")
        self._capture.__enter__()

    def close(self) -> None:
        """Remove the hooks; the features and gradients stay."""
        self._capture.__exit__(None, None, None)

    def __enter__(self) -> ModelDiagnostics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def features(self) -> dict[str, Tensor]:
        """The latest output of each layer, by path; if it has several tensors, the first."""
        found = {path: _first(calls.output) for path, calls in self._capture.items() if path not in self._head}
        return {path: tensor for path, tensor in found.items() if tensor is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the latest output of each layer, by path."""
        return {path: gradient for path, gradient in self._gradients().items() if path not in self._head}

    def compute_activation_stats(self) -> dict[str, dict[str, float]]:
        """Mean, standard deviation, maximum and minimum of every feature, without NaN and Inf."""
        stats = {}
        for path, feature in self.features.items():
            moments = Moments().of(feature)
            stats[path] = {"mean": moments.mean, "std": moments.std, "max": moments.max, "min": moments.min}
        return stats

    def visualize(self, writer: Any, step: int | None = None) -> None:
        """Write features and gradients as histograms to a TensorBoard writer, or anything with its `add_histogram`."""
        for folder, tensors in (("features", self.features), ("gradients", self.gradients)):
            for path, tensor in tensors.items():
                known = tensor[tensor.isfinite()]
                if known.numel():  # writers refuse empty histograms
                    writer.add_histogram(f"{folder}/{path}", known, global_step=step)

    def check(self) -> Report:
        """Report what is wrong with the features and gradients, by the rules that apply to them.

        The gradients that the parameters hold at this moment count, too.
        """
        reduce, modules = Reduce("moments", "channels", "headroom"), dict(self.model.named_modules())
        held = {path: p.grad for path, p in self.model.named_parameters() if p.grad is not None and p.grad.numel()}
        ports: tuple[tuple[Port, dict[str, Tensor]], ...]
        ports = ("output", self.features), ("grad_output", self._gradients()), ("param_grad", held)
        for port, tensors in ports:
            for path, tensor in tensors.items():
                reduce.cell(Site(path, port), modules.get(path)).update(tensor)
        return check(reduce.snapshot(), model=type(self.model).__name__)

    def _gradients(self) -> dict[str, Tensor]:
        found = {path: _first(calls.grad) for path, calls in self._capture.items() if calls.grads}
        return {path: gradient for path, gradient in found.items() if gradient is not None}


def _last_linear(model: nn.Module) -> tuple[str, ...]:
    """The path of the last linear layer, in the order of the modules; empty if there is none."""
    return tuple([path for path, module in walk(model) if isinstance(module, nn.Linear)][-1:])


def _first(value: Any) -> Tensor | None:
    return next((leaf for _, leaf in leaves(value)), None)
