"""check(): which rules are applied, what happens to their findings, and that a watch measures nothing else."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from specimens import hooks_of
from torchhook import Report, Rule, Severity, check, diagnose, measure, stats
from torchhook.rules import RULES, History, chosen, register
from torchhook.rules.check import layers_of
from torchhook.rules.history import joined
from torchhook.rules.kinds import kind_of
from torchhook.rules.watch import Watch
from torchhook.stats.reading import FLAGS, Snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def registry():
    """The registered rules, which are restored after the test."""
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


def net(bias=-100.0):
    """Its ReLU is dead."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    nn.init.constant_(model[0].bias, bias)
    return model


def measured(model, passes=1, **options):
    with measure(model, by="channel", **options) as seen:
        for _ in range(passes):
            model(torch.randn(1000, 4))
    return seen


def codes(report):
    return [finding.code for finding in report.findings]


class Explains(Rule):
    """A model as a whole, and what comes of it at a step."""

    code, name = "MY002", "explains"

    def find(self, history):
        yield replace(self.finding("all of it"), affected=(self.finding("what comes of it", "0", 21),))


class Finds(Rule):
    """There is a model."""

    code, name = "MY001", "finds"

    def find(self, history):
        yield self.finding("found", "0")


class Raises(Rule):
    """Nothing: it is broken."""

    code, name = "MY002", "raises"

    def find(self, history):
        yield self.finding("found before it broke")
        raise ZeroDivisionError("oh")


class RaisesEarly(Finds):
    """Nothing: it does not even know what it needs."""

    code, name = "MY003", "raises-early"

    def missing(self, history):
        raise LookupError("what?")


# --- what is checked


def test_statistics_snapshots_and_histories_give_the_same_report():
    seen = measured(net())
    snapshot = seen.snapshot()
    history = History()
    history.add(0, joined([snapshot]))
    reports = [check(given, ["TH1", "TH2"]) for given in (seen, snapshot, history)]
    assert codes(reports[0]) == ["TH201"] and reports[0].findings[0].site == "1"
    assert reports[0] == reports[1] == replace(reports[2], span=None) and reports[2].span == (0, 0)


def test_the_numbers_by_place_are_of_one_step():
    history, snapshot = History(), joined([measured(net()).snapshot()])
    assert check(history).span is None
    for step in range(0, 35, 5):
        history.add(step, snapshot)
    assert check(history, ["TH1"]).span == (30, 30)
    history.add(35, Snapshot({}))
    assert check(history, ["TH1"]).span == (30, 30)  # of the last one, nothing is known


