"""What is read back is what was committed, however it is asked for, and whatever happened to the rest."""

import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import stores
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Shard
from torch.utils.data import DataLoader

from torchhook import harvest
from torchhook.activations import batches as in_order
from torchhook.activations import mapped, store_files
from torchhook.activations.mapped import RowFile
from torchhook.activations.store import Activations
from torchhook.activations.store_files import Journal, last_commit
from torchhook.captures.appendable import PAGE
from torchhook.core.errors import HarvestError, NotRecordedError
from torchhook.stats.moments import Moments

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
SHARDS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@pytest.fixture
def store(tmp_path):
    """Three shards, two sites."""
    shards = stores.plain([30, 50, 7], sites=("fc", "head"))
    stores.write(tmp_path, shards)
    return tmp_path, shards


@pytest.fixture
def ragged(tmp_path):
    """Tokens: samples of different lengths, one of them empty, ids out of order, beside a site with a row a sample."""
    tokens = torch.arange(22.0).view(11, 2)
    shards = [
        Shard([7, 3, 9], {"mlp": tokens[:6], "pool": torch.tensor([[7.0], [3.0], [9.0]])}, {"mlp": [1, 0, 5]}),
        Shard([2, 4], {"mlp": tokens[6:], "pool": torch.tensor([[2.0], [4.0]])}, {"mlp": [3, 2]}),
    ]
    stores.write(tmp_path, shards, ragged=["mlp"])
    return Activations.open(tmp_path), tokens


def slices(rows):
    edge = st.none() | st.integers(-rows - 3, rows + 3)
    return st.builds(slice, edge, edge, st.none() | st.integers(-4, 4).filter(bool))


def expressions(rows):
    """What one may write in brackets."""
    number = st.integers(-rows, rows - 1) if rows else st.nothing()
    numbers = st.lists(number, max_size=60 if rows else 0)
    mask = st.lists(st.booleans(), min_size=rows, max_size=rows)
    return st.one_of(
        number,
        slices(rows),
        numbers,
        numbers.map(lambda x: torch.tensor(x, dtype=torch.int64)),
        numbers.map(lambda x: torch.tensor(x * 2, dtype=torch.int32).view(2, -1)),
        mask.map(lambda x: torch.tensor(x, dtype=torch.bool)),
    )


def expected(values, rows):
    if isinstance(rows, slice):
        return values[list(range(len(values))[rows])]
    return values[rows if not isinstance(rows, torch.Tensor) or rows.dtype == torch.bool else rows.long()]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.double() == b.double()).all())


