"""Files of a stranger, in every format that is read: what is read is valid, or our error names the file."""

import copy
import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import torchhook
from torchhook import Activations, FileError, HarvestError, Profile, Report, render
from torchhook.core.config import Config
from torchhook.origins import Catch, replay

sys.path.insert(0, str(Path(__file__).parent / "activations"))
import stores
from stores import Shard

sys.path.pop(0)

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
ODD = [
    None,
    True,
    -1,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../../etc/passwd",
    "\x00",
    "9" * 5000,
    [],
    [-1],
    ["4"],
    [2**62, 2**62],
    [0, 2**62, 2**62],
    {},
    {"x": None},
    {"__class__": "os:system"},
]


def places_in(value, at=()):
    """All places in JSON, as tuples of keys."""
    yield at
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(item, (*at, key))


def changed(value, place, new):
    """JSON with another value at a place; without that place if there is no new one."""
    if not place:
        return new
    value = copy.deepcopy(value)
    *way, last = place
    inner = value
    for key in way:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return value


@st.composite
def changes(draw, data):
    """JSON with one to three changes, as text."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([place for place in places_in(data) if place]))
        data = changed(data, place, draw(st.sampled_from([*ODD, ...])))
        if not data:
            break
    text = json.dumps(data)
    return text.replace("{", '{"format": 1, "format": 1, ', 1) if draw(st.integers(0, 9)) == 0 else text


@st.composite
def damage(draw, raw):
    """Bytes that were flipped, cut, or doubled."""
    raw = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "length"]))
        if kind == "flip" and raw:
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at:]
        elif kind == "double":
            raw[at:at] = raw[at : at + 40]
        else:
            raw[:8] = struct.pack("<Q", draw(st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])))
    return bytes(raw)


fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def require_ours(read, file, kind):
    """Either it is read, or an error of this kind names the file."""
    try:
        return read()
    except kind as error:
        assert str(file) in str(error) or Path(file).name in str(error)
        return None


# ------------------------------------------------------------ stores of activations


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    out = tmp_path_factory.mktemp("store")
    values = {"fc": torch.randn(3, 4), "tokens": torch.randn(5, 2)}
    stores.write(out, [Shard([0, 1, 2], values, {"tokens": [2, 0, 3]})], ragged=("tokens",))
    return out


def read_store(out):
    acts = Activations.open(out)
    for site in acts:
        acts[site][:]
        acts[site].statistics  # noqa: B018
        list(acts[site].batches(2))
    acts.verify(progress=False)
    return len(acts), acts.samples, acts.statistics(), repr(acts), acts.skipped


def attacked(store, name, content):
    """What reading gives of a copy of the store in which a file was replaced."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "store"
        shutil.copytree(store, out)
        (out / name).write_bytes(content)
        return require_ours(lambda: read_store(out), out, HarvestError)


def test_the_store_as_it_was_written_is_read(store):
    assert read_store(store)[0] == 3


