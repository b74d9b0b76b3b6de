"""``torchhook diagnose``: exit codes, and what is printed and written."""

import json
import sys
from xml.etree import ElementTree

import pytest

import torchhook
from torchhook import render
from torchhook.rules import diagnose as diagnosing


def test_ends_with_0_if_all_is_well(diagnosed):
    done = diagnosed("small.net:Net", "--optimizer", "small.training:optimizer")
    assert done.code == 0
    assert done.out.startswith("passed  Net: nothing found\n")
    assert done.err == ""


def test_ends_with_1_if_something_is_found(diagnosed):
    done = diagnosed("small.net:Net", "--optimizer", "small.training:forgetful")
    assert done.code == 1
    assert "FAILED  Net: 1 error" in done.out
    assert "error TH503  2" in done.out
    assert done.err == ""
    assert "\x1b" not in done.out


@pytest.mark.parametrize(("level", "code"), [("error", 0), ("warning", 1), ("info", 1)])
def test_fails_on_what_it_is_told_to(diagnosed, level, code):
    done = diagnosed("small.net:Net", "--select", "TH2,TH3", "--fail-on", level, loader="small.data:scaled")
    assert (done.code, "warning TH303" in done.out) == (code, True)


def test_random_inputs(command):
    assert command("diagnose", "small.net:Net", "--input", "16,8").out.startswith("passed")
    assert command("diagnose", "small.net:embedding", "--input", "16,4:int").out.startswith("passed")
    dead = command("diagnose", "small.net:dead", "--input", "256,8")
    assert dead.code == 1 and "TH201" in dead.out


@pytest.mark.parametrize("loader", ["small.data:listed", "small.data:endless"])
def test_batches_may_be_an_object_or_endless(diagnosed, loader):
    assert diagnosed("small.net:made", loader=loader).code == 0


def test_losses_and_optimizers_by_name(diagnosed):
    named = diagnosed("small.net:Net", "--loss", "cross_entropy", "--optimizer", "AdamW", "--select", "TH503")
    assert named.code == 0 and "1 rule checked" in named.out
    own = ["--loss", "small.training:Loss", "--optimizer", "torch.optim:Adam", "--select", "TH503"]
    assert diagnosed("small.net:Net", *own).code == 0
    assert "note: the loss is" not in diagnosed("small.net:Net", "--loss", "small.training:loss").out


def test_no_steps_is_no_training(diagnosed):
    trained = "the copy was trained with AdamW"
    assert trained in diagnosed("small.net:Net").out
    assert trained not in diagnosed("small.net:Net", steps=0).out


@pytest.mark.parametrize(
    ("arguments", "options"), [([], (True, 10)), (["--no-try"], (False, 10)), (["--seconds", "2.5"], (True, 2.5))]
)
def test_repairs_are_tried_for_a_while_unless_told_otherwise(diagnosed, monkeypatch, arguments, options):
    seen = []

    def inspect(*_, try_repairs, seconds, **__):
        seen.append((try_repairs, seconds))
        return torchhook.Report()

    monkeypatch.setattr(diagnosing, "diagnose", inspect)
    assert diagnosed("small.net:Net", *arguments).code == 0
    assert seen == [options]


def test_the_seed_makes_it_happen_again(diagnosed):
    def losses(seed):
        return json.loads(diagnosed("small.net:Net", "--format", "json", "--seed", seed).out)["losses"]

    assert losses(0) == losses(0) != losses(1)


def test_rules_are_chosen(diagnosed):
    done = diagnosed(
        "small.net:Net", "--select", "th2,TH503", "--ignore", "TH202", "--ignore", "TH204", "--format", "json"
    )
    report = json.loads(done.out)
    assert {*report["checked"], *report["skipped"]} == {"TH201", "TH203", "TH503"}