@settings(deadline=None, max_examples=60)
@given(SHARDS, st.sampled_from([(), (3,), (2, 2), (0,)]), st.data())
def test_any_rows_are_those_of_all_shards_together(tmp_path_factory, sizes, shape, data):
    out = tmp_path_factory.mktemp("store")
    width = int(torch.tensor(shape).prod()) if shape else 1
    shards = stores.plain(sizes, width)
    for shard in shards:
        shard.values["fc"] = shard.values["fc"].reshape(-1, *shape) if width else torch.zeros(len(shard.ids), 0)
    stores.write(out, shards)
    values, column = stores.reference(shards), Activations.open(out)["fc"]
    assert column.shape == tuple(values.shape) and len(column) == len(values)
    for _ in range(5):
        rows = data.draw(expressions(len(values)))
        assert same(column[rows], expected(values, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    shards = stores.plain([100, 90], 8)
    for shard in shards:
        shard.values["fc"] = (shard.values["fc"] % 7).to(dtype)
    stores.write(tmp_path, shards)
    values, acts = torch.cat([shard.values["fc"].float() for shard in shards]), Activations.open(tmp_path)
    column = acts["fc"]
    assert column.dtype == dtype
    rows = torch.randperm(190)
    assert torch.equal(column[:].float(), values)
    assert torch.equal(column[rows].float(), values[rows])
    assert torch.equal(torch.cat([batch.float() for batch in column.batches(33)]), values)
    mixed = torch.cat([batch.float() for batch in column.batches(33, shuffle=True)])
    assert sorted(mixed.tolist()) == sorted(values.tolist())
    assert acts.verify(False) > 0
    table = acts.to_arrow()
    assert table["fc"].to_pylist() == (values.bool() if dtype == torch.bool else values).tolist()


def test_a_large_slice_is_a_view_that_changes_nothing_else(tmp_path):
    stores.write(tmp_path, stores.plain([3000], 64))
    column = Activations.open(tmp_path)["fc"]
    before = store_files.values_path(tmp_path, "fc", 0).read_bytes()
    rows, mapped = column[1000:2000], mappings(tmp_path)
    assert mapped == 1, "not mapped"
    rows.zero_()
    assert column[1000:2000].ne(0).all() and column[[1500]].ne(0).all(), "others see the change"
    assert rows.eq(0).all()
    del rows
    column[[1500]]
    assert store_files.values_path(tmp_path, "fc", 0).read_bytes() == before


def test_a_view_takes_only_itself_along(tmp_path):
    stores.write(tmp_path, stores.plain([3000], 64))
    rows = Activations.open(tmp_path)["fc"][1000:2000]
    file = io.BytesIO()
    torch.save(rows, file)
    assert rows.nbytes <= file.tell() < rows.nbytes + 5000
    assert rows.untyped_storage().nbytes() == rows.nbytes


def test_a_view_outlives_the_store(tmp_path):
    stores.write(tmp_path, stores.plain([3000], 64))
    rows = Activations.open(tmp_path)["fc"][1000:]
    assert rows[0, 0] == 64000 and rows[-1, -1] == 3000 * 64 - 1


def test_thousands_of_slices_need_no_files(tmp_path):
    stores.write(tmp_path, stores.plain([6000], 64))
    column = Activations.open(tmp_path)["fc"]
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [column[start : start + 300] for start in range(3000)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert held[-1][0, 0] == 2999 * 64


def test_many_random_rows_of_many_shards(tmp_path):
    shards = stores.plain([2000, 1, 3000, 1500], 96)
    stores.write(tmp_path, shards)
    rows = torch.randint(0, 6501, (5000,))
    assert torch.equal(Activations.open(tmp_path)["fc"][rows], stores.reference(shards)[rows])


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (87, IndexError, "'fc' has no row 87: it has 87"),
        (-88, IndexError, "'fc' has no row -88"),
        ([0, 90], IndexError, "'fc' has no row 90"),
        (torch.ones(3, dtype=torch.bool), IndexError, "each of the 87 rows of 'fc'"),
        ([0.5], TypeError, "index the rows of 'fc' by an int, a slice, integers or a mask, not by torch.float32"),
        (torch.tensor(1.5), TypeError, "not by torch.float32"),
        ((0, 1), TypeError, "index only the rows of 'fc', then the features: column[rows][:, features]"),
        ("a", TypeError, "index the rows of 'fc' by an int, a slice, integers or a mask, not by 'a'"),
        (None, TypeError, "not by None"),
        (..., TypeError, "not by Ellipsis"),
        ([[1], [2, 3]], TypeError, "not by [[1], [2, 3]]"),
        ({1}, TypeError, "not by {1}"),
    ],
)
def test_rows_that_there_are_not(store, rows, error, said):
    column = Activations.open(store[0])["fc"]
    for read in (column.__getitem__, column.keys):
        with pytest.raises(error) as caught:
            read(rows)
        assert said in str(caught.value)


def test_what_a_store_says_of_itself(store):
    acts = Activations.open(str(store[0]))
    assert len(acts) == 87 and acts.sites == ["fc", "head"] == list(acts) and acts.complete and acts.skipped == {}
    assert "fc" in acts and "fd" not in acts
    assert torch.equal(acts.samples, torch.arange(87))
    assert acts["fc"].nbytes == 87 * 16 and acts.nbytes == 2 * 87 * 16 and not acts["fc"].ragged
    with pytest.raises(NotRecordedError, match="'heed' was not harvested; nearest: 'head'"):
        acts["heed"]


def test_statistics_without_reading(store):
    out, shards = store
    for shard in range(3):
        store_files.values_path(out, "fc", shard).write_bytes(
            bytes(store_files.values_path(out, "fc", shard).stat().st_size)
        )
    column = Activations.open(out)["fc"]
    assert column[:].eq(0).all()
    whole = Moments().of(stores.reference(shards))
    assert column.statistics.count == 87 * 4
    assert column.statistics.mean == pytest.approx(whole.mean) and column.statistics.std == pytest.approx(whole.std)
    line = Activations.open(out).statistics()[0]
    assert line["site"] == "fc" and line["rows"] == 87 and line["max"] == whole.max and line["overflow"] == 0


def test_repr_and_html(tmp_path):
    shards = stores.plain([4, 4], sites=("fc<b>", "\x1b[31m"))
    shards[0].skipped, shards[1].done = {99: "broken"}, False
    shards[0].overflow, shards[1].overflow = 3, 7
    stores.write(tmp_path, shards, complete=False)
    acts = Activations.open(tmp_path)
    assert repr(acts).splitlines() == [
        "Activations of Net: 8 samples, 2 sites, 256 B; not complete; 1 skipped",
        "site        rows  shape  dtype    size     mean    std  nonfinite  overflow",
        "fc<b>          8  4      float32  128 B    15.5  9.381          0        10",
        "'\\x1b[31m'     8  4      float32  128 B  1016.0  9.381          0        10",
    ]
    assert "fc&lt;b&gt;" in acts._repr_html_() and "fc<b>" not in acts._repr_html_()
    assert repr(acts["fc<b>"]) == "Column('fc<b>', 8×4 float32, 128 B)"


def test_ragged_rows_of_a_sample(ragged):
    acts, tokens = ragged
    assert acts["mlp"].ragged and len(acts) == 5 and len(acts["mlp"]) == 11
    found = {sample: acts["mlp"].of(sample).tolist() for sample in acts.samples.tolist()}
    assert found == {
        7: tokens[:1].tolist(),
        3: [],
        9: tokens[1:6].tolist(),
        2: tokens[6:9].tolist(),
        4: tokens[9:].tolist(),
    }
    assert acts["mlp"].of(3).shape == (0, 2)
    assert acts["pool"].of(4).tolist() == [[4.0]]
    with pytest.raises(HarvestError, match="no sample 5"):
        acts["mlp"].of(5)


def test_keys_of_rows(ragged):
    acts, _ = ragged
    ids, positions = acts["mlp"].keys()
    assert ids.tolist() == [7, 9, 9, 9, 9, 9, 2, 2, 2, 4, 4]
    assert positions.tolist() == [0, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert [x.tolist() for x in acts["mlp"].keys([-1, 1])] == [[4, 9], [1, 0]]
    assert [x.tolist() for x in acts["mlp"].keys(slice(None, None, -5))] == [[4, 9, 7], [1, 4, 0]]
    assert [x.tolist() for x in acts["pool"].keys(2)] == [[9], [0]]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4))
