"""Every result of `compare` fits on a screen, says how to see the rest, and is more than the name of its class."""

import pytest
import torch
from torch import nn

from torchhook import compare

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 200
SCREEN = 30  # lines


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS // 2) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    return nn.Sequential(*layers).eval()


def batches():
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=draw), torch.arange(16) % 8) for _ in range(4)]


def one_shift(model):
    return compare.shift(model[:2], batches(), batches(), "0", permutations=2)


RESULTS = {
    "cka": lambda model: compare.cka(model, None, batches()),
    "datasets": lambda model: compare.datasets(model, batches(), batches()),
    "inputs": lambda model: compare.inputs(model, torch.randn(40, 8), torch.randn(40, 8)),
    "models": lambda model: compare.models({"a": model, "b": model, "c": nn.Sequential(*model)}, torch.randn(40, 8)),
    "shift": lambda model: compare.Shifts(dict.fromkeys(map(str, range(LAYERS)), one_shift(model)), {}),
    "leakage": lambda model: compare.leakage(model, batches(), batches(), draws=2),
}


@pytest.mark.parametrize("verb", RESULTS)
def test_a_result_of_many_layers_fits_on_a_screen_and_says_how_to_see_all(verb, deep):
    result = RESULTS[verb](deep)
    text, page = repr(result), result._repr_html_()
    assert len(result.table()) >= LAYERS and len(text.splitlines()) <= SCREEN and page.count("<tr>") <= SCREEN
    assert ".table() has all" in text and ".table() has all" in page and "object at" not in text
    assert max(map(len, text.splitlines())) < 130
    parts = [*getattr(result, "rows", ()), *getattr(result, "signals", ()), *getattr(result, "layers", {}).values()]
    assert all("object at" not in repr(part) and len(repr(part)) < 2000 for part in parts[:5])


def test_a_layer_of_many_channels_is_a_line():
    model = nn.Linear(4, 900)
    (row,) = compare.inputs(model, torch.randn(40, 4), torch.randn(40, 4)).rows
    assert len(row.shifts) == 900 and repr(row) == f"the model (x2): distance {row.distance:.3g}, noise {row.noise:.2g}"


def test_a_shift_of_many_channels_fits_on_a_screen():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, 900, generator=draw)
    result = compare.shift(nn.Identity(), [x], [y], "", permutations=2)
    assert len(repr(result).splitlines()) <= SCREEN and "see .table() for all" in repr(result)
