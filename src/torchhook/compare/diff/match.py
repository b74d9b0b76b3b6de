"""Which modules of a are which of b: written by hand, read from a file, or found.

An entry pairs one module, or several that b computes at once, with their counterparts. A star stands for one name of a
path, the same on both sides; an entry also holds for all that is below its modules, unless another one says otherwise.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product, zip_longest
from pathlib import Path
from typing import Any

from torchhook.core.errors import FileError, SelectionError
from torchhook.core.optional import require
from torchhook.core.selection import nearest

_DEEPEST = 4  # numbers of a path that a star may stand for


@dataclass(frozen=True)
class Counterparts:
    """Modules of a and their counterparts in b; one side has several if the other computes them at once.

    With `heads`, the features of the one that computes several are ordered by head: those of all parts for the first of
    so many heads, then for the next. With `rotary`, b has the two halves of each head of this size interleaved.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    heads: int | None = None
    rotary: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it pairs one module with one, whose values are in the same order."""
        return len(self.a) == len(self.b) == 1 and self.rotary is None


class Match(Sequence[Counterparts]):
    """The entries of a map between the names of two models; `save` writes them to a file that ``match=`` takes.

    >>> Match.of({"h.*.attn": "blocks.*.mix"})
    Match({'h.*.attn': 'blocks.*.mix'})
    """

    def __init__(self, pairs: Sequence[Counterparts] = ()) -> None:
        self.pairs = tuple(pairs)

    @staticmethod
    def of(match: Any) -> Match:
        """The map that a user has given: paths of a and of b, a list of entries, or the name of a TOML file."""
        if isinstance(match, Match):
            return match
        if match is None:
            return Match()
        if isinstance(match, (str, os.PathLike)):
            return _read(Path(match))
        if isinstance(match, Mapping):
            match = [{"a": a, **(b if isinstance(b, Mapping) else {"b": b})} for a, b in match.items()]
        if not isinstance(match, Sequence):
            raise TypeError(f"match must map paths in a to paths in b, or name a file, not {match!r:.80}")
        return Match([_pair(entry) for entry in match])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the entries to a TOML file."""
        entries = "\n".join(map(_toml, self.pairs))
        Path(path).write_text(f"# Modules of a, and their counterparts in b.\n{entries}", encoding="utf-8")

    def expanded(self, a: Collection[str], b: Collection[str]) -> Match:
        """The entries without stars, given the paths of all modules; raises if they do not fit.

        >>> Match.of({"h.*": "blocks.*"}).expanded(["h.0", "h.1"], ["blocks.0", "blocks.1"])
        Match({'h.0': 'blocks.0', 'h.1': 'blocks.1'})
        """
        return Match([one for pair in self.pairs for one in _expanded(pair, a, b)])

    def __getitem__(self, number: Any) -> Any:
        return self.pairs[number]

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        shown = [f"{_shown(pair.a)}: {_shown(pair.b)}" for pair in self.pairs]
        return f"Match({{{', '.join(shown)}}})"


def _pair(entry: Any) -> Counterparts:
    if not isinstance(entry, Mapping) or not {"a", "b"} <= entry.keys():
        raise TypeError(f"match must map paths in a to paths in b; {entry!r:.80} does not have a and b")
    if unknown := entry.keys() - {field.name for field in fields(Counterparts)}:
        raise ValueError(f"match: an entry has a, b, heads and rotary, not {', '.join(sorted(unknown))}")
    numbers = {name: entry.get(name) for name in ("heads", "rotary")}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"match: {name} must be a positive whole number, not {number!r}")
    a, b = _paths(entry["a"]), _paths(entry["b"])
    if len(a) > 1 and len(b) > 1:
        raise ValueError(f"match: {_shown(a)} and {_shown(b)}: one side must be a single module")
    if numbers["heads"] is not None and len(a) == len(b) == 1:
        raise ValueError(f"match: {_shown(a)} and {_shown(b)}: heads goes with several modules on one side")
    if numbers["rotary"] is not None and (len(a), len(b)) != (1, 1):
        raise ValueError(f"match: {_shown(a)} and {_shown(b)}: rotary goes with one module on each side")
    return Counterparts(a, b, **numbers)


def _paths(given: Any) -> tuple[str, ...]:
    paths = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not paths or not all(isinstance(path, str) for path in paths):
        raise TypeError(f"match must have paths of modules, or lists of them, not {given!r:.80}")
    return paths


def _expanded(pair: Counterparts, a: Collection[str], b: Collection[str]) -> Iterator[Counterparts]:
    stars = {path.count("*") for path in (*pair.a, *pair.b)}
    if len(stars) > 1:
        raise ValueError(f"match: {_shown(pair.a)} and {_shown(pair.b)} must have the same number of stars")
    mine, theirs = _names(pair.a[0], a, "a"), _names(pair.b[0], b, "b")
    if mine != theirs:
        odd = sorted(mine ^ theirs)[0]
        raise ValueError(
            f"match: {_shown(pair.a)} fits {len(mine)} modules of a, and {_shown(pair.b)} {len(theirs)} of b"
            f" (the star stands for {'.'.join(odd)} only in {'a' if odd in mine else 'b'})"
        )
    for names in sorted(mine, key=lambda names: [(len(name), name) for name in names]):
        one = replace(pair, a=_filled(pair.a, names), b=_filled(pair.b, names))
        for which, paths, known in (("a", one.a, a), ("b", one.b, b)):
            for path in paths:
                if path not in known:
                    raise SelectionError(f"match: {which} has no module {path!r}; {nearest(path, known)}")
        yield one


