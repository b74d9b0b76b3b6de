"""Data of every kind come as numbered batches, the same ones from wherever one begins."""

import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from torchhook.activations.collate import PADDING, Parameters, batch_of_columns, stacked, tensor_of
from torchhook.activations.fingerprints import batch_fingerprint
from torchhook.activations.sources import source_of
from torchhook.core.batch import Batch, call, samples_of
from torchhook.core.errors import HarvestError

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL = nn.Linear(2, 1)


class Numbered(Dataset):
    """Sample i is (i, -i), and has a label; some cannot be read."""

    def __init__(self, samples, broken=(), odd=()):
        self.samples, self.broken, self.odd = samples, set(broken), set(odd)
        self.prepared = False

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"no file {index}\nin two lines")
        return torch.tensor([float(index), -float(index)] + [0.0] * (index in self.odd)), index % 3


class AtOnce(Numbered):
    """One that reads several at once, in `calls`."""

    def __getitems__(self, indices):
        self.calls = [*getattr(self, "calls", []), list(indices)]
        return [self[index] for index in indices]


class Named(Numbered):
    """Whose samples are mappings."""

    def __getitem__(self, index):
        return {"input": super().__getitem__(index)[0], "label": index % 3, "name": str(index)}


class Flow(IterableDataset):
    def __init__(self, samples, fails_at=None):
        self.samples, self.fails_at = samples, fails_at

    def __iter__(self):
        for number in range(self.samples):
            if number == self.fails_at:
                raise OSError("the line is dead")
            yield torch.tensor([float(number), -float(number)])


class Batches:
    """An iterable of batches, as people write them."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        place = 0
        for size in self.sizes:
            yield torch.arange(place, place + size).float()[:, None].expand(size, 2)
            place += size


class Text(nn.Module):
    """What the forward of a language model looks like."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        assert set(kwargs) <= {"custom"}
        return input_ids * attention_mask


def numbers(read):
    """What the samples of a batch of the data above are."""
    data = read.data
    while not isinstance(data, torch.Tensor):
        data = data["input"] if isinstance(data, dict) else data[0]
    return data[:, 0].long().tolist()


def same(one, other):
    return [(read.number, list(read.ids), read.unread, batch_fingerprint(read.data)) for read in one] == [
        (read.number, list(read.ids), read.unread, batch_fingerprint(read.data)) for read in other
    ]


KINDS = ["tensor", "array", "dataset", "loader", "dropping", "shuffled", "stream", "flow", "list", "iterable", "bulk"]


def made(kind, samples, size):
    """A source of a kind, and the samples that it has, in their order."""
    rows = torch.arange(samples).float()[:, None].expand(samples, 2)
    sizes = [size + number % 2 for number in range(samples)]
    data = {
        "tensor": rows,
        "array": rows.numpy(),
        "dataset": Numbered(samples),
        "loader": DataLoader(Numbered(samples), size),
        "dropping": DataLoader(Numbered(samples), size, drop_last=True),
        "shuffled": DataLoader(Numbered(samples), size, shuffle=True) if samples else DataLoader(Numbered(0), size),
        "stream": Flow(samples),
        "flow": DataLoader(Flow(samples), size),
        "list": list(Batches(sizes)),
        "iterable": Batches(sizes),
        "bulk": DataLoader(Numbered(samples), None, sampler=range(samples)),
    }[kind]
    in_samples = kind in ("tensor", "array", "dataset", "stream")
    count = samples - samples % size if kind == "dropping" else sum(sizes) if kind in ("list", "iterable") else samples
    if kind == "bulk":
        data = DataLoader(TensorDataset(rows, rows), None, sampler=BatchSampler(range(samples), size, drop_last=False))
    return source_of(data, size if in_samples else None, MODEL), count


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(KINDS), st.integers(0, 13), st.integers(1, 5), st.integers(0, 6), st.none() | st.integers(0, 6))
def test_any_start_and_stop_are_a_slice_of_all(kind, samples, size, start, stop):
    source, count = made(kind, samples, size)
    whole = list(source.read())
    assert [read.number for read in whole] == list(range(len(whole)))
    assert sorted(number for read in whole for number in read.ids) == list(range(count)), "exactly once"
    assert all(list(read.ids) == numbers(read) for read in whole), "an id is the place of its sample"
    assert same(source.read(start, stop), whole[start:stop])
    assert same(source.read(start, stop, skip=True), whole[start:stop])
    assert source.samples in (None, count)
    assert source.batches in (None, len(whole))
    assert source.repeats == (kind != "shuffled" or len(whole) == 0 or source.repeats)