def test_prints_in_other_forms(diagnosed):
    own = ["--optimizer", "small.training:forgetful", "--format"]
    as_json = diagnosed("small.net:Net", *own, "json")
    assert as_json.code == 1
    assert json.loads(as_json.out)["findings"][0]["code"] == "TH503"
    suites = ElementTree.fromstring(diagnosed("small.net:Net", *own, "junit").out)
    assert suites.find(".//testcase[@name='TH503']/failure") is not None
    assert diagnosed("small.net:Net", *own, "markdown").out.startswith("## ❌ Net: 1 error\n")


def test_what_a_model_prints_does_not_get_into_what_programs_read(diagnosed):
    done = diagnosed("small.net:talking", "--format", "json")
    assert json.loads(done.out)["model"] == "Net"
    assert done.err == "building\n"
    assert diagnosed("small.net:talking").out.startswith("building\npassed")


def test_writes_reports(diagnosed, tmp_path):
    files = [tmp_path / f"report{suffix}" for suffix in (".html", ".json", ".xml", ".md")]
    done = diagnosed("small.net:Net", *(word for file in files for word in ("--report", file)))
    assert done.code == 0
    assert all(f"written: {file}\n" in done.out for file in files)
    assert files[0].read_text().startswith("<!doctype html>")
    assert isinstance(render.load(files[1]), torchhook.Report)
    assert ElementTree.parse(files[2]).getroot().tag == "testsuites"
    assert files[3].read_text().startswith("## ✅ Net: nothing found")


def test_adds_to_the_summary_of_a_job(diagnosed, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for _ in range(2):
        assert diagnosed("small.net:Net", "--format", "json", steps=0).code == 0
    assert summary.read_text().startswith("# Before\n\n## ✅ Net: nothing found\n")
    assert summary.read_text().count("## ✅") == 2


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("report.pdf", "'report.pdf' must end in .html, .json, .md, .xml"),
        ("report", "'report' must end in .html, .json, .md, .xml"),
        ("nowhere/report.html", "there is no folder 'nowhere'"),
        ("small.json", "'small.json' cannot be written"),
    ],
)
def test_refuses_a_report_before_it_works(diagnosed, project, monkeypatch, file, why):
    (project / "small.json").mkdir(exist_ok=True)
    monkeypatch.setattr(diagnosing, "diagnose", lambda *_, **__: pytest.fail("it worked"))
    done = diagnosed("small.net:Net", "--report", file)
    assert (done.code, done.out) == (2, "")
    assert f"--report: {why}" in done.said


def test_refuses_a_page_without_plotly_before_it_works(diagnosed, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr(diagnosing, "diagnose", lambda *_, **__: pytest.fail("it worked"))
    done = diagnosed("small.net:Net", "--report", tmp_path / "report.html")
    assert (done.code, done.err) == (2, 'torchhook: an HTML report needs plotly: pip install "torchhook[plot]"\n')


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing argument 'MODEL'"),
        (["small.net:Net"], "--input / --loader: pass exactly one of the two"),
        (["small.net:Net", "--input", "1,8", "--loader", "small.data:batches"], "pass exactly one of the two"),
        (["small.net:Net", "--input", "1,x"], "--input: write sizes separated by commas, such as 1,3,224,224"),
        (["small.net:Net", "--input", "0,8"], "not '0,8'"),
        (["small.net:Net", "--input", "1,8:str"], "after the colon must be int, float or bool, not 'str'"),
        (["small.net:Net", "--input", "1,8", "--loss", "mse_loss"], "mse_loss needs targets"),
        (["small.net:Net", "--input", "1,8", "--fail-on", "doom"], "--fail-on"),
        (["small.net:Net", "--input", "1,8", "--format", "pdf"], "--format"),
        (["small.net:Net", "--input", "1,8", "--steps", "-1"], "--steps"),
        (["small.net:Net", "--input", "1,8", "--seconds", "-1"], "--seconds"),
        (["small.net:Net", "--input", "1,8", "--selekt", "TH1"], "--select"),
        (["small.net:Net", "--input", "1,8", "--select", "TH999"], "there is no rule 'TH999'; did you mean TH901"),
    ],
)
def test_wrong_use_ends_with_2(command, arguments, why):
    done = command("diagnose", *arguments)
    assert (done.code, done.out) == (2, "")
    assert why in done.said
