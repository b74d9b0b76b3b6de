"""`prune.importance`: each score by its definition, the same however the data is batched, and nothing touched."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook.core.batch import Batch
from torchhook.core.errors import SelectionError
from torchhook.prune.score_points import ModuleCall, score_points
from torchhook.prune.scores import importance

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("taylor", "fisher", "l1", "activation", "apoz", "wanda")


class Net(nn.Module):
    """A norm and an activation in place behind one layer, an addition in place behind the other, and a second call."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        a = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(a))
        out += a
        return self.fc(self.relu(out).mean((2, 3)))


@pytest.fixture
def net():
    net = Net()
    for bn in (net.bn1, net.bn2):
        nn.init.normal_(bn.weight, 1.0, 0.5)
        nn.init.normal_(bn.bias)
        bn.running_var.uniform_(0.5, 2.0)
        bn.running_mean.normal_()
    return net


def data(n=20):
    return torch.randn(n, 2, 5, 5), torch.randint(0, 4, (n,))


def by_hand(net, x, y):
    """Each sample's Σ a · dL/da at the score points of all three layers, a sample at a time."""
    net.eval()
    found = []
    for xi, yi in zip(x.split(1), y.split(1), strict=True):
        a = F.relu(net.bn1(net.conv1(xi)))
        b = net.bn2(net.conv2(a))
        out = net.fc(F.relu(a + b).mean((2, 3)))
        gradients = torch.autograd.grad(F.cross_entropy(out, yi), (a, b, out))
        found.append([(v * g).reshape(v.shape[1], -1).sum(1) for v, g in zip((a, b, out), gradients, strict=True)])
    return {
        path: torch.stack(rows) for path, rows in zip(("conv1", "conv2", "fc"), zip(*found, strict=True), strict=True)
    }


