"""What a model claims to be: read from its config, its classes and its signature, never from what it computes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchhook.core.batch import Keywords
from torchhook.core.selection import unwrapped, walk
from torchhook.core.trees import leaves

PAIRS = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that say themselves whether samples or positions come first."""

CACHES = ("past_key_values", "cache_params", "past_key_value", "layer_past", "past", "kv_cache", "cache", "state",
          "mems", "hx", "past_kv", "kv_caches", "caches", "past_states", "layer_cache")  # fmt: skip
"""What arguments with a cache of earlier positions are called."""

STATES = ("state", "hx", "hidden", "h0", "h_0", "initial_state", "init_state")
"""What the state of a recurrence is called, also of one that reads in both directions: layers × samples × features."""

_GOING_ON = ("state", "hx", "hidden")
"""Those of them that are not called after the beginning: a model that returns them takes them to go on."""

TARGETS = ("tgt", "trg", "target", "decoder")
"""How the names of arguments begin that are about a second sequence, which the model writes."""

_WRITTEN = ("tgt", "trg", "decoder")
"""Those that do not also mean what a loss compares with."""

_OFFSETS = ("offsets", "cu_seqlens")
_LENGTHS = ("lengths", "length", "lens")
GRAPHS = ("edge_index", "edge_attr", "edge_weight", "adj", "adj_t", "adjacency", "adjacency_matrix", "graph", "edges")
_MASKS = ("attention_mask", "padding_mask", "src_key_padding_mask", "key_padding_mask", "pad_mask", "mask")
_GIVEN_MASKS = ("attn_mask", "valid_mask")
_GIVEN_LENGTHS = ("seq_len", "src_len")
"""Names that also mean something else: they count if the argument has the form of a mask, or of lengths."""
_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids")
_LIMITS = (
    "window",
    "local_att",
    "sparse",
    "block_size",
    "attention_chunk",
    "stride",
    "attention_type",
    "attention_layers",
)
"""Parts of the names of options of transformers that limit how much of the past an attention sees."""
_SETS = re.compile(r"(^|[a-z])Sets?([A-Z]|$)")
_MARK = re.compile("(_key)?_(pad|padding|attention)_mask$|_mask$")
_WINDOWS = ("sliding_window", "window_size", "attention_window_size", "local_window", "window")


class Mask(NamedTuple):
    """The argument that says which positions are padding, the value it has for those that are not, and its dtype."""

    name: str
    real: bool
    dtype: torch.dtype

    @property
    def is_clear(self) -> bool:
        """Whether its name says what its values mean."""
        return self.name == "attention_mask" or "pad" in self.name