@pytest.mark.parametrize("kind", ["tensor", "array", "dataset", "loader", "dropping", "list", "shuffled"])
def test_data_with_indices_know_how_many_they_are(kind):
    source, count = made(kind, 11, 3)
    assert source.indexed
    assert (source.samples, source.batches) == (count, len(list(source.read())))


@pytest.mark.parametrize("kind", ["stream", "flow", "iterable"])
def test_data_that_flow_do_not(kind):
    source, _ = made(kind, 11, 3)
    assert not source.indexed and source.repeats
    assert source.samples is None


def test_workers_of_a_loader_are_kept_with_all_that_they_do():
    def prepare(worker):
        get_worker_info().dataset.samples_by_worker = worker

    class Telling(Numbered):
        def __getitem__(self, index):
            return torch.tensor([float(index), self.samples_by_worker])

    def twice(samples):
        return torch.stack(samples).repeat(1, 2)

    loader = DataLoader(
        Telling(12),
        2,
        num_workers=2,
        collate_fn=twice,
        worker_init_fn=prepare,
        prefetch_factor=3,
        persistent_workers=True,
    )
    reads = list(source_of(loader, None, MODEL).read(1))
    assert [list(read.ids) for read in reads] == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [numbers(read) for read in reads] == [list(read.ids) for read in reads]
    assert all(read.data.shape == (2, 4) for read in reads)
    assert {int(read.data[0, 1]) for read in reads} == {0, 1}, "both workers, each prepared"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_costs_itself_alone(workers):
    loader = DataLoader(Numbered(10, broken=[1, 8, 9]), 4, num_workers=workers)
    source = source_of(loader, None, MODEL)
    reads = list(source.read(skip=True))
    assert [list(read.ids) for read in reads] == [[0, 2, 3], [4, 5, 6, 7], []]
    assert [numbers(read) for read in reads[:2]] == [[0, 2, 3], [4, 5, 6, 7]]
    assert reads[2].data is None
    assert [read.unread for read in reads] == [
        {1: "OSError: no file 1"},
        {},
        {8: "OSError: no file 8", 9: "OSError: no file 9"},
    ]
    with pytest.raises(HarvestError, match=r"cannot read sample 1 of data: OSError: no file 1(.|\n)*'skip'"):
        next(source.read())


def test_workers_end_when_one_of_them_fails():
    before = set(multiprocessing.active_children())
    source = source_of(DataLoader(Numbered(8, broken=[1]), 2, num_workers=2), None, MODEL)
    with pytest.raises(HarvestError):
        next(source.read())
    assert set(multiprocessing.active_children()) <= before


def test_an_error_comes_with_what_was_behind_it():
    with pytest.raises(HarvestError) as caught:
        list(source_of(Numbered(3, broken=[2]), None, MODEL).read())
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("odd", [[0], [3], [2, 4]])
def test_a_sample_of_another_shape_costs_itself_alone(odd):
    source = source_of(Numbered(6, odd=odd), 6, MODEL)
    (read,) = source.read(skip=True)
    assert list(read.ids) == numbers(read) == [index for index in range(6) if index not in odd]
    assert sorted(read.unread) == odd
    assert "equal size" in read.unread[odd[0]]
    with pytest.raises(HarvestError, match="cannot collate samples 0 to 5 of data"):
        next(source.read())


