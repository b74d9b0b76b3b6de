"""Find the channels that must be removed together, and remove them, with the dependency graph of Torch-Pruning.

A residual connection adds the outputs of two layers, so a channel of one cannot go without that of the other. And no
channel can go without the weights for it in the layers behind. Torch-Pruning traces that; it is imported when the first
graph is built: ``pip install "torchhook[prune]"``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from torchhook.core.batch import Batch, call
from torchhook.core.model_state import buffers_kept, evaluating
from torchhook.core.optional import require
from torchhook.core.selection import unwrapped
from torchhook.core.torch_internals import own_parameters
from torchhook.core.trees import leaves
from torchhook.prune.layers import LAYERS, channels_of, first_of, inputs_of

_ROUNDS = 30  # visits per node of the graph in one search, on average; convolutional networks need two or three
_FIXED = (nn.MultiheadAttention, nn.RNNBase, nn.GroupNorm, nn.Parameter)


class ChannelIndex(NamedTuple):
    """Channels of a layer, and the choice of their group that each of them belongs to."""

    own: Tensor
    choice: Tensor

    def joined(self, other: ChannelIndex) -> ChannelIndex:
        """These channels and those of `other`."""
        return ChannelIndex(torch.cat([self.own, other.own]), torch.cat([self.choice, other.choice]))


class ChannelGroup(NamedTuple):
    """Channels of several layers that can only be removed together.

    Each of its `choices` is a channel of the root, or several that can only go together, like those that a gated linear
    unit multiplies. `outputs` are the layers with these output channels, and `inputs` the layers that receive them.
    `fixed` says why none of them can go; it is empty if they can.
    """

    root: str
    choices: int
    outputs: dict[str, ChannelIndex]
    inputs: dict[str, ChannelIndex]
    fixed: str


class Graph:
    """The dependency graph of a model, traced with one batch.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 2 * 2, 5))
    >>> graph = Graph(model, Batch.of(torch.ones(1, 3, 2, 2)))
    >>> [(group.root, list(group.inputs), group.fixed) for group in graph.groups()]
    [('3', [], 'it computes the output of the model'), ('0', ['3'], '')]
    >>> graph.cut("0", [1, 2])
    >>> model[0].out_channels, model[3].in_features
    (2, 8)
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = unwrapped(model)
        self.paths = {module: path for path, module in self.model.named_modules()}
        self._shared = _shared(self.model)
        few = first_of(batch, 2)  # two samples are enough to trace
        library = require("torch_pruning", "prune", "pruning")
        self._graph = library.DependencyGraph()
        with tracing(self.model), buffers_kept(self.model), warnings.catch_warnings():
            _require_run(self.model, few)
            warnings.filterwarnings("error", "Maximum recursive depth")  # otherwise it would never end
            try:
                self._graph.build_dependency(self.model, few, forward_fn=call, output_transform=_graphed, verbose=False)
            except Exception as error:
                raise ValueError(
                    f"Torch-Pruning cannot trace this model ({type(error).__name__}: {error}), so it is unknown which"
                    " channels must go together"
                ) from error

    def groups(self) -> Iterator[ChannelGroup]:
        """All groups, from the output of the model to its input."""
        met: set[str] = set()
        for layer in [module for module in self._graph.module2node if isinstance(module, LAYERS)]:
            if self.paths[layer] not in met:
                group = self._group(self.paths[layer], layer)
                met.update(group.outputs)
                yield group

    def _group(self, root: str, layer: nn.Module) -> ChannelGroup:
        width = channels_of(layer)
        alone = ChannelGroup(root, width, {root: ChannelIndex(torch.arange(width), torch.arange(width))}, {}, "")
        if _in_attention(self.model, root):  # Torch-Pruning often misses these
            return alone._replace(fixed=_heads(root))
        try:
            with self._bounded():
                items = self._items(layer, range(width))
            outputs, inputs = self._members(items, out=True), self._members(items, out=False)
            fixed = self._fixed(items, outputs, inputs)
            choices = self._choices(layer, width) if not fixed else []
        except _EndlessSearchError:
            return alone._replace(fixed="Torch-Pruning's search for channels tied to it does not end")
        if fixed or len(choices) == width:
            return ChannelGroup(root, width, outputs, inputs, fixed)
        parts = [self._items(layer, choice) for choice in choices]  # the items of all channels at once do not show ties
        outputs, inputs = (_numbered([self._members(part, out) for part in parts]) for out in (True, False))
        return ChannelGroup(root, len(choices), outputs, inputs, "")

    def _choices(self, layer: nn.Module, width: int) -> list[list[int]]:
        """The channels of a layer, grouped by those that can only go together."""
        bits = [[c for c in range(width) if not c >> bit & 1] for bit in range((width - 1).bit_length())]
        if all(self._gone(layer, asked) == set(asked) for asked in bits):  # these separate every pair
            return [[channel] for channel in range(width)]
        label = torch.arange(width)
        for channel in range(width):
            met = label[sorted(self._gone(layer, [channel]))]
            label[torch.isin(label, met)] = met.min()
        return [(label == first).nonzero()[:, 0].tolist() for first in label.unique()]

    def _gone(self, layer: nn.Module, channels: list[int]) -> set[int]:
        """The channels of a layer that go if `channels` do."""
        with self._bounded():
            return set(self._members(self._items(layer, channels), out=True)[self.paths[layer]].own.tolist())

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Raise if the nodes of the graph are visited so often that the search can have no end."""
        nodes = list(self._graph.module2node.values())
        kept = [node.dependencies for node in nodes]
        steps = count()
        try:
            for node in nodes:
                node.dependencies = _Bounded(node.dependencies, steps, _ROUNDS * len(nodes))
            yield
        finally:
            for node, dependencies in zip(nodes, kept, strict=True):
                node.dependencies = dependencies

    def _items(self, layer: nn.Module, channels: Iterable[int]) -> Any:
        pruner = self._graph.get_pruner_of_module(layer)
        return self._graph.get_pruning_group(layer, pruner.prune_out_channels, list(channels))

    def cut(self, root: str, channels: Sequence[int]) -> None:
        """Remove channels of a layer and everything tied to them."""
        self._items(self.model.get_submodule(root), channels).prune()

    def silence(self, root: str, channels: Sequence[int]) -> None:
        """Remove nothing, but zero the weights for some channels in the layers that receive them."""
        items = self._items(self.model.get_submodule(root), channels)
        for path, index in self._members(items, out=False).items():
            layer: Any = self.model.get_submodule(path)
            with torch.no_grad():
                layer.weight.index_fill_(
                    0 if getattr(layer, "transposed", False) else 1, index.own.to(layer.weight.device), 0
                )

    def _members(self, items: Any, out: bool) -> dict[str, ChannelIndex]:
        found: dict[str, ChannelIndex] = {}
        for item in items:
            module, handler = item.dep.target.module, item.dep.handler
            if isinstance(module, LAYERS) and self._graph.is_out_channel_pruning_fn(handler) == out:
                index = ChannelIndex(torch.tensor(item.idxs), torch.tensor(item.root_idxs))
                path = self.paths[module]
                found[path] = found[path].joined(index) if path in found else index
        return found

    def _fixed(self, items: Any, outputs: dict[str, ChannelIndex], inputs: dict[str, ChannelIndex]) -> str:
        """Why the channels cannot go; empty if they can."""
        for item in items:
            node = item.dep.target
            if self._graph.is_out_channel_pruning_fn(item.dep.handler) and not node.outputs:
                return "it computes the output of the model"
            if isinstance(node.module, _FIXED):
                return f"it is tied to a {type(node.module).__name__}, whose width is fixed"
            path = self.paths.get(node.module)
            if path is not None and (reason := self._uncuttable(node.module)):
                return f"{path!r} must be cut with it, but {reason}"
        for path in [*outputs, *inputs]:
            if _is_grouped(self.model.get_submodule(path)):
                return f"it is tied to {path!r}, a grouped convolution"
        for path, index in inputs.items():
            if int(index.own.max()) >= inputs_of(self.model.get_submodule(path)):
                return f"{path!r} receives fewer channels than it has, in a way that Torch-Pruning does not see"
        attention = next((path for path in outputs if _in_attention(self.model, path)), None)
        return "" if attention is None else _heads(attention)

    def _uncuttable(self, module: nn.Module) -> str:
        """Why the parameters of a module cannot be cut; empty if they can."""
        if is_parametrized(module):
            return "its parameters come from a parametrization"
        for name in ("weight", "bias"):
            if isinstance(getattr(module, name, None), Tensor) and name not in own_parameters(module):
                return f"its {name} is not a parameter but computed, as with a mask of torch.nn.utils.prune"
        shared = next((self._shared[p] for p in module.parameters(recurse=False) if p in self._shared), None)
        return "" if shared is None else f"one parameter is shared by {' and '.join(map(repr, shared))}"


class _EndlessSearchError(Exception):
    """A search does not end."""


class _Bounded(list[Any]):
    """A list that can be iterated a limited number of times, counted together with others."""

    def __init__(self, items: list[Any], steps: Iterator[int], most: int) -> None:
        super().__init__(items)
        self.steps = steps
        self.most = most

    def __iter__(self) -> Iterator[Any]:
        if next(self.steps) > self.most:
            raise _EndlessSearchError
        return super().__iter__()


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model, also if it has computed weights."""
    made = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = {id(value): value.detach().clone() for value in made if not value.is_leaf}  # like masked weights
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"cannot copy the model, and pruning works on a copy ({type(error).__name__}: {error})"
        ) from error


