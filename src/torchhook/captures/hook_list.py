"""List the hooks on a model with their owners, and remove torchhook's by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from torchhook.core.hooks.outputs import Hook
from torchhook.core.hooks.registration import Sentinel
from torchhook.core.marks import Marks, listening
from torchhook.core.selection import require_module, walk
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import (
    accumulate_hooks,
    backward_hooks,
    backward_pre_hooks,
    forward_hooks,
    forward_pre_hooks,
    parameter_hooks,
)


class HookInfo(NamedTuple):
    """One hook on a model: its path, port and owner, and its group if it is torchhook's."""

    path: str
    port: str
    owner: str
    group: str | None


# torch's dictionaries of hooks and the port that each of them serves
_FOREIGN = {
    forward_pre_hooks: "input",
    forward_hooks: "output",
    backward_hooks: "grad_input",
    backward_pre_hooks: "grad_output",
}


def hooks(model: nn.Module) -> list[HookInfo]:
    """Every hook on `model` and its submodules, torchhook's and others', in calling order.

    >>> from torchhook import capture
    >>> model = nn.Sequential(nn.ReLU())
    >>> with capture(model, "0", group="analysis", on_silent="ignore"):
    ...     hooks(model)
    [HookInfo(path='0', port='output', owner='torchhook.Record', group='analysis')]
    """
    require_module(model)
    found = []
    for path, hook, port in _all_hooks(model):
        if isinstance(hook, Hook):
            found += [
                HookInfo(site.path, site.port, _owner(tap.action), tap.group)
                for tap, site, _ in hook.point.bound
                if site.port in hook.ports
            ]
        elif not isinstance(hook, Sentinel):
            found.append(HookInfo(path, port, _owner(hook), None))
    for marks in _marks_of(model):
        found += [HookInfo(selector.label, tap.port, _owner(tap.action), tap.group) for tap, selector in marks.wanted]
    return found


def detach(model: nn.Module, group: str | None = None) -> int:
    """Remove torchhook's taps from `model`, those of `group` or all. Other libraries' hooks are never touched.

    Returns the number of taps that were removed.

    >>> from torchhook import capture
    >>> model = nn.Sequential(nn.ReLU())
    >>> acts = capture(model, group="monitoring").attach()
    >>> detach(model, group="monitoring")
    1
    """
    require_module(model)
    taps: dict[Tap, Session] = {}
    for _, hook, _ in _all_hooks(model):
        session = hook.point.session() if isinstance(hook, Hook) else None
        if session is not None:
            taps.update({tap: session for tap, _, _ in hook.point.bound if group in (None, tap.group)})
    for marks in _marks_of(model):
        if (session := marks.session()) is not None:
            taps.update({tap: session for tap, _ in marks.wanted if group in (None, tap.group)})
    for tap, session in taps.items():
        session.remove(tap)
        if not session.taps:
            session.abandon()
    return len(taps)


def _all_hooks(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    seen: set[int] = set()
    for path, module in walk(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        for hooks_of, port in _FOREIGN.items():
            for hook in list(hooks_of(module).values()):
                yield path, hook, port
        for name, parameter in module.named_parameters(path, recurse=False):
            for hook in list((parameter_hooks(parameter) or {}).values()):
                yield name, hook, "param_grad"
            for hook in list((accumulate_hooks(parameter) or {}).values()):
                yield name, hook, "param_grad"


def _marks_of(model: nn.Module) -> list[Marks]:
    """The listeners for marks of `model` or of a part of it."""
    modules = {id(module) for module in model.modules()}
    return [marks for marks in listening() if (session := marks.session()) and id(session.model) in modules]


def _owner(thing: Any) -> str:
    """The full name of a function, or of an object's class; torchhook's own by their public names."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    package = "torchhook" if named.__module__.startswith("torchhook.") else named.__module__
    return f"{package}.{named.__qualname__}"
