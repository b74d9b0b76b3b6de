"""`explain.attention` on real models, against the weights that they hand out themselves."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import BudgetError
from torchhook.core.errors import SilentError
from torchhook.explain.attention_capture import attention

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
WORDS = {"vocab_size": 50, "max_position_embeddings": 32}


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options))


def bert(**options):
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SIZES, **WORDS, **options))


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **WORDS, num_key_value_heads=2, **options))


def mistral(**options):
    from transformers import MistralConfig, MistralModel

    return MistralModel(MistralConfig(**SIZES, **WORDS, num_key_value_heads=2, sliding_window=3, **options))


def vit(**options):
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=4, **options))


WORD_MODELS = {"GPT-2": gpt2, "BERT": bert, "Llama": llama, "Mistral": mistral}
PLACES = {
    "GPT-2": "transformer.h.{}.attn",
    "BERT": "encoder.layer.{}.attention.self",
    "Llama": "model.layers.{}.self_attn",
    "Mistral": "layers.{}.self_attn",
}
PADDED = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def pair(make, **options):
    """The same seeded model, eager, and with kernels that keep their weights."""
    models = []
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(3)
        models.append(make(attn_implementation=implementation, **options).eval())
    return models


def same(one, other, **tolerance):
    torch.testing.assert_close(one, other, **{"rtol": 0, "atol": 2e-6} | tolerance)


def entropy_by_hand(weights, seen):
    """The entropy of one query over the keys that it sees."""
    found = [float(w) for w, s in zip(weights, seen, strict=True) if s]
    total = -sum(w * torch.tensor(w).log().item() for w in found if w > 0)
    return total / torch.tensor(float(len(found))).log().item()


@pytest.mark.parametrize("name", WORD_MODELS)
@pytest.mark.parametrize("padded", [None, "right", "left"])
def test_weights_under_sdpa_are_those_that_hugging_face_hands_out(name, padded):
    eager, fused = pair(WORD_MODELS[name])
    inputs = {"input_ids": torch.randint(50, (2, 9))}
    mask = torch.ones_like(PADDED)
    if padded:
        mask = PADDED if padded == "right" else PADDED.flip(1)
        inputs["attention_mask"] = mask
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
        plain = fused(**inputs)[0]
    seen = attention(fused, inputs)
    assert torch.equal(seen.output[0], plain)
    assert seen.paths == [PLACES[name].format(number) for number in range(2)]
    real = mask.bool()
    for call, weights in zip(seen, expected, strict=True):
        assert call.shape == (2, 4, 9, 9)
        same(call.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])
        assert call.entropy.isnan()[:, 0][~real].all()  # what padding looks at is of no interest
        assert not call.entropy.isnan()[:, :, 8 if padded != "right" else 5].any()
        same(call.received.sum(-1), torch.ones(2, 4))
        assert (call.received[:, 0][~real] == 0).all()


@pytest.mark.parametrize("name", ["GPT-2", "Mistral"])
def test_entropy_counts_the_keys_that_a_query_sees(name):
    seen = attention(pair(WORD_MODELS[name])[1], torch.randint(50, (1, 9)))
    reach = 3 if name == "Mistral" else 9
    weights = seen[1].weights[0, 2]
    for query in range(1, 9):
        keys = [0 <= query - key < reach for key in range(9)]
        assert float(seen[1].entropy[0, 2, query]) == pytest.approx(entropy_by_hand(weights[query], keys), abs=1e-5)
    assert seen[1].entropy[0, 2, 0].isnan()  # which sees itself alone


def test_an_image_model():
    eager, fused = pair(vit)
    image = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = eager(image, output_attentions=True).attentions
    seen = attention(fused, {"pixel_values": image}, grid=(4, 4))
    for call, weights in zip(seen, expected, strict=True):
        same(call.weights, weights)
        assert call.distance.isnan()[:, :, 0].all()  # of the class token
    place = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))
    share = expected[0][1, 3, 6, 1:]  # of the sixth token, the fifth patch
    by_hand = (share * (place - place[5]).norm(dim=-1)).sum() / share.sum()
    assert float(seen[0].distance[1, 3, 6]) == pytest.approx(float(by_hand), abs=1e-5)
    with pytest.raises(ValueError, match="grid has 9×9 patches"):
        attention(fused, {"pixel_values": image}, grid=(9, 9))


@pytest.mark.parametrize("padded", [False, True])
def test_a_sink_that_is_learnt(padded):
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(3)
    own = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **WORDS, **own, **kinds, attn_implementation="eager")).eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    inputs = {"input_ids": torch.randint(50, (2, 9)), "attention_mask": PADDED if padded else torch.ones_like(PADDED)}
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
    seen = attention(model, inputs)
    assert torch.equal(seen.output.logits, plain.logits)
    real = inputs["attention_mask"].bool()
    whole = torch.eye(9)
    for call, weights in zip(seen, plain.attentions, strict=True):
        assert call.shape == (2, 4, 9, 10) and call.added == 1 and weights.shape == (2, 4, 9, 9)
        same(call.weights[..., :9].transpose(1, 2)[real], weights.transpose(1, 2)[real])
        gaps = (torch.arange(9)[:, None] - torch.arange(9)).abs()
        distance = (weights * gaps).sum(-1) / weights.sum(-1)
        same(call.distance.transpose(1, 2)[real], distance.transpose(1, 2)[real], atol=1e-5)
        step = weights.mean(1) + torch.eye(9)
        whole = step / step.sum(-1, keepdim=True) @ whole
    same(seen.rollout()[real], whole[real])


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_encoders_and_decoders(name):
    import transformers

    sizes = {"d_model": 32, "vocab_size": 50, "decoder_start_token_id": 0}
    own = {
        "T5": {"num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48, "relative_attention_num_buckets": 8},
        "BART": {
            f"{part}_{what}": n
            for part in ("encoder", "decoder")
            for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
        },
    }[name]
    config, model = {
        "T5": (transformers.T5Config, transformers.T5Model),
        "BART": (transformers.BartConfig, transformers.BartModel),
    }[name]
    eager, fused = pair(lambda **options: model(config(**sizes, **own, **options)))
    inputs = {
        "input_ids": torch.randint(50, (2, 9)),
        "attention_mask": PADDED,
        "decoder_input_ids": torch.randint(50, (2, 5)),
    }
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True)
    seen = attention(fused, inputs)
    shapes = [call.shape for call in seen]
    assert shapes == [(2, 4, 9, 9)] * 2 + [(2, 4, 5, 5), (2, 4, 5, 9)] * 2
    real = PADDED.bool()
    for call, weights in zip(seen[:2], expected.encoder_attentions, strict=True):
        same(call.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])
    for call, weights in zip(seen[2::2], expected.decoder_attentions, strict=True):
        same(call.weights, weights)
    for call, weights in zip(seen[3::2], expected.cross_attentions, strict=True):
        same(call.weights, weights)
        assert call.distance.isnan().all() and not call.entropy.isnan().any()
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        seen.rollout()
    assert seen.rollout(seen["encoder.**"]).shape == (2, 9, 9)


@pytest.mark.parametrize("how", ["recompute", "eager", "error"])
def test_what_to_do_about_fused_kernels(how):
    eager, fused = pair(bert)
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = eager(ids, output_attentions=True).attentions
    if how == "error":
        with pytest.raises(SilentError, match=r"'encoder.layer.0.attention.self' computes attention in a fused kernel"):
            attention(fused, ids, how=how)
        assert hooks_of(fused) == hooks_of(bert())
    else:
        same(attention(fused, ids, how=how)[1].weights, expected[1])
    assert fused.config._attn_implementation == "sdpa"
    same(attention(eager, ids, how=how)[1].weights, expected[1])


def test_kernels_that_show_nothing_need_another_implementation():
    ids = torch.randint(50, (2, 9))
    _, fused = pair(llama)
    expected = attention(fused, ids)[1].weights
    fused.set_attn_implementation("flex_attention")
    with pytest.raises(SilentError, match="implementation is 'flex_attention'.*how='eager'"):
        attention(fused, ids)
    same(attention(fused, ids, how="eager")[1].weights, expected)
    assert fused.config._attn_implementation == "flex_attention"


def test_a_part_that_does_not_run_need_not_be_seen():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = pair(llama)[1], llama(attn_implementation="flex_attention")

        def forward(self, ids):
            return self.one(ids)

    assert len(attention(Unused().eval(), torch.randint(50, (2, 9)))) == 2


def test_an_implementation_is_as_before_after_an_exception():
    _, fused = pair(llama)
    with pytest.raises(Exception, match="input_ids|inputs_embeds"):
        attention(fused, {"attention_mask": PADDED}, how="eager")
    assert fused.config._attn_implementation == "sdpa" and hooks_of(fused) == hooks_of(llama())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_timm(name, fused):
    import timm

    small = {"img_size": 32, "num_classes": 3, "embed_dim": 24}
    own = {"vit": {"depth": 2, "patch_size": 8}, "swi": {"depths": (1, 1), "num_heads": (2, 4), "window_size": 4}}
    model = timm.create_model(name, **small, **own[name[:3]]).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(image)
    seen = attention(model, image)
    assert torch.equal(seen.output, plain)
    if name.startswith("vit"):
        assert seen.paths == ["blocks.0.attn", "blocks.1.attn"] and seen[0].shape == (2, 3, 17, 17)
    else:
        assert seen.paths == ["layers.0.blocks.0.attn", "layers.1.blocks.0.attn"]
        assert [call.shape for call in seen] == [(8, 2, 16, 16), (2, 4, 16, 16)]  # of windows
    if fused:
        opened = attention(model, image, how="eager")
        for call, other in zip(seen, opened, strict=True):
            same(call.weights, other.weights)
        assert all(module.fused_attn for module in model.modules() if hasattr(module, "fused_attn"))
        with pytest.raises(SilentError, match="fused kernel"):
            attention(model, image, how="error")
        assert attention(model, image, how="eager").output.shape == (2, 3)


@pytest.mark.parametrize("kind", ["vit", "swin", "swin v2"])
def test_torchvision(kind):
    from torchvision.models import SwinTransformer, VisionTransformer
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    swin = {"patch_size": [4, 4], "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    model = {
        "vit": lambda: VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3),
        "swin": lambda: SwinTransformer(**swin, num_classes=3),
        "swin v2": lambda: SwinTransformer(**swin, **second, num_classes=3),
    }[kind]().eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(image)
    seen = attention(model, image)
    torch.testing.assert_close(seen.output, plain, rtol=0, atol=1e-6)
    if kind == "vit":
        assert seen.paths == [f"encoder.layers.encoder_layer_{number}.self_attention" for number in range(2)]
        assert seen.rollout().shape == (2, 17, 17)
    else:
        assert seen.paths == ["features.1.0.attn", "features.3.0.attn"]
        with pytest.raises(ValueError, match="cannot be multiplied"):
            seen.rollout()
    for call in seen:
        same(call.weights.sum(-1), torch.ones(call.shape[:-1]))


# --- rxnmapper's ALBERT: one layer that is called twelve times


def shipped(package, inside):
    """A folder of a package that ships weights, whether or not the package itself can be imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.fail(f"{package} is not installed; `make test` installs what is in tests/weights.txt")
    return Path(spec.submodule_search_locations[0]) / inside


