"""Change what a model computes, inside a block: `edit`, `skip`, `clip_gradients`; `arm` prepares compiled models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.call_wrapper import Armed
from torchhook.core.edit import Edit
from torchhook.core.forward_patch import ForwardPatch
from torchhook.core.hooks.registration import Removable, on_gradient
from torchhook.core.lifetime import Attaching
from torchhook.core.renamed import old_method
from torchhook.core.selection import Query, require_module, select
from torchhook.core.session import ScopeName, Session
from torchhook.core.shards import is_sharded
from torchhook.core.shown import Shown, maker
from torchhook.core.silent import OnSilent
from torchhook.core.site import PORTS, Port
from torchhook.core.tap import Tap
from torchhook.edits import apply

Change = Edit | Callable[[Any], Any]


def edit(
    model: nn.Module,
    edits: Mapping[Any, Change],
    *,
    port: Port = "output",
    scope: ScopeName = "thread",
    on_silent: OnSilent | None = None,
    group: str | None = None,
) -> Session:
    """Change the values at some sites of `model`, inside the block.

    `edits` maps a query (or a pair of a query and a port) to an edit of `torchhook.edits` or to any function of the
    value. Ports are ``output``, ``input``, ``grad_output``, ``grad_input`` and ``param_grad``. Several edits at one
    site act in the order of the mapping, several sessions in the order in which they were opened: a capture that is
    opened later sees the edited value. If a checkpoint recomputes in the backward, the backward must run inside the
    block, too.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU())
    >>> with edit(model, {"0": torch.neg, nn.ReLU: edits.scale(2.0)}):
    ...     model(torch.tensor([-1.0, 1.0]))
    tensor([2., 0.])
    """
    if not isinstance(edits, Mapping):
        raise TypeError(f"edits must map queries to edits, not {edits!r:.80}")
    if not edits:
        raise ValueError("edits is empty: pass a query and an edit, such as {'layer3': torchhook.edits.zero}")
    taps = []
    for key, change in edits.items():
        query, where = _query_and_port(key, port)
        if not isinstance(change, Edit) and (not callable(change) or isinstance(change, type)):
            raise TypeError(f"the edit for {query!r} must be an Edit or a function of the value, not {change!r:.80}")
        taps.append(Tap(query, change if isinstance(change, Edit) else apply(change), where, group=group))
    return Session(model, taps, scope=scope, on_silent=on_silent)


def _query_and_port(key: Any, port: Port) -> tuple[Any, Port]:
    """The query and the port of a key of the mapping."""
    if not isinstance(key, tuple):
        return key, port
    if len(key) != 2 or key[1] not in PORTS:
        raise ValueError(f"a key must be a query or a pair of a query and a port ({', '.join(PORTS)}), not {key!r}")
    return key


class SkippedModules(Shown, Attaching):
    """Leaves some modules of a model out; see `torchhook.skip`."""

    def __init__(self, modules: list[nn.Module], returns: Callable[[Any], Any] | None) -> None:
        self._modules = modules
        self._returns = returns
        self._patches: list[ForwardPatch] = []

    def open(self) -> SkippedModules:
        """Start to leave them out. (``with`` does this.)"""
        if not self._patches:
            self._patches = [ForwardPatch(module, self._identity) for module in self._modules]
        return self

    def close(self) -> None:
        """Let them run again. (The end of the ``with`` block does this.)"""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()

    def _identity(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        return first if self._returns is None else self._returns(first)


@maker
def skip(model: nn.Module, *queries: Query, returns: Callable[[Any], Any] | None = None) -> SkippedModules:
    """Run `model` without the selected modules, inside the block: each returns its first input.

    Taps on these modules still see it. If a module does not return a plain tensor, `returns` turns its input into
    what it should return: ``returns=lambda x: (x, None)``.

    >>> from torchhook import skip
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with skip(model, "0"):
    ...     model(torch.tensor([-1.0, 1.0]))
    tensor([0., 1.])
    """
    if not queries:
        raise ValueError("skip needs at least one query for the modules to leave out")
    modules = select(model, *queries)
    for path, module in modules.items() if returns is None else ():
        returned = str(getattr(type(module).forward, "__annotations__", {}).get("return", "")).lower()
        if isinstance(module, nn.RNNBase) or returned.startswith(("tuple", "typing.tuple")):
            raise ValueError(
                f"{path!r}, a {type(module).__name__}, returns a tuple, but its input is not one; say what to return,"
                " such as returns=lambda x: (x, None)"
            )
    return SkippedModules(list(dict.fromkeys(modules.values())), returns)


class ClipGradients(Attaching):
    """Clips gradients by hooks, and counts how often; see `torchhook.clip_gradients`."""

    def __init__(self, parameters: dict[str, nn.Parameter], limit: float, by_norm: bool, group: str | None) -> None:
        self.limit = limit
        self.by_norm = by_norm
        self.group = group
        self._parameters = parameters
        self._counts: dict[str, Tensor] = {}  # clipped and nonfinite
        self._handles: list[Removable] = []
        for path, parameter in parameters.items():
            self._counts[path] = torch.zeros(2, dtype=torch.int64, device=parameter.device)
        self.open()

    @property
    def counts(self) -> dict[str, int]:
        """How many gradients were clipped, by parameter."""
        return {path: int(count[0]) for path, count in self._counts.items()}

    @property
    def clipped(self) -> int:
        """The total number of clipped gradients."""
        return sum(self.counts.values())

    @property
    def nonfinite_counts(self) -> dict[str, int]:
        """How many gradients had NaN or Inf in them, by parameter. They do not count as clipped."""
        return {path: int(count[1]) for path, count in self._counts.items()}

    @property
    def nonfinite(self) -> int:
        """The total number of gradients with NaN or Inf in them."""
        return sum(self.nonfinite_counts.values())

    def open(self) -> ClipGradients:
        """Clip again after `close`; at first it does so by itself."""
        if not self._handles:
            for path, parameter in self._parameters.items():
                clip = Clip(self._counts[path], self.limit, self.by_norm)
                self._handles.append(on_gradient(parameter, clip, self.group))
        return self

    def close(self) -> None:
        """Stop clipping. (The end of a ``with`` block does this.)"""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    remove = old_method("close")

    def __repr__(self) -> str:
        limit = f"{'norm' if self.by_norm else 'value'}={self.limit}"
        rest = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return f"ClipGradients({limit}): {self.clipped} gradients of {len(self._counts)} parameters clipped{rest}"


class Clip:
    """Clips the gradients of one parameter, and counts on the device, without a synchronisation."""

    def __init__(self, counts: Tensor, limit: float, by_norm: bool) -> None:
        self.counts = counts
        self.limit = limit
        self.by_norm = by_norm

    def __call__(self, gradient: Tensor) -> Tensor:
        clipped: Tensor
        if self.by_norm:
            length = torch.linalg.vector_norm(gradient)
            clipped = gradient * (self.limit / length).clamp(max=1.0).to(gradient.dtype)
        else:
            clipped = gradient.clamp(-self.limit, self.limit)
        finite = gradient.isfinite().all()
        self.counts += torch.stack([(clipped != gradient).any() & finite, ~finite])
        return clipped


def clip_gradients(
    model: nn.Module,
    *queries: Query,
    value: float | None = None,
    norm: float | None = None,
    group: str | None = None,
) -> ClipGradients:
    """Clip the gradients of the selected modules' parameters (without queries, all) as soon as they are computed.

    `value` limits each element to ±`value`; `norm` limits the L2 norm of each parameter's gradient. (For the total
    norm of all gradients use ``torch.nn.utils.clip_grad_norm_``.) It applies from now on, until `close` or the end of a
    ``with`` block. ``.clipped`` and ``.counts`` say how many gradients were clipped, ``.nonfinite`` and
    ``.nonfinite_counts`` how many had NaN or Inf in them. `group` is a label for `torchhook.hooks` and
    `torchhook.detach`.

    >>> from torchhook import clip_gradients
    >>> model = nn.Linear(1, 1)
    >>> with clip_gradients(model, value=0.5) as clip:
    ...     model(torch.full((1, 1), 100.0)).sum().backward()
    >>> model.weight.grad.item(), clip.counts
    (0.5, {'weight': 1, 'bias': 1})
    """
    require_module(model)
    limits = [limit for limit in (value, norm) if limit is not None]
    if len(limits) != 1 or not limits[0] > 0:
        raise ValueError(f"pass value= or norm=, a positive number; got value={value!r}, norm={norm!r}")
    modules = select(model, *queries) if queries else {"": model}
    parameters: dict[str, nn.Parameter] = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters(path):
            if parameter.requires_grad and not any(parameter is known for known in parameters.values()):
                parameters[name] = parameter
    if not parameters:
        raise ValueError("no selected module has parameters that require gradients")
    if any(is_sharded(parameter) for parameter in parameters.values()):
        raise ValueError(
            "the gradients of sharded parameters are computed outside autograd, where hooks cannot see them; use"
            " torch.nn.utils.clip_grad_norm_ after the backward"
        )
    return ClipGradients(parameters, limits[0], by_norm=norm is not None, group=group)


@maker
def arm(model: nn.Module) -> Armed:
    """Prepare `model`, before it is compiled, for taps that are attached afterwards.

    A compiled graph notices new hooks only on modules that had some when it was compiled. Attaching taps then compiles
    once more, and when they are removed the first graph is used again. It lasts until `close`.

    >>> from torchhook import arm
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> armed = arm(model).open()
    >>> armed.close()
    """
    require_module(model)
    return Armed(model)
