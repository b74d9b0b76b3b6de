"""Healthy models that look unusual: each obeys all contracts, in its own way. `healthy` lists a function that returns
the model, its batch and, if it has one, its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

HEALTHY: dict[str, Callable[[], tuple[Any, ...]]] = {}
LENGTHS = torch.tensor([12, 10, 7, 5])


def healthy(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    HEALTHY[make.__name__] = make
    return make


def ids(length: int = 12) -> Tensor:
    return torch.randint(1, 40, (4, length))


def rows() -> Tensor:
    return torch.randn(4, 8)


def classified(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.tensor([0, 1, 2, 0])


# Sequences


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / 4).masked_fill(~seen, torch.finfo(x.dtype).min)
        return x + self.out(scores.softmax(-1) @ v)


class Reader(nn.Module):
    """Attention in both directions, and the mean over what is not hidden."""

    def __init__(self, true_is_padding: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 16), Attention(), nn.Linear(16, 3)
        self.true_is_padding = true_is_padding

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.full(ids.shape, not self.true_is_padding)
        real = ~mask if self.true_is_padding else mask
        x = self.mix(self.embed(ids), real[:, None])
        return self.head(x.masked_fill(~real[..., None], 0).sum(1) / real.sum(1, keepdim=True))


@healthy
def a_mask_that_has_to_be_bool():
    return Reader(), ids()


@healthy
def a_mask_that_is_true_at_padding():
    return Reader(true_is_padding=True), ids()


@healthy
def a_mask_whose_padding_shows():
    return Reader(true_is_padding=True), {"ids": ids(), "mask": torch.arange(12) >= LENGTHS[:, None]}


class Packing(nn.Module):
    """Packs its sequences by itself; their lengths are its second argument, not a target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(40, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(torch.cat(list(self.rnn(packed)[1][0]), -1))


@healthy
def a_tuple_without_a_target():
    return Packing(), (ids(), LENGTHS)


class Tagging(nn.Module):
    """From one packed sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 8, bidirectional=True), nn.Linear(16, 3)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        found, _ = self.rnn(packed)
        return found._replace(data=self.head(found.data))


@healthy
def a_packed_sequence_alone():
    return Tagging(), pack_sequence([torch.randn(length, 8) for length in (4, 9, 6)], enforce_sorted=False)


class Translating(nn.Module):
    """An LSTM with attention to what another one has read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(32, 40)
        self.read, self.write = nn.LSTM(16, 16, batch_first=True), nn.LSTM(16, 16, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, src_lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(src), src_lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, state = self.read(packed)
        memory, _ = pad_packed_sequence(found, batch_first=True, total_length=src.shape[1])
        x, _ = self.write(self.embed(tgt), state)
        hidden = torch.arange(src.shape[1]) >= src_lengths[:, None]
        weights = (x @ memory.mT).masked_fill(hidden[:, None], -1e9).softmax(-1)
        return self.head(torch.cat([x, weights @ memory], -1))


@healthy
def two_sequences_of_different_lengths():
    return Translating(), {"src": ids(), "tgt": ids(7), "src_lengths": LENGTHS}


class Hearing(nn.Module):
    """Returns positions first, as CTC wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.GRU(32, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.conv(x).relu().permute(3, 0, 1, 2).flatten(2))[0]).log_softmax(-1)


@healthy
def positions_come_first_in_the_result():
    return Hearing(), torch.randn(4, 1, 8, 20)


def series(length: int = 6) -> Tensor:
    return torch.randn(4, length, 8)


@healthy
def a_transformer_of_torch():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True), {"src": series(), "tgt": series()}


@healthy
def attention_of_torch():
    return nn.MultiheadAttention(8, 2), {"query": torch.randn(6, 4, 8), "key": torch.randn(5, 4, 8),
                                         "value": torch.randn(5, 4, 8)}  # fmt: skip


@healthy
def a_state_to_begin_with():
    return nn.GRU(8, 8, 2, batch_first=True), {"input": series(), "hx": torch.randn(2, 4, 8)}


class Reading(nn.Module):
    """Attention in both directions before a recurrence, which begins with a state and returns the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.rnn = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor, h0: Tensor | None = None) -> Any:
        return self.rnn(x + self.mix(x, x, x)[0], h0)


@healthy
def a_state_that_is_no_cache():
    return Reading(), series(10)


# Graphs, sets, lists


class Molecules(nn.Module):
    """Several graphs in one, and which node is of which."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = x + torch.zeros_like(x).index_add(0, edge_index[1], self.mix(x)[edge_index[0]])
        return self.head(torch.zeros(2, 8).index_add(0, batch, x.relu()))


@healthy
def several_graphs_in_one():
    edges = torch.randint(5, (2, 12))
    given = {"x": torch.randn(10, 8), "edge_index": torch.cat([edges, edges + 5], 1), "batch": torch.arange(10) // 5}
    return Molecules(), given


class Bonds(nn.Module):
    """A graph whose edges have features."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.edge = nn.Linear(8, 8), nn.Linear(3, 8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return x.index_add(0, edge_index[1], self.node(x)[edge_index[0]] * self.edge(edge_attr))


@healthy
def a_graph_with_as_many_edges_as_nodes():
    return Bonds(), {"x": torch.randn(7, 8), "edge_index": torch.randint(7, (2, 7)), "edge_attr": torch.randn(7, 3)}


class Dense(nn.Module):
    """A graph as a matrix, or a batch of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return self.head((x + adj @ self.mix(x)).relu())


@healthy
def a_graph_with_as_many_features_as_nodes():
    return Dense(), {"x": torch.randn(8, 8), "adj": torch.rand(8, 8).round()}


@healthy
def several_graphs_as_matrices():
    return Dense(), {"x": torch.randn(4, 7, 8), "adj": torch.rand(4, 7, 7).round()}


class Lines(nn.Module):
    """Classes of nodes, and an edge in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(x).sum(1)
        return x.index_add(0, edges[:, 1], self.mix(x)[edges[:, 0]])


@healthy
def a_graph_with_an_edge_in_each_row():
    return Lines(), {"x": torch.randint(9, (7, 2)), "edges": torch.randint(7, (18, 2))}


class SetAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mix(x, x, x)[0])


