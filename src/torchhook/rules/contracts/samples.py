"""Contracts about the samples of a batch: they do not talk to each other, and there may be any number of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.recorded_run import everywhere
from torchhook.core.event import Event
from torchhook.core.selection import walk
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import BATCH_NORMS
from torchhook.core.trees import leaves, mapped
from torchhook.rules.contracts.case import Agreement, Case, Given, Variant
from torchhook.rules.contracts.contract import Breach, Note, Skip, contract
from torchhook.rules.contracts.pairings import by_sample, turned
from torchhook.rules.contracts.positions import reading

Shape = tuple[int, ...]

_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_MIXING = ("Attention", "Attn", "Transformer", "Mixer", "Window")
_SIZED = ("img_size", "image_size", "input_size", "input_resolution", "feat_size", "grid_size", "window_size")


@contract(
    "TV102",
    "Reduce and normalise over the dimensions of one sample only; check that no reshape or batch_first=False takes"
    " samples for positions.",
)
def independent(case: Case) -> Iterator[Agreement | Skip | Note]:
    """The result of a sample does not depend on the others in the batch, nor on its place in it."""
    if not case.has_rows:
        yield Skip(case.claims.without_rows)
        return
    if all(case.dim_of(str(name), x, case.count) is None for (name, *_), x in leaves(case.given)):
        yield Skip("no argument has one entry per sample")
        return
    if any(isinstance(module, BATCH_NORMS) for module in case.model.modules()):
        yield Note("batch norms mix samples in train mode, on purpose: checked in eval mode only")
    given, count = (case.given, case.count) if case.count > 1 else (_doubled(case), 2)

    def variant(*numbers: int) -> Variant:
        return case.variant(case.taken(given, numbers, count))

    said = "the result of a sample changes with the other samples of the batch, or with its place among them"
    for number in reversed(range(count)):  # what all get from one sample does not change for that one
        yield Agreement(
            case.variant(given),
            variant(*[number] * count),
            said,
            ("among different samples", "among copies of itself"),
            by_sample(count, count + 1, number, count - 1 - number),
            reference=variant(*range(count), 0),
        )
    yield Agreement(  # copies are sorted in any order
        case.variant(given),
        variant(*reversed(range(count))),
        said,
        ("in the order given", "in reverse order"),
        turned(count, count + 1),
        reference=variant(*range(count), 0),
    )


@contract(
    "TV109",
    "Name the dimensions to squeeze, and compute sizes from the input.",
    severity="warning",
    folds=False,
)
def shapes(case: Case) -> Iterator[Breach | Note]:
    """Batches and sequences of other sizes run, and so do images, if the model says so."""
    if not case.has_rows:
        yield Note(f"other batch sizes: {case.claims.without_rows}")
    else:
        for count in (1, case.count + 1):
            numbers = [number % case.count for number in range(count)]
            variant = case.variant(case.taken(case.given, numbers), case.taken(case.target, numbers))
            yield from _runs(case, variant, f"a batch of {count}" if count > 1 else "a batch of one sample", count)
    shorter, why = _shorter(case)
    if shorter is not None:
        yield from _runs(case, case.variant(shorter), "a sequence that is one shorter")
    else:
        yield Note(f"other lengths: {why}")
    larger, why = _larger(case)
    if larger is not None:
        yield from _runs(case, case.variant(larger), "images that are 32 pixels larger")
    else:
        yield Note(f"other image sizes: {why}")


def _runs(case: Case, variant: Variant, what: str, count: int = 0) -> Iterator[Breach]:
    """Broken if the model raises, or if its result loses a dimension. `count` is the number of samples, if another."""
    usual, found = _Shapes(case, case.plain), _Shapes(case, variant)
    both = [path for path in found.outputs if path in usual.outputs]
    lost = next((path for path in both if len(usual.outputs[path]) != len(found.outputs[path])), None)
    if lost is not None and len(usual.inputs[lost]) != len(found.inputs[lost]):
        lost = lost.rpartition(".")[0]  # it was lost before, in the code around
    if found.error is not None:
        fixed = next((path for path in both if count and _is_fixed(usual, found, path, (case.count, count))), None)
        said = f"it raises {type(found.error).__name__} for {what}: {str(found.error).partition(chr(10))[0]:.200}"
        yield Breach(said, next(path for path in (lost, fixed, found.running[-1]) if path is not None))
    elif len(usual.outputs[""]) != len(found.outputs[""]):
        before, after = ("×".join(map(str, run.outputs[""])) or "a scalar" for run in (usual, found))
        yield Breach(f"its result loses a dimension: {after} for {what}, {before} for {case.count} samples", lost or "")


class _Shapes:
    """A run: the shapes that each module takes and returns, and what it raised, if it did."""

    def __init__(self, case: Case, variant: Variant) -> None:
        self.inputs: dict[str, Shape] = {}
        self.outputs: dict[str, Shape] = {}
        self.running = [""]  # the calls in progress
        self.error: Exception | None = None
        where = everywhere(case.model)
        try:
            case.output(variant, [Tap(where, self._enter, "input"), Tap(where, self._leave)])
        except Exception as error:  # whatever the model raises
            self.error = error

    def _enter(self, event: Event) -> None:
        self.running.append(event.path)
        self.inputs.setdefault(event.path, _shape((event.live, event.kwargs)))

    def _leave(self, event: Event) -> None:
        self.running.pop()
        self.outputs.setdefault(event.path, _shape(event.live))


def _shape(value: Any) -> Shape:
    return next((tuple(x.shape) for _, x in leaves(value) if x.dim()), ())


def _is_fixed(usual: _Shapes, found: _Shapes, path: str, counts: tuple[int, int]) -> bool:
    """Whether a module takes another number of samples than usual, but returns as many as usual."""
    taken = usual.inputs[path][:1] + found.inputs[path][:1]
    return taken == counts and usual.outputs[path][:1] == found.outputs[path][:1] == counts[:1]


def _shorter(case: Case) -> tuple[Given | None, str]:
    sequence = reading(case)
    if sequence is None:
        return None, "it does not say that it takes sequences"
    if case.claims.has_one_length:
        return None, "its config fixes the length"
    if sequence.length < 2:
        return None, "the sequence has one position only"
    return sequence.cut(0, sequence.length - 1), ""


def _larger(case: Case) -> tuple[Given | None, str]:
    """The arguments with larger images, if the model averages over them and knows no size."""
    images = {name: x for name, x in case.given.items() if isinstance(x, Tensor) and x.dim() == 4}
    modules = [module for _, module in walk(case.model)]
    pools = any(isinstance(module, _POOLS) for module in modules)
    if not images or not pools:
        return None, "it does not say that it takes any"
    mixing = any(word in type(module).__name__ for module in modules for word in _MIXING)
    if mixing or any(hasattr(module, name) for module in modules for name in _SIZED):
        return None, "its parts may be made for one size"
    if any("pos" in name for name, _ in case.model.named_parameters()):
        return None, "it learns positions"
    larger = {name: nn.functional.pad(x, (0, 32, 0, 32)) for name, x in images.items()}
    return {**{name: x for name, x in case.given.items() if "label" not in name}, **larger}, ""


def _doubled(case: Case) -> Given:
    """The arguments with a second sample, made from the first one."""

    def double(name: str, x: Tensor) -> Tensor:
        dim, last = case.dim_of(name, x, 1), x.dim() - 1
        return x if dim is None else torch.cat([x, x.flip(last) if last != dim else x], dim)

    return {name: mapped(partial(double, name), value) for name, value in case.given.items()}
