"""A pytest plugin: the fixture `model_check` fails a test with what is wrong with a model.

    def test_model(model_check):
        model_check(Net(), (torch.randn(32, 8), torch.randint(2, (32,))), F.cross_entropy)

pytest loads this file by itself, for every project, so it imports torch only once the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchhook.findings import Report

SEVERITIES = ("info", "warning", "error")
_REPORTS = pytest.StashKey[list[tuple[str, "Report"]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("torchhook", "checks of models by torchhook")
    group.addoption("--torchhook-fail-on", choices=SEVERITIES, help="how bad a finding fails a model_check")


def pytest_configure(config: pytest.Config) -> None:
    """A place for the reports of this session."""
    config.stash[_REPORTS] = []


@pytest.fixture
def model_check(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Any:
    """Check a model: ``model_check(model, batch, loss)`` gives a `Report`, or fails the test with its findings.

    `batch` may be a list of batches. Other arguments are those of `torchhook.diagnose`; the copy is trained for twenty
    steps, unless `steps` says otherwise. Settings come from ``[tool.torchhook]`` in pyproject.toml.
    """
    from torchhook.config import Config

    config = Config.find(Path(request.config.rootpath))
    fail_on = request.config.getoption("--torchhook-fail-on") or config.fail_on

    def check(
        model: Any, batch: Any, loss: Any = None, optimizer: Any = None, steps: int = 20, **options: Any
    ) -> Report:
        __tracebackhide__ = True
        from torchhook.diagnosing import diagnose

        settings = {"rules": config.select, "ignore": config.ignore, "per_module": config.per_module}
        report = diagnose(model, batch, loss, optimizer, steps, **{**settings, "fail_on": fail_on, **options})
        request.config.stash[_REPORTS].append((request.node.nodeid, report))
        record_property("torchhook", report.headline)
        if not report.ok:
            pytest.fail(f"torchhook found, at or above {report.fail_on}:\n{report}", pytrace=False)
        return report

    return check


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was found below the level that fails a test: it would not be seen otherwise."""
    told = [(node, report) for node, report in config.stash[_REPORTS] if report.ok and report.findings]
    if told:
        terminalreporter.section("torchhook")
        for node, report in told:
            terminalreporter.write_line(f"{node}: {report}")
