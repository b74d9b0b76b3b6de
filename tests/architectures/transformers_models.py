"""Architectures of transformers, tiny: a function for each returns a fresh model and batches of a task it learns.

A batch is the keyword arguments of the model, labels among them, so that the output has a loss. The tasks are made so
that the loss falls within a few steps: words follow one another, classes have a picture or a frequency of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES, SAMPLES, CLASSES = 10, 16, 4
VOCABULARY, LENGTH, SPECIAL = 64, 24, 6  # the first words are kept for padding, masks and the like
MASK, START, END = 3, 4, 5
SIDE = 32

RATES = {"autoformer": 3e-3, "dab_detr": 1e-2, "detr": 3e-3, "dpt": 3e-3, "mobilevit": 1e-2, "mobilevitv2": 3e-3}
RATES |= {"vit_mae": 3e-3, "yolos": 3e-3}
"""Learning rates other than 1e-3, for those that hardly move in thirty steps of it."""


def built(name: str, **options) -> nn.Module:
    """A model with random weights, by the name of its class."""
    import transformers

    cls = getattr(transformers, name)
    return cls(cls.config_class(**options))


# The tasks. Each is a function of a random generator and returns one batch.


def text(draw: torch.Generator, samples: int = SAMPLES, length: int = LENGTH) -> Tensor:
    """Words of which some are frequent; every other one follows from the word before it."""
    frequency = 1 / torch.arange(1, VOCABULARY - SPECIAL + 1.0)
    words = torch.multinomial(frequency, samples * length, replacement=True, generator=draw).view(samples, length)
    for at in range(1, length, 2):
        words[:, at] = (words[:, at - 1] * 7 + 3) % (VOCABULARY - SPECIAL)
    return words + SPECIAL


def causal(draw: torch.Generator) -> dict:
    words = text(draw)
    return {"input_ids": words, "labels": words.clone()}


def masked(draw: torch.Generator) -> dict:
    words = text(draw)
    hidden = torch.rand(words.shape, generator=draw) < 0.3
    return {"input_ids": words.masked_fill(hidden, MASK), "labels": words.masked_fill(~hidden, -100)}


def translation(draw: torch.Generator) -> dict:
    words = text(draw)
    return {"input_ids": words, "labels": words.roll(1, dims=1)}


def topic(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words, and which of the classes' own words is spread among them."""
    words, label = text(draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)
    there = torch.rand(words.shape, generator=draw) < 0.3
    return torch.where(there, (VOCABULARY - 1 - label)[:, None], words), label


def sentences(draw: torch.Generator) -> dict:
    words, label = topic(draw)
    return {"input_ids": words, "labels": label}


