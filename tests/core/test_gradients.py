"""Gradients of what flows: right under in-place ops, in every container, for every call."""

import pytest
import torch
from torch import nn

from specimens import Containers, InPlace, OutOfPlace, Returning, Shared, resnet18
from torchhook import Record, Ring, Session, Tap, capture


def test_in_place_ops_give_the_gradients_of_what_was_there_before_them():
    net, oracle = InPlace(), OutOfPlace()
    oracle.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 5, 5)
    with capture(net, "conv", "norm", "last", grads=True) as acts:
        net(x).square().sum().backward()
    with capture(oracle, "conv", "norm", "last", grads=True) as expected:
        oracle(x).square().sum().backward()
    for path in ("conv", "norm", "last"):
        assert torch.equal(acts[path].output, expected[path].output)
        assert torch.equal(acts[path].grad, expected[path].grad)
        assert not torch.equal(acts[path].grad, torch.zeros_like(acts[path].grad))


def test_a_resnet_gives_the_same_as_one_without_in_place_ops():
    net, oracle = resnet18(), resnet18()
    oracle.load_state_dict(net.state_dict())
    for module in oracle.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    x = torch.randn(2, 3, 64, 64)
    grads = []
    for model in (net, oracle):
        with capture(model, nn.BatchNorm2d, nn.Conv2d, grads=True) as acts:
            model(x).square().mean().backward()
        grads.append(acts)
    for path in grads[0]:
        assert torch.equal(grads[0][path].output, grads[1][path].output), path
        assert torch.equal(grads[0][path].grad, grads[1][path].grad), path


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as they are", "converted"])
def test_containers_keep_their_shape(dtype):
    net = Containers()
    with capture(net, "pair", "mapping", "data", grads=True, dtype=dtype) as acts:
        net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    w = net.head.weight.detach().expand(2, 4).to(dtype)
    assert torch.allclose(acts["data"].grad.hidden, w) and type(acts["data"].grad).__name__ == "Result"
    assert torch.allclose(acts["data"].grad.extra["h"], w) and acts["data"].grad.extra["n"] is None
    assert torch.allclose(acts["mapping"].grad["b"]["c"], 5 * w)
    first, (second, nothing) = acts["pair"].grad
    assert torch.allclose(first, 25 * w) and torch.allclose(second, 25 * w) and nothing is None
    assert acts["pair"].output[1][1] is None


def test_a_hugging_face_model_output():
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    net = BertModel(config)
    with capture(net, "", "encoder", grads=True) as acts:
        net(torch.arange(6).reshape(1, 6)).last_hidden_state.square().sum().backward()
    assert type(acts["encoder"].grad) is type(acts["encoder"].output)
    hidden = acts[""].output.last_hidden_state
    assert torch.allclose(acts["encoder"].grad.last_hidden_state, 2 * hidden)
    assert acts[""].grad.pooler_output is None


def test_each_call_has_its_own_gradient():
    net = Shared()
    x = torch.randn(2, 4, requires_grad=True)
    with capture(net, nn.Linear, grads=True) as acts:
        net(x).square().sum().backward()
    a = net.first(x).detach().requires_grad_()
    b = net.first(a.relu())
    c = net.first(b.relu())
    expected = torch.autograd.grad(c.square().sum(), [a, b, c])
    assert len(acts["first"].grads) == len(acts["first"].outputs) == 3
    for got, want in zip(acts["first"].grads, expected, strict=True):
        assert torch.allclose(got, want)
    assert torch.equal(acts["second"].grad, acts["first"].grad)


def test_no_gradient_is_none_and_a_second_backward_replaces_the_first():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with capture(net, grads=True) as acts:
        out = net(torch.ones(1, 4))
        assert acts["0"].grads == [None]
        out.sum().backward(retain_graph=True)
        assert acts["1"].grad.tolist() == [[1, 1, 1, 1]]
        (3 * out).sum().backward(retain_graph=True)
        assert acts["1"].grads[0].tolist() == [[3, 3, 3, 3]]
        with torch.no_grad():
            net(torch.ones(1, 4))
        assert acts["1"].grad is None
    out.sum().backward()
    assert acts["1"].grads == [None]


def test_a_backward_after_the_scope_records_nothing():
    net = nn.Sequential(nn.Linear(4, 4))
    with (
        pytest.warns(UserWarning, match="no backward ran while the taps"),
        capture(net, grads=True) as acts,
    ):
        out = net(torch.ones(1, 4))
    out.sum().backward()
    assert acts["0"].grad is None and net[0].weight.grad is not None


def test_a_backward_of_an_evicted_pass_is_let_go():
    net = nn.Sequential(nn.Linear(4, 4))
    with capture(net, grads=True, keep=1) as acts:
        old = net(torch.ones(1, 4))
        net(torch.ones(1, 4))
        old.sum().backward()
        assert acts["0"].grads == [None]


def test_gradients_of_all_kept_passes_belong_to_their_outputs():
    net = nn.Sequential(nn.Linear(4, 4))
    with capture(net, grads=True, keep=3) as acts:
        outs = [net(torch.ones(1, 4)) for _ in range(4)]
        for factor in (3, 1):
            (outs[factor] * factor).sum().backward()
        (outs[0] * 9).sum().backward()  # evicted
    assert [None if grad is None else grad[0, 0].item() for grad in acts["0"].grads] == [1, None, 3]


def test_a_parameter_that_is_an_output_carries_no_hook_afterwards():
    net = nn.Sequential(Returning(lambda x: x), nn.Linear(2, 2))
    queries = nn.Parameter(torch.ones(1, 2))
    net[0].function = lambda x: queries
    with capture(net, "0", grads=True, keep=None) as acts:
        for factor in (1, 2):
            (net(None) * factor).sum().backward()
    assert not queries._backward_hooks
    assert torch.allclose(acts["0"].grads[1], 2 * acts["0"].grads[0])
    assert torch.allclose(queries.grad, acts["0"].grads[0] + acts["0"].grads[1])