def _names(path: str, known: Collection[str], which: str) -> set[tuple[str, ...]]:
    """What the stars of a path stand for."""
    pattern = re.compile(r"([^.]+)".join(map(re.escape, path.split("*"))))
    found = {match.groups() for one in known if (match := pattern.fullmatch(one))}
    if not found:
        raise SelectionError(f"match: {which} has no module {path!r}; {nearest(path, known)}")
    return found


def _filled(paths: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The paths with names in place of their stars."""
    return tuple("".join(map("".join, zip_longest(path.split("*"), names, fillvalue=""))) for path in paths)


def _read(path: Path) -> Match:
    try:
        toml = require("tomllib" if sys.version_info >= (3, 11) else "tomli", "cli", "a map in a file")
        found = toml.loads(path.read_text(encoding="utf-8"))
        if found.keys() - {"match"}:
            raise ValueError(f"a map consists of [[match]] entries, not {', '.join(map(repr, found))}")
        return Match([_pair(entry) for entry in found.get("match", ())])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise FileError(f"match: cannot read {str(path)!r}: {error}") from error


def _toml(pair: Counterparts) -> str:
    numbers = {"heads": pair.heads, "rotary": pair.rotary}
    lines = [f"{name} = {_quoted(paths)}" for name, paths in (("a", pair.a), ("b", pair.b))]
    lines += [f"{name} = {number}" for name, number in numbers.items() if number is not None]
    return "\n".join(["[[match]]", *lines, ""])


def _quoted(paths: Sequence[str]) -> str:
    texts = [f'"{path}"' for path in (re.sub(r'(["\\])', r"\\\1", path) for path in paths)]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _shown(paths: Sequence[str]) -> str:
    return repr(paths[0]) if len(paths) == 1 else repr(tuple(paths))


def used(
    pairs: Sequence[Counterparts], names: Iterable[tuple[str, str]], a: Collection[str], b: Collection[str]
) -> Match:
    """The map that was used: the entries, and the names of modules that are called differently, with stars for numbers.

    `a` and `b` are the paths of all modules.

    >>> names = [("h.0.fc", "blocks.0.up"), ("h.1.fc", "blocks.1.up"), ("norm", "norm")]
    >>> used([], names, *zip(*names))
    Match({'h.*.fc': 'blocks.*.up'})
    """
    known = {path for pair in pairs for path in (*pair.a, *pair.b)}
    differing = [
        Counterparts((mine,), (other,)) for mine, other in names if mine != other and not {mine, other} & known
    ]
    return Match([*_starred(list(pairs), a, b), *_starred(differing, a, b)])


def _starred(pairs: Sequence[Counterparts], a: Collection[str], b: Collection[str]) -> list[Counterparts]:
    """The same pairs, those that differ in numbers alone as one, if it stands for these and no others."""
    groups: dict[Counterparts, list[Counterparts]] = {}
    for pair in pairs:
        for pattern in _patterns(pair):
            groups.setdefault(pattern, []).append(pair)
    chosen: dict[Counterparts, Counterparts] = {}
    for pattern, held in sorted(groups.items(), key=lambda group: -len(group[1])):
        if len(held) > 1 and not chosen.keys() & set(held) and _stands_for(pattern, held, a, b):
            chosen |= dict.fromkeys(held, pattern)
    return list(dict.fromkeys(chosen.get(pair, pair) for pair in pairs))


def _stands_for(pattern: Counterparts, held: Sequence[Counterparts], a: Collection[str], b: Collection[str]) -> bool:
    try:
        return set(_expanded(pattern, a, b)) == set(held)
    except (ValueError, SelectionError):
        return False


def _patterns(pair: Counterparts) -> Iterator[Counterparts]:
    """The pair with stars for numbers that all of its paths have, in every way."""
    ways = [_ways(path) for path in (*pair.a, *pair.b)]
    for numbers in ways[0]:
        for paths in product(*(way.get(numbers, ()) for way in ways)):
            yield replace(pair, a=paths[: len(pair.a)], b=paths[len(pair.a) :])


def _ways(path: str) -> dict[tuple[str, ...], list[str]]:
    """The path with stars for some of its numbers, by these numbers."""
    names = path.split(".")
    places = [place for place, name in enumerate(names) if name.isdecimal()][:_DEEPEST]
    found: dict[tuple[str, ...], list[str]] = {}
    for count in range(1, len(places) + 1):
        for starred in combinations(places, count):
            text = ".".join("*" if place in starred else name for place, name in enumerate(names))
            found.setdefault(tuple(names[place] for place in starred), []).append(text)
    return found
