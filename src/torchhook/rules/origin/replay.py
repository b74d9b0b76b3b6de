"""A call is rerun op by op to find where NaN and Inf begin.

It runs on a copy of the module, its twin, that shares only the memory of the parameters: the gradients, running
statistics and hooks of the original stay untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchhook.core.eager import eagerly
from torchhook.core.shards import is_sharded
from torchhook.core.torch_internals import is_dynamo_loaded, is_fsdp_module
from torchhook.core.trees import Address, Arguments, leaves, mapped
from torchhook.rules.origin.calls import BAD, Call, Setting, buffers_before, used_buffers
from torchhook.rules.origin.tracer import Operand, TracedOp, Tracer, first, memory_of


class Detached(TorchFunctionMode):
    """Lets `deepcopy` copy any tensor, even one that is part of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class Shown(NamedTuple):
    """What a replay showed: the op that produced the value, or the operand that brought it in, or why neither."""

    step: TracedOp | None = None
    culprit: Operand | None = None
    masked: bool = False  # there is nothing but masks, which are legal
    blank: bool = False  # nothing showed, but part of the result was never written to
    note: str = ""

    @property
    def is_conclusive(self) -> bool:
        """Whether the replay explains the value."""
        return self.step is not None or self.culprit is not None or self.masked


def replay_call(call: Call, calls: list[Call], backward: bool = False) -> Shown:
    """Rerun `call` on a twin of its module; `calls` are all calls of its pass."""
    try:
        if reason := _refusal(call.module):
            return Shown(note=f"not replayed: {reason}")
        twin = twin_of(call.module)
        fill(twin, buffers_before(call, calls))
        pairs = zip(twin.modules(), call.module.modules(), strict=True)
        originals = {id(module): original for module, original in pairs}
        return show(twin, originals, call.arguments, call.wanted, call.setting, call.grads if backward else None)
    except Exception as error:
        return Shown(note=f"the replay raised {type(error).__name__}: {error}")


def twin_of(module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters share the original's memory."""
    with torch.inference_mode(False), Detached():
        shared: dict[int, Any] = {}
        for parameter in module.parameters():
            shared[id(parameter)] = same = nn.Parameter(parameter.detach(), parameter.requires_grad)
            vars(same).update(vars(parameter))  # attributes that users have set
        return copy.deepcopy(module, shared)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `module`, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def fill(twin: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of `twin` to these values."""
    own = state_of(twin)
    for name, tensor in state.items():
        own[name].data = tensor.clone()


def show(
    twin: nn.Module,
    originals: Mapping[int, nn.Module],
    arguments: Arguments,
    wanted: list[bool],
    setting: Setting,
    grads: Mapping[Address, Tensor] | None,
) -> Shown:
    """Run `twin` under a tracer, with `grads` its backward, too, and find where NaN and Inf began."""
    backward = grads is not None
    with torch.inference_mode(setting.inference), Detached():
        given = copy.deepcopy(arguments)
    inputs: list[Tensor] = []
    if backward:
        with torch.enable_grad():  # without grad mode, it was the first run of a reentrant checkpoint
            given = mapped(_requiring(inputs, wanted if setting.grad else [True] * len(wanted)), given, faithful=True)
    known = {memory_of(tensor): ("argument", _argument_name(address)) for address, tensor in leaves(given)}
    known |= {memory_of(tensor): ("parameter", name) for name, tensor in twin.named_parameters()}
    for path, part in twin.named_modules():
        for name, tensor in used_buffers(part).items():
            known[memory_of(tensor)] = "buffer", f"{path}.{name}".strip(".")
    tracer = Tracer(originals, known)
    with tracer, _eager(), torch.autograd.set_detect_anomaly(backward, check_nan=False):
        with setting._replace(grad=setting.grad or backward).restored():
            result = twin(*given.args, **given.kwargs)
        if grads is not None:
            tracer.backward = True
            result = _differentiated(result, grads, [*inputs, *twin.parameters()])
    found = [seen for _, tensor in leaves(result) if (seen := tracer.seen(tensor)) and seen.bits]
    if not found and any(memory_of(tensor) in tracer.blank for _, tensor in leaves(result)):
        return Shown(blank=True)
    return _judged(found, backward)


def _judged(found: list[Operand], backward: bool) -> Shown:
    """Where the nonfinite values in the result began."""
    bad = [seen for seen in found if backward or seen.bits & BAD]
    if not found:
        return Shown(note="a replay did not reproduce it")
    if not bad:
        computed = [seen.source.computed if seen.source else None for seen in found]
        return Shown(masked=True) if None in computed else Shown(first(computed))
    step = first([seen.source.cause for seen in bad if seen.source])
    return Shown(step, bad[0] if step is None else step.culprit)


def _differentiated(result: Any, grads: Mapping[Address, Tensor], wrt: list[Tensor]) -> list[Tensor | None]:
    reached = [(tensor, grads[at]) for at, tensor in leaves(result) if at in grads and tensor.requires_grad]
    outputs, gradients = zip(*reached, strict=True)
    wrt = [tensor for tensor in wrt if tensor.requires_grad]
    return list(torch.autograd.grad(outputs, wrt, gradients, allow_unused=True))


def _requiring(inputs: list[Tensor], wanted: list[bool]) -> Callable[[Tensor], Tensor]:
    """Makes arguments require gradients as they did. The module gets clones, which it may overwrite, unlike leaves."""
    flags = iter(wanted)

    def require(tensor: Tensor) -> Tensor:
        if not next(flags, False) or not tensor.is_floating_point():
            return tensor
        inputs.append(tensor.requires_grad_())
        return tensor.clone()

    return require


def _refusal(module: nn.Module) -> str:
    """Why `module` must not be run on this rank alone; empty if it may."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    together = any(isinstance(part, nn.SyncBatchNorm) or is_fsdp_module(part) for part in module.modules())
    if (distributed and together) or any(map(is_sharded, module.parameters())):
        return "all ranks compute it together, and one rank alone would wait forever"
    return ""


def _eager() -> AbstractContextManager[Any]:
    """Runs everything uncompiled: ops in compiled graphs have no source lines."""
    return eagerly() if is_dynamo_loaded() else nullcontext()


def _argument_name(address: Address) -> str:
    """The position or keyword of an argument, and the keys that lead to the tensor inside it."""
    (_, name), rest = address[:2], address[2:]
    return str(name) + "".join(f"[{key!r}]" for key in rest)
