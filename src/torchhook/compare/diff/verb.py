"""`diff`: the first place where two models that should be the same diverge."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from torchhook.captures.agreement.paired_runs import Side
from torchhook.compare.diff.match import Match
from torchhook.compare.diff.recorded import Recorded, as_far_as_known, compared, diff_recordings
from torchhook.compare.diff.result import Difference
from torchhook.compare.diff.sides import require_fitting
from torchhook.compare.recordings.recording import Recording
from torchhook.compare.task import task_of
from torchhook.core.batch import Batch, Loss

Subject = nn.Module | Recording | str | os.PathLike[str] | Sequence[Recording | str | os.PathLike[str]]
"""A model, a recording or its path, or the recordings of several ranks."""


def diff(
    a: Subject,
    b: Subject,
    x: Any = None,
    loss: Callable[..., Tensor] | None = None,
    tolerance: float | None = None,
    match: Any = None,
) -> Difference:
    """Find where two models first diverge, given the same input: ``.first``, a site or None.

    Each of `a` and `b` is a model, which is run here, or a recording of one (see `record`), by its path or as a list of
    those of several ranks. Rounding does not count as a difference, however far it accumulates. If one of the models
    is here, it runs once more, with the output of every module replaced by what the other one had there. So each module
    differs by its own error alone, which is compared with the rounding of its dtype and with the effect of noise of
    that size. bfloat16 and float32, compiled and eager, or two memory formats therefore agree, while a mistyped
    epsilon is found at its module. Of two recordings, what each value was computed from bounds its own error, so small
    mistakes after large rounding errors may stay unseen. Differences below the rounding of the coarser dtype cannot
    be seen.

    Models run as they are (train or eval mode), one after the other, with the same random numbers. Afterwards their
    buffers, gradients and the random number generators are as before.

    Args:
        x: An input, a tuple of positional arguments, or a dict of keyword arguments. It is moved to the device of each
            model, and floating-point tensors are cast to its dtype. By default, the input in the recording.
        loss: Also compare gradients, backward from this loss. A function of the output; or of output and target, which
            is then the last element of the tuple `x` (or all of `x` if it is not a tuple).
        tolerance: Instead of all that, diverge at the first relative error above `tolerance`, of models that run once.
        match: Paths of modules in a and what they are called in b, including everything below them; several paths for
            what the other model computes at once; or a TOML file of these. A star stands for one name. Other modules
            are matched by name, and the rest by execution order and shape. `Difference.match` is what was used.

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
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, (int, float))):
        raise TypeError(f"tolerance must be a number or None, not {tolerance!r:.80}")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, but is {tolerance}")
    first, second, given = _opened(a, "a"), _opened(b, "b"), Match.of(match)
    if isinstance(first, Recorded) and isinstance(second, Recorded):
        if x is not None or loss is not None:
            raise ValueError("x= and loss= are for models; a recording has its own inputs and gradients")
        return diff_recordings(first, second, given, tolerance)
    batch, graded = _task((first, second), x, loss)
    models = [None if isinstance(one, Recorded) else Side.of(one, batch, graded) for one in (first, second)]
    like = next(side.run for side in models if side is not None)
    sides = [
        one.side(like, given) if isinstance(one, Recorded) else cast("Side", side)
        for one, side in zip((first, second), models, strict=True)
    ]
    a_run, b_run = (side.run for side in sides)
    require_fitting(given, (a_run.modules, b_run.modules), (a_run.called, b_run.called))
    ranks = [len(one.ranks) if isinstance(one, Recorded) else 1 for one in (first, second)]
    found = compared(sides[0], sides[1], given, tolerance, batch, graded, (ranks[0], ranks[1]))
    cut = [one.name for one in (first, second) if isinstance(one, Recorded) and one.is_cut(one.first)]
    return as_far_as_known(found, cut)


def _opened(subject: Any, name: str) -> nn.Module | Recorded:
    if isinstance(subject, nn.Module):
        return subject
    several = subject if isinstance(subject, (list, tuple)) else [subject]
    if not several or not all(isinstance(one, (str, os.PathLike, Recording)) for one in several):
        raise TypeError(f"{name} must be a model, a recording or its path, or a list of these, not {subject!r:.80}")
    return Recorded([one if isinstance(one, Recording) else Recording(one) for one in several], name)


def _task(subjects: Sequence[Any], x: Any, loss: Callable[..., Tensor] | None) -> tuple[Batch, Loss | None]:
    """What the models are run on: the input that was given, or that of the recording."""
    if x is not None:
        return task_of(x, loss)
    recorded = next((subject for subject in subjects if isinstance(subject, Recorded)), None)
    if recorded is None:
        raise TypeError("x is missing: two models need an input to run on")
    return Batch(recorded.inputs(), None), task_of((), loss)[1]
