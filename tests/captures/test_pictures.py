"""Pictures of feature maps are PNG files as others read them."""

import io
import math

import pytest
import torch
from PIL import Image

from torchhook.captures.pictures import png


def pixels(maps):
    image = Image.open(io.BytesIO(png(maps)))
    image.verify()
    image = Image.open(io.BytesIO(png(maps)))
    assert (image.format, image.mode) == ("PNG", "L")
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width)


def test_each_map_goes_from_black_to_white_beside_the_others():
    maps = torch.stack([torch.arange(6.0).view(2, 3), -10 * torch.arange(6.0).view(2, 3)])
    assert pixels(maps).tolist() == [
        [0, 51, 102, 0, 255, 204, 153],
        [153, 204, 255, 0, 102, 51, 0],
    ]


def test_five_maps_are_a_grid_of_three_columns():
    grid = pixels(torch.stack([torch.full((4, 2), float(number)) for number in range(5)]))
    assert grid.shape == (2 * 4 + 1, 3 * 2 + 2)
    assert grid[0, 0] == 128 and grid[4].eq(0).all() and grid[:, 2].eq(0).all()  # flat maps are grey, gaps black
    assert grid[5:, 6:].eq(0).all()  # there is no sixth


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_black(value):
    maps = torch.tensor([[[value, 1.0], [2.0, 3.0]], [[value, value], [value, value]]])
    assert pixels(maps).tolist() == [[0, 0, 0, 0, 0], [128, 255, 0, 0, 0]]


def test_extreme_and_small_types():
    assert pixels(torch.tensor([[[-1e38, 1e38]]], dtype=torch.float32)).tolist() == [[0, 255]]
    assert pixels(torch.tensor([[[-1.7e308, 1.7e308]]], dtype=torch.float64)).shape == (1, 2)
    assert pixels(torch.tensor([[[1.0, 2.0]]], dtype=torch.bfloat16)).tolist() == [[0, 255]]
    assert pixels(torch.tensor([[[1, 3]]])).tolist() == [[0, 255]]


def test_large_maps_and_many_are_shown_in_part():
    assert pixels(torch.rand(1, 1000, 300)).shape == (125, 38)
    assert pixels(torch.rand(500, 2, 2)).shape == (8 * 3 - 1, 8 * 3 - 1)
    assert len(png(torch.rand(500, 500).expand(100, 500, 500))) < 1.2 * 2**20


def test_strides_are_followed():
    maps = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(pixels(maps.permute(0, 2, 1)), pixels(maps.permute(0, 2, 1).contiguous()))


def test_what_is_not_finite_has_a_colour_of_its_own_if_there_is_one():
    maps = torch.tensor([[[0.0, 1.0, math.nan], [0.5, math.inf, 0.0]]])
    image = Image.open(io.BytesIO(png(maps, "#ff7f00"))).convert("RGB")
    colours = [[image.getpixel((x, y)) for x in range(3)] for y in range(2)]
    orange, black = (255, 127, 0), (0, 0, 0)
    assert colours[0] == [black, (255, 255, 255), orange] and colours[1][1:] == [orange, black]
