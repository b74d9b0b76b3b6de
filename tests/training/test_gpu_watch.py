"""A monitor beside a training on a GPU: right, and never waiting for it inside a step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchhook import Monitor, Run
from torchhook.training.launch.discovery import Discovery

pytestmark = pytest.mark.gpu


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16 * 36, 10)
    ).cuda()


def train(model, optimizer, monitor, steps):
    x, y = torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(10, (32,), device="cuda")
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        monitor.step(loss)
    return losses


@pytest.mark.parametrize("fused", [False, True])
def test_no_step_waits_and_all_is_written(tmp_path, fused):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    with Monitor(model, optimizer, every=5, price=None, to=[tmp_path]) as monitor:
        train(model, optimizer, monitor, 1)  # what is made on first use may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses = train(model, optimizer, monitor, 120)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not monitor.report.findings, monitor.report
    with Run(monitor.run) as run:
        assert run.steps == list(range(0, 121, 5))
        assert list(run.losses.values())[1:] == pytest.approx([float(loss) for loss in losses], rel=1e-6)
        assert run.window(5)["2"].zero_fraction > 0 and run.samples


def test_no_step_waits_while_the_loop_is_looked_at(tmp_path):
    """As `torchhook run` does: the gradients that are left, what the loss compares, and the losses themselves."""
    x, y = torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(10, (32,), device="cuda")
    with Discovery(every=5, price=None, to=tmp_path) as found:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        try:
            for step in range(60):
                if step == 2:  # what is made on first use may wait
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert "TH511" in [finding.code for finding in found.watched[0].report.findings]
