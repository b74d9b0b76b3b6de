"""Batches have every row once: in order or mixed, in one process or several, in no more memory than was said."""

import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import stores
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from torchhook.harvesting.activations import Activations
from torchhook.harvesting.shuffling import Blocks, shuffled

pytestmark = pytest.mark.usefixtures("one_thread")
SHARDS = st.lists(st.integers(0, 300), min_size=1, max_size=4)


def opened(out, sizes, width=2, dtype=torch.int64, **more):
    stores.write(out, stores.plain(sizes, width, dtype, **more))
    return Activations.open(out)


def numbers(batches):
    """Which rows, by what is in them, of `opened` with rows of two numbers."""
    return [int(row) // 2 for batch in batches for row in batch[:, 0]]


@settings(deadline=None, max_examples=40)
@given(SHARDS, st.integers(1, 400), st.integers(0, 2**40), st.sampled_from([1e-4, 0.01, 1]))
def test_mixed_batches_are_a_permutation(tmp_path_factory, sizes, size, seed, memory):
    column = opened(tmp_path_factory.mktemp("store"), sizes)["fc"]
    batches = column.batches(size, shuffle=True, seed=seed, memory_mb=memory)
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
@given(SHARDS, st.integers(1, 10_000), st.integers(1, 10**6), st.integers(1, 4), st.integers(0, 99))
def test_blocks_have_every_row_once(lengths, width, memory, workers, seed):
    blocks = Blocks.of(lengths, width, memory)
    rows = [(run.part, row) for run in map(blocks.run, range(blocks.firsts[-1])) for row in range(run.start, run.stop)]
    assert rows == [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    assert sum(blocks.shares(seed, workers)) == sum(lengths)


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
    blocks = Blocks((50_000,), (0, 782), rows=64, held=100)
    batch = next(iter(shuffled([column.parts], blocks, 1000, seed=0)))[0]
    assert len({number // 64 for number in numbers([batch])}) > 90


def test_sites_go_together(tmp_path):
    acts = opened(tmp_path, [500, 70], 2, torch.float32, sites=("a", "b"))
    for shuffle in (False, True):
        batches = acts.batches(33, shuffle=shuffle, memory_mb=0.01)
        found = list(batches)
        assert [list(batch) for batch in found] == [["a", "b"]] * len(batches)
        assert all(torch.equal(batch["a"] + 1000, batch["b"]) for batch in found)
        assert sorted(numbers(batch["a"] for batch in found)) == list(range(570))
    assert list(next(iter(acts.batches(3, ["b"])))) == ["b"]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader(tmp_path, workers, shuffle):
    acts = opened(tmp_path, [500, 1, 70])
    loader = acts.loader(33, shuffle=shuffle, seed=3, memory_mb=0.01, num_workers=workers)
    assert isinstance(loader, DataLoader)
    found = [batch["fc"] for batch in loader]
    rows = numbers(found)
    assert len(found) == len(loader)
    assert sorted(rows) == list(range(571)) and (rows == sorted(rows)) is not shuffle
    if workers:
        assert all(batch.untyped_storage().nbytes() == batch.nbytes for batch in found), "all of a window was sent"
    if workers < 2:
        assert rows == numbers(acts["fc"].batches(33, shuffle=shuffle, seed=3, memory_mb=0.01))


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
    for _ in column.batches(10, shuffle=True, memory_mb=0.001):
        break
    assert threading.active_count() == before


def test_a_file_that_breaks_meanwhile_is_named(tmp_path):
    acts = opened(tmp_path, [500])
    acts["fc"].parts[0].path.write_bytes(b"")
    with pytest.raises(ValueError, match="00000.safetensors' became shorter"):
        list(acts["fc"].batches(10, shuffle=True))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 1, "memory_mb": 0}])
def test_wrong_arguments(tmp_path, wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        opened(tmp_path, [5])["fc"].batches(**wrong, shuffle=True)


MEMORY = """
import sys, torch
from torchhook.harvesting.activations import Activations
torch.set_num_threads(1)
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
column = Activations.open(sys.argv[1])["fc"]
torch.ones(1000, 1000, dtype=torch.int16).max()
before, most, seen = resident(), 0, 0
for batch in column.batches(1000, shuffle=sys.argv[2] == "mixed", memory_mb=8):
    seen += int(batch.max() > -1) * len(batch)
    most = max(most, resident() - before)
print(seen, most)
"""


@pytest.mark.parametrize("order", ["plain", "mixed"])
def test_memory_is_bounded(tmp_path, order):
    """80 MB in 8 MB of buffers."""
    opened(tmp_path, [20_000, 20_000], 1000, torch.int16)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path, order], capture_output=True, text=True, check=True)
    seen, most = done.stdout.split()
    assert int(seen) == 40_000
    assert float(most) < 40, "MiB more than before"
