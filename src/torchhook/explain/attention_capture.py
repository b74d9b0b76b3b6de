"""The weights of every attention of a model, wherever they come from.

The model is run once as it is, inside a mode that is shown every call of torch's. Which module a call happens in is
told by hooks on all that may compute attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchhook.core.attention import Attending, Logits
from torchhook.core.errors import BudgetError, SilentError
from torchhook.core.event import Event
from torchhook.core.passes import Scope
from torchhook.core.selection import Query, Selector, require_module, select, walk
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import in_units
from torchhook.core.torch_internals import is_dynamo_loaded, submodules
from torchhook.core.transfer import free_memory
from torchhook.core.trees import Arguments, nbytes
from torchhook.explain.attention_maps import Attended, AttentionCall, Focus, Grid, focus_of
from torchhook.explain.unfused_attention import implementation_of, unfused

How = Literal["recompute", "eager", "error"]


def attention(
    model: nn.Module,
    x: Any,
    *,
    how: How = "recompute",
    maps: Query | Iterable[Query] | None = None,
    grid: Grid | None = None,
    max_bytes: int | None = None,
) -> Attended:
    """Run `model` on `x`; what every head of every attention looks at.

    Seen are ``nn.MultiheadAttention``, ``F.scaled_dot_product_attention``, and every softmax over keys whose weights
    are multiplied with values: so are all models of torchvision, timm and Hugging Face that compute attention in one of
    these ways, and your own. The model stays in the mode in which it is; weights are those before dropout.

    Args:
        x: The input, a tuple of positional arguments or a dict of keyword arguments.
        how: What to do where a fused kernel keeps the weights. ``"recompute"`` computes them again of the queries,
            keys, masks and scale that it is given, and the output stays as it is, to the last bit (but where torch has
            to leave a fast path for a whole encoder layer: to the tolerance of the dtype). ``"eager"`` runs Hugging
            Face and timm models in the implementation that has the weights, and computes again what is fused even
            then. ``"error"`` raises.
        maps: Which layers to keep the weights of: a query or several, of modules in or below which attention happens;
            these must fit into `max_bytes`. None keeps all as long as they fit, ``[]`` none. The statistics are always
            there.
        grid: Rows and columns of the patches of an image, to measure distances in patches. Positions before the
            patches, as of a class token, have no place in it.
        max_bytes: The most to keep; half of the free memory by default. Weights are made when they are read, from
            queries and keys, which are far smaller.

    >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> seen = attention(model, torch.randn(3, 5, 8))
    >>> seen.paths, seen[0].weights.shape
    (['self_attn'], torch.Size([3, 2, 5, 5]))
    >>> seen["self_attn"][0].entropy.shape, seen.rollout().shape
    (torch.Size([3, 2, 5]), torch.Size([3, 5, 5]))
    """
    require_module(model)
    if how not in get_args(How):
        raise ValueError(f"how must be 'recompute', 'eager' or 'error', not {how!r}")
    if max_bytes is not None:
        require_count(max_bytes, "max_bytes")
    _require_grid(grid)
    given = Arguments.of(x)
    run = _Run(how, _Shelf(_wanted(model, maps), max_bytes), grid)
    with ExitStack() as stack:
        if how == "eager":
            stack.enter_context(unfused(model))
        if is_dynamo_loaded():  # a compiled graph shows nothing
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        session = stack.enter_context(Session(model, [_everywhere(model)], on_silent="ignore"))
        run.scope = session.scope
        with Attending(run.tell):
            output = model(*given.args, **given.kwargs)
        run.check(model, {point.path for point in session.points if point.fired})
    return Attended(run.calls(), output, _is_branched(model))


class _Seen(NamedTuple):
    path: str
    shape: tuple[int, int, int, int]
    added: int
    focus: Focus
    kept: Logits | None


class _Run:
    """One pass under way: what was seen so far."""

    scope: Scope

    def __init__(self, how: How, shelf: _Shelf, grid: Grid | None) -> None:
        self.how = how
        self.shelf = shelf
        self.grid = grid
        self.seen: list[_Seen] = []

    def tell(self, logits: Logits) -> None:
        """One attention is computed."""
        if not prod(logits.shape):  # of an empty batch
            return
        path = self._path()
        if self.how == "error" and not logits.handed_out:
            raise SilentError(
                f"{path or 'the model'!r} computes attention in a fused kernel, which hands out no weights"
                " (how='error'); pass how='recompute', or how='eager' for a Hugging Face or timm model"
            )
        focus, kept = focus_of(logits, self.grid), self.shelf.keep(path, logits)
        self.seen.append(_Seen(path, logits.shape, logits.added, focus, kept))

    def calls(self) -> list[AttentionCall]:
        """All that was seen, numbered by place."""
        found: list[AttentionCall] = []
        totals: dict[str, int] = {}
        for path, *_ in self.seen:
            totals[path] = totals.get(path, 0) + 1
        numbers = dict.fromkeys(totals, 0)
        for path, shape, added, focus, kept in self.seen:
            asked, most = self.shelf.wants(path), self.shelf.max_bytes or 0
            found.append(AttentionCall(path, numbers[path], totals[path], shape, added, *focus, kept, asked, most))
            numbers[path] += 1
        return found

    def check(self, model: nn.Module, ran: set[str]) -> None:
        """Raise if something that was asked for did not come; `ran` are the paths of the modules that did."""
        for path, name in _hidden(model).items():
            if path in ran and not any(_is_in(seen.path, path) for seen in self.seen):
                raise SilentError(
                    f"no attention was seen in {path or 'the model'!r}: its implementation is {name!r}, whose kernel"
                    " shows neither weights nor queries and keys; pass how='eager', which switches it for this run"
                )
        if not self.seen:
            raise SilentError(
                f"no attention was seen in this {type(model).__name__}: it called neither nn.MultiheadAttention nor"
                " F.scaled_dot_product_attention, and multiplied no softmax over keys with values. Attention in kernels"
                " of other libraries or without a softmax cannot be seen; of a Hugging Face model try how='eager'"
            )
        for query, paths in (self.shelf.wanted or {}).items():
            if not any(_is_in(seen.path, path) for path in paths for seen in self.seen):
                places = ", ".join(repr(place) for place in dict.fromkeys(seen.path for seen in self.seen))
                raise SilentError(f"maps: no attention was seen in or below {query}; it was at {places}")
        if self.grid is not None and all(bool(seen.focus.distance.isnan().all()) for seen in self.seen):
            rows, columns = self.grid
            raise ValueError(f"grid has {rows}×{columns} patches, and no self-attention has as many positions")

    def _path(self) -> str:
        """Of the module that runs now."""
        current = self.scope.current
        return self.scope.points[current.stack[-1][0]].path if current is not None and current.stack else ""


class _Shelf:
    """What is kept to make weights of, up to a number of bytes."""

    def __init__(self, wanted: dict[str, list[str]] | None, max_bytes: int | None) -> None:
        self.wanted = wanted  # paths by query; None for all
        self.max_bytes = max_bytes
        self.used = 0
        self.masks: list[Tensor] = []  # layers often have one in common

    def wants(self, path: str) -> bool:
        """Whether the weights of what happens there are wanted."""
        return self.wanted is None or any(_is_in(path, one) for paths in self.wanted.values() for one in paths)

    def keep(self, path: str, logits: Logits) -> Logits | None:
        """Copies of what `logits` are made of; None if they are not wanted, or too large and nobody named them."""
        if not self.wants(path):
            return None
        known, size = len(self.masks), 0

        def copy(x: Tensor) -> Tensor:
            nonlocal size
            size += nbytes(x)
            return x.detach().clone()

        def of_mask(mask: Tensor) -> Tensor:
            small = _unexpanded(mask)
            same = (one for one in self.masks if one.shape == small.shape and one.dtype == small.dtype)
            found = next((one for one in same if torch.equal(one, small)), None)
            if found is None:
                found = copy(small)
                self.masks.append(found)
            return found

        kept = logits.kept(copy, of_mask)
        if self.max_bytes is None:
            self.max_bytes = self._default(logits)
        if self.used + size <= self.max_bytes:
            self.used += size
            return kept
        del self.masks[known:]
        if self.wanted is not None:
            raise BudgetError(
                f"to keep the weights at {path!r} takes {in_units(size)}, and {in_units(self.used)} of max_bytes="
                f"{self.max_bytes} are taken; name fewer layers in maps, or pass a larger max_bytes"
            )
        return None

    @staticmethod
    def _default(logits: Logits) -> int:
        return free_memory(logits.seen(0, 1).device) // 2


class _Nothing(Sink):
    """Of what flows, nothing is wanted: that a module runs is all there is to know."""

    lazy = True

    def receive(self, event: Event) -> None:
        """Do nothing with it."""


def _everywhere(model: nn.Module) -> Tap:
    """A tap on every module that may compute attention: torch's own layers do not, if they have no parts."""

    def may_attend(path: str, module: nn.Module) -> bool:
        return bool(path) and (bool(submodules(module)) or not type(module).__module__.startswith("torch.nn."))

    parts = [may_attend] if any(may_attend(*place) for place in walk(model)) else []
    return Tap(Selector.union(["", *parts]), _Nothing(), "input")


