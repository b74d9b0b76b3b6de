"""Models that break a contract, each beside its healthy twin: a function of whether it is broken returns the model.

`planted` lists it with the contract that it breaks and the module where it does. Models of transformers are tiny.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from architectures.transformers_models import BART, BERT, GPT, LLAMA, T5, VIT, VOCABULARY, built

LENGTH = 12


class Planted(NamedTuple):
    make: Callable[[bool], nn.Module]
    contract: str
    site: str
    batch: Callable[[], Any]
    options: dict[str, Any]


PLANTED: dict[str, Planted] = {}


def planted(contract: str, site: str, batch: Callable[[], Any], **options: Any):
    """List a function of whether to break the model, which returns it."""

    def listed(make: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
        PLANTED[make.__name__] = Planted(make, contract, site, batch, options)
        return make

    return listed


def words(length: int = LENGTH, **more: Any) -> dict:
    return {"input_ids": torch.randint(6, VOCABULARY, (4, length)), **more}


def labelled() -> dict:
    found = words()
    return {**found, "labels": found["input_ids"].clone()}


def translated() -> dict:
    return {**words(), "labels": torch.randint(6, VOCABULARY, (4, 10))}


def pictures() -> Tensor:
    return torch.randn(4, 3, 32, 32)


def spoken() -> dict:
    return {"input_features": torch.randn(4, 16, 64), "labels": torch.randint(6, VOCABULARY, (4, 10))}


def series() -> Tensor:
    return torch.randn(4, LENGTH, 8)


# What is planted: a module around another one, which spoils what that is given or returns.


class Around(nn.Module):
    """Calls a module, and passes its attributes on; `given` and `returned` change what goes in and comes out."""

    def __init__(self, inner: nn.Module, returned=None, given=None) -> None:
        super().__init__()
        self.inner, self.returned, self.given = inner, returned, given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            args, kwargs = self.given(args, kwargs)
        output = self.inner(*args, **kwargs)
        if self.returned is None:
            return output
        if isinstance(output, tuple):
            return (self.returned(output[0]), *output[1:])
        return self.returned(output)


def spoil(model: nn.Module, path: str, broken: bool, **how: Any) -> nn.Module:
    """The model with a module that is spoiled, if it is to be `broken`."""
    if broken:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Around(model.get_submodule(path), **how))
    return model


def without_mask(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, {**kwargs, "attention_mask": None}


def across_samples(x: Tensor) -> Tensor:
    return x - 0.1 * x.mean(0, keepdim=True)


def from_next(x: Tensor) -> Tensor:
    return x + 0.1 * torch.cat([x[:, 1:], x[:, -1:]], 1)


def single(x: Tensor) -> Tensor:
    """Other results for one position at a time, as in decoding."""
    return x * 1.05 if x.shape[1] == 1 else x


bert = partial(built, "BertForMaskedLM", **BERT)
gpt2 = partial(built, "GPT2LMHeadModel", **GPT)
llama = partial(built, "LlamaForCausalLM", **LLAMA)
mistral = partial(built, "MistralForCausalLM", **LLAMA, sliding_window=6)
gemma2 = partial(built, "Gemma2ForCausalLM", **LLAMA, head_dim=8, sliding_window=6)
mixtral = partial(built, "MixtralForCausalLM", **LLAMA, num_local_experts=4)
t5 = partial(built, "T5ForConditionalGeneration", **T5)
vit = partial(built, "ViTForImageClassification", **VIT)
mamba = partial(built, "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
whisper = partial(built, "WhisperForConditionalGeneration", **{**BART, "max_position_embeddings": 32},
                  num_mel_bins=16, max_source_positions=32, max_target_positions=32,
                  begin_suppress_tokens=None)  # fmt: skip

# BERT


@planted("padding", "bert.encoder.layer.1.attention.self", words)
def bert_forgets_its_mask(broken):
    return spoil(bert(), "bert.encoder.layer.1.attention.self", broken, given=without_mask)


class Averaging(nn.Module):
    """A classifier of the mean over the positions: of all of them, if it is broken."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body, self.head, self.broken = (
            built("BertModel", **BERT, add_pooling_layer=False),
            nn.Linear(32, 4),
            broken,
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.body(input_ids, attention_mask).last_hidden_state
        kept = torch.ones_like(attention_mask) if self.broken else attention_mask
        return self.head((hidden * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


@planted("padding", "", lambda: words(attention_mask=torch.ones(4, LENGTH, dtype=torch.long)))
def bert_averages_padding(broken):
    return Averaging(broken)


@planted("independent", "bert.encoder.layer.0.output.LayerNorm", words)
def bert_normalises_over_samples(broken):
    return spoil(bert(), "bert.encoder.layer.0.output.LayerNorm", broken, returned=across_samples)


@planted("deterministic", "bert.encoder.layer.0.intermediate", words)
def bert_drops_in_eval_mode(broken):
    return spoil(bert(), "bert.encoder.layer.0.intermediate", broken, returned=partial(F.dropout, p=0.1))


@planted("modes", "bert.encoder.layer.1.output", words)
def bert_scales_in_train_mode(broken):
    model = bert()
    spoil(model, "bert.encoder.layer.1.output", broken)
    around = model.bert.encoder.layer[1].output
    if broken:
        around.returned = lambda x: x * 1.1 if around.training else x
    return model


@planted("used", "cls.predictions.decoder", labelled)
def bert_comes_untied(broken):
    model = bert()
    if broken:
        model.cls.predictions.decoder.weight = nn.Parameter(model.cls.predictions.decoder.weight.detach().clone())
    return model


# GPT-2


@planted("causal", "transformer.h.0.mlp", words)
def gpt2_looks_ahead(broken):
    return spoil(gpt2(), "transformer.h.0.mlp", broken, returned=from_next)


class FromZero(nn.Embedding):
    """Positions that begin at zero, whatever came before."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[-1]).expand_as(ids))


@planted("cached", "transformer.wpe", words)
def gpt2_forgets_where_it_is(broken):
    model = gpt2()
    if broken:
        model.transformer.wpe.__class__ = FromZero
    return model


@planted("cached", "transformer.h.1.attn", words)
def gpt2_scales_single_tokens(broken):
    return spoil(gpt2(), "transformer.h.1.attn", broken, returned=single)


@planted("padding", "transformer.h.0.attn", words)
def gpt2_sees_padding_on_the_left(broken):
    return spoil(gpt2(), "transformer.h.0.attn", broken, given=without_mask)


@planted("used", "lm_head", labelled)
def gpt2_comes_untied(broken):
    model = gpt2()
    if broken:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def token_loss(output: Any, target: Any, num_items_in_batch: Any = None, broken: bool = False) -> Tensor:
    labels = target["labels"][:, 1:].flatten()
    summed = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="sum", ignore_index=-100)
    count = (labels != -100).sum()
    return summed / (count if broken or num_items_in_batch is None else num_items_in_batch)


# Llama


@planted("independent", "model.layers.1.input_layernorm", words)
def llama_normalises_over_samples(broken):
    return spoil(llama(), "model.layers.1.input_layernorm", broken, returned=across_samples)


@planted("cached", "model.rotary_emb", words)
def llama_turns_from_zero(broken):
    def restarted(args, kwargs):
        ids = kwargs.pop("position_ids", args[1] if len(args) > 1 else None)
        return args[:1], {**kwargs, "position_ids": torch.arange(ids.shape[1])[None]}

    return spoil(llama(), "model.rotary_emb", broken, given=restarted)


@planted("modes", "model.layers.0.mlp", words)
def llama_computes_otherwise_when_compiled(broken):
    return spoil(llama(), "model.layers.0.mlp", broken,
                 returned=lambda x: x * 1.5 if torch.compiler.is_compiling() else x)  # fmt: skip


@planted("modes", "model.layers.1.mlp", words)
def llama_computes_otherwise_under_autocast(broken):
    return spoil(llama(), "model.layers.1.mlp", broken,
                 returned=lambda x: x * 50 if torch.is_autocast_enabled("cpu") else x)  # fmt: skip


class Forgotten(nn.Linear):
    """A layer that is neither saved nor loaded."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        pass

    def _load_from_state_dict(self, state_dict, prefix, local, strict, missing, unexpected, errors):
        pass


@planted("modes", "model.layers.0.mlp.up_proj", words)
def llama_forgets_to_save(broken):
    model = llama()
    if broken:
        model.model.layers[0].mlp.up_proj.__class__ = Forgotten
    return model


class Reset(nn.Linear):
    """A layer whose copies start again."""

    def __deepcopy__(self, memo):
        return Reset(self.in_features, self.out_features, bias=False)


@planted("modes", "model.layers.1.mlp.down_proj", words)
def llama_is_copied_badly(broken):
    model = llama()
    if broken:
        model.model.layers[1].mlp.down_proj.__class__ = Reset
    return model


class Recomputed(nn.Module):
    """Gives something else when a checkpoint runs it again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        from torchhook.core.event import recomputing

        return self.inner(x * (3 if recomputing() else 1))


@planted("modes", "model.layers.0.mlp.inner.down_proj", labelled)
def llama_is_recomputed_otherwise(broken):
    model = llama()
    if broken:
        model.model.layers[0].mlp = Recomputed(model.model.layers[0].mlp)
    return model


@planted("used", "model.layers.1.post_attention_layernorm", labelled)
def llama_skips_a_norm(broken):
    class Passing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.weight = inner.weight

        def forward(self, x):
            return x

    model = llama()
    if broken:
        layer = model.model.layers[1]
        layer.post_attention_layernorm = Passing(layer.post_attention_layernorm)
    return model


# Windows: Mistral, Gemma 2 (transformers #35896)


@planted("causal", "model.layers.1.self_attn", words)
def mistral_sees_beyond_its_window(broken):
    def full(args, kwargs):
        length = kwargs["hidden_states"].shape[1]
        return args, {**kwargs, "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).tril()}

    return spoil(mistral(), "model.layers.1.self_attn", broken, given=full)


@planted("causal", "model.layers.0.self_attn", words)
def gemma_has_windows_on_the_wrong_layers(broken):
    """As in https://github.com/huggingface/transformers/issues/35896."""
    model = gemma2()
    if broken:
        kinds = model.config.layer_types[::-1]
        for layer, kind in zip(model.model.layers, kinds, strict=True):
            layer.attention_type = layer.layer_type = kind
        swapped = dict(zip(model.config.layer_types, kinds, strict=True))
        inner = model.model

        def forward(*args, **kwargs):
            inner.config.layer_types = [swapped[kind] for kind in inner.config.layer_types]
            try:
                return type(inner).forward(inner, *args, **kwargs)
            finally:
                inner.config.layer_types = [swapped[kind] for kind in inner.config.layer_types]

        inner.forward = forward
    return model


@planted("causal", "model.layers.0.self_attn", words)
def llama_forgets_the_far_past(broken):
    """Its config has no window."""

    def near(args, kwargs):
        length = kwargs["hidden_states"].shape[1]
        return args, {**kwargs, "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).tril().triu(-4)}

    return spoil(llama(), "model.layers.0.self_attn", broken, given=near)


# Kinds of caches


def with_cache(name: str) -> Callable[[tuple, dict], tuple[tuple, dict]]:
    """Other inputs for one kind of cache."""

    def changed(args, kwargs):
        is_kind = type(kwargs.get("past_key_values")).__name__ == name
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].flip(-1)} if is_kind else kwargs

    return changed


@planted("cached", "model.layers.1.self_attn", words)
def llama_cannot_use_a_static_cache(broken):
    return spoil(llama(), "model.layers.1.self_attn", broken, given=with_cache("StaticCache"))


@planted("cached", "model.layers.1.self_attn", words)
def llama_cannot_use_a_quantized_cache(broken):
    return spoil(llama(), "model.layers.1.self_attn", broken, given=with_cache("QuantizedCache"))


@planted("causal", "h.0.mlp", words)
def gpt2_looks_ahead_without_a_head(broken):
    """What says that it is causal is the cache that it returns."""
    return spoil(built("GPT2Model", **GPT), "h.0.mlp", broken, returned=from_next)


# T5, Mixtral, ViT, Whisper, Mamba


@planted("cached", "decoder.block.1.layer.1.EncDecAttention", translated)
def t5_sees_padding_with_a_cache(broken):
    def unmasked(args, kwargs):
        return args, {**kwargs, "mask": None} if args[0].shape[1] == 1 else kwargs

    return spoil(t5(), "decoder.block.1.layer.1.EncDecAttention", broken, given=unmasked)


@planted("padding", "encoder.block.0.layer.0.SelfAttention", translated)
def t5_sees_padding(broken):
    def unmasked(args, kwargs):
        return args, {**kwargs, "mask": None}

    return spoil(t5(), "encoder.block.0.layer.0.SelfAttention", broken, given=unmasked)


@planted("causal", "decoder.block.1.layer.2", translated)
def t5_looks_ahead(broken):
    return spoil(t5(), "decoder.block.1.layer.2", broken, returned=from_next)


@planted("cached", "decoder.block.0.layer.0", translated)
def t5_scales_single_tokens(broken):
    return spoil(t5(), "decoder.block.0.layer.0", broken, returned=single)


@planted("independent", "model.layers.0.mlp", words)
def mixtral_shares_its_tokens(broken):
    return spoil(mixtral(), "model.layers.0.mlp", broken, returned=across_samples)


@planted("shapes", "model.layers.1.mlp", words)
def mixtral_has_one_batch_size(broken):
    return spoil(mixtral(), "model.layers.1.mlp", broken, returned=lambda x: x.view(4, LENGTH, 32))


@planted("independent", "vit.layers.0.attention", pictures)
def vit_attends_over_samples(broken):
    return spoil(vit(), "vit.layers.0.attention", broken, returned=lambda x: x + 0.1 * x.flip(0))


@planted("shapes", "classifier", pictures)
def vit_squeezes_its_result(broken):
    return spoil(vit(), "classifier", broken, returned=torch.squeeze)


@planted("causal", "model.decoder.layers.0.fc1", spoken)
def whisper_looks_ahead(broken):
    return spoil(whisper(), "model.decoder.layers.0.fc1", broken, returned=from_next)


@planted("cached", "model.decoder.embed_positions", spoken)
def whisper_forgets_where_it_is(broken):
    def restarted(args, kwargs):
        return args[:1], {"past_key_values_length": 0}

    return spoil(whisper(), "model.decoder.embed_positions", broken, given=restarted)


@planted("causal", "backbone.layers.0.mixer", words)
def mamba_looks_ahead(broken):
    return spoil(mamba(), "backbone.layers.0.mixer", broken, returned=from_next)


@planted("cached", "backbone.layers.1.mixer", words)
def mamba_scales_single_tokens(broken):
    return spoil(mamba(), "backbone.layers.1.mixer", broken, returned=single)


# Pictures


def resnet() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=4)


