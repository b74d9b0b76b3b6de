"""Whether a map is faithful: does the score fall when the hottest pixels are erased, and rise when they are restored?

These are the deletion and insertion curves of Petsiuk et al. (2018), "RISE". Random maps are measured in the same way,
for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.core.batch import inputs_of
from torchhook.core.model_state import inference
from torchhook.core.result import Result
from torchhook.core.selection import require_module
from torchhook.core.tap import require_count
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments, taken
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.heat import Heat
from torchhook.explain.targets import Score, Target, logits_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Baseline = Literal["blur", "zero", "mean"]
_COARSE = 8  # cells of a random map: noise of single pixels would be too easy to beat
_BLUR = 20  # the longer side of the image over the standard deviation of the blur


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(Result):
    """The curves of the maps, and of random maps, over the fraction of the pixels that were erased or restored.

    Args:
        fractions: The fractions of the pixels, steps + 1 numbers from 0 to 1.
        insertion, deletion: The score of each sample at each fraction, N × (steps + 1).
        random_insertion, random_deletion: The same for each random map, maps × N × (steps + 1).
    """

    fractions: Tensor
    insertion: Tensor
    deletion: Tensor
    random_insertion: Tensor
    random_deletion: Tensor

    @property
    def insertion_area(self) -> Tensor:
        """The area under the insertion curve of each sample: the higher, the sooner the score returns."""
        return torch.trapezoid(self.insertion, self.fractions)

    @property
    def deletion_area(self) -> Tensor:
        """The area under the deletion curve of each sample: the lower, the sooner the score is gone."""
        return torch.trapezoid(self.deletion, self.fractions)

    @property
    def passed(self) -> bool:
        """Whether the maps beat every random map on both curves, averaged over the samples."""
        return all(row.better == row.maps for row in self._rows())

    @property
    def verdict(self) -> str:
        """Whether to believe the maps, in a sentence."""
        good = [row.curve for row in self._rows() if row.better == row.maps]
        if len(good) == 2:
            return "Faithful: what the maps show matters more to the score than what random maps show."
        if good:
            return f"Partly faithful: the maps beat all random maps by {good[0]} only."
        return "Not faithful: what the maps show does not matter more to the score than what random maps show."

    def figure(self) -> Figure:
        """Both curves, averaged over the samples, with those of the random maps in grey. Needs matplotlib."""
        from torchhook.plot.style import SMALL, place
        from torchhook.render.palette import BLUE, GREY, ORANGE

        figure, ax = place(None, 6.0, 4.0)
        at = self.fractions.tolist()
        for name, colour, curve, others in (
            ("insertion", BLUE, self.insertion, self.random_insertion),
            ("deletion", ORANGE, self.deletion, self.random_deletion),
        ):
            for other in others.mean(1):
                ax.plot(at, other.tolist(), color=GREY, linewidth=0.8, linestyle=":" if name == "deletion" else "-")
            ax.plot(at, curve.mean(0).tolist(), color=colour, label=name)
        ax.set_xlabel("fraction of pixels", fontsize=SMALL)
        ax.set_ylabel("score", fontsize=SMALL)
        ax.legend(frameon=False, fontsize=SMALL)
        return figure

    def __len__(self) -> int:
        return len(self.insertion)

    def _records(self) -> list[dict[str, Any]]:
        return [row._asdict() for row in self._rows()]

    def _foot(self) -> Sequence[str]:
        return (self.verdict,)

    def _rows(self) -> list[_CurveSummary]:
        return [
            _CurveSummary.of(
                "insertion", self.insertion_area, torch.trapezoid(self.random_insertion, self.fractions), 1
            ),
            _CurveSummary.of("deletion", self.deletion_area, torch.trapezoid(self.random_deletion, self.fractions), -1),
        ]

    def _title(self) -> str:
        return f"Faithfulness of {len(self)} map{'s' * (len(self) > 1)}, area under the score curves"

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        rows = [
            [row.curve, f"{row.area:.3f}", f"{row.random:.3f}", f"{row.better} of {row.maps}"] for row in self._rows()
        ]
        return ("curve", "area", "random maps", "better than"), rows


class _CurveSummary(NamedTuple):
    """One curve: its mean area over the samples, that of the random maps, and how many of those it beats."""

    curve: str
    area: float
    random: float
    better: int
    maps: int

    @classmethod
    def of(cls, curve: str, areas: Tensor, others: Tensor, sign: int) -> _CurveSummary:
        means = others.mean(1)
        better = int((sign * (areas.mean() - means) > 0).sum())
        return cls(curve, float(areas.mean()), float(means.mean()), better, len(means))


def faithfulness(
    maps: Heat | Tensor,
    model: nn.Module,
    x: Any,
    target: Target = None,
    *,
    steps: int = 32,
    baseline: Baseline | Tensor = "blur",
    randoms: int = 4,
    batch: int | None = None,
    seed: int = 0,
) -> Faithfulness:
    """How the score changes when pixels are erased, the hottest first, and when they are restored.

    The score of a class is its probability, the softmax of the logits, as in the paper; a function of the output is
    used as it is. Pixels of equal heat come in random order, those of negative heat last: pass the signed maps. The
    model runs in eval mode without gradients, and its modes are restored afterwards.

    Args:
        maps: The result of `explain.grad_cam` or another method for `x`, or maps N×h×w of any resolution.
        x: The input, a tuple of positional arguments or a dict of keyword arguments; the first images N×C×H×W in it
            are erased.
        target: As for `explain.grad_cam`; None is the class that a `Heat` was made for, or the predicted one.
        steps: The number of steps, each of which erases the same number of pixels.
        baseline: What replaces an erased pixel: the ``"blur"`` of the image, which adds no new edges; ``"zero"``; the
            ``"mean"`` of each channel of the image; or a tensor that can be broadcast to the images. (The paper inserts
            into the blurred image, and deletes to zero.)
        randoms: The number of random maps to compare with, as coarse as the maps, and at most 8×8.
        batch: The number of images in one forward; by default 64, or 8 on a CPU, which is slower with more. All curves
            take ``2 * (1 + randoms) * (steps + 1)`` images per sample.
        seed: Seeds the random maps and orders.

    >>> class Corner(nn.Module):
    ...     def forward(self, x):
    ...         return x[:, 0, :4, :4].mean((1, 2))
    >>> maps = torch.zeros(1, 8, 8)
    >>> maps[:, :4, :4] = 1.0
    >>> faithfulness(maps, Corner(), torch.ones(1, 1, 8, 8), lambda out: out, steps=64, baseline="zero")
    Faithfulness of 1 map, area under the score curves
    curve      area   random maps  better than
    insertion  0.875  0.501        4 of 4
    deletion   0.125  0.499        4 of 4
    Faithful: what the maps show matters more to the score than what random maps show.
    """
    require_module(model)
    heat, given = _heat(maps), inputs_of(x, model)
    images = _images(given, len(heat))
    batch = (8 if images.device.type == "cpu" else 64) if batch is None else batch
    for name, count in (("steps", steps), ("randoms", randoms), ("batch", batch)):
        require_count(count, name)
    target = _target(maps, target)
    with inference(model):
        output = model(*given.args, **given.kwargs)
        score = _score(target, output)
        samples = BatchedArguments.of(given).apart(lambda some: model(*some.args, **some.kwargs), score, output)
        eraser = _Eraser(model, samples, images, _base(baseline, images), score, batch)
        size = images.shape[-2:]
        counts = torch.arange(steps + 1) * (size[0] * size[1]) // steps
        generator = torch.Generator().manual_seed(seed)
        coarse = [min(_COARSE, side) for side in heat.shape[1:]]
        noise = [torch.rand(len(heat), *coarse, generator=generator) for _ in range(randoms)]
        orders = [_order(one, size, generator).to(images.device) for one in (heat, *noise)]
        insertion, *random_insertion = (eraser.curve(order, counts, back=True) for order in orders)
        deletion, *random_deletion = (eraser.curve(order, counts, back=False) for order in orders)
    fractions = counts / (size[0] * size[1])
    return Faithfulness(fractions, insertion, deletion, torch.stack(random_insertion), torch.stack(random_deletion))


class _Eraser(NamedTuple):
    """Runs a model on images with some pixels erased."""

    model: nn.Module
    samples: BatchedArguments
    images: Tensor
    base: Tensor
    score: Any
    batch: int

    def curve(self, order: Tensor, counts: Tensor, back: bool) -> Tensor:
        """The scores, N × counts, with that many of the first pixels in `order` restored (`back`) or erased."""
        samples, height, width = len(self.images), *self.images.shape[-2:]
        runs = torch.arange(samples * len(counts), device=order.device)
        scores = []
        for some in runs.split(self.batch):
            rows = some // len(counts)
            first = (order[rows] < counts.to(order.device)[some % len(counts), None]).view(-1, 1, height, width)
            mixed = torch.where(first == back, self.images[rows], self.base[rows])
            scores.append(self.score(self._called(mixed, rows), rows))
        return torch.cat(scores).float().cpu().view(samples, len(counts))

    def _called(self, images: Tensor, rows: Tensor) -> Any:
        given = self.samples.picked(rows, lambda _: images)
        return self.model(*given.args, **given.kwargs)


def _heat(maps: Any) -> Tensor:
    found = maps.maps if isinstance(maps, Heat) else maps
    if not isinstance(found, Tensor) or found.dim() != 3 or not found.is_floating_point():
        kind = shape_of(found) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"maps must be a Heat or a floating-point tensor N×h×w, not {kind}")
    if not found.isfinite().all():
        raise ValueError("maps contain NaN or Inf, which cannot be sorted")
    return found.detach().cpu().float()


def _images(given: Arguments, samples: int) -> Tensor:
    """The images among the arguments."""
    address = BatchedArguments.of(given).images
    images = None if address is None else taken(given, address)
    if not isinstance(images, Tensor) or images.dim() != 4:
        raise ValueError(f"x has no images N×C×H×W to erase: it is {shape_of(given.unwrapped()):.200}")
    if not images.is_floating_point():
        raise ValueError(
            f"the images in x are {images.dtype}, but only floating-point images can be erased: pass images.float()"
        )
    if len(images) != samples:
        raise ValueError(f"maps has {samples} samples, but x has {len(images)}: pass one map per sample")
    return images


def _target(maps: Any, target: Target) -> Target:
    """The target if one was given, or the one that the maps were made for."""
    if target is not None or not isinstance(maps, Heat):
        return target
    name = next((one for one in maps.target if isinstance(one, str)), None)
    if name is not None:
        raise ValueError(f"these maps were made for the function {name}: pass it as target=")
    return [one for one in maps.target if isinstance(one, int)] or None


def _score(target: Target, output: Any) -> Any:
    """The probability of the class, or the result of the function, for each row of an output."""
    score = Score.of(target, output)
    if callable(target) and not isinstance(target, Tensor):
        return score
    return lambda output, rows: score(logits_of(output).softmax(1), rows)


def _base(baseline: Any, images: Tensor) -> Tensor:
    """The images with every pixel erased."""
    if isinstance(baseline, Tensor):
        try:
            return baseline.to(images).expand_as(images)
        except RuntimeError:
            raise ValueError(
                f"baseline {shape_of(baseline)} cannot be broadcast to images {shape_of(images)}"
            ) from None
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline must be 'blur', 'zero', 'mean' or a tensor, not {baseline!r:.80}")
    if baseline == "blur":
        return _blurred(images)
    return torch.zeros_like(images) if baseline == "zero" else images.mean((2, 3), keepdim=True).expand_as(images)


def _blurred(images: Tensor) -> Tensor:
    """Images blurred by a Gaussian with a deviation of a twentieth of the longer side; edge pixels are repeated."""
    deviation = max(1.0, max(images.shape[-2:]) / _BLUR)
    reach = int(2 * deviation)
    kernel = torch.exp(-torch.arange(-reach, reach + 1, device=images.device).square() / (2 * deviation**2))
    kernel = (kernel / kernel.sum()).to(images.dtype)
    channels = images.shape[1]
    across = kernel.expand(channels, 1, 1, -1)
    wide = F.conv2d(F.pad(images, (reach, reach, 0, 0), mode="replicate"), across, groups=channels)
    return F.conv2d(F.pad(wide, (0, 0, reach, reach), mode="replicate"), across.transpose(2, 3), groups=channels)


def _order(maps: Tensor, size: torch.Size, generator: torch.Generator) -> Tensor:
    """For each sample, the rank of each pixel: the hottest first, those of equal heat in random order."""
    heat = F.interpolate(maps[:, None], tuple(size), mode="bilinear", align_corners=False).flatten(1)
    mixed = torch.rand(heat.shape, generator=generator).argsort(1)
    hottest = mixed.gather(1, heat.gather(1, mixed).argsort(dim=1, descending=True, stable=True))
    return hottest.argsort(1)
