"""Hooks that do not belong to a session: on gradients, optimizer steps and calls, and sentinels for compilers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import count
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchhook.core.torch_internals import can_place_hooks, forward_hooks

# torch numbers its handles without a lock. Reentrant, since the garbage collector may release a session at any time.
registering = threading.RLock()


class Removable(Protocol):
    """The handle that torch returns for a hook."""

    def remove(self) -> None:
        """Remove the hook."""


class Placed:
    """The handle of a hook that was put into its place directly."""

    __slots__ = ("hooks", "number")

    def __init__(self, hooks: dict[int, Any], number: int) -> None:
        self.hooks = hooks
        self.number = number

    def remove(self) -> None:
        """Remove the hook."""
        self.hooks.pop(self.number, None)

    def places(self) -> list[tuple[dict[Any, Any], Any]]:
        """Where the hook is: a dictionary and a key."""
        return [(self.hooks, self.number)]


_register = nn.Module.register_forward_hook
_numbers = count(-1, -1)  # torch's own are not negative


def after_forward(module: nn.Module, hook: Callable[..., Any]) -> Removable:
    """The same as ``module.register_forward_hook(hook)``, whose handle takes longer to make than all the rest."""
    if not can_place_hooks or type(module).register_forward_hook is not _register:
        return module.register_forward_hook(hook)
    hooks, number = forward_hooks(module), next(_numbers)
    hooks[number] = hook
    return Placed(hooks, number)


def taken_out(handles: Iterable[Any]) -> Callable[[], None]:
    """Take hooks out of their places, which then are as fast as without; returns a function that puts them back."""
    places = [place for handle in handles for place in _places_of(handle)]
    taken = [(hooks, number, hooks.pop(number)) for hooks, number in places if hooks and number in hooks]

    def put_back() -> None:
        for hooks, number, hook in taken:
            hooks.setdefault(number, hook)

    return put_back


def _places_of(handle: Any) -> list[tuple[dict[Any, Any] | None, Any]]:
    """Where the hook of a handle is; for one of torch's, also what torch notes about the hook."""
    if hasattr(handle, "places"):
        return list(handle.places())
    return [(ref(), handle.id) for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)]


def inert_copy() -> tuple[Any, ...]:
    """What copies and pickles of a hook become: ``nullcontext().__exit__`` takes anything and returns None."""
    return getattr, (nullcontext(), "__exit__")


class Sentinel:
    """A hook that does nothing. A compiler that saw it on a module notices hooks that are added later."""

    def __call__(self, *_: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_copy()


class Listener:
    """A hook that calls a function; copies and pickles of it do nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, module: nn.Module, args: Any, *_: Any) -> None:
        self.call(module, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_copy()


def armed(module: nn.Module) -> list[Removable]:
    """Register sentinels on `module`."""
    return [module.register_forward_hook(Sentinel()), module.register_forward_pre_hook(Sentinel())]


class GradientHook:
    """A hook that changes every gradient of a parameter, with the label under which it is listed and removed."""

    __torch_unserializable__ = True  # so that torch.save of the model does not warn

    def __init__(self, parameter: Tensor, change: Callable[[Tensor], Tensor], group: str | None) -> None:
        self.change = change
        self.group = group
        self.handle: Removable = parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.change(gradient)

    def remove(self) -> None:
        """Remove the hook."""
        self.handle.remove()


def on_gradient(parameter: Tensor, change: Callable[[Tensor], Tensor], group: str | None) -> Removable:
    """Replace every gradient of `parameter` by ``change(gradient)`` before it is accumulated."""
    return GradientHook(parameter, change, group)


def on_step(optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
    """Call `before` and `after` around every step of `optimizer`: both, or neither."""
    return _both(lambda: optimizer.register_step_pre_hook(before), lambda: optimizer.register_step_post_hook(after))


def on_call(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
    """Call `before` and `after` around every call of `module`, `after` even if the call raises: both, or neither."""
    return _both(
        lambda: module.register_forward_pre_hook(before, prepend=True),
        lambda: module.register_forward_hook(after, always_call=True),
    )


def before_call(module: nn.Module, before: Callable[..., None]) -> Removable:
    """Call `before` before every call of `module`, but not of its copies."""
    handle: Removable = module.register_forward_pre_hook(Listener(before), prepend=True)
    return handle


def on_any_step(before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
    """Call `before` and `after` around every step of every optimizer."""
    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def on_any_call(before: Callable[..., None]) -> Removable:
    """Call `before` before every call of every module."""
    handle: Removable = register_module_forward_pre_hook(before)
    return handle


def _both(*registers: Callable[[], Any]) -> list[Removable]:
    handles: list[Removable] = []
    try:
        for register in registers:
            handles.append(register())  # noqa: PERF401 (one that raises must not lose the others)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return handles