@planted("independent", "layer2.0.bn1", pictures)
def resnet_has_no_running_statistics(broken):
    model = resnet()
    if broken:
        model.layer2[0].bn1 = nn.BatchNorm2d(128, track_running_stats=False)
    return model


@planted("deterministic", "layer3.1.relu", pictures)
def resnet_drops_in_eval_mode(broken):
    return spoil(resnet(), "layer3.1.relu", broken, returned=partial(F.dropout, p=0.2))


class Stubborn(nn.Dropout):
    """Stays in train mode."""

    def train(self, mode: bool = True):
        return super().train(True)


@planted("deterministic", "1", lambda: torch.randn(4, 8))
def dropout_ignores_eval(broken):
    return nn.Sequential(nn.Linear(8, 8), Stubborn() if broken else nn.Dropout(), nn.Linear(8, 2))


@planted("modes", "layer1.0.conv1", pictures)
def resnet_reads_memory_in_order(broken):
    def in_order(x):
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())

    return spoil(resnet(), "layer1.0.conv1", broken, returned=in_order)


@planted("shapes", "avgpool", pictures)
def resnet_squeezes_its_features(broken):
    return spoil(resnet(), "avgpool", broken, returned=torch.squeeze)


@planted("shapes", "layer4", pictures)
def resnet_has_one_image_size(broken):
    return spoil(resnet(), "layer4", broken, returned=lambda x: x.view(len(x), 512, 1, 1))


