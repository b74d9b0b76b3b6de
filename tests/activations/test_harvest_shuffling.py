"""Batches have every row once: in order or mixed, in one process or several, in no more memory than was said."""

import os
import subprocess
import sys
import threading
from itertools import chain, pairwise, zip_longest

import pytest
import stores
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from torchhook.activations import store_files
from torchhook.activations.batches import Blocks, shuffled
from torchhook.activations.store import Activations

pytestmark = pytest.mark.usefixtures("one_thread")
SHARDS = st.lists(st.integers(0, 300), min_size=1, max_size=4)


def opened(out, sizes, width=2, dtype=torch.int64, **more):
    stores.write(out, stores.plain(sizes, width, dtype, **more))
    return Activations.open(out)


def numbers(batches):
    """Which rows, by what is in them, of `opened` with rows of two numbers."""
    return [int(row) // 2 for batch in batches for row in batch[:, 0]]


@settings(deadline=None, max_examples=40)
@given(SHARDS, st.integers(1, 400), st.integers(0, 2**40), st.sampled_from([105, 10486, 2**20]))
def test_mixed_batches_are_a_permutation(tmp_path_factory, sizes, size, seed, memory):
    column = opened(tmp_path_factory.mktemp("store"), sizes)["fc"]
    batches = column.batches(size, shuffle=True, seed=seed, memory_bytes=memory)
    found = list(batches)
    assert sorted(numbers(found)) == list(range(sum(sizes)))
    assert all(len(batch) == size for batch in found[:-1]) and len(found) == len(batches)
    assert numbers(batches) == numbers(found), "not the same again"


@settings(deadline=None, max_examples=30)
@given(SHARDS, st.integers(1, 400))
def test_batches_in_order(tmp_path_factory, sizes, size):
    column = opened(tmp_path_factory.mktemp("store"), sizes)["fc"]
    found = list(column.batches(size))
    assert numbers(found) == list(range(sum(sizes)))
    assert all(len(batch) == size for batch in found[:-1]) and len(found) == len(column.batches(size))


@settings(deadline=None, max_examples=40)
@given(SHARDS, st.integers(1, 10_000), st.integers(1, 10**6), st.lists(st.integers(0, 1200), max_size=3))
def test_blocks_have_every_row_once_however_they_are_cut(lengths, width, memory, cuts):
    blocks, edges = (
        Blocks.of(lengths, width, memory),
        sorted([0, sum(lengths), *(min(cut, sum(lengths)) for cut in cuts)]),
    )
    rows = []
    for begin, end in pairwise(edges):
        mixed = blocks.mixed(torch.Generator().manual_seed(3), begin, end).tolist()
        assert sum(stop - start for _, start, stop in mixed) == end - begin
        assert all(0 < stop - start <= blocks.rows for _, start, stop in mixed)
        rows += [(part, row) for part, start, stop in mixed for row in range(start, stop)]
    assert sorted(rows) == [(part, row) for part, length in enumerate(lengths) for row in range(length)]


def test_blocks_are_of_64_rows_at_least_and_many(tmp_path):
    assert Blocks.of([10**6], 8192, 2**28).rows == 64
    assert Blocks.of([10**6], 4, 2**28).rows == 65536, "small reads"
    assert Blocks.of([10**6], 2**20, 2**28).held == 64, "too few to mix"
    for width in (4, 1536, 8192, 2**17):
        blocks = Blocks.of([10**6], width, 2**28)
        assert 2 * blocks.held * blocks.rows * width <= 2**28


def test_seeds_differ_and_are_well_mixed(tmp_path):
    column = opened(tmp_path, [20_000, 30_000])["fc"]
    one, two = (numbers(column.batches(100, shuffle=True, seed=seed)) for seed in (1, 2))
    assert one != two and one != sorted(one)
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 20
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(one))
    assert neighbours < 20


