"""Parameters without a gradient: those that change the loss when they are changed are cut off, the others unused."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, Loss, call, loss_of, on_device
from torchhook.core.model_state import random_state_kept, state_kept
from torchhook.core.selection import plain
from torchhook.rules.history import History, is_within, owner

_MOST = 16  # modules to try one by one


def reached(history: History) -> dict[str, int]:
    """The number of windows in which each parameter had a gradient."""
    return {
        path: sum(moments.nonfinite > 0 or moments.l2 > 0 for moments in by_step.values())
        for (path, _), by_step in history.summaries("param_grad").items()
    }


def unreached(history: History) -> list[str]:
    """The parameters that should be trained but never had a gradient, although others had one."""
    seen = reached(history)
    if history.rest is None or not any(seen.values()):
        return []
    known, has_optimizer = history.rest.parameters, history.rest.has_optimizer
    trained = [path for path, state in known.items() if state.trainable and (state.groups or not has_optimizer)]
    return [path for path in trained if not seen.get(path)]


def unused_part(site: str, used: Collection[str]) -> tuple[str, str]:
    """The largest part around `site` without a used parameter, and the module that should have used it.

    >>> unused_part("block.expert.fc", ["block.router.weight"])
    ('block.expert', 'block')
    """
    part, user = site, site
    while user and not any(is_within(path, user) for path in used):
        part, user = user, owner(user)
    return part, user


def has_used_siblings(part: str, used: Iterable[str]) -> bool:
    """Whether a part is a member of a list of which others have used parameters.

    >>> has_used_siblings("experts.3", ["experts.0.weight"])
    True
    """
    listed = re.compile(rf"{re.escape(owner(part))}\.(\w*?)\d+\.")
    mine = re.fullmatch(r"(\D*)\d+", part.rpartition(".")[2])
    others = (match for path in used if (match := listed.match(path)))
    return mine is not None and any(match[1] == mine[1] for match in others)


def effects_of(paths: Iterable[str], model: nn.Module, data: Any, loss: Loss | None) -> dict[str, bool]:
    """Whether the loss of a batch changes with each of these parameters; those that were not tried are left out.

    All of them are changed at once, and if that has an effect, those of one module at a time. The model is left as it
    was.

    >>> model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1)})
    >>> model.forward = lambda x: model["used"](x).detach()
    >>> effects_of(["used.weight", "spare.weight"], model, torch.ones(1, 2), lambda output, batch: output.sum())
    {'used.weight': True, 'spare.weight': False}
    """
    by_path = {plain(path): parameter for path, parameter in model.named_parameters()}
    known = {path: by_path[path] for path in paths if path in by_path}
    if not known:
        return {}
    try:
        return _tried(known, model, data, loss)
    except Exception:  # of the user's code, which may not accept other values
        return {}


def _tried(known: dict[str, nn.Parameter], model: nn.Module, data: Any, loss: Loss | None) -> dict[str, bool]:
    plain_loss = _loss(model, data, loss)
    noise = abs(_loss(model, data, loss) - plain_loss)  # of kernels that are not deterministic

    fixed = [(row, row.clone()) for row in _padding(model)]

    def matter(changed: Collection[nn.Parameter]) -> bool:
        values = [parameter.detach().clone() for parameter in changed]
        try:
            with torch.no_grad(), random_state_kept(model):  # the model must draw the same numbers as before
                for parameter in changed:
                    parameter.add_(torch.randn_like(parameter) * (1 + 3 * parameter.abs().mean()))
                for row, value in fixed:
                    row.copy_(value)
            other = _loss(model, data, loss)
        finally:
            with torch.no_grad():
                for parameter, value in zip(changed, values, strict=True):
                    parameter.copy_(value)
        return not math.isclose(other, plain_loss, rel_tol=1e-6, abs_tol=10 * noise)

    if not math.isfinite(plain_loss):
        return {}
    if not matter(list(known.values())):
        return dict.fromkeys(known, False)
    found: dict[str, bool] = {}
    for module in list(dict.fromkeys(map(owner, known)))[:_MOST]:
        own = {path: parameter for path, parameter in known.items() if owner(path) == module}
        found.update(dict.fromkeys(own, matter(list(own.values()))))
    return found


def _padding(model: nn.Module) -> Iterator[Tensor]:
    """The rows of embeddings that stand for padding, which are never trained."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield module.weight.detach()[module.padding_idx]


def _loss(model: nn.Module, data: Any, loss: Loss | None) -> float:
    batch = Batch.of(on_device(data, model))
    with state_kept(model), torch.no_grad():
        return float(loss_of(call(model, batch), batch.target, loss).loss)
