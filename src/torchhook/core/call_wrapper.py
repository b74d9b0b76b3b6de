"""Wrappers around a model's call: where passes begin and end, and where compiled parts are recompiled.

A `CallWrapper` is put into the slot of ``Module.compile``, which torch calls before all hooks and leaves out of copies
and pickles. It tells sessions when a pass begins and lets them stop it. Unlike hooks, it sees every end of a forward,
even a KeyboardInterrupt. If torch lacks that slot, `PassHooks` do the same with hooks, but cannot stop a forward.

A `CompiledPart` stands for a part of the model that was compiled before the taps were attached. Its graphs know nothing
of later hooks, and torch does not notice them, so the part is recompiled for as long as taps are inside it. A session
that pauses lets it run its own graphs meanwhile.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.compiled import as_number, begin, end, fresh, tracing
from torchhook.core.edit import latest_refusal
from torchhook.core.errors import SessionError, TapError, TorchhookError
from torchhook.core.hooks.registration import Removable, Sentinel, armed, on_call
from torchhook.core.hooks.shortcut import Shortcut
from torchhook.core.lifetime import Attaching
from torchhook.core.passes import StopForward
from torchhook.core.renamed import old_method
from torchhook.core.scope import Scope
from torchhook.core.shown import Shown
from torchhook.core.text import warn
from torchhook.core.torch_internals import (
    CALL_SLOT,
    WRAPPED_CALL_CODE,
    backend_of,
    call_impl,
    can_wrap_calls,
    compiled_inside,
    forward_hooks,
    graph_count,
    is_compiled_call,
    is_jit_tracing,
    is_replica,
    is_transformed,
    traced_call,
)
from torchhook.core.trees import leaves

_lock = threading.RLock()
_parts: weakref.WeakKeyDictionary[nn.Module, CompiledPart] = weakref.WeakKeyDictionary()

REMEDIES = (
    "attach before the first call of the compiled model, call torchhook.arm(model).open() before compiling it, or call"
    " torch.compiler.reset() before running it again"
)


def follow_passes(model: nn.Module, scope: Scope) -> Callable[[], None]:
    """Report every pass of `model` to `scope` from now on; returns a function that undoes it."""
    if can_wrap_calls:
        CallWrapper.add(model, scope)
        return lambda: CallWrapper.discard(model, scope)
    return PassHooks(model, scope).remove


class CallWrapper:
    """Replaces the call of a model, and reports the beginning and end of each pass to the sessions on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        held = vars(model).get(CALL_SLOT)
        self.inner: Callable[..., Any] | None = None if isinstance(held, Shortcut) else held
        self.scopes: tuple[Scope, ...] = ()
        self.keys: tuple[str, ...] = ()  # those of the scopes, as text: a compiler takes changing numbers for variables

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # for modules that copy or pickle all of their __dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tracing():
            return self.traced(args, kwargs)
        model, call = self._called(sys._getframe(1))
        if model is None:
            return call(*args, **kwargs)
        begun = [scope for scope in self.scopes if scope.begin_pass(model, args)]
        latest_refusal.clear()
        try:
            if begun and is_transformed():
                raise SessionError(_why_not_here())
            result = call(*args, **kwargs)
            for scope in begun:
                if scope.has_stopped():  # and the model's own bare `except:` may have swallowed the stop
                    return None
            return result
        except StopForward as stop:
            for scope in begun:
                scope.stopped_by_other |= scope.opener is not stop.session
            if any(stop.session is scope.opener for scope in begun):
                return None
            raise
        except Exception as error:
            if not isinstance(error, TorchhookError) and compiled_among([model]) and (reason := _reason_behind(error)):
                raise TapError(reason) from error
            raise
        finally:
            for scope in begun:
                scope.end_pass()

    def _called(self, frame: Any) -> tuple[nn.Module | None, Callable[..., Any]]:
        """The module that torch called, and its call. The module is None for a copy, which no session sees.

        Copies made by hand and replicas of DataParallel have this object in their slot, too.
        """
        model = self.model
        caller = frame.f_locals["self"] if frame.f_code is WRAPPED_CALL_CODE else model
        if caller is model:
            return model, self.inner or call_impl(model)
        return (caller if is_replica(caller) else None), call_impl(caller)

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call inside a graph that is being compiled: the graph itself reports when a pass begins and ends."""
        for key in self.keys:
            begin(_some_tensor((args, kwargs)), as_number(key))
        result = traced_call(self.model, args, kwargs)
        for key in self.keys:
            end(_some_tensor(result), as_number(key))
        return result

    @staticmethod
    def of(model: nn.Module) -> CallWrapper | None:
        """The wrapper around the call of `model`, if there is one."""
        wrapper = vars(model).get(CALL_SLOT)
        return wrapper if isinstance(wrapper, CallWrapper) else None

    @staticmethod
    def add(model: nn.Module, scope: Scope) -> None:
        """Report the passes of `model` to `scope`."""
        with _lock:
            wrapper = CallWrapper.of(model)
            if wrapper is None:
                kind: Any = CallWrapper
                if graph_count():  # then a new class, for whose code nothing was compiled yet
                    kind = type("CallWrapper", (CallWrapper,), {"__call__": fresh(CallWrapper.__call__)})
                wrapper = kind(model)
                vars(model)[CALL_SLOT] = wrapper
            wrapper._set((*wrapper.scopes, scope))

    @staticmethod
    def discard(model: nn.Module, scope: Scope) -> None:
        """Undo `add`."""
        with _lock:
            wrapper = CallWrapper.of(model)
            if wrapper is None:
                return
            wrapper._set(tuple(known for known in wrapper.scopes if known is not scope))
            if wrapper.scopes:
                return
            if wrapper.inner is None:
                del vars(model)[CALL_SLOT]
            else:
                vars(model)[CALL_SLOT] = wrapper.inner

    def _set(self, scopes: tuple[Scope, ...]) -> None:
        self.scopes, self.keys = scopes, tuple(str(scope.key) for scope in scopes)


class PassHooks:
    """Follows the passes of a model with hooks, for a torch without the slot of ``Module.compile``."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        if scope.stop_sites:
            raise SessionError("stop=True needs a private part of torch that this version lacks; see torchhook doctor")
        self.scope = scope
        self.begun = threading.local()
        self.handles: list[Removable] = on_call(model, self._before, self._after)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_transformed():
            raise SessionError(_why_not_here())
        self.begun.stack = [*getattr(self.begun, "stack", ()), self.scope.begin_pass(module, args)]

    def _after(self, *_: Any) -> None:
        if getattr(self.begun, "stack", None) and self.begun.stack.pop():
            self.scope.end_pass()


