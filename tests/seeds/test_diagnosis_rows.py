"""The rows of diagnosis: C20, C21, C22, C39, C43, B04, B10, B11, B12, B13, B14."""

import inspect
import json
import math
import re
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from architectures import transformers_models
from real.scoring import NAMES, Case, outcome, program, warnings_of
from specimens import hooks_of, resnet18
from torchhook import (
    ModelDiagnostics,
    Profile,
    Trial,
    catch_nonfinite,
    check,
    diagnose,
    measure,
    origins,
    render,
    verify,
)
from torchhook.cli import main
from torchhook.core.errors import NonfiniteError
from zoo import FAULTS, HEALTHY
from zoo.inspecting import inspected, is_at

pytestmark = pytest.mark.usefixtures("one_thread")


def batches(count=4, size=64):
    return [(torch.randn(size, 8), torch.randint(3, (size,))) for _ in range(count)]


def mlp(*between):
    return nn.Sequential(nn.Linear(8, 32), *between, nn.Linear(32, 3))


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_c20_one_diagnostics_object_over_features_and_gradients():
    class Writer:
        tags = ()

        def add_histogram(self, tag, values, global_step=None):
            self.tags = (*self.tags, (tag, global_step, values.numel()))

    model, writer, x = resnet18(num_classes=3), Writer(), torch.randn(2, 3, 32, 32)
    before = hooks_of(model)
    diagnostics = ModelDiagnostics(model)
    model(x).sum().backward()
    diagnostics.visualize(writer, 5)
    diagnostics.close()
    assert hooks_of(model) == before
    convolutions = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert sorted(diagnostics.features) == sorted(diagnostics.gradients) == sorted(convolutions)
    assert diagnostics.features["conv1"].shape == diagnostics.gradients["conv1"].shape == (2, 64, 16, 16)
    torch.testing.assert_close(diagnostics.features["conv1"], model.conv1(x))
    for path, stats in diagnostics.compute_activation_stats().items():
        values = diagnostics.features[path].double()
        expected = {name: float(getattr(values, name)()) for name in ("mean", "std", "max", "min")}
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6), path
    assert ("features/conv1", 5, 2 * 64 * 16 * 16) in writer.tags and len(writer.tags) == 2 * len(convolutions)


def test_c20_a_forward_in_another_thread_that_is_not_seen_is_told():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
    said = r"nothing was seen at the output of '0', output of '1': it ran only in a thread .*; pass scope='all'"
    with ModelDiagnostics(net) as here, ModelDiagnostics(net, scope="all") as everywhere:
        thread = threading.Thread(target=lambda: net(torch.ones(1, 1, 8, 8)).sum().backward())
        thread.start()
        thread.join()
        reads = (here.compute_activation_stats, here.check, lambda: here.features, lambda: here.gradients)
        for read in reads:
            with pytest.warns(UserWarning, match=said):
                read()
    for read in reads:  # after the end, too
        with pytest.warns(UserWarning, match=said):
            read()
    assert list(everywhere.features) == list(everywhere.gradients) == ["0", "1"]


def test_c21_dead_units_are_found():
    model = mlp(nn.ReLU())
    with measure(model, by="channel") as stats:
        model(torch.randn(500, 8))
    assert not check(stats, ["TH201"]).findings  # half of all values are zero, and no unit is dead
    nn.init.constant_(model[0].bias[:30], -100)
    with measure(model, by="channel") as stats:
        model(torch.randn(500, 8))
    (finding,) = check(stats, ["dead-units"]).findings
    assert (finding.code, finding.site, finding.severity) == ("TH201", "1", "error")
    assert finding.evidence["dead"] == 30 and finding.evidence["units"] == 32


def gradient_norms(model, x, y, layers, factor=1.0):
    """The norms of the gradients of the outputs of some layers, with autograd alone."""
    outputs, value = {}, x
    for number, layer in enumerate(model):
        value = outputs[number] = layer(value)
    gradients = torch.autograd.grad(factor * F.cross_entropy(value, y), [outputs[number] for number in layers])
    return [float(gradient.double().norm()) for gradient in gradients]