def _wanted(model: nn.Module, maps: Any) -> dict[str, list[str]] | None:
    """The paths that each query selects."""
    if maps is None:
        return None
    single = isinstance(maps, (str, type, nn.Module, Selector)) or not isinstance(maps, Iterable)
    queries = [maps] if single else list(maps)
    return {Selector.of(query).label: list(select(model, query)) for query in queries}


def _hidden(model: nn.Module) -> dict[str, str]:
    """The Hugging Face models in `model` whose attention may not be seen, with the names of their implementations."""
    models = {path: module for path, module in walk(model) if hasattr(module, "set_attn_implementation")}
    names = {path: implementation_of(module) for path, module in models.items()}
    return {path: name for path, name in names.items() if name is not None and name not in ("eager", "sdpa")}


def _is_branched(model: nn.Module) -> bool:
    """Whether there is an encoder and a decoder."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "is_encoder_decoder", False) for config in configs) or any(
        isinstance(module, nn.TransformerDecoderLayer) for module in model.modules()
    )


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _unexpanded(mask: Tensor) -> Tensor:
    """A mask without the dimensions along which it was expanded."""
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _require_grid(grid: Any) -> None:
    if grid is None:
        return
    if not isinstance(grid, tuple) or len(grid) != 2:
        raise TypeError(f"grid must be (rows, columns) of patches, or None, not {grid!r}")
    for side in grid:
        require_count(side, "grid")
