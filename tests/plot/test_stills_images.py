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
from torchhook.render.palette import GREY, NONFINITE, ZERO

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


def channels(figure, count, height, width):
    """The drawn pixels of each channel; before several, there is their mean."""
    first = int(count > 1)
    return tiles(figure, first + count, height, width)[first:]


def bad(colour):
    return np.array([round(255 * part) for part in to_rgba(colour)])


def captions(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def channel_captions(figure):
    """Those of the channels alone."""
    return [caption for caption in captions(figure) if not caption.startswith("mean")]


def test_feature_maps_of_a_real_model():
    net = resnet18(num_classes=5).eval()
    with torchhook.capture(net, "conv1", "layer4") as acts:
        net(torch.randn(3, 3, 64, 64))
    figure = feature_maps(acts["conv1"].output)
    assert figure.axes[0].get_title() == "first of 3 samples, 32 of 64 channels"
    assert channel_captions(figure) == [str(number) for number in range(32)]
    assert png(figure)[:4] == b"\x89PNG"
    everything = feature_maps(acts["layer4"].output[0], most=1000)
    assert everything.axes[0].get_title() == "" and png(everything)


def test_zero_is_white_among_both_signs_and_darkest_above_zero():
    signed = channels(feature_maps([[[0.0, -2.0, 2.0]], [[0.0, 0.0, 1.0]]]), 2, 1, 3)
    assert (signed[0][0, 0] == WHITE).all() and (signed[1][0, :2] == WHITE).all()
    blue, red = signed[0][0, 1], signed[0][0, 2]
    assert blue[2] > blue[0] and red[0] > red[2]
    (above,) = channels(feature_maps([[[0.0, 3.0]]]), 1, 1, 2)
    assert (above[0, 0] == DARK).all() and (above[0, 1] == BRIGHT).all()


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_each_map_has_its_own_scale_which_an_outlier_does_not_stretch(least):
    maps = torch.empty(20, 20).uniform_(least, 1).double()
    first, second = channels(feature_maps(torch.stack([maps, maps * 1e-6])), 2, 20, 20)
    assert (np.abs(first.astype(int) - second) <= 1).all()
    maps[0, 0] = 1e308
    (with_outlier,) = channels(feature_maps(maps[None]), 1, 20, 20)
    assert len(np.unique(with_outlier.reshape(-1, 4), axis=0)) > 50


@pytest.mark.parametrize("value", [3.0, -3.0, 1e300, -1e300, 5e-324])
def test_a_constant_map_is_grey_and_says_its_value(value):
    others = np.stack([np.full((4, 4), value), np.arange(16.0).reshape(4, 4)])
    figure = feature_maps(others)
    tile, other = channels(figure, 2, 4, 4)
    assert (tile == bad(GREY)).all() and not (other == bad(GREY)).all(-1).any()
    assert channel_captions(figure) == [f"0: all {value:.2g}", "1"]


def test_a_dead_channel_is_loud():
    figure = feature_maps(torch.stack([torch.zeros(4, 4), torch.rand(4, 4)]))
    dead, other = channels(figure, 2, 4, 4)
    assert (dead == bad(ZERO)).all() and not (other == bad(ZERO)).all(-1).any()
    assert channel_captions(figure) == ["0: all 0", "1"]


def test_of_a_constant_map_what_is_not_finite_is_still_seen():
    maps = torch.zeros(1, 4, 4)
    maps[0, 0, 0] = math.nan
    figure = feature_maps(maps)
    (tile,) = channels(figure, 1, 4, 4)
    assert (tile[0, 0] == bad(NONFINITE)).all() and (tile[1:] == bad(ZERO)).all()
    assert channel_captions(figure) == ["0: 1 not finite"]


def test_a_map_of_one_pixel_is_not_called_constant():
    assert channel_captions(feature_maps(torch.rand(3, 1, 1))) == ["0", "1", "2"]


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite_is_seen_and_counted(sign):
    maps = torch.rand(2, 8, 8) * sign
    maps[1, 0, 0], maps[1, 3, 4], maps[1, 7, 7] = math.nan, math.inf, -math.inf
    figure = feature_maps(maps)
    _, tile = channels(figure, 2, 8, 8)
    found = (tile == bad(NONFINITE)).all(-1)
    assert found.sum() == 3 and found[0, 0] and found[3, 4] and found[7, 7]
    assert channel_captions(figure) == ["0", "1: 3 not finite"]


def test_a_map_far_from_zero_is_no_single_colour():
    (tile,) = channels(feature_maps(100 + torch.rand(1, 20, 20)), 1, 20, 20)
    assert len(np.unique(tile.reshape(-1, 4), axis=0)) > 50


def test_one_broken_pixel_of_a_large_map_is_not_thinned_away():
    maps = torch.rand(1, 500, 300)
    maps[0, 333, 222] = math.nan
    pixels = feature_maps(maps).axes[0].images[0].get_array()
    assert max(pixels.shape) < 150 and (pixels == bad(NONFINITE)).all(-1).sum() == 1


def test_nothing_is_drawn_between_maps():
    pixels = feature_maps(torch.rand(3, 8, 8)).axes[0].images[0].get_array()
    assert (pixels[..., 3] > 0).sum() == (1 + 3) * 8 * 8


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]),
    st.integers(1, 20),
)
def test_any_shape_and_dtype_is_drawn(shape, dtype, most):
    x = (torch.randn(shape) * 3).to(dtype)
    figure = feature_maps(x, most=most)
    count = min(most, shape[-3]) + (shape[-3] > 1)
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
        ("maps", TypeError, "x must be a tensor, .* a dict of these, a capture or one layer of it, not 'maps'"),
        ({"a": 1}, ValueError, r"x has no feature maps \[N, C, H, W\]: it holds 'a' \[\]; capture a convolution"),
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
    assert ((tile == bad(NONFINITE)).all(-1) == np.triu(np.ones((4, 4)), 1)).all()


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