def test_samples_that_are_all_different_are_told():
    class Growing(Numbered):
        def __getitem__(self, index):
            return torch.zeros(index + 1)

    (read,) = source_of(Growing(9), 9, MODEL).read(skip=True)
    assert (list(read.ids), read.data, sorted(read.unread)) == ([], None, list(range(9)))


def test_samples_are_read_at_once_where_they_can_be():
    dataset = AtOnce(6)
    list(source_of(dataset, 4, MODEL).read())
    assert dataset.calls == [[0, 1, 2, 3], [4, 5]]
    (read,) = source_of(AtOnce(4, broken=[2]), 4, MODEL).read(skip=True)
    assert list(read.ids) == numbers(read) == [0, 1, 3]


def test_the_default_is_32_samples_a_batch():
    assert [len(read.ids) for read in source_of(Numbered(70), None, MODEL).read()] == [32, 32, 6]
    assert [len(read.ids) for read in source_of(torch.ones(33, 2), None, MODEL).read()] == [32, 1]


def test_a_shuffled_loader_is_drawn_once():
    source = source_of(DataLoader(Numbered(40), 4, shuffle=True), None, MODEL)
    assert not source.repeats
    assert "shuffle=False" in source.why_not and "resume=False" in source.why_not
    ids = [number for read in source.read() for number in read.ids]
    assert ids != sorted(ids) and sorted(ids) == list(range(40))
    assert same(source.read(), source.read()), "by this source always the same"


def test_an_order_of_ones_own_repeats():
    order = [[5, 1], [0], [2, 3, 4]]
    source = source_of(DataLoader(Numbered(6), batch_sampler=order), None, MODEL)
    assert source.repeats and (source.samples, source.batches) == (6, 3)
    assert [list(read.ids) for read in source.read(1)] == order[1:]
    tensors = DataLoader(Numbered(6), 2, sampler=torch.arange(6).flip(0))
    assert [read.ids for read in source_of(tensors, None, MODEL).read()] == [[5, 4], [3, 2], [1, 0]]
    subset = source_of(Subset(Numbered(9), [7, 8]), None, MODEL)
    assert [(list(read.ids), numbers(read)) for read in subset.read()] == [([0, 1], [7, 8])]


def test_keys_that_are_no_numbers_have_places():
    loader = DataLoader({"a": torch.ones(2), "b": torch.zeros(2)}, 1, sampler=["a", "b"])
    source = source_of(loader, None, MODEL)
    assert not source.indexed
    assert [(list(read.ids), read.data.tolist()) for read in source.read()] == [([0], [[1, 1]]), ([1], [[0, 0]])]


def test_a_huge_data_set_is_not_listed():
    source = source_of(DataLoader(Numbered(10**15), 10), None, MODEL)
    assert source.batches == 10**14
    assert list(next(source.read(10**14 - 1)).ids) == list(range(10**15 - 10, 10**15))


@pytest.mark.parametrize("data", [iter([torch.ones(2, 2)] * 3), (torch.ones(2, 2) for _ in range(3))])
def test_what_can_be_read_once_says_so(data):
    source = source_of(data, None, MODEL)
    assert not source.repeats
    assert "pass a list" in source.why_not and "resume=False" in source.why_not
    assert [list(read.ids) for read in source.read()] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(HarvestError, match="was already read"):
        next(source.read())


def test_batches_that_come_as_they_get_ready_say_so():
    loader = DataLoader(Flow(8), 2, num_workers=2, in_order=False)
    source = source_of(loader, None, MODEL)
    assert not source.repeats and "in_order=True" in source.why_not


