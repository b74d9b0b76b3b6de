"""List the hooks on a model with their owners, and remove torchhook's by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from torchhook.core.errors import SelectionError
from torchhook.core.hooks.outputs import Hook
from torchhook.core.hooks.registration import GradientHook, Sentinel
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
    return [info for info, _ in _listed(model)]


def detach(model: nn.Module, group: str | None = None) -> int:
    """Remove torchhook's hooks from `model`, those of `group` or all. Other libraries' hooks are never touched.

    Returns how many of those that `hooks` lists were removed. A group that none of them is in raises `SelectionError`.

    >>> from torchhook import capture
    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> acts = capture(model, group="monitoring").open()
    >>> detach(model, group="monitoring")
    2
    """
    require_module(model)
    ours = [(info.group, remove) for info, remove in _listed(model) if remove is not None]
    chosen = [remove for known, remove in ours if group in (None, known)]
    if group is not None and not chosen:
        groups = ", ".join(dict.fromkeys(repr(known) for known, _ in ours if known is not None))
        raise SelectionError(
            f"no hook on the model is in the group {group!r}; the groups there are: {groups or 'none'}"
        )
    for remove in chosen:
        remove()
    return len(chosen)


def _listed(model: nn.Module) -> Iterator[tuple[HookInfo, Callable[[], None] | None]]:
    """Every hook, and what removes it if it is torchhook's."""
    for path, hook, port in _all_hooks(model):
        if isinstance(hook, Hook):
            for tap, site, _ in hook.point.bound:
                if site.port in hook.ports:
                    info = HookInfo(site.path, site.port, _owner(tap.action), tap.group)
                    yield info, partial(_remove, hook.point.session(), tap)
        elif isinstance(hook, GradientHook):
            yield HookInfo(path, port, _owner(hook.change), hook.group), hook.remove
        elif not isinstance(hook, Sentinel):
            yield HookInfo(path, port, _owner(hook), None), None
    for marks in _marks_of(model):
        for tap, selector in marks.wanted:
            info = HookInfo(selector.label, tap.port, _owner(tap.action), tap.group)
            yield info, partial(_remove, marks.session(), tap)


def _remove(session: Session | None, tap: Tap) -> None:
    """Remove `tap`, which may be listed at several places, and end the session if it was the last one."""
    if session is not None and tap in session.taps:
        session.remove(tap)
        if not session.taps:
            session.abandon()


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