def test_the_layers_are_those_of_the_step_at_which_something_went_wrong():
    history, model = History(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for step, scale in enumerate([1.0, 10.0, math.nan, 0.0, 0.0, 0.0]):
        with measure(model) as seen:
            model(torch.ones(2, 4) * scale)
        history.add(step, joined([seen.snapshot()]))
    report = check(history, ["TH1"])
    assert report.findings[0].step == 2 and report.span == (2, 2)
    expected = layers_of(history.windows[2].snapshot)
    assert str(report.layers) == str(expected)  # NaN is not equal to itself
    assert check(history, ["TH601"]).span == (5, 5)


def test_the_numbers_of_a_step_are_not_completed_by_those_of_an_older_one():
    history, model = History(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for step, by in enumerate(["channel", None]):  # units are not measured in every step
        with measure(model, by=by) as seen:
            model(torch.randn(64, 4) * 1000**step)
        history.add(step, joined([seen.snapshot()]))
    first, _ = check(history, ["TH1"]).layers
    assert first["std"] == history.windows[1].snapshot["0"]["moments"].std > 100


def test_the_gradients_of_several_steps_are_in_the_report():
    history, model = History(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for step in range(100):
        with measure(model, grads=True, param_grads=True) as seen:
            (model(torch.ones(2, 4)).sum() * 10.0**-step).backward()
        history.add(step, joined([seen.snapshot()]))
    report = check(history, ["TH1"])
    assert 20 < len(report.gradients) <= 40 and report.span[1] in report.gradients
    sizes = {step: sizes[0] for step, sizes in report.gradients.items()}
    assert sizes[99] == pytest.approx(report.layers[0]["grad_norm"], rel=1e-2) and sizes[0] > 1e20 * sizes[99]
    assert check(seen, ["TH1"]).gradients == {}  # there is nothing to choose from


def test_the_step_of_a_consequence_counts_where_its_cause_has_none():
    history, snapshot = History(), joined([measured(net()).snapshot()])
    for step in range(0, 35, 5):
        history.add(step, snapshot)
    assert check(history, [Explains()]).span == (25, 25)  # the step before is not yet faulty


def test_statistics_under_way_can_be_checked_and_go_on():
    model = net()
    with measure(model, by="channel") as seen:
        model(torch.randn(1000, 4))
        assert codes(check(seen, ["TH201"])) == ["TH201"]
        nn.init.constant_(model[0].bias, 100)
        seen.reset()
        model(torch.randn(1000, 4))
        assert not check(seen, ["TH201"]).findings


def test_a_finding_in_statistics_has_their_step():
    (finding,) = check(measured(net(), passes=4), ["TH201"]).findings
    assert finding.step == 3


def test_checking_changes_nothing_of_what_is_checked():
    seen = measured(net())
    before = {place: seen[place]["moments"] for place in seen}
    first = check(seen)
    assert check(seen) == first
    assert {place: seen[place]["moments"] for place in seen} == before


@pytest.mark.parametrize("wrong", [None, nn.ReLU(), {"0": 1}, 3])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match="measure"):
        check(wrong)


def test_a_history_of_nothing_finds_nothing_and_says_what_is_missing():
    report = check(History())
    assert report.ok and not report.findings and not report.checked
    assert set(report.skipped) == set(RULES) and all(report.skipped.values())


# --- which rules


@pytest.mark.parametrize(
    "select, expected",
    [
        (["TH201"], {"TH201"}),
        (["dead-units"], {"TH201"}),
        ("TH201", {"TH201"}),
        (["TH2"], {code for code in RULES if code.startswith("TH2")}),
        (["TH201", "TH2", "dead-units"], {code for code in RULES if code.startswith("TH2")}),
        ([RULES["TH201"]], {"TH201"}),
        (RULES["TH201"], {"TH201"}),
        ((code for code in ["TH201", "TH101"]), {"TH101", "TH201"}),
        (None, set(RULES)),
        ([], set()),
    ],
    ids=["code", "name", "text", "family", "overlapping", "rules", "rule", "generator", "all", "none"],
)
def test_rules_are_chosen_by_code_beginning_name_or_object(select, expected):
    report = check(measured(net()), select)
    assert {*report.checked, *report.skipped} == expected
    assert not {*report.checked} & {*report.skipped}


@pytest.mark.parametrize("ignore", [["TH201"], "TH201", ["dead-units"], ["TH20"], [RULES["TH201"]]], ids=str)
def test_rules_are_ignored_likewise(ignore):
    report = check(measured(net()), ["TH1", "TH201"], ignore=ignore)
    assert "TH201" not in {*report.checked, *report.skipped} and not report.findings
    assert "TH101" in report.checked


def test_a_rule_object_need_not_be_registered():
    report = check(measured(net()), [Finds(), "TH101"])
    assert report.checked == ("MY001", "TH101")
    assert codes(report) == ["MY001"]
    assert "MY001" not in RULES


@pytest.mark.parametrize(
    "wrong, near", [("TH2O1", "TH201"), ("dead-unit", "dead-units"), ("loss-spikes", "loss-spike"), ("", "TH")]
)
@pytest.mark.parametrize("argument", ["rules", "ignore"])
def test_an_unknown_rule_raises_with_the_nearest(argument, wrong, near):
    with pytest.raises(ValueError, match=f"no rule '{wrong}'.*{near}"):
        check(measured(net()), **{argument: [wrong]})


def test_what_is_no_choice_of_a_rule_raises():
    with pytest.raises(TypeError, match="codes"):
        check(measured(net()), [201])


def test_rules_are_ignored_at_modules_by_globs():
    model = nn.Sequential(net(), net())
    model[1][0] = nn.Linear(2, 64)
    nn.init.constant_(model[1][0].bias, -100)
    seen = measured(model)

    def sites(**per_module):
        report = check(seen, ["TH201"], per_module=per_module.get("only"))
        return [finding.site for root in report.findings for finding in (root, *root.affected)]

    assert sites() == ["0.1", "1.1"]
    assert sites(only={"0.*": ["TH201"]}) == ["1.1"]
    assert sites(only={"1.1": ["TH2"]}) == ["0.1"]
    assert sites(only={"0.*": ["TH101"]}) == ["0.1", "1.1"]
    assert sites(only={"?.1": ["TH202", "TH201"]}) == []


# --- what cannot be applied


def test_a_rule_without_what_it_needs_is_skipped_with_the_reason():
    report = check(measured(net()))
    assert "grad" in report.skipped["TH103"]
    assert "losses" in report.skipped["TH601"]
    assert "at rest" in report.skipped["TH302"]
    assert "optimizer" in report.skipped["TH503"]
    assert "profile" in report.skipped["TH901"]
    assert "which only diagnose makes" in report.skipped["TH704"]


@pytest.mark.parametrize("broken", [Raises, RaisesEarly])
def test_a_rule_that_raises_is_a_finding_and_the_others_go_on(broken):
    report = check(measured(net()), [broken(), "TH201", Finds()])
    assert sorted(codes(report)) == ["MY001", "TH000", "TH201"]
    assert set(report.checked) == {"MY001", "TH201"}
    finding = report.findings[codes(report).index("TH000")]
    error = "ZeroDivisionError: oh" if broken is Raises else "LookupError: what?"
    assert broken.code in finding.message and error in finding.message
    assert finding.severity == Severity.INFO and finding.hint
    assert error in report.skipped[broken.code]


def test_a_broken_rule_does_not_fail_a_report_of_warnings():
    assert check(measured(net(1.0)), [Raises()], fail_on="warning").ok


def test_to_be_interrupted_is_no_finding():
    class Interrupted(Finds):
        def find(self, history):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(measured(net()), [Interrupted()])


# --- how bad it is


@pytest.mark.parametrize("severity", list(Severity))
@pytest.mark.parametrize("fail_on", list(Severity))
def test_a_report_fails_at_its_level_and_above(severity, fail_on):
    class Bad(Finds):
        code = "MY004"

        def find(self, history):
            yield self.finding("bad", severity=severity)

    report = check(measured(net()), [Bad()], fail_on=str(fail_on))
    assert report.ok == (severity.rank < fail_on.rank)
    assert report.exit_code == (0 if report.ok else 1)
    assert report.passing("info").exit_code == 1


def test_errors_alone_fail_by_default():
    seen = measured(net())
    assert not check(seen, ["TH201"]).ok and check(seen, ["TH101"]).ok


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="bad"):
        check(measured(net()), fail_on="bad")


def test_a_report_has_the_layers_in_execution_order_and_goes_through_json():
    model = net()
    with measure(model, grads=True, by="channel") as seen:
        model(torch.randn(300, 4)).sum().backward()
    report = check(seen, model="Net")
    assert report.model == "Net" and report.headline.startswith("Net: ")
    assert [layer["site"] for layer in report.layers] == ["0", "1", "2"]
    assert report.layers[0]["mean"] == pytest.approx(seen["0"].mean)
    size = seen["2", "grad_output"]
    assert report.layers[2]["grad_norm"] == pytest.approx(size.l2 / size.count**0.5)
    assert Report.from_dict(report.to_dict()) == report


def test_a_parameter_is_shown_with_the_class_of_its_module():
    model = nn.Sequential(nn.Linear(4, 8), nn.Threshold(math.inf, -math.inf), nn.Linear(8, 2))
    report = diagnose(model, torch.randn(8, 4), progress=False)
    found = [one for finding in report.findings for one in (finding, *finding.affected)]
    assert "2.weight (Linear)" in {one.place for one in found}


def test_a_module_that_is_never_called_is_shown_with_its_class():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "spare": nn.Conv2d(1, 1, 3)})
    model.forward = lambda x: model["used"](x)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(4)]
    report = diagnose(model, batches, loss=nn.functional.mse_loss, steps=8, progress=False, try_repairs=False)
    found = [one for top in report.findings for one in (top, *top.affected)]
    assert "spare (Conv2d)" in {one.place for one in found}