def test_two_may_read_the_same_loader_at_once():
    loader = DataLoader(Flow(8), 2, num_workers=1, persistent_workers=True)
    source = source_of(loader, None, MODEL)
    one = source.read()
    next(one)
    assert len(list(source.read())) == 4
    assert [read.number for read in one] == [1, 2, 3]


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_that_breaks_cannot_be_read_on(skip):
    source = source_of(DataLoader(Flow(9, fails_at=5), 2), None, MODEL)
    reads = source.read(skip=skip)
    assert [list(next(reads).ids) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(
        HarvestError, match="cannot read batch 2 of data, or any batch after it: OSError: the line is dead"
    ):
        next(reads)


def test_a_worker_that_dies_is_told_with_the_batch():
    class Deadly(Numbered):
        def __getitem__(self, index):
            if index == 5:
                import os

                os._exit(1)
            return super().__getitem__(index)

    source = source_of(DataLoader(Deadly(8), 2, num_workers=1), None, MODEL)
    with pytest.raises(HarvestError, match="cannot read batch [12] of data, or any batch after it: .*Error"):
        list(source.read(skip=True))


def test_a_loader_that_does_something_of_its_own_is_left_to_it():
    class Doubling(DataLoader):
        def __iter__(self):
            return (x * 2 for x, _ in super().__iter__())

    reads = list(source_of(Doubling(Numbered(4), 2), None, MODEL).read())
    assert [numbers(read) for read in reads] == [[0, 2], [4, 6]]


@pytest.mark.parametrize("data", [[torch.ones(2, 2)], DataLoader(Numbered(4), 2), Batches([2])])
def test_batches_have_their_size(data):
    with pytest.raises(ValueError, match="batch_size=8 is for data that come as single samples"):
        source_of(data, 8, MODEL)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"x": torch.ones(2)}, "not a dict; put a single batch into a list"),
        ("folder", "not a str"),
        (3, "not a int"),
        (None, "not a NoneType"),
        (torch.ones(()), "a dimension for the samples"),
        (np.array(["a"]), "needs numbers"),
    ],
)
def test_what_is_no_data_is_refused(data, match):
    with pytest.raises(TypeError, match=match):
        source_of(data, None, MODEL)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_batch_size_is_a_positive_number(size, error):
    with pytest.raises(error, match="batch_size"):
        source_of(torch.ones(2, 2), size, MODEL)


def test_a_batch_without_tensors_is_told():
    with pytest.raises(HarvestError, match="batch 1 of data: .* has no tensor"):
        list(source_of(Batches2(), None, MODEL).read())


class Batches2:
    def __iter__(self):
        yield torch.ones(2, 2)
        yield ["text"]


def test_entries_that_forward_does_not_take_are_left_out():
    source = source_of(Named(3), None, MODEL)
    (read,) = source.read()
    assert list(read.data) == ["input"] and numbers(read) == [0, 1, 2]
    (read,) = source_of(Named(3), None, MODEL, keep=["label"]).read()
    assert list(read.data) == ["input", "label"]
    (read,) = source_of([{"custom": torch.ones(2, 1), "input_ids": torch.ones(2, 1)}], None, Text()).read()
    assert set(read.data) == {"custom", "input_ids"}, "it takes any other name"


def test_one_tensor_of_another_name_is_the_first_argument():
    (read,) = source_of([{"image": torch.ones(3, 2), "name": ["a", "b", "c"]}], None, MODEL).read()
    assert list(read.data) == ["input"]
    (read,) = source_of([{"image": torch.ones(3, 2), "label": torch.ones(3)}], None, MODEL, keep=["label"]).read()
    assert list(read.data) == ["input", "label"]
    (read,) = source_of([{"image": torch.ones(3, 2), "label": torch.ones(3)}], None, MODEL).read()
    assert list(read.data) == ["input"], "a label is none"
    with pytest.raises(HarvestError, match="data has 'image', 'depth', and .* takes 'input'"):
        next(source_of(BatchesOf({"image": torch.ones(3, 2), "depth": torch.ones(3)}), None, MODEL).read())


