import pytest
import torch
from torch import nn

from torchhook import FeatureExtractor, SelectionError
from zoo import InPlace, Shared, resnet18


def test_features_are_right_under_in_place_ops_and_carry_their_graph():
    net = InPlace().eval()
    x = torch.randn(1, 3, 4, 4)
    features = FeatureExtractor(net, ["conv", "norm"], stop=False)(x)
    assert torch.equal(features["norm"], net.norm(net.conv(x)))
    features["norm"].sum().backward()
    assert net.conv.weight.grad is not None


def test_equal_to_torchvisions_extractor():
    from torchvision.models.feature_extraction import create_feature_extractor

    net = resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    ours = FeatureExtractor(net, ["layer1", "layer3.1", "avgpool"])(x)
    theirs = create_feature_extractor(net, ["layer1", "layer3.1.relu_1", "avgpool"])(x)
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))


def test_queries_several_calls_and_bad_layers():
    net = Shared()
    assert set(FeatureExtractor(net, [nn.Linear, "relu"], stop=False)(torch.ones(1, 4))) == {"first", "relu"}
    assert len(FeatureExtractor(net, "relu", stop=False)(torch.ones(1, 4))["relu"]) == 2
    with pytest.raises(SelectionError, match="'reluu'; nearest: 'relu'"):
        FeatureExtractor(net, ["reluu"])
    with pytest.raises(ValueError, match="layers is empty"):
        FeatureExtractor(net, [])


def test_it_is_a_module_like_any_other():
    net = nn.Sequential(FeatureExtractor(resnet18(), ["layer2"]), nn.Identity())
    assert net.eval()[0].model.training is False
    assert next(net.double().parameters()).dtype == torch.float64
    assert torch.jit.is_tracing() is False and "0.model.conv1.weight" in net.state_dict()
