"""The torch hooks of a session: the only file that registers any.

A `Point` is one hooked module; it installs at most one hook before and one after the forward, which
serve all ports there. A hook holds its session weakly, and a copy or a pickle of it is an inert
stand-in from the standard library: copies of a hooked model record nothing and load anywhere.

Gradients come from tensor hooks that the forward hook puts on what flows. They see the gradient of
the value as it was there and then, also if a later op overwrites it, in any container. Where a forward
is computed again in the backward (checkpointing), edits act again, and gradients that only the second
run can tell are caught there.

A hook that ``torch.compile`` traces leaves its `steps` in the graph instead (see `core.compiled`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchhook.core.compiled import (
    Impossible,
    Inlay,
    Regrading,
    Retracing,
    Step,
    entered,
    followed,
    forget,
    leave_keeping,
    received,
    traced_names,
    tracing,
)
from torchhook.core.edit import Editing, GradientEditing
from torchhook.core.errors import NonfiniteError, TapError
from torchhook.core.event import recomputing
from torchhook.core.passes import Pass, StopForward
from torchhook.core.shards import is_sharded
from torchhook.core.site import Port, Site
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Act, Keep, Receive, Tap, at_once, is_at_once
from torchhook.core.trees import Address, Arguments, leaves, replaced

if TYPE_CHECKING:
    from torchhook.core.session import Session

_thread = threading.get_ident
_lazy_clone = torch._lazy_clone
# tensor.data, and a TypeError for whatever else has such an attribute
_data: Callable[[Tensor], Tensor] = vars(torch._C.TensorBase)["data"].__get__
# torch numbers its handles without a lock. Reentrant, for a collected session may be released at any time.
_registering = threading.RLock()
_NEVER = -2  # the number of no pass
_MOST_AWAITED = 1_000


Bound = tuple[Tap, Site, Act]
"""One tap at one site, ready to act."""


class Removable(Protocol):
    """What torch hands back for a hook."""

    def remove(self) -> None:
        """Take the hook away."""


class Hook:
    """What torch calls: routes a call to its pass, then runs the acts bound to this place."""

    __slots__ = ("act", "index", "point", "scope", "steps")
    ports: ClassVar[tuple[Port, ...]] = ()

    def __init__(self, point: Point, act: Act | None, steps: str = "") -> None:
        self.point = point
        self.scope = point.scope
        self.index = point.index
        self.act: Act = act or _nothing
        self.steps = steps  # the name of what it leaves in a compiled graph

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
        if tracing():
            return followed(self.steps, output)
        if not self.scope.when.active:
            return None
        pass_ = self.pass_of(module)
        if pass_ is None:
            return self.point.repeated(output)
        self.point.fired = True
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
        self.number = _NEVER  # of the pass that the value is from

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if tracing():
            leave_keeping(output, self.scope.key, self.point.index)
            return
        scope = self.scope
        pass_ = scope.current
        if pass_ is None or _thread() != scope.home:
            pass_ = scope.route(module)
            if pass_ is not None:
                self.point.fired = True
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

    def __init__(self, point: Point, act: Act | None, catches: list[Act], steps: str) -> None:
        super().__init__(point, act, steps)
        self.catches = catches

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # another thread calls while torch adds this hook: that it takes keywords is said last
            return None
        if tracing():
            return tuple(followed(self.steps, Arguments(args, kwargs)))
        if not self.scope.when.active:
            return None
        pass_ = self.pass_of(module)
        if pass_ is None:
            return self.point.repeated_input(Arguments(args, kwargs))
        self.point.fired = True
        call = pass_.count(self.index)
        begun = self.point.guarded(self.begin, pass_, call, Arguments(args, kwargs), args)
        if begun is None:  # it failed, and nobody is to suffer from that
            return None
        pass_.enter(self.index, call, begun.views, begun.arguments.args)
        return tuple(begun.arguments) if begun.arguments.args is not args or begun.changed else None

    def begin(self, pass_: Pass, call: int, value: Arguments, args: tuple[Any, ...]) -> Begun:
        """Run the acts, and make the views if gradients are wanted."""
        changed = self.act(pass_, call, value, args)
        value = value if changed is None else changed
        if not self.catches:
            return Begun(value, None, changed is not None)
        receives = received(self.catches, pass_, call, value, args)
        if not receives:
            return Begun(value, None, changed is not None)
        if pass_.graded and not torch.is_grad_enabled():
            self.point.input_awaited.put(value, receives)
        views = Views(value, receives)
        return Begun(views.arguments, views, True)


class Begun(NamedTuple):
    """A call that begins: what the module is given, and what waits for its gradients."""

    arguments: Arguments
    views: Views | None
    changed: bool


class PairedOutputHook(Hook):
    """After a forward that an `InputHook` saw begin: the same call, whatever was called inside it."""

    __slots__ = ()
    ports = ("output", "grad_output")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if tracing():
            return followed(self.steps, output)
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

    def hook(self, hook: GradHook, when: Callable[[], bool] = lambda: True) -> None:
        """Have `hook` told of the tensor's gradient, if then `when` holds."""

        output, whole_like, part_like = self.output, self.whole, self.part  # the node must not hold itself

        def told(grads: tuple[Tensor | None, ...]) -> None:
            gradient = grads[output]
            if gradient is not None and when():
                whole = gradient.new_empty_strided(*whole_like).copy_(gradient)
                if hook(whole.as_strided(*part_like)) is not None:
                    raise TapError(
                        f"the gradient at {hook.point.path!r} cannot be edited, since a later op overwrote that value"
                        " in place; make that op out of place, or edit the gradient one module further on"
                    )

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

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not self.point.scope.alive:
            return None
        return self.point.receive(self.receives, self.number, self.address, gradient)


