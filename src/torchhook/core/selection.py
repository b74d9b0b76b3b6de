"""Selecting places of a model: paths, globs, classes and the like become a `Selector`, all in `Selector.of`.

A selector is a predicate on (path, module) that combines with ``&``, ``|`` and ``~``. Paths are those of
``named_modules``; a module with two names has two paths. Modules that only wrap another one (``torch.compile``, DDP,
FSDP, a checkpoint) are skipped: paths are the same with and without them.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, Union

from torch import nn

from torchhook.core.errors import SelectionError
from torchhook.core.torch_internals import WRAPPER_NAMES, own_parameters, submodules

Test = Callable[[str, nn.Module, "str | None"], bool]
Query: TypeAlias = Union[
    str,
    "re.Pattern[str]",
    type[nn.Module],
    nn.Module,
    Callable[[str, nn.Module], bool],
    "Selector",
    "Sequence[Query]",
]
Sites: TypeAlias = Query | Iterable[Query] | None
"""One query, several, or None for every leaf."""

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

_WILD = re.compile(r"[*?\[]")
# "**" as a whole segment stands for any number of segments, elsewhere for any characters
_GLOB = re.compile(r"((?<![^.])\*\*\.|\.\*\*$|\*\*|\*|\?|\[!?[^\]]+\])")
_GLOB_TOKENS = {"**.": r"(?:.+\.)?", ".**": r"\..+", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}


class Selector:
    """A predicate on (path, module), combined with ``&``, ``|`` and ``~``.

    >>> linear_but_not_head = of_type(nn.Linear) & ~glob("head*")
    >>> list(select(nn.ModuleDict({"fc": nn.Linear(1, 1), "head": nn.Linear(1, 1)}), linear_but_not_head))
    ['fc']
    """

    __slots__ = ("label", "marks", "parts", "path", "test")

    def __init__(self, test: Test, label: str, marks: bool = False, path: str | None = None) -> None:
        self.test = test
        self.label = label
        self.marks = marks  # whether it selects marks inside a forward instead of modules
        self.path = path  # the query if it was a string: an exact path needs no search
        self.parts: tuple[Selector, ...] = (self,)  # each of them must match something

    @staticmethod
    def of(query: Query) -> Selector:
        """The selector for a `query`: a path, a glob, a regex, a class, a module, or a predicate."""
        if isinstance(query, Selector):
            return query
        if isinstance(query, (list, tuple)):
            if not query:
                raise SelectionError("the list of queries is empty; name at least one module")
            return Selector.union(query)
        if isinstance(query, str):
            return _of_string(query)
        if isinstance(query, re.Pattern):
            return regex(query)
        if isinstance(query, type) and issubclass(query, nn.Module):
            return of_type(query)
        if isinstance(query, nn.Module):
            return Selector(lambda path, module, mark: module is query, f"the {type(query).__name__}")
        if callable(query) and not isinstance(query, type):
            return _predicate(query)
        raise SelectionError(
            f"query {query!r} is a {type(query).__name__}; pass a path, a glob, a compiled regex, a module"
            " class, a module, a predicate on (path, module), a Selector, or a list of these"
        )

    @staticmethod
    def union(queries: Iterable[Query]) -> Selector:
        """Everything that any of `queries` selects; each must match something. No query selects every leaf."""
        parts = tuple(part for query in queries for part in Selector.of(query).parts)
        union = Selector(
            lambda path, module, mark: any(part.test(path, module, mark) for part in parts),
            ", ".join(part.label for part in parts) or "every leaf",
        )
        union.parts = parts
        return union

    def __and__(self, other: Query) -> Selector:
        a, b = self, Selector.of(other)
        return Selector(
            lambda *place: a.test(*place) and b.test(*place), f"({a.label} & {b.label})", a.marks or b.marks
        )

    def __or__(self, other: Query) -> Selector:
        a, b = self, Selector.of(other)
        if a.marks != b.marks:
            raise SelectionError(
                f"{a.label} | {b.label} mixes modules and marks; pass them as two queries, whose union is taken"
            )
        return Selector(lambda *place: a.test(*place) or b.test(*place), f"({a.label} | {b.label})", a.marks)

    def __invert__(self) -> Selector:
        return Selector(lambda *place: not self.test(*place), f"~{self.label}", self.marks)

    def __repr__(self) -> str:
        return f"Selector({self.label})"


def of_type(*types: type[nn.Module]) -> Selector:
    """Modules that are instances of any of `types`.

    >>> list(select(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), of_type(nn.ReLU)))
    ['1']
    """
    for kind in types or (None,):
        if not isinstance(kind, type):
            raise SelectionError(f"of_type takes module classes, not {kind!r}")
    return Selector(lambda path, module, mark: isinstance(module, types), " | ".join(t.__name__ for t in types))


def glob(pattern: str) -> Selector:
    """Paths that match `pattern`: ``*`` and ``?`` stay within a dotted segment, ``**`` crosses them.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    >>> list(select(net, glob("*"))), list(select(net, glob("0.**")))
    (['0', '1'], ['0.0'])
    """
    matches = _compiled(pattern).fullmatch
    return Selector(lambda path, module, mark: bool(matches(path)), f"glob {pattern!r}")


def regex(pattern: str | re.Pattern[str]) -> Selector:
    """Paths in which the regular expression `pattern` is found (anchor it with ``^`` and ``$``).

    >>> list(select(nn.Sequential(nn.ReLU(), nn.ReLU()), regex("^1$")))
    ['1']
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise SelectionError(f"regex {pattern!r} is malformed: {error}") from error
    return Selector(lambda path, module, mark: bool(compiled.search(path)), f"regex {compiled.pattern!r}")


