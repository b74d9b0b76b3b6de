"""Buffers that stay where they are, which a CUDA graph fills when it is replayed."""

import pytest
import torch
from torch import nn

from torchhook import TapError, capture


def net():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(inplace=True), layer, nn.Linear(4, 2))


def test_every_call_has_its_buffer_and_keeps_it():
    model = net()
    with capture(model, inputs=True, grads=True) as plain, capture(model, inputs=True, grads=True, static=True) as acts:
        model(torch.randn(3, 4)).sum().backward()
        first = [acts["0"].outputs, acts["3"].output, acts["3"].input, acts["0"].grads]
        kept = [acts["3"].output.clone(), acts["3"].output.data_ptr()]
        model(torch.randn(3, 4)).sum().backward()
    for path in plain:
        torch.testing.assert_close(acts[path].outputs, plain[path].outputs, rtol=0, atol=0)
        torch.testing.assert_close(acts[path].inputs, plain[path].inputs, rtol=0, atol=0)
        torch.testing.assert_close(acts[path].grads, plain[path].grads, rtol=0, atol=0)
    assert not torch.equal(acts["3"].output, kept[0]) and acts["3"].output.data_ptr() == kept[1]
    assert torch.equal(first[1], acts["3"].output) and first[0][0].data_ptr() != first[0][1].data_ptr()
    with pytest.raises(ValueError, match="static=True"):
        capture(model, static=True, keep=2)


@pytest.mark.gpu
@pytest.mark.matrix("CUDA graphs", "`static=True`: a replay fills the buffers of outputs and gradients")
def test_a_replay_fills_them():
    model = net().cuda()
    x = torch.randn(3, 4, device="cuda")

    def step():
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()

    with capture(model, inputs=True, grads=True, static=True) as acts:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        values = torch.randn(3, 4, device="cuda")
        x.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        got = {path: [acts[path].outputs, acts[path].grads, acts[path].inputs] for path in acts}
    with capture(model, inputs=True, grads=True) as plain:
        model(values).square().sum().backward()
    for path in plain:
        torch.testing.assert_close(got[path], [plain[path].outputs, plain[path].grads, plain[path].inputs])


@pytest.mark.gpu
@pytest.mark.matrix("CUDA graphs", "a graph captured without a warm-up is refused, not left empty")
def test_without_a_first_run_there_is_no_buffer():
    model, x = net().cuda(), torch.randn(3, 4, device="cuda")
    torch.nn.functional.linear(x, torch.randn(4, 4, device="cuda"))  # the library's own warm-up
    with pytest.raises(TapError, match="run the model once"):
        with torch.no_grad(), capture(model, static=True):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(x)
