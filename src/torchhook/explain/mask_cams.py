"""Class activation maps without gradients: weight each channel by the score when only it is shown, or when it is gone.

That takes one run of the model for each channel of each sample. Many are run in one batch, whichever samples they
belong to, and their scores stay on the device until the end. Channels that cannot make a difference are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.core.batch import inputs_of
from torchhook.core.edit import Edit
from torchhook.core.model_state import inference
from torchhook.core.renamed import renamed
from torchhook.core.selection import Sites
from torchhook.core.session import Session
from torchhook.core.tap import Tap, require_count
from torchhook.core.trees import Arguments, put, taken
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.cams import heat_of, named_after, warn_of_empty, weighted
from torchhook.explain.heat import Heat
from torchhook.explain.layer_choice import choose_layer
from torchhook.explain.layer_values import ReachedLayer, reach_layer
from torchhook.explain.module_calls import main_address
from torchhook.explain.targets import Score, Target, classes_as_list
from torchhook.explain.token_grid import Fold
from torchhook.explain.untrained import warn_of_untrained

_EPSILON = 1e-8  # added to the range of a map, which may be zero, as in pytorch-grad-cam
_IMAGE = 224 * 224  # pixels
_AT_ONCE = {"cpu": 16 * _IMAGE}  # pixels: a CPU gains nothing from more
_ELSEWHERE = 256 * _IMAGE
_BYTES = 2**28  # of copies of a layer's output for one sample
_NEAR = 1e-3  # by how much of the largest score another order of sums may change a score


class _Runner:
    """Runs a model again on some of the samples that it was given."""

    def __init__(
        self, model: nn.Module, given: Arguments, reached: ReachedLayer, score: Score, batch: int | None
    ) -> None:
        self.model = model
        self.samples = BatchedArguments.of(given).apart(self._called, score, reached.output)
        self.reached = reached
        self.score = score
        self.batch = batch
        kind = reached.value.device.type
        high, wide = reached.layout.size or (224, 224)
        self.at_once = batch or max(1, _AT_ONCE.get(kind, _ELSEWHERE) // (high * wide))
        self.channels_last = True  # convolutions are faster that way, but not every model supports it

    def output(self, rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The output for the samples with indices `rows`, with their images changed."""
        given = self.samples.picked(rows, lambda image: self._laid_out(change(image) if change else image))
        try:
            return self._called(given)
        except RuntimeError:
            if not self.channels_last:
                raise
            self.channels_last = False
            return self.output(rows, change)

    def _called(self, given: Arguments) -> Any:
        return self.model(*given.args, **given.kwargs)

    def _laid_out(self, image: Tensor) -> Tensor:
        return image.contiguous(memory_format=torch.channels_last) if self.channels_last else image


class BatchedCam(Protocol):
    """The signature that both methods share."""

    def __call__(
        self,
        model: nn.Module,
        x: Any,
        target: Target = None,
        sites: Sites = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
        batch: int | None = None,
    ) -> Heat:
        """The heat maps of the samples."""


def _by_masking(weigh: Callable[[_Runner], Tensor]) -> BatchedCam:
    """The method whose weights of the channels, samples × channels, `weigh` computes."""

    @renamed(layer="sites")
    def cam(
        model: nn.Module,
        x: Any,
        target: Target = None,
        sites: Sites = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
        batch: int | None = None,
    ) -> Heat:
        if batch is not None:
            require_count(batch, "batch")
        given, target = inputs_of(x, model), classes_as_list(target)
        with inference(model) as modules:
            warn_of_untrained(model, modules)
            layer = choose_layer(model, given, target, sites, call, fold)
            reached = reach_layer(model, given, layer, fold, graph=False, modules=modules)
            score = Score.of(target, reached.output, reached.layout.samples)
            maps = weighted(reached.maps, weigh(_Runner(model, given, reached, score, batch)))
            heat = heat_of(weigh.__name__, reached, maps, score.explained(len(maps)))
            what = f"no channel of layer {heat.layer!r} changes the score"
            warn_of_empty((maps == 0).flatten(1).all(1), heat, what, "the target does not depend on the layer")
            return heat

    return named_after(weigh, cam)


@_by_masking
def score_cam(runner: _Runner) -> Tensor:
    """Weight each channel by the softmax of the score of the input masked with the channel's map (Wang 2020).

    The model runs once for each channel of each sample, in batches of `batch`. Channels with a constant map hide the
    whole input, and share one run per sample. The other arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> score_cam(net, torch.rand(2, 3, 16, 16), target=5)
    score_cam of '1' (ReLU): 2×14×14, target 5
    """
    maps, size = runner.reached.maps, runner.reached.layout.size
    if size is None:
        raise ValueError("score_cam masks images, but x has none: pass samples × channels × h × w")
    flat = maps.amax((2, 3)) == maps.amin((2, 3))
    shared = flat & (flat.cumsum(1) == 1)  # one channel runs for all flat ones
    samples, channels = (shared | ~flat).nonzero(as_tuple=True)
    found = []
    for rows, some in zip(samples.split(runner.at_once), channels.split(runner.at_once), strict=True):
        # The paper does not say which points of map and image are aligned: here the corners, as in pytorch-grad-cam.
        resized = F.interpolate(maps[rows, some][:, None], size, mode="bilinear", align_corners=True)
        low, high = resized.amin((2, 3), keepdim=True), resized.amax((2, 3), keepdim=True)
        mask = (resized - low) / (high - low + _EPSILON)
        output = runner.output(rows, partial(_masked, mask=mask))
        found.append(runner.score(output, rows))
    scores = maps.new_zeros(maps.shape[:2])
    scores[samples, channels] = torch.cat(found).to(scores.dtype)
    return scores.where(~flat, scores.where(shared, 0).sum(1, keepdim=True)).softmax(1)


