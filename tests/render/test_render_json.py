"""JSON is the contract: strict, by its schema, and read back as the same report."""

import json
import math
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import report_samples
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torchhook import render
from torchhook.core.findings import Finding, Report, Trial
from torchhook.render.to_json import from_json
from torchhook.rules.diagnose import diagnose

SCHEMA = json.loads(Path(render.__file__).with_name("report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

numbers = st.floats() | st.integers(-(2**60), 2**60)
trials = st.builds(
    Trial,
    change=st.text(),
    without=st.floats(),
    repaired=st.floats(),
    steps=st.integers(0),
    helped=st.booleans(),
)
evidence = st.dictionaries(
    st.text(), st.recursive(numbers | st.text() | st.none() | st.booleans(), st.lists, max_leaves=5)
)
findings = st.builds(
    Finding,
    code=st.text(),
    severity=st.sampled_from(["info", "warning", "error"]),
    message=st.text(),
    site=st.text(),
    step=st.none() | st.integers(0),
    evidence=evidence,
    hint=st.text(),
    tried=st.none() | trials,
)
layer = st.fixed_dictionaries(
    {"site": st.text(), "kind": st.sampled_from(["module", "parameter"])},
    optional={
        key: numbers | st.none() for key in ("mean", "std", "zero_fraction", "norm", "grad_norm", "update_ratio")
    },
)
reports = st.builds(
    Report,
    findings=st.lists(findings, max_size=3).map(tuple),
    model=st.text(),
    fail_on=st.sampled_from(["info", "warning", "error"]),
    checked=st.lists(st.text(), max_size=3).map(tuple),
    skipped=st.dictionaries(st.text(), st.text(), max_size=3),
    layers=st.lists(layer, max_size=4).map(tuple),
    losses=st.dictionaries(st.integers(0, 100), st.floats(), max_size=4),
    notes=st.lists(st.text(), max_size=2).map(tuple),
)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", ["sick", "healthy", "hostile", "large"])
def test_reports_keep_the_contract(name):
    text = render.json(getattr(report_samples, name)())
    VALIDATOR.validate(strict(text))
    assert text.endswith("}\n")


def test_a_diagnosis_keeps_the_contract():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = torch.randn(32, 8), torch.randint(0, 3, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    text = render.json(diagnose(model, batch, F.cross_entropy, optimizer, steps=20))
    VALIDATOR.validate(strict(text))
    assert render.json(from_json(text)) == text and from_json(text).layers


@given(reports)
def test_any_report_is_read_back(report):
    text = render.json(report)
    VALIDATOR.validate(strict(text))
    assert render.json(from_json(text)) == text


def test_numbers_that_are_not_finite_come_back_as_numbers_but_as_words_in_the_evidence():
    affected = (Finding("TH2", "info", "", evidence={"deep": {"list": [math.nan, -math.inf]}}),)
    layers = ({"site": "NaN", "kind": "module", "module": "Infinity", "std": math.nan, "mean": None},)
    found = Finding("TH1", "error", "NaN", site="NaN", evidence={"x": math.inf}, affected=affected)
    back = from_json(render.json(Report((found,), layers=layers, losses={0: math.nan, 5: 1.0, 6: -math.inf})))
    assert back.findings[0].evidence == {"x": "Infinity"}
    assert back.findings[0].affected[0].evidence == {"deep": {"list": ["NaN", "-Infinity"]}}
    assert math.isnan(back.losses[0]) and (back.losses[5], back.losses[6]) == (1.0, -math.inf)
    assert back.layers[0]["site"] == "NaN" and back.layers[0]["module"] == "Infinity"
    assert math.isnan(back.layers[0]["std"]) and back.layers[0]["mean"] is None
    assert back.findings[0].message == "NaN"


def test_what_was_tried_comes_back_also_where_a_loss_is_not_finite():
    tried = Trial("learning rate a tenth", without=math.inf, repaired=0.31, steps=100)
    data = strict(render.json(Report((Finding("TH501", "error", "", tried=tried),))))
    assert data["findings"][0]["tried"]["without"] == "Infinity"
    assert from_json(json.dumps(data)).findings[0].tried == tried


def test_a_report_from_before_repairs_were_tried_can_be_read():
    data = strict(render.json(report_samples.sick()))
    for finding in data["findings"]:
        del finding["tried"]
    VALIDATOR.validate(data)
    assert {finding.tried for finding in from_json(json.dumps(data)).findings} == {None}


def test_scalars_of_numpy_and_torch_are_numbers():
    evidence = {
        "a": np.float32(0.5),
        "b": torch.tensor([1.0, math.nan]),
        "c": (1, 2),
        "d": torch.float16,
        5: np.int64(3),
    }
    data = strict(render.json(Report((Finding("TH1", "error", "", evidence=evidence),))))
    assert data["findings"][0]["evidence"] == {"a": 0.5, "b": [1.0, "NaN"], "c": [1, 2], "d": "torch.float16", "5": 3}


def test_another_schema_is_refused():
    data = strict(render.json(Report())) | {"schema": 99}
    with pytest.raises(ValueError, match="cannot read a report of schema 99"):
        from_json(json.dumps(data))
