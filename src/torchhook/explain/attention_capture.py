"""Record the weights of every attention in a model, however it computes them.

The model runs once, unchanged, inside a mode that sees every call of a torch function. Hooks on all modules that may
compute attention say which module a call belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchhook.core.attention import Attending, Given, Logits
from torchhook.core.batch import inputs_of
from torchhook.core.eager import eagerly
from torchhook.core.errors import BudgetError, SilentError
from torchhook.core.event import Event
from torchhook.core.renamed import renamed
from torchhook.core.scope import Scope
from torchhook.core.selection import Selector, Sites, queries_of, require_module, select, walk
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import in_units, warn
from torchhook.core.torch_internals import is_dynamo_loaded, submodules
from torchhook.core.transfer import free_memory
from torchhook.core.trees import nbytes
from torchhook.explain.attention_maps import Attended, AttentionCall, HeadSummary, summary_of
from torchhook.explain.token_grid import Grid
from torchhook.explain.unfused_attention import implementation_of, unfused
from torchhook.explain.untrained import warn_of_untrained

_IN_BANDS = (
    "{kind} computes a softmax whose weights are not multiplied with values key by key, as in the banded attention of"
    " Longformer and LED: which key a weight belongs to cannot be seen"
)
_UNSEEN = (
    "{kind} called neither nn.MultiheadAttention nor F.scaled_dot_product_attention, and did not multiply a softmax"
    " over keys with values: attention without a softmax, or in the kernel of another library, cannot be seen; for a"
    " Hugging Face model try how='eager'"
)

How = Literal["recompute", "eager", "error"]


@renamed(maps="sites")
def attention(
    model: nn.Module,
    x: Any,
    *,
    how: How = "recompute",
    sites: Sites = None,
    grid: Grid | None = None,
    max_bytes: int | None = None,
) -> Attended:
    """Run `model` on `x`, and return what every head of every attention looks at.

    It sees ``nn.MultiheadAttention``, ``F.scaled_dot_product_attention``, and every softmax over keys whose weights are
    multiplied with values. That covers the models of torchvision, timm and Hugging Face that compute attention in one
    of these ways, and your own. What a module named after attention computes in another way is in ``.left_out``, with
    the reason, and a warning says so if that is a softmax. The model stays in its current mode; the weights are those
    before dropout.

    Args:
        x: The input, a tuple of positional arguments or a dict of keyword arguments.
        how: What to do about fused kernels, which do not return weights. ``"recompute"`` computes them again from the
            kernel's queries, keys, masks and scale; the output stays bit-equal, except where torch has to leave the
            fast path of a whole encoder layer: there it is equal to the tolerance of the dtype. ``"eager"`` runs
            Hugging Face and timm models in their unfused implementation, and recomputes what is still fused.
            ``"error"`` raises.
        sites: Which layers to keep the weights of: one or several queries for modules that are or contain attention.
            Their weights must fit into `max_bytes`. None keeps as many as fit, ``[]`` none. The statistics are always
            available.
        grid: The rows and columns of an image's patches, to measure distances in patches. Positions before the
            patches, such as a class token, are left out of the distance.
        max_bytes: The most memory to use; half of the free memory by default. Only queries and keys are kept, which
            are far smaller than the weights; these are computed when you read them.

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
    given = inputs_of(x, model)
    warn_of_untrained(model)
    recorder = _Recorder(how, _LogitStore(_wanted(model, sites), max_bytes), grid)
    with ExitStack() as stack:
        if how == "eager":
            stack.enter_context(unfused(model))
        if is_dynamo_loaded():  # a compiled graph hides its calls
            stack.enter_context(eagerly())
        stack.enter_context(torch.no_grad())
        session = stack.enter_context(Session(model, [_everywhere(model)], on_silent="ignore"))
        recorder.scope = session.scope
        with _Noticing(recorder.add, recorder.note_softmax):
            output = model(*given.args, **given.kwargs)
        ran = {point.path for point in session.points if point.fired}
        recorder.check(model, ran)
        left_out = recorder.left_out(model, ran)
    lost = [path for path in left_out if path in recorder.lost_softmaxes]
    if lost:
        warn(f"attention is missing at {lost[0]!r}: {left_out[lost[0]]} (.left_out lists all {len(lost)} such modules)")
    return Attended(recorder.calls(), output, _is_branched(model), left_out)


