"""A session attaches taps to a model and removes exactly what it added, however it ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.fx
from torch import nn

from torchhook.core.call_wrapper import CallWrapper, CompiledPart, compiled_among, follow_passes, is_armed
from torchhook.core.edit import Edit
from torchhook.core.errors import SelectionError, SessionError
from torchhook.core.fastpaths import Detours
from torchhook.core.hooks.point import Point, install, on_parameter, parameter_of
from torchhook.core.hooks.registration import registering, taken_out
from torchhook.core.lifetime import Attaching
from torchhook.core.marks import Marks
from torchhook.core.scope import Scope, ScopeOptions, Switch
from torchhook.core.selection import Selector, along, find, plain, require_module, spellings, unwrapped, walk
from torchhook.core.shards import agree_on_the_whole, is_sharded, shards_of_gathered
from torchhook.core.silent import OnSilent, report_silent, require_hookable, silent_sites
from torchhook.core.sink import Bind
from torchhook.core.site import Port, Site
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import is_dynamo_loaded

ScopeName = Literal["thread", "all"]

# Modules inside which hooks fire only with some help, or not at all.
_SPECIAL = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    torch.jit.ScriptModule,
    torch.fx.GraphModule,
)


class Session(Attaching):
    """Owns the hooks of its taps on one model.

    It sees the passes of the thread and context that open it; with ``scope="all"``, those of all threads.
    With ``stop=True`` a forward ends, and returns None, once every site was seen in it. A tap that raises ends
    the session, unless ``detach_on_error=False``; the error is raised to the caller of the model.
    ``recomputed=True`` also sees the calls that a checkpoint repeats in the backward, and ``full=True`` sees
    sharded values as a whole.

    When it ends, a site that was named by its path but never fired raises `SilentError`, and so does a query
    none of whose sites fired; `on_silent` (``"raise"``, ``"warn"``, ``"ignore"``) overrides that.

    With `on_fault`, an error in a tap never reaches the caller of the model: `on_fault` is called with it, and
    only the session ends. A forward that taps cannot see, as in torch.export, is then ignored, not refused.
    With `when`, nothing is seen while its ``active`` is false, which costs next to nothing.

    >>> import torch
    >>> from torchhook import Record, Ring, Session, Tap
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> ring = Ring(max_entries=10)
    >>> with Session(model, [Tap(nn.ReLU, Record(ring))]):
    ...     _ = model(torch.ones(1, 2))
    >>> ring["1"][0].shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Iterable[Tap] = (),
        *,
        scope: ScopeName = "thread",
        stop: bool = False,
        detach_on_error: bool = True,
        recomputed: bool = False,
        full: bool = False,
        on_silent: OnSilent | None = None,
        on_fault: Callable[[Exception], None] | None = None,
        when: Switch | None = None,
    ) -> None:
        require_module(model)
        if scope not in ("thread", "all"):
            raise ValueError(f"scope must be 'thread' or 'all', not {scope!r}")
        if on_silent not in (None, "raise", "warn", "ignore"):
            raise ValueError(f"on_silent must be 'raise', 'warn', 'ignore' or None, not {on_silent!r}")
        if stop and isinstance(model, nn.DataParallel):
            raise ValueError("stop=True cannot stop a DataParallel forward; pass its .module as model")
        self.model = model
        self.stop = stop
        self.detach_on_error = detach_on_error
        self.recomputed = recomputed
        self.full = full
        self.on_silent = on_silent
        self.on_fault = on_fault
        self.when = when
        self.state: Literal["new", "open", "closed"] = "new"
        if isinstance(taps, Tap):
            raise TypeError("taps must be a list of Tap objects; put the single tap into a list")
        self.taps = list(taps)
        for tap in self.taps:
            _require_tap(tap)
        self.aliases: dict[str, str] = {}  # other names of a shared module → the name it is recorded under
        self.silent: dict[Site, str] = {}  # the sites that saw nothing, and why; known at the end
        self._shared = scope == "all"
        self._compiled: list[nn.Module] = []  # parts with taps inside
        self._undo: list[Callable[[], None]] = []
        self._put_back: list[Callable[[], None]] = []  # what ends a pause
        self._above: list[nn.Module] = []  # the modules above a site that was found without walking the model
        self._past: dict[Site, type] = {}  # sites of taps that were removed
        self._points: dict[int, Point] = {}  # by id of the module or parameter
        self._points_of: dict[Tap, list[Point]] = {}
        self._modules: dict[str, nn.Module] = {}
        self._wrappers: list[nn.Module] = []

    def open(self) -> Session:
        """Attach all taps, or none of them if one selects nothing."""
        if self.state != "new":
            raise SessionError(f"this session is already {self.state}; make a new one")
        self.state = "open"
        options = ScopeOptions(
            shared=self._shared,
            recomputed=self.recomputed,
            full=self.full,
            skips_transforms=self.on_fault is not None,
        )
        self.scope = Scope(options, self.when)
        self.reference = weakref.ref(self)  # for objects that must not keep it alive
        self._marks = Marks(self)
        self._detours = Detours()
        self._release = weakref.finalize(
            self, _release, self.scope, self._points, self._marks, self._detours, self._compiled, self._undo
        )
        self._release.atexit = False
        try:
            with _no_collection():
                self._plan(self.taps)
            if self.full:
                agree_on_the_whole(list(map(str, self.sites)))
            self._undo.append(follow_passes(self.model, self.scope))
        except BaseException:
            self.abandon()
            raise
        return self

    def close(self) -> None:
        """Remove all hooks. Raises if a site that was asked for never fired, which is known only now."""
        if self.state == "open":
            self.abandon()
            self._marks.check()
            if self.silent:
                report_silent(self)

    def abandon(self) -> None:
        """Remove all hooks, without raising about silent sites."""
        if self.state == "open":
            self.state = "closed"
            try:
                self.silent = silent_sites(self)
            finally:
                self._release()

    def pause(self) -> None:
        """Take the hooks out of the model until `resume`; what is compiled runs as it did without them.

        Nothing is taken out if others have taps in the same compiled parts, or if taps are in a graph around the model.
        """
        if self.state != "open" or self._put_back or any(map(CompiledPart.is_shared, self._compiled)):
            return
        inside = {id(module) for part in self._compiled for module in part.modules()}
        if any(point.is_traced() and id(point.target) not in inside for point in self.points):
            return
        with registering:
            back = [taken_out(handle for point in self.points for handle in point.handles)]
        self._put_back = [*back, *map(CompiledPart.pause, self._compiled)]
        if not self._compiled:  # a new wrapper around a compiled call would have to be compiled, too
            for step in self._undo:
                step()
            self._undo.clear()

    def resume(self) -> None:
        """Undo `pause`."""
        if self.state == "open" and self._put_back:
            with registering:
                for put_back in self._put_back:
                    put_back()
            self._put_back.clear()
            if not self._compiled:
                self._undo.append(follow_passes(self.model, self.scope))

    def unseen(self) -> dict[Site, str]:
        """The sites that saw nothing so far, each with the likely reason."""
        return silent_sites(self) if self.state == "open" else self.silent

    @property
    def has_run(self) -> bool:
        """Whether the model ran since it was opened, even where the taps could not see it."""
        return self.state != "new" and (self.scope.last is not None or bool(self.scope.why_unseen))

    def add(self, tap: Tap) -> None:
        """Add a tap after the others."""
        _require_tap(tap)
        if self.state != "open":
            raise SessionError(f"cannot add a tap to a {self.state} session; open it first, or make a new one")
        self._plan([tap])
        self.taps.append(tap)

    def remove(self, tap: Tap) -> None:
        """Remove one tap, and the hooks that only it needed."""
        if tap not in self.taps or self.state == "new":
            raise SessionError("this tap is not attached by this session")
        self.taps.remove(tap)
        for point in self._marks.forget(tap):
            self._past |= point.places()
        for point in self._points_of.pop(tap, ()):
            self._past |= point.places()
            point.unbind(tap)
            if point.bound:
                install([point])
            elif self._points.pop(id(point.target), None):  # several parameters of one module are one point
                point.close()

    @property
    def sites(self) -> list[Site]:
        """The sites that are or were tapped, by tap and then in the model's order; of marks, those seen so far."""
        return list(self.places)

    @property
    def places(self) -> dict[Site, type]:
        """The same sites, each with the class of its module."""
        if self.state == "new":
            return {}
        places = dict(self._past)
        for point in (*self._points.values(), *self._marks.points.values()):
            places |= point.places()
        return places

    def __repr__(self) -> str:
        taps = "1 tap" if len(self.taps) == 1 else f"{len(self.taps)} taps"
        return f"Session({type(self.model).__name__}, {taps}, {self.state})"

    @property
    def points(self) -> list[Point]:
        """The hooked modules and parameters."""
        return list(self._points.values())

    def parameters(self, selector: Selector) -> dict[str, nn.Parameter]:
        """The parameters of the modules that `selector` selects, by path."""
        seen: dict[int, str] = {}
        found = find(self._all_modules(), selector.parts).items()
        return {below: p for path, module in found for below, _, p in self._parameters_in(path, module, seen)}

    def selected(self, part: Selector) -> dict[str, nn.Module]:
        """The modules that one query of a tap selects, by path."""
        return find(self._all_modules(), (part,))

    def _plan(self, taps: list[Tap]) -> None:
        """Bind `taps` to their points, and hook these."""
        touched: dict[Point, None] = {}
        self._above.clear()
        self._shards = shards_of_gathered(self.model)
        for tap in taps:
            bind = self._bind_parameters if tap.port in ("param", "param_grad") else self._bind
            acts = {port: tap.binding(port, self.scope) for port in tap.ports}
            seen: dict[int, str] = {}
            points = self._points_of[tap] = []
            for path, module in self._selected(tap):
                points += bind(tap, acts, path, module, seen)
            if tap.port == "param" and not points:
                raise SelectionError(f"no module that {Selector.of(tap.selector).label} selects has parameters")
            touched.update(dict.fromkeys(points))
        around = self._modules.values() or self._above
        if any(issubclass(kind, _SPECIAL) for kind in {type(module) for module in around}):
            targets = {id(point.target): point for point in touched}
            require_hookable(around, targets)
            self._detours.take(around, targets.keys())
        parts: list[nn.Module] = []
        if is_dynamo_loaded():
            modules = [*self._modules.values(), *self._wrappers] if self._modules else self._above
            parts = self._parts_around(touched, compiled_among(modules))
        install(touched)
        for part in parts:
            CompiledPart.open(part)
            self._compiled.append(part)

    def _parts_around(self, points: Iterable[Point], compiled: list[nn.Module]) -> list[nn.Module]:
        """Those of the `compiled` modules that have one of `points` inside; raises if they cannot be tapped."""
        targets = {id(point.target) for point in points} if compiled else set()
        parts = [part for part in compiled if any(id(module) in targets for module in part.modules())]
        wrapper = CallWrapper.of(self.model)
        if (parts or is_armed(unwrapped(self.model))) and wrapper is not None:
            here = threading.get_ident()
            if any(scope.home != here for scope in wrapper.scopes):
                raise SessionError(
                    "another thread has a session open on this compiled model, whose taps see every thread; close that"
                    " session first, or tap a copy of the model"
                )
        if parts and self.stop:
            raise SessionError("stop=True cannot stop a compiled graph; leave it out, or tap the uncompiled model")
        return parts

    def _selected(self, tap: Tap) -> Iterable[tuple[str, nn.Module]]:
        parts = Selector.of(tap.selector).parts
        if len(parts) == 1 and (way := along(self.model, parts[0].path)):
            self._above += way
            return [(str(parts[0].path), way[-1])]  # no need to walk the model for an exact path
        modules = self._all_modules()
        marked = [part for part in parts if part.marks and part.path not in modules]
        if marked and self.stop:
            raise ValueError("stop=True cannot wait for marks, which exist only while the forward runs")
        for part in marked:
            self._marks.want(tap, part, modules)
        rest = tuple(part for part in parts if part not in marked)
        found = find(modules, rest) if rest or not parts else {}
        for path in (part.path for part in rest if part.path is not None and part.path not in found):
            for name in spellings(path):
                if name in found:  # written with the name of a wrapper in it
                    self.aliases[path] = name
        return found.items()

    def _all_modules(self) -> dict[str, nn.Module]:
        if not self._modules:
            self._modules = dict(walk(self.model, wrappers=self._wrappers))
        return self._modules

    def _bind(
        self, tap: Tap, acts: dict[Port, Bind], path: str, module: nn.Module, seen: dict[int, str]
    ) -> Sequence[Point]:
        """Bind `tap` to `module`, unless it was already `seen` under another name."""
        if id(module) in seen:
            self.aliases[path] = seen[id(module)]
            return ()
        seen[id(module)] = path
        if tap.edits:
            assert isinstance(tap.action, Edit)
            path, module, port = tap.action.moved(path, module, tap.port, self.model)
            acts = {port: acts[tap.port]}
        point = self._point(path, module)
        for port, act_at in acts.items():
            site = Site(path, port)
            point.bind(tap, site, act_at(site, module))
        return (point,)

    def _bind_parameters(
        self, tap: Tap, acts: dict[Port, Bind], path: str, module: nn.Module, seen: dict[int, str]
    ) -> Sequence[Point]:
        """Bind `tap` to the parameters in `module`, except those already `seen` under another name."""
        points: list[Point] = []
        for below, name, parameter in self._parameters_in(path, module, seen):
            if tap.port == "param_grad" and not parameter.requires_grad:
                continue
            site = Site(below, tap.port)
            act = acts[tap.port](site, module)
            if tap.port == "param":  # read when the module is called
                points.append(self._point(path, module))
                shard = parameter if is_sharded(parameter) and not self.full else None
                act = on_parameter(act, parameter_of(module, name, shard))
            else:
                points.append(self._point(below, parameter))
            points[-1].bind(tap, site, act)
        return points

    def _parameters_in(
        self, path: str, module: nn.Module, seen: dict[int, str]
    ) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(path, name in `module`, parameter) for each parameter in `module` that was not `seen` before."""
        for name, known in module.named_parameters(remove_duplicate=False):
            parameter = self._shards.get(id(known), known)
            below = plain(f"{path}.{name}" if path else name)
            if id(parameter) not in seen:
                seen[id(parameter)] = below
                yield below, name, parameter
            elif seen[id(parameter)] != below:
                self.aliases[below] = seen[id(parameter)]

    def _point(self, path: str, target: nn.Module | nn.Parameter) -> Point:
        point = self._points.get(id(target))
        if point is None:
            stops = self.stop and isinstance(target, nn.Module)
            point = self._points[id(target)] = Point(self, path, target, stops)
        return point


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: attaching makes thousands of objects that all stay, and searching them takes longer."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _require_tap(tap: Any) -> None:
    if not isinstance(tap, Tap):
        raise TypeError(f"taps must be Tap objects, not {tap!r:.80}; write Tap(selector, action)")


def _release(
    scope: Scope,
    points: dict[int, Point],
    marks: Marks,
    detours: Detours,
    compiled: list[nn.Module],
    undo: list[Callable[[], None]],
) -> None:
    """Undo everything. It takes what was added and not the session, which may be gone already."""
    scope.close()
    marks.close()
    for point in points.values():
        point.remove()
    detours.leave()
    for step in undo:
        step()
    undo.clear()
    for part in compiled:
        CompiledPart.close(part)
    compiled.clear()
