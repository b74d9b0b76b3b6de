"""The report as JUnit XML for CI systems: each rule is a test case, which findings from ``fail_on`` up fail."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from torchhook.core.findings import Finding, Report
from torchhook.render.words import finding_title, printable, shown


def junit(report: Report) -> str:
    """A report as JUnit test results.

    >>> print(junit(Report(model="Net", checked=("TH101",))))
    <?xml version="1.0" encoding="utf-8"?>
    <testsuites name="torchhook" tests="1" failures="0" errors="0" skipped="0" time="0">
      <testsuite name="torchhook.Net" tests="1" failures="0" errors="0" skipped="0" time="0">
        <testcase classname="torchhook.Net" name="TH101" time="0" />
      </testsuite>
    </testsuites>
    """
    suite = Element("testsuite")
    for code in _codes(report):
        suite.append(_case(report, code))
    totals = {
        "tests": str(len(suite)),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": "0",
        "skipped": str(len(suite.findall("testcase/skipped"))),
        "time": "0",
    }
    suite.attrib.update({"name": _class(report), **totals})
    if report.notes:
        _add_text(suite, "system-out", "\n".join(report.notes))
    suites = Element("testsuites", {"name": "torchhook", **totals})
    suites.append(suite)
    indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _codes(report: Report) -> list[str]:
    """The code of every rule that was checked, found something or was skipped."""
    found = [finding.code for finding in report.findings]
    return list(dict.fromkeys([*report.checked, *found, *report.skipped]))


def _class(report: Report) -> str:
    return printable(f"torchhook.{report.model}")


def _case(report: Report, code: str) -> Element:
    case = Element("testcase", classname=_class(report), name=printable(code), time="0")
    found = [finding for finding in report.findings if finding.code == code]
    failing = [finding for finding in found if finding.severity >= report.fail_on]
    passing = [finding for finding in found if finding.severity < report.fail_on]
    if failing:
        worst = max(finding.severity for finding in failing)
        _add_text(
            case,
            "failure",
            "\n\n".join(map(_described, failing)),
            message=printable(failing[0].message),
            type=str(worst),
        )
    elif code in report.skipped and not found:
        SubElement(case, "skipped", message=printable(report.skipped[code]))
    others = [*map(_described, passing), *_explained(report, code)]
    if others:
        _add_text(case, "system-out", "\n\n".join(others))
    return case


def _explained(report: Report, code: str) -> list[str]:
    """Findings of a rule that another finding explains; they do not fail the test case."""
    pairs = [(root, other) for root in report.findings for other in root.affected if other.code == code]
    return [f"{other}\n  explained by {finding_title(root)}" for root, other in pairs]


def _add_text(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = printable(text)


def _described(finding: Finding) -> str:
    evidence = [f"  {name}: {shown(value)}" for name, value in finding.evidence.items()]
    advice = [f"  {line}" for line in finding.advice]
    explained = [f"  explains {finding_title(other)}: {other.message}" for other in finding.affected]
    return "\n".join([str(finding), *evidence, *advice, *explained])
