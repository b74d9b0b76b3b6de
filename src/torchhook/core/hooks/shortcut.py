"""A shorter way from a module's call to its only hook.

torch prepares for every kind of hook that a call may have, which takes longer than keeping the output. A `Shortcut` is
put into the slot of ``Module.compile``, which torch calls before all hooks, and leaves out of copies and pickles. The
hook stays where torch keeps hooks. While it is the only one, the shortcut does all that torch would do: it calls the
forward, and then the hook. Otherwise it leaves the call to torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from torchhook.core.compiled import tracing
from torchhook.core.hooks.registration import Placed, Removable, after_forward
from torchhook.core.torch_internals import (
    CALL_SLOT,
    WRAPPED_CALL_CODE,
    call_impl,
    calls_only,
    graph_count,
    is_called_by_torch,
    not_alone,
    submodules,
    traced_call,
)


class Shortcut:
    """Calls a module's forward, and then a hook on it that returns nothing. It is the handle of both."""

    __slots__ = ("hook", "module", "placed")

    def __init__(self, module: nn.Module, hook: Callable[..., None], placed: Placed) -> None:
        self.module = module
        self.hook = hook
        self.placed = placed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that copy or pickle all of their __dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return traced_call(self.module, args, kwargs)
        frame = sys._getframe(1)
        # Copies made by hand and replicas of DataParallel have this object in their slot, too.
        module = frame.f_locals["self"] if frame.f_code is WRAPPED_CALL_CODE else self.module
        if not calls_only(module, self.placed.number):
            return call_impl(module)(*args, **kwargs)
        output = module.forward(*args, **kwargs)
        self.hook(module, args, output)
        return output

    def remove(self) -> None:
        """Remove the hook, and leave the slot unless something else has taken it meanwhile."""
        self.placed.remove()
        own = self.module.__dict__
        if own.get(CALL_SLOT) is self:
            del own[CALL_SLOT]

    def places(self) -> list[tuple[dict[Any, Any], Any]]:
        """Where both are: dictionaries and keys."""
        own = self.module.__dict__
        slot = [(own, CALL_SLOT)] if own.get(CALL_SLOT) is self else []
        return [*self.placed.places(), *slot]


not_alone(Shortcut.__call__, but_inside=True)  # where the forward is
not_alone(calls_only)


def keeping(module: nn.Module, hook: Callable[..., None]) -> Removable:
    """Register a `hook` that returns nothing, with a shortcut to it if there can be one.

    There is none in modules that have others inside, whose forward may add hooks, and none once anything was compiled.
    """
    placed, own = after_forward(module, hook), module.__dict__
    if not isinstance(placed, Placed) or len(placed.hooks) > 1 or CALL_SLOT in own or submodules(module):
        return placed
    if graph_count() or not is_called_by_torch(module):
        return placed
    own[CALL_SLOT] = way = Shortcut(module, hook, placed)
    return way