@pytest.mark.parametrize(
    "times, code", [(1e-6, "TH401"), (0.9e-3, "TH401"), (1.1e-3, None), (2, None), (900, None), (1100, "TH402")]
)
def test_c22_exploding_and_vanishing_gradients_are_found(times, code):
    """A rotation keeps the norm of a gradient, so that the first layer has exactly `times` that of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), Scale(times), nn.Linear(32, 32))
    nn.init.orthogonal_(model[2].weight)
    x, direction = 9 * torch.randn(64, 8), 0.01 * torch.randn(64, 32)
    with measure(model, grads=True) as stats:
        (model(x) * direction).sum().backward()
    assert stats["0", "grad_output"].l2 == pytest.approx(times * float(direction.norm()), rel=1e-4)
    found = check(stats, ["TH4"]).findings
    assert [(finding.code, finding.site) for finding in found] == ([(code, "0")] if code else [])
    assert [finding.evidence["ratio"] for finding in found] == [pytest.approx(times, rel=0.02)] * len(found)


@pytest.mark.parametrize("factor, code", [(1, None), (2, None), (1e6, "TH402")])
def test_c22_gradients_that_are_large_everywhere_are_found(factor, code):
    torch.manual_seed(0)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), pool, nn.Linear(8, 3))
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 3
    with ModelDiagnostics(model) as diagnostics, measure(model, grads=True, param_grads=True) as stats:
        (factor * F.cross_entropy(model(x), y)).backward()
    of_head = gradient_norms(model, x, y, [5], factor)[0] / math.sqrt(16 * 3)
    of_output = min(1.0, float(model(x).detach().square().mean().sqrt()))
    for report, size in ((check(stats), of_head * of_output), (diagnostics.check(), of_head)):
        found = [(finding.code, finding.site, finding.evidence["size"]) for finding in report.findings]
        assert found == ([(code, "5", pytest.approx(size, rel=1e-3))] if code else []), report


@pytest.mark.parametrize("weights", [False, True])
def test_c22_a_mean_over_very_many_positions_is_no_vanishing_gradient(weights):
    """It divides the norm by the square root of their number, and leaves the sum of the absolute values as it is."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    x, y = torch.randn(2, 3, 224, 224), torch.tensor([0, 1])
    pooled, after, last = gradient_norms(model, x, y, (3, 4, 6))
    assert pooled == pytest.approx(after / 224, rel=1e-5) and gradient_norms(model, x, y, [0])[0] < 1e-3 * last
    with measure(model, grads=True, param_grads=weights) as stats:
        F.cross_entropy(model(x), y).backward()
    assert not check(stats, ["TH4"]).findings


@pytest.mark.slow
def test_c22_diagnose_finds_nothing_in_a_mean_over_very_many_positions():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    data = [(torch.randn(2, 3, 224, 224), torch.tensor([0, 1])) for _ in range(2)]
    assert not diagnose(model, data, F.cross_entropy, steps=3, rules=["TH4"]).findings


