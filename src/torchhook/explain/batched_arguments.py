"""Which of a model's arguments are by sample, so that some of the samples can be run alone, or one several times.

The images are. What else there is may be as long as the batch by chance: as many prompts as images, or a scale for each
of three channels with three images. So it is left as it is wherever the model then says the same of each sample, and
cut only where that shows it to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchhook.core.trees import Address, Arguments, leaves, put, taken
from torchhook.explain.token_grid import Grid, Setting

_NEAR = 5e-3  # of the largest score: what the size of a batch may change


@dataclass(frozen=True, eq=False)
class Samples:
    """What a model is given, and what of it is by sample.

    >>> images, prompts = torch.ones(2, 3, 32, 48), torch.ones(2, 77)
    >>> samples = Samples.of(Arguments.of({"prompts": prompts, "images": images}))
    >>> samples.setting(), samples.others
    (Setting(samples=2, size=(32, 48), grids=()), ((1, 'prompts'),))
    """

    given: Arguments
    images: Address | None  # a batch or a list of them, or else the first batch of whatever it is
    others: tuple[Address, ...]  # those that are cut with them

    @staticmethod
    def of(given: Arguments) -> Samples:
        """All that may be by sample: what is as long as the batch of images."""
        batches = _batches(given)
        images = next((address for is_it in _KINDS for address in batches if is_it(address, batches[address])), None)
        count = None if images is None else len(batches[images])
        others = (address for address, item in batches.items() if address != images and len(item) == count)
        return Samples(given, images, tuple(others))

    def setting(self) -> Setting:
        """How many samples there are, and how large."""
        if self.images is None:
            return Setting(None, None)
        batch = taken(self.given, self.images)
        sizes = {_size(batch)} if _is_tensor(batch, 4) else {_size(one) for one in batch if one.dim() == 3}
        return Setting(len(batch), sizes.pop() if len(sizes) == 1 else None)

    def picked(self, rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Arguments:
        """Some of the samples, by their numbers, with their images, samples × channels × h × w, changed.

        >>> Samples.of(Arguments.of(torch.arange(3.0))).picked(torch.tensor([2, 0, 2])).args
        (tensor([2., 0., 2.]),)
        """
        given = self.given
        for address in () if self.images is None else (self.images, *self.others):
            some = _rows(taken(self.given, address), rows)
            if address == self.images and change is not None:
                some = _changed(some, change)
            given = put(given, address, some)
        return given

    def first(self) -> Arguments | None:
        """The first sample alone; None if it is the only one, or if more than the images may have to be cut for it."""
        is_plain = self.images is not None and not self.others and len(taken(self.given, self.images)) > 1
        return self.picked(torch.zeros(1, dtype=torch.long)) if is_plain else None

    def apart(
        self, run: Callable[[Arguments], Any], score: Callable[[Any, Tensor | None], Tensor], output: Any
    ) -> Samples:
        """The same without those of the others that are not by sample; `output` is what comes of all.

        To see which, the samples are run in another order, with one of them twice: what is said of each must stay.
        """
        if self.images is None or not self.others:
            return self
        count = len(taken(self.given, self.images))
        rows = torch.tensor([*reversed(range(count)), 0])
        expected = score(output, torch.arange(count))
        expected = expected[rows.to(expected.device)]
        fault = None
        for others in _choices(self.others):
            cut = replace(self, others=others)
            try:
                if _is_same(score(run(cut.picked(rows)), rows), expected):
                    return cut
            except Exception as error:  # whatever a model raises for arguments that do not fit
                fault = error
        names = ", ".join(repr(address[-1]) for address in self.others)
        raise ValueError(
            "the samples cannot be run in another order or number: what is said of them changes, whether or not"
            f" arguments {names} are taken to be one a sample; pass the samples one by one"
        ) from fault


def _batches(given: Arguments) -> dict[Address, Any]:
    """Where there are tensors with a first dimension, and lists of such as are no batches themselves."""
    found: dict[Address, Any] = {}
    for address, tensor in leaves(given):
        owner = taken(given, address[:-1])
        if len(address) > 2 and _is_list(owner):  # what has two is an argument
            found[address[:-1]] = owner
        elif tensor.dim():
            found[address] = tensor
    return found


def _is_list(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and all(isinstance(one, Tensor) and one.dim() != 4 for one in item)


def _is_tensor(item: Any, dims: int) -> bool:
    return isinstance(item, Tensor) and item.dim() == dims


_KINDS: tuple[Callable[[Address, Any], bool], ...] = (  # what images are, the likeliest first
    lambda address, item: _is_tensor(item, 4) and item.is_floating_point(),
    lambda address, item: _is_tensor(item, 4),
    lambda address, item: not isinstance(item, Tensor) and all(_is_tensor(one, 3) for one in item),
    lambda address, item: len(address) == 2,
)


def _choices(others: tuple[Address, ...]) -> Iterable[tuple[Address, ...]]:
    """What may be by sample: nothing, all, one, all but one."""
    alone = [(one,) for one in others]
    without = [tuple(other for other in others if other != one) for one in others]
    return dict.fromkeys([(), others, *alone, *without])


def _rows(batch: Any, rows: Tensor) -> Any:
    return batch[rows.to(batch.device)] if isinstance(batch, Tensor) else [batch[row] for row in rows.tolist()]


def _changed(images: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(images, Tensor):
        return change(images) if images.dim() == 4 else images
    return [change(one[None])[0] for one in images]


def _is_same(scores: Tensor, expected: Tensor) -> bool:
    near = max(_NEAR, torch.finfo(expected.dtype).eps ** 0.5) * float(expected.nan_to_num().abs().max())
    return scores.shape == expected.shape and torch.allclose(scores, expected, rtol=0, atol=near, equal_nan=True)


def _size(image: Tensor) -> Grid:
    return int(image.shape[-2]), int(image.shape[-1])
