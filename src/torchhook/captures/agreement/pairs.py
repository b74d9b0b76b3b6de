"""Which call in model a matches which call in model b: by `match`, by name, else by execution order and shape.

Containers with different names are matched by their contents. That is only a guess, because a block may do in its own
forward what the caller of the block does in the other model. So teacher forcing replaces nothing there (see `judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import NamedTuple

from torchhook.captures.agreement.evidence import in_words
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.captures.agreement.rounding import comparable, gap, shapes_of
from torchhook.core.site import Site


class Unmatched(NamedTuple):
    """A module of one model that has no match in the other."""

    model: str  # "a" or "b"
    path: str
    reason: str


class Call(NamedTuple):
    """One call of a module."""

    path: str
    number: int


class Pairs:
    """The calls of two models that match, and those without a match."""

    def __init__(self, a: RecordedRun, b: RecordedRun) -> None:
        self.a = _calls(a)
        self.b = _calls(b)
        self.partners: dict[Call, Call] = {}  # from a to b
        self.misshapen: dict[Call, Call] = {}  # the same name, but outputs of different shapes
        self.likely: dict[Call, Call] = {}  # containers with the same contents but different names

    def join(self, pairs: Iterable[tuple[Call, Call]]) -> None:
        """Match those of `pairs` of which both calls are still free."""
        taken = set(self.partners.values())
        for mine, other in pairs:
            if mine in self.a and other in self.b and mine not in self.partners and other not in taken:
                if comparable(self.a[mine].tensors, self.b[other].tensors):
                    if self._is_doubtful(self.a[mine], self.b[other]):
                        self.likely[mine] = other
                        continue
                    self.partners[mine] = other
                    taken.add(other)
                else:
                    self.misshapen[mine] = other

    def _is_doubtful(self, mine: Observation, other: Observation) -> bool:
        """Whether two containers do not return the same things, such as a sum and its two terms."""
        containers = not (mine.module.is_leaf or other.module.is_leaf)
        return containers and len(mine.tensors) != len(other.tensors)

    def align(self, key: Callable[[Observation], Hashable], known: Mapping[Call, Call]) -> None:
        """Match free leaf modules with equal `key` that run in the same order between the same `known` pairs."""
        mine, others = _free(self.a, {call: call for call in known}), _free(self.b, _inverted(known))
        left, right = list(mine), list(others)
        left_keys = [(mine[call], key(self.a[call])) for call in left]
        right_keys = [(others[call], key(self.b[call])) for call in right]
        for i, j, size in SequenceMatcher(None, left_keys, right_keys, autojunk=False).get_matching_blocks():
            self.join(zip(left[i : i + size], right[j : j + size], strict=True))

    def drop_matched(self) -> None:
        """Remove from the misshapen pairs those of which one call has found a match since."""
        taken = set(self.partners.values())
        self.misshapen = {
            mine: other for mine, other in self.misshapen.items() if mine not in self.partners and other not in taken
        }

    def guess_containers(self, a: RecordedRun, b: RecordedRun) -> None:
        """Match free containers with the same matched contents; of several, those with the closest outputs."""
        known = {**self.partners, **self.misshapen}
        mine = _contents(a, {call: call for call in self.partners}, known)
        others = _contents(b, _inverted(self.partners), _inverted(known))
        errors = {
            (one, other): gap(self.a[one].tensors[0], self.b[other].tensors[0]).error
            for one, held in mine.items()
            for other, held_there in others.items()
            if held == held_there
            and one in self.a
            and other in self.b  # a recording may end before they returned
            and comparable(self.a[one].tensors, self.b[other].tensors)
        }
        taken: set[Call] = set()
        for one, other in sorted(errors, key=errors.__getitem__):
            if one not in self.likely and other not in taken:
                self.likely[one] = other
                taken.add(other)

    @property
    def everyone(self) -> dict[Call, Call]:
        """All pairs, from a to b, including misshapen and likely ones."""
        return {**self.partners, **self.misshapen, **self.likely}

    def finder(self, from_a: bool, likely: bool = False) -> Callable[[Location], Location | None]:
        """A function from a location in one model to that in the other; parameters are matched by their modules."""
        both = self.everyone if likely else {**self.partners, **self.misshapen}
        calls = both if from_a else _inverted(both)
        names = {mine.path: other.path for mine, other in reversed(calls.items())}

        def find(location: Location) -> Location | None:
            site = location.site
            if site.port == "param_grad":
                owner, _, name = site.path.rpartition(".")
                other = names.get(owner, owner)
                return Location(Site(f"{other}.{name}" if other else name, site.port), 0)
            partner = calls.get(Call(site.path, location.call))
            return None if partner is None else Location(Site(partner.path, site.port), partner.number, location.leaf)

        return find


def matched(a: RecordedRun, b: RecordedRun, renamed: Mapping[str, str]) -> Pairs:
    """Match the calls of two runs. `renamed` maps paths in a to paths in b, including everything below them."""
    pairs = Pairs(a, b)
    pairs.join((call, Call(renaming(call.path, renamed), call.number)) for call in pairs.a)
    pairs.join((call, call) for call in pairs.a if not call.path)  # what is around one model may belong to the other
    pairs.align(_shapes_and_size, pairs.partners)
    pairs.align(_shapes, pairs.partners)
    pairs.drop_matched()
    pairs.align(_type_and_parameters, {**pairs.partners, **pairs.misshapen})
    pairs.guess_containers(a, b)
    return pairs


def renaming(path: str, renamed: Mapping[str, str]) -> str:
    """The path in b of the module at `path` in a.

    >>> renaming("transformer.h.0.attn", {"transformer.h": "blocks"})
    'blocks.0.attn'
    """
    for above in sorted(renamed, key=len, reverse=True):
        if path == above or path.startswith(f"{above}.") or not above:
            rest = path[len(above) :].removeprefix(".")
            return ".".join(filter(None, (renamed[above], rest)))
    return path


def unmatched(pairs: Pairs, a: Collection[str], b: Collection[str], recorded: tuple[bool, bool]) -> list[Unmatched]:
    """The modules of each model that ran without a match in the other, with the reason; not those that do nothing.

    `a` and `b` have the paths of all modules; `recorded` says which sides come from a file, which may lack some calls.
    """
    modules = a, b
    missing = {
        name: "did not record it" if known else "does not call it" for name, known in zip("ab", recorded, strict=True)
    }
    everyone = pairs.everyone
    taken = set(everyone.values())
    lonely = [
        ("a", call, "b", modules[1], pairs.b)
        for call, output in pairs.a.items()
        if (call not in everyone and not output.module.is_idle) or call in pairs.misshapen
    ]
    lonely += [
        ("b", call, "a", modules[0], pairs.a)
        for call, output in pairs.b.items()
        if call not in taken and not output.module.is_idle
    ]
    found: dict[tuple[str, str], str] = {}
    for name, call, other, known, calls in lonely:
        if name == "a" and call in pairs.misshapen:
            reason = _shapes_differ(pairs.a[call], pairs.b[pairs.misshapen[call]])
        elif call.path not in known:
            reason = f"{other} has no such module"
        elif all(call.path != path for path, _ in calls):
            reason = f"{other} {missing[other]}"
        else:
            reason = f"{other} calls it fewer times, or runs a different module there"
        if reason:
            found.setdefault((name, call.path), reason)
    return [Unmatched(name, path, reason) for (name, path), reason in found.items()]


def _shapes_differ(a: Observation, b: Observation) -> str:
    """Why the outputs of two modules cannot be compared; empty if neither has tensors."""
    if not a.tensors and not b.tensors:
        return ""
    shapes = [in_words(shapes_of(one.tensors)) for one in (a, b)]
    return f"it returns {shapes[0]} in a and {shapes[1]} in b"


def _calls(run: RecordedRun) -> dict[Call, Observation]:
    return {Call(output.location.site.path, output.location.call): output for output in run.of("output")}


def _free(calls: Mapping[Call, Observation], known: Mapping[Call, Call]) -> dict[Call, Call | None]:
    """The unmatched calls of leaf modules, in order, each with the last matched call (as one of a) before it."""
    free: dict[Call, Call | None] = {}
    before = None
    for call, output in calls.items():
        if call in known:
            before = known[call]
        elif output.module.is_leaf:
            free[call] = before
    return free


def _contents(run: RecordedRun, partners: Mapping[Call, Call], known: Mapping[Call, Call]) -> dict[Call, set[Call]]:
    """The calls that are not `known` and the matched calls, as those of a, that ran inside each of them."""
    inside: dict[Call, set[Call]] = {}
    running: list[Call] = []
    for location in run.observations:
        call = Call(location.site.path, location.call)
        if location.site.port == "input":
            running.append(call)
        elif location.site.port == "output" and call in running:
            while running.pop() != call:
                pass  # calls that raised an exception which the model caught
            for above in running if call in partners else ():
                inside.setdefault(above, set()).add(partners[call])
    return {call: calls for call, calls in inside.items() if call not in known}


def _inverted(calls: Mapping[Call, Call]) -> dict[Call, Call]:
    return {other: mine for mine, other in calls.items()}


def _shapes_and_size(output: Observation) -> Hashable:
    """What a module has in common with its match of another name: output shapes and the number of parameters."""
    return *_shapes(output), output.module.size


def _shapes(output: Observation) -> tuple[Hashable, ...]:
    """The same without the number of parameters."""
    shapes = tuple(shapes_of(output.tensors))
    return output.module.is_passive, bool(output.module.parameters), shapes


def _type_and_parameters(output: Observation) -> Hashable:
    """What a module has in common with a match whose output has another shape: its type and parameter shapes."""
    return output.module.kind, tuple(output.module.parameters.values())