NETS = """
import torch
from torch import nn

def healthy():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

def sick():
    model = healthy()
    model[0].weight.data[0, 0] = float("nan")
    return model

def batches():
    torch.manual_seed(0)
    return [(torch.randn(64, 8), torch.randint(3, (64,))) for _ in range(4)]
"""
TESTS = """
import torch.nn.functional as F
from nets import batches, healthy, sick

def test_healthy(model_check):
    assert model_check(healthy(), batches(), F.cross_entropy).ok

def test_sick(model_check):
    model_check(sick(), batches(), F.cross_entropy)
"""


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["torchhook", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


@pytest.mark.slow
def test_c39_health_checks_in_continuous_integration(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "test_nets.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = "--loader", "nets:batches", "--steps", "5", "--fail-on", "error", "--report", "report.json"
    assert command(monkeypatch, "diagnose", "nets:healthy", *options) == 0
    assert render.load("report.json").ok
    assert command(monkeypatch, "diagnose", "nets:sick", *options) == 1
    assert render.load("report.json").findings[0].code == "TH102"
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nets.py"]
    done = subprocess.run(test, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "TH102" in done.stdout and "0.weight" in done.stdout


def test_c43_anomalies_in_production_against_a_stored_profile(tmp_path):
    model = mlp(nn.ReLU()).eval()
    Profile.of(model, [x for x, _ in batches(8)]).save(tmp_path / "profile.safetensors")
    profile = Profile.load(tmp_path / "profile.safetensors")
    live = batches(1)[0][0]
    assert profile.check(model, live, fail_on="warning").ok
    report = profile.check(model, 50 * live)
    assert not report.ok
    assert (report.findings[0].code, report.findings[0].site) == ("TH901", "0")
    with torch.no_grad():
        model[2].weight *= 50
    assert profile.check(model, live).findings[0].site == "2"


class Log(nn.Module):
    def forward(self, x):
        return x.log()  # here


def test_b04_the_origin_of_the_first_nan_its_op_its_line_and_the_input_that_reproduces_it(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Log(), nn.Linear(8, 3))
    before = hooks_of(model)
    with pytest.raises(NonfiniteError), catch_nonfinite(model, save=tmp_path) as caught:
        model(torch.randn(4, 8))
    assert hooks_of(model) == before
    lines, start = inspect.getsourcelines(Log)
    (line,) = [start + number for number, text in enumerate(lines) if text.rstrip().endswith("# here")]
    assert (caught.origin.path, caught.origin.op) == ("2", "aten.log")
    assert caught.origin.line.startswith(f"{Path(__file__).name}:{line}:")
    assert [finding.site for finding in caught.finding.affected][:1] == ["3"]
    fresh = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Log(), nn.Linear(8, 3))
    assert origins.replay(caught.file, fresh).op == "aten.log"


def named(specimens, name):
    return next(specimen for specimen in specimens if specimen.name == name)


@pytest.mark.slow
def test_b10_rules_are_calibrated_on_a_zoo_of_healthy_and_sick_trainings():
    assert len(HEALTHY) >= 12 and len(FAULTS) >= 24
    assert len({specimen.name for specimen in (*HEALTHY, *FAULTS)}) == len(HEALTHY) + len(FAULTS)
    report = inspected(named(HEALTHY, "tanh_regression"), 1000)
    assert not [finding for finding in report.findings if finding.severity >= "warning"], report
    fault = named(FAULTS, "dead_relu")
    first = inspected(fault, 1000).findings[0]
    assert first.code in fault.codes and is_at(first.site, fault.sites_for(1000))


def test_b10_precision_and_recall_are_published():
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    assert any(
        "precision" in page.lower() and "recall" in page.lower() for page in (file.read_text() for file in pages)
    )


def test_b11_one_report_for_people_and_machines(tmp_path, capsys):
    model = mlp(nn.ReLU())
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    report = diagnose(model, batches(), F.cross_entropy, steps=3)
    code, site = report.findings[0].code, report.findings[0].site
    assert (code, site) == ("TH102", "0.weight")
    for suffix in ("html", "json", "xml", "md"):
        render.save(report, tmp_path / f"report.{suffix}")
        text = (tmp_path / f"report.{suffix}").read_text()
        assert code in text and site in text, suffix
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html") and "<script src" not in page  # works from disk
    assert render.load(tmp_path / "report.json").findings == report.findings
    assert json.loads(render.json(report))["ok"] is False
    failing = {finding.code for finding in report.findings if finding.severity == "error"}
    suite = ElementTree.parse(tmp_path / "report.xml").getroot().find("testsuite")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases.keys() >= {*report.checked, *failing} and code in failing
    assert {name for name, case in cases.items() if case.find("failure") is not None} == failing
    assert (int(suite.get("failures")), int(suite.get("tests"))) == (len(failing), len(cases))
    assert site in cases[code].find("failure").text and cases[code].find("failure").get("message")
    render.terminal(report)
    assert code in capsys.readouterr().out and code in str(report) and code in report._repr_html_()


def test_b12_there_are_real_programs_with_repaired_twins_and_healthy_ones():
    faulty = [name for name in NAMES if program(name).CAUSES]
    assert len(faulty) >= 30 and len(NAMES) >= 35 and len(NAMES) > len(faulty)
    with_build = [program(name).build for name in faulty if hasattr(program(name), "build")]
    assert all("repaired" in inspect.signature(build).parameters for build in with_build) and len(with_build) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["diagnose", "run"])
@pytest.mark.parametrize("name", ["relu_output_signed", "mnist_no_zero_grad"])
def test_b12_the_cause_of_a_real_fault_is_named_first_and_its_repaired_twin_is_left_alone(name, mode):
    if program(name).LOOP and mode == "diagnose":
        pytest.skip("diagnose does not see the loop")
    faulty, repaired = (outcome(Case(name, mode, twin)) for twin in (False, True))
    assert faulty.found and (faulty.at_layer or not faulty.has_layer), faulty.wrong
    assert not repaired.alarm, repaired.wrong


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["diagnose", "run"])
def test_b12_nothing_is_said_of_a_healthy_program(mode):
    healthy = outcome(Case("healthy_regression", mode))
    assert not healthy.alarm, healthy.wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, about itself
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_b12_nothing_is_said_of_a_standard_architecture(name):
    torch.manual_seed(0)
    model, data = transformers_models.MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), transformers_models.RATES.get(name, 1e-3))
    assert not warnings_of(diagnose(model, data, None, optimizer, steps=10).findings)


