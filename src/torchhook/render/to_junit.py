"""JUnit XML, which every CI system shows: a rule is a test case, failed by what it found if as bad as ``fail_on``."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from torchhook.core.findings import Finding, Report
from torchhook.render.words import named, printable, shown


def junit(report: Report) -> str:
    """A report as the results of tests.

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
        _say(suite, "system-out", "\n".join(report.notes))
    suites = Element("testsuites", {"name": "torchhook", **totals})
    suites.append(suite)
    indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _codes(report: Report) -> list[str]:
    """Every rule once: those that found something, were checked or were skipped."""
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
        _say(case, "failure", "\n\n".join(map(_told, failing)), message=printable(failing[0].message), type=str(worst))
    elif code in report.skipped and not found:
        SubElement(case, "skipped", message=printable(report.skipped[code]))
    said = [*map(_told, passing), *_explained(report, code)]
    if said:
        _say(case, "system-out", "\n\n".join(said))
    return case


def _explained(report: Report, code: str) -> list[str]:
    """What a rule found that another finding explains: no failure of its own, yet not nothing."""
    pairs = [(root, other) for root in report.findings for other in root.affected if other.code == code]
    return [f"{other}\n  explained by {named(root)}" for root, other in pairs]


def _say(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = printable(text)


def _told(finding: Finding) -> str:
    evidence = [f"  {name}: {shown(value)}" for name, value in finding.evidence.items()]
    hint = [f"  {finding.hint}"] if finding.hint else []
    explained = [f"  explains {named(other)}: {other.message}" for other in finding.affected]
    return "\n".join([str(finding), *evidence, *hint, *explained])
