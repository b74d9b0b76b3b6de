"""`diagnose`: inspects a model in three parts and reports what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchhook.core.batch import InputBatches, Loss, ToInputs
from torchhook.core.findings import Report
from torchhook.core.model_state import random_state_kept
from torchhook.core.progress import Progress, progress_bar
from torchhook.core.selection import require_module
from torchhook.rules.check import check
from torchhook.rules.contracts.claims import Claims
from torchhook.rules.inspection import Inspection
from torchhook.rules.registry import Choice, chosen
from torchhook.rules.rule import Phase

PARTS = ("rest", "pass", "train")


def diagnose(
    model: nn.Module,
    data: Any,
    loss: Loss | None = None,
    optimizer: Any = None,
    steps: int = 100,
    *,
    parts: Sequence[str] = PARTS,
    try_repairs: bool = True,
    seconds: float = 10.0,
    rules: Iterable[Choice] | None = None,
    ignore: Sequence[Choice] = (),
    per_module: Mapping[str, Sequence[str]] | None = None,
    fail_on: str = "error",
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Report:
    """Inspect `model` at rest, in a forward and backward, and in a short training of a copy.

    The model, the optimizer and the random number generators are left as they were.

    Args:
        data: Batches: a DataLoader, a list, or a single batch. A tuple is the inputs followed by the target; a dict,
            keyword arguments of the model; a tensor, the input. Batches are moved to the device of the model, and
            repeated if there are fewer than `steps`.
        loss: A function of output and target (for a dict or tensor: the batch) that returns a number. By default, the
            ``loss`` of the output if it has one, cross entropy if the targets are classes, or the mean squared error if
            they are shaped like the outputs.
        optimizer: The optimizer of the model; a copy of it trains the copy. Without one, AdamW is used, and rules about
            the optimizer are skipped.
        steps: How many steps to train for.
        parts: Some of ``"rest"`` (weights, buffers, batch norms, optimizer), ``"pass"`` (a forward and backward of
            some batches) and ``"train"``.
        rules, ignore, per_module, fail_on: As for `check`.
        try_repairs: Whether to try the repairs of findings on further copies, and say by how much the loss fell.
        seconds: For how long to try repairs, at most.
        batch_to_inputs: Turns a batch into inputs and target: ``lambda batch: (batch["image"], batch["label"])``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> import torch.nn.functional as F
    >>> from torchhook import diagnose
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    >>> data = [(x, (x.sum(1) > 0).long()) for x in torch.randn(10, 64, 8)]
    >>> optimizer = torch.optim.AdamW(model[:2].parameters(), lr=3e-3)
    >>> report = diagnose(model, data, F.cross_entropy, optimizer)
    >>> print(report.findings[0])
    TH503 error: 2 (Linear): not in the optimizer: weight, bias
    """
    require_module(model)
    if isinstance(parts, str) or any(part not in PARTS for part in parts):
        raise ValueError(f"parts must be some of {PARTS}, not {parts!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer of at least 0, not {steps!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"seconds must be a number of at least 0, not {seconds!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of output and target, not {loss!r}")
    batches = InputBatches(data, model, batch_to_inputs, "data", targets=True)
    applied = [rule for rule in chosen(rules, ignore) if "rest" in parts or rule.phase != Phase.REST]
    with _state_kept(model), progress_bar("diagnose", progress) as tell:
        inspection = Inspection(model, batches, loss, optimizer, applied, tell)
        inspection.run(steps if "train" in parts else 0, "pass" in parts)
        trials = inspection.trials(steps, seconds) if try_repairs and "train" in parts else None
        report = check(
            inspection.history,
            applied,
            per_module=per_module,
            fail_on=fail_on,
            model=type(model).__name__,
            tried=None if trials is None else trials.judged,
        )
    tried = trials.notes if trials is not None else ()
    return replace(report, notes=(*inspection.notes, *tried, *report.notes, *_pointer(model)))


def _pointer(model: nn.Module) -> list[str]:
    """Where to look for faults that no statistic shows, in models that are made for sequences."""
    claims = Claims(model, {})
    if not (claims.is_causal or claims.cache or claims.mask or claims.lengths):
        return []
    return ["masks, padding and caches are not judged here: torchhook.verify(model, batch) checks them"]


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Enable gradients inside the block, and restore the random number generators after it."""
    with random_state_kept(model), warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("ignore", "a tap is inside")  # of the copy
        yield
