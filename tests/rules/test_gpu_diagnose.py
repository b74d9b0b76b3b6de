"""Diagnosis where the model is on a GPU: the same findings, and no waiting inside a forward."""

import pytest
import torch
from torch import nn

from torchhook import Profile, catch_nonfinite, diagnose
from zoo import FAULTS, HEALTHY
from zoo.inspecting import is_at

pytestmark = pytest.mark.gpu

ON_GPU = ("convnet_batchnorm", "gpt", "lstm", "dead_relu", "log_of_silence", "signed_root", "statistics_stand_still")


@pytest.mark.parametrize("name", ON_GPU)
def test_the_zoo_reads_the_same_on_a_gpu(name):
    specimen = next(specimen for specimen in (*HEALTHY, *FAULTS) if specimen.name == name)
    case = specimen.build(1000)
    model = case.model.cuda()
    report = diagnose(model, case.data, case.loss, case.optimizer, case.steps)
    worth = [finding for finding in report.findings if finding.severity >= "warning"]
    if specimen.codes:
        assert worth[0].code in specimen.codes
        assert is_at(worth[0].site, specimen.sites_for(1000))
    else:
        assert not worth


def test_catching_does_not_wait_inside_of_a_forward():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()).cuda()
    x = torch.randn(4, 8, device="cuda")

    class Inside(nn.Module):
        def forward(self, x):
            torch.cuda.set_sync_debug_mode("error")
            x = model(x)
            torch.cuda.set_sync_debug_mode("default")
            return x

    whole = Inside()
    whole.model = model
    try:
        with catch_nonfinite(whole) as caught:
            whole(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert caught.finding is None


def test_a_log_on_a_gpu_is_found_with_its_line():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Log()).cuda()
    with catch_nonfinite(model, on_found="warn") as caught, pytest.warns(UserWarning):
        model(torch.randn(16, 4, device="cuda")).sum()
    assert caught.origin.path == "2"
    assert "x.log()" in caught.origin.line


def test_a_profile_made_on_a_gpu_serves_on_a_cpu():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    profile = Profile.of(model.cuda(), [torch.randn(64, 8) for _ in range(8)])
    assert profile.check(model.cpu(), torch.randn(64, 8)).ok
    assert not profile.check(model, torch.randn(64, 8) * 30).ok


def test_half_precision_shows_its_headroom():
    class Big(nn.Module):
        def forward(self, x):
            return (x * 0 + 6.2e4).half()

    model = nn.Sequential(nn.Linear(4, 4), Big()).cuda()
    report = diagnose(model, torch.randn(8, 4), loss=lambda output, _: output.float().mean(), steps=5)
    assert report.findings[0].code == "TH105"
