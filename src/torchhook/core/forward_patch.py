"""Replace the forward of one module for a while."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class ForwardPatch:
    """Replaces a module's forward until it is removed: hooks still fire, and compilers notice the change.

    It is stored in the module's ``__dict__``. Copies and pickles of the module get the forward of their class.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module = module
        self.run = run
        self.before: Any = vars(module).get("forward")
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def remove(self) -> None:
        """Restore the forward, even if another patch was put on top of this one."""
        above = vars(self.module).get("forward")
        if above is self:
            if self.before is None:
                del vars(self.module)["forward"]
            else:
                vars(self.module)["forward"] = self.before
            return
        while isinstance(above, ForwardPatch):
            if above.before is self:
                above.before = self.before
                return
            above = above.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, memo[id(self.module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")
