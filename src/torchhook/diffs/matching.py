"""Which call of the one model is which call of the other: by mapping, by name, else by order and shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from torch import nn

from torchhook.core.selection import nearest, walk
from torchhook.core.site import Site
from torchhook.diffs.numbers import comparable
from torchhook.diffs.running import Moment, Place, Recording
from torchhook.errors import SelectionError
from torchhook.text import shape_of

_PASSIVE = (nn.Dropout, nn.modules.dropout._DropoutNd, nn.Identity)


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

    def align(self, key: Callable[[Moment], Hashable]) -> None:
        """Make partners of leaves with the same `key` that come in the same order between the same partners."""
        mine, others = _free(self.a, {call: call for call in self.partners}), _free(self.b, self.backwards)
        left, right = list(mine), list(others)
        left_keys = [(mine[call], key(self.a[call])) for call in left]
        right_keys = [(others[call], key(self.b[call])) for call in right]
        for i, j, size in SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_matching_blocks():
            self.join(zip(left[i : i + size], right[j : j + size], strict=True))

    @property
    def backwards(self) -> dict[Call, Call]:
        """The partners from b to a."""
        return {other: mine for mine, other in self.partners.items()}

    def finder(self, from_a: bool) -> Callable[[Place], Place | None]:
        """What finds to a place of one model that of the other; parameters go with their modules."""
        both = {**self.partners, **self.odd}
        calls = both if from_a else {other: mine for mine, other in both.items()}
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
    pairs.align(_closely)
    pairs.align(_roughly)
    taken = set(pairs.partners.values())
    pairs.odd = {mine: other for mine, other in pairs.odd.items() if mine not in pairs.partners and other not in taken}
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
    taken = set(pairs.partners.values()), set(pairs.odd.values())
    lonely = [("a", call, "b", modules[1], pairs.b) for call in pairs.a if call not in pairs.partners]
    lonely += [
        ("b", call, "a", modules[0], pairs.a) for call in pairs.b if call not in taken[0] and call not in taken[1]
    ]
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
        elif not moment.module._modules:
            free[call] = before
    return free


def _closely(moment: Moment) -> Hashable:
    """What a module and its partner by another name have in common: shapes of outputs, number of parameters."""
    return *_roughly(moment), sum(parameter.numel() for parameter in moment.module.parameters())


def _roughly(moment: Moment) -> tuple[Hashable, ...]:
    has_parameters = next(moment.module.parameters(), None) is not None
    shapes = tuple(tuple(tensor.shape) for tensor in moment.tensors)
    return isinstance(moment.module, _PASSIVE), has_parameters, shapes
