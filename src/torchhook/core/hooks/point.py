"""A point is a module, a parameter or a mark that a session taps, with the acts bound to it and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchhook.core.compiled import (
    EditStep,
    GradientEditStep,
    GraphStep,
    ObserveStep,
    RefusedStep,
    entered,
    forget,
    steps_in_graphs,
)
from torchhook.core.edit import Editing, GradientEditing
from torchhook.core.errors import NonfiniteError
from torchhook.core.event import recomputing
from torchhook.core.hooks.gradients import InputViews, catching, hooked
from torchhook.core.hooks.outputs import Hook, InputHook, KeepHook, OutputHook, PairedOutputHook, ParamGradHook
from torchhook.core.hooks.registration import Removable, after_forward, registering
from torchhook.core.hooks.replay import Awaited, repeatable
from torchhook.core.hooks.shortcut import keeping
from torchhook.core.page import NEVER, Keep
from torchhook.core.passes import Pass, StopForward
from torchhook.core.shards import is_sharded
from torchhook.core.sink import Act, Receive
from torchhook.core.site import Port, Site
from torchhook.core.tap import Tap
from torchhook.core.trees import Address, Arguments

if TYPE_CHECKING:
    from torchhook.core.session import Session

Bound = tuple[Tap, Site, Act]
"""A tap at one site, and what it does there."""


class Defaults:
    """What most points never set. A model has many points, and attaching must be fast."""

    observers: tuple[ObserveStep, ...] = ()
    steps: tuple[str, ...] = ()
    fired = False  # unless the hook itself knows
    saw_gradient = False
    awaited: Awaited
    input_awaited: Awaited


class Point(Defaults):
    """A place that a session taps: the acts bound there, and the hooks that run them."""

    __slots__ = ("bound", "handles", "hook", "index", "path", "scope", "session", "stops", "target")

    def __init__(self, session: Session, path: str, target: nn.Module | nn.Parameter, stops: bool) -> None:
        self.session = session.reference
        self.scope = session.scope
        self.index = self.scope.add_point(self)
        self.path = path
        self.target = target
        self.stops = stops
        if stops:
            self.scope.stop_sites += 1
        # Tuples, since they are the fastest to make.
        self.bound: tuple[Bound, ...] = ()
        self.handles: tuple[Removable, ...] = ()
        self.hook: Hook | None = None  # the one after the forward

    def bind(self, tap: Tap, site: Site, act: Act) -> None:
        """Let `tap` do `act` at `site`, which is here."""
        self.bound += ((tap, site, act),)

    def places(self) -> dict[Site, type]:
        """The sites here that taps are bound to, with the class of the module or parameter."""
        return {site: type(self.target) for _, site, _ in self.bound}

    def unbind(self, tap: Tap) -> None:
        """Undo `bind`."""
        self.bound = tuple(bound for bound in self.bound if bound[0] is not tap)

    def close(self) -> None:
        """Remove the hooks of a point to which nothing is bound any more; passes no longer wait for it."""
        self.remove()
        self.scope.stop_sites -= self.stops
        self.stops = False

    def install(self) -> None:
        """Register exactly the hooks that the bound acts need."""
        if self.handles:
            self.remove()
        target = self.target
        if not isinstance(target, nn.Module):
            on_gradient = ParamGradHook(self, chained(self._acts("param_grad")))
            self.handles = (target.register_post_accumulate_grad_hook(on_gradient),)
            return
        act = self.bound[0][2]
        hook: Any
        if len(self.bound) == 1 and isinstance(act, Keep) and act.newest and not self.stops:
            hook = self.hook = KeepHook(self, act)
        else:
            hook = self.hook = self._installed_before(target)
        if self.scope.options.full:  # run before the hooks of others, which may take the value apart
            self.handles += (target.register_forward_hook(hook, prepend=True),)
        elif isinstance(hook, KeepHook):
            self.handles = (keeping(target, hook),)
        else:
            self.handles += (after_forward(target, hook),)

    def remove(self) -> None:
        """Remove this point's hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = ()
        self.hook = None  # which has this point: it must not need the garbage collector to let go of its module
        if self.observers:
            self.observers = ()
        if self.steps:
            for name in self.steps:
                forget(name)
            self.steps = ()

    def is_traced(self) -> bool:
        """Whether a compiled graph has the steps of this point."""
        return any(map(steps_in_graphs, self.steps))

    def mark_act(self) -> Act | None:
        """For a mark, which is an identity: the acts on its input, then those on its output."""
        return chained([*map(_as_input, self._acts("input")), *filter(None, [self.output_act()])])

    def output_act(self) -> Act | None:
        """The acts on outputs, then the hooks that catch their gradients, then the stop once everything was seen."""
        acts = self._acts("output")
        catches = self._acts("grad_output")
        if catches:
            acts.append(catching(catches, self))
        if self.stops:
            acts.append(_stopping(self.scope.opener))
        return chained(acts)

    def guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """Run a tap. One that raises ends its session; the error is raised to the caller of the model."""
        try:
            return action(*args)
        except Exception as error:
            session = self.session()
            if session is not None and session.detach_on_error:
                session.abandon()
            if session is not None and session.on_fault is not None:
                session.on_fault(error)
                return None
            if hasattr(error, "add_note") and not isinstance(error, NonfiniteError):  # which says where itself
                error.add_note(f"(raised in a tap at {self.path!r})")
            raise

    def receive(self, receives: list[Receive], number: int, address: Address, gradient: Tensor) -> Tensor | None:
        """Hand a gradient to `receives`; returns the gradient to continue with, or None if none of them changed it."""
        self.saw_gradient = True
        changed = None
        for receive in receives:
            continued = self.guarded(receive, number, address, gradient)
            if continued is not None:
                gradient = changed = continued
        return changed

    def repeated(self, output: Any) -> Any:
        """After a forward that a checkpoint repeats: edits act again, and late gradients can now be caught."""
        if not self._repeats():
            return None
        changed = self._edited("output", output)
        receives = self.awaited.take(output if changed is None else changed)
        if receives is None:
            return changed
        views = hooked(output if changed is None else changed, receives, self)
        return changed if views is None else views

    def repeated_input(self, value: Arguments) -> Any:
        """The same, before such a forward."""
        if not self._repeats():
            return None
        changed = self._edited("input", value)
        receives = self.input_awaited.take(value if changed is None else changed)
        if receives is None:
            return None if changed is None else tuple(changed)
        views = InputViews(value if changed is None else changed, receives)
        views.hook(self)
        return tuple(views.arguments)

    def silent(self) -> list[Site]:
        """The sites here that saw nothing."""
        fired = self.fired
        if not fired or not self.saw_gradient:
            inside = [step for name in self.steps for step in steps_in_graphs(name)]
            fired = fired or any(isinstance(step, EditStep) for step in inside)
            self.saw_gradient = self.saw_gradient or any(isinstance(step, GradientEditStep) for step in inside)
        seen = {"grad_input": self.saw_gradient, "grad_output": self.saw_gradient, "param_grad": self.saw_gradient}
        return [site for _, site, _ in self.bound if not seen.get(site.port, fired)]

    def observer(self, number: int) -> ObserveStep:
        """The observer that a compiled graph knows by this number."""
        if not self.observers:  # a `KeepHook` has made none
            self.observers = (ObserveStep(self, 0, self._acts("output"), []),)
        return self.observers[number]

    def _repeats(self) -> bool:
        return recomputing() and self.scope.sees_backward()

    def _edited(self, port: Port, value: Any) -> Any:
        edits = [repeatable(act, site) for tap, site, act in self.bound if tap.edits and site.port == port]
        act = chained(edits)
        return None if act is None else self.guarded(act, None, 0, value, ())

    def _installed_before(self, module: nn.Module) -> Hook:
        """For any mixture of ports: register the hook before the forward; returns the one for after it."""
        self.awaited, self.input_awaited = Awaited(), Awaited()
        self.observers, self.steps = (), ()
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

    def _steps(self, ports: tuple[Port, ...], grad_port: Port) -> str:
        """The name of the steps for a compiled graph."""
        name = entered(partial(self._made, ports, grad_port))
        self.steps += (name,)
        return name

    def _made(self, ports: tuple[Port, ...], grad_port: Port) -> tuple[GraphStep, ...]:
        """The steps for a compiled graph: the acts at `ports`, then those on gradients at `grad_port`."""
        steps: list[GraphStep] = []
        observing: list[Act] = []  # consecutive observers become one op
        for tap, site, act in self.bound:
            if site.port not in ports:
                continue
            if not tap.edits:
                observing.append(act)
                continue
            if observing:
                steps.append(self._observe_step(observing, [], grad_port))
                observing = []
            if isinstance(act, Editing):
                steps.append(EditStep(act))
            else:
                steps.append(
                    RefusedStep(f"the edit at the {site} has a schedule, which a compiled graph cannot follow")
                )
        catches = [act for tap, site, act in self.bound if site.port == grad_port and not tap.edits]
        if observing or catches:
            steps.append(self._observe_step(observing, catches, grad_port))
        steps += [GradientEditStep(act.editing) for act in self._acts(grad_port) if isinstance(act, GradientEditing)]
        return tuple(steps)

    def _observe_step(self, acts: list[Act], catches: list[Act], grad_port: Port) -> ObserveStep:
        step = ObserveStep(self, len(self.observers), acts, catches, grad_port == "grad_input")
        self.observers += (step,)
        return step


