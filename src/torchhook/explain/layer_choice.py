"""Which layer a class activation map is made of, and which of its calls: the one named, or the last that matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.errors import SelectionError
from torchhook.core.selection import Sites, queries_of, select, walk
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import submodules
from torchhook.core.trees import Arguments, mapped
from torchhook.explain.batched_arguments import BatchedArguments
from torchhook.explain.layer_values import LayerCall, never_ran, no_such_call
from torchhook.explain.module_calls import ModuleCall, on_first_sample, trial_run
from torchhook.explain.targets import Score, Target, first_target
from torchhook.explain.token_grid import Fold, Grid, is_like

_SHOWN = 3  # modules that an error names
_ROUNDED = 0.02  # how far from 1 half precision may take a sum of weights


def choose_layer(
    model: nn.Module,
    given: Arguments,
    target: Target,
    sites: Sites,
    call: int | None = None,
    fold: Fold | None = None,
    *,
    scored: bool = True,
) -> LayerCall:
    """The call of the layer to explain; called inside `inference`.

    Without `sites`, it is the last one on which the target depends, before a pooling at the end. If the map needs no
    score (`scored` is False) and the output has no classes to take one from, it need only have a spatial extent.
    """
    if call is not None and (isinstance(call, bool) or not isinstance(call, int)):
        raise TypeError(f"call must be an integer or None, not {call!r}")
    if sites is None:
        if call is not None or fold is not None:
            raise ValueError(f"{'fold' if call is None else 'call'}= applies to one layer: name it with sites=")
        return on_first_sample(
            lambda some: _last_that_matters(model, some, target if some is given else first_target(target), scored),
            given,
        )
    found = select(model, *queries_of(sites))
    if len({id(module) for module in found.values()}) > 1:
        some = ", ".join(map(repr, list(found)[:_SHOWN]))
        raise SelectionError(f"sites must be one module, but {sites!r:.80} selects {len(found)}: {some}, …; name one")
    path, module = next(iter(found.items()))
    if call is not None and call < 0:
        calls = on_first_sample(lambda some: _count_calls(model, some, path), given)
        if call + calls < 0:
            raise no_such_call(path, call, calls)
        call += calls
    return LayerCall(path, module, call)


def _last_that_matters(model: nn.Module, given: Arguments, target: Target, scored: bool) -> LayerCall:
    """The last call with a spatial extent on which the target depends, before a pooling at the end.

    In a model whose head reads the class token alone, this is a call before the last attention, since the patches no
    longer affect the output after it. Modules inside an attention are considered only if there is nothing else.
    """
    output, calls = trial_run(model, given)
    layout, score = BatchedArguments.of(given).layout(), None
    if scored or target is not None or _has_classes(output):
        with torch.enable_grad():
            score = Score.of(target, output, layout.samples)(output)
    candidates = _with_maps(calls, model, layout.size)
    last = _before_pooling(reversed(candidates) if score is None else _leading_to(score, candidates))
    if last is not None:
        is_only = sum(other.path == last.path for other in calls) == 1
        return LayerCall(last.path, last.module, None if is_only else last.call)
    raise ValueError(
        "no layer of the model has a spatial extent and affects the target; name one with sites=, and pass a function"
        " fold= that turns its output into samples × channels × height × width"
    )


def _leading_to(score: Tensor, calls: Sequence[ModuleCall]) -> Iterator[ModuleCall]:
    """The calls with a nonzero gradient, last first; if all are zero, as with a head of zeros, all that have one."""
    calls = [call for call in calls if call.value.requires_grad] if score.requires_grad else []
    if not calls:
        return
    gradients = torch.autograd.grad(score, [call.value for call in calls], torch.ones_like(score), allow_unused=True)
    possible = [(call, found) for call, found in zip(calls, gradients, strict=True) if found is not None]
    is_zero = True
    for call, found in reversed(possible):
        if call.fold is not None and call.fold(found).count_nonzero():  # folded: tokens without a patch do not count
            is_zero = False
            yield call
    if is_zero:
        yield from (call for call, _ in reversed(possible))


def _before_pooling(calls: Iterator[ModuleCall]) -> ModuleCall | None:
    """Of some calls, the last first: the last one whose maps have the size of the last convolution or linear layer's.

    What follows at another size is a pooling: it says less precisely where, and nothing else.
    """
    behind: list[ModuleCall] = []
    for call in calls:
        behind.append(call)
        if any(weight.dim() > 1 for weight in call.module.parameters(recurse=False)):
            break
    sizes = [_map_size(call) for call in reversed(behind)]
    same = len(list(takewhile(lambda size: size == sizes[0], sizes)))
    return behind[-same] if behind else None


def _map_size(call: ModuleCall) -> torch.Size:
    assert call.fold is not None
    return call.fold(call.value.detach()).shape[2:]


def _with_maps(calls: list[ModuleCall], model: nn.Module, size: Grid | None) -> list[ModuleCall]:
    """The calls that returned maps, without values that only look like maps: those inside an attention."""
    token_counts, spatial, attentions = set[int](), list[ModuleCall](), set[str]()
    for call in calls:
        if call.fold is None:
            continue
        shape = call.value.shape
        if len(shape) == 3:
            token_counts.add(shape[1])
        elif token_counts.intersection(shape[2:]) and _are_attention_weights(call.value):
            attentions.add(call.path.rpartition(".")[0])
            continue
        elif token_counts.intersection(shape[1:]) and size is not None and not is_like((shape[2], shape[3]), size):
            continue  # heads × tokens × features
        spatial.append(call)
    hidden = _inside_attention(model, attentions)
    return [call for call in spatial if call.path not in hidden] or spatial


def _are_attention_weights(value: Tensor) -> bool:
    """Whether no value is negative and every row sums to 1."""
    value = value.detach().float()
    return bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < _ROUNDED).all())


def _inside_attention(model: nn.Module, known: set[str]) -> set[str]:
    """The paths of all modules inside an attention, which is a `known` path or has a class named after it."""
    inside = set[str]()
    for path, module in walk(model):  # parents before children
        owner = path.rpartition(".")[0]
        if owner in inside:
            inside.add(path)
        elif path and (path in known or any(word in type(module).__name__.lower() for word in ("attention", "attn"))):
            inside.update(f"{path}.{name}" for name in submodules(module))
    return inside


def _count_calls(model: nn.Module, given: Arguments, path: str) -> int:
    """How often a layer is called in one pass."""
    calls: list[int] = []
    given = mapped(Tensor.clone, given)
    with Session(model, [Tap(path, lambda event: calls.append(event.call))], on_silent="ignore") as session:
        model(*given.args, **given.kwargs)
    if not calls:
        raise never_ran(path, session)
    return len(calls)


def _has_classes(output: Any) -> bool:
    try:
        Score.of(None, output)
    except ValueError:
        return False
    return True
