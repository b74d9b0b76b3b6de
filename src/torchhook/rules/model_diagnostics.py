"""`ModelDiagnostics`: the features and gradients of a model in one object, and what is wrong with them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from torchhook.captures.capture import capture
from torchhook.captures.pictures import views
from torchhook.captures.result import Capture
from torchhook.core.findings import Report
from torchhook.core.lifetime import Attaching
from torchhook.core.selection import Query, require_module, walk
from torchhook.core.session import ScopeName
from torchhook.core.shown import Shown
from torchhook.core.silent import warn_silent
from torchhook.core.site import Port, Site
from torchhook.core.torch_internals import CONVOLUTIONS
from torchhook.core.trees import leaves
from torchhook.rules.check import check
from torchhook.stats import Moments
from torchhook.stats.reduce import Reduce


class ModelDiagnostics(Shown, Attaching):
    """The latest features of the selected layers (default: every convolution, or else every leaf) and their gradients.

    It attaches hooks when it is created; `close`, or the end of a ``with`` block, removes them. `scope` and `group` are
    as for `capture`: it sees the passes of this thread alone, unless the scope is ``"all"``, and warns when it is read
    but the model ran only elsewhere.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> with ModelDiagnostics(model) as diagnostics:
    ...     model(torch.ones(1, 1, 8, 8)).sum().backward()
    >>> {name: tuple(feature.shape) for name, feature in diagnostics.features.items()}
    {'0': (1, 2, 6, 6)}
    >>> sorted(diagnostics.compute_activation_stats()["0"])
    ['max', 'mean', 'min', 'std']
    """

    def __init__(
        self, model: nn.Module, *queries: Query, scope: ScopeName = "thread", group: str | None = None
    ) -> None:
        require_module(model)
        has_convolutions = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
        default: tuple[Query, ...] = (CONVOLUTIONS,) if has_convolutions else ()
        self.model = model
        # A pooling divides the gradients of what it pools: how large they are is seen behind it, at the head.
        self._head = _last_linear(model) if has_convolutions and not queries else ()
        chosen = *(queries or default), *self._head
        self._new_capture = partial(capture, model, *chosen, grads=True, scope=scope, on_silent="ignore", group=group)
        self._capture: Capture = self._new_capture().open()

    def open(self) -> ModelDiagnostics:
        """Attach again after `close`, with nothing kept; at first it attaches by itself."""
        if self._capture.session.state == "closed":
            self._capture = self._new_capture().open()
        return self

    def close(self) -> None:
        """Remove the hooks; the features and gradients stay."""
        self._capture.close()

    @property
    def features(self) -> dict[str, Tensor]:
        """The latest output of each layer, by path; if it has several tensors, the first."""
        warn_silent(self._capture.session)
        found = {path: _first(calls.output) for path, calls in self._capture.items() if path not in self._head}
        return {path: tensor for path, tensor in found.items() if tensor is not None}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the latest output of each layer, by path."""
        warn_silent(self._capture.session)
        return {path: gradient for path, gradient in self._gradients().items() if path not in self._head}

    def compute_activation_stats(self) -> dict[str, dict[str, float]]:
        """Mean, standard deviation, maximum and minimum of every feature, without NaN and Inf."""
        stats = {}
        for path, feature in self.features.items():
            moments = Moments().of(feature)
            stats[path] = {"mean": moments.mean, "std": moments.std, "max": moments.max, "min": moments.min}
        return stats

    def visualize(self, writer: Any, step: int | None = None) -> None:
        """Write features and gradients as histograms to a TensorBoard writer, or anything with its `add_histogram`.

        If it has `add_image`, features N×C×H×W are also written as images of the first sample: their channels under
        ``maps/``, the mean of all channels under ``mean_map/``.
        """
        for folder, tensors in (("features", self.features), ("gradients", self.gradients)):
            for path, tensor in tensors.items():
                known = tensor[tensor.isfinite()]
                if known.numel():  # writers refuse empty histograms
                    writer.add_histogram(f"{folder}/{path}", known, global_step=step)
        images = self.features if hasattr(writer, "add_image") else {}
        for path, feature in images.items():
            if feature.dim() == 4 and feature.numel():
                for folder, grey in views(feature[0].detach().cpu()).items():
                    writer.add_image(f"{folder}/{path}", grey, global_step=step, dataformats="HW")

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
