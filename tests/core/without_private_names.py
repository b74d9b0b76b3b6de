"""Run by test_torch_internals: hides each private name of torch in turn, in a fork, and tries what users do.

A fork per name, since what is private is looked up when torchhook is first imported; torch itself is imported once.
"""

import json
import os
import sys
import traceback
import warnings

import numpy  # noqa: F401 (as are the next: imported once, for all forks)
import torch
import torch.distributed
import typer  # noqa: F401
from torch import nn


class Net(nn.Module):
    """Convolutions, batch norm, dropout, an op in place, a shared layer, a dict as output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.mix = nn.Linear(8, 8)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 4))

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        x = self.mix(self.mix(x))
        return {"logits": self.head(x)}


def expected(net, x):
    """What flows and its gradients, by bare hooks that copy at once."""
    outputs, gradients = {}, {}
    handles = []
    for path, module in net.named_modules():
        if not list(module.children()):

            def note(module, args, output, path=path):
                outputs.setdefault(path, []).append(output.detach().clone())
                output.register_hook(lambda gradient: gradients.setdefault(path, []).append(gradient.clone()))

            handles.append(module.register_forward_hook(note))
    net(x)["logits"].square().sum().backward()
    for handle in handles:
        handle.remove()
    weights = {path: parameter.grad.clone() for path, parameter in net.named_parameters()}
    return outputs, gradients, weights


def check():
    """Capture and measure give the values that bare hooks give; nothing stays behind."""
    import torchhook as th

    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3, 12, 12)
    net.head[0].p = 0.0
    state = {name: value.clone() for name, value in net.state_dict().items()}
    outputs, gradients, weights = expected(net, x)
    net.load_state_dict(state)
    net.zero_grad()
    with th.capture(net, grads=True, params=True) as acts:
        net(x)["logits"].square().sum().backward()
    for path, values in outputs.items():
        assert all(map(torch.equal, acts[path].outputs, values)) and len(acts[path].outputs) == len(values), path
        if path != "conv.1":  # overwritten in place by the ReLU behind it: the bare hook sees the gradient of that
            assert torch.allclose(acts[path].grad, gradients[path][0]), path
    assert all(torch.equal(parameter.grad, weights[path]) for path, parameter in net.named_parameters())
    net.load_state_dict(state)
    net.zero_grad()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with th.measure(net, optimizer=optimizer, stats=("moments", "channels"), param_grads=True) as stats:
        net(x)["logits"].square().sum().backward()
        optimizer.step()
    for path, values in outputs.items():
        every = torch.cat([value.flatten() for value in values]).double()
        assert abs(stats[path].mean - every.mean()) < 1e-6 and abs(stats[path].max - every.max()) < 1e-6, path
    assert abs(stats["mix.weight", "param_grad"].l2 - weights["mix.weight"].double().norm()) < 1e-5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def attempt(name):
    """Hide a name, and see what happens: what doctor says, or what failed."""
    os.environ["TORCHHOOK_HIDE"] = name
    warnings.filterwarnings("ignore", "statistics on")  # are computed by plain torch, as they should be then
    try:
        check()
        from torchhook.cli.doctor import _private_torch

        return {"doctor": _private_torch()}
    except BaseException:
        return {"error": traceback.format_exc()}


def in_fork(name):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(attempt(name)).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else {"error": "the process died"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1).zero_grad()  # imports the compiler, which takes seconds
    print(json.dumps({name: in_fork(name) for name in sys.argv[1:]}))
