"""Values that are not at a module boundary: a forward names them with `mark`, and taps select them by name.

A mark's path is ``<module path>:<name>``. It is known only when the forward runs: `mark` finds the module whose forward
called it on the stack, and hands the value to the sessions that listen for it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from torchhook.core.compiled import tracing
from torchhook.core.edit import refused
from torchhook.core.errors import SelectionError
from torchhook.core.hooks.point import Point
from torchhook.core.selection import Selector
from torchhook.core.sink import Act
from torchhook.core.site import Site
from torchhook.core.tap import Tap

if TYPE_CHECKING:
    from torchhook.core.session import Session

Value = TypeVar("Value")


def mark(value: Value, name: str) -> Value:
    """Name an intermediate value inside a forward, so that taps on ``marked(name)`` see it; returns the value.

    It costs next to nothing while no session listens.

    >>> import torch
    >>> from torchhook import capture, mark, marked
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return mark(x * 2, "doubled") + 1
    >>> model = nn.Sequential(Block())
    >>> with capture(model, marked("doubled")) as acts:
    ...     _ = model(torch.ones(1))
    >>> acts["0:doubled"].output
    tensor([2.])
    """
    if not _listeners:
        return value
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, not {name!r}")
    if tracing():
        raise refused("a mark inside a compiled graph cannot be seen; tap a module there, or the uncompiled model")
    module = _calling_module()
    if module is not None:
        for marks in _listeners:
            value = marks(value, name, module)
    return value


class Marks:
    """The marks that one session listens for: each becomes a point once its path is known."""

    def __init__(self, session: Session) -> None:
        self.session = weakref.ref(session)
        self.scope = session.scope
        self.wanted: list[tuple[Tap, Selector]] = []
        self.points: dict[str, Point] = {}
        self.acts: dict[str, Act | None] = {}
        self.owners: dict[int, str] = {}  # paths by id of module
        self.met: set[Selector] = set()
        self.seen: set[str] = set()

    def want(self, tap: Tap, selector: Selector, modules: dict[str, nn.Module]) -> None:
        """Bind `tap` to every mark that `selector` matches."""
        if tap.port not in ("input", "output", "grad_output"):
            raise SelectionError(
                f"{selector.label} has no {tap.port}: a mark is a value; tap its output or grad_output"
            )
        for path, module in modules.items():
            self.owners.setdefault(id(module), path)
        self.wanted.append((tap, selector))
        self.points.clear()  # they are made again when they come, with the new tap
        _listen(self)

    def forget(self, tap: Tap) -> list[Point]:
        """Unbind `tap`; returns the points so far, which are made again without it when they come."""
        self.wanted = [pair for pair in self.wanted if pair[0] is not tap]
        points = list(self.points.values())
        self.points.clear()
        return points

    def close(self) -> None:
        """Stop listening."""
        _unlisten(self)

    def check(self) -> None:
        """Raise if a mark that was asked for never came."""
        for _, selector in self.wanted:
            if selector in self.met:
                continue
            seen = ", ".join(map(repr, sorted(self.seen)[:5])) or "none (no forward called torchhook.mark)"
            raise SelectionError(f"no value {selector.label} was seen in any pass; marks that were seen: {seen}")

    def __call__(self, value: Any, name: str, module: nn.Module) -> Any:
        pass_ = self.scope.pass_of_call(module)
        owner = self.owners.get(id(module))
        if pass_ is None or owner is None:
            return value
        path = f"{owner}:{name}"
        point = self.points.get(path) or self._point(path, owner, name, module)
        act = self.acts[path]
        if act is None:
            return value
        continued = point.guarded(act, pass_, pass_.next_call(point.index), value, (value,))
        return value if continued is None else continued

    def _point(self, path: str, owner: str, name: str, module: nn.Module) -> Point:
        session = self.session()
        assert session is not None  # marks are listened for only while the session is open
        point = self.points[path] = Point(session, path, module, stops=False)
        self.seen.add(path)
        wanting: dict[Tap, None] = {}  # a tap whose queries overlap is bound once
        for tap, selector in self.wanted:
            if selector.test(owner, module, name):
                self.met.add(selector)
                wanting[tap] = None
        for tap in wanting:
            site = Site(path, tap.port)
            point.bind(tap, site, tap.binding(tap.port, self.scope)(site, module))
        self.acts[path] = point.mark_act()
        return point


_listeners: tuple[Marks, ...] = ()
_lock = threading.RLock()


def _listen(marks: Marks) -> None:
    global _listeners
    with _lock:
        if marks not in _listeners:
            _listeners = (*_listeners, marks)


def _unlisten(marks: Marks) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(known for known in _listeners if known is not marks)


def listening() -> tuple[Marks, ...]:
    """The marks of all sessions that listen now."""
    return _listeners


def _calling_module() -> nn.Module | None:
    """The module whose forward is the nearest caller of `mark`: the first argument of that frame."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
