"""Which nodes and wires of a model are drawn, when some of its blocks are folded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

_FEW = 40  # nodes that are shown at first


def above(path: str) -> list[str]:
    """The blocks around a layer, the outermost first.

    >>> above("h.0.fc")
    ['h', 'h.0']
    """
    parts = path.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


def blocks(layers: Iterable[str]) -> dict[str, int]:
    """How many layers are in each block, outer blocks first.

    >>> blocks(["h.0.fc", "h.0.act", "head"])
    {'h': 2, 'h.0': 2}
    """
    found: dict[str, int] = {}
    for block in (block for path in layers for block in above(path)):
        found[block] = found.get(block, 0) + 1
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def seen_as(path: str, unfolded: Collection[str]) -> str:
    """The node in which a layer is seen: its outermost folded block, or itself.

    >>> seen_as("h.0.fc", {"h"}), seen_as("h.0.fc", {"h", "h.0"})
    ('h.0', 'h.0.fc')
    """
    return next((block for block in above(path) if block not in unfolded), path)


def unfolded_first(layers: Sequence[str]) -> list[str]:
    """The blocks that are unfolded at first: level by level, as long as few nodes are seen.

    >>> unfolded_first([f"h.{block}.{layer}" for block in range(30) for layer in range(3)])
    ['h']
    """
    known, unfolded = blocks(layers), set[str]()
    for depth in sorted({block.count(".") for block in known}):
        more = unfolded | {block for block in known if block.count(".") == depth}
        if len({seen_as(path, more) for path in layers}) > _FEW:
            break
        unfolded = more
    return sorted(unfolded)


def drawn_wires(sources: Mapping[str, Sequence[str]], layers: Sequence[str]) -> list[tuple[str, str]]:
    """The wires between layers that are drawn, given each layer's sources in execution order.

    In a residual stream, a layer receives the sum of all layers before it. Of the sources that lead to another source,
    only the last one is drawn, as the skip.

    >>> drawn_wires({"b": "a", "c": "ab", "d": "abc"}, "abcd")
    [('a', 'b'), ('a', 'c'), ('b', 'c'), ('b', 'd'), ('c', 'd')]
    """
    place = {path: number for number, path in enumerate(layers)}
    before: dict[str, int] = {}  # the layers that lead to a layer, as bits
    wires = []
    for path in layers:
        known = [source for source in sources.get(path, ()) if source in place and source != path]
        earlier = [source for source in known if place[source] < place[path]]
        reached = 0
        for source in earlier:
            reached |= before[source]
        before[path] = reached | sum(1 << place[source] for source in earlier)
        skips = [source for source in earlier if reached >> place[source] & 1]
        wires += [(source, path) for source in known if source not in skips[:-1]]
    return wires