class Symmetric(nn.Module):
    """Looks the same from the left and from the right; a ramp tells them apart."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 2)
        self.ramp = Ramp(broken)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.ramp(self.conv(x)).relu()).flatten(1))


class Ramp(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(-1, 1, x.shape[-1]) if self.broken else x


def flip(x: Tensor) -> Tensor:
    return x.flip(-1)


@planted("equivariant", "ramp", pictures, change=flip)
def net_knows_left_from_right(broken):
    return Symmetric(broken)


# Recurrence


class Recurrent(nn.Module):
    """An LSTM over samples × positions × features; broken, it takes samples for positions."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=not broken), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@planted("independent", "lstm", series)
def lstm_without_batch_first(broken):
    return Recurrent(broken)


class Added(nn.Module):
    """Adds the last position; broken, the last sample."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return x + (x[-1] if self.broken else x[:, -1:]).tanh()


@planted("independent", "1", series)
def all_get_something_of_the_last_sample(broken):
    return nn.Sequential(nn.Linear(8, 8), Added(broken), nn.Linear(8, 2))


class Convolved(nn.Module):
    """The largest of what a convolution finds; broken, it reads padding beside the last word."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(VOCABULARY, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 3)
        self.broken = broken

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = attention_mask[:, None] == 0
        x = self.embed(ids).mT
        x = self.conv(x if self.broken else x.masked_fill(hidden, 0)).relu()
        return self.head(x.masked_fill(hidden, 0).amax(2))


