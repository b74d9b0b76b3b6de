"""A pytest plugin with two fixtures: `model_check` fails a test if `diagnose` finds something, `model_verify` if a
contract is broken.

    def test_model(model_check, model_verify):
        model_check(Net(), (torch.randn(32, 8), torch.randint(2, (32,))), F.cross_entropy)
        model_verify(Net(), torch.randn(4, 8))

pytest loads this file in every project, so it imports torch only when the fixture is used.
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
    """Add the option of this plugin."""
    group = parser.getgroup("torchhook", "model checks by torchhook")
    said = "the severity from which model_check and model_verify fail a test"
    group.addoption("--torchhook-fail-on", choices=SEVERITIES, help=said)


@pytest.fixture
def model_check(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Check a model: ``model_check(model, batch, loss)`` returns a `Report`, or fails the test with its findings.

    `batch` may be a list of batches. The other arguments are those of `torchhook.diagnose`, but `steps` is twenty by
    default; ``try_repairs=False`` saves the time to try repairs of what is found. Settings come from
    ``[tool.torchhook]`` in pyproject.toml.
    """
    config = _config(request)

    def check(
        model: Any, batch: Any, loss: Any = None, optimizer: Any = None, steps: int = 20, **options: Any
    ) -> Report:
        __tracebackhide__ = True
        from torchhook.rules.diagnose import diagnose

        report = diagnose(model, batch, loss, optimizer, steps, **{**config.arguments(), **options})
        return _passed(report, request)

    return check


@pytest.fixture
def model_verify(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Verify a model: ``model_verify(model, batch)`` returns a `Report`, or fails the test if a contract is broken.

    The other arguments are those of `torchhook.verify`; ``fail-on`` comes from ``[tool.torchhook]`` in pyproject.toml.
    """
    config = _config(request)

    def verify(model: Any, batch: Any, loss: Any = None, contracts: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        from torchhook.rules.verify import verify

        options.setdefault("fail_on", config.fail_on)
        return _passed(verify(model, batch, loss, contracts, **options), request)

    return verify


def _config(request: pytest.FixtureRequest) -> Config:
    try:
        fail_on = request.config.getoption("--torchhook-fail-on")
        return Config.find(request.config.rootpath).overruled(fail_on=fail_on)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)


def _passed(report: Report, request: pytest.FixtureRequest) -> Report:
    """The report, if it is ok; otherwise the test fails."""
    __tracebackhide__ = True
    request.node.user_properties.append(("torchhook", report.headline))  # for --junitxml
    if not report.ok:
        pytest.fail(_as_text(report), pytrace=False)
    if report.findings:  # sections are sent with the results, also by the workers of pytest-xdist
        request.node.add_report_section("call", _SECTION, _as_text(report))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show findings that did not fail their test, which pytest would hide."""
    found = [
        (result.nodeid, text)
        for outcome in ("passed", "xpassed")
        for result in terminalreporter.getreports(outcome)
        for name, text in result.sections
        if name == f"Captured {_SECTION} call"
    ]
    if found:
        terminalreporter.section("torchhook: findings that fail no test")
        for node, text in found:
            terminalreporter.write_line(f"{node}\n{text}\n")


def _as_text(report: Report) -> str:
    """A headline, which pytest's own summary shows, the findings as a table, then details."""
    from torchhook.core.text import table

    first = report.findings[0]
    rows = [[found.severity, found.code, found.where, found.message.split("\n")[0]] for found in report.findings]
    details = dict.fromkeys(f"{found.code}: {line}" for found in report.findings for line in _details(found))
    headline = f"{first.code} at {first.where} ({report.headline})"
    return "\n".join([headline, "", table(["severity", "code", "where", "what"], rows), "", *details])


def _details(found: Finding) -> list[str]:
    """What does not fit into the table: the rest of the message, what it explains, the hint, and what was tried."""
    explained = f"explains {len(found.affected)} more findings" if found.affected else ""
    return [line.strip() for line in (*found.message.split("\n")[1:], explained, *found.advice) if line]
