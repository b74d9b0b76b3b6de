"""Class activation maps: where in the input a layer saw what speaks for a target.

All are sums over the channels of what the layer gave, A, weighted by the gradient of the target's score, G, and differ
in how. None clips, scales or resizes: those are steps on the `Heat` that comes back.

All take the same arguments:

    model   It is in eval mode for the time, each module as it was afterwards. Nothing else of it is touched: no
            ``.grad``, no hook, no parameter. Frozen parameters are fine, as are no_grad and inference_mode around.
    x       The input, a tuple of positional arguments or a dict of keyword arguments; a whole batch costs one backward.
    target  What is explained: a class, one class a sample, a function of the model's output that gives one number a
            sample (for segmentation, detection, embeddings, …), or None for the class that each sample is taken for.
    layer   The path of a module, or the module. None is the last call in a pass, in order of execution, that gave maps
            or tokens of patches on which the target depends; ``heat.layer`` says which.
    call    Which call, if the layer is called several times in a pass; ``-1`` is the last.
    fold    How to make samples × channels × height × width of what the layer gives, and of its gradient, where that
            does not show by itself: it does for maps (channels first or last) and for the tokens of ViT and Swin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from torchhook.core.model_state import inference
from torchhook.core.selection import Query
from torchhook.core.trees import Arguments
from torchhook.explain.heat import Heat
from torchhook.explain.layer_choice import settle
from torchhook.explain.layer_values import Reached, reach
from torchhook.explain.targets import Score, Target, at_hand
from torchhook.explain.token_grid import Fold

Formula = Callable[[Tensor, Tensor], Tensor]
"""From what a layer gave and the gradient there, both samples × channels × height × width, to one map a sample."""

Method = TypeVar("Method", bound=Callable[..., Heat])

_SUM = 1e-7  # for a sum of activations that is zero, as in pytorch-grad-cam
_SQUARE = 1e-6  # for a gradient that is next to nothing


class Cam(Protocol):
    """What all methods are called with."""

    def __call__(
        self,
        model: nn.Module,
        x: Any,
        target: Target = None,
        layer: Query | None = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
    ) -> Heat:
        """The heat of some samples."""


def by_gradient(formula: Formula) -> Cam:
    """The method that a formula for its maps stands for."""

    def cam(
        model: nn.Module,
        x: Any,
        target: Target = None,
        layer: Query | None = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
    ) -> Heat:
        given, target = Arguments.of(x), at_hand(target)
        with inference(model):
            reached = reach(model, given, settle(model, given, target, layer, call, fold), fold)
            score = Score.of(target, reached.output, reached.setting.samples)
            maps = formula(reached.maps, reached.gradient(score))
            return heat_of(formula.__name__, reached, maps, score.explained(len(maps)))

    return named_after(formula, cam)


def named_after(formula: Callable[..., Tensor], method: Method) -> Method:
    """`method` with the name and the documentation of what it was made of, and arguments of its own."""
    method.__name__, method.__qualname__, method.__doc__ = formula.__name__, formula.__qualname__, formula.__doc__
    method.__module__ = formula.__module__
    return method


@by_gradient
def grad_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Each channel by the mean of its gradient: the one to begin with (Selvaraju 2017).

    Args:
        model: Put in eval mode for the time, since batch statistics would mix the samples; all is restored.
        x: The input, a tuple of positional arguments or a dict of keyword arguments.
        target: A class, one a sample, a function of the output that gives one number a sample, or None for the
            predicted class.
        layer: A path or a module; None is the last one with a spatial extent on which the target depends.
        call: Which call of the layer, if there are several in a pass.
        fold: From what the layer gives to samples × channels × height × width, where that does not show by itself.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> grad_cam(net, torch.rand(2, 3, 16, 16), target=5)
    grad_cam of '1': 2×14×14, target 5
    """
    return weighted(maps, gradient.mean((2, 3)))


