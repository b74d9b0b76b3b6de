"""Cached equals full: decoding with a cache of earlier positions gives what one forward over all of them gives."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.batch import Batch, call, fitted
from torchhook.rules.contracts.case import Agreement, Case, Given, UnsuitedError, Variant, arguments_of
from torchhook.rules.contracts.claims import cache_of
from torchhook.rules.contracts.contract import Note, Skip, contract
from torchhook.rules.contracts.influence import Attentions
from torchhook.rules.contracts.pairings import chunk
from torchhook.rules.contracts.positions import Positions, reading, writing

_LENGTH = 8  # positions that are decoded: most of them at once, then two together, then one at a time
_SINGLE = 3  # positions that are decoded one at a time
_PADDING = 2
_WIDEST = 64  # a window that is wider than this is not filled
_BACKENDS = {"fp8": (2.0**-5, {}), "quanto": (2.0**-3, {"q_group_size": 8}), "hqq": (2.0**-3, {"q_group_size": 8})}
"""Backends of quantized caches of transformers: about how far they move a value, and options for small models."""

Make = Callable[[], Any]
"""Makes an empty cache, or returns None, so that the model makes its own."""


class Kind(NamedTuple):
    """A kind of cache, and the machine epsilon of what it keeps, if that is coarser than what the model computes."""

    name: str
    make: Make
    epsilon: float = 0.0
    is_own: bool = False  # whether the model makes it


@contract(
    "TV105",
    "Check what depends on the length of the cache: position ids, the offset of the causal mask, the window, and the"
    " order in which keys are appended.",
)
def cached(case: Case) -> Iterator[Agreement | Skip | Note]:
    """Decoding token by token with a cache gives the same as one forward."""
    claims = case.claims
    if claims.cache is None or not (claims.is_causal or claims.returns_cache or claims.returns_state or case.asked):
        yield Skip("it takes no cache of earlier positions")
        return
    if claims.takes_images and not claims.is_encoder_decoder:
        yield Skip("its tokens follow those of images, which are not decoded")
        return
    sequence = writing(case)
    widest = max((window or 0 for window in Attentions(case).windows.values()), default=0)
    if widest > _WIDEST:
        yield Note(f"past its window of {widest} positions, which are more than are decoded here")
    length = max(_LENGTH, widest + 2 if widest <= _WIDEST else 0)  # with single positions before, at and after its end
    if sequence is None or length + _PADDING > (claims.longest or length + _PADDING):
        yield Skip(f"it has no sequence of {length + _PADDING} positions to decode")
        return
    sequence = sequence.repeated(length)
    padded = _padded(case, sequence, _PADDING)
    if padded is None:
        yield Note("with padding: it takes no mask that would mark it")
    elif _is_stateful(case):  # where the first layer may not know the position
        sequence = _padded(case, sequence, 0) or sequence
    for kind in _kinds(case, length + _PADDING):
        yield from _decoded(case, sequence, kind)
        if padded is not None:
            yield from _decoded(case, padded, kind, padded=True)


def _decoded(case: Case, sequence: Positions, kind: Kind, padded: bool = False) -> Iterator[Agreement]:
    """One agreement for each part that is decoded with what came before it in the cache."""
    name = f"{kind.name}, with padding" if padded else kind.name
    together = 1 if _is_stateful(case) else 2  # state-space models take one at a time
    first = sequence.length - _SINGLE - together
    stops = [0, first, *range(first + together, sequence.length + 1)]
    for number in range(1, len(stops) - 1):
        begin, end = stops[number], stops[number + 1]
        yield Agreement(
            case.variant(sequence.given),
            Variant(partial(_continued, case, sequence, stops[: number + 1], end, kind.make)),
            f"decoding with a cache ({name}) gives another result than one forward",
            ("in one forward", "with the cache"),
            chunk(begin, end, case.count, sequence.length, earlier=not padded),
            what=f"decoding with a cache ({name})",
            raising="warning" if kind.is_own else None,
            epsilon=kind.epsilon,
            evidence={"cache": name, "positions": [begin, end - 1]},
        )


def _continued(case: Case, sequence: Positions, stops: list[int], end: int, make: Make) -> Batch:
    """The batch with the positions before `end`, and the cache of those before the last of `stops`."""
    name, cache = case.claims.cache, make()
    assert name is not None
    for begin, stop in pairwise(stops):
        given = _chunk(case, sequence, begin, stop, cache)
        with torch.no_grad():
            output = call(case.model, Batch(fitted(arguments_of(given), case.model), None))
        returned = cache_of(output, name)
        cache = returned if returned is not None or begin else cache
        if cache is None:
            raise UnsuitedError(f"it returned no {name}")
    return Batch(arguments_of(_chunk(case, sequence, stops[-1], end, cache)), None)


def _chunk(case: Case, sequence: Positions, begin: int, end: int, cache: Any) -> Given:
    """The arguments for some positions: a mask has those in the cache, too; if that is one state, it is left out."""
    has_keys = not _is_stateful(case) or "position_ids" in case.claims.names  # for attention, in some layers at least
    given = {}
    for name, value in sequence.given.items():
        is_mask = name in case.claims.masks
        if name in sequence.names and (has_keys or not is_mask or not begin):
            start = 0 if is_mask else begin
            given[name] = value.narrow(sequence.dim_of(name), start, end - start)
        elif name not in sequence.names and "label" not in name:
            given[name] = value
    if cache is not None:
        given[str(case.claims.cache)] = cache
    return {**given, "use_cache": True} if "use_cache" in case.claims.names else given


def _kinds(case: Case, length: int) -> Iterator[Kind]:
    """The kinds of cache that the model takes."""
    yield Kind("its own cache", lambda: None, is_own=True)
    transformers, config = sys.modules.get("transformers"), case.claims.config
    if transformers is None or config is None or case.claims.cache != "past_key_values" or _is_stateful(case):
        return
    dynamic: Make = transformers.DynamicCache
    static = partial(transformers.StaticCache, config=config, max_cache_len=length)
    takes_static = getattr(case.claims.model, "_can_compile_fullgraph", False)  # models that say so do
    if case.claims.is_encoder_decoder:
        both = transformers.EncoderDecoderCache
        yield Kind("EncoderDecoderCache of DynamicCache", lambda: both(dynamic(), dynamic()))
        if takes_static:
            read = partial(static, config=_without_windows(config), max_cache_len=_source_length(case, length))
            yield Kind("EncoderDecoderCache of StaticCache", lambda: both(static(), read()))
        return
    yield Kind("DynamicCache", dynamic)
    if takes_static:
        yield Kind("StaticCache", static)
    for backend, (epsilon, options) in _BACKENDS.items():
        quantized = partial(transformers.QuantizedCache, backend=backend, config=config, **options)
        if _can_make(quantized):
            yield Kind(f"QuantizedCache of {backend}", quantized, epsilon)


def _without_windows(config: Any) -> Any:
    """The config for the cache of what is read: it is seen whole, whatever the window of the decoder."""
    full = copy.deepcopy(config.get_text_config(decoder=True))
    if getattr(full, "layer_types", None) is not None:
        full.layer_types = ["full_attention"] * len(full.layer_types)
    full.sliding_window = None
    return full


def _can_make(make: Make) -> bool:
    """Whether such a cache can be made: its backend is installed, and it is for models like this one."""
    try:
        make()
    except Exception:  # of transformers or the backend
        return False
    return True


def _source_length(case: Case, default: int) -> int:
    """How many positions an encoder returns."""
    hidden = getattr(case.claims.returned, "encoder_last_hidden_state", None)
    return hidden.shape[1] if isinstance(hidden, Tensor) else default


def _padded(case: Case, sequence: Positions, amount: int) -> Positions | None:
    """The same sequence, but some positions of the first sample are padding; None if the model takes no mask.

    Those are the first ones, which position ids skip, or, if the mask is for what an encoder reads, the last ones.
    """
    mask = case.claims.mask
    read = reading(case) if case.claims.is_encoder_decoder else sequence
    if mask is None or read is None or case.sample_dim:
        return None
    masked = read.with_mask()
    marks = masked.given[mask.name].clone()
    if case.claims.is_encoder_decoder:
        marks[0, marks.shape[1] - amount :] = int(not mask.real)
        return replace(sequence, given={**sequence.given, mask.name: marks})
    marks[0, :amount] = int(not mask.real)
    given, names = {**masked.given, mask.name: marks}, [*masked.names, mask.name]
    if "position_ids" in case.claims.names:
        given["position_ids"] = ((marks.bool() == mask.real).long().cumsum(1) - 1).clamp(min=0)
        names.append("position_ids")
    return replace(masked, given=given, names=tuple(dict.fromkeys(names)))


def _is_stateful(case: Case) -> bool:
    """Whether it is a state-space model of transformers, or the like."""
    return bool(getattr(case.claims.model, "_is_stateful", False))
