"""What is trained is used: parameters influence the loss, tied weights are tied, and all of them are the model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.facts import is_leaf
from torchhook.core.batch import loss_of, on_device
from torchhook.core.model_state import training
from torchhook.core.selection import plain, walk
from torchhook.core.tap import Tap
from torchhook.core.text import first_few
from torchhook.rules.contracts.case import Case, Variant, move
from torchhook.rules.contracts.contract import Breach, Skip, contract
from torchhook.rules.effects import effects_of, unused_part
from torchhook.rules.history import owner
from torchhook.rules.loss_graph import leaves_of
from torchhook.rules.model_copy import copies_of
from torchhook.rules.rest import installed_modules

_BY_DESIGN = re.compile("mask|expert")  # parameters that only some batches need
_DRAWS = 3  # of other weights


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
    missing = _never_reached(case, gradients)
    reached = [path for path in map(plain, gradients) if path not in set(missing)]
    if not reached:
        yield Skip("no parameter gets a gradient")
        return
    with case.running(in_training) as model:
        given = on_device(case.given, model)
        effects = effects_of(missing, model, given, lambda out, _: loss_of(out, case.target, case.loss).loss)
    installed = set(installed_modules(case.model))
    dropped = set() if guess.real else _called(case, in_training, [path for path in map(owner, missing) if path])
    parts: dict[tuple[str, bool, bool], list[str]] = {}
    for path in missing:
        part, user = unused_part(owner(path), reached)
        matters = effects.get(path, False)
        sure = guess.real or matters or owner(path) in dropped  # without a loss, it may be for one that is not here
        meant = {user, owner(path)} <= installed or bool(_BY_DESIGN.search(path))
        parts.setdefault((part, matters, meant or not sure), []).append(path)
    for (part, matters, meant), paths in parts.items():
        names = first_few([path.removeprefix(f"{part}.") for path in paths])
        message = f"no gradient reaches {names}, although the loss depends on it" if matters else f"{names}: not used"
        hint = "Look for detach(), no_grad(), argmax, round() or .data after it." if matters else None
        yield Breach(message, part, "info" if meant else None, hint)


def _never_reached(case: Case, gradients: Mapping[str, Tensor | None]) -> list[str]:
    """The parameters without a gradient, or with one of zeros, also if the model has other weights.

    With those, the weight that another one is multiplied by is no longer zero, and other experts are chosen.
    """

    def among(paths: Iterable[str], gradients: Mapping[str, Tensor | None]) -> list[str]:
        return [path for path in paths if (gradient := gradients[path]) is None or not gradient.any()]

    missing = among(gradients, gradients)
    try:
        twin = copies_of(case.model, None)[0] if missing else case.model
    except ValueError:  # then its own weights have to do
        return [plain(path) for path in missing]
    for seed in range(_DRAWS if missing else 0):
        move([one for one in twin.parameters() if one.requires_grad and one.is_floating_point()], seed)
        missing = among(missing, case.gradients(case.variant(model=twin, within=lambda: training(twin)))[1])
    return [plain(path) for path in missing]


def _called(case: Case, variant: Variant, paths: Iterable[str]) -> set[str]:
    """Those of some modules that run and have no parts, so that they use their parameters."""
    called: set[str] = set()
    leaves = {path for path, module in walk(case.model) if is_leaf(module)}.intersection(paths)
    case.output(variant, [Tap(path, lambda event: called.add(event.path)) for path in leaves])
    return called


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
    """Parameters of the optimizer that the model does not have, and what it has instead."""
    held = [one for group in getattr(case.optimizer, "param_groups", []) for one in group["params"]]
    named, known = dict(case.model.named_parameters()), set(map(id, held))
    foreign = [one for one in held if id(one) not in set(map(id, named.values()))]
    without = [plain(path) for path, one in named.items() if one.requires_grad and id(one) not in known]
    if foreign:
        shapes = first_few(["×".join(map(str, one.shape)) for one in foreign])
        message = f"the optimizer holds {len(foreign)} parameters that the model does not have: {shapes}"
        instead = f"; it does not hold {first_few(without)}" if without else ""
        hint = "Make the optimizer after the model is moved, wrapped or replaced."
        yield Breach(message + instead, owner(without[0]) if without else "", severity="error", hint=hint)


def _unlisted(loss: Tensor, trained: Mapping[str, nn.Parameter]) -> Iterator[Breach]:
    """Tensors that the loss depends on and that require a gradient, but that the model does not list."""
    own = set(map(id, trained.values()))
    foreign = [one for one in leaves_of([loss]) if id(one) not in own and isinstance(one, nn.Parameter)]
    if foreign:
        shapes = first_few(["×".join(map(str, one.shape)) for one in foreign])
        message = f"the loss depends on {len(foreign)} parameters that the model does not list: {shapes}"
        yield Breach(f"{message}: they are neither trained nor saved", hint=used.hint)