MANIFESTS = {
    "deep": DEEP,
    "a list": "[]",
    "a number": "7",
    "a string": '"format"',
    "NaN": "NaN",
    "no UTF-8": b"\xff\xfe{}",
    "many digits": "9" * 10_000,
    "twice": '{"format": 1, "format": 2}',
    "newer, of no type": '{"format": 99, "torchhook": {"a": []}}',
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_manifests_that_are_none(store, text):
    assert attacked(store, "manifest.json", text if isinstance(text, bytes) else text.encode()) is None


KINDS = {
    "negative shape": {"shape": [-4]},
    "shape of strings": {"shape": ["4"]},
    "huge shape": {"shape": [2**62]},
    "shape that overflows": {"shape": [2**62, 2**62, 4]},
    "empty shape that overflows": {"shape": [0, 2**62, 2**62]},
    "shape of fractions": {"shape": [4.0]},
    "shape of NaN": {"shape": [float("nan")]},
    "no list": {"shape": 4},
    "dtype that is none": {"dtype": "load"},
    "dtype that is not stored": {"dtype": "complex128"},
    "dtype of no type": {"dtype": ["float32"]},
    "larger dtype": {"dtype": "float64"},
    "ragged as text": {"ragged": "no"},
}


@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
def test_formats_of_rows_that_cannot_be(store, change):
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["sites"]["fc"].update(change)
    assert attacked(store, "manifest.json", json.dumps(manifest).encode()) is None


COMMITS = {
    "negative samples": {"samples": -3},
    "negative rows": {"sites": {"fc": {"rows": -3}}},
    "rows that overflow": {"samples": 2**62},
    "rows as text": {"samples": "3"},
    "moments that overflow": {"sites": {"fc": {"rows": 3, "moments": ["0x1p99999"] * 12}}},
    "moments that are none": {"sites": {"fc": {"rows": 3, "moments": ["x"] * 12}}},
    "moments with NaN": {"sites": {"fc": {"rows": 3, "moments": ["nan"] * 12}}},
    "negative moments": {"sites": {"fc": {"rows": 3, "moments": ["-0x1p0"] * 12}}},
    "too few moments": {"sites": {"fc": {"rows": 3, "moments": ["0x1p0"]}}},
    "skipped without ids": {"skipped": {"x": "broken"}},
    "unknown fields": {"shell": "rm"},
}


@pytest.mark.parametrize("change", COMMITS.values(), ids=COMMITS)
def test_journals_that_lie(store, change):
    commit = json.loads((store / "journal" / "00000.jsonl").read_text())
    commit.update(change)
    assert attacked(store, "journal/00000.jsonl", json.dumps(commit).encode() + b"\n") is None


def test_a_journal_that_is_nested_deeply(store):
    assert attacked(store, "journal/00000.jsonl", DEEP.encode() + b"\n") is None


@pytest.mark.parametrize("offsets", [[0, -1, 2, 5], [0, 9, 2, 5], [1, 2, 3, 5], [0, 2, 2, 2**62]])
def test_offsets_that_lead_elsewhere(store, offsets):
    name = "sites/tokens/00000.offsets.safetensors"
    content = (store / name).read_bytes()
    assert attacked(store, name, content[:-32] + struct.pack("<4q", *offsets)) is None


def test_sites_whose_names_lead_elsewhere(store, tmp_path):
    """The rows of such a site are looked for inside the store only."""
    manifest = json.loads((store / "manifest.json").read_text())
    outside = tmp_path / "outside"
    shutil.copytree(store / "sites" / "fc", outside)
    manifest["sites"] = {str(outside): manifest["sites"]["fc"], "../../outside": manifest["sites"]["fc"]}
    commit = json.loads((store / "journal" / "00000.jsonl").read_text())
    commit["sites"] = dict.fromkeys(manifest["sites"], commit["sites"]["fc"])
    out = tmp_path / "a" / "store"
    shutil.copytree(store, out)
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / "journal" / "00000.jsonl").write_text(json.dumps(commit) + "\n")
    with pytest.raises(HarvestError, match="cannot read"):
        Activations.open(out)


@fuzzed
@given(data=st.data())
def test_any_store(store, data):
    """Some file of it has other bytes, or other values in its JSON."""
    file = data.draw(st.sampled_from(sorted(file for file in store.rglob("*") if file.is_file())))
    raw = file.read_bytes()
    if file.suffix in (".json", ".jsonl") and data.draw(st.booleans()):
        raw = data.draw(changes(json.loads(raw))).encode() + b"\n"
    else:
        raw = data.draw(damage(raw))
    attacked(store, str(file.relative_to(store)), raw)


# ------------------------------------------------------------ profiles


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    file = tmp_path_factory.mktemp("profile") / "profile.safetensors"
    Profile.of(model, [torch.randn(8, 4) for _ in range(3)], progress=False).save(file)
    return model, file


def with_metadata(file, key, text, tensors=None):
    """A copy of a safetensors file with other metadata, or tensors."""
    copied = Path(tempfile.mkdtemp()) / file.name
    save_file(load_file(file) if tensors is None else tensors, copied, {key: text})
    return copied


def metadata(file, key):
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()[key])


def check_profile(model, file):
    return require_ours(lambda: Profile.load(file).check(model, torch.randn(8, 4)), file, (FileError, ValueError))


@pytest.mark.parametrize(
    "state",
    [torch.ones(3), torch.ones(2, 2), torch.zeros(0), torch.ones(7, dtype=torch.int8), torch.full((600,), torch.nan)],
    ids=["short", "two dimensions", "empty", "integers", "NaN"],
)
def test_profiles_with_histograms_that_are_none(profile, state):
    _, file = profile
    attack = with_metadata(file, "torchhook", json.dumps(metadata(file, "torchhook")), {"0": state, "1": state.clone()})
    with pytest.raises(FileError, match=r"profile\.safetensors' is not a profile, or it is corrupt"):
        Profile.load(attack)


@pytest.mark.parametrize("counts", [-1.0, torch.nan, torch.inf, 1e300])
def test_profiles_with_counts_that_cannot_be(profile, counts):
    _, file = profile
    tensors = {name: torch.full_like(state, counts) for name, state in load_file(file).items()}
    with pytest.raises(FileError, match="impossible counts"):
        Profile.load(with_metadata(file, "torchhook", json.dumps(metadata(file, "torchhook")), tensors))


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "7", '{"torchhook_profile": 1}', '{"torchhook_profile": 1, "model": "x"}']
)
def test_profiles_that_are_none(profile, text):
    _, file = profile
    with pytest.raises(FileError, match="is not a profile"):
        Profile.load(with_metadata(file, "torchhook", text))


