"""What reviewers broke, and must stay mended."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from specimens import Returning, hooks_of
from torchhook import (
    NotRecordedError,
    Session,
    SessionError,
    Tap,
    TapError,
    capture,
    edit,
    edits,
    every,
    skip,
    sweep,
)

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_a_model_that_works_in_place_does_not_write_to_the_source():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.ones(2, 3)
    for value in (torch.full((2, 3), -1.0), torch.tensor([1.0, -2.0, 3.0])):
        before = value.clone()
        with torch.no_grad(), edit(net, {"0": edits.replace(value)}):
            net(x)
        assert torch.equal(value, before)
    with torch.no_grad():
        with capture(net, "0") as clean:
            net(x)
        kept = clean["0"].output.clone()
        with edit(net, {"0": edits.patch(clean)}):
            net(x)
            net(x)
    assert torch.equal(clean["0"].output, kept)


def test_a_scheduled_edit_under_a_checkpoint_is_refused_not_forgotten():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(lambda x: torch.tanh(self.a(x)).square(), x, use_reentrant=False)

    net = Net()
    with pytest.raises(TapError, match="schedule"):
        with Session(net, [Tap("a", edits.scale(3.0), when=every(1))]):
            net(torch.ones(1, 3, requires_grad=True)).sum().backward()


def test_a_sweep_over_a_value_that_has_no_batch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.bias = Returning(lambda x: torch.linspace(0, 1, 4).expand(1, 4))

        def forward(self, x):
            return self.layer(x) + self.bias(x)

    net, x = Net().eval(), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="run alone"):
        together = sweep(net, x, ["layer", "bias"], edits.zero, torch.sum)
    alone = sweep(net, x, ["layer", "bias"], edits.zero, torch.sum, batch=1)
    assert [row.value for row in together] == [row.value for row in alone] and together[1].change != 0


def test_at_of_a_gradient_is_looked_up_where_it_is_said():
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2, requires_grad=True)
    net = nn.Sequential(Returning(lambda x: x * 2))
    for at in (0, 5):
        with pytest.raises(TapError, match="at="):
            with edit(net, {("0", "grad_output"): edits.zero(at=at)}):
                net(x).sum().backward()
    outer = nn.Sequential(Returning(lambda x: BaseModelOutput(last_hidden_state=x * 2)), Returning(lambda o: o[0]))
    with edit(outer, {("0", "grad_output"): edits.zero(at=0)}):
        outer(x).sum().backward()
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    "layer, x, dim",
    [
        (nn.Linear(3, 3), torch.randn(2, 4, 5, 3), -1),
        (nn.Conv2d(2, 3, 1), torch.randn(2, 5, 6), 0),
        (nn.Conv2d(2, 3, 1), torch.randn(4, 2, 5, 6), 1),
        (nn.LayerNorm(3), torch.randn(2, 4, 5, 3), -1),
    ],
)
def test_channels_are_where_the_module_puts_them(layer, x, dim):
    net = nn.Sequential(layer)
    with torch.no_grad(), edit(net, {"0": edits.ablate(channels=1)}):
        out = net(x)
    gone = out.abs().sum([d for d in range(out.dim()) if d != dim % out.dim()]) == 0
    assert gone.tolist() == [False, True, False]


def test_indices_in_every_form():
    x = torch.ones(1, 4)
    for given in (
        [1, 3],
        (1, 3),
        torch.tensor([1, 3]),
        torch.tensor([False, True] * 2),
        [False, True] * 2,
        slice(1, 4, 2),
    ):
        net = nn.Sequential(nn.Identity())
        with edit(net, {"0": edits.ablate(channels=given, with_=7.0)}):
            assert net(x).tolist() == [[1, 7, 1, 7]]
    with pytest.raises(TypeError, match="must be integers"):
        edits.ablate(channels=[1.7])


def test_a_part_of_the_value():
    net, x = nn.Sequential(nn.Identity()), torch.ones(2, 3, 2)
    with edit(net, {"0": edits.add(torch.tensor([5.0, 0.0]), where=(slice(None), -1))}):
        out = net(x)
    assert out[:, -1].tolist() == [[6, 1], [6, 1]] and out[:, :-1].eq(1).all()


def test_patching_inputs_by_position_and_by_keyword_and_from_the_newest_pass():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returning(None)
            self.inner.forward = lambda x, y=None: x + 10 * y

        def forward(self, x):
            return self.inner(x, y=x * 2)

    net = Net()
    with capture(net, "inner", inputs=True, keep=None) as clean:
        net(torch.tensor([9.0]))
        net(torch.tensor([1.0]))
    for at, expected in ((0, 1), ("y", 20)):
        with edit(net, {("inner", "input"): edits.patch(clean, at=at)}):
            assert net(torch.tensor([0.0])).item() == expected
    with edit(net, {"inner": edits.patch(clean)}):
        assert net(torch.tensor([0.0])).item() == 21  # of the newest pass
    with pytest.raises(TapError, match=r"does not have the input of 'inner'.*capture\(model, 'inner', inputs=True\)"):
        with capture(net, "inner") as outputs:
            net(torch.tensor([1.0]))
        edit(net, {("inner", "input"): edits.patch(outputs, at=0)}).open()


def test_overlapping_detours_end_in_any_order():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 4, 8)
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    before = hooks_of(net)
    with torch.no_grad(), pytest.warns(UserWarning, match="fast path"):
        first = capture(net, "**.linear1", "**.out_proj").open()
        second = capture(net, "**.linear1", "**.out_proj").open()
        net(x, src_key_padding_mask=mask)
        first.close()
        net(x, src_key_padding_mask=mask)
        second.close()
    assert net.use_nested_tensor and hooks_of(net) == before


def test_a_detour_leaves_anothers_forward_alone():
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, batch_first=True)})
    net.forward = lambda x: net["attn"](x, x, x)[0]
    x = torch.randn(2, 4, 8)
    with skip(net, "attn", returns=lambda x: (x, None)), capture(net, "attn.out_proj", on_silent="ignore") as acts:
        assert torch.equal(net(x), x)
    assert "attn.out_proj" in acts.silent


def test_skip_refuses_what_returns_a_tuple():
    net = nn.Sequential(nn.LSTM(2, 2), nn.MultiheadAttention(2, 1))
    for path in "01":
        with pytest.raises(ValueError, match=r"returns a tuple.*returns=lambda"):
            skip(net, path)


def test_two_equal_calls_of_a_reentrant_checkpoint_keep_their_gradients():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Returning(lambda x: x * 1.0)
            self.how = None

        def forward(self, x):
            run = lambda x: self.layer(x)  # noqa: E731
            outs = [run(x) if self.how is None else checkpoint(run, x, use_reentrant=True) for _ in range(2)]
            return outs[0] + 10 * outs[1]

    net, results = Net(), []
    for net.how in (None, "reentrant"):
        with capture(net, "layer", grads=True) as acts:
            net(torch.ones(1, requires_grad=True) * 3).sum().backward()
        results.append([gradient.item() for gradient in acts["layer"].grads])
    assert results[1] == [1, 10]


def test_sweeps_say_what_they_want():
    net, x = nn.Sequential(nn.Identity()).eval(), torch.ones(1, 2)
    with pytest.raises(TypeError, match="a function from the clean values"):
        sweep(net, x, "0", edits.zero, torch.sum, source=x)
    with pytest.raises(TypeError, match="must return one number"):
        sweep(net, x, "0", edits.zero, lambda out: out)
    with pytest.warns(UserWarning, match="training mode"):
        sweep(nn.Sequential(nn.Identity()), x, "0", edits.zero, torch.sum)
    with pytest.raises(ValueError, match="pair of a query and a port.*grad_output"):
        edit(net, {("0", "outputs"): edits.zero})


def test_patching_heads_one_by_one():
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=9)).eval()
    clean, corrupt = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 2, 3]])
    result = sweep(
        net,
        {"input_ids": corrupt},
        "transformer.h.*.attn",
        lambda capture: edits.ablate(heads=[0, 1], with_=capture),
        lambda out: out.logits[0, -1, 0],
        source={"input_ids": clean},
    )
    assert len(result) == 2 and all(row.change != 0 for row in result)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.attn(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("training", [False, True])
def test_the_projection_of_a_compiled_attention(training):
    net, x = Block().train(training), torch.randn(2, 3, 8)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(training), capture(run, "attn.out_proj", "out", inputs=True) as acts:
        run(x)
    torch.testing.assert_close(acts["attn.out_proj"].output, acts["out"].input)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False)


def test_edits_of_a_compiled_checkpoint():
    net, x = Repeated(), torch.randn(2, 3, requires_grad=True)
    with edit(net, {"a": edits.scale(2.0)}):
        net(x).sum().backward()
    want = net.a.weight.grad.clone()
    net.zero_grad()
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with edit(run, {"a": edits.scale(2.0)}):
        run(x).sum().backward()
    torch.testing.assert_close(net.a.weight.grad, want)


@pytest.mark.matrix("torch.compile", "with checkpointing: values and edits are correct, gradients inside are refused")
def test_captures_of_a_compiled_checkpoint():
    net, x = Repeated(), torch.randn(2, 3, requires_grad=True)
    with capture(net, "a") as eager:
        net(x)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, "a") as acts:
        run(x).sum().backward()
    torch.testing.assert_close(acts["a"].outputs, eager["a"].outputs)
    with pytest.raises(TapError, match="inside a compiled checkpoint cannot be captured; capture the uncompiled model"):
        with capture(run, "a", grads=True):
            run(x).sum().backward()


@pytest.mark.parametrize("returns", [lambda x: torch.max(x, 1), lambda x: (x, x.shape)], ids=["max", "shape"])
def test_tuples_of_torchs_own_in_a_graph(returns):
    net, x = nn.Sequential(Returning(returns), Returning(lambda pair: pair[0] * 1)), torch.randn(2, 3)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, "0") as acts:
        torch.testing.assert_close(run(x), acts["0"].output[0])


def test_nothing_of_a_compiled_capture_outlives_it():
    net, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with capture(run, "0", grads=True, keep=None) as acts:
        for _ in range(5):
            run(x).sum().backward()
    kept = weakref.ref(acts["0"].outputs[0])
    del acts
    gc.collect()
    assert kept() is None


def test_a_backward_after_the_scope_is_not_seen_in_a_graph_either():
    net, seen = nn.Sequential(nn.Linear(3, 3)), []
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with Session(run, [Tap("0", seen.append, "grad_output")], on_silent="ignore"):
        out = run(torch.randn(2, 3))
    out.sum().backward()
    assert not seen and net[0].weight.grad is not None


def test_stop_and_a_compile_in_the_middle():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    run = torch.compile(net, backend="aot_eager")
    with pytest.raises(SessionError, match="stop=True"):
        capture(run, "0", stop=True).open()
    net.compile(backend="aot_eager")
    with capture(net, "0"):
        net(x)
        net.compile(backend="eager")
        mine = net._compiled_call_impl
    assert net._compiled_call_impl is mine


def test_reading_what_was_not_recorded_for_a_patch():
    net = nn.Sequential(nn.Identity())
    with capture(net, "0") as acts:
        net(torch.ones(1))
    with pytest.raises(NotRecordedError):
        acts["0"].newest("input")
