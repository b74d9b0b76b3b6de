"""The pytest plugin, in pytest sessions of its own."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import torchhook
import torchhook.core.text
import torchhook.render

BATCHES = """
import pytest
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
X = torch.randn(8, 64, 8)
BATCHES = [(x, (x.sum(1) > 0).long()) for x in X]

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)

"""
HEALTHY = """
def test_healthy(model_check):
    model = net()
    report = model_check(model, BATCHES, F.cross_entropy, adam(model.parameters()))
    assert report.ok and "TH503" in report.checked
"""
FORGETFUL = """
def test_forgetful(model_check):
    model = net()
    model_check(model, BATCHES, F.cross_entropy, adam(model[0].parameters()))
    raise AssertionError("not reached")
"""
SCALED = """
def test_scaled(model_check):
    model_check(net(), [(x * 50, y) for x, y in BATCHES], F.cross_entropy, rules=["TH2", "TH3"])
"""


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """Import torch first: a session inside this process forgets its imports, and torch must not be imported twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torchhook.diagnose(model, [(torch.ones(2, 2), torch.zeros(2).long())], steps=2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def session(pytester):
    """Run pytest inside this process on the given tests."""

    def run(*tests, arguments=(), pyproject=""):
        pytester.makepyfile(BATCHES + "".join(tests))
        pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\n{pyproject}")
        others = [word for name in ("anyio", "hypothesispytest", "xdist") for word in ("-p", f"no:{name}")]
        return pytester.runpytest_inprocess(*others, *arguments)

    return run


def test_a_healthy_model_passes(session):
    done = session(HEALTHY)
    done.assert_outcomes(passed=1)
    done.stdout.no_fnmatch_line("*torchhook: *")
    done.stdout.no_re_match_line(r".*\bTH\d{3}\b")


def test_a_finding_fails_the_test_with_a_table(session):
    done = session(FORGETFUL)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "TH503 at 2 (Linear) (Sequential: 1 error)",
            "",
            "severity  code   where       what",
            "error     TH503  2 (Linear)  not in the optimizer: weight, bias",
            "",
            "TH503: ?*",
        ]
    )
    assert "pytest_plugin.py" not in done.stdout.str()
    assert "def check" not in done.stdout.str()


def test_what_is_not_bad_enough_is_told_at_the_end(session):
    done = session(SCALED, HEALTHY)
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines(
        [
            "*torchhook: findings that fail no test*",
            "*::test_scaled",
            "TH303 at 0 (Linear), step 0 (Sequential: 1 warning)",
            "*warning *TH303 *the inputs have a mean of *",
            "TH303: ?*",
        ]
    )


TRIED = """
def test_tried(model_check, monkeypatch):
    from dataclasses import replace
    from torchhook import Trial
    from torchhook.rules import diagnose as module
    inspect = module.diagnose
    def diagnose(*arguments, try_repairs, seconds, **options):
        report = inspect(*arguments, **options)
        tried = Trial(f"try_repairs={try_repairs}, seconds={seconds}", without=2.28, repaired=0.31, steps=100)
        return replace(report, findings=tuple(replace(found, tried=tried) for found in report.findings))
    monkeypatch.setattr(module, "diagnose", diagnose)
    model = net()
    model_check(model, BATCHES, F.cross_entropy, adam(model[0].parameters()), try_repairs=False, seconds=3)
"""


def test_options_reach_diagnose_and_what_was_tried_is_told(session):
    told = "TH503: tried: try_repairs=False, seconds=3 → loss 0.31 instead of 2.28 after 100 steps"
    session(TRIED).stdout.fnmatch_lines([told])


def test_how_bad_is_an_option(session):
    session(SCALED, arguments=["--torchhook-fail-on", "warning"]).assert_outcomes(failed=1)
    session(SCALED, arguments=["--torchhook-fail-on", "error"]).assert_outcomes(passed=1)
    wrong = session(SCALED, arguments=["--torchhook-fail-on", "doom"])
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    wrong.stderr.fnmatch_lines(["*--torchhook-fail-on*doom*info*warning*error*"])


