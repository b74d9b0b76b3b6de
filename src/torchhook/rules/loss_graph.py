"""Takes a loss apart by its autograd graph: what it compares, and what was done to the output just before.

A loss that is written by hand, and a softmax that is called as a function, show there as well as those that are
modules. The graph keeps tensors only until its backward, so it has to be read before.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.torch_internals import saved_by
from torchhook.core.transfer import sent_home

_OURS = f'"{Path(__file__).parents[1]}{os.sep}'  # as it is in a traceback
_MOST = 400  # nodes to look at
_NODES = 10_000  # of a graph that we walk for its leaves
_PLUMBING = (
    "View|UnsafeView|Reshape|Squeeze|Unsqueeze|Select|Slice|Index|Transpose|Permute|T|Clone|ToCopy|Expand|Alias|Copy"
    "|SplitWithSizes|Split|Chunk|Unbind|Narrow|Gather|Contiguous|AsStrided|MaskedSelect"
)
_COMBINING = "Neg|Mean|Sum|Div|Mul|Add|Sub|Rsub|MaskedFill|Where|Stack|Cat|Logsumexp|NanToNum|Clamp|Exp|Dot"
_LOSSES = {
    "NllLoss": "nll",
    "NllLoss2D": "nll",
    "BinaryCrossEntropy": "binary",
    "BinaryCrossEntropyWithLogits": "binary-logits",
    "MseLoss": "squared",
    "SmoothL1Loss": "squared",
    "HuberLoss": "squared",
}
_SQUASHING = {
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Relu": "relu",
    "LogSigmoid": "log_sigmoid",
    "Log": "log",
}
_WEIGHTS = "Addmm|Mm|Bmm|Convolution|ThnnConv2D|Addbmm|Baddbmm|MkldnnConvolution"


@dataclass(frozen=True)
class Extent:
    """The values of a tensor in a few numbers."""

    low: float
    high: float
    mean: float
    std: float
    count: int

    def __or__(self, other: Extent) -> Extent:
        """The range of the values of both."""
        count = self.count + other.count
        mean = (self.mean * self.count + other.mean * other.count) / count
        squares = [(one.std**2 + one.mean**2) * one.count for one in (self, other)]
        spread = math.sqrt(max(sum(squares) / count - mean**2, 0.0))
        return Extent(min(self.low, other.low), max(self.high, other.high), mean, spread, count)


@dataclass(frozen=True)
class LossTerm:
    """One comparison of outputs and targets inside a loss.

    `kind` is ``"cross-entropy"``, ``"nll"``, ``"binary"``, ``"binary-logits"``, ``"squared"``, ``"absolute"`` or
    ``"log"`` (a log by hand); `squash`, the function that was applied to the output just before, if any.
    """

    kind: str
    squash: str = ""
    units: int = 0  # over which a softmax runs
    classes: int = 0  # of a cross entropy
    output: Extent | None = None  # what the loss is given; for a log, its argument
    target: Extent | None = None
    sums: float | None = None  # how far the sums of the targets' rows are from one
    is_over_samples: bool = False  # whether a softmax runs over the batch
    reshaped: str = ""  # sizes before and after a reshape that swaps two of them
    broadcast: str = ""  # shapes of output and target, if each output is compared with each target
    linear: int = 0  # weight layers below, if nothing but weight layers leads to the inputs
    site: str = ""  # of the squashing function, or the module before it
    line: str = ""  # where it was called

    @property
    def chance(self) -> float:
        """The loss of the best constant prediction, about; NaN if it is unknown.

        >>> LossTerm("cross-entropy", classes=10).chance
        2.302585092994046
        """
        if self.kind == "cross-entropy" and self.classes:
            return math.log(self.classes)
        if self.target is None:
            return math.nan
        if self.kind in ("binary", "binary-logits"):
            share = min(max(self.target.mean, 0.0), 1.0)
            return -sum(p * math.log(p) for p in (share, 1 - share) if p)
        return {"squared": self.target.std**2, "absolute": 0.8 * self.target.std}.get(self.kind, math.nan)

    def __or__(self, other: LossTerm) -> LossTerm:
        """The same comparison in several steps."""
        output = self.output | other.output if self.output and other.output else self.output or other.output
        target = self.target | other.target if self.target and other.target else self.target or other.target
        return replace(self, output=output, target=target, sums=max(self.sums or 0.0, other.sums or 0.0))


def merged(terms: Iterable[Sequence[LossTerm]]) -> list[LossTerm]:
    """The comparisons of several steps, each over all of them."""
    found: dict[tuple[Any, ...], LossTerm] = {}
    for step in terms:
        for number, term in enumerate(step):
            key = number, term.kind, term.squash
            found[key] = found[key] | term if key in found else term
    return list(found.values())


def loss_terms(loss: Tensor, makers: Mapping[Any, str] | None = None, target: Any = None) -> list[LossTerm]:
    """The comparisons in a loss. This waits for the device.

    `makers` has the path of the module that made each node of the graph; `target` is used where the graph has none.

    >>> layer = torch.nn.Linear(2, 3)
    >>> output = layer(torch.ones(4, 2)).softmax(1)
    >>> [term] = loss_terms(torch.nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 0])))
    >>> term.kind, term.squash, term.target.high
    ('cross-entropy', 'softmax', 2.0)
    """
    return terms_arriving(loss, makers, target)()


def terms_arriving(
    loss: Tensor, makers: Mapping[Any, str] | None = None, target: Any = None
) -> Callable[[], list[LossTerm]]:
    """As `loss_terms`, but only calling the result waits for the device."""
    drafts = [_draft(node, makers or {}) for node in _losses(loss.grad_fn)]
    if len(drafts) == 1 and drafts[0].target is None and isinstance(target, Tensor):
        drafts = [drafts[0]._replace(target=target)]
    numbers = [_numbers(values, loss.device) for draft in drafts for values in (draft.output, draft.target)]
    arrived = sent_home(torch.stack(numbers)) if numbers else None

    def read() -> list[LossTerm]:
        rows = [] if arrived is None else arrived().tolist()
        return [_finished(draft, *rows[2 * n : 2 * n + 2]) for n, draft in enumerate(drafts)]

    return read


def leaves_of(losses: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that require a gradient and on which the losses depend, those nearest to the losses first.

    >>> x, y = (torch.full((2,), number, requires_grad=True) for number in (1.0, 2.0))
    >>> [leaf.mean().item() for leaf in leaves_of([(x * y.exp()).sum()])]
    [1.0, 2.0]
    """
    nodes = dict.fromkeys(loss.grad_fn for loss in losses if loss.grad_fn is not None)
    new = list(nodes)
    while new and len(nodes) < _NODES:
        after = dict.fromkeys(below for node in new for below, _ in node.next_functions if below is not None)
        new = [node for node in after if node not in nodes]
        nodes |= dict.fromkeys(new)
    return [node.variable for node in nodes if hasattr(node, "variable")]


