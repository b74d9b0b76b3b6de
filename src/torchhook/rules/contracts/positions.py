"""The sequence that a model reads or writes: cut, padded, and with other tokens from a position on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchhook.captures.agreement.rounding import gap
from torchhook.core.batch import main_tensor
from torchhook.rules.contracts.case import Case, Given
from torchhook.rules.contracts.claims import TARGETS, Mask

_IGNORED = -100  # what losses leave out
_CLOSE = 1e-3  # an error that a mask which hides nothing may make
_DTYPES = {True: (torch.long, torch.bool), False: (torch.bool, torch.long)}
"""The usual dtypes of masks, by their value where nothing is padding."""


@dataclass(frozen=True, eq=False)
class Positions:
    """The arguments of a case that have one entry per position.

    `name` is the one with the tokens, `names` has them all; `dim` is the dimension of positions, of `length` in all.
    """

    case: Case
    given: Given
    name: str
    names: tuple[str, ...]
    dim: int
    length: int

    def cut(self, start: int, length: int) -> Given:
        """Only some of the positions."""
        lengths = self.case.claims.lengths
        given = self._mapped(lambda name, x: x.narrow(self.dim_of(name), start, length))
        return given if lengths not in given else {**given, lengths: given[lengths].clamp(max=length)}

    def changed(self, start: int) -> Given:
        """Other tokens from position `start` on."""
        x = self.given[self.name]
        before, after = x.narrow(self.dim, 0, start), x.narrow(self.dim, start, self.length - start)
        return {**self.given, self.name: torch.cat([before, self._others(after)], self.dim)}

    def repeated(self, length: int) -> Positions:
        """As many positions as asked for, by repeating tokens."""
        index = torch.arange(length) % self.length
        given = self._mapped(lambda name, x: x.index_select(self.dim_of(name), index.to(x.device)))
        return replace(self, given=given, length=length)

    def padded(self, amount: int, left: bool = False) -> Given:
        """More positions at the end, or at the beginning, which are marked as padding."""

        def pad(name: str, x: Tensor) -> Tensor:
            sizes, dim = [*x.shape], self.dim_of(name)
            sizes[dim] = amount
            parts = [x, self._padding(name, x, sizes)]
            return torch.cat(parts[::-1] if left else parts, dim)

        return self._mapped(pad)

    def ragged(self, number: int, amount: int) -> Given:
        """As many positions, of which the last ones of one sample are padding."""
        kept, case = self.length - amount, self.case
        padded = replace(self, given=self.cut(0, kept), length=kept).padded(amount)

        def mixed(name: str, x: Any) -> Any:
            dim = case.dim_of(name, x, case.count) if isinstance(x, Tensor) else None
            if dim is None:
                return x
            index = torch.tensor([number], device=x.device)
            return x.index_copy(dim, index, padded[name].index_select(dim, index))

        return {name: mixed(name, x) for name, x in self.given.items()}

    def with_mask(self) -> Positions:
        """With the mask, the lengths, or both, that the model takes, and no padding where there is none yet."""
        claims, x = self.case.claims, self.given[self.name]
        given, names = dict(self.given), self.names
        if claims.mask is not None:
            mask = given.get(claims.mask.name)
            mask = self.unpadded(claims.mask).to(x.device) if mask is None else mask
            given = {**dict.fromkeys(claims.masks, mask), **given}
            names = tuple(dict.fromkeys((*names, *claims.masks)))
        if claims.lengths is not None and claims.lengths not in given:
            given[claims.lengths] = torch.full((self.case.count,), self.length)
        return replace(self, given=given, names=names)

    def unmarked(self) -> Positions:
        """The same, but none of the positions is padding."""
        claims, given = self.case.claims, dict(self.given)
        for name, value in given.items():
            if isinstance(value, Tensor) and claims.mask is not None and name in claims.masks:
                given[name] = torch.full_like(value, int(claims.mask.real))
            elif isinstance(value, Tensor) and name == claims.lengths:
                given[name] = torch.full_like(value, self.length)
        return replace(self, given=given)

    def dim_of(self, name: str) -> int:
        """The dimension of positions of an argument: masks have it after that of the samples, also in torch."""
        return 1 if name in self.case.claims.masks else self.dim

    def unpadded(self, mask: Mask) -> Tensor:
        """A mask for which nothing is padding."""
        x = self.given[self.name]
        return torch.full((x.shape[self.case.sample_dim], self.length), int(mask.real)).to(mask.dtype)

    def _padding(self, name: str, x: Tensor, sizes: list[int]) -> Tensor:
        mask = self.case.claims.mask
        if mask is not None and name in self.case.claims.masks:
            return torch.full(sizes, int(not mask.real)).to(x)
        if x.is_floating_point():
            return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(x)
        if any(part in name for part in ("label", "target")):
            return torch.full(sizes, _IGNORED).to(x)
        pad = self.case.claims.option("pad_token_id")
        return torch.full(sizes, pad if name == self.name and isinstance(pad, int) and pad >= 0 else 0).to(x)

    def _others(self, x: Tensor) -> Tensor:
        """Other tokens than these: each becomes the next one of those that occur, except special ones."""
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            return x + noise * (x.std() + 1)
        special = self.case.claims.special
        known = [one for one in self.given[self.name].unique().tolist() if one not in special]
        if len(known) < 2:
            known = [one for one in range(8) if one not in special]
        following = dict(zip(known, [*known[1:], known[0]], strict=True))
        return x.cpu().clone().apply_(lambda one: following.get(one, one)).to(x.device) if known else x

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> Given:
        return {name: change(name, x) if name in self.names else x for name, x in self.given.items()}


def reading(case: Case, padded: bool = False) -> Positions | None:
    """The sequence that the model reads, if it says that it does, or if its contract was asked for.

    If it reads several, it is the first one, or, if it is to be `padded`, the one that has a mask.
    """
    claims = case.claims
    name = claims.padded if padded else claims.tokens
    if name is None or not (claims.reads_sequence or case.asked):
        return None
    decoded = writing(case) if claims.is_encoder_decoder else None
    others = () if name.startswith(TARGETS) else (*TARGETS, *(["label"] if claims.is_encoder_decoder else []))
    return _positions(
        case, case.given if decoded is None else decoded.given, name, lambda one: not one.startswith(others)
    )


def writing(case: Case) -> Positions | None:
    """The sequence that the model writes token by token: that of its decoder, or the one that it reads."""
    if not case.claims.is_encoder_decoder:
        found = reading(case)
        return found and replace(found, given=_uncached(case, found.given))
    given = {name: value for name, value in case.given.items() if name != "labels"}
    name = case.claims.written or "decoder_input_ids"
    if not isinstance(given.get(name), Tensor):
        labels = case.given.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() != 2:
            return None
        given[name] = _shifted(case, labels)
    return _positions(case, _uncached(case, given), name, lambda one: one.startswith(TARGETS))


def settle_mask(case: Case) -> None:
    """Find out how the model takes a mask that it was not given: with that, if nothing is padding, nothing changes."""
    mask, sequence = case.claims.mask, reading(case, padded=True)
    if mask is None or sequence is None or mask.name in case.given:
        return
    values = [mask.real] if mask.is_clear else [mask.real, not mask.real]
    kinds = [mask._replace(real=real, dtype=dtype) for real in values for dtype in _DTYPES[real]]
    names = case.claims.masks
    outputs = [(kind, _output(case, sequence.given | dict.fromkeys(names, sequence.unpadded(kind)))) for kind in kinds]
    known = [(kind, output) for kind, output in outputs if output is not None]
    usual = main_tensor(case.claims.returned)
    same = [kind for kind, output in known if output.shape == usual.shape and gap(usual, output).error < _CLOSE]
    case.claims.settled = next(iter((*same, *(kind for kind, _ in known))), None)


def _output(case: Case, given: Given) -> Tensor | None:
    try:
        return main_tensor(case.output(case.variant(given)))
    except Exception:  # of a model that wants another dtype
        return None


def _uncached(case: Case, given: Given) -> Given:
    """The arguments of one forward over all positions, for models that may also keep a cache for the next one."""
    return {**given, "use_cache": False} if "use_cache" in case.claims.names else given


def _positions(case: Case, given: Given, name: str, belongs: Callable[[str], bool]) -> Positions | None:
    x, dim = given[name], 1 - case.sample_dim
    length = x.shape[dim]
    masks = case.claims.masks
    names = [
        other
        for other, value in given.items()
        if isinstance(value, Tensor)
        and value.dim() > 1
        and belongs(other)
        and value.shape[1 if other in masks else dim] == length
    ]
    return Positions(case, given, name, tuple(names), dim, length)


def _shifted(case: Case, labels: Tensor) -> Any:
    """The tokens from which a decoder predicts `labels`."""
    prepare = getattr(case.claims.model, "prepare_decoder_input_ids_from_labels", None)
    if callable(prepare):
        return prepare(labels=labels)
    start = case.claims.option("decoder_start_token_id", 0)
    shifted = labels.roll(1, 1).masked_fill(labels.roll(1, 1) == _IGNORED, case.claims.option("pad_token_id", 0))
    shifted[:, 0] = start
    return shifted