@by_gradient
def hires_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Each place of each channel by its own gradient: faithful, what the map says the model did use (Draelos 2020).

    Where only linear layers follow, the map sums up to the score less its bias. Arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 10, bias=False))
    >>> x = torch.rand(2, 3, 16, 16)
    >>> torch.allclose(hires_cam(net, x, target=5).maps.sum((1, 2)), net(x)[:, 5], atol=1e-5)
    True
    """
    return (gradient * maps).sum(1)


@by_gradient
def layer_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """HiResCAM with positive gradients alone: of use in early layers, for fine detail (Jiang 2021).

    Arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 10))
    >>> layer_cam(net, torch.rand(2, 3, 16, 16), target=[1, 2], layer="1")
    layer_cam of '1': 2×14×14, target 1, 2
    """
    return (gradient.relu() * maps).sum(1)


@by_gradient
def x_grad_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Each channel by the mean of its gradient, weighted by where the channel is active (Fu 2020).

    Arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    >>> x_grad_cam(net, torch.rand(1, 3, 16, 16), target=1)
    x_grad_cam of '1': 1×14×14, target 1
    """
    return weighted(maps, (gradient * maps).sum((2, 3)) / (maps.sum((2, 3)) + _SUM))


@by_gradient
def grad_cam_pp(maps: Tensor, gradient: Tensor) -> Tensor:
    """Grad-CAM++: several objects of one class each count, the small one too (Chattopadhyay 2018).

    Arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    >>> grad_cam_pp(net, torch.rand(1, 3, 16, 16), target=1).maps.shape
    torch.Size([1, 14, 14])
    """
    square = gradient**2
    share = square / (2 * square + maps.sum((2, 3), keepdim=True) * square * gradient + _SQUARE)
    return weighted(maps, (share * gradient.relu()).sum((2, 3)))  # a gradient of zero has no share


def eigen_cam(
    model: nn.Module,
    x: Any,
    target: Target = None,
    layer: Query | None = None,
    *,
    call: int | None = None,
    fold: Fold | None = None,
) -> Heat:
    """What the channels of a layer have most in common, of whatever class: their first principal component.

    It needs no gradient (Muhammad 2020), and `target` only where `layer` is None, to see which layer matters. A
    principal component has no sign of its own: here it is the one in which the map is higher where the channels are
    more active (by a positive correlation with their mean absolute value). Arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> x = torch.zeros(1, 3, 8, 8)
    >>> x[:, :, 2, 5] = 9.0
    >>> heat = eigen_cam(net, x)
    >>> heat, divmod(heat.maps.argmax().item(), 8)
    (eigen_cam of '0': 1×8×8, (2, 5))
    """
    given = Arguments.of(x)
    with inference(model):
        place = settle(model, given, target, layer, call, fold, scored=False)
        reached = reach(model, given, place, fold, graph=False)
        maps = _principal(reached.maps)
    return heat_of("eigen_cam", reached, maps, [None] * len(maps))


def heat_of(method: str, reached: Reached, maps: Tensor, target: list[int | str | None]) -> Heat:
    """The maps, with where they are from."""
    return Heat(maps, target, reached.place.path, reached.call, method, reached.setting.size, reached.calls)


def weighted(maps: Tensor, weights: Tensor) -> Tensor:
    """The sum of the channels, each with a weight."""
    return torch.einsum("nc,nchw->nhw", weights, maps)


def _principal(maps: Tensor) -> Tensor:
    """The channels projected onto their first principal component, with a sign."""
    places = maps.flatten(2).double()  # for the eigenvalues are squares
    centred = places - places.mean(2, keepdim=True)
    if centred.shape[1] < centred.shape[2]:  # whichever of the two matrices is the smaller one
        _, vectors = torch.linalg.eigh(centred @ centred.mT)
        projected = (vectors[..., -1:].mT @ centred)[:, 0]
    else:
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        projected = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    activity = places.abs().mean(1)
    along = (projected * (activity - activity.mean(1, keepdim=True))).sum(1, keepdim=True)
    return torch.where(along < 0, -projected, projected).view(-1, *maps.shape[2:]).to(maps.dtype)
