"""The hard places on a GPU, where autograd has threads of its own and graphs are replayed without Python."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from torchhook import capture, edit, edits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu_(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, how=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.matrix("torch.compile", "on a GPU, by inductor: the values and gradients of eager mode in one full graph")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_by_inductor(dtype):
    net = Net().cuda().to(dtype)
    x = torch.randn(8, 32, device="cuda", dtype=dtype)
    with capture(net, grads=True) as eager:
        net(x).float().square().sum().backward()
    exact = copy.deepcopy(net).double()
    with capture(exact, grads=True) as truth:
        exact(x.double()).square().sum().backward()
    run = torch.compile(net, fullgraph=True)
    with capture(run, grads=True) as acts, edit(run, {"blocks.0": edits.scale(1.0)}):
        for _ in range(4):
            run(x).float().square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for path in truth:
        for name in ("output", "grad"):
            got, want, true = (getattr(one[path], name).double() for one in (acts, eager, truth))
            # as good as eager: no further from the truth than the dtype takes eager itself
            assert (got - true).norm() <= 2 * (want - true).norm() + 1e-5 * true.norm(), (path, name)


@pytest.mark.matrix("CUDA graphs", '`torch.compile(mode="reduce-overhead")`: every run is seen, with its own values')
@pytest.mark.parametrize("static", [False, True])
def test_reduce_overhead_shows_every_run(static):
    net = Net().cuda().eval()
    run = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    xs = [torch.randn(8, 32, device="cuda") for _ in range(6)]
    with torch.no_grad():
        wanted = []
        for x in xs:
            with capture(net, "blocks.1") as eager:
                net(x)
            wanted.append(eager["blocks.1"].output)
        with capture(run, "blocks.1", static=static) as acts:
            for x, want in zip(xs, wanted, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                run(x)
                torch.testing.assert_close(acts["blocks.1"].output, want, rtol=1e-3, atol=1e-3)


@pytest.mark.matrix("checkpointing", "on a GPU, where autograd repeats the forward in its own thread")
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointing(how):
    net, x = Net().cuda(), torch.randn(8, 32, device="cuda", requires_grad=True)
    results = []
    for net.how in (None, how):
        net.zero_grad()
        with capture(net, grads=True) as acts, edit(net, {"blocks.1.up": edits.scale(0.5)}):
            net(x).square().sum().backward()
        results.append((acts, [p.grad.clone() for p in net.parameters()]))
    (plain, want), (acts, got) = results
    assert acts.order == plain.order
    torch.testing.assert_close(got, want)
    for path in plain:
        torch.testing.assert_close(acts[path].grads, plain[path].grads)


@pytest.mark.matrix("AMP", "autocast and a gradient scaler on a GPU")
def test_amp():
    net, x = Net().cuda(), torch.randn(8, 32, device="cuda")
    scaler = torch.amp.GradScaler("cuda")
    with capture(net, "**.up", grads=True) as acts:
        with torch.autocast("cuda", torch.float16):
            loss = net(x).square().mean()
        scaler.scale(loss).backward()
    assert acts["blocks.0.up"].output.dtype == torch.float16 and acts["blocks.0.up"].grad.dtype == torch.float16


@pytest.mark.matrix("fast paths", "`nn.TransformerEncoder` on a GPU, with padding")
def test_fused_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval().cuda()
    x, mask = torch.randn(2, 5, 32, device="cuda"), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).cuda()
    with torch.no_grad():
        fast = net(x, src_key_padding_mask=mask)
        with pytest.warns(UserWarning, match="fast path"), capture(net, "**.linear1", "**.out_proj") as acts:
            slow = net(x, src_key_padding_mask=mask)
    torch.testing.assert_close(slow[~mask], fast[~mask], rtol=1e-3, atol=1e-3)
    assert acts["layers.0.linear1"].output.shape == (2, 5, 64)
    assert acts["layers.1.self_attn.out_proj"].output.shape == (2, 5, 32)
