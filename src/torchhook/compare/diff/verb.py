"""`diff`: the first place where two models that should be the same diverge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.captures.agreement.pairs import require_mapping
from torchhook.compare.diff.comparison import Comparison
from torchhook.compare.diff.result import Difference
from torchhook.core.batch import Batch, Loss
from torchhook.core.selection import require_module, walk
from torchhook.core.trees import Arguments


def diff(
    a: nn.Module,
    b: nn.Module,
    x: Any,
    loss: Callable[..., Tensor] | None = None,
    tolerance: float | None = None,
    match: Mapping[str, str] | None = None,
) -> Difference:
    """Run two models on the same input and find where they first diverge: ``.first``, a site or None.

    Rounding does not count as a difference, however far it accumulates: b runs once more, with the output of every
    module replaced by what a had there. So each module differs by its own error alone, which is compared with the
    rounding of its dtype and with the effect of noise of that size. bfloat16 and float32, compiled and eager, or two
    memory formats therefore agree, while a mistyped epsilon is found at its module. Differences below the rounding of
    the coarser dtype cannot be seen.

    The models run as they are (train or eval mode), one after the other, with the same random numbers. Afterwards their
    buffers, gradients and the random number generators are as before.

    Args:
        x: An input, a tuple of positional arguments, or a dict of keyword arguments. It is moved to the device of each
            model, and floating-point tensors are cast to its dtype.
        loss: Also compare gradients, backward from this loss. A function of the output; or of output and target, which
            is then the last element of the tuple `x` (or all of `x` if it is not a tuple).
        tolerance: Instead of all that, run each model once and diverge at the first relative error above `tolerance`.
        match: Paths of modules in a and what they are called in b, including everything below them. Other modules are
            matched by name, and the rest by execution order and shape.

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
        raise ValueError(f"tolerance must not be negative, but is {tolerance}")
    comparison = Comparison(a, b, *_task(x, loss), require_mapping(match, *(dict(walk(model)) for model in (a, b))))
    return comparison.judged() if tolerance is None else comparison.within(tolerance)


def _task(x: Any, loss: Callable[..., Tensor] | None) -> tuple[Batch, Loss | None]:
    """The batch for the models, and the loss as a function of output and target."""
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
    except ValueError:  # a builtin without a signature
        return False
    return False