def test_ragged_rows_go_back_to_their_samples(tmp_path_factory, counts):
    out, first, shards = tmp_path_factory.mktemp("store"), 0, []
    for of_shard in counts:
        rows = sum(of_shard)
        ids = [100 - first - i for i in range(len(of_shard))]
        shards.append(Shard(ids, {"x": torch.rand(rows, 2)}, {"x": of_shard}))
        first += len(ids)
    stores.write(out, shards, ragged=["x"])
    acts = Activations.open(out)
    column, (ids, positions) = acts["x"], acts["x"].keys()
    for sample in acts.samples.tolist():
        assert torch.equal(column.of(sample), column[ids == sample])
        assert positions[ids == sample].tolist() == list(range(len(column.of(sample))))


def test_sites_with_a_row_a_sample_go_with_tokens(ragged):
    acts, tokens = ragged
    pooled = acts["mlp"].keys()[0].view(-1, 1).float()  # which has the id of its sample in it
    for batches in (acts.batches(3), acts.loader(3), acts.batches(3, ["pool", "mlp"])):
        assert torch.equal(torch.cat([batch["mlp"] for batch in batches]), tokens)
        assert torch.equal(torch.cat([batch["pool"] for batch in batches]), pooled)
    for table in (acts.to_arrow(), acts.to_arrow("pool", "mlp")):
        table.validate(full=True)
        assert table["mlp"].to_pylist() == tokens.tolist() and table["pool"].to_pylist() == pooled.tolist()
        assert table["sample"].to_pylist() == acts["mlp"].keys()[0].tolist()
    assert acts.to_arrow("pool").num_rows == 5 == sum(len(batch["pool"]) for batch in acts.batches(2, ["pool"]))
    with pytest.raises(TypeError, match=r"\['mlp'\]"):
        acts.batches(3, "mlp")


def test_as_many_rows_of_other_things_do_not_go_together(tmp_path):
    rows = torch.rand(3, 2)
    values = {"z": rows[:2], "x": rows, "y": rows}
    stores.write(tmp_path, [Shard([0, 1], values, {"x": [1, 2], "y": [2, 1]})], ragged=["x", "y"])
    acts = Activations.open(tmp_path)
    for read in (lambda: acts.batches(2), lambda: acts.loader(2), acts.to_arrow):
        with pytest.raises(HarvestError, match="the 3 rows of 'x' and the 3 rows of 'y' are not of the same tokens"):
            read()


