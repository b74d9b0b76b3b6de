"""`capture`: record the values at some places of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook.captures.record import Copy, Record, Ring
from torchhook.captures.result import Capture
from torchhook.core.selection import Query, Selector, require_module
from torchhook.core.session import ScopeName, Session
from torchhook.core.silent import OnSilent
from torchhook.core.sink import Sink
from torchhook.core.site import Port
from torchhook.core.tap import Tap, require_count
from torchhook.core.transfer import free_memory


def capture(
    model: nn.Module,
    *queries: Query,
    inputs: bool = False,
    outputs: bool = True,
    grads: bool = False,
    params: bool = False,
    keep: int | None = 1,
    transform: Callable[[Any], Any] | None = None,
    to: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    copy: Copy = "lazy",
    max_bytes: int | None = None,
    stop: bool = False,
    scope: ScopeName = "thread",
    recomputed: bool = False,
    full: bool = False,
    static: bool = False,
    on_silent: OnSilent | None = None,
    group: str | None = None,
) -> Capture:
    """Record the values at the places that `queries` select (no query: every leaf), as they flowed.

    Args:
        inputs, outputs, grads, params: What to record of a selected module: its arguments, its output, the
            gradient of its output, its parameters (by their own paths; with `grads`, their gradients, too).
        keep: Keep every call of the newest `keep` passes. A pass is one forward of `model`. None keeps all
            passes within `max_bytes`, whose default is then half of the free memory.
        transform: Called with each value; its result is stored instead of the value.
        to, dtype: The device and dtype to store. Copying to the CPU does not make the device wait.
        copy: ``"lazy"`` copies on write, ``"clone"`` copies immediately, ``"reference"`` never copies, and
            raises on reading if the value was overwritten since. Copy on write notices every write through
            torch; if another library writes to the same memory (a NumPy view of a tensor), use ``"clone"``.
            Objects other than tensors and their containers, such as a key-value cache, are kept as they are.
        max_bytes: The most to keep; the value that would exceed it raises `BudgetError`.
        stop: End the forward, which then returns None, once every selected site was seen.
        scope: ``"thread"`` sees the passes of the thread and context that attach; ``"all"`` sees those of all
            threads, as taps inside a compiled graph always do.
        recomputed: Also keep the calls that a checkpoint repeats in the backward (``.recomputed`` says which).
        full: Keep sharded tensors as a whole. All ranks gather them together, so every rank has to capture.
            Otherwise the local shard is kept.
        static: Write into fixed buffers, which a CUDA graph fills when it is replayed.
        on_silent: What to do about sites that saw nothing: ``"raise"``, ``"warn"`` or ``"ignore"``. None
            raises for a site named by its path and for a query none of whose sites fired, and warns about others
            (and about gradients that never came). ``.silent`` has all of them, with the likely reasons.
        group: A label for `torchhook.hooks` and `torchhook.detach`.

    >>> import torch
    >>> from torchhook import capture
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
    >>> with capture(model, "0", nn.ReLU, grads=True) as acts:
    ...     model(torch.ones(2, 4)).sum().backward()
    >>> acts["0"].output.shape, acts["1"].grad.tolist()
    (torch.Size([2, 3]), [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    >>> acts.order
    [('0', 0), ('1', 0)]
    """
    require_module(model)
    ports = _ports(inputs=inputs, outputs=outputs, grads=grads, params=params)
    if not isinstance(stop, bool):
        raise TypeError(f"stop must be True or False, not {stop!r}")
    if stop and grads:
        raise ValueError("stop=True ends the forward, so there is no backward for grads=True; leave one of them out")
    if keep is not None:
        require_count(keep, "keep")
    elif max_bytes is None:
        max_bytes = free_memory(_home(model, to)) // 2
    ring = Ring(max_passes=keep, max_bytes=max_bytes)
    sink: Sink
    if static:
        if (keep, transform, to, dtype, copy, params, full) != (1, None, None, None, "lazy", False, False):
            raise ValueError(
                "static=True writes into fixed buffers; leave out keep, transform, to, dtype, copy, params and full"
            )
        from torchhook.captures.static_record import StaticRecord

        sink = StaticRecord(ring)
    else:
        sink = Record(ring, copy=copy, to=to, dtype=dtype, full=full)
    where = Selector.union(queries)
    taps = [Tap(where, sink, port, transform=transform, group=group) for port in ports]
    session = Session(model, taps, scope=scope, stop=stop, recomputed=recomputed, full=full, on_silent=on_silent)
    return Capture(session, ring, ports)


def _ports(**flags: bool) -> list[Port]:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    wanted: dict[Port, bool] = {
        "input": flags["inputs"],
        "output": flags["outputs"],
        "grad_output": flags["grads"],
        "param": flags["params"],
        "param_grad": flags["params"] and flags["grads"],
    }
    ports = [port for port, want in wanted.items() if want]
    if not ports:
        raise ValueError("nothing to capture: set at least one of inputs, outputs, grads and params to True")
    return ports


def _home(model: nn.Module, to: torch.device | str | None) -> torch.device:
    """The device on which captured values will be."""
    if to is not None:
        return torch.device(to)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