def grad_inputs(net, query, x, loss=lambda out: out.square().sum()):
    ring = Ring(max_passes=1)
    with Session(net, [Tap(query, Record(ring), port="grad_input")]):
        loss(net(x)).backward()
    return ring[query, "grad_input"][0]


def test_grad_input_is_the_gradient_through_this_module_alone():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = x * 1
            return self.left(x) + self.right(x) + x

    net = Branches()
    seen = {}
    handle = net.left.register_full_backward_hook(lambda module, given, out: seen.update(left=given[0]))
    got = grad_inputs(net, "left", torch.randn(2, 3, requires_grad=True))
    handle.remove()
    assert torch.equal(got, seen["left"])


def test_grad_input_of_a_module_that_overwrites_its_input():
    x = torch.randn(2, 3)
    expected = None
    for inplace in (False, True):
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=inplace))
        torch.manual_seed(1)
        nn.init.normal_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        got = grad_inputs(net, "1", x)
        assert expected is None or torch.equal(got, expected)
        expected = got


def test_grad_input_of_one_in_place_module_after_another():
    x, expected = torch.randn(2, 3), None
    for inplace in (False, True):
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3, inplace), nn.Dropout(0.5, inplace), nn.Linear(3, 3))
        for parameter in net.parameters():
            torch.nn.init.constant_(parameter, 0.3)
        ring = Ring(max_passes=1)
        torch.manual_seed(0)
        with Session(net, [Tap("*", Record(ring), port="grad_input")]):
            net(x).square().sum().backward()
        got = [ring[path, "grad_input"][0] for path in "123"]
        assert expected is None or all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        expected = got


@pytest.mark.parametrize(
    "view",
    [
        nn.Flatten(),
        nn.Unflatten(1, (2, 4)),
        Returning(lambda x: x[:, 2:6]),
        Returning(lambda x: x.reshape(4, 4).t()),
        Returning(lambda x: x[:, ::2].unsqueeze(1)),
    ],
)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_views_that_are_overwritten_have_the_gradients_of_what_was_there(view, layout):
    x = torch.randn(2, 3)
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(3, 8)
        first = linear if layout == "rows" else Returning(lambda x, layer=linear: layer(x).t().contiguous().t())
        net = nn.Sequential(first, view, nn.ReLU(inplace=inplace))
        ring = Ring(max_passes=1)
        with Session(net, [Tap("*", Record(ring), port=port) for port in ("grad_input", "grad_output")]):
            out = net(x)
            out.mul(torch.arange(1, 1 + out.numel()).reshape(out.shape)).sum().backward()
        found.append([*ring["1", "grad_output"], *ring["2", "grad_output"], *ring["2", "grad_input"]])
    for plain, overwritten in zip(*found, strict=True):
        assert overwritten is not None and torch.equal(plain, overwritten) and plain.any()


def test_a_view_that_nothing_uses_has_no_gradient_though_its_base_has():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.view = nn.Linear(3, 4), nn.Flatten()

        def forward(self, x):
            x = self.linear(x)
            self.view(x.unsqueeze(-1))
            return x

    net = Net()
    with capture(net, grads=True) as acts:
        net(torch.ones(2, 3)).sum().backward()
    assert acts["view"].grad is None and acts["linear"].grad is not None


def test_grad_input_of_several_arguments_and_keywords():
    class Mix(nn.Module):
        def forward(self, a, b, *, scale):
            return a * 2 + b * scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = Mix()

        def forward(self, x):
            return self.mix(x, x * 3, scale=x.exp())

    ring = Ring(max_passes=1)
    x = torch.ones(2, requires_grad=True)
    with Session(
        Net(), [Tap("mix", Record(ring), port="grad_input"), Tap("mix", Record(ring), port="input")]
    ) as session:
        session.model(x).sum().backward()
    assert [grad.tolist() for grad in ring["mix", "grad_input"][0]] == [[2, 2], [pytest.approx(2.71828)] * 2]


def test_create_graph_and_double_backward():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    with capture(net, grads=True) as acts:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        assert torch.equal(acts["1"].grad, torch.ones(2, 3))
        grad.square().sum().backward()
    assert not acts["0"].grad.requires_grad and net[0].weight.grad is not None


PORTS = ("input", "output", "grad_input", "grad_output", "param", "param_grad")


def models():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.arange(12).reshape(2, 6)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=16))
    yield "resnet18", resnet18(), torch.randn(2, 3, 64, 64), lambda out: out.square().mean()
    yield "gpt2", gpt2, tokens, lambda out: out.logits.square().mean()
    yield "lstm", nn.LSTM(4, 5, 2, dropout=0.5), torch.randn(3, 2, 4), lambda out: out[0].sum()
    yield "encoder", nn.TransformerEncoderLayer(8, 2, 16), torch.randn(5, 2, 8), lambda out: out.square().mean()


@pytest.mark.parametrize("number", range(4))
def test_observing_taps_change_no_bit(number):
    _, net, x, loss = list(models())[number]
    results = []
    for taps in (
        [],
        [Tap(lambda path, module: True, Record(), port=port) for port in PORTS]
        if number != 2
        else [Tap("", Record(), port=port) for port in PORTS],
    ):
        torch.manual_seed(0)
        net.zero_grad()
        with Session(net, taps, on_silent="ignore"):
            value = loss(net(x))
            value.backward()
        results.append([value.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