# what was not committed, or is broken


def test_an_unfinished_store_has_what_was_committed(tmp_path):
    shards = stores.plain([10, 10, 10])
    shards[2].done = False
    stores.write(tmp_path, [shards[0], None, shards[2]], complete=False)
    path = store_files.values_path(tmp_path, "fc", 2)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b'{"values":{"dtype":"F32","shape":[99,4],"data_offsets":[0,1584]}}')  # ahead of the journal
        file.seek(0, 2)
        file.write(bytes(7777))  # rows on their way
    with store_files.journal_path(tmp_path, 2).open("ab") as file:
        file.write(b'{"batches": 2, "samp')
    acts = Activations.open(tmp_path)
    assert len(acts) == 20 and not acts.complete
    assert torch.equal(acts["fc"][:], stores.reference([shards[0], shards[2]]))
    assert acts.verify(False) == 20 * 8 + 20 * 16


def test_opening_writes_nothing(store):
    out = store[0]
    journal = Journal(store_files.journal_path(out, 0))  # by a writer that is at it
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for path in out.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        acts = Activations.open(out)
        acts["fc"][:], acts["fc"][[3, 2]], acts.verify(False), list(acts.batches(9, shuffle=True))
    finally:
        for path in [out, *out.rglob("*")]:
            path.chmod(0o755)
        journal.close()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_reader_keeps_what_it_opened_while_the_store_grows(tmp_path):
    shards = stores.plain([10, 10])
    stores.write(tmp_path, shards[:1], complete=False)
    acts = Activations.open(tmp_path)
    stores.write(tmp_path, shards)
    assert len(acts) == 10 and not acts.complete and len(pickle.loads(pickle.dumps(acts))) == 10
    assert len(Activations.open(tmp_path)) == 20


@pytest.mark.parametrize("which", ["values", "offsets", "samples"])
@pytest.mark.parametrize("how", ["shorter", "gone"])
def test_a_file_shorter_than_its_journal_says(tmp_path, which, how):
    stores.write(tmp_path, [Shard([0, 1], {"x": torch.rand(3, 2)}, {"x": [1, 2]})], ragged=["x"])
    path = (
        store_files.samples_path(tmp_path, 0)
        if which == "samples"
        else getattr(store_files, f"{which}_path")(tmp_path, "x", 0)
    )
    os.truncate(path, path.stat().st_size - 1) if how == "shorter" else path.unlink()
    with pytest.raises(HarvestError) as caught:
        Activations.open(tmp_path)
    assert repr(str(path)) in str(caught.value)


def test_a_lost_journal(store):
    store_files.journal_path(store[0], 1).unlink()
    with pytest.raises(HarvestError, match="00001.jsonl"):
        Activations.open(store[0])


def test_no_store(tmp_path):
    with pytest.raises(HarvestError, match="no activations"):
        Activations.open(tmp_path / "nowhere")


def test_a_store_without_rows(tmp_path):
    stores.write(tmp_path, [Shard([], {"x": torch.empty(0, 3)}, skipped={0: "broken"})])
    acts = Activations.open(tmp_path)
    assert len(acts) == 0 and acts.skipped == {0: "broken"} and acts.complete and acts.samples.tolist() == []
    assert acts["x"][:].shape == (0, 3) and acts["x"][[]].shape == (0, 3)
    assert list(acts["x"].batches(2)) == [] == list(acts["x"].batches(2, shuffle=True))
    assert acts["x"].statistics.count == 0 and acts.verify(False) == 0 and acts.to_arrow().num_rows == 0
    assert "0 samples" in repr(acts)


def test_offsets_that_do_not_fit(tmp_path):
    stores.write(tmp_path, [Shard([0, 1], {"x": torch.rand(3, 2)}, {"x": [1, 1]})], ragged=["x"])
    with pytest.raises(HarvestError, match="offsets.safetensors' is broken"):
        Activations.open(tmp_path)["x"].of(1)


def test_rows_that_do_not_fit_their_samples(store):
    path = store_files.journal_path(store[0], 1)
    path.write_text(path.read_text().replace('"rows":50', '"rows":49', 1))
    with pytest.raises(HarvestError, match="49 rows of 'fc' for 50 samples"):
        Activations.open(store[0])