def test_the_settings_of_a_project_are_honoured(session):
    level = '[tool.torchhook]\nfail-on = "warning"'
    session(SCALED, pyproject=level).assert_outcomes(failed=1)
    session(SCALED, pyproject=level, arguments=["--torchhook-fail-on=error"]).assert_outcomes(passed=1)
    session(FORGETFUL, pyproject='[tool.torchhook]\nignore = ["TH503", "TH4"]').stdout.fnmatch_lines(["*not reached*"])
    ignored = '[tool.torchhook.per-module-ignores]\n"2" = ["TH503"]'
    session(FORGETFUL, pyproject=ignored).stdout.fnmatch_lines(["*not reached*"])


def test_wrong_settings_are_told_in_a_line(session):
    done = session(HEALTHY, pyproject="[tool.torchhook]\nfail_on = 'error'")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(
        ["*pyproject.toml: ?tool.torchhook?: there is no setting 'fail_on'; did you mean 'fail-on'?"]
    )
    assert "Traceback" not in done.stdout.str() and "def model_check" not in done.stdout.str()


def test_junit_has_the_headline(session, pytester):
    strict = ["-W", "error", "-p", "no:dash"]  # its own plugin warns
    done = session(HEALTHY, FORGETFUL, arguments=["--junitxml=junit.xml", *strict])
    done.assert_outcomes(passed=1, failed=1)
    suites = ElementTree.parse(pytester.path / "junit.xml")
    found = {case.get("name"): case.find(".//property").attrib for case in suites.iter("testcase")}
    assert found["test_healthy"] == {"name": "torchhook", "value": "Sequential: nothing found"}
    assert found["test_forgetful"] == {"name": "torchhook", "value": "Sequential: 1 error"}


def test_what_a_model_raises_is_shown_as_it_is(session):
    done = session("def test_unfit(model_check):\n    model_check(net(), torch.randn(4, 7))\n")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*RuntimeError: mat1 and mat2 shapes cannot be multiplied*"])


def test_other_fixtures_may_use_it(session):
    fixture = "@pytest.fixture\ndef checked(model_check):\n    return model_check(net(), BATCHES, steps=0)\n"
    session(fixture, "def test_it(checked):\n    assert checked.ok\n").assert_outcomes(passed=1)


def test_it_can_be_turned_off(session):
    done = session(HEALTHY, arguments=["-p", "no:torchhook"])
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*fixture 'model_check' not found"])


def test_help_tells_of_the_option(pytester):
    pytester.runpytest_inprocess("--help").stdout.fnmatch_lines(["model checks by torchhook:", "*--torchhook-fail-on*"])


@pytest.mark.slow
def test_workers_of_xdist_tell_it_too(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makepyfile(BATCHES + SCALED)
    done = pytester.runpytest_subprocess("-n", "1")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["*findings that fail no test*", "*::test_scaled", "TH303 at 0 (Linear), step 0 *"])


def test_importing_it_does_not_import_torch():
    lines = "import sys, torchhook.integrations.pytest_plugin; print('torch' in sys.modules, 'pytest' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_session_that_does_not_use_it_does_not_import_torch(pytester):
    pytester.makepyfile("import sys\ndef test_it(request):\n    assert 'torch' not in sys.modules\n")
    done = pytester.runpytest_subprocess("-p", "no:hypothesispytest")
    done.assert_outcomes(passed=1)


def test_a_broken_contract_fails_its_test(pytester):
    pytester.makepyfile(
        BATCHES
        + """
class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def test_talking(model_verify):
    model_verify(nn.Sequential(nn.Linear(8, 8), Centred()), X[0], contracts=["independent"])

def test_unused(model_verify):
    report = model_verify(nn.ModuleDict({"a": net()})["a"], BATCHES[0], F.cross_entropy, ["independent", "used"])
    assert report.ok and report.checked == ("TV102", "TV108")
"""
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*TV102 at 1 (Centred)*"])