def marked(name: str) -> Selector:
    """Values that a forward marked with ``torchhook.mark(x, name)``; `name` may be a glob.

    >>> marked("attention")
    Selector(marked 'attention')
    """
    matches = _compiled(name).fullmatch
    return Selector(lambda path, module, mark: mark is not None and bool(matches(mark)), f"marked {name!r}", marks=True)


def select(model: nn.Module, *queries: Query) -> dict[str, nn.Module]:
    """The modules that any of `queries` selects, by path, in the order of ``named_modules``.

    No query selects every leaf. Only ``""`` selects the root.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> select(net, nn.ReLU)
    {'1': ReLU()}
    >>> select(net, "relu")
    Traceback (most recent call last):
    torchhook.core.errors.SelectionError: no module matches 'relu'; nearest: '0', '1'
    """
    require_module(model)
    parts = Selector.union(queries).parts
    if len(parts) == 1 and (way := along(model, parts[0].path)):
        return {str(parts[0].path): way[-1]}  # no need to walk the model for an exact path
    modules = dict(walk(model))
    for part in parts:
        if part.marks and part.path not in modules:
            raise SelectionError(f"{part.label} selects marks, which exist only while the forward runs")
    return find(modules, parts)


def find(modules: dict[str, nn.Module], parts: tuple[Selector, ...]) -> dict[str, nn.Module]:
    """Those of `modules` (all of a model, by path) that any of `parts` selects; each must select some."""
    if not parts:
        return {path: module for path, module in modules.items() if not submodules(module)}
    found: dict[str, nn.Module] = {}
    for part in parts:
        hits = _hits(modules, part)
        if not hits:
            raise SelectionError(f"no module matches {part.label}; {_remedy(part, modules)}")
        found.update(hits)
    if len(parts) > 1:  # a union is in the model's order, not in that of the queries
        return {path: module for path, module in modules.items() if path in found}
    return found


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, the module that it wraps, and so on, down to one that is not a wrapper."""
    yield module
    while (name := wrapped_name(module)) is not None and (inner := submodules(module)[name]) is not None:
        module = inner
        yield module


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers.

    >>> model = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(model)) is model
    True
    """
    return list(layers(module))[-1]


def wrapped_name(module: nn.Module) -> str | None:
    """The attribute of a wrapper that holds the wrapped module, None if `module` is not a wrapper."""
    if len(submodules(module)) == 1 and isinstance(submodules(module), dict):  # TorchScript has its own class here
        (name,) = submodules(module)
        if name in WRAPPER_NAMES or (name == "module" and isinstance(module, _PARALLEL)):
            return name
    return None


def plain(path: str) -> str:
    """`path` without the names of wrappers.

    >>> plain("module._orig_mod.fc")
    'module.fc'
    """
    return ".".join(name for name in path.split(".") if name not in WRAPPER_NAMES)


def spellings(path: str) -> tuple[str, ...]:
    """The paths that `path` may stand for: it may contain the names of wrappers.

    >>> spellings("module._orig_mod.fc")
    ('module._orig_mod.fc', 'module.fc', 'fc')
    """
    inside = plain(path)
    return path, inside, f"{inside}.".removeprefix("module.").removesuffix(".")


