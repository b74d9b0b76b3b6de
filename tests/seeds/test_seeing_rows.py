"""The rows of seeing and explaining: C15, C16, C19, C27, C33, C34, C35, C37, C38, C40."""

import base64
import copy
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
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


def seen_by_plain_hooks(model, paths, forward):
    """The outputs of some modules and the gradients of these, with torch alone; `forward` also does the backward."""
    outputs, gradients = {}, {}

    def hook(path):
        def keep(module, args, output):
            outputs[path] = output.detach().clone()
            output.register_hook(lambda gradient: gradients.__setitem__(path, gradient.clone()))

        return keep

    handles = [model.get_submodule(path).register_forward_hook(hook(path)) for path in paths]
    forward()
    for handle in handles:
        handle.remove()
    return outputs, gradients


def in_grey(maps):
    """Maps in a square grid, a black pixel apart, each from black to white: as numpy computes it."""
    maps = np.asarray(maps, dtype=np.float64)
    low, high = maps.min((1, 2), keepdims=True), maps.max((1, 2), keepdims=True)
    tiles = np.rint(255 * (maps - low) / (high - low))
    side = math.ceil(math.sqrt(len(maps)))
    height, width = maps.shape[1] + 1, maps.shape[2] + 1
    grid = np.zeros((math.ceil(len(maps) / side) * height, side * width))
    for number, tile in enumerate(tiles):
        top, left = number // side * height, number % side * width
        grid[top : top + height - 1, left : left + width - 1] = tile
    return grid[:-1, :-1]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=np.float64)


def runs_of(mask):
    """The stretches of a line of booleans that are true."""
    edges = np.flatnonzero(np.diff([0, *mask.astype(int), 0]))
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_c15_feature_maps_and_histograms_of_one_pass_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from torchhook.integrations.tensorboard import TensorBoard

    model, x = small(), torch.randn(2, 3, 32, 32)
    outputs, _ = seen_by_plain_hooks(model, ["conv1", "layer1"], lambda: model(x))
    with th.capture(model, "conv1", "layer1", "fc") as acts:
        model(x)
    TensorBoard(tmp_path / "log").feature_maps(acts, step=7)
    with (
        SummaryWriter(str(tmp_path / "writer")) as writer,
        th.ModelDiagnostics(model, "conv1", "layer1") as diagnostics,
    ):
        model(x)
        diagnostics.visualize(writer, step=7)
    for folder, prefix in (("log", "torchhook/"), ("writer", "")):
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        paths = [f"{prefix}{what}/{path}" for what in ("maps", "mean_map") for path in outputs]
        assert sorted(events.Tags()["images"]) == paths, "fc has no maps"
        for path, output in outputs.items():
            maps, mean = (events.Images(f"{prefix}{what}/{path}")[0] for what in ("maps", "mean_map"))
            assert maps.step == mean.step == 7
            assert (pixels(maps.encoded_image_string) == in_grey(output[0])).all()
            assert np.abs(pixels(mean.encoded_image_string) - in_grey(output[0].double().mean(0)[None])).max() <= 1
    for path, output in outputs.items():
        said = events.Histograms(f"features/{path}")[0].histogram_value
        limits = np.array(said.bucket_limit)
        wanted = np.histogram(output.double().numpy(), [-np.inf, *limits])[0]
        assert said.num == output.numel() and said.sum == pytest.approx(float(output.double().sum()), rel=1e-4)
        assert np.abs(np.array(said.bucket) - wanted).sum() <= 1e-3 * said.num, (
            "values on an edge may be counted beside it"
        )


