"""The result of every class activation map: raw signed maps, where they come from, and the steps to a picture."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.core.cards import boxed, text
from torchhook.core.text import shape_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 16  # maps that a notebook shows, and targets that the text names


@dataclass(frozen=True, eq=False, repr=False)
class Heat:
    """Where a model looked: one map per sample, exactly as the method computed it.

    Nothing is clipped, scaled or resized until you ask for it. Each step returns a new `Heat`, and you choose the order
    of the steps: ``heat.positive().at_input_size().normalized()``. ``heat[3]`` and ``heat[:2]`` select samples.

    Args:
        maps: N×h×w, signed, at the resolution of the layer.
        target: What was explained for each sample: a class, or the name of a function of the output.
        layer: The path of the module whose output the maps are made of.
        call: The index of its call in the pass.
        method: The name of the function that made the maps.
        size: Height and width of the input; None if it was not an image.
        calls: How often the module was called.
        module: The class of the module.

    >>> heat = Heat(torch.tensor([[[-1.0, 3.0]]]), [282], "layer4", 0, "grad_cam", (2, 4))
    >>> heat
    grad_cam of 'layer4': 1×1×2, target 282
    >>> heat.positive().maps
    tensor([[[0., 3.]]])
    >>> heat.normalized().at_input_size().maps.shape
    torch.Size([1, 2, 4])
    """

    maps: Tensor
    target: list[int | str | None]
    layer: str
    call: int
    method: str
    size: tuple[int, int] | None
    calls: int = 1
    module: str = ""

    def __post_init__(self) -> None:
        if self.maps.dim() != 3 or len(self.maps) != len(self.target):
            raise ValueError(
                f"maps must be N×h×w, with N targets, not {shape_of(self.maps)} with {len(self.target)} targets"
            )

    def positive(self) -> Heat:
        """Only the evidence for the target: negative values become zero."""
        return replace(self, maps=self.maps.relu())

    def normalized(self) -> Heat:
        """Each map scaled to [0, 1] by its minimum and maximum; a constant map becomes zeros."""
        low, high = self.maps.amin((1, 2), keepdim=True), self.maps.amax((1, 2), keepdim=True)
        span = high - low
        return replace(self, maps=(self.maps - low) / torch.where(span == 0, torch.ones_like(span), span))

    def at_input_size(self) -> Heat:
        """The maps resized to the size of the input: bilinear, with half-pixel centres (``align_corners=False``)."""
        if self.size is None:
            raise ValueError(
                f"the input of this {self.method} was not an image: there is no size to resize its maps to"
            )
        resized = F.interpolate(self.maps[:, None], self.size, mode="bilinear", align_corners=False)[:, 0]
        return replace(self, maps=resized)

    def overlay(self, image: Any) -> Figure:
        """The maps drawn over their images, side by side; needs matplotlib.

        `image` is an image that `torchhook.plot.cam` accepts, or a batch or list with one per sample.

        >>> heat = Heat(torch.rand(2, 7, 7), [281, 282], "layer4", 0, "grad_cam", (32, 32))
        >>> [ax.get_title() for ax in heat.overlay(torch.rand(2, 3, 32, 32)).axes[:2]]
        ['281', '282']
        """
        from torchhook.plot import cam

        return cam(image, self)

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, which: int | slice) -> Heat:
        if isinstance(which, slice):
            return replace(self, maps=self.maps[which], target=self.target[which])
        number = range(len(self))[which]  # raises IndexError beyond the end
        return self[number : number + 1]

    def __iter__(self) -> Iterator[Heat]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        which = f" (call {self.call} of {self.calls})" if self.calls > 1 else ""
        names = list(dict.fromkeys(str(one) for one in self.target if one is not None))
        more = ", …" if len(names) > _SHOWN else ""
        target = f", target {', '.join(names[:_SHOWN])}{more}" if names else ""
        kind = f" ({self.module})" if self.module else ""
        return f"{self.method} of {self.layer or 'the model'!r}{kind}{which}: {shape_of(self.maps)}{target}"

    def _repr_png_(self) -> bytes | None:
        """The maps alone, each on its own scale; None without matplotlib."""
        if not self.maps.numel():
            return None
        try:
            from torchhook.plot import cam

            png: bytes = cam(self[:_SHOWN])._repr_png_()  # type: ignore[attr-defined]  # a Still has it
        except ImportError:
            return None
        return png

    def _repr_html_(self) -> str:
        png = self._repr_png_()
        picture = "" if png is None else f'<img alt="" src="data:image/png;base64,{b64encode(png).decode()}">'
        return boxed(f"<p>{text(repr(self))}</p>{picture}")