def test_a_batch_comes_from_many_blocks(tmp_path):
    column = opened(tmp_path, [50_000])["fc"]
    blocks = Blocks((50_000,), rows=64, held=100)
    batch = next(iter(shuffled([column.parts], blocks, 1000, seed=0)))[0]
    assert len({number // 64 for number in numbers([batch])}) > 90


def test_sites_go_together(tmp_path):
    acts = opened(tmp_path, [500, 70], 2, torch.float32, sites=("a", "b"))
    for shuffle in (False, True):
        batches = acts.batches(33, shuffle=shuffle, memory_bytes=10486)
        found = list(batches)
        assert [list(batch) for batch in found] == [["a", "b"]] * len(batches)
        assert all(torch.equal(batch["a"] + 1000, batch["b"]) for batch in found)
        assert sorted(numbers(batch["a"] for batch in found)) == list(range(570))
    assert list(next(iter(acts.batches(3, ["b"])))) == ["b"]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader(tmp_path, workers, shuffle):
    acts = opened(tmp_path, [500, 1, 70])
    loader = acts.loader(33, shuffle=shuffle, seed=3, memory_bytes=10486, num_workers=workers)
    assert isinstance(loader, DataLoader)
    found = [batch["fc"] for batch in loader]
    rows = numbers(found)
    assert len(found) == len(loader)
    assert sorted(rows) == list(range(571)) and (rows == sorted(rows)) is not shuffle
    if workers:
        assert all(batch.untyped_storage().nbytes() == batch.nbytes for batch in found), "all of a window was sent"
    if workers < 2:
        assert rows == numbers(acts["fc"].batches(33, shuffle=shuffle, seed=3, memory_bytes=10486))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.filterwarnings("error:Length of IterableDataset", "ignore:This DataLoader will create")
def test_any_loader_knows_how_many_batches_there_are(tmp_path, shuffle):
    """Also one that is made by hand, of whose workers nobody told us; and only the very last batch is short."""
    batches = opened(tmp_path, [500, 1, 70])["fc"].batches(40, shuffle=shuffle, memory_bytes=3146)
    loader = DataLoader(batches, batch_size=None, num_workers=3)
    assert len(loader) == 15
    found = list(loader)
    assert [len(batch) for batch in found] == [40] * 14 + [11]
    assert sorted(numbers(found)) == list(range(571))


@settings(deadline=None, max_examples=40)
@given(SHARDS, st.integers(1, 400), st.integers(1, 9))
def test_workers_share_whole_batches(tmp_path_factory, sizes, size, workers):
    column = opened(tmp_path_factory.mktemp("store"), sizes)["fc"]
    blocks = Blocks.of(sizes, 16, 5000)
    shares = [[rows for (rows,) in shuffled([column.parts], blocks, size, 0, n, workers)] for n in range(workers)]
    turns = [batch for turn in zip_longest(*shares) for batch in turn if batch is not None]  # as a DataLoader does
    assert all(len(batch) == size for batch in turns[:-1])
    assert sorted(numbers(turns)) == list(range(sum(sizes)))


def test_workers_that_are_spawned(tmp_path):
    acts = opened(tmp_path, [50_000, 40_000])
    loader = DataLoader(
        acts.batches(1000, shuffle=True), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    assert sorted(numbers(batch["fc"] for batch in loader)) == list(range(90_000))


def test_a_batch_can_be_changed(tmp_path):
    column = opened(tmp_path, [50_000])["fc"]
    for batch in column.batches(100):
        batch.zero_()
    assert numbers(column.batches(1000)) == list(range(50_000))


def test_a_loop_that_is_left_leaves_no_thread(tmp_path):
    column, before = opened(tmp_path, [5000])["fc"], threading.active_count()
    for _ in column.batches(10, shuffle=True, memory_bytes=1049):
        break
    assert threading.active_count() == before


def test_a_file_that_breaks_meanwhile_is_named(tmp_path):
    acts = opened(tmp_path, [500])
    acts["fc"].parts[0].path.write_bytes(b"")
    with pytest.raises(ValueError, match="00000.safetensors' became shorter"):
        list(acts["fc"].batches(10, shuffle=True))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 1, "memory_bytes": 0}])
