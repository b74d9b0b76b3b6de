import pytest
import torch
from torch import nn

from specimens import InPlace, Shared, resnet18
from torchhook import FeatureExtractor, SelectionError


def test_features_are_right_under_in_place_ops_and_carry_their_graph():
    net = InPlace().eval()
    x = torch.randn(1, 3, 4, 4)
    features = FeatureExtractor(net, ["conv", "norm"], stop=False)(x)
    assert torch.equal(features["norm"], net.norm(net.conv(x)))
    features["norm"].sum().backward()
    assert net.conv.weight.grad is not None


def test_one_feature_depends_on_another():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    features = FeatureExtractor(net, ["0", "1"])(torch.ones(1, 2))
    (grad,) = torch.autograd.grad(features["1"].sum(), features["0"])
    assert torch.equal(grad, net[1].weight.sum(0, keepdim=True))


def test_equal_to_torchvisions_extractor():
    from torchvision.models.feature_extraction import create_feature_extractor

    net = resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    ours = FeatureExtractor(net, ["layer1", "layer3.1", "avgpool"])(x)
    theirs = create_feature_extractor(net, ["layer1", "layer3.1.relu_1", "avgpool"])(x)
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))


def test_queries_several_calls_and_bad_layers():
    net = Shared()
    features = FeatureExtractor(net, [nn.Linear, "relu"], stop=False)(torch.ones(1, 4))
    assert list(features) == ["first", "relu", "second"] and features["second"] is features["first"]
    assert len(FeatureExtractor(net, ["relu"], stop=False)(torch.ones(1, 4))["relu"]) == 2
    with pytest.raises(TypeError, match="layers must be a list"):
        FeatureExtractor(net, "relu")
    with pytest.raises(SelectionError, match="'reluu'; nearest: 'relu'"):
        FeatureExtractor(net, ["reluu"])
    with pytest.raises(ValueError, match="layers is empty"):
        FeatureExtractor(net, [])


def test_it_is_a_module_like_any_other():
    net = nn.Sequential(FeatureExtractor(resnet18(), ["layer2"]), nn.Identity())
    assert net.eval()[0].model.training is False
    assert next(net.double().parameters()).dtype == torch.float64
    assert "0.model.conv1.weight" in net.state_dict()