def walk(
    model: nn.Module,
    path: str = "",
    above: tuple[nn.Module, ...] = (),
    wrappers: list[nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """Every (path, module), the root first; shared modules appear under each of their names.

    Like ``named_modules(remove_duplicate=False)``, but wrappers are skipped (and added to `wrappers`), and a module
    that contains itself is not entered again.
    """
    if wrapped_name(model) is not None:
        *around, model = layers(model)
        if wrappers is not None:
            wrappers += around
    yield path, model
    above = (*above, model)
    for name, child in submodules(model).items():
        if child is None:
            continue
        below = f"{path}.{name}" if path else name
        if not submodules(child):
            yield below, child
        elif not any(child is module for module in above):
            yield from walk(child, below, above, wrappers)


def along(model: nn.Module, path: str | None) -> list[nn.Module]:
    """The modules from `model` down to the one at exactly `path`; empty if there is none."""
    if path is None:
        return []
    modules = list(layers(model))
    for name in path.split(".") if path else ():
        inside = submodules(modules[-1])
        child = inside[name] if name in inside else None  # noqa: SIM401 (TorchScript's has no get)
        if child is None:
            return []
        modules += layers(child)
    return modules


def require_module(model: Any, argument: str = "model") -> None:
    """Raise unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, not {type(model).__name__}: {model!r:.80}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The names in `known` that look most like `name`, as the end of an error message."""
    known = [path for path in known if path]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
    return "nearest: " + ", ".join(map(repr, close)) if close else "there are no other names"


def _of_string(query: str) -> Selector:
    owner, colon, name = query.rpartition(":")
    selector = marked(name) & _of_path(owner) if colon else _of_path(query)
    return Selector(selector.test, repr(query), selector.marks, path=query)


def _of_path(path: str) -> Selector:
    if _WILD.search(path):
        return glob(path)
    return Selector(lambda other, module, mark: other == path, repr(path))


def _hits(modules: dict[str, nn.Module], selector: Selector) -> dict[str, nn.Module]:
    if selector.path is not None:
        for path in spellings(selector.path):
            if path in modules:
                return {path: modules[path]}
    test = selector.test
    return {path: module for path, module in modules.items() if path and test(path, module, None)}


def _predicate(query: Callable[[str, nn.Module], bool]) -> Selector:
    name = getattr(query, "__qualname__", type(query).__name__)
    try:
        inspect.signature(query).bind("path", "module")
    except TypeError as error:
        raise SelectionError(f"predicate {name} must take a path and a module: {error}") from error
    except ValueError:  # a builtin without a signature
        pass
    return Selector(lambda path, module, mark: bool(query(path, module)), f"predicate {name}")


def _remedy(part: Selector, modules: dict[str, nn.Module]) -> str:
    owner, _, name = (part.path or "").rpartition(".")
    if owner in modules and name in own_parameters(modules[owner]):
        return (
            f"it is a parameter: select {owner!r} with params=True in capture or measure, or with port 'param' in a Tap"
        )
    return nearest(part.path or part.label, modules)


def _compiled(pattern: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise SelectionError(f"a glob must be a string, not {pattern!r}")
    try:
        return re.compile("".join(map(_glob_token, _GLOB.split(pattern))))
    except re.error as error:
        raise SelectionError(f"glob {pattern!r} is malformed: {error}") from error


def _glob_token(token: str) -> str:
    if token in _GLOB_TOKENS:
        return _GLOB_TOKENS[token]
    if token.startswith("[") and token.endswith("]"):
        body = token[1:-1].replace("\\", r"\\")
        return f"[^{body[1:]}]" if body.startswith("!") else f"[{body}]"
    return re.escape(token)


def queries_of(sites: Sites) -> Sequence[Query]:
    """One query, several, or None (every leaf), as a list."""
    if sites is None:
        return []
    many = isinstance(sites, Iterable) and not isinstance(sites, (str, nn.Module))
    return list(sites) if many else [sites]  # type: ignore[arg-type, list-item]  # some modules are iterable


def require_sites(model: nn.Module, sites: Sites, argument: str, hint: str = "") -> None:
    """Raise unless `sites` select modules of `model`, before anything runs."""
    queries = queries_of(sites)
    if sites is not None and not queries:
        raise SelectionError(f"{argument} is empty; name at least one module, or leave it out for every leaf")
    try:
        select(model, *queries)
    except SelectionError as error:
        raise SelectionError(f"{argument}: {error}{hint}") from error
