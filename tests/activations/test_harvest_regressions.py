"""What was found wrong once: each of these gave wrong rows, lost some, or misled."""

import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from torchhook import Activations, HarvestError, harvest
from torchhook.activations.collector import Collector, Positions, Tokens, Wanted, rows_of

quiet = partial(harvest, progress=False, dtype=None)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 3)

    def forward(self, input_ids):
        return self.embed(input_ids)


@pytest.fixture
def padded():
    ids = torch.arange(20).view(4, 5)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [1], [4]])).long()
    return ids, mask


@pytest.mark.parametrize("change", ["lambda", "partial", "setting"])
def test_a_change_that_no_weight_shows_is_refused(tmp_path, change):
    x, model = torch.rand(50, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU())
    transforms = {
        "lambda": [lambda t: t * 2, lambda t: t * 3],
        "partial": [partial(torch.mul, other=k) for k in (2, 3)],
    }
    first, second = transforms.get(change, [None, None])
    quiet(model, x, "1", tmp_path / "acts", transform=first)
    if change == "setting":
        model[1].approximate = "tanh"
    with pytest.raises(HarvestError, match="changed since"):
        quiet(model, x, "1", tmp_path / "acts", transform=second)


def test_a_mask_that_the_model_does_not_take_still_tells_of_padding(tmp_path, padded):
    ids, mask = padded
    model = Texts()
    acts = quiet(model, [{"input_ids": ids, "attention_mask": mask}], "embed", tmp_path / "acts")
    assert torch.equal(acts["embed"][:], model.embed(ids)[mask.bool()])


def test_ragged_columns_are_cut_for_a_model_without_a_mask(tmp_path):
    datasets = pytest.importorskip("datasets")
    model, lists = Texts(), [[1, 2, 3], [4], [5, 6]]
    acts = quiet(model, datasets.Dataset.from_dict({"input_ids": lists}), "embed", tmp_path / "acts", batch_size=2)
    assert torch.equal(acts["embed"][:], model.embed(torch.arange(1, 7)))


def test_labels_are_not_taken_for_the_input(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [7, 9]})
    with pytest.raises(HarvestError, match="input_ids"):
        quiet(Texts(), data, "embed", tmp_path / "acts")


def tokens(*lengths, width):
    places = [row * width + place for row, length in enumerate(lengths) for place in range(length)]
    return Tokens(width, list(lengths), torch.tensor(places))


def test_what_is_decoded_has_the_mask_of_the_decoder():
    both = Positions(tokens(3, 1, width=3), tokens(1, 2, width=3))
    x = torch.rand(2, 3, 4)
    assert rows_of(x, 2, both, "decoder.block.1").lengths == [1, 2]
    assert rows_of(x, 2, both, "encoder.block.1").lengths == [3, 1]
    assert rows_of(x[:, :2], 2, Positions(tokens(3, 1, width=3), tokens(1, 2, width=2)), "lm_head").lengths == [1, 2]
    with pytest.raises(HarvestError, match="both attention masks"):
        rows_of(x, 2, both, "shared")
    assert rows_of(x, 2, Positions(tokens(3, 1, width=3)), "model.decoder.layers.0").lengths == [
        3,
        1,
    ]  # reads and writes


def test_a_model_that_reads_and_writes(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 20, (4, 7))
    mask, other = ((torch.arange(7) < torch.tensor(n)[:, None]).long() for n in ([7, 2, 5, 3], [1, 7, 4, 4]))
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": other}
    seen = {}
    for name in ("encoder", "decoder"):
        block = model.get_submodule(f"{name}.block.1")
        block.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out[0].clone()}))
    with torch.no_grad():
        model(**batch)
    acts = quiet(model, [batch], ["encoder.block.1", "decoder.block.1"], tmp_path / "acts")
    assert torch.equal(acts["encoder.block.1"][:], seen["encoder"][mask.bool()])
    assert torch.equal(acts["decoder.block.1"][:], seen["decoder"][other.bool()])


def test_matrices_by_channel_and_pooled_rows_are_not_cut_up():
    x = torch.rand(2, 3, 3, 3)  # three heads, three positions
    assert rows_of(x, 2, Positions(tokens(3, 1, width=3)), "attention").lengths is None
    labels = torch.rand(2, 3)  # three scores a sample
    assert rows_of(labels, 2, Positions(tokens(3, 1, width=3)), "scores", kept=True).lengths is None


def test_what_a_transform_returns_has_a_row_a_sample(tmp_path, padded):
    ids, mask = padded
    batch = [{"input_ids": ids, "attention_mask": mask}]
    acts = quiet(Texts(), batch, "embed", tmp_path / "a", transform=lambda x: x * 2)
    assert acts["embed"].shape == (4, 5, 3)
    acts = quiet(Texts(), batch, "embed", tmp_path / "b", transform=lambda x: x * 2, rows="token")
    assert acts["embed"].shape == (int(mask.sum()), 3)