class _Draft(NamedTuple):
    """A comparison whose numbers are still tensors."""

    term: LossTerm
    output: Tensor | None
    target: Tensor | None


@torch.no_grad()
def _numbers(values: Tensor | None, device: torch.device) -> Tensor:
    """The smallest and largest value, mean, deviation, and how far the sums of rows are from one; NaN for no values."""
    if values is None or not values.numel():
        return torch.full((5,), math.nan, dtype=torch.float64, device=device)
    given = values.detach().double()
    rows = (given.flatten(1).sum(1) - 1).abs().max() if given.dim() > 1 else given.new_zeros(())
    return torch.stack([given.min(), given.max(), given.mean(), given.std(correction=0), rows])


def _finished(draft: _Draft, output: Sequence[float], target: Sequence[float]) -> LossTerm:
    ranges = [
        None if values is None or not values.numel() else Extent(row[0], row[1], row[2], row[3], values.numel())
        for values, row in ((draft.output, output), (draft.target, target))
    ]
    return replace(draft.term, output=ranges[0], target=ranges[1], sums=target[4] if ranges[1] else None)


def _losses(top: Any) -> Iterator[Any]:
    """The nodes at which outputs meet targets, or logs are taken by hand."""
    left: list[Any] = [top]
    seen: set[Any] = set()
    while left and len(seen) < _MOST:
        node = left.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = _name(node)
        if name in _LOSSES or name == "Log" or (name in ("Abs", "Pow") and _is(_below(node), "Sub")):
            yield node
        elif name == "LogSoftmax":
            yield node  # of a cross entropy with soft targets
        elif re.fullmatch(f"{_PLUMBING}|{_COMBINING}", name):
            left += [following for following, _ in node.next_functions]


def _draft(node: Any, makers: Mapping[Any, str]) -> _Draft:
    name = _name(node)
    kind = _LOSSES.get(name, {"Log": "log", "Abs": "absolute", "Pow": "squared"}.get(name, "cross-entropy"))
    output, target = _saved(node, "self"), _saved(node, "target")
    before = node
    if name in ("Abs", "Pow"):
        before, output = _below(node), None  # what is saved is the difference
    last = _through(before)
    is_over_samples = _is_over_samples(_below(before))
    classes = 0
    if kind == "cross-entropy":
        classes, output = _units(node), None
    elif kind == "nll" and _is(last, "LogSoftmax"):
        kind, classes, last, output = "cross-entropy", _units(last), _through(last), None
    elif kind == "nll" and _is(last, "Log"):
        kind, output, last = "log", _saved(last, "self"), _through(last)
    # log(1 - p) is like log p, and p may be normalised; a clamp keeps a loss from being infinite
    while _is(last, {"log": "Rsub|Clamp|Div", "binary": "Clamp"}.get(kind, "")):
        last = _through(last)
    squash = _SQUASHING.get(_name(last), "")
    if squash and kind != "log":
        output = _saved(last, "result")
    term = LossTerm(
        kind=kind,
        squash=squash,
        units=_units(last) if squash in ("softmax", "log_softmax") else 0,
        classes=classes,
        is_over_samples=is_over_samples,
        reshaped=_reshaped(before if kind == "cross-entropy" else None),
        broadcast=_broadcast(node, target),
        linear=_linear(last),
        site=_site(last, makers),
        line=_line(last),
    )
    return _Draft(term, output, target)


