"""What a teacher-forced run shows at one location: two tensors and what rounding explains, or two shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.captures.agreement.recorded_run import Location
from torchhook.captures.agreement.rounding import TINY, Gap, difference, peak_of, rms, unexplained

_FAR = 8.0
_NARROW = 1e-4  # kernels sum dtypes with a larger machine epsilon in a wider dtype, others in themselves

Shapes = list[tuple[int, ...] | None]
"""The shapes of several tensors; None for nested ones."""


class Slack(NamedTuple):
    """How many rounding errors are allowed: for a tensor as a whole, for one element, and of measured noise."""

    whole: float
    element: float
    noise: float


_TIGHT = Slack(2.0, 8.0, 2.0)
_LOOSE = Slack(8.0, 32.0, 4.0)  # for what is summed in its own dtype


@dataclass(eq=False)
class ComparedTensor:
    """A tensor of the student next to the teacher's, and how far noise moves it.

    It diverges if its difference is more than rounding explains: the rounding inside its own module (a few machine
    epsilons, see `Slack`), plus what noise in the module's input does to it, if that was measured.
    """

    location: Location
    teachers: Location
    where: str  # the path of the module whose forward was running
    gap: Gap
    epsilon: float  # machine epsilon of the coarsest dtype involved
    floor: float  # an absolute error that rounding may make of numbers close to zero
    growth: float  # factor by which long sums exceed the error of one rounding
    tensors: tuple[Tensor, Tensor]  # the teacher's and the student's
    sure: bool = True  # whether the two locations are sure to match
    reach: Tensor | None = None  # how far noise has moved each element; None if not measured
    reshaped: bool = False  # whether noise has changed the shape
    excused: bool = False  # whether it depends on something that noise reshapes
    carried: float = 0.0  # the difference (RMS) that comes from what it was computed from, if that differs already

    def note_moved(self, tensor: Tensor) -> None:
        """Remember how far noise has moved each element, given what the student had in a run with noise."""
        moved = difference(self.tensors[1], tensor.detach())
        self.reach = moved if self.reach is None else torch.maximum(self.reach, moved)

    @property
    def explained(self) -> float:
        """How large a difference (RMS) rounding explains."""
        moved = 0.0 if self.reach is None else rms(self.reach)
        return self._allowed + self.carried + self._slack.noise * moved

    @property
    def diverges(self) -> bool:
        """Whether rounding fails to explain the difference, of the tensor as a whole or of a single element."""
        if self.excused:
            return False
        if self.reach is None:
            is_far = not self.carried and self.gap.peak > self._allowed_peak  # where it was carried to is not known
            return self.gap.rms > self._allowed + self.carried or is_far
        reach = self._slack.noise * self.reach
        rest, rest_peak = unexplained(*self.tensors, reach, self.gap.scale)
        explained_peak = self._allowed_peak + peak_of(reach, self.tensors[0], self.gap.scale)
        return (self.gap.rms > self.explained and rest > self._allowed) or (
            self.gap.peak > explained_peak and rest_peak > self._allowed_peak
        )

    @property
    def is_beyond_doubt(self) -> bool:
        """Whether half of the elements are off by far more than any noise so far has moved one of them."""
        if self.reach is None:
            return False
        explained = self._slack.noise * float(self.reach.max()) + self._slack.element * self.epsilon * self.gap.scale
        return float(difference(*self.tensors).median()) > _FAR * (explained + self._slack.element * self.floor)

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient."""
        return "grad" in self.location.site.port

    @property
    def _allowed(self) -> float:
        """The difference (RMS) that rounding inside the module may make."""
        return self._slack.whole * (self.epsilon * self.gap.scale + self.floor)

    @property
    def _allowed_peak(self) -> float:
        """The same for one element, relative as in `Gap.peak`."""
        return self._slack.element * (self.epsilon + self.floor / (self.gap.scale + TINY))

    @property
    def _slack(self) -> Slack:
        if self.epsilon > _NARROW:
            return _LOOSE if self.location.site.port == "param_grad" else _TIGHT
        growth = max(1.0, self.growth)
        return Slack(_LOOSE.whole * growth, _LOOSE.element * growth, _LOOSE.noise * math.sqrt(growth))


@dataclass(eq=False)
class ShapeMismatch:
    """Tensors that cannot be compared, because their number or their shapes differ."""

    location: Location
    teachers: Location
    where: str  # the path of the module whose forward was running
    text: str  # both shapes in words
    before: int  # how many tensors were compared before
    shapes: tuple[Shapes, Shapes]  # the teacher's and the student's
    same_kind: bool = True  # whether the modules are of one class, which takes the same arguments
    excused: bool = False

    @property
    def has_effect(self) -> bool:
        """Whether it must change what follows, unlike an extra argument that only one model passes."""
        return self.location.site.port == "output" or len(self.shapes[0]) == len(self.shapes[1])


def in_words(shapes: Shapes) -> str:
    """Some shapes in one short line.

    >>> in_words([(2, 3)]), in_words([(2, 3), ()])
    ('(2×3)', '(2×3, scalar)')
    """
    words = ["nested" if shape is None else "×".join(map(str, shape)) or "scalar" for shape in shapes]
    return f"({', '.join(words)})"


def size_change(a: Shapes, b: Shapes) -> float:
    """The largest difference between two sizes; infinite if the number of tensors or of dimensions differs.

    >>> size_change([(4, 8)], [(6, 8)])
    2
    """
    x, y = ([shape or () for shape in shapes] for shapes in (a, b))
    if [len(shape) for shape in x] != [len(shape) for shape in y]:
        return math.inf
    pairs = zip(x, y, strict=True)
    return max((abs(m - n) for one, other in pairs for m, n in zip(one, other, strict=True)), default=0)
