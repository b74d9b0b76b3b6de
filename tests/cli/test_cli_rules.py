"""``torchhook rules``: the list, and the explanation of one rule."""

import pytest

from torchhook.rules import RULES


def test_lists_every_rule_on_a_line(command):
    done = command("rules")
    header, *lines = done.out.splitlines()
    assert done.code == 0 and done.err == ""
    assert header.split() == ["code", "name", "severity", "finds"]
    assert [line.split()[:3] for line in lines] == [[r.code, r.name, str(r.severity)] for r in sorted_rules()]
    assert "The output of a module holds NaN or +Inf" in lines[0]


@pytest.mark.parametrize("name", ["TH101", "th101", "nonfinite-values"])
def test_tells_all_about_one(command, name):
    done = command("rules", name)
    assert done.code == 0
    assert done.out.startswith("TH101 nonfinite-values (error)\n\nThe output of a module holds NaN or +Inf.")
    assert f"What to do: {RULES['TH101'].hint}" in " ".join(done.out.split())
    assert all(len(line) <= 80 for line in done.out.splitlines())


def test_tells_about_a_family(command):
    done = command("rules", "TH1")
    assert all(f"{rule.code} {rule.name} (" in done.out for rule in sorted_rules() if rule.code.startswith("TH1"))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_can_be_told_about(command, rule):
    done = command("rules", rule)
    assert (done.code, done.err) == (0, "")
    for part in ("Cause: ", "What to do: ", "When it is wrong: ", "Needs: "):
        assert part in done.out


@pytest.mark.parametrize(("name", "near"), [("TH999", "TH901"), ("nonfinite-valeus", "nonfinite-values")])
def test_an_unknown_one_ends_with_2_and_the_nearest(command, name, near):
    done = command("rules", name)
    assert (done.code, done.out) == (2, "")
    assert f"there is no rule {name!r}; did you mean {near}" in done.said


def sorted_rules():
    return [RULES[code] for code in sorted(RULES)]
