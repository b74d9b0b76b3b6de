"""The rows of seeing and explaining: C16, C19, C27, C35, C37, C38, C40."""

import json
import subprocess
import sys
from urllib.request import Request, urlopen

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchhook as th
from specimens import hooks_of, resnet18
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog

pytestmark = pytest.mark.usefixtures("one_thread")


def small():
    torch.manual_seed(0)
    return resnet18(num_classes=5).eval()


def test_c16_feature_maps_as_pictures():
    model = small()
    with th.capture(model, "layer1") as acts:
        model(torch.randn(1, 3, 32, 32))
    figure = th.plot.feature_maps(acts["layer1"].output)
    assert "32 of 64 channels" in figure.axes[0].get_title() and figure._repr_png_().startswith(b"\x89PNG")


def test_c19_gradients_are_watched_and_plotted_by_layer():
    model = small()
    with th.measure(model, grads=True, params=True, stats=("moments", "histogram")) as stats:
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    flow, boxes = th.plot.gradient_flow(stats), th.plot.distributions(stats, port="grad_output")
    names = [tick.get_text() for tick in boxes.axes[0].get_yticklabels()]
    assert "fc" in names and "fc" in [tick.get_text() for tick in flow.axes[0].get_yticklabels()]


def test_c27_grad_cam_lies_on_what_the_class_is_of():
    class Corner(nn.Module):
        """Class 1 is how bright the upper left quarter is."""

        def __init__(self):
            super().__init__()
            self.features = nn.Conv2d(1, 1, 1, bias=False)
            nn.init.ones_(self.features.weight)

        def forward(self, x):
            maps = self.features(x)
            return torch.stack([maps[..., 8:, 8:].mean((1, 2, 3)), maps[..., :8, :8].mean((1, 2, 3))], 1)

    model, x = Corner(), torch.rand(2, 1, 16, 16)
    before = hooks_of(model)
    heat = th.explain.hires_cam(model, x, target=1)
    assert heat.layer == "features" and hooks_of(model) == before
    assert (heat.maps[:, :8, :8] > 0).all() and heat.maps.count_nonzero() == 2 * 8 * 8
    assert th.explain.grad_cam(model, x, target=[0, 1]).target == [0, 1]


def test_c35_and_c40_a_dashboard_of_ones_own_that_follows_a_training(tmp_path):
    log = RunLog(tmp_path / "net")
    log.begin({"model": "Net"})
    command = [sys.executable, "-m", "torchhook", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        address = server.stdout.readline().strip()
        try:
            assert b"torchhook" in urlopen(address, timeout=30).read()
            for step in range(2):
                log.write(Entry(step, float(step), Snapshot({}), losses={step: 1.0}))
                assert f'"x": {json.dumps(list(range(step + 1)))}' in overview(address), "it shows the newest step"
        finally:
            server.terminate()


def overview(address):
    """What the browser is given for the page of the run."""
    asked = {
        "output": "..page.children...where.children..",
        "outputs": [{"id": "page", "property": "children"}, {"id": "where", "property": "children"}],
        "inputs": [
            {"id": "url", "property": "pathname", "value": "/run/net"},
            {"id": "url", "property": "search", "value": ""},
        ],
        "changedPropIds": ["url.pathname"],
    }
    request = Request(
        f"{address}_dash-update-component", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    return json.dumps(json.loads(urlopen(request, timeout=30).read()))


def test_c37_a_weak_level_of_a_detector_is_named():
    from torchvision.models.detection import fcos_resnet50_fpn

    torch.manual_seed(0)
    detector = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64).eval()
    with torch.no_grad():
        detector.backbone.fpn.layer_blocks[0][0].weight.mul_(1e-3)
    found = th.explain.pyramid(detector, [torch.rand(3, 64, 64)], [torch.tensor([[4.0, 4.0, 30.0, 30.0]])])
    assert [level.name for level in found.weak] == ["0"] and "Weak levels: '0'" in repr(found)


def test_c38_attention_weights_and_their_entropy_by_layer_and_head():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    x = torch.randn(3, 5, 16)
    seen = th.explain.attention(encoder.train(), x)
    assert [call.path for call in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    weights = seen[0].weights
    _, wanted = encoder.layers[0].self_attn.eval()(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, wanted)
    entropy = torch.special.entr(weights).sum(-1) / torch.tensor(5.0).log()  # of weights that are probabilities already
    torch.testing.assert_close(seen[0].entropy, entropy)
