"""Finds the op that first produced a nonfinite value from finite operands, and its source line.

A `Tracer` inspects what every op reads and writes. It follows NaN and Inf through the memory that holds them, so an op
whose result the model masks later is not blamed.
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
    WRAPPED_CALL_CODE,
    DispatchMode,
    current_node,
    is_in_place,
    sequence_number,
    sequence_number_of,
    storage_identity,
)
from torchhook.core.trees import leaves
from torchhook.rules.origin.calls import BAD, bits_in, bits_of, marks, merged

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_LINE = re.compile(r'File "(.+?)", line (\d+)')
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class SourceLine(NamedTuple):
    """A line of source code."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        return f"{Path(self.file).name}:{self.number}" + (f": {code}" if code else "")


class Operand(NamedTuple):
    """A tensor that an op was given; `role` and `name` are set if it existed before the call."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    bits: int
    source: TracedOp | None  # the op that wrote the nonfinite values
    role: str
    name: str


class Where(NamedTuple):
    """The module whose forward runs an op, the number of that call, and the child that ran before the op."""

    module: nn.Module
    number: int
    after: nn.Module | None


@dataclass(eq=False)
class TracedOp:
    """An op that wrote nonfinite values."""

    number: int
    op: str
    operands: list[Operand]
    bits: int  # which nonfinite values it wrote
    fills: bool  # whether it was asked to write -Inf, as masking does
    place: SourceLine | None
    where: Where | None
    node: str = ""  # the autograd node, in a backward

    def __post_init__(self) -> None:
        """Determine from the operands where the nonfinite values began."""
        bad = [known for known in self.operands if known.bits & BAD or (known.source and known.source.node)]
        began = [known.source.cause for known in bad if known.source]
        self.culprit = bad[0] if bad and not began else None
        # The op that computed the -Inf, None if (some of) it is a mask.
        self.computed = first(began) if bad else self._computed()
        self.cause: TracedOp = self.computed or self

    def _computed(self) -> TracedOp | None:
        below = [known.source.computed if known.source else None for known in self.operands if known.bits]
        if self.fills or None in below:
            return None
        return first(below) or self


class Tracer(DispatchMode):
    """Inspects every op; `known` has the roles and names of tensors that existed before, by their memory."""

    def __init__(self, originals: Mapping[int, nn.Module], known: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.originals = originals  # the modules, by the id of their twin
        self.known = known
        self.writers: dict[int, TracedOp] = {}  # the op that wrote nonfinite values, by memory
        self.blank: set[int] = set()  # memory that was allocated and not yet written
        self.backward = False  # set by the caller: a forward may run inside another backward
        self.number = 0
        self.stack: list[tuple[FrameType, nn.Module, int]] = []  # the calls in progress
        self.begun: Counter[nn.Module] = Counter()  # calls so far, by module
        self.latest: dict[nn.Module, nn.Module] = {}  # the child that ran last, by module
        self.where: dict[int, Where] = {}  # by the sequence number of the autograd node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        operands = [seen for _, tensor in given if (seen := self.seen(tensor))]  # before the op can overwrite them
        result = func(*args, **kwargs)
        name = ".".join(str(func).split(".")[:2])  # without the overload
        written = [tensor for _, tensor in leaves(result)]
        if name.rpartition(".")[2] in _EMPTY:  # uninitialised memory may hold anything
            self.blank.update(memory_of(tensor.zero_()) for tensor in written)
        elif is_in_place(func):
            self.blank -= {*map(memory_of, written)}
        self.number += 1
        self._follow_modules()
        broken = {memory_of(tensor): bits for tensor in written if (bits := bits_in(tensor))}
        if broken:
            op = self._traced(name, operands, merged(broken.values()), (*args, *kwargs.values()))
            self.writers.update(dict.fromkeys(broken, op))
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch
        self.stack.clear()  # frames keep their local variables alive

    def seen(self, tensor: Tensor) -> Operand | None:
        """`tensor` as it is now; None if its values cannot be NaN or Inf."""
        extremes = [mark.item() for mark in marks(tensor)]
        if not extremes:
            return None
        low, high = (math.nan if value != value else value for value in extremes)  # one NaN object equals itself
        memory, bits, dtype = memory_of(tensor), bits_of(low, high), str(tensor.dtype).removeprefix("torch.")
        source = self.writers.get(memory) if bits else None
        return Operand(tuple(tensor.shape), dtype, low, high, bits, source, *self.known.get(memory, ("", "")))

    def _traced(self, name: str, operands: list[Operand], bits: int, arguments: tuple[Any, ...]) -> TracedOp:
        fills = any(isinstance(value, float) and value == -torch.inf for value in arguments)
        node: Any = current_node() if self.backward else None
        known = self.number, name, operands, bits, fills
        if node is None:
            return TracedOp(*known, _most_telling(_lines_to_here()), self._here())
        text = "".join(node.metadata.get("traceback_", ()))
        lines = [SourceLine(file, int(number)) for file, number in _LINE.findall(text)]
        number = sequence_number_of(node)
        where = None if number is None else self.where.get(number)
        return TracedOp(*known, _most_telling(lines[::-1]), where, node.name())

    def _here(self) -> Where | None:
        if not self.stack:
            return None
        _, module, number = self.stack[-1]
        return Where(module, number, self.latest.get(module))

    def _follow_modules(self) -> None:
        """Keep track of the module whose forward is running, and of the child that ran last."""
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is WRAPPED_CALL_CODE and id(frame.f_locals["self"]) in self.originals:
                frames.insert(0, frame)
            frame = frame.f_back
        known = {id(frame): (module, number) for frame, module, number in self.stack}
        self.stack = [(frame, *(known.get(id(frame)) or self._begun(frame))) for frame in frames]
        for (_, outer, _), (_, inner, _) in pairwise(self.stack):
            self.latest[outer] = inner
        if (here := self._here()) is not None:  # the op that runs right after its node was created
            self.where.setdefault(sequence_number() - 1, here)

    def _begun(self, frame: FrameType) -> tuple[nn.Module, int]:
        module = self.originals[id(frame.f_locals["self"])]
        self.begun[module] += 1
        self.latest.pop(module, None)
        return module, self.begun[module] - 1


def first(ops: Iterable[TracedOp | None]) -> TracedOp | None:
    """The op that ran first."""
    return min(filter(None, ops), key=lambda op: op.number, default=None)


def memory_of(tensor: Tensor) -> int:
    """An id of the memory of a tensor: equal for tensors that share it."""
    try:
        return int(storage_identity(tensor.untyped_storage()))
    except RuntimeError:  # sparse tensors and the like have no storage
        return id(tensor)


def _lines_to_here() -> list[SourceLine]:
    """The source lines on the stack, innermost first."""
    lines: list[SourceLine] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":  # of a mode, which is not part of the model's code
            lines.append(SourceLine(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


def _most_telling(lines: list[SourceLine]) -> SourceLine | None:
    """The innermost line of the user's code, or else of one of torch's modules."""
    lines = list(takewhile(lambda line: not line.file.startswith(_OURS), lines))
    users = [line for line in lines if not line.file.startswith(_TORCH)]
    modules = [line for line in lines if "modules" in line.file and not line.file.endswith("module.py")]
    return next(iter(users or modules or lines), None)