def test_b12_recall_precision_and_false_alarms_are_published():
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    section = page.split("### Real programs")[1].split("\n### ")[0]
    for mode in ("diagnose", "run"):  # cause first, precision, alarms on twins, alarms on healthy ones
        (row,) = re.findall(rf"^\| `{mode}` \|(.*)\|$", section, re.M)
        assert all(re.search(r"\d+ of \d+", cell) for cell in row.split("|")[:4]), row
    assert re.search(r"alarm on \d+ of \d+", section, re.I), "of the standard architectures"
    assert all(peer in section for peer in ("DeepFD", "NeuraLint", "UMLAUT", "DeepDiagnosis"))


def raw_batches():
    """Classes to be told apart by features whose sizes differ by orders of magnitude."""
    scales = torch.logspace(0, 3, 8)
    return [(500 + x * scales, (x.sum(1) > 0).long()) for x in torch.randn(16, 64, 8)]


def test_b13_the_repair_of_a_finding_is_tried_on_a_copy_and_the_finding_says_what_the_loss_did_then(tmp_path, capsys):
    model, data = mlp(nn.ReLU()), raw_batches()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    report = diagnose(model, data, F.cross_entropy, optimizer, seconds=5)
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    finding = report.findings[0]
    assert (finding.code, finding.evidence["cause"]) == ("TH303", "input-scale")
    assert isinstance(finding.tried, Trial) and finding.tried.change == "inputs standardised"
    assert finding.tried.helped and finding.tried.repaired < 0.5 * finding.tried.without
    said = str(finding.tried)
    assert re.fullmatch(r"tried: inputs standardised → loss \S+ instead of \S+ after \d+ steps", said)
    for suffix in ("html", "xml", "md"):
        render.save(report, tmp_path / f"report.{suffix}")
        assert said in (tmp_path / f"report.{suffix}").read_text(), suffix
    render.save(report, tmp_path / "report.json")
    assert render.load(tmp_path / "report.json").findings[0].tried == finding.tried
    render.terminal(report)
    assert said in " ".join(capsys.readouterr().out.split()) and said in str(report)