class Claims:
    """What `model` says about itself, and what its arguments are called."""

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        self.model = unwrapped(model)
        self.given = given
        self.returned: Any = None  # what the model returns for them, if it has run
        self.settled: Mask | None = None  # the mask as the model takes it, if that was found out
        self.config = getattr(self.model, "config", None)
        self.keywords = Keywords.of(self.model)
        self.names = {*self.keywords.names, *(name for name in given if isinstance(name, str))}

    def option(self, name: str, default: Any = None) -> Any:
        """A value of the model's config; for models of several parts, of the one that reads text."""
        if self.config is None:
            return default
        found = getattr(self.config, name, None)
        text = getattr(self.config, "get_text_config", None)
        if found is None and callable(text):
            found = getattr(text(decoder=True), name, None)
        return default if found is None else found

    @property
    def takes_graph(self) -> bool:
        """Whether an argument connects the rows of others, as in a graph: then rows are not samples."""
        return any(name in self.names for name in GRAPHS)

    @property
    def without_rows(self) -> str:
        """Why the rows of its arguments are not samples; empty if they are."""
        if self.takes_graph:
            return "it takes a graph, whose rows are not samples"
        if any(isinstance(value, PackedSequence) for value in self.given.values()):
            return "it takes packed sequences, whose rows are not samples"
        if any(name in self.given for name in _OFFSETS):
            return "it takes samples in a row, with the offset of each"
        if any(_are_samples(value) for value in self.given.values()):
            return "it takes its samples in a list"
        return ""

    @property
    def set_dim(self) -> int | None:
        """The dimension of the entries of a set, if the model is named after them: DeepSets, SetTransformer."""
        named = _SETS.search(type(self.model).__name__) and self.lengths is None
        return 1 if named else None

    @property
    def takes_images(self) -> bool:
        """Whether an argument is a batch of images."""
        return any(isinstance(value, Tensor) and value.dim() > 3 for value in self.given.values())

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it reads one sequence and writes another."""
        return bool(self.option("is_encoder_decoder", False)) or self.written is not None

    @property
    def written(self) -> str | None:
        """The argument with the sequence that it writes, beside the one that it reads."""
        if "decoder_input_ids" in self.names:
            return "decoder_input_ids"
        found = [name for name in map(str, self.given) if name.startswith(_WRITTEN) and not _is_side(name)]
        return next((name for name in found if _is_series(self.given[name])), None)

    @property
    def batch_first(self) -> bool:
        """Whether samples come before positions, as everywhere but in some modules of torch."""
        return not isinstance(self.model, PAIRS) or bool(_batch_first(self.model))

    @property
    def is_causal(self) -> str:
        """Why the model must not see later positions; empty if it does not claim so."""
        name = type(self.model).__name__
        if name.endswith(("ForCausalLM", "LMHeadModel")) and self._is_one_way:
            return f"it is a {name}"
        if self.is_encoder_decoder and "decoder_input_ids" in self.names:
            return "it has a decoder"
        if self.option("is_decoder", False):
            return "its config has is_decoder=True"
        if self.returns_cache and not (self.is_encoder_decoder or self.takes_images):
            return f"it returns a cache of earlier positions, {self.cache}"
        if self.option("model_type"):  # attributes of their parts are not meant for all of the model
            return ""
        for path, module in walk(self.model):
            if getattr(module, "is_causal", None) is True or getattr(module, "causal", None) is True:
                return f"{path or 'the model'} says that it is causal"
            if _has_triangle(module):
                return f"{path or 'the model'} holds a causal mask"
        return ""

    @property
    def _is_one_way(self) -> bool:
        """Whether the config of a language model does not say that it looks in both directions."""
        return bool(self.option("causal", True)) and self.option("attn_type") != "bi"

    @property
    def tokens(self) -> str | None:
        """The argument whose positions are a sequence."""
        named = [name for name in _TOKENS if isinstance(self.given.get(name), Tensor)]
        if named or self.option("model_type"):  # models of transformers call them so
            return named[0] if named else self._sound
        shapes = [(name, value) for name, value in self.given.items() if isinstance(value, Tensor)]
        found = [name for name, value in shapes if _is_series(value)]
        ids = [name for name in found if not self.given[name].is_floating_point()]
        return next((str(name) for name in (*ids, *found) if not _is_side(str(name))), None)

    @property
    def _sound(self) -> str | None:
        """The argument of a model of transformers that is a sound: a wave, or frames of features."""
        for name, dims in (("input_values", 2), ("input_features", 3)):
            value = self.given.get(name)
            if isinstance(value, Tensor) and value.dim() == dims and value.shape[1] != self.option("num_mel_bins"):
                return name
        return None

    @property
    def reads_sequence(self) -> bool:
        """Whether its main argument is a sequence, of any length."""
        named = self.tokens in _TOKENS or self.mask is not None or self.lengths is not None or self.cache is not None
        return named or bool(self.is_causal) or any(isinstance(module, PAIRS) for module in self.model.modules())

    @property
    def mask(self) -> Mask | None:
        """The argument that marks padding."""
        if self.settled is not None:
            return self.settled
        named = [*_MASKS, *(name for name in self._ordered if "mask" in name and "pad" in name)]
        named += [name for name in _GIVEN_MASKS if self._has_form_of_mask(self.given.get(name))]
        name = next((name for name in named if name in self.names), None)
        given = None if name is None else self.given.get(name)
        if name is None or (isinstance(given, Tensor) and given.dim() != 2):
            return None
        real = None if given is None else _real(given)
        real = "pad" not in name if real is None else real
        return Mask(name, real, torch.long if real else torch.bool)

    def _has_form_of_mask(self, value: Any) -> bool:
        """Whether this has an entry per token, and not one per pair of positions."""
        tokens = self.given.get(self.tokens or "")
        if not isinstance(value, Tensor) or not isinstance(tokens, Tensor):
            return False
        return value.shape == tokens.shape[:2] and value.shape[0] != value.shape[1]

    @property
    def masks(self) -> list[str]:
        """The arguments that mark the same padding: a decoder may take that of its source a second time."""
        again = [name for name in self._ordered if name.startswith("memory") and "pad" in name]
        return [] if self.mask is None else list(dict.fromkeys([self.mask.name, *again]))

    @property
    def padded(self) -> str | None:
        """The argument whose padding the mask marks: the one that it is named after, or that with the tokens."""
        stem = "" if self.mask is None else _MARK.sub("", self.mask.name)
        return stem if isinstance(self.given.get(stem), Tensor) else self.tokens

    @property
    def lengths(self) -> str | None:
        """The argument with the length of each sequence."""
        named = [*_LENGTHS, *(name for name in self._ordered if name.endswith(("lengths", "_lens")))]
        given = [(name, self.given.get(name)) for name in _GIVEN_LENGTHS]
        named += [name for name, value in given if isinstance(value, Tensor) and value.dim() == 1]
        return next((name for name in named if name in self.names), None)

    @property
    def _ordered(self) -> list[str]:
        """The names of the arguments, in their order, but for those about targets."""
        names = dict.fromkeys((*self.keywords.names, *map(str, self.given)))
        return [name for name in names if not name.startswith((*TARGETS, "label", "max"))]

    @property
    def cache(self) -> str | None:
        """The argument that takes a cache of earlier positions."""
        parameters = forward_parameters(self.model)
        states = [name for name in STATES if name in parameters and parameters[name].default is None]
        return next((name for name in (*CACHES, *states) if name in self.keywords.names), None)

    @property
    def returns_cache(self) -> bool:
        """Whether it returns the cache of keys and values, or the like, that it takes for the next positions."""
        named = self.cache not in (None, *STATES) and self._is_one_way
        return named and cache_of(self.returned, str(self.cache)) is not None

    @property
    def returns_state(self) -> bool:
        """Whether it returns the state of its recurrence, which reads in one direction, and takes it to go on from."""
        recurrences = [module for module in self.model.modules() if isinstance(module, nn.RNNBase)]
        if self.cache not in _GOING_ON or any(one.bidirectional for one in recurrences):
            return False
        state = [x for _, x in leaves(cache_of(self.returned, str(self.cache))) if x.dim() == 3]
        return any(len(x) == one.num_layers for x in state for one in recurrences)

    @property
    def has_one_length(self) -> bool:
        """Whether its config fixes the length of sequences."""
        return self.option("segment_means_seq_len") is not None

    @property
    def longest(self) -> int | None:
        """How many positions it takes at most, if its config says so."""
        names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx", "block_size")
        found = [self.option(name) for name in names]
        return min((int(number) for number in found if isinstance(number, int) and number > 0), default=None)

    @property
    def special(self) -> set[int]:
        """Tokens with a meaning of their own, such as that of padding."""
        names = [name for name in getattr(self.config, "__dict__", {}) if name.endswith(("_token_id", "_token_index"))]
        found = [self.option(name) for name in names]
        return {number for number in found if isinstance(number, int)}

    def window(self, module: nn.Module) -> int | None:
        """How many positions an attention sees, its own included: 0 for all of the past, None if it does not say."""
        number, kinds = getattr(module, "layer_idx", None), self.option("layer_types")
        if isinstance(number, int) and isinstance(kinds, (list, tuple)) and number < len(kinds):
            known = {"sliding_attention": _whole(self.option("sliding_window")), "full_attention": 0}
            return known.get(kinds[number])
        name = next((name for name in _WINDOWS if hasattr(module, name)), None)
        if name is not None:
            return _whole(getattr(module, name)) or 0
        if not hasattr(module, "config") or self.is_encoder_decoder:  # some attend to the encoder
            return None
        limited = any(word in key for key in vars(module.config) for word in _LIMITS)
        return _whole(self.option("sliding_window")) if limited else 0


def cache_of(output: Any, name: str) -> Any:
    """The cache in an output, by its name or as the second of two."""
    if isinstance(output, Mapping):
        return output.get(name)
    if isinstance(output, tuple) and not hasattr(output, name):
        return output[1] if len(output) == 2 else None
    return getattr(output, name, None)


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward; none if it is not written in Python."""
    try:
        return inspect.signature(unwrapped(model).forward).parameters
    except (TypeError, ValueError):
        return {}


