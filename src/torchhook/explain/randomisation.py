"""Whether a map depends on what a model has learned: does it change when the weights are randomised, layer by layer?

This is the cascading randomisation of Adebayo et al. (2018), "Sanity checks for saliency maps". It is done to a copy of
the model, so that the model itself is never touched, whatever happens on the way; that takes the memory of one more.
"""

from __future__ import annotations

import copy
import html
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.model_state import inference, random_state_kept
from torchhook.core.selection import Selector, require_module, select
from torchhook.core.session import Session
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import html_table, shape_of, table
from torchhook.core.torch_internals import own_parameters, submodules
from torchhook.core.trees import Arguments
from torchhook.explain.heat import Heat
from torchhook.explain.targets import Score, Target

Method = Callable[..., Any]
"""A function of a model, an input and ``target=`` that gives a `Heat`, or maps N×h×w."""

_ALIKE = 0.5  # a rank correlation from which on two maps are much the same
_EQUAL = 0.99
_OTHER = 0x5EED5EED  # a model made with the same seed would be given the weights that it has


class Step(NamedTuple):
    """What is left of the maps when a layer and all after it are randomised."""

    layer: str
    randomised: int  # layers, so far
    similarity: float  # rank correlation with the maps of the model as it is, mean over the samples
    absolute: float  # the same of the absolute values, which a change of sign does not hide


class Sanity(Sequence[Step]):
    """The steps from the output of a model back to its input, and what they say of the method."""

    def __init__(self, method: str, steps: list[Step]) -> None:
        self.method = method
        self.steps = steps

    @property
    def passed(self) -> bool:
        """Whether the maps are others once all is randomised."""
        last = self.steps[-1]
        return max(last.similarity, last.absolute) < _ALIKE

    @property
    def verdict(self) -> str:
        """What that means, in a sentence or two."""
        last = self.steps[-1]
        left = f"(rank correlation {last.similarity:.2f}, of absolutes {last.absolute:.2f})"
        every = f"with all {last.randomised} layers randomised"
        if last.similarity >= _EQUAL:
            return f"Fails: {every} the maps are the same {left}: they do not depend on what the model has learned."
        if not self.passed:
            return f"Fails: {every} the maps are much the same {left}: most of what they show lies in the input."
        return f"Passes: {every} the maps are others {left}: they depend on the weights.{self._late()}"

    def table(self) -> list[dict[str, Any]]:
        """The steps as plain dictionaries, for pandas and the like."""
        return [step._asdict() for step in self.steps]

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._cells())}\n{self.verdict}"

    def _repr_html_(self) -> str:
        title, verdict = html.escape(self._title()), html.escape(self.verdict)
        return f"<p>{title}</p>{html_table(_HEADER, self._cells())}<p>{verdict}</p>"

    def _late(self) -> str:
        """Where the first change shows, if that is not at once."""
        changed = next(number for number, step in enumerate(self.steps) if step.similarity < _EQUAL)
        name = self.steps[changed].layer or "the model"
        return f" Nothing changes before {name!r} does: what comes after it plays no part." if changed else ""

    def _title(self) -> str:
        return f"Sanity of {self.method}: layers randomised from the output back to the input"

    def _cells(self) -> list[list[Any]]:
        return [[s.randomised, s.layer or "''", f"{s.similarity:.2f}", f"{s.absolute:.2f}"] for s in self.steps]


_HEADER = ("randomised", "back to", "rank correlation", "of absolutes")


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

    A map that stays as it is does not depend on the weights: it shows edges, or what else lies in the input. A map that
    changes passes a test that is necessary, not sufficient; `faithfulness` asks more. Take several samples: two smooth
    maps of one image may look alike by chance.

    A copy of the model is randomised; `model`, its mode and the random numbers of others are as before. What has a
    ``reset_parameters`` is initialised by that; other parameters are drawn from a normal distribution with the mean and
    deviation that they have, but for those of whole numbers, which stay as they are.

    Args:
        method: ``method(model, x, target=...)`` gives a `Heat` or maps N×h×w: `explain.grad_cam`, or your own. It must
            use the model that it is given, so name layers by their paths: ``layer="layer4"``, not ``model.layer4``.
        target: As for `explain.grad_cam`. The predicted class is that of the model as it is, at every step.
        steps: How many maps to compare at most; of more layers, several are randomised between two maps.
        seed: Of the random weights.
        options: For `method`.

    >>> from torchhook.explain.cams import grad_cam
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(512, 5))
    >>> sanity(grad_cam, model, torch.randn(8, 1, 12, 12)).passed
    True
    >>> sanity(lambda model, x, target: x[:, 0], model, torch.randn(8, 1, 12, 12))
    Sanity of <lambda>: layers randomised from the output back to the input
    randomised  back to  rank correlation  of absolutes
             1  4        1.00              1.00
             2  2        1.00              1.00
             3  0        1.00              1.00
    Fails: with all 3 layers randomised the maps are the same (rank correlation 1.00, of absolutes 1.00): they do not \
