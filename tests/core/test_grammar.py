"""What all verbs have in common: how data, progress, sizes and tables are given, and old names that still work."""

import io
import warnings
from contextlib import redirect_stderr

import pandas
import polars
import pytest
import torch
from torch import nn

from torchhook.core.batch import Batch, InputBatches
from torchhook.core.errors import SelectionError
from torchhook.core.progress import track
from torchhook.core.renamed import old_method, renamed
from torchhook.core.selection import Selector, select
from torchhook.core.tabular import Tabular
from torchhook.core.text import size_of


class Pair(nn.Module):
    def forward(self, image, scale=1.0):
        return image * scale


X, Y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0])


def calls(data, **options):
    """What the model is called with, batch by batch."""
    return [Batch.of(batch) for batch in InputBatches(data, Pair(), **options)]


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize(
    ("data", "args", "kwargs"),
    [
        (X, [X], {}),
        ((X, Y), [X], {}),
        ((X, 2.0, Y), [X, 2.0], {}),
        ({"image": X, "scale": 3.0}, [], {"image": X, "scale": 3.0}),
    ],
)
def test_data_of_every_kind(data, args, kwargs, in_list):
    (batch,) = calls([data] if in_list else data)
    assert list(batch.arguments.args) == args and batch.arguments.kwargs == kwargs


def test_fields_become_inputs():
    loader = [{"x": X, "y": Y}] * 2
    for to_inputs in (
        lambda batch: (batch["x"], batch["y"]),
        lambda batch: {"image": batch["x"]},
        lambda batch: batch["x"],
    ):
        first, second = calls(loader, batch_to_inputs=to_inputs)
        given = first.arguments.args[0] if first.arguments.args else first.arguments.kwargs["image"]
        assert given is X and second.arguments == first.arguments
    with pytest.raises(
        TypeError, match=r"has the fields 'x', 'y', but Pair.forward takes 'image', 'scale'.*batch\['x'\]"
    ):
        calls(loader)
    with pytest.raises(TypeError, match="batch_to_inputs must be a function"):
        calls(loader, batch_to_inputs="x")


@pytest.mark.parametrize("wrong", [7, None, "images", nn.Linear(1, 1)])
def test_what_is_not_data(wrong):
    with pytest.raises(TypeError, match="train must be a tensor, a tuple or dict of them, or an iterable"):
        InputBatches(wrong, Pair(), argument="train")


def test_a_split_tensor_is_a_list_of_batches_where_nothing_takes_a_target():
    parts = torch.ones(5, 2).split(2)
    assert [len(batch.arguments.args[0]) for batch in calls(parts)] == [2, 2, 1]
    (batch,) = calls(parts, targets=True)
    assert batch.target is parts[-1]


def test_streams_are_read_once_and_loaders_again():
    assert not InputBatches(iter([X]), Pair()).repeats and InputBatches([X], Pair()).repeats
    with pytest.raises(TypeError):
        len(InputBatches(iter([X]), Pair()))


def test_lists_of_places():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Tanh())
    assert list(select(net, ["2", nn.Linear])) == ["0", "2"] == list(select(net, Selector.of(["2", nn.Linear])))
    with pytest.raises(SelectionError, match="'3'"):
        select(net, ["0", "3"])
    with pytest.raises(SelectionError, match="empty"):
        select(net, [])


def test_progress_is_a_bar_a_function_or_nothing(monkeypatch):
    told = []
    assert list(track("ab", 2, "letters", lambda *said: told.append(said))) == ["a", "b"]
    assert told == [("letters", 1, 2), ("letters", 2, 2)]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for progress, wanted, seen in ((True, "", True), (False, "", False), (True, "0", False)):
        monkeypatch.setenv("TORCHHOOK_PROGRESS", wanted)
        with redirect_stderr(Terminal()) as file:
            list(track("ab", 2, "letters", progress))
        assert ("letters" in file.getvalue()) == seen
    with pytest.raises(TypeError, match="progress must be True, False or a function"):
        list(track("ab", 2, "letters", 1.5))
    with pytest.warns(DeprecationWarning, match="files and None will go") as said:
        list(track("ab", 2, "letters", None))
    assert said[0].filename == __file__


class Rows(Tabular):
    def __init__(self, count):
        self.count = count

    def _records(self):
        return [{"path": f"<{number}>", "share": number / 3} for number in range(self.count)]


def test_tables():
    rows = Rows(3)
    assert isinstance(rows.table(), pandas.DataFrame) and isinstance(rows.table("polars"), polars.DataFrame)
    assert rows.table().to_dict("records") == rows.table("list") == rows.table("polars").to_dicts()
    with pytest.raises(ValueError, match="'pandas', 'polars', 'list'"):
        rows.table("arrow")
    assert "&lt;1&gt;" in rows._repr_html_() and "0.3333" in repr(rows)
    assert len(repr(Rows(500)).splitlines()) < 50 and "476 more rows: .table() has all" in repr(Rows(500))
    assert "476 more rows" in Rows(500)._repr_html_() and repr(Rows(0)) == ""


def test_the_row_that_matters_is_on_the_screen():
    class Important(Rows):
        pass

    for number, first, last in ((300, 288, 311), (3, 0, 23), (499, 476, 499)):
        Important._important = lambda self, number=number: number
        lines = repr(Important(500)).splitlines()
        assert len(lines) == 26 and lines[1].startswith(f"<{first}>") and lines[-2].startswith(f"<{last}>")
        assert f"<td>&lt;{number}&gt;</td>" in Important(500)._repr_html_()


def test_tables_without_pandas(monkeypatch):
    monkeypatch.setattr("torchhook.core.tabular.find_spec", lambda name: None)
    assert Rows(2).table() == Rows(2)._records()
    with pytest.raises(ImportError, match="pip install pandas"):
        Rows(2).table("pandas")


def test_sizes():
    assert [size_of(text) for text in ("12", "12B", "3KiB", "1.5 MiB", "2GiB")] == [12, 12, 3072, 1572864, 2**31]
    for wrong in ("", "MiB", "12MB", "-1", "1e9 KiB x"):
        with pytest.raises(ValueError, match="not a size"):
            size_of(wrong)


def test_old_names_warn_once_at_the_line_of_the_user():
    @renamed(layer="sites", max_mb=("max_bytes", lambda mib: mib * 2**20))
    def look(sites=None, max_bytes=1):
        return sites, max_bytes

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert look(sites="a", max_bytes=2) == ("a", 2)
    with pytest.warns(DeprecationWarning, match=r"look\(layer=...\) is now .*look\(sites=...\)") as said:
        assert look(layer="a") == ("a", 1)
    assert [one.filename for one in said] == [__file__]
    with pytest.warns(DeprecationWarning):
        assert look(max_mb=2) == (None, 2**21)
    with pytest.raises(TypeError, match="both sites= and its old name layer="):
        look(sites="a", layer="b")

    class Session:
        attach = old_method("open")

        def open(self):
            return "open"

    with pytest.warns(DeprecationWarning, match=r"this method of Session is now called open\(\)"):
        assert Session().attach() == "open"
