"""A pytest plugin: the fixture `model_check` fails a test with what is wrong with a model.

    def test_model(model_check):
        model_check(Net(), (torch.randn(32, 8), torch.randint(2, (32,))), F.cross_entropy)

pytest loads this file by itself, for every project, so it imports torch only once the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from torchhook.core.config import SEVERITIES, Config

if TYPE_CHECKING:
    from torchhook.core.findings import Finding, Report

_SECTION = "torchhook"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of this plugin."""
    group = parser.getgroup("torchhook", "checks of models by torchhook")
    group.addoption("--torchhook-fail-on", choices=SEVERITIES, help="how bad a finding fails a model_check")


@pytest.fixture
def model_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Check a model: ``model_check(model, batch, loss)`` gives a `Report`, or fails the test with its findings.

    `batch` may be a list of batches. Other arguments are those of `torchhook.diagnose`; the copy is trained for twenty
    steps, unless `steps` says otherwise. Settings come from ``[tool.torchhook]`` in pyproject.toml.
    """
    try:
        fail_on = request.config.getoption("--torchhook-fail-on")
        config = Config.find(request.config.rootpath).overruled(fail_on=fail_on)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)

    def check(
        model: Any, batch: Any, loss: Any = None, optimizer: Any = None, steps: int = 20, **options: Any
    ) -> Report:
        __tracebackhide__ = True
        from torchhook.rules.diagnose import diagnose

        report = diagnose(model, batch, loss, optimizer, steps, **{**config.arguments(), **options})
        request.node.user_properties.append(("torchhook", report.headline))  # for --junitxml
        if not report.ok:
            pytest.fail(_told(report), pytrace=False)
        if report.findings:  # sections travel with the results, from the workers of pytest-xdist, too
            request.node.add_report_section("call", _SECTION, _told(report))
        return report

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was found below the level that fails a test: it would not be seen otherwise."""
    told = [
        (result.nodeid, text)
        for outcome in ("passed", "xpassed")
        for result in terminalreporter.getreports(outcome)
        for name, text in result.sections
        if name == f"Captured {_SECTION} call"
    ]
    if told:
        terminalreporter.section("torchhook: found, but not bad enough to fail")
        for node, text in told:
            terminalreporter.write_line(f"{node}\n{text}\n")


def _told(report: Report) -> str:
    """The findings as a table, then more of them; the first line is all that pytest's own summary shows."""
    from torchhook.core.text import table

    first = report.findings[0]
    rows = [[found.severity, found.code, found.where, found.message.split("\n")[0]] for found in report.findings]
    more = dict.fromkeys(f"{found.code}: {line}" for found in report.findings for line in _more(found))
    headline = f"{first.code} at {first.where} ({report.headline})"
    return "\n".join([headline, "", table(["severity", "code", "where", "what"], rows), "", *more])


def _more(found: Finding) -> list[str]:
    """What the table has no room for."""
    explained = f"explains {len(found.affected)} more findings" if found.affected else ""
    return [line.strip() for line in (*found.message.split("\n")[1:], explained, found.hint) if line]
