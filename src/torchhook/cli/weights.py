"""Loads trained weights from a file into a model, without running what the file may contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from torchhook.cli.loaders import wrong
from torchhook.core.optional import require
from torchhook.render.words import short

if TYPE_CHECKING:
    from torch import Tensor, nn

_OPTION = "--weights"
_INSIDE = ("state_dict", "model_state_dict", "model_state", "model", "weights")  # where checkpoints have the state dict
_PREFIXES = ("module", "model")  # of DataParallel and Lightning; those of torch's own wrappers are added
_NAMED = 3  # keys in a message


def load_weights(model: nn.Module, file: Path) -> None:
    """Load the tensors of `file` into `model`; what does not fit is said in one line."""
    state = _fitting(_tensors(_read(file), file), model)
    own = model.state_dict()
    fits = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    if not fits:
        raise wrong(_OPTION, f"none of the {len(state)} tensors in {str(file)!r} fits this {type(model).__name__}")
    model.load_state_dict(fits, strict=False)
    odd = {
        "missing": [key for key in own if key not in state],
        "of another shape": [key for key in state if key in own and key not in fits],
        "unexpected": [key for key in state if key not in own],
    }
    said = ", ".join(f"{len(keys)} {what} ({_some(keys)})" for what, keys in odd.items() if keys)
    if said:
        typer.echo(f"torchhook: {_OPTION}: {len(fits)} of {len(own)} tensors loaded; {said}", err=True)


def _read(file: Path) -> Any:
    """What `file` has: tensors in containers, and nothing else."""
    import pickle

    import torch

    if not file.is_file():
        raise wrong(_OPTION, f"there is no file {str(file)!r}")
    try:
        if file.suffix == ".safetensors":
            return require("safetensors.torch", "files", f"{_OPTION} {file.name}").load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise wrong(
            _OPTION,
            f"{str(file)!r} is refused: it is not a file of tensors alone, and loading anything else could run code;"
            " save model.state_dict(), best as safetensors",
        ) from error
    except ImportError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for a damaged file
        why = short((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        raise wrong(_OPTION, f"cannot read {str(file)!r} as safetensors or as a state dict: {why}") from error


def _tensors(loaded: Any, file: Path) -> dict[str, Tensor]:
    """The state dict, which a checkpoint has beside the state of an optimizer and other things."""
    seen: set[int] = set()
    while isinstance(loaded, Mapping) and id(loaded) not in seen:  # a file may be made so that it has itself inside
        seen.add(id(loaded))
        inner = next((loaded[key] for key in _INSIDE if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            found = {str(key): value for key, value in loaded.items() if _is_plain(value)}
            if found:
                return found
            break
        loaded = inner
    raise wrong(_OPTION, f"{str(file)!r} has no state dict: neither at its top nor under {', '.join(_INSIDE)}")


def _fitting(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """`state` without a prefix that all its keys share and the model does not have."""
    from torchhook.core.torch_internals import WRAPPER_NAMES

    own, known = model.state_dict().keys(), tuple(f"{name}." for name in (*_PREFIXES, *WRAPPER_NAMES))
    while not own & state.keys():
        prefix = next((one for one in known if all(key.startswith(one) for key in state)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose values can be copied: not without memory, sparse, nested or quantized."""
    from torch import Tensor, strided

    if not isinstance(value, Tensor) or value.is_nested or value.is_quantized:
        return False
    return value.layout == strided and not value.is_meta


def _some(keys: list[str]) -> str:
    """The first of the keys, which may be any text."""
    return short(", ".join(keys[:_NAMED]), 200) + ", …" * (len(keys) > _NAMED)
