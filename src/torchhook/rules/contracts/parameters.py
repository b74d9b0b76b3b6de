"""What is trained is used: parameters influence the loss, tied weights are tied, and all of them are the model's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchhook.core.batch import loss_of, on_device
from torchhook.core.model_state import training
from torchhook.core.selection import plain, walk
from torchhook.rules.contracts.case import Case
from torchhook.rules.contracts.contract import Breach, Skip, contract
from torchhook.rules.effects import effects_of, unused_part
from torchhook.rules.history import owner
from torchhook.rules.loss_graph import leaves_of
from torchhook.rules.rest import installed_modules

_BY_DESIGN = re.compile("mask|expert")  # parameters that only some batches need


@contract(
    "TV108",
    "Use it in forward, freeze it with requires_grad_(False), or delete it; register lists as nn.ModuleList.",
    severity="warning",
    folds=False,
)
def used(case: Case) -> Iterator[Breach | Skip]:
    """Every trained parameter influences the loss, tied weights are tied, and all that is trained is the model's."""
    yield from _untied(case.claims.model)
    yield from _strangers(case)
    in_training = case.variant(within=lambda: training(case.model))
    guess, gradients = case.gradients(in_training)
    trained = {path: one for path, one in case.model.named_parameters() if one.requires_grad}
    yield from _unlisted(guess.loss, trained)
    missing = [plain(path) for path, gradient in gradients.items() if gradient is None]
    reached = [plain(path) for path, gradient in gradients.items() if gradient is not None]
    if not reached:
        yield Skip("no parameter gets a gradient")
        return
    with case.running(in_training) as model:
        given = on_device(case.given, model)
        effects = effects_of(missing, model, given, lambda out, _: loss_of(out, case.target, case.loss).loss)
    installed = set(installed_modules(case.model))
    parts: dict[tuple[str, bool, bool], list[str]] = {}
    for path in missing:
        part, user = unused_part(owner(path), reached)
        meant = {user, owner(path)} <= installed or bool(_BY_DESIGN.search(path)) or not guess.real
        parts.setdefault((part, effects.get(path, False), meant), []).append(path)
    for (part, matters, meant), paths in parts.items():
        names = _listed(paths, part)
        message = f"no gradient reaches {names}, although the loss depends on it" if matters else f"{names}: not used"
        hint = "Look for detach(), no_grad(), argmax or .data after it." if matters else None
        yield Breach(message, part, "info" if meant else None, hint)


def _untied(model: nn.Module) -> Iterator[Breach]:
    """Heads whose weights should be those of an embedding, and are not."""
    keys = getattr(model, "_tied_weights_keys", None)  # of transformers: from a name to the one that it is tied to
    if isinstance(keys, Mapping):
        named = dict(model.named_parameters(remove_duplicate=False))
        claimed = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        for path, other in keys.items() if claimed else ():
            if path in named and other in named and named[path] is not named[other]:
                yield Breach(f"its {path.rpartition('.')[2]} should be {other}, but is not", owner(path), "error")
        return
    embeddings = [(path, module) for path, module in walk(model) if isinstance(module, nn.Embedding)]
    for path, module in walk(model):
        for other, embedding in embeddings:
            if isinstance(module, nn.Linear) and _are_copies(module.weight, embedding.weight):
                yield Breach(f"its weight is a copy of that of {other}: they were tied, and are no longer", path)


def _are_copies(a: Tensor, b: Tensor) -> bool:
    return (
        a is not b and a.shape == b.shape and a.data_ptr() != b.data_ptr() and torch.equal(a, b) and bool(a.std() > 0)
    )


def _strangers(case: Case) -> Iterator[Breach]:
    """Parameters of the optimizer that the model does not have."""
    groups = getattr(case.optimizer, "param_groups", [])
    own = set(map(id, case.model.parameters()))
    foreign = [one for group in groups for one in group["params"] if id(one) not in own]
    if foreign:
        shapes = ", ".join("×".join(map(str, one.shape)) for one in foreign[:3])
        message = f"the optimizer holds {len(foreign)} parameters that the model does not have, such as {shapes}"
        hint = "Make the optimizer after the model is moved, wrapped or replaced."
        yield Breach(message, severity="error", hint=hint)


def _unlisted(loss: Tensor, trained: Mapping[str, nn.Parameter]) -> Iterator[Breach]:
    """Tensors that the loss depends on and that require a gradient, but that the model does not list."""
    own = set(map(id, trained.values()))
    foreign = [one for one in leaves_of([loss]) if id(one) not in own and isinstance(one, nn.Parameter)]
    if foreign:
        shapes = ", ".join("×".join(map(str, one.shape)) for one in foreign[:3])
        message = f"the loss depends on {len(foreign)} parameters that the model does not list, such as {shapes}"
        yield Breach(f"{message}: they are neither trained nor saved", hint=used.hint)


def _listed(paths: Sequence[str], site: str) -> str:
    names = [path.removeprefix(f"{site}.") for path in paths]
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
