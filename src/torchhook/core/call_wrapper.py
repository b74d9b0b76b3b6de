"""Doors: what stands around a model's call while sessions look on.

A `Door` sits in the slot of ``Module.compile``, which is asked before all hooks and left out of copies and
pickles. It tells the sessions of the model's passes and lets them stop one; unlike hooks it sees every end
of a forward, a KeyboardInterrupt too.

A `Gate` stands where a part of the model was compiled. Its graphs know nothing of hooks that came later,
nor does torch notice them, so while taps lie behind the gate the part is compiled anew, with them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.compiled import fresh, tracing
from torchhook.core.edit import latest_refusal
from torchhook.core.errors import SessionError, TapError, TorchhookError
from torchhook.core.hooks import Sentinel, armed
from torchhook.core.passes import Scope, StopForward, is_transformed
from torchhook.core.text import warn
from torchhook.core.trees import leaves

_CALL = nn.Module._wrapped_call_impl.__code__
_SLOT = "_compiled_call_impl"
_is_exporting = torch.compiler.is_exporting
_is_tracing = torch._C._is_tracing
_lock = threading.RLock()
_gates: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()

REMEDIES = (
    "attach before the first call of what was compiled, call torchhook.arm(model) before compiling it, or"
    " torch.compiler.reset() before calling it again"
)


class Door:
    """Around the call of a session's model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inner: Callable[..., Any] | None = vars(model).get(_SLOT)
        self.scopes: tuple[Scope, ...] = ()
        self.keys: tuple[int, ...] = ()  # of the scopes, for compiled graphs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that copy or pickle all they have

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return self.traced(args, kwargs)
        model, call = self.model, self.inner or self.model._call_impl
        frame = sys._getframe(1)
        caller = frame.f_locals["self"] if frame.f_code is _CALL else model
        if caller is not model:  # a replica of DataParallel's, or a copy made by hand, has our slot too
            if not caller.__dict__.get("_is_replica"):
                return caller._call_impl(*args, **kwargs)
            model, call = caller, caller._call_impl
        begun = [scope for scope in self.scopes if scope.begin(model, args)]
        latest_refusal.clear()
        try:
            if begun and is_transformed():
                raise SessionError(_refusal())
            result = call(*args, **kwargs)
            return None if any(scope.has_stopped() for scope in begun) else result  # a bare except may eat the stop
        except StopForward as stop:
            for scope in begun:
                scope.cut |= scope.token is not stop.token
            if any(stop.token is scope.token for scope in begun):
                return None
            raise
        except Exception as error:
            if not isinstance(error, TorchhookError) and compiled_among([model]) and (reason := _told(error)):
                raise TapError(reason) from error
            raise
        finally:
            for scope in begun:
                scope.end()

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same inside a graph that is being compiled."""
        for key in self.keys:
            torch.ops.torchhook.begin(_some_tensor((args, kwargs)), key, torch.is_grad_enabled())
        result = self.model._call_impl(*args, **kwargs)
        for key in self.keys:
            torch.ops.torchhook.end(_some_tensor(result), key)
        return result

    @staticmethod
    def of(model: nn.Module) -> Door | None:
        """The door around `model`, if there is one."""
        door = vars(model).get(_SLOT)
        return door if isinstance(door, Door) else None

    @staticmethod
    def open(model: nn.Module, scope: Scope) -> None:
        """Let `scope` know of the model's passes."""
        with _lock:
            door = Door.of(model)
            if door is None:
                kind: Any = Door
                if graphs_so_far():  # then a class of its own: nothing was compiled under its code yet
                    kind = type("Door", (Door,), {"__call__": fresh(Door.__call__)})
                door = kind(model)
                vars(model)[_SLOT] = door
            door.scopes = (*door.scopes, scope)
            door.keys = tuple(known.key for known in door.scopes)

    @staticmethod
    def close(model: nn.Module, scope: Scope) -> None:
        """Undo `open`."""
        with _lock:
            door = Door.of(model)
            if door is None:
                return
            door.scopes = tuple(known for known in door.scopes if known is not scope)
            door.keys = tuple(known.key for known in door.scopes)
            if not door.scopes:
                _fill(model, door.inner)