class ParamGradHook(Hook):
    """After a parameter's gradient was accumulated."""

    __slots__ = ()
    ports = ("param_grad",)

    def __call__(self, parameter: Tensor) -> None:
        if not self.scope.when.active:
            return
        pass_ = self.scope.route_backward()
        if pass_ is not None and parameter.grad is not None:
            self.point.graded = True
            changed = self.point.guarded(self.act, pass_, pass_.count(self.index), parameter.grad, ())
            if changed is not None:
                parameter.grad = changed


class Spare:
    """What a point has that most points never need: a model has many points, and they are made in a hurry."""

    inlays: tuple[Inlay, ...] = ()
    steps: Mapping[str, tuple[Step, ...]] = {}
    fired = False  # unless the hook itself knows
    graded = False  # whether a gradient came
    awaited: Awaited
    input_awaited: Awaited


class Point(Spare):
    """One place of a session, a module, a parameter or a mark: the acts bound there, the hooks for them."""

    __slots__ = ("bound", "handles", "hook", "index", "path", "scope", "session", "stops", "target")

    def __init__(self, session: Session, path: str, target: nn.Module | nn.Parameter, stops: bool) -> None:
        self.session = session.reference
        self.scope = session.scope
        self.index = self.scope.add(self)
        self.path = path
        self.target = target
        self.stops = stops
        if stops:
            self.scope.awaited += 1
        # Tuples, since they are the least to make.
        self.bound: tuple[Bound, ...] = ()
        self.handles: tuple[Removable, ...] = ()
        self.hook: Hook | None = None  # the one after the forward

    def bind(
        self, tap: Tap, path: str, module: nn.Module, port: Port, parameter: Callable[[], Tensor] | None = None
    ) -> None:
        """Let `tap` act here, on the `port` of `path`; `parameter` gets the parameter of `module` that is meant."""
        site = Site(path, port)
        act = tap.bind(site, module, self.scope)
        if parameter is not None:
            act = _on_parameter(act, parameter)
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
        target = self.target
        if not isinstance(target, nn.Module):
            on_parameter = ParamGradHook(self, chained(self._acts("param_grad")))
            self.handles = (target.register_post_accumulate_grad_hook(on_parameter),)
            return
        act = self.bound[0][2]
        hook: Any
        if len(self.bound) == 1 and isinstance(act, Keep) and act.newest and not self.stops:
            hook = self.hook = KeepHook(self, act)
        else:
            hook = self.hook = self._installed_before(target)
        if self.scope.full:  # seen before others' hooks, which may hand on a part of it alone
            self.handles += (target.register_forward_hook(hook, prepend=True),)
        else:
            self.handles += (target.register_forward_hook(hook),)

    def remove(self) -> None:
        """Take this point's hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles = ()
        if self.steps:
            for name in self.steps:
                forget(name)
            self.steps = {}

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
            if session is not None and session.on_fault is not None:
                session.on_fault(error)
                return None
            if hasattr(error, "add_note") and not isinstance(error, NonfiniteError):  # which tells where itself
                error.add_note(f"(raised in a tap at {self.path!r})")
            raise

    def receive(self, receives: list[Receive], number: int, address: Address, gradient: Tensor) -> Tensor | None:
        """A gradient came; the one that continues, if somebody changed it."""
        self.graded = True
        changed = None
        for receive in receives:
            continued = self.guarded(receive, number, address, gradient)
            if continued is not None:
                gradient = changed = continued
        return changed

    def repeated(self, output: Any) -> Any:
        """A forward that is computed again: edits act again, and gradients are caught that only now can be."""
        if not self._repeats():
            return None
        changed = self._edited("output", output)
        receives = self.awaited.take(output if changed is None else changed)
        if receives is None:
            return changed
        views = _hooked(output if changed is None else changed, receives, self)
        return changed if views is None else views

    def repeated_input(self, value: Arguments) -> Any:
        """The same before it."""
        if not self._repeats():
            return None
        changed = self._edited("input", value)
        receives = self.input_awaited.take(value if changed is None else changed)
        if receives is None:
            return None if changed is None else tuple(changed)
        views = Views(value if changed is None else changed, receives)
        views.hook(self)
        return tuple(views.arguments)

    def silent(self) -> list[Site]:
        """What is bound here and saw nothing."""
        fired = self.fired
        if not fired or not self.graded:
            inside = [step for name in self.steps if name in traced_names for step in self.steps[name]]
            fired = fired or any(isinstance(step, Retracing) for step in inside)
            self.graded = self.graded or any(isinstance(step, Regrading) for step in inside)
        seen = {"grad_input": self.graded, "grad_output": self.graded, "param_grad": self.graded}
        return [site for _, site, _ in self.bound if not seen.get(site.port, fired)]

    def inlay(self, number: int) -> Inlay:
        """What a compiled graph knows by this number."""
        if not self.inlays:  # of a hook that only keeps
            self.inlays = (Inlay(self, 0, self._acts("output"), []),)
        return self.inlays[number]

    def _repeats(self) -> bool:
        return recomputing() and self.scope.sees_backward()

    def _edited(self, port: Port, value: Any) -> Any:
        edits = [_once_more(act, site) for tap, site, act in self.bound if tap.edits and site.port == port]
        act = chained(edits)
        return None if act is None else self.guarded(act, None, 0, value, ())

    def _installed_before(self, module: nn.Module) -> Hook:
        """For any mixture of ports: the hook for after the forward, once that for before is in place."""
        self.awaited, self.input_awaited = Awaited(), Awaited()
        self.inlays, self.steps = (), {}
        before = any(site.port in InputHook.ports for _, site, _ in self.bound)
        if before:
            act = chained(self._acts("param") + self._acts("input"))
            steps = self._steps(("param", "input"), "grad_input")
            hook = InputHook(self, act, self._acts("grad_input"), steps)
            self.handles = (module.register_forward_pre_hook(hook, with_kwargs=True),)
        after = PairedOutputHook if before else OutputHook
        return after(self, self.output_act(), self._steps(("output",), "grad_output"))

    def _acts(self, port: Port) -> list[Act]:
        return [act for _, site, act in self.bound if site.port == port]

    def _steps(self, ports: tuple[Port, ...], graded: Port) -> str:
        """The name of what a compiled graph gets of the acts at `ports`, and of those at `graded` after them."""
        steps: list[Step] = []
        observing: list[Act] = []  # several that follow one another are one op
        for tap, site, act in self.bound:
            if site.port not in ports:
                continue
            if not tap.edits:
                observing.append(act)
                continue
            if observing:
                steps.append(self._new_inlay(observing, []))
                observing = []
            if isinstance(act, Editing):
                steps.append(Retracing(act))
            else:
                steps.append(Impossible(f"the edit at the {site} has a schedule, which a compiled graph cannot follow"))
        catches = [act for tap, site, act in self.bound if site.port == graded and not tap.edits]
        if observing or catches:
            steps.append(self._new_inlay(observing, catches))
        steps += [Regrading(act.editing) for act in self._acts(graded) if isinstance(act, GradientEditing)]
        name = entered(tuple(steps))
        self.steps = {**self.steps, name: tuple(steps)}
        return name

    def _new_inlay(self, acts: list[Act], catches: list[Act]) -> Inlay:
        inlay = Inlay(self, len(self.inlays), acts, catches)
        self.inlays += (inlay,)
        return inlay


class Awaited:
    """Calls in the first run of a reentrant checkpoint, which has no graph: the second run has the gradients.

    A second run is told from others of the same place by a sample of its values.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[Tensor | None, list[Receive]]] = deque(maxlen=_MOST_AWAITED)

    def put(self, value: Any, receives: list[Receive]) -> None:
        """A call was run for the first time."""
        self.calls.append((_sample(value), receives))

    def take(self, value: Any) -> list[Receive] | None:
        """Who waits for the gradients of the call that is run again with `value`."""
        if not self.calls:
            return None
        sample = _sample(value)
        for position in range(len(self.calls) - 1, -1, -1):  # checkpoints are computed again from last to first
            known, receives = self.calls[position]
            only_one = len(self.calls) == 1  # no need to compare, for which an accelerator would be waited for
            if only_one or (known is not None and sample is not None and torch.equal(known, sample)):
                del self.calls[position]
                return receives
        return None