class _Noticing(Attending):
    """Also calls `note` at every softmax that may be attention."""

    def __init__(self, tell: Callable[[Logits], None], note: Callable[[Given], None]) -> None:
        super().__init__(tell)
        self.note = note

    def look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().look(name, args, kwargs)
        if name == "softmax" and self._given is not None:
            self.note(self._given)


class _SeenAttention(NamedTuple):
    """One attention that was computed."""

    path: str
    shape: tuple[int, int, int, int]
    added: int
    summary: HeadSummary
    kept: Logits | None


class _Recorder:
    """Collects the attentions of one pass."""

    scope: Scope

    def __init__(self, how: How, store: _LogitStore, grid: Grid | None) -> None:
        self.how = how
        self.store = store
        self.grid = grid
        self.seen: list[_SeenAttention] = []
        self.unused: dict[int, str] = {}  # softmaxes that were not multiplied with values, by id of the logits
        self.lost: set[str] = set()  # the paths of those that are gone

    def note_softmax(self, given: Given) -> None:
        """A softmax begins in the module that is running, which may turn out to be attention."""
        before = self.unused.pop(id(given.logits), None)
        if before is not None:  # of a tensor that is gone
            self.lost.add(before)
        self.unused[id(given.logits)] = self._path()

    def add(self, logits: Logits) -> None:
        """Take in one attention that is being computed."""
        if not prod(logits.shape):  # an empty batch
            return
        path = self._path()
        if isinstance(logits, Given):
            self.unused.pop(id(logits.logits), None)
        if self.how == "error" and not logits.handed_out:
            raise SilentError(
                f"{path or 'the model'!r} computes attention in a fused kernel, which does not return its"
                " weights (how='error'); pass how='recompute', or how='eager' for a Hugging Face or timm model"
            )
        summary, kept = summary_of(logits, self.grid), self.store.keep(path, logits)
        self.seen.append(_SeenAttention(path, logits.shape, logits.added, summary, kept))

    def calls(self) -> list[AttentionCall]:
        """All attentions, numbered within each module."""
        found: list[AttentionCall] = []
        totals: dict[str, int] = {}
        for path, *_ in self.seen:
            totals[path] = totals.get(path, 0) + 1
        numbers = dict.fromkeys(totals, 0)
        for path, shape, added, summary, kept in self.seen:
            asked, most = self.store.wants(path), self.store.max_bytes or 0
            found.append(AttentionCall(path, numbers[path], totals[path], shape, added, *summary, kept, asked, most))
            numbers[path] += 1
        return found

    def check(self, model: nn.Module, ran: set[str]) -> None:
        """Raise if something that was asked for was not seen; `ran` are the paths of the modules that ran."""
        for path, name in _hidden(model).items():
            if path in ran and not any(_is_in(seen.path, path) for seen in self.seen):
                raise SilentError(
                    f"no attention was seen in {path or 'the model'!r}: its implementation is {name!r}, whose kernel"
                    " hides weights, queries and keys; pass how='eager', which switches it for this run"
                )
        if not self.seen and (left_out := self.left_out(model, ran)):
            path, reason = next(iter(left_out.items()))
            raise SilentError(f"no attention was seen in this {type(model).__name__}: at {path!r}, {reason}")
        if not self.seen:
            raise SilentError(
                f"no attention was seen in this {type(model).__name__}: it called neither nn.MultiheadAttention nor"
                " F.scaled_dot_product_attention, and did not multiply a softmax over keys with values. Attention"
                " without a softmax or in kernels of other libraries cannot be seen; for a Hugging Face model try"
                " how='eager'"
            )
        for query, paths in (self.store.wanted or {}).items():
            if not any(_is_in(seen.path, path) for path in paths for seen in self.seen):
                found = ", ".join(repr(path) for path in dict.fromkeys(seen.path for seen in self.seen))
                raise SilentError(f"sites: no attention was seen in or below {query}, only in {found}")
        if self.grid is not None and all(bool(seen.summary.distance.isnan().all()) for seen in self.seen):
            rows, columns = self.grid
            raise ValueError(f"grid has {rows}×{columns} patches, but no self-attention has that many positions")

    def left_out(self, model: nn.Module, ran: set[str]) -> dict[str, str]:
        """The modules named after attention that ran, but whose attention was not seen or only in part, and why."""
        named = {path: module for path, module in walk(model) if path in ran and _is_named_after_attention(module)}
        found: dict[str, str] = {}
        for path, module in named.items():
            if path in self.lost_softmaxes:
                found[path] = _IN_BANDS.format(kind=type(module).__name__)
            elif not any(_is_in(other, path) for other in (*self.paths, *(one for one in named if one != path))):
                found[path] = _UNSEEN.format(kind=type(module).__name__)
        return found

    @property
    def lost_softmaxes(self) -> set[str]:
        """The paths of the modules with a softmax whose weights were not multiplied with values."""
        return self.lost.union(self.unused.values())

    @property
    def paths(self) -> list[str]:
        """The paths of the modules whose attention was seen."""
        return [seen.path for seen in self.seen]

    def _path(self) -> str:
        """The path of the module that is running."""
        current = self.scope.current
        return self.scope.points[current.stack[-1][0]].path if current is not None and current.stack else ""