def all_padded() -> dict:
    """Every sample ends with padding, which comes before any more of it."""
    return {"ids": ids(), "attention_mask": (torch.arange(LENGTH) < torch.tensor([[9], [5], [7], [4]])).long()}


@planted("padding", "conv", all_padded)
def convolution_reads_padding_at_its_edge(broken):
    return Convolved(broken)


class Lasting(nn.Module):
    """Classifies by the state after the last position; broken, after the padding."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.broken = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2), broken

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.broken:
            return self.head(self.lstm(x)[0][:, -1])
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


@planted("padding", "lstm", lambda: {"x": torch.randn(4, LENGTH, 8), "lengths": torch.full((4,), LENGTH)})
def lstm_reads_padding(broken):
    return Lasting(broken)


class Packed(nn.Module):
    """Classifies packed sequences; broken, by the mean over the longest one's positions."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.broken = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2), broken

    def forward(self, packed: Any) -> Tensor:
        output, (hidden, _) = self.lstm(packed)
        if self.broken:
            return self.head(pad_packed_sequence(output, batch_first=True)[0].mean(1))
        return self.head(hidden[-1])


def packed() -> dict:
    return {"packed": pack_sequence([torch.randn(length, 8) for length in (9, 3, 6)], enforce_sorted=False)}