def _name(node: Any) -> str:
    """The name of the operation: ``"Addmm"`` for ``AddmmBackward0``."""
    return "" if node is None else re.sub(r"Backward\d*$", "", node.name())


def _is(node: Any, names: str) -> bool:
    return re.fullmatch(names, _name(node)) is not None


def _below(node: Any) -> Any:
    """The node that made the first argument."""
    return next((following for following, _ in node.next_functions if following is not None), None)


def _through(node: Any) -> Any:
    """The node that made the argument, past operations that only move values."""
    node = _below(node)
    while node is not None and _is(node, _PLUMBING):
        node = _below(node)
    return node


def _saved(node: Any, name: str) -> Tensor | None:
    value = saved_by(node, name)
    return value if isinstance(value, Tensor) else None


def _units(softmax: Any) -> int:
    """The number of units that a softmax runs over."""
    result, dim = _saved(softmax, "result"), saved_by(softmax, "dim")
    if result is None or dim is None:
        return 0
    dim = dim - 2**64 if dim >= 2**63 else dim  # torch shows a negative number as an unsigned one
    return result.shape[dim] if result.dim() else 1


def shown(sizes: Sequence[int]) -> str:
    """Sizes as they are told.

    >>> shown((2, 3)), shown(())
    ('2×3', 'scalar')
    """
    return "×".join(map(str, sizes)) or "scalar"


def _reshaped(node: Any) -> str:
    """The sizes before and after a reshape just before a cross entropy, if it swaps some: a transpose was meant."""
    softmax = node if node is None or _is(node, "LogSoftmax") else _through(node)
    after = _saved(softmax, "result") if _is(softmax, "LogSoftmax") else None
    view = _below(softmax) if after is not None else None
    before = _sizes(view) if _is(view, "View|UnsafeView|Reshape") else ()
    is_swapped = (
        after is not None and len(before) > 2 and before != after.shape and sorted(before) == sorted(after.shape)
    )
    return f"{shown(before)} to {shown(after.shape)}" if after is not None and is_swapped else ""


def _broadcast(loss: Any, target: Tensor | None) -> str:
    """The shapes of an output and a target that were both expanded to be compared; empty if they were not."""
    below = _below(loss)
    if target is None or not _is(below, "Expand") or 0 not in target.stride():
        return ""
    own = [size for size, stride in zip(target.shape, target.stride(), strict=True) if stride]
    output = _sizes(below)
    return f"{shown(output)} against {shown(own)}" if output.count(1) and max(target.shape) > 1 else ""


def _sizes(node: Any) -> tuple[int, ...]:
    """The sizes of the argument of a reshape or an expansion."""
    return tuple(map(int, saved_by(node, "self_sym_sizes") or ()))


def _is_over_samples(node: Any) -> bool:
    """Whether a node is a softmax over the first of several dimensions."""
    result = _saved(node, "result") if _is(node, "Softmax|LogSoftmax") else None
    return result is not None and result.dim() > 1 and saved_by(node, "dim") in (0, 2**64 - result.dim())


def _linear(node: Any) -> int:
    """How many weight layers lead from the inputs to `node`, if nothing else does; 0 if something else does."""
    layers = 0
    while node is not None and not node.name().endswith("AccumulateGrad"):
        if _is(node, _WEIGHTS):
            layers += 1
            node = _input_of(node)
        elif _is(node, _PLUMBING):
            node = _below(node)
        else:
            return 0
    return layers


def _input_of(layer: Any) -> Any:
    """The node that made the input of a weight layer; None if that is data."""
    place = {"Addmm": 1, "Addbmm": 1, "Baddbmm": 1}.get(_name(layer), 0)
    return layer.next_functions[place][0]


def _site(node: Any, makers: Mapping[Any, str]) -> str:
    """The module that made a node, or the nearest one before it."""
    for _ in range(_MOST):
        if node is None or node in makers:
            return makers.get(node, "")
        node = _below(node)
    return ""


def _line(node: Any) -> str:
    """The user's line that made a node, if there is one and the graph was recorded with tracebacks."""
    recorded = node.metadata.get("traceback_", ()) if node is not None else ()
    calls = [frame for frame in reversed(recorded) if "in __torch_function__" not in frame]  # of a mode
    own = [frame for frame in takewhile(lambda frame: _OURS not in frame, calls) if "/torch/" not in frame]
    if not own:
        return ""
    found = re.search(r'File "(?:.*[/\\])?([^"]+)", line (\d+).*\n\s*(.*)', own[0])
    return f"{found[1]}:{found[2]}: {found[3].strip()}" if found else ""
