"""Whether a map depends on what a model has learned: does it change when the weights are randomised, layer by layer?

This is the cascading randomisation of Adebayo et al. (2018), "Sanity checks for saliency maps". A copy of the model is
randomised, so that the model itself is never touched; that takes the memory of a second model.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import inputs_of
from torchhook.core.model_state import inference, random_state_kept
from torchhook.core.result import Result
from torchhook.core.selection import Selector, require_module, select
from torchhook.core.session import Session
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import shape_of
from torchhook.core.torch_internals import own_parameters, submodules
from torchhook.explain.heat import Heat
from torchhook.explain.targets import Score, Target

Method = Callable[..., Any]
"""A function of a model, an input and ``target=`` that returns a `Heat`, or maps N×h×w."""

_ALIKE = 0.5  # rank correlation from which two maps count as similar
_EQUAL = 0.99  # rank correlation from which two maps count as the same
_OTHER = 0x5EED5EED  # mixed into the seed: a model made with the same seed would get its own weights back


class SanityStep(NamedTuple):
    """How similar the maps still are when a layer and all after it are randomised."""

    layer: str
    randomised: int  # number of layers so far
    similarity: float  # rank correlation with the maps of the original model, mean over the samples
    absolute: float  # the same for the absolute values, which a change of sign does not affect


class Sanity(Result, Sequence[SanityStep]):
    """The steps from the output of a model back to its input, and what they say about the method."""

    def __init__(self, method: str, steps: list[SanityStep]) -> None:
        self.method = method
        self.steps = steps

    @property
    def passed(self) -> bool:
        """Whether the maps have changed once all layers are randomised."""
        last = self.steps[-1]
        return max(last.similarity, last.absolute) < _ALIKE

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        last = self.steps[-1]
        numbers = f"(rank correlation {last.similarity:.2f}, of absolute values {last.absolute:.2f})"
        every = f"with all {last.randomised} layers randomised"
        if last.similarity >= _EQUAL:
            return f"Fails: {every}, the maps are the same {numbers}: they do not depend on what the model has learned."
        if not self.passed:
            return f"Fails: {every}, the maps are similar {numbers}: most of what they show comes from the input."
        return f"Passes: {every}, the maps are different {numbers}: they depend on the weights.{self._late()}"

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def _records(self) -> list[dict[str, Any]]:
        return [
            {"path": step.layer, **{k: v for k, v in step._asdict().items() if k != "layer"}} for step in self.steps
        ]

    def _foot(self) -> Sequence[str]:
        return (self.verdict,)

    def _late(self) -> str:
        """Where the first change shows, if not at the first step."""
        changed = next(number for number, step in enumerate(self.steps) if step.similarity < _EQUAL)
        name = self.steps[changed].layer or "the model"
        return f" Nothing changes until {name!r} is randomised: the layers after it play no part." if changed else ""

    def _title(self) -> str:
        return f"Sanity of {self.method}: layers randomised from the output back to the input"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        rows = [[s.randomised, s.layer or "''", f"{s.similarity:.2f}", f"{s.absolute:.2f}"] for s in self.steps]
        return ("randomised", "back to", "rank correlation", "of absolute values"), rows


def sanity(
    method: Method,
    model: nn.Module,
    x: Any,
    target: Target = None,
    *,
    steps: int = 12,
    seed: int = 0,
    **options: Any,
) -> Sanity:
    """Whether the maps of `method` change when the weights of `model` are randomised, from the output to the input.

    A map that does not change does not depend on the weights: it shows edges, or something else in the input. A map
    that changes has passed a necessary test, not a sufficient one; `faithfulness` asks more. Use several samples: two
    smooth maps of one image may look alike by chance.

    A copy of the model is randomised; `model`, its mode and the random number generators are left as they were. Modules
    with ``reset_parameters`` are initialised by it; other parameters are drawn from a normal distribution with their
    current mean and standard deviation, except integer parameters, which stay as they are.

    Args:
        method: ``method(model, x, target=...)`` returns a `Heat` or maps N×h×w: `explain.grad_cam`, or your own. It
            must use the model that it is given, so name layers by path: ``sites="layer4"``, not ``model.layer4``.
        target: As for `explain.grad_cam`. The predicted class is that of the original model at every step.
        steps: The most maps to compare; with more layers than that, several are randomised between two maps.
        seed: Seeds the random weights.
        options: Further arguments for `method`.

    >>> from torchhook.explain.cams import grad_cam
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 5))
    >>> sanity(grad_cam, model, torch.randn(8, 1, 12, 12)).passed
    True
    >>> sanity(lambda model, x, target: x[:, 0], model, torch.randn(8, 1, 12, 12))
    Sanity of <lambda>: layers randomised from the output back to the input
    randomised  back to  rank correlation  of absolute values
             1  4        1.00              1.00
             2  2        1.00              1.00
             3  0        1.00              1.00
    Fails: with all 3 layers randomised, the maps are the same (rank correlation 1.00, of absolute values 1.00): they \
