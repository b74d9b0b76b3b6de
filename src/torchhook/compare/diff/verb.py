"""`diff`: where two models that should be the same first part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.captures.agreement.pairs import require_mapping
from torchhook.captures.agreement.recorded_run import ToNumber
from torchhook.compare.diff.comparison import Comparison
from torchhook.compare.diff.result import Difference
from torchhook.core.batch import Batch
from torchhook.core.selection import require_module
from torchhook.core.trees import Arguments


def diff(
    a: nn.Module,
    b: nn.Module,
    x: Any,
    loss: Callable[..., Tensor] | None = None,
    tolerance: float | None = None,
    match: Mapping[str, str] | None = None,
) -> Difference:
    """Run two models on the same input and say where they first part: ``.first``, a site or None.

    Rounding is not held against them, however far it carries: b is run once more with what a had at every place handed
    on from module to module, so that each differs by its own error alone, and that is compared with the spacing of the
    numbers there and with what noise of that size does. So bfloat16 against float32, compiled against eager or another
    memory format do not part, while an epsilon that was mistyped does, at its module. Differences that are smaller than
    the rounding of the coarser dtype cannot be seen.

    The models are run as they are, in train mode if they are in it, one after the other, with the same random numbers;
    their buffers and gradients and the random number generators are as before afterwards.

    Args:
        x: An input, a tuple of positional arguments or a dict of keyword arguments; for each model moved to its device
            and, where it is of floating point, cast to its dtype.
        loss: Compare gradients, too, from this backwards. A function of the output; or of output and target, which is
            then the last of the tuple `x` (with other `x`, all of it).
        tolerance: Instead of all that, part at the first relative error above this one in two plain runs.
        match: Of modules in a, and all below them, what they are called in b. Modules of one name belong together, and
            the rest by order of execution and shape.

    >>> import copy, torch
    >>> from torchhook import diff
    >>> _ = torch.manual_seed(0)
    >>> a = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-5), nn.Linear(8, 2))
    >>> b = copy.deepcopy(a)
    >>> print(diff(a, b.bfloat16(), torch.randn(4, 8)).first)
    None
    >>> b = copy.deepcopy(a)
    >>> b[1].eps = 1e-6
    >>> diff(a, b, torch.randn(4, 8)).first
    Site(path='1', port='output')
    """
    require_module(a, "a")
    require_module(b, "b")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the output, or of output and target, not {loss!r:.80}")
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, (int, float))):
        raise TypeError(f"tolerance must be a number or None, not {tolerance!r:.80}")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, and is {tolerance}")
    comparison = Comparison(a, b, *_task(x, loss), require_mapping(match, a, b))
    return comparison.judged() if tolerance is None else comparison.within(tolerance)


def _task(x: Any, loss: Callable[..., Tensor] | None) -> tuple[Batch, ToNumber | None]:
    """What the models are given, and the loss as a function of output and target."""
    if loss is not None and _takes_target(loss):
        return Batch.of(x), loss
    return Batch(Arguments.of(x), None), None if loss is None else lambda output, _: loss(output)


def _takes_target(loss: Callable[..., Tensor]) -> bool:
    """Whether `loss` cannot be called with the output alone."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        signature.bind("output")
    except TypeError:
        return True
    except ValueError:  # a builtin that does not say what it takes
        return False
    return False
