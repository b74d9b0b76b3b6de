"""Taking values off an accelerator without waiting for it."""

import threading

import pytest
import torch
from torch import nn

from torchhook import capture
from torchhook.core.transfer import free_memory


def test_free_memory_of_this_machine():
    assert 2**26 < free_memory(torch.device("cpu")) < 2**50


def test_to_the_cpu_from_the_cpu_is_plain():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with capture(model, to="cpu", dtype=torch.float64) as acts:
        model(torch.ones(1, 4))
    assert acts["0"].output.dtype == torch.float64 and acts["0"].output.device.type == "cpu"
    assert acts["0"].output.min() < 0


class Busy(nn.Module):
    """Keeps the device busy for long, then overwrites what its layer returned."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, device="cuda")
        self.relu = nn.ReLU(inplace=True)
        self.load = torch.randn(8192, 8192, device="cuda")

    def forward(self, x):
        for _ in range(10):
            self.load @ self.load
        x = self.layer(x)
        return self.relu(x).mul_(0)


@pytest.mark.gpu
def test_copies_to_the_cpu_are_asynchronous_pinned_and_right():
    model, x = Busy(), torch.randn(256, 512, device="cuda")
    with torch.no_grad():
        expected = []
        handle = model.layer.register_forward_hook(lambda module, args, out: expected.append(out.clone()))
        model(x)
        handle.remove()
        torch.cuda.synchronize()
        with capture(model, "layer", "relu", to="cpu", keep=None, max_bytes=2**33) as acts:
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    model(x)
                pending = not torch.cuda.current_stream().query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert pending, "the device had nothing left to do: the test shows nothing"
        for output in acts["layer"].outputs:
            assert output.is_pinned() and torch.equal(output, expected[0].cpu())
        assert torch.equal(acts["relu"].output, expected[0].relu().cpu())


@pytest.mark.gpu
def test_copy_on_write_on_the_device():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=True)).cuda()
    x = torch.randn(64, 512, device="cuda")
    with capture(model, grads=True, inputs=True) as acts:
        torch.cuda.set_sync_debug_mode("error")
        model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(acts["0"].output, model[0](x))
    assert torch.equal(acts["0"].grad, (acts["0"].output > 0).float())
    assert acts["0"].output.is_cuda


@pytest.mark.gpu
def test_parameter_gradients_are_routed_from_autograds_threads_to_their_session():
    model = nn.Sequential(nn.Linear(8, 8)).cuda()
    x = torch.ones(2, 8, device="cuda")
    counts = {}

    def work(name, start):
        with capture(model, params=True, grads=True, outputs=False, keep=None) as acts:
            start.wait()
            for _ in range(5 if name == "a" else 9):
                model(x).sum().backward()
            torch.cuda.synchronize()
            start.wait()
        counts[name] = len(acts["0.weight"].grads), len(acts["0"].grads)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name, barrier)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if torch._C._is_key_in_tls("context"):  # from torch 2.13 a backward leaves word of who called it
        assert counts == {"a": (5, 5), "b": (9, 9)}
    else:  # before, parameters' gradients go to every open session
        assert counts == {"a": (14, 5), "b": (14, 9)}


@pytest.mark.gpu
def test_a_budget_of_the_devices_memory():
    model = nn.Sequential(nn.Linear(8, 8)).cuda()
    free, _ = torch.cuda.mem_get_info()
    assert abs(capture(model, keep=None)._store.max_bytes - free // 2) < 2**28