def test_what_is_kept_needs_a_name_for_the_rest():
    class Nameless(nn.Module):
        def forward(self, *args):
            return args

    batch = {"image": torch.ones(3, 2), "label": torch.ones(3)}
    with pytest.raises(HarvestError, match="forward takes nothing"):
        next(source_of(BatchesOf(batch), None, Nameless(), keep=["label"]).read())
    del batch["label"]
    (read,) = source_of(BatchesOf(batch), None, Nameless()).read()
    assert read.data.shape == (3, 2), "the only argument"


class BatchesOf:
    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        yield self.batch


def test_what_forward_takes_is_seen_through_wrappers():
    for wrapped in (Text(), torch.compile(Text()), nn.DataParallel(Text())):
        assert Parameters.of(wrapped).names == ("input_ids", "attention_mask", "labels")
    plain = Parameters.of(MODEL)
    assert plain.takes("input") and not plain.takes("label")
    script = Parameters.of(torch.jit.script(nn.Sequential(nn.Linear(2, 2))))
    assert script.takes("input")


def test_batches_are_on_the_host_and_without_graphs():
    weights = torch.ones(4, 2, requires_grad=True)
    (read,) = source_of([weights * 2], None, MODEL).read()
    assert not read.data.requires_grad and read.data.device.type == "cpu"


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.ones(4, 2), 4),
        ((torch.ones(4, 2), torch.ones(4)), 4),
        ({"scale": torch.ones(3), "x": torch.ones(5, 2)}, 5),
        ({"table": torch.ones(9, 2), "x": torch.ones(5, 2), "y": torch.ones(5)}, 5),
        (torch.ones(6), 6),
    ],
)
def test_a_batch_is_as_long_as_most_of_it(batch, length):
    assert samples_of(Batch.of(batch)).length == length


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.uint16([1, 2]), torch.tensor([1, 2])),
        (np.uint8([1, 2]), torch.tensor([1, 2], dtype=torch.uint8)),
        (np.float64(0.5), torch.tensor(0.5)),
        ([0.5, 1], torch.tensor([0.5, 1])),
        (True, torch.tensor(True)),
        (np.array(["a"]), None),
        (["a"], None),
        ([[1], [2, 3]], None),
        (object(), None),
    ],
)
def test_values_become_tensors_as_models_want_them(value, expected):
    found = tensor_of(value)
    assert (found is None) == (expected is None)
    assert expected is None or (torch.equal(found, expected) and found.dtype == expected.dtype)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=5), st.booleans())
def test_ragged_columns_are_padded_and_masked(lists, arrays):
    given = [np.array(one, dtype=np.int32) for one in lists] if arrays else lists
    batch = batch_of_columns({"input_ids": given, "text": ["a"] * len(lists)}, Parameters.of(Text()))
    assert list(batch) == ["input_ids", "attention_mask"]
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    assert [[x for x, real in zip(*row, strict=True) if real] for row in rows] == lists
    assert batch["input_ids"].sum() == sum(map(sum, lists)), "and all else is zero"
    assert batch["input_ids"].dtype == torch.int64 or not any(lists)


def test_a_mask_that_is_there_is_kept_and_one_that_nobody_takes_is_no_argument():
    ids, mask = [[1, 2], [3]], [[1, 0], [1]]
    batch = batch_of_columns({"attention_mask": mask, "input_ids": ids}, Parameters.of(Text()))
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 0]]
    assert list(batch_of_columns({"input": ids}, Parameters(("input",), others=False))) == ["input", PADDING]
    assert list(batch_of_columns({"input": ids}, Parameters(("input",), others=True))) == ["input", PADDING]
    assert "attention_mask" in batch_of_columns({"input": ids}, Parameters((), others=True)), "a wrapper"
    assert list(batch_of_columns({"input_ids": [1, 2]}, Parameters.of(Text()))) == ["input_ids"], "no lists"


def test_columns_that_are_no_batch_are_told():
    with pytest.raises(
        ValueError, match=r"column 'x' has samples of different shapes, which cannot be stacked: 2×2, 3×3"
    ):
        stacked([np.ones((2, 2)), np.ones((3, 3))], "x")
    with pytest.raises(ValueError, match="column 'x' has numbers for 1 of 2 samples"):
        stacked([1, None], "x")


