"""The same on an accelerator: nothing waits inside a step, and random numbers and half precision are replayed."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from sick_models import Between, Calls, Divide, Log, Sqrt, line_of, linear
from torch import nn

from torchhook.origins import Catch, replay
from torchhook.rules.origin.catch import catch_nonfinite

pytestmark = pytest.mark.gpu


def caught(model, run, save=None):
    with Catch(model, save, "record") as catch:
        run()
    return catch


def ones(*shape, **options):
    return torch.ones(*shape, device="cuda", **options)


def test_forward_and_backward():
    model = nn.Sequential(linear(), Between(), linear()).cuda()
    origin = caught(model, lambda: model(ones(2, 4))).origin
    assert (origin.path, origin.after, origin.line) == ("1", "1.first", line_of(Between, "between"))
    model = nn.Sequential(linear(), Sqrt(), linear()).cuda()
    origin = caught(model, lambda: model(0 * ones(2, 4)).sum().backward()).origin
    assert (origin.path, origin.op, origin.line) == ("1", "SqrtBackward0 (aten.div)", line_of(Sqrt, "sqrt"))
    with pytest.raises(FloatingPointError, match="SqrtBackward0"), catch_nonfinite(model):
        model(0 * ones(2, 4)).sum().backward()
    model.zero_grad()
    model(ones(2, 4)).sum().backward()  # autograd works as before


def test_a_step_waits_once_for_the_forward_and_once_for_the_backward():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64), nn.Tanh())).cuda()
    x = torch.randn(32, 64, device="cuda")
    model(x).sum().backward()
    with catch_nonfinite(model):
        model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                out = model(x)
                forward = len(seen)
                out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (forward, len(seen)) == (1, 2), [str(warning.message) for warning in seen]


def test_random_numbers_and_autocast_come_back_also_from_a_file(tmp_path):
    seen = []

    def sick(self, x):
        h = F.dropout(self.fc(x), 0.5) * torch.rand_like(x)
        seen.append(h.detach().clone())
        return h / 0

    model = nn.Sequential(nn.Dropout(0.5), Calls(sick, fc=linear(64))).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        catch = caught(model, lambda: model(torch.randn(8, 64, device="cuda")), tmp_path)
    assert catch.origin.path == "1" and seen[0].dtype == torch.float32 and torch.equal(*seen)
    torch.manual_seed(7)
    assert replay(catch.file, model) == catch.origin
    assert torch.equal(seen[0], seen[2])


def test_overflow_in_float16_and_the_search_of_a_scaler():
    model = nn.Sequential(linear(), Calls(lambda self, x: x.half() * 1e4)).cuda()
    catch = caught(model, lambda: model(10 * ones(2, 4)))
    assert (catch.origin.path, catch.origin.what) == ("1", "Inf") and "65,504" in catch.finding.hint

    model = nn.Linear(64, 64).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cuda", init_scale=2.0**24)
    with catch_nonfinite(model) as watched:
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(ones(64, 64)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2**24 and watched.finding is None


def test_masks():
    mask = torch.full((5, 5), -torch.inf, device="cuda").triu(1)
    model = Calls(lambda self, x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
    x = torch.randn(2, 4, 5, 8, device="cuda", requires_grad=True)
    assert caught(model, lambda: model(x, mask).sum().backward()).finding is None
    model = nn.Sequential(nn.ReLU(), Log(), Divide(on=False)).cuda()
    assert caught(model, lambda: model(0 * ones(2, 4))).origin.op == "aten.log"
