"""`ModelDiagnostics`: features and gradients of a model in one object, and what is wrong with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchhook.captures.capture import capture
from torchhook.captures.result import Capture
from torchhook.core.findings import Report
from torchhook.core.selection import Query
from torchhook.core.site import Port, Site
from torchhook.core.torch_internals import CONVOLUTIONS
from torchhook.core.trees import leaves
from torchhook.rules.check import check
from torchhook.stats import Moments
from torchhook.stats.reduce import Reduce


class ModelDiagnostics:
    """The newest features of some layers and their gradients (none selected: every convolution, or every leaf).

    It watches the model from the beginning; `close`, or the end of a ``with`` block, takes the hooks away.

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
        self._capture: Capture = capture(model, *(queries or default), grads=True, on_silent="ignore")
        self._capture.__enter__()

    def close(self) -> None:
        """Take the hooks away; what was seen stays."""
        self._capture.__exit__(None, None, None)

    def __enter__(self) -> ModelDiagnostics:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def features(self) -> dict[str, Tensor]:
        """What the layers returned last, by path; of several tensors, the first."""
        return {path: tensor for path, calls in self._capture.items() if (tensor := _first(calls.output)) is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients of what the layers returned last, by path."""
        found = {path: _first(calls.grad) for path, calls in self._capture.items() if calls.grads}
        return {path: gradient for path, gradient in found.items() if gradient is not None}

    def compute_activation_stats(self) -> dict[str, dict[str, float]]:
        """Mean, standard deviation, maximum and minimum of every feature; NaN and Inf are left out."""
        stats = {}
        for path, feature in self.features.items():
            said = Moments().of(feature)
            stats[path] = {"mean": said.mean, "std": said.std, "max": said.max, "min": said.min}
        return stats

    def visualize(self, writer: Any, step: int | None = None) -> None:
        """Write features and gradients as histograms to a TensorBoard writer, or anything with its `add_histogram`."""
        for folder, tensors in (("features", self.features), ("gradients", self.gradients)):
            for path, tensor in tensors.items():
                known = tensor[tensor.isfinite()]
                if known.numel():  # writers refuse to draw nothing
                    writer.add_histogram(f"{folder}/{path}", known, global_step=step)

    def check(self) -> Report:
        """What is wrong with the features and gradients, by the rules that can be applied to them."""
        reduce, modules = Reduce("moments", "channels", "headroom"), dict(self.model.named_modules())
        ports: tuple[tuple[Port, dict[str, Tensor]], ...]
        ports = ("output", self.features), ("grad_output", self.gradients)
        for port, tensors in ports:
            for path, tensor in tensors.items():
                reduce.cell(Site(path, port), modules.get(path)).update(tensor)
        return check(reduce.snapshot(), model=type(self.model).__name__)


def _first(value: Any) -> Tensor | None:
    return next((leaf for _, leaf in leaves(value)), None)
