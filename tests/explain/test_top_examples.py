"""The inputs that drive a unit most: the same as sorting the whole data set, with little in memory."""

import gc
import io
import weakref
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from specimens import hooks_of
from torchhook import SelectionError
from torchhook.explain.examples import top_examples

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """It counts how often each of its layers runs."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Dropout(0.9), nn.Linear(6, 2)
        self.ran = 0

    def forward(self, x, weight=None):
        x = self.drop(self.conv(x))
        self.ran += 1
        return self.fc(x.relu().mean((2, 3)))


def dataset(count=53):
    return torch.randn(count, 3, 16, 12)


@pytest.mark.parametrize("by", ["max", "mean"])
@pytest.mark.parametrize("size", [1, 8, 53])
def test_it_is_what_sorting_all_would_give(by, size):
    net, images = Net().train(), dataset()
    before = hooks_of(net)
    found = top_examples(net, DataLoader(images, size), "conv", [4, 1], k=5, by=by, progress=False)
    with torch.no_grad():
        maps = net.conv(images)
    for unit in (4, 1):
        flat = maps[:, unit].flatten(1)
        value, index = (flat.amax(1) if by == "max" else flat.mean(1)).sort(descending=True)
        assert [one.sample for one in found.of(unit)] == index[:5].tolist()
        assert [one.value for one in found.of(unit)] == pytest.approx(value[:5].tolist(), abs=1e-6)
        for one in found.of(unit):
            y, x = divmod(int(flat[one.sample].argmax()), 6)
            assert one.position == (y, x) and one.box == (2 * x, 2 * y, 2 * x + 2, 2 * y + 2)
            assert torch.equal(one.input, images[one.sample])
    assert [one.unit for one in found] == [4] * 5 + [1] * 5 and found.samples == 53
    assert hooks_of(net) == before and net.training and net.drop.training


def test_the_model_is_in_eval_mode_for_the_time():
    net, images = Net().train(), dataset(8)
    found = top_examples(net, [images], "drop", 0, k=8, progress=False)
    with torch.no_grad():
        assert [one.value for one in found] == sorted(net.conv(images)[:, 0].amax((1, 2)).tolist(), reverse=True)
    assert net.training and net.drop.training


def test_every_kind_of_batch():
    net, images = Net(), dataset(6)
    expected = [one.sample for one in top_examples(net, [images], "conv", 0, progress=False)]
    assert len(expected) == 6  # there are no nine
    pairs = DataLoader(TensorDataset(images, torch.zeros(6)), 4)
    for loader in (pairs, [{"x": images}], [(images,)], [[images[:3], 0], [images[3:], 0]], iter([images])):
        assert [one.sample for one in top_examples(net, loader, "conv", 0, progress=False)] == expected
    weighted = top_examples(net, [{"x": images, "weight": torch.arange(6)}], "conv", 0, k=1, progress=False)[0]
    assert weighted.input["weight"] == weighted.sample and torch.equal(weighted.input["x"], images[weighted.sample])


@pytest.mark.parametrize("stop", [True, False])
def test_the_rest_of_the_pass_is_saved(stop):
    net = Net()
    top_examples(net, dataset(40).split(10), "conv", 0, stop=stop, progress=False)
    assert net.ran == (1 if stop else 4)  # the first pass shows that the layer is called once


@pytest.mark.parametrize("by", ["max", "mean"])
def test_nan_is_passed_over(by):
    images = torch.zeros(3, 1, 1, 2)
    images[0], images[1, 0, 0, 0], images[1, 0, 0, 1], images[2] = torch.nan, torch.nan, 2.0, 1.0
    found = top_examples(nn.Sequential(nn.Identity()), [images], "0", 0, by=by, progress=False)
    assert [(one.sample, one.value) for one in found] == [(1, 2.0), (2, 1.0)] and found[0].position == (0, 1)


def test_of_equals_the_first_are_kept():
    loader = torch.ones(20, 2).split(3)
    assert [one.sample for one in top_examples(nn.Sequential(nn.ReLU()), loader, "0", 1, k=4, progress=False)] == [
        0,
        1,
        2,
        3,
    ]


def test_units_of_tokens_and_of_features():
    tokens = torch.zeros(2, 5, 3)
    tokens[1, 3, 2] = 7.0
    example = top_examples(nn.Sequential(nn.ReLU()), [tokens], "0", 2, k=1, progress=False)[0]
    assert (example.sample, example.value, example.position, example.box) == (1, 7.0, (3,), None)
    feature = top_examples(nn.Sequential(nn.ReLU()), [torch.eye(4)], "0", 2, k=1, progress=False)[0]
    assert (feature.sample, feature.position, feature.box) == (2, (), None)
    sound = torch.zeros(2, 1, 8)
    sound[1, 0, 6] = 1.0
    heard = top_examples(nn.Sequential(nn.MaxPool1d(2)), [sound], "0", 0, k=1, progress=False)[0]
    assert (heard.sample, heard.position, heard.box) == (1, (3,), None)
    last = torch.zeros(2, 3, 4, 5)  # channels in the last dimension
    last[1, 2, 1, 4] = 1.0
    assert top_examples(nn.Sequential(nn.ReLU()), [last], "0", 4, k=1, dim=-1, progress=False)[0].position == (2, 1)


def test_a_module_called_twice_wants_to_know_which_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(-self.act(x) + 1)

    loader = [torch.tensor([[0.0], [5.0]])] * 3
    with pytest.raises(ValueError, match="'act' is called 2 times in a pass; choose one with call=0 to call=1"):
        top_examples(Twice(), loader, "act", 0, progress=False)
    assert [top_examples(Twice(), loader, "act", 0, k=1, call=n, progress=False)[0].sample for n in (0, 1)] == [1, 0]
    with pytest.raises(ValueError, match="call must be 0 to 1"):
        top_examples(Twice(), loader, "act", 0, call=2, progress=False)


def test_only_what_is_among_the_best_stays_in_memory():
    batches: list[weakref.ref] = []

    def loader():
        for number in range(30):
            batch = torch.full((4, 1, 8, 8), float(number % 7))
            batches.append(weakref.ref(batch))
            yield batch

    found = top_examples(nn.Sequential(nn.ReLU()), loader(), "0", 0, k=3, progress=False)
    gc.collect()
    assert not any(batch() is not None for batch in batches)
    assert all(one.input.untyped_storage().nbytes() == 8 * 8 * 4 for one in found)
    bare = top_examples(nn.Sequential(nn.ReLU()), loader(), "0", 0, k=3, inputs=False, progress=False)
    assert [one.input for one in bare] == [None] * 3 and "<img" not in bare._repr_html_()


def test_progress_is_shown_in_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    model, file = nn.Sequential(nn.ReLU()), Terminal()
    with redirect_stderr(file):
        top_examples(model, [torch.ones(1, 1)] * 4, "0", 0)
    assert "batches" in file.getvalue() and "━" in file.getvalue() and "4/4" in file.getvalue()
    with redirect_stderr(file := Terminal()):
        top_examples(model, iter([torch.ones(1, 1)] * 3), "0", 0)
    assert "batches" in file.getvalue() and "3/?" in file.getvalue()  # how many there are is not known
    with redirect_stderr(file := io.StringIO()):
        top_examples(model, [torch.ones(1, 1)] * 4, "0", 0)
    assert not file.getvalue()  # not a terminal


def test_a_notebook_shows_the_images():
    found = top_examples(Net(), [dataset(9)], "conv", 2, k=6, progress=False)
    figure = found.figure()
    assert len(figure.axes) == 6 and figure.axes[0].patches[0].get_bbox().bounds[2:] == (2.0, 2.0)
    assert '<img alt="" src="data:image/png;base64,' in found._repr_html_()
    words = top_examples(nn.Sequential(nn.ReLU()), [torch.rand(3, 4)], "0", 2, progress=False)
    assert "<img" not in words._repr_html_()
    with pytest.raises(ValueError, match="not images"):
        words.figure()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"unit": 6}, ValueError, "unit 6 is out of range: there are 6 units, 0 to 5"),
        ({"unit": -1}, ValueError, "unit must be an integer from 0"),
        ({"unit": True}, ValueError, "unit must be"),
        ({"unit": []}, ValueError, "unit must be"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"by": "sum"}, ValueError, "'max' or 'mean'"),
        ({"loader": []}, ValueError, "loader has no batches"),
        ({"loader": 7}, TypeError, "loader must be a tensor, a tuple or dict of them, or an iterable of such batches"),
        ({"sites": "cunv"}, SelectionError, "nearest: 'conv'"),
        ({"sites": "*"}, SelectionError, "sites must be one module, but 3 match"),
    ],
)
def test_bad_input(options, error, said):
    given = {"model": Net(), "loader": [dataset(2)], "sites": "conv", "unit": 0, "progress": False} | options
    with pytest.raises(error, match=said):
        top_examples(**given)


def test_what_has_no_samples_first_is_refused():
    class Turned(nn.Module):
        def forward(self, x):
            return x.t()

    with pytest.raises(ValueError, match="returned 5×3 for 3 samples; its first dimension must be samples"):
        top_examples(nn.Sequential(Turned()), [torch.rand(3, 5)], "0", 0, progress=False)


def test_a_model_that_raises_is_as_before():
    net = Net().train()
    before = hooks_of(net)
    with pytest.raises(RuntimeError):
        top_examples(net, [torch.rand(2, 5, 4, 4)], "conv", 0, progress=False)
    assert net.training and hooks_of(net) == before