class CompiledPart:
    """A module that was compiled, by ``module.compile()`` or ``torch.compile(module)``, and now has taps inside."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.users = 0
        self.call: Any = None
        self.slot = "forward" if compiled_inside(module) is not None else CALL_SLOT
        wrapper = CallWrapper.of(module)
        self.before: Any = vars(module)[self.slot] if wrapper is None or self.slot == "forward" else wrapper.inner

    @staticmethod
    def open(module: nn.Module) -> None:
        """Recompile the module, which has more taps inside now."""
        with _lock:
            part = _parts.get(module) or CompiledPart(module)
            _parts[module] = part
            part.users += 1
            part._put(part._compiled(module))

    @staticmethod
    def close(module: nn.Module) -> None:
        """Undo `open`."""
        with _lock:
            part = _parts.get(module)
            if part is not None:
                part.users -= 1
                if not part.users:
                    del _parts[module]
                    if part._held() is part.call:  # otherwise the user has recompiled the module meanwhile
                        part._put(part.before)

    @staticmethod
    def is_shared(module: nn.Module) -> bool:
        """Whether several sessions have taps inside the module, or one has added some later."""
        return _parts[module].users > 1

    @staticmethod
    def pause(module: nn.Module) -> Callable[[], None]:
        """Let the module run without taps, as it was compiled before; returns a function that undoes it."""
        part = _parts[module]
        tapped = part.call
        with _lock:
            if part._held() is tapped:
                part._put(part.before)
        return partial(part._resume, tapped)

    def _resume(self, tapped: Any) -> None:
        with _lock:
            module, held = self.module(), self._held()
            if module is None:
                return
            if held is not self.call:  # the user has recompiled the module meanwhile
                self.before = self.call = held
            # Another session that came meanwhile has compiled a graph that knows only its own taps.
            self._put(tapped if held is self.before else self._compiled(module))

    def _compiled(self, module: nn.Module) -> Any:
        """The module's call, compiled by the same backend with the same options, with no graphs yet."""
        optimized: Any = module
        inner = compiled_inside(module)
        if inner is not None:
            return _recompiled(optimized.dynamo_ctx, fresh(_entering(inner)))
        try:
            cells = dict(zip(self.before.__code__.co_freevars, self.before.__closure__, strict=True))
            context = cells["self"].cell_contents
        except (AttributeError, KeyError, TypeError) as error:
            raise SessionError(f"this {type(module).__name__} was compiled without these taps; {REMEDIES}") from error
        return _recompiled(context, fresh(_entering(call_impl(module))))

    def _held(self) -> Any:
        module = self.module()
        wrapper = None if module is None or self.slot != CALL_SLOT else CallWrapper.of(module)
        return vars(module).get(self.slot) if wrapper is None else wrapper.inner

    def _put(self, call: Any) -> None:
        module = self.module()
        self.call = call
        if module is None:
            return
        wrapper = CallWrapper.of(module)
        if self.slot == CALL_SLOT and wrapper is not None:
            wrapper.inner = call
        else:
            vars(module)[self.slot] = call


