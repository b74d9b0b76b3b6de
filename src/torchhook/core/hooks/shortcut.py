"""A shorter way from a module's call to its only hook.

torch looks for every kind of hook that a call may have, which takes a microsecond: longer than to keep the output. A
`Shortcut` is in the slot of ``Module.compile``, which torch calls before all hooks, and leaves out of copies and pickles.
The hook stays where torch keeps hooks. While it is the only one, the shortcut does all that torch would do: it calls the
forward, and then the hook. Otherwise it leaves the call to torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from torchhook.core.compiled import tracing
from torchhook.core.hooks.registration import Placed
from torchhook.core.torch_internals import (
    CALL_SLOT,
    WRAPPED_CALL_CODE,
    call_impl,
    calls_only,
    graph_count,
    is_called_by_torch,
    submodules,
    traced_call,
)


class Shortcut:
    """Calls the forward of a module, and then a hook that is registered on it and returns nothing."""

    __slots__ = ("hook", "module", "number")

    def __init__(self, module: nn.Module, hook: Callable[..., None], number: int) -> None:
        self.module = module
        self.hook = hook
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that copy or pickle all of their __dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return traced_call(self.module, args, kwargs)
        frame = sys._getframe(1)
        # Copies made by hand and replicas of DataParallel have this object in their slot, too.
        module = frame.f_locals["self"] if frame.f_code is WRAPPED_CALL_CODE else self.module
        if not calls_only(module, self.number):
            return call_impl(module)(*args, **kwargs)
        output = module.forward(*args, **kwargs)
        self.hook(module, args, output)
        return output


def shortcut(module: nn.Module, hook: Callable[..., None], placed: Any) -> tuple[Placed, ...]:
    """The handle of a shortcut to the `hook` that was `placed` on a `module`, or nothing if there can be none.

    There is none in modules that have others inside, whose forward may add hooks, and none once anything was compiled.
    """
    own = module.__dict__
    if not isinstance(placed, Placed) or not is_called_by_torch(module):
        return ()
    if CALL_SLOT in own or submodules(module) or graph_count():
        return ()
    own[CALL_SLOT] = way = Shortcut(module, hook, placed.key)
    return (Placed(own, CALL_SLOT, way),)
