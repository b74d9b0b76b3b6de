"""Which channels have to go together, and the cutting of them: both by the dependency graph of Torch-Pruning.

A residual connection adds what two layers give, so a channel of one cannot go without that of the other, nor a channel
at all without the inputs that it was for in the layers behind it. Torch-Pruning traces that; it is imported when the
first graph is made: ``pip install "torchhook[prune]"``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from torchhook.core.batch import Batch, call
from torchhook.core.model_state import buffers_kept, evaluating
from torchhook.core.selection import unwrapped
from torchhook.core.torch_internals import own_parameters
from torchhook.core.trees import leaves
from torchhook.prune.score_points import LAYERS, channels_of, first_of, inputs_of

_ROUNDS = 30  # that a search makes of a graph, a node at a time; of convolutional networks it makes two or three
_FIXED = (nn.MultiheadAttention, nn.RNNBase, nn.GroupNorm, nn.Parameter)


class Index(NamedTuple):
    """Channels of a layer, and with which choice of their group each of them goes."""

    own: Tensor
    choice: Tensor


class Group(NamedTuple):
    """Channels that go together, of all layers that share them.

    Each of its `choices` is a channel of the root, or several that can only go together, as those that a gated linear
    unit multiplies. `outputs` are the layers whose output channels they are, `inputs` those that they are given to.
    `fixed` says why none of them can go, if none can.
    """

    root: str
    choices: int
    outputs: dict[str, Index]
    inputs: dict[str, Index]
    fixed: str


class Graph:
    """The dependency graph of a model, as one batch goes through it.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 2 * 2, 5))
    >>> graph = Graph(model, Batch.of(torch.ones(1, 3, 2, 2)))
    >>> [(group.root, list(group.inputs), group.fixed) for group in graph.groups()]
    [('3', [], 'it makes what the model gives'), ('0', ['3'], '')]
    >>> graph.cut("0", [1, 2])
    >>> model[0].out_channels, model[3].in_features
    (2, 8)
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = unwrapped(model)
        self.paths = {module: path for path, module in self.model.named_modules()}
        self._shared = _shared(self.model)
        few = first_of(batch, 2)  # which are enough to see where things go
        library = torch_pruning()
        self._graph = library.DependencyGraph()
        with tracing(self.model), buffers_kept(self.model), warnings.catch_warnings():
            _require_run(self.model, few)
            warnings.filterwarnings("error", "Maximum recursive depth")  # else it would go round in circles for ever
            try:
                self._graph.build_dependency(self.model, few, forward_fn=call, output_transform=_graphed, verbose=False)
            except Exception as error:
                raise ValueError(
                    f"Torch-Pruning cannot trace this model ({type(error).__name__}: {error}), so it is not known which"
                    " channels go together"
                ) from error

    def groups(self) -> Iterator[Group]:
        """All groups, from the output of the model to its input."""
        met: set[str] = set()
        for layer in [module for module in self._graph.module2node if isinstance(module, LAYERS)]:
            if self.paths[layer] not in met:
                group = self._group(self.paths[layer], layer)
                met.update(group.outputs)
                yield group

    def _group(self, root: str, layer: nn.Module) -> Group:
        width = channels_of(layer)
        alone = Group(root, width, {root: Index(torch.arange(width), torch.arange(width))}, {}, "")
        if _in_attention(self.model, root):  # of which Torch-Pruning often makes nothing
            return alone._replace(fixed=_heads(root))
        try:
            with self._bounded():
                items = self._items(layer, range(width))
            outputs, inputs = self._members(items, out=True), self._members(items, out=False)
            fixed = self._fixed(items, outputs, inputs)
            choices = self._choices(layer, width) if not fixed else []
        except _CirclesError:
            return alone._replace(fixed="Torch-Pruning goes round in circles where it looks for what goes with it")
        if fixed or len(choices) == width:
            return Group(root, width, outputs, inputs, fixed)
        parts = [self._items(layer, choice) for choice in choices]  # in the items of all channels, ties are not seen
        outputs, inputs = (_numbered([self._members(part, out) for part in parts]) for out in (True, False))
        return Group(root, len(choices), outputs, inputs, "")

    def _choices(self, layer: nn.Module, width: int) -> list[list[int]]:
        """The channels of a layer, those together that can only go together."""
        bits = [[c for c in range(width) if not c >> bit & 1] for bit in range((width - 1).bit_length())]
        if all(self._gone(layer, asked) == set(asked) for asked in bits):  # any two are asked apart in one of these
            return [[channel] for channel in range(width)]
        label = torch.arange(width)
        for channel in range(width):
            met = label[sorted(self._gone(layer, [channel]))]
            label[torch.isin(label, met)] = met.min()
        return [(label == first).nonzero()[:, 0].tolist() for first in label.unique()]

    def _gone(self, layer: nn.Module, channels: list[int]) -> set[int]:
        """Which channels of a layer go if some do."""
        with self._bounded():
            return set(self._members(self._items(layer, channels), out=True)[self.paths[layer]].own.tolist())

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Raise if each node of the graph is gone through so often that there can be no end to it."""
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
        """Remove some channels of a layer, and whatever goes with them."""
        self._items(self.model.get_submodule(root), channels).prune()

    def silence(self, root: str, channels: Sequence[int]) -> None:
        """Remove nothing, but have the layers that some channels are given to make nothing of them."""
        items = self._items(self.model.get_submodule(root), channels)
        for path, index in self._members(items, out=False).items():
            layer: Any = self.model.get_submodule(path)
            with torch.no_grad():
                layer.weight.index_fill_(
                    0 if getattr(layer, "transposed", False) else 1, index.own.to(layer.weight.device), 0
                )

    def _members(self, items: Any, out: bool) -> dict[str, Index]:
        found: dict[str, Index] = {}
        for item in items:
            module, handler = item.dep.target.module, item.dep.handler
            if isinstance(module, LAYERS) and self._graph.is_out_channel_pruning_fn(handler) == out:
                index = Index(torch.tensor(item.idxs), torch.tensor(item.root_idxs))
                path = self.paths[module]
                found[path] = Index(*map(torch.cat, zip(found[path], index, strict=True))) if path in found else index
        return found

    def _fixed(self, items: Any, outputs: dict[str, Index], inputs: dict[str, Index]) -> str:
        """Why the channels cannot go, empty if they can."""
        for item in items:
            node = item.dep.target
            if self._graph.is_out_channel_pruning_fn(item.dep.handler) and not node.outputs:
                return "it makes what the model gives"
            if isinstance(node.module, _FIXED):
                return f"it is tied to a {type(node.module).__name__}, whose width is fixed"
            path = self.paths.get(node.module)
            if path is not None and (reason := self._uncuttable(node.module)):
                return f"{path!r} has to be cut with it, and {reason}"
        for path in [*outputs, *inputs]:
            if _is_grouped(self.model.get_submodule(path)):
                return f"it is tied to {path!r}, a convolution in groups of channels"
        for path, index in inputs.items():
            if int(index.own.max()) >= inputs_of(self.model.get_submodule(path)):
                return f"{path!r} is given fewer channels than there are, in a way that Torch-Pruning does not see"
        attention = next((path for path in outputs if _in_attention(self.model, path)), None)
        return "" if attention is None else _heads(attention)

    def _uncuttable(self, module: nn.Module) -> str:
        """Why the parameters of a module cannot be cut, empty if they can."""
        if is_parametrized(module):
            return "its parameters are made by a parametrization"
        for name in ("weight", "bias"):
            if isinstance(getattr(module, name, None), Tensor) and name not in own_parameters(module):
                return f"its {name} is no parameter: something makes it, as a mask of torch.nn.utils.prune does"
        shared = next((self._shared[p] for p in module.parameters(recurse=False) if p in self._shared), None)
        return "" if shared is None else f"one parameter is shared by {' and '.join(map(repr, shared))}"


class _CirclesError(Exception):
    """A search without an end."""


class _Bounded(list[Any]):
    """A list that can be gone through, together with others, so many times."""

    def __init__(self, items: list[Any], steps: Iterator[int], most: int) -> None:
        super().__init__(items)
        self.steps = steps
        self.most = most

    def __iter__(self) -> Iterator[Any]:
        if next(self.steps) > self.most:
            raise _CirclesError
        return super().__iter__()


def torch_pruning() -> Any:
    """The library."""
    if not find_spec("torch_pruning"):
        raise ImportError('pruning needs Torch-Pruning: pip install "torchhook[prune]"')
    return import_module("torch_pruning")


def copied(model: nn.Module) -> nn.Module:
    """A copy, so that the model itself stays as it is."""
    made = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    memo = {id(value): value.detach().clone() for value in made if not value.is_leaf}  # as the weights that masks make
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and it is a copy that is cut first"
        ) from error


@contextmanager
def tracing(model: nn.Module) -> Iterator[None]:
    """Eval mode, autograd, and parameters that all have a gradient, for that is what is traced."""
    flags = {path: parameter.requires_grad for path, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
            yield
    finally:
        for path, parameter in model.named_parameters():  # some may have come and gone
            if path in flags:
                parameter.requires_grad_(flags[path])


def _require_run(model: nn.Module, batch: Batch) -> None:
    try:
        output = call(model, batch)
    except Exception as error:
        raise ValueError(
            f"the model does not run on the example input ({type(error).__name__}: {error}); pass one with x="
        ) from error
    if not _graphed(output):
        raise ValueError("no output of the model has a gradient, which is what is traced")


def _graphed(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(output) if leaf.grad_fn is not None]


def _shared(model: nn.Module) -> dict[Tensor, list[str]]:
    """The parameters that several modules have, with all their names."""
    names: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, []).append(name)
    return {parameter: found for parameter, found in names.items() if len(found) > 1}


def _numbered(members: list[dict[str, Index]]) -> dict[str, Index]:
    """Of each choice its channels by layer: the same by layer."""
    found: dict[str, Index] = {}
    for number, by_path in enumerate(members):
        for path, index in by_path.items():
            own = index.own.unique()
            more = Index(own, torch.full_like(own, number))
            found[path] = Index(*map(torch.cat, zip(found[path], more, strict=True))) if path in found else more
    return found


def _is_grouped(layer: nn.Module) -> bool:
    groups = getattr(layer, "groups", 1)
    return groups > 1 and not groups == layer.in_channels == layer.out_channels


def _heads(path: str) -> str:
    return f"it is tied to {path!r}, whose channels are those of attention heads"


def _in_attention(model: nn.Module, path: str) -> bool:
    above = path.split(".")
    around = (model.get_submodule(".".join(above[:depth])) for depth in range(len(above)))
    return any("attention" in (name := type(module).__name__.lower()) or "attn" in name for module in around)
