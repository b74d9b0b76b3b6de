"""A harvest on a GPU: the rows of the CPU, nothing that waits for the device in a forward, memory within its budget."""

import pytest
import torch
from torch import nn

from torchhook import harvest

pytestmark = pytest.mark.gpu


class Strict(nn.Module):
    """Forbids everything inside its forward to wait for the device."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True))

    def forward(self, input_ids, attention_mask):
        before = torch.cuda.get_sync_debug_mode()
        if input_ids.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return self.mix(self.embed(input_ids)) * attention_mask[..., None]
        finally:
            torch.cuda.set_sync_debug_mode(before)


def batches(number=6, size=8, width=12):
    lengths = torch.randint(1, width + 1, (number, size, 1))
    return [
        {"input_ids": torch.randint(0, 50, (size, width)), "attention_mask": (torch.arange(width) < length).long()}
        for length in lengths
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
def test_the_rows_are_those_of_the_cpu_and_no_tap_waits(tmp_path, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    model, data = Strict().eval(), batches()
    options = {"dtype": dtype, "keep": ["input_ids"], "progress": False}
    here = harvest(model, data, ["mix.0", "mix"], tmp_path / "cpu", **options)
    there = harvest(model.cuda(), data, ["mix.0", "mix"], tmp_path / "gpu", **options)
    assert there.manifest.model_fingerprint == here.manifest.model_fingerprint
    assert torch.equal(there["input_ids"][:], here["input_ids"][:])
    for site in ("mix.0", "mix"):
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2, None: 1e-5}[dtype]
        torch.testing.assert_close(there[site][:], here[site][:], rtol=tolerance, atol=tolerance)
        assert there[site].statistics.mean == pytest.approx(here[site].statistics.mean, abs=1e-5)
    there.verify(False)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        assert x.is_cuda
        return x * self.weight


def test_overflow_is_counted_there(tmp_path):
    x = torch.tensor([[1.0, 7e4], [torch.inf, torch.nan]])
    with (
        pytest.warns(UserWarning, match="1 values of '' are too large"),
        pytest.warns(UserWarning, match="has 2 NaN or infinite values"),
    ):
        acts = harvest(Scale().cuda(), x, "", tmp_path, progress=False)
    assert acts[""].overflow == 1 and acts[""].statistics.nonfinite == 2


def test_pinned_memory_stays_within_the_budget(tmp_path):
    """Of 256 MB of rows, no more than about 16 are on their way at any time."""
    model = nn.Linear(64, 1024).cuda().eval()
    data = [torch.randn(1024, 64) for _ in range(64)]  # of 4 MB of rows each
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    before, pinned = torch.cuda.memory_allocated(), torch.cuda.host_memory_stats()["allocated_bytes.current"]
    acts = harvest(model, data, "", tmp_path, dtype="float32", memory_bytes=16000000, progress=False)
    assert len(acts) == 64 * 1024
    assert torch.cuda.max_memory_allocated() - before < 64e6
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] - pinned < 64e6
