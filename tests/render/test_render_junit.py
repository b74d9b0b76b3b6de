"""JUnit XML that ordinary readers read: what fails, what was skipped, what was said."""

from xml.etree import ElementTree

import junitparser
import pytest
import report_samples
from hypothesis import given
from test_render_json import reports

from torchhook import render
from torchhook.core.findings import Finding, Report


def cases(report):
    suites = junitparser.JUnitXml.fromstring(render.junit(report).encode())
    return {case.name: case for suite in suites for case in suite}


def test_a_rule_is_a_test_case():
    found = cases(report_samples.sick())
    assert list(found) == [*report_samples.CODES[:21], "TH502", "TH503", "TH504"]
    assert {case.classname for case in found.values()} == {"torchhook.ResNet"}


def test_what_is_as_bad_as_fail_on_fails_with_its_text():
    failing = [case for case in cases(report_samples.sick()).values() if isinstance_of(case, junitparser.Failure)]
    assert [case.name for case in failing] == ["TH101"]
    text = failing[0].result[0].text
    assert "layer3.1.bn, step 240" in text and "largest_input: 6.27e+04" in text and "Use bfloat16" in text
    assert "explains TH102 at fc" in text


def test_what_is_less_bad_is_said_and_passes():
    case = cases(report_samples.sick())["TH403"]
    assert case.is_passed and "41 % of its size" in case.system_out
    assert "or warm up.\n  tried: learning rate a tenth → loss 0.31 instead of 2.28" in case.system_out
    stricter = cases(report_samples.sick().passing("warning"))["TH403"]
    assert isinstance_of(stricter, junitparser.Failure)


def test_what_another_finding_explains_is_said():
    case = cases(report_samples.sick())["TH102"]
    assert case.is_passed and "explained by TH101 at layer3.1.bn" in case.system_out


def test_skipped_rules_say_why():
    case = cases(report_samples.sick())["TH504"]
    assert case.is_skipped and case.result[0].message == "no labels were given"


def test_a_finding_of_a_rule_that_is_not_listed_is_not_lost():
    report = Report((Finding("TH9", "error", "x"),), checked=("TH1",), skipped={"TH9": "because"})
    assert isinstance_of(cases(report)["TH9"], junitparser.Failure)


def test_the_totals_are_right():
    suites = ElementTree.fromstring(render.junit(report_samples.sick()))
    for element in (suites, suites[0]):
        assert (element.get("tests"), element.get("failures"), element.get("skipped")) == ("24", "1", "3")


@pytest.mark.parametrize("name", ["hostile", "large", "healthy"])
def test_every_report_is_xml(name):
    assert cases(getattr(report_samples, name)())


@given(reports)
def test_any_report_is_xml(report):
    ElementTree.fromstring(render.junit(report).encode())


def isinstance_of(case, kind):
    return any(isinstance(result, kind) for result in case.result)