do not depend on what the model has learned.
    """
    require_module(model)
    require_count(steps, "steps")
    with random_state_kept(model):
        first = method(model, x, target=target, **options)
        original = _maps(first)
        if not any(len(one.unique()) > 1 for one in original):
            raise ValueError("the maps of the original model are constant, so there is nothing to compare")
        target = _fixed_target(first, model, x, target)
        if isinstance(first, Heat) and {"layer", "call"} <= inspect.signature(method).parameters.keys():
            # the same layer at every step, whatever the random weights are
            options |= {"layer": first.layer, "call": first.call if first.calls > 1 else None}
        twin = _copy(model)
        layers = _from_the_output(twin, x)
        torch.default_generator.manual_seed(seed ^ _OTHER)
        found = []
        for number, (path, module) in enumerate(layers, 1):
            _randomise(module)
            if _is_step(number, len(layers), steps):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "the weights of this")  # the copy has no others
                    new = _maps(method(twin, x, target=target, **options))
                found.append(SanityStep(path, number, *_similarity(original, new)))
    return Sanity(str(getattr(method, "__name__", None) or getattr(method, "func", method).__name__), found)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"cannot copy the model ({type(error).__name__}: {error}); sanity randomises a copy, never the model itself"
        ) from error


def _fixed_target(first: Any, model: nn.Module, x: Any, target: Target) -> Target:
    """The target for all steps: a predicted class is that of the original model."""
    if target is not None:
        return target
    if isinstance(first, Heat):
        return [one for one in first.target if isinstance(one, int)] or None
    given = inputs_of(x, model)
    with inference(model):
        classes = Score.of(None, output := model(*given.args, **given.kwargs)).explained(len(output))
    return [one for one in classes if isinstance(one, int)]


def _from_the_output(model: nn.Module, x: Any) -> list[tuple[str, nn.Module]]:
    """The modules with parameters of their own; the one that starts to run last comes first.

    A module that is never called itself, such as the output projection of an attention, counts as starting with its
    parent.
    """
    given, started = inputs_of(x, model), [""]
    taps = [Tap(_EVERY, lambda event: started.append(event.path), "input")] if submodules(model) else []
    with inference(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a tap is inside")  # about the copy, which only runs once
        with Session(model, taps, on_silent="ignore"):
            model(*given.args, **given.kwargs)
    last = {path: number for number, path in enumerate(started)}
    owners: dict[nn.Module, str] = {}
    for path, module in select(model, "", *([_EVERY] if submodules(model) else [])).items():
        if own_parameters(module):
            owners.setdefault(module, path)
    if not owners:
        raise ValueError(f"this {type(model).__name__} has no parameters to randomise")
    modules = [(_last_start(path, last), path, module) for module, path in owners.items()]
    return [(path, module) for _, path, module in sorted(modules, key=lambda one: -one[0])]


def _last_start(path: str, last: dict[str, int]) -> int:
    """When a module, or else its nearest parent that is called, last started to run."""
    while path not in last:
        path = path.rpartition(".")[0]
    return last[path]


def _randomise(module: nn.Module) -> None:
    """Give a module's own parameters and buffers fresh values, the same on every device."""
    fresh = copy.deepcopy(module).cpu()
    with torch.no_grad():
        reset: Any = getattr(fresh, "reset_parameters", None)
        drawn = [parameter for parameter in fresh.parameters(recurse=False) if parameter.is_floating_point()]
        if callable(reset) and len(drawn) == len(list(fresh.parameters(recurse=False))):
            reset()
        else:
            for parameter in drawn:
                spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
                parameter.normal_(float(parameter.float().mean()), spread)
        for mine, new in zip(_own(module), _own(fresh), strict=True):
            mine.copy_(new)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_step(number: int, count: int, steps: int) -> bool:
    """Whether to compare maps after layer `number` of `count`, so that there are `steps` in all, the last included.

    >>> [number for number in range(1, 8) if _is_step(number, 7, 3)]
    [3, 5, 7]
    """
    return number * steps // count > (number - 1) * steps // count


def _maps(result: Any) -> Tensor:
    maps = result.maps if isinstance(result, Heat) else result
    if not isinstance(maps, Tensor) or maps.dim() != 3:
        kind = shape_of(maps) if isinstance(maps, Tensor) else f"a {type(maps).__name__}"
        raise TypeError(f"method must return a Heat or maps N×h×w, but it returned {kind}")
    return maps.detach().cpu().double().flatten(1)


def _similarity(original: Tensor, new: Tensor) -> tuple[float, float]:
    """The rank correlation of two sets of maps, averaged over the samples, and that of their absolute values."""
    if original.shape != new.shape:
        raise ValueError(
            f"method returned maps of shape {list(new.shape)} for random weights, but {list(original.shape)} before;"
            " name the layer to make the maps of"
        )
    pairs = list(zip(original, new, strict=True))
    return _mean(rank_correlation(a, b) for a, b in pairs), _mean(rank_correlation(a.abs(), b.abs()) for a, b in pairs)


def _mean(values: Iterator[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation: 1 if both rise together, 0 if they are unrelated; equal values share their rank.

    It is NaN if `a` is constant or not finite, and 0 if `b` is, since then nothing is left of `a`.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 11.0]))
    1.0
    """
    first, second = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    if not first.any() or not a.isfinite().all():
        return math.nan
    if not second.any() or not b.isfinite().all():
        return 0.0
    return round(float(first @ second / (first.norm() * second.norm())), 12)


def _ranks(values: Tensor) -> Tensor:
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    middle: Tensor = (counts.cumsum(0) - (counts - 1) / 2).double()
    return middle[place]


_EVERY = Selector(lambda path, module, mark: True, "every module")
