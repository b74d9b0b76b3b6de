"""Which positions depend on which, told by gradients: of the result for tokens, of an attention for its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, call, fitted
from torchhook.core.event import Event
from torchhook.core.selection import walk
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.trees import leaves
from torchhook.rules.contracts.case import Case
from torchhook.rules.contracts.contract import Breach
from torchhook.rules.contracts.positions import Positions

_FAR = 64  # positions, beyond which an attention may have a weight of zero without a mask


def future_gradient(case: Case, sequence: Positions, stop: int) -> int | None:
    """The last token that has a gradient for the result before position `stop`; None if no token could be followed."""
    tokens, variant = sequence.given[sequence.name], case.variant(sequence.given)
    live: list[Tensor] = []

    def embedded(event: Event) -> None:
        ids = next((x for _, x in leaves(event.args)), None)
        is_live = isinstance(event.live, Tensor) and event.live.requires_grad and event.live.dim() == 3
        if is_live and ids is not None and ids.shape == tokens.shape and ids.equal(tokens.to(ids.device)):
            live.append(event.live)

    embeddings = [path for path, module in walk(case.model) if isinstance(module, nn.Embedding)]
    with case.running(variant) as model, torch.enable_grad():
        given = fitted(variant.make().arguments, model)
        if tokens.is_floating_point():
            live.append(given.kwargs[sequence.name].requires_grad_())
        with Session(model, [Tap(path, embedded) for path in embeddings], on_silent="ignore"):
            output = call(model, Batch(given, None))
    early = [
        x.narrow(sequence.dim, 0, stop)
        for _, x in leaves(output)
        if x.requires_grad and x.dim() > 2 and x.shape[sequence.dim] == sequence.length
    ]
    return max(_seen(early, live, sequence.dim), default=-1) if live and early else None


class Attentions:
    """The attentions of a model, and how many positions each says that it sees: 0 for all, None if it does not say."""

    def __init__(self, case: Case) -> None:
        self.case = case
        decodes = case.claims.is_encoder_decoder
        self.windows = {
            path: case.claims.window(module)
            for path, module in walk(case.model)
            if _is_attention(module) and (not decodes or "decoder" in path) and "cross" not in path
        }

    def breaches(self, sequence: Positions) -> Iterator[Breach]:
        """Where an attention sees later positions than its own, more of the past than it says, or less."""
        last = sequence.length - 1
        middle = last // 2
        for path, (given, returned) in self._values(sequence).items():
            window = self.windows[path]
            future = max(_seen([returned[:, : middle + 1]], [given], 1), default=-1)
            if future > middle:
                yield Breach(f"position {middle} sees position {future}, which comes later", path)
                continue
            if window is None:
                continue
            seen = _seen([returned[:, last:]], [given], 1)
            first = max(0, last - window + 1) if window else 0
            says = f"its window is {window}" if window else "nothing says that it sees fewer"
            if seen and min(seen) < first:
                yield Breach(f"it sees {last - min(seen) + 1} positions, but {says}", path)
            elif last - first < _FAR and first not in seen:
                count = last - min(seen, default=last) + 1
                yield Breach(f"it sees {count} of {last - first + 1} positions, but {says}", path)

    def _values(self, sequence: Positions) -> dict[str, tuple[Tensor, Tensor]]:
        """What each attention was given and returned, with the graph between them."""
        given: dict[str, Tensor] = {}
        found: dict[str, tuple[Tensor, Tensor]] = {}

        def first(event: Event) -> Tensor | None:
            values = [x for _, x in leaves((event.live, event.kwargs)) if x.dim() == 3 and x.requires_grad]
            return next((x for x in values if x.shape[1] == sequence.length), None)

        def enter(event: Event) -> None:
            if (x := first(event)) is not None:
                given[event.path] = x

        def leave(event: Event) -> None:
            if event.path in given and (x := first(event)) is not None:
                found[event.path] = given[event.path], x

        variant = self.case.variant(sequence.given)
        taps = [tap for path in self.windows for tap in (Tap(path, enter, "input"), Tap(path, leave))]
        with self.case.running(variant) as model, torch.enable_grad():
            arguments = fitted(variant.make().arguments, model)
            with Session(model, taps, on_silent="ignore"):
                call(model, Batch(arguments, None))
        return found


def _seen(values: Sequence[Tensor], sources: Sequence[Tensor], dim: int) -> set[int]:
    """The positions of `sources`, along `dim`, that some of `values` depend on."""
    along = [(x * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)).sum() for x in values]
    found: set[int] = set()
    for gradient in torch.autograd.grad(along, sources, allow_unused=True, retain_graph=True):
        if gradient is not None and bool(gradient.any()):
            sizes = gradient.abs().float().transpose(0, dim).flatten(1).amax(1)
            found.update((sizes > 1e-9 * sizes.max()).nonzero().flatten().tolist())
    return found


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention, and none of its parts is."""
    return _is_named(module) and not any(_is_named(part) for part in module.modules() if part is not module)


def _is_named(module: nn.Module) -> bool:
    name = type(module).__name__
    return (
        any(word in name for word in ("Attention", "Attn"))
        and "Cross" not in name
        and any(True for _ in module.parameters())
    )
