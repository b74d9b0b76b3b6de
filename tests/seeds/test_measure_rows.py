"""The rows of statistics: C17, C25, B02."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specimens import hooks_of, resnet18
from torchhook import Stat, capture, measure


def test_c17_statistics_by_layer():
    net, x = resnet18(num_classes=3), torch.randn(4, 3, 32, 32)
    before = hooks_of(net)
    with capture(net) as acts, measure(net, stats=("moments", "quantiles")) as stats:
        net(x)
    assert hooks_of(net) == before
    assert list(dict.fromkeys(path for path, _ in stats)) == list(acts)  # in execution order
    for path in acts:  # a ReLU is called twice in a block, and works in place
        values = torch.cat([output.flatten() for output in acts[path].outputs]).double()
        said = stats[path]
        assert (said.count, said.min, said.max) == (values.numel(), values.min().item(), values.max().item())
        assert said.std == pytest.approx(values.std().item(), rel=1e-5)
        assert said.mean == pytest.approx(values.mean().item(), abs=1e-5 * said.std)
        assert said.l2 == pytest.approx(values.norm().item(), rel=1e-5)
        assert said.abs_mean == pytest.approx(values.abs().mean().item(), rel=1e-5)
        assert said.zero_fraction == (values == 0).double().mean().item()
        exact = values.quantile(0.9).item()
        assert said.quantile(0.9) == pytest.approx(exact, rel=0.25)


def test_c25_statistics_without_keeping_tensors():
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(512, 64)

    def large_tensors():
        gc.collect()
        return sum(issubclass(type(known), torch.Tensor) and known.numel() >= x.numel() for known in gc.get_objects())

    before = large_tensors()
    with measure(net, inputs=True, grads=True) as stats:
        for _ in range(5):
            net(x).sum().backward()
        assert large_tensors() <= before  # what others left behind may be freed meanwhile
    assert stats["1"].count == 5 * x.numel()


class NearZero(Stat):
    name, width = "near_zero", 2

    def update(self, state, x):
        near = (x.abs() < 1e-3).sum()
        state += torch.stack([near, near.new_tensor(x.numel())])

    def compute(self, state):
        return float(state[0] / state[1])


def test_b02_every_activation_gradient_weight_and_update_of_a_training():
    net, x, y = resnet18(num_classes=3), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wanted = dict.fromkeys(("grads", "params", "param_grads", "updates"), True)
    with measure(net, **wanted, optimizer=optimizer, stats=("moments", NearZero())) as stats:
        for _ in range(3):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    leaves = [path for path, module in net.named_modules() if not list(module.children())]
    for path in leaves:
        assert stats[path].nonfinite == stats[path, "grad_output"].nonfinite == 0
        assert 0 <= stats[path]["near_zero"] <= 1
    for path, parameter in net.named_parameters():
        for port in ("param", "param_grad", "step_grad", "update"):
            assert stats[path, port].count == 3 * parameter.numel(), (path, port)
        assert stats[path, "update"].l2 == pytest.approx(0.1 * stats[path, "step_grad"].l2, rel=1e-3)
        assert stats[path, "update_ratio"].count == 3