def pictures(draw: torch.Generator, side: int = SIDE, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """A coarse pattern for each class, with noise."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    label = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    clean = F.interpolate(patterns[label], size=(side, side), mode="bilinear")
    return clean + noise * torch.randn(clean.shape, generator=draw), label


def classified(draw: torch.Generator, side: int = SIDE) -> dict:
    pixels, label = pictures(draw, side)
    return {"pixel_values": pixels, "labels": label}


def segmented(draw: torch.Generator, side: int = SIDE) -> dict:
    """Pictures whose left and right half are of different classes."""
    left, right = pictures(draw, side), pictures(draw, side)
    half = torch.arange(side) < side // 2
    pixels = torch.where(half, left[0], right[0])
    labels = torch.where(half, left[1][:, None, None], right[1][:, None, None]).expand(-1, side, side)
    return {"pixel_values": pixels, "labels": labels.contiguous()}


def depths(draw: torch.Generator, side: int = SIDE) -> dict:
    pixels, _ = pictures(draw, side)
    return {"pixel_values": pixels, "labels": 1 + F.avg_pool2d(pixels.mean(1), 5, 1, 2).sigmoid()}


def boxes(draw: torch.Generator, side: int = 64) -> dict:
    """Noise with one coloured rectangle, which is the object."""
    pixels, labels = 0.3 * torch.randn(SAMPLES, 3, side, side, generator=draw), []
    for picture in pixels:
        width, height = (0.3 + 0.3 * torch.rand(2, generator=draw)).tolist()
        x, y = (0.3 + 0.4 * torch.rand(2, generator=draw)).tolist()
        kind = int(torch.randint(3, (), generator=draw))
        edges = [int(side * max(0, at)) for at in (y - height / 2, y + height / 2, x - width / 2, x + width / 2)]
        picture[kind, edges[0] : edges[1], edges[2] : edges[3]] += 2
        labels.append({"class_labels": torch.tensor([kind]), "boxes": torch.tensor([[x, y, width, height]])})
    return {"pixel_values": pixels, "labels": labels}


def masks(draw: torch.Generator, side: int = 64) -> dict:
    """The rectangles of `boxes` as masks, with a class each."""
    found = boxes(draw, side)
    grid = torch.arange(side) / side
    shapes, kinds = [], []
    for label in found["labels"]:
        x, y, width, height = label["boxes"][0]
        rows, columns = (grid - y).abs() < height / 2, (grid - x).abs() < width / 2
        shapes.append((rows[:, None] & columns)[None].float())
        kinds.append(label["class_labels"])
    return {"pixel_values": found["pixel_values"], "mask_labels": shapes, "class_labels": kinds}


def sounds(draw: torch.Generator, length: int = 1600) -> tuple[Tensor, Tensor]:
    """A frequency for each class, with noise."""
    label = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    phase = 2 * math.pi * torch.rand(SAMPLES, 1, generator=draw)
    wave = torch.sin(phase + torch.arange(length) * (0.05 * 2.0 ** label[:, None]))
    return wave + 0.3 * torch.randn(wave.shape, generator=draw), label


def heard(draw: torch.Generator) -> dict:
    wave, label = sounds(draw)
    return {"input_values": wave, "labels": label}


def spoken(draw: torch.Generator) -> dict:
    """Sounds, and their class twice as what is said."""
    wave, label = sounds(draw)
    return {"input_values": wave, "labels": (label[:, None] + SPECIAL).expand(-1, 2).contiguous()}


def spectra(draw: torch.Generator, frames: int, bands: int) -> tuple[Tensor, Tensor]:
    """A band for each class, with noise: frames by bands."""
    label = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    middle = (label + 0.5) * bands / CLASSES
    power = torch.exp(-((torch.arange(bands) - middle[:, None]) ** 2) / 8)[:, None].expand(-1, frames, -1)
    return 2 * power + 0.5 * torch.randn(power.shape, generator=draw), label


def dictated(draw: torch.Generator, frames: int = 64, bands: int = 16, turned: bool = True) -> dict:
    """Spectra, and words of their class, for models that write down what they hear."""
    heard, label = spectra(draw, frames, bands)
    words = (text(draw, length=8) + label[:, None]) % VOCABULARY
    return {"input_features": heard.mT.contiguous() if turned else heard, "labels": words.clamp(min=SPECIAL)}


def captions(draw: torch.Generator, side: int = SIDE) -> dict:
    """Pictures with words of their class."""
    pixels, label = pictures(draw, side)
    words = text(draw, length=8)
    words[:, ::2], words[:, -1] = (VOCABULARY - 1 - label)[:, None], END  # where CLIP and its like look
    return {"pixel_values": pixels, "input_ids": words}


def matched(draw: torch.Generator, side: int = SIDE) -> dict:
    """Pictures and words that belong together, for contrastive models."""
    return {**captions(draw, side), "return_loss": True}


def described(draw: torch.Generator, side: int = SIDE) -> dict:
    words = captions(draw, side)
    return {**words, "labels": words["input_ids"].clone()}


def questions(draw: torch.Generator) -> dict:
    """Where the words of the class begin and end."""
    words = text(draw)
    begin = torch.randint(1, LENGTH - 3, (SAMPLES,), generator=draw)
    for row, at in zip(words, begin.tolist(), strict=True):
        row[at : at + 2] = VOCABULARY - 1
    return {"input_ids": words, "start_positions": begin, "end_positions": begin + 1}


def placed(draw: torch.Generator, length: int = LENGTH) -> Tensor:
    """Where on a page each word is."""
    corner = torch.randint(0, 40, (SAMPLES, length, 2), generator=draw)
    return torch.cat([corner, corner + 8], dim=2)


def pages(draw: torch.Generator) -> dict:
    return {**masked(draw), "bbox": placed(draw)}


def series(draw: torch.Generator, length: int = 32, channels: int = 2) -> Tensor:
    """Waves with noise."""
    phase = 6 * torch.rand(SAMPLES, 1, channels, generator=draw)
    wave = torch.sin(phase + 0.4 * torch.arange(length)[None, :, None])
    return wave + 0.1 * torch.randn(wave.shape, generator=draw)


def patched_series(draw: torch.Generator) -> dict:
    whole = series(draw, 40)
    return {"past_values": whole[:, :32].contiguous(), "future_values": whole[:, 32:].contiguous()}


def dated_series(draw: torch.Generator, past: int = 40, future: int = 8) -> dict:
    whole = series(draw, past + future, 1)[..., 0]
    dates = (torch.arange(past + future) / 10)[None, :, None].expand(SAMPLES, -1, -1).contiguous()
    seen = torch.ones(SAMPLES, past)
    parts = {"past_values": whole[:, :past], "past_time_features": dates[:, :past], "past_observed_mask": seen}
    return {**parts, "future_values": whole[:, past:], "future_time_features": dates[:, past:]}


def tagged_pages(draw: torch.Generator) -> dict:
    """Words on pages, each to be put into a class."""
    words = text(draw)
    return {"input_ids": words, "bbox": placed(draw), "labels": words % CLASSES}


def learned_pixels(draw: torch.Generator) -> dict:
    pixels, label = pictures(draw, side=16)
    return {"inputs": pixels, "labels": label}


def unlabelled(draw: torch.Generator) -> dict:
    return {"pixel_values": pictures(draw, noise=0.1)[0]}


def films(draw: torch.Generator, frames: int = 2) -> dict:
    """Pictures that do not move, but their noise does."""
    pixels, label = pictures(draw)
    film = pixels[:, None].repeat(1, frames, 1, 1, 1)
    return {"pixel_values": film + 0.2 * torch.randn(film.shape, generator=draw), "labels": label}


def bands(draw: torch.Generator) -> dict:
    heard, label = spectra(draw, 32, 16)
    return {"input_values": heard, "labels": label}


def frames(draw: torch.Generator) -> dict:
    heard, label = spectra(draw, 32, 16)
    return {"input_features": heard, "labels": label}


def written(draw: torch.Generator) -> dict:
    wave, label = sounds(draw)
    words = text(draw, length=8)
    words[:, ::2] = (VOCABULARY - 1 - label)[:, None]
    return {"input_values": wave, "labels": words}


def captioned(draw: torch.Generator) -> dict:
    seen = captions(draw)
    return {"pixel_values": seen["pixel_values"], "labels": seen["input_ids"]}


def sounding(draw: torch.Generator) -> dict:
    heard, label = spectra(draw, 64, 16)
    words = text(draw, length=8)
    words[:, ::2] = (VOCABULARY - 1 - label)[:, None]
    return {"input_features": heard[:, None], "input_ids": words, "return_loss": True}


def pointed_at(draw: torch.Generator) -> dict:
    found = captions(draw)
    return {**found, "labels": (found["pixel_values"].mean(1) > 0).float()}


def looked_at(draw: torch.Generator, count: int = 4, nested: bool = False) -> dict:
    """Words after as many places for a picture as it takes."""
    seen = captions(draw)
    words = torch.cat([torch.full((SAMPLES, count), 2), seen["input_ids"]], dim=1)
    pixels = seen["pixel_values"][:, None] if nested else seen["pixel_values"]
    return {"pixel_values": pixels, "input_ids": words, "labels": words.masked_fill(words == 2, -100)}


def regions(draw: torch.Generator) -> dict:
    """A question with what was found in a picture, and how likely each answer is."""
    seen, label = spectra(draw, 6, 16)
    answer = F.one_hot(label, CLASSES).float()
    seen_words = torch.ones(SAMPLES, 8, dtype=torch.long)
    return {"input_ids": text(draw, length=8), "attention_mask": seen_words, "visual_embeds": seen, "labels": answer}


def asked(draw: torch.Generator) -> dict:
    seen, label = spectra(draw, 6, 16)
    return {"input_ids": text(draw), "visual_feats": seen, "visual_pos": placed(draw, 6) / 48, "labels": label}


def answered(draw: torch.Generator) -> dict:
    pixels, label = pictures(draw)
    answer = F.one_hot(label, CLASSES).float()
    return {"input_ids": text(draw, length=8), "pixel_values": pixels, "labels": answer}


def patches(draw: torch.Generator, grid: int = 4) -> dict:
    """Pictures as patches, each after its row and column."""
    seen = captions(draw, side=4 * grid)
    flat = F.unfold(seen["pixel_values"], 4, stride=4).mT
    place = torch.cartesian_prod(torch.arange(1, grid + 1), torch.arange(1, grid + 1)).float()
    patches = torch.cat([place.expand(SAMPLES, -1, -1), flat], dim=2)
    return {"flattened_patches": patches, "labels": seen["input_ids"]}


# The models.

Made = tuple[nn.Module, list[dict]]
MODELS: dict[str, Callable[[], Made]] = {}


def _made(make: Callable[[], nn.Module], task: Callable[[torch.Generator], dict]) -> Made:
    draw = torch.Generator().manual_seed(1)
    return make(), [task(draw) for _ in range(BATCHES)]


def add(name: str, cls: str, task: Callable[[torch.Generator], dict], **options) -> None:
    """List the model of class `cls` with these options of its config under `name`."""
    MODELS[name] = partial(_made, partial(built, cls, **options), task)


WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": START}
WORDS |= {"eos_token_id": END}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = WORDS | SIZES
LLAMA = BERT | {"num_key_value_heads": 2}

# Text encoders.
add("albert", "AlbertForMaskedLM", masked, **BERT, embedding_size=16)
add("bert", "BertForMaskedLM", masked, **BERT)
add("big_bird", "BigBirdForMaskedLM", masked, **BERT, attention_type="original_full")
add("big_bird_sparse", "BigBirdForMaskedLM", masked, **BERT, block_size=2, num_random_blocks=1)
add("bros", "BrosForTokenClassification", tagged_pages, **{**BERT, "hidden_size": 64}, num_labels=CLASSES)
add("canine", "CanineForSequenceClassification", sentences, **BERT, num_labels=CLASSES, num_hash_buckets=64,
    downsampling_rate=2, local_transformer_stride=8, upsampling_kernel_size=4)  # fmt: skip
add("convbert", "ConvBertForMaskedLM", masked, **BERT, embedding_size=32, conv_kernel_size=3)
add("deberta", "DebertaForMaskedLM", masked, **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"])
add("deberta_v2", "DebertaV2ForMaskedLM", masked, **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"])
add("distilbert", "DistilBertForMaskedLM", masked, vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
add("electra", "ElectraForMaskedLM", masked, **BERT, embedding_size=16)
add("esm", "EsmForMaskedLM", masked, **BERT, mask_token_id=MASK, position_embedding_type="rotary")
add("eurobert", "EuroBertForMaskedLM", masked, **LLAMA, mask_token_id=MASK)
add("flaubert", "FlaubertWithLMHeadModel", masked, vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
add("fnet", "FNetForMaskedLM", masked, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
add("funnel", "FunnelForMaskedLM", masked, vocab_size=VOCABULARY, d_model=32, n_head=4, d_head=8, d_inner=64,
    block_sizes=[1, 1], num_decoder_layers=1)  # fmt: skip
add("ibert", "IBertForMaskedLM", masked, **BERT)
add("layoutlm", "LayoutLMForMaskedLM", pages, **BERT, max_2d_position_embeddings=64)
add("lilt", "LiltForTokenClassification", tagged_pages, **{**BERT, "hidden_size": 48}, num_labels=CLASSES,
    max_2d_position_embeddings=64)  # fmt: skip
add("longformer", "LongformerForMaskedLM", masked, **BERT, attention_window=8)
add("luke", "LukeForMaskedLM", masked, **BERT, entity_vocab_size=8, entity_emb_size=16)
add("megatron_bert", "MegatronBertForMaskedLM", masked, **BERT)
add("mobilebert", "MobileBertForMaskedLM", masked, **BERT, embedding_size=16, true_hidden_size=16,
    intra_bottleneck_size=16)  # fmt: skip
add("modernbert", "ModernBertForMaskedLM", masked, **BERT)
add("mpnet", "MPNetForMaskedLM", masked, **BERT)
add("mra", "MraForMaskedLM", masked, **BERT)
add("nomic_bert", "NomicBertForMaskedLM", masked, **BERT)
add("nystromformer", "NystromformerForMaskedLM", masked, **BERT, num_landmarks=8, segment_means_seq_len=LENGTH)
add("rembert", "RemBertForMaskedLM", masked, **BERT, input_embedding_size=16, output_embedding_size=32)
add("roberta", "RobertaForMaskedLM", masked, **BERT)
add("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM", masked, **BERT)
add("roc_bert", "RoCBertForMaskedLM", masked, **BERT, pronunciation_vocab_size=8, shape_vocab_size=8)
add("roformer", "RoFormerForMaskedLM", masked, **BERT, embedding_size=32)
add("splinter", "SplinterForQuestionAnswering", questions, **BERT, question_token_id=VOCABULARY - 2)
add("squeezebert", "SqueezeBertForMaskedLM", masked, **BERT, embedding_size=32)
add("tapas", "TapasForSequenceClassification", sentences, **BERT, num_labels=CLASSES)
add("xlm", "XLMWithLMHeadModel", masked, vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
add("xlm_roberta_xl", "XLMRobertaXLForMaskedLM", masked, **BERT)
add("xlnet", "XLNetLMHeadModel", causal, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)
add("xmod", "XmodForMaskedLM", masked, **BERT, languages=["en_XX", "de_DE"], default_language="en_XX")
add("yoso", "YosoForMaskedLM", masked, **BERT)


# Decoders.
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": START, "eos_token_id": END}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
add("apertus", "ApertusForCausalLM", causal, **LLAMA)
add("bert_generation", "BertGenerationDecoder", causal, **BERT, is_decoder=True)
add("biogpt", "BioGptForCausalLM", causal, **BERT)
add("bitnet", "BitNetForCausalLM", causal, **LLAMA)
add("bloom", "BloomForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
add("codegen", "CodeGenForCausalLM", causal, **GPT, rotary_dim=4)
add("cohere", "CohereForCausalLM", causal, **LLAMA, logit_scale=1.0)
add("cpmant", "CpmAntForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, dim_head=8,
    dim_ff=64, num_hidden_layers=2, prompt_length=4, prompt_types=4, segment_types=4)  # fmt: skip
add("ctrl", "CTRLLMHeadModel", causal, **GPT, dff=64)
add("dbrx", "DbrxForCausalLM", causal, vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
    attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32})  # fmt: skip
add("deepseek_v3", "DeepseekV3ForCausalLM", causal, **BERT, **EXPERTS, num_key_value_heads=4, n_routed_experts=4,
    n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    first_k_dense_replace=1)  # fmt: skip
add("diffllama", "DiffLlamaForCausalLM", causal, **LLAMA)
add("falcon", "FalconForCausalLM", causal, **{**BERT, "ffn_hidden_size": 64})
add("gemma", "GemmaForCausalLM", causal, **LLAMA, head_dim=8)
add("gemma2", "Gemma2ForCausalLM", causal, **LLAMA, head_dim=8, sliding_window=8)
add("gemma3", "Gemma3ForCausalLM", causal, **LLAMA, head_dim=8, sliding_window=8)
add("glm", "GlmForCausalLM", causal, **LLAMA, head_dim=8)
add("gpt2", "GPT2LMHeadModel", causal, **GPT)
add("gpt_bigcode", "GPTBigCodeForCausalLM", causal, **GPT)
add("gpt_neo", "GPTNeoForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4,
    max_position_embeddings=64, attention_types=[[["global", "local"], 1]], window_size=8)  # fmt: skip
add("gpt_neox", "GPTNeoXForCausalLM", causal, **BERT)
add("gpt_oss", "GptOssForCausalLM", causal, **LLAMA, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=8)  # fmt: skip
add("gptj", "GPTJForCausalLM", causal, **GPT, rotary_dim=4)
add("granite", "GraniteForCausalLM", causal, **LLAMA)
add("helium", "HeliumForCausalLM", causal, **LLAMA, head_dim=8)
add("imagegpt", "ImageGPTForCausalImageModeling", causal, **{**GPT, "vocab_size": VOCABULARY + 1})
add("jetmoe", "JetMoeForCausalLM", causal, **WORDS, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2,
    kv_channels=8, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)  # fmt: skip
add("llama", "LlamaForCausalLM", causal, **LLAMA)
add("mistral", "MistralForCausalLM", causal, **LLAMA, sliding_window=8)
add("mixtral", "MixtralForCausalLM", causal, **LLAMA, num_local_experts=4)
add("mpt", "MptForCausalLM", causal, vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
add("nemotron", "NemotronForCausalLM", causal, **LLAMA)
add("olmo", "OlmoForCausalLM", causal, **LLAMA)
add("olmo2", "Olmo2ForCausalLM", causal, **LLAMA)
add("olmoe", "OlmoeForCausalLM", causal, **LLAMA, num_experts=4, num_experts_per_tok=2)
add("openai", "OpenAIGPTLMHeadModel", causal, **GPT)
add("opt", "OPTForCausalLM", causal, **WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
    word_embed_proj_dim=32)  # fmt: skip
add("persimmon", "PersimmonForCausalLM", causal, **BERT)
add("phi", "PhiForCausalLM", causal, **LLAMA)
add("phi3", "Phi3ForCausalLM", causal, **LLAMA)
add("phimoe", "PhimoeForCausalLM", causal, **LLAMA, num_local_experts=4)
add("qwen2", "Qwen2ForCausalLM", causal, **LLAMA)
add("qwen2_moe", "Qwen2MoeForCausalLM", causal, **LLAMA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32)
add("qwen3", "Qwen3ForCausalLM", causal, **LLAMA, head_dim=8)
add("reformer", "ReformerModelWithLMHead", causal, vocab_size=VOCABULARY, hidden_size=32, feed_forward_size=64,
    num_attention_heads=4, attention_head_size=8, attn_layers=["local", "local"], local_attn_chunk_length=8,
    is_decoder=True, axial_pos_embds=False, max_position_embeddings=64)  # fmt: skip
add("stablelm", "StableLmForCausalLM", causal, **LLAMA)
add("starcoder2", "Starcoder2ForCausalLM", causal, **LLAMA)
add("xglm", "XGLMForCausalLM", causal, **WORDS, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64)

# State-space models, recurrence and hybrids.
add("bamba", "BambaForCausalLM", causal, **LLAMA, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8,
    mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)  # fmt: skip
add("falcon_mamba", "FalconMambaForCausalLM", causal, **WORDS, hidden_size=32, num_hidden_layers=2, state_size=8)
add("jamba", "JambaForCausalLM", causal, **LLAMA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
    expert_layer_offset=1, num_experts=4, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)  # fmt: skip
add("lfm2", "Lfm2ForCausalLM", causal, **LLAMA, full_attn_idxs=[1])
add("mamba", "MambaForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
add("mamba2", "Mamba2ForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8,
    num_heads=8, head_dim=8, n_groups=1, chunk_size=8)  # fmt: skip
add("qwen3_next", "Qwen3NextForCausalLM", causal, **LLAMA, **EXPERTS, head_dim=8, num_experts=4,
    shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])  # fmt: skip
add("recurrent_gemma", "RecurrentGemmaForCausalLM", causal, **LLAMA, lru_width=32, head_dim=8,
    attention_window_size=16, block_types=["recurrent", "attention"])  # fmt: skip
add("rwkv", "RwkvForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, context_length=64)
add("xlstm", "xLSTMForCausalLM", causal, vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=4,
    qk_dim_factor=1.0, chunk_size=8, use_cache=False)  # fmt: skip
add("zamba2", "Zamba2ForCausalLM", causal, **LLAMA, n_mamba_heads=8, mamba_d_state=8, mamba_ngroups=1, chunk_size=8,
    layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, adapter_rank=8)  # fmt: skip

# Encoders with decoders.
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **WORDS}
BART |= {"decoder_start_token_id": START, "forced_eos_token_id": END}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
add("bart", "BartForConditionalGeneration", translation, **BART)
add("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", translation, **BART, attention_type="original_full")
add("blenderbot", "BlenderbotForConditionalGeneration", translation, **BART)
add("fsmt", "FSMTForConditionalGeneration", translation, **{key: value for key, value in BART.items()
    if key != "vocab_size"}, langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)  # fmt: skip
add("led", "LEDForConditionalGeneration", translation, **BART, max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64, attention_window=8)  # fmt: skip
add("longt5", "LongT5ForConditionalGeneration", translation, **T5, local_radius=4)
add("m2m_100", "M2M100ForConditionalGeneration", translation, **BART)
add("marian", "MarianMTModel", translation, **BART)
add("mbart", "MBartForConditionalGeneration", translation, **BART)
add("nllb_moe", "NllbMoeForConditionalGeneration", translation, **BART, num_experts=4, encoder_sparse_step=2,
    decoder_sparse_step=2, expert_capacity=64)  # fmt: skip
add("pegasus", "PegasusForConditionalGeneration", translation, **BART)
add("pegasus_x", "PegasusXForConditionalGeneration", translation, **BART, num_global_tokens=4, block_size=8)
add("plbart", "PLBartForConditionalGeneration", translation, **BART)
add("prophetnet", "ProphetNetForConditionalGeneration", translation, **WORDS, hidden_size=32, encoder_ffn_dim=64,
    decoder_ffn_dim=64, num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
    num_decoder_attention_heads=4, decoder_start_token_id=START)  # fmt: skip
add("switch_transformers", "SwitchTransformersForConditionalGeneration", translation, **T5, num_experts=4,
    num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=512)  # fmt: skip
add("t5", "T5ForConditionalGeneration", translation, **T5)
add("umt5", "UMT5ForConditionalGeneration", translation, **T5)

# Vision. Those that halve their pictures five times get larger ones, so that more than one place is left.
VIT = {**SIZES, "image_size": SIDE, "patch_size": 8, "num_labels": CLASSES}
STAGES = {"num_labels": CLASSES, "depths": [1, 1], "hidden_sizes": [16, 32]}
SWIN = {"num_labels": CLASSES, "image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [2, 2]}
SWIN |= {"num_heads": [2, 4], "window_size": 4}
add("beit", "BeitForImageClassification", classified, **VIT)
add("bit", "BitForImageClassification", classified, **STAGES, embedding_size=16, num_groups=4)
add("convnext", "ConvNextForImageClassification", classified, **STAGES, num_stages=2)
add("convnextv2", "ConvNextV2ForImageClassification", classified, **STAGES, num_stages=2)
add("cvt", "CvtForImageClassification", classified, num_labels=CLASSES, embed_dim=[16, 32], num_heads=[1, 2],
    depth=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], mlp_ratio=[2.0, 2.0],
    attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.1], qkv_bias=[True, True],
    cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1],
    stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1])  # fmt: skip
add("deit", "DeiTForImageClassification", classified, **VIT)
add("dinov2", "Dinov2ForImageClassification", classified, **VIT)
add("dpt", "DPTForSemanticSegmentation", segmented, **{**VIT, "num_hidden_layers": 4},
    backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
    is_hybrid=False)  # fmt: skip
# Smaller initial weights, as by default, stay below the eps of its batch norms when it is this narrow.
add("efficientnet", "EfficientNetForImageClassification", partial(classified, side=64), num_labels=CLASSES,
    image_size=64, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320, initializer_range=0.1)  # fmt: skip
add("focalnet", "FocalNetForImageClassification", classified, num_labels=CLASSES, image_size=SIDE,
    patch_size=4, embed_dim=16, depths=[2, 2], hidden_sizes=[16, 32], focal_levels=[2, 2],
    focal_windows=[3, 3])  # fmt: skip
add("glpn", "GLPNForDepthEstimation", partial(depths, side=64), hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16)  # fmt: skip
add("hgnet_v2", "HGNetV2ForImageClassification", classified, num_labels=CLASSES, embedding_size=16,
    depths=[1, 1], hidden_sizes=[16, 32], stem_channels=[3, 8, 16], stage_in_channels=[16, 16],
    stage_mid_channels=[8, 8], stage_out_channels=[16, 32], stage_num_blocks=[1, 1],
    stage_downsample=[False, True], stage_light_block=[False, False], stage_kernel_size=[3, 3],
    stage_numb_of_layers=[2, 2])  # fmt: skip
add("hiera", "HieraForImageClassification", classified, num_labels=CLASSES, image_size=[SIDE, SIDE], embed_dim=16,
    patch_kernel=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], depths=[1, 1], num_heads=[1, 2],
    query_stride=[2, 2], num_query_pool=1, masked_unit_size=[4, 4],
    masked_unit_attention=[True, False])  # fmt: skip
add("ijepa", "IJepaForImageClassification", classified, **VIT)
add("levit", "LevitForImageClassification", partial(classified, side=128), num_labels=CLASSES,
    image_size=128, hidden_sizes=[16, 32, 32],
    num_attention_heads=[1, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8], attention_ratio=[2, 2, 2],
    mlp_ratio=[2, 2, 2])  # fmt: skip
# The default of the next one drops 0.999 of the features: the share that TensorFlow keeps.
add("mobilenet_v1", "MobileNetV1ForImageClassification", partial(classified, side=64), num_labels=CLASSES,
    image_size=64, depth_multiplier=0.25, classifier_dropout_prob=0.001)  # fmt: skip
add("mobilenet_v2", "MobileNetV2ForImageClassification", partial(classified, side=64), num_labels=CLASSES,
    image_size=64, depth_multiplier=0.25)  # fmt: skip
add("mobilevit", "MobileViTForImageClassification", partial(classified, side=64), num_labels=CLASSES, image_size=64,
    hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], num_attention_heads=2,
    output_stride=16)  # fmt: skip
add("mobilevitv2", "MobileViTV2ForImageClassification", partial(classified, side=64), num_labels=CLASSES,
    image_size=64, width_multiplier=0.25, n_attn_blocks=[1, 1, 1], base_attn_unit_dims=[32, 48, 64])  # fmt: skip
add("perceiver", "PerceiverForImageClassificationLearned", learned_pixels, num_labels=CLASSES,
    image_size=16, num_latents=8, d_latents=32, num_blocks=1, num_self_attends_per_block=2,
    num_self_attention_heads=4, num_cross_attention_heads=4)  # fmt: skip
add("poolformer", "PoolFormerForImageClassification", partial(classified, side=64), num_labels=CLASSES,
    depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32])  # fmt: skip
add("pvt", "PvtForImageClassification", classified, num_labels=CLASSES, image_size=SIDE, num_encoder_blocks=2,
    depths=[1, 1], sequence_reduction_ratios=[4, 1], hidden_sizes=[16, 32], patch_sizes=[4, 2], strides=[4, 2],
    num_attention_heads=[1, 2], mlp_ratios=[2, 2])  # fmt: skip
add("pvt_v2", "PvtV2ForImageClassification", classified, num_labels=CLASSES, image_size=SIDE, num_encoder_blocks=2,
    depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
    num_attention_heads=[1, 2], mlp_ratios=[2, 2])  # fmt: skip
add("regnet", "RegNetForImageClassification", classified, **STAGES, embedding_size=16, groups_width=8)
add("resnet", "ResNetForImageClassification", classified, **STAGES, embedding_size=16)
add("segformer", "SegformerForSemanticSegmentation", segmented, num_labels=CLASSES, num_encoder_blocks=2,
    depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
    num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32)  # fmt: skip
add("siglip", "SiglipForImageClassification", classified, num_labels=CLASSES,
    vision_config={**SIZES, "image_size": SIDE, "patch_size": 8})  # fmt: skip
add("swiftformer", "SwiftFormerForImageClassification", classified, num_labels=CLASSES, image_size=SIDE,
    depths=[1, 1], embed_dims=[16, 32], downsamples=[True, True], mlp_ratio=2)  # fmt: skip
add("swin", "SwinForImageClassification", classified, **SWIN)
add("swinv2", "Swinv2ForImageClassification", classified, **SWIN)
add("textnet", "TextNetForImageClassification", classified, num_labels=CLASSES, image_size=[SIDE, SIDE],
    stem_out_channels=16, hidden_sizes=[16, 16, 16, 32, 32])  # fmt: skip
add("timesformer", "TimesformerForVideoClassification", films, **VIT, num_frames=2)
add("upernet", "UperNetForSemanticSegmentation", segmented, num_labels=CLASSES, hidden_size=16,
    pool_scales=[1, 2], use_auxiliary_head=True, auxiliary_in_channels=32, auxiliary_channels=16,
    backbone_config={"model_type": "convnext", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 32],
    "out_features": ["stage1", "stage2", "stage3", "stage4"]})  # fmt: skip
add("videomae", "VideoMAEForVideoClassification", films, **VIT, num_frames=2, tubelet_size=2)
add("vit", "ViTForImageClassification", classified, **VIT)
add("vit_mae", "ViTMAEForPreTraining", unlabelled, **SIZES, image_size=SIDE, patch_size=4,
    decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
    decoder_intermediate_size=64)  # fmt: skip
add("vit_msn", "ViTMSNForImageClassification", classified, **VIT)
add("vivit", "VivitForVideoClassification", films, **SIZES, image_size=SIDE, num_frames=2,
    tubelet_size=[2, 8, 8], num_labels=CLASSES)  # fmt: skip


# Detection and instance segmentation.
SMALL_RESNET = {"model_type": "resnet", "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "embedding_size": 8}
SMALL_RESNET |= {"layer_type": "basic", "out_features": ["stage4"]}
PYRAMID = {**SMALL_RESNET, "out_features": ["stage2", "stage3", "stage4"]}
DETR = {"num_queries": 8, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
DETR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_labels": 3}
DETR |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
add("conditional_detr", "ConditionalDetrForObjectDetection", boxes, **DETR, backbone_config=SMALL_RESNET)
add("dab_detr", "DabDetrForObjectDetection", boxes, num_queries=8, hidden_size=32, encoder_layers=1, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_labels=3,
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
    backbone_config=SMALL_RESNET)  # fmt: skip
add("deformable_detr", "DeformableDetrForObjectDetection", boxes, **DETR, backbone_config=PYRAMID,
    num_feature_levels=3, disable_custom_kernels=True)  # fmt: skip
add("detr", "DetrForObjectDetection", boxes, **DETR, backbone_config=SMALL_RESNET)
add("mask2former", "Mask2FormerForUniversalSegmentation", masks, num_labels=3, feature_size=32, mask_feature_size=32,
    hidden_dim=32, encoder_feedforward_dim=64, encoder_layers=1, decoder_layers=3, num_attention_heads=4,
    dim_feedforward=64, num_queries=8, train_num_points=256, backbone_config={**PYRAMID, "out_features":
    ["stage1", "stage2", "stage3", "stage4"]})  # fmt: skip
add("maskformer", "MaskFormerForInstanceSegmentation", masks, num_labels=3, fpn_feature_size=32,
    mask_feature_size=32, backbone_config={**PYRAMID, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    decoder_config={"model_type": "detr", **DETR})  # fmt: skip
add("rt_detr", "RTDetrForObjectDetection", boxes, num_labels=3, d_model=32, encoder_hidden_dim=32, num_queries=8,
    encoder_in_channels=[16, 16, 32], feat_strides=[8, 16, 32], encoder_layers=1, encoder_ffn_dim=64,
    encoder_attention_heads=4, decoder_in_channels=[32, 32, 32], decoder_layers=2, decoder_ffn_dim=64,
    decoder_attention_heads=4, num_denoising=4, hidden_expansion=0.5, disable_custom_kernels=True,
    backbone_config={"model_type": "rt_detr_resnet", **{key: value for key, value in PYRAMID.items()
    if key != "model_type"}})  # fmt: skip
add("yolos", "YolosForObjectDetection", boxes, **SIZES, image_size=[64, 64], patch_size=8, num_detection_tokens=8,
    num_labels=3, use_mid_position_embeddings=False)  # fmt: skip

# Audio.
WAV = {**SIZES, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 4]}
WAV |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
WAV |= {"classifier_proj_size": 16, "num_labels": CLASSES, "mask_time_prob": 0.0, "layerdrop": 0.0}
WAV |= {"pad_token_id": 1, "bos_token_id": START, "eos_token_id": END}
add("audio_spectrogram_transformer", "ASTForAudioClassification", bands, **SIZES,
    num_labels=CLASSES, patch_size=8, frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=16)  # fmt: skip
add("data2vec_audio", "Data2VecAudioForSequenceClassification", heard, **{**WAV, "num_conv_pos_embeddings": 2,
    "conv_pos_kernel_size": 7})  # fmt: skip
add("hubert", "HubertForSequenceClassification", heard, **WAV)
add("moonshine", "MoonshineForConditionalGeneration", written, vocab_size=VOCABULARY,
    hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
    encoder_num_attention_heads=4, decoder_num_attention_heads=4, decoder_start_token_id=START,
    pad_token_id=1)  # fmt: skip
add("sew", "SEWForSequenceClassification", heard, **WAV, squeeze_factor=2)
add("sew_d", "SEWDForSequenceClassification", heard, **WAV, squeeze_factor=2)
add("speech_to_text", "Speech2TextForConditionalGeneration", partial(dictated, turned=False), **BART,
    input_feat_per_channel=16, conv_channels=32, max_source_positions=64, max_target_positions=64)  # fmt: skip
add("unispeech", "UniSpeechForSequenceClassification", heard, **WAV)
add("wav2vec2", "Wav2Vec2ForCTC", spoken, **WAV, ctc_loss_reduction="mean")
add("wav2vec2_bert", "Wav2Vec2BertForSequenceClassification", frames, **WAV,
    feature_projection_input_dim=16)  # fmt: skip
add("wav2vec2_conformer", "Wav2Vec2ConformerForSequenceClassification", heard, **WAV)
add("wavlm", "WavLMForSequenceClassification", heard, **WAV)
add("whisper", "WhisperForConditionalGeneration", dictated, **{**BART, "max_position_embeddings": 32},
    num_mel_bins=16, max_source_positions=32, max_target_positions=32, begin_suppress_tokens=None)  # fmt: skip


# Several kinds of input at once.
SEEN = {**SIZES, "image_size": SIDE, "patch_size": 8}
READ = {**BERT}
PAIR = {"text_config": READ, "vision_config": SEEN, "projection_dim": 16}
add("align", "AlignModel", partial(matched, side=64), projection_dim=80, text_config=READ,
    vision_config={"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.5,
    "hidden_dim": 80})  # fmt: skip
add("blip", "BlipForConditionalGeneration", described, **{**PAIR, "text_config": {**READ, "encoder_hidden_size": 32}})
add("bridgetower", "BridgeTowerForContrastiveLearning", matched, hidden_size=64, num_attention_heads=4,
    num_hidden_layers=2, contrastive_hidden_size=16, logit_scale_init_value=2.6592,
    text_config={**READ, "hidden_size": 64},
    vision_config={"hidden_size": 64, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": 8})  # fmt: skip
add("chinese_clip", "ChineseCLIPModel", matched, **PAIR)
add("clap", "ClapModel", sounding, projection_dim=32, text_config=READ,
    audio_config={"spec_size": 64, "num_mel_bins": 16, "patch_embeds_hidden_size": 16, "depths": [1, 1],
    "num_attention_heads": [2, 2], "hidden_size": 32, "window_size": 4, "patch_size": 4, "num_hidden_layers": 2,
    "enable_fusion": False})  # fmt: skip
add("clip", "CLIPModel", matched, **PAIR)
add("clipseg", "CLIPSegForImageSegmentation", pointed_at, **PAIR, extract_layers=[0, 1],
    reduce_dim=16, decoder_num_attention_heads=4, decoder_intermediate_size=32)  # fmt: skip
add("git", "GitForCausalLM", described, **READ, vision_config=SEEN)
add("groupvit", "GroupViTModel", matched, projection_dim=16, projection_intermediate_dim=32, text_config=READ,
    vision_config={"hidden_size": 32, "intermediate_size": 64, "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0],
    "num_output_groups": [8, 4, 0], "num_attention_heads": 4, "image_size": SIDE, "patch_size": 8})  # fmt: skip
add("idefics3", "Idefics3ForConditionalGeneration", partial(looked_at, nested=True), image_token_id=2,
    scale_factor=2, text_config={**LLAMA, "model_type": "llama"}, vision_config=SEEN)  # fmt: skip
add("llava", "LlavaForConditionalGeneration", partial(looked_at, count=16), image_token_index=2,
    image_token_id=2, text_config={**LLAMA, "model_type": "llama"}, vision_feature_layer=-1,
    vision_config={**SEEN, "model_type": "clip_vision_model"})  # fmt: skip
add("lxmert", "LxmertForQuestionAnswering", asked, **WORDS, hidden_size=32, num_attention_heads=4,
    intermediate_size=64, l_layers=2, x_layers=1, r_layers=1, visual_feat_dim=16, num_qa_labels=CLASSES)  # fmt: skip
add("paligemma", "PaliGemmaForConditionalGeneration", partial(looked_at, count=16), image_token_index=2,
    image_token_id=2, projection_dim=32, text_config={**LLAMA, "model_type": "gemma", "head_dim": 8},
    vision_config={**SEEN, "model_type": "siglip_vision_model", "vision_use_head": False})  # fmt: skip
add("pix2struct", "Pix2StructForConditionalGeneration", patches,
    text_config={**T5, "hidden_size": 32}, vision_config={"hidden_size": 32, "patch_embed_hidden_size": 48,
    "d_ff": 64, "d_kv": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 64})  # fmt: skip
add("vilt", "ViltForQuestionAnswering", answered, **BERT, image_size=SIDE, patch_size=8,
    num_labels=CLASSES)  # fmt: skip
add("visual_bert", "VisualBertForQuestionAnswering", regions, **BERT, visual_embedding_dim=16,
    num_labels=CLASSES)  # fmt: skip


def vit_with_gpt2() -> nn.Module:
    import transformers

    encoder, decoder = transformers.ViTConfig(**SEEN), transformers.GPT2Config(**GPT)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = START, 1
    return transformers.VisionEncoderDecoderModel(config)


def vit_beside_bert() -> nn.Module:
    import transformers

    seen, read = transformers.ViTConfig(**SEEN), transformers.BertConfig(**READ)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(seen, read, projection_dim=16)
    return transformers.VisionTextDualEncoderModel(config)


def bert_with_bert() -> nn.Module:
    import transformers

    both = transformers.BertConfig(**READ), transformers.BertConfig(**READ)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*both)
    config.decoder_start_token_id, config.pad_token_id = START, 1
    return transformers.EncoderDecoderModel(config)


MODELS["vision_encoder_decoder"] = partial(_made, vit_with_gpt2, captioned)
MODELS["vision_text_dual_encoder"] = partial(_made, vit_beside_bert, matched)
MODELS["encoder_decoder"] = partial(_made, bert_with_bert, translation)


# Series of numbers.
FORECAST = {"context_length": 32, "prediction_length": 8, "num_input_channels": 2, "patch_length": 8}
DATED = {"prediction_length": 8, "context_length": 32, "lags_sequence": [1, 2, 8], "num_time_features": 1}
DATED |= {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
add("autoformer", "AutoformerForPrediction", dated_series, **DATED)
add("informer", "InformerForPrediction", dated_series, **DATED)
add("patchtsmixer", "PatchTSMixerForPrediction", patched_series, **FORECAST, patch_stride=8, d_model=16, num_layers=2)
add("patchtst", "PatchTSTForPrediction", patched_series, **FORECAST, patch_stride=8, d_model=32, num_hidden_layers=2,
    num_attention_heads=4, ffn_dim=64)  # fmt: skip
add("time_series_transformer", "TimeSeriesTransformerForPrediction", dated_series, **DATED)
