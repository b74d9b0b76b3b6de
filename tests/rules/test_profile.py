"""Profile: what it stores, what it reports on live batches, and how it refuses files that are not profiles."""

from __future__ import annotations

import json
import math
import struct
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from specimens import Containers, hooks_of
from torchhook import Profile, SelectionError, TorchhookError
from torchhook.rules.profile import VERSION

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.act = nn.GELU()

    def forward(self, x):
        return self.head(self.second(self.act(self.first(x))).tanh())


def data(count=8, size=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


@pytest.fixture
def model():
    return Net().eval()


@pytest.fixture
def profile(model):
    return Profile.of(model, data())


@pytest.fixture
def file(profile, tmp_path):
    profile.save(tmp_path / "profile.safetensors")
    return tmp_path / "profile.safetensors"


# --- there and back


def test_what_is_read_back_says_the_same(model, profile, file):
    again = Profile.load(file)
    assert again.model == profile.model == "Net" and repr(again) == repr(profile)
    assert list(again.places) == list(profile.places)
    for place, known in profile.places.items():
        same = again.places[place]
        assert torch.equal(same.state, known.state)
        assert (same.unit, same.noise, same.size) == (known.unit, known.noise, known.size)
    for scale in (1, 3, 100):
        live = scale * data(1, seed=1)[0]
        assert again.check(model, live) == profile.check(model, live)


def test_a_path_may_be_a_string(profile, tmp_path):
    profile.save(str(tmp_path / "profile"))
    assert list(Profile.load(str(tmp_path / "profile")).places) == list(profile.places)


def test_a_file_holds_tensors_and_json_and_no_pickle(file):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    about = json.loads(header.pop("__metadata__")["torchhook"])
    assert about["torchhook_profile"] == VERSION and about["model"] == "Net"
    assert {(known["path"], known["port"]) for known in about["places"]} >= {("first", "output"), ("head", "output")}
    assert len(raw) == 8 + length + max(each["data_offsets"][1] for each in header.values())
    assert {each["dtype"] for each in header.values()} == {"F64"}  # everything else is numbers in the metadata


def test_a_profile_has_all_leaves_in_execution_order_or_those_that_are_asked_for(model, profile):
    assert [path for path, _ in profile.places] == ["first", "act", "second", "head"]
    assert [path for path, _ in Profile.of(model, data(), "second", nn.GELU).places] == ["act", "second"]
    with pytest.raises(SelectionError, match="secnd.*second"):
        Profile.of(model, data(), "secnd")


def test_how_far_batches_are_apart_is_their_distance_from_the_rest():
    parts = [1000 + shift + torch.randn(400, 2) for shift in (0, 0, 0, 0, 2)]  # too far from zero for the bins
    known = Profile.of(nn.Identity(), parts, "").places["", "output"]
    whole, rest = torch.cat(parts).double(), torch.cat(parts[:-1]).double()
    distance = float(parts[-1].double().mean() - rest.mean()) / float(whole.std())
    assert known.noise == pytest.approx(distance, rel=0.1)


def test_a_profile_is_of_all_values_of_all_batches(model, profile):
    with torch.no_grad():
        values = torch.cat([model.first(x) for x in data()])
    known = profile.places["first", "output"]
    assert int(known.bins.counts.sum()) == values.numel()
    assert known.unit == pytest.approx(float(values.std()), rel=1e-5)
    assert known.noise > 0 and known.size == values.numel() / len(data())


def test_batches_may_be_tuples_and_dicts(model):
    class Keywords(Net):
        def forward(self, x, offset=0):
            return super().forward(x + offset)

    batches = data()
    plain = Profile.of(model, batches)
    tuples = Profile.of(model, [(x, torch.zeros(len(x))) for x in batches])
    other = Keywords().eval()
    other.load_state_dict(model.state_dict())
    dicts = Profile.of(other, [{"x": x, "offset": 0} for x in batches])
    for place, known in plain.places.items():
        assert torch.equal(tuples.places[place].state, known.state)
        assert torch.equal(dicts.places[place].state, known.state)


def test_the_model_is_as_before(model, profile):
    before, values = hooks_of(model), {name: p.clone() for name, p in model.named_parameters()}
    batch = data(1)[0]
    given = batch.clone()
    profile.check(model, batch)
    Profile.of(model, [batch, batch])
    assert hooks_of(model) == before and torch.equal(batch, given)
    assert all(torch.equal(p, values[name]) and p.grad is None for name, p in model.named_parameters())
    assert not model.training


def norm_net():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_the_buffers_of_a_model_in_train_mode_are_as_before():
    model = norm_net()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    profile = Profile.of(model, data())
    profile.check(model, data())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_buffers_are_as_before_when_a_batch_does_not_fit():
    model = norm_net()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="shapes"):
        Profile.of(model, [*data(2), torch.randn(4, 5)])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("count", [0, 1])