def tokens(samples):
    lists = [[number + 1] * (number % 3 + 1) for number in range(samples)]
    return {"text": ["a"] * samples, "label": list(range(samples)), "input_ids": lists}


def check_tokens(reads, first, samples):
    assert [number for read in reads for number in read.ids] == list(range(first, samples))
    for read in reads:
        assert set(read.data) == {"input_ids", "attention_mask"}
        assert read.data["attention_mask"].sum(1).tolist() == [number % 3 + 1 for number in read.ids]
        assert read.data["input_ids"][:, 0].tolist() == [number + 1 for number in read.ids]
        assert call(Text(), Batch.of(read.data)).dtype == torch.int64


def test_hugging_face_data_sets():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(tokens(10))
    source = source_of(data, 4, Text())
    assert source.indexed and source.repeats and (source.samples, source.batches) == (10, 3)
    check_tokens(list(source.read()), 0, 10)
    check_tokens(list(source.read(2)), 8, 10)
    check_tokens(list(source_of(data.with_format("torch"), 4, Text()).read()), 0, 10)
    flowing = source_of(data.to_iterable_dataset(), 4, Text())
    assert not flowing.indexed and flowing.repeats and flowing.samples is None
    check_tokens(list(flowing.read(1)), 4, 10)
    (read,) = source_of(data, None, Text(), keep=["label"]).read()
    assert read.data["label"].tolist() == list(range(10))
    with pytest.raises(HarvestError, match="data has 'text', 'label', and .* takes 'input'"):
        next(source_of(data.remove_columns("input_ids"), 4, MODEL).read(skip=True))


def test_a_hugging_face_sample_that_cannot_be_read():
    datasets = pytest.importorskip("datasets")
    rows = [[1.0, 2.0], None, [3.0, 4.0]]
    data = datasets.Dataset.from_dict({"input": rows, "name": ["a", "b", "c"]})
    (read,) = source_of(data, 4, MODEL).read(skip=True)
    assert (list(read.ids), list(read.unread)) == ([0, 2], [1])
    assert read.data["input"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("kind", ["tensor", "dataset", "loader", "shuffled", "list"])
def test_data_with_indices_can_be_sent_to_others(kind):
    source, _ = made(kind, 9, 2)
    assert same(pickle.loads(pickle.dumps(source)).read(1, 3), source.read(1, 3))


def test_what_is_read_draws_nothing_from_the_users_dice():
    """A worker's seed aside, reading in order leaves Python's generator as it was."""
    random.seed(0)
    before = random.getstate()
    list(source_of(Numbered(9), 2, MODEL).read())
    assert random.getstate() == before


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_data_sets(ray):
    columns = tokens(10)
    rows = [{name: column[number] for name, column in columns.items()} for number in range(10)]
    data = ray.data.from_items(rows)
    source = source_of(data, 4, Text())
    assert source.repeats and not source.indexed and (source.samples, source.batches) == (10, 3)
    check_tokens(list(source.read()), 0, 10)
    check_tokens(list(source.read(1)), 4, 10)


@pytest.mark.slow
def test_ray_data_sets_keep_their_order_and_their_options(ray):
    class Late:  # in here, for Ray's workers cannot import this file
        def __call__(self, batch):
            import time

            time.sleep(0.5 if batch["data"][0, 0] == 0 else 0)
            return batch

    data = ray.data.from_numpy([np.full((2, 2), number, dtype=np.float64) for number in range(8)])
    slow_first = data.map_batches(Late, batch_size=None, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=0.5)
    before = slow_first.context.execution_options.preserve_order
    source = source_of(slow_first, 3, MODEL)
    reads = list(source.read())
    assert source.samples is None
    assert [row for read in reads for row in read.data["input"][:, 0].tolist()] == [x // 2 for x in range(16)]
    assert reads[0].data["input"].dtype == torch.float32
    assert slow_first.context.execution_options.preserve_order == before
