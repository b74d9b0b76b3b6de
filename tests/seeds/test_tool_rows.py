"""The rows of trainings in TensorBoard, of whole scripts, of whole data sets, and of `why`: C15, B03, B09, B18."""

import asyncio
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchhook import Monitor, harvest
from torchhook.training.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def trained(model, log, steps=3):
    """Train for some steps, watched; returns the losses and the model as it was in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, last = [], {}
    with Monitor(model, optimizer, every=1, price=None, to=[log]) as monitor:
        for _ in range(steps):
            last = {name: value.clone() for name, value in model.state_dict().items()}
            loss = F.cross_entropy(model(X), Y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            monitor.step(loss)
    return losses, last


def grey(maps):
    """Feature maps in a square of squares, each from black to white, a black pixel apart."""
    count, height, width = maps.shape
    side = round(count**0.5)
    square = torch.zeros(side * (height + 1) - 1, side * (width + 1) - 1)
    for number, one in enumerate(maps):
        row, column = number // side * (height + 1), number % side * (width + 1)
        square[row : row + height, column : column + width] = 255 * (one - one.min()) / (one.max() - one.min())
    return square.round()


def pixels(data):
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("L")
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).view(image.height, image.width)


def test_c15_feature_maps_and_histograms_of_a_training_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from torchhook.integrations.tensorboard import TensorBoard

    model = net()
    losses, last = trained(model, TensorBoard(tmp_path))
    everything = dict.fromkeys(("scalars", "histograms", "images"), 0)
    events = EventAccumulator(str(tmp_path), size_guidance=everything).Reload()
    assert [point.value for point in events.Scalars("torchhook/loss")] == pytest.approx(losses)
    model.load_state_dict(last)
    conv = model[0](X).detach()
    assert events.Scalars("torchhook/mean/0")[-1].value == pytest.approx(conv.mean().item(), rel=1e-4)
    said = events.Histograms("torchhook/output/0")[-1].histogram_value
    assert (said.num, said.sum) == pytest.approx((conv.numel(), conv.sum().item()), rel=1e-4)
    upper = torch.tensor(said.bucket_limit)
    below = (conv.flatten() < upper[:, None]).sum(1)
    assert torch.tensor(said.bucket).cumsum(0).tolist() == below.tolist()
    picture = pixels(events.Images("torchhook/maps/0")[-1].encoded_image_string)
    torch.testing.assert_close(picture, grey(conv[0]), atol=1, rtol=0)


SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
if "dead" in sys.argv:
    net[0].bias.data[:30] = -100
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for step in range(60):
    x = torch.randn(256, 8)
    loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.slow
def test_b03_a_script_is_diagnosed_without_a_change_to_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ours = [sys.executable, "-m", "torchhook", "run", "--every", "2"]

    def outcome(command, *arguments):
        command = [*command, "train.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)

    for arguments, codes in (["dead"], {"TH201"}), ([], set()):
        plain, watched = outcome([sys.executable], *arguments), outcome(ours, *arguments)
        assert (watched.stdout, watched.returncode) == (plain.stdout, 0) and plain.returncode == 0, watched.stderr
        folder = re.search(r"→ torchhook dashboard (\S+)\n", watched.stderr)[1]
        with Run(tmp_path / folder) as run:
            losses = list(map(float, plain.stdout.split()))
            assert run.losses == pytest.approx(dict(enumerate(losses)), rel=1e-6) and len(losses) == 60
            assert {finding.code for finding in run.report.findings if finding.severity >= "warning"} == codes
        assert all(f"{code}  1" in watched.stderr for code in codes)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)
        nn.init.constant_(self.first.bias, -100)

    def forward(self, x):
        hidden = self.relu(self.first(x))
        return self.last(hidden)


def test_b18_why_a_training_fails_for_people_programs_and_agents(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, every=1, price=None, to=tmp_path) as monitor:
        for _ in range(20):
            x = torch.randn(64, 8)
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    why = [sys.executable, "-m", "torchhook", "why", str(tmp_path)]
    text, data = (subprocess.run([*why, *more], capture_output=True, text=True) for more in ([], ["--json"]))
    assert text.returncode == data.returncode == 1, text.stderr
    said = json.loads(data.stdout)
    dead = said["findings"][0]
    assert dead["site"] == "relu" and f"{dead['code']}  relu (ReLU)" in text.stdout
    assert said["schema"] == 1 and said["last_step"] == 19
    assert dead["line"].endswith("hidden = self.relu(self.first(x))") and __file__ in dead["line"]
    assert dead["module"] == "ReLU" and dead["cause"] and dead["evidence"]
    assert " ".join(dead["next"].split()) in " ".join(text.stdout.split())
    assert asyncio.run(told(tmp_path, "why"))["findings"] == said["findings"]
    layers = asyncio.run(told(tmp_path, "layers", layers="relu"))["layers"]
    assert [(row["path"], row["module"], row["zero_fraction"]) for row in layers] == [("relu", "ReLU", 1)]


async def told(folder, tool, **arguments):
    """What an agent is told that starts the server and calls a tool."""
    from mcp import Client, StdioServerParameters, stdio_client

    words = ["-m", "torchhook", "mcp", str(folder)]
    process = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    async with Client(stdio_client(process)) as client:
        return (await client.call_tool(tool, arguments)).structured_content


class Impatient(nn.Module):
    """Stops in the middle of the data, once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.batches, self.patience = 0, 5

    def forward(self, x):
        if self.batches == self.patience:
            raise KeyboardInterrupt
        self.batches += 1
        return self.last(torch.relu(self.first(x)))


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_b09_the_activations_of_a_data_set_where_it_was_interrupted(tmp_path):
    x = torch.randn(100, 4)
    whole = Impatient()
    whole.patience = None
    options = {"batch_size": 8, "commit_seconds": 0.0, "dtype": None}
    acts = harvest(whole, x, ["first", "last"], tmp_path / "whole", **options)
    with torch.no_grad():
        first = torch.cat([whole.first(batch) for batch in x.split(8)])
        last = torch.cat([whole.last(batch.relu()) for batch in first.split(8)])
    assert torch.equal(acts["first"][:], first) and torch.equal(acts["last"][:], last)
    assert torch.equal(acts["first"][[99, 3, 50]], first[[99, 3, 50]]) and len(acts["first"]) == 100
    assert acts.verify() == 100 * (8 + 8 * 4 + 2 * 4), "bytes that agree with their checksums: ids, rows, rows"
    said = acts["first"].statistics
    assert (said.count, said.mean, said.std) == pytest.approx((800, first.mean().item(), first.std().item()), rel=1e-4)
    model = Impatient()
    with pytest.raises(KeyboardInterrupt):
        harvest(model, x, ["first", "last"], tmp_path / "parts", **options)
    model.patience, model.batches = None, 0
    harvest(model, x, ["first", "last"], tmp_path / "parts", **options)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert 13 - 5 <= model.batches < 13, "batches that were done are not run again"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_b09_on_ray_data(tmp_path):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        x = torch.randn(100, 4)
        data = ray.data.from_numpy(x.numpy())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        acts = harvest(model, data, "0", tmp_path, batch_size=8, dtype=None, engine="ray", workers=2)
        with torch.no_grad():
            torch.testing.assert_close(acts["0"][:], model[0](x))
    finally:
        ray.shutdown()
