"""Seeing attention wherever it is computed: the logits of every call, for any range of queries.

Fused kernels never return their weights, so the logits are computed again from the queries, keys, masks and scale. The
results of the model do not change.

A softmax counts as attention if it is over the last of at least three dimensions, and its output is then multiplied
with values of as many dimensions. That includes Swin's windows. It excludes classifiers, the router of a mixture of
experts, and a distribution whose mean is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchhook.core.event import recomputing
from torchhook.core.snapshot import lazily_copied

UNSEEN = -1e4  # logits below this belong to masked keys: some models write the lowest number instead of -inf
_PRODUCTS = frozenset(("matmul", "__matmul__", "__rmatmul__", "bmm", "einsum"))
Shape = tuple[int, int, int, int]
Copy = Callable[[Tensor], Tensor]


class Logits(ABC):
    """The logits of one attention: samples × heads × queries × keys."""

    shape: Shape
    added: int = 0  # keys at the end that do not belong to a position
    handed_out: bool = True  # whether the model computes the weights itself

    @abstractmethod
    def rows(self, first: int, last: int) -> Tensor:
        """The logits of queries `first` to `last`; -inf, or a very low number, for keys that they do not see."""

    @abstractmethod
    def seen(self, first: int, last: int) -> Tensor:
        """Which keys these queries may attend to, in a shape that broadcasts to `rows`."""

    @abstractmethod
    def kept(self, copy: Copy, of_mask: Copy) -> Logits:
        """The same logits made of copies: `copy` for tensors of this call, `of_mask` for masks, which calls share."""


@dataclass(frozen=True, eq=False)
class Product(Logits):
    """Queries times keys. With grouped queries, several heads share their keys; `query` has all samples and heads.

    >>> one = torch.ones(1, 1, 2, 4)
    >>> Product(one, one, scale=0.5, causal=True).rows(0, 2)
    tensor([[[[2., -inf],
              [2., 2.]]]])
    """

    query: Tensor
    key: Tensor
    scale: float
    masks: tuple[Tensor, ...] = ()  # booleans, True for keys that are seen, or numbers that are added
    causal: bool = False
    added: int = 0
    handed_out: bool = False

    @property
    def shape(self) -> Shape:  # type: ignore[override]  # computed, not stored
        samples, heads, queries, _ = self.query.shape
        return samples, heads, queries, self.key.shape[-2]

    def rows(self, first: int, last: int) -> Tensor:
        query, key = (_wide(x) for x in (self.query[..., first:last, :], self.key))
        if key.shape[1] not in (1, query.shape[1]):
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        with torch.autocast(query.device.type, enabled=False):
            logits = query @ key.transpose(-1, -2) * self.scale
        for mask in self._masks(first, last):
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        return logits

    def seen(self, first: int, last: int) -> Tensor:
        seen = torch.ones(last - first, self.shape[-1], dtype=torch.bool, device=self.query.device)
        for mask in self._masks(first, last):
            seen = seen & (mask if mask.dtype == torch.bool else mask > UNSEEN)
        return seen

    def kept(self, copy: Copy, of_mask: Copy) -> Logits:
        masks = tuple(map(of_mask, self.masks))
        return Product(copy(self.query), copy(self.key), self.scale, masks, self.causal, self.added, self.handed_out)

    def _masks(self, first: int, last: int) -> Iterator[Tensor]:
        for mask in self.masks:
            yield mask[..., first:last, :] if mask.shape[-2] > 1 else mask
        if self.causal:
            here, there = (torch.arange(*ends, device=self.query.device) for ends in ((first, last), (self.shape[-1],)))
            yield there <= here[:, None]


@dataclass(frozen=True, eq=False)
class Given(Logits):
    """The input of a softmax."""

    logits: Tensor
    added: int = 0

    @property
    def shape(self) -> Shape:  # type: ignore[override]  # computed, not stored
        samples, heads, queries, keys = self.logits.shape
        return samples, heads, queries, keys

    def rows(self, first: int, last: int) -> Tensor:
        return _wide(self.logits[..., first:last, :])

    def seen(self, first: int, last: int) -> Tensor:
        return ~(self.logits[..., first:last, :] <= UNSEEN)  # a NaN counts as seen

    def kept(self, copy: Copy, of_mask: Copy) -> Logits:
        return Given(copy(self.logits), self.added)


class Attending(TorchFunctionMode):
    """Inside the ``with`` block, calls `tell` with the logits of every attention.

    The logits refer to tensors of the model, which may be overwritten later, so `tell` must read them immediately. The
    input of a softmax is copied (on write), since it may be gone by the time that the weights are multiplied.

    >>> seen = []
    >>> with Attending(lambda logits: seen.append(logits.shape)):
    ...     x = torch.ones(2, 4, 5, 8)
    ...     _ = F.scaled_dot_product_attention(x, x, x)
    ...     _ = (x @ x.mT).softmax(-1) @ x
    ...     _ = x.softmax(-1)
    >>> seen
    [(2, 4, 5, 5), (2, 4, 5, 5)]
    """

    def __init__(self, tell: Callable[[Logits], None]) -> None:
        self.tell = tell
        self._given: Given | None = None  # the input of the softmax that is under way
        self._open: Any = WeakTensorKeyDictionary()  # output of a softmax, or weights made from it → its input

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if recomputing():
            return function(*args, **kwargs)
        if name == "softmax" or name in _LOGITS or (name in _PRODUCTS and self._open):
            self.look(name, args, kwargs)
        result = function(*args, **kwargs)
        if name == "softmax" or self._open:
            self.follow(name, args, kwargs, result)
        return result

    def look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call: report it if it is attention; of a softmax, which may be attention, note the input."""
        with torch.no_grad():
            if name == "softmax":
                self._given = _of_softmax(*args, **kwargs)
                return
            found = _LOGITS[name](*args, **kwargs) if name in _LOGITS else self._multiplied(args)
            if found is not None:
                self.tell(found)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After a call: tensors made from weights, as by dropout, are weights; keys may be cut off, like a sink."""
        given, self._given = self._given, None
        if not isinstance(result, Tensor):
            return
        if name == "softmax":
            if given is not None:
                self._open[result] = given
        elif name not in _PRODUCTS:
            source = next((x for x in args if isinstance(x, Tensor) and x in self._open), None)
            if source is not None and (result.numel() == source.numel() or name == "__getitem__"):
                known = self._open[source]
                self._open[result] = replace(known, added=known.added + _cut_off(source, result))

    def _multiplied(self, args: tuple[Any, ...]) -> Given | None:
        """The logits of a softmax whose weights are now multiplied with values."""
        operands = [x for x in _flat(args) if isinstance(x, Tensor)]
        found: Given | None = next((self._open[x] for x in operands if x in self._open), None)
        if found is None or len(operands) < 2 or len({x.dim() for x in operands}) > 1:
            return None
        for x in [x for x, given in self._open.items() if given.logits is found.logits]:
            del self._open[x]
        return found


def _of_softmax(input: Any = None, dim: Any = None, *rest: Any, **others: Any) -> Given | None:  # noqa: A002
    """The input of a softmax, if that may be attention."""
    if isinstance(input, Tensor) and input.dim() > 2 and dim in (-1, input.dim() - 1):
        return Given(_of_four(lazily_copied(input.detach())))
    return None


def _cut_off(weights: Tensor, rest: Tensor) -> int:
    """How many keys at the end of `weights` are missing in `rest`; 0 if anything else is missing."""
    fewer = weights.shape[-1] - rest.shape[-1] if rest.dim() == weights.dim() else 0
    begins_there = rest.stride() == weights.stride() and rest.storage_offset() == weights.storage_offset()
    return fewer if rest.shape[:-1] == weights.shape[:-1] and begins_there else 0


def _of_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Logits:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, *masks = _alike(query, key, *(() if attn_mask is None else (attn_mask,)))
    return Product(query, key, factor, tuple(masks), is_causal)


def _of_multihead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    *rest: Any,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    **others: Any,
) -> Logits:
    """The logits of ``nn.MultiheadAttention``, whose queries are positions × samples × features."""
    width = query.shape[-1]
    weights: Any = q_proj_weight, k_proj_weight
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight[:width], in_proj_weight[width : 2 * width]
    biases = (None, None) if in_proj_bias is None else (in_proj_bias[:width], in_proj_bias[width : 2 * width])
    pair = zip((query, key), weights, biases, strict=True)
    q, k = (F.linear(x if x.dim() == 3 else x[:, None], w, b) for x, w, b in pair)
    if bias_k is not None:
        k = torch.cat([k, bias_k.expand(1, k.shape[1], -1)])
    q, k = _split(q, num_heads), _split(k, num_heads)
    if static_k is not None:
        k = static_k.view(*q.shape[:2], *static_k.shape[-2:])
    k = F.pad(k, (0, 0, 0, int(add_zero_attn)))
    added = int(bias_k is not None) + int(add_zero_attn)
    # As torch does: where a fused kernel follows, the hint that the mask is causal replaces the mask.
    causal = is_causal and key_padding_mask is None and not need_weights
    masks = []
    if attn_mask is not None and not causal:
        by_head = attn_mask.dim() == 3
        masks.append(attn_mask.view(-1, num_heads, *attn_mask.shape[-2:]) if by_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1]))
    seen = tuple(_with_added(mask, added) for mask in masks)
    return Product(q, k, q.shape[-1] ** -0.5, seen, causal, added, need_weights)


def _with_added(mask: Tensor, added: int) -> Tensor:
    """A mask of ``nn.MultiheadAttention``, but True for keys that are seen, as added keys always are."""
    return F.pad(~mask, (0, added), value=True) if mask.dtype == torch.bool else F.pad(mask, (0, added))


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1).permute(1, 2, 0, 3)


def _of_four(x: Tensor) -> Tensor:
    """`x` as samples × heads × positions × features, however many dimensions it has before the positions."""
    if x.dim() < 4:
        return x.reshape(-1, 1, *x.shape[-2:])
    return x.flatten(0, -4)


def _alike(query: Tensor, key: Tensor, *masks: Tensor) -> list[Tensor]:
    """All with four dimensions, and the queries expanded to all samples and heads, as the kernel broadcasts them."""
    most = max(query.dim(), key.dim())
    given = [x[(None,) * (most - x.dim())] for x in (query, key, *masks)]
    outer = torch.broadcast_shapes(*(x.shape[:-3] for x in given[:2]))
    query, key, *rest = (_of_four(x.expand(*outer, *x.shape[-3:])) for x in given)
    heads = key.shape[1] if query.shape[1] == 1 else 1  # otherwise there are as many, or they are grouped
    lead = torch.broadcast_shapes(query.shape[:2], (len(key), heads))
    return [query.expand(*lead, -1, -1), key, *rest]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for arg in args:
        yield from arg if isinstance(arg, (tuple, list)) else (arg,)


_LOGITS: dict[str, Callable[..., Logits]] = {  # by name, since core.fastpaths has a double of the second function
    "scaled_dot_product_attention": _of_product,
    "multi_head_attention_forward": _of_multihead,
}