class Normed(nn.Module):
    """A function undoes the scale of the inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32, bias=False), nn.Linear(32, 3)

    def forward(self, x):
        return self.last(F.layer_norm(self.first(x), (32,)).relu())


def test_b13_a_finding_whose_repair_changes_nothing_goes_down_a_severity():
    data = [(30 * x, (x.sum(1) > 0).long()) for x in torch.randn(16, 64, 8)]
    model = Normed()
    report = diagnose(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), rules=["TH303"])
    (finding,) = report.findings
    assert finding.severity == "info" and not finding.tried.helped and "no clear difference" in str(finding.tried)


def test_b13_nothing_is_tried_if_that_is_not_wanted(tmp_path, monkeypatch):
    model = mlp(nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    report = diagnose(model, raw_batches(), F.cross_entropy, optimizer, steps=20, try_repairs=False)
    assert report.findings[0].code == "TH303" and report.findings[0].tried is None
    (tmp_path / "raw.py").write_text(RAW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = "raw:model", "--loader", "raw:batches", "--steps", "20", "--report", "report.json"
    for more, is_tried in ((["--no-try"], False), (["--seconds", "5"], True)):
        command(monkeypatch, "diagnose", *options, *more)
        finding = render.load("report.json").findings[0]
        assert finding.code == "TH303" and (finding.tried is not None) == is_tried


RAW = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

def batches():
    torch.manual_seed(0)
    scales = torch.logspace(0, 3, 8)
    return [(500 + x * scales, (x.sum(1) > 0).long()) for x in torch.randn(16, 64, 8)]
"""


class Leaky(nn.Module):
    """Attention over samples × positions × features, with a fault that no loss shows."""

    def __init__(self, fault):
        super().__init__()
        self.mix, self.fault = nn.Linear(8, 8), fault

    def forward(self, x, padding_mask, past):
        seen = x if past is None else torch.cat([past, x], 1)
        queries, keys = x.shape[1], seen.shape[1]
        scores = self.mix(x) @ seen.mT
        if self.fault != "padding":
            scores = scores.masked_fill(padding_mask[:, None], -1e9)
        if self.fault not in ("future", "padding"):  # behind a causal mask, padding would not be seen
            first = 0 if self.fault == "cache" else keys - queries
            scores = scores.masked_fill(torch.ones(queries, keys).triu(first + 1).bool(), -1e9)
        mixed = scores.softmax(-1) @ seen
        return (mixed - mixed.mean(0) if self.fault == "samples" else mixed), seen


class Reader(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(20, 8), Leaky(""), Leaky(fault)
        self.head = nn.Linear(8, 20)

    def forward(self, ids, padding_mask=None, cache=None):
        keys = ids.shape[1] + (0 if cache is None else cache[0].shape[1])
        mask = torch.zeros(len(ids), keys, dtype=torch.bool) if padding_mask is None else padding_mask
        first, second = (None, None) if cache is None else cache
        x, first = self.first(self.embed(ids), mask, first)
        x, second = self.second(x, mask, second)
        return self.head(x), (first, second)


@pytest.mark.parametrize(
    ("fault", "contract"),
    [("samples", "independent"), ("padding", "padding"), ("future", "causal"), ("cache", "cached"), ("", "")],
)
def test_b14_the_contract_that_a_model_breaks_and_the_first_module_that_breaks_it(fault, contract):
    wanted = [contract, "deterministic", "shapes"] if fault else ["independent", "padding", "causal", "cached"]
    report = verify(Reader(fault), torch.randint(20, (3, 9)), contracts=wanted, progress=False)
    assert [(found.evidence["contract"], found.site) for found in report.findings] == [(contract, "second")] * bool(
        fault
    )
    assert report.ok == (not fault)


@pytest.mark.parametrize("broken", [True, False])
def test_b14_micro_batches_add_up_to_the_batch(broken):
    def loss(output, target, num_items_in_batch):
        total = F.cross_entropy(output[0].flatten(0, 1), target.flatten(), reduction="sum")
        return total / ((target >= 0).sum() if broken else num_items_in_batch)

    ids = torch.randint(20, (3, 9))
    report = verify(Reader(), (ids, ids.roll(-1, 1)), loss, ["accumulation"], progress=False)
    assert [(found.code, found.severity) for found in report.findings] == [("TV106", "warning")] * broken