def unheard(points: Iterable[Point]) -> list[Point]:
    """The points that may have seen nothing: all but those whose `KeepHook` has kept something."""
    return [point for point in points if not isinstance(point.hook, KeepHook) or point.hook.number == NEVER]


def install(points: Iterable[Point]) -> None:
    """Hook all `points`."""
    with registering:
        for point in points:
            point.install()


def chained(acts: list[Act]) -> Act | None:
    """The acts one after the other, each with the value that the one before continues with."""
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


def _as_input(act: Act) -> Act:
    return lambda pass_, call, value, args: act(pass_, call, Arguments((value,), {}), args)


def parameter_of(module: nn.Module, name: str, shard: nn.Parameter | None) -> Callable[[], Tensor]:
    """A function that looks a parameter up when its module is called, since it may have been replaced.

    While FSDP computes, the gathered parameter is in its place; if a `shard` is wanted, that is returned instead.
    """
    get = attrgetter(name)
    if shard is None:
        return lambda: get(module)
    return lambda: found if is_sharded(found := get(module)) else shard


def on_parameter(act: Act, parameter: Callable[[], Tensor]) -> Act:
    """The act with a parameter as its value: what `parameter` returns."""

    def see(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        return act(pass_, call, parameter(), args)

    return see


def _stopping(session: object) -> Act:
    """The act that stops the forward once every site was seen."""

    def stop(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        if call == 0 and not pass_.outside:
            pass_.stop_sites_left -= 1
            if not pass_.stop_sites_left:
                raise StopForward(session)

    return stop