@healthy
def each_of_a_set_has_a_result():
    return SetAttention(), torch.randn(4, 6, 8)


class Detector(nn.Module):
    """Images of any size, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"scores": self.head(self.conv(image).mean((1, 2)))} for image in images]


@healthy
def images_in_a_list():
    return Detector(), {"images": [torch.randn(3, 9, 9), torch.randn(3, 7, 12), torch.randn(3, 8, 8)]}


class Mixture(nn.Module):
    """Two inputs in a list, several results in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.image, self.head = nn.Linear(8, 6), nn.Conv1d(3, 6, 3, padding=1), nn.Linear(6, 2)

    def forward(self, inputs: list[Tensor]) -> dict[str, Any]:
        table, image = inputs
        features = self.table(table) + self.image(image).mean(-1)
        return {"logits": self.head(features), "features": [features, F.normalize(features, dim=-1)]}


@healthy
def inputs_in_a_list():
    return Mixture(), ([rows(), torch.randn(4, 3, 10)],)


class Bags(nn.Module):
    """All words in a row, and where those of each sample begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table, self.head = nn.EmbeddingBag(40, 8), nn.Linear(5, 8), nn.Linear(16, 1)

    def forward(self, table: Tensor, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(table), self.bag(words, offsets)], -1))[:, 0]


@healthy
def words_in_a_row():
    given = {"table": torch.randn(4, 5), "words": torch.randint(40, (11,)), "offsets": torch.tensor([0, 3, 5, 9])}
    return Bags(), given


# What is random, or depends on the batch, in training alone


class Standardised(nn.Module):
    """Batch norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) / (self.var + 1e-5).sqrt()
        mean, var = x.mean(0), x.var(0, unbiased=False)
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        self.var.lerp_(var.detach(), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


@healthy
def batch_norm_by_hand():
    return nn.Sequential(nn.Linear(8, 8), Standardised(), nn.ReLU(), nn.Linear(8, 3)), rows()


@healthy
def weights_that_are_normalised():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(),
                         parametrizations.weight_norm(nn.Linear(8, 3))), rows()  # fmt: skip


class Codes(nn.Module):
    """The nearest of some codes, which follow what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        if self.training:
            self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * z.detach()
        return self.decode(z + (self.codes[nearest] - z).detach())


@healthy
def codes_that_are_not_trained_by_gradients():
    return Codes(), rows()


class Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * spread.exp() if self.training else mean
        return {"decoded": self.decode(z), "mean": mean, "spread": spread}


@healthy
def samples_are_drawn_in_training():
    return Sampling(), rows()


# What is trained


class Experts(nn.Module):
    """Each row goes to two of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.branches = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, branch in enumerate(self.branches):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                total = total.index_add(0, row, weights[row, place, None] * branch(x[row]))
        return x + total


@healthy
def experts_of_which_few_are_chosen():
    return nn.Sequential(Experts(), nn.Linear(8, 3)), classified(rows()), F.cross_entropy


class Adapted(nn.Module):
    """Fixed weights and a correction of low rank, which is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up, self.head = nn.Linear(8, 2), nn.Linear(2, 8, bias=False), nn.Linear(8, 3)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fixed(x) + self.up(self.down(x)))


@healthy
def a_correction_that_is_zero_at_first():
    return Adapted(), classified(rows()), F.cross_entropy


class Matching(nn.Module):
    """Compares each image with each text, on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(8, 6), nn.EmbeddingBag(40, 6), nn.Parameter(torch.zeros(()))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return {"image": a, "text": b, "logits": self.scale.exp() * a @ b.mT}


@healthy
def every_sample_with_every_other():
    return Matching(), {"image": rows(), "text": ids()}


# Pictures


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down, up, and across; the time of a diffusion is added in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.time = _block(3, 8), _block(8, 8), nn.Linear(2, 8)
        self.up, self.across, self.head = nn.ConvTranspose2d(8, 8, 2, 2), _block(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        high = self.down(x)
        low = self.middle(F.max_pool2d(high, 2)) + self.time(torch.stack([t.sin(), t.cos()], -1))[..., None, None]
        return self.head(self.across(torch.cat([self.up(low), high], 1)))


@healthy
def a_unet_with_a_time():
    return UNet(), {"x": torch.randn(4, 3, 16, 16), "t": torch.rand(4)}


class Heads(nn.Module):
    """A class, boxes and an embedding of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.classes = _block(3, 8), nn.Linear(8, 5)
        self.boxes, self.embed = nn.Conv2d(8, 4, 1), nn.Linear(8, 6)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.stem(images)
        pooled = x.mean((2, 3))
        return {
            "logits": self.classes(pooled),
            "boxes": self.boxes(x).flatten(2).mT,
            "embedding": F.normalize(self.embed(pooled), dim=-1),
        }


@healthy
def an_image_has_three_results():
    return Heads(), {"images": torch.randn(4, 3, 16, 16)}