def test_a_profile_of_too_little_is_refused(model, count):
    with pytest.raises(ValueError, match=f"two batches.*{count}"):
        Profile.of(model, data(count))


# --- what it finds


@pytest.mark.parametrize("seed", range(1, 21))
def test_other_batches_of_the_same_data_are_fine(model, profile, seed):
    live = data(1, seed=seed)[0]
    report = profile.check(model, live, fail_on="warning")
    assert report.ok and report.exit_code == 0, report
    assert "TH901" in report.checked


def test_other_inputs_are_found_at_the_first_layer(model, profile):
    live = data(1, seed=1)[0]
    for changed in (live * 30, live + 10, torch.where(torch.rand(live.shape) < 0.5, 0, live * 30)):
        report = profile.check(model, changed)
        assert not report.ok
        (finding,) = report.findings
        assert (finding.code, finding.site) == ("TH901", "first")
        assert finding.evidence["distance"] > finding.evidence["noise"]
        assert "head" in {other.site for other in finding.affected}


def test_a_changed_weight_is_found_at_its_layer(model, profile):
    with torch.no_grad():
        model.second.weight *= 30
    (finding,) = profile.check(model, data(1, seed=1)[0]).findings
    assert finding.site == "second"
    assert "first" not in {other.site for other in finding.affected}


def test_several_batches_are_one_live_sample(model, profile):
    assert profile.check(model, data(4, seed=2), fail_on="warning").ok
    report = profile.check(model, [30 * x for x in data(4, seed=2)])
    assert report.findings[0].site == "first"


@pytest.mark.parametrize("center", [1000, 1024])
def test_a_shift_of_values_that_are_far_from_zero_is_found(center):
    """1000 and 1020 are in one bin, 1024 and 1023 in two that are 200 wide."""
    model = nn.Sequential(nn.Identity())
    profile = Profile.of(model, [center + batch for batch in data()])
    (finding,) = profile.check(model, data(1, seed=1)[0] + center + 1).findings
    assert finding.site == "0" and finding.evidence["distance"] == pytest.approx(1, abs=0.1)
    assert profile.check(model, data(1, seed=1)[0] + center).ok


def test_a_file_without_means_is_read(model, profile, file):
    with safe_open(file, "pt") as stored:
        about = json.loads(stored.metadata()["torchhook"])
        states = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a mapping)
    for place in about["places"]:
        assert place.pop("mean") == profile.places[place["path"], place["port"]].mean
    save_file(states, file, metadata={"torchhook": json.dumps(about)})
    old = Profile.load(file)
    assert old.check(model, data(1, seed=1)[0]).ok and old.check(model, data(1, seed=1)[0] * 9).findings


def test_nan_is_found_as_such(model, profile):
    live = data(1)[0]
    live[3, 4] = math.nan
    (finding,) = profile.check(model, live).findings
    assert (finding.code, finding.site) == ("TH101", "first")


