"""One bad run is one row of the list, and one part of a comparison; the others are there."""

import os
import sqlite3
from contextlib import closing

import pytest
from dashboard_samples import ended

from torchhook.core.errors import FileError, RunError
from torchhook.core.parts import Sentence
from torchhook.core.result import write
from torchhook.dashboard.app import _routed
from torchhook.dashboard.library import Library
from torchhook.dashboard.pages import compare, runs
from torchhook.dashboard.parts import address
from torchhook.training.runs.schema import FILE

ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n AS step, 1.0 AS loss FROM c"
STRANGE = {
    "an endless view": ["DROP TABLE losses", f"CREATE VIEW losses AS {ENDLESS}"],
    "a trigger": ["CREATE TRIGGER t AFTER INSERT ON losses BEGIN DELETE FROM losses; END"],
    "a start that is text": ["UPDATE life SET started = 'yesterday'"],
    "a start without a calendar": ["UPDATE life SET started = 1e300"],
    "a path of thousands of levels": [f"UPDATE places SET path = '{3000 * 'a.'}' WHERE id = 1"],
    "a path that is missing": ["UPDATE places SET path = NULL WHERE id = 1"],
    "a shape below zero": ["UPDATE layouts SET shape = '[-1]'"],
    "states that are text": ["UPDATE states SET data = 'x'"],
    "a loss that is text": ["UPDATE losses SET loss = 'low'"],
    "wires that are a number": ["INSERT OR REPLACE INTO about VALUES ('wires', '5')"],
    "findings that are a number": ["INSERT INTO findings VALUES ('TH201', 'fc', 1, 1, '5')"],
}


@pytest.fixture(params=STRANGE)
def library(tmp_path, request):
    for name in ("first", "strange", "last"):
        ended(tmp_path / name)
    with closing(sqlite3.connect(tmp_path / "strange" / FILE)) as db:
        for statement in STRANGE[request.param]:
            db.execute(statement)
        db.commit()
    return Library(tmp_path)


def test_the_list_has_all(library):
    assert {*library.files()} == {"first", "strange", "last"}
    shown = str(runs.page(library).to_plotly_json())
    assert all(name in shown for name in ("first", "strange", "last"))


def test_a_comparison_has_the_others_and_says_what_is_missing(library, request):
    shown = str(compare.page(library, ["first", "strange", "last"]).to_plotly_json())
    is_read = "wires" in request.node.callspec.id  # which no comparison shows
    assert shown.count("Nothing found.") == 2 + is_read
    assert shown.count("is corrupt") + shown.count("is refused") == 1 - is_read


@pytest.mark.parametrize("path", ["", "/layers", "/flow", "/graph", "/layer?path=conv"])
def test_a_page_of_it_is_shown_or_is_the_error_of_the_run(library, path):
    try:
        page, _ = _routed(library, f"/run/strange{path.partition('?')[0]}", {"path": ["conv"]})
        assert "strange" in str(page.to_plotly_json())
    except RunError as error:
        assert FILE in str(error)


@pytest.mark.parametrize("name", [b"odd\xff\xfe", b"odd\n\x1b[31mname", b"a%2fb", b"..%2f", b"--help"])
def test_any_name_of_a_folder_leads_to_its_page(tmp_path, name):
    ended(tmp_path / os.fsdecode(name))
    ended(tmp_path / "other")
    library = Library(tmp_path)
    page, _ = _routed(library, address(os.fsdecode(name)), {})
    assert "overview-shown" in str(page.to_plotly_json())
    assert "other" in str(runs.page(library).to_plotly_json())


def test_a_result_that_is_a_link_is_not_followed(tmp_path):
    root = tmp_path / "runs"
    write("Secret", [Sentence("secret")], tmp_path / "secret.th")
    write("Own", [Sentence("own")], root / "own.th")
    (root / "linked.th").symlink_to(tmp_path / "secret.th")
    library = Library(root)
    assert "linked" not in str(_routed(library, "/", {})[0].to_plotly_json())
    assert "own" in str(_routed(library, "/result/own.th", {})[0].to_plotly_json())
    with pytest.raises(FileError, match="there is no result 'linked.th'"):
        _routed(library, "/result/linked.th", {})
