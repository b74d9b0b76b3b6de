"""Ablation: take channels, attention heads or positions out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchhook.core.edit import At, Edit
from torchhook.core.errors import SelectionError, TapError
from torchhook.core.selection import unwrapped
from torchhook.core.shown import maker
from torchhook.core.site import Port, Site
from torchhook.core.torch_internals import BATCH_AND_INSTANCE_NORMS, CONVOLUTIONS, POOLINGS, submodules
from torchhook.edits.basic import fitted
from torchhook.edits.patching import captured_values, of_call

With = Literal["zero", "mean"] | Mapping[str, Any] | Tensor | float
Indices = int | slice | Tensor | Iterable[Any]

# The names that attention modules of torchvision, timm, transformers and others give to these.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
PROJECTIONS = ("out_proj", "o_proj", "c_proj", "proj", "out_lin", "wo", "to_out", "o", "dense", "output.dense")
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase)
_CHANNELS_FIRST = (
    BATCH_AND_INSTANCE_NORMS,
    *POOLINGS,
    nn.GroupNorm,
)


class Ablate(Edit):
    """Replaces some channels, heads or positions."""

    def __init__(self, kind: str, indices: slice | list[int], with_: With, dim: int | None, at: At = None) -> None:
        super().__init__(at)
        self.kind = kind
        self.indices = indices
        self.with_ = with_
        self.dim = dim
        self.heads = 0
        self.module_kind: type[nn.Module] = nn.Module
        self.spatial = 0  # number of spatial dimensions of a convolution
        self.values: list[Tensor] = []

    def moved(self, path: str, module: nn.Module, port: Port, model: nn.Module) -> tuple[str, nn.Module, Port]:
        """Heads are ablated where they are still separate: at the input of the attention's output projection."""
        if self.kind != "heads":
            return path, module, port
        name, projection = _projection(path, module)
        return f"{path}.{name}" if name else path, projection, "input"

    def bound(self, site: Site, module: nn.Module) -> Ablate:
        twin = copy.copy(self)
        twin.module_kind = type(module)
        twin.spatial = len(module.kernel_size) if isinstance(module, CONVOLUTIONS) else 0
        if isinstance(self.with_, Mapping):
            twin.values = captured_values(self.with_, site, self.at)
            twin.by_call = len(twin.values) > 1
        return twin

    def change(self, x: Tensor, call: int) -> Tensor:
        channel = self._channel(x)
        if isinstance(self.with_, Mapping):
            other = fitted(of_call(self.values, call, False), x, "ablate")
        elif isinstance(self.with_, Tensor):
            other = fitted(self.with_, x, "ablate")
        elif isinstance(self.with_, (int, float)):
            other = torch.full_like(x, self.with_)
        elif self.with_ == "mean":
            other = x.mean([dim for dim in range(x.dim()) if dim != channel], keepdim=True).expand_as(x)
        else:
            other = torch.zeros_like(x)
        return torch.where(self._mask(x, channel), other, x)

    def _channel(self, x: Tensor) -> int:
        """The dimension of the channels: where the module puts them, or the usual one for values of this shape."""
        if self.dim is not None and self.kind == "channels":
            return self.dim % x.dim()
        if self.spatial:
            return x.dim() - 1 - self.spatial
        if self.kind == "heads" or x.dim() == 1 or issubclass(self.module_kind, _CHANNELS_LAST):
            return x.dim() - 1
        return 1 if x.dim() != 3 or issubclass(self.module_kind, _CHANNELS_FIRST) else 2

    def _mask(self, x: Tensor, channel: int) -> Tensor:
        """A mask of the ablated elements, which can be broadcast to `x`."""
        if self.kind == "heads":
            return self._mask_along(x, channel, x.shape[channel] // self.heads, self.heads)
        dim = channel
        if self.kind == "positions":
            if x.dim() != 3 and self.dim is None:
                raise TapError(
                    f"positions= expects a value (batch, position, channel), but this one has shape {tuple(x.shape)};"
                    " pass the dimension of the positions as dim="
                )
            dim = 3 - channel if self.dim is None else self.dim % x.dim()
        return self._mask_along(x, dim, 1, x.shape[dim])

    def _mask_along(self, x: Tensor, dim: int, times: int, count: int) -> Tensor:
        chosen = list(range(count))[self.indices] if isinstance(self.indices, slice) else self.indices
        wrong = [index for index in chosen if not -count <= index < count]
        if wrong:
            raise TapError(f"{self.kind}={chosen[:8]} is out of range: there are {count}, 0 to {count - 1}")
        indices = [index % count for index in chosen]
        mask = torch.tensor([index in indices for index in range(count)], device=x.device).repeat_interleave(times)
        return mask.view([-1 if other == dim else 1 for other in range(x.dim())])


class AblateHeads(Ablate):
    """Ablates heads; looks up how many each attention has."""

    def moved(self, path: str, module: nn.Module, port: Port, model: nn.Module) -> tuple[str, nn.Module, Port]:
        place = super().moved(path, module, port, model)
        self.number_of[place[0]] = _heads(path, module, model)
        return place

    def __init__(self, indices: slice | list[int], with_: With, at: At = None) -> None:
        super().__init__("heads", indices, with_, None, at)
        self.number_of: dict[str, int] = {}

    def bound(self, site: Site, module: nn.Module) -> Ablate:
        twin = super().bound(site, module)
        twin.heads = self.number_of[site.path]
        return twin


@maker
def ablate(
    *,
    channels: Indices | None = None,
    heads: Indices | None = None,
    positions: Indices | None = None,
    with_: With = "zero",
    dim: int | None = None,
    at: At = None,
) -> Edit:
    """Take some channels, attention heads or positions out.

    Args:
        channels, heads, positions: Which to take out, as indices, a slice or a mask. Heads are those of an attention
            module (or of its output projection), and are taken out at the input of that projection.
        with_: What replaces them: ``"zero"``, the ``"mean"`` of the value over batch and positions, a number, a tensor,
            or a capture, from which the same site and call is taken.
        dim: The dimension of the channels or positions, if it is not the usual one.
        at: Which tensor of a nested value.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.ablate(channels=[0, 2])}):
    ...     model(torch.ones(1, 4))
    tensor([[0., 1., 0., 1.]])
    """
    given = {"channels": channels, "heads": heads, "positions": positions}
    chosen = {kind: indices for kind, indices in given.items() if indices is not None}
    if len(chosen) != 1:
        raise ValueError(f"pass one of channels=, heads= and positions=, not {', '.join(chosen) or 'none'}")
    if not isinstance(with_, (Mapping, Tensor, int, float)) and with_ not in ("zero", "mean"):
        raise ValueError(f"with_ must be 'zero', 'mean', a number, a tensor or a capture, not {with_!r:.80}")
    ((kind, indices),) = chosen.items()
    wanted = _indices(kind, indices)
    return AblateHeads(wanted, with_, at) if kind == "heads" else Ablate(kind, wanted, with_, dim, at)


def _indices(kind: str, given: Indices) -> slice | list[int]:
    """The indices as a list of integers, or the slice; a mask becomes the indices where it is True."""
    if isinstance(given, slice):
        return given
    if isinstance(given, Tensor):
        given = given.tolist() if given.dim() else [given.item()]
    listed = list(given) if isinstance(given, Iterable) else [given]
    if listed and all(isinstance(item, bool) for item in listed):
        return [number for number, chosen in enumerate(listed) if chosen]
    try:
        return [operator.index(item) for item in listed]
    except TypeError as error:
        raise TypeError(f"{kind} must be integers, a slice or a mask, not {listed[:8]}") from error


def _projection(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The output projection of an attention `module` and its path inside it; the module itself if it is one."""
    below = dict(module.named_modules())
    for name in PROJECTIONS:
        if name in below:
            return name, below[name]
    if not submodules(module) and path.rpartition(".")[2] in PROJECTIONS:
        return "", module
    raise SelectionError(
        f"heads= found no output projection in {path!r}, a {type(module).__name__} (looked for"
        f" {', '.join(PROJECTIONS)}); select the attention that contains it, or ablate channels= at its port 'input'"
    )


def _heads(path: str, module: nn.Module, model: nn.Module) -> int:
    """The number of heads of the attention at `path`, or around it if that is its projection."""
    around = [module]
    if not submodules(module):  # a projection: the attention contains it
        above = path.split(".")
        ways = [".".join(above[:depth]) for depth in range(len(above) - 1, 0, -1)][:2]
        around = [unwrapped(model).get_submodule(way) for way in ways] or [unwrapped(model)]
    for attention in around:
        is_one = "att" in type(attention).__name__.lower()
        inside = [child for child in attention.children() if "att" in type(child).__name__.lower()]
        for owner in (attention, *inside, getattr(attention, "config", None) if is_one else None):
            for name in _HEADS:
                number = getattr(owner, name, None)
                if isinstance(number, int) and not isinstance(number, bool):
                    return number
    raise SelectionError(
        f"heads= found no number of heads in {path!r}, a {type(module).__name__} (looked for"
        f" {', '.join(_HEADS)}); select an attention, or ablate the channels of its output projection at port 'input'"
    )