# --- results of our own verbs


def test_the_mean_of_all_channels_comes_first():
    maps = torch.rand(40, 6, 5)
    figure = feature_maps(maps)
    assert captions(figure) == ["mean", *map(str, range(32))]
    mean = tiles(figure, 33, 6, 5)[0]
    assert (mean == channels(feature_maps(maps.double().mean(0)[None]), 1, 6, 5)[0]).all()
    assert captions(feature_maps(maps[:1])) == ["0"], "of one channel, it would be the same picture"
    maps[39, 2, 2] = math.nan
    assert captions(feature_maps(maps))[0] == "mean: 1 not finite"


def test_a_layer_of_a_capture_is_drawn_as_its_output_is():
    net = resnet18(num_classes=5).eval()
    with torchhook.capture(net, "conv1", "layer1", "fc") as acts:
        net(torch.randn(2, 3, 64, 64))
    ours, plain = feature_maps(acts["layer1"]), feature_maps(acts["layer1"].output)
    assert (ours.axes[0].images[0].get_array() == plain.axes[0].images[0].get_array()).all()
    assert ours.axes[0].get_title() == "layer1 (Sequential), first of 2 samples, 32 of 64 channels"
    assert ours.axes[0].get_xlabel() == "16 × 16 positions, each map on its own scale"
    with pytest.raises(ValueError, match=r"x of 'fc' must be \[C, H, W\] or \[N, C, H, W\], not of shape \[2, 5\]"):
        feature_maps(acts["fc"])


def test_a_capture_is_drawn_a_row_for_each_layer_with_maps():
    net = resnet18(num_classes=5).eval()
    with torchhook.capture(net, "conv1", "layer1", "avgpool", "fc") as acts:
        net(torch.randn(2, 3, 64, 64))
    figure = feature_maps(acts)
    titles = [ax.get_title() for ax in figure.axes]
    assert [title.split(",")[0] for title in titles] == ["conv1 (Conv2d)", "layer1 (Sequential)"]
    assert all(title.endswith("first of 2 samples, 11 of 64 channels") for title in titles)
    for ax, path, side in zip(figure.axes, ("conv1", "layer1"), (32, 16), strict=True):
        alone = channels(feature_maps(acts[path], most=11), 11, side, side)
        mosaic = Mosaic.of(torch.zeros(12, side, side), columns=12)
        for number, tile in enumerate(alone, start=1):
            top, left = mosaic.corner(number)
            assert (ax.images[0].get_array()[top : top + side, left : left + side] == tile).all()
    with pytest.raises(ValueError, match="ax has room for one layer, and x has 2: pass one of them"):
        feature_maps(acts, ax=figure.axes[0])
    with torchhook.capture(net, "fc") as flat:
        net(torch.randn(2, 3, 64, 64))
    with pytest.raises(
        ValueError, match=r"x has no feature maps \[N, C, H, W\]: it holds 'fc' \[2, 5\]; capture a conv"
    ):
        feature_maps(flat)


