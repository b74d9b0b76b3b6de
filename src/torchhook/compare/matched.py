"""`Matched`: what was measured of another model, layer by layer beside that of the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from torchhook.compare.layer_pairs import Pair, pairs_of, places_of, roles_of
from torchhook.rules.history import joined, settled
from torchhook.stats.reading import Place, Reading, Snapshot


class Matched(NamedTuple):
    """What was measured of another model, under the places of the reference.

    `judged` are the places whose distances the drift rule may judge: those with the same path, or all of them if the
    models have the same layers under other names.
    """

    places: dict[Place, Place]
    pairs: Mapping[str, Pair]
    windows: list[Snapshot]
    whole: Snapshot
    judged: frozenset[Place]
    alone: tuple[list[Place], list[Place]]  # in the reference, and in the other

    @classmethod
    def of(
        cls,
        known: Collection[Place],
        reference: Snapshot,
        windows: list[Snapshot],
        models: tuple[nn.Module, nn.Module],
    ) -> Matched:
        """Pair the layers of two models, or of one model in two conditions."""
        live = settled(joined(windows))
        seen = [place for place in live.rows if place[1].startswith("output")]
        if models[0] is models[1]:
            pairs = [Pair(path, path, "path") for path in dict.fromkeys(path for path, _ in known)]
        else:
            pairs = pairs_of(roles_of(models[0], known), roles_of(models[1], seen))
        places = places_of(pairs, list(known), seen)
        by_path = {pair.path: pair for pair in pairs}
        is_whole = len(places) == len(known) == len(seen) and all(
            has_same_channels(reference[here], live[there]) for here, there in places.items()
        )
        return cls(
            places,
            by_path,
            [_under(window, places) for window in windows],
            _under(live, places),
            frozenset(here for here in places if is_whole or by_path[here[0]].by == "path"),
            ([place for place in known if place not in places], [p for p in seen if p not in places.values()]),
        )

    def left_out(self, names: tuple[str, str]) -> Iterator[tuple[str, str, str]]:
        """Each layer without a counterpart, what is wrong, and in which of the two models."""
        has_paths = any(pair.by == "path" for pair in self.pairs.values())
        for places, own, other in zip(self.alone, names, reversed(names), strict=True):
            for place in places:
                if has_paths:
                    yield label_of(place), "it did not run in", other
                else:
                    yield f"{label_of(place)} of {own}", "it has no counterpart, by role and order, in", other


def _under(snapshot: Snapshot, places: Mapping[Place, Place]) -> Snapshot:
    """The rows of a snapshot under other places."""
    return Snapshot({here: snapshot.rows[there] for here, there in places.items() if there in snapshot.rows})


def has_same_channels(a: Reading, b: Reading) -> bool:
    """Whether two outputs have the same number of channels."""
    return "channels" in a and "channels" in b and a.channels.mean.shape == b.channels.mean.shape


def label_of(place: Place) -> str:
    """The path of a layer, with the address of the tensor if its output is not a single one."""
    path, port = place
    return path + port.removeprefix("output")