class Sentinel:
    """On a module that is armed: does nothing, but a compiler that saw it notices hooks that come later."""

    def __call__(self, *_: Any) -> None:
        return None

    __reduce__ = Hook.__reduce__


def armed(module: nn.Module) -> list[Removable]:
    """Put sentinels onto `module`."""
    return [module.register_forward_hook(Sentinel()), module.register_forward_pre_hook(Sentinel())]


def on_gradient(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> Removable:
    """Let `change` change every gradient of `parameter` before it is accumulated."""
    handle: Removable = parameter.register_hook(change)
    return handle


def on_step(optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
    """Let `before` and `after` be called around every step of `optimizer`: both, or neither."""
    handles: list[Removable] = []
    try:
        handles.append(optimizer.register_step_pre_hook(before))
        handles.append(optimizer.register_step_post_hook(after))
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return handles


def on_any_step(before: Callable[..., None], after: Callable[..., None]) -> list[Removable]:
    """Let `before` and `after` be called around every step of every optimizer."""
    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def on_any_call(before: Callable[..., None]) -> Removable:
    """Let `before` be called before every call of every module."""
    handle: Removable = register_module_forward_pre_hook(before)
    return handle


def unheard(points: Iterable[Point]) -> list[Point]:
    """Those that may have seen nothing: not the many whose only hook has kept something."""
    return [point for point in points if type(point.hook) is not KeepHook or point.hook.number == _NEVER]


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


def on_parameter(module: nn.Module, name: str, shard: nn.Parameter | None) -> Callable[[], Tensor]:
    """Gets a parameter when its module is called. It is looked up then: it may be another one.

    While FSDP computes, it has the gathered one in that place; what is wanted may be the `shard` that is here.
    """
    get = attrgetter(name)
    if shard is None:
        return lambda: get(module)
    return lambda: found if is_sharded(found := get(module)) else shard


def _on_parameter(act: Act, parameter: Callable[[], Tensor]) -> Act:
    def see(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        return act(pass_, call, parameter(), args)

    return at_once(see) if is_at_once(act) else see


def _once_more(act: Act, site: Site) -> Act:
    """The act of an edit where a checkpoint computes again; which call of which pass it is, nobody knows."""
    if isinstance(act, Editing) and not act.edit.by_call:
        return act
    raise TapError(
        f"the edit at the {site} differs from call to call or has a schedule, and which call a checkpoint computes"
        " again cannot be told; give it one tensor for all calls and passes, or turn checkpointing off"
    )


def _catching(catches: list[Act], point: Point) -> Act:
    """The act that hooks every tensor in an output for its gradient."""

    def catch(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        receives = received(catches, pass_, call, value, args)
        if not receives:
            return None
        if pass_.graded and not torch.is_grad_enabled():
            point.awaited.put(value, receives)
        return _hooked(value, receives, point)

    return catch


def _hooked(value: Any, receives: list[Receive], point: Point) -> Any:
    """Hook every tensor in `value` for its gradient; the value that continues, if it is another one."""
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


def _sample(value: Any) -> Tensor | None:
    """A few of the numbers in `value`."""
    row: Tensor | None = next((tensor.detach() for _, tensor in leaves(value)), None)
    while row is not None and row.dim() > 1 and row.numel():
        row = row[0]
    return row if row is None or not row.dim() else row[:64].clone()


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
