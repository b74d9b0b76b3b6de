"""Contracts about sequences: padding changes nothing, and the future is not seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from torchhook.rules.contracts.case import Agreement, Case, Given
from torchhook.rules.contracts.contract import Breach, Note, Skip, contract
from torchhook.rules.contracts.influence import Attentions, future_gradient
from torchhook.rules.contracts.pairings import from_pack, shortened, shortened_sample, until
from torchhook.rules.contracts.positions import Positions, reading, writing

_PADDING = 3  # positions
_WIDEST = 256  # a window that is wider than this is not checked
_SHORTEST = 4  # positions, to have some before and some after


@contract(
    "TV103",
    "Mask padding wherever positions are mixed: in attention, pooling, convolutions and norms; and count only real"
    " positions where something is averaged.",
)
def padding(case: Case) -> Iterator[Agreement | Skip | Note]:
    """Padding changes nothing at the real positions."""
    claims = case.claims
    if any(isinstance(value, PackedSequence) for value in case.given.values()):
        yield _packed(case)
        return
    sequence = reading(case, padded=True)
    if sequence is None or (claims.mask is None and claims.lengths is None):
        yield Skip("it takes no mask and no lengths that would mark padding")
        return
    if claims.option("feat_extract_norm") == "group":
        yield Skip("feat_extract_norm='group' normalises over all positions, so that it is meant to run without a mask")
        return
    if claims.has_one_length:
        yield Skip("its config fixes the length of sequences")
        return
    masked = sequence.with_mask()
    names = ("without more padding", f"with {_PADDING} more positions of padding")
    if claims.longest is not None and sequence.length + _PADDING > claims.longest:
        yield Skip(f"the sequence has {sequence.length} positions already, and it takes {claims.longest}")
        return
    is_marked = not case.given.keys().isdisjoint((*claims.masks, claims.lengths))
    for one in (masked, masked.unmarked()) if is_marked else (masked,):  # what is padding already has no neighbour
        yield Agreement(
            case.variant(one.given),
            case.variant(one.padded(_PADDING)),
            "padding on the right changes the result",
            names,
            shortened(case.count),
        )
    if case.count > 1 and sequence.length > _PADDING + 1:
        yield _ragged(case, masked.unmarked())
    if claims.mask is None or "position_ids" not in claims.names or claims.is_encoder_decoder:
        yield Note("padding on the left: it does not take position_ids, which would have to skip it")
    elif not claims.is_causal:
        yield Note("padding on the left: it is an encoder, which may expect its first token in front")
    elif claims.takes_images:
        yield Note("padding on the left: its tokens follow those of images")
    else:
        yield Agreement(
            case.variant(_placed(case, masked.given)),
            case.variant(_placed(case, masked.padded(_PADDING, left=True))),
            "padding on the left changes the result, although position_ids skip it",
            names,
            shortened(case.count, at_end=True),
        )


@contract(
    "TV104",
    "Check the causal mask: its diagonal, its offset where there are more keys than queries, and that every attention"
    " gets it; and the window of each layer.",
)
def causal(case: Case) -> Iterator[Agreement | Breach | Skip | Note]:
    """A position does not depend on later ones, and does on earlier ones, up to the window that the model claims."""
    if not (case.claims.is_causal or case.asked):
        yield Skip("it does not claim to be causal")
        return
    sequence = writing(case)
    if sequence is None or sequence.length < _SHORTEST:
        yield Skip(f"it needs a sequence of at least {_SHORTEST} positions")
        return
    for stop in (sequence.length // 2, sequence.length - 1):
        yield Agreement(
            case.variant(sequence.given),
            case.variant(sequence.changed(stop)),
            f"it sees the future: the result before position {stop} changes with the tokens from there on",
            ("with the tokens given", "with other tokens later on"),
            until(stop, case.count, sequence.length),
            reference=case.variant(sequence.cut(0, sequence.length - 1)),
            evidence={"position": stop},
        )
    yield from _by_gradients(case, sequence)


def _by_gradients(case: Case, sequence: Positions) -> Iterator[Breach | Note]:
    """The same by gradients, and for each attention whether it sees as much of the past as it claims."""
    stop = sequence.length // 2
    leak = future_gradient(case, sequence, stop)
    if leak is None:
        yield Note("gradients of later tokens: no embedding of them was found")
    elif leak >= stop:
        yield Breach(f"it sees the future: the result before position {stop} has a gradient for token {leak}")
    widest = max((window or 0 for window in Attentions(case).windows.values()), default=0)
    wanted = max(sequence.length, widest + 2)
    if widest > _WIDEST or wanted > (case.claims.longest or wanted):
        yield Note(f"windows: {wanted} positions would be needed to see that of {widest}")
        return
    yield from Attentions(case).breaches(sequence.repeated(wanted) if wanted > sequence.length else sequence)


def _ragged(case: Case, sequence: Positions) -> Agreement:
    """The last sample, with padding that the others do not have."""
    count, last = case.count, case.count - 1
    short = sequence.cut(0, sequence.length - _PADDING)
    return Agreement(
        case.variant(short),
        case.variant(sequence.ragged(last, _PADDING)),
        "padding of one sample on the right changes its result",
        ("among samples of its length", f"among samples that are {_PADDING} positions longer"),
        shortened_sample(count, count + 1, last),
        reference=case.variant(case.taken(short, [*range(count), 0])),
    )


def _packed(case: Case) -> Agreement:
    """The shortest of some packed sequences, alone and among the others."""
    name = next(name for name, value in case.given.items() if isinstance(value, PackedSequence))
    pack: PackedSequence = case.given[name]
    parts = unpack_sequence(pack)
    number = min(range(len(parts)), key=lambda number: len(parts[number]))
    order = range(len(parts)) if pack.sorted_indices is None else pack.sorted_indices.tolist()
    starts = torch.cat([torch.zeros(1, dtype=torch.long), pack.batch_sizes.cumsum(0)])[: len(parts[number])]
    alone = pack_sequence([parts[number]], enforce_sorted=False)
    return Agreement(
        case.variant({**case.given, name: alone}),
        case.variant(),
        "the result of a packed sequence changes with the longer ones it is packed with",
        ("alone", "packed with others"),
        from_pack(starts + list(order).index(number), len(pack.data), number, len(parts)),
    )


def _placed(case: Case, given: Given) -> Given:
    """With the position of each token among those that are not padding."""
    mask = case.claims.mask
    assert mask is not None
    real: Tensor = given[mask.name].bool() == mask.real
    return {**given, "position_ids": (real.long().cumsum(1) - 1).clamp(min=0)}
