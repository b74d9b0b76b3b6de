"""CAMs without gradients: by showing channels alone, and by taking them away."""

import pytest
import torch
import torch.nn.functional as F
from pytorch_grad_cam import AblationCAM, ScoreCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

from specimens import hooks_of, resnet18
from torchhook.explain.cams import grad_cam
from torchhook.explain.mask_cams import ablation_cam, score_cam

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH = pytest.mark.parametrize("method", [score_cam, ablation_cam])


def small(seed=0, **options):
    """A residual net whose blocks overwrite what their layers give."""
    torch.manual_seed(seed)
    return resnet18(num_classes=10, **options).eval()


def by_peer(peer, model, layer, x, classes):
    """What pytorch-grad-cam makes of it before it clips and scales: its weights times what the layer gave."""
    cam, seen = peer(model, [model.get_submodule(layer)]), {}
    plain = cam.get_cam_weights

    def weights(*args):
        seen["weights"], seen["maps"] = plain(*args), args[3]
        return seen["weights"]

    cam.get_cam_weights = weights
    cam(input_tensor=x, targets=[ClassifierOutputTarget(one) for one in classes])
    return torch.as_tensor(seen["weights"][:, :, None, None] * seen["maps"]).sum(1)


@pytest.mark.parametrize(("method", "peer"), [(score_cam, ScoreCAM), (ablation_cam, AblationCAM)])
def test_the_same_as_pytorch_grad_cam_where_it_is_right(method, peer):
    model, x = small(), torch.rand(2, 3, 32, 32)
    classes = model(x).argmax(1).tolist()  # whose scores are above zero: below, its ablations change their sign
    with torch.no_grad():
        assert (model(x).amax(1) > 0).all()
    wanted = by_peer(peer, model, "layer3", x, classes)
    heat = method(model, x, sites="layer3")
    assert heat.target == classes and heat.method == method.__name__
    torch.testing.assert_close(heat.maps, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


class Linear(nn.Module):
    """Its score is a weighted sum of what a layer gave, so that all is known of it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6 * 64, 4)

    def forward(self, x):
        return self.head(self.first(x).flatten(1))


def test_ablation_is_the_share_of_the_score_that_a_channel_has():
    torch.manual_seed(0)
    model, x = Linear(), torch.rand(3, 3, 8, 8)
    heat = ablation_cam(model, x, target=2, sites="first")
    with torch.no_grad():
        maps = model.first(x)
        parts = (maps * model.head.weight[2].view(6, 8, 8)).sum((2, 3))
        weights = parts / model(x)[:, 2:3].abs()
        wanted = (weights[:, :, None, None] * maps).sum(1)
    torch.testing.assert_close(heat.maps, wanted, rtol=1e-4, atol=1e-5)


def test_what_lowers_the_score_is_negative_also_where_the_score_is():
    net = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1, bias=False))
    net[3].weight.data = torch.tensor([[1.0, -3.0]])
    x = torch.zeros(1, 2, 2, 2)
    x[0, 0, 0, 0] = x[0, 1, 1, 1] = 4.0
    heat = ablation_cam(net, x, target=0, sites="0")
    assert net(x).item() == -2 and heat.maps.sign().tolist() == [[[1, 0], [0, -1]]]


class Joined(nn.Module):
    """Joins what bypasses the layer in a way that copies of it do not survive, but for `how`."""

    def __init__(self, how):
        super().__init__()
        self.first, self.layer, self.how = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), how
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        samples = len(x)
        before = self.first(x)
        after = F.relu(self.layer(before))
        if self.how == "sum":
            both = before + after
        elif self.how == "concatenation":
            both = torch.cat([before, after], 3)
        elif self.how == "in place":
            both = before
            both += after
        else:  # all rows are taken for one sample's
            both = after.view(samples, -1, *after.shape[2:])[:, :4]
        return self.head(both.mean((2, 3)))


@pytest.mark.parametrize("how", ["sum", "concatenation", "in place", "mixed"])
def test_ablation_is_the_same_whatever_the_model_does_with_copies(how):
    torch.manual_seed(0)
    model, x = Joined(how).eval(), torch.rand(2, 3, 8, 8)
    heat = ablation_cam(model, x, target=[1, 3], sites="layer")
    with torch.no_grad():
        whole, maps = model(x)[[0, 1], [1, 3]], model.layer(model.first(x))
        weights = torch.empty(2, 4)
        for channel in range(4):
            handle = model.layer.register_forward_hook(lambda module, args, out, c=channel: _without(out, c))
            weights[:, channel] = (whole - model(x)[[0, 1], [1, 3]]) / whole.abs()
            handle.remove()
    torch.testing.assert_close(heat.maps, (weights[:, :, None, None] * maps).sum(1), rtol=1e-3, atol=1e-5)


def _without(maps, channel):
    maps = maps.clone()
    maps[:, channel] = 0
    return maps


@BOTH
def test_batches_of_any_size_give_the_same(method):
    model, x = small(), torch.rand(3, 3, 32, 32)
    whole = method(model, x, sites="layer2")
    for other in (method(model, x, sites="layer2", batch=7), method(model, x, sites="layer2", batch=1000)):
        torch.testing.assert_close(other.maps, whole.maps, rtol=1e-3, atol=1e-4)
    alone = torch.cat([method(model, x[n : n + 1], sites="layer2").maps for n in range(3)])
    torch.testing.assert_close(alone, whole.maps, rtol=1e-3, atol=1e-4)


@BOTH
def test_the_model_is_left_as_it_was(method):
    model = small().train()
    model.layer1.eval()
    model.requires_grad_(False)
    before, modes = hooks_of(model), [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.rand(2, 3, 32, 32)
    given = x.clone()
    with torch.inference_mode():
        method(model, x, sites="layer3")
    with pytest.raises(ZeroDivisionError):
        method(model, x, target=lambda out: 1 / 0, sites="layer3")
    assert hooks_of(model) == before and [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(x, given)


def test_dead_channels_take_one_run_a_sample_or_none():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        net[0].bias[:2], net[0].bias[2:] = 100.0, -100.0
    rows = []
    handle = net.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    heat = score_cam(net, torch.rand(2, 3, 16, 16), target=0, sites="1")
    assert sum(rows[1:]) == 2 * 3 and heat.maps.isfinite().all()  # two that live, and one for all that are flat
    rows.clear()
    assert ablation_cam(net, torch.rand(2, 3, 16, 16), target=7, sites="1").maps.abs().sum() == 0
    handle.remove()
    assert rows == [2, 1, 1]  # all that live of a sample at once


def test_a_model_that_views_its_maps_can_be_shown_channels():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

        def forward(self, x):
            return self.head(self.conv(x).view(len(x), -1))  # fails with the channels last

    heat = score_cam(Viewing(), torch.rand(2, 3, 8, 8), sites="conv")
    assert heat.maps.shape == (2, 6, 6)


def test_score_cam_of_tokens_and_of_several_arguments():
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    nn.init.normal_(vit.heads.head.weight)
    for method in (score_cam, ablation_cam):
        heat = method(vit, torch.rand(2, 3, 32, 32))
        assert heat.layer == grad_cam(vit, torch.rand(2, 3, 32, 32)).layer
        assert heat.maps.shape == (2, 4, 4) and heat.maps.isfinite().all() and heat.maps.abs().sum() > 0

    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, image, weight):
            return self.conv(image).mean((2, 3)) * weight[:, None]

    net, images, weight = Weighing(), torch.rand(2, 3, 8, 8), torch.tensor([1.0, 100.0])
    both = score_cam(net, {"image": images, "weight": weight}, target=1, sites="conv")
    alone = [score_cam(net, (images[n : n + 1], weight[n : n + 1]), target=1, sites="conv").maps for n in range(2)]
    torch.testing.assert_close(both.maps, torch.cat(alone))


@BOTH
def test_what_is_wrong_is_told(method):
    model = small()
    with pytest.raises(ValueError, match="batch must be"):
        method(model, torch.rand(1, 3, 32, 32), batch=0)
    with pytest.raises(ValueError, match="layer 'fc' has no spatial extent: its output is 1×10 for 1 sample"):
        method(model, torch.rand(1, 3, 32, 32), sites="fc")
    with pytest.raises(ValueError, match="target 10 is out of range: the model has 10 classes"):
        method(model, torch.rand(1, 3, 32, 32), target=10)


def test_score_cam_of_images_of_whole_numbers():
    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)

        def forward(self, image):
            return 500 * self.conv(image.float() / 255).relu().mean((2, 3))

    torch.manual_seed(0)
    model, image = Bytes(), torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    heat = score_cam(model, image, 1, "conv")
    torch.testing.assert_close(heat.maps, score_cam(model, image.float(), 1, "conv").maps, rtol=0, atol=0.02)


def test_score_cam_needs_images():
    net = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 3, 1), nn.Flatten())
    with pytest.raises(ValueError, match="score_cam masks images, but x has none"):
        score_cam(net, torch.rand(2, 32), target=0, sites="1")
    assert ablation_cam(net, torch.rand(2, 32), target=0, sites="1").maps.shape == (2, 4, 4)