@fuzzed
@given(data=st.data())
def test_any_profile(profile, data):
    model, file = profile
    if data.draw(st.booleans()):
        attack = with_metadata(file, "torchhook", data.draw(changes(metadata(file, "torchhook"))))
    else:
        attack = Path(tempfile.mkdtemp()) / "profile.safetensors"
        attack.write_bytes(data.draw(damage(file.read_bytes())))
    loaded = require_ours(lambda: Profile.load(attack), attack, FileError)
    if loaded is not None:
        repr(loaded)
        if {path for path, _ in loaded.places} <= {path for path, _ in model.named_modules()}:
            loaded.check(model, torch.randn(8, 4))


# ------------------------------------------------------------ saved calls


class Log(nn.Module):
    def forward(self, x, *, scale=1.0):
        return x.log() * scale * 0


@pytest.fixture(scope="module")
def saved_call(tmp_path_factory):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Log())
    with Catch(model, tmp_path_factory.mktemp("call"), "record") as caught:
        model(torch.zeros(1, 2))
    return model, caught.file


CALLS = {
    "deep": DEEP,
    "a list": "[]",
    "floats that overflow": ("args", {"type": "builtins:tuple", "items": [[0, {"float": "0x1p99999"}]]}),
    "a container without a base": ("args", {"type": "builtins:object", "items": []}),
    "arguments of another type": ("args", {"value": 3}),
    "an origin of other types": ("origin", {"path": 3, "kind": [], "phase": "sideways", "call": -1}),
    "wanted of no type": ("wanted", [[1], {}]),
    "lost of no type": ("lost", [3, {}]),
    "format of no type": ("format", {"a": 1}),
}


@pytest.mark.parametrize("change", CALLS.values(), ids=CALLS)
def test_calls_that_cannot_be_replayed(saved_call, change):
    model, file = saved_call
    text = change if isinstance(change, str) else json.dumps({**metadata(file, "torchhook.call"), change[0]: change[1]})
    attack = with_metadata(file, "torchhook.call", text)
    with pytest.raises(FileError, match=attack.name.replace(".", r"\.")):
        replay(attack, model)


@fuzzed
@given(data=st.data())
def test_any_call(saved_call, data):
    model, file = saved_call
    if data.draw(st.booleans()):
        attack = with_metadata(file, "torchhook.call", data.draw(changes(metadata(file, "torchhook.call"))))
    else:
        attack = Path(tempfile.mkdtemp()) / "call.safetensors"
        attack.write_bytes(data.draw(damage(file.read_bytes())))
    require_ours(lambda: repr(replay(attack, model)), attack, FileError)


# ------------------------------------------------------------ reports and settings


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    model = nn.Sequential(nn.Linear(2, 2), Log(), nn.Linear(2, 2))
    found = torchhook.diagnose(model, [torch.zeros(4, 2)], progress=False)
    assert found.findings
    file = tmp_path_factory.mktemp("report") / "report.json"
    render.save(found, file)
    return file


@fuzzed
@given(data=st.data())
def test_any_report(report, data):
    raw = report.read_bytes()
    raw = data.draw(changes(json.loads(raw))).encode() if data.draw(st.booleans()) else data.draw(damage(raw))
    attack = Path(tempfile.mkdtemp()) / "report.json"
    attack.write_bytes(raw)
    found = require_ours(lambda: render.load(attack), attack, FileError)
    assert found is None or isinstance(found, Report)


@pytest.mark.parametrize("text", [DEEP, "[]", "{", '{"findings": [3]}', '{"findings": 3}'])
def test_reports_that_are_none(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(FileError, match="is not a report of torchhook, or it is corrupt"):
        render.load(tmp_path / "report.json")


def test_settings_that_are_nested_deeply(tmp_path):
    (tmp_path / "pyproject.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(FileError, match="is not valid TOML"):
        Config.find(tmp_path)


@fuzzed
@example(raw=b"[tool.torchhook]\nselect = 3\n")
@given(raw=damage(b'[tool.torchhook]\nselect = ["TH1"]\n[tool.torchhook.per-module-ignores]\n"a" = ["TH2"]\n'))
def test_any_settings(raw):
    file = Path(tempfile.mkdtemp()) / "pyproject.toml"
    file.write_bytes(raw)
    require_ours(lambda: Config.find(file.parent), file, ValueError)
