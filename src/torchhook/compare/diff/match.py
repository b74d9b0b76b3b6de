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
from pathlib import Path
from typing import Any

from torchhook.core.errors import FileError, SelectionError
from torchhook.core.optional import require
from torchhook.core.selection import nearest


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
            f"match: {_shown(pair.a)} is there {len(mine)} times in a, and {_shown(pair.b)} {len(theirs)} times in b"
            f" (as {'.'.join(odd)} only in {'a' if odd in mine else 'b'})"
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
    return tuple(path.replace("*", "{}").format(*names) for path in paths)


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


def used(pairs: Sequence[Counterparts], names: Iterable[tuple[str, str]]) -> Match:
    """The map that was used: the entries, and the names of modules that are called differently, with stars for numbers.

    >>> used([], [("h.0.fc", "blocks.0.up"), ("h.1.fc", "blocks.1.up"), ("norm", "norm")])
    Match({'h.*.fc': 'blocks.*.up'})
    """
    known = {path for pair in pairs for path in (*pair.a, *pair.b)}
    differing = [Counterparts((a,), (b,)) for a, b in dict.fromkeys(names) if a != b and not {a, b} & known]
    return Match([*_starred(list(pairs)), *_starred(differing)])


def _starred(pairs: Sequence[Counterparts]) -> list[Counterparts]:
    """The same pairs, those that differ in numbers alone as one; a number that is not the same on both sides stays."""
    groups: dict[Counterparts, list[Counterparts]] = {}
    for pair in pairs:
        groups.setdefault(_pattern(pair), []).append(pair)
    return [pattern if len(held) > 1 else held[0] for pattern, held in groups.items()]


def _pattern(pair: Counterparts) -> Counterparts:
    paths = [path.split(".") for path in (*pair.a, *pair.b)]
    numbers = [[name for name in path if name.isdecimal()] for path in paths]
    if any(found != numbers[0] for found in numbers):
        return pair
    stars = [".".join("*" if name.isdecimal() else name for name in path) for path in paths]
    return replace(pair, a=tuple(stars[: len(pair.a)]), b=tuple(stars[len(pair.a) :]))
