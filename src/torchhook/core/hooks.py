"""The torch hooks of a session: the only file that registers any.

A `Point` is one hooked module; it installs at most one hook before and one after the forward, which
serve all ports there. A hook holds its session weakly, and a copy or a pickle of it is an inert
stand-in from the standard library: copies of a hooked model record nothing and load anywhere.

Gradients come from tensor hooks that the forward hook puts on what flows. They see the gradient of
the value as it was there and then, also if a later op overwrites it, in any container.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchhook.core.passes import Pass, Scope
from torchhook.core.site import Port, Site
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Act, Keep, Receive, Tap
from torchhook.core.trees import Address, Arguments, leaves, replaced
from torchhook.errors import SessionError

if TYPE_CHECKING:
    from torchhook.core.session import Session

_CALL = nn.Module._wrapped_call_impl.__code__
_thread = threading.get_ident
_lazy_clone = torch._lazy_clone
# tensor.data, and a TypeError for whatever else has such an attribute
_data: Callable[[Tensor], Tensor] = vars(torch._C.TensorBase)["data"].__get__
# torch numbers its handles without a lock. Reentrant, for a collected session may be released at any time.
_registering = threading.RLock()


Bound = tuple[Tap, Site, Act]
"""One tap at one site, ready to act."""


class Removable(Protocol):
    """What torch hands back for a hook."""

    def remove(self) -> None:
        """Take the hook away."""


class StopForward(BaseException):
    """Ends a forward once all is seen. Not an Exception: a model's own handlers must not catch it."""

    def __init__(self, token: object) -> None:
        self.token = token


class Hook:
    """What torch calls: routes a call to its pass, then runs the acts bound to this place."""

    __slots__ = ("act", "index", "point", "scope")
    ports: ClassVar[tuple[Port, ...]] = ()

    def __init__(self, point: Point, act: Act | None) -> None:
        self.point = point
        self.scope = point.scope
        self.index = point.index
        self.act: Act = act or _nothing

    def pass_of(self, module: nn.Module) -> Pass | None:
        """The pass that this call belongs to, None if another thread's."""
        scope = self.scope
        if scope.current is None or _thread() != scope.home:
            return scope.route(module)
        return scope.current

    def __reduce__(self) -> tuple[Any, ...]:
        # nullcontext().__exit__ takes anything and returns None: a hook that does nothing.
        return getattr, (nullcontext(), "__exit__")


class OutputHook(Hook):
    """After a forward: outputs, and the hooks on them that catch their gradients."""

    __slots__ = ()
    ports = ("output", "grad_output")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        pass_ = self.pass_of(module)
        if pass_ is None:
            return None
        return self.point.guarded(self.act, pass_, pass_.count(self.index), output, args)


class KeepHook(Hook):
    """After a forward whose newest output is kept and no more: `OutputHook` and `Keep` in one breath.

    The hook holds the value itself and is what the page lists. A pass's value takes the place of the
    one before, because memory that was freed just now is the fastest to have.
    """

    __slots__ = ("number", "site", "value")
    ports = ("output",)
    value: Any

    def __init__(self, point: Point, act: Keep) -> None:
        self.point = point
        self.scope = point.scope
        self.site = act.site
        self.number = -1  # of the pass that the value is from

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scope = self.scope
        pass_ = scope.current
        if pass_ is None or _thread() != scope.home:
            pass_ = scope.route(module)
            if pass_ is not None:
                pass_.keep((self.site, None, snapshot(output)))
            return
        try:
            value = _lazy_clone(_data(output) if pass_.graded else output)
        except (TypeError, RuntimeError):  # a container, or no copy on write for it
            value = snapshot(output)
        if self.number == pass_.number:  # called before in this pass
            pass_.keep((self.site, None, value))
        else:
            self.number = pass_.number
            self.value = value
            pass_.keep(self)


