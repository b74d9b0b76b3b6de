"""Which arguments of a model have one row per sample, so that it can run on any selection of the samples.

The images do. Another argument may have as many rows by chance: as many prompts as images, or one scale for each of
three channels with three images. Such an argument is indexed only if the scores of the samples change without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchhook.core.trees import Address, Arguments, leaves, put, taken
from torchhook.explain.token_grid import Grid, ImageLayout

_NEAR = 5e-3  # by how much of the largest score the batch size may change the scores


@dataclass(frozen=True, eq=False)
class BatchedArguments:
    """The arguments of a model, and which of them have one row per sample.

    >>> images, prompts = torch.ones(2, 3, 32, 48), torch.ones(2, 77)
    >>> batched = BatchedArguments.of(Arguments.of({"prompts": prompts, "images": images}))
    >>> batched.layout(), batched.others
    (ImageLayout(samples=2, size=(32, 48), grids=()), ((1, 'prompts'),))
    """

    given: Arguments
    images: Address | None  # a batch or a list of images; without images, the first argument that has rows
    others: tuple[Address, ...]  # the other arguments to index by sample

    @staticmethod
    def of(given: Arguments) -> BatchedArguments:
        """With every argument that may have one row per sample: all that are as long as the batch of images."""
        batches = _batches(given)
        images = next((address for is_it in _KINDS for address in batches if is_it(address, batches[address])), None)
        count = None if images is None else len(batches[images])
        others = (address for address, item in batches.items() if address != images and len(item) == count)
        return BatchedArguments(given, images, tuple(others))

    def layout(self) -> ImageLayout:
        """The number of samples and the size of the images."""
        if self.images is None:
            return ImageLayout(None, None)
        batch = taken(self.given, self.images)
        sizes = {_size(batch)} if _is_tensor(batch, 4) else {_size(one) for one in batch if one.dim() == 3}
        return ImageLayout(len(batch), sizes.pop() if len(sizes) == 1 else None)

    def picked(self, rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Arguments:
        """The samples with the indices `rows`; `change` is applied to their images, samples × channels × h × w.

        >>> BatchedArguments.of(Arguments.of(torch.arange(3.0))).picked(torch.tensor([2, 0, 2])).args
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
        """The first sample alone; None if it is the only one, or if other arguments may have to be indexed as well."""
        is_plain = self.images is not None and not self.others and len(taken(self.given, self.images)) > 1
        return self.picked(torch.zeros(1, dtype=torch.long)) if is_plain else None

    def apart(
        self, run: Callable[[Arguments], Any], score: Callable[[Any, Tensor | None], Tensor], output: Any
    ) -> BatchedArguments:
        """The same, with only those `others` that do have one row per sample; `output` is that of the whole batch.

        To find them, the samples are run in another order, one of them twice: the score of each must stay the same.
        """
        if self.images is None or not self.others:
            return self
        count = len(taken(self.given, self.images))
        rows = torch.tensor([*reversed(range(count)), 0])
        expected = score(output, torch.arange(count))
        expected = expected[rows.to(expected.device)]
        fault = None
        for others in _choices(self.others):
            some = replace(self, others=others)
            try:
                if _is_same(score(run(some.picked(rows)), rows), expected):
                    return some
            except Exception as error:  # a model may raise anything for arguments that do not fit
                fault = error
        names = ", ".join(repr(address[-1]) for address in self.others)
        raise ValueError(
            "the samples cannot be run in another order or number: their scores change, whether or not the arguments"
            f" {names} are taken to have one row per sample; pass the samples one by one"
        ) from fault


def _batches(given: Arguments) -> dict[Address, Any]:
    """All tensors with a first dimension, and lists of tensors that are not batches themselves, by address."""
    found: dict[Address, Any] = {}
    for address, tensor in leaves(given):
        owner = taken(given, address[:-1])
        if len(address) > 2 and _is_list(owner):  # an address of length two is an argument
            found[address[:-1]] = owner
        elif tensor.dim():
            found[address] = tensor
    return found


def _is_list(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and all(isinstance(one, Tensor) and one.dim() != 4 for one in item)


def _is_tensor(item: Any, dims: int) -> bool:
    return isinstance(item, Tensor) and item.dim() == dims


_KINDS: tuple[Callable[[Address, Any], bool], ...] = (  # what the images may be, the likeliest first
    lambda address, item: _is_tensor(item, 4) and item.is_floating_point(),
    lambda address, item: _is_tensor(item, 4),
    lambda address, item: not isinstance(item, Tensor) and all(_is_tensor(one, 3) for one in item),
    lambda address, item: len(address) == 2,
)


def _choices(others: tuple[Address, ...]) -> Iterable[tuple[Address, ...]]:
    """Which arguments may have one row per sample: none, all, one, all but one."""
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