def _are_samples(value: Any) -> bool:
    """Whether these are samples in a list: images, or whatever differs in length."""
    if not isinstance(value, list) or not value or not all(isinstance(one, Tensor) for one in value):
        return False
    dims, lengths = {one.dim() for one in value}, {len(one) for one in value if one.dim()}
    return dims == {3} or (len(dims) == 1 and len(lengths) > 1)


def _batch_first(model: nn.Module) -> bool | None:
    own: bool | None = getattr(model, "batch_first", None)
    return own if own is not None else getattr(getattr(model, "self_attn", None), "batch_first", None)


def _has_triangle(module: nn.Module) -> bool:
    """Whether a module has a buffer that is a lower triangle, as a causal mask is."""
    for buffer in module.buffers(recurse=False):
        square = buffer.squeeze()
        if square.dim() == 2 and square.shape[0] == square.shape[1] > 1 and square.shape[0] <= 4096:
            seen = square.isfinite() & (square > 0) if square.dtype.is_floating_point else square.bool()
            if torch.equal(seen, torch.ones_like(seen).tril()):
                return True
    return False


def _real(mask: Tensor) -> bool | None:
    """The value of a mask where no padding is, if it shows: that of its first or last column, which one side has."""
    ends = [column for column in (mask[:, 0], mask[:, -1]) if bool((column == column[0]).all())]
    values = {bool(column[0]) for column in ends}
    return values.pop() if len(values) == 1 else None


def _is_side(name: str) -> bool:
    """Whether an argument goes along with the sequence: a mask, labels, and the like."""
    return any(part in name for part in ("mask", "label", "target", "position", "type", "length"))


def _is_series(value: Any) -> bool:
    """Whether this is a batch of sequences: of tokens, or of features."""
    return isinstance(value, Tensor) and value.dim() == (3 if value.is_floating_point() else 2)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
