"""The signals that may reveal whether a sample was trained on: one number per sample and signal, and layer features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.compare.features import FeatureReader, LayerCall
from torchhook.compare.gradient_inversion import SharedGradient, inverted, why_not_invertible
from torchhook.compare.sample_gradients import COUNTED, Backward, Flow, backward, not_by_sample
from torchhook.compare.sample_losses import confidence, losses, target_of
from torchhook.core.batch import Batch, Loss, batch_count, fitted, samples_of
from torchhook.core.progress import Progress, track
from torchhook.core.trees import mapped

FOLDS = 5  # of the cross-validation, and so the least number of members and of others
SHARED = "shared gradients"


class SampleSignals:
    """The signals of the members, or of the others, batch by batch. Higher scores suggest a member."""

    def __init__(self, reader: FeatureReader, loss: Loss | None, *, invert: bool) -> None:
        self.reader = reader
        self.loss = loss
        self.invert = invert  # whether to invert the gradients of the batches
        self.count = 0
        self.batches = 0
        self.scores: dict[str, list[Tensor]] = {}
        self.squares: dict[str, list[Tensor]] = {}  # squared gradient norms, by layer
        self.not_by_sample: set[str] | None = None  # layers without one row per sample; None until known
        self.features: dict[LayerCall, list[Tensor]] = {}
        self.left_out: dict[str, str] = {}
        self.layer: str | None = None  # the layer whose gradient was inverted
        self.shared: list[SharedGradient] = []

    def over(self, loader: Iterable[Any], argument: str, most: int, progress: Progress) -> SampleSignals:
        """Add the batches of `loader`, up to `most` samples."""
        for data in track(loader, batch_count(loader), argument, progress):
            self._add(data, most - self.count)
            if self.count >= most:
                break
        if self.count < FOLDS:
            raise ValueError(f"{argument} has {self.count} samples, but at least {FOLDS} are needed")
        return self

    def _add(self, data: Any, most: int) -> None:
        model = self.reader.model
        count = samples_of(Batch.of(data)).length
        if not count:
            return
        data, count = _first_rows(data, most, count), min(most, count)
        self.reader.run(data, self._take_features)
        batch = Batch.of(fitted(data, model))
        batch = Batch(batch.arguments, target_of(batch))
        if self.not_by_sample is None and count > 1:
            fewer = fitted(_first_rows(data, count - 1, count), model)
            self.not_by_sample = not_by_sample(model, Batch.of(fewer), count - 1)
        found = backward(model, batch, losses(self.loss, count))
        self._score("loss", -found.losses)
        for name, score in confidence(found.output, batch.target, count).items():
            self._score(name, score)
        self._add_gradients(found, count)
        if self.invert:
            self._invert_gradient(found.flows)
        self.count += count
        self.batches += 1

    def _take_features(self, layer_call: LayerCall, rows: Tensor | str) -> None:
        if isinstance(rows, str):
            self.left_out[str(layer_call)] = rows
        else:
            self.features.setdefault(layer_call, []).append(rows.double().cpu())

    def _score(self, name: str, scores: Tensor) -> None:
        self.scores.setdefault(name, []).append(scores.double().cpu())

    def _add_gradients(self, found: Backward, count: int) -> None:
        unknown = found.losses.isnan()
        for path, flow in found.flows.items():
            is_odd = path in (self.not_by_sample or ())
            squares = "its inputs do not have one row per sample" if is_odd else flow.squares(count)
            if isinstance(squares, str):
                self.left_out[f"gradient of {path!r}"] = squares
            else:
                self.squares.setdefault(path, []).append(squares.masked_fill(unknown, torch.nan).cpu())

    def _invert_gradient(self, flows: dict[str, Flow]) -> None:
        """Try to recover the inputs of the first linear layer from its gradient."""
        path = next((path for path, flow in flows.items() if isinstance(flow.module, nn.Linear)), None)
        reason = "the model has no linear layer" if path is None else why_not_invertible(path, flows[path])
        if reason or path is None:
            self.left_out[SHARED] = reason
            return
        self.layer = path
        self.shared.append(inverted(flows[path]))


def gradient_norms(
    members: SampleSignals, others: SampleSignals, left_out: dict[str, str]
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """The negative gradient norms over the layers that count in every batch; otherwise samples would not compare."""
    paths = []
    for path, module in members.reader.model.named_modules():
        if not isinstance(module, COUNTED) or f"gradient of {path!r}" in left_out:
            continue
        if all(len(side.squares.get(path, ())) == side.batches for side in (members, others)):
            paths.append(path)
        else:
            left_out[f"gradient of {path!r}"] = "it was not called in every batch"
    if not paths:
        left_out["gradient norm"] = "it is not known for any layer"
        return {}
    norms = [
        [-torch.stack(rows).sum(0).sqrt() for rows in zip(*(side.squares[path] for path in paths), strict=True)]
        for side in (members, others)
    ]
    return {"gradient norm": (norms[0], norms[1])}


def uncounted_layers(model: nn.Module) -> dict[str, str]:
    """The classes of layers whose gradients are not part of the norm, and why."""
    names = {
        type(module).__name__: None
        for module in model.modules()
        if not isinstance(module, COUNTED) and any(p.requires_grad for p in module.parameters(recurse=False))
    }
    return {f"gradients of {name}": "only linear and convolution layers count" for name in names}


def _first_rows(data: Any, most: int, count: int) -> Any:
    """The first `most` of the `count` samples of a batch."""
    return data if most >= count else mapped(lambda x: x[:most] if x.dim() and len(x) == count else x, data)