def flip(path, place):
    """One bit, of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_verify_names_every_broken_file(store):
    out, _ = store
    acts = Activations.open(out)
    assert acts.verify() == 87 * 8 + 2 * 87 * 16
    broken = [
        store_files.values_path(out, "fc", 1),
        store_files.samples_path(out, 2),
        store_files.samples_path(out, 0),
        store_files.values_path(out, "fc", 2),
    ]
    flip(broken[0], -1)
    flip(broken[1], -1)
    os.truncate(broken[2], 4100)  # after it was opened
    broken[3].unlink()
    with pytest.raises(HarvestError) as caught:
        acts.verify()
    assert all(repr(str(path)) in str(caught.value) for path in broken)
    assert str(store_files.values_path(out, "fc", 0)) not in str(caught.value)


@pytest.mark.parametrize("place", [0, 12, 4095])
def test_verify_reads_the_headers_of_what_is_done(tmp_path, place):
    shards = [Shard([0, 1], {"x": torch.rand(3, 2)}, {"x": [1, 2]}), Shard([], {"x": torch.rand(0, 2)}, {"x": []})]
    stores.write(tmp_path, shards, ragged=["x"])
    acts, files = Activations.open(tmp_path), sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 6 and acts.verify(False)
    for path in files:
        flip(path, place)
        with pytest.raises(HarvestError) as caught:
            acts.verify(False)
        assert [repr(str(other)) in str(caught.value) for other in files] == [other == path for other in files]
        flip(path, place)


def test_what_verify_says_to_do_mends_the_store(tmp_path):
    model, data = torch.nn.Linear(3, 2), torch.rand(40, 3)

    def harvested():
        return harvest(model, data, "", tmp_path, batch_size=4, shard_bytes=40, progress=False)

    acts = harvested()
    assert len(acts[""].parts) > 2
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    broken = [store_files.values_path(tmp_path, "", 1), store_files.samples_path(tmp_path, 0)]
    flip(broken[0], 5000 % len(whole[broken[0]]))
    flip(broken[1], 12)
    with pytest.raises(HarvestError, match="delete these files and call harvest again") as caught:
        acts.verify(False)
    assert all(repr(str(path)) in str(caught.value) for path in broken)
    for path in broken:
        path.unlink()
    assert harvested().verify(False) == acts.nbytes + 40 * 8
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == whole


def test_verify_shows_how_far_it_is(store, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    screen, plain = Terminal(), io.StringIO()
    acts = Activations.open(store[0])
    with redirect_stderr(screen):
        size = acts.verify()
    with redirect_stderr(plain):
        assert size == acts.verify() == acts.verify(False)
    assert "checking pieces of 8 MiB" in screen.getvalue() and "9/9" in screen.getvalue()
    assert plain.getvalue() == ""


def test_every_file_is_one_of_safetensors(store):
    from safetensors.torch import load_file

    out, shards = store
    assert torch.equal(load_file(store_files.values_path(out, "head", 1))["values"], shards[1].values["head"])
    assert last_commit(store_files.journal_path(out, 1)).samples == 50


# as others read it


def test_a_map_style_data_set(store):
    out, shards = store
    data = Activations.open(out)["fc"].dataset()
    assert len(data) == 87 and torch.equal(data[3], stores.reference(shards)[3])
    loaded = torch.cat(list(DataLoader(data, batch_size=10)))
    assert torch.equal(loaded, stores.reference(shards))


def test_another_process_reads_it(store):
    out, shards = store
    column = Activations.open(out)["fc"]
    column[[5, 4]], column.keys()  # something is mapped already
    loader = DataLoader(column.dataset(), batch_size=40, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(torch.cat(list(loader)), stores.reference(shards))
    assert multiprocessing.active_children() == []


def test_arrow(ragged):
    acts, tokens = ragged
    table = acts.to_arrow("mlp")
    assert table.column_names == ["sample", "position", "mlp"]
    assert table["sample"].to_pylist() == acts["mlp"].keys()[0].tolist()
    assert table["position"].to_pylist() == acts["mlp"].keys()[1].tolist()
    assert table["mlp"].to_pylist() == tokens.tolist() and table["mlp"].num_chunks == 2
    assert table.schema.field("mlp").metadata == {b"shape": b"[2]"}
    table.validate(full=True)


def test_arrow_copies_nothing(tmp_path):
    import pyarrow

    stores.write(tmp_path, stores.plain([3000, 3000], 64, torch.float16))
    before = pyarrow.total_allocated_bytes()
    table = Activations.open(tmp_path).to_arrow()
    assert pyarrow.total_allocated_bytes() - before < 10_000
    assert mappings(tmp_path / "sites") == 2
    assert table["fc"][4000].as_py()[1] == float(torch.tensor(4000 * 64 + 1).half())


def test_arrow_of_more_dimensions_to_parquet_and_back(tmp_path):
    from pyarrow import parquet

    shards = [Shard([0, 1], {"x": torch.rand(2, 3, 4), "y": torch.tensor([5, 6])})]
    stores.write(tmp_path, shards)
    parquet.write_table(Activations.open(tmp_path).to_arrow(), tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert torch.equal(torch.tensor(table["x"].to_pylist()).view(2, 3, 4), shards[0].values["x"])
    assert table["y"].to_pylist() == [5, 6] and table.schema.field("x").metadata[b"shape"] == b"[3, 4]"


def test_arrow_and_a_site_with_the_name_of_a_key(tmp_path):
    stores.write(tmp_path, stores.plain([3], sites=("sample",)))
    with pytest.raises(HarvestError, match="'sample' has the name"):
        Activations.open(tmp_path).to_arrow()


def test_neither_numpy_nor_arrow_is_needed(store):
    program = f"""
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = sys.modules["safetensors"] = None
from torchhook.activations.store import Activations
acts = Activations.open({str(store[0])!r})
acts["fc"][:], acts["fc"][[1, 2]], list(acts.batches(9, shuffle=True)), acts.verify(False)
try:
    acts.to_arrow()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.stdout == 'to_arrow() needs pyarrow: pip install "torchhook[parquet]"\n', done.stderr


