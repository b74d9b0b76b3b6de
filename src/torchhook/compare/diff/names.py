"""Where two models part, in a sentence: by the names that things have in a, with b's beside them where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import NamedTuple

from torch import nn

from torchhook.captures.agreement.judge import Misfit, Seen
from torchhook.captures.agreement.pairs import PASSIVE, Call, Pairs
from torchhook.captures.agreement.recorded_run import Place, Recording
from torchhook.captures.agreement.rounding import is_leaf
from torchhook.core.selection import walk


class Both(NamedTuple):
    """A place in a and the same in b."""

    a: Place
    b: Place


class Names:
    """What the modules of two models are called. The one whose values were judged is b, or, `swapped`, a."""

    def __init__(self, pairs: Pairs, models: tuple[nn.Module, nn.Module], swapped: bool) -> None:
        self.calls = pairs.everyone
        self.modules = dict(walk(models[0])), dict(walk(models[1]))
        self.swapped = swapped
        self.in_b = {mine.path: other.path for mine, other in reversed(self.calls.items())}
        self.in_a = {other.path: mine.path for mine, other in reversed(self.calls.items())}

    def both(self, found: Seen | Misfit) -> Both:
        """Where in both models something was seen."""
        return Both(found.place, found.teachers) if self.swapped else Both(found.teachers, found.place)

    def module(self, path: str) -> str:
        """The path in a of the module that was judged at `path`, or of the nearest one above it that has a partner."""
        while not self.swapped and path and path not in self.in_a:
            path = path.rpartition(".")[0]
        return path if self.swapped else self.in_a.get(path, "")

    def of(self, path: str, kind: bool = True) -> str:
        """The module of a at `path`, in words; of which `kind` it is, too."""
        known = type(self.modules[0][path]).__name__ if kind and path in self.modules[0] else ""
        other = self.in_b.get(path, path)
        words = ", ".join(filter(None, (known, f"{other} in b" if other != path else "")))
        return f"{path or 'the model itself'}{f' ({words})' if words else ''}"

    def call(self, place: Place, kind: bool = True) -> str:
        """A call of a module of a, in words."""
        return f"{self.of(place.site.path, kind)}{f', call {place.call}' if place.call else ''}"

    def lonely(self, records: tuple[Recording, Recording], after: Both | None, until: Both) -> str:
        """The first module that ran between two places in b, else in a, and has no partner; in words."""
        known: tuple[Mapping[Call, Call], Mapping[Call, Call]] = self.calls, {b: a for a, b in self.calls.items()}
        for which in (1, 0):
            ran = _begun(records[which], after[which] if after else None, until[which])
            for place in ran:
                module = records[which].moments[place].module
                idle = isinstance(module, PASSIVE) and not module.training
                if not idle and Call(place.site.path, place.call) not in known[which]:
                    return f"{'ab'[which]} runs {place.site.path} ({type(module).__name__}), which has no partner"
        return ""


def told(
    names: Names, records: tuple[Recording, Recording], found: Seen | Misfit, before: Seen | None, off: str
) -> tuple[str, str]:
    """The module whose doing it is, and a sentence: what was `found` is `off`, and `before` they agreed."""
    both = names.both(found)
    site, call = both.a.site, names.call(both.a)
    if site.port == "grad_output":
        sentence = f"their gradients part at the output of {call}: what comes back there is {off}"
        return names.module(found.where), sentence
    if site.port == "param_grad":
        return names.module(found.where), f"their gradients part at the parameter {site.path}: its gradient is {off}"
    since = names.both(before) if before else None
    lonely = names.lonely(records, since, both)
    module = names.module(found.where)
    if site.port == "output":
        code = "at" if site.path in names.modules[0] and is_leaf(names.modules[0][site.path]) else "in the code of"
        return module, f"they part {code} {call}{f', where {lonely}' if lonely else ''}: its output is {off}"
    if lonely and before and since:
        module = names.module(_common(before.place.site.path, found.where))
        start = f"the {since.a.site.port} of {names.call(since.a)}"
        return module, f"they part between {start} and the input of {call}, where {lonely}: that input is {off}"
    called = names.call(both.a, kind=False)
    return module, f"they part in the code of {names.of(module)}, before it calls {called}: its input is {off}"


def _begun(recording: Recording, after: Place | None, until: Place) -> Iterator[Place]:
    """The calls that began between two places, in order."""
    places = list(recording.moments)
    start = places.index(after) + 1 if after in recording.moments else 0
    stop = places.index(until) if until in recording.moments else 0
    return (place for place in places[start:stop] if place.site.port == "input")


def _common(path: str, other: str) -> str:
    """The path that both are under.

    >>> _common("stage.1.body", "stage.10")
    'stage'
    """
    pairs = zip(path.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
