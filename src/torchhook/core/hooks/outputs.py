"""The hooks around a module's forward, which find the pass of a call and run the acts bound to the module."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.compiled import followed, followed_by, leave, received, tracing
from torchhook.core.hooks.gradients import InputViews
from torchhook.core.hooks.registration import inert_copy
from torchhook.core.page import NEVER, Keep, Newest
from torchhook.core.passes import Pass
from torchhook.core.scope import Scope
from torchhook.core.sink import Act
from torchhook.core.site import Port
from torchhook.core.snapshot import snapshot
from torchhook.core.torch_internals import lazy_clone, not_alone, tensor_data
from torchhook.core.trees import Arguments

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point

_thread = threading.get_ident


class Hook:
    """A function that torch calls at a point, for some of its ports."""

    __slots__ = ()
    ports: ClassVar[tuple[Port, ...]] = ()
    point: Point
    scope: Scope

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_copy()


class ActHook(Hook):
    """Finds the pass of a call, then runs the acts bound to the point."""

    __slots__ = ("act", "index", "point", "scope", "steps")

    def __init__(self, point: Point, act: Act | None, steps: str = "") -> None:
        self.point = point
        self.scope = point.scope
        self.index = point.index
        self.act: Act = act or _nothing
        self.steps = steps  # the name of the steps that it leaves in a compiled graph

    def pass_of(self, module: nn.Module) -> Pass | None:
        """The pass that this call belongs to, or None if the session does not see it."""
        scope = self.scope
        if scope.current is None or _thread() != scope.home:
            return scope.pass_of_call(module)
        return scope.current


class OutputHook(ActHook):
    """Runs after a forward: takes the output, and hooks its tensors for their gradients."""

    __slots__ = ()
    ports = ("output", "grad_output")

    @not_alone
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if tracing():
            return followed_by(self.steps, module, args, output)
        if not self.scope.when.active:
            return None
        pass_ = self.pass_of(module)
        if pass_ is None:
            return self.point.repeated(output)
        self.point.fired = True
        return self.point.guarded(self.act, pass_, pass_.next_call(self.index), output, args)


class KeepHook(Newest, Hook):
    """Runs after a forward, if all that is wanted is the newest output: the cost of recording is the cost of this hook.

    It does what `OutputHook` and `Keep` would do together. The hook itself is the entry on the page, and the value of a
    pass replaces the one before.
    """

    __slots__ = ("index", "key", "scope")
    ports = ("output",)

    def __init__(self, point: Point, act: Keep) -> None:
        self.site = act.site
        self.number = NEVER
        self.index = point.index
        self.scope = point.scope
        self.key = self.scope.key  # here, too: a graph would check at every run whose scope it is

    @property
    def point(self) -> Point:  # type: ignore[override]  # not kept: what the page keeps must not lead back to it
        """The point that this hook is of, while the session is open."""
        return self.scope.points[self.index]

    @not_alone
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if tracing():
            leave(output, self.key, self.index, 0)
            return
        scope = self.scope
        pass_ = scope.current
        if pass_ is None or _thread() != scope.home:
            pass_ = scope.pass_of_call(module)
            if pass_ is not None:
                self.number = pass_.number
                pass_.pages[0].put(self.site, None, snapshot(output))
            return
        try:
            value = lazy_clone(tensor_data(output) if pass_.grad_enabled else output)
        except (TypeError, RuntimeError):  # a container, or a tensor without copy on write
            value = snapshot(output)
        if self.number == pass_.number:  # called before in this pass
            pass_.pages[0].put(self.site, None, value)
        else:
            self.number = pass_.number
            self.value = value
            pass_.pages[0].kept.append(self)


class InputHook(ActHook):
    """Runs before a forward: takes inputs and parameters, and makes the views that catch the inputs' gradients."""

    __slots__ = ("catches",)
    ports = ("param", "input", "grad_input")

    def __init__(self, point: Point, act: Act | None, catches: list[Act], steps: str) -> None:
        super().__init__(point, act, steps)
        self.catches = catches

    @not_alone
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # another thread calls while torch still registers this hook as one that takes keywords
            return None
        if tracing():
            return tuple(followed(self.steps, Arguments(args, kwargs)))
        if not self.scope.when.active:
            return None
        pass_ = self.pass_of(module)
        if pass_ is None:
            return self.point.repeated_input(Arguments(args, kwargs))
        self.point.fired = True
        call = pass_.next_call(self.index)
        begun = self.point.guarded(self.begin, pass_, call, Arguments(args, kwargs), args)
        if begun is None:  # a tap failed, but the call goes on
            return None
        pass_.enter(self.index, call, begun.views, begun.arguments.args)
        return tuple(begun.arguments) if begun.arguments.args is not args or begun.changed else None

    def begin(self, pass_: Pass, call: int, value: Arguments, args: tuple[Any, ...]) -> Begun:
        """Run the acts, and make the views if gradients are wanted."""
        changed = self.act(pass_, call, value, args)
        value = value if changed is None else changed
        receives = received(self.catches, pass_, call, value, args)
        if not receives:
            return Begun(value, None, changed is not None)
        if pass_.grad_enabled and not torch.is_grad_enabled():
            self.point.input_awaited.put(value, receives)
        views = InputViews(value, receives)
        return Begun(views.arguments, views, True)


class Begun(NamedTuple):
    """A call that begins: the arguments for the module, and the views that wait for their gradients."""

    arguments: Arguments
    views: InputViews | None
    changed: bool


class PairedOutputHook(ActHook):
    """Runs after a forward that an `InputHook` saw begin: finds the same call, even if the module called itself."""

    __slots__ = ()
    ports = ("output", "grad_output")

    @not_alone
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if tracing():
            return followed_by(self.steps, module, args, output)
        if not self.scope.when.active:
            return None
        pass_ = self.pass_of(module)
        if pass_ is None:
            return self.point.repeated(output)
        entered = pass_.leave(self.index, args)
        if entered is None:
            return None
        call, views = entered
        if views is not None:
            views.hook(self.point)
        return self.point.guarded(self.act, pass_, call, output, args)


class ParamGradHook(ActHook):
    """Runs after a parameter's gradient was accumulated."""

    __slots__ = ()
    ports = ("param_grad",)

    def __call__(self, parameter: Tensor) -> None:
        if not self.scope.when.active:
            return
        pass_ = self.scope.pass_of_backward()
        if pass_ is not None and parameter.grad is not None:
            self.point.saw_gradient = True
            changed = self.point.guarded(self.act, pass_, pass_.next_call(self.index), parameter.grad, ())
            if changed is not None:
                parameter.grad = changed


def _nothing(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
    return None