def _masked(image: Tensor, mask: Tensor) -> Tensor:
    """An image multiplied by a mask from 0 to 1, in the image's own dtype."""
    if image.is_floating_point():
        return image * mask.to(image.dtype)
    return (image * mask).round().to(image.dtype)


@_by_masking
def ablation_cam(runner: _Runner) -> Tensor:
    """Weight each channel by the relative drop of the score when the channel is set to zero (Desai 2020).

    Where possible, the layers before the chosen one run once for many channels, which are set to zero in copies of its
    output, in batches of `batch`. The other arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> ablation_cam(net, torch.rand(2, 3, 16, 16), target=5)
    ablation_cam of '1' (ReLU): 2×14×14, target 5
    """
    maps = runner.reached.maps
    whole = runner.score(runner.reached.output).to(maps.dtype)
    alive = (maps != 0).flatten(2).any(2)  # the others are zero already
    left = _in_copies(runner, alive, whole)
    if left is None:
        left = _by_whole_runs(runner, alive)
    scores = whole[:, None].expand(maps.shape[:2]).clone()
    scores[alive] = left.to(maps.dtype)
    size = whole.abs()[:, None]  # so that evidence for the target is positive even if the score is negative
    return (whole[:, None] - scores) / size.where(size > 0, 1)


def _in_copies(runner: _Runner, alive: Tensor, whole: Tensor) -> Tensor | None:
    """The scores without each channel, by running one sample up to the layer, and copies of it from there on.

    What bypasses the layer has one sample, and is broadcast to all copies. Not every model supports that: the result is
    None if the model fails, or if the score of an unchanged copy differs from that of the plain run.
    """
    value = runner.reached.value
    at_once = runner.batch or max(1, _BYTES // (value[0].numel() * value.element_size()))
    zeroing, found, change = _ZeroChannels(runner.reached, is_copying=True), [], []
    try:
        with Session(runner.model, [Tap(runner.reached.layer.path, zeroing)]):
            for sample, each in enumerate(alive):
                row = torch.tensor([sample], device=value.device)
                for zeroing.channels in each.nonzero()[:, 0].split(at_once):
                    copies = row.expand(len(zeroing.channels) + 1)
                    scores = runner.score(runner.output(row), copies)
                    found.append(scores[:-1])
                    change.append(scores[-1] - whole[sample])
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    is_same = torch.stack([whole.new_zeros(()), *change]).abs() <= _NEAR * whole.abs().max()
    return torch.cat([whole[:0], *found]) if bool(is_same.all()) else None


def _by_whole_runs(runner: _Runner, alive: Tensor) -> Tensor:
    """The scores without each channel, by one whole run for each."""
    samples, channels = alive.nonzero(as_tuple=True)
    zeroing, found = _ZeroChannels(runner.reached, is_copying=False), []
    with Session(runner.model, [Tap(runner.reached.layer.path, zeroing)]):
        for rows, zeroing.channels in zip(samples.split(runner.at_once), channels.split(runner.at_once), strict=True):
            found.append(runner.score(runner.output(rows), rows))
    return torch.cat(found)


class _ZeroChannels(Edit):
    """Sets one of the `channels` to zero in each row of a layer's output.

    If it `is_copying`, the output has one row, which is copied once for each channel, and once more unchanged.
    """

    whole = resizes = True
    channels: Tensor

    def __init__(self, reached: ReachedLayer, is_copying: bool) -> None:
        super().__init__()
        self.layer = reached.layer
        self.is_copying = is_copying
        # Which elements of a row belong to each channel, only the fold knows: it is given their indices as values.
        row = reached.value[:1]
        numbers = torch.arange(row.numel(), device=row.device, dtype=torch.float64).view_as(row)
        self.elements = reached.fold(numbers.expand_as(reached.value))[0].flatten(1).long()

    def change(self, x: Any, call: int) -> Any:
        if call != (self.layer.call or 0):
            return x
        address = main_address(x, self.layer.path)
        value: Tensor = taken(x, address)
        count = len(self.channels)
        rows = value.expand(count + 1, *value.shape[1:]) if self.is_copying else value
        rows = rows.clone(memory_format=torch.contiguous_format)
        rows.view(len(rows), -1)[:count].scatter_(1, self.elements[self.channels], 0)
        return put(x, address, rows)
