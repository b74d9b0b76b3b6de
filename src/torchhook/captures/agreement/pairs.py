"""Which call of the one model is which call of the other: by mapping, by name, else by order and shape.

Modules that hold others and go by another name are matched by what they hold. That is a guess: a block may do in its
own forward what in the other model the caller of the block does. So nothing is handed on there, see `judging`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from torch import nn

from torchhook.captures.agreement.recorded_run import Moment, Place, Recording
from torchhook.captures.agreement.rounding import comparable, gap, is_leaf
from torchhook.core.errors import SelectionError
from torchhook.core.selection import nearest, walk
from torchhook.core.site import Site
from torchhook.core.text import shape_of
from torchhook.core.torch_internals import DROPOUTS

PASSIVE = (DROPOUTS, nn.Identity)
"""Modules that in eval mode hand on what they are given."""


class Unmatched(NamedTuple):
    """A module of one model without a partner in the other."""

    model: str  # "a" or "b"
    path: str
    reason: str


class Call(NamedTuple):
    """One call of a module."""

    path: str
    number: int


class Pairs:
    """The calls of two models that belong together, and those that have no partner."""

    def __init__(self, a: Recording, b: Recording) -> None:
        self.a = _calls(a)
        self.b = _calls(b)
        self.partners: dict[Call, Call] = {}  # from a to b
        self.odd: dict[Call, Call] = {}  # called alike, and shaped otherwise
        self.likely: dict[Call, Call] = {}  # modules that hold the same, by other names

    def join(self, pairs: Iterable[tuple[Call, Call]]) -> None:
        """Make partners of the pairs that are both free."""
        taken = set(self.partners.values())
        for mine, other in pairs:
            if mine in self.a and other in self.b and mine not in self.partners and other not in taken:
                if comparable(self.a[mine].tensors, self.b[other].tensors):
                    self.partners[mine] = other
                    taken.add(other)
                else:
                    self.odd[mine] = other

    def align(self, key: Callable[[Moment], Hashable], known: Mapping[Call, Call]) -> None:
        """Make partners of leaves with the same `key` that come in the same order between the same `known` ones."""
        mine, others = _free(self.a, {call: call for call in known}), _free(self.b, _turned(known))
        left, right = list(mine), list(others)
        left_keys = [(mine[call], key(self.a[call])) for call in left]
        right_keys = [(others[call], key(self.b[call])) for call in right]
        for i, j, size in SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_matching_blocks():
            self.join(zip(left[i : i + size], right[j : j + size], strict=True))

    def settle(self) -> None:
        """Forget of those that are shaped otherwise what has found a partner since."""
        taken = set(self.partners.values())
        self.odd = {mine: other for mine, other in self.odd.items() if mine not in self.partners and other not in taken}

    def fold(self, a: Recording, b: Recording) -> None:
        """Make likely partners of free modules that hold the same partners; of several, the nearest by value."""
        known = {**self.partners, **self.odd}
        mine = _holders(a, {call: call for call in self.partners}, known)
        others = _holders(b, _turned(self.partners), _turned(known))
        errors = {
            (one, other): gap(self.a[one].tensors[0], self.b[other].tensors[0]).error
            for one, held in mine.items()
            for other, held_there in others.items()
            if held == held_there and comparable(self.a[one].tensors, self.b[other].tensors)
        }
        taken: set[Call] = set()
        for one, other in sorted(errors, key=errors.__getitem__):
            if one not in self.likely and other not in taken:
                self.likely[one] = other
                taken.add(other)

    @property
    def everyone(self) -> dict[Call, Call]:
        """From a to b, also those that are shaped otherwise and the likely ones."""
        return {**self.partners, **self.odd, **self.likely}

    def finder(self, from_a: bool, likely: bool = False) -> Callable[[Place], Place | None]:
        """What finds to a place of one model that of the other, or a `likely` one; parameters go with their modules."""
        both = self.everyone if likely else {**self.partners, **self.odd}
        calls = both if from_a else _turned(both)
        names = {mine.path: other.path for mine, other in reversed(calls.items())}

        def find(place: Place) -> Place | None:
            site = place.site
            if site.port == "param_grad":
                owner, _, name = site.path.rpartition(".")
                other = names.get(owner, owner)
                return Place(Site(f"{other}.{name}" if other else name, site.port), 0)
            partner = calls.get(Call(site.path, place.call))
            return None if partner is None else Place(Site(partner.path, site.port), partner.number, place.leaf)

        return find


def matched(a: Recording, b: Recording, renamed: Mapping[str, str]) -> Pairs:
    """The calls that belong together. `renamed` says of modules of a, and all below, what they are called in b."""
    pairs = Pairs(a, b)
    pairs.join((call, Call(renaming(call.path, renamed), call.number)) for call in pairs.a)
    pairs.align(_closely, pairs.partners)
    pairs.align(_roughly, pairs.partners)
    pairs.settle()
    pairs.align(_otherwise, {**pairs.partners, **pairs.odd})
    pairs.fold(a, b)
    return pairs


def renaming(path: str, renamed: Mapping[str, str]) -> str:
    """What the module at `path` is called in the other model.

    >>> renaming("transformer.h.0.attn", {"transformer.h": "blocks"})
    'blocks.0.attn'
    """
    for above in sorted(renamed, key=len, reverse=True):
        if path == above or path.startswith(f"{above}.") or not above:
            rest = path[len(above) :].removeprefix(".")
            return ".".join(filter(None, (renamed[above], rest)))
    return path


def require_mapping(match: Any, a: nn.Module, b: nn.Module) -> dict[str, str]:
    """`match`, if it maps paths of a to paths of b."""
    if match is None:
        return {}
    if not isinstance(match, Mapping):
        raise TypeError(f"match must map paths in a to paths in b, not {match!r:.80}")
    known = {path for path, _ in walk(a)}, {path for path, _ in walk(b)}
    for pair in match.items():
        for name, path, paths in zip("ab", pair, known, strict=True):
            if path not in paths:
                raise SelectionError(f"match names {path!r}, which {name} has not; {nearest(str(path), paths)}")
    return dict(match)


def unmatched(pairs: Pairs, a: nn.Module, b: nn.Module) -> list[Unmatched]:
    """The modules of each model that were called and have no partner, with the reason."""
    modules = {path for path, _ in walk(a)}, {path for path, _ in walk(b)}
    everyone = pairs.everyone
    taken = set(everyone.values())
    lonely = [("a", call, "b", modules[1], pairs.b) for call in pairs.a if call not in everyone or call in pairs.odd]
    lonely += [("b", call, "a", modules[0], pairs.a) for call in pairs.b if call not in taken]
    found: dict[tuple[str, str], str] = {}
    for name, call, other, known, calls in lonely:
        if name == "a" and call in pairs.odd:
            reason = _unlike(pairs.a[call], pairs.b[pairs.odd[call]])
        elif call.path not in known:
            reason = f"{other} has no such module"
        elif all(call.path != path for path, _ in calls):
            reason = f"{other} does not call it"
        else:
            reason = f"{other} calls it less often, or has something else there"
        if reason:
            found.setdefault((name, call.path), reason)
    return [Unmatched(name, path, reason) for (name, path), reason in found.items()]


def _unlike(a: Moment, b: Moment) -> str:
    """Why what two modules return cannot be compared; empty if there is nothing to compare."""
    if not a.tensors and not b.tensors:
        return ""
    return f"it returns {shape_of(a.tensors)} in a and {shape_of(b.tensors)} in b"


def _calls(recording: Recording) -> dict[Call, Moment]:
    return {Call(moment.place.site.path, moment.place.call): moment for moment in recording.of("output")}


def _free(calls: Mapping[Call, Moment], known: Mapping[Call, Call]) -> dict[Call, Call | None]:
    """The leaves without a partner, in order, and after which partner (as a call of a) each comes."""
    free: dict[Call, Call | None] = {}
    before = None
    for call, moment in calls.items():
        if call in known:
            before = known[call]
        elif is_leaf(moment.module):
            free[call] = before
    return free


def _holders(recording: Recording, partners: Mapping[Call, Call], known: Mapping[Call, Call]) -> dict[Call, set[Call]]:
    """The calls that are not `known` in the course of which there were others with partners, and those partners."""
    held: dict[Call, set[Call]] = {}
    under_way: list[Call] = []
    for place in recording.moments:
        call = Call(place.site.path, place.call)
        if place.site.port == "input":
            under_way.append(call)
        elif place.site.port == "output" and call in under_way:
            while under_way.pop() != call:
                pass  # calls that raised, and somebody caught it
            for above in under_way if call in partners else ():
                held.setdefault(above, set()).add(partners[call])
    return {call: inside for call, inside in held.items() if call not in known}


def _turned(calls: Mapping[Call, Call]) -> dict[Call, Call]:
    return {other: mine for mine, other in calls.items()}


def _closely(moment: Moment) -> Hashable:
    """What a module and its partner by another name have in common: shapes of outputs, number of parameters."""
    return *_roughly(moment), sum(parameter.numel() for parameter in moment.module.parameters())


def _roughly(moment: Moment) -> tuple[Hashable, ...]:
    """The same without that number."""
    has_parameters = next(moment.module.parameters(), None) is not None
    shapes = tuple(tuple(tensor.shape) for tensor in moment.tensors)
    return isinstance(moment.module, PASSIVE), has_parameters, shapes


def _otherwise(moment: Moment) -> Hashable:
    """What a module has in common with one that gives other shapes: its kind, and the shapes of its parameters."""
    return type(moment.module), tuple(tuple(parameter.shape) for parameter in moment.module.parameters())