class InputHook(Hook):
    """Before a forward: inputs and parameters, and the views that catch the inputs' gradients."""

    __slots__ = ("catches",)
    ports = ("param", "input", "grad_input")

    def __init__(self, point: Point, act: Act | None, catches: list[Act]) -> None:
        super().__init__(point, act)
        self.catches = catches

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pass_ = self.pass_of(module)
        if pass_ is None:
            return None
        call = pass_.count(self.index)
        views = self.point.guarded(self.begin, pass_, call, Arguments(args, kwargs), args)
        pass_.enter(self.index, call, views, args if views is None else views.arguments.args)
        return None if views is None else tuple(views.arguments)

    def begin(self, pass_: Pass, call: int, value: Arguments, args: tuple[Any, ...]) -> Views | None:
        """Run the acts, and make the views if gradients are wanted."""
        self.act(pass_, call, value, args)
        if not self.catches:
            return None
        return Views(value, [catch(pass_, call, value, args) for catch in self.catches])


class PairedOutputHook(Hook):
    """After a forward that an `InputHook` saw begin: the same call, whatever was called inside it."""

    __slots__ = ()
    ports = ("output", "grad_output")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        pass_ = self.pass_of(module)
        if pass_ is None:
            return None
        entered = pass_.leave(self.index, args)
        if entered is None:
            return None
        call, views = entered
        if views is not None:
            views.hook(self.point)
        return self.point.guarded(self.act, pass_, call, output, args)


class Views:
    """A call's inputs as identity views, so that a gradient through this module alone can be told.

    The views are hooked after the forward. If it overwrote its input in place, the view is no longer
    part of the graph, and the gradient is caught at the input's origin instead.
    """

    __slots__ = ("arguments", "receives", "seen")

    def __init__(self, arguments: Arguments, receives: list[Receive]) -> None:
        self.receives = receives
        self.seen: list[tuple[int, Address, Tensor, int, Origin | None]] = []
        views: dict[int, Tensor] = {}  # by number of the leaf: a tensor may be given twice
        if torch.is_grad_enabled():
            for number, (address, x) in enumerate(leaves(arguments)):
                if x.requires_grad:
                    view = views[number] = x.view_as(x)
                    self.seen.append((number, address, view, view._version, Origin.of(x)))
        self.arguments = replaced(arguments, views) if views else arguments

    def hook(self, point: Point) -> None:
        """Catch the gradients of the views."""
        for number, address, view, version, origin in self.seen:
            hook = GradHook(point, self.receives, number, address)
            if view._version == version:
                view.register_hook(hook)
            elif origin is not None:  # always, for autograd lets no leaf be overwritten
                origin.hook(hook)


class Origin(NamedTuple):
    """The node that made a tensor, or made what it is a view of.

    It knows the tensor's gradient even after that was overwritten in place (with whatever used the
    same memory before).
    """

    node: Any
    output: int
    whole: tuple[torch.Size, tuple[int, ...]]
    part: tuple[torch.Size, tuple[int, ...], int]

    @staticmethod
    def of(x: Tensor) -> Origin | None:
        """Where `x` comes from, None if it is a leaf or a part of one."""
        base = x if x._base is None else x._base
        if base.grad_fn is None:
            return None
        part = (x.shape, x.stride(), int(x.storage_offset() - base.storage_offset()))
        return Origin(base.grad_fn, base.output_nr, (base.shape, base.stride()), part)

    def hook(self, hook: Callable[[Tensor], None], when: Callable[[], bool] = lambda: True) -> None:
        """Have `hook` told of the tensor's gradient, if then `when` holds."""

        def told(grads: tuple[Tensor | None, ...]) -> None:
            gradient = grads[self.output]
            if gradient is not None and when():
                whole = gradient.new_empty_strided(*self.whole).copy_(gradient)
                hook(whole.as_strided(*self.part))

        self.node.register_prehook(told)


class GradHook:
    """On a tensor that flowed: hands its gradient on, as long as the session is open."""

    __slots__ = ("address", "number", "point", "receives")
    __torch_unserializable__ = True  # torch.save of a tensor that carries it need not warn

    def __init__(self, point: Point, receives: list[Receive], number: int, address: Address) -> None:
        self.point = point
        self.receives = receives
        self.number = number
        self.address = address

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None and self.point.scope.alive:
            for receive in self.receives:
                self.point.guarded(receive, self.number, self.address, gradient)