depend on what the model has learned.
    """
    require_module(model)
    require_count(steps, "steps")
    with random_state_kept(model):
        first = method(model, x, target=target, **options)
        original = _maps(first)
        if not any(len(one.unique()) > 1 for one in original):
            raise ValueError("the maps of the model as it is are the same everywhere: there is nothing to compare")
        target = _settled(first, model, x, target)
        if isinstance(first, Heat) and {"layer", "call"} <= inspect.signature(method).parameters.keys():
            # the same place at every step, whatever the random weights do
            options |= {"layer": first.layer, "call": first.call if first.calls > 1 else None}
        twin = _copy(model)
        layers = _from_the_output(twin, x)
        torch.default_generator.manual_seed(seed ^ _OTHER)
        found = []
        for number, (path, module) in enumerate(layers, 1):
            _randomise(module)
            if _is_step(number, len(layers), steps):
                new = _maps(method(twin, x, target=target, **options))
                found.append(Step(path, number, *_similarity(original, new)))
    return Sanity(str(getattr(method, "__name__", None) or getattr(method, "func", method).__name__), found)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and is not to be randomised itself"
        ) from error


def _settled(first: Any, model: nn.Module, x: Any, target: Target) -> Target:
    """The target, for good: a predicted class is that of the model as it is."""
    if target is not None:
        return target
    if isinstance(first, Heat):
        return [one for one in first.target if isinstance(one, int)] or None
    given = Arguments.of(x)
    with inference(model):
        classes = Score.of(None, output := model(*given.args, **given.kwargs)).explained(len(output))
    return [one for one in classes if isinstance(one, int)]


def _from_the_output(model: nn.Module, x: Any) -> list[tuple[str, nn.Module]]:
    """The modules with parameters of their own, the last one that begins to run first.

    What is not called itself, as the projection in an attention, whose weights that uses, runs when what it is in does.
    """
    given, begun = Arguments.of(x), [""]
    taps = [Tap(_EVERY, lambda event: begun.append(event.path), "input")] if submodules(model) else []
    with inference(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a tap is inside")  # of the copy, for this one run
        with Session(model, taps, on_silent="ignore"):
            model(*given.args, **given.kwargs)
    last = {path: number for number, path in enumerate(begun)}
    owners: dict[nn.Module, str] = {}
    for path, module in select(model, "", *([_EVERY] if submodules(model) else [])).items():
        if own_parameters(module):
            owners.setdefault(module, path)
    if not owners:
        raise ValueError(f"this {type(model).__name__} has no parameters to randomise")
    places = [(_begin(path, last), path, module) for module, path in owners.items()]
    return [(path, module) for _, path, module in sorted(places, key=lambda place: -place[0])]


def _begin(path: str, last: dict[str, int]) -> int:
    """When a module began to run for the last time, or what it is in did."""
    while path not in last:
        path = path.rpartition(".")[0]
    return last[path]


def _randomise(module: nn.Module) -> None:
    """Give a module's own parameters, and what it has counted, fresh values, the same on every device."""
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
    """Whether to look after so many of `count` layers, to look so often in all, and after the last.

    >>> [number for number in range(1, 8) if _is_step(number, 7, 3)]
    [3, 5, 7]
    """
    return number * steps // count > (number - 1) * steps // count


def _maps(result: Any) -> Tensor:
    maps = result.maps if isinstance(result, Heat) else result
    if not isinstance(maps, Tensor) or maps.dim() != 3:
        said = shape_of(maps) if isinstance(maps, Tensor) else f"a {type(maps).__name__}"
        raise TypeError(f"method must give a Heat or maps N×h×w, and it gave {said}")
    return maps.detach().cpu().double().flatten(1)


def _similarity(original: Tensor, new: Tensor) -> tuple[float, float]:
    """The rank correlation of two sets of maps, mean over the samples, and that of their absolute values."""
    if original.shape != new.shape:
        raise ValueError(
            f"method gave maps of {list(new.shape)} places for random weights, and of {list(original.shape)} before;"
            " name the layer that the maps are of"
        )
    pairs = list(zip(original, new, strict=True))
    return _mean(rank_correlation(a, b) for a, b in pairs), _mean(rank_correlation(a.abs(), b.abs()) for a, b in pairs)


def _mean(values: Iterator[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's: 1 if both rise together, 0 if one says nothing of the other; equals share their rank.

    It is 0 if `b` is the same everywhere or not finite, for then nothing is left of `a`; NaN if `a` is.

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
