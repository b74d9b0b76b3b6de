"""A call saved as one safetensors file (arguments, module state, settings), and its replay from that file."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.errors import FileError
from torchhook.core.findings import Finding
from torchhook.core.optional import require
from torchhook.core.selection import walk
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments
from torchhook.core.untrusted import built, json_of
from torchhook.rules.origin.calls import Call, Setting, buffers_before
from torchhook.rules.origin.origin import Origin
from torchhook.rules.origin.packing import Packing, available, dtype_of, unpack
from torchhook.rules.origin.replay import fill, show, state_of, twin_of

FORMAT = 1
"""The version of the file format; it is raised when older readers would fail."""

_KEY = "torchhook.call"
_OF_ORIGIN = ("path", "kind", "phase", "call", "pass_number", "what", "after", "came_with")


def require_safetensors() -> None:
    """Raise ImportError unless safetensors is installed."""
    require("safetensors", "files", "saving and replaying calls")


def save_call(
    where: Path, call: Call, calls: list[Call], origin: Origin, finding: Finding
) -> tuple[Path | None, Finding]:
    """Save `call`, one of `calls`; returns the file, and the finding with a note about the file. Never raises."""
    name = f"nonfinite_{re.sub('[^A-Za-z0-9_.]', '_', call.path) or 'model'}_{origin.phase}_{origin.pass_number}"
    file = where if where.suffix == ".safetensors" else where / f"{name}.safetensors"
    try:
        lost = _write(file, call, calls, origin)
    except Exception as error:
        return None, _noting(finding, not_saved=f"{type(error).__name__}: {error}")
    return file, _noting(finding, saved=str(file), **({"not_stored": lost} if lost else {}))


def replay(file: str | Path, model: nn.Module) -> Origin:
    """Rerun the call saved in `file`, and find where NaN or Inf begins.

    `model` is the model that the call was saved from, or the module that was called. It is copied, and the copy gets
    the parameters and buffers from the file.

    >>> import tempfile
    >>> from torchhook.origins import Catch, replay
    >>> class Log(nn.Module):
    ...     def forward(self, x):
    ...         return x.log() * 0
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), Log())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Catch(model, Path(folder), "record") as caught:
    ...         _ = model(torch.zeros(1, 2))
    ...     replay(caught.file, model).op
    'aten.log'
    """
    require_safetensors()
    saved, tensors = _read(Path(file))
    try:
        if lost := built(tuple[str, ...], saved["lost"], "lost"):
            raise ValueError(f"it could not store {', '.join(lost)}")
        origin = built(Origin, {name: saved["origin"][name] for name in _OF_ORIGIN})
        twin = twin_of(_module(model, saved["path"], saved["class"]))
        _load(twin, saved, tensors)
        arguments = Arguments(unpack(saved["args"], tensors), unpack(saved["kwargs"], tensors))
        grads = {tuple(address): unpack(packed, tensors) for address, packed in saved["grads"]}
        setting, wanted = _setting(saved["setting"], tensors), built(tuple[bool, ...], saved["wanted"], "wanted")
        originals = {id(part): part for part in twin.modules()}
        shown = show(twin, originals, arguments, list(wanted), setting, grads if origin.phase == "backward" else None)
    except Exception as error:  # whatever does not fit in a file of a stranger
        raise FileError(f"cannot replay {file}: {error}") from error
    if origin.came_with and shown.is_conclusive:
        return origin
    paths = {id(part): f"{saved['path']}.{name}".strip(".") for name, part in twin.named_modules()}
    return replace(origin, came_with="").shown(shown, paths)


def _write(file: Path, call: Call, calls: list[Call], origin: Origin) -> list[str]:
    """Write the file; returns the names of the values that it cannot store."""
    from safetensors.torch import save_file

    module, packing = call.module, Packing()
    parameters, grads = dict(module.named_parameters()), enumerate(call.grads.items())
    state = {**parameters, **buffers_before(call, calls)}
    contents = {
        "format": FORMAT,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "origin": {name: getattr(origin, name) for name in _OF_ORIGIN},
        "path": call.path,
        "class": type(module).__name__,
        "args": packing.pack(tuple(call.arguments.args), "args"),
        "kwargs": packing.pack(dict(call.arguments.kwargs), "kwargs"),
        "wanted": call.wanted,
        "grads": [[list(address), packing.pack(grad, f"grad.{number}")] for number, (address, grad) in grads],
        "state": {name: packing.pack(tensor, f"state.{name}") for name, tensor in state.items()},
        "trained": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "training": [name for name, part in module.named_modules() if part.training],
        "setting": _packed(call.setting, packing),
        "lost": packing.lost,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(packing.tensors, file, {_KEY: json.dumps(contents)})
    return packing.lost


def _packed(setting: Setting, packing: Packing) -> dict[str, Any]:
    return {
        "grad": setting.grad,
        "inference": setting.inference,
        "autocast": [[kind, on, str(dtype).removeprefix("torch.")] for kind, (on, dtype) in setting.autocast.items()],
        "seeds": {device: packing.pack(seed, f"seed.{device}") for device, seed in setting.seeds.items()},
    }


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            saved = json_of((opened.metadata() or {})[_KEY])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        version = saved["format"]
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise FileError(f"{file} is not a call saved by torchhook, or it is corrupt: {error}") from error
    if version != FORMAT:
        raise FileError(
            f"{file} has format {version!r:.40}, this torchhook reads format {FORMAT}: update the older one"
        )
    return saved, tensors


def _setting(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Setting:
    """The saved setting, without devices that this machine does not have."""
    autocast = {kind: (bool(on), dtype_of(dtype)) for kind, on, dtype in saved["autocast"] if _is_here(kind)}
    seeds = {device: unpack(seed, tensors) for device, seed in saved["seeds"].items() if _is_here(device)}
    return Setting(bool(saved["grad"]), bool(saved["inference"]), autocast, {"cpu": seeds.pop("cpu"), **seeds})


def _is_here(device: str) -> bool:
    return str(available(device)) == device


def _module(model: nn.Module, path: str, kind: str) -> nn.Module:
    """The module that was called: the one at its path in `model`, or `model` itself."""
    for found in (dict(walk(model)).get(path), model):
        if type(found).__name__ == kind and found is not None:
            return found
    raise ValueError(f"the saved call is of {path!r}, a {kind}; this {type(model).__name__} neither is nor contains it")


def _load(twin: nn.Module, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Load the saved state into `twin`."""
    own, state = state_of(twin), {name: unpack(packed, tensors) for name, packed in saved["state"].items()}
    for name in own.keys() | state.keys():
        here, there = own.get(name), state.get(name)
        if here is None or there is None or here.shape != there.shape:
            raise ValueError(f"{name!r} is {shape_of(there)} in the file, but {shape_of(here)} in this model")
    fill(twin, state)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name in saved["trained"])
    for name, part in twin.named_modules():
        part.training = name in saved["training"]


def _noting(finding: Finding, **notes: Any) -> Finding:
    """The finding with more evidence, which its message also states."""
    said = "".join(f"\n  {name.replace('_', ' ')}: {note}" for name, note in notes.items())
    return replace(finding, message=finding.message + said, evidence={**finding.evidence, **notes})