class Armed(Shown, Attaching):
    """Makes a model notice taps that are attached after it was compiled; see `torchhook.arm`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Removable] = []

    def open(self) -> Armed:
        """Put a sentinel on every module, before the model is compiled."""
        if not self._handles:
            self._handles = [handle for module in self._model.modules() for handle in armed(module)]
        return self

    def close(self) -> None:
        """Remove the sentinels."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    remove = old_method("close")


def compiled_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of `modules` that were compiled, by ``module.compile()`` or ``torch.compile(module)``."""
    candidates = [module for module in modules if CALL_SLOT in module.__dict__ or "dynamo_ctx" in module.__dict__]
    return [module for module in candidates if compiled_inside(module) is not None or _is_compiled(module)]


def is_armed(model: nn.Module) -> bool:
    """Whether `model` notices taps that are attached after it was compiled."""
    return any(isinstance(hook, Sentinel) for hook in forward_hooks(model).values())


def _recompiled(context: Any, function: Any) -> Any:
    """`function` compiled as `context` compiles, but without CUDA graphs, whose replays would skip the taps."""
    backend = backend_of(context)
    options = getattr(backend, "config", None)
    if not isinstance(options, dict) or not options.get("triton.cudagraphs"):
        return context(function)
    warn("a tap is inside a part compiled with CUDA graphs; until the tap is removed, that part runs without them")
    options = {**options, "triton.cudagraphs": False}
    return torch.compile(function, fullgraph=context.fullgraph, dynamic=backend.dynamic, options=options)


def _reason_behind(error: Exception) -> str:
    """Our reason behind an error that a compiler raised; empty if unknown."""
    if "tensors_saved_with_vc_check" in str(error):  # an op cannot be recomputed, and torch saved nothing for it
        return (
            "gradients inside a compiled checkpoint cannot be captured; capture the uncompiled model, turn"
            " checkpointing off, or leave out grads=True"
        )
    return latest_refusal.pop() if latest_refusal else ""


def _why_not_here() -> str:
    """Why the model cannot be called with taps on it here."""
    if torch.compiler.is_exporting():
        return "torch.export flattens the model into one graph, where no hook fires; detach the taps before exporting"
    if is_jit_tracing():
        return "torch.jit.trace would record the taps as part of the model; detach the taps before tracing"
    return (
        "the model was called inside torch.func (vmap, grad, jvp, ...), whose tensors are meaningless outside of it;"
        " call it without the transform, or detach the taps first (torch.func.functional_call is fine)"
    )


def _some_tensor(value: Any) -> Tensor:
    found: list[Tensor] = [tensor for _, tensor in leaves(value)]
    return found[0].detach() if found else torch.empty(0)


def _is_compiled(module: nn.Module) -> bool:
    wrapper = CallWrapper.of(module)
    return is_compiled_call(vars(module).get(CALL_SLOT) if wrapper is None else wrapper.inner)


def _entering(call: Callable[..., Any]) -> Callable[..., Any]:
    def enter(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return enter