def test_the_table_of_parameters_has_the_classes_of_their_modules():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    report = diagnose(model, batches, loss=nn.functional.cross_entropy, steps=4, progress=False, try_repairs=False)
    assert {layer["site"]: layer["module"] for layer in report.layers if layer["kind"] == "parameter"} == {
        f"{layer}.{name}": "Linear" for layer in (0, 2) for name in ("weight", "bias")
    }


# --- rules of one's own


def test_a_registered_rule_is_applied_by_default_and_known_by_its_names(registry):
    register(Finds)
    seen = measured(net())
    assert "MY001" in codes(check(seen))
    assert codes(check(seen, ["finds"])) == codes(check(seen, ["MY"])) == ["MY001"]
    assert "MY001" not in codes(check(seen, ignore=["MY001"]))


def test_a_code_is_registered_once_and_has_a_shape(registry):
    register(Finds)
    with pytest.raises(ValueError, match="already"):
        register(Finds)
    for wrong in ("", "my1", "MY", "1MY", "MY-1"):
        with pytest.raises(ValueError, match="code"):
            register(type("Wrong", (Finds,), {"code": wrong}))
    assert len(registry) == len(chosen())


def test_a_rule_of_ones_own_explains_and_is_explained(registry):
    class Cause(Finds):
        """The reason for dead units."""

        code, explains = "MY005", ("TH2",)

    register(Cause)
    (root,) = check(measured(net()), ["MY", "TH201"]).findings
    assert root.code == "MY005" and [other.code for other in root.affected] == ["TH201"]
    assert root.severity == Severity.ERROR