def albert():
    from transformers import AlbertConfig, AlbertModel

    folder = shipped("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    model = AlbertModel(AlbertConfig(**json.loads((folder / "config.json").read_text()))).eval()
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    inside = {k.removeprefix("albert."): v for k, v in state.items() if k.startswith("albert.")}
    model.load_state_dict(inside, strict=False)
    return model, (folder / "vocab.txt").read_text().split()


TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)


def test_a_pretrained_model_maps_the_atoms_of_a_reaction():
    model, vocabulary = albert()
    tokens = ["[CLS]", *TOKEN.findall("CCO.CC(=O)O>>CC(=O)OCC"), "[SEP]"]
    seen = attention(model, torch.tensor([[vocabulary.index(token) for token in tokens]]))
    assert len(seen) == 12 and len(seen.paths) == 1 and [call.call for call in seen] == list(range(12))
    weights = seen[seen.paths[0], 10].weights[0, 5]
    middle = tokens.index(">>")
    atoms = [number for number, token in enumerate(tokens) if token in ("C", "O")]
    before = [number for number in atoms if number < middle]
    after = [number for number in atoms if number > middle]
    assert len(before) == 7 and len(after) == 6
    found = [before[int(weights[number][before].argmax())] for number in after]
    assert [tokens[number] for number in found] == [tokens[number] for number in after]
    assert len(set(found)) == 6  # each of another
    assert all(0.5 < float(weights[a][b]) < 1 for a, b in zip(after, found, strict=True))
    assert repr(seen[10]).startswith(f"attention of '{seen.paths[0]}' (call 10 of 12): 1×8×")


