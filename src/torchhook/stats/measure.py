"""`measure`: statistics of everything that flows, while the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from torchhook.core.selection import Query, Selector, require_module
from torchhook.core.session import ScopeName, Session
from torchhook.core.silent import OnSilent
from torchhook.core.site import Port
from torchhook.core.tap import Tap, require_count
from torchhook.stats import Channels, Stat, named
from torchhook.stats.clock import Clock
from torchhook.stats.optimizer.steps import Steps
from torchhook.stats.reduce import Reduce
from torchhook.stats.result import Stats


def measure(
    model: nn.Module,
    *queries: Query,
    inputs: bool = False,
    outputs: bool = True,
    grads: bool = False,
    params: bool = False,
    param_grads: bool = False,
    updates: bool = False,
    optimizer: Any = None,
    every: int = 1,
    stats: Sequence[str | Stat] = ("moments",),
    by: Literal["channel"] | None = None,
    scope: ScopeName = "thread",
    on_silent: OnSilent | None = None,
    group: str | None = None,
) -> Stats:
    """Statistics of what flows at the places that `queries` select (none: every leaf), in bounded memory.

    No tensor is kept, and on an accelerator nothing waits for the device until you read. All passes of a measured step
    count, including those of an evaluation.

    Args:
        inputs, outputs, grads: Measure the inputs, the outputs, and the gradients of the outputs of the selected
            modules. Read them as ``stats[path, "input"]``, ``stats[path]`` and ``stats[path, "grad_output"]``.
        params, param_grads, updates: Measure the parameters in the selected modules (no queries: all parameters), their
            gradients, and their updates: ``stats[path, "param"]``, ``"param_grad"``, ``"update"``, where ``path`` is
            that of the parameter. With an optimizer they are measured once per step: ``"param_grad"`` is the gradient
            of the whole step, over all micro-batches, before clipping and without the scale of a GradScaler;
            ``"step_grad"`` is the gradient that the optimizer got, after clipping. Without an optimizer, parameters are
            measured in every pass, and gradients after every backward, as accumulated so far. ``"param_norm"``,
            ``"param_grad_norm"``, ``"step_grad_norm"``, ``"update_norm"`` and ``"update_ratio"`` (the norm of the
            update over that of the parameter) are statistics over steps, with one value per step. ``.note`` of a
            reading says what exactly it is. `updates` keeps a copy of the parameters during a step.
        optimizer: The optimizer whose steps are counted and measured; `updates` needs it.
        every: Measure one step in `every`, with all its micro-batches. Without an optimizer, a step is a pass with
            gradients (or any pass, as long as none had gradients).
        stats: What to compute, by name or as `Stat` objects: ``"moments"``, ``"histogram"``, ``"quantiles"``,
            ``"channels"``, ``"covariance"``, ``"topk"``, or your own.
        by: ``"channel"`` adds the statistics of each unit, ``stats[path].channels``. Units are in the second dimension
            of the outputs of convolutions, batch norms and poolings, and in the last dimension of those of linear
            layers, layer norms and attention. Elsewhere they are in the last of three dimensions, else in the second.
            If that is wrong, as for a ReLU after a Conv1d, pass ``stats=("moments", Channels(dim=1))`` instead.
        scope, on_silent, group: As for `capture`.

    >>> import torch
    >>> from torchhook import measure
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with measure(model, grads=True) as stats:
    ...     for _ in range(10):
    ...         model(torch.zeros(2, 4)).sum().backward()
    >>> stats["1"].count, stats["1", "grad_output"].mean
    (60, 1.0)
    >>> stats["0"].quantile(0.5)
    Traceback (most recent call last):
        ...
    torchhook.core.errors.NotRecordedError: 'histogram' was not collected for the output of '0'; add it: \
measure(..., stats=('moments', 'histogram'))
    """
    require_module(model)
    require_count(every, "every")
    flags = {"outputs": outputs, "inputs": inputs, "grads": grads}
    of_parameters = {"params": params, "param_grads": param_grads, "updates": updates}
    _require_some({**flags, **of_parameters})
    if updates and optimizer is None:
        raise ValueError("updates=True needs the optimizer: pass it as optimizer=")
    if param_grads and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("param_grads=True, but no parameter of the model requires a gradient")
    reduce = Reduce(*_chosen(stats, by), clock=Clock(every, by_passes=optimizer is None))
    where = Selector.union(queries)
    taps = [Tap(where, reduce, _PORTS[name], group=group) for name, flag in flags.items() if flag]
    below = where if queries else Selector.of("")
    steps = None
    if optimizer is not None:
        steps = Steps(optimizer, reduce, below, params=params, param_grads=param_grads, updates=updates)
        taps += steps.taps(group)
    else:
        taps += [Tap(below, reduce, _PORTS[name], group=group) for name, flag in of_parameters.items() if flag]
    return Stats(Session(model, taps, scope=scope, on_silent=on_silent), reduce, steps)


def _require_some(flags: dict[str, bool]) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    if not any(flags.values()):
        raise ValueError(f"nothing to measure: one of {', '.join(flags)} must be True")


def _chosen(stats: Sequence[str | Stat] | str | Stat, by: str | None) -> list[Stat]:
    if by not in (None, "channel"):
        raise ValueError(f"by must be 'channel' or None, not {by!r}")
    chosen = [named(stat) for stat in ((stats,) if isinstance(stats, (str, Stat)) else stats)]
    if by and not any(stat.name == Channels.name for stat in chosen):
        chosen.append(Channels())
    if not chosen:
        raise ValueError("nothing to compute: stats must have at least one name or Stat")
    return chosen


_PORTS: dict[str, Port] = {
    "outputs": "output",
    "inputs": "input",
    "grads": "grad_output",
    "params": "param",
    "param_grads": "param_grad",
}
