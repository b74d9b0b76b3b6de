"""Which layer of a model, and which of its calls, a class activation map is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.errors import SelectionError
from torchhook.core.selection import Query, select, walk
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import submodules
from torchhook.core.trees import Arguments, mapped
from torchhook.explain.batched_arguments import Samples
from torchhook.explain.layer_values import Place, no_call
from torchhook.explain.module_calls import ModuleCall, trial_run, tried
from torchhook.explain.targets import Score, Target, first_target
from torchhook.explain.token_grid import Fold, Grid, is_like

_NEAR = 3  # layers that an error names
_ROUNDED = 0.02  # what half precision makes of a sum of weights


def settle(
    model: nn.Module,
    given: Arguments,
    target: Target,
    layer: Query | None,
    call: int | None = None,
    fold: Fold | None = None,
    *,
    scored: bool = True,
) -> Place:
    """The layer that is meant, and which of its calls; inside `running`.

    If none is named, it is the last that the target depends on, or, unless it is to be `scored`, the last of all where
    the model says nothing that a target could be of.
    """
    if call is not None and (isinstance(call, bool) or not isinstance(call, int)):
        raise TypeError(f"call must be a whole number or None, not {call!r}")
    if layer is None:
        if call is not None or fold is not None:
            raise ValueError(f"{'fold' if call is None else 'call'} speaks of one layer: say with layer= of which")
        return tried(
            lambda some: _last_that_matters(model, some, target if some is given else first_target(target), scored),
            given,
        )
    found = select(model, layer)
    if len({id(module) for module in found.values()}) > 1:
        some = ", ".join(map(repr, list(found)[:_NEAR]))
        raise SelectionError(f"layer must be one module, and {layer!r:.80} selects {len(found)}: {some}, …; name one")
    path, module = next(iter(found.items()))
    if call is not None and call < 0:
        calls = tried(lambda some: _count(model, some, path), given)
        if call + calls < 0:
            raise no_call(path, call, calls)
        call += calls
    return Place(path, module, call)


def _last_that_matters(model: nn.Module, given: Arguments, target: Target, scored: bool) -> Place:
    """The last call with a spatial extent on which the target depends.

    In a model that reads its class token alone it is one before the last attention: what happens to the patches after
    that, nobody sees. The parts of an attention come into question only if there is nothing else, and what the target
    could depend on only if it depends on nothing, as with a head of zeros.
    """
    output, seen = trial_run(model, given)
    setting, score = Samples.of(given).setting(), None
    if scored or target is not None or _has_classes(output):
        with torch.enable_grad():
            score = Score.of(target, output, setting.samples)(output)
    calls = _candidates(seen, model, setting.size)
    possible = calls if score is None else _leading_to(score, calls)
    if possible:
        return _placed(possible[-1], seen)
    raise ValueError(
        "the model has no layer with a spatial extent that the target depends on; name one with layer=, and say with"
        " fold= how to make samples × channels × height × width of what it gives"
    )


def _leading_to(score: Tensor, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls on which the score depends, or, if it depends on none, those on which it could."""
    calls = [call for call in calls if call.value.requires_grad] if score.requires_grad else []
    if not calls:
        return []
    gradients = torch.autograd.grad(score, [call.value for call in calls], torch.ones_like(score), allow_unused=True)
    possible = [(call, found) for call, found in zip(calls, gradients, strict=True) if found is not None]
    for call, found in reversed(possible):
        if call.fold is not None and call.fold(found).count_nonzero():  # of tokens without a patch nothing counts
            return [call]
    return [call for call, _ in possible]


def _candidates(seen: list[ModuleCall], model: nn.Module, size: Grid | None) -> list[ModuleCall]:
    """Those of the calls that gave maps: not what only looks so, as heads × tokens × features of an attention do."""
    tokens, spatial, attending = set[int](), list[ModuleCall](), set[str]()
    for call in seen:
        if call.fold is None:
            continue
        shape = call.value.shape
        if len(shape) == 3:
            tokens.add(shape[1])
        elif tokens.intersection(shape[2:]) and _are_weights(call.value):
            attending.add(call.path.rpartition(".")[0])
            continue
        elif tokens.intersection(shape[1:]) and size is not None and not is_like((shape[2], shape[3]), size):
            continue
        spatial.append(call)
    hidden = _inside_attention(model, attending)
    return [call for call in spatial if call.path not in hidden] or spatial


def _are_weights(value: Tensor) -> bool:
    """Whether these are the weights of an attention, which are in rows that sum to 1."""
    value = value.detach().float()
    return bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < _ROUNDED).all())


def _placed(call: ModuleCall, seen: list[ModuleCall]) -> Place:
    calls = sum(other.path == call.path for other in seen)
    return Place(call.path, call.module, call.call if calls > 1 else None)


def _inside_attention(model: nn.Module, known: set[str]) -> set[str]:
    """The paths of what lies inside one that is `known`, or whose class is named so: queries, keys and the like."""
    inside = set[str]()
    for path, module in walk(model):  # from above
        owner = path.rpartition(".")[0]
        if owner in inside:
            inside.add(path)
        elif path and (path in known or any(word in type(module).__name__.lower() for word in ("attention", "attn"))):
            inside.update(f"{path}.{name}" for name in submodules(module))
    return inside


def _count(model: nn.Module, given: Arguments, path: str) -> int:
    """How often a layer is called in a pass."""
    calls: list[int] = []
    given = mapped(Tensor.clone, given)
    with Session(model, [Tap(path, lambda event: calls.append(event.call))]):
        model(*given.args, **given.kwargs)
    return len(calls)


def _has_classes(output: Any) -> bool:
    try:
        Score.of(None, output)
    except ValueError:
        return False
    return True
