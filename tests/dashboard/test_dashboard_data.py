"""What the dashboard reads of runs: which there are, and sheets that grow with them."""

import math
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from dashboard_samples import append, ended, garbage, large, newer, snapshot, written
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook import Finding, Report, Severity, Trial
from torchhook.core.errors import RunError
from torchhook.dashboard import sheets
from torchhook.dashboard.library import Library
from torchhook.dashboard.pages import flow, overview
from torchhook.dashboard.parts import card, state_of
from torchhook.dashboard.sheets import LOSSES, WIDE, Book
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import Run
from torchhook.training.runs.folders import delete
from torchhook.training.runs.schema import FILE
from torchhook.training.runs.summary import summarize

pytestmark = pytest.mark.usefixtures("one_thread")


# Which runs there are


def test_a_folder_shows_its_runs_and_one_alone_itself(tmp_path):
    for name in ("first", "second"):
        ended(tmp_path / name)
    assert sorted(Library(tmp_path).files()) == ["first", "second"]
    for alone in (Library(tmp_path / "first"), Library(tmp_path / "first" / FILE)):
        assert list(alone.files()) == ["first"] and alone.book("first").run.model == "Net"
        with pytest.raises(RunError, match="there is no run 'second'"):
            alone.book("second")


def test_a_link_to_a_run_leads_to_it_when_it_is_given_by_hand(tmp_path):
    ended(tmp_path / "net")
    (tmp_path / "latest").symlink_to("net")
    assert list(Library(tmp_path / "latest").files()) == ["net"]
    assert list(Library(tmp_path).files()) == ["net"]  # but is none of its own


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../outside", "net/../net", "net/", "./net", "{root}/net", "linked", "net/below", "net\0", "/etc"],
)
def test_names_lead_nowhere_else(tmp_path, name):
    root = tmp_path / "runs"
    for folder in (root / "net", root / "net" / "below", tmp_path / "outside"):
        ended(folder)
    (root / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match="there is no run"):
        Library(root).book(name.format(root=root))


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(RunError, match="cannot list the folder .*No such file"):
        Library(tmp_path / "none")


def test_an_empty_folder_is_fine_and_runs_come_later(tmp_path):
    library = Library(tmp_path)
    assert library.files() == {}
    ended(tmp_path / "net")
    assert list(library.files()) == ["net"] and library.book("net") is library.book("net")


def test_broken_runs_are_told_of_and_hide_no_others(tmp_path):
    garbage(tmp_path / "garbage")
    newer(tmp_path / "newer")
    ended(tmp_path / "net")
    library = Library(tmp_path)
    assert sorted(library.files()) == ["garbage", "net", "newer"]
    for name, words in (("garbage", "broken"), ("newer", "newer torchhook")):
        with pytest.raises(RunError, match=words):
            library.book(name)
    assert library.book("net").run.steps == [0, 1, 2]


def test_a_run_that_is_deleted_is_gone(tmp_path):
    library = Library(tmp_path)
    ended(tmp_path / "net")
    library.book("net")
    delete(tmp_path / "net")
    with pytest.raises(RunError, match="there is no run 'net'"):
        library.book("net")


def test_a_run_that_begins_anew_is_read_anew(tmp_path):
    library = Library(tmp_path)
    ended(tmp_path / "net", range(20))
    assert len(library.book("net").sheet("std", "output").steps) == 20
    delete(tmp_path / "net")
    ended(tmp_path / "net", range(3))
    assert library.book("net").sheet("std", "output").steps == [0, 1, 2]


# Sheets


def test_a_sheet_reads_only_what_is_new(tmp_path):
    log = written(tmp_path, range(5))
    book = Book(tmp_path)
    sheet = book.sheet("std", "output")
    assert sheet.paths == ["conv", "fc"] and sheet.steps == list(range(5))
    edition, rows = sheet.edition, [list(row) for row in sheet.rows]
    append(log, range(5, 8))
    with mock.patch.object(Run, "series", autospec=True, side_effect=Run.series) as series:
        grown = book.sheet("std", "output")
    assert [call.kwargs["after"] for call in series.call_args_list] == [4]
    assert grown.edition == edition and grown.steps == list(range(8)) and grown.rows[:5] == rows
    before = list(grown.rows)
    assert book.sheet("std", "output").rows == before and book.sheet("std", "output").edition == edition


def test_sheets_of_different_fields_and_ports_are_apart(tmp_path):
    written(tmp_path, range(3))
    book = Book(tmp_path)
    std, mean, gradient = book.sheet("std", "output"), book.sheet("mean", "output"), book.sheet("std", "grad_output")
    assert std.rows != mean.rows and std.rows != gradient.rows
    assert book.sheet("std", "nowhere").paths == []


