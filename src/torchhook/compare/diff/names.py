"""Where two models diverge, in a sentence: with the names that modules have in a, and b's where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile

from torchhook.captures.agreement.evidence import ComparedTensor, ShapeMismatch
from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.agreement.paired_runs import Both, Judgement
from torchhook.captures.agreement.pairs import Call, Pairs
from torchhook.captures.agreement.recorded_run import Location, RecordedRun
from torchhook.core.site import Site


class Names:
    """The names of the modules of two models, one of which was judged."""

    def __init__(self, pairs: Pairs, modules: Mapping[str, ModuleFacts], judgement: Judgement) -> None:
        self.calls = pairs.everyone
        self.modules = modules  # of a
        self.in_both = judgement.in_both
        self.swapped = judgement.swapped
        self.in_b = {mine.path: other.path for mine, other in reversed(self.calls.items())}
        self.in_a = {other.path: mine.path for mine, other in reversed(self.calls.items())}

    def module(self, path: str) -> str:
        """The path in a of the judged model's module at `path`, or of its nearest parent that has a match."""
        while not self.swapped and path and path not in self.in_a:
            path = path.rpartition(".")[0]
        return path if self.swapped else self.in_a.get(path, "")

    def of(self, path: str, kind: bool = True, call: int = 0) -> str:
        """The module of a at `path` in words, with its class if `kind`, and its name in b, as of one call."""
        known = self.modules[path].kind if kind and path in self.modules else ""
        partner = self.calls.get(Call(path, call))
        other = partner.path if partner else self.in_b.get(path, path)
        words = ", ".join(filter(None, (known, f"{other} in b" if other != path else "")))
        return f"{path or 'the model itself'}{f' ({words})' if words else ''}"

    def call(self, location: Location, kind: bool = True) -> str:
        """A call of a module of a, in words."""
        return f"{self.of(location.site.path, kind, location.call)}{f', call {location.call}' if location.call else ''}"

    def unpartnered(self, records: tuple[RecordedRun, RecordedRun], after: Both | None, until: Both) -> str:
        """The first module without a match that ran between two locations in b, else in a, in words."""
        known: tuple[Mapping[Call, Call], Mapping[Call, Call]] = self.calls, {b: a for a, b in self.calls.items()}
        for which in (1, 0):
            ran = _entered(records[which], after[which] if after else None, until[which])
            for location in ran:
                module = records[which].observations[location].module
                if not module.is_idle and Call(location.site.path, location.call) not in known[which]:
                    return f"{'ab'[which]} runs {location.site.path} ({module.kind}), which has no match"
        return ""


def explanation(
    names: Names,
    records: tuple[RecordedRun, RecordedRun],
    found: ComparedTensor | ShapeMismatch,
    before: ComparedTensor | None,
    off: str,
) -> tuple[str, str]:
    """The module at fault, and a sentence: what was `found` is `off`, and `before` it the models last agreed."""
    both = names.in_both(found)
    site, call = both.a.site, names.call(both.a)
    module = names.module(found.where)
    if site.port == "grad_output":
        return module, f"the gradients diverge at the output of {call}: its gradient is {off}"
    if site.port == "param_grad":
        return module, f"the gradients diverge at the parameter {site.path}: its gradient is {off}"
    since = names.in_both(before) if before else None
    extra = names.unpartnered(records, since, both)
    if site.port == "output":
        code = "at" if site.path in names.modules and names.modules[site.path].is_leaf else "in the code of"
        return module, f"a and b diverge {code} {call}{f', where {extra}' if extra else ''}: its output is {off}"
    if extra and before and since:
        judged = names.module(_common(before.location.site.path, found.where))
        module = max(judged, _caller(records[0], since.a, both.a), key=len)
        start = f"the {since.a.site.port} of {names.call(since.a)}"
        return module, f"a and b diverge between {start} and the input of {call}, where {extra}: that input is {off}"
    called = names.call(both.a, kind=False)
    return module, f"a and b diverge in the code of {names.of(module)}, before it calls {called}: its input is {off}"


def _entered(run: RecordedRun, after: Location | None, until: Location) -> Iterator[Location]:
    """The inputs of the calls that began between two locations, in order."""
    locations = list(run.observations)
    start = locations.index(after) + 1 if after in run.observations else 0
    stop = locations.index(until) if until in run.observations else 0
    return (location for location in locations[start:stop] if location.site.port == "input")


def _caller(run: RecordedRun, since: Location, until: Location) -> str:
    """The innermost module whose code runs from one location to the input of another one."""
    start = since.site.path if since.site.port == "input" else since.site.path.rpartition(".")[0]
    path = _common(start, until.site.path.rpartition(".")[0])
    while path and Location(Site(path, "input"), 0) not in run.observations:
        path = path.rpartition(".")[0]
    return path


def _common(path: str, other: str) -> str:
    """The path that both are under.

    >>> _common("stage.1.body", "stage.10")
    'stage'
    """
    pairs = zip(path.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
