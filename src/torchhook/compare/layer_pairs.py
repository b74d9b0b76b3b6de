"""Which layers of two models correspond: those with the same path, or those with the same role, in the same order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import nn

from torchhook.core.selection import walk
from torchhook.rules.kinds import ACTIVATIONS, NORMS, kind_of
from torchhook.stats.reading import Place

_LINEAR = re.compile(r"Linear|^Conv1D$")  # transformers has a Conv1D that is a linear layer
_ACTIVATION = re.compile(r"sigmoid|tanh|softmax|softmin|softsign|shrink|glu|threshold", re.IGNORECASE)


class Pair(NamedTuple):
    """A layer of the reference, the layer of the other model that it is compared with, and why it is that one."""

    path: str
    paired: str
    by: Literal["path", "role"]


def role_of(module: nn.Module) -> str:
    """What a module is for, by its class: modules of the same role can be compared.

    >>> [role_of(module) for module in (nn.Conv2d(1, 1, 1), nn.BatchNorm1d(1), nn.SiLU(), nn.Flatten())]
    ['convolution', 'norm', 'activation', 'Flatten']
    """
    name = type(module).__name__
    kind = kind_of(name)
    if kind in NORMS:
        return "norm"
    if kind in ACTIVATIONS or (kind == "other" and _ACTIVATION.search(name)):
        return "activation"
    if kind == "weight":
        return "linear" if _LINEAR.search(name) else "convolution"
    if kind != "other":
        return kind
    if "Pool" in name:
        return "pooling"
    return "block" if next(module.children(), None) is not None else name


def pairs_of(first: Mapping[str, str], second: Mapping[str, str]) -> list[Pair]:
    """The pairs of two models, each given as the roles of its layers by path, in the order of execution.

    If at least half of the layers of the smaller model have the path and the role of one in the other, paths mean the
    same in both: layers with the same path are pairs, and only the others are paired by role. Pairs by role are as many
    as possible without crossing; among those, they are at the most similar relative depths.

    >>> pairs_of({"a": "linear", "b": "activation", "c": "linear"}, {"x": "linear", "y": "linear"})
    [Pair(path='a', paired='x', by='role'), Pair(path='c', paired='y', by='role')]
    >>> pairs_of({"a": "linear", "b": "activation"}, {"a": "linear", "b": "norm"})
    [Pair(path='a', paired='a', by='path'), Pair(path='b', paired='b', by='path')]
    """
    alike = sum(second.get(path) == role for path, role in first.items())
    named = first.keys() & second.keys() if 2 * alike >= max(1, min(len(first), len(second))) else set()
    paths, others = list(first), list(second)

    def fits(i: int, j: int) -> bool:
        if paths[i] in named or others[j] in named:
            return paths[i] == others[j]
        return first[paths[i]] == second[others[j]]

    found = {paths[i]: others[j] for i, j in _aligned(len(paths), len(others), fits)}
    found |= {path: path for path in named}  # also those that run in another order
    return [Pair(path, found[path], "path" if path in named else "role") for path in paths if path in found]


def _aligned(n: int, m: int, fits: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """The longest list of pairs (i, j) that fit, both ascending; if there are several, that of the nearest depths."""

    def worth(i: int, j: int) -> float:
        apart = abs(i / max(n - 1, 1) - j / max(m - 1, 1))
        return 1 + (1 - apart) / (min(n, m) + 1)  # all depths together are worth less than one more pair

    best = [[0.0] * (m + 1) for _ in range(n + 1)]  # of the layers from i and from j on
    for i in reversed(range(n)):
        for j in reversed(range(m)):
            paired = best[i + 1][j + 1] + worth(i, j) if fits(i, j) else 0.0
            best[i][j] = max(best[i + 1][j], best[i][j + 1], paired)
    found, i, j = [], 0, 0
    while i < n and j < m:
        if fits(i, j) and best[i][j] == best[i + 1][j + 1] + worth(i, j):
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def roles_of(model: nn.Module, places: Iterable[Place]) -> dict[str, str]:
    """The roles of the layers at some places, by path, in the same order."""
    modules = dict(walk(model))
    return {path: role_of(modules[path]) if path in modules else "" for path, _ in places}


def places_of(pairs: Sequence[Pair], first: Sequence[Place], second: Sequence[Place]) -> dict[Place, Place]:
    """The places of the first model, and those of the second that they are compared with.

    If two layers return different containers, their first tensors are compared.
    """
    ports: list[dict[str, list[str]]] = [{}, {}]
    for side, places in zip(ports, (first, second), strict=True):
        for path, port in places:
            side.setdefault(path, []).append(port)
    found: dict[Place, Place] = {}
    for pair in pairs:
        here, there = ports[0].get(pair.path, []), ports[1].get(pair.paired, [])
        common = [(port, port) for port in here if port in there] or list(zip(here, there, strict=False))[:1]
        found |= {(pair.path, port): (pair.paired, other) for port, other in common}
    return found
