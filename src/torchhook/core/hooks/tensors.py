"""Hooks on single tensors, which catch the gradient of a value as it was when it was hooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.errors import TapError
from torchhook.core.torch_internals import base_of, version_of

Hook = Callable[[Tensor], Tensor | None]
"""Takes a gradient, and returns the one to continue with, or None if that is the same."""


def apart(tensor: Tensor) -> Tensor:
    """A view of `tensor`, to hook in its place: for a leaf, on which a hook would outlive the pass, or an input."""
    return tensor.view_as(tensor)


def hook_gradient(tensor: Tensor, hook: Hook, path: str) -> None:
    """Call `hook` with the gradient of `tensor`, which flowed at `path`, even if a later op overwrites it."""
    tensor.register_hook(hook)
    if base_of(tensor) is not None:
        _catch_if_overwritten(tensor, hook, path)


class SourceNode(NamedTuple):
    """The autograd node that made a tensor, or the base that the tensor is a view of.

    It receives the tensor's gradient even after an in-place op overwrote the tensor.
    """

    node: Any
    output: int
    whole: tuple[torch.Size, tuple[int, ...]]
    part: tuple[torch.Size, tuple[int, ...], int]

    @staticmethod
    def of(x: Tensor) -> SourceNode | None:
        """The node behind `x`, None if `x` is a leaf or a view of one."""
        viewed = base_of(x)
        base = x if viewed is None else viewed
        if base.grad_fn is None:
            return None
        part = (x.shape, x.stride(), int(x.storage_offset() - base.storage_offset()))
        return SourceNode(base.grad_fn, base.output_nr, (base.shape, base.stride()), part)

    def hook(self, hook: Hook, path: str, when: Callable[[], bool] = lambda: True) -> None:
        """Call `hook` with the tensor's gradient, if `when()` is true then."""
        output, whole_like, part_like = self.output, self.whole, self.part  # the node must not reference itself

        def catch(grads: tuple[Tensor | None, ...]) -> None:
            gradient = grads[output]
            if gradient is not None and when():
                whole = gradient.new_empty_strided(*whole_like).copy_(gradient)
                if hook(whole.as_strided(*part_like)) is not None:
                    raise TapError(
                        f"cannot edit the gradient at {path!r}: a later op overwrote that value in place;"
                        " make that op out of place, or edit the gradient at the next module"
                    )

        self.node.register_prehook(catch)


def _catch_if_overwritten(view: Tensor, hook: Hook, path: str) -> None:
    """Also hook the node that made `view`: a view that is overwritten leaves the graph, together with its own hook."""
    source = SourceNode.of(view)
    if source is not None:
        alias, version = view.detach(), version_of(view)  # not the view: a graph must not reference itself
        source.hook(hook, path, when=lambda: version_of(alias) != version)


def watched(tensor: Tensor, ticket: Tensor, position: int, number: int, is_apart: bool, path: str) -> Tensor:
    """In a compiled graph: the tensor to continue with, whose gradient is reported by an op.

    The compiler runs this when it differentiates the graph. So the hook sees the gradient of the whole tensor, even if
    the module returned its very input, unless it `is_apart`; and it leaves its op in the graph of the backward.
    """

    def report(gradient: Tensor) -> None:
        torch.ops.torchhook.see_gradient(gradient, ticket, position, number)

    tensor = apart(tensor) if is_apart else tensor
    hook_gradient(tensor, report, path)
    return tensor
