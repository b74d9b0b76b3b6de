"""Accumulation equals the batch: the gradients of micro-batches add up to those of the whole batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchhook.core.batch import Loss
from torchhook.core.selection import plain
from torchhook.rules.contracts.case import Case, Given
from torchhook.rules.contracts.claims import forward_parameters
from torchhook.rules.contracts.contract import Breach, Note, Skip, contract
from torchhook.rules.history import owner

COUNTS = ("num_items_in_batch", "num_items", "total_count", "total", "normalizer", "avg_factor", "denominator")
_IGNORED = -100

Gradients = Mapping[str, "Tensor | None"]


@contract(
    "TV106",
    "Divide the sum over the tokens of a micro-batch by their number in the whole batch, not by its own; losses of"
    " transformers take that number as num_items_in_batch.",
    severity="warning",
)
def accumulation(case: Case) -> Iterator[Breach | Skip | Note]:
    """The gradients of micro-batches add up to those of the whole batch."""
    if case.count < 2:
        yield Skip("it needs at least two samples")
        return
    count_name = _count_name(case)
    given, target, loss = _ragged(case, count_name)
    try:
        guess, whole = case.gradients(case.variant(given, target), loss)
    except Exception:  # of the loss
        if given is case.given:
            raise
        yield Note(f"labels as given: the loss does not take {_IGNORED}, which marks labels left out here")
        given, target, loss = _ragged(case, count_name, leaves_out=False)
        guess, whole = case.gradients(case.variant(given, target), loss)
    if guess.how or not any(gradient is not None for gradient in whole.values()):
        yield Skip("no loss was given, and the output has none" if guess.how else "no parameter gets a gradient")
        return
    parts = []
    for number in range(case.count):
        micro = case.variant(case.taken(given, [number]), case.taken(target, [number]))
        parts.append(case.gradients(micro, loss)[1])
    sums = {"the sum": [1.0] * case.count}
    if count_name is None:
        sums["the mean"] = [1 / case.count] * case.count
    if any(_differing(whole, parts, weights) is None for weights in sums.values()):
        return
    error, site = _differing(whole, parts, sums.get("the mean", sums["the sum"])) or (0.0, "")
    evidence = {"error": error, "micro_batches": case.count}
    if count_name is not None:
        message = f"micro-batches do not add up to the batch, although the loss is given the total as {count_name}"
        yield Breach(f"{message}: the gradients are off by {error:.0%}", site, evidence=evidence)
    elif math.isfinite(error) and _differing(whole, parts, _best_weights(whole, parts)) is None:
        message = "the loss is a mean over the tokens of each micro-batch, so that short ones count too much"
        yield Breach(f"{message}: the gradients are off by {error:.0%}", severity="info", evidence=evidence)
    else:
        message = "the loss of a batch is not a mean or sum over its samples, so that micro-batches cannot add up to it"
        yield Breach(message, severity="info", hint="Accumulate outputs, not gradients.", evidence=evidence)


def _ragged(case: Case, count_name: str | None, leaves_out: bool = True) -> tuple[Given, Any, Loss | None]:
    """The case with labels and a mask of different lengths, if it has one per token, and a loss that knows how many."""
    given, target, total = _shortened(case, leaves_out)
    if count_name is None:
        return given, target, case.loss
    if case.loss is not None:
        return given, target, partial(case.loss, **{count_name: total})
    return {**given, count_name: torch.tensor(total)}, target, None


def _shortened(case: Case, leaves_out: bool) -> tuple[Given, Any, int]:
    """Arguments and target with labels and a mask of different lengths, and how many labels there are."""
    name = next((name for name in ("labels", "targets", "target") if _is_tokens(case, case.given.get(name))), None)
    labels = case.target if name is None else case.given[name]
    if not _is_tokens(case, labels):
        return case.given, case.target, case.count
    length = labels.shape[1]
    lengths = torch.tensor([max(2, length - number * length // case.count) for number in range(case.count)])
    after = (torch.arange(length) >= lengths[:, None]).to(labels.device)
    labels = labels.masked_fill(after, _IGNORED) if leaves_out else labels
    changed: Given = {} if name is None else {name: labels}
    mask = case.claims.mask
    known = None if mask is None else case.given.get(mask.name)
    if mask is not None and isinstance(known, Tensor) and known.shape == labels.shape:
        changed[mask.name] = known.masked_fill(after, int(not mask.real))
    target = labels if name is None else {**case.target, **changed} if isinstance(case.target, dict) else case.target
    return {**case.given, **changed}, target, int((labels != _IGNORED).sum())


def _is_tokens(case: Case, labels: Any) -> bool:
    """Whether these are labels of tokens, of which a loss leaves out some."""
    is_labels = isinstance(labels, Tensor) and labels.dim() == 2 and labels.dtype == torch.long
    return is_labels and case.sample_dim == 0 and labels.shape[1] > 2 and case.claims.reads_sequence


def _count_name(case: Case) -> str | None:
    """The argument by which the loss, or the model that has one, takes the number of tokens of the whole batch."""
    model = case.claims.model
    takes = case.loss if case.loss is not None else getattr(model, "loss_function", None)
    if takes is None:
        return next((name for name in forward_parameters(model) if name.startswith("num_items")), None)
    try:
        known = list(inspect.signature(takes).parameters)
    except (TypeError, ValueError):
        return None
    name = next((name for name in COUNTS if name in known), None)
    if case.loss is None and name is not None:  # some models have such a loss, and compute another
        code = getattr(type(model).forward, "__wrapped__", type(model).forward).__code__
        return name if "loss_function" in code.co_names else None
    return name


def _differing(whole: Gradients, parts: Sequence[Gradients], weights: Sequence[float]) -> tuple[float, str] | None:
    """The relative error of a weighted sum, and the module of the first parameter that is off; None if it is right."""
    errors: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for path, gradient in whole.items():
        own = [weight * part[path] for weight, part in zip(weights, parts, strict=True) if part[path] is not None]  # type: ignore[operator]  # checked
        expected = torch.zeros(()) if gradient is None else gradient
        errors[path] = float((sum(own) - expected).double().norm())
        sizes[path] = float(expected.double().norm())
    total = math.hypot(*sizes.values())
    error = math.hypot(*errors.values()) / total if total else 0.0
    precision = max((torch.finfo(one.dtype).eps for one in whole.values() if one is not None), default=0.0)
    if error <= math.sqrt(precision):
        return None
    if not math.isfinite(error):  # such as that of the deviation of one sample
        return error, ""
    off = [path for path in errors if errors[path] > math.sqrt(precision) * max(sizes[path], error * total / 100)]
    return error, owner(plain(off[0])) if len(off) < len(errors) else ""


def _best_weights(whole: Gradients, parts: Sequence[Gradients]) -> list[float]:
    """The weights with which micro-batches come nearest to the whole batch, by least squares."""

    def dot(a: Gradients, b: Gradients) -> float:
        pairs = [(x, b[path]) for path, x in a.items()]
        return sum(float((x.double() * y.double()).sum()) for x, y in pairs if x is not None and y is not None)

    matrix = torch.tensor([[dot(a, b) for b in parts] for a in parts], dtype=torch.float64)
    wanted = torch.tensor([dot(part, whole) for part in parts], dtype=torch.float64)
    weights: list[float] = torch.linalg.lstsq(matrix, wanted).solution.tolist()
    return weights
