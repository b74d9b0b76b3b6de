"""`apply`: the channels of a plan are really removed, and what that costs and saves is measured."""

from __future__ import annotations

import html
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch
from torch import nn

from torchhook.core.batch import Batch, Loss, batch_count, call, loss_of, on_device, require_loader, samples_of
from torchhook.core.model_state import buffers_kept, evaluating, random_state_kept
from torchhook.core.progress import track
from torchhook.core.selection import require_module, unwrapped
from torchhook.core.tap import require_count
from torchhook.core.text import html_table, table
from torchhook.core.trees import leaves
from torchhook.prune.dependencies import Graph, copied, tracing
from torchhook.prune.planner import Plan, flops_of
from torchhook.prune.score_points import channels_of
from torchhook.prune.scores import target_of
from torchhook.prune.verification import verified


class Change(NamedTuple):
    """A number before and after."""

    before: float
    after: float


@dataclass(frozen=True, eq=False, repr=False)
class Pruned:
    """A model without some of its channels, and what has changed.

    Args:
        model: It.
        parameters: How many numbers it has.
        flops: Of a forward of the example batch.
        milliseconds: Of the same, the median of some runs, both models in turn.
        loss: The mean over the batches; None if there is no loss to be measured.
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
        """Whether the model gives what the whole one does where nothing sees the channels that went."""
        return not self.note

    def table(self) -> list[dict[str, Any]]:
        """A plain dictionary a measure, for pandas and the like."""
        return [{"measure": name, **change._asdict()} for name, change in self._changes().items()]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows())}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>{html_table(_HEADER, self._rows())}"

    def _title(self) -> str:
        return f"Pruned {type(self.model).__name__}" + (f" (not verified: {self.note})" if self.note else "")

    def _changes(self) -> dict[str, Change]:
        found = {"parameters": self.parameters, "FLOPs": self.flops, "milliseconds": self.milliseconds}
        return found if self.loss is None else {**found, "loss": self.loss}

    def _rows(self) -> list[list[str]]:
        formats = {"parameters": ",.0f", "FLOPs": ",.0f", "milliseconds": ".3g", "loss": ".4f"}
        return [
            [name, *(format(number, formats[name]) for number in change), _percent(change)]
            for name, change in self._changes().items()
        ]


def apply(
    model: nn.Module,
    plan: Plan,
    x: Any = None,
    *,
    loader: Iterable[Any] | None = None,
    loss: Loss | None = None,
    inplace: bool = False,
    runs: int = 5,
    progress: TextIO | None = sys.stderr,
) -> Pruned:
    """Remove the channels of `plan` from `model`, with all that goes with them, and measure before and after.

    The model that comes back is a copy, in which hooks are as in the model (of a compiled or parallel one, of what is
    in it); an optimizer has to be made anew. Nothing is trained: do that next.

    What comes out is compared on `x` with the whole model in which nothing is made of the channels that go, and refused
    if they disagree. Where channels are mixed, as by a layer norm, that cannot be told, and ``note`` says so.

    Args:
        x: A batch to trace and to time the model with; None is the first that `importance` saw.
        loader: Batches to measure the loss on; None measures it on `x`.
        loss: From output and target to a number; None is that of `importance`, or a guess as there.
        inplace: Cut `model` itself. It is left alone if what comes out does not run, or is wrong.
        runs: How many forwards of each model to time.
        progress: Where to show it; only a terminal does.

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
        raise TypeError(f"plan must be what prune.plan gave, not {plan!r:.80}")
    if loader is not None:
        require_loader(loader, "loader")
    example = plan.x if x is None else x
    if example is None:
        raise ValueError("x: there is no example input to trace the model with; pass a batch")
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
    with tracing(model):  # which also puts back what has no gradient, for cut parameters are new ones
        graph = Graph(model, batch)
        for root, channels in plan.cuts.items():
            graph.cut(root, channels)


def _losses(
    models: list[nn.Module], measured: tuple[Iterable[Any], int | None], loss: Loss | None, progress: TextIO | None
) -> Change | None:
    """The mean loss of each model; None if it can only be guessed that there is none."""
    totals, n = [0.0 for _ in models], 0
    for data in track(*measured, "loss", progress):
        batch = Batch.of(on_device(data, models[0]))
        count = samples_of(batch).length
        n += count
        for number, model in enumerate(models):
            with torch.enable_grad(), evaluating(model):  # a guess without a loss asks for a gradient
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
    """Of both in turn, so that a change of the machine hits both."""
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
            raise ValueError(f"plan is of another model: this one has no {path!r}")
        found = channels_of(layers[path])
        if found != size:
            raise ValueError(f"plan is of another model: {path!r} has {size} channels there, and {found} here")


def _require_alike(model: nn.Module, twin: nn.Module, batch: Batch) -> None:
    """Raise unless what was cut runs, and gives what has the same shapes."""
    with torch.no_grad(), evaluating(model), evaluating(twin):
        try:
            shapes = [[leaf.shape for _, leaf in leaves(call(one, batch))] for one in (model, twin)]
        except Exception as error:
            raise ValueError(
                f"the model does not run without these channels ({type(error).__name__}: {error}); something in it"
                " relies on a width that cannot be seen from outside: find the layer, and pass it to plan(ignore=)"
            ) from error
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the model gives other shapes without these channels; pass the layers that make its output to plan(ignore=)"
        )


def _percent(change: Change) -> str:
    return f"{100 * (change.after / change.before - 1):+.1f} %" if change.before else ""


_HEADER = ("", "before", "after", "change")
