"""`catch_nonfinite`: the origin of the first NaN or Inf."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from torch import nn

from torchhook.core.selection import require_module
from torchhook.rules.origin.files import require_safetensors
from torchhook.rules.origin.sink import Catch


def catch_nonfinite(
    model: nn.Module, *, save: str | PathLike[str] | None = None, on_found: Literal["raise", "warn"] = "raise"
) -> Catch:
    """Find where the first NaN or Inf begins while `model` runs or trains inside the block.

    At the end of a forward whose output holds NaN or Inf (or a -Inf that no mask made), and of a backward that leaves
    such gradients, the call at fault is run once more, op by op: ``.origin`` then says in which module and by which
    operation it was made, on which line, and of what. ``.finding`` has the same with all that merely passed it on.
    Overflows while a GradScaler looks for its scale are not at fault.

    Args:
        save: A folder, or a file that ends in ``.safetensors``, for the call at fault: its arguments, the state of its
            module, the states of random generators. `torchhook.origins.replay` runs it again, anywhere.
        on_found: ``"raise"`` raises `NonfiniteError` with the story, ``"warn"`` tells it once and lets the training go
            on, unwatched.

    What each module is called with in a pass, and the gradients of what it returns, are held until the next one.

    >>> import torch
    >>> from torchhook.rules.origin.catch import catch_nonfinite
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=1))
    >>> with catch_nonfinite(model, on_found="warn") as caught:
    ...     _ = model(torch.ones(1, 2))
    >>> print(caught.origin)
    None
    """
    require_module(model)
    if on_found not in ("raise", "warn"):
        raise ValueError(f"on_found must be 'raise' or 'warn', not {on_found!r}")
    if save is not None:
        require_safetensors()
    return Catch(model, None if save is None else Path(fspath(save)), on_found)