class Gate:
    """Around a part that was compiled, by ``module.compile()`` or ``torch.compile(module)``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.users = 0
        self.call: Any = None
        self.slot = "forward" if _is_optimized(module) else _SLOT
        door = Door.of(module)
        self.before: Any = vars(module)[self.slot] if door is None or self.slot == "forward" else door.inner

    @staticmethod
    def open(module: nn.Module) -> None:
        """Compile what is behind the gate anew, since more taps lie there now."""
        with _lock:
            gate = _gates.get(module) or Gate(module)
            _gates[module] = gate
            gate.users += 1
            gate._put(gate._compiled(module))

    @staticmethod
    def close(module: nn.Module) -> None:
        """Undo `open`."""
        with _lock:
            gate = _gates.get(module)
            if gate is not None:
                gate.users -= 1
                if not gate.users:
                    del _gates[module]
                    if gate._held() is gate.call:  # nobody compiled the module anew meanwhile
                        gate._put(gate.before)

    def _compiled(self, module: nn.Module) -> Any:
        """The module's call, compiled by the same backend with the same options, but without a past."""
        if self.slot == "forward":
            optimized: Any = module
            return _recompiled(optimized.dynamo_ctx, fresh(_entering(optimized._orig_mod)))
        try:
            cells = dict(zip(self.before.__code__.co_freevars, self.before.__closure__, strict=True))
            context = cells["self"].cell_contents
        except (AttributeError, KeyError, TypeError) as error:
            raise SessionError(f"a {type(module).__name__} was compiled without these taps; {REMEDIES}") from error
        return _recompiled(context, fresh(_entering(module._call_impl)))

    def _held(self) -> Any:
        module = self.module()
        door = None if module is None or self.slot != _SLOT else Door.of(module)
        return vars(module).get(self.slot) if door is None else door.inner

    def _put(self, call: Any) -> None:
        module = self.module()
        self.call = call
        if module is None:
            return
        door = Door.of(module)
        if self.slot == _SLOT and door is not None:
            door.inner = call
        else:
            vars(module)[self.slot] = call


class Armed:
    """Makes a model notice taps that come after it was compiled; see `torchhook.arm`."""

    def __init__(self, model: nn.Module) -> None:
        self._handles = [handle for module in model.modules() for handle in armed(module)]

    def remove(self) -> None:
        """Take the sentinels away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Armed:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def compiled_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of `modules` that were compiled, by ``module.compile()`` or ``torch.compile(module)``."""
    marked = [module for module in modules if _SLOT in module.__dict__ or "dynamo_ctx" in module.__dict__]
    return [module for module in marked if _is_optimized(module) or _is_compiled(module)]


def graphs_so_far() -> int:
    """How many graphs were compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else int(dynamo.utils.counters["stats"]["unique_graphs"])


def is_armed(model: nn.Module) -> bool:
    """Whether `model` notices taps that come after it was compiled."""
    return any(isinstance(hook, Sentinel) for hook in model._forward_hooks.values())


def _recompiled(context: Any, function: Any) -> Any:
    """`function` compiled as `context` compiles, but without CUDA graphs, which would be replayed without the taps."""
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    options = getattr(backend, "config", None)
    if not isinstance(options, dict) or not options.get("triton.cudagraphs"):
        return context(function)
    warn("a tap lies in what was compiled with CUDA graphs: while it is there, it is compiled without them")
    options = {**options, "triton.cudagraphs": False}
    return torch.compile(function, fullgraph=context.fullgraph, dynamic=backend.dynamic, options=options)


def _told(error: Exception) -> str:
    """What is behind an error that comes out of a compiler, which says it in its own words."""
    if "tensors_saved_with_vc_check" in str(error):  # an op cannot be computed again, and torch saves nothing for it
        return (
            "gradients inside a checkpoint cannot be captured where that is compiled; capture them uncompiled, turn"
            " checkpointing off, or leave out grads=True"
        )
    return latest_refusal.pop() if latest_refusal else ""


def _refusal() -> str:
    """Why the model cannot be called with taps on it here."""
    if _is_exporting():
        return "torch.export writes all into one graph, where no hook fires; detach the taps, and tap the model itself"
    if _is_tracing():
        return "torch.jit.trace writes down one run, taps and all; detach them first, and tap the model itself"
    return (
        "the model is called inside torch.func (vmap, grad, jvp, ...), whose tensors mean nothing outside of it; call"
        " it without the transform, or detach the taps first (torch.func.functional_call is fine)"
    )


def _some_tensor(value: Any) -> Tensor:
    found: list[Tensor] = [tensor for _, tensor in leaves(value)]
    return found[0].detach() if found else torch.empty(0)


def _fill(model: nn.Module, call: Any) -> None:
    """Put `call` into the slot, or leave that as if nothing ever was in it."""
    if call is None:
        del vars(model)[_SLOT]
    else:
        vars(model)[_SLOT] = call


def _is_compiled(module: nn.Module) -> bool:
    door = Door.of(module)
    call = vars(module).get(_SLOT) if door is None else door.inner
    return hasattr(call, "_torchdynamo_orig_callable")


def _is_optimized(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _entering(call: Callable[..., Any]) -> Callable[..., Any]:
    def enter(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return enter
