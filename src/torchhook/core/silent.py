"""No silent miss: which of the selected sites saw nothing, and why.

When a session ends, a site named by its exact path that did not fire is an error, and so is a query none of whose sites
fired. Other silent sites are listed with their reasons, with a warning. That no gradient reaches a site is an answer,
not a miss: it is listed, at most with a warning.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from torchhook.core.call_wrapper import REMEDIES
from torchhook.core.errors import SessionError, SilentError
from torchhook.core.hooks.point import Point, unheard
from torchhook.core.selection import Selector
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.text import warn
from torchhook.core.torch_internals import graph_count

if TYPE_CHECKING:
    from torchhook.core.session import Session

OnSilent = Literal["raise", "warn", "ignore"]


def require_hookable(modules: Iterable[nn.Module], targets: dict[int, Point]) -> None:
    """Raise if one of `targets` (by id) is, or is inside, one of `modules` in which no hook fires."""
    for point in targets.values():
        if isinstance(point.target, torch.jit.ScriptModule):
            kind = type(point.target).__name__
            raise SessionError(
                f"{point.path or 'the model'!r} is a {kind}, inside which torch.jit runs no hooks;"
                " hook the module that it was made from"
            )
    for graph in (module for module in modules if isinstance(module, torch.fx.GraphModule)):
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
        for path, part in graph.named_modules():
            if path and path not in called and id(part) in targets:
                raise SessionError(
                    f"{targets[id(part)].path!r} is inside a graph module that never calls it (torch.export flattens"
                    " the model into one graph, where no hook fires); hook the module that it was made from"
                )


def silent_sites(session: Session) -> dict[Site, str]:
    """The sites that saw nothing, each with the likely reason."""
    silent = [(site, point) for point in unheard(session.points) for site in point.silent()]
    return {site: _reason(session, site, point) for site, point in silent}


def report_silent(session: Session) -> None:
    """Raise or warn about the silent sites, as the session's ``on_silent`` says."""
    silent, how = session.silent, session.on_silent
    whole = {} if how == "ignore" else _whole_queries(session)
    loud = {"raise": silent, "warn": {}, "ignore": {}}.get(how or "", {})
    if how is None:
        loud = {site: reason for site, reason in whole.items() if "grad" not in site.port}
    if loud:
        raise SilentError(f"{_by_reason(loud)} (pass on_silent='warn' to only warn, or 'ignore')")
    rest = silent if how == "warn" else {s: r for s, r in silent.items() if "grad" not in s.port or s in whole}
    if rest and how != "ignore":
        warn(f"{_by_reason(rest)} (.silent lists them all)")


def warn_silent(session: Session, paths: Container[str] | None = None) -> None:
    """Warn about the sites (at `paths`, or all) that saw no value so far, in the words of the end of a session."""
    unseen = {site: why for site, why in session.unseen().items() if "grad" not in site.port}
    silent = {site: why for site, why in unseen.items() if paths is None or site.path in paths}
    if silent:
        warn(_by_reason(silent))


def _whole_queries(session: Session) -> dict[Site, str]:
    """The silent sites of exact paths, and of queries none of whose sites fired."""
    found: dict[Site, str] = {}
    for tap in session.taps:
        mine = [site for point in session.points for known, site, _ in point.bound if known is tap]
        for part in Selector.of(tap.selector).parts or (Selector.union(()),):
            asked = _asked(session, tap, part, mine)
            silent = {site: session.silent[site] for site in asked if site in session.silent}
            if len(silent) == len(asked):
                found |= silent
    return found


def _asked(session: Session, tap: Tap, part: Selector, mine: list[Site]) -> list[Site]:
    """The sites that one query of a tap asked for."""
    if part.marks or not part.parts or tap.edits or "param" in tap.port:
        return [] if part.marks else mine
    paths = {session.aliases.get(path, path) for path in session.selected(part)}
    return [site for site in mine if site.path in paths]


def _by_reason(silent: dict[Site, str]) -> str:
    """The silent sites in one sentence, those with the same reason together."""
    reasons: dict[str, list[Site]] = {}
    for site, reason in silent.items():
        reasons.setdefault(reason, []).append(site)
    parts = []
    for reason, sites in reasons.items():
        more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
        parts.append(f"the {', '.join(map(str, sites[:3]))}{more}: {reason}")
    return f"nothing was seen at {'; at '.join(parts)}"


def _reason(session: Session, site: Site, point: Point) -> str:
    scope, module = session.scope, point.target
    if "grad" in site.port:
        return "no gradient arrived: no backward ran while the taps were attached, or none flows through it"
    if scope.last is None:
        if scope.why_unseen:
            return f"it ran only {scope.why_unseen}"
        return (
            f"the model did not run while the taps were attached, or its .forward() was called directly{_or_compiled()}"
        )
    if isinstance(module, nn.Module) and type(module).forward is nn.Module.forward:
        return "it only holds other modules and is never called itself; select the modules inside it"
    if scope.why_unseen:
        return f"it ran only {scope.why_unseen}, or not at all"
    if scope.stopped_by_other:
        return (
            "another session's stop= ended the forward first; leave that stop= out, or, if both are at the same place,"
            " open this session before that one"
        )
    return (
        "it is in a branch that was not taken, or its .forward() or its weights were used without calling it"
        f"{_or_compiled()}"
    )


def _or_compiled() -> str:
    """One more possible reason, if anything was compiled in this process."""
    if not graph_count():
        return ""
    return f", or it ran in a graph of torch.export, or one compiled before the tap was attached: then {REMEDIES}"
