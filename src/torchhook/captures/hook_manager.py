"""The classic interface: `HookManager`, forward hooks on some layers with lists of the features they saw."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from torchhook.captures.summary import count_parameters, format_parameter_count
from torchhook.core.errors import SelectionError, TapError
from torchhook.core.event import Event
from torchhook.core.lifetime import Attaching
from torchhook.core.selection import nearest, require_module, walk
from torchhook.core.session import Session
from torchhook.core.silent import warn_silent
from torchhook.core.sink import Sink, Unknown
from torchhook.core.snapshot import frozen, lazily_copied
from torchhook.core.tap import Tap

CustomHook = Callable[[nn.Module, Any, Any], "Tensor | None"]
OutputTransform = Callable[[Tensor], Tensor]

_RULE = "-" * 80


class HookManager(Attaching):
    """Hooks on some layers of a model, each with a list of the features it saw, newest last.

    `max_size` is how many features are kept per layer; -1 keeps all. Features are plain tensors on the CPU,
    as they flowed, in whatever thread. `group` is a label for `torchhook.hooks` and `torchhook.detach`. The hooks are
    removed by `close`, at the end of a ``with`` block, or when the manager is deleted.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(inplace=True))
    >>> manager = HookManager(model, max_size=1)
    >>> handle = manager.add("0")
    >>> _ = model(torch.ones(3, 4))
    >>> manager.get("0")[0].shape
    torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module, max_size: int = -1, *, group: str | None = None) -> None:
        require_module(model)
        if isinstance(max_size, bool) or not isinstance(max_size, int):
            raise TypeError(f"max_size must be an integer, not {max_size!r}; -1 keeps all features")
        if max_size < -1:
            raise ValueError(f"max_size must be at least -1, which keeps all features, not {max_size}")
        self.model = model
        self.max_size = max_size
        self.group = group
        self.hooks: dict[str, Handle] = {}
        self.features: dict[str, list[Tensor]] = {}
        self._session = self._new_session([])
        self._paths: dict[nn.Module, str] = {}

    def register_forward_hook(
        self,
        layer_name: str | None = None,
        layer: nn.Module | None = None,
        custom_hook: CustomHook | None = None,
        output_transform: OutputTransform | None = None,
        *,
        group: str | None = None,
    ) -> Handle:
        """Hook the layer called `layer_name`, or the module `layer`, whose key is then `layer_name`.

        `custom_hook(module, input, output)` returns the tensor to store, or None to store nothing. Without it,
        `output_transform(output)` returns the tensor to store. `group` is that of the manager if it is left out.
        """
        _require(layer_name, str, "layer_name")
        _require(layer, nn.Module, "layer")
        for name, function in (("custom_hook", custom_hook), ("output_transform", output_transform)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable or None, not {function!r}")
        path = self._path_of(layer_name, layer)
        key = layer_name if layer_name is not None else self._new_key(type(layer).__name__)
        if key in self.hooks:
            raise ValueError(f"a hook with key {key!r} already exists; remove it first, or pass another layer_name")
        features: list[Tensor] = []
        sink = Features(key, features, self.max_size, custom_hook, output_transform)
        tap = Tap(path, sink, group=self.group if group is None else group)
        if self._session.state == "closed":  # by close or torchhook.detach
            self._session = self._new_session([])
        self._session.add(tap)
        self.features[key] = features
        self.hooks[key] = Handle(self, path, tap)
        return self.hooks[key]

    add = register_forward_hook

    def get_features(self, key: str) -> list[Tensor]:
        """The features of `key`, oldest first, as a list that is kept up to date; empty if it did not fire."""
        self._require_key(key)
        self._say_unseen([key])
        return self.features[key]

    get = get_features

    def get_all(self) -> dict[str, list[Tensor]]:
        """The features of every key."""
        self._say_unseen(self.hooks)
        return self.features

    def get_keys(self) -> list[str]:
        """The keys, in the order in which they were added."""
        return list(self.hooks)

    def remove(self, key: str) -> None:
        """Remove the hook of `key` and its features."""
        self._require_key(key)
        self.hooks.pop(key).remove()
        del self.features[key]

    def clear_hooks(self) -> None:
        """Remove all hooks and features."""
        for key in self.get_keys():
            self.remove(key)

    def clear_features(self) -> None:
        """Remove the features; the hooks stay."""
        for features in self.features.values():
            features.clear()

    def summary(self) -> None:
        """Print the hooked layers and the captured features."""
        self._say_unseen(self.hooks)
        print(self)

    def open(self) -> HookManager:
        """Hook the layers again after `close`; at first each is hooked when it is added."""
        if self._session.state == "closed":
            self._session = self._new_session([handle.tap for handle in self.hooks.values()])
        return self

    def close(self) -> None:
        """Remove all hooks; the keys and the features stay."""
        self._session.abandon()

    def __repr__(self) -> str:
        parameters = format_parameter_count(count_parameters(self.model))
        title = f"Model: {type(self.model).__name__} | Total Parameters: {parameters}"
        if not self.hooks:
            return f"{title}\nNo hooks have been registered."
        fired = {key: features for key, features in self.features.items() if features}
        if not fired:
            names = ", ".join(self.hooks)
            return f"{title}\n{len(self.hooks)} hooks registered ({names}), but no features have been captured yet."
        size = self.max_size if self.max_size > 0 else "unlimited"
        lines = [title, f"Registered Hooks: {len(self.hooks)} (max_size={size})", _RULE]
        lines += ["Captured Features Summary:", f"{'Layer Key':<30}{'Feature Count':<20}{'Feature Shape':<30}", _RULE]
        for key, features in fired.items():
            lines.append(f"{key:<30}{len(features):<20}{tuple(features[0].shape)!s:<30}")
        silent = [key for key in self.hooks if key not in fired]
        if silent:
            lines += [_RULE, "Hooks Registered but Not Triggered Yet:", *(f"- {key}" for key in silent)]
        return "\n".join([*lines, _RULE])

    def _path_of(self, name: str | None, layer: nn.Module | None) -> str:
        if layer is None and name is None:
            raise ValueError("pass layer_name or layer")
        if layer is None:
            try:
                self.model.get_submodule(str(name))
            except AttributeError as error:
                known = [path for path, _ in walk(self.model)]
                raise SelectionError(f"layer {name!r} not found in the model; {nearest(str(name), known)}") from error
            return str(name)
        if layer not in self._paths:
            self._paths = {module: path for path, module in walk(self.model)}
        if layer not in self._paths:
            raise SelectionError(f"layer {type(layer).__name__} is not part of the model; pass one of its modules")
        return self._paths[layer]

    def _new_session(self, taps: list[Tap]) -> Session:
        return Session(self.model, taps, scope="all", detach_on_error=False, on_silent="ignore").open()

    def _say_unseen(self, keys: Iterable[str]) -> None:
        """Warn about hooks that saw nothing although the model ran."""
        if self._session.has_run:
            warn_silent(self._session, {self.hooks[key].path for key in keys if not self.features[key]})

    def _new_key(self, kind: str) -> str:
        number = 0
        while f"{kind}_{number}" in self.hooks:
            number += 1
        return f"{kind}_{number}"

    def _require_key(self, key: str) -> None:
        if not isinstance(key, str):
            raise TypeError(f"key must be a string, not {key!r}")
        if key not in self.hooks:
            keys = f"{nearest(key, self.hooks)}; get_keys() has all" if self.hooks else "the manager has no hooks"
            raise SelectionError(f"no hook registered with key {key!r}; {keys}")


class Handle:
    """Removes one hook of a manager."""

    def __init__(self, manager: HookManager, path: str, tap: Tap) -> None:
        self._manager = weakref.ref(manager)
        self.path = path
        self.tap = tap

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        manager = self._manager()
        if manager is not None and self.tap in manager._session.taps:
            manager._session.remove(self.tap)

    def __repr__(self) -> str:
        return f"Handle({self.path!r})"

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Features(Sink):
    """Appends the output of one layer to a list, and drops the oldest above `max_size`."""

    lazy = True

    def __init__(
        self,
        key: str,
        features: list[Tensor],
        max_size: int,
        custom_hook: CustomHook | None,
        output_transform: OutputTransform | None,
    ) -> None:
        self.key = key
        self.features = features
        self.max_size = max_size
        self.custom_hook = custom_hook
        self.output_transform = output_transform

    def receive(self, event: Event) -> None:
        """Store the feature of one call."""
        module, args, output = event.module, event.args, event.value if event.in_graph else event.live
        if self.custom_hook is not None:
            if isinstance(args, Unknown):
                raise TapError(
                    f"custom_hook of {self.key!r} needs the layer's input, which is not available in a compiled graph;"
                    " use output_transform, or torchhook.capture(model, ..., inputs=True)"
                )
            feature = self._custom(self.custom_hook(module, args, output))
        else:
            feature = self._transformed(self._first(output))
        if feature is not None:
            self.features.append(feature)
            if self.max_size > 0:
                del self.features[: -self.max_size]

    def _custom(self, result: Any) -> Tensor | None:
        if result is None:
            return None
        if not isinstance(result, Tensor):
            self._warn(f"custom_hook returned a {type(result).__name__}, which is not stored; return a Tensor or None")
            return None
        return lazily_copied(result)

    def _transformed(self, output: Tensor | None) -> Tensor | None:
        if output is None:
            return None
        if self.output_transform is not None:
            return self.output_transform(lazily_copied(output))
        return frozen(output).cpu()  # waits for the device, so that the list has plain tensors

    def _first(self, output: Any) -> Tensor | None:
        if isinstance(output, Tensor):
            return output
        if isinstance(output, (list, tuple)) and output and isinstance(output[0], Tensor):
            self._warn("the output is a sequence; its first element is stored (use custom_hook to choose)")
            return output[0]
        self._warn(f"the output is a {type(output).__name__}; nothing is stored (use custom_hook to choose)")
        return None

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self.key!r}: {what}", stacklevel=2)


def _require(value: Any, kind: type, argument: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{argument} must be a {kind.__name__} or None, not {value!r}")
