"""Class activation maps: where in the input a layer found evidence for a target.

Each map is a sum over the channels of the layer's output, A, weighted by the gradient of the target's score, G; the
methods differ in the weights. None clips, scales or resizes: those are steps on the `Heat` that they return.

All take the same arguments:

    model   Runs in eval mode; the mode of each module is restored afterwards. Nothing else of it is touched: no
            ``.grad``, no hook, no parameter. Frozen parameters, no_grad and inference_mode are fine.
    x       The input, a tuple of positional arguments or a dict of keyword arguments; a whole batch costs one backward.
    target  What to explain: a class, one class per sample, a function from the model's output to one number per sample
            (for segmentation, detection, embeddings, …), or None for the predicted class of each sample.
    sites   The path of a module, or the module. None is the last call in a pass, in order of execution, that returns
            maps or patch tokens on which the target depends, before a pooling at the end; ``heat.layer`` says which.
    call    Which call, if the layer is called several times in a pass; ``-1`` is the last.
    fold    A function that turns the layer's output, and its gradient, into samples × channels × height × width. Not
            needed for maps (channels first or last) and for the tokens of ViT and Swin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from torchhook.core.batch import inputs_of
from torchhook.core.model_state import inference
from torchhook.core.renamed import renamed
from torchhook.core.selection import Sites
from torchhook.core.text import warn
from torchhook.explain.heat import Heat
from torchhook.explain.layer_choice import choose_layer
from torchhook.explain.layer_values import ReachedLayer, reach_layer
from torchhook.explain.targets import Score, Target, classes_as_list
from torchhook.explain.token_grid import Fold
from torchhook.explain.untrained import warn_of_untrained

Formula = Callable[[Tensor, Tensor], Tensor]
"""From the output of a layer and its gradient, both samples × channels × height × width, to one map per sample."""

AnyCam = TypeVar("AnyCam", bound=Callable[..., Heat])

_SHOWN = 8  # samples that a warning names
_SUM = 1e-7  # added to a sum of activations, which may be zero, as in pytorch-grad-cam
_SQUARE = 1e-6  # added to a square of the gradient, which may be zero
_POWER, _ROUNDS = 8, 16  # together 2^48: what is as strong to within that cannot be told apart in double precision
_LEFT = 1e-12  # of all eigenvalues but the first, at which they no longer matter


class Cam(Protocol):
    """The signature that all gradient methods share."""

    def __call__(
        self,
        model: nn.Module,
        x: Any,
        target: Target = None,
        sites: Sites = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
    ) -> Heat:
        """The heat maps of the samples."""


def by_gradient(formula: Formula) -> Cam:
    """The method whose maps `formula` computes."""

    @renamed(layer="sites")
    def cam(
        model: nn.Module,
        x: Any,
        target: Target = None,
        sites: Sites = None,
        *,
        call: int | None = None,
        fold: Fold | None = None,
    ) -> Heat:
        given, target = inputs_of(x, model), classes_as_list(target)
        with inference(model) as modules:
            layer = choose_layer(model, given, target, sites, call, fold)
            reached = reach_layer(model, given, layer, fold, modules=modules)
            score = Score.of(target, reached.output, reached.layout.samples)
            gradient = reached.gradient(score)
            maps = formula(reached.maps, gradient)
            heat = heat_of(formula.__name__, reached, maps, score.explained(len(maps)))
            warn_of_untrained(model, modules)  # now, while an accelerator is still at work
            _warn_of_zeros(gradient, heat)
            return heat

    return named_after(formula, cam)


def _warn_of_zeros(gradient: Tensor, heat: Heat) -> None:
    """Warn of samples whose gradient is zero everywhere, since their empty maps look like an answer."""
    warn_of_empty(
        (gradient.flatten(1) == 0).all(1),
        heat,
        f"the gradient of the target is zero in the whole output of layer {heat.layer!r}",
        "what follows the layer passes no gradient on (a saturated softmax, a ReLU that is off, weights of zero, a"
        " detach)",
    )


def warn_of_empty(empty: Tensor, heat: Heat, what: str, why: str) -> None:
    """Warn of the samples that are `empty`."""
    numbers = [number for number, is_empty in enumerate(empty.tolist()) if is_empty]  # waits for the device once
    if numbers:
        which = f"{', '.join(map(str, numbers[:_SHOWN]))}{', …' * (len(numbers) > _SHOWN)} of {len(heat)}"
        warn(
            f"{heat.method}: {what} for sample {which}, so there is nothing on its map: {why}; choose another target="
            " or sites="
        )


def named_after(formula: Callable[..., Tensor], method: AnyCam) -> AnyCam:
    """`method` with the name and docstring of `formula`, but its own arguments."""
    method.__name__, method.__qualname__, method.__doc__ = formula.__name__, formula.__qualname__, formula.__doc__
    method.__module__ = formula.__module__
    return method


@by_gradient
def grad_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Weight each channel by the mean of its gradient: the method to start with (Selvaraju 2017).

    Args:
        model: Runs in eval mode, since batch statistics would mix the samples; its modes are restored afterwards.
        x: The input, a tuple of positional arguments or a dict of keyword arguments.
        target: A class, one class per sample, a function from the output to one number per sample, or None for the
            predicted class.
        sites: A path or a module; None is the last one with a spatial extent on which the target depends: in a
            convolutional net the activation of its last convolution, before a pooling at the end.
        call: Which call of the layer, if there are several in a pass.
        fold: A function from the layer's output to samples × channels × height × width, if its shape is unusual.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> grad_cam(net, torch.rand(2, 3, 16, 16), target=5)
    grad_cam of '1' (ReLU): 2×14×14, target 5
    """
    return weighted(maps, gradient.mean((2, 3)))


