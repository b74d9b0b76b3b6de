"""A point is one place of a session: a module, a parameter or a mark, with the acts bound there and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    traced_names,
)
from torchhook.core.edit import Editing, GradientEditing
from torchhook.core.errors import NonfiniteError
from torchhook.core.event import recomputing
from torchhook.core.hooks.gradients import InputViews, catching, hooked
from torchhook.core.hooks.outputs import Hook, InputHook, KeepHook, OutputHook, PairedOutputHook, ParamGradHook
from torchhook.core.hooks.registration import Removable, registering
from torchhook.core.hooks.replay import Awaited, again
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
"""One tap at one site, ready to act."""


class Defaults:
    """What most points never set: a model has many points, and attaching must be quick."""

    observers: tuple[ObserveStep, ...] = ()
    steps: Mapping[str, tuple[GraphStep, ...]] = {}
    fired = False  # unless the hook itself knows
    saw_gradient = False
    awaited: Awaited
    input_awaited: Awaited


class Point(Defaults):
    """One place of a session: the acts bound there, and the hooks that run them."""

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
        self.scope.stop_sites -= self.stops
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
        if self.scope.options.full:  # seen before others' hooks, which may hand on a part of it alone
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
            acts.append(catching(catches, self))
        if self.stops:
            acts.append(_stopping(self.scope.opener))
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
        self.saw_gradient = True
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
        views = hooked(output if changed is None else changed, receives, self)
        return changed if views is None else views

    def repeated_input(self, value: Arguments) -> Any:
        """The same before it."""
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
        """What is bound here and saw nothing."""
        fired = self.fired
        if not fired or not self.saw_gradient:
            inside = [step for name in self.steps if name in traced_names for step in self.steps[name]]
            fired = fired or any(isinstance(step, EditStep) for step in inside)
            self.saw_gradient = self.saw_gradient or any(isinstance(step, GradientEditStep) for step in inside)
        seen = {"grad_input": self.saw_gradient, "grad_output": self.saw_gradient, "param_grad": self.saw_gradient}
        return [site for _, site, _ in self.bound if not seen.get(site.port, fired)]

    def observer(self, number: int) -> ObserveStep:
        """What a compiled graph knows by this number."""
        if not self.observers:  # of a hook that only keeps
            self.observers = (ObserveStep(self, 0, self._acts("output"), []),)
        return self.observers[number]

    def _repeats(self) -> bool:
        return recomputing() and self.scope.sees_backward()

    def _edited(self, port: Port, value: Any) -> Any:
        edits = [again(act, site) for tap, site, act in self.bound if tap.edits and site.port == port]
        act = chained(edits)
        return None if act is None else self.guarded(act, None, 0, value, ())

    def _installed_before(self, module: nn.Module) -> Hook:
        """For any mixture of ports: the hook for after the forward, once that for before is in place."""
        self.awaited, self.input_awaited = Awaited(), Awaited()
        self.observers, self.steps = (), {}
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
        steps: list[GraphStep] = []
        observing: list[Act] = []  # several that follow one another are one op
        for tap, site, act in self.bound:
            if site.port not in ports:
                continue
            if not tap.edits:
                observing.append(act)
                continue
            if observing:
                steps.append(self._observe_step(observing, []))
                observing = []
            if isinstance(act, Editing):
                steps.append(EditStep(act))
            else:
                steps.append(RefusedStep(f"the edit at the {site} has a schedule, which a compiled graph cannot have"))
        catches = [act for tap, site, act in self.bound if site.port == graded and not tap.edits]
        if observing or catches:
            steps.append(self._observe_step(observing, catches))
        steps += [GradientEditStep(act.editing) for act in self._acts(graded) if isinstance(act, GradientEditing)]
        name = entered(tuple(steps))
        self.steps = {**self.steps, name: tuple(steps)}
        return name

    def _observe_step(self, acts: list[Act], catches: list[Act]) -> ObserveStep:
        step = ObserveStep(self, len(self.observers), acts, catches)
        self.observers += (step,)
        return step


def unheard(points: Iterable[Point]) -> list[Point]:
    """The points that may have seen nothing: those whose only hook has kept something are left out."""
    return [point for point in points if not isinstance(point.hook, KeepHook) or point.hook.number == NEVER]


def install(points: Iterable[Point]) -> None:
    """Hook all `points`."""
    with registering:
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

    return see


def _stopping(session: object) -> Act:
    """The act that ends the pass once every site was seen."""

    def stop(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        if call == 0 and not pass_.outside:
            pass_.stop_sites_left -= 1
            if not pass_.stop_sites_left:
                raise StopForward(session)

    return stop
