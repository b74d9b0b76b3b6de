"""A call in one safetensors file: its arguments, the state of its module, its setting; and its replay from there."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.findings import Finding
from torchhook.core.selection import walk
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments
from torchhook.rules.origin.calls import Call, Setting, buffers_before
from torchhook.rules.origin.origin import Origin
from torchhook.rules.origin.packing import Packing, available, dtype_of, unpack
from torchhook.rules.origin.replay import fill, show, state_of, twin_of

FORMAT = 1
"""The version of the files; it grows when a reader of the old ones would fail."""

_KEY = "torchhook.call"
_OF_ORIGIN = ("path", "kind", "phase", "call", "pass_number", "what", "after", "came_with")


def require_safetensors() -> None:
    """Raise unless files can be written and read."""
    if find_spec("safetensors") is None:
        raise ImportError('files of calls need safetensors: pip install "torchhook[files]"')


def save_call(
    where: Path, call: Call, calls: list[Call], origin: Origin, finding: Finding
) -> tuple[Path | None, Finding]:
    """Save `call`, of all these; the file, and the finding with what there is to say about it. It never raises."""
    name = f"nonfinite_{re.sub('[^A-Za-z0-9_.]', '_', call.path) or 'model'}_{origin.phase}_{origin.pass_number}"
    file = where if where.suffix == ".safetensors" else where / f"{name}.safetensors"
    try:
        lost = _write(file, call, calls, origin)
    except Exception as error:
        return None, _noting(finding, not_saved=f"{type(error).__name__}: {error}")
    return file, _noting(finding, saved=str(file), **({"not_stored": lost} if lost else {}))


def replay(file: str | Path, model: nn.Module) -> Origin:
    """Run the call that is saved in `file` once more, and see where NaN or Inf begins.

    `model` is the model that it was saved from, or the very module that was called. The parameters and buffers are
    those of the file, in a copy of the module.

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
    told, tensors = _read(Path(file))
    if told.get("lost"):
        raise ValueError(f"{file} cannot be replayed, for this could not be stored: {', '.join(told['lost'])}")
    try:
        origin = Origin(**{name: told["origin"][name] for name in _OF_ORIGIN})
        twin = twin_of(_module(model, told["path"], told["class"]))
        _load(twin, told, tensors)
        arguments = Arguments(unpack(told["args"], tensors), unpack(told["kwargs"], tensors))
        grads = {tuple(address): unpack(of, tensors) for address, of in told["grads"]}
        setting, wanted = _setting(told["setting"], tensors), list(told["wanted"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be replayed: {error}") from error
    originals = {id(part): part for part in twin.modules()}
    shown = show(twin, originals, arguments, wanted, setting, grads if origin.phase == "backward" else None)
    if origin.came_with and shown.told:
        return origin
    paths = {id(part): f"{told['path']}.{name}".strip(".") for name, part in twin.named_modules()}
    return replace(origin, came_with="").shown(shown, paths)


def _write(file: Path, call: Call, calls: list[Call], origin: Origin) -> list[str]:
    """Write the file; the names of what it cannot hold."""
    from safetensors.torch import save_file

    module, packing = call.module, Packing()
    parameters, grads = dict(module.named_parameters()), enumerate(call.grads.items())
    state = {**parameters, **buffers_before(call, calls)}
    told = {
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
    save_file(packing.tensors, file, {_KEY: json.dumps(told)})
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
            told = json.loads((opened.metadata() or {})[_KEY])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        version = told["format"]
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} holds no call that torchhook saved, or is damaged: {error}") from error
    if version != FORMAT:
        raise ValueError(f"{file} is of format {version!r}, and this torchhook reads {FORMAT}: update the older one")
    return told, tensors


def _setting(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Setting:
    """The setting; devices that are not here are left out."""
    autocast = {kind: (bool(on), dtype_of(dtype)) for kind, on, dtype in told["autocast"] if _is_here(kind)}
    seeds = {device: unpack(seed, tensors) for device, seed in told["seeds"].items() if _is_here(device)}
    return Setting(bool(told["grad"]), bool(told["inference"]), autocast, {"cpu": seeds.pop("cpu"), **seeds})


def _is_here(device: str) -> bool:
    return str(available(device)) == device


def _module(model: nn.Module, path: str, kind: str) -> nn.Module:
    """The module that was called: at its path in `model`, or `model` itself."""
    for found in (dict(walk(model)).get(path), model):
        if type(found).__name__ == kind and found is not None:
            return found
    raise ValueError(f"the saved call is of {path!r}, a {kind}; the {type(model).__name__} given neither is nor has it")


def _load(twin: nn.Module, told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give `twin` the state that it had."""
    own, state = state_of(twin), {name: unpack(of, tensors) for name, of in told["state"].items()}
    for name in own.keys() | state.keys():
        here, there = own.get(name), state.get(name)
        if here is None or there is None or here.shape != there.shape:
            raise ValueError(f"{name!r} is {shape_of(there)} in the file, and {shape_of(here)} in the model given")
    fill(twin, state)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(name in told["trained"])
    for name, part in twin.named_modules():
        part.training = name in told["training"]


def _noting(finding: Finding, **notes: Any) -> Finding:
    """The finding with some more evidence, said in its message, too."""
    said = "".join(f"\n  {name.replace('_', ' ')}: {note}" for name, note in notes.items())
    return replace(finding, message=finding.message + said, evidence={**finding.evidence, **notes})
