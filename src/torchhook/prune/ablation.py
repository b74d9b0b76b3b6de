"""`sensitivity`: how much a model needs each of its layers, by ablating one after the other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

from torch import nn

from torchhook.core.batch import Batch, InputBatches, ToInputs, batch_count, on_device, samples_of
from torchhook.core.model_state import buffers_kept, inference, random_state_kept
from torchhook.core.progress import Progress, track
from torchhook.core.renamed import renamed
from torchhook.core.selection import Sites, require_module, unwrapped
from torchhook.edits import ablate
from torchhook.edits.sweep import Sweep, SweepRow, sweep
from torchhook.prune.score_points import score_points


@renamed(layers="sites")
def sensitivity(
    model: nn.Module,
    loader: Any,
    metric: Callable[[Any, Any], Any],
    *,
    sites: Sites = None,
    with_: Literal["zero", "mean"] = "zero",
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Sweep:
    """How `metric` changes without each layer in turn; the layer that matters most comes first.

    All channels in the output of a layer are replaced, and the metric is averaged over the batches of `loader`,
    weighted by their numbers of samples. The model runs in eval mode. `torchhook.plot.sweep` draws the result.

    Args:
        loader: Yields batches: tuples whose last element is the target, tensors, or mappings of keyword arguments.
        metric: From output and target to a number that is a mean over the batch, such as a loss.
        sites: Queries for some of the convolutions and linear layers; None means all.
        with_: What replaces a channel: ``"zero"``, or its ``"mean"`` over batch and positions.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> import torch
    >>> from torchhook.prune.ablation import sensitivity
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.eye(2)), model[1].weight.copy_(torch.eye(2))
    >>> x = torch.ones(4, 2)
    >>> [(row.site.path, row.change) for row in sensitivity(model, [(x, x)], nn.functional.mse_loss)]
    [('0', 1.0), ('1', 1.0)]
    """
    require_module(model)
    loader = InputBatches(loader, model, batch_to_inputs, targets=True)
    if with_ not in ("zero", "mean"):
        raise ValueError(f"with_ must be 'zero' or 'mean', not {with_!r}")
    edit = ablate(channels=slice(None), with_=with_)
    sweeps: list[tuple[int, Sweep]] = []
    model = unwrapped(model)
    with random_state_kept(model), buffers_kept(model), inference(model):
        batches = iter(loader)
        first = next(batches, _NOTHING)
        if first is _NOTHING:
            raise ValueError("loader has no batches")
        paths = list(score_points(model, Batch.of(on_device(first, model)), sites).layers)
        for data in track(chain([first], batches), batch_count(loader), "sensitivity", progress):
            batch = Batch.of(on_device(data, model))
            x = batch.arguments.args or batch.arguments.kwargs
            found = sweep(model, x, paths, edit, _of_output(metric, batch.target), progress=False)
            sweeps.append((samples_of(batch).length, found))
    return _mean(sweeps)


def _of_output(metric: Callable[[Any, Any], Any], target: Any) -> Callable[[Any], Any]:
    return lambda output: metric(output, target)


def _mean(sweeps: list[tuple[int, Sweep]]) -> Sweep:
    """The sweeps of all batches as one; the rows that change most come first."""
    total = sum(count for count, _ in sweeps)
    baseline = sum(count * found.baseline for count, found in sweeps) / total
    rows = []
    for number, row in enumerate(sweeps[0][1]):
        value = sum(count * found[number].value for count, found in sweeps) / total
        rows.append(SweepRow(row.site, value, value - baseline, None))
    return Sweep(sorted(rows, key=lambda row: -abs(row.change)), baseline, None)


_NOTHING = object()
