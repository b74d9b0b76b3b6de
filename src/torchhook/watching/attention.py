"""Seeing what attention looks at, wherever it is computed.

Fused kernels never hand their weights out, so the logits are computed again from the queries, keys, mask and scale
that were seen. What the model computes stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchhook.text import warn

_MOST = 2**27  # logits that are computed again: kernels that never hold them are used where they are many


class Attending(TorchFunctionMode):
    """While it is entered, gives `tell` the logits of every attention."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self.tell = tell

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = _LOGITS.get(getattr(function, "__name__", ""))
        if logits is not None and torch._C._current_graph_task_id() == -1:  # not in a backward
            try:
                with torch.no_grad():
                    found = logits(*args, **kwargs)
                    if found is not None:
                        self.tell(found)
            except Exception as error:  # to be looked at must not stop a training
                warn(f"what {function.__name__} looks at is not measured, for that raised {error!r:.200}")
        return function(*args, **kwargs)


def _of_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if query.shape[:-1].numel() * key.shape[-2] > _MOST:
        return None
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    return _masked(logits, attn_mask)


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
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """The logits of ``nn.MultiheadAttention``, whose queries are positions × samples × features."""
    width = query.shape[-1]
    weights: Any = q_proj_weight, k_proj_weight
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight[:width], in_proj_weight[width : 2 * width]
    biases = (None, None) if in_proj_bias is None else (in_proj_bias[:width], in_proj_bias[width : 2 * width])
    pair = zip((query, key), weights, biases, strict=True)
    q, k = (F.linear(x if x.dim() == 3 else x[:, None], w, b) for x, w, b in pair)
    keys = len(k)
    if bias_k is not None:
        k = torch.cat([k, bias_k.expand(1, k.shape[1], -1)])
    q, k = _split(q, num_heads), _split(k, num_heads)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(-1, num_heads, *attn_mask.shape[-2:])
    logits = F.pad(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, (0, int(add_zero_attn)))
    given, added = logits[..., :keys], logits[..., keys:]  # masks are of the keys that were given
    given = _masked(given, attn_mask)
    if key_padding_mask is not None:
        hides = key_padding_mask.dtype == torch.bool
        padding = (~key_padding_mask if hides else key_padding_mask).view(-1, 1, 1, keys)
        given = _masked(given, padding)
    return torch.cat([given, added], -1)


def _of_softmax(input: Tensor, dim: int | None = None, *rest: Any, **others: Any) -> Tensor | None:  # noqa: A002
    """What is given to a softmax over the last of four dimensions."""
    return input if input.dim() == 4 and dim in (-1, 3) else None


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1).permute(1, 2, 0, 3)


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -torch.inf)
    return logits + mask


def _inverted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For ``nn.MultiheadAttention`` a boolean mask is True where nothing is seen."""

    def logits(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        return function(*args, attn_mask=attn_mask, **kwargs)

    return logits


_LOGITS: dict[str, Callable[..., Tensor | None]] = {  # by name, for a function may have a double that calls modules
    "scaled_dot_product_attention": _of_product,
    "multi_head_attention_forward": _inverted(_of_multihead),
    "softmax": _of_softmax,
}
