"""Pictures: what is drawn of feature maps, attention and heat, whatever their shapes and numbers are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from still_samples import HOSTILE, png

import torchhook
from specimens import resnet18
from torchhook.plot import attention, cam, feature_maps
from torchhook.plot.mosaic import Mosaic
from torchhook.plot.style import colours
from torchhook.render.palette import GREY, VERMILLION, YELLOW

pytestmark = pytest.mark.usefixtures("one_thread")
WHITE, DARK, BRIGHT = (
    np.array(colours(signed)(at, bytes=True)) for signed, at in ((True, 0.5), (False, 0.0), (False, 1.0))
)


def tiles(figure, count, height, width):
    """The drawn pixels of each map."""
    pixels = figure.axes[0].images[0].get_array()
    mosaic = Mosaic.of(torch.zeros(count, height, width))
    assert pixels.shape[:2] == mosaic.shape
    corners = map(mosaic.corner, range(count))
    return [pixels[top : top + height, left : left + width] for top, left in corners]


def bad(colour):
    return np.array([round(255 * part) for part in to_rgba(colour)])


def captions(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_feature_maps_of_a_real_model():
    net = resnet18(num_classes=5).eval()
    with torchhook.capture(net, "conv1", "layer4") as acts:
        net(torch.randn(3, 3, 64, 64))
    figure = feature_maps(acts["conv1"].output)
    assert figure.axes[0].get_title() == "first of 3 samples, 32 of 64 channels"
    assert captions(figure) == [str(number) for number in range(32)]
    assert png(figure)[:4] == b"\x89PNG"
    everything = feature_maps(acts["layer4"].output[0], most=1000)
    assert everything.axes[0].get_title() == "" and png(everything)


def test_zero_is_white_among_both_signs_and_darkest_above_zero():
    signed = tiles(feature_maps([[[0.0, -2.0, 2.0]], [[0.0, 0.0, 1.0]]]), 2, 1, 3)
    assert (signed[0][0, 0] == WHITE).all() and (signed[1][0, :2] == WHITE).all()
    blue, red = signed[0][0, 1], signed[0][0, 2]
    assert blue[2] > blue[0] and red[0] > red[2]
    (above,) = tiles(feature_maps([[[0.0, 3.0]]]), 1, 1, 2)
    assert (above[0, 0] == DARK).all() and (above[0, 1] == BRIGHT).all()


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_each_map_has_its_own_scale_which_an_outlier_does_not_stretch(least):
    maps = torch.empty(20, 20).uniform_(least, 1).double()
    first, second = tiles(feature_maps(torch.stack([maps, maps * 1e-6])), 2, 20, 20)
    assert (np.abs(first.astype(int) - second) <= 1).all()
    maps[0, 0] = 1e308
    (with_outlier,) = tiles(feature_maps(maps[None]), 1, 20, 20)
    assert len(np.unique(with_outlier.reshape(-1, 4), axis=0)) > 50


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e300, -1e300, 5e-324])
def test_a_constant_map_is_grey_and_says_its_value(value):
    others = np.stack([np.full((4, 4), value), np.arange(16.0).reshape(4, 4)])
    figure = feature_maps(others)
    tile, other = tiles(figure, 2, 4, 4)
    assert (tile == bad(GREY)).all() and not (other == bad(GREY)).all(-1).any()
    assert captions(figure) == [f"0: all {value:.2g}", "1"]


def test_of_a_constant_map_what_is_not_finite_is_still_seen():
    maps = torch.zeros(1, 4, 4)
    maps[0, 0, 0] = math.nan
    figure = feature_maps(maps)
    (tile,) = tiles(figure, 1, 4, 4)
    assert (tile[0, 0] == bad(VERMILLION)).all() and (tile[1:] == bad(GREY)).all()
    assert captions(figure) == ["0: 1 not finite"]


def test_a_map_of_one_pixel_is_not_called_constant():
    assert captions(feature_maps(torch.rand(3, 1, 1))) == ["0", "1", "2"]


@pytest.mark.parametrize(("sign", "colour"), [(1, VERMILLION), (-1, YELLOW)])
def test_what_is_not_finite_is_seen_and_counted(sign, colour):
    maps = torch.rand(2, 8, 8) * sign
    maps[1, 0, 0], maps[1, 3, 4], maps[1, 7, 7] = math.nan, math.inf, -math.inf
    figure = feature_maps(maps)
    _, tile = tiles(figure, 2, 8, 8)
    found = (tile == bad(colour)).all(-1)
    assert found.sum() == 3 and found[0, 0] and found[3, 4] and found[7, 7]
    assert captions(figure) == ["0", "1: 3 not finite"]


def test_a_map_far_from_zero_is_no_single_colour():
    (tile,) = tiles(feature_maps(100 + torch.rand(1, 20, 20)), 1, 20, 20)
    assert len(np.unique(tile.reshape(-1, 4), axis=0)) > 50


def test_one_broken_pixel_of_a_large_map_is_not_thinned_away():
    maps = torch.rand(1, 500, 300)
    maps[0, 333, 222] = math.nan
    pixels = feature_maps(maps).axes[0].images[0].get_array()
    assert max(pixels.shape) < 150 and (pixels == bad(VERMILLION)).all(-1).sum() == 1


def test_nothing_is_drawn_between_maps():
    pixels = feature_maps(torch.rand(3, 8, 8)).axes[0].images[0].get_array()
    assert (pixels[..., 3] > 0).sum() == 3 * 8 * 8


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]),
    st.integers(1, 20),
)
def test_any_shape_and_dtype_is_drawn(shape, dtype, most):
    x = (torch.randn(shape) * 3).to(dtype)
    figure = feature_maps(x, most=most)
    count = min(most, shape[-3])
    assert len(tiles(figure, count, *shape[-2:])) == count
    assert png(figure)


@pytest.mark.parametrize("make", [lambda x: x.requires_grad_(), lambda x: x.numpy(), lambda x: x.tolist(), list])
def test_numbers_come_in_any_form(make):
    x = torch.randn(2, 3, 3)
    assert (
        feature_maps(make(x.clone())).axes[0].images[0].get_array() == feature_maps(x).axes[0].images[0].get_array()
    ).all()


def test_arrays_that_torch_does_not_take_are_taken():
    array = np.random.default_rng(0).random((2, 3, 3))[::-1]
    array.flags.writeable = False
    assert png(feature_maps(array))


@pytest.mark.parametrize(
    ("x", "error", "said"),
    [
        (torch.ones(3, 4), ValueError, r"x must be \[C, H, W\] or \[N, C, H, W\], not of shape \[3, 4\]: reshape it"),
        (torch.ones(0, 3, 4), ValueError, r"x is empty: its shape is \[0, 3, 4\]"),
        (torch.ones(1, 2, 2, dtype=torch.complex64), TypeError, "x must be .* real numbers"),
        ([[[1.0, 2.0], [3.0]]], TypeError, "x must be a tensor, an array or lists"),
        ({"a": 1}, TypeError, "x must be a tensor"),
    ],
)
def test_refuses_what_are_no_maps(x, error, said):
    with pytest.raises(error, match=said):
        feature_maps(x)


def test_refuses_no_maps_at_all():
    with pytest.raises(ValueError, match="most"):
        feature_maps(torch.ones(1, 2, 2), most=0)


@pytest.fixture(scope="module")
def gpt2_attention():
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=1, attn_implementation="eager", vocab_size=50)).eval()
    with torch.no_grad():
        return net(torch.arange(6)[None], output_attentions=True).attentions[0]


def test_attention_of_a_real_model(gpt2_attention):
    figure = attention(gpt2_attention, tokens=list("abcdef"))
    assert captions(figure) == [f"head {number}" for number in range(12)]
    first = tiles(figure, 12, 6, 6)[0]
    assert (first[0, 1:] == DARK).all() and (first[0, 0] == BRIGHT).all()  # the first token sees itself alone
    names = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert names == list("abcdef") * 4 and png(figure)


def test_heads_share_a_scale():
    one, half = tiles(attention(torch.stack([torch.ones(2, 2), torch.ones(2, 2) / 2])), 2, 2, 2)
    assert (one == BRIGHT).all() and not (half == BRIGHT).all(-1).any()


def test_scores_before_the_softmax_may_be_masked():
    scores = torch.randn(1, 4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
    (tile,) = tiles(attention(scores), 1, 4, 4)
    assert ((tile == bad(YELLOW)).all(-1) == np.triu(np.ones((4, 4)), 1)).all()


def test_long_sequences_keep_what_is_largest():
    maps = torch.zeros(2, 1000, 1000)
    maps[1, 777, 333] = 1.0
    figure = attention(maps, tokens=range(1000))
    pixels = figure.axes[0].images[0].get_array()
    assert max(pixels.shape) < 600 and (pixels == BRIGHT).all(-1).sum() == 1
    assert 2 < len(figure.axes[0].get_xticklabels()) < 100 and png(figure)


def test_tokens_are_shown_as_they_are():
    figure = attention(torch.rand(1, 10, 10), tokens=HOSTILE)
    shown = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert shown[1] == r"\$x^2\$" and shown[2] == "_private" and shown[5] == r"fc\x1b[31m\n" and shown[9] == ""
    assert png(figure)


def test_other_queries_than_keys_have_no_names():
    figure = attention(torch.rand(2, 3, 5), tokens="abcde")
    assert not figure.axes[0].get_yticklabels() and figure.axes[0].get_xticklabels()
    with pytest.raises(ValueError, match=r"tokens must have 5 names, one per key of maps of shape \[2, 3, 5\], not 3"):
        attention(torch.rand(2, 3, 5), tokens="abc")
    with pytest.raises(ValueError, match=r"not of shape \[3, 5\]: for a single head, pass maps\[None\]"):
        attention(torch.rand(3, 5))


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (torch.rand(3, 20, 30), (20, 30, 3)),
        (torch.rand(20, 30, 3), (20, 30, 3)),
        (torch.rand(1, 20, 30), (20, 30)),
        (torch.rand(20, 30), (20, 30)),
        (torch.rand(1, 4, 20, 30), (20, 30, 4)),
        (torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8), (20, 30, 3)),
        (np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8), (20, 30, 3)),
        (torch.randn(3, 20, 30, dtype=torch.bfloat16), (20, 30, 3)),
    ],
)
def test_heat_lies_over_any_image(image, shape):
    figure = cam(image, torch.rand(1, 1, 4, 5, requires_grad=True))
    picture, heat = (drawn.get_array() for drawn in figure.axes[0].images)
    assert picture.shape == shape and heat.shape == (20, 30)
    assert picture.min() >= 0 and picture.max() <= 1 and png(figure)


def test_an_image_that_was_normalised_is_stretched():
    image = torch.rand(3, 8, 8)
    image[0, 0, 0], image[0, 0, 1] = 0.0, 1.0
    normalised = 4 * image - 2
    normalised[1, 5, 5] = math.nan
    plain, stretched = (cam(some, torch.ones(2, 2)).axes[0].images[0].get_array() for some in (image, normalised))
    assert stretched[5, 5, 1] == 0
    plain[5, 5, 1] = 0
    assert np.allclose(plain, stretched)


def test_bytes_and_floats_are_the_same_image():
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    drawn = [cam(some, torch.ones(2, 2)).axes[0].images[0].get_array() for some in (image, image / 255)]
    assert np.allclose(*drawn)


def test_the_heat_is_where_it_is():
    heat = torch.zeros(4, 4)
    heat[0, 3] = 2.0
    drawn = cam(torch.zeros(3, 40, 40), heat).axes[0].images[1]
    row, column = np.unravel_index(drawn.get_array().argmax(), (40, 40))
    assert row < 10 and column >= 30
    alpha = drawn.get_alpha()
    assert alpha[0, 39] > 0.6 and alpha[39, 0] < 0.2


@pytest.mark.parametrize("heat", [torch.zeros(3, 3), torch.full((3, 3), math.nan), -torch.ones(3, 3)])
def test_odd_heat_is_drawn(heat):
    assert png(cam(torch.rand(3, 9, 9), heat))


def test_refuses_what_is_no_image():
    with pytest.raises(ValueError, match=r"image must be .* not of shape \[2, 3, 8, 8\]: pass one image of a batch"):
        cam(torch.rand(2, 3, 8, 8), torch.rand(2, 2))
    with pytest.raises(ValueError, match=r"heat must be \[h, w\], not of shape \[2, 2, 2\]"):
        cam(torch.rand(3, 8, 8), torch.rand(2, 2, 2))