def test_wrong_arguments(tmp_path, wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        opened(tmp_path, [5])["fc"].batches(**wrong, shuffle=True)


def tokens_and_labels(out, counts, dtype=torch.float32):
    """A row a token, with its number; and of its sample the id and something wider, one a sample. Counts by shard."""
    shards, sample, token = [], 0, 0
    for of_shard in counts:
        ids = torch.arange(sample, sample + len(of_shard))
        rows = sum(of_shard)
        values = {
            "label": ids,
            "h": torch.arange(token, token + rows).view(-1, 1).expand(-1, 3).contiguous(),
            "pooled": (ids.view(-1, 1, 1) % 2).expand(-1, 2, 2).to(dtype).contiguous(),
        }
        shards.append(stores.Shard(ids.tolist(), values, {"h": of_shard}))
        sample, token = sample + len(of_shard), token + rows
    stores.write(out, shards, ragged=["h"])
    return Activations.open(out), [n for n, count in enumerate(chain(*counts)) for _ in range(count)]


COUNTS = st.lists(st.lists(st.integers(0, 90), max_size=8), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.integers(1, 200), st.booleans(), st.sampled_from([105, 10486, 2**20]))
def test_tokens_go_with_what_is_of_their_samples(tmp_path_factory, counts, size, shuffle, memory):
    acts, labels = tokens_and_labels(tmp_path_factory.mktemp("store"), counts)
    batches = acts.batches(size, ["label", "h", "pooled"], shuffle=shuffle, memory_bytes=memory)
    found = list(batches)
    assert len(found) == len(batches)
    tokens = [int(token) for batch in found for token in batch["h"][:, 0]]
    assert sorted(tokens) == list(range(len(labels))) and (shuffle or tokens == sorted(tokens))
    for batch in found:
        expected = [labels[token] for token in batch["h"][:, 0].tolist()]
        assert batch["label"].tolist() == expected
        assert batch["pooled"][:, 1, 1].tolist() == [label % 2 for label in expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_tokens_and_labels(tmp_path, dtype, shuffle):
    acts, labels = tokens_and_labels(tmp_path, [[30, 0, 200], [0], [7] * 90], dtype)
    loader = acts.loader(33, sites=["h", "label", "pooled"], shuffle=shuffle, memory_bytes=10486, num_workers=2)
    found = list(loader)
    pairs = [pair for batch in found for pair in zip(batch["h"][:, 0].tolist(), batch["label"].tolist(), strict=True)]
    assert len(found) == len(loader) and sorted(pairs) == list(enumerate(labels))
    assert all(torch.equal(batch["pooled"][:, 0, 0], (batch["label"] % 2).to(dtype)) for batch in found)


def test_what_is_repeated_can_be_spawned_and_broken_offsets_are_named(tmp_path):
    acts, labels = tokens_and_labels(tmp_path, [[30, 0, 200]])
    batches = acts.batches(50, shuffle=True)
    list(batches)  # something is mapped already
    loader = DataLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert sorted(label for batch in loader for label in batch["label"].tolist()) == labels
    path = store_files.offsets_path(tmp_path, "h", 0)
    with path.open("r+b") as file:
        file.seek(-8, 2)
        file.write(bytes([231]))
    with pytest.raises(ValueError, match="offsets.safetensors' is broken: its offsets do not cover the 230 rows"):
        list(Activations.open(tmp_path).batches(50, shuffle=True))


MEMORY = """
import sys, torch
from torchhook.activations.store import Activations
torch.set_num_threads(1)
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
batches = Activations.open(sys.argv[1]).batches(1000, shuffle=sys.argv[2] == "mixed", memory_bytes=2**23)
def looked_at(batch):
    return len(batch["fc"]) * all(bool(rows.max() > -1) for rows in batch.values())
looked_at(next(iter(batches)))  # what of torch this needs is loaded when it is first used
before, most, seen = resident(), 0, 0
for batch in batches:
    seen += looked_at(batch)
    most = max(most, resident() - before)
print(seen, most)
"""


@pytest.mark.parametrize("order", ["plain", "mixed"])
def test_memory_is_bounded(tmp_path, order):
    """80 MB in 8 MB of buffers."""
    opened(tmp_path, [20_000, 20_000], 1000, torch.int16)
    seen, most = gone_through(tmp_path, order)
    assert seen == 40_000
    assert most < 20, "MiB more than before"


@pytest.mark.parametrize("order", ["plain", "mixed"])
def test_memory_is_bounded_where_rows_are_repeated(tmp_path, order):
    """40 MB become 80 beside as many small rows."""
    values = {"fc": torch.zeros(40_000, 1, dtype=torch.int16), "wide": torch.ones(20_000, 1000, dtype=torch.int16)}
    stores.write(tmp_path, [stores.Shard(list(range(20_000)), values, {"fc": [2] * 20_000})], ragged=["fc"])
    seen, most = gone_through(tmp_path, order)
    assert seen == 40_000
    assert most < 20, "MiB more than before"


def gone_through(out, order):
    gives_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # or what is freed is in pieces, and counted
    program = [sys.executable, "-c", MEMORY, out, order]
    done = subprocess.run(program, env=gives_back, capture_output=True, text=True, check=True)
    seen, most = done.stdout.split()
    return int(seen), float(most)
