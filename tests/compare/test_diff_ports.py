"""`diff` of models that were written anew, with other names, and of models whose shapes rounding decides."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from torchhook.compare.diff.verb import diff
from torchhook.core.site import Site

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = 6
IMAGES = torch.linspace(-2, 2, 4 * 3 * 64).reshape(4, 3, 8, 8).sin()


def convolution():
    return nn.Conv2d(WIDE, WIDE, 3, padding=1, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = convolution(), nn.BatchNorm2d(WIDE)
        self.conv2, self.bn2 = convolution(), nn.BatchNorm2d(WIDE)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class Original(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 3, padding=1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.fc = nn.Linear(WIDE, 5)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(x.mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.body = nn.Sequential(layer.conv1, layer.bn1, nn.ReLU(), layer.conv2, layer.bn2)
        self.scale = self.before = 1.0

    def forward(self, x):
        return torch.relu(x + self.scale * self.body(self.before * x))


class Ported(nn.Module):
    def __init__(self, original):
        super().__init__()
        self.head, self.first = original.fc, original.stem
        self.stage = nn.Sequential(*map(Stage, original.layers))

    def forward(self, x):
        return self.head(self.stage(self.first(x)).mean((2, 3)))


@pytest.fixture
def models():
    torch.manual_seed(0)
    a = Original()
    a(IMAGES)
    a.eval()
    return a, Ported(copy.deepcopy(a))


def test_a_port_with_other_names_does_not_part(models):
    a, b = models
    found = diff(a, b, IMAGES)
    assert found.same
    assert [one.path for one in found.unmatched if one.model == "a"] == [f"layers.{i}.relu" for i in range(3)]
    assert diff(a, b.bfloat16(), IMAGES, lambda y: y.float().square().mean()).same


@pytest.mark.parametrize("number", range(3))
def test_code_of_a_block_by_another_name_is_blamed_on_that_block(models, number):
    a, b = models
    b.stage[number].scale = 1.01
    found = diff(a, b, IMAGES)
    assert (found.first, found.module) == (Site(f"layers.{number}"), f"layers.{number}")
    assert f"in the code of layers.{number} (Layer, stage.{number} in b)" in found.verdict
    assert diff(b, a, IMAGES).module == f"stage.{number}"


def test_code_before_a_part_of_such_a_block_is_blamed_on_what_is_between(models):
    a, b = models
    b.stage[1].before = 1.01
    found = diff(a, b, IMAGES)
    assert (found.first, found.module) == (Site("layers.1.conv1", "input"), "layers.1")
    between = "between the input of layers.1 (Layer, stage.1 in b) and the input of layers.1.conv1"
    assert f"a and b diverge {between}" in str(found)
    assert "where b runs stage.1.body (Sequential), which has no match" in found.verdict


def test_a_block_that_does_what_its_caller_did_is_no_difference():
    class Bare(nn.Module):
        def __init__(self, adds):
            super().__init__()
            self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
            self.adds = adds

        def forward(self, x):
            y = self.down(self.up(x).tanh())
            return x + y if self.adds else y

    class Adding(nn.Module):
        def __init__(self, name, adds):
            super().__init__()
            self.name, self.adds = name, adds
            self.add_module(name, Bare(not adds))
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            y = getattr(self, self.name)(x)
            return self.head(x + y if self.adds else y)

    a, b = Adding("inner", True), Adding("outer", False)
    b.load_state_dict({name.replace("inner", "outer"): value for name, value in a.state_dict().items()})
    assert diff(a, b.double(), torch.randn(4, 6)).same


def test_a_stride_by_another_name_is_blamed_on_its_convolution():
    a = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    b = nn.Sequential(OrderedDict((f"k{number}", module) for number, module in enumerate(copy.deepcopy(a))))
    b.k0.stride = (2, 2)
    found = diff(a, b, IMAGES)
    assert (found.first, found.module) == (Site("0"), "0")
    assert "at 0 (Conv2d, k0 in b): its output is not of the same shape" in found.verdict


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_that_came_through_a_coarser_parameter_may_be_as_coarse(dtype):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16) + 0.5)

        def forward(self, x):
            return self.weight * x.float()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.same, self.norm, self.head = nn.Linear(16, 16), nn.Identity(), Norm(), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.norm(self.same(self.fc(x).float())).to(self.head.weight.dtype))

    torch.manual_seed(0)
    a = Model()
    found = diff(a, copy.deepcopy(a).to(dtype), torch.randn(8, 16), lambda y: y.float().square().mean())
    assert found.same, found.verdict


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.some = 2

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.some)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, row, expert(x[row]) * weights[row, column, None])
        return y


def routed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 4)), torch.randn(400, 16)


@pytest.mark.parametrize("loss", [None, lambda y: y.float().square().mean()])
def test_a_router_that_rounding_decides_is_no_difference(loss):
    for seed in range(3):
        a, x = routed(seed)
        found = diff(a, copy.deepcopy(a).bfloat16(), x, loss)
        assert found.same, found.verdict
        said = "rounding alone changes the shapes inside 1 (Experts)"
        assert [note for note in found.notes if note.startswith(said)] == [*found.notes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_that_chooses_otherwise_is_blamed_itself(dtype):
    a, x = routed()
    b = copy.deepcopy(a)
    b[1].some = 3
    found = diff(a, b.to(dtype), x)
    assert (found.first, found.module) == (Site("1.experts.0", "input"), "1"), found.verdict
    b = copy.deepcopy(a)
    b[1].router.weight.data *= 1.1
    assert diff(a, b.to(dtype), x).first == Site("1.router")
    b = copy.deepcopy(a)
    b[2].weight.data *= 1.1
    assert diff(a, b.to(dtype), x).first == Site("2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_module_is_no_container():
    a = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    b = torch.ao.quantization.quantize_dynamic(copy.deepcopy(a), {nn.Linear}, dtype=torch.qint8)
    a[2].weight.data *= 2
    assert diff(b, a, torch.randn(5, 6)).verdict.startswith("a and b diverge at 2 (Linear): its output")
