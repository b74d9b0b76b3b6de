"""What an op makes of what it is given: which one first made of finite operands what is not finite, on which line.

A `Tracer` looks at what every op reads and writes. Where NaN or Inf began is settled as they arise, by following the
memory that they lie in, so that what a model hides again is blamed for nothing.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.torch_internals import (
    CALL_CODE,
    DispatchMode,
    current_node,
    sequence_number,
    sequence_number_of,
    storage_identity,
)
from torchhook.core.trees import leaves
from torchhook.rules.origin.calls import BAD, bits_in, bits_of, marks, merged

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_PLACE = re.compile(r'File "(.+?)", line (\d+)')
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Place(NamedTuple):
    """A line of source."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f"{Path(self.file).name}:{self.number}" + (f": {code}" if code else "")


class Operand(NamedTuple):
    """A tensor that an op was given; `role` and `name` are of one that was there before the call."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    bits: int
    source: Step | None  # the op that made it so
    role: str
    name: str


class Where(NamedTuple):
    """In the forward of which module an op is: in which call of it, and after which of its children."""

    module: nn.Module
    number: int
    after: nn.Module | None


@dataclass(eq=False)
class Step:
    """An op that wrote something that is not finite."""

    number: int
    op: str
    operands: list[Operand]
    bits: int  # what it wrote
    fills: bool  # whether it was told to write -Inf, as one masks
    place: Place | None
    where: Where | None
    node: str = ""  # of a backward

    def __post_init__(self) -> None:
        """Settle where it began: what is known of the operands says it."""
        bad = [known for known in self.operands if known.bits & BAD or (known.source and known.source.node)]
        began = [known.source.cause for known in bad if known.source]
        self.culprit = bad[0] if bad and not began else None
        # The op that computed the -Inf, None if (some of) it is a mask.
        self.computed = first(began) if bad else self._computed()
        self.cause: Step = self.computed or self

    def _computed(self) -> Step | None:
        below = [known.source.computed if known.source else None for known in self.operands if known.bits]
        if self.fills or None in below:
            return None
        return first(below) or self


class Tracer(DispatchMode):
    """Looks at every op; `known` are the roles and names of the tensors that come from outside, by their memory."""

    def __init__(self, originals: Mapping[int, nn.Module], known: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.originals = originals  # the modules, by the ids of their twins
        self.known = known
        self.writers: dict[int, Step] = {}  # who wrote what is not finite, by memory
        self.blank: set[int] = set()  # memory to which nothing was written
        self.backward = False  # a forward may run inside of some other backward
        self.number = 0
        self.stack: list[tuple[FrameType, nn.Module, int]] = []  # the calls under way
        self.begun: Counter[nn.Module] = Counter()  # how many of each module there were
        self.latest: dict[nn.Module, nn.Module] = {}  # which child ran last
        self.where: dict[int, Where] = {}  # by the number of the node of the graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        operands = [seen for _, tensor in given if (seen := self.seen(tensor))]  # before it may write to them
        result = func(*args, **kwargs)
        name = ".".join(str(func).split(".")[:2])  # without the overload
        written = [tensor for _, tensor in leaves(result)]
        if name.rpartition(".")[2] in _EMPTY:  # what lies in memory by chance is nobody's fault
            self.blank.update(memory_of(tensor.zero_()) for tensor in written)
        elif func._schema.is_mutable:
            self.blank -= {*map(memory_of, written)}
        self.number += 1
        self._follow_modules()
        broken = {memory_of(tensor): bits for tensor in written if (bits := bits_in(tensor))}
        if broken:
            step = self._step(name, operands, merged(broken.values()), (*args, *kwargs.values()))
            self.writers.update(dict.fromkeys(broken, step))
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch
        self.stack.clear()  # frames hold all that was computed in them

    def seen(self, tensor: Tensor) -> Operand | None:
        """`tensor` as it is now, None if nothing in it could be NaN or Inf."""
        extremes = [mark.item() for mark in marks(tensor)]
        if not extremes:
            return None
        low, high = (math.nan if value != value else value for value in extremes)  # one NaN, which equals itself
        memory, bits, dtype = memory_of(tensor), bits_of(low, high), str(tensor.dtype).removeprefix("torch.")
        source = self.writers.get(memory) if bits else None
        return Operand(tuple(tensor.shape), dtype, low, high, bits, source, *self.known.get(memory, ("", "")))

    def _step(self, name: str, operands: list[Operand], bits: int, arguments: tuple[Any, ...]) -> Step:
        fills = any(isinstance(value, float) and value == -torch.inf for value in arguments)
        node: Any = current_node() if self.backward else None
        step = self.number, name, operands, bits, fills
        if node is None:
            return Step(*step, _chosen(_frames()), self._here())
        text = "".join(node.metadata.get("traceback_", ()))
        places = [Place(file, int(number)) for file, number in _PLACE.findall(text)]
        return Step(*step, _chosen(places[::-1]), self.where.get(sequence_number_of(node) or -1), node.name())

    def _here(self) -> Where | None:
        if not self.stack:
            return None
        _, module, number = self.stack[-1]
        return Where(module, number, self.latest.get(module))

    def _follow_modules(self) -> None:
        """Note whose forward is running, and which of its children ran before."""
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is CALL_CODE and id(frame.f_locals["self"]) in self.originals:
                frames.insert(0, frame)
            frame = frame.f_back
        known = {id(frame): (module, number) for frame, module, number in self.stack}
        self.stack = [(frame, *(known.get(id(frame)) or self._begun(frame))) for frame in frames]
        for (_, outer, _), (_, inner, _) in pairwise(self.stack):
            self.latest[outer] = inner
        if (here := self._here()) is not None:  # the op that comes after its node was made is its op
            self.where.setdefault(sequence_number() - 1, here)

    def _begun(self, frame: FrameType) -> tuple[nn.Module, int]:
        module = self.originals[id(frame.f_locals["self"])]
        self.begun[module] += 1
        self.latest.pop(module, None)
        return module, self.begun[module] - 1


def first(steps: Iterable[Step | None]) -> Step | None:
    """The one that ran before the others."""
    return min(filter(None, steps), key=lambda step: step.number, default=None)


def memory_of(tensor: Tensor) -> int:
    """What tells whether two tensors share memory."""
    try:
        return int(storage_identity(tensor.untyped_storage()))
    except RuntimeError:  # sparse and the like have none
        return id(tensor)


def _frames() -> list[Place]:
    """The lines that led here from the twin's call, the innermost first."""
    places: list[Place] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":  # a mode that looks on is no part of the way
            places.append(Place(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places


def _chosen(places: list[Place]) -> Place | None:
    """The innermost line of a user's, or that of torch's module if there is none."""
    places = list(takewhile(lambda place: not place.file.startswith(_OURS), places))
    users = [place for place in places if not place.file.startswith(_TORCH)]
    modules = [place for place in places if "modules" in place.file and not place.file.endswith("module.py")]
    return next(iter(users or modules or places), None)
