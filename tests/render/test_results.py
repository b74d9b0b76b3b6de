"""Results of every verb: saved, opened again, shown on a page; files that others made."""

import json
import math
import os
import struct

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

import torchhook
from torchhook import FileError, Finding, Report, render
from torchhook.core.parts import Bars, Matrix, Picture, Sentence, Table
from torchhook.core.result import VERSION, Saved, write
from torchhook.render.figures.results import caption, drawn

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


VERBS = {
    "cka": lambda: torchhook.compare.cka(net(), net(1), X.split(4), progress=False),
    "diff": lambda: torchhook.diff(net(), net(1), X),
    "sweep": lambda: torchhook.sweep(net(), X, ["0", "2"], torchhook.edits.zero(), torch.sum, progress=False),
    "datasets": lambda: torchhook.compare.datasets(net(), X.split(4), (X + 9).split(4), progress=False),
    "shift": lambda: torchhook.compare.shift(net(), X.split(4), (X + 9).split(4), "0", progress=False),
    "shifts": lambda: torchhook.compare.shift(net(), X.split(4), (X + 9).split(4), ["0", "2"], progress=False),
    "leakage": lambda: torchhook.compare.leakage(
        net(), [(X, torch.zeros(12, dtype=torch.long))], [(X + 1, torch.ones(12, dtype=torch.long))], progress=False
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_verb_returns_is_saved_and_opened_again(verb, tmp_path):
    result = VERBS[verb]()
    result.save(tmp_path / "result.th")
    opened = render.load(tmp_path / "result.th")
    assert isinstance(opened, Saved) and opened.kind == type(result).__name__
    assert opened._title() == result._title() and opened._foot() == list(result._foot())
    for old, new in zip(result._parts(), opened.parts, strict=True):
        assert type(old) is type(new)
        if isinstance(old, Matrix):
            assert torch.equal(old.values, new.values) and list(old.rows) == new.rows
        elif isinstance(old, Table):
            assert repr(new.records()) == repr(old.records())
    assert repr(opened.table("list")) == repr(result._tables()[0].records())
    assert render.html(opened) == render.html(result)
    opened.save(tmp_path / "again.th")
    assert (tmp_path / "again.th").read_bytes() == (tmp_path / "result.th").read_bytes()


def test_a_report_is_saved_like_other_results(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(model[0].bias, -50.0)
    report = torchhook.diagnose(model, [(X, torch.zeros(12, dtype=torch.long))] * 3, loss=F.cross_entropy)
    assert report.findings
    report.save(tmp_path / "report.th")
    render.save(report, tmp_path / "same.th")
    assert render.load(tmp_path / "report.th") == render.load(tmp_path / "same.th")
    assert render.html(render.load(tmp_path / "report.th")) == render.html(report)


def test_a_loss_that_is_not_finite_comes_back_as_one(tmp_path):
    report = Report((Finding("TH101", "error", "NaN", evidence={"loss": math.nan}),), losses={0: math.inf, 1: 1.0})
    report.save(tmp_path / "report.th")
    opened = render.load(tmp_path / "report.th")
    assert opened.losses == {0: math.inf, 1: 1.0} and math.isnan(opened.findings[0].evidence["loss"])


def test_a_picture_of_a_result_is_kept(tmp_path):
    picture = Picture.of(b"\x89PNG\r\n\x1a\n123")
    write("Drawn", [Sentence("A drawing"), picture], tmp_path / "drawn.th")
    opened = render.load(tmp_path / "drawn.th")
    assert opened.parts[1].address() == picture.address() and picture.address() in render.html(opened)


def test_a_name_without_its_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot save a result as 'x.json': the name of the file must end in .th"):
        VERBS["sweep"]().save(tmp_path / "x.json")
    with pytest.raises(ValueError, match="cannot save a result as 'x.md': the suffix must be one of .html, .th"):
        render.save(VERBS["sweep"](), tmp_path / "x.md")
    with pytest.raises(FileError, match="there is no result"):
        render.load(tmp_path / "nowhere.th")


def test_saving_is_atomic(tmp_path, monkeypatch):
    file = tmp_path / "result.th"
    VERBS["sweep"]().save(file)
    before = file.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        VERBS["cka"]().save(file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def file_of(about, tensors=None):
    return save(tensors or {}, {"torchhook_result": about if isinstance(about, str) else json.dumps(about)})


def parts_of(*parts):
    tensors = {"0": torch.ones(2, 2), "odd": torch.ones(1, 1).to(torch.float8_e4m3fn)}
    return file_of({"version": VERSION, "kind": "X", "parts": list(parts)}, tensors)


HOSTILE = {
    "nothing": b"",
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a header without an end": struct.pack("<Q", 2**62) + b"{}",
    "a checkpoint": save({"weight": torch.ones(2)}),
    "no JSON": file_of("{"),
    "JSON that never ends": file_of("[" * 100_000),
    "no parts": file_of({"version": VERSION, "kind": "X"}),
    "an unknown kind": parts_of({"part": "Shell", "text": "rm"}),
    "a name of Python": parts_of({"part": "__class__"}),
    "text that is a number": parts_of({"part": "Sentence", "text": 3}),
    "a row that is too short": parts_of({"part": "Table", "header": ["a", "b"], "rows": [["x"]]}),
    "a cell that is a list": parts_of({"part": "Table", "header": ["a"], "rows": [[["x"]]]}),
    "a matrix that does not fit": parts_of(
        {"part": "Matrix", "values": {"$tensor": "0"}, "rows": ["a"], "columns": ["a"], "unit": ""}
    ),
    "a tensor that is not there": parts_of(
        {"part": "Matrix", "values": {"$tensor": "9"}, "rows": ["a"], "columns": ["a"], "unit": ""}
    ),
    "a picture that is a script": parts_of({"part": "Picture", "png": {"$tensor": "0"}}),
    "bars of words": parts_of({"part": "Bars", "layers": ["a"], "values": {"": ["x"]}, "unit": ""}),
    "bars of endless numbers": parts_of({"part": "Bars", "layers": ["a"], "values": {"": [10**400]}, "unit": ""}),
    "a matrix of numbers that cannot be drawn": parts_of(
        {"part": "Matrix", "values": {"$tensor": "odd"}, "rows": ["a"], "columns": ["a"], "unit": ""}
    ),
    "a report with a layer of lists": parts_of(
        {"part": "Report", **Report().to_dict(), "layers": [{"site": "a", "kind": "module", "std": []}]}
    ),
    "a report with a step of words": parts_of({"part": "Report", **Report().to_dict(), "losses": [["x", 1.0]]}),
    "a report that is too deep to show": parts_of(
        {"part": "Report", **Report().to_dict(), "about": {"run": json.loads(400 * "[" + 400 * "]")}}
    ),
    "a report of nothing": parts_of({"part": "Report"}),
    "a finding of numbers": parts_of(
        {"part": "Report", **Report((Finding("TH1", "error", "x"),)).to_dict(), "model": 3, "schema": 1}
    ),
    "a severity that is unknown": parts_of({"part": "Report", **Report(notes=("a",)).to_dict(), "fail_on": "<b>"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_somebody_made_gives_our_error(name, tmp_path):
    (tmp_path / "bad.th").write_bytes(HOSTILE[name])
    with pytest.raises(FileError, match=r"bad\.th.* is not a result that torchhook saved, or it is damaged"):
        render.load(tmp_path / "bad.th")


def test_a_file_of_a_later_version_says_so(tmp_path):
    (tmp_path / "new.th").write_bytes(file_of({"version": 99}))
    with pytest.raises(FileError, match="has version 99; this torchhook reads version 1: update the older one"):
        render.load(tmp_path / "new.th")


def test_a_huge_file_is_not_read(tmp_path):
    file = tmp_path / "huge.th"
    header = b'{"0":{"dtype":"F64","shape":[134217728],"data_offsets":[0,1073741824]}}'
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + 2**30)  # sparse: it takes no room on the disk
    with pytest.raises(FileError, match="too large"):
        render.load(file)


def test_a_result_that_is_too_large_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"this Big is too large to be saved, .*at most 16.0 MiB of text"):
        write("Big", [Table(["a"], [["x" * 2**20]] * 20)], tmp_path / "big.th")
    assert not list(tmp_path.iterdir())


def test_text_from_outside_is_text():
    evil = "<script>alert(1)</script>"
    parts = (
        Sentence(evil),
        Table([evil], [[evil]], evil),
        Bars([evil], {evil: [1.0]}, evil, evil),
        Bars([evil], {evil: [1.0]}, evil, evil, log=True),
        Matrix(torch.ones(1, 1), [evil], [evil], evil, evil),
        Sentence(evil),
    )
    page = render.html(Saved(evil, parts))
    assert evil not in page and page.count("&lt;script&gt;alert(1)") > 5
    assert evil not in Saved(evil, parts)._repr_html_()


def test_values_that_are_not_finite_are_not_a_gap_in_a_matrix():
    part = Matrix(torch.tensor([[1.0, math.nan], [math.inf, 0.5]]), ["a", "b"], ["c", "d"], "cka")
    odd, values = drawn(part).data
    assert [list(row) for row in odd.z] == [[None, 1], [0, None]]
    assert [list(row) for row in values.z] == [[1.0, None], [None, 0.5]]
    assert caption(part).endswith("2 × 2 layers. 1 values are not finite (orange). 1 values are missing (grey).")


def test_zeros_and_what_is_not_finite_are_not_a_gap_among_bars():
    bars, zero, broken = drawn(Bars(["a", "b", "c", "d"], {"": [1.0, 0.0, math.nan, None]}, "change")).data
    assert bars.x == (1.0, 0.0, None, None) and zero.y == (1,) and broken.y == (2,)


def test_a_matrix_of_two_models_says_which_is_which():
    (matrix,) = VERBS["cka"]()._figures()
    assert matrix.title == "Similarity of layers of a (rows) and b (columns)"
    (alone,) = torchhook.compare.cka(net(), None, X.split(4), progress=False)._figures()
    assert alone.title == "Similarity of layers"


def test_a_sweep_of_positions_is_a_matrix():
    found = torchhook.sweep(
        nn.Sequential(nn.Identity()).eval(),
        torch.ones(1, 3, 2),
        "0",
        torchhook.edits.zero(),
        torch.sum,
        positions=True,
        progress=False,
    )
    (matrix,) = found._figures()
    assert (
        matrix.values.tolist() == [[-2.0] * 3]
        and matrix.rows == ["0 (Identity), output"]
        and matrix.columns == ["0", "1", "2"]
    )


def test_a_large_matrix_is_thinned_and_says_so():
    part = Matrix(torch.rand(900, 900), [str(n) for n in range(900)], [str(n) for n in range(900)], "cka")
    assert len(drawn(part).data[1].z) == 300 and "One row and column of 3 is drawn" in caption(part)


def test_notebook_output_scrolls_inside_its_box():
    for result in (VERBS["sweep"](), Report((Finding("TH201", "error", "61 % never fire", "relu", hint="Do this."),))):
        shown = result._repr_html_()
        assert shown.startswith('<div class="torchhook"><style>') and shown.endswith("</div>")
    assert '<article class="card error">' in shown and "<h3>61 % never fire</h3>" in shown
    assert '<div class="scroll"><table>' in VERBS["sweep"]()._repr_html_()