def test_c16_feature_maps_as_pictures():
    model, x = small(), torch.randn(2, 3, 32, 32)
    outputs, _ = seen_by_plain_hooks(model, ["bn1", "layer1"], lambda: model(x))
    with th.capture(model, "bn1", "layer1") as acts:
        model(x)
    assert outputs["bn1"].min() < 0 == outputs["layer1"].min(), "one of each kind of scale"
    for path, output in outputs.items():
        figure = th.plot.feature_maps(acts[path])
        assert "32 of 64 channels" in figure.axes[0].get_title() and figure._repr_png_().startswith(b"\x89PNG")
        drawn = figure.axes[0].images[0].get_array()
        rows, columns = (runs_of((drawn[..., 3] > 0).any(axis)) for axis in (1, 0))
        tiles = [drawn[slice(*row), slice(*column)] for row in rows for column in columns]
        wanted = output[0].double().numpy()
        for tile, values in zip(tiles, [wanted.mean(0), *wanted[:32]], strict=False):
            colour = in_colours(values, signed=path == "bn1")
            assert np.abs(tile.astype(int) - colour).max() <= 2


def in_colours(values, signed):
    """One map in matplotlib's colours, without 1 % of outliers: both signs around zero, or from the lowest value up."""

    def share(some, part):
        return np.sort(some.ravel())[round(part * (some.size - 1))]

    if signed:
        scaled = 0.5 + 0.5 * values / share(np.abs(values), 0.99)
    else:
        low, high = share(values, 0.01), share(values, 0.99)
        if values.min() == values.max():
            return np.array([138, 144, 153, 255])  # grey: a constant map has no scale
        scaled = (values - low) / (high - low)
    return matplotlib.colormaps["RdBu_r" if signed else "viridis"](scaled.clip(0, 1), bytes=True).astype(int)


def test_c19_gradients_are_watched_and_plotted_by_layer():
    model, x, y = small(), torch.randn(4, 3, 32, 32), torch.arange(4)
    paths = ["conv1", "bn1", "layer1.0.conv1", "layer4.1.bn2", "fc"]
    _, gradients = seen_by_plain_hooks(model, paths, lambda: F.cross_entropy(model(x), y).backward())
    of_parameters = {name: float(one.grad.square().mean().sqrt()) for name, one in model.named_parameters()}
    model.zero_grad()
    with th.measure(model, grads=True, param_grads=True, stats=("moments", "histogram")) as stats:
        F.cross_entropy(model(x), y).backward()
    flow, boxes = th.plot.gradient_flow(stats), th.plot.distributions(stats, port="grad_output")
    names = {tick.get_text(): row for row, tick in enumerate(flow.axes[0].get_yticklabels())}
    outputs, parameters = flow.axes[0].lines
    drawn = dict(zip(outputs.get_ydata(), outputs.get_xdata(), strict=True))
    for path in paths:
        gradient = gradients[path].double()
        assert drawn[names[path]] == pytest.approx(float(gradient.square().mean().sqrt()), rel=1e-4)
        points = [size for size, row in zip(*parameters.get_data(), strict=True) if row == names[path]]
        wanted = [size for name, size in of_parameters.items() if name.rpartition(".")[0] == path]
        assert sorted(points) == pytest.approx(sorted(wanted), rel=1e-3)
        row = [tick.get_text() for tick in boxes.axes[0].get_yticklabels()].index(path)
        left, right = np.quantile(gradient.numpy(), [0.25, 0.75])
        box = boxes.axes[0].patches[row]
        assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx((left, right), rel=0.25, abs=0.01 * right)


