"""Explanations on a GPU: the same as on a CPU, with everything left on the device."""

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import explain

pytestmark = pytest.mark.gpu
CAMS = ("grad_cam", "grad_cam_pp", "hires_cam", "layer_cam", "x_grad_cam", "eigen_cam", "score_cam", "ablation_cam")


@pytest.fixture(autouse=True)
def _exact():
    """Without the shortcuts that a GPU takes, which a CPU does not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, 2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@pytest.mark.parametrize("method", CAMS)
def test_the_same_as_on_a_cpu(method):
    model, x = network(), torch.rand(4, 3, 32, 32)
    here = getattr(explain, method)(model, x, target=3)
    model.cuda()
    before = hooks_of(model)
    there = getattr(explain, method)(model, x.cuda(), target=3)
    assert there.maps.is_cuda and there.layer == here.layer and hooks_of(model) == before
    torch.testing.assert_close(there.maps.cpu(), here.maps, rtol=1e-3, atol=1e-4 * here.maps.abs().max().item())


@pytest.mark.parametrize("method", ["grad_cam", "hires_cam", "layer_cam"])
def test_a_map_of_a_layer_waits_for_nothing_but_what_it_tells(method):
    model, x, classes = network().cuda(), torch.rand(4, 3, 32, 32, device="cuda"), [1, 2, 3, 4]
    call = getattr(explain, method)
    call(model, x, classes, "4")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as waits:
            call(model, x, classes, "4")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    said = [one for one in waits if "synchronizing" in str(one.message)]
    assert len(said) <= 2  # a weight, and whether maps are empty


def test_attention_in_half_precision_is_that_of_the_fused_kernel():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0).cuda().half().train()
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.half)
    with torch.no_grad():
        plain = model(x)
        seen = explain.attention(model, x)
    assert torch.equal(seen.output, plain)
    attention = model.self_attn
    _, wanted = attention(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(seen[0].weights, wanted.float(), rtol=2e-3, atol=2e-3)


def test_trust_on_the_device():
    model, x = network().cuda(), torch.rand(4, 3, 32, 32, device="cuda")
    heat = explain.grad_cam(model, x, target=3)
    assert 0 <= explain.faithfulness(heat, model, x, target=3).insertion_area.mean() <= 1
    assert len(explain.sanity(explain.grad_cam, model, x, target=3)) > 0


def test_top_examples_of_a_loader():
    model = network().cuda()
    loader = [torch.rand(8, 3, 32, 32) for _ in range(3)]
    found = explain.top_examples(model, loader, "3", 5, k=4)
    here = explain.top_examples(model.cpu(), loader, "3", 5, k=4)
    assert [one.sample for one in found] == [one.sample for one in here]