# --- every rule


@pytest.mark.parametrize("code", RULES)
def test_every_rule_says_what_it_is_what_to_do_and_when_it_is_wrong(code):
    rule = RULES[code]
    assert rule.code == code and rule.name == rule.name.lower().replace(" ", "-")
    for text in (inspect.getdoc(type(rule)), rule.hint, rule.wrong):
        assert text and text.strip().endswith("."), text
    assert type(rule).__doc__ is not None, "a docstring of its own"


def test_names_are_of_one_rule_each():
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("code", RULES)
def test_every_rule_asks_for_what_there_is(code):
    rule = RULES[code]
    for need in (*rule.needs, *rule.uses):
        assert stats.named(need.stat).name == need.stat
        assert need.port in {*FLAGS, "attention"}
    for fact in rule.facts:
        assert hasattr(History(), fact)
    assert rule.missing(History()), "with nothing known, every rule has a reason to be skipped"
    known = (*RULES, "TH2", "TH3", "TH4", "TH5", "TH6", "TH7", "TH8", "TH9", "TH1")
    assert all(prefix in known for prefix in rule.explains)


# --- what a watch collects


class Everything(nn.Module):
    """A module of every kind that rules ask for."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Sigmoid(), nn.Linear(8, 3))

    def forward(self, x):
        x = self.embedding(x)
        x = self.attention(x, x, x)[0]
        x = self.recurrent(x)[0].mean(1)
        return self.last(self.middle(self.first(x)))


def watched(rules, with_optimizer, thorough=True, steps=2):
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), 0.01) if with_optimizer else None
    before = hooks_of(model)
    with Watch(model, rules, optimizer) as watch:
        watch.be_thorough(thorough)
        for _ in range(steps):
            model.zero_grad()
            model(torch.randint(10, (16, 5))).square().sum().backward()
            if optimizer is not None:
                optimizer.step()
            watch.step(1.0)
    assert hooks_of(model) == before
    return watch.history.whole()


def wanted(need, reading, stat):
    """Whether a statistic at a place is there because of a need."""
    flag, port = FLAGS.get(need.port), reading.port.partition("[")[0]
    if flag in ("params", "param_grads", "updates"):  # they are measured together
        return FLAGS.get(port) == flag and stat == "moments"
    kinds_fit = not need.kinds or kind_of(reading.module_class) in need.kinds
    return port == need.port and stat == need.stat and kinds_fit


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["alone", "optimizer"])
@pytest.mark.parametrize("code", RULES)
def test_a_watch_collects_what_a_rule_asks_for_and_no_more(code, with_optimizer):
    rule = RULES[code]
    seen = watched([rule], with_optimizer)
    asked = {*rule.needs, *rule.uses}
    for reading in seen.values():
        for stat in reading:
            assert any(wanted(need, reading, stat) for need in asked), (reading.path, reading.port, stat)
    for need in asked:
        served = any(wanted(need, reading, stat) for reading in seen.values() for stat in reading)
        assert served or (FLAGS.get(need.port) == "updates" and not with_optimizer), need


def test_a_watch_collects_no_more_for_several_rules_than_for_each():
    some = chosen(["TH101", "TH201", "TH401", "TH801"])
    together = watched(some, with_optimizer=True)
    apart = [watched([rule], with_optimizer=True) for rule in some]
    pairs = {(place, stat) for place, reading in together.items() for stat in reading}
    assert pairs == {(place, stat) for seen in apart for place, reading in seen.items() for stat in reading}


def test_a_watch_without_rules_collects_nothing():
    assert not watched([], with_optimizer=True)
    assert not watched(chosen(["TH602", "TH503"]), with_optimizer=True)


def test_what_is_dear_is_collected_while_the_watch_is_thorough():
    rules = chosen(["TH801", "TH803", "TH101"])
    names = {stat for reading in watched(rules, False, thorough=False).values() for stat in reading}
    assert names == {"moments"}
    names = {stat for reading in watched(rules, False, thorough=True).values() for stat in reading}
    assert names == {"moments", "covariance", "attention"}


def test_a_watch_leaves_nothing_behind_when_the_training_raises():
    model = Everything()
    before = hooks_of(model)
    with pytest.raises(ZeroDivisionError), Watch(model, chosen()) as watch:
        watch.be_thorough(True)
        model(torch.randint(10, (4, 5)))
        raise ZeroDivisionError
    assert hooks_of(model) == before
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_window_is_of_its_step_alone():
    model = nn.Sequential(nn.Identity())
    with Watch(model, chosen(["TH101"])) as watch:
        for value in (1.0, 2.0, 3.0):
            model(torch.full((4,), value))
            watch.step(value)
    assert [window.snapshot["0"].mean for window in watch.history.windows] == [1, 2, 3]
    assert watch.history.losses == {0: 1.0, 1: 2.0, 2: 3.0}


# --- causes


def test_every_rule_has_a_cause_of_the_closed_list_which_the_page_has():
    from pathlib import Path

    from torchhook.rules.rule import CAUSES

    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
    assert all(f"`{cause}`" in page for cause in CAUSES) and len(CAUSES) == 19
    for rule in RULES.values():
        assert rule.cause in CAUSES, rule.code
        assert rule.finding("something").evidence["cause"] == rule.cause
        assert rule.finding("something", cause="labels").evidence["cause"] == "labels"