# --- other ways to run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    eager, fused = (model.to(dtype) for model in pair(llama))
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        expected = eager(ids, output_attentions=True).attentions
    for call, weights in zip(attention(fused, ids), expected, strict=True):
        assert call.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        same(
            call.weights, weights.to(call.weights.dtype), atol=2e-7 if dtype == torch.float64 else 0.01
        )  # theirs is single


def test_a_compiled_model_is_run_without_its_graphs(nothing_compiled):
    _, fused = pair(bert)
    ids = torch.randint(50, (2, 9))
    expected = attention(fused, ids)
    compiled = torch.compile(fused, backend="eager")
    with torch.no_grad():
        before = compiled(ids)[0]
    seen = attention(compiled, ids)
    assert seen.paths == expected.paths
    same(seen[1].weights, expected[1].weights)
    with torch.no_grad():
        assert torch.equal(compiled(ids)[0], before)
    fused.encoder.compile(backend="eager")
    same(attention(fused, ids)[1].weights, expected[1].weights)


def test_the_weights_of_some_layers():
    _, fused = pair(bert)
    ids = torch.randint(50, (2, 9))
    seen = attention(fused, ids, sites="encoder.layer.1")
    assert seen[1].weights.shape == (2, 4, 9, 9) and seen[0].entropy.shape == (2, 4, 9)
    with pytest.raises(KeyError, match="'encoder.layer.0.attention.self' were not kept; name it in sites="):
        _ = seen[0].weights
    with pytest.raises(SilentError, match="sites: no attention was seen in or below 'pooler', only in 'encoder"):
        attention(fused, ids, sites=["encoder", "pooler"])
    with pytest.raises(BudgetError, match="takes 4.5 KiB, but 4.5 KiB of max_bytes=5000 are already used"):
        attention(fused, ids, sites=nn.Linear.__mro__[1], max_bytes=5000)
    some = attention(fused, ids, max_bytes=5000)
    assert some[0].weights.shape == (2, 4, 9, 9) and not some[1].entropy.isnan().any()
    with pytest.raises(BudgetError, match="were not kept: earlier ones filled max_bytes=5000"):
        _ = some[1].weights


