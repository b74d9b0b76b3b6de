"""Cached equals full: decoding with a cache of earlier positions gives what one forward over all of them gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchhook.core.batch import Batch, call, fitted
from torchhook.rules.contracts.case import Agreement, Case, Given, Variant, arguments_of
from torchhook.rules.contracts.contract import Note, Skip, contract
from torchhook.rules.contracts.pairings import chunk
from torchhook.rules.contracts.positions import Positions, writing

_LENGTH = 8  # positions that are decoded: the first half at once, then two together, then one at a time
_PADDING = 2
_WIDEST = 64  # a window that is wider than this is not filled

Make = Callable[[], Any]
"""Makes an empty cache, or returns None, so that the model makes its own."""


@contract(
    "TV105",
    "Check what depends on the length of the cache: position ids, the offset of the causal mask, the window, and the"
    " order in which keys are appended.",
)
def cached(case: Case) -> Iterator[Agreement | Skip | Note]:
    """Decoding token by token with a cache gives the same as one forward."""
    claims = case.claims
    if claims.cache is None or not (claims.is_causal or _is_recurrent(case) or case.asked):
        yield Skip("it takes no cache of earlier positions")
        return
    if claims.takes_images and not claims.is_encoder_decoder:
        yield Skip("its tokens follow those of images, which are not decoded")
        return
    sequence = writing(case)
    window = claims.option("sliding_window", 0)
    length = max(_LENGTH, window + 3 if isinstance(window, int) and window <= _WIDEST else 0)
    if sequence is None or length + _PADDING > (claims.longest or length + _PADDING):
        yield Skip(f"it has no sequence of {length + _PADDING} positions to decode")
        return
    sequence = sequence.repeated(length)
    pads = claims.mask is not None and "position_ids" in claims.names and not claims.is_encoder_decoder
    if not pads:
        yield Note("with padding: it does not take a mask and position_ids, which would have to skip it")
    if pads and getattr(claims.model, "_is_stateful", False):  # where the first layer may not know the position
        sequence = _padded(case, sequence, 0)
    for kind, make in _kinds(case, length + _PADDING):
        yield from _decoded(case, sequence, kind, make)
        if pads:
            yield from _decoded(case, _padded(case, sequence, _PADDING), f"{kind}, padded on the left", make)


def _decoded(case: Case, sequence: Positions, kind: str, make: Make) -> Iterator[Agreement]:
    """One agreement for each part that is decoded with what came before it in the cache."""
    half = sequence.length // 2
    together = not getattr(case.claims.model, "_is_stateful", False)  # state-space models take one at a time
    stops = [half, *([half + 2] if together else []), *range(half + (3 if together else 1), sequence.length + 1)]
    for begin, end in [(half, stops[1]), (sequence.length - 1, sequence.length)]:
        earlier = [0, *(stop for stop in stops if stop <= begin)]
        yield Agreement(
            case.variant(sequence.given),
            Variant(lambda earlier=earlier, end=end: _continued(case, sequence, earlier, end, make)),  # type: ignore[misc]  # mypy does not infer the defaults of a lambda
            f"decoding with a cache ({kind}) gives another result than one forward",
            ("in one forward", "with the cache"),
            chunk(begin, end, case.count, sequence.length),
            evidence={"cache": kind, "positions": [begin, end - 1]},
        )


def _continued(case: Case, sequence: Positions, stops: list[int], end: int, make: Make) -> Batch:
    """The batch with the positions before `end`, and the cache of those before the last of `stops`."""
    name, cache = case.claims.cache, make()
    assert name is not None
    for begin, stop in pairwise(stops):
        given = _chunk(case, sequence, begin, stop, cache)
        with torch.no_grad():
            output = call(case.model, Batch(fitted(arguments_of(given), case.model), None))
        cache = _cache_of(output, name) if cache is None or begin or _cache_of(output, name) is not None else cache
        if cache is None:
            raise ValueError(f"it returned no {name}")
    return Batch(arguments_of(_chunk(case, sequence, stops[-1], end, cache)), None)


def _chunk(case: Case, sequence: Positions, begin: int, end: int, cache: Any) -> Given:
    """The arguments for some positions: of a mask, those of the cache, too."""
    mask, dim = case.claims.mask, sequence.dim
    given = {}
    for name, value in sequence.given.items():
        if name in sequence.names:
            start = 0 if mask is not None and name == mask.name else begin
            given[name] = value.narrow(dim, start, end - start)
        elif "label" not in name:
            given[name] = value
    if cache is not None:
        given[str(case.claims.cache)] = cache
    return {**given, "use_cache": True} if "use_cache" in case.claims.names else given


def _cache_of(output: Any, name: str) -> Any:
    """The cache in an output, by its name or as the second of two."""
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, tuple) and not hasattr(output, name):
        return output[1] if len(output) == 2 else None
    return getattr(output, name, None)


def _kinds(case: Case, length: int) -> Iterator[tuple[str, Make]]:
    """The kinds of cache that the model takes."""
    yield "its own cache", lambda: None
    transformers, config = sys.modules.get("transformers"), case.claims.config
    if transformers is None or case.claims.cache != "past_key_values" or case.claims.is_encoder_decoder:
        return
    if not getattr(case.claims.model, "_is_stateful", False):
        yield "DynamicCache", lambda: transformers.DynamicCache()
    if getattr(case.claims.model, "_can_compile_fullgraph", False):  # models that say so take a static cache
        yield "StaticCache", lambda: transformers.StaticCache(config=config, max_cache_len=length)


def _padded(case: Case, sequence: Positions, amount: int) -> Positions:
    """The same sequence with padding on the left of the first sample, and position ids that skip it."""
    mask = case.claims.mask
    assert mask is not None
    masked = sequence.with_mask()
    marks = masked.given[mask.name].clone()
    marks[0, :amount] = int(not mask.real)
    places = ((marks.bool() == mask.real).long().cumsum(1) - 1).clamp(min=0)
    names = tuple(dict.fromkeys((*masked.names, mask.name, "position_ids")))
    given = {**masked.given, mask.name: marks, "position_ids": places}
    return Positions(case, given, masked.name, names, masked.dim, masked.length)


def _is_recurrent(case: Case) -> bool:
    """Whether it is a recurrence of torch, which returns its state beside its outputs."""
    return isinstance(case.claims.model, nn.RNNBase) and not case.claims.model.bidirectional