class ParamGradHook(Hook):
    """After a parameter's gradient was accumulated."""

    __slots__ = ()
    ports = ("param_grad",)

    def __call__(self, parameter: Tensor) -> None:
        pass_ = self.scope.route_backward()
        if pass_ is not None and parameter.grad is not None:
            self.point.guarded(self.act, pass_, pass_.count(self.index), parameter.grad, ())


class Door:
    """Around a model's call while sessions look on: tells them of its passes, and lets them stop one.

    It sits in the slot of ``Module.compile``, which is asked before all hooks and left out of copies
    and pickles. Unlike hooks it sees every end of a forward, a KeyboardInterrupt too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inner = model._compiled_call_impl
        self.scopes: tuple[Scope, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that copy or pickle all they have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, call = self.model, self.inner or self.model._call_impl
        frame = sys._getframe(1)
        caller = frame.f_locals["self"] if frame.f_code is _CALL else model
        if caller is not model:  # a replica of DataParallel's, or a copy made by hand, has our slot too
            if not caller.__dict__.get("_is_replica"):
                return caller._call_impl(*args, **kwargs)
            model, call = caller, caller._call_impl
        begun = [scope for scope in self.scopes if scope.begin(model, args)]
        try:
            result = call(*args, **kwargs)
            return None if any(scope.has_stopped() for scope in begun) else result  # a bare except may eat the stop
        except StopForward as stop:
            if any(stop.token is scope.token for scope in begun):
                return None
            raise
        finally:
            for scope in begun:
                scope.end()

    @staticmethod
    def open(model: nn.Module, scope: Scope) -> None:
        """Let `scope` know of the model's passes."""
        with _registering:
            if not isinstance(model._compiled_call_impl, Door):
                model._compiled_call_impl = Door(model)
            door: Door = model._compiled_call_impl
            door.scopes = (*door.scopes, scope)

    @staticmethod
    def close(model: nn.Module, scope: Scope) -> None:
        """Undo `open`."""
        with _registering:
            door = model._compiled_call_impl
            if not isinstance(door, Door):
                return
            door.scopes = tuple(known for known in door.scopes if known is not scope)
            if not door.scopes:
                del model._compiled_call_impl
                if door.inner is not None:
                    model._compiled_call_impl = door.inner


class Point:
    """One place of a session, a module, a parameter or a mark: the acts bound there, the hooks for them."""

    __slots__ = ("bound", "handles", "index", "path", "scope", "session", "stops", "target")

    def __init__(self, session: Session, path: str, target: nn.Module | nn.Parameter, stops: bool) -> None:
        self.session = weakref.ref(session)
        self.scope = session.scope
        self.index = self.scope.new_site()
        self.scope.awaited += stops
        self.path = path
        self.target = target
        self.stops = stops
        # Tuples, since a model has many points and a tuple is the least to make.
        self.bound: tuple[Bound, ...] = ()
        self.handles: tuple[Removable, ...] = ()

    def bind(self, tap: Tap, path: str, module: nn.Module, parameter: str | None = None) -> None:
        """Let `tap` act here, on the site at `path`; `parameter` names the one of `module` that it is."""
        site = Site(path, tap.port)
        act = tap.bind(site, module, self.scope)
        if parameter is not None:
            act = _on_parameter(act, module, parameter)
        self.bound += ((tap, site, act),)

    def places(self) -> dict[Site, type]:
        """The sites that something is bound to, with the class of what is there."""
        return {site: type(self.target) for _, site, _ in self.bound}

    def unbind(self, tap: Tap) -> None:
        """Let `tap` act here no more."""
        self.bound = tuple(bound for bound in self.bound if bound[0] is not tap)

    def close(self) -> None:
        """Nothing is bound here any more."""
        self.remove()
        self.scope.awaited -= self.stops
        self.stops = False

    def install(self) -> None:
        """Put exactly the hooks in place that the bound acts need."""
        if self.handles:
            self.remove()
        if isinstance(self.target, nn.Module):
            try:
                self._install_on_module(self.target)
            except RuntimeError as error:
                raise SessionError(
                    f"{self.path or 'the model'!r} is a {type(self.target).__name__}, which takes no hooks"
                    f" ({error}); hook the module that it was made from"
                ) from error
        else:
            hook = ParamGradHook(self, chained(self._acts("param_grad")))
            self.handles = (self.target.register_post_accumulate_grad_hook(hook),)

    def remove(self) -> None:
        """Take this point's hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles = ()

    def mark_act(self) -> Act | None:
        """For a mark, which is an identity: what comes in, then as for an output."""
        return chained([*map(_as_input, self._acts("input")), *filter(None, [self.output_act()])])

    def output_act(self) -> Act | None:
        """Outputs, then the hooks that catch their gradients, then, once all is seen, the stop."""
        acts = self._acts("output")
        catches = self._acts("grad_output")
        if catches:
            acts.append(_catching(catches, self))
        if self.stops:
            acts.append(_stopping(self.scope.token))
        return chained(acts)

    def guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run a tap. One that raises ends its session; the error goes on to whoever called the model."""
        try:
            return action(*args)
        except Exception as error:
            session = self.session()
            if session is not None and session.detach_on_error:
                session.abandon()
            if hasattr(error, "add_note"):
                error.add_note(f"(raised in a tap at {self.path!r})")
            raise

    def _install_on_module(self, module: nn.Module) -> None:
        hook: Hook
        act = self.bound[0][2]
        if len(self.bound) == 1 and isinstance(act, Keep) and act.newest and not self.stops:
            hook = KeepHook(self, act)
        elif any(site.port in InputHook.ports for _, site, _ in self.bound):
            before = chained(self._acts("param") + self._acts("input"))
            before_hook = InputHook(self, before, self._acts("grad_input"))
            self.handles = (module.register_forward_pre_hook(before_hook, with_kwargs=True),)
            hook = PairedOutputHook(self, self.output_act())
        else:
            hook = OutputHook(self, self.output_act())
        self.handles += (module.register_forward_hook(hook),)

    def _acts(self, port: Port) -> list[Act]:
        return [act for _, site, act in self.bound if site.port == port]


