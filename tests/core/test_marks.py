import pytest
import torch
from torch import nn

from torchhook import SelectionError, capture, glob, mark, marked, of_type
from torchhook.core import marks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = mark(self.fc(x), "pre")
        hidden = self.doubled(hidden)
        hidden += x
        return mark(hidden, "post")

    def doubled(self, hidden):
        return mark((lambda: hidden * 2)(), "twice")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return mark({"x": x}, "end")["x"]


def test_marks_are_found_by_name_glob_path_and_owner():
    net = Net()
    for queries, expected in (
        ([marked("pre")], ["blocks.0:pre", "blocks.1:pre"]),
        ([marked("p*")], ["blocks.0:pre", "blocks.0:post", "blocks.1:pre", "blocks.1:post"]),
        (["blocks.1:twice"], ["blocks.1:twice"]),
        (["blocks.*:twice", "blocks.0.fc"], ["blocks.0.fc", "blocks.0:twice", "blocks.1:twice"]),
        ([marked("*") & glob("blocks.0")], ["blocks.0:pre", "blocks.0:twice", "blocks.0:post"]),
        ([marked("*") & ~of_type(Block)], [":end"]),
    ):
        with capture(net, *queries) as acts:
            net(torch.ones(1, 4))
        assert list(acts) == expected


def test_marked_values_and_gradients_are_right():
    net = Net()
    x = torch.randn(2, 4)
    with capture(net, marked("twice"), marked("end"), "blocks.0.fc", grads=True) as acts:
        plain = net(x)
        plain.sum().backward()
    assert torch.equal(acts["blocks.0:twice"].output, 2 * acts["blocks.0.fc"].output)  # later overwritten by +=
    assert torch.equal(acts[":end"].grad["x"], torch.ones(2, 4))
    assert torch.equal(acts["blocks.0.fc"].grad, acts["blocks.0:twice"].grad * 2)
    assert acts["blocks.0:twice"].module_class is Block
    assert torch.equal(net(x), plain)


def test_a_mark_that_never_came_raises_at_the_end_of_the_scope():
    net = Net()
    with (
        pytest.raises(
            SelectionError,
            match="no value marked 'prre' was seen in any pass; .*: ':end', 'blocks.0:post'",
        ),
        capture(net, marked("prre")),
    ):
        net(torch.ones(1, 4))
    with pytest.raises(SelectionError, match="no forward called torchhook.mark"):
        with capture(nn.Sequential(nn.ReLU()), marked("x")) as acts:
            acts._session.model(torch.ones(1))
    with pytest.raises(ZeroDivisionError), capture(net, marked("prre")):
        1 / 0  # noqa: B018
    assert marks._listeners == ()


def test_nobody_listens_afterwards_and_other_models_are_not_heard():
    net, other = Net(), Net()
    acts = capture(net, marked("pre")).open()
    assert len(marks._listeners) == 1
    other(torch.ones(1, 4))
    assert len(acts) == 0
    net(torch.ones(1, 4))
    assert len(acts) == 2
    del acts
    assert marks._listeners == ()
    value = object()
    assert mark(value, "x") is value


def test_stop_cannot_wait_for_marks():
    with pytest.raises(ValueError, match="stop=True cannot wait for marks"):
        capture(Net(), marked("pre"), stop=True).open()