def test_a_live_batch_of_nothing_but_nan_is_told(model, profile):
    report = profile.check(model, torch.full((16, 8), math.nan))
    assert report.findings[0].code == "TH101" and "TH000" not in [finding.code for finding in report.findings]


def test_a_constant_layer_of_a_profile_is_held_to_it():
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    nn.init.zeros_(model[0].weight)
    profile = Profile.of(model, data())
    assert profile.check(model, data(1, seed=1)[0], fail_on="warning").ok
    assert "TH000" not in [finding.code for finding in profile.check(model, data(1)[0] * 10).findings]


def test_outputs_in_containers_are_profiled():
    model = Containers().eval()
    batches = [x[:, :4] for x in data()]
    profile = Profile.of(model, batches)
    assert ("mapping", "output['b']['c']") in profile.places
    assert profile.check(model, batches[0], fail_on="warning").ok
    assert profile.check(model, 50 * batches[0]).findings[0].site == "pair"


# --- files and models that do not fit


def test_what_is_no_profile_is_refused(tmp_path):
    for name, metadata in (("plain", None), ("other", {"torchhook": "{}"}), ("strange", {"format": "pt"})):
        save_file({"0": torch.ones(3)}, tmp_path / name, metadata)
        with pytest.raises(ValueError, match="is not a profile"):
            Profile.load(tmp_path / name)


def test_a_profile_of_a_later_version_is_refused(file, tmp_path):
    with safe_open(str(file), "pt") as opened:
        about = json.loads(opened.metadata()["torchhook"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    about["torchhook_profile"] = VERSION + 1
    save_file(tensors, tmp_path / "later", {"torchhook": json.dumps(about)})
    with pytest.raises(ValueError, match=f"version {VERSION}"):
        Profile.load(tmp_path / "later")


def broken_bytes(raw):
    yield "empty", b""
    yield "half", raw[: len(raw) // 2]
    yield "text", b"this is a text and not a profile at all"
    yield "pickle", b"\x80\x04K\x01."


def test_a_broken_file_is_refused_with_its_name(file, tmp_path):
    for name, content in broken_bytes(file.read_bytes()):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises((ValueError, TorchhookError), match=name):
            Profile.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Profile.load(tmp_path / "nowhere")


def test_a_file_whose_metadata_are_no_json_is_refused(tmp_path):
    save_file({"0": torch.ones(3)}, tmp_path / "odd", {"torchhook": "{"})
    with pytest.raises(ValueError, match="is not a profile"):
        Profile.load(tmp_path / "odd")


def test_without_safetensors_it_says_what_to_install(monkeypatch, profile, file):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for action in (lambda: profile.save(file), lambda: Profile.load(file)):
        with pytest.raises(ImportError, match=r'pip install "torchhook\[files\]"'):
            action()


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_profile_fits_the_model_inside_a_wrapper_too(model, profile, wrap, nothing_compiled):
    wrapped = wrap(model)
    assert [path for path, _ in Profile.of(wrapped, data()).places] == [path for path, _ in profile.places]
    assert profile.check(wrapped, data(1, seed=1)[0], fail_on="warning").ok
    assert profile.check(wrapped, 50 * data(1, seed=1)[0]).findings[0].site == "first"


def test_a_layer_that_is_gone_is_named(model, profile):
    other = nn.Sequential(model.first, nn.GELU(), model.head)
    with pytest.raises(ValueError, match="of another model, a Net.*'first'"):
        profile.check(other, data(1)[0])


def test_a_layer_that_no_longer_runs_is_told(model, profile):
    class Shorter(Net):
        def forward(self, x):
            return self.head(self.act(self.first(x)))

    shorter = Shorter().eval()
    shorter.load_state_dict(model.state_dict())
    report = profile.check(shorter, data(1, seed=1)[0])
    told = [*(finding.site for finding in report.findings), *report.notes, *report.skipped.values()]
    assert any("second" in each for each in told), report
