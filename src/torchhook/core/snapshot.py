"""Values as they were at one moment, at the cost of a reference.

torch's copy on write (`lazy_clone`) takes about a microsecond, and memory only once the original or the copy is written
to. Tensors that it does not support (sparse, nested, shared or foreign memory) are cloned.

In torch 2.11 to 2.13, two threads may hang if they let go of copies of the same tensor at the same moment. What a
thread of ours lets go of has to be cloned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from torchhook.core.errors import OverwrittenError, TapError
from torchhook.core.shards import local
from torchhook.core.torch_internals import is_transformed_tensor, lazy_clone, version_of
from torchhook.core.trees import leaves, mapped, nbytes


def lazily_copied(tensor: Tensor) -> Tensor:
    """A copy on write of `tensor`, part of its graph if it has one."""
    try:
        return lazy_clone(tensor)
    except RuntimeError:  # NotImplementedError is one
        return tensor.clone()


def frozen(tensor: Tensor) -> Tensor:
    """A detached copy on write of `tensor`."""
    return lazily_copied(local(meaningful(tensor).detach()))


def cloned(tensor: Tensor) -> Tensor:
    """A detached real copy of `tensor`."""
    return local(meaningful(tensor).detach()).clone()


def meaningful(tensor: Tensor) -> Tensor:
    """`tensor`; raises if it exists only inside a transform of torch.func."""
    if is_transformed_tensor(tensor):
        raise TapError(
            "a tensor inside torch.func (vmap, grad, jvp, ...) is meaningless outside of it and cannot be recorded;"
            " call the module without the transform, or detach the taps first (torch.func.functional_call is fine)"
        )
    return tensor


def snapshot(value: Any) -> Any:
    """`value` with every tensor as it is now, even if the original is overwritten later.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> before = snapshot((x,))
    >>> x += 1
    >>> before
    (tensor([0., 0.]),)
    """
    return mapped(frozen, value)


class Held(ABC):
    """A recorded value that must be read through `read`."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> Any:
        """The value, once it has arrived; raises if it is no longer valid."""

    @abstractmethod
    def peek(self) -> Any:
        """What is held now: its shapes and sizes are right, its numbers may not be."""

    def came(self) -> bool:
        """Whether there is a value: a compiled graph that raised has promised values that never come."""
        return True


class Alias(Held):
    """A value kept by reference; reading it raises if a tensor in it was overwritten since."""

    __slots__ = ("site", "value", "versions")

    def __init__(self, value: Any, site: object) -> None:
        self.value = mapped(Tensor.detach, value)  # shares memory and version counter
        self.site = site
        try:
            self.versions = [version_of(tensor) for _, tensor in leaves(self.value)]
        except RuntimeError as error:
            raise OverwrittenError(
                f"copy='reference' cannot detect whether the {site} is overwritten, since tensors made"
                " in inference_mode have no version counter; use copy='lazy' or torch.no_grad()"
            ) from error

    def peek(self) -> Any:
        return self.value

    def read(self) -> Any:
        for version, (_, tensor) in zip(self.versions, leaves(self.value), strict=True):
            if version_of(tensor) != version:
                raise OverwrittenError(
                    f"the {self.site} was overwritten in place after it was recorded with"
                    " copy='reference'; record it with copy='lazy' to keep the value that flowed"
                )
        return self.value


def read(value: Any) -> Any:
    """The value that a store holds, as the user sees it."""
    return value.read() if isinstance(value, Held) else value


def peek(value: Any) -> Any:
    """The value that a store holds, for its shapes and sizes only."""
    return value.peek() if isinstance(value, Held) else value


def weight(value: Any) -> int:
    """The size of a value that a store holds, in bytes."""
    return nbytes(peek(value))
