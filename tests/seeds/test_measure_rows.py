"""The rows of statistics and of what they cost: C17, C25, B02, B17."""

import copy
import gc
import math
import pickle
import re
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import nn
from torch.nn import functional as F

from specimens import hooks_of, resnet18
from torchhook import Histogram, Monitor, Stat, capture, measure


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


def occupied(values):
    """How many values are in each bin, four of equal width per octave and sign, counted one by one."""
    fraction, exponent = np.frexp(values)
    quarter = np.floor((np.abs(fraction) * 2 - 1) * 4)
    return list(Counter(zip(np.sign(values), exponent, quarter, strict=True)).values())


def test_c17_entropy_and_shape_of_the_features_of_each_layer():
    net, x = resnet18(num_classes=3), torch.randn(4, 3, 32, 32)
    net.fc = nn.Sequential(net.fc, nn.Hardtanh(2.0, 3.0))  # whose outputs are the same
    nn.init.zeros_(net.fc[0].weight), nn.init.zeros_(net.fc[0].bias)
    with capture(net, keep=None) as acts, measure(net, stats=("moments", "histogram")) as stats:
        net(x)
        net(x[:2])
    table = {line["path"]: line for line in stats.table("list")}
    for path in acts:
        values = torch.cat([output.flatten() for output in acts[path].outputs]).numpy()
        bins, line = stats[path].histogram(), table[path]
        counts = occupied(values)
        assert line["entropy"] == bins.entropy == pytest.approx(entropy(counts), rel=1e-6, abs=1e-12), path
        most = entropy(np.ones(len(counts)))
        share = pytest.approx(entropy(counts) / most if most else 0.0, rel=1e-6)
        assert line["normalised_entropy"] == bins.normalised_entropy == share
        assert 0 <= bins.normalised_entropy <= 1
        assert stats[path].shape == line["shape"] == tuple(acts[path].output.shape)
    assert stats["conv1"].shape == (2, 64, 16, 16)  # of the latest pass
    assert stats["fc.1"].histogram().entropy == 0 < stats["conv1"].histogram().entropy


def test_c17_entropy_of_nothing_and_of_equally_full_bins():
    assert math.isnan(Histogram().of(torch.tensor([math.nan])).entropy)
    assert math.isnan(Histogram().of(torch.tensor([math.inf])).normalised_entropy)
    spread = Histogram().of(torch.tensor([-8.0, -2.0, 1.0, 4.0]))
    assert spread.entropy == pytest.approx(math.log(4)) and spread.normalised_entropy == pytest.approx(1)


def test_c17_shapes_of_gradients_parameters_and_updates():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    everything = {"grads": True, "params": True, "param_grads": True, "updates": True}
    with measure(net, optimizer=optimizer, **everything) as stats:
        net(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    assert stats["0", "grad_output"].shape == stats["1"].shape == (5, 3)
    for port in ("param", "param_grad", "step_grad", "update"):
        assert stats["0.weight", port].shape == (3, 4), port
    twin = pickle.loads(pickle.dumps(stats.snapshot()))
    assert twin["1"].shape == (5, 3)


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


def trained_by_hand(net, x, y, steps, rate):
    """What flows in a training, by plain hooks and plain arithmetic: values by path and port, a tensor a step."""
    seen = defaultdict(list)

    def keep(path):
        def hook(module, args, output):
            seen[path, "output"].append(output.detach().clone())
            output.register_hook(lambda gradient: seen[path, "grad_output"].append(gradient.clone()))

        return hook

    leaves = {path: module for path, module in net.named_modules() if not list(module.children())}
    handles = [module.register_forward_hook(keep(path)) for path, module in leaves.items()]
    for _ in range(steps):
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for path, parameter in net.named_parameters():
            before = parameter.detach().clone()
            parameter.data -= rate * parameter.grad
            seen[path, "param"].append(before)
            seen[path, "param_grad"].append(parameter.grad.clone())
            seen[path, "update"].append(parameter.detach() - before)
            seen[path, "update_ratio"].append((rate * parameter.grad.norm() / before.norm()).reshape(1))
    for handle in handles:
        handle.remove()
    return {place: torch.cat([part.flatten() for part in parts]).double() for place, parts in seen.items()}


def test_b02_every_activation_gradient_weight_and_update_of_a_training():
    net, x, y = resnet18(num_classes=3), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    expected = trained_by_hand(copy.deepcopy(net), x, y, steps=3, rate=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wanted = dict.fromkeys(("grads", "params", "param_grads", "updates"), True)
    with measure(net, **wanted, optimizer=optimizer, stats=("moments", NearZero())) as stats:
        for _ in range(3):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {port for _, port in expected} < {port for _, port in stats}
    for (path, port), values in expected.items():
        said, finite = stats[path, port], values.isfinite()  # the ratio of a bias that was zero is infinite
        assert (said.count, said.nonfinite) == (values.numel(), int((~finite).sum())), (path, port)
        values = values[finite]
        found = said.mean, said.std, said.min, said.max, said.abs_mean, said.l2
        exact = values.mean(), values.std(), values.min(), values.max(), values.abs().mean(), values.norm()
        assert found == pytest.approx(
            [float(number) for number in exact], rel=1e-3, abs=1e-4 * float(values.abs().max())
        ), (path, port)
        if port in ("output", "grad_output"):
            assert said["near_zero"] == pytest.approx((values.abs() < 1e-3).double().mean().item(), abs=1e-3)
        if port == "param_grad":
            assert stats[path, "step_grad"].l2 == pytest.approx(said.l2, rel=1e-6)


def in_seconds(model, steps, **watching):
    """The processor time of some steps of a training, which is watched if it is said how."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = Monitor(model, optimizer, every=1, to=[], **watching) if watching else None
    x, begun = torch.randn(64, 64), time.process_time()
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(loss)
    return time.process_time() - begun, monitor


@pytest.mark.usefixtures("one_thread")
def test_b17_watching_costs_what_was_asked_for():
    """Steps of half a millisecond, each of which would be measured: without a price, several times as long."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    in_seconds(model, 100)
    plain, _ = in_seconds(model, 4000)
    watched, monitor = in_seconds(model, 4000, price=0.02)
    monitor.close()
    assert watched - plain < 0.02 * plain + 1.0  # a short training may overdraw it by a second
    all_measured, unlimited = in_seconds(model, 200, price=None)
    unlimited.close()
    assert (watched - plain) / 4000 < 0.2 * (all_measured / 200 - plain / 4000)
    assert re.fullmatch(r"measured 1 step in [\d,]+ to stay under 2 %", monitor.report.about["watching"])
    assert len(monitor.report.losses) == 4000