def test_c27_grad_cam_and_its_family_are_what_the_papers_say():
    model, x, target = small(), torch.randn(2, 3, 64, 64), torch.tensor([3, 1])
    outputs, gradients = seen_by_plain_hooks(
        model, ["layer4"], lambda: model(x).gather(1, target[:, None]).sum().backward()
    )
    maps, gradient = outputs["layer4"].double().numpy(), gradients["layer4"].double().numpy()

    def weighted(weights):
        return sum(weights[:, channel, None, None] * maps[:, channel] for channel in range(maps.shape[1]))

    square = gradient**2
    share = square / (2 * square + maps.sum((2, 3), keepdims=True) * square * gradient + 1e-6)
    wanted = {
        "grad_cam": weighted(gradient.mean((2, 3))),
        "hires_cam": (gradient * maps).sum(1),
        "layer_cam": (gradient.clip(min=0) * maps).sum(1),
        "x_grad_cam": weighted((gradient * maps).sum((2, 3)) / (maps.sum((2, 3)) + 1e-7)),
        "grad_cam_pp": weighted((share * gradient.clip(min=0)).sum((2, 3))),
    }
    for name, expected in wanted.items():
        heat = getattr(th.explain, name)(model, x, target=target.tolist(), sites="layer4")
        assert np.abs(expected).max() > 1e-3, "a map of zeros would prove nothing"
        np.testing.assert_allclose(heat.maps.numpy(), expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    resized = th.explain.grad_cam(model, x, target=target.tolist(), sites="layer4").at_input_size().maps
    assert resized.shape == (2, 64, 64)
    drawn = [ax.images[1].get_array() for ax in th.plot.cam(x, heat).axes if len(ax.images) == 2]
    assert np.allclose(np.stack(drawn), heat.at_input_size().maps, atol=1e-5)


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


def test_c33_a_lightning_trainer_is_watched(tmp_path):
    import lightning.pytorch as pl

    from torchhook.integrations.lightning import TorchhookCallback

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        def training_step(self, batch, number):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    module, x = Net(), torch.randn(12, 4)
    y = (x.sum(1) > 0).long()
    losses, means, norms = trained_by_hand(copy.deepcopy(module.net), x.split(4), y.split(4))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    callback = TorchhookCallback(every=1, price=None, to=[tmp_path])
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet).fit(module, data)
    assert callback.report.ok
    with th.Run(callback.run) as run:
        assert [run.losses[step] for step in range(3)] == pytest.approx(losses, rel=1e-6)
        windows = [run.window(step) for step in range(3)]
        assert [window["net.2"].mean for window in windows] == pytest.approx(means, rel=1e-4, abs=1e-6)
        found = [window["net.0.weight", "param_grad_norm"].mean for window in windows]
        assert found == pytest.approx(norms, rel=1e-4)


