"""Run a model with attention that computes its weights explicitly, instead of in a fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_CHOICE = "_attn_implementation_internal"


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Switch Hugging Face models to the ``"eager"`` implementation and timm models off fused kernels, inside the block.

    >>> block = nn.Sequential(nn.ReLU())
    >>> block[0].fused_attn = True  # as in timm's attention
    >>> with unfused(block):
    ...     print(block[0].fused_attn)
    False
    >>> block[0].fused_attn
    True
    """
    with ExitStack() as stack:
        module: Any  # with attributes of these libraries
        for module in model.modules():
            if vars(module).get("fused_attn") is True:
                stack.callback(setattr, module, "fused_attn", True)
                module.fused_attn = False
            if hasattr(module, "set_attn_implementation") and implementation_of(module) is not None:
                for config in _configs(module.config):
                    stack.callback(setattr, config, _CHOICE, getattr(config, _CHOICE))
                module.set_attn_implementation("eager")
        yield


def implementation_of(module: nn.Module) -> str | None:
    """The attention implementation of a Hugging Face model; None for any other module.

    >>> implementation_of(nn.ReLU()) is None
    True
    """
    return getattr(getattr(module, "config", None), _CHOICE, None)


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those nested in it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if hasattr(inner, _CHOICE):
            yield from _configs(inner)