def test_numbers_are_those_of_the_run(tmp_path):
    written(tmp_path, range(3))
    sheet = Book(tmp_path).sheet("std", "output")
    expected = Run(tmp_path).series("std", "output").values
    torch.testing.assert_close(torch.tensor(sheet.rows, dtype=torch.float64).T, expected, rtol=1e-3, atol=0)
    assert sheet.line("fc") == [row[1] for row in sheet.rows] and sheet.line("nowhere") == []


def test_what_is_not_finite_is_a_gap(tmp_path):
    written(tmp_path, range(2), scale=float("inf"))
    assert Book(tmp_path).sheet("std", "output").rows == [[None, None]] * 2


def test_rows_tell_what_is_not_finite_from_what_was_not_measured(tmp_path):
    log = written(tmp_path, range(2), sites=("conv",))
    append(log, [2], sites=("conv", "late"), scale=float("inf"))
    book = Book(tmp_path)
    rows = book.rows(book.sheet("std", "output"))
    assert [row[1] for row in rows[:2]] == [None] * 2 and all(map(math.isnan, rows[2])) and rows[0][0] > 0
    assert [str(row) for row in book.rows(book.sheet("std", "output"), 2)] == ["[nan, nan]"]


def test_units_are_those_of_the_layer(tmp_path):
    log = written(tmp_path, range(0, 4, 2), stats=("moments", "channels"), sites=("fc",))
    append(log, [4], sites=("fc",))  # without
    units = Book(tmp_path).units("fc")
    assert list(units) == [0, 2] and Book(tmp_path).units("nowhere") == {}
    assert units[0].abs_mean.shape == units[2].abs_mean.shape != (0,)


def test_new_layers_make_another_edition(tmp_path):
    log = written(tmp_path, range(4), sites=("conv",))
    book = Book(tmp_path)
    edition = book.sheet("std", "output").edition
    append(log, [4], sites=("conv", "late"))
    sheet = book.sheet("std", "output")
    assert sheet.edition != edition and sheet.paths == ["conv", "late"] and sheet.steps == list(range(5))
    assert [row[1] is None for row in sheet.rows] == [True] * 4 + [False]


def test_a_run_that_has_not_begun_is_an_empty_sheet(tmp_path):
    log = written(tmp_path, [])
    book = Book(tmp_path)
    sheet = book.sheet("std", "output")
    assert (sheet.steps, sheet.paths, sheet.rows, book.layers(), book.ports()) == ([], [], [], {}, [])
    append(log, range(2))
    sheet = book.sheet("std", "output")
    assert sheet.steps == [0, 1] and [len(row) for row in sheet.rows] == [2, 2]
    assert book.ports() == ["output", "grad_output"] and list(book.layers()) == ["conv", "fc"]


def test_many_steps_are_thinned_and_keep_their_order(tmp_path):
    made = [snapshot(number, ("fc",), ("output",)) for number in range(4)]
    log = written(tmp_path, [])
    book = Book(tmp_path)
    editions, lengths = set(), []
    for step in range(1200):
        log.write(Entry(step, 0.0, made[step % 4]))
        if step % 40 == 39:
            sheet = book.sheet("std", "output")
            editions.add(sheet.edition)
            lengths.append(len(sheet.steps))
            assert sheet.steps == sorted(set(sheet.steps)) and len(sheet.rows) == len(sheet.steps)
            assert sheet.steps[0] == 0 and sheet.steps[-1] == step
    assert max(lengths) <= 2 * WIDE and len(editions) > 2
    told = dict(zip(sheet.steps, sheet.rows, strict=True))
    assert all(told[step] == told[min(s for s in told if s % 4 == step % 4)] for step in told)