def test_taylor_and_fisher_are_what_each_sample_would_lose_to_first_order(net):
    x, y = data()
    expected = by_hand(net, x, y)
    taylor, fisher = (importance(net, [(x, y)], by, F.cross_entropy) for by in ("taylor", "fisher"))
    assert list(taylor) == ["conv1", "conv2", "fc"] and taylor.n == 20
    for path, rows in expected.items():
        torch.testing.assert_close(taylor[path], rows.abs().mean(0).double(), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(fisher[path], rows.square().mean(0).double() / 2, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("by", ALL)
def test_however_the_data_is_cut_into_batches(net, by):
    x, y = data()
    whole = importance(net, [(x, y)], by)
    for size in (1, 7):
        parts = importance(net, list(zip(x.split(size), y.split(size), strict=True)), by)
        for path in whole:
            torch.testing.assert_close(parts[path], whole[path], rtol=1e-4, atol=1e-7)


def test_l1_wanda_activation_and_apoz_by_their_formulas(net):
    x, y = data()
    net.eval()
    with torch.no_grad():
        a = F.relu(net.bn1(net.conv1(x)))
        b = net.bn2(net.conv2(a))
    scale = net.bn2.weight.abs() / (net.bn2.running_var + net.bn2.eps).sqrt()
    weights = net.conv2.weight.detach().abs()  # 6 × 2 × 3 × 3, in 3 groups
    sizes = a.square().mean((0, 2, 3)).sqrt().view(3, 1, 2).expand(3, 2, 2).reshape(6, 2, 1, 1)
    expected = {
        "l1": weights.sum((1, 2, 3)) * scale,
        "wanda": (weights * sizes).sum((1, 2, 3)) * scale,
        "activation": b.abs().mean((0, 2, 3)),
        "apoz": (b > 0).float().mean((0, 2, 3)),
    }
    for by, scores in expected.items():
        torch.testing.assert_close(
            importance(net, [(x, y)], by)["conv2"].float(), scores.detach(), rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(importance(net, [(x, y)], "apoz")["conv1"].float(), (a > 0).float().mean((0, 2, 3)))


def test_l1_of_a_transposed_convolution_in_groups():
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2)
    with torch.no_grad():
        for channel in range(6):  # inputs × outputs of a group × kernel
            group, number = divmod(channel, 3)
            layer.weight[2 * group : 2 * group + 2, number] = channel + 1.0
    found = importance(nn.Sequential(layer), [torch.ones(1, 4, 5)], "l1")
    assert found["0"].tolist() == [6.0 * (channel + 1) for channel in range(6)]
    assert found.n == 0


@pytest.mark.parametrize("by", ["taylor", "fisher", "l1", "activation", "apoz", "wanda"])
def test_a_channel_that_a_batch_norm_mutes_is_worth_nothing(net, by):
    """Torch-Pruning's Taylor score does not see the norm."""
    with torch.no_grad():
        net.bn1.weight[3] = net.bn1.bias[3] = 0
        net.conv1.weight[3] = 100
    found = importance(net, [data()], by)["conv1"]
    assert found[3] == 0 and (found > 0).sum() >= 4


def test_nothing_of_the_model_is_touched(net):
    x, y = data()
    net.train()
    net.bn2.eval()
    net.conv1.weight.requires_grad_(False)
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    hooks, state, modes = (
        hooks_of(net),
        {k: v.clone() for k, v in net.state_dict().items()},
        [m.training for m in net.modules()],
    )
    torch.manual_seed(5)
    expected = torch.rand(1)
    for by in ALL:
        torch.manual_seed(5)
        importance(net, [(x, y)], by)
        assert torch.rand(1) == expected
    with pytest.raises(ZeroDivisionError):
        importance(net, [(x, y)], loss=lambda output, target: 1 / 0)
    assert hooks_of(net) == hooks and [m.training for m in net.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert net.fc.weight.grad.eq(1).all() and net.fc.bias.grad is None and not net.conv1.weight.requires_grad


def test_frozen_models_no_grad_and_inference_mode_around(net):
    x, y = data()
    expected = importance(net, [(x, y)])["conv1"]
    net.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(importance(net, [(x, y)])["conv1"], expected)
    with torch.inference_mode():
        assert torch.equal(importance(net, [(x, y)])["conv1"], expected)


def test_where_channels_come_out(net):
    x, _ = data()
    found = score_points(net.eval(), Batch.of(x))
    assert found.chains[ModuleCall("conv1", 0)] == ("conv1", "bn1", "relu")
    assert found.chains[ModuleCall("conv2", 0)] == ("conv2", "bn2")  # then something else is added, in place
    assert found.norms == {"conv1": [net.bn1], "conv2": [net.bn2], "fc": [None]}


def test_what_goes_two_ways_comes_out_before_that():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.relu, self.tanh, self.sigmoid = nn.Linear(3, 3), nn.ReLU(), nn.Tanh(), nn.Sigmoid()

        def forward(self, x):
            x = self.fc(x)
            return self.relu(x) + self.tanh(x) + self.sigmoid(x)

    assert score_points(Fork(), Batch.of(torch.ones(1, 3))).chains == {ModuleCall("fc", 0): ("fc",)}


def test_a_layer_that_is_called_twice_has_one_score():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    found = importance(model, [(x, y)], "taylor")
    first = torch.tanh(layer(x))
    second = layer(first)
    one, two = torch.autograd.grad(F.mse_loss(second, y), (first, second))
    expected = ((first * one + second * two) * 6).abs().mean(0)
    torch.testing.assert_close(found["0"], expected.double(), rtol=1e-4, atol=1e-7)
    assert list(found) == ["0"]


def test_execution_order_some_layers_and_mappings():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(3, 1), nn.Linear(2, 3)

        def forward(self, x):
            return self.last(self.first(x))

    batch = {"x": torch.randn(4, 2)}
    assert list(importance(Backwards(), [batch], "wanda")) == ["first", "last"]
    assert list(importance(Backwards(), [batch], sites="last", loss=lambda out, _: out.square().mean())) == ["last"]
    found = importance(Backwards(), [batch], "l1")
    assert found.table("list")[0].keys() == {"path", "channel", "score"} and "<td>first</td>" in found._repr_html_()


def test_what_is_refused(net):
    x, y = data(4)
    with pytest.raises(ValueError, match="by must be one of 'taylor'"):
        importance(net, [(x, y)], by="magnitude")
    with pytest.raises(ValueError, match="loader has no batches"):
        importance(net, [])
    with pytest.raises(
        TypeError, match="loader must be a tensor, a tuple or dict of them, or an iterable of such batches"
    ):
        importance(net, 7)
    with pytest.raises(ValueError, match="cannot guess a loss: .*; pass loss="):
        importance(net, [x])
    with pytest.raises(SelectionError, match="none of the selected modules is a convolution"):
        importance(net, [(x, y)], sites="relu")
    with pytest.raises(ValueError, match="does not depend on any layer"):
        importance(net, [(x, y)], loss=lambda output, target: torch.tensor(1.0))
    net.conv2.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="scores of 'conv2' are not finite; torchhook.diagnose"):
        importance(net, [(x, y)], "l1")