@planted("padding", "", packed)
def lstm_averages_what_is_not_there(broken):
    return Packed(broken)


@planted("padding", "", lambda: packed()["packed"])
def lstm_takes_a_packed_sequence_alone(broken):
    return Packed(broken)


class Remembering(nn.Module):
    """Broken, it starts with the state that the last batch ended with."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.broken, self.state = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2), broken, None

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.lstm(x, self.state)
        if self.broken:
            self.state = tuple(one.detach() for one in state)
        return self.head(output[:, -1])


@planted("deterministic", "", series)
def lstm_carries_its_state_over(broken):
    return Remembering(broken)


class Smoothing(nn.Module):
    """Broken, it mixes its input with that of the last call."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.last = broken, None

    def forward(self, x: Tensor) -> Tensor:
        last = x if self.last is None or self.last.shape != x.shape else self.last
        if self.broken:
            self.last = (0.5 * x + 0.5 * last).detach()
        return 0.5 * x + 0.5 * last if self.broken else x


@planted("deterministic", "1", lambda: torch.randn(4, 8))
def smoothing_goes_on_from_batch_to_batch(broken):
    return nn.Sequential(nn.Linear(8, 8), Smoothing(broken), nn.Linear(8, 2))


class Continued(nn.LSTM):
    """Broken, it ignores the cell that it is given."""

    broken = False

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002 (torch's name)
        if self.broken and hx is not None:
            hx = (hx[0], torch.zeros_like(hx[1]))
        return super().forward(input, hx)


@planted("cached", "", series)
def lstm_forgets_its_cell(broken):
    model = Continued(8, 16, batch_first=True)
    model.broken = broken
    return model


# A graph


class GraphLayer(nn.Module):
    """Sums what comes along the edges; broken, it weights nodes by their number."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(8, 8), broken

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        values = self.linear(x)
        if self.broken:
            values = values * torch.linspace(0.5, 1.5, len(x))[:, None]
        return x + torch.zeros_like(x).index_add(0, edge_index[1], values[edge_index[0]])


class Graph(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = GraphLayer(False), GraphLayer(broken), nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, edge_index).relu(), edge_index))


@planted("equivariant", "second", lambda: {"x": torch.randn(9, 8), "edge_index": torch.randint(9, (2, 20))})
def graph_knows_the_numbers_of_nodes(broken):
    return Graph(broken)


# A set


class DeepSets(nn.Module):
    """Sums over what is in a set; broken, it knows which came first."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.number, self.each, self.all = Numbered(broken), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(self.number(x)).relu().sum(1))


class Numbered(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.linspace(0, 1, x.shape[1])[:, None] if self.broken else x


@planted("equivariant", "number", series)
def set_has_an_order(broken):
    return DeepSets(broken)


@planted("equivariant", "number", series, set_dim=1)
def set_has_an_order_and_its_dimension_is_given(broken):
    return nn.Sequential(OrderedDict(number=Numbered(broken), each=nn.Linear(8, 8), act=nn.ReLU(), mix=Summed()))


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


# Attention by hand


class Attention(nn.Module):
    """Causal attention with a cache, less to what is far away. `fault` is what is wrong with it."""

    def __init__(self, width: int = 16, fault: str = "", window: int | None = None, slope: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(width, 3 * width), nn.Linear(width, width), fault
        self.causal, self.slope = True, slope
        if window is not None:
            self.window = window

    def forward(self, x: Tensor, cache: Any = None, padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        queries, keys = q.shape[1], k.shape[1]
        first = 0 if self.fault == "top left" else keys - queries  # pytorch #103082
        ahead = 1 if self.fault == "off by one" else 0
        places, seen = torch.arange(queries)[:, None] + first, torch.arange(keys)
        mask = seen <= places + ahead
        if hasattr(self, "window"):
            is_early = self.fault == "rolls early" and cache is not None and keys == self.window  # transformers #37574
            mask = mask & (seen > places - self.window + (1 if self.fault == "narrow" or is_early else 0))
        if padding_mask is not None:
            hidden = ~padding_mask if self.fault == "inverted" else padding_mask
            mask = mask & ~hidden[:, None, :]
        start = 0 if self.fault == "distances from zero" else keys - queries  # transformers #19045
        distances = torch.arange(queries)[:, None] + start - seen
        bias = (-self.slope * distances.abs()).masked_fill(~mask, -1e9)
        values = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(values), (k, v)


class Writer(nn.Module):
    """A small GPT by hand."""

    def __init__(self, fault: str = "", window: int | None = None, slope: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(Attention(fault=one, window=window, slope=slope) for one in ("", fault))

    def forward(self, ids: Tensor, cache: Any = None, padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        x, kept = self.embed(ids), []
        for number, block in enumerate(self.blocks):
            change, new = block(x, None if cache is None else cache[number], padding_mask)
            x, kept = x + change, [*kept, new]
        return self.head(x), kept


def ids() -> Tensor:
    return torch.randint(6, VOCABULARY, (4, LENGTH))


@planted("causal", "blocks.1", ids)
def writer_is_off_by_one(broken):
    return Writer("off by one" if broken else "")


@planted("cached", "blocks.1", ids)
def writer_masks_from_the_top_left(broken):
    """As in https://github.com/pytorch/pytorch/issues/103082."""
    return Writer("top left" if broken else "")


@planted("cached", "blocks.1", ids)
def writer_measures_distances_from_zero(broken):
    """As in https://github.com/huggingface/transformers/issues/19045."""
    return Writer("distances from zero" if broken else "", slope=0.3)


@planted("cached", "blocks.1", ids)
def writer_rolls_its_window_early(broken):
    """As in https://github.com/huggingface/transformers/issues/37574: one position is wrong, the next ones are not."""
    return Writer("rolls early" if broken else "", window=9)


@planted("causal", "blocks.1", ids)
def writer_has_a_narrow_window(broken):
    return Writer("narrow" if broken else "", window=5)


@planted("padding", "blocks.1", ids)
def writer_inverts_its_mask(broken):
    return Writer("inverted" if broken else "")


class Cropped(Writer):
    """Keeps only the window in its cache; broken, one position less."""

    def __init__(self, broken: bool) -> None:
        super().__init__(window=5)
        self.kept = 3 if broken else 4

    def forward(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        logits, kept = super().forward(ids, cache)
        return logits, [tuple(one[:, -self.kept :] for one in pair) for pair in kept]


@planted("cached", "blocks.0", ids)
def writer_crops_its_cache_too_soon(broken):
    return Cropped(broken)


class Answering(nn.Module):
    """Says nothing of being causal, but returns a cache; broken, it puts new values before the old ones."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.broken = broken

    def forward(self, ids: Tensor, past_key_values: Any = None) -> dict[str, Any]:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        if past_key_values is not None:
            old_k, old_v = past_key_values
            k, v = torch.cat([old_k, k], 1), torch.cat([v, old_v] if self.broken else [old_v, v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return {"logits": self.head(F.scaled_dot_product_attention(q, k, v, mask)), "past_key_values": (k, v)}


@planted("cached", "", ids)
def answers_come_with_values_in_the_wrong_order(broken):
    return Answering(broken)


# Switches of models by hand


class Economical(nn.Module):
    """Can be checkpointed; broken, the mask is lost then."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(VOCABULARY, 8), Masked(), nn.Linear(8, 2)
        self.use_checkpoint, self.broken = False, broken

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.use_checkpoint:
            given = torch.ones_like(mask) if self.broken else mask
            return self.head(checkpoint(self.mix, x, given, use_reentrant=False))
        return self.head(self.mix(x, mask))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(~mask[:, None], -1e9)
        return (scores.softmax(-1) @ self.values(x)).masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)


@planted("modes", "mix", lambda: {"ids": ids(), "mask": torch.arange(LENGTH) < torch.tensor([[12], [9], [7], [4]])})
def checkpointing_loses_the_mask(broken):
    return Economical(broken)


class Scaling(nn.Module):
    """Broken, it keeps a function that refers to its parameter, which every deep copy then shares."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.scale = scale = nn.Parameter(torch.ones(8))
        self.function = (lambda x: x * scale) if broken else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.function else x * self.scale


@planted("modes", "1", lambda: torch.randn(4, 8))
def copies_share_a_parameter(broken):
    return nn.Sequential(nn.Linear(8, 8), Scaling(broken), nn.Linear(8, 2))


class Sharing(nn.Module):
    """Scales its input; broken, a deep copy has the same buffer."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8) + 1)
        self.broken = broken

    def __deepcopy__(self, memo: dict) -> nn.Module:
        twin = Sharing(self.broken)
        twin.scale = self.scale if self.broken else self.scale.clone()
        return twin

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@planted("modes", "1", lambda: torch.randn(4, 8))
def copies_share_a_buffer(broken):
    return nn.Sequential(nn.Linear(8, 8), Sharing(broken), nn.Linear(8, 2))


class Folded(nn.Module):
    """Joins all dimensions but the first; broken, it knows the number of samples."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1) if self.broken else x.flatten(1)


@planted("shapes", "1", lambda: torch.randn(4, 3, 8, 8))
def four_samples_are_expected(broken):
    return nn.Sequential(nn.Conv2d(3, 2, 3), Folded(broken), nn.Linear(72, 2))


class Translator(nn.Module):
    """The transformer of torch; broken, its decoder sees the padding of its source."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.embed, self.head, self.broken = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), broken
        self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, src_padding_mask: Tensor | None = None) -> Tensor:
        x = self.body(
            self.embed(src),
            self.embed(tgt),
            tgt_mask=torch.ones(tgt.shape[1], tgt.shape[1]).triu(1).bool(),
            src_key_padding_mask=src_padding_mask,
            memory_key_padding_mask=None if self.broken else src_padding_mask,
        )
        return self.head(x)


@planted("padding", "body.decoder.layers.0.multihead_attn", lambda: {"src": ids(), "tgt": ids()})
def translator_sees_padding_of_its_source(broken):
    return Translator(broken)


def padded_source() -> dict:
    return {"src": ids(), "tgt": ids(), "src_padding_mask": torch.arange(LENGTH) >= torch.tensor([[12], [9], [7], [4]])}


@planted("padding", "body.decoder.layers.0.multihead_attn", padded_source)
def translator_has_a_fast_path(broken):
    return Translator(broken)


class Holding(Translator):
    """It holds its causal mask; broken, that is off by one."""

    def __init__(self, broken: bool) -> None:
        super().__init__(False)
        self.register_buffer("past", torch.ones(32, 32).tril())
        self.offset = 1 + broken

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        size = tgt.shape[1]
        future = (self.past[:size, :size] == 0) & ~torch.ones(size, size).tril(self.offset - 1).bool()
        return self.head(self.body(self.embed(src), self.embed(tgt), tgt_mask=future))


@planted("causal", "body.decoder.layers.0.self_attn", lambda: {"src": ids(), "tgt": ids()})
def translator_looks_ahead(broken):
    return Holding(broken)


class Averaged(nn.Module):
    """Takes away a running mean, which broken ones do not save."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=not broken)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


@planted("modes", "1", lambda: torch.randn(4, 8))
def a_running_mean_is_not_saved(broken):
    return nn.Sequential(nn.Linear(8, 8), Averaged(broken), nn.Linear(8, 2))


# What is trained


class Listed(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(2)]
        self.layers = layers if broken else nn.ModuleList(layers)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def classes() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randint(2, (4,))


@planted("used", "", classes)
def layers_are_in_a_plain_list(broken):
    return Listed(broken)


class Cut(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body, self.head, self.broken = nn.Linear(8, 8), nn.Linear(8, 2), broken

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).relu()
        return self.head(features.detach() if self.broken else features)


@planted("used", "body", classes)
def gradients_are_cut(broken):
    return Cut(broken)


class Spare(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body, self.norm, self.head, self.broken = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2), broken

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return self.head((features if self.broken else self.norm(features)).relu())


@planted("used", "norm", classes)
def a_norm_is_never_called(broken):
    return Spare(broken)


class Steps(nn.Module):
    """Broken, what it rounds to has no gradient."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body, self.head, self.broken = nn.Linear(8, 8), nn.Linear(8, 2), broken

    def forward(self, x: Tensor) -> Tensor:
        features = 3 * self.body(x)
        return self.head(features.round() if self.broken else features + (features.round() - features).detach())


@planted("used", "body", classes)
def rounding_stops_the_gradient(broken):
    return Steps(broken)


class Gated(nn.Module):
    """Starts with a gate of zero; broken, it stays there."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body, self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.gate = 0.0 if broken else nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu() + self.gate * self.side(x))


@planted("used", "side", classes)
def a_gate_stays_closed(broken):
    return Gated(broken)


@planted("used", "side", lambda: torch.randn(4, 8))
def a_gate_stays_closed_without_a_loss(broken):
    return Gated(broken)


class Speaking(nn.Module):
    """A language model that returns the state of its recurrence, to go on from."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, 8),
            nn.GRU(8, 8, 2, batch_first=True),
            nn.Linear(8, VOCABULARY),
        )
        self.broken = broken

    def forward(self, ids: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, hidden = self.rnn(self.embed(ids), hidden)
        return self.head(x), hidden.flip(0) if self.broken else hidden


@planted("cached", "rnn", ids)
def layers_take_the_states_of_others(broken):
    return Speaking(broken)


class LocalAttn(nn.Module):
    is_causal = True
    sliding_window = 4

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.qkv, self.out, self.reach = nn.Linear(8, 24), nn.Linear(8, 8), reach

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(1 - self.reach)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, seen))


@planted("causal", "1", series)
def a_window_is_narrower_than_it_says(broken):
    return nn.Sequential(LocalAttn(4), LocalAttn(2 if broken else 4))


class Ordered(nn.Module):
    """A graph as a matrix, whose nodes are read one after the other."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True) if broken else Summed()

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        found = self.last((adj @ self.mix(x))[None])
        return found[0][0] if isinstance(found, tuple) else found


@planted("equivariant", "last", lambda: {"x": torch.randn(7, 8), "adj": torch.rand(7, 7).round()})
def nodes_are_read_one_after_the_other(broken):
    return Ordered(broken)


class Counting(nn.Module):
    """Its loss is a mean over the tokens of the whole batch, or of the part that it sees."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(self.embed(input_ids))
        own = self.broken or num_items_in_batch is None
        total = (labels != -100).sum() if own else num_items_in_batch
        return {"loss": F.cross_entropy(logits.mT, labels, reduction="sum") / total, "logits": logits}


@planted("accumulation", "", labelled)
def a_loss_ignores_the_total_that_it_is_given(broken):
    return Counting(broken)