@contextmanager
def requiring_gradients(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Let all parameters require gradients inside the block, or none."""
    flags = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(wanted and parameter.is_floating_point())
        yield
    finally:
        for path, parameter in model.named_parameters():  # some may be new, and some gone
            if path in flags:
                parameter.requires_grad_(flags[path])


@contextmanager
def tracing(model: nn.Module) -> Iterator[None]:
    """Run in eval mode with autograd, and with gradients for all parameters: the trace follows the autograd graph."""
    with requiring_gradients(model, True), torch.inference_mode(False), torch.enable_grad(), evaluating(model):
        yield


def _require_run(model: nn.Module, batch: Batch) -> None:
    try:
        output = call(model, batch)
    except Exception as error:
        raise ValueError(
            f"the model does not run on the example input ({type(error).__name__}: {error}); pass another with x="
        ) from error
    if not _graphed(output):
        raise ValueError("no output of the model has a gradient, so it cannot be traced")


def _graphed(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(output) if leaf.grad_fn is not None]


def _shared(model: nn.Module) -> dict[Tensor, list[str]]:
    """The parameters that several modules share, with all their names."""
    names: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, []).append(name)
    return {parameter: found for parameter, found in names.items() if len(found) > 1}


def _numbered(members: list[dict[str, ChannelIndex]]) -> dict[str, ChannelIndex]:
    """From the channels of each choice by layer to the channels and choices of each layer."""
    found: dict[str, ChannelIndex] = {}
    for number, by_path in enumerate(members):
        for path, index in by_path.items():
            own = index.own.unique()
            more = ChannelIndex(own, torch.full_like(own, number))
            found[path] = found[path].joined(more) if path in found else more
    return found


def _is_grouped(layer: nn.Module) -> bool:
    groups = getattr(layer, "groups", 1)
    return groups > 1 and not groups == layer.in_channels == layer.out_channels


def _heads(path: str) -> str:
    return f"it is tied to {path!r}, whose channels belong to attention heads"


def _in_attention(model: nn.Module, path: str) -> bool:
    above = path.split(".")
    around = (model.get_submodule(".".join(above[:depth])) for depth in range(len(above)))
    return any("attention" in (name := type(module).__name__.lower()) or "attn" in name for module in around)
