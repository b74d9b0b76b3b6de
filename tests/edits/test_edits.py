"""What each edit does, where it may act, and what it refuses."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from specimens import InPlace, Returning, hooks_of
from torchhook import Record, Ring, SelectionError, Session, Tap, TapError, capture, edit, edits, skip


def chain():
    return nn.Sequential(nn.Identity(), nn.Identity())


def through(change, x, **options):
    with edit(chain(), {"0": change}, **options) as session:
        return session.model(x)


def test_each_edit_says_what_it_means():
    x = torch.tensor([[1.0, -2.0, 3.0]])
    assert torch.equal(through(edits.zero, x), torch.zeros(1, 3))
    assert torch.equal(through(edits.zero(), x), torch.zeros(1, 3))
    assert torch.equal(through(edits.replace(torch.tensor([7.0, 8.0, 9.0])), x), torch.tensor([[7.0, 8.0, 9.0]]))
    assert torch.equal(through(edits.add(torch.tensor([1.0, 0.0, 0.0])), x), torch.tensor([[2.0, -2.0, 3.0]]))
    assert torch.equal(through(edits.scale(-2), x), -2 * x)
    assert torch.equal(through(edits.clamp(-1, 2), x), torch.tensor([[1.0, -1.0, 2.0]]))
    assert torch.equal(through(edits.patch(torch.ones(1, 3)), x), torch.ones(1, 3))
    assert torch.equal(through(edits.patch(torch.zeros(1, 3), where=(0, [0, 2])), x), torch.tensor([[0.0, -2.0, 0.0]]))
    assert torch.equal(through(torch.abs, x), x.abs())
    assert torch.equal(through(edits.apply(torch.neg), x), -x)


def test_noise_has_its_spread_and_its_seed():
    x = torch.zeros(10_000)
    a, b = through(edits.noise(0.5, seed=1), x), through(edits.noise(0.5, seed=1), x)
    assert torch.equal(a, b) and abs(a.std() - 0.5) < 0.02
    assert not torch.equal(a, through(edits.noise(0.5, seed=2), x))
    assert not torch.equal(through(edits.noise(0.5), x), through(edits.noise(0.5), x))


def test_vectors_follow_the_dtype_and_the_graph():
    vector = torch.ones(3, requires_grad=True)
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    y = through(edits.add(vector), x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and vector.grad.tolist() == [2, 2, 2] and x.grad.shape == (2, 3)


@pytest.mark.parametrize("with_", ["zero", "mean"])
def test_ablation_of_channels_and_positions(with_):
    images, tokens = torch.randn(2, 4, 3, 3), torch.randn(2, 5, 6)
    out = through(edits.ablate(channels=[1, -1], with_=with_), images)
    mean = images.mean((0, 2, 3)) if with_ == "mean" else torch.zeros(4)
    assert torch.equal(out[:, [0, 2]], images[:, [0, 2]])
    torch.testing.assert_close(out[:, [1, 3]], mean[[1, 3]].view(1, 2, 1, 1).expand(2, 2, 3, 3))
    out = through(edits.ablate(positions=2, with_=with_), tokens)
    mean = tokens.mean((0, 1)) if with_ == "mean" else torch.zeros(6)
    torch.testing.assert_close(out[:, 2], mean.expand(2, 6))
    assert torch.equal(out[:, [0, 1, 3, 4]], tokens[:, [0, 1, 3, 4]])
    out = through(edits.ablate(channels=[0], with_=with_), tokens)
    assert torch.equal(out[..., 1:], tokens[..., 1:]) and not torch.equal(out[..., 0], tokens[..., 0])


def test_the_channels_of_a_sequence_follow_the_module():
    net = nn.Sequential(nn.Conv1d(3, 4, 1))
    with edit(net, {"0": edits.ablate(channels=[2])}):
        out = net(torch.randn(2, 3, 5))
    assert out[:, 2].abs().sum() == 0 and out[:, [0, 1, 3]].abs().min() > 0
    out = through(edits.ablate(channels=[1], dim=1), torch.ones(2, 3, 5))
    assert out[:, 1].sum() == 0 and out.sum() == 20


def test_ablation_with_a_capture_takes_the_same_site_and_call():
    layer = nn.Identity()
    net = nn.Sequential(layer, Returning(lambda x: x + 1), layer)
    with capture(net, "0") as other:
        net(torch.full((1, 3), 10.0))
    with edit(net, {"0": edits.ablate(channels=[0], with_=other)}):
        assert net(torch.zeros(1, 3)).tolist() == [[11.0, 1.0, 1.0]]
    with edit(net, {"0": edits.patch(other)}), capture(net, "0") as acts:
        net(torch.zeros(1, 3))
    assert [output[0, 0].item() for output in acts["0"].outputs] == [10.0, 11.0]


@given(st.data())
def test_patching_everything_from_a_clean_run_gives_the_clean_run(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    net = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])
    where = data.draw(st.integers(0, len(net) - 1))
    clean_x, x = torch.randn(2, sizes[0]), torch.randn(2, sizes[0])
    with capture(net) as clean:
        expected = net(clean_x)
    with edit(net, {str(where): edits.patch(clean)}):
        assert torch.equal(net(x), expected)
    index = (slice(None), 0)
    with edit(net, {str(where): edits.patch(clean, where=index)}), capture(net) as acts:
        net(x)
    assert torch.equal(acts[str(where)].output[index], clean[str(where)].output[index])


class Attention(nn.Module):
    """As most are written: heads side by side until the projection."""

    def __init__(self, heads=4):
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def without_heads(weight, heads, count):
    gone = weight.clone()
    size = weight.shape[1] // count
    for head in heads:
        gone[:, head * size : (head + 1) * size] = 0
    return gone


@pytest.mark.parametrize("query", ["attn", "attn.proj"])
def test_heads_are_ablated_before_the_projection(query):
    net = nn.Sequential()
    net.add_module("attn", Attention())
    x = torch.randn(2, 5, 8)
    with edit(net, {query: edits.ablate(heads=[0, 3])}):
        out = net(x)
    net.attn.proj.weight.data = without_heads(net.attn.proj.weight.data, [0, 3], 4)
    torch.testing.assert_close(out, net(x))


def test_heads_of_the_libraries_models():
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    tokens = torch.arange(1, 7).reshape(1, 6)
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    models = {
        "h.0.attn": (GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)), "c_proj"),
        "layers.0.self_attn": (LlamaModel(LlamaConfig(vocab_size=9, **size)), "o_proj"),
        "encoder.layer.0.attention": (BertModel(BertConfig(vocab_size=9, **size)), "output.dense"),
    }
    for path, (net, projection) in models.items():
        net.eval()
        with torch.no_grad():
            with edit(net, {path: edits.ablate(heads=1)}):
                out = net(tokens)[0]
            weight = net.get_submodule(f"{path}.{projection}").weight
            rows = weight.data.T if "c_proj" in projection else weight.data
            rows.copy_(without_heads(rows, [1], 2))
            torch.testing.assert_close(out, net(tokens)[0], msg=path)


def test_heads_of_multihead_attention_and_of_what_has_none():
    net, x = nn.MultiheadAttention(8, 4, batch_first=True), torch.randn(2, 5, 8)
    with edit(net, {"": edits.ablate(heads=2)}):
        out, _ = net(x, x, x)
    net.out_proj.weight.data = without_heads(net.out_proj.weight.data, [2], 4)
    torch.testing.assert_close(out, net(x, x, x)[0])
    block = nn.ModuleDict({"mlp": nn.ModuleDict({"c_proj": nn.Linear(4, 4)}), "attn": Attention()})
    for query in ("mlp", "mlp.c_proj"):
        with pytest.raises(SelectionError, match="number of heads in 'mlp.*ablate the channels"):
            edit(block, {query: edits.ablate(heads=0)}).open()
    with pytest.raises(SelectionError, match="no output projection in 'attn.qkv'"):
        edit(block, {"attn.qkv": edits.ablate(heads=0)}).open()
    with pytest.raises(SelectionError, match="no output projection in '0'"):
        edit(nn.Sequential(nn.Sequential(nn.ReLU())), {"0": edits.ablate(heads=0)}).open()
    with pytest.raises(TapError, match=r"heads=\[9\] is out of range: there are 4"):
        with edit(net, {"": edits.ablate(heads=9)}):
            net(x, x, x)


@dataclass(frozen=True)
class Result:
    hidden: torch.Tensor
    other: int = 3


Pair = namedtuple("Pair", "first second")


def containers():
    from transformers.modeling_outputs import BaseModelOutput

    return {
        "tuple": (lambda x: (x, x + 1), 1),
        "list": (lambda x: [x, [x + 1]], (1, 0)),
        "dict": (lambda x: {"a": x, "b": x + 1}, "b"),
        "namedtuple": (lambda x: Pair(x, x + 1), 1),
        "dataclass": (lambda x: Result(x), "hidden"),
        "ModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)), "last_hidden_state"),
        "ModelOutput by position": (lambda x: BaseModelOutput(last_hidden_state=x), 0),
        "one of a pair": (lambda x: (x, None), None),
    }


@pytest.mark.parametrize("name", containers())
def test_one_leaf_of_a_container_is_edited_and_the_rest_kept(name):
    wrap, at = containers()[name]
    net, x = nn.Sequential(Returning(wrap)), torch.ones(2)
    plain = wrap(x)
    with edit(net, {"0": edits.scale(5.0, at=at)}):
        out = net(x)
    assert type(out) is type(plain)
    flat = torch.utils._pytree.tree_leaves(vars(out) if name == "dataclass" else out)
    values = [leaf.tolist() for leaf in flat if isinstance(leaf, torch.Tensor)]
    original = torch.utils._pytree.tree_leaves(vars(plain) if name == "dataclass" else plain)
    originals = [leaf.tolist() for leaf in original if isinstance(leaf, torch.Tensor)]
    changed = [a for a, b in zip(values, originals, strict=True) if a != b]
    assert len(changed) == 1 and changed[0] in ([5.0, 5.0], [10.0, 10.0])


def test_which_leaf_must_be_said():
    net = nn.Sequential(Returning(lambda x: {"a": x, "b": (x, x)}))
    for change in (edits.zero, edits.zero(at="c"), edits.zero(at="b")):
        with pytest.raises(TapError, match=r"output of '0'.*tensors at 'a', \('b', 0\), \('b', 1\).*at="):
            with edit(net, {"0": change}):
                net(torch.ones(1))
    with pytest.raises(TapError, match="leave out at="):
        through(edits.zero(at=0), torch.ones(1))


class TakesKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Returning(lambda x: x)
        self.inner.forward = lambda x, y=None, *, scale=None: x + y * scale

    def forward(self, x):
        return self.inner(x, x * 2, scale=torch.tensor(10.0))


def test_inputs_by_position_and_by_keyword():
    net, x = TakesKeywords(), torch.ones(2)
    assert net(x).tolist() == [21, 21]
    for change, expected in (
        (edits.zero(at=0), [20, 20]),
        (edits.zero(at=1), [1, 1]),
        (edits.replace(3.0, at="scale"), [7, 7]),
        (edits.apply(lambda args: (args[0] * 5, args[1])), [25, 25]),
    ):
        with edit(net, {"inner": change}, port="input"), capture(net, "inner", inputs=True) as acts:
            assert net(x).tolist() == expected
        assert acts["inner"].input[0].shape == (2,)
        with edit(net, {("inner", "input"): change}):
            assert net(x).tolist() == expected
    with pytest.raises(TapError, match=r"input of 'inner'.*the arguments.*tensors at 0, 1, 'scale'"):
        with edit(net, {("inner", "input"): edits.zero}):
            net(x)


def test_gradients_of_outputs_inputs_and_parameters():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    x = torch.ones(1, 2, requires_grad=True)
    net(x).sum().backward()
    plain, plain_x = net[0].weight.grad.clone(), x.grad.clone()
    for port, path in (("grad_output", "0"), ("grad_input", "1"), ("grad_output", "1")):
        net.zero_grad()
        x.grad = None
        with edit(net, {path: edits.scale(3.0)}, port=port):
            net(x).sum().backward()
        torch.testing.assert_close(net[0].weight.grad, 3 * plain)
        torch.testing.assert_close(x.grad, 3 * plain_x)
    net.zero_grad()
    with edit(net, {"0": edits.scale(0.5)}, port="param_grad"):
        net(x).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, 0.5 * plain)


def test_gradients_see_the_edits_before_them_and_the_next_ones_after():
    net, seen = nn.Sequential(nn.Identity(), nn.Identity()), []
    x = torch.ones(1, requires_grad=True)
    taps = [
        Tap("0", lambda event: seen.append(event.value.item()), "grad_output"),
        Tap("0", edits.scale(4.0), "grad_output"),
        Tap("0", lambda event: seen.append(event.value.item()), "grad_output"),
    ]
    with Session(net, taps):
        net(x).sum().backward()
    assert seen == [1.0, 4.0] and x.grad.item() == 4.0


def test_a_gradient_of_an_overwritten_view_is_not_edited_silently():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.view = Returning(lambda x: x.view(-1))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.view(self.linear(x))
            y.mul_(2)
            return y

    net = Net()
    with pytest.raises(TapError, match="cannot edit the gradient.*overwrote"):
        with edit(net, {("view", "grad_output"): edits.zero}):
            net(torch.ones(1, 3)).sum().backward()


def test_the_order_of_the_list_is_the_order_at_a_site():
    net, ring = chain(), Ring(max_entries=9)
    taps = [
        Tap("0", Record(ring)),
        Tap("0", edits.add(1.0)),
        Tap("0", Record(ring)),
        Tap("0", edits.scale(10.0)),
        Tap("0", Record(ring)),
    ]
    with Session(net, taps):
        assert net(torch.ones(1)).item() == 20
    assert [value.item() for value in ring["0"]] == [1, 2, 20]
    with edit(net, {"0": edits.scale(10.0), "?": edits.add(1.0)}):
        assert net(torch.ones(1)).item() == 12
    with edit(net, {"0": edits.add(1.0)}), edit(net, {"0": edits.scale(10.0)}), capture(net, "0") as acts:
        net(torch.ones(1))
    assert acts["0"].output.item() == 20


@pytest.mark.parametrize(
    "wrong, told",
    [
        (lambda x: x[:1], r"\(1, 3\) float32 on cpu for \(2, 3\) float32 on cpu"),
        (lambda x: x.double(), r"\(2, 3\) float64 on cpu for \(2, 3\) float32"),
        (lambda x: x.to("meta"), r"float32 on meta for .* on cpu"),
        (lambda x: None, "NoneType"),
        (lambda x: (x,), "tuple"),
    ],
)
def test_what_does_not_fit_raises_with_both_at_the_site(wrong, told):
    for query, port in (("0", "output"), ("1", "input"), ("0", "grad_output")):
        net = chain()
        before = hooks_of(net)
        with pytest.raises(TapError, match=f"the {port} of '{query}'.*{told}"):
            with edit(net, {query: edits.apply(wrong, at=None)}, port=port):
                net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert hooks_of(net) == before


def test_arguments_that_make_no_sense():
    net = chain()
    for wrong, error in (
        (lambda: edit(net, [("0", edits.zero)]), TypeError),
        (lambda: edit(net, {}), ValueError),
        (lambda: edit(net, {"0": 3}), TypeError),
        (lambda: edit(net, {"0": edits.zero}, port="param"), ValueError),
        (lambda: edits.ablate(), ValueError),
        (lambda: edits.ablate(channels=1, heads=2), ValueError),
        (lambda: edits.ablate(channels=1, with_="median"), ValueError),
        (lambda: edits.clamp(), ValueError),
        (lambda: edits.patch(3), TypeError),
        (lambda: Tap("0", edits.zero, transform=abs), ValueError),
        (lambda: edit(net, {"nope": edits.zero}).open(), SelectionError),
        (lambda: skip(net), ValueError),
        (lambda: skip(net, "nope"), SelectionError),
    ):
        with pytest.raises(error):
            wrong()
    with pytest.raises(TapError, match="positions=.*dim="):
        through(edits.ablate(positions=0), torch.ones(2, 3))
    with pytest.raises(TapError, match=r"shape \(4,\), which does not fit \(2, 3\)"):
        through(edits.replace(torch.ones(4)), torch.ones(2, 3))
    with pytest.raises(TapError, match="2 calls"):
        layer = nn.Identity()
        with capture(nn.Sequential(layer, layer), "0") as acts:
            acts._session.model(torch.ones(1))
        net = nn.Sequential(layer, layer, layer)
        with edit(net, {"0": edits.patch(acts)}):
            net(torch.ones(1))


def test_only_while_open_and_only_in_this_thread_and_on_schedule():
    net, x = InPlace(), torch.randn(2, 3, 8, 8)
    plain, before = net.eval()(x), hooks_of(net)
    with edit(net, {"norm": edits.zero}):
        assert not torch.equal(net(x), plain)
        twin = copy.deepcopy(net)
        assert torch.equal(twin(x), plain)
        import threading

        other = []
        thread = threading.Thread(target=lambda: other.append(net(x)))
        thread.start()
        thread.join()
        assert torch.equal(other[0], plain)
    assert torch.equal(net(x), plain) and hooks_of(net) == before
    with Session(chain(), [Tap("0", edits.zero, when=lambda number: number == 1)]) as session:
        assert [session.model(torch.ones(1)).item() for _ in range(3)] == [1, 0, 1]


def test_marks_are_edited_too():
    import torchhook

    class Net(nn.Module):
        def forward(self, x):
            return torchhook.mark(x * 2, "doubled") + 1

    net = nn.Sequential(Net())
    with edit(net, {torchhook.marked("doubled"): edits.zero}):
        assert net(torch.ones(1)).item() == 1


def test_skipping_a_module():
    net, x = InPlace().eval(), torch.randn(2, 3, 8, 8)
    before = hooks_of(net)
    with skip(net, "norm", nn.ReLU), capture(net, "norm", inputs=True) as acts:
        out = net(x)
        twin = copy.deepcopy(net)
    torch.testing.assert_close(out, net.last(net.conv(x)) + x)
    assert torch.equal(acts["norm"].output, acts["norm"].input)
    assert torch.equal(twin(x), net(x)) and hooks_of(net) == before  # the copy runs all of it
    pairs = nn.Sequential(Returning(lambda x: (x * 9, None)), Returning(lambda pair: pair[0] + 1))
    with skip(pairs, "0", returns=lambda x: (x, None)):
        assert pairs(torch.ones(1)).item() == 2
    first, second = skip(net, "norm").open(), skip(net, "norm").open()
    first.close()
    assert "forward" in vars(net.norm)
    second.close()
    assert hooks_of(net) == before