# --- attention that is not seen


def small(kind, **sizes):
    return kind(
        vocab_size=50, attention_window=4, pad_token_id=1, bos_token_id=0, eos_token_id=2, **sizes
    )  # windows of four positions


def test_the_bands_of_longformer_are_not_seen_and_that_is_said():
    from transformers import LongformerConfig, LongformerModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = LongformerModel(small(LongformerConfig, max_position_embeddings=64, **sizes)).eval()
    ids, everywhere = torch.randint(3, 50, (2, 16)), torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(SilentError, match="at 'encoder.layer.0.attention.self', LongformerSelfAttention .* banded"):
        attention(model, ids)
    everywhere[:, 0] = 1  # this position sees all others, outside of the bands
    with pytest.warns(UserWarning, match="attention is missing at 'encoder.layer.0.attention.self'.* all 2 such"):
        seen = attention(model, {"input_ids": ids, "global_attention_mask": everywhere})
    assert list(seen.left_out) == seen.paths == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    assert "note: not seen at 'encoder.layer.0.attention.self' and 1 more: Longformer" in repr(seen)
    assert "and 1 more: Longformer" in seen._repr_html_()


def test_the_encoder_of_led_is_not_seen_and_that_is_said():
    from transformers import LEDConfig, LEDModel

    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 2}
    model = LEDModel(small(LEDConfig, **layers, **heads)).eval()
    ids = torch.randint(3, 50, (2, 16))
    with pytest.warns(UserWarning, match="attention is missing at 'encoder.layers.0.self_attn.longformer_self_attn'"):
        seen = attention(model, {"input_ids": ids, "decoder_input_ids": ids[:, :5]})
    assert seen.paths == ["decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"]
    assert list(seen.left_out) == ["encoder.layers.0.self_attn.longformer_self_attn"]


def test_attention_without_a_softmax_is_listed():
    class LinearAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x):
            q = self.q(x).relu()
            return q @ (q.mT @ x)

    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), LinearAttention())
    seen = attention(model, torch.randn(2, 5, 8))
    assert list(seen.left_out) == ["1"] and "LinearAttention called neither" in seen.left_out["1"]
    assert not attention(model[0], torch.randn(2, 5, 8)).left_out
