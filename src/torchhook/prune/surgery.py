"""`apply`: remove the channels of a plan, and measure the model before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook.core.batch import Batch, InputBatches, Loss, ToInputs, batch_count, call, loss_of, on_device, samples_of
from torchhook.core.model_state import buffers_kept, evaluating, random_state_kept
from torchhook.core.progress import Progress, track
from torchhook.core.selection import require_module, unwrapped
from torchhook.core.tabular import Tabular
from torchhook.core.tap import require_count
from torchhook.core.trees import leaves
from torchhook.prune.dependencies import Graph, copied, tracing
from torchhook.prune.layers import channels_of
from torchhook.prune.planner import Plan, flops_of
from torchhook.prune.scores import target_of
from torchhook.prune.verification import verified


class Change(NamedTuple):
    """A number before and after."""

    before: float
    after: float


@dataclass(frozen=True, eq=False, repr=False)
class Pruned(Tabular):
    """A model without some of its channels, and how it has changed.

    Args:
        model: The pruned model.
        parameters: The number of parameters.
        flops: FLOPs of a forward of the example batch.
        milliseconds: Time of a forward of the example batch, the median of several runs, both models in turn.
        loss: The mean loss over the batches; None if there is no loss to measure.
        note: Why it could not be verified that the right channels were cut; empty if it was.

    >>> Pruned(nn.Identity(), Change(1000, 490), Change(20_000, 9_000), Change(0.2, 0.1), Change(0.31, 0.33))
    Pruned Identity
                  before  after   change
    parameters    1,000   490     -51.0 %
    FLOPs         20,000  9,000   -55.0 %
    milliseconds  0.2     0.1     -50.0 %
    loss          0.3100  0.3300  +6.5 %
    """

    model: nn.Module
    parameters: Change
    flops: Change
    milliseconds: Change
    loss: Change | None
    note: str = ""

    @property
    def verified(self) -> bool:
        """Whether the output was checked against the whole model with zero weights for the removed channels."""
        return not self.note

    def _records(self) -> list[dict[str, Any]]:
        return [{"measure": name, **change._asdict()} for name, change in self._changes().items()]

    def _title(self) -> str:
        return f"Pruned {type(self.model).__name__}" + (f" (not verified: {self.note})" if self.note else "")

    def _changes(self) -> dict[str, Change]:
        found = {"parameters": self.parameters, "FLOPs": self.flops, "milliseconds": self.milliseconds}
        return found if self.loss is None else {**found, "loss": self.loss}

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        formats = {"parameters": ",.0f", "FLOPs": ",.0f", "milliseconds": ".3g", "loss": ".4f"}
        return _HEADER, [
            [name, *(format(number, formats[name]) for number in change), _percent(change)]
            for name, change in self._changes().items()
        ]


def apply(
    model: nn.Module,
    plan: Plan,
    x: Any = None,
    *,
    loader: Any = None,
    loss: Loss | None = None,
    inplace: bool = False,
    runs: int = 5,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Pruned:
    """Remove the channels of `plan` from `model`, with everything tied to them, and measure before and after.

    The pruned model is a copy with the same hooks (for a compiled or parallel model, of the module inside). Create a
    new optimizer for it. Nothing is trained: do that next.

    The output on `x` is compared with that of the whole model with zero weights for the removed channels, and if they
    disagree, an error is raised. If channels are mixed, as by a layer norm, this cannot be checked; ``note`` says so.

    Args:
        x: A batch to trace and time the model with; None means the first that `importance` saw.
        loader: Batches to measure the loss on; None measures it on `x`.
        loss: From output and target to a number; None means that of `importance`, or a guess as there.
        inplace: Cut `model` itself. It is left unchanged if the result does not run or is wrong.
        runs: How many forwards of each model to time.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.prune.planner import plan
    >>> from torchhook.prune.scores import importance
    >>> model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
    >>> data = [(torch.rand(8, 4), torch.rand(8, 2))]
    >>> pruned = apply(model, plan(importance(model, data), ratio=0.5))
    >>> pruned.model[0].out_features, pruned.parameters
    (5, Change(before=72, after=37))
    """
    require_module(model)
    require_count(runs, "runs")
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a result of prune.plan, not {plan!r:.80}")
    if loader is not None:
        loader = InputBatches(loader, model, batch_to_inputs, targets=True)
    example = plan.x if x is None else x
    if example is None:
        raise ValueError("x: no example input to trace the model with; pass a batch")
    bare = unwrapped(model)
    _require_same(bare, plan)
    with random_state_kept(bare), torch.inference_mode(False):
        batch = Batch.of(on_device(example, bare))
        twin = copied(bare)
        _cut(twin, plan, batch)
        with buffers_kept(bare), buffers_kept(twin):
            _require_alike(bare, twin, batch)
            note = verified(bare, twin, plan, batch)
            measured = (loader, batch_count(loader)) if loader is not None else ([example], 1)
            losses = _losses([bare, twin], measured, loss or plan.loss, progress)
            changes = _parameters(bare, twin), _flops(bare, twin, batch), _times(bare, twin, batch, runs)
        if inplace:
            _cut(bare, plan, batch)
    return Pruned(model if inplace else twin, *changes, losses, note)


def _cut(model: nn.Module, plan: Plan, batch: Batch) -> None:
    with tracing(model):  # cutting creates new parameters; this also restores their requires_grad
        graph = Graph(model, batch)
        for root, channels in plan.cuts.items():
            graph.cut(root, channels)


def _losses(
    models: list[nn.Module], measured: tuple[Iterable[Any], int | None], loss: Loss | None, progress: Progress
) -> Change | None:
    """The mean loss of each model; None if no loss was given and none can be guessed."""
    totals, n = [0.0 for _ in models], 0
    for data in track(*measured, "loss", progress):
        batch = Batch.of(on_device(data, models[0]))
        count = samples_of(batch).length
        n += count
        for number, model in enumerate(models):
            with torch.enable_grad(), evaluating(model):  # guessing a loss needs a gradient
                guess = loss_of(call(model, Batch.of(on_device(data, model))), target_of(batch, loss), loss)
            if not guess.real:
                return None
            totals[number] += float(guess.loss.detach()) * count
    return Change(*(total / n for total in totals)) if n else None


def _parameters(*models: nn.Module) -> Change:
    return Change(*(sum(parameter.numel() for parameter in model.parameters()) for model in models))


def _flops(before: nn.Module, after: nn.Module, batch: Batch) -> Change:
    return Change(*(flops_of(model, batch)[0] for model in (before, after)))


def _times(before: nn.Module, after: nn.Module, batch: Batch, runs: int) -> Change:
    """The time of a forward, measured in turn so that changes in machine load affect both."""
    times: list[list[float]] = [[], []]
    with torch.no_grad(), evaluating(before), evaluating(after):
        for number in range(2 * (runs + 1)):
            started = time.perf_counter()
            call((before, after)[number % 2], batch)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            times[number % 2].append((time.perf_counter() - started) * 1e3)
    return Change(*(statistics.median(some[1:]) for some in times))  # the first warms up


def _require_same(model: nn.Module, plan: Plan) -> None:
    layers = dict(model.named_modules())
    for path, size in plan.sizes.items():
        if path not in layers:
            raise ValueError(f"plan is for another model: this one has no {path!r}")
        found = channels_of(layers[path])
        if found != size:
            raise ValueError(f"plan is for another model: {path!r} has {size} channels there and {found} here")


def _require_alike(model: nn.Module, twin: nn.Module, batch: Batch) -> None:
    """Raise unless the cut model runs, with outputs of the same shapes."""
    with torch.no_grad(), evaluating(model), evaluating(twin):
        try:
            shapes = [[leaf.shape for _, leaf in leaves(call(one, batch))] for one in (model, twin)]
        except Exception as error:
            raise ValueError(
                f"the model does not run without these channels ({type(error).__name__}: {error}); its code relies on"
                " the width of a layer: find that layer and pass it to plan(ignore=)"
            ) from error
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the output shapes change without these channels; pass the layers that compute the output to plan(ignore=)"
        )


def _percent(change: Change) -> str:
    return f"{100 * (change.after / change.before - 1):+.1f} %" if change.before else ""


_HEADER = ("", "before", "after", "change")