def test_readers_who_read_differently_have_different_editions(tmp_path):
    """A page outlives a server: to another one, what is drawn on it must not look like its own."""
    log = written(tmp_path, range(WIDE // 2), sites=("fc",))
    first = Book(tmp_path)
    first.sheet("std", "output")
    append(log, range(WIDE // 2, WIDE + 10), sites=("fc",))
    one, other = first.sheet("std", "output"), Book(tmp_path).sheet("std", "output")
    assert one.steps != other.steps
    assert one.edition != other.edition


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just("look"),
            st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3)),  # windows, steps between, layers
        ),
        max_size=12,
    )
)
def test_however_a_run_grows_a_sheet_says_what_the_run_says(story):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sheets, "WIDE", 8):
        log, book, step = written(Path(folder), []), Book(Path(folder)), 0
        seen = None
        for event in [*story, "look"]:
            if event != "look":
                windows, gap, layers = event
                append(log, range(step, step + windows * gap, gap), sites=("a", "b", "c")[:layers], ports=("output",))
                step += windows * gap
                continue
            sheet = book.sheet("std", "output")
            whole = book.run.series("std", "output", most=None)
            drawn = {
                s: list(map(sheets._drawn, row)) for s, row in zip(whole.steps, whole.values.T.tolist(), strict=True)
            }
            assert sheet.paths == whole.paths and len(sheet.steps) <= 2 * 8
            assert dict(zip(sheet.steps, sheet.rows, strict=True)) == {s: drawn[s] for s in sheet.steps}
            assert sheet.steps == sorted(sheet.steps)
            if whole.steps:
                assert (sheet.steps[0], sheet.steps[-1]) == (whole.steps[0], whole.steps[-1])
            if seen is not None and seen[0] == sheet.edition:  # what was drawn is right, and there may be more
                assert sheet.paths == seen[1] and sheet.steps[: len(seen[2])] == seen[2]
            seen = sheet.edition, list(sheet.paths), list(sheet.steps)
        book.run.close()
        log._close()


# Losses


def test_losses_grow_and_stay_in_order(tmp_path):
    log = written(tmp_path, range(4))
    book = Book(tmp_path)
    curve = book.curve()
    edition = curve.edition
    assert curve.steps == [0, 1, 2, 3] and curve.values[0] == pytest.approx(2.1, rel=1e-3)
    log.write(Entry(9, 0.0, Snapshot({}), losses={4: float("nan"), 9: 0.5}))
    curve = book.curve()
    assert curve.steps == [0, 1, 2, 3, 4, 9] and curve.values[4:] == [None, 0.5] and curve.edition == edition


def test_many_losses_are_thinned(tmp_path):
    log = written(tmp_path, [])
    book = Book(tmp_path)
    edition = book.curve().edition
    for first in range(0, 20_000, 500):
        log.write(Entry(first, 0.0, Snapshot({}), losses={step: step + 1.0 for step in range(first, first + 500)}))
        curve = book.curve()
        assert curve.steps[0] == 0 and curve.steps[-1] >= first + 498
        assert len(curve.steps) <= 2 * LOSSES and curve.steps == sorted(set(curve.steps))
        assert all(abs(value - step - 1) <= 1e-3 * step for step, value in zip(curve.steps, curve.values, strict=True))
    assert curve.edition != edition
    assert LOSSES / 4 < len(Book(tmp_path).curve().steps) <= LOSSES  # all at once


# What was found, and how values are distributed


def test_health_is_the_worst_of_what_was_found_and_of_what_comes_of_it(tmp_path):
    log = written(tmp_path, range(3))
    book = Book(tmp_path)
    stamp = book.stamp()
    assert book.health() == {}
    affected = (Finding("TH102", "warning", "after", "fc"), Finding("TH404", "error", "no gradient", "conv.weight"))
    log.found(Finding("TH101", "error", "first", "conv", 1, affected=affected))
    log.found(Finding("TH601", "info", "slow", "conv"))
    assert book.health() == {"conv": Severity.ERROR, "fc": Severity.WARNING, "conv.weight": Severity.ERROR}
    assert [found.code for found in book.findings_at("conv")] == ["TH101", "TH404", "TH601"]
    assert [found.code for found in book.findings_at("fc")] == ["TH102"] and book.findings_at("con") == []
    assert book.stamp() != stamp


def test_the_map_of_health_says_from_which_step_on_if_that_is_known(tmp_path):
    log = written(tmp_path, range(10))
    after = (Finding("TH403", "warning", "jumped", step=7), Finding("TH201", "error", "dead", "fc"))
    log.found(Finding("TH402", "error", "exploded", "conv", affected=after))
    log.found(Finding("TH701", "warning", "differs", "fc"))
    _, _, warning, error = overview._health(Book(tmp_path)).data
    assert (error.y, error.base) == (("conv", "fc"), (7, 7))
    assert error.hovertext == ("TH402 from step 7: exploded", "TH201 from step 7: dead")
    assert (warning.y, warning.base, warning.hovertext) == (("fc",), (0,), ("TH701, step not known: differs",))


def test_the_flow_begins_at_the_first_step_that_is_faulty(tmp_path):
    log = written(tmp_path, range(0, 40, 10))
    log.found(Finding("TH602", "error", "the loss jumped", step=12))
    for step, shown in {None: "step 20", 10: "step 10", 99: "step 30"}.items():
        assert flow.page(Book(tmp_path), step).children[3].children[0].children == shown


