"""Where hooks usually fail: checkpointing, fast paths, AMP, quantized and functional models, generate, export."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from specimens import hooks_of
from torchhook import Session, SessionError, Tap, TapError, capture, edit, edits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.last(self.act(self.linear(x)))


class Checkpointed(nn.Module):
    """Blocks, the first of which is called twice, each inside a checkpoint or not."""

    def __init__(self, how=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(0.3)
        self.how = how

    def forward(self, x):
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            run = lambda x, block=block: self.drop(block(x))  # noqa: E731
            x = run(x) if self.how is None else checkpoint(run, x, use_reentrant=self.how == "reentrant")
        return x


def run_once(net, x):
    torch.manual_seed(7)
    net.zero_grad()
    net(x).square().sum().backward()


@pytest.mark.matrix("checkpointing", "one event per call and correct gradients, reentrant or not")
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointing_shows_one_event_a_call_and_right_gradients(how):
    net, x = Checkpointed(), torch.randn(4, 6, requires_grad=True)
    with capture(net, inputs=True, grads=True, params=True) as plain:
        run_once(net, x)
    want = [p.grad.clone() for p in net.parameters()]
    net.how = how
    with capture(net, inputs=True, grads=True, params=True) as acts:
        run_once(net, x)
    assert acts.order == plain.order
    for path in plain:
        torch.testing.assert_close(acts[path].outputs, plain[path].outputs)
        torch.testing.assert_close(acts[path].inputs, plain[path].inputs)
        torch.testing.assert_close(acts[path].grads, plain[path].grads)
    torch.testing.assert_close([p.grad for p in net.parameters()], want)
    assert acts["blocks.0.linear"].recomputed == [False, False]


@pytest.mark.matrix("checkpointing", "gradients of inputs, and of several forwards before one backward")
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_gradients_of_inputs_and_of_several_forwards_before_one_backward(how):
    net, seen = Checkpointed(how), {}
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)

    def both(net):
        torch.manual_seed(7)
        (net(x).square().sum() + 2 * net(y).square().sum()).backward()

    for how_now in (None, how):
        net.how = how_now
        with Session(net, [Tap("blocks.1", lambda e, k=how_now: seen.setdefault(k, []).append(e), "grad_input")]):
            both(net)
    assert len(seen[how]) == len(seen[None]) == 2
    by_pass = {event.pass_number: event.value for event in seen[None]}
    for event in seen[how]:
        torch.testing.assert_close(event.value, by_pass[event.pass_number])


@pytest.mark.matrix("checkpointing", "repeated calls are dropped, or with `recomputed=True` recorded and marked")
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_recomputed_calls_are_shown_and_marked_if_wanted(how):
    net, x = Checkpointed(how), torch.randn(4, 6, requires_grad=True)
    with capture(net, "**.linear", keep=None, recomputed=True) as acts:
        run_once(net, x)
    calls = acts["blocks.1.linear"]
    assert calls.recomputed == [False, True]
    torch.testing.assert_close(calls.outputs[0], calls.outputs[1])
    events = []
    with Session(net, [Tap("blocks.1.linear", events.append)], recomputed=True):
        run_once(net, x)
    assert [event.recomputed for event in events] == [False, True]


@pytest.mark.matrix(
    "checkpointing", "edits also act when the forward is repeated, so the gradients are those of the edited model"
)
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_edits_act_again_where_a_checkpoint_computes_again(how):
    net, x = Checkpointed(), torch.randn(4, 6, requires_grad=True)
    changes = {
        "blocks.0.linear": edits.scale(0.5),
        "blocks.1.act": edits.noise(0.1, seed=1),
        ("blocks.1", "input"): edits.add(torch.ones(6)),
        ("blocks.0.last", "grad_output"): edits.scale(3.0),
    }
    results = []
    for net.how in (None, how):
        x.grad = None
        with edit(net, changes):
            run_once(net, x)
        results.append([x.grad.clone(), *(p.grad.clone() for p in net.parameters())])
    torch.testing.assert_close(results[1], results[0])
    with capture(net, "blocks.0.linear") as clean:
        net(x)
    if how == "non-reentrant":
        with pytest.raises(TapError, match="differs from call to call.*checkpoint"):
            with edit(net, {"blocks.0.linear": edits.patch(clean)}):
                run_once(net, x)


def test_checkpoint_sequential_and_the_checkpoints_of_transformers():
    layers = nn.Sequential(*[Block() for _ in range(4)])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=True)

    x = torch.randn(3, 6, requires_grad=True)
    with capture(layers, grads=True) as plain:
        layers(x).square().sum().backward()
    with capture(Net(), grads=True) as acts:
        acts._session.model(x).square().sum().backward()
    assert [f"layers.{path}" for path in plain] == list(acts)
    for path in plain:
        torch.testing.assert_close(acts[f"layers.{path}"].grads, plain[path].grads)


@pytest.mark.matrix("checkpointing", "Hugging Face's `gradient_checkpointing_enable`")
@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_faces_gradient_checkpointing(reentrant):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    net, tokens = LlamaForCausalLM(config).train(), torch.arange(12).reshape(2, 6)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
            net.enable_input_require_grads()
        with capture(net, "model.layers.*", "**.mlp", "**.q_proj", grads=True) as acts:
            net(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        results.append(acts)
    plain, acts = results
    assert acts.order == plain.order
    for path in plain:
        torch.testing.assert_close(acts[path].output, plain[path].output)
        torch.testing.assert_close(acts[path].grad, plain[path].grad)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.matrix(
    "fast paths", "inside `nn.TransformerEncoder` in eval mode, also with padding masks (nested tensors)"
)
@pytest.mark.parametrize("padded", [False, True])
def test_inside_a_fused_transformer_encoder(padded):
    net, x = encoder(), torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    before, kept = hooks_of(net), net.use_nested_tensor
    with torch.no_grad():
        fast = net(x, src_key_padding_mask=mask)
        with pytest.warns(UserWarning, match="fast path"), capture(net, "**.linear1", "layers.0") as acts:
            slow = net(x, src_key_padding_mask=mask)
        assert acts["layers.0.linear1"].output.shape == (2, 5, 16) and not acts["layers.0"].output.is_nested
        real = ~mask if padded else torch.ones(2, 5, dtype=bool)
        torch.testing.assert_close(slow[real], fast[real])
        torch.testing.assert_close(net(x, src_key_padding_mask=mask), fast, rtol=0, atol=0)
    assert hooks_of(net) == before and net.use_nested_tensor is kept


@pytest.mark.matrix("fast paths", "`out_proj` of `nn.MultiheadAttention`, in eval and in training")
@pytest.mark.parametrize("training", [False, True])
def test_the_output_projection_of_multihead_attention(training):
    net = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    x, before = torch.randn(2, 5, 8), hooks_of(net)
    plain, _ = net(x, x, x, need_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if training else "ignore")
        with capture(net, "out_proj", inputs=True, grads=training) as acts:
            seen, _ = net(x, x, x, need_weights=False)
            if training:
                seen.sum().backward()
    torch.testing.assert_close(seen, plain)
    torch.testing.assert_close(acts["out_proj"].output, seen.detach())
    torch.testing.assert_close(net.out_proj(acts["out_proj"].input), seen)
    assert hooks_of(net) == before and (not training or acts["out_proj"].grad is not None)
    with torch.no_grad(), pytest.warns(UserWarning, match="fast path") if not training else warnings.catch_warnings():
        with capture(net, "out_proj") as acts:
            twin = copy.deepcopy(net)
            net(x, x, x)
    assert "forward" in vars(twin) and twin.forward.__self__ is twin  # the copy runs as itself
    torch.testing.assert_close(twin(x, x, x)[0], plain)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_trains_the_same_to_the_last_bit(batch_first):
    torch.manual_seed(0)
    net = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=batch_first)
    source, target = torch.randn(5, 7, 32), torch.randn(5, 7, 32)

    def trained(model, **options):
        torch.manual_seed(1)
        with capture(model, **options) if options else contextlib.nullcontext() as acts:
            output = model(source, target)
            output.square().mean().backward()
        return acts, [output, *(parameter.grad for parameter in model.parameters())]

    _, plain = trained(copy.deepcopy(net))
    for options in ({"outputs": True}, {"grads": True}, {"inputs": True, "grads": True, "params": True}):
        acts, seen = trained(copy.deepcopy(net), **options)
        assert all(map(torch.equal, plain, seen)), options
        shown = acts["decoder.layers.1.self_attn.out_proj"].output
        assert shown.shape == (5, 7, 32)


@pytest.mark.matrix("fast paths", "only the selected modules leave the fast path, with one warning")
def test_only_what_is_selected_leaves_the_fast_path():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.unseen = encoder(), encoder()

        def forward(self, x):
            return self.unseen(self.seen(x))

    net = Two().eval()
    with torch.no_grad(), pytest.warns(UserWarning, match="fast path") as record:
        with capture(net, "seen.layers.*.linear1"):
            assert net.unseen.use_nested_tensor and not net.seen.use_nested_tensor
            net(torch.randn(2, 5, 8))
    assert len(record) == 1


@pytest.mark.parametrize("query", ["layers.0", "**.linear1", "**.out_proj"])
def test_nothing_is_said_of_a_fast_path_that_is_switched_off(query):
    net, x = encoder(), torch.randn(2, 5, 8)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            plain = net(x)
            with capture(net, query) as acts:
                seen = net(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert torch.equal(seen, plain) and len(acts)


@pytest.mark.matrix("AMP", "values and gradients in the dtype of autocast")
def test_autocast():
    net, x = Checkpointed(), torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16), capture(net, "**.linear", grads=True) as acts:
        run_once(net, x)
    assert acts["blocks.0.linear"].output.dtype == torch.bfloat16 == acts["blocks.0.linear"].grad.dtype
    with torch.autocast("cpu", torch.bfloat16), edit(net, {"blocks.0.linear": edits.add(torch.ones(6))}):
        net(x)


@pytest.mark.matrix("quantized", "dynamic int8 models, captured and edited")
def test_dynamically_quantized():
    net = torch.ao.quantization.quantize_dynamic(Checkpointed().eval(), {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(4, 6)
    plain = net(x)
    with capture(net, "**.linear", "**.last", inputs=True) as acts:
        assert torch.equal(net(x), plain)
    assert torch.equal(net.blocks[0].linear(acts["blocks.0.linear"].inputs[0]), acts["blocks.0.linear"].outputs[0])
    with edit(net, {"blocks.0": edits.zero}):
        assert not torch.equal(net(x), plain)


@pytest.mark.matrix("inference_mode", "values and edits as under `no_grad`")
def test_inference_mode():
    net, x = Checkpointed().eval(), torch.randn(4, 6)
    with torch.no_grad(), capture(net, inputs=True) as plain:
        net(x)
    with torch.inference_mode():
        with capture(net, inputs=True) as acts:
            net(x)
        with edit(net, {"blocks.0.linear": edits.zero, "drop": edits.ablate(channels=0, with_="mean")}):
            net(x)
    for path in plain:
        assert all(map(torch.equal, acts[path].outputs, plain[path].outputs))


@pytest.mark.matrix("torch.func", "`functional_call` works; `vmap` and `grad` are refused")
def test_functional_call_is_right_and_transforms_are_refused():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    with capture(net, "0", params=True) as acts:
        torch.func.functional_call(net, zeros, (x,))
    assert acts["0"].output.abs().sum() == 0 and acts["0.weight"].param.abs().sum() == 0
    before = hooks_of(net)
    for transformed in (
        lambda: torch.func.vmap(net)(x),
        lambda: torch.func.grad(lambda x: net(x).sum())(x),
    ):
        with pytest.raises(SessionError, match=r"torch\.func.*without the transform"):
            with capture(net, "0"):
                transformed()
    assert hooks_of(net) == before

    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return torch.func.vmap(self.layer)(x)

    inner = Mapped()
    with pytest.raises(TapError, match=r"inside torch\.func"):
        with capture(inner, "layer"):
            inner(x)
    with warnings.catch_warnings(), torch.no_grad(), capture(inner, "layer") as acts:
        warnings.simplefilter("ignore")  # torch's, of vmap being slow here
        inner(x)
    with pytest.raises(TapError, match=r"inside torch\.func"):
        _ = acts["layer"].output


@pytest.mark.matrix("torch.jit, torch.export", "their modules are refused with the reason")
def test_torch_jit_and_torch_export_say_that_hooks_cannot_fire():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU())), torch.randn(2, 3)
    traced, scripted = torch.jit.trace(net, x), torch.jit.script(net)
    exported = torch.export.export(net, (x,)).module()
    for model in (traced, scripted):
        for path in ("0", ""):
            with pytest.raises(SessionError, match="torch.jit.*hook the module that it was made from"):
                capture(model, path).open()
    with pytest.raises(SessionError, match="torch.export.*hook the module that it was made from"):
        capture(exported, "0").open()
    with capture(exported, "") as acts:
        assert torch.equal(exported(x), acts[""].output)
    symbolic = torch.fx.symbolic_trace(net)
    with capture(symbolic, "0") as acts:
        symbolic(x)
    assert acts["0"].output.shape == (2, 3)


@pytest.mark.matrix("torch.jit, torch.export", "exporting or tracing a tapped model is refused")
@pytest.mark.parametrize("strict", [False, True])
def test_exporting_a_tapped_model_is_refused(strict):
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    before = hooks_of(net)
    with pytest.raises(Exception, match=r"torch\.export"):
        with capture(net, "0", ""):
            torch.export.export(net, (x,), strict=strict)
    assert hooks_of(net) == before
    with pytest.raises(SessionError, match=r"torch\.jit\.trace"), capture(net, "0"):
        torch.jit.trace(net, x)


@pytest.mark.matrix("generate()", "every step by its number, the prompt first")
def test_every_step_of_generate_is_addressable():
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=32)).eval()
    prompt = torch.arange(1, 6).reshape(1, 5)
    with capture(net, "transformer.h.1.mlp", keep=None) as acts:
        tokens = net.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    steps = acts["transformer.h.1.mlp"].outputs
    assert [step.shape[1] for step in steps] == [5, 1, 1, 1]  # the prompt, then a token each
    with torch.no_grad(), capture(net, "transformer.h.1.mlp") as whole:
        net(tokens[:, :-1])
    torch.testing.assert_close(torch.cat(steps, 1), whole["transformer.h.1.mlp"].output)
    steered = []
    with edit(net, {"transformer.h.0.mlp": lambda x: steered.append(x.shape[1]) or x * -3}):
        other = net.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert steered == [5, 1, 1, 1] and other.shape == tokens.shape