@by_gradient
def hires_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Weight every position of each channel by its own gradient: shows only what the model used (Draelos 2020).

    If only linear layers follow, the map sums to the score minus its bias. The arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 10, bias=False))
    >>> x = torch.rand(2, 3, 16, 16)
    >>> torch.allclose(hires_cam(net, x, target=5).maps.sum((1, 2)), net(x)[:, 5], atol=1e-5)
    True
    """
    return (gradient * maps).sum(1)


@by_gradient
def layer_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """HiResCAM with only the positive gradients: for early layers and fine detail (Jiang 2021).

    The arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 10))
    >>> layer_cam(net, torch.rand(2, 3, 16, 16), target=[1, 2], sites="1")
    layer_cam of '1' (ReLU): 2×14×14, target 1, 2
    """
    return (gradient.relu() * maps).sum(1)


@by_gradient
def x_grad_cam(maps: Tensor, gradient: Tensor) -> Tensor:
    """Weight each channel by the mean of its gradient over the places where it is active (Fu 2020).

    The arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    >>> x_grad_cam(net, torch.rand(1, 3, 16, 16), target=1)
    x_grad_cam of '1' (ReLU): 1×14×14, target 1
    """
    return weighted(maps, (gradient * maps).sum((2, 3)) / (maps.sum((2, 3)) + _SUM))


@by_gradient
def grad_cam_pp(maps: Tensor, gradient: Tensor) -> Tensor:
    """Grad-CAM++: every object of a class counts, small ones included (Chattopadhyay 2018).

    The arguments are those of `grad_cam`.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    >>> grad_cam_pp(net, torch.rand(1, 3, 16, 16), target=1).maps.shape
    torch.Size([1, 14, 14])
    """
    square = gradient**2
    share = square / (2 * square + maps.sum((2, 3), keepdim=True) * square * gradient + _SQUARE)
    return weighted(maps, (share * gradient.relu()).sum((2, 3)))  # where the gradient is zero, so is the share


@renamed(layer="sites")
def eigen_cam(
    model: nn.Module,
    x: Any,
    target: Target = None,
    sites: Sites = None,
    *,
    call: int | None = None,
    fold: Fold | None = None,
) -> Heat:
    """The first principal component of a layer's channels: what they have in common, for any class (Muhammad 2020).

    It needs no gradient, and uses `target` only to find the layer if `sites` is None. The sign of a principal component
    is arbitrary; here the map correlates positively with the mean absolute value of the channels. The arguments are
    those of `grad_cam`.

    >>> net = nn.Sequential(nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> x = torch.zeros(1, 3, 8, 8)
    >>> x[:, :, 2, 5] = 9.0
    >>> heat = eigen_cam(net, x)
    >>> heat, divmod(heat.maps.argmax().item(), 8)
    (eigen_cam of '0' (Softplus): 1×8×8, (2, 5))
    """
    given = inputs_of(x, model)
    with inference(model) as modules:
        chosen = choose_layer(model, given, target, sites, call, fold, scored=False)
        reached = reach_layer(model, given, chosen, fold, graph=False, modules=modules)
        warn_of_untrained(model, modules)
        maps = _principal(reached.maps)
    return heat_of("eigen_cam", reached, maps, [None] * len(maps))


def heat_of(method: str, reached: ReachedLayer, maps: Tensor, target: list[int | str | None]) -> Heat:
    """The maps, with where they come from."""
    layer = reached.layer
    module = type(layer.module).__name__
    return Heat(maps, target, layer.path, reached.call, method, reached.layout.size, reached.calls, module)


def weighted(maps: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the channels."""
    return torch.einsum("nc,nchw->nhw", weights, maps)


def _principal(maps: Tensor) -> Tensor:
    """The channels projected onto their first principal component, with its sign fixed."""
    values = maps.flatten(2).double()  # in double precision, since the eigenvalues are squares
    centred = values - values.mean(2, keepdim=True)
    if centred.shape[1] < centred.shape[2]:  # the smaller of the two matrices has the same eigenvalues
        projected = _dominant(centred @ centred.mT).mT @ centred
    else:
        vector = _dominant(centred.mT @ centred)
        projected = (vector * torch.linalg.matrix_norm(centred @ vector, keepdim=True)).mT
    activity = values.abs().mean(1, keepdim=True)
    along = (projected * (activity - activity.mean(2, keepdim=True))).sum(2, keepdim=True)
    return torch.where(along < 0, -projected, projected).view(-1, *maps.shape[2:]).to(maps.dtype)


def _dominant(matrix: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue of each positive semidefinite matrix, as a column of length one.

    In the powers of a matrix, it outgrows all others. They take products alone, at which accelerators are good: a
    decomposition of a batch of small matrices takes them longer than the forward of a model.
    """
    tiny = torch.finfo(matrix.dtype).tiny  # for matrices of zeros, which stay zero
    for _ in range(_ROUNDS):
        matrix = matrix / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=tiny)
        trace = matrix.diagonal(dim1=1, dim2=2).sum(1)  # 1 if a single eigenvalue is left, else more
        if not (trace > 1 + _LEFT).any():
            break
        matrix = torch.linalg.matrix_power(matrix, _POWER)
    longest = matrix.diagonal(dim1=1, dim2=2).argmax(1)
    column = matrix.gather(2, longest[:, None, None].expand(-1, matrix.shape[1], 1))
    length: Tensor = torch.linalg.matrix_norm(column, keepdim=True)
    return column / length.clamp(min=tiny)