def test_entries_that_are_kept_keep_their_numbers(tmp_path):
    data = [(torch.rand(2, 3), torch.tensor([1e6, 0.1234567]))]
    acts = harvest(nn.Linear(3, 2), data, "", tmp_path / "acts", keep="target", progress=False)
    assert torch.equal(acts["target"][:], data[0][1]) and acts[""].dtype == torch.float16


def test_text_that_is_to_be_kept_is_refused_with_its_name(tmp_path, padded):
    batch = [{"input_ids": padded[0], "text": ["a", "b", "c", "d"]}]
    with pytest.raises(HarvestError, match="'text' is not numeric and cannot be stored"):
        quiet(Texts(), batch, "embed", tmp_path / "acts", keep=["text"])


class Numbered:
    """A stream of so many batches that may fail at one of them."""

    def __init__(self, count, fails=None):
        self.count, self.fails = count, fails

    def __iter__(self):
        for number in range(self.count):
            if number == self.fails:
                raise OSError("no more")
            yield torch.full((4, 3), float(number))


class Batches:
    def __init__(self, count, fails=None):
        self.count, self.fails = count, fails

    __iter__ = Numbered.__iter__


@pytest.mark.parametrize("batches_a_shard", [1, 7])
def test_a_stream_that_became_shorter_is_refused(tmp_path, batches_a_shard):
    out, model = tmp_path / "acts", nn.Linear(3, 2)
    size = batches_a_shard * 4 * 2 * 4
    with pytest.raises(HarvestError, match="no more"):
        quiet(model, Batches(100, fails=60), "", out, shard_bytes=size)
    assert len(Activations.open(out)) == 240
    with pytest.raises(HarvestError, match="the data changed"):
        quiet(model, Batches(20), "", out, shard_bytes=size)
    assert len(quiet(model, Batches(80), "", out, shard_bytes=size)) == 320


def test_what_a_forward_writes_to_buffers_counts_once_for_each_batch(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.site = nn.Identity()

        def forward(self, x):
            self.count += 1
            return self.site(x + self.count)

    acts = quiet(Counting(), [torch.zeros(2, 1)] * 3, "site", tmp_path / "acts")
    assert acts["site"][:].flatten().tolist() == [1, 1, 2, 2, 3, 3]


def test_nothing_to_harvest_is_said(tmp_path):
    with pytest.raises(HarvestError, match="data has no samples"):
        quiet(nn.Linear(3, 2), [torch.empty(0, 3)], "", tmp_path / "acts")


def test_batches_of_one_token_are_rows_of_tokens(tmp_path):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.router = nn.Embedding(20, 3), nn.Linear(3, 2)

        def forward(self, input_ids):
            return self.router(self.embed(input_ids).flatten(0, 1))

    batches = [torch.arange(8).view(4, 2), torch.arange(4).view(4, 1)]
    acts = quiet(Flat(), batches, "router", tmp_path / "acts")
    assert len(acts["router"]) == 12 and acts["router"].of(5).shape == (1, 2)


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarvestError, match="must be a folder"):
        quiet(nn.Linear(3, 2), torch.rand(4, 3), "", tmp_path / "file" / "acts")


def test_a_relative_folder_is_where_it_was_when_harvest_was_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    acts = quiet(nn.Linear(3, 2), torch.rand(4, 3), "", "acts", transform=lambda x: (os.chdir("/"), x)[1])
    assert len(acts) == 4 and acts.folder == tmp_path / "acts"


def test_the_size_of_a_batch_may_be_said_or_not(tmp_path):
    model, x = nn.Linear(3, 2), torch.rand(40, 3)
    quiet(model, x, "", tmp_path / "acts")
    assert len(quiet(model, x, "", tmp_path / "acts", batch_size=32)) == 40


def test_the_estimate_counts_reading(tmp_path, capsys):
    class Slow(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            import time

            time.sleep(0.05)
            return torch.rand(3)

    harvest(nn.Linear(3, 2), Slow(), "", tmp_path / "acts", batch_size=2)
    told = capsys.readouterr().err
    assert "8 samples to go" in told and " free on disk, 64.0 MiB of them in reserve\n" in told
    milliseconds = float(told.split("in about ")[1].split(" ms")[0])
    assert milliseconds > 300


def test_no_copy_on_write_goes_to_the_writing_thread():
    """torch may hang if two threads let go of copies on write of one tensor at the same moment."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.ones(3, 4)
    with Collector(model, Wanted(["0", "1"])) as collector:
        sent = collector.collect(x, 3)
    assert not any(torch._C._is_cow_tensor(rows.values()) for rows in sent.values())