class _LogitStore:
    """Keeps copies of queries, keys and masks to compute weights from, up to a number of bytes."""

    def __init__(self, wanted: dict[str, list[str]] | None, max_bytes: int | None) -> None:
        self.wanted = wanted  # paths by query; None for all
        self.max_bytes = max_bytes
        self.used = 0
        self.masks: list[Tensor] = []  # layers often share one

    def wants(self, path: str) -> bool:
        """Whether to keep the weights of attention in this module."""
        return self.wanted is None or any(_is_in(path, one) for paths in self.wanted.values() for one in paths)

    def keep(self, path: str, logits: Logits) -> Logits | None:
        """Copies of what `logits` are computed from; None if not wanted, or if they do not fit and sites= is None."""
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
                f"keeping the weights of {path!r} takes {in_units(size)}, but {in_units(self.used)} of max_bytes="
                f"{self.max_bytes} are already used; name fewer layers in sites, or pass a larger max_bytes"
            )
        return None

    @staticmethod
    def _default(logits: Logits) -> int:
        return free_memory(logits.seen(0, 1).device) // 2


class _Nothing(Sink):
    """Ignores all values: the taps only say which module is running."""

    lazy = True

    def receive(self, event: Event) -> None:
        """Ignore it."""


def _everywhere(model: nn.Module) -> Tap:
    """A tap on every module that may compute attention, which torch's own layers without submodules do not."""

    def may_attend(path: str, module: nn.Module) -> bool:
        return bool(path) and (bool(submodules(module)) or not type(module).__module__.startswith("torch.nn."))

    parts = [may_attend] if any(may_attend(*one) for one in walk(model)) else []
    return Tap(Selector.union(["", *parts]), _Nothing(), "input")


def _wanted(model: nn.Module, sites: Sites) -> dict[str, list[str]] | None:
    """The paths that each query selects."""
    if sites is None:
        return None
    return {Selector.of(query).label: list(select(model, query)) for query in queries_of(sites)}


def _hidden(model: nn.Module) -> dict[str, str]:
    """The Hugging Face models in `model` whose attention may be hidden, with the names of their implementations."""
    models = {path: module for path, module in walk(model) if hasattr(module, "set_attn_implementation")}
    names = {path: implementation_of(module) for path, module in models.items()}
    return {path: name for path, name in names.items() if name is not None and name not in ("eager", "sdpa")}


def _is_branched(model: nn.Module) -> bool:
    """Whether the model has an encoder and a decoder."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "is_encoder_decoder", False) for config in configs) or any(
        isinstance(module, nn.TransformerDecoderLayer) for module in model.modules()
    )


def _is_named_after_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


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
