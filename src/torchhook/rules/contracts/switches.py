"""Contracts about modes and switches: they change speed, memory and rounding, and nothing else."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchhook.captures.agreement.rounding import gap
from torchhook.core.batch import Batch, call, fitted, loss_of, main_tensor
from torchhook.core.model_state import training
from torchhook.core.selection import plain, unwrapped, walk
from torchhook.core.text import first_few
from torchhook.core.torch_internals import BATCH_NORMS, COMPILER_LOG, DROPOUTS, graph_count, own_buffers
from torchhook.core.trees import leaves, mapped
from torchhook.rules.active_dropout import drops
from torchhook.rules.contracts.case import Agreement, Case, Variant
from torchhook.rules.contracts.contract import Breach, Note, contract
from torchhook.rules.contracts.randomness import places, random_modules
from torchhook.rules.history import owner
from torchhook.rules.loss_graph import leaves_of
from torchhook.rules.model_copy import copies_of, shared_between
from torchhook.rules.rest import installed_modules

_BFLOAT16 = torch.finfo(torch.bfloat16).eps
Within = Callable[[], AbstractContextManager[Any]]
_METHODS = ("gradient_checkpointing_enable", "set_grad_checkpointing", "enable_gradient_checkpointing")
_FLAGS = ("gradient_checkpointing", "grad_checkpointing", "use_checkpoint", "use_checkpointing", "with_cp")
"""How models call the switch for gradient checkpointing."""
_CLEAR = 1e-3  # an error that is more than rounding
_ROUNDS = 3  # of looking for modules that draw random numbers in train mode


@contract(
    "TV107",
    "Look for code that depends on self.training, the dtype, the memory format or the strides without need, and for"
    " tensors that are neither parameters nor buffers.",
    folds=False,
)
def modes(case: Case, compile: str | None = "aot_eager") -> Iterator[Agreement | Breach | Note]:  # noqa: A002 (the word users know)
    """Train mode without randomness, checkpointing, compilation, memory formats, autocast and copies change nothing.

    `compile` is a backend of torch.compile, or None not to compile.
    """
    switches: dict[str, Callable[[Case], Iterator[Agreement | Breach | Note]]] = {
        "train mode": _train_mode,
        "gradient checkpointing": _checkpointed,
        "copies": _copied,
        "channels_last": _channels_last,
        "autocast": _autocast,
        "torch.compile": partial(_compiled, backend=compile),
    }
    for name, check in switches.items():
        try:
            yield from check(case)
        except Exception as error:  # noqa: PERF203 (of the model or its switch; the others can still be checked)
            yield Note(f"{name}: {type(error).__name__}: {error!s:.200}")


def _train_mode(case: Case) -> Iterator[Agreement | Note]:
    quiet, unusual = _quiet(case, _NoDropout)
    if unusual:
        yield Note(f"train mode of {places(unusual)}, which draw random numbers or write to their buffers")
    actual = case.variant(within=lambda: _quietly(case.model, quiet, _NoDropout))
    if {address for address, _ in leaves(case.output(actual))} != {
        address for address, _ in leaves(case.output(case.plain))
    }:
        yield Note("train mode: the model returns other things in it")
        return
    yield Agreement(
        case.plain,
        actual,
        "train mode changes the result, although what is random or depends on the batch is switched off",
        ("in eval mode", "in train mode"),
    )


def _checkpointed(case: Case) -> Iterator[Agreement | Note]:
    twin = _twin(case)
    if twin is None or not any(parameter.requires_grad for parameter in twin.parameters()):
        yield Note("gradient checkpointing: the model cannot be copied, or is not trained")
        return
    if not _switched_on(unwrapped(twin)):
        yield Note("gradient checkpointing: the model has no switch for it")
        return
    quiet, _ = _quiet(case)  # functions cannot be switched off here: the backward runs the forward again
    paths = {path for path, module in case.model.named_modules() if module in quiet}
    others = {module for path, module in twin.named_modules() if path in paths}
    yield Agreement(
        case.variant(within=lambda: training(case.model, quiet)),
        case.variant(model=twin, within=lambda: training(twin, others)),
        "gradient checkpointing changes the result or its gradients",
        ("without checkpointing", "with it"),
        loss=lambda output, target: loss_of(output, target, case.loss).loss,
    )


def _switched_on(model: nn.Module) -> bool:
    """Switch gradient checkpointing on, if the model has a switch for it: a method, or a flag of its modules."""
    if not getattr(model, "supports_gradient_checkpointing", True):  # of transformers
        return False
    method = next((getattr(model, name) for name in _METHODS if hasattr(model, name)), None)
    if method is not None:
        method()
        return True
    off = [(module, name) for module in model.modules() for name in _FLAGS if getattr(module, name, None) is False]
    for module, name in off:
        setattr(module, name, True)
    return bool(off)


def _copied(case: Case) -> Iterator[Agreement | Breach | Note]:
    twin, loaded = copy.deepcopy(case.model), _twin(case)
    if loaded is None:
        yield Note("copies: the model cannot be copied")
        return
    yield Agreement(case.plain, case.variant(model=twin), "a deep copy gives another result", ("the model", "its copy"))
    yield from _shared(case, twin)
    state = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in case.model.state_dict().items()
    }
    with torch.no_grad():
        for value in (*loaded.parameters(), *loaded.state_dict().values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(torch.rand_like(value))
    try:
        loaded.load_state_dict(state)
    except Exception as error:  # whatever the model's own loading raises
        yield Breach(f"its own state_dict cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]:.200}")
        return
    said = "a copy that loads its state_dict gives another result: something is not saved"
    yield Agreement(case.plain, case.variant(model=loaded), said, ("the model", "the copy"))
    yield from _unsaved(case, twin)


def _unsaved(case: Case, twin: nn.Module) -> Iterator[Breach]:
    """Tensors that the result depends on, but that the state_dict does not have."""
    saved, installed = set(twin.state_dict()), set(installed_modules(twin))
    written = set(_written(case, case.variant(within=lambda: training(case.model))))
    for path, module in walk(twin):
        for name in [name for name, value in vars(module).items() if type(value) is Tensor]:
            if _matters(case, twin, vars(module), name):
                message = f"the result depends on {name}, a tensor that is neither a parameter nor a buffer"
                said = f"{message}: it is not in the state_dict, and the model does not take it along to a device"
                yield Breach(said, path, "info", "Register it by register_buffer.")
        for name, _ in module.named_buffers(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if full in saved or not (full in written or path not in installed):
                continue
            if _matters(case, twin, own_buffers(module), name):
                message = f"the result depends on {name}, a buffer that the state_dict does not have"
                if full in written:
                    yield Breach(f"{message}, although training changes it", path, hint="Register it as persistent.")
                else:
                    said = f"{message}: a loaded model is the same only if its constructor makes the same again"
                    yield Breach(said, path, "info", "Register it as persistent, unless it is computed from options.")


def _matters(case: Case, twin: nn.Module, tensors: MutableMapping[str, Any], name: str) -> bool:
    """Whether the result depends on one of the `tensors` of a copy of the model."""
    value = tensors[name]
    if value is None or not value.is_floating_point():
        return False
    tensors[name] = value + torch.randn(value.shape).to(value)
    try:
        usual, changed = main_tensor(case.claims.returned), main_tensor(case.output(case.variant(model=twin)))
    finally:
        tensors[name] = value
    return changed.shape != usual.shape or gap(usual, changed).error > _CLEAR


def _shared(case: Case, twin: nn.Module) -> Iterator[Breach]:
    """What a deep copy shares with the model, and parameters of the model that functions of the copy refer to."""
    paths = list(map(plain, shared_between(case.model, twin)))
    if paths:
        said = f"a deep copy shares memory with the original, so that each changes the other: {first_few(paths)}"
        yield Breach(said, owner(paths[0]), hint="Clone tensors in __deepcopy__, or leave it out.")
        return
    if not any(parameter.requires_grad for parameter in case.model.parameters()):
        return  # which parameters it computes with is read from the graph
    guess, _ = case.gradients(case.variant(model=twin, within=lambda: training(twin)))
    used = set(map(id, leaves_of([guess.loss])))
    paths = [plain(path) for path, parameter in case.model.named_parameters() if id(parameter) in used]
    if paths:
        hint = "Call methods instead of keeping a function that refers to the module or its parameters."
        yield Breach(
            f"a deep copy computes with parameters of the original: {first_few(paths)}", owner(paths[0]), hint=hint
        )


def _channels_last(case: Case) -> Iterator[Agreement | Note]:
    if not any(x.dim() == 4 and x.is_floating_point() for _, x in leaves(case.given)):
        yield Note("channels_last: no argument is a batch of images")
        return
    twin = _twin(case)
    if twin is None:
        yield Note("channels_last: the model cannot be copied")
        return
    twin = twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it

    def moved(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    yield Agreement(
        case.plain,
        case.variant(mapped(moved, case.given), model=twin),
        "memory format channels_last changes the result",
        ("in the default format", "in channels_last"),
        raising="warning",
    )


def _autocast(case: Case) -> Iterator[Agreement | Note]:
    first = next((one for one in case.model.parameters() if one.is_floating_point()), None)
    if first is None or first.dtype != torch.float32 or not torch.amp.is_autocast_available(first.device.type):
        yield Note("autocast: its parameters are not float32, or on a device that has none")
        return
    yield Agreement(
        case.plain,
        case.variant(within=lambda: torch.autocast(first.device.type, torch.bfloat16)),
        "autocast to bfloat16 changes the result by more than rounding",
        ("in float32", "under autocast"),
        raising="info",  # many models are not made for it
        epsilon=_BFLOAT16,
    )


def _compiled(case: Case, backend: str | None) -> Iterator[Agreement | Note]:
    if backend is None:
        return
    twin = _twin(case)
    if twin is None:
        yield Note("torch.compile: the model cannot be copied")
        return
    compiled: Any = torch.compile(twin, backend=backend, **_afresh())
    before = graph_count()
    yield Agreement(
        case.plain,
        case.variant(model=compiled, within=_without_remarks),
        f"torch.compile ({backend}) changes the result by more than rounding",
        ("eager", "compiled"),
    )
    if graph_count() == before:
        yield Note("torch.compile: it found nothing to compile")


def _afresh() -> dict[str, Any]:
    """Options of torch.compile so that functions which were compiled often before are compiled once more."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    torch.compiler.reset()
    return {}


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without what the compiler says about graph breaks and the like, which was not asked for."""
    logger = logging.getLogger(COMPILER_LOG)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _twin(case: Case) -> nn.Module | None:
    try:
        return copies_of(case.model, None)[0]
    except ValueError:  # it says why in diagnose, which needs a copy
        return None


def _quiet(case: Case, within: Within = nullcontext) -> tuple[set[nn.Module], list[str]]:
    """The modules to leave in eval mode: those that are random or depend on the batch; and paths of unusual ones.

    In train mode, a module that depends on the batch writes to its buffers, like batch norm.
    """
    quiet = {module for module in case.model.modules() if isinstance(module, (DROPOUTS, BATCH_NORMS))}
    by_path = dict(case.model.named_modules())
    unusual: list[str] = []
    variant = case.variant(within=lambda: _quietly(case.model, quiet, within))
    for _ in range(_ROUNDS):
        acting = dict.fromkeys((*random_modules(case, variant), *map(owner, _written(case, variant))))
        found = [path for path in acting if by_path[path] not in quiet]
        quiet |= {by_path[path] for path in found}
        unusual += found
        if not found:
            break
    return quiet, unusual


def _written(case: Case, variant: Variant) -> list[str]:
    """The buffers that a run changes."""
    with case.running(variant) as model, torch.no_grad():
        before = {path: buffer.clone() for path, buffer in model.named_buffers()}
        call(model, Batch(fitted(variant.make().arguments, model), None))
        after = dict(model.named_buffers())
        return [plain(path) for path, value in before.items() if path in after and not torch.equal(value, after[path])]


@contextmanager
def _quietly(model: nn.Module, quiet: set[nn.Module], within: Within) -> Iterator[None]:
    with training(model, quiet), within():
        yield


class _NoDropout(TorchFunctionMode):
    """Functional dropout drops nothing inside the block."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if drops(func, args, given):
            if "attention" not in getattr(func, "__name__", ""):
                return args[0] if args else given["input"]
            args, given = ((*args[:4], 0.0, *args[5:]), given) if len(args) > 4 else (args, {**given, "dropout_p": 0.0})
        return func(*args, **given)