def trained_by_hand(net, inputs, targets):
    """Losses, means of the output and norms of the first weight's gradient, step by step."""
    optimizer, losses, means, norms = torch.optim.SGD(net.parameters(), lr=0.1), [], [], []
    for x, y in zip(inputs, targets, strict=True):
        output = net(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        means.append(output.mean().item())
        norms.append(float(net[0].weight.grad.norm()))
        optimizer.step()
    return losses, means, norms


def test_c34_a_training_and_feature_maps_in_mlflow(tmp_path, monkeypatch):
    import mlflow

    from torchhook.integrations.mlflow import MLflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run(client.create_experiment("maps", (tmp_path / "files").as_uri())).info.run_id

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(12, 4)
    y = (x.sum(1) > 0).long()
    losses, means, norms = trained_by_hand(copy.deepcopy(net), x.split(4), y.split(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with th.Monitor(net, optimizer, every=1, price=None, to=[MLflow(run_id, client)]) as monitor:
        for some, targets in zip(x.split(4), y.split(4), strict=True):
            loss = F.cross_entropy(net(some), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    for name, wanted in (("loss", losses), ("mean/2", means), ("grad_norm/0.weight", norms)):
        history = sorted(client.get_metric_history(run_id, f"torchhook/{name}"), key=lambda metric: metric.step)
        assert [metric.value for metric in history] == pytest.approx(wanted, rel=1e-4, abs=1e-6)

    model, image = small(), torch.randn(2, 3, 32, 32)
    outputs, _ = seen_by_plain_hooks(model, ["layer1"], lambda: model(image))
    with th.capture(model, "layer1", "fc") as acts:
        model(image)
    MLflow(run_id, client).feature_maps(acts, step=5)
    images = [file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]
    assert len(images) == 2
    for what, wanted in (("maps", outputs["layer1"][0]), ("mean_map", outputs["layer1"][0].double().mean(0)[None])):
        (path,) = [path for path in images if re.search(rf"torchhook.{what}.layer1\+step\+5\+", path)]
        drawn = pixels(Path(client.download_artifacts(run_id, path, str(tmp_path))).read_bytes())
        assert np.abs(drawn - in_grey(wanted)).max() <= (what == "mean_map")


@pytest.fixture
def no_screen(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


def test_c35_what_one_has_is_shown_without_a_training(tmp_path, no_screen, capsys):
    model, x = small(), torch.randn(2, 3, 32, 32)
    outputs, _ = seen_by_plain_hooks(model, ["layer1", "fc"], lambda: model(x))
    with th.capture(model, "layer1", "fc") as acts, th.measure(model, "layer1", "fc") as stats:
        model(x)
    by_name = {path: output.numpy() for path, output in outputs.items()}
    for what in (acts, by_name, stats, stats.snapshot()):
        path = th.dashboard.show(what)
        page = path.read_text(encoding="utf-8")
        assert capsys.readouterr().out.strip() == path.as_uri()
        assert "default-src 'none'" in page, "it may fetch nothing"
        for name, output in outputs.items():
            cells = re.search(rf'<th scope="row"><code>{name}</code></th>(.*?)</tr>', page).group(1)
            numbers = [float(cell) for cell in re.findall(r'<td class="number">([^<]*)</td>', cells)]
            assert numbers[:2] == pytest.approx([float(output.mean()), float(output.std())], rel=1e-3)
        pictures = re.findall(r'<img alt="[^"]*" src="data:image/png;base64,([^"]*)"', page)
        assert len(pictures) == (what is acts or what is by_name), "fc has no maps, and statistics have none"
        assert all((pixels(base64.b64decode(one)) == in_grey(outputs["layer1"][0])).all() for one in pictures)
    report = th.check(stats, model="Little net")
    assert "<h1>Little net</h1>" in th.dashboard.show(report).read_text(encoding="utf-8")
    capsys.readouterr()

    log = RunLog(tmp_path / "net")
    log.begin({"model": "Net"})
    log.write(Entry(0, 0.0, Snapshot({}), losses={0: 1.0}))
    assert th.dashboard.show(tmp_path / "net") == tmp_path / "net"
    assert b"torchhook" in urlopen(capsys.readouterr().out.strip(), timeout=30).read()
    with pytest.raises(TypeError, match="what must be a model, a monitor, a run .* a capture, a dict .*; not 3"):
        th.dashboard.show(3)


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
    image = torch.rand(3, 64, 64)
    found = th.explain.pyramid(detector, [image], [torch.tensor([[4.0, 4.0, 30.0, 30.0]])])
    assert [level.name for level in found.weak] == ["0"] and "Weak levels: '0'" in repr(found)
    with torch.no_grad():
        batch, _ = detector.transform([image])
        levels = detector.backbone(batch.tensors)
    assert [level.name for level in found] == list(levels) and batch.tensors.shape[-2:] == (64, 64)
    for level, maps in zip(found, levels.values(), strict=True):
        maps = maps[0].double().numpy()
        high, wide = maps.shape[1:]
        assert level.size == (high, wide) and level.stride == (64 / high, 64 / wide)
        assert level.strength == pytest.approx(np.abs(maps).mean(), rel=1e-4)
        assert level.rms == pytest.approx(np.sqrt((maps**2).mean()), rel=1e-4)
        by_pixel = np.abs(maps).mean(0).repeat(64 // high, 0).repeat(64 // wide, 1)
        inside = np.zeros((64, 64), dtype=bool)
        inside[4:30, 4:30] = True
        assert level.small == pytest.approx(by_pixel[inside].mean(), rel=1e-4)
        assert level.medium is level.large is None


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