def install(points: Iterable[Point]) -> None:
    """Hook all `points`."""
    with _registering:
        for point in points:
            point.install()


def chained(acts: list[Act]) -> Act | None:
    """The acts one after the other, each given the value that the one before let continue."""
    if len(acts) < 2:
        return acts[0] if acts else None

    def chain(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        changed = None
        for act in acts:
            continued = act(pass_, call, value, args)
            if continued is not None:
                value = changed = continued
        return changed

    return chain


def _nothing(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
    return None


def _as_input(act: Act) -> Act:
    return lambda pass_, call, value, args: act(pass_, call, Arguments((value,), {}), args)


def _on_parameter(act: Act, module: nn.Module, name: str) -> Act:
    """The act on a parameter of `module`, when that is called. It is looked up then: it may be another one."""
    get = attrgetter(name)
    return lambda pass_, call, value, args: act(pass_, call, get(module), args)


def _catching(catches: list[Act], point: Point) -> Act:
    """The act that hooks every tensor in an output for its gradient."""

    def catch(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        receives = [act(pass_, call, value, args) for act in catches]
        views: dict[int, Tensor] = {}
        for number, (address, tensor) in enumerate(leaves(value)):
            if not tensor.requires_grad:
                continue
            if tensor.is_leaf:  # a hook on a parameter would outlive this call: it goes on a view
                if not torch.is_grad_enabled():
                    continue
                views[number] = tensor.view_as(tensor)
            hook = GradHook(point, receives, number, address)
            views.get(number, tensor).register_hook(hook)
            if tensor._base is not None and not tensor.is_leaf:
                _catch_if_overwritten(tensor, hook)
        return replaced(value, views) if views else None

    return catch


def _catch_if_overwritten(view: Tensor, hook: GradHook) -> None:
    """A view that is overwritten leaves the graph, and its hook with it: then its origin is asked."""
    origin = Origin.of(view)
    if origin is not None:
        alias, version = view.detach(), view._version  # not the view: a graph must not hold itself
        origin.hook(hook, when=lambda: alias._version != version)


def _stopping(token: object) -> Act:
    """The act that ends the pass once every site was seen."""

    def stop(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        if call == 0 and not pass_.outside:
            pass_.waiting -= 1
            if not pass_.waiting:
                raise StopForward(token)

    return stop
