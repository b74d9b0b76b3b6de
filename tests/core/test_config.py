"""``[tool.torchhook]``: where it is found, what it may contain, and what takes precedence."""

import json

import pytest

from torchhook.core.config import Config

TABLE = """
[tool.torchhook]
select = ["TH2", "TH5"]
ignore = ["TH202"]
fail-on = "warning"

[tool.torchhook.per-module-ignores]
"head.*" = ["TH201"]
"""


def test_is_found_upwards(tmp_path):
    (tmp_path / "pyproject.toml").write_text(TABLE)
    inner = tmp_path / "package" / "tests"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert Config.find(inner) == Config(("TH2", "TH5"), ("TH202",), "warning", {"head.*": ["TH201"]})


def test_there_need_be_none(tmp_path):
    assert Config.find(tmp_path) == Config()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tool.torchhook\n", "is not valid TOML: "),
        ("[tool]\ntorchhook = 3", "[tool.torchhook] must be a table, not 3"),
        ("[tool.torchhook]\nfail_on = 'error'", "there is no setting 'fail_on'; did you mean 'fail-on'?"),
        ("[tool.torchhook]\nx = 1", "known settings are select, ignore, fail-on, per-module-ignores"),
        ("[tool.torchhook]\nselect = 'TH1'", "select must be a list of codes, not 'TH1'"),
        ("[tool.torchhook]\nignore = [1]", "ignore must be a list of codes, not [1]"),
        ("[tool.torchhook]\nfail-on = 'doom'", "fail-on must be info, warning or error, not 'doom'"),
        ("[tool.torchhook]\nper-module-ignores = ['TH1']", "per-module-ignores must be a table of lists of codes"),
        ("[tool.torchhook.per-module-ignores]\nhead = 'TH1'", "per-module-ignores must be a table of lists of codes"),
    ],
)
def test_what_is_wrong_with_it_ends_with_2(diagnosed, project, text, why):
    (project / "pyproject.toml").write_text(text)
    done = diagnosed("small.net:Net")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"torchhook: {project / 'pyproject.toml'}")
    assert why in done.err
    assert len(done.err.splitlines()) == 1


def test_what_is_not_utf_8(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"pyproject\.toml is not valid TOML"):
        Config.find(tmp_path)


def test_an_unknown_code_ends_with_2(diagnosed, project):
    (project / "pyproject.toml").write_text('[tool.torchhook]\nignore = ["TH999"]')
    assert "there is no rule 'TH999'; did you mean TH901, TH609?" in diagnosed("small.net:Net").err


def test_the_command_goes_by_it(diagnosed, project):
    (project / "pyproject.toml").write_text(TABLE.replace("head.*", "2*").replace("TH201", "TH503"))
    report = json.loads(diagnosed("small.net:Net", "--optimizer", "small.training:forgetful", "--format", "json").out)
    applied = {*report["checked"], *report["skipped"]}
    assert all(code.startswith(("TH2", "TH5")) for code in applied) and "TH202" not in applied
    assert report["fail_on"] == "warning"
    assert not report["findings"]


def test_the_command_line_counts_for_more(diagnosed, project):
    (project / "pyproject.toml").write_text(TABLE)
    done = diagnosed("small.net:Net", "--select", "TH202,TH6", "--fail-on", "error", "--format", "json")
    report = json.loads(done.out)
    assert "TH202" in report["checked"] and "TH201" not in report["checked"]
    assert report["fail_on"] == "error"


def test_ignoring_more_leaves_the_rest():
    config = Config(("TH2",), ("TH202",), "warning").overruled(ignore=["TH203"])
    assert config == Config(("TH2",), ("TH202", "TH203"), "warning")