def test_reading_needs_no_posix(store, tmp_path):
    """As on Windows: files cannot be locked, nor read or written at a place, nor advice be given on maps of them."""
    program = f"""
import ctypes, os, sys, torch
sys.modules["fcntl"] = None
for name in ("preadv", "pread", "pwrite", "pwritev"):
    delattr(os, name)
def no_library(name): raise TypeError(name)
ctypes.CDLL = no_library
from torchhook import harvest
from torchhook.activations.store import Activations
acts = Activations.open({str(store[0])!r})
assert len(acts) == 87 and acts["fc"][:].shape == acts["fc"][torch.randperm(87)].shape == (87, 4)
assert acts["fc"].of(3).tolist() == acts["fc"][[3]].tolist() == [[12.0, 13.0, 14.0, 15.0]]
assert sum(len(batch["fc"]) for shuffle in (True, False) for batch in acts.batches(9, shuffle=shuffle)) == 2 * 87
assert acts.verify(False) == 87 * 8 + 2 * 87 * 16 and acts.to_arrow().num_rows == 87
try:
    harvest(torch.nn.Linear(2, 2), torch.ones(4, 2), "", {str(tmp_path / "new")!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("HarvestError harvest cannot write here: this system has no POSIX file locks"), done
    assert done.stdout.count("\n") == 1 and not done.stderr and not (tmp_path / "new").exists()


def mappings(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no such advice")
def test_the_system_reads_ahead_of_batches_in_order(tmp_path, monkeypatch):
    rows = [60, 50, 7]
    stores.write(tmp_path, stores.plain(rows, sites=("fc",)))
    monkeypatch.setattr(in_order, "_WINDOW", 1)
    monkeypatch.setattr(in_order, "_AHEAD", 0)
    asked = []
    monkeypatch.setattr(RowFile, "expect", lambda part, start, stop: asked.append((part.path.stem, start, stop)))
    loop = iter(Activations.open(tmp_path)["fc"].batches(25))
    assert len(next(loop)) == 25
    list(loop)
    assert asked == [
        ("00000", 0, 25),
        ("00000", 25, 50),
        ("00000", 50, 60),
        ("00001", 0, 15),
        ("00001", 15, 40),
        ("00001", 40, 50),
        ("00002", 0, 7),
    ], "each row once, in order"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no such advice")
def test_advice_covers_the_rows_in_steps_and_never_raises(tmp_path, monkeypatch):
    stores.write(tmp_path, stores.plain([100], sites=("fc",)))
    part = Activations.open(tmp_path)["fc"].parts[0]
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: asked.append((start, size, advice)))
    monkeypatch.setattr(mapped, "_READAHEAD", 2 * part.row_bytes)
    part.expect(10, 15)
    first, step = PAGE + 10 * part.row_bytes, 2 * part.row_bytes
    assert asked == [(first + n * step, step, os.POSIX_FADV_WILLNEED) for n in range(3)]
    part.path.unlink()
    part.expect(10, 15)