def test_many_layers_are_drawn_in_part_from_the_first_to_the_last():
    figure = feature_maps({f"layer{number}": np.random.default_rng(0).random((3, 4, 4)) for number in range(100)})
    assert len(figure.axes) == 16 and figure.get_suptitle() == "16 of 100 layers"
    assert figure.axes[0].get_title() == "layer0" and figure.axes[-1].get_title() == "layer99"


def test_what_a_hook_manager_keeps_is_drawn_by_name():
    net = resnet18(num_classes=5).eval()
    manager = torchhook.HookManager(net, max_size=2)
    manager.add("conv1")
    for _ in range(2):
        net(torch.randn(1, 3, 32, 32))
    drawn = feature_maps(manager.get_all()).axes[0].images[0].get_array()
    assert (drawn == feature_maps(manager.get("conv1")[-1]).axes[0].images[0].get_array()).all()


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return torchhook.explain.attention(torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 16))


def test_an_attention_that_was_seen_is_drawn_as_its_weights_are(seen):
    ours, plain = attention(seen[0], tokens="abcde"), attention(seen[0].weights, tokens="abcde")
    assert (ours.axes[0].images[0].get_array() == plain.axes[0].images[0].get_array()).all()
    assert ours.axes[0].get_title() == "layers.0.self_attn, first of 2 samples"
    assert (ours.axes[0].get_xlabel(), ours.axes[0].get_ylabel()) == ("key", "query")
    assert ours.axes[1].get_ylabel() == "weight"
    with pytest.raises(TypeError, match="maps must be .* or what torchhook.explain.attention saw, not 'abc'"):
        attention("abc")


def test_all_attentions_are_drawn_a_row_each(seen):
    rows = [ax for ax in attention(seen).axes if ax.get_title()]
    assert [ax.get_title().split(",")[0] for ax in rows] == ["layers.0.self_attn", "layers.1.self_attn"]
    mosaic = Mosaic.of(torch.zeros(4, 5, 5), columns=4)
    for ax, call in zip(rows, seen, strict=True):
        alone = tiles(attention(call), 4, 5, 5)
        for number, tile in enumerate(alone):
            top, left = mosaic.corner(number)
            assert (ax.images[0].get_array()[top : top + 5, left : left + 5] == tile).all()
    assert len([ax for ax in attention(seen["layers.1.**"]).axes if ax.get_title()]) == 1
    with pytest.raises(ValueError, match="ax has room for one layer, and maps has 2"):
        attention(seen, ax=rows[0])


@pytest.fixture(scope="module")
def heat():
    torch.manual_seed(0)
    net = resnet18(num_classes=5).eval()
    return torchhook.explain.grad_cam(net, torch.rand(2, 3, 64, 48), target=[1, 3])


def test_heat_without_an_image_is_drawn_alone_in_pixels_of_the_input(heat):
    figure = cam(heat)
    first, second = [ax for ax in figure.axes if ax.get_title()]
    assert (first.get_title(), second.get_title()) == ("1", "3")
    for ax, wanted in zip((first, second), heat.maps, strict=True):
        (drawn,) = ax.images
        assert np.allclose(drawn.get_array(), wanted) and drawn.get_extent() == [-0.5, 47.5, 63.5, -0.5]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("x (pixels)", "y (pixels)")
    assert {ax.get_ylabel() for ax in figure.axes if not ax.get_title()} == {"grad_cam of layer4"}
    assert cam(torch.rand(3, 4)).axes[0].get_xlabel() == "x (cells)"


@pytest.mark.parametrize("swapped", [False, True])
def test_heat_over_its_images(heat, swapped):
    images = torch.rand(2, 3, 64, 48)
    figure = cam(heat, images) if swapped else cam(images, heat)
    over = [ax for ax in figure.axes if ax.get_title()]
    for ax, image, wanted in zip(over, images, heat.maps, strict=True):
        plain = cam(image, wanted).axes[0].images
        assert all((one.get_array() == other.get_array()).all() for one, other in zip(ax.images, plain, strict=True))
    assert len(cam(images[0], heat[0]).axes[0].images) == 2
    with pytest.raises(ValueError, match="pass 2 images, one per sample, not 1"):
        cam(images[:1], heat)
    with pytest.raises(ValueError, match="ax has room for one map, and heat has 2: pass one of them, such as heat"):
        cam(images, heat, ax=over[0])
    with pytest.raises(TypeError, match="heat must be .* or a result of torchhook.explain such as grad_cam, not 'hot'"):
        cam("hot")
