"""The rows of edits and of the hard places: C47, B06, B07, B08."""

import copy

import pytest
import torch
from torch import nn

from specimens import hooks_of, resnet18
from torchhook import SilentError, capture, clip_gradients, edit, edits


def parameter_hooks(model):
    return sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("limit", [{"value": 0.01}, {"norm": 10.0}])
def test_c47_gradient_clipping_by_hooks_by_value_and_by_norm(limit):
    net, x = resnet18(num_classes=3), torch.randn(4, 3, 32, 32)
    twin = copy.deepcopy(net)
    twin(x).square().sum().backward()
    with clip_gradients(net, **limit) as clip:
        net(x).square().sum().backward()
    assert parameter_hooks(net) == 0
    expected = {}
    for (path, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        if "value" in limit:
            torch.testing.assert_close(parameter.grad, other.grad.clamp(-0.01, 0.01))
            expected[path] = int(other.grad.abs().max() > 0.01)
        else:
            factor = min(1.0, 10.0 / float(other.grad.norm()))
            torch.testing.assert_close(parameter.grad, factor * other.grad)
            expected[path] = int(factor < 1)
    assert clip.counts == expected and 3 < clip.clipped == sum(expected.values())
    assert "value" in limit or clip.clipped < 60  # short gradients stay as they are
    assert f"{clip.clipped} gradients of 62 parameters" in repr(clip)


def test_c47_for_good_on_some_layers_through_accumulation_and_copies():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clip = clip_gradients(net, "1", value=0.5)
    for _ in range(3):
        net(torch.full((1, 2), 100.0)).sum().backward()
    assert clip.counts == {"1.weight": 3, "1.bias": 3} and net[1].weight.grad.abs().max() <= 1.5
    assert net[0].weight.grad.abs().max() > 1.5 and parameter_hooks(copy.deepcopy(net)) == 0
    clip.close()
    assert parameter_hooks(net) == 0
    for wrong in ({}, {"value": 1.0, "norm": 1.0}, {"value": -1.0}):
        with pytest.raises(ValueError, match="value= or norm="):
            clip_gradients(net, **wrong)
    with pytest.raises(ValueError, match="require gradients"):
        clip_gradients(net.requires_grad_(False), value=1.0)


@pytest.mark.parametrize("limit", [{"value": 0.5}, {"norm": 0.5}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_c47_gradients_that_are_not_finite_are_counted_as_such(limit, bad):
    net = nn.Linear(2, 1)
    with clip_gradients(net, **limit) as clip:
        for factor in (0.01, 100.0, bad, bad):
            (net(torch.ones(1, 2)) * torch.tensor([[factor]])).sum().backward()
    assert clip.counts == {"weight": 1, "bias": 1} and clip.clipped == 2
    assert clip.nonfinite_counts == {"weight": 2, "bias": 2} and clip.nonfinite == 4
    assert "4 not finite" in repr(clip)


def by_plain_hooks(net, x, paths, function):
    """What the model returns if a function is applied to the outputs of some modules."""
    handles = [net.get_submodule(path).register_forward_hook(lambda m, args, out: function(out)) for path in paths]
    try:
        return net(x)
    finally:
        for handle in handles:
            handle.remove()


def without_both_ends(out):
    """Without its first and its last channel."""
    out = out.clone()
    out[:, 0] = out[:, out.shape[1] - 1] = 0
    return out


def test_b06_one_selection_language_for_ablating_patching_steering_and_clipping():
    net, x = resnet18(num_classes=3).eval(), torch.randn(2, 3, 32, 32)
    before = hooks_of(net)
    with torch.no_grad():
        plain = net(x)
        with capture(net, "layer[23]") as clean:
            net(x.flip(0))
        norms = [path for path, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]
        for where, paths in (
            ("layer2", ["layer2"]),
            ("layer?.0", [f"layer{number}.0" for number in (1, 2, 3, 4)]),
            (nn.BatchNorm2d, norms),
            (lambda path, module: path == "layer3.1", ["layer3.1"]),
        ):
            for change, function in (
                (edits.ablate(channels=[0, -1]), without_both_ends),
                (edits.add(0.5), lambda out: out + 0.5),
                (edits.scale(1.5), lambda out: out * 1.5),
                (edits.clamp(min=-0.2, max=0.1), lambda out: out.minimum(out * 0 + 0.1).maximum(out * 0 - 0.2)),
            ):
                expected = by_plain_hooks(net, x, paths, function)
                with edit(net, {where: change}):
                    assert torch.equal(net(x), expected) and not torch.equal(expected, plain)
        vector = torch.randn(128, 1, 1)
        with edit(net, {"layer2": edits.add(vector, where=(slice(None), slice(3, 5)))}):  # steers two channels
            result = net(x)
        steered = vector * ((torch.arange(128) == 3) | (torch.arange(128) == 4)).view(-1, 1, 1)
        assert torch.equal(result, by_plain_hooks(net, x, ["layer2"], lambda out: out + steered))
        with edit(net, {"layer[23]": edits.patch(clean)}):
            assert torch.equal(net(x), net(x.flip(0)))  # inside, both runs are the clean one
        assert torch.equal(net(x), plain)
    assert hooks_of(net) == before


def test_b07_inside_one_full_graph_forward_and_backward():
    torch.compiler.reset()
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)), torch.randn(4, 3)
    with capture(net, grads=True) as eager:
        net(x).sum().backward()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(compiled, grads=True) as acts:
        compiled(x).sum().backward()
    for path in eager:
        torch.testing.assert_close(acts[path].output, eager[path].output)
        torch.testing.assert_close(acts[path].grad, eager[path].grad)
    torch.compiler.reset()


def test_b08_no_silent_misses():
    net = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    net.forward = lambda x: net["used"](x)
    with pytest.raises(SilentError, match="'unused'.*branch that was not taken"), capture(net, "used", "unused"):
        net(torch.ones(1, 1))
