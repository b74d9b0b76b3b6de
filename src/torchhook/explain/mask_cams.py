"""Class activation maps without gradients: a channel weighs what the score becomes if it is shown alone, or taken away.

That takes a run of the model for each channel of each sample. They are run many at once, of whatever samples, and what
they say stays on the device until the end. What cannot make a difference is not run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.core.edit import Edit
from torchhook.core.model_state import inference
from torchhook.core.selection import Query
from torchhook.core.session import Session
from torchhook.core.tap import Tap, require_count
from torchhook.core.trees import Arguments, put, taken
from torchhook.explain.batched_arguments import Samples
from torchhook.explain.cams import heat_of, named_after, weighted
from torchhook.explain.heat import Heat
from torchhook.explain.layer_choice import settle
from torchhook.explain.layer_values import Reached, reach
from torchhook.explain.module_calls import main_tensor
from torchhook.explain.targets import Score, Target, at_hand
from torchhook.explain.token_grid import Fold

_EPSILON = 1e-8  # for a map that is the same everywhere, as in pytorch-grad-cam
_IMAGE = 224 * 224  # pixels
_AT_ONCE = {"cpu": 16 * _IMAGE}  # pixels: a processor gains nothing by more
_ELSEWHERE = 256 * _IMAGE
_BYTES = 2**28  # of copies of what a layer gave for one sample
_NEAR = 1e-3  # of the largest score: what the order of sums may change


class _Runs:
    """A model, what it was given and what came of it, to be run again with some of the samples."""

    def __init__(self, model: nn.Module, given: Arguments, reached: Reached, score: Score, batch: int | None) -> None:
        self.model = model
        self.samples = Samples.of(given).apart(self._called, score, reached.output)
        self.reached = reached
        self.score = score
        self.batch = batch
        kind = reached.value.device.type
        high, wide = reached.setting.size or (224, 224)
        self.at_once = batch or max(1, _AT_ONCE.get(kind, _ELSEWHERE) // (high * wide))
        self.channels_last = True  # convolutions are faster with them last; but not every model can live with that

    def output(self, rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Any:
        """What comes of `rows`, numbers of samples, with their images changed."""
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
    """What both methods are called with."""

    def __call__(
        self,
        model: nn.Module,
        x: Any,
        target: Target = None,
        layer: Query | None = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
        batch: int | None = None,
    ) -> Heat:
        """The heat of some samples."""


def _by_runs(weigh: Callable[[_Runs], Tensor]) -> BatchedCam:
    """The method that weights of channels, samples × channels, stand for."""

    def cam(
        model: nn.Module,
        x: Any,
        target: Target = None,
        layer: Query | None = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
        batch: int | None = None,
    ) -> Heat:
        if batch is not None:
            require_count(batch, "batch")
        given, target = Arguments.of(x), at_hand(target)
        with inference(model):
            reached = reach(model, given, settle(model, given, target, layer, call, fold), fold, graph=False)
            score = Score.of(target, reached.output, reached.setting.samples)
            maps = weighted(reached.maps, weigh(_Runs(model, given, reached, score, batch)))
            return heat_of(weigh.__name__, reached, maps, score.explained(len(maps)))

    return named_after(weigh, cam)


@_by_runs
def score_cam(runs: _Runs) -> Tensor:
    """Each channel by the score of the input as seen through its map: its share in a softmax of these (Wang 2020).

    The model runs once for each channel of each sample, `batch` at once. Channels whose map is the same everywhere
    show nothing of the input, and are run once a sample. Other arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> score_cam(net, torch.rand(2, 3, 16, 16), target=5)
    score_cam of '1': 2×14×14, target 5
    """
    maps, size = runs.reached.maps, runs.reached.setting.size
    if size is None:
        raise ValueError("score_cam looks at images through maps, and x has none: pass samples × channels × h × w")
    flat = maps.amax((2, 3)) == maps.amin((2, 3))
    stands = flat & (flat.cumsum(1) == 1)  # one for all that are flat
    samples, channels = (stands | ~flat).nonzero(as_tuple=True)
    found = []
    for rows, some in zip(samples.split(runs.at_once), channels.split(runs.at_once), strict=True):
        # Which points of map and image are matched, the paper leaves open: the corners here, as in pytorch-grad-cam.
        seen = F.interpolate(maps[rows, some][:, None], size, mode="bilinear", align_corners=True)
        low, high = seen.amin((2, 3), keepdim=True), seen.amax((2, 3), keepdim=True)
        through = (seen - low) / (high - low + _EPSILON)
        output = runs.output(rows, partial(_through, map_=through))
        found.append(runs.score(output, rows))
    scores = maps.new_zeros(maps.shape[:2])
    scores[samples, channels] = torch.cat(found).to(scores.dtype)
    return scores.where(~flat, scores.where(stands, 0).sum(1, keepdim=True)).softmax(1)


def _through(image: Tensor, map_: Tensor) -> Tensor:
    """An image as seen through a map from 0 to 1, in the numbers that it is made of."""
    if image.is_floating_point():
        return image * map_.to(image.dtype)
    return (image * map_).round().to(image.dtype)


@_by_runs
def ablation_cam(runs: _Runs) -> Tensor:
    """Each channel by how much of the score goes if the channel is set to zero, as a part of it (Desai 2020).

    Wherever possible, what comes before the layer runs once for many channels, which are taken away in copies of what
    the layer gave, `batch` at once. Other arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> ablation_cam(net, torch.rand(2, 3, 16, 16), target=5)
    ablation_cam of '1': 2×14×14, target 5
    """
    maps = runs.reached.maps
    whole = runs.score(runs.reached.output).to(maps.dtype)
    alive = (maps != 0).flatten(2).any(2)  # others are zero as they are
    left = _in_copies(runs, alive, whole)
    if left is None:
        left = _from_the_beginning(runs, alive)
    scores = whole[:, None].expand(maps.shape[:2]).clone()
    scores[alive] = left.to(maps.dtype)
    size = whole.abs()[:, None]  # what speaks for the target is above zero, also where the score is below
    return (whole[:, None] - scores) / size.where(size > 0, 1)


def _in_copies(runs: _Runs, alive: Tensor, whole: Tensor) -> Tensor | None:
    """The scores without each channel, by running a sample up to the layer, and copies of it from there on.

    What bypasses the layer is of the one sample, and meets all copies alike by broadcasting. Not every model is made
    for that: it is None if one fails, or if of a copy in which nothing is changed something else comes than before.
    """
    value = runs.reached.value
    at_once = runs.batch or max(1, _BYTES // (value[0].numel() * value.element_size()))
    ablating, found, change = _Ablating(runs.reached, is_copying=True), [], []
    try:
        with Session(runs.model, [Tap(runs.reached.place.path, ablating)]):
            for sample, each in enumerate(alive):
                row = torch.tensor([sample], device=value.device)
                for ablating.channels in each.nonzero()[:, 0].split(at_once):
                    copies = row.expand(len(ablating.channels) + 1)
                    scores = runs.score(runs.output(row), copies)
                    found.append(scores[:-1])
                    change.append(scores[-1] - whole[sample])
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    is_same = torch.stack([whole.new_zeros(()), *change]).abs() <= _NEAR * whole.abs().max()
    return torch.cat([whole[:0], *found]) if bool(is_same.all()) else None


def _from_the_beginning(runs: _Runs, alive: Tensor) -> Tensor:
    """The scores without each channel, by a whole run for each."""
    samples, channels = alive.nonzero(as_tuple=True)
    ablating, found = _Ablating(runs.reached, is_copying=False), []
    with Session(runs.model, [Tap(runs.reached.place.path, ablating)]):
        for rows, ablating.channels in zip(samples.split(runs.at_once), channels.split(runs.at_once), strict=True):
            found.append(runs.score(runs.output(rows), rows))
    return torch.cat(found)


class _Ablating(Edit):
    """Sets, in each row of what a layer gives, one of the `channels` to zero.

    If it `is_copying`, the layer gives one row, of which there is a copy for each channel and one more as it was.
    """

    whole = resizes = True
    channels: Tensor

    def __init__(self, reached: Reached, is_copying: bool) -> None:
        super().__init__()
        self.place = reached.place
        self.is_copying = is_copying
        # Where in a row each channel lies, which only the fold knows: it is given their numbers instead of values.
        row = reached.value[:1]
        numbers = torch.arange(row.numel(), device=row.device, dtype=torch.float64).view_as(row)
        self.places = reached.fold(numbers.expand_as(reached.value))[0].flatten(1).long()

    def change(self, x: Any, call: int) -> Any:
        if call != (self.place.call or 0):
            return x
        address = main_tensor(x, self.place.path)
        value: Tensor = taken(x, address)
        count = len(self.channels)
        rows = value.expand(count + 1, *value.shape[1:]) if self.is_copying else value
        rows = rows.clone(memory_format=torch.contiguous_format)
        rows.view(len(rows), -1)[:count].scatter_(1, self.places[self.channels], 0)
        return put(x, address, rows)