def test_a_card_says_what_was_tried_unless_its_cause_comes_first():
    tried = Trial("learning rate a tenth", without=2.28, repaired=0.31, steps=100)
    found = Finding("TH501", "error", "the steps are too large", hint="Lower the rate.", tried=tried)
    texts = [part.children for part in card("net", found, []).children]
    assert texts[-2:] == ["Lower the rate.", str(tried)]
    caused = [part.children for part in card("net", found, [], cause=Finding("TH303", "error", "x")).children]
    assert caused[-1][0] == "Caused by TH303 at " and str(tried) not in caused


def test_a_run_in_which_an_error_was_found_did_not_end_well(tmp_path):
    findings = [Finding("TH201", severity, "no unit fires", site="fc") for severity in ("warning", "error")]
    log = written(tmp_path / "net", range(3))
    assert summarize(tmp_path / "net").errors == 0
    for finding in findings:
        log.found(finding)
    log.end(Report(tuple(findings)), "ended")
    known = summarize(tmp_path / "net")
    assert state_of(known.state, known.errors) == ("error", "ended with 1 error")
    assert [state_of(state, 0)[0] for state in ("running", "ended", "failed", "interrupted", "killed")] == [
        "info",
        "passed",
        "error",
        "info",
        "error",
    ]


def verdict_of(folder):
    said = str(overview.page(Book(folder)).to_plotly_json())
    return re.search(r"P\(children='([^']*)', className='said (\w+)'\)", said).groups()


def test_a_training_that_did_not_come_to_its_end_is_not_well(tmp_path):
    error = {"type": "OSError", "message": "no data", "line": "train.py:9: load()"}
    expected = {
        "ended": ("Nothing is wrong, as far as 3 measured steps show.", "passed"),
        "interrupted": ("Nothing is wrong, as far as 3 measured steps show.", "passed"),
        "failed": ("the training failed: OSError: no data, at train.py:9: load()", "error"),
        "unwritten": ("the run could not be written to its end.", "error"),
    }
    for state, (words, colour) in expected.items():
        log = written(tmp_path / state, range(3))
        if state == "failed":
            log.found(Finding("TH603", "info", "a small thing"))
        log.end(Report(about={"error": error} if state == "failed" else {}), state)
        said, shown = verdict_of(tmp_path / state)
        assert said.endswith(words) and shown == colour
    log = written(tmp_path / "killed", range(3))
    with mock.patch("torchhook.training.runs.run.is_gone", return_value=True):
        said = verdict_of(log.folder)
    assert said == ("Nothing wrong was found in 3 measured steps, but the training was killed.", "error")


def test_the_stamp_changes_with_every_window_and_in_the_end(tmp_path):
    log = written(tmp_path, range(3))
    book, stamps = Book(tmp_path), []
    stamps.append(book.stamp())
    assert book.stamp() == stamps[0]
    append(log, [3])
    stamps.append(book.stamp())
    log.end(Report(), "ended")
    stamps.append(book.stamp())
    assert len(set(map(str, stamps))) == 3


def test_quantiles_come_of_histograms(tmp_path):
    log = written(tmp_path, range(0, 40, 2), stats=("moments", "histogram"), sites=("fc",))
    append(log, range(40, 44), sites=("fc",))  # without
    book = Book(tmp_path)
    steps, quantiles = book.quantiles("fc")
    assert steps == list(range(0, 40, 2))
    for step, row in zip(steps, quantiles, strict=True):
        assert row == sorted(row) and len(row) == 7
        random = torch.Generator().manual_seed(step)
        values = torch.randn(64, generator=random)
        assert (
            abs(row[3] - values.median().item()) < 0.3
            and row[0] < values.quantile(0.1)
            and row[6] > values.quantile(0.9)
        )
    append(log, [44], stats=("moments", "histogram"), sites=("fc",))
    assert book.quantiles("fc")[0][-1] == 44
    assert book.quantiles("nowhere") == ([], [])


def test_parameters_are_those_of_the_layer(tmp_path):
    written(tmp_path, [0], sites=("fc.weight", "fc.bias", "fc2.weight", "fc.inner.weight"), ports=("param_grad",))
    assert Book(tmp_path).parameters("fc") == ["fc.weight", "fc.bias"]


def test_a_large_run_is_little_to_draw(tmp_path):
    large(tmp_path / "net", layers=20, windows=1000, losses=10_000)
    book = Book(tmp_path / "net")
    assert WIDE / 3 < len(book.sheet("std", "output").steps) <= 2 * WIDE
    assert len(book.curve().steps) <= 2 * LOSSES
    assert [file.name for file in (tmp_path / "net").iterdir()] == [FILE]  # reading leaves nothing behind
