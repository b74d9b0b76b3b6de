"""How layers are joined, as a monitor writes it down: what each is given comes from where it says."""

import pytest
import torch
from torch import nn

from specimens import hooks_of, resnet18
from torchhook import Monitor, Run

pytestmark = pytest.mark.usefixtures("one_thread")


def wires_of(model, x, folder, steps=2):
    """What is in the run of a training of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = hooks_of(model)
    with Monitor(model, optimizer, every=1, price=None, to=[folder]) as monitor:
        for _ in range(steps):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    assert hooks_of(model) == before
    with Run(monitor.run) as run:
        return set(run.wires)


def test_sums_of_residual_blocks_have_two_sources(tmp_path):
    wires = wires_of(resnet18(num_classes=4), torch.randn(2, 3, 32, 32), tmp_path)
    assert {("conv1", "bn1"), ("maxpool", "layer1.0.conv1"), ("avgpool", "fc")} <= wires
    assert {source for source, path in wires if path == "layer1.0.relu"} == {"layer1.0.bn1", "layer1.0.bn2", "maxpool"}
    assert {source for source, path in wires if path == "layer2.0.relu"} == {
        "layer2.0.bn1",
        "layer2.0.bn2",
        "layer2.0.downsample.1",
    }


class Odd(nn.Module):
    """Joins layers in all ways but the plain one."""

    def __init__(self):
        super().__init__()
        self.frozen, self.left, self.right, self.shared, self.unused = (nn.Linear(4, 4) for _ in range(5))
        self.last = nn.Linear(8, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.frozen(x)
        left, right = self.left(x), self.right(x)
        left.relu_()
        return self.last(torch.cat([self.shared(left), self.shared(right * 2)], 1))


def test_joins_that_have_no_module(tmp_path):
    assert wires_of(Odd(), torch.randn(3, 4), tmp_path) == {
        ("frozen", "left"),
        ("frozen", "right"),
        ("left", "shared"),
        ("right", "shared"),
        ("shared", "last"),
    }


def test_only_the_first_measured_step_is_looked_at(tmp_path):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.turns = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            self.turns += 1
            return self.two(self.one(x)) if self.turns == 1 else self.one(self.two(x))

    assert wires_of(Turning(), torch.randn(3, 4), tmp_path, steps=5) == {("one", "two")}


def test_a_compiled_model_has_none_and_is_compiled_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    assert wires_of(model, torch.randn(3, 4), tmp_path) == set()


def test_a_run_knows_shapes_and_the_classes_of_containers(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 2))
    wires_of(model, torch.randn(3, 4), tmp_path)
    with Run(next(tmp_path.iterdir())) as run:
        assert run.shapes == {"0.0": "3×8", "0.1": "3×8", "1": "3×2"}
        assert run.containers == {"0": "Sequential"}
